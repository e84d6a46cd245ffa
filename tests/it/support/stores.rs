use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::Semaphore;
use tower_quota::store::{
    ChargeState, ErrorKind, Outcome, Store, StoreError, StoreFuture, StoreRequest, StoreResponse,
};

/// A store whose answers are never ready at once.
pub(crate) struct Later<S>(pub(crate) S);

impl<S: Store> Store for Later<S> {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let answer = self.0.decide(requests);
        StoreFuture::pending(async {
            tokio::task::yield_now().await;
            answer.await
        })
    }
}

/// A store whose answers wait for the test.
#[derive(Clone)]
pub(crate) struct Gated<S> {
    store: S,
    gate: Arc<Semaphore>,
}

impl<S> Gated<S> {
    pub(crate) fn new(store: S) -> Self {
        Self {
            store,
            gate: Arc::new(Semaphore::new(0)),
        }
    }

    /// Lets this many answers out.
    pub(crate) fn open(&self, answers: usize) {
        self.gate.add_permits(answers);
    }
}

impl<S: Store> Store for Gated<S> {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let answer = self.store.decide(requests);
        let gate = self.gate.clone();
        StoreFuture::pending(async move {
            gate.acquire().await.expect("the gate stays").forget();
            answer.await
        })
    }
}

/// A store that counts how often it is asked.
#[derive(Clone)]
pub(crate) struct Counted<S> {
    store: S,
    asked: Arc<AtomicUsize>,
}

impl<S> Counted<S> {
    pub(crate) fn new(store: S) -> Self {
        Self {
            store,
            asked: Arc::default(),
        }
    }

    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl<S: Store> Store for Counted<S> {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.store.decide(requests)
    }
}

/// A store that never answers.
#[derive(Clone, Default)]
pub(crate) struct Broken {
    asked: Arc<AtomicUsize>,
}

impl Broken {
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Store for Broken {
    fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
        self.asked.fetch_add(1, Ordering::Relaxed);
        StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "the store is away")))
    }
}

/// A store that always says the same: one verdict for each charge. It is 2027-01-15 08:00:00 UTC.
pub(crate) struct Says(pub(crate) Vec<ChargeState>);

impl Says {
    /// So much left, and all of it after so many milliseconds.
    pub(crate) fn admitted(remaining: u64, reset_after: u64) -> Self {
        Self(vec![ChargeState::new(
            remaining,
            None,
            Duration::from_millis(reset_after),
        )])
    }

    /// Come back after this.
    pub(crate) fn denied(wait: Duration) -> Self {
        Self(vec![ChargeState::new(0, Some(wait), wait)])
    }
}

impl Store for Says {
    fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
        let allowed = self.0.iter().all(|verdict| verdict.retry_after.is_none());
        let outcome = Outcome::new(allowed, self.0.iter().copied());
        StoreFuture::ready(Ok(StoreResponse::new(Duration::from_secs(1_800_000_000), [outcome])))
    }
}
