//! Settlements of receipts: the estimate of a check is replaced by the actual cost, once, in every store.

use std::{
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use proptest::{
    collection::vec,
    option,
    prelude::{Just, Strategy, TestCaseError, prop_assert, prop_assert_eq, prop_oneof},
};
use tokio::task::JoinSet;
use tower_quota::{
    ClientLibrary, Decision, FixedWindow, Limit, Limiter, MemoryStore, Policy, RedisStore, SlidingCounter, SlidingLog,
    store::{ErrorKind, Operation, Store},
};

use crate::{
    limit::oracles::{WINDOW, holds, limits, micros},
    support::{Bench, Counted, Gated, Proxy, Redis, connected, decide, each_client, eventually, patient, try_decide},
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
    let decision = limiter.check_n("k", estimate).await.expect("the store answers");
    assert!(decision.is_allowed(), "{estimate} fits");
    decision
}

/// What counts for the key `k`, by policy.
async fn counted(limiter: &Limiter) -> Vec<u64> {
    let peeked = limiter.peek("k").await.expect("the store answers");
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
        receipt.settle(actual).await.expect("the store answers");
        assert_eq!(store.calls(), before + 1);
        assert_eq!(counted(&limiter).await, [actual; 3]);
        limiter.reset("k").await.expect("the store answers");
    }

    let receipt = check(&limiter, 10).await.take_receipt();
    let before = store.calls();
    receipt.settle(10).await.expect("the store answers");
    assert_eq!(store.calls(), before, "nothing is to be changed");
}

#[tokio::test]
async fn one_script_call_settles_all_policies_of_a_caller() {
    let redis = Redis::start();
    let policies = ["a", "b", "c"].map(|name| Policy::new(name, SlidingLog::per_hour(QUOTA)));
    let limiter = Limiter::new(connected(patient(), &redis.url()).await, policies);
    let script_calls = async || -> u64 {
        let stats: String = redis.command("INFO", ["commandstats"]).await;
        let mut lines = stats
            .lines()
            .filter_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        let calls = lines.next().and_then(|line| line.split(',').next()).expect("calls");
        calls.parse().expect("a number")
    };

    for (actual, calls) in [(1, 1), (10, 0), (0, 1), (50, 1)] {
        let receipt = check(&limiter, 10).await.take_receipt();
        let before = script_calls().await;
        receipt.settle(actual).await.expect("Redis answers");
        assert_eq!(script_calls().await - before, calls, "{actual} in place of 10");
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
    let decision = limiter.check("k").await.expect("the store answers");

    assert!(decision.take_receipt_of("unknown").is_empty());
    let tokens = decision.take_receipt_of("tokens");
    assert!(decision.take_receipt_of("tokens").is_empty());
    tokens.settle(120).await.expect("the store answers");
    assert_eq!(counted(&limiter).await, [1, 120]);

    let rest = decision.take_receipt();
    rest.refund().await.expect("the store answers");
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
    decision.take_receipt().settle(4).await.expect("the store answers");
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
    refunded.take_receipt().refund().await.expect("the store answers");
    assert_eq!(counted(&limiter).await, [4, 4]);

    let one = check(&limiter, 10).await;
    let tokens = one.take_receipt_of("tokens");
    one.take_receipt().refund().await.expect("the store answers");
    assert_eq!(counted(&limiter).await, [4, 14]);
    drop(tokens);

    let denied = limiter.check_n("k", 60).await.expect("the store answers");
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
                    receipt.settle(actual).await.expect("the store answers");
                    used += actual;
                }
                used
            });
        }
        let used: u64 = tasks.join_all().await.into_iter().sum();
        assert_eq!(counted(&limiter).await, [used], "{limit}");
    }
}

#[tokio::test]
async fn settlements_at_once_count_each_actual_cost_in_memory() {
    settlements_at_once_count_each_actual_cost(MemoryStore::new()).await;
}

#[tokio::test]
async fn settlements_at_once_count_each_actual_cost_in_redis() {
    let redis = Redis::start();
    settlements_at_once_count_each_actual_cost(connected(patient(), &redis.url()).await).await;
}

async fn through(proxy: &Proxy, library: ClientLibrary) -> RedisStore {
    let builder = RedisStore::builder()
        .client_library(library)
        .deadline(Duration::from_millis(500));
    let store = builder.url(&proxy.url()).connect().await.expect("the URL is good");
    replies(&store).await;
    store
}

/// Waits until the store is connected.
async fn replies(store: &RedisStore) {
    eventually("the store replies", async || {
        let limit = SlidingLog::per_hour(QUOTA).into();
        try_decide(store, Operation::Peek, &limit, "other", 1).await.is_ok()
    })
    .await;
}

async fn a_settlement_whose_reply_is_lost_is_made_once(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let store = through(&proxy, library).await;
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
    let store = through(&proxy, library).await;
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

/// A check after a pause, with its estimate, and the actual cost of one of the previous requests.
type Timeline = Vec<(u64, u64, Option<(usize, u64)>)>;

fn timelines(pause: impl Strategy<Value = u64>) -> impl Strategy<Value = Timeline> {
    let estimate = prop_oneof![2 => Just(1), 3 => 1..=10u64];
    let settlement = option::weighted(0.6, (0..4usize, prop_oneof![1 => Just(0), 4 => 0..=12u64]));
    vec((pause, estimate, settlement), 0..30)
}

/// Runs a timeline on a bench, and returns the charges as they would be with the actual costs, with their times.
async fn run(bench: &Bench, limit: &Limit, timeline: Timeline) -> Result<Vec<(u64, u64)>, TestCaseError> {
    let (mut receipts, mut net) = (Vec::new(), Vec::<(u64, u64)>::new());
    for (pause, estimate, settlement) in timeline {
        bench.advance(micros(pause)).await;
        let decision = bench.decision(limit, estimate).await;
        let receipt = decision.take_receipt();
        if !receipt.is_empty() {
            receipts.push(Some((receipt, net.len())));
            net.push((bench.now(), estimate));
        }
        let position = settlement.and_then(|(back, actual)| Some((receipts.len().checked_sub(back + 1)?, actual)));
        if let Some((position, actual)) = position
            && let Some((receipt, charge)) = receipts[position].take()
        {
            let before = bench.peek(limit, 1).await.states()[0].remaining;
            receipt.settle(actual).await.expect("the store answers");
            let after = bench.peek(limit, 1).await.states()[0].remaining;
            let estimate = net[charge].1;
            let (gain, loss) = (after.saturating_sub(before), before.saturating_sub(after));
            prop_assert!(gain <= estimate.saturating_sub(actual), "{before} to {after}");
            prop_assert!(loss <= actual.saturating_sub(estimate), "{before} to {after}");
            net[charge].1 = estimate.min(actual);
            if actual > estimate {
                net.push((bench.now(), actual - estimate));
            }
        }
    }
    Ok(net)
}

/// No more is left than if the actual costs had been charged.
async fn settlements_give_back_no_more_than_was_charged(
    bench: Bench,
    (limit, timeline): (Limit, Timeline),
) -> Result<(), TestCaseError> {
    // The clock of the other timeline starts at the same time.
    let other = Bench::memory_store().await;
    let start = bench.now().max(other.now());
    other.advance(micros(start - other.now())).await;
    bench.advance(micros(start - bench.now())).await;

    let mut net = run(&bench, &limit, timeline).await?;
    net.sort_unstable();
    for (at, cost) in net.into_iter().filter(|(_, cost)| *cost > 0) {
        other.advance(micros(at - other.now())).await;
        other.charge(&limit, cost).await;
    }
    other.advance(micros(bench.now() - other.now())).await;
    let (left, most) = (bench.peek(&limit, 1).await, other.peek(&limit, 1).await);
    let (left, most) = (left.states()[0].remaining, most.states()[0].remaining);
    prop_assert!(left <= most, "{left} of {most} remain under {limit}");
    Ok(())
}

/// While the clock stands, exactly the actual costs count.
async fn settlements_count_the_actual_costs(
    bench: Bench,
    (limit, timeline): (Limit, Timeline),
) -> Result<(), TestCaseError> {
    let net = run(&bench, &limit, timeline).await?;
    let used: u64 = net.into_iter().map(|(_, cost)| cost).sum();
    let left = bench.peek(&limit, 1).await.states()[0].remaining;
    prop_assert_eq!(left, limit.quota().saturating_sub(used), "under {}", limit);
    Ok(())
}

fn pauses() -> impl Strategy<Value = u64> {
    prop_oneof![2 => Just(0), 2 => 0..=20u64, 4 => 0..=WINDOW / 3, 1 => 0..=2 * WINDOW]
}

#[test]
fn settlements_in_memory_give_back_no_more_than_was_charged() {
    let property = settlements_give_back_no_more_than_was_charged;
    holds(3_000, Bench::memory_store(), (limits(), timelines(pauses())), property);
}

#[test]
fn settlements_in_redis_give_back_no_more_than_was_charged() {
    let property = settlements_give_back_no_more_than_was_charged;
    holds(60, Bench::redis_store(), (limits(), timelines(pauses())), property);
}

#[test]
fn settlements_in_memory_count_the_actual_costs() {
    let property = settlements_count_the_actual_costs;
    holds(1_000, Bench::memory_store(), (limits(), timelines(Just(0))), property);
}

#[test]
fn settlements_in_redis_count_the_actual_costs() {
    let property = settlements_count_the_actual_costs;
    holds(60, Bench::redis_store(), (limits(), timelines(Just(0))), property);
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
