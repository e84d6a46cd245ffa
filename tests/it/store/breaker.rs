//! The breaker: while Redis does not reply, checks fail at once.

use std::{
    error::Error,
    sync::{Arc, Mutex},
    time::Duration,
};

use fred::interfaces::ClientLike;
use http::{Request, Response};
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    ClientLibrary, FailureMode, Limit, Policy, RateLimitLayer, RedisStore, SlidingLog, key,
    store::{ErrorKind, Operation, StoreError},
};

use crate::support::{Redis, connected, each_client, eventually, patient, timed, try_decide};

each_client! {
    after_a_few_calls_without_a_reply_checks_fail_at_once_until_redis_replies
    checks_that_are_dropped_before_the_deadline_open_the_breaker
    ten_thousand_checks_a_second_do_not_accumulate
}

const DEADLINE: Duration = Duration::from_millis(100);

fn limit() -> Limit {
    SlidingLog::per_hour(50_000).into()
}

async fn store(redis: &Redis, library: ClientLibrary) -> RedisStore {
    let builder = patient().deadline(DEADLINE).client_library(library);
    connected(builder, &redis.url()).await
}

async fn fails(store: &RedisStore) -> (ErrorKind, Duration) {
    let limit = limit();
    let (outcome, waited) = timed(try_decide(store, Operation::Check, &limit, "k", 1)).await;
    (outcome.unwrap_err().kind(), waited)
}

async fn after_a_few_calls_without_a_reply_checks_fail_at_once_until_redis_replies(library: ClientLibrary) {
    let redis = Redis::start();
    let store = store(&redis, library).await;

    let frozen = redis.freeze();
    let mut waits = Vec::new();
    for _ in 0..100 {
        waits.push(fails(&store).await.1);
    }
    // A check that fails at once fails before the next tick.
    let waited = waits.iter().filter(|wait| !wait.is_zero()).count();
    assert!((1..=6).contains(&waited), "{waited} waited for the deadline");

    // So they do while probes fail, of which several are sent in this time.
    let mut ticks = tokio::time::interval(DEADLINE);
    for _ in 0..12 {
        ticks.tick().await;
        let error = try_decide(&store, Operation::Check, &limit(), "k", 1)
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert!(error.source().is_some(), "why the last call had no reply: {error}");
    }
    drop(frozen);

    eventually("the store is answered", async || {
        let peeked = try_decide(&store, Operation::Peek, &limit(), "k", 1).await?;
        // What was sent before it opened may have been counted, and no more.
        assert!(peeked.states()[0].remaining >= 50_000 - 6, "{peeked:?}");
        Ok::<_, StoreError>(())
    })
    .await;
}

async fn checks_that_are_dropped_before_the_deadline_open_the_breaker(library: ClientLibrary) {
    let redis = Redis::start();
    let store = store(&redis, library).await;
    let (_frozen, limit) = (redis.freeze(), limit());

    eventually("checks fail at once", async || {
        let check = try_decide(&store, Operation::Check, &limit, "k", 1);
        let answer = tokio::time::timeout(DEADLINE / 10, check).await;
        matches!(answer, Ok(Err(error)) if error.kind() == ErrorKind::Unreachable)
    })
    .await;
}

/// The memory of this process, in bytes.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: u64 = pages
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .expect("a number");
    pages * 4_096
}

async fn ten_thousand_checks_a_second_do_not_accumulate(library: ClientLibrary) {
    let redis = Redis::start();
    let store = store(&redis, library).await;
    let frozen = redis.freeze();

    let (mut checks, mut before) = (JoinSet::new(), 0);
    let failed = |(kind, waited): (ErrorKind, Duration)| {
        assert!(matches!(kind, ErrorKind::Timeout | ErrorKind::Unreachable), "{kind:?}");
        assert!(waited < DEADLINE * 10, "{waited:?}");
    };
    let started = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(10));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for tick in 0..150 {
        for _ in 0..100 {
            let store = store.clone();
            checks.spawn(async move { fails(&store).await });
        }
        while let Some(answer) = checks.try_join_next() {
            failed(answer.expect("no check panics"));
        }
        // The first second is for allocations that are made once.
        if tick == 100 {
            checks.join_all().await.into_iter().for_each(failed);
            (checks, before) = (JoinSet::new(), resident());
        }
        ticks.tick().await;
    }
    checks.join_all().await.into_iter().for_each(failed);
    let grown = resident().saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes more");

    let seconds = started.elapsed().as_secs();
    drop(frozen);
    eventually("Redis has done what it was sent", async || {
        let before: u64 = redis
            .command("ZCOUNT", ["quota:1:log/1h:test:{key=k}", "(0", "+inf"])
            .await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        before
            == redis
                .command::<u64>("ZCOUNT", ["quota:1:log/1h:test:{key=k}", "(0", "+inf"])
                .await
    })
    .await;
    let calls = redis.script_calls().await;
    // Eight calls in flight when it froze, then ten probes a second.
    assert!(
        calls <= 50 + 10 * seconds,
        "{calls} calls for 15,000 checks in {seconds} s"
    );
}

#[tokio::test]
async fn a_decision_takes_at_most_the_deadline_and_is_observed() {
    const SHORT: Duration = Duration::from_millis(20);
    let redis = Redis::start();
    // Each is used for less than the half second after which it gives its connection up.
    let mut clients = Vec::new();
    for _ in 0..20 {
        let client = redis.builder().build().expect("a client");
        client.init().await.expect("Redis replies");
        clients.push(client);
    }
    let frozen = redis.freeze();
    let failures = Arc::<Mutex<Vec<ErrorKind>>>::default();

    let (mut decisions, mut controls) = (Vec::new(), Vec::new());
    for client in clients.iter().flat_map(|client| [client; 5]) {
        // A new store each time, whose breaker is closed.
        let store = RedisStore::builder()
            .deadline(SHORT)
            .client(client.clone())
            .connect_lazy();
        let policy = Policy::new("test", SlidingLog::per_hour(5)).key(key::constant("k"));
        let observed = failures.clone();
        let layer = RateLimitLayer::new(
            store.expect("the client will do"),
            policy.failure_mode(FailureMode::Open),
        )
        .on_failure(move |error| observed.lock().expect("no panic").push(error.kind()));
        // Not an async closure: rustc 1.95 fails on this one when it compiles again, incrementally.
        let service = layer.layer(service_fn(|_: Request<String>| async {
            Ok::<_, std::convert::Infallible>(Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
        }));

        // In four steps, as the deadline: what delays one of them delays the other.
        let started = Instant::now();
        let slept = async {
            for _ in 0..4 {
                tokio::time::sleep(SHORT / 4).await;
            }
            started.elapsed()
        };
        let decided = async {
            let response = service.oneshot(Request::new(String::new())).await;
            (response.expect("it never fails"), started.elapsed())
        };
        let ((response, decision), control) = tokio::join!(decided, slept);
        decisions.push(decision);
        controls.push(control);
        assert!(response.status().is_success());
    }
    drop(frozen);

    let kinds = failures.lock().expect("no panic");
    assert_eq!(kinds.len(), 100);
    // Others are of a connection that was given up while the machine was busy.
    let timed_out: Vec<_> = kinds.iter().map(|kind| *kind == ErrorKind::Timeout).collect();
    let [decision, control] = [decisions, controls].map(|times| {
        let of_timeouts = times.into_iter().zip(&timed_out).filter(|(_, timed_out)| **timed_out);
        let mut times: Vec<_> = of_timeouts.map(|(time, _)| time).collect();
        assert!(times.len() >= 50, "{kinds:?}");
        times.sort_unstable();
        times[times.len() / 2]
    });
    assert!(
        decision >= SHORT && decision <= control * 3 / 2,
        "{decision:?}, and a sleep {control:?}"
    );
}
