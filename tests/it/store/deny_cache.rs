//! The cache of denials.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use proptest::{
    collection::vec,
    option,
    prelude::{Just, Strategy, TestCaseError, prop_assert, prop_assert_eq, prop_oneof},
    sample::select,
    test_runner::{Config, TestRunner},
};
use tokio::time::{Instant, advance, pause, resume, sleep};
use tower_quota::{
    Decision, Key, Limit, Limiter, Policy, RedisStore, SlidingLog, TokenBucket,
    store::{Charge, Operation, Outcome, Store, StoreRequest},
};

use crate::support::{Bench, Clock, Redis, connected, patient};

async fn store(redis: &Redis, deny_cache: bool) -> RedisStore {
    connected(patient().deny_cache(deny_cache), &redis.url()).await
}

/// The number of commands that Redis has run, in scripts too.
async fn commands(redis: &Redis) -> u64 {
    let calls = redis.all_calls().await.into_iter();
    calls.filter(|(name, _)| name != "info").map(|(_, calls)| calls).sum()
}

async fn check(limiter: &Limiter) -> Decision {
    limiter.check("k").await.expect("Redis answers")
}

/// What checks decide, and the commands so far, when what they have learned is known for half a second more, which takes a moment.
async fn known_denial<T>(redis: &Redis, checks: impl AsyncFn() -> T) -> (T, u64) {
    commands(redis).await; // connects
    for _ in 0..60 {
        let asked = Instant::now();
        let (decided, before) = (checks().await, commands(redis).await);
        if asked.elapsed() < Duration::from_millis(400) {
            return (decided, before);
        }
        sleep(Duration::from_secs(1)).await;
    }
    panic!("each reply of Redis comes late");
}

#[tokio::test]
async fn a_cached_denial_needs_no_redis_and_its_wait_runs_down() {
    let redis = Redis::start();
    let limiter = Limiter::new(store(&redis, true).await, Policy::new("test", SlidingLog::per_hour(1)));
    assert!(check(&limiter).await.is_allowed());
    let (mut denied, before) = known_denial(&redis, async || check(&limiter).await).await;
    assert!(!denied.is_allowed());
    pause();
    for _ in 0..1_000 {
        advance(Duration::from_micros(500)).await;
        let again = check(&limiter).await;
        assert!(!again.is_allowed());
        assert!(again.server_time() > denied.server_time());
        assert!(again.retry_after() < denied.retry_after());
        denied = again;
    }
    resume();
    assert_eq!(commands(&redis).await, before);
}

#[tokio::test]
async fn denials_of_checks_that_are_made_at_once_are_cached() {
    let redis = Redis::start();
    let limiter = Limiter::new(store(&redis, true).await, Policy::new("test", SlidingLog::per_hour(1)));
    // The first is a call of its own, the second another one, and the rest one together.
    let all_at_once = async || {
        let check = async |key| limiter.check(key).await.expect("Redis answers").is_allowed();
        <[bool; 4]>::from(tokio::join!(check("j"), check("k"), check("l"), check("m")))
    };
    assert_eq!(all_at_once().await, [true; 4]);
    let (denied, before) = known_denial(&redis, &all_at_once).await;
    assert_eq!(denied, [false; 4]);
    pause();
    assert_eq!(all_at_once().await, [false; 4]);
    resume();
    assert_eq!(commands(&redis).await, before);
}

#[tokio::test]
async fn without_the_cache_each_check_is_a_call() {
    let redis = Redis::start();
    let limiter = Limiter::new(store(&redis, false).await, Policy::new("test", SlidingLog::per_hour(1)));
    assert!(check(&limiter).await.is_allowed());

    let before = commands(&redis).await;
    for _ in 0..20 {
        assert!(!check(&limiter).await.is_allowed());
    }
    assert!(commands(&redis).await - before >= 20);
}

#[tokio::test]
async fn a_request_after_the_wait_of_its_denial_is_admitted() {
    let (redis, clock) = (Redis::start(), Clock::new());
    clock.write_to(&redis).await;
    let store = clock.redis_store_with_a_deny_cache(&redis).await;
    let policy = Policy::new("test", TokenBucket::per_second(20).burst(1));
    let limiter = Limiter::new(store, policy);
    assert!(check(&limiter).await.is_allowed());
    for _ in 0..20 {
        let wait = check(&limiter).await.retry_after().expect("it is denied");
        // A check that comes too early changes nothing for the next one.
        assert!(!check(&limiter).await.is_allowed());
        clock.advance(wait);
        clock.write_to(&redis).await;
        pause();
        advance(wait).await;
        resume();
        assert!(check(&limiter).await.is_allowed());
    }
}

#[tokio::test]
async fn a_reset_clears_cached_denials_at_once() {
    let redis = Redis::start();
    let limiter = Limiter::new(store(&redis, true).await, Policy::new("test", SlidingLog::per_hour(1)));
    for _ in 0..20 {
        assert!(check(&limiter).await.is_allowed());
        assert!(!check(&limiter).await.is_allowed());
        limiter.reset("k").await.expect("Redis answers");
    }
}

#[tokio::test]
async fn a_refund_clears_cached_denials_of_all_policy_lists_at_once() {
    let redis = Redis::start();
    let store = store(&redis, true).await;
    let alone = Limiter::new(store.clone(), Policy::new("test", SlidingLog::per_hour(1)));
    let pair = [
        Policy::new("test", SlidingLog::per_hour(1)),
        Policy::new("other", SlidingLog::per_hour(100)),
    ];
    let both = Limiter::new(store, pair.to_vec());
    for _ in 0..20 {
        let decision = check(&alone).await;
        assert!(decision.is_allowed());
        assert!(!check(&both).await.is_allowed());
        assert!(!check(&both).await.is_allowed());
        let receipt = decision.take_receipt();
        receipt.refund().await.expect("Redis answers");

        let decision = check(&both).await;
        assert!(decision.is_allowed());
        let receipt = decision.take_receipt();
        receipt.refund().await.expect("Redis answers");
    }
}

#[tokio::test]
async fn a_settlement_below_the_estimate_clears_cached_denials_at_once() {
    let redis = Redis::start();
    let policies = ["test", "other"].map(|name| Policy::new(name, SlidingLog::per_hour(100)));
    let limiter = Limiter::new(store(&redis, true).await, policies);
    for used in 0..20 {
        let decision = limiter
            .request("k")
            .cost(100 - used)
            .check()
            .await
            .expect("Redis answers");
        assert!(decision.is_allowed());
        assert!(!check(&limiter).await.is_allowed());
        assert!(!check(&limiter).await.is_allowed());
        let receipt = decision.take_receipt();
        receipt.settle(1).await.expect("Redis answers");
    }
}

/// A request after a pause, and the refund of an earlier one.
#[derive(Clone, Debug)]
struct Request {
    after: Duration,
    cost: u64,
    refunds: Option<usize>,
}

fn histories() -> impl Strategy<Value = (Vec<Limit>, Vec<Request>)> {
    let limits = [
        "3/s",
        "3/s precision 4",
        "token-bucket 3/s",
        "token-bucket 7/s burst 2",
        "sliding-counter 3/s",
        "fixed-window 3/s",
        "fixed-window 3/s aligned",
    ];
    let limits = limits.map(|limit| limit.parse::<Limit>().expect("a limit"));
    let limited = select(limits.to_vec());
    let after = prop_oneof![5 => Just(0), 3 => 0..=50_000u64, 2 => 0..=400_000u64];
    let refunds = option::weighted(0.1, 0..4usize);
    let request = (after, 1..=3u64, refunds).prop_map(|(after, cost, refunds)| Request {
        after: Duration::from_micros(after),
        cost,
        refunds,
    });
    (vec(limited, 1..=2), vec(request, 20..50))
}

/// The charges of a request, one for each limit.
fn charges(limits: &[Limit], key: &Key, cost: u64) -> Vec<Charge> {
    let limits = limits.iter().zip(["first", "second"]);
    limits
        .map(|(limit, policy)| Charge::new(policy, limit, key, cost))
        .collect()
}

async fn decide(store: &dyn Store, operation: Operation, charges: &[Charge]) -> Outcome {
    let response = store.decide(&[StoreRequest::new(operation, charges)]).await;
    response.expect("Redis answers").outcomes()[0].clone()
}

fn longest_wait(outcome: &Outcome) -> Option<Duration> {
    outcome.states().iter().filter_map(|state| state.retry_after).max()
}

/// The number of denials that needed no call of the script.
static CACHED: AtomicU64 = AtomicU64::new(0);

/// Sends each request through a store with the cache and through one without, on a key of each.
async fn a_cached_denial_denies_nothing_that_redis_would_admit(
    bench: Bench,
    (limits, requests): (Vec<Limit>, Vec<Request>),
) -> Result<(), TestCaseError> {
    let cached = bench.store_with_a_deny_cache().await;
    let stores: [&dyn Store; 2] = [&cached, &bench.store];
    static KEYS: AtomicU64 = AtomicU64::new(0);
    let number = KEYS.fetch_add(1, Ordering::Relaxed);
    let keys = ["cached", "sent"].map(|name| Key::from(format!("{name} {number}")));
    let before = bench.script_calls().await;
    let (mut calls, mut admitted) = (0, Vec::new());
    for request in requests {
        bench.advance(request.after).await;
        pause();
        advance(request.after).await;
        resume();

        let [from_cache, sent] = [0, 1].map(|which| (stores[which], charges(&limits, &keys[which], request.cost)));
        let from_cache = decide(from_cache.0, Operation::Check, &from_cache.1).await;
        let sent = decide(sent.0, Operation::Check, &sent.1).await;
        calls += 2;
        prop_assert_eq!(from_cache.allowed, sent.allowed, "{:?}: {:?}", request, sent);
        // A cached denial of a lower cost has the wait of that cost.
        let (wait, most) = (longest_wait(&from_cache), longest_wait(&sent));
        prop_assert!(wait <= most, "{wait:?} is longer than {most:?}");
        if sent.allowed {
            admitted.push((Duration::from_micros(bench.now()), request.cost));
        }

        let refunded = request.refunds.and_then(|back| admitted.len().checked_sub(back + 1));
        if let Some(position) = refunded {
            let (admitted_at, cost) = admitted.remove(position);
            for (store, key) in stores.iter().zip(&keys) {
                for charge in charges(&limits, key, cost) {
                    decide(*store, Operation::Refund { admitted_at }, &[charge]).await;
                    calls += 1;
                }
            }
        }
    }
    let sent = bench.script_calls().await - before;
    CACHED.fetch_add(u64::saturating_sub(calls, sent), Ordering::Relaxed);
    Ok(())
}

#[test]
fn cached_denials_deny_nothing_that_redis_would_admit() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let bench = runtime.block_on(Bench::redis_store());
    let result = TestRunner::new(Config::with_cases(60)).run(&histories(), |history| {
        let bench = bench.with_a_fresh_key();
        runtime.block_on(a_cached_denial_denies_nothing_that_redis_would_admit(bench, history))
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(CACHED.load(Ordering::Relaxed) > 100, "few denials are cached");
}

#[tokio::test]
async fn a_cached_denial_is_for_requests_of_which_no_cost_is_lower() {
    let redis = Redis::start();
    let policies = ["a", "b"].map(|name| Policy::new(name, SlidingLog::per_hour(9)));
    let limiter = Limiter::new(store(&redis, true).await, policies);
    let check = async |a, b| {
        let request = limiter.request("k").cost_of("a", a).cost_of("b", b);
        request.check().await.expect("Redis answers").is_allowed()
    };
    assert!(check(5, 5).await);
    assert!(!check(5, 1).await);
    assert!(check(1, 2).await, "`a` has room for 4");
}
