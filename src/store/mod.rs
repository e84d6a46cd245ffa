//! Storage backends for counts.
//!
//! [`RedisStore`](crate::RedisStore) shares counts between all replicas of a service. [`MemoryStore`] counts in one process,
//! with the same decisions. [`FailureMode`] defines what happens while a store fails.

mod charge;
mod failover;
#[cfg_attr(not(feature = "_redis"), expect(dead_code, reason = "other stores have no nodes"))]
mod health;
mod memory;
mod outstanding;
mod overrides;
#[cfg(feature = "_redis")]
pub(crate) mod redis;
mod request;
mod response;
mod status;
pub(crate) mod wakes;

use std::{pin::Pin, sync::Arc, time::Duration};

pub(crate) use self::overrides::OverrideError;
pub(crate) use self::{
    failover::Failover,
    outstanding::{LostSettlements, Outstanding, Owed, OwedKind, PerStore},
};
pub use self::{
    failover::FailureMode,
    memory::{ManualClock, MemoryStore, MemoryStoreBuilder},
    outstanding::StoreId,
    overrides::Override,
    request::StoreRequest,
    response::{StoreFuture, StoreResponse},
    status::{NodeState, NodeStatus, StoreStatus},
};
#[cfg(feature = "admin")]
pub(crate) use self::{overrides::LONGEST_OVERRIDE, status::summary};
pub use crate::error::{ErrorKind, StoreError};
pub(crate) use crate::limit::NamedLimit;
/// What requests and responses contain, for the tests of this crate. It may change in any version.
#[doc(hidden)]
pub use {
    self::{
        charge::Charge,
        overrides::Overrides,
        request::Operation,
        response::{ChargeState, Outcome},
    },
    crate::limit::{Arrival, ChargeLine, LeaseId},
};

/// Storage backend for counts: [`RedisStore`](crate::RedisStore) and [`MemoryStore`].
///
/// A store decides a list of requests one after the other. Each decision is atomic and has one instant of one clock.
///
/// An application can implement it for a store around one of these, which counts, delays or fails requests. What requests and
/// responses contain is not part of the public API, so a backend of its own is not possible: what all stores have to promise
/// is tested by the conformance suite of this crate.
///
/// `Arc<S>` and `Box<S>` of a store are stores, and so are `Arc<dyn Store>` and `Box<dyn Store>`, for a backend that is chosen
/// at run time.
///
/// # A store around a store
///
/// It passes the requests on, and has the identity of that store:
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog, store::{Store, StoreFuture, StoreRequest}};
///
/// /// Counts the requests to a store.
/// struct Counted<S>(S, &'static AtomicUsize);
///
/// impl<S: Store> Store for Counted<S> {
///     fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
///         self.1.fetch_add(requests.len(), Ordering::Relaxed);
///         self.0.decide(requests)
///     }
///
///     fn inner(&self) -> Option<&dyn Store> {
///         Some(&self.0)
///     }
/// }
///
/// static REQUESTS: AtomicUsize = AtomicUsize::new(0);
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = Counted(MemoryStore::new(), &REQUESTS);
/// let limiter = Limiter::new(store, Policy::new("mail", SlidingLog::per_hour(3)));
///
/// assert!(limiter.check("42").await?.is_allowed());
/// assert_eq!(REQUESTS.load(Ordering::Relaxed), 1);
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not store counts",
    note = "use `MemoryStore::new()`, or `RedisStore::connect(\"redis://127.0.0.1:6379\").await?`",
    note = "a store is passed by value: its clones share their counts, and an `Arc<dyn Store>` can be cloned too"
)]
pub trait Store: Send + Sync + 'static {
    /// Decides the requests one after the other. A failure is a [`StoreError`]; the [`FailureMode`]s of the policies apply then.
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture;

    /// The store that this one wraps, if it shares the counts of that store. The default is `None`.
    ///
    /// Then this store has the [identity](Self::id), the [status](Self::status) and the
    /// [overrides](crate::Limiter::override_limit) of that store.
    fn inner(&self) -> Option<&dyn Store> {
        None
    }

    /// The identity of the counts: equal for stores that share them, such as clones.
    ///
    /// A policy that nested layers have in common is charged once for a request if they count in the same store. A store without
    /// an identity and an [inner](Self::inner) store shares its counts with no other one.
    fn id(&self) -> Option<StoreId> {
        self.inner()?.id()
    }

    /// Whether each response is [ready](StoreFuture::ready) when [`decide`](Self::decide) returns, as
    /// [`check_now`](crate::LimiterRequest::check_now) needs it. The default is `false`, also with an inner store, whose
    /// responses this one may delay.
    fn replies_at_once(&self) -> bool {
        false
    }

    /// What the store reports about itself to operators, from memory: no call of a server is made for it.
    fn status(&self) -> Option<StoreStatus> {
        self.inner()?.status()
    }

    /// Starts to receive the messages of other processes that wake requests which [wait](crate::Policy::wait_up_to), if the store has
    /// such messages. It is called for each request that waits, and returns at once.
    #[doc(hidden)]
    fn receive_wakes(&self) {
        if let Some(inner) = self.inner() {
            inner.receive_wakes();
        }
    }

    /// The overrides of single keys.
    #[doc(hidden)]
    fn overrides(&self) -> Option<&Overrides> {
        self.inner()?.overrides()
    }

    /// Random bytes that all processes which share the counts have in common: those that came first, or these; `None` of counts of
    /// one process.
    #[doc(hidden)]
    fn shared_secret(&self, known: [u8; 32]) -> Option<SecretFuture> {
        self.inner()?.shared_secret(known)
    }

    /// Waits until the store has confirmed what requests of this process owe to it, for at most this long.
    ///
    /// Refunds, settlements and releases of slots are sent by tasks, which end with their runtime, so a process that ends sends the
    /// last ones only if it waits for them. Call it after the server has shut down:
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tokio::{net::TcpListener, signal::unix::{SignalKind, signal}};
    /// use tower_quota::{RedisStore, store::Store};
    ///
    /// # fn app(store: RedisStore) -> axum::Router { drop(store); axum::Router::new() }
    /// #[tokio::main]
    /// async fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///     let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
    ///     let listener = TcpListener::bind("127.0.0.1:3000").await?;
    ///     let mut terminated = signal(SignalKind::terminate())?;
    ///     axum::serve(listener, app(store.clone()))
    ///         .with_graceful_shutdown(async move { terminated.recv().await; })
    ///         .await?;
    ///
    ///     store.drained(Duration::from_secs(5)).await?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// It is for all layers and limiters on this store, its clones, and stores that return its [`id`](Self::id); stores without
    /// one are waited for together. A request counts from its admission until the store has confirmed what is sent at its end:
    ///
    /// | the request has | it counts until |
    /// | --- | --- |
    /// | [slots](crate::Slots) | their release is confirmed |
    /// | a [receipt](crate::Decision::take_receipt) that was taken | it is settled, refunded or dropped, and a settlement is confirmed |
    /// | a policy with [`refund_if`](crate::Policy::refund_if) or [`learn_from_responses`](crate::Policy::learn_from_responses) | its completion is known, and what follows is confirmed |
    /// | a layer or limiter with [`on_settled`](crate::Limiter::on_settled) | its usage was observed: when the last clone of its `Decision` is dropped |
    /// | a check in flight that lets it [wait](crate::Policy::wait_up_to) | the store has replied, and if its caller has left, the refund is confirmed |
    ///
    /// [Units that were taken ahead](crate::limit#units-that-are-taken-ahead) are waited for until their time ends and what was not
    /// used is returned.
    ///
    /// So what ends meanwhile is waited for too. Servers do not wait for upgraded connections: end the tasks that hold slots of
    /// these before.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tokio::time::{Instant, sleep};
    /// use tower_quota::{Concurrency, Limiter, MemoryStore, Policy, store::Store};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = MemoryStore::new();
    /// let exports = Limiter::new(store.clone(), Policy::new("exports", Concurrency::new(1)));
    ///
    /// let slots = exports.check("42").await?.take_slots();
    /// tokio::spawn(async move {
    ///     sleep(Duration::from_secs(2)).await; // the export
    ///     drop(slots);
    /// });
    /// let undrained = store.drained(Duration::ZERO).await.unwrap_err();
    /// assert_eq!(undrained.to_string(), "the store has not confirmed 0 settlements and 1 release of slots, sent or still to be sent");
    ///
    /// let start = Instant::now();
    /// store.drained(Duration::from_secs(5)).await?;
    /// assert_eq!(start.elapsed().as_secs(), 2);
    /// assert_eq!(exports.peek("42").await?.remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A reset is one of the settlements until the store has replied. Nothing is sent again, and nothing is kept from being sent
    /// later. Stores do not implement this.
    ///
    /// # Errors
    ///
    /// The number of settlements and releases that are not confirmed after this time, and of those that have failed since the
    /// call, in an error of the kind [`Timeout`](ErrorKind::Timeout). What was charged stays charged until it expires, and slots are
    /// free when their leases expire. Earlier failures are in [`lost_settlements`](crate::RateLimitLayer::lost_settlements) and the metrics.
    ///
    /// # Panics
    ///
    /// Its future panics outside of a tokio runtime with a timer, if it has to wait.
    fn drained(&self, within: Duration) -> Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>> {
        Outstanding::of(self.id()).drained(within)
    }
}

/// The future of [`Store::shared_secret`].
#[doc(hidden)]
pub type SecretFuture = Pin<Box<dyn Future<Output = Result<[u8; 32], StoreError>> + Send>>;

/// A pointer to a store, with its identity.
macro_rules! pointer {
    ($pointer:ident, |$own:ident| $id:expr) => {
        impl<S: Store + ?Sized> Store for $pointer<S> {
            fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
                (**self).decide(requests)
            }

            fn inner(&self) -> Option<&dyn Store> {
                (**self).inner()
            }

            fn id(&self) -> Option<StoreId> {
                let $own = self;
                $id
            }

            fn replies_at_once(&self) -> bool {
                (**self).replies_at_once()
            }

            fn receive_wakes(&self) {
                (**self).receive_wakes();
            }

            fn overrides(&self) -> Option<&Overrides> {
                (**self).overrides()
            }

            fn shared_secret(&self, known: [u8; 32]) -> Option<SecretFuture> {
                (**self).shared_secret(known)
            }

            fn status(&self) -> Option<StoreStatus> {
                (**self).status()
            }
        }
    };
}

pointer!(Arc, |own| Some((**own).id().unwrap_or_else(|| StoreId::of(own))));
pointer!(Box, |own| (**own).id());
