//! Where counts live.
//!
//! [`RedisStore`](crate::RedisStore) shares them between all replicas of a service; [`MemoryStore`] keeps them in one
//! process, and decides exactly alike. Both are a [`Store`]. [`FailureMode`] is what happens while a store fails.

mod failover;
mod fold;
mod memory;
#[cfg(any(feature = "fred", feature = "redis"))]
pub(crate) mod redis;
#[cfg(any(feature = "fred", feature = "redis"))]
mod uncounted;

use std::{
    borrow::Cow,
    error::Error,
    fmt,
    hash::{BuildHasher, Hasher, RandomState},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use smallvec::SmallVec;

pub use self::{
    failover::FailureMode,
    memory::{MemoryStore, MemoryStoreBuilder},
};

pub(crate) use self::failover::{Failover, LocalCharge};

use crate::{Key, Limit, limit::MAX_QUOTA, policy::Quota};

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

/// What is asked of a store: an operation on one charge or several.
#[derive(Clone, Copy, Debug)]
pub struct StoreRequest<'a> {
    operation: Operation,
    charges: &'a [Charge<'a>],
}

impl<'a> StoreRequest<'a> {
    /// An operation on these charges; several on one key of one policy are added up.
    #[must_use]
    pub fn new(operation: Operation, charges: &'a [Charge<'a>]) -> Self {
        Self { operation, charges }
    }

    /// What to do.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// What to do it to.
    #[must_use]
    pub fn charges(&self) -> &'a [Charge<'a>] {
        self.charges
    }
}

/// What a request does to its charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Counts all charges if all fit, else none.
    Check,
    /// Counts all charges, whether they fit or not; later requests pay.
    Charge,
    /// Says what [`Check`](Self::Check) would, and counts nothing.
    Peek,
    /// Forgets all that was counted.
    Reset,
    /// Takes back what was counted at that time of the store's clock, as far as it still counts.
    Refund {
        /// The server time of the answer that admitted it.
        admitted_at: Duration,
    },
}

/// A cost that a request puts on one key of one policy.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    policy: &'a str,
    /// Of the name of the policy, by [`hash_name`].
    policy_hash: u64,
    limit: &'a Limit,
    key: &'a Key,
    cost: u64,
}

impl<'a> Charge<'a> {
    /// `cost`, which is at least 1 and within the limit, on the `key` of the policy of this name.
    ///
    /// To charge regardless it may be above the limit; more than 999,999,999,999,999 counts as that.
    #[must_use]
    pub fn new(policy: &'a str, limit: &'a Limit, key: &'a Key, cost: u64) -> Self {
        Self {
            policy,
            policy_hash: hash_name(policy),
            limit,
            key,
            cost: cost.clamp(1, MAX_QUOTA),
        }
    }

    /// The same for a quota, which knows its hash already.
    #[inline]
    pub(crate) fn on(quota: &'a Quota, key: &'a Key, cost: u64) -> Self {
        Self {
            policy: &quota.name,
            policy_hash: quota.name_hash,
            limit: &quota.limit,
            key,
            cost: cost.clamp(1, MAX_QUOTA),
        }
    }

    /// Where to look for it in a table.
    ///
    /// Callers choose keys, so these are hashed with a secret. They do not choose names of policies; and algorithms are few,
    /// so that they need no part in it.
    #[inline]
    fn hash(&self, hasher: &RandomState) -> u64 {
        let mut hasher = hasher.build_hasher();
        hasher.write(self.key.as_bytes());
        hasher.finish() ^ self.policy_hash
    }

    /// Whether both are stored in one place.
    fn same_key(&self, other: &Charge<'_>) -> bool {
        self.key == other.key && self.policy == other.policy && self.limit.algorithm() == other.limit.algorithm()
    }

    /// The name of the policy.
    #[must_use]
    pub fn policy(&self) -> &'a str {
        self.policy
    }

    /// The limit that the policy has now.
    #[must_use]
    pub fn limit(&self) -> &'a Limit {
        self.limit
    }

    /// Whom it counts against.
    pub fn key(&self) -> &'a Key {
        self.key
    }

    /// How much is counted.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }
}

/// 64 bits of the name of a policy (FNV-1a).
pub(crate) fn hash_name(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The answer of a store, ready or on its way; a future either way.
#[must_use]
pub enum StoreFuture {
    /// The store knew at once.
    Ready(Result<StoreResponse, StoreError>),
    /// The store asks somebody else.
    Pending(Pin<Box<dyn Future<Output = Result<StoreResponse, StoreError>> + Send>>),
}

impl Future for StoreFuture {
    type Output = Result<StoreResponse, StoreError>;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Ready(answer) => {
                let taken = std::mem::replace(answer, Err(StoreError::new(ErrorKind::Protocol, "polled again")));
                Poll::Ready(taken)
            }
            Self::Pending(answer) => answer.as_mut().poll(cx),
        }
    }
}

impl fmt::Debug for StoreFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready(answer) => f.debug_tuple("Ready").field(answer).finish(),
            Self::Pending(_) => f.write_str("Pending(..)"),
        }
    }
}

/// What a store decided.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreResponse {
    /// The time of the decisions by the clock of the store, since the Unix epoch.
    pub server_time: Duration,
    /// One for each request, in their order.
    pub outcomes: SmallVec<[Outcome; 1]>,
}

/// What a store decided about one request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// Whether the request may pass.
    pub allowed: bool,
    /// One for each charge, in their order.
    pub states: SmallVec<[ChargeState; 1]>,
}

/// How one charge stands after the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChargeState {
    /// How much more weight fits.
    pub remaining: u64,
    /// How long until the charge will fit, if it is one that does not.
    pub retry_after: Option<Duration>,
    /// How long until nothing counts anymore.
    pub reset_after: Duration,
    /// When it was decided, if not at the time of the answer: nodes of a cluster have clocks of their own.
    pub decided_at: Option<Duration>,
}

impl StoreResponse {
    /// An answer at this time.
    pub fn new(server_time: Duration, outcomes: impl IntoIterator<Item = Outcome>) -> Self {
        Self {
            server_time,
            outcomes: outcomes.into_iter().collect(),
        }
    }
}

impl Outcome {
    /// An outcome with a verdict for each charge.
    pub fn new(allowed: bool, states: impl IntoIterator<Item = ChargeState>) -> Self {
        Self {
            allowed,
            states: states.into_iter().collect(),
        }
    }
}

impl ChargeState {
    /// A verdict.
    #[must_use]
    pub fn new(remaining: u64, retry_after: Option<Duration>, reset_after: Duration) -> Self {
        Self {
            remaining,
            retry_after,
            reset_after,
            decided_at: None,
        }
    }

    /// The same verdict, decided at this time of the clock of the store.
    #[must_use]
    pub fn at(mut self, decided_at: Duration) -> Self {
        self.decided_at = Some(decided_at);
        self
    }
}

/// A store did not answer.
///
/// It says nothing about the caller: what happens to the request is the policy's [`FailureMode`].
/// Its text holds neither keys nor credentials.
#[derive(Clone)]
pub struct StoreError {
    kind: ErrorKind,
    message: Cow<'static, str>,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

/// Why a store did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There was no reply within the deadline. The request may have been counted.
    Timeout,
    /// There is no connection, or it was lost. What was already sent may have been counted.
    Unreachable,
    /// The server answered with an error, such as `OOM` or `NOPERM`.
    Refused,
    /// The server answered with something that is no answer.
    Protocol,
}

impl StoreError {
    /// An error with a message.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
        }
    }

    /// The same error with a cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(Arc::from(source.into()));
        self
    }

    /// Why.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreError")
            .field("kind", &self.kind)
            .field("message", &self.message)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn Error + 'static))
    }
}
