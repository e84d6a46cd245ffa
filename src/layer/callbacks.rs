use crate::{Decision, RateLimitLayer, observer::Observer, store::StoreError};

/// Callbacks.
///
/// They only observe. They run on the path of the request, so they must be quick, and a panic in one is a panic of the
/// service.
impl RateLimitLayer {
    /// Observes each [`Decision`]: of requests that are admitted, and of those that a limit denies.
    ///
    /// A decision has the policies that [only observe](crate::Policy::observe_only) too, with what they would have done.
    /// Decisions that a process makes by itself while the store fails are included; their
    /// [`store_error`](Decision::store_error) is set. There is no decision, and so no call, for a request
    ///
    /// * to which no policy applies, or that is [skipped](Self::skip);
    /// * that is [blocked](Self::block);
    /// * that is refused, since its key cannot be extracted;
    /// * that is admitted uncounted or rejected because the store fails ([`Open`](crate::FailureMode::Open)
    ///   and [`Closed`](crate::FailureMode::Closed)): see [`on_failure`](Self::on_failure).
    ///
    /// Of nested layers each observes its own decisions. Setting it again replaces the callback. By default none is set.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use bytes::Bytes;
    /// use http::Request;
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// static ADMITTED: AtomicU64 = AtomicU64::new(0);
    /// static DENIED: AtomicU64 = AtomicU64::new(0);
    ///
    /// let policy = Policy::new("hello", SlidingLog::per_minute(2)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), policy).on_decision(|decision| {
    ///     let counter = if decision.is_allowed() { &ADMITTED } else { &DENIED };
    ///     counter.fetch_add(1, Ordering::Relaxed);
    /// });
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    /// for _ in 0..5 {
    ///     service.clone().oneshot(Request::new(Body::new())).await?;
    /// }
    /// assert_eq!(ADMITTED.load(Ordering::Relaxed), 2);
    /// assert_eq!(DENIED.load(Ordering::Relaxed), 3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_decision(mut self, observe: impl Fn(&Decision) + Send + Sync + 'static) -> Self {
        self.enforcer_mut().on_decision = Observer::new(observe);
        self
    }

    /// Observes each request for which the store failed, in every failure mode.
    ///
    /// Setting it again replaces the callback. By default none is set.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use bytes::Bytes;
    /// use http::{Request, StatusCode};
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, FailureMode, Policy, RateLimitLayer, SlidingLog};
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
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// static FAILURES: AtomicU64 = AtomicU64::new(0);
    ///
    /// let policy = Policy::new("hello", SlidingLog::per_second(100)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(Down, policy).failure_mode(FailureMode::Closed).on_failure(|error| {
    ///     assert_eq!(error.kind(), ErrorKind::Unreachable);
    ///     FAILURES.fetch_add(1, Ordering::Relaxed);
    /// });
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    ///
    /// let rejected = service.oneshot(Request::new(Body::new())).await?;
    /// assert_eq!(rejected.status(), StatusCode::SERVICE_UNAVAILABLE);
    /// assert_eq!(rejected.headers()["retry-after"], "1");
    /// assert_eq!(FAILURES.load(Ordering::Relaxed), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_failure(mut self, observe: impl Fn(&StoreError) + Send + Sync + 'static) -> Self {
        self.enforcer_mut().on_failure = Observer::new(observe);
        self
    }
}
