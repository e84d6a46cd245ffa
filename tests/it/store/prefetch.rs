//! Units that are taken ahead, on Redis: the limit holds, and hot keys need few calls.

use std::time::{Duration, Instant};

use axum::{Router, routing::get as route};
use http::{StatusCode, request::Parts};
use tokio::{runtime::Builder, task::JoinSet};
use tower_quota::{
    ClientLibrary, FixedWindow, Key, Limit, Limiter, MemoryStore, Plans, Policy, RateLimitLayer, RedisStore,
    SlidingLog, TokenBucket, key,
    store::{Charge, Operation, Store, StoreRequest},
};

use crate::support::{Cluster, Redis, connected, each_client, get, patient, send};

const QUOTA: u64 = 3_000;
const WINDOW: Duration = Duration::from_secs(1);
const TIME: Duration = Duration::from_millis(50);

fn limits() -> [Limit; 3] {
    [
        SlidingLog::new(QUOTA, WINDOW).precision(20).prefetch(TIME).into(),
        FixedWindow::new(QUOTA, WINDOW).prefetch(TIME).into(),
        TokenBucket::new(QUOTA, WINDOW).prefetch(TIME).into(),
    ]
}

/// Sends requests for three windows. Returns when each one that was admitted was sent, and answered.
async fn send_many(store: RedisStore, limit: Limit, started: Instant) -> Vec<[Duration; 2]> {
    let limiter = Limiter::new(store, Policy::new(limit.algorithm(), limit));
    let mut admitted = Vec::new();
    while started.elapsed() < 3 * WINDOW {
        let sent = started.elapsed();
        if limiter.check("k").await.expect("Redis answers").is_allowed() {
            admitted.push([sent, started.elapsed()]);
        }
        tokio::task::yield_now().await;
    }
    admitted
}

each_client! {
    no_window_holds_more_than_the_quota
    a_hot_key_needs_few_calls
}

async fn no_window_holds_more_than_the_quota(library: ClientLibrary) {
    let redis = Redis::start();
    let mut stores = Vec::new();
    for _ in 0..3 {
        stores.push(connected(patient().client_library(library), &redis.url()).await);
    }
    let started = Instant::now();
    let callers = limits().map(|limit| {
        let mut callers = JoinSet::new();
        for store in stores.iter().flat_map(|store| [store; 4]) {
            callers.spawn(send_many(store.clone(), limit.clone(), started));
        }
        (limit, callers)
    });
    for (limit, callers) in callers {
        let mut admitted = callers.join_all().await.concat();
        assert!(admitted.len() as u64 > QUOTA, "{limit}: {}", admitted.len());
        admitted.sort_unstable();
        // Those that were both sent and answered in a window were admitted in it.
        for (position, [from, _]) in admitted.iter().enumerate() {
            let within = |[_, answered]: &&[Duration; 2]| *answered < *from + WINDOW;
            let inside = admitted[position..].iter().filter(within).count() as u64;
            let most = if matches!(limit, Limit::SlidingLog(_)) {
                QUOTA
            } else {
                2 * QUOTA - 1
            };
            assert!(inside <= most, "{limit}: {inside} from {from:?} on");
            if position > 2_000 {
                break;
            }
        }
    }
}

/// With a time of a second, however slow the machine is.
async fn a_hot_key_needs_few_calls(library: ClientLibrary) {
    const REQUESTS: u64 = 2_000;
    let limit = Limit::from(SlidingLog::per_minute(20_000).prefetch(Duration::from_secs(1)));
    let redis = Redis::start();
    let store = connected(patient().client_library(library), &redis.url()).await;
    let limiter = Limiter::new(store.clone(), Policy::new("hot", limit.clone()));
    let before = redis.script_calls().await;
    for number in 0..REQUESTS {
        // A call that does not wait takes units too.
        let decision = match number % 2 {
            0 => limiter.check("k").await.expect("Redis answers"),
            _ => limiter.acquire("k").await.expect("it fits"),
        };
        assert!(decision.is_allowed());
        tokio::task::yield_now().await;
    }
    let made = redis.script_calls().await - before;
    assert!(made < REQUESTS / 5, "{made} calls");

    // What was not used is returned.
    store.drained(Duration::from_secs(60)).await.expect("Redis answers");
    assert_eq!(
        limiter.peek("k").await.expect("Redis answers").remaining(),
        20_000 - REQUESTS
    );
}

#[tokio::test]
async fn a_policy_with_waits_takes_nothing_from_requests_to_which_it_does_not_apply() {
    const REQUESTS: u64 = 500;
    fn plan(parts: &Parts) -> Option<&str> {
        parts.headers.get("plan")?.to_str().ok()
    }

    let unkeyed = || {
        let limit = SlidingLog::per_minute(20_000).prefetch(Duration::from_secs(1));
        Policy::new("free", limit)
    };
    let free = || unkeyed().key(key::header("user"));
    let waits = || {
        let policy = Policy::new("pro", SlidingLog::per_minute(9)).key(key::header("user"));
        policy.wait_up_to(WINDOW)
    };
    for is_of_plans in [true, false] {
        let redis = Redis::start();
        let store = connected(patient(), &redis.url()).await;
        let layer = match is_of_plans {
            true => RateLimitLayer::new(store.clone(), Plans::new("free", free()).plan("pro", waits()).by(plan)),
            false => {
                let waits = waits().apply_if(|parts| plan(parts).is_some());
                RateLimitLayer::new(store.clone(), [free(), waits])
            }
        };
        let app = Router::new().route("/", route(async || "hi").layer(layer));
        let request = async |user: &str| send(&app, get("/").header("user", user)).await.status;
        let before = redis.script_calls().await;
        for _ in 0..REQUESTS {
            assert_eq!(request("1").await, StatusCode::OK);
            tokio::task::yield_now().await;
        }
        let made = redis.script_calls().await - before;
        assert!(made < REQUESTS / 2, "{made} calls");

        let all = Limiter::new(store, unkeyed());
        let all = all.request(Key::header("user", "2")).cost(20_000).charge().await;
        assert!(all.is_ok(), "{all:?}");
        assert_eq!(request("2").await, StatusCode::TOO_MANY_REQUESTS);
        let (before, started) = (redis.script_calls().await, Instant::now());
        for _ in 0..100 {
            assert_eq!(request("2").await, StatusCode::TOO_MANY_REQUESTS);
        }
        let made = redis.script_calls().await - before;
        assert!(made <= 1 + started.elapsed().as_secs(), "{made} calls");
    }
}

#[tokio::test]
async fn a_peek_counts_the_units_that_are_in_hand_as_used() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let limit = SlidingLog::per_minute(20_000).prefetch(Duration::from_secs(1));
    let limiter = Limiter::new(store.clone(), Policy::new("hot", limit));
    let (mut used, mut fewer) = (0, 0);
    for _ in 0..300 {
        assert!(limiter.check("k").await.expect("Redis answers").is_allowed());
        used += 1;
        let peeked = limiter.peek("k").await.expect("Redis answers").remaining();
        assert!(peeked <= 20_000 - used, "{peeked} after {used}");
        fewer += u32::from(peeked < 20_000 - used);
        tokio::task::yield_now().await;
    }
    assert!(fewer > 0, "units were in hand");
}

#[tokio::test]
async fn a_store_in_memory_applies_the_same_numbers() {
    let more: [Limit; 2] = [
        TokenBucket::new(QUOTA, WINDOW).burst(200).prefetch(TIME).into(),
        SlidingLog::new(QUOTA, WINDOW).prefetch(TIME).into(),
    ];
    for limit in limits().into_iter().chain(more) {
        let time = Duration::from_secs(1_800_000_000);
        let store = MemoryStore::builder().clock(move || time).build();
        let limiter = Limiter::new(store, Policy::new("hot", limit.clone()));
        for left in (0..limit.quota()).rev() {
            assert_eq!(
                limiter.check("k").await.expect("a decision").remaining(),
                left,
                "{limit}"
            );
        }
        let denied = limiter.check("k").await.expect("a decision");
        assert!(!denied.is_allowed(), "{limit}: more than its quota");
    }
}

#[tokio::test]
async fn processes_with_and_without_units_ahead_do_not_starve_each_other() {
    let redis = Redis::start();
    for log in [SlidingLog::per_hour(100), SlidingLog::per_hour(100).precision(20)] {
        let limiter = async |limit: SlidingLog| {
            let store = connected(patient(), &redis.url()).await;
            Limiter::new(store, Policy::new("hot", limit))
        };
        let is_admitted = async |limiter: &Limiter| limiter.check("k").await.expect("Redis answers").is_allowed();
        let (plain, other) = (limiter(log).await, limiter(log).await);
        let ahead = limiter(log.prefetch(Duration::from_secs(1))).await;
        for number in 0..50 {
            assert!(
                is_admitted(&plain).await && is_admitted(&other).await,
                "{log}: {number}"
            );
        }
        assert!(!is_admitted(&other).await, "{log}: they share a count");
        for number in 0..50 {
            assert!(is_admitted(&ahead).await, "{log}: {number}");
        }
    }
}

#[test]
fn units_of_a_store_that_is_dropped_are_returned_or_expire() {
    let redis = Redis::start();
    let limit = Limit::from(FixedWindow::per_hour(1_000).prefetch(Duration::from_secs(1)));
    let runtime = || Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime().block_on(async {
        let store = connected(patient(), &redis.url()).await;
        let limiter = Limiter::new(store, Policy::new("hot", limit.clone()));
        for _ in 0..100 {
            assert!(limiter.check("k").await.expect("Redis answers").is_allowed());
        }
    });
    // The process is gone with what it had.
    runtime().block_on(async {
        let store = connected(patient(), &redis.url()).await;
        let key = Key::from("k");
        let charges = [Charge::new("hot", &limit, &key, 1)];
        let peeked = store
            .decide(&[StoreRequest::new(Operation::Peek, &charges)])
            .await
            .expect("Redis answers");
        assert!(peeked.outcomes()[0].states()[0].remaining <= 900);
    });
}

#[tokio::test]
async fn a_cluster_grants_units() {
    let cluster = Cluster::start().await;
    let store = connected(patient(), &cluster.url()).await;
    cluster.serves(&store).await;
    let limit = Limit::from(SlidingLog::per_minute(20_000).prefetch(Duration::from_secs(1)));
    let limiter = Limiter::new(store.clone(), Policy::new("hot", limit.clone()));
    let (key, mut without_call) = (Key::from("k"), 0);
    for _ in 0..300 {
        let charges = [Charge::new("hot", &limit, &key, 1)];
        let reply = store.decide(&[StoreRequest::new(Operation::Check, &charges)]);
        let reply = match reply.try_ready() {
            Ok(reply) => {
                without_call += 1;
                reply
            }
            Err(later) => later.await,
        };
        assert!(reply.expect("the cluster answers").outcomes()[0].allowed);
        tokio::task::yield_now().await;
    }
    assert!(without_call > 0, "some were decided without a call");
    store
        .drained(Duration::from_secs(60))
        .await
        .expect("the cluster answers");
    assert_eq!(
        limiter.peek("k").await.expect("the cluster answers").remaining(),
        20_000 - 300
    );
}
