use std::{error::Error, fmt, time::Duration};

use super::{Limiter, LimiterRequest};
use crate::{
    Decision, Denial, Denied, Key, PolicyDecision,
    decide::turn_key,
    store::{Operation, StoreError},
};

/// Waiting.
impl Limiter {
    /// Waits until the cost of the policies fits, and counts it; the default cost is 1.
    ///
    /// It waits for at most [`wait_up_to`](crate::LimiterRequest::wait_up_to), by default for the longest waits of the
    /// [policies](crate::Policy::wait_up_to); without either it does not wait. A call that would wait longer is denied at once,
    /// with the wait that it would take. Calls of one key are admitted in the order of arrival, across all replicas that share the
    /// store. If the future is dropped before, nothing is counted.
    ///
    /// The decision is [allowed](Decision::is_allowed), and has the numbers of the check that has admitted the call. With a limit of
    /// [`Concurrency`](crate::Concurrency) it holds the slots of the call: dropping it and its clones releases them.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tokio::time::Instant;
    /// use tower_quota::{AcquireError, Concurrency, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), AcquireError> {
    /// let mails = Policy::new("mails", SlidingLog::per_second(10)).wait_up_to(Duration::from_secs(5));
    /// let mails = Limiter::new(MemoryStore::new(), mails);
    ///
    /// let start = Instant::now();
    /// for _ in 0..30 {
    ///     let _permit = mails.acquire("smtp").await?;
    /// }
    /// assert_eq!(start.elapsed().as_secs(), 2);
    ///
    /// let denied = mails.request("smtp").wait_up_to(Duration::from_millis(500)).acquire().await.unwrap_err();
    /// assert_eq!(denied.to_string(), "rate limit exceeded: mails; try again in 1 s");
    ///
    /// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(1)));
    /// let permit = exports.acquire("42").await?;
    /// assert!(exports.acquire("42").await.is_err());
    /// drop(permit);
    /// assert!(exports.acquire("42").await.is_ok());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If a limit denies it, or the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with timers, if it has to wait.
    pub async fn acquire(&self, key: impl Into<Key>) -> Result<Decision, AcquireError> {
        self.request(key).acquire().await
    }
}

/// Waiting.
impl LimiterRequest<'_> {
    /// The longest wait of [`acquire`](Self::acquire), in place of those of the [policies](crate::Policy::wait_up_to): in microseconds,
    /// rounded down, and zero for what fits at once.
    ///
    /// Other operations do not wait, and refuse it; so they do with [`fair_by`](Self::fair_by) and [`priority`](Self::priority).
    ///
    /// Requests of policies without waits that set none are not behind those that wait, and what they release wakes none of them
    /// earlier than within a second. Where some requests wait, give the policy a [wait](crate::Policy::wait_up_to).
    pub fn wait_up_to(mut self, longest: Duration) -> Self {
        self.wait_up_to = Some(longest);
        self
    }

    /// Requests of this key take turns with those of other keys while they wait in this process, as with
    /// [`Policy::fair_by`](crate::Policy::fair_by).
    pub fn fair_by(mut self, key: impl Into<Key>) -> Self {
        self.turn_key = turn_key(&key.into());
        self
    }

    /// The request waits before those of lower priority in this process, as with [`Policy::priority_fn`](crate::Policy::priority_fn). The
    /// default is 0.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Waits until the costs fit, and counts them, as [`Limiter::acquire`] does.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Limiter, MemoryStore, Policy, TokenBucket};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::AcquireError> {
    /// let policies = [("requests", 10), ("tokens", 100)].map(|(name, n)| Policy::new(name, TokenBucket::per_second(n)));
    /// let model = Limiter::new(MemoryStore::new(), policies);
    ///
    /// let request = |tokens| model.request("42").cost_of("tokens", tokens).wait_up_to(Duration::from_secs(1));
    /// let _first = request(100).acquire().await?;
    /// let second = request(50).acquire().await?;
    /// assert_eq!(second.waited(), Duration::from_millis(500));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If a limit denies it, and as [`check`](Self::check).
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with timers, if it has to wait.
    pub async fn acquire(self) -> Result<Decision, AcquireError> {
        Ok(self.perform(Operation::Wait).await?.require()?)
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
///
/// [`Debug`](fmt::Debug) is the message and the cause, as `main` prints the error.
#[derive(Clone)]
#[non_exhaustive]
pub enum AcquireError {
    /// A limit denies it: the wait would be too long, or does not help.
    Denied(Denied),
    /// A limit denies it, and [too much waits](crate::Policy::max_waiting) for it already in this process.
    LineFull(Denied),
    /// The store fails, and a policy is [`Closed`](crate::FailureMode::Closed); or, of the kind
    /// [`Invalid`](crate::store::ErrorKind::Invalid), the limiter has no policy or plan of a name that was given.
    Store(StoreError),
}

impl From<Denied> for AcquireError {
    fn from(denied: Denied) -> Self {
        let is_full = |policy: &PolicyDecision| policy.denial() == Some(Denial::LineFull);
        if denied.decision().policies().any(is_full) {
            return Self::LineFull(denied);
        }
        Self::Denied(denied)
    }
}

impl From<StoreError> for AcquireError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl AcquireError {
    fn error(&self) -> &(dyn Error + 'static) {
        match self {
            Self::Denied(denied) | Self::LineFull(denied) => denied,
            Self::Store(error) => error,
        }
    }
}

impl_error!(AcquireError, error => error.error(), error.error().source());

#[cfg(feature = "tonic")]
impl From<AcquireError> for tonic::Status {
    fn from(error: AcquireError) -> Self {
        match error {
            AcquireError::Denied(denied) | AcquireError::LineFull(denied) => denied.into(),
            AcquireError::Store(error) => error.into(),
        }
    }
}

/// The response of the denial or of the failure.
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for AcquireError {
    fn into_response(self) -> axum::response::Response {
        match self {
            Self::Denied(denied) | Self::LineFull(denied) => denied.into_response(),
            Self::Store(error) => error.into_response(),
        }
    }
}
