use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::Semaphore;
use tower_quota::store::{ErrorKind, Reply, Request, Store, StoreError};

/// A store whose answers are never ready at once.
pub(crate) struct Later<S>(pub(crate) S);

impl<S: Store> Store for Later<S> {
    fn decide(&self, requests: &[Request<'_>]) -> Reply {
        let answer = self.0.decide(requests);
        Reply::Pending(Box::pin(async {
            tokio::task::yield_now().await;
            answer.await
        }))
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
    fn decide(&self, requests: &[Request<'_>]) -> Reply {
        let answer = self.store.decide(requests);
        let gate = self.gate.clone();
        Reply::Pending(Box::pin(async move {
            gate.acquire().await.expect("the gate stays").forget();
            answer.await
        }))
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
    fn decide(&self, requests: &[Request<'_>]) -> Reply {
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
    fn decide(&self, _: &[Request<'_>]) -> Reply {
        self.asked.fetch_add(1, Ordering::Relaxed);
        Reply::Ready(Err(StoreError::new(ErrorKind::Unreachable, "the store is away")))
    }
}
