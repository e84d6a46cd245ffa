use std::sync::Arc;

use crate::{Decision, Headers, Limiter, decision::response::ResponseFormat, observe::Observer, store::StoreError};

/// Responses of handlers.
///
/// They apply to [`Decision::headers`](crate::Decision::headers) and [`Decision::require`](crate::Decision::require).
impl Limiter {
    /// Sets the format of responses to requests that the limiter denies.
    ///
    /// The default is [`Negotiated`](crate::decision::response::Negotiated), as of a [layer](crate::RateLimitLayer::format). See
    /// [`Denied::response_to`](crate::Denied::response_to) for an example.
    pub fn format(mut self, format: impl ResponseFormat) -> Self {
        self.policies
            .change_context(|context| context.format = Arc::new(format));
        self
    }

    /// Sets the rate limit fields of decisions.
    ///
    /// The default is [`Headers::Draft08`].
    ///
    /// ```
    /// use tower_quota::{Headers, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = Policy::new("mails", SlidingLog::per_hour(3));
    /// let mails = Limiter::new(MemoryStore::new(), mails).headers(Headers::Draft06);
    ///
    /// let headers = mails.check("42").await?.headers();
    /// assert_eq!(headers["ratelimit-limit"], "3");
    /// assert_eq!(headers["ratelimit-remaining"], "2");
    /// # Ok(())
    /// # }
    /// ```
    pub fn headers(mut self, headers: Headers) -> Self {
        self.policies.change_context(|context| context.fields.dialect = headers);
        self
    }
}

/// Callbacks.
impl Limiter {
    /// Observes each decision of [`check`](Self::check), [`check_n`](Self::check_n), [`check_once`](Self::check_once),
    /// [`charge`](Self::charge) and [`acquire`](Self::acquire), whose admissions are observed after the wait.
    ///
    /// [`peek`](Self::peek), which counts nothing, is not observed. There is no call either if no policy applies (the cost
    /// is 0, or the limit is [`Limit::Unlimited`](crate::Limit::Unlimited)), or if the store fails and nothing was counted
    /// ([`FailureMode::Open`](crate::FailureMode::Open) and [`FailureMode::Closed`](crate::FailureMode::Closed)). The callback
    /// runs on the path of the check, so it must be quick, and a panic in it is a panic of the check. Setting it again
    /// replaces it. By default none is set.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// static DENIED: AtomicU64 = AtomicU64::new(0);
    ///
    /// let mails = Policy::new("mails", SlidingLog::per_hour(1));
    /// let limiter = Limiter::new(MemoryStore::new(), mails).on_decision(|decision| {
    ///     DENIED.fetch_add(u64::from(!decision.is_allowed()), Ordering::Relaxed);
    /// });
    /// for _ in 0..3 {
    ///     let _ = limiter.check("42").await?;
    /// }
    /// assert_eq!(DENIED.load(Ordering::Relaxed), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_decision(mut self, observe: impl Fn(&Decision) + Send + Sync + 'static) -> Self {
        self.on_decision = Observer::new(observe);
        self
    }

    /// Observes each operation for which the store failed, in every failure mode.
    ///
    /// [`peek`](Self::peek) and [`reset`](Self::reset) are included. The refund of a [`Receipt`](crate::Receipt) returns its
    /// error and is not. The callback runs on the path of the operation, as that of [`on_decision`](Self::on_decision).
    /// Setting it again replaces it. By default none is set.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use tower_quota::{Limiter, Policy, SlidingLog};
    /// use tower_quota::store::{ErrorKind, Store, StoreError, StoreFuture, StoreRequest};
    ///
    /// /// A Redis that is down.
    /// struct Down;
    ///
    /// impl Store for Down {
    ///     fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
    ///         StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "connection refused")))
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), StoreError> {
    /// static FAILURES: AtomicU64 = AtomicU64::new(0);
    ///
    /// let limiter = Limiter::new(Down, Policy::new("mails", SlidingLog::per_hour(1))).on_failure(|error| {
    ///     assert_eq!(error.kind(), ErrorKind::Unreachable);
    ///     FAILURES.fetch_add(1, Ordering::Relaxed);
    /// });
    /// assert!(limiter.check("42").await?.is_allowed()); // counted in this process
    /// assert_eq!(FAILURES.load(Ordering::Relaxed), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_failure(mut self, observe: impl Fn(&StoreError) + Send + Sync + 'static) -> Self {
        self.on_failure = Observer::new(observe);
        self
    }
}
