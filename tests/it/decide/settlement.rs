//! Settlements of receipts: the estimate of a check is replaced by the actual cost, once, in every store.

use std::{
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use tokio::task::JoinSet;
use tower_quota::{
    ClientLibrary, Decision, FixedWindow, Limit, Limiter, ManualClock, MemoryStore, Policies, Policy, RedisStore,
    RedisStoreBuilder, SlidingCounter, SlidingLog, TokenBucket,
    store::{ErrorKind, Operation, Store},
};

use crate::support::{
    Counted, Gated, Proxy, Redis, connected, decide, each_client, each_store, eventually, less_patient, patient,
    try_decide,
};

each_client! {
    a_settlement_whose_reply_is_lost_is_made_once
    a_settlement_without_a_connection_changes_nothing
}

#[tokio::test]
async fn a_refund_goes_on_when_its_caller_leaves() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let gated = Gated::new(store.clone());
    let policy = || Policy::new("mails", SlidingLog::per_hour(1));
    let (limiter, direct) = (Limiter::new(gated.clone(), policy()), Limiter::new(store, policy()));
    gated.open(1);
    let receipt = check(&limiter, 1).await.take_receipt();

    // The gate is closed: the store has sent nothing when the future is dropped.
    let mut refund = Box::pin(receipt.refund());
    assert!(
        refund
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    );
    drop(refund);
    gated.open(1);
    eventually("the refund arrives", async || {
        direct.peek("k").await.is_ok_and(|decision| decision.remaining() == 1)
    })
    .await;
}

const QUOTA: u64 = 1_000;

/// Limits whose counts do not shrink within a test.
fn hourly() -> [Limit; 4] {
    [
        SlidingLog::per_hour(QUOTA).into(),
        SlidingLog::per_hour(QUOTA).precision(60).into(),
        SlidingCounter::per_day(QUOTA).into(),
        FixedWindow::per_hour(QUOTA).into(),
    ]
}

async fn check(limiter: &Limiter, estimate: u64) -> Decision {
    let decision = limiter
        .request("k")
        .cost(estimate)
        .check()
        .await
        .expect("the store replies");
    assert!(decision.is_allowed(), "{estimate} fits");
    decision
}

/// What counts for the key `k`, by policy.
async fn counted(limiter: &Limiter) -> Vec<u64> {
    let peeked = limiter.peek("k").await.expect("the store replies");
    peeked
        .policies()
        .map(|policy| policy.limit() - policy.remaining())
        .collect()
}

#[tokio::test]
async fn one_call_settles_all_policies() {
    let store = Counted::new(MemoryStore::new());
    let policies = ["a", "b", "c"].map(|name| Policy::new(name, SlidingLog::per_hour(QUOTA)));
    let limiter = Limiter::new(store.clone(), policies);
    for actual in [1, 50] {
        let receipt = check(&limiter, 10).await.take_receipt();
        let before = store.calls();
        receipt.settle(actual).await.expect("the store replies");
        assert_eq!(store.calls(), before + 1);
        assert_eq!(counted(&limiter).await, [actual; 3]);
        limiter.reset("k").await.expect("the store replies");
    }

    let receipt = check(&limiter, 10).await.take_receipt();
    let before = store.calls();
    receipt.settle(10).await.expect("the store replies");
    assert_eq!(store.calls(), before, "nothing is to be changed");
}

/// One number cannot be the actual cost of both.
#[tokio::test]
async fn policies_that_were_charged_different_costs_are_not_settled_as_one() {
    let policies = ["requests", "tokens"].map(|name| Policy::new(name, SlidingLog::per_hour(QUOTA)));
    let limiter = Limiter::new(MemoryStore::new(), policies);
    let check = async || {
        let decision = limiter.request("k").cost_of("tokens", 10).check().await;
        decision.expect("the store replies")
    };

    let error = check().await.take_receipt().settle(7).await.expect_err("they differ");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("`take_receipt_of(policy)`"), "{error}");
    assert_eq!(counted(&limiter).await, [1, 10]);

    let decision = check().await;
    let tokens = decision.take_receipt_of("tokens").settle(7);
    tokens.await.expect("the store replies");
    assert_eq!(counted(&limiter).await, [2, 17]);
    decision.take_receipt().settle(1).await.expect("it is of one policy");
    assert_eq!(counted(&limiter).await, [2, 17]);
    check().await.take_receipt().refund().await.expect("the store replies");
    assert_eq!(counted(&limiter).await, [2, 17]);
}

#[tokio::test]
async fn one_script_call_settles_all_policies_of_a_caller() {
    let redis = Redis::start();
    let policies = ["a", "b", "c"].map(|name| Policy::new(name, SlidingLog::per_hour(QUOTA)));
    let limiter = Limiter::new(connected(patient(), &redis.url()).await, policies);
    for (actual, calls) in [(1, 1), (10, 0), (0, 1), (50, 1)] {
        let receipt = check(&limiter, 10).await.take_receipt();
        let before = redis.script_calls().await;
        receipt.settle(actual).await.expect("Redis answers");
        assert_eq!(redis.script_calls().await - before, calls, "{actual} in place of 10");
    }
    assert_eq!(counted(&limiter).await, [61; 3]);
}

#[tokio::test]
async fn the_receipt_of_one_policy_leaves_those_of_the_others() {
    let policies = [
        Policy::new("requests", SlidingLog::per_minute(60)),
        Policy::new("tokens", SlidingLog::per_minute(QUOTA)).cost(300),
    ];
    let limiter = Limiter::new(MemoryStore::new(), policies);
    let decision = limiter.check("k").await.expect("the store replies");

    assert!(decision.take_receipt_of("unknown").is_empty());
    let tokens = decision.take_receipt_of("tokens");
    assert!(decision.take_receipt_of("tokens").is_empty());
    tokens.settle(120).await.expect("the store replies");
    assert_eq!(counted(&limiter).await, [1, 120]);

    let rest = decision.take_receipt();
    rest.refund().await.expect("the store replies");
    assert_eq!(counted(&limiter).await, [0, 120]);
    assert!(decision.take_receipt().is_empty());
    assert!(decision.take_receipt_of("requests").is_empty());
}

#[tokio::test]
async fn a_decision_is_settled_or_refunded_once_without_its_receipt() {
    let policies = [
        Policy::new("requests", SlidingLog::per_minute(60)),
        Policy::new("tokens", SlidingLog::per_minute(QUOTA)),
    ];
    let limiter = Limiter::new(MemoryStore::new(), policies);
    let decision = check(&limiter, 10).await;
    decision.take_receipt().settle(4).await.expect("the store replies");
    assert_eq!(counted(&limiter).await, [4, 4]);
    decision
        .clone()
        .take_receipt()
        .settle(7)
        .await
        .expect("nothing is left to settle");
    decision
        .take_receipt()
        .refund()
        .await
        .expect("nothing is left to refund");
    assert!(decision.take_receipt().is_empty());
    assert_eq!(counted(&limiter).await, [4, 4]);

    let refunded = check(&limiter, 10).await;
    refunded.take_receipt().refund().await.expect("the store replies");
    assert_eq!(counted(&limiter).await, [4, 4]);

    let one = check(&limiter, 10).await;
    let tokens = one.take_receipt_of("tokens");
    one.take_receipt().refund().await.expect("the store replies");
    assert_eq!(counted(&limiter).await, [4, 14]);
    drop(tokens);

    let denied = limiter.request("k").cost(60).check().await.expect("the store replies");
    denied.take_receipt().refund().await.expect("nothing was charged");
    assert_eq!(counted(&limiter).await, [4, 14]);
}

/// Settles by many tasks at once, and counts what was used.
async fn settlements_at_once_count_each_actual_cost(store: impl Store + Clone) {
    for limit in hourly() {
        let name = format!("p-{}", fastrand::u32(..));
        let limiter = Limiter::new(store.clone(), Policy::new(name, limit.clone()));
        let mut tasks = JoinSet::new();
        for _ in 0..8 {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let mut used = 0;
                for _ in 0..10 {
                    let actual = fastrand::u64(0..=11);
                    let decision = check(&limiter, 5).await;
                    let receipt = decision.take_receipt();
                    receipt.settle(actual).await.expect("the store replies");
                    used += actual;
                }
                used
            });
        }
        let used: u64 = tasks.join_all().await.into_iter().sum();
        assert_eq!(counted(&limiter).await, [used], "{limit}");
    }
}

each_store! { with crate::support::Unclocked: settlements_at_once_count_each_actual_cost }

async fn through(proxy: &Proxy, builder: RedisStoreBuilder) -> RedisStore {
    let store = connected(builder, &proxy.url()).await;
    replies(&store).await;
    store
}

/// Waits until the store is connected.
async fn replies(store: &RedisStore) {
    eventually("the store replies", async || {
        let limit = SlidingLog::per_hour(QUOTA).into();
        try_decide(store, Operation::Peek, &limit, "other", 1).await
    })
    .await;
}

async fn a_settlement_whose_reply_is_lost_is_made_once(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let store = through(&proxy, patient().client_library(library)).await;
    let limit = SlidingLog::per_hour(QUOTA);
    let limiter = Limiter::new(store.clone(), Policy::new("test", limit));
    let direct = connected(patient(), &redis.url()).await;

    let mut total = 0;
    for actual in [100, 3, 0] {
        let receipt = check(&limiter, 10).await.take_receipt();
        proxy.cut_before_the_next_answer();
        let error = receipt.settle(actual).await.expect_err("the reply is lost");
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert!(proxy.has_cut());
        replies(&store).await;
        total += actual;
        let left = decide(&direct, Operation::Peek, &limit.into(), "k", 1).await.states()[0].remaining;
        assert_eq!(QUOTA - left, total);
    }
}

async fn a_settlement_without_a_connection_changes_nothing(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let store = through(&proxy, less_patient().client_library(library)).await;
    let limiter = Limiter::new(store.clone(), Policy::new("test", SlidingLog::per_hour(QUOTA)));
    let receipts = [check(&limiter, 10).await, check(&limiter, 10).await];

    proxy.partition();
    for (decision, actual) in receipts.into_iter().zip([100, 0]) {
        let receipt = decision.take_receipt();
        receipt.settle(actual).await.expect_err("Redis is cut off");
    }
    proxy.heal();
    replies(&store).await;
    assert_eq!(counted(&limiter).await, [20]);
}

#[tokio::test]
async fn a_settlement_that_is_not_polled_changes_nothing() {
    let limiter = Limiter::new(
        Arc::new(MemoryStore::new()),
        Policy::new("test", SlidingLog::per_hour(QUOTA)),
    );
    let receipt = check(&limiter, 10).await.take_receipt();
    drop(receipt.settle(0));
    assert_eq!(counted(&limiter).await, [10]);
}

/// As the docs of the bucket have it: the tokens that came since then are first those that stay charged.
#[tokio::test]
async fn a_settlement_of_a_bucket_returns_what_has_not_come_since_what_stays() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let limiter = Limiter::new(store, Policy::new("p", TokenBucket::per_second(1).burst(10)));
    let estimated = limiter.request("k").cost(5).check().await.expect("in memory");
    clock.advance(Duration::from_secs(1));
    let _ = limiter.check("k").await.expect("in memory");
    clock.advance(Duration::from_secs(3));
    let remaining = async || limiter.peek("k").await.expect("in memory").remaining();
    assert_eq!(remaining().await, 8);
    estimated.take_receipt().settle(3).await.expect("in memory");
    assert_eq!(remaining().await, 9);
}

/// Entries of charges above the limit are merged, and this one is not above it.
#[tokio::test]
async fn a_settlement_of_a_request_with_an_override_is_by_its_limit() {
    let (clock, millis) = (ManualClock::new(), Duration::from_millis(100));
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let window = Duration::from_secs(1_000);
    let policies = Policies::from_toml("policies.p.limit = 'sliding-log 1/1000s'").expect("a policy");
    let limiter = Limiter::new(store, policies.unkeyed("p").expect("a policy"));
    let set = limiter.override_limit("p", "k", SlidingLog::new(100, window), 2 * window);
    set.await.expect("it is valid");
    let estimated = [check(&limiter, 1).await, check(&limiter, 1).await];
    for decision in estimated {
        clock.advance(millis);
        decision.take_receipt().settle(2).await.expect("in memory");
    }
    clock.advance(window - millis);
    assert_eq!(limiter.peek("k").await.expect("in memory").remaining(), 99);
}
