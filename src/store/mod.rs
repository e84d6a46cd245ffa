//! Where counts live.
//!
//! [`RedisStore`](crate::RedisStore) shares them between all replicas of a service; [`MemoryStore`] keeps them in one
//! process, and decides exactly alike. Both are a [`Store`]. [`FailureMode`] is what happens while a store fails.

mod error;
mod failover;
mod fold;
mod health;
mod memory;
mod quota;
#[cfg(any(feature = "fred", feature = "redis"))]
pub(crate) mod redis;
mod request;
mod response;
#[cfg(any(feature = "fred", feature = "redis"))]
mod uncounted;

use std::sync::Arc;

pub use self::{
    error::{ErrorKind, StoreError},
    failover::FailureMode,
    memory::{MemoryStore, MemoryStoreBuilder},
    request::{Charge, Operation, StoreRequest},
    response::{ChargeState, Outcome, StoreFuture, StoreResponse},
};
pub(crate) use self::{
    failover::{Failover, LocalCharge},
    quota::Quota,
};

/// Where counts live.
///
/// A store decides each request on its own and at one instant of one clock: a request is admitted if all of its charges
/// fit, and only then is anything counted. A request without charges is admitted, and so is a charge of
/// [`Limit::Unlimited`]. A check of [`Limit::DenyAll`] is denied and has no `retry_after`. Nothing is counted for these.
///
/// A store that wraps another one passes the requests on and changes the [`StoreFuture`]:
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog, store::{StoreFuture, StoreRequest, Store, StoreId}};
///
/// /// Counts how often a store is asked.
/// #[derive(Debug)]
/// struct Counted<S>(S, &'static AtomicUsize);
///
/// impl<S: Store> Store for Counted<S> {
///     fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
///         self.1.fetch_add(requests.len(), Ordering::Relaxed);
///         self.0.decide(requests)
///     }
///
///     fn id(&self) -> Option<StoreId> {
///         self.0.id()
///     }
/// }
///
/// static ASKED: AtomicUsize = AtomicUsize::new(0);
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = Counted(MemoryStore::new(), &ASKED);
/// let limiter = Limiter::new(store, Policy::new("mail", SlidingLog::per_hour(3)));
///
/// assert!(limiter.check("42").await?.is_allowed());
/// assert_eq!(ASKED.load(Ordering::Relaxed), 1);
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not store counts",
    note = "use `MemoryStore::new()`, or `RedisStore::connect(\"redis://127.0.0.1:6379\").await?`"
)]
pub trait Store: Send + Sync + 'static {
    /// Decides the requests one after the other.
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture;

    /// The identity of the counts: equal for stores that share them, such as clones.
    ///
    /// A policy that nested layers have in common is charged once for a request if they count in the same store. A store
    /// that wraps another one returns the identity of that store. The default is `None`: such a store shares its counts with
    /// no other one.
    fn id(&self) -> Option<StoreId> {
        None
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        (**self).decide(requests)
    }

    fn id(&self) -> Option<StoreId> {
        Some((**self).id().unwrap_or_else(|| StoreId::of(self)))
    }
}

/// Identity of the counts of a [`Store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoreId(usize);

impl StoreId {
    /// The identity of a store whose clones share this, for as long as one of them exists.
    #[must_use]
    pub fn of<T: ?Sized>(shared: &Arc<T>) -> Self {
        Self(Arc::as_ptr(shared).addr())
    }
}
