//! What a memory store forgets, and when.

use std::time::Duration;

use tower_quota::{Limit, Limiter, MemoryStore, Policy, SlidingLog, store::Operation};

use crate::support::{Clock, decide};

fn hourly() -> Limit {
    SlidingLog::per_hour(1).into()
}

#[tokio::test]
async fn expired_keys_make_room_first() {
    let clock = Clock::new();
    let now = clock.clone();
    let store = MemoryStore::with_capacity(1_000).clock(move || Duration::from_micros(now.now()));
    let short = Limit::from(SlidingLog::per_second(1));
    for key in 0..900 {
        decide(&store, Operation::Check, &short, &format!("short {key}"), 1).await;
    }
    clock.advance(Duration::from_secs(1));
    for key in 0..1_000 {
        decide(&store, Operation::Check, &hourly(), &key.to_string(), 1).await;
    }

    assert_eq!(store.evictions(), 0);
    assert!(store.len() <= 1_000, "{}", store.len());
    for key in 0..1_000 {
        assert!(
            !decide(&store, Operation::Peek, &hourly(), &key.to_string(), 1)
                .await
                .allowed,
            "{key}"
        );
    }
}

#[tokio::test]
async fn a_full_store_forgets_what_is_restored_soonest_and_counts_it() {
    let clock = Clock::new();
    let now = clock.clone();
    let store = MemoryStore::with_capacity(100).clock(move || Duration::from_micros(now.now()));
    for key in 0..110 {
        decide(&store, Operation::Check, &hourly(), &key.to_string(), 1).await;
        clock.advance(Duration::from_secs(1));
    }

    assert_eq!((store.len(), store.evictions()), (100, 10));
    for key in 0..110 {
        let forgotten = decide(&store, Operation::Peek, &hourly(), &key.to_string(), 1)
            .await
            .allowed;
        assert_eq!(forgotten, key < 10, "{key}");
    }
}

#[tokio::test]
async fn a_key_that_comes_to_a_full_store_is_kept() {
    let store = MemoryStore::with_capacity(100);
    let daily = Limiter::new(store.clone(), Policy::new("daily", SlidingLog::per_day(1)));
    for key in 0..100_u64 {
        assert!(daily.check(key).await.unwrap().is_allowed());
    }

    let login = Limiter::new(store.clone(), Policy::new("login", SlidingLog::per_minute(1)));
    assert!(login.check("42").await.unwrap().is_allowed());
    assert!(!login.check("42").await.unwrap().is_allowed());
    assert_eq!((store.len(), store.evictions()), (100, 1));
}

#[tokio::test]
async fn keys_that_come_and_go_leave_nothing() {
    let store = MemoryStore::new();
    let limiter = Limiter::new(store.clone(), Policy::new("mail", SlidingLog::per_hour(1)));
    for key in 0..10_000_u64 {
        assert!(limiter.check(key).await.unwrap().is_allowed());
        limiter.reset(key).await.unwrap();
    }
    assert!(store.is_empty());
}

#[tokio::test]
async fn denied_and_peeked_keys_are_not_stored() {
    let store = MemoryStore::new();
    let limiter = Limiter::new(store.clone(), Policy::new("mail", SlidingLog::per_hour(1)));
    assert!(limiter.peek("a").await.unwrap().is_allowed());
    assert!(!limiter.check_n("b", 2).await.unwrap().is_allowed());
    assert!(store.is_empty());
}

#[tokio::test]
async fn a_clock_at_the_end_of_time_panics_nowhere() {
    for now in [0, 1, u64::MAX] {
        let store = MemoryStore::new().clock(move || Duration::from_micros(now));
        for limit in [
            "sliding-log 2/h",
            "sliding-counter 2/h",
            "fixed-window 2/h aligned",
            "token-bucket 2/h",
        ] {
            let limit = limit.parse().unwrap();
            let allowed = decide(&store, Operation::Check, &limit, "k", 2).await.allowed;
            assert!(
                allowed && !decide(&store, Operation::Check, &limit, "k", 1).await.allowed,
                "{limit} at {now}"
            );
        }
    }
}
