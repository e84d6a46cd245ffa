//! What counts while a store fails: how much of it, where refunds go, and what is reported.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, routing::get as route};
use http::StatusCode;
use tokio::time::{advance, sleep, timeout};
use tower_quota::{
    AcquireError, Ban, Decision, FailureMode, Limit, Limiter, Policy, RateLimitLayer, SlidingLog, TokenBucket, key,
    store::{ErrorKind, NodeState, Store, StoreError, StoreFuture, StoreRequest},
};

use crate::support::{
    Algorithm, Broken, Flaky, Gated, Later, Log, PATIENCE, Redis, connected, eventually, get, less_patient, patient,
    send, try_decide,
};

const DAY: Duration = Duration::from_secs(86_400);

fn hourly(quota: u64) -> Limit {
    SlidingLog::per_hour(quota).into()
}

fn policy(limit: impl Into<Limit>) -> Policy<()> {
    Policy::new("test", limit)
}

/// A limiter whose store is down.
fn down(limit: impl Into<Limit>, mode: FailureMode) -> Limiter {
    Limiter::new(Broken::default(), policy(limit).failure_mode(mode))
}

async fn check(limiter: &Limiter, cost: u64) -> bool {
    limiter
        .request("k")
        .cost(cost)
        .check()
        .await
        .expect("a decision")
        .is_allowed()
}

async fn remaining(limiter: &Limiter) -> u64 {
    limiter.peek("k").await.expect("a decision").remaining()
}

/// How many are admitted in a row.
async fn admitted(limiter: &Limiter) -> u64 {
    let mut admitted = 0;
    while check(limiter, 1).await {
        admitted += 1;
        assert!(admitted < 1_000, "no limit applies");
    }
    admitted
}

// Where requests are counted.

#[tokio::test]
async fn by_default_the_process_counts_while_the_store_fails() {
    for store in [
        Arc::new(Broken::default()) as Arc<dyn Store>,
        Arc::new(Later(Broken::default())),
    ] {
        let limiter = Limiter::new(store, policy(hourly(3)));
        assert_eq!(admitted(&limiter).await, 3);
    }
}

#[tokio::test]
async fn every_kind_of_failure_is_one() {
    struct Fails(ErrorKind);

    impl Store for Fails {
        fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
            StoreFuture::ready(Err(StoreError::new(self.0, "it fails")))
        }
    }

    for kind in [
        ErrorKind::Timeout,
        ErrorKind::Unreachable,
        ErrorKind::Refused,
        ErrorKind::Protocol,
    ] {
        let limiter = Limiter::new(Fails(kind), policy(hourly(2)));
        let decision = limiter.check("k").await.expect("a decision");
        assert_eq!(decision.store_error().map(StoreError::kind), Some(kind));
        assert_eq!(admitted(&limiter).await, 1, "{kind:?}");
    }
}

#[tokio::test]
async fn a_store_that_replies_again_decides_by_its_own_counts() {
    let store = Flaky::default();
    let limiter = Limiter::new(store.clone(), policy(hourly(3)));
    let decision = limiter.check("k").await.expect("a decision");
    assert!(decision.store_error().is_none());

    store.fail(true);
    assert_eq!(admitted(&limiter).await, 3);
    store.fail(false);
    assert_eq!(admitted(&limiter).await, 2);
}

#[tokio::test]
async fn a_redis_that_was_killed_is_replaced_and_counts_again_when_it_is_back() {
    let mut redis = Redis::start();
    let store = connected(less_patient(), &redis.url()).await;
    let limiter = Limiter::new(
        store.clone(),
        policy(hourly(4)).failure_mode(FailureMode::local_share(1, 2)),
    );
    assert!(check(&limiter, 1).await);

    redis.kill();
    assert_eq!(admitted(&limiter).await, 2);

    redis.restart();
    eventually("Redis replies", async || {
        let peek = tower_quota::store::Operation::Peek;
        try_decide(&store, peek, &hourly(4), "k", 1).await
    })
    .await;
    assert_eq!(admitted(&limiter).await, 4);
}

#[tokio::test]
async fn layers_and_limiters_on_one_store_share_the_counts_of_the_process() {
    let store = Flaky::default();
    store.fail(true);
    let layer = || RateLimitLayer::new(store.clone(), policy(hourly(3)).key(key::constant("k")));
    let app = Router::new()
        .route("/a", route(async || "hi").layer(layer()))
        .route("/b", route(async || "hi").layer(layer()));
    assert_eq!(send(&app, get("/a")).await.status, StatusCode::OK);
    assert_eq!(send(&app, get("/b")).await.status, StatusCode::OK);

    let limiter = Limiter::new(Arc::new(store.clone()), policy(hourly(3)));
    let key = tower_quota::Key::constant("k");
    assert_eq!(limiter.check(key).await.expect("a decision").remaining(), 0);
    assert_eq!(send(&app, get("/a")).await.status, StatusCode::TOO_MANY_REQUESTS);
}

// The modes.

#[tokio::test]
async fn open_policies_admit_everything_and_closed_ones_nothing() {
    let open = down(hourly(1), FailureMode::Open);
    for _ in 0..3 {
        let decision = open.check("k").await.expect("a decision");
        assert!(decision.is_allowed());
        assert_eq!(decision.policies().count(), 0, "it is not counted");
        assert!(decision.take_receipt().is_empty());
        assert!(decision.store_error().is_some());
    }

    let closed = down(hourly(1), FailureMode::Closed);
    let error = closed.check("k").await.expect_err("the store is down");
    assert_eq!(error.kind(), ErrorKind::Unreachable);
}

#[tokio::test]
async fn of_several_policies_each_has_its_mode() {
    let [local, open] = [("a", FailureMode::Local), ("b", FailureMode::Open)]
        .map(|(name, mode)| Policy::new(name, hourly(2)).failure_mode(mode));
    let limiter = Limiter::new(Broken::default(), [local.clone(), open.clone()]);
    let decision = limiter.check("k").await.expect("a decision");
    let counted: Vec<_> = decision.policies().map(|policy| policy.name().to_owned()).collect();
    assert_eq!(counted, ["a"]);
    assert_eq!(admitted(&limiter).await, 1);

    let closed = Policy::new("c", hourly(2)).failure_mode(FailureMode::Closed);
    let limiter = Limiter::new(Broken::default(), [local, open, closed]);
    assert!(limiter.check("k").await.is_err());
}

#[tokio::test]
async fn each_mode_admits_as_it_says() {
    let policies = || ["a", "b"].map(|name| Policy::new(name, hourly(1)).key(key::constant("all")));
    let layer = |mode| RateLimitLayer::new(Broken::default(), policies().map(|policy| policy.failure_mode(mode)));
    let app = Router::new()
        .route("/local", route(async || "hi").layer(layer(FailureMode::Local)))
        .route("/open", route(async || "hi").layer(layer(FailureMode::Open)))
        .route("/closed", route(async || "hi").layer(layer(FailureMode::Closed)));
    for (path, statuses) in [("/local", [200, 429]), ("/open", [200, 200]), ("/closed", [503, 503])] {
        for status in statuses {
            let response = send(&app, get(path)).await;
            assert_eq!(response.status, status, "{path}");
            assert_eq!(response.field("ratelimit").is_some(), path == "/local", "{path}");
        }
    }
}

// Shares.

#[tokio::test(start_paused = true)]
async fn a_share_is_rounded_down_and_at_least_1() {
    for algorithm in Algorithm::ALL {
        for (quota, parts, of, share) in [
            (10, 1, 4, 2),
            (10, 3, 4, 7),
            (10, 1, 1, 10),
            (3, 1, 4, 1),
            (1, 1, 100, 1),
        ] {
            let limit = algorithm.limit(quota);
            let limiter = down(limit.clone(), FailureMode::local_share(parts, of));
            assert_eq!(admitted(&limiter).await, share, "{parts}/{of} of {limit}");
            let denied = limiter.check("k").await.expect("a decision");
            assert_eq!(denied.limit(), quota, "the whole limit is announced");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_share_of_a_bucket_fills_at_its_share_of_the_rate() {
    for (limit, parts, of, hours) in [
        ("token-bucket 3/d burst 8", 1, 4, 32),
        ("token-bucket 3/d burst 8", 3, 4, 11),
        ("token-bucket 10/h burst 10", 1, 100, 10),
    ] {
        let limiter = down(
            limit.parse::<Limit>().expect("a limit"),
            FailureMode::local_share(parts, of),
        );
        admitted(&limiter).await;
        let denied = limiter.check("k").await.expect("a decision");
        let wait = denied.retry_after().expect("it is denied");
        assert_eq!(
            wait.as_secs().div_ceil(3_600),
            hours,
            "{parts}/{of} of {limit}: {wait:?}"
        );

        advance(wait).await;
        assert_eq!(admitted(&limiter).await, 1);
    }
}

#[tokio::test(start_paused = true)]
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
            let limiter = down(limit.clone(), FailureMode::local_share(parts, of));
            let share = (u128::from(limit.quota()) * u128::from(parts) / u128::from(of)).max(1) as u64;
            assert_eq!(remaining(&limiter).await, share, "{parts}/{of} of {limit}");
            assert!(check(&limiter, share).await, "{limit}");
            assert!(!check(&limiter, 1).await, "{limit}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_cost_above_the_share_counts_as_all_of_it_and_waits_until_all_of_it_is_free() {
    let limiter = down(hourly(8), FailureMode::local_share(1, 4));
    assert!(check(&limiter, 8).await);
    assert!(!check(&limiter, 1).await);
    advance(Duration::from_secs(3_600)).await;

    assert!(check(&limiter, 1).await);
    let denied = limiter.request("k").cost(8).check().await.expect("a decision");
    advance(denied.retry_after().expect("it is denied")).await;
    assert!(check(&limiter, 8).await);
}

/// A process takes nothing ahead of itself, so nothing is held back for that.
#[tokio::test(start_paused = true)]
async fn a_share_of_a_bucket_that_is_taken_ahead_is_never_empty() {
    for (parts, of) in [(1, 100), (1, 99), (1, 7), (3, 100)] {
        let limit: Limit = "token-bucket 100/s prefetch 100ms".parse().expect("a limit");
        let limiter = down(limit, FailureMode::local_share(parts, of));
        let admitted = limiter.request("k").wait_up_to(Duration::from_secs(60)).acquire().await;
        assert!(admitted.expect("it is admitted").waited().is_zero(), "{parts}/{of}");
        for _ in 0..parts + 100 / of {
            let waited = limiter.request("k").wait_up_to(Duration::from_secs(60)).acquire().await;
            assert!(waited.is_ok(), "{parts}/{of}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_charge_counts_in_full() {
    let limit: Limit = "token-bucket 2/s".parse().expect("a limit");
    let limiter = down(limit, FailureMode::local_share(1, 2));
    let _ = limiter.request("k").cost(5).charge().await.expect("a decision");
    let denied = limiter.check("k").await.expect("a decision");
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(5)));
}

#[tokio::test]
async fn policies_of_one_layer_have_their_shares_together() {
    let policies = [
        Policy::new("per-path", SlidingLog::per_hour(8)).key((key::ip(), key::path())),
        Policy::new("per-address", SlidingLog::per_hour(12)).key(key::ip()),
    ];
    let layer = RateLimitLayer::new(
        Later(Broken::default()),
        policies.map(|policy| policy.failure_mode(FailureMode::local_share(1, 4))),
    );
    let app = Router::new().fallback(route(async || "hi")).layer(layer);

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
fn a_share_is_above_0_and_at_most_1() {
    for (parts, of) in [(0, 4), (5, 4), (0, 0), (1, 0)] {
        let panic = std::panic::catch_unwind(|| FailureMode::local_share(parts, of)).expect_err("it panics");
        let message = panic.downcast_ref::<&str>().expect("a text");
        assert!(message.contains("`FailureMode::local_share(1, 4)`"), "{message}");
    }
}

// Refunds and resets.

#[tokio::test]
async fn a_refund_goes_to_where_the_request_was_counted() {
    let refund = async |decision: Decision| decision.take_receipt().refund().await;
    for cost in [1, 2, 8] {
        let store = Flaky::default();
        let share = FailureMode::local_share(1, 4);
        let limiter = Limiter::new(Later(store.clone()), policy(hourly(8)).failure_mode(share));
        store.fail(true);
        let local = limiter.request("k").cost(cost).check().await.expect("a decision");
        assert_eq!(remaining(&limiter).await, 2 - cost.min(2));

        // Also when the store replies again, which has counted the same meanwhile.
        store.fail(false);
        let shared = limiter.request("k").cost(cost).check().await.expect("a decision");
        refund(local).await.expect("the process has counted it");
        assert_eq!(remaining(&limiter).await, 8 - cost);
        store.fail(true);
        assert_eq!(remaining(&limiter).await, 2);

        // And what the store has counted, this process cannot give back.
        let error = refund(shared).await.expect_err("the store is down");
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert_eq!(remaining(&limiter).await, 2);
    }
}

#[tokio::test]
async fn a_settlement_is_made_where_the_request_was_counted() {
    for actual in [0, 1, 5] {
        let store = Flaky::default();
        let limiter = Limiter::new(Later(store.clone()), policy(hourly(8)));
        let shared = limiter.request("k").cost(2).check().await.expect("a decision");
        store.fail(true);
        let local = limiter.request("k").cost(2).check().await.expect("a decision");
        let settle = async |decision: Decision| decision.take_receipt().settle(actual).await;

        settle(local).await.expect("the process has counted it");
        assert_eq!(remaining(&limiter).await, 8 - actual);
        let error = settle(shared).await.expect_err("the store is down");
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert_eq!(remaining(&limiter).await, 8 - actual);
        store.fail(false);
        assert_eq!(remaining(&limiter).await, 6);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refund_gives_back_exactly_what_was_counted() {
    let limit: Limit = "fixed-window 100/h".parse().expect("a limit");
    let limiter = down(limit, FailureMode::local_share(1, 4));
    let checked = limiter.request("k").cost(60).check().await.expect("a decision");
    assert_eq!(remaining(&limiter).await, 0, "of 25");
    let charged = limiter.request("k").cost(50).charge().await.expect("a decision");

    for (decision, left) in [(charged, 0), (checked, 25)] {
        let receipt = decision.take_receipt();
        receipt.refund().await.expect("the process has counted it");
        assert_eq!(remaining(&limiter).await, left);
    }
}

#[tokio::test]
async fn a_reset_is_for_the_store_and_the_process() {
    let store = Flaky::default();
    let limiter = Limiter::new(Later(store.clone()), policy(hourly(2)));
    for fails in [true, false] {
        store.fail(fails);
        assert!(check(&limiter, 2).await);
    }

    limiter.reset("k").await.expect("the store replies");
    for fails in [true, false] {
        store.fail(fails);
        assert!(check(&limiter, 2).await, "the store fails: {fails}");
    }

    store.fail(true);
    limiter.reset("k").await.expect_err("the store is down");
    assert!(check(&limiter, 2).await, "the process was reset all the same");
}

// What is reported.

#[tokio::test]
async fn each_failure_is_observed_although_the_process_counts() {
    let reported = Arc::new(Mutex::new(Vec::new()));
    let sink = reported.clone();
    let layer = RateLimitLayer::new(Later(Broken::default()), policy(hourly(2)).key(key::ip()))
        .on_failure(move |error| sink.lock().expect("no panic").push(error.kind()));
    let app = Router::new().route("/", route(async || "hi").layer(layer));

    for status in [200, 200, 429] {
        assert_eq!(send(&app, get("/")).await.status, status);
    }
    assert_eq!(*reported.lock().expect("no panic"), [ErrorKind::Unreachable; 3]);
}

/// Those at a full line, for ten milliseconds.
#[tokio::test(start_paused = true)]
async fn denials_that_this_process_knows_are_no_replies() {
    let log = Log::capture();
    let store = Flaky::default();
    let waits = policy(hourly(1)).wait_up_to(Duration::from_secs(7_200)).max_waiting(1);
    let limiter = Limiter::new(store.clone(), waits);
    let is_full = async || matches!(limiter.acquire("k").await, Err(AcquireError::LineFull(_)));
    assert!(check(&limiter, 1).await);
    let waiting = limiter.clone();
    tokio::spawn(async move { waiting.acquire("k").await });
    sleep(Duration::from_millis(1)).await;
    assert!(is_full().await);

    store.fail(true);
    let _ = limiter.check("other").await.expect("this process counts");
    assert!(is_full().await);
    for _ in 0..200 {
        let _ = limiter.check("other").await.expect("this process counts");
        sleep(Duration::from_millis(100)).await;
    }
    assert!(log.text().contains("decided=0 failed="), "{}", log.text());
}

#[tokio::test(start_paused = true)]
async fn there_is_one_line_for_each_change_of_state() {
    let log = Log::capture();
    let store = Flaky::default();
    let limiters = [(); 3].map(|()| Limiter::new(store.clone(), policy(hourly(1))));
    for fails in [false, true, false] {
        store.fail(fails);
        for _ in 0..200 {
            for limiter in &limiters {
                check(limiter, 1).await;
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
    let text = log.text();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    for part in [
        "the rate limit store fails; until it replies",
        "decided=0 failed=",
        r#"kind="unreachable" error="the store is away""#,
    ] {
        assert!(lines[0].contains(part), "{text}");
    }
    assert!(
        lines[1].contains("replies again") && lines[1].contains(" failed="),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_share_of_failures_is_one_state_and_a_line_a_minute() {
    let log = Log::capture();
    let store = Flaky::default();
    let limiter = Limiter::new(store.clone(), policy(hourly(1)));
    for _ in 0..100 {
        for number in 0..100 {
            store.fail(number % 25 == 0);
            check(&limiter, 1).await;
        }
        sleep(Duration::from_secs(1)).await;
    }
    let text = log.text();
    assert_eq!(text.lines().count(), 2, "{text}");
    assert_eq!(text.matches("the rate limit store fails a share").count(), 2, "{text}");
}

#[tokio::test]
async fn a_key_of_another_type_is_one_line_with_a_count_and_no_state() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let limiter = Limiter::new(store.clone(), policy(hourly(1)));
    let _: String = redis.command("SET", ["quota:1:log/1h:test:{key=wrong}", "text"]).await;
    let log = Log::capture();
    for round in 0..20 {
        let failed = limiter.check("wrong").await.expect("this process counts");
        assert!(failed.store_error().is_some());
        for caller in 0..25 {
            let key = format!("{round}-{caller}");
            assert!(limiter.check(key).await.expect("Redis replies").is_allowed());
        }
    }
    eventually("it is logged", async || !log.text().is_empty()).await;
    for _ in 0..200 {
        let _ = limiter.check("wrong").await.expect("this process counts");
    }
    let node = store.status().expect("a status").nodes.remove(0);
    assert_eq!((node.state, node.failed, node.failed_by_key), (NodeState::Ok, 220, 220));
    assert!(node.error.is_some_and(|error| error.contains("WRONGTYPE")));

    let text = log.text();
    assert_eq!(text.lines().count(), 1, "{text}");
    let address = format!("node=\"127.0.0.1:{}\"", redis.port());
    for part in [
        "checks of some keys failed",
        " failed=",
        "kind=\"refused\"",
        "WRONGTYPE",
        &address,
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

const MODES: [FailureMode; 4] = [
    FailureMode::Local,
    FailureMode::local_share(1, 2),
    FailureMode::Open,
    FailureMode::Closed,
];

#[tokio::test]
async fn shares_of_a_limit_are_of_one_count_unless_their_rates_differ() {
    for (limit, by_shares) in [
        (Limit::from(SlidingLog::new(60, DAY)), [30, 0, 0, 0, 0]),
        // Those of a bucket have other rates, and so are other counts.
        (TokenBucket::new(60, DAY).into(), [30, 20, 15, 12, 10]),
    ] {
        let store = Flaky::default();
        store.fail(true);
        let shares = (2..=6).map(|of| FailureMode::local_share(1, of));
        let limiters: Vec<_> = shares
            .map(|mode| Limiter::new(store.clone(), Policy::new("p", limit.clone()).failure_mode(mode)))
            .collect();
        let mut admitted = Vec::new();
        for limiter in &limiters {
            let mut count = 0;
            while check(limiter, 1).await {
                count += 1;
            }
            admitted.push(count);
        }
        assert_eq!(admitted, by_shares, "{limit}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_bucket_that_was_used_for_long_has_a_share_at_once() {
    let store = Flaky::default();
    store.fail(true);
    let limiter = |mode| {
        let policy = policy(TokenBucket::per_second(8)).failure_mode(mode);
        Limiter::new(store.clone(), policy)
    };
    let (whole, share) = (limiter(FailureMode::Local), limiter(FailureMode::local_share(1, 4)));
    for _ in 0..60 {
        assert_eq!(admitted(&whole).await, 8);
        advance(Duration::from_secs(1)).await;
    }
    for _ in 0..60 {
        assert_eq!(admitted(&share).await, 2);
        advance(Duration::from_secs(1)).await;
    }

    assert!(admitted(&share).await > 0);
    share.reset("k").await.expect_err("the store fails");
    assert_eq!((admitted(&share).await, admitted(&whole).await), (2, 8));
}

#[tokio::test]
async fn a_reset_ends_counts_and_bans_of_the_process_whatever_its_failure_mode() {
    for limit in [Limit::from(SlidingLog::new(1, DAY)), TokenBucket::new(1, DAY).into()] {
        for mode in MODES {
            let store = Flaky::default();
            let policy = || Policy::new("p", limit.clone()).ban(Ban::by_hand());
            let limiter = Limiter::new(store.clone(), policy());
            let other = Limiter::new(store.clone(), policy().failure_mode(mode));

            store.fail(true);
            assert!(check(&limiter, 1).await);
            assert!(!check(&limiter, 1).await);
            store.fail(false);
            other.reset("k").await.expect("the store replies");
            store.fail(true);
            assert!(check(&limiter, 1).await, "a count: {limit}, {mode}");

            store.fail(false);
            other.ban("k", DAY).await.expect("the store replies");
            other.reset("k").await.expect("the store replies");
            store.fail(true);
            assert!(check(&limiter, 1).await, "a ban: {limit}, {mode}");
        }
    }
}

#[tokio::test]
async fn a_reset_whose_caller_leaves_ends_the_counts_of_the_process() {
    let flaky = Flaky::default();
    let store = Gated::new(flaky.clone());
    let limiter = Limiter::new(store.clone(), Policy::new("p", SlidingLog::new(1, DAY)));
    flaky.fail(true);
    store.open(2);
    assert!(check(&limiter, 1).await);
    assert!(!check(&limiter, 1).await);

    flaky.fail(false);
    let left = timeout(Duration::from_millis(1), limiter.reset("k")).await;
    assert!(left.is_err(), "the gate is closed");
    store.open(1);
    store.drained(PATIENCE).await.expect("the reset goes on");

    flaky.fail(true);
    store.open(1);
    assert!(check(&limiter, 1).await);
}
