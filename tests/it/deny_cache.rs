//! The cache of denials.

use std::time::Duration;

use tokio::time::{advance, pause, resume};
use tower_quota::{Decision, Limiter, Policy, RedisStore, SlidingLog, TokenBucket};

use crate::support::{Clock, Redis, connected, patient};

async fn store(redis: &Redis, deny_cache: bool) -> RedisStore {
    connected(patient().deny_cache(deny_cache), &redis.url()).await
}

/// The number of commands that Redis has run, in scripts too.
async fn commands(redis: &Redis) -> u64 {
    let stats: String = redis.command("INFO", ["commandstats"]).await;
    let counts = stats.lines().filter_map(|line| {
        let (name, counts) = line.split_once(":calls=")?;
        let counts: u64 = counts.split(',').next()?.parse().ok()?;
        (!name.ends_with("info")).then_some(counts)
    });
    counts.sum()
}

async fn check(limiter: &Limiter) -> Decision {
    limiter.check("k").await.expect("Redis answers")
}

#[tokio::test]
async fn a_cached_denial_needs_no_redis_and_its_wait_runs_down() {
    let redis = Redis::start();
    let limiter = Limiter::new(store(&redis, true).await, Policy::new("test", SlidingLog::per_hour(1)));
    assert!(check(&limiter).await.is_allowed());
    let mut denied = check(&limiter).await;
    assert!(!denied.is_allowed());

    let before = commands(&redis).await;
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
    assert_eq!(all_at_once().await, [false; 4]);

    let before = commands(&redis).await;
    assert_eq!(all_at_once().await, [false; 4]);
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
    let store = clock.redis_store(&redis).await;
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
        let receipt = decision.take_receipt().expect("it was charged");
        receipt.refund().await.expect("Redis answers");

        let decision = check(&both).await;
        assert!(decision.is_allowed());
        let receipt = decision.take_receipt().expect("it was charged");
        receipt.refund().await.expect("Redis answers");
    }
}

#[tokio::test]
async fn a_settlement_below_the_estimate_clears_cached_denials_at_once() {
    let redis = Redis::start();
    let policies = ["test", "other"].map(|name| Policy::new(name, SlidingLog::per_hour(100)));
    let limiter = Limiter::new(store(&redis, true).await, policies);
    for used in 0..20 {
        let decision = limiter.check_n("k", 100 - used).await.expect("Redis answers");
        assert!(decision.is_allowed());
        assert!(!check(&limiter).await.is_allowed());
        assert!(!check(&limiter).await.is_allowed());
        let receipt = decision.take_receipt().expect("it was charged");
        receipt.settle(1).await.expect("Redis answers");
    }
}
