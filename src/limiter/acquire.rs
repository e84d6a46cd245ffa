use std::{error::Error, fmt, pin::Pin, time::Duration};

use super::{Limiter, LimiterRequest};
use crate::{
    Decision, Denied, Key,
    store::{Operation, StoreError, Waiting},
};

/// Waiting.
impl Limiter {
    /// Waits until the cost of the policies fits, and counts it; the default cost is 1.
    ///
    /// It waits for at most [`max_wait`](Acquire::max_wait), by default for the longest waits of the
    /// [policies](crate::Policy::wait_up_to); without either it does not wait. A call that would wait longer is denied at once,
    /// with the wait that it would take. Calls of one key are admitted in their order, across all replicas that share the
    /// store, and each is one check; those that wait for [slots](crate::Concurrency#waiting-for-a-slot) check again when these may be
    /// free. If the future is dropped before, the call is refunded, and leaves the queue.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tokio::time::Instant;
    /// use tower_quota::{AcquireError, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), AcquireError> {
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_second(10)));
    ///
    /// let start = Instant::now();
    /// for _ in 0..30 {
    ///     let _permit = mails.acquire("smtp").max_wait(Duration::from_secs(5)).await?;
    /// }
    /// assert_eq!(start.elapsed().as_secs(), 2);
    ///
    /// let denied = mails.acquire("smtp").max_wait(Duration::from_millis(500)).await.unwrap_err();
    /// assert_eq!(denied.to_string(), "rate limit exceeded: mails; try again in 1 s");
    /// # Ok(())
    /// # }
    /// ```
    pub fn acquire(&self, key: impl Into<Key>) -> Acquire<'_> {
        self.request(key).acquire()
    }
}

/// A call of [`Limiter::acquire`], which starts when it is awaited.
#[derive(Debug)]
#[must_use = "nothing is counted unless it is awaited"]
pub struct Acquire<'a> {
    pub(super) request: LimiterRequest<'a>,
    pub(super) max_wait: Option<Duration>,
}

impl Acquire<'_> {
    /// The longest wait, in place of those of the policies: in microseconds, rounded down, and zero for what fits at once.
    ///
    /// Policies with a limit that [cannot wait](crate::Policy::wait_up_to), such as [`FixedWindow`](crate::FixedWindow), must
    /// have room at once.
    pub fn max_wait(mut self, longest: Duration) -> Self {
        self.max_wait = Some(longest);
        self
    }

    /// The cost, in place of that of the policies.
    ///
    /// A cost above the limit is denied; a cost of 0 is admitted and not counted.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{AcquireError, Limiter, MemoryStore, Policy, TokenBucket};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), AcquireError> {
    /// let rows = Limiter::new(MemoryStore::new(), Policy::new("rows", TokenBucket::per_second(1_000)));
    /// let _permit = rows.acquire("42").cost(600).await?;
    /// let permit = rows.acquire("42").cost(600).max_wait(Duration::from_secs(1)).await?;
    /// assert_eq!(permit.decision().delay(), Duration::from_millis(200));
    /// # Ok(())
    /// # }
    /// ```
    pub fn cost(mut self, cost: u64) -> Self {
        self.request = self.request.cost(cost);
        self
    }
}

impl<'a> IntoFuture for Acquire<'a> {
    type Output = Result<Permit, AcquireError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { request, max_wait } = self;
        let wait = move |waiting: Waiting| match max_wait {
            Some(longest) => waiting.at_most(longest),
            None => waiting,
        };
        Box::pin(async move {
            let decision = request.perform(Operation::Wait, wait).await?;
            decision.require()?;
            Ok(Permit::new(decision))
        })
    }
}

/// The reason why [`Limiter::acquire`] does not admit a call.
///
/// ```
/// use tower_quota::{AcquireError, Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), AcquireError> {
/// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(1)));
/// let _permit = mails.acquire("42").await?;
///
/// let AcquireError::Denied(denied) = mails.acquire("42").await.unwrap_err() else {
///     panic!("a memory store does not fail");
/// };
/// assert_eq!(denied.decision().retry_after().map(|wait| wait.as_secs()), Some(3_600));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AcquireError {
    /// A limit denies it: the wait would be too long, or too many wait.
    Denied(Denied),
    /// The store fails, and a policy is [`Closed`](crate::FailureMode::Closed).
    Store(StoreError),
}

impl From<Denied> for AcquireError {
    fn from(denied: Denied) -> Self {
        Self::Denied(denied)
    }
}

impl From<StoreError> for AcquireError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied(denied) => denied.fmt(f),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl Error for AcquireError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Denied(denied) => denied.source(),
            Self::Store(error) => error.source(),
        }
    }
}

/// The permission to continue, of a request that [`Limiter::acquire`](crate::Limiter::acquire) has admitted.
///
/// With a limit of [`Concurrency`](crate::Concurrency) it holds the slots of the request: dropping it, and each clone of its
/// decision, releases them.
///
/// ```
/// use tower_quota::{Concurrency, Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::AcquireError> {
/// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(3)));
/// let permit = mails.acquire("42").await?;
/// assert_eq!(permit.decision().remaining(), 2);
///
/// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(1)));
/// let permit = exports.acquire("42").await?;
/// assert!(exports.acquire("42").await.is_err());
/// drop(permit);
/// assert!(exports.acquire("42").await.is_ok());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "dropping the permit releases its slots"]
pub struct Permit {
    decision: Decision,
}

impl Permit {
    pub(super) fn new(decision: Decision) -> Self {
        Self { decision }
    }

    /// The decision, which is [allowed](Decision::is_allowed). Its numbers are those of the check, before the wait.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }
}

/// The status of the denial or of the failure.
#[cfg(feature = "tonic")]
impl From<AcquireError> for tonic::Status {
    fn from(error: AcquireError) -> Self {
        match error {
            AcquireError::Denied(denied) => denied.into(),
            AcquireError::Store(error) => error.into(),
        }
    }
}
