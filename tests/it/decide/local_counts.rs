//! What a process counts while the store fails.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::timeout;
use tower_quota::{
    Ban, FailureMode, Limit, Limiter, MemoryStore, Policy, SlidingLog, TokenBucket,
    store::{ErrorKind, Store, StoreError, StoreFuture, StoreId, StoreRequest},
};

use crate::support::{Gated, PATIENCE};

const DAY: Duration = Duration::from_secs(86_400);

/// A store that can be switched off.
#[derive(Clone, Default)]
struct Switched {
    inner: MemoryStore,
    is_off: Arc<AtomicBool>,
}

impl Switched {
    fn switch(&self, on: bool) {
        self.is_off.store(!on, Relaxed);
    }
}

impl Store for Switched {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        match self.is_off.load(Relaxed) {
            true => StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "it is off"))),
            false => self.inner.decide(requests),
        }
    }

    fn id(&self) -> Option<StoreId> {
        self.inner.id()
    }
}

async fn is_allowed(limiter: &Limiter) -> bool {
    limiter.check("k").await.expect("the process decides").is_allowed()
}

const MODES: [FailureMode; 4] = [
    FailureMode::Local,
    FailureMode::local_share(1, 2),
    FailureMode::Open,
    FailureMode::Closed,
];

#[tokio::test]
async fn shares_of_a_limit_are_of_one_count() {
    for limit in [Limit::from(SlidingLog::new(60, DAY)), TokenBucket::new(60, DAY).into()] {
        let store = Switched::default();
        store.switch(false);
        let shares = (2..=6).map(|of| FailureMode::local_share(1, of));
        let limiters: Vec<_> = shares
            .map(|mode| Limiter::new(store.clone(), Policy::new("p", limit.clone()).failure_mode(mode)))
            .collect();
        let mut admitted = Vec::new();
        for limiter in &limiters {
            let mut count = 0;
            while is_allowed(limiter).await {
                count += 1;
            }
            admitted.push(count);
        }
        assert_eq!(admitted, [30, 0, 0, 0, 0], "{limit}");
    }
}

#[tokio::test]
async fn a_reset_ends_counts_and_bans_of_the_process_whatever_its_failure_mode() {
    for limit in [Limit::from(SlidingLog::new(1, DAY)), TokenBucket::new(1, DAY).into()] {
        for mode in MODES {
            let store = Switched::default();
            let policy = || Policy::new("p", limit.clone()).ban(Ban::by_hand());
            let limiter = Limiter::new(store.clone(), policy());
            let other = Limiter::new(store.clone(), policy().failure_mode(mode));

            store.switch(false);
            assert!(is_allowed(&limiter).await);
            assert!(!is_allowed(&limiter).await);
            store.switch(true);
            other.reset("k").await.expect("the store is on");
            store.switch(false);
            assert!(is_allowed(&limiter).await, "a count: {limit}, {mode}");

            store.switch(true);
            other.ban("k", DAY).await.expect("the store is on");
            other.reset("k").await.expect("the store is on");
            store.switch(false);
            assert!(is_allowed(&limiter).await, "a ban: {limit}, {mode}");
        }
    }
}

#[tokio::test]
async fn a_reset_whose_caller_leaves_ends_the_counts_of_the_process() {
    let switched = Switched::default();
    let store = Gated::new(switched.clone());
    let limiter = Limiter::new(store.clone(), Policy::new("p", SlidingLog::new(1, DAY)));
    switched.switch(false);
    store.open(2);
    assert!(is_allowed(&limiter).await);
    assert!(!is_allowed(&limiter).await);

    switched.switch(true);
    let left = timeout(Duration::from_millis(1), limiter.reset("k")).await;
    assert!(left.is_err(), "the gate is closed");
    store.open(1);
    store.drained(PATIENCE).await.expect("the reset goes on");

    switched.switch(false);
    store.open(1);
    assert!(is_allowed(&limiter).await);
}
