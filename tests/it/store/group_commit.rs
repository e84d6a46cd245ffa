//! Group commit: checks that are sent to Redis together.

use std::{
    pin::Pin,
    task::{Context, Waker},
    thread,
    time::Duration,
};

use tokio::{
    runtime::Builder,
    task::{JoinSet, spawn_blocking, yield_now},
};
use tower_quota::{
    FixedWindow, Key, Limit, Limiter, Policy, RedisStore, SlidingLog, TokenBucket,
    limit::Calendar,
    store::{Charge, ErrorKind, Operation, Store, StoreFuture, StoreRequest},
};

use crate::support::{Clock, Counted, Redis, connected, decide, eventually, patient, timed, try_decide};

async fn store(redis: &Redis) -> RedisStore {
    connected(patient().deny_cache(false), &redis.url()).await
}

/// Checks all keys at once; whether each check was admitted, and what was left.
async fn check_at_once(store: &RedisStore, limit: &Limit, keys: impl IntoIterator<Item = String>) -> Vec<(bool, u64)> {
    let mut checks = JoinSet::new();
    for key in keys {
        let (store, limit) = (store.clone(), limit.clone());
        checks.spawn(async move {
            let outcome = decide(&store, Operation::Check, &limit, &key, 1).await;
            (outcome.allowed, outcome.states()[0].remaining)
        });
    }
    checks.join_all().await
}

#[tokio::test]
async fn a_thousand_checks_at_once_are_a_few_calls() {
    let redis = Redis::start();
    let store = store(&redis).await;
    let limit = SlidingLog::per_hour(5).into();
    let before = redis.script_calls().await;

    let outcomes = check_at_once(&store, &limit, (0..1_000).map(|number| number.to_string())).await;

    assert!(outcomes.iter().all(|outcome| *outcome == (true, 4)));
    let calls = redis.script_calls().await - before;
    assert!(calls <= 50, "{calls} calls");
}

/// RD-01 of `tests/vectors/redis.md`.
#[tokio::test]
async fn each_of_the_checks_of_one_key_that_are_in_flight_is_counted() {
    const CHECKS: usize = 20_000;
    let redis = Redis::start();
    let store = store(&redis).await;
    let limits = [
        Limit::from(SlidingLog::per_hour(30_000)),
        SlidingLog::per_hour(30_000).precision(100).into(),
        FixedWindow::per_hour(30_000).into(),
    ];
    for limit in limits {
        let outcomes = check_at_once(&store, &limit, (0..CHECKS).map(|_| "one".to_owned())).await;
        assert!(outcomes.iter().all(|(is_admitted, _)| *is_admitted), "{limit}");
        let left = decide(&store, Operation::Peek, &limit, "one", 1).await;
        assert_eq!(left.states()[0].remaining, 10_000, "{limit}");
    }
}

#[tokio::test]
async fn a_check_of_a_calendar_window_is_one_call() {
    let redis = Redis::start();
    let store = store(&redis).await;
    let limit = FixedWindow::calendar(100, Calendar::Year, "Europe/Berlin")
        .unwrap()
        .into();
    let before = redis.script_calls().await;
    for _ in 0..20 {
        decide(&store, Operation::Check, &limit, "k", 1).await;
    }
    // One more at the turn of the year.
    assert!(redis.script_calls().await - before <= 21);
}

/// The process learns how far its clock is off.
#[tokio::test]
async fn a_check_of_a_calendar_window_is_one_call_by_another_clock_too() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let store = clock.redis_store(&redis).await;
    clock.write_to(&redis).await;
    let limit = FixedWindow::calendar(100, Calendar::Hour, "UTC").unwrap().into();
    let before = redis.script_calls().await;
    for _ in 0..20 {
        decide(&store, Operation::Check, &limit, "k", 1).await;
    }
    assert_eq!(redis.script_calls().await - before, 21);
}

#[tokio::test]
async fn without_group_commit_each_check_is_a_call() {
    let redis = Redis::start();
    let store = connected(patient().group_commit(false), &redis.url()).await;
    let before = redis.script_calls().await;

    let limit = SlidingLog::per_hour(500).into();
    let mut outcomes = check_at_once(&store, &limit, (0..500).map(|_| "k".to_owned())).await;

    outcomes.sort_unstable();
    assert!(outcomes.into_iter().eq((0..500).map(|remaining| (true, remaining))));
    assert_eq!(redis.script_calls().await - before, 500);
}

#[tokio::test]
async fn of_many_checks_of_one_key_the_limit_is_admitted_and_each_returns_its_remaining() {
    let redis = Redis::start();
    let store = store(&redis).await;
    for limit in [
        SlidingLog::per_hour(300).into(),
        SlidingLog::per_hour(300).precision(10).into(),
        FixedWindow::per_hour(300).into(),
        TokenBucket::per_day(300).into(),
        TokenBucket::new(300, Duration::from_secs(86_399)).into(), // these checks are not merged
    ] {
        let key = Limit::to_string(&limit);
        let outcomes = check_at_once(&store, &limit, (0..1_000).map(|_| key.clone())).await;

        let mut admitted: Vec<_> = outcomes
            .iter()
            .filter(|(allowed, _)| *allowed)
            .map(|(_, left)| *left)
            .collect();
        admitted.sort_unstable();
        assert!(admitted.into_iter().eq(0..300), "{limit}");
        assert!(outcomes.iter().all(|(allowed, left)| *allowed || *left == 0), "{limit}");
    }
}

#[tokio::test]
async fn checks_are_decided_in_the_order_of_arrival() {
    let redis = Redis::start();
    let store = store(&redis).await;
    let limit = Limit::from(SlidingLog::per_hour(100));
    let key = Key::from("k");
    let charges = [Charge::new("test", &limit, &key, 1)];

    let replies = (0..200).map(|_| store.decide(&[StoreRequest::new(Operation::Check, &charges)]));
    // All are sent before the first reply, in this order.
    let admitted = in_order(replies.collect()).await;
    assert!(admitted.iter().take(100).all(|admitted| *admitted));
    assert!(!admitted.iter().skip(100).any(|admitted| *admitted));
}

/// Polls all, in turn, until all are ready, and returns which checks are admitted.
async fn in_order(mut replies: Vec<StoreFuture>) -> Vec<bool> {
    use std::{future::poll_fn, pin::Pin, task::Poll};

    let mut done: Vec<Option<bool>> = vec![None; replies.len()];
    poll_fn(|cx| {
        for (reply, done) in replies.iter_mut().zip(&mut done) {
            if done.is_none()
                && let Poll::Ready(reply) = Pin::new(reply).poll(cx)
            {
                *done = Some(reply.expect("Redis replies").outcomes()[0].allowed);
            }
        }
        match done.iter().all(Option::is_some) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    done.into_iter().flatten().collect()
}

#[tokio::test]
async fn a_check_that_is_dropped_before_it_is_sent_is_not_charged_and_delays_no_other() {
    let redis = Redis::start();
    let store = store(&redis).await;
    let limiter = Limiter::new(store, Policy::new("test", SlidingLog::per_hour(1_000)));
    let start = |limiter: &Limiter| -> Pin<Box<dyn Future<Output = _> + Send>> {
        let limiter = limiter.clone();
        Box::pin(async move { limiter.check("k").await })
    };
    let mut cx = Context::from_waker(Waker::noop());

    // It is sent at once; the others are queued behind it.
    let mut first = start(&limiter);
    assert!(first.as_mut().poll(&mut cx).is_pending());
    let mut checks = JoinSet::new();
    let mut leaving = Vec::new();
    for number in 0..600 {
        let mut check = start(&limiter);
        match number % 2 {
            0 => drop(checks.spawn(check)),
            _ => {
                // Queued, and dropped before the call is sent.
                assert!(check.as_mut().poll(&mut cx).is_pending());
                leaving.push(check);
            }
        }
    }
    drop(leaving);

    let mut decisions = checks.join_all().await;
    decisions.push(first.await);
    for decision in decisions {
        assert!(decision.expect("Redis answers").is_allowed());
    }
    let peeked = limiter.peek("k").await.expect("Redis answers");
    assert_eq!(peeked.remaining(), 699);
}

#[tokio::test]
async fn checks_that_wait_for_a_redis_that_hangs_fail_by_their_deadline() {
    let redis = Redis::start();
    let builder = RedisStore::builder().deadline(Duration::from_millis(100));
    let store = Counted::new(connected(builder, &redis.url()).await);
    let limit = SlidingLog::per_hour(5).into();

    let frozen = redis.freeze();
    // The second half arrives while the calls of the first are in flight.
    let mut checks = JoinSet::new();
    for half in 0..2 {
        for number in 0..500 {
            let (store, limit) = (store.clone(), Limit::clone(&limit));
            checks.spawn(async move {
                let key = format!("{half} {number}");
                let (outcome, waited) = timed(try_decide(&store, Operation::Check, &limit, &key, 1)).await;
                (outcome.unwrap_err().kind(), waited)
            });
        }
        eventually("they are made", async || store.calls() == 500 * (half + 1)).await;
    }
    for (kind, waited) in checks.join_all().await {
        assert!(matches!(kind, ErrorKind::Timeout | ErrorKind::Unreachable), "{kind:?}");
        assert!(waited < Duration::from_secs(1), "{waited:?}");
    }
    drop(frozen);
    eventually("the store is answered", async || {
        try_decide(&store, Operation::Peek, &limit, "k", 1).await
    })
    .await;
}
#[tokio::test]
async fn an_error_of_one_request_fails_no_other_of_its_call() {
    let redis = Redis::start();
    let store = store(&redis).await;
    redis
        .command::<()>("SET", ["quota:1:log/1h:test:{key=bad}", "no log"])
        .await;
    let limit = Limit::from(SlidingLog::per_hour(5));

    let mut checks = JoinSet::new();
    for number in 0..100 {
        let (store, limit) = (store.clone(), limit.clone());
        checks.spawn(async move {
            let key = if number == 50 { "bad".into() } else { number.to_string() };
            let outcome = try_decide(&store, Operation::Check, &limit, &key, 1).await;
            (number, outcome.map_err(|error| (error.kind(), error.to_string())))
        });
    }
    for (number, outcome) in checks.join_all().await {
        match (number, outcome) {
            (50, outcome) => {
                let (kind, text) = outcome.expect_err("the key is of another type");
                assert_eq!(kind, ErrorKind::Refused);
                assert!(text.contains("WRONGTYPE"), "{text}");
            }
            (_, outcome) => assert!(outcome.expect("this key is good").allowed),
        }
    }
}

/// Each batch may have the checks of several runtimes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_is_blocked_and_ends_fails_no_check_of_another() {
    const DEADLINE: Duration = Duration::from_secs(1);
    let redis = Redis::start();
    let store = connected(patient().deadline(DEADLINE), &redis.url()).await;
    let limit = Limit::from(SlidingLog::per_hour(1_000_000).precision(1));
    let checks = move |store: &RedisStore| {
        let mut checks = JoinSet::new();
        for number in 0..64 {
            let (store, limit) = (store.clone(), limit.clone());
            checks.spawn(async move { try_decide(&store, Operation::Check, &limit, &format!("{number}"), 1).await });
        }
        checks
    };
    let (other, checks_of_other) = (store.clone(), checks.clone());
    let blocked = spawn_blocking(move || {
        for _ in 0..3 {
            let runtime = Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let _checks = checks_of_other(&other);
                for _ in 0..20 {
                    yield_now().await;
                }
                // As a handler does that computes.
                thread::sleep(3 * DEADLINE);
            });
        }
    });
    while !blocked.is_finished() {
        for decided in checks(&store).join_all().await {
            assert!(decided.is_ok(), "{:?}", decided.err());
        }
    }
    blocked.await.expect("no panic");
}
