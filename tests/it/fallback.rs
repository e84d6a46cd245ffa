//! A store behind another one: what it counts, how much of it, and who gives back.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{Router, routing::get as route};
use http::StatusCode;
use tower_quota::{
    Fallback, Limit, Limiter, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, key,
    store::{ErrorKind, Operation, Reply, Request, Store, StoreError},
};

use crate::support::{Algorithm, Broken, Clock, Counted, Later, Log, Redis, decide, eventually, get, send, try_decide};

/// A store that fails when the test says so.
#[derive(Clone)]
struct Flaky<S> {
    store: S,
    fails: Arc<AtomicBool>,
}

impl<S> Flaky<S> {
    fn new(store: S) -> Self {
        Self {
            store,
            fails: Arc::default(),
        }
    }

    fn fail(&self, fails: bool) {
        self.fails.store(fails, Ordering::Relaxed);
    }
}

impl<S: Store> Store for Flaky<S> {
    fn decide(&self, requests: &[Request<'_>]) -> Reply {
        match self.fails.load(Ordering::Relaxed) {
            true => Broken::default().decide(requests),
            false => self.store.decide(requests),
        }
    }
}

fn hourly(quota: u64) -> Limit {
    SlidingLog::per_hour(quota).into()
}

fn limiter(store: impl Store, limit: impl Into<Limit>) -> Limiter {
    Limiter::new(store, Policy::new("test", limit))
}

async fn check(limiter: &Limiter, cost: u64) -> bool {
    let decision = limiter.check_n("k", cost).await.expect("a store answers");
    decision.is_allowed()
}

async fn remaining(store: &impl Store, limit: &Limit) -> u64 {
    decide(store, Operation::Peek, limit, "k", 1).await.verdicts[0].remaining
}

/// How many are admitted in a row.
async fn admitted(store: &impl Store, limit: &Limit) -> u64 {
    let mut admitted = 0;
    while decide(store, Operation::Check, limit, "k", 1).await.allowed {
        admitted += 1;
    }
    admitted
}

// Who counts.

#[tokio::test]
async fn a_first_store_that_answers_is_the_only_one() {
    let second = Counted::new(MemoryStore::new());
    let store = Fallback::new(MemoryStore::new(), second.clone()).share(1, 4);
    assert_eq!(admitted(&store, &hourly(8)).await, 8);
    assert_eq!(second.asked(), 0);
}

#[tokio::test]
async fn while_the_first_store_fails_the_second_counts() {
    for first in [
        Arc::new(Broken::default()) as Arc<dyn Store>,
        Arc::new(Later(Broken::default())),
    ] {
        for second in [
            Arc::new(MemoryStore::new()) as Arc<dyn Store>,
            Arc::new(Later(MemoryStore::new())),
        ] {
            let store = Fallback::new(first.clone(), second);
            assert_eq!(admitted(&store, &hourly(3)).await, 3);
        }
    }
}

#[tokio::test]
async fn when_the_first_store_is_back_it_knows_what_it_knew() {
    let first = Flaky::new(MemoryStore::new());
    let store = Fallback::new(first.clone(), MemoryStore::new());
    assert!(decide(&store, Operation::Check, &hourly(3), "k", 1).await.allowed);

    first.fail(true);
    assert_eq!(admitted(&store, &hourly(3)).await, 3);
    first.fail(false);
    assert_eq!(admitted(&store, &hourly(3)).await, 2);
}

#[tokio::test]
async fn every_kind_of_failure_falls_back() {
    struct Fails(ErrorKind);

    impl Store for Fails {
        fn decide(&self, _: &[Request<'_>]) -> Reply {
            Reply::Ready(Err(StoreError::new(self.0, "it fails")))
        }
    }

    for kind in [
        ErrorKind::Timeout,
        ErrorKind::Unreachable,
        ErrorKind::Refused,
        ErrorKind::Protocol,
    ] {
        let store = Fallback::new(Fails(kind), MemoryStore::new());
        assert_eq!(admitted(&store, &hourly(2)).await, 2, "{kind:?}");
    }
}

#[tokio::test]
async fn two_stores_that_answer_at_once_make_one_that_does() {
    let key = "k".into();
    let limit = hourly(3);
    let charges = [tower_quota::store::Charge::new("test", &limit, &key, 1)];
    for first in [
        Arc::new(MemoryStore::new()) as Arc<dyn Store>,
        Arc::new(Broken::default()),
    ] {
        let store = Fallback::new(first, MemoryStore::new());
        let reply = store.decide(&[Request::new(Operation::Check, &charges)]);
        assert!(matches!(reply, Reply::Ready(Ok(_))), "{reply:?}");
    }
}

#[tokio::test]
async fn if_both_stores_fail_the_error_is_that_of_the_second() {
    struct Worse;

    impl Store for Worse {
        fn decide(&self, _: &[Request<'_>]) -> Reply {
            Reply::Ready(Err(StoreError::new(ErrorKind::Protocol, "worse")))
        }
    }

    let store = Fallback::new(Broken::default(), Worse);
    let error = try_decide(&store, Operation::Check, &hourly(1), "k", 1).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Protocol);
}

#[tokio::test]
async fn a_redis_that_was_killed_is_replaced_and_counts_again_when_it_is_back() {
    let mut redis = Redis::start();
    let builder = RedisStore::builder().deadline(Duration::from_secs(1));
    let first = builder.connect(&redis.url()).await.expect("the URL is good");
    let store = Fallback::new(first.clone(), MemoryStore::new()).share(1, 2);
    let limit = hourly(4);
    assert!(decide(&store, Operation::Check, &limit, "k", 1).await.allowed);

    redis.kill();
    assert_eq!(admitted(&store, &limit).await, 2);

    redis.restart();
    eventually("Redis answers", async || {
        try_decide(&first, Operation::Peek, &limit, "k", 1).await.is_ok()
    })
    .await;
    assert_eq!(admitted(&store, &limit).await, 4);
}

// Shares.

#[tokio::test]
async fn a_share_is_rounded_down_and_at_least_1() {
    for algorithm in Algorithm::ALL {
        for (quota, parts, of, share) in [
            (10, 1, 4, 2),
            (10, 3, 4, 7),
            (10, 1, 1, 10),
            (3, 1, 4, 1),
            (1, 1, 100, 1),
        ] {
            let clock = Clock::new();
            let limit = algorithm.limit(quota);
            let store = Fallback::new(Later(Broken::default()), clock.memory_store()).share(parts, of);
            assert_eq!(admitted(&store, &limit).await, share, "{parts}/{of} of {limit}");
        }
    }
}

#[tokio::test]
async fn a_share_of_a_bucket_fills_at_its_share_of_the_rate() {
    for (limit, parts, of, hours) in [
        ("token-bucket 3/d burst 8", 1, 4, 32),
        ("token-bucket 3/d burst 8", 3, 4, 11),
        ("token-bucket 10/h burst 10", 1, 100, 10),
    ] {
        let clock = Clock::new();
        let store = Fallback::new(Broken::default(), clock.memory_store()).share(parts, of);
        let limit: Limit = limit.parse().expect("a limit");
        admitted(&store, &limit).await;
        let denied = decide(&store, Operation::Check, &limit, "k", 1).await;
        let wait = denied.verdicts[0].retry_after.expect("it is denied");
        assert_eq!(
            wait.as_secs().div_ceil(3_600),
            hours,
            "{parts}/{of} of {limit}: {wait:?}"
        );

        clock.advance(wait);
        assert_eq!(admitted(&store, &limit).await, 1);
    }
}

#[tokio::test]
async fn numbers_of_many_digits_have_shares_too() {
    for limit in [
        "sliding-log 999999999999999/s precision 10",
        "sliding-counter 999999999999999/s",
        "fixed-window 999999999999999/3650d",
        "token-bucket 50000017/s burst 40000000",
        "token-bucket 67108859/3650d burst 10",
        "token-bucket 1/3650d burst 10",
    ] {
        let limit: Limit = limit.parse().expect("a limit");
        for (parts, of) in [(1, 4), (u32::MAX - 1, u32::MAX), (1, u32::MAX)] {
            let store = Fallback::new(Broken::default(), Clock::new().memory_store()).share(parts, of);
            let share = (u128::from(limit.quota()) * u128::from(parts) / u128::from(of)).max(1) as u64;
            assert_eq!(remaining(&store, &limit).await, share, "{parts}/{of} of {limit}");
            assert!(
                decide(&store, Operation::Check, &limit, "k", share).await.allowed,
                "{limit}"
            );
            assert!(
                !decide(&store, Operation::Check, &limit, "k", 1).await.allowed,
                "{limit}"
            );
        }
    }
}

#[tokio::test]
async fn a_cost_above_the_share_counts_as_all_of_it() {
    let limiter = limiter(
        Fallback::new(Broken::default(), MemoryStore::new()).share(1, 4),
        hourly(8),
    );
    assert!(check(&limiter, 8).await);
    assert!(!check(&limiter, 1).await);
}

#[tokio::test]
async fn a_cost_above_the_share_waits_until_all_of_it_is_free() {
    let clock = Clock::new();
    let store = Fallback::new(Broken::default(), clock.memory_store()).share(1, 4);
    let limiter = limiter(store, hourly(8));
    assert!(check(&limiter, 1).await);

    let denied = limiter.check_n("k", 8).await.expect("a store answers");
    clock.advance(denied.retry_after().expect("it is denied"));
    assert!(check(&limiter, 8).await);
}

#[tokio::test]
async fn a_cost_above_the_limit_asks_no_store() {
    let second = Counted::new(MemoryStore::new());
    let limiter = limiter(Fallback::new(Broken::default(), second.clone()).share(1, 4), hourly(8));
    assert!(!check(&limiter, 9).await);
    assert_eq!(second.asked(), 0);
}

#[tokio::test]
async fn a_charge_counts_in_full() {
    let store = Fallback::new(Later(Broken::default()), Clock::new().memory_store()).share(1, 2);
    let limit = "token-bucket 2/s".parse().expect("a limit");
    decide(&store, Operation::Charge, &limit, "k", 5).await;
    let denied = decide(&store, Operation::Check, &limit, "k", 1).await;
    assert_eq!(denied.verdicts[0].retry_after, Some(Duration::from_secs(5)));
}

#[tokio::test]
async fn policies_of_one_layer_have_their_shares_together() {
    let policies = [
        Policy::new("per-path", SlidingLog::per_hour(8)).key((key::ip(), key::path())),
        Policy::new("per-address", SlidingLog::per_hour(12)).key(key::ip()),
    ];
    let store = Fallback::new(Later(Broken::default()), MemoryStore::new()).share(1, 4);
    let app = Router::new()
        .fallback(route(async || "hi"))
        .layer(RateLimitLayer::new(store, policies));

    for expected in [
        r#""per-path";r=1;t=3600, "per-address";r=2;t=3600"#,
        r#""per-path";r=0;t=3600, "per-address";r=1;t=3600"#,
    ] {
        assert_eq!(send(&app, get("/a")).await.field("ratelimit"), Some(expected));
    }
    assert_eq!(send(&app, get("/a")).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(send(&app, get("/b")).await.status, StatusCode::OK);
    assert_eq!(send(&app, get("/b")).await.status, StatusCode::TOO_MANY_REQUESTS);
}

#[test]
fn a_share_is_more_than_nothing_and_at_most_the_whole() {
    for (parts, of) in [(0, 4), (5, 4), (0, 0), (1, 0)] {
        let built = std::panic::catch_unwind(|| Fallback::new(Broken::default(), Broken::default()).share(parts, of));
        let panic = built.expect_err("it panics");
        let message = panic.downcast_ref::<&str>().expect("a text");
        assert!(message.contains("`.share(1, 4)`"), "{message}");
    }
}

// Who gives back.

#[tokio::test]
async fn a_refund_goes_to_the_second_store_if_that_was_charged() {
    for cost in [1, 2, 8] {
        let first = Flaky::new(MemoryStore::new());
        let second = MemoryStore::new();
        let limiter = limiter(
            Fallback::new(Later(first.clone()), second.clone()).share(1, 4),
            hourly(8),
        );
        first.fail(true);
        let decision = limiter.check_n("k", cost).await.expect("a store answers");
        let share = hourly(2);
        assert_eq!(remaining(&second, &share).await, 2 - cost.min(2));

        // Even when the first one is back, which has counted the same meanwhile.
        first.fail(false);
        assert!(check(&limiter, cost).await);
        let receipt = decision.receipt().expect("it was charged");
        limiter.refund(receipt).await.expect("a store answers");
        assert_eq!(remaining(&second, &share).await, 2);
        assert_eq!(remaining(&first, &hourly(8)).await, 8 - cost);
    }
}

#[tokio::test]
async fn a_refund_gives_back_no_more_than_the_share_was_charged() {
    let second = Clock::new().memory_store();
    let store = Fallback::new(Broken::default(), second.clone()).share(1, 4);
    let limit: Limit = "fixed-window 8/h".parse().expect("a limit");
    let limiter = limiter(store, limit.clone());
    let heavy = limiter.check_n("k", 6).await.expect("a store answers");
    let _ = limiter.charge("k", 5).await.expect("a store answers");

    limiter
        .refund(heavy.receipt().expect("it was charged"))
        .await
        .expect("a store answers");
    let whole: Limit = "fixed-window 10/h".parse().expect("a limit");
    assert_eq!(remaining(&second, &whole).await, 5);
}

#[tokio::test]
async fn a_refund_goes_to_the_first_store_if_that_was_charged_and_fails_with_it() {
    let first = Flaky::new(MemoryStore::new());
    let second = Counted::new(MemoryStore::new());
    let limiter = limiter(Fallback::new(first.clone(), second.clone()), hourly(8));
    let receipts = [1, 2].map(async |cost| {
        let decision = limiter.check_n("k", cost).await.expect("a store answers");
        decision.receipt().expect("it was charged")
    });
    let [one, two] = receipts;

    limiter.refund(one.await).await.expect("a store answers");
    assert_eq!(remaining(&first, &hourly(8)).await, 8);

    let two = two.await;
    first.fail(true);
    assert_eq!(limiter.refund(two).await.unwrap_err().kind(), ErrorKind::Unreachable);
    assert_eq!(second.asked(), 0);
}

#[tokio::test]
async fn a_reset_goes_to_both_stores() {
    let first = Flaky::new(MemoryStore::new());
    let limiter = limiter(Fallback::new(Later(first.clone()), MemoryStore::new()), hourly(2));
    for fails in [true, false] {
        first.fail(fails);
        assert!(check(&limiter, 2).await);
    }

    limiter.reset("k").await.expect("a store answers");
    for fails in [true, false] {
        first.fail(fails);
        assert!(check(&limiter, 2).await, "the first fails: {fails}");
    }
}

#[tokio::test]
async fn a_reset_fails_with_either_store_and_is_done_in_the_other() {
    let second = MemoryStore::new();
    let first_fails = Fallback::new(Broken::default(), second.clone());
    assert_eq!(admitted(&first_fails, &hourly(2)).await, 2);
    assert!(limiter(first_fails, hourly(2)).reset("k").await.is_err());
    assert_eq!(remaining(&second, &hourly(2)).await, 2);

    let first = MemoryStore::new();
    let second_fails = Fallback::new(first.clone(), Broken::default());
    assert_eq!(admitted(&second_fails, &hourly(2)).await, 2);
    assert!(limiter(second_fails, hourly(2)).reset("k").await.is_err());
    assert_eq!(remaining(&first, &hourly(2)).await, 2);
}

#[tokio::test]
async fn a_fallback_of_a_fallback_has_a_share_of_a_share() {
    let last = MemoryStore::new();
    for second_is_nested in [false, true] {
        let store = match second_is_nested {
            true => {
                let inner = Fallback::new(Later(Broken::default()), last.clone()).share(1, 2);
                Fallback::new(Broken::default(), inner).share(1, 3)
            }
            false => {
                let inner = Fallback::new(Later(Broken::default()), Broken::default());
                Fallback::new(inner, last.clone()).share(1, 6)
            }
        };
        let limit: Limit = "fixed-window 12/h".parse().expect("a limit");
        let limiter = limiter(store, limit.clone());
        let heavy = limiter.check_n("k", 7).await.expect("a store answers");
        assert!(!check(&limiter, 1).await);

        let _ = limiter.charge("k", 3).await.expect("a store answers");
        limiter
            .refund(heavy.receipt().expect("it was charged"))
            .await
            .expect("a store answers");
        assert_eq!(remaining(&last, &limit).await, 12 - 3);
        limiter.reset("k").await.expect_err("the first one fails");
    }
}

// Who is told.

#[tokio::test]
async fn each_failure_of_the_first_store_is_told() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let sink = told.clone();
    let store = Fallback::new(Later(Broken::default()), MemoryStore::new())
        .on_failure(move |error| sink.lock().expect("nobody panics").push(error.kind()));
    let layers_told = Arc::new(AtomicBool::new(false));
    let layers_sink = layers_told.clone();
    let layer = RateLimitLayer::new(store, Policy::new("p", SlidingLog::per_hour(2)).key(key::ip()))
        .on_failure(move |_| layers_sink.store(true, Ordering::Relaxed));
    let app = Router::new().route("/", route(async || "hi").layer(layer));

    for status in [200, 200, 429] {
        assert_eq!(send(&app, get("/")).await.status, status);
    }
    assert_eq!(*told.lock().expect("nobody panics"), [ErrorKind::Unreachable; 3]);
    assert!(!layers_told.load(Ordering::Relaxed), "the layer was answered");
}

#[tokio::test]
async fn there_is_one_warning_for_each_change_of_state() {
    let log = Log::capture();
    let first = Flaky::new(MemoryStore::new());
    let store = Fallback::new(first.clone(), MemoryStore::new());
    for fails in [false, true, false] {
        first.fail(fails);
        for _ in 0..30 {
            decide(&store, Operation::Check, &hourly(1), "k", 1).await;
        }
    }
    let text = log.text();
    assert_eq!(text.matches("another one counts").count(), 1, "{text}");
    assert_eq!(text.matches("answers again").count(), 1, "{text}");
    assert_eq!(text.lines().count(), 2, "{text}");
}
