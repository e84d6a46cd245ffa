//! The slots that this process holds: their leases, and the task that renews them.

mod lease;
#[cfg(all(test, feature = "shuttle"))]
#[path = "simulation.rs"]
mod threads;

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
};

use http::{Method, StatusCode};
use smallvec::{SmallVec, smallvec};

use super::{
    PolicyDecision,
    completion::caught,
    store_replies::{Responses, receive},
};
use crate::{
    Decision,
    observe::GaugeGuard,
    store::{Operation, Owed, OwedKind, StoreError},
    sync::lock,
};

pub(crate) use self::lease::{Keeper, Lease};

/// The slots that an admitted request holds of policies with a limit of [`Concurrency`](crate::Concurrency). Dropping them
/// releases them.
///
/// [`Decision::take_slots`](crate::Decision::take_slots) returns it, for work that continues after the response, such as an
/// upgraded connection (without it, a layer logs a warning at the first response that opens one):
///
/// ```
/// use std::time::Duration;
/// use axum::{Router, body::Body, extract::Request, routing::get};
/// use http::StatusCode;
/// use tower::ServiceExt;
/// use tower_quota::{Concurrency, Decision, MemoryStore, Policy, RateLimitLayer, key};
///
/// /// In place of `WebSocketUpgrade`: `upgrade.on_upgrade(move |socket| ...)` is used in the same way.
/// async fn connect(decision: Decision) -> StatusCode {
///     let slots = decision.take_slots();
///     tokio::spawn(async move {
///         tokio::time::sleep(Duration::from_secs(60)).await; // the connection
///         drop(slots);
///     });
///     StatusCode::SWITCHING_PROTOCOLS
/// }
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let sockets = Policy::new("sockets", Concurrency::new(1)).key(key::constant("all"));
/// let app = Router::new().route("/", get(connect)).layer(RateLimitLayer::new(MemoryStore::new(), sockets));
///
/// let status = async || Ok::<_, Box<dyn std::error::Error>>(app.clone().oneshot(Request::new(Body::empty())).await?.status());
/// assert_eq!(status().await?, StatusCode::SWITCHING_PROTOCOLS);
/// assert_eq!(status().await?, StatusCode::TOO_MANY_REQUESTS);
///
/// tokio::time::sleep(Duration::from_secs(61)).await;
/// assert_eq!(status().await?, StatusCode::SWITCHING_PROTOCOLS);
/// # Ok(())
/// # }
/// ```
///
/// The release is sent in a task of its own, or is done at once in a [`MemoryStore`](crate::MemoryStore). If the store fails
/// then, or no tokio runtime is there, the slots are free when their leases expire. A process that ends waits for the release with
/// [`Store::drained`](crate::store::Store::drained).
#[must_use = "dropping the slots releases them"]
#[derive(Default)]
pub struct Slots(SmallVec<[Held; 1]>);

/// A lease, and what renews it.
struct Held {
    lease: Arc<Lease>,
    keeper: Arc<Keeper>,
    _counted: GaugeGuard,
}

impl Held {
    /// A lease that was taken, which is renewed from now on.
    fn new(lease: Lease, keeper: &Arc<Keeper>, counted: GaugeGuard) -> Self {
        let (lease, keeper) = (Arc::new(lease), keeper.clone());
        keeper.hold(lease.clone());
        Self {
            lease,
            keeper,
            _counted: counted,
        }
    }
}

/// The release of leases in one place.
type Unsent = (Owed, SmallVec<[Arc<Lease>; 1]>);

impl Slots {
    /// Whether others may hold the slots: their lease expired, and there was no room to take them again when the store was
    /// reached; or no renewal was confirmed for the length of the lease.
    ///
    /// The second is by the clock of this process. A lease that was lost is taken up again as soon as there is room.
    ///
    /// ```
    /// use tower_quota::{Concurrency, Limiter, MemoryStore, Policy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(1)));
    /// let slots = exports.check("42").await?.take_slots().expect("it is admitted");
    /// assert!(!slots.is_lost());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.iter().any(|held| held.lease.is_lost())
    }

    /// Releases the slots, and waits until the store has confirmed it.
    ///
    /// A lease that is being renewed at this moment is released after its renewal, and this does not wait for that. If the
    /// future is dropped before the store has confirmed the release, it continues in a task, as when the slots are dropped.
    ///
    /// ```
    /// use tower_quota::{Concurrency, Limiter, MemoryStore, Policy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(1)));
    /// let decision = exports.check("42").await?;
    /// assert!(!exports.check("42").await?.is_allowed());
    ///
    /// if let Some(slots) = decision.take_slots() {
    ///     slots.release().await?;
    /// }
    /// assert!(exports.check("42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If a store fails. Its slots are free when their leases expire.
    pub async fn release(mut self) -> Result<(), StoreError> {
        self.end().await
    }

    /// Holds those that these policies were admitted with.
    pub(super) fn of(policies: &[PolicyDecision]) -> Self {
        Self(policies.iter().filter_map(PolicyDecision::hold_slots).collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Ends all leases, those in one place in one call.
    fn end(&mut self) -> Responses {
        let mut unconfirmed = Responses::default();
        for (release, leases) in self.ended() {
            unconfirmed.push(Lease::send(Operation::EndLease, &leases), release);
        }
        unconfirmed
    }

    /// Ends all leases, and returns those of each place with their release, which is to be sent.
    fn ended(&mut self) -> SmallVec<[Unsent; 1]> {
        let mut unsent: SmallVec<[Unsent; 1]> = SmallVec::new();
        for Held { lease, keeper, .. } in self.0.drain(..) {
            keeper.forget(&lease);
            // The release of a lease that is being renewed comes after its renewal, which could take the slots again.
            let Some(release) = lease.end() else { continue };
            let shares_store = |(_, leases): &&mut Unsent| Arc::ptr_eq(&leases[0].store, &lease.store);
            match unsent.iter_mut().find(shares_store) {
                Some((releases, leases)) => {
                    releases.join(release);
                    leases.push(lease);
                }
                None => unsent.push((release, smallvec![lease])),
            }
        }
        unsent
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            caught(|| drop(self.end()));
        }
    }
}

/// The names of the policies.
impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Slots ")?;
        f.debug_list()
            .entries(self.0.iter().map(|held| held.lease.policy()))
            .finish()
    }
}

/// Releases the slots of a decision when it is dropped, even if the decision has clones. Slots that a handler has taken stay.
pub(crate) struct Release {
    decision: Decision,
    /// Whether the request is a CONNECT.
    connects: bool,
}

impl Release {
    /// The release of a decision with slots, about a request with this method.
    #[inline]
    pub(crate) fn of(decision: &Decision, method: &Method) -> Option<Self> {
        decision.has_slots().then(|| Self {
            decision: decision.clone(),
            connects: method == Method::CONNECT,
        })
    }

    /// Whether a response with this status opens a connection that outlives it: 101, or 2xx to a CONNECT, which opens a WebSocket
    /// in HTTP/2 (RFC 9110 §9.3.6, RFC 8441 §5).
    #[inline]
    pub(crate) fn outlives(&self, status: StatusCode) -> bool {
        status == StatusCode::SWITCHING_PROTOCOLS || self.connects && status.is_success()
    }

    /// Logs once that the slots of an upgraded connection are about to be released, unless the handler has taken them.
    #[cold]
    pub(crate) fn warn_of_upgrade(&self) {
        let decision = &self.decision.0;
        let (Some(slots), Some(policy)) = (&decision.slots, decision.policies.first()) else {
            return;
        };
        let policies: Vec<String> = lock(slots)
            .0
            .iter()
            .map(|held| held.lease.policy().to_owned())
            .collect();
        if !policies.is_empty() && !policy.context.warned_of_upgrade.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                ?policies,
                "the slots of an upgraded connection are released with the response; keep `Decision::take_slots` until it ends"
            );
        }
    }

    /// Releases the slots now.
    #[cold]
    pub(crate) fn now(&self) {
        drop(self.decision.take_slots());
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        self.now();
    }
}

impl Decision {
    /// Takes the slots that the request holds of policies with a limit of [`Concurrency`](crate::Concurrency), to release them
    /// when work has ended that continues after the response.
    ///
    /// There are slots once for a decision and all its clones; `None` if they were taken or released, or if no such policy
    /// applies. Slots that are not taken are released when the response body ends or, of a decision of a
    /// [`Limiter`](crate::Limiter), when its last clone is dropped.
    ///
    /// ```
    /// use tower_quota::{Concurrency, Limiter, MemoryStore, Policy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(1)));
    ///
    /// let slots = exports.check("42").await?.take_slots();
    /// assert!(slots.is_some());
    /// assert!(!exports.check("42").await?.is_allowed());
    ///
    /// drop(slots);
    /// assert!(exports.check("42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn take_slots(&self) -> Option<Slots> {
        let mut slots = Slots::default();
        self.for_each_layer(&mut |layer| {
            if let Some(untaken) = &layer.0.slots {
                slots.0.append(&mut lock(untaken).0);
            }
        });
        (!slots.is_empty()).then_some(slots)
    }

    /// Whether the decision of this layer or limiter has slots, which may have been taken.
    #[inline]
    fn has_slots(&self) -> bool {
        self.0.slots.is_some()
    }
}

/// Releases the slots that the store may have taken for these policies, since the outcome is unknown. A call that has timed out may be
/// executed later than its release; the breaker bounds how many there are.
#[cold]
pub(crate) fn release_unknown(policies: &[PolicyDecision], has_timed_out: bool) {
    for (release, leases) in Slots::of(policies).ended() {
        receive(Lease::send(Operation::EndLease, &leases), move |response| {
            release.end(response);
            if has_timed_out && response.as_ref().is_err_and(StoreError::has_no_reply) {
                Lease::end_later(leases);
            }
        });
    }
}

impl PolicyDecision {
    /// Holds the slots that it was admitted with, if it takes slots.
    fn hold_slots(&self) -> Option<Held> {
        let made_at = self.lease.filter(|_| self.denial.is_none())?;
        let charge = self.counted().after_check(self.counted().cost);
        let release = self.context.outstanding.owe(OwedKind::Release);
        let lease = Lease::new(self.store().clone(), charge, made_at, release)?;
        Some(Held::new(lease, &self.context.keeper, self.hold()))
    }
}

#[cfg(all(test, feature = "_redis"))]
mod tests {
    use std::{sync::atomic::AtomicUsize, time::Duration};

    use crate::{
        Concurrency, FailureMode, Limiter, Policy,
        store::{ErrorKind, Store, StoreError, StoreFuture, StoreRequest},
    };

    use super::*;

    /// A store whose breaker is open.
    #[derive(Clone, Default)]
    struct Open(Arc<AtomicUsize>);

    impl Store for Open {
        fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
            self.0.fetch_add(1, Ordering::Relaxed);
            StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "it is open").recorded()))
        }
    }

    /// A release would fail too, and count as another failed check.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_released_of_a_check_that_was_not_sent() {
        let store = Open::default();
        let jobs = Policy::new("jobs", Concurrency::new(1)).failure_mode(FailureMode::Open);
        let decision = Limiter::new(store.clone(), jobs).check("a").await;
        assert!(decision.is_ok_and(|decision| decision.store_error().is_some()));
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(store.0.load(Ordering::Relaxed), 1);
    }
}
