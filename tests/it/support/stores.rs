use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::Semaphore;
use tower_quota::{
    MemoryStore,
    store::{ChargeState, ErrorKind, Outcome, Store, StoreError, StoreFuture, StoreId, StoreRequest, StoreResponse},
};

/// Wraps a store, and shares its counts.
#[derive(Clone)]
pub(crate) struct Wrapped<S>(pub(crate) S);

impl<S: Store> Store for Wrapped<S> {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        self.0.decide(requests)
    }

    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.0)
    }
}

/// A store that never returns a ready response.
#[derive(Clone)]
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

/// A store that holds its responses until the test opens the gate.
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

    /// Lets this many responses pass.
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

    fn id(&self) -> Option<StoreId> {
        self.store.id()
    }
}

/// A store that counts its calls.
#[derive(Clone)]
pub(crate) struct Counted<S> {
    store: S,
    calls: Arc<AtomicUsize>,
}

impl<S> Counted<S> {
    pub(crate) fn new(store: S) -> Self {
        Self {
            store,
            calls: Arc::default(),
        }
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

impl<S: Store> Store for Counted<S> {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.store.decide(requests)
    }

    fn id(&self) -> Option<StoreId> {
        self.store.id()
    }
}

/// A store that always fails.
#[derive(Clone, Default)]
pub(crate) struct Broken {
    calls: Arc<AtomicUsize>,
}

impl Broken {
    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Store for Broken {
    fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
        self.calls.fetch_add(1, Ordering::Relaxed);
        StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "the store is away")))
    }
}

/// A store that fails while the test sets it to fail.
#[derive(Clone, Default)]
pub(crate) struct Flaky {
    store: MemoryStore,
    fails: Arc<AtomicBool>,
}

impl Flaky {
    pub(crate) fn fail(&self, fails: bool) {
        self.fails.store(fails, Ordering::Relaxed);
    }
}

impl Store for Flaky {
    fn id(&self) -> Option<StoreId> {
        self.store.id()
    }

    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        match self.fails.load(Ordering::Relaxed) {
            true => Broken::default().decide(requests),
            false => self.store.decide(requests),
        }
    }
}

/// A store that always returns these states, one for each charge, at 2027-01-15 08:00:00 UTC.
pub(crate) struct Fixed(pub(crate) Vec<ChargeState>);

impl Fixed {
    /// Admitted, with so much left, and a full quota after so many milliseconds.
    pub(crate) fn admitted(remaining: u64, reset_after: u64) -> Self {
        Self(vec![ChargeState::new(
            remaining,
            None,
            Duration::from_millis(reset_after),
        )])
    }

    /// Denied, with this wait.
    pub(crate) fn denied(wait: Duration) -> Self {
        Self(vec![ChargeState::new(0, Some(wait), wait)])
    }
}

impl Store for Fixed {
    fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
        let allowed = self.0.iter().all(|verdict| verdict.retry_after.is_none());
        let outcome = Outcome::new(allowed, self.0.iter().copied());
        StoreFuture::ready(Ok(StoreResponse::new(Duration::from_secs(1_800_000_000), [outcome])))
    }
}
