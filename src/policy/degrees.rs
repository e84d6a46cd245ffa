use super::Policy;
use crate::ConfigError;

/// Degrees.
impl<K> Policy<K> {
    /// A threshold: a fraction of the quota, above 0 and at most 1, from which on requests are near the limit.
    ///
    /// Requests are admitted as without it. [`Decision::degree`](crate::Decision::degree) returns how many of the thresholds
    /// are reached, so that a handler can degrade step by step before requests are denied. It is also in
    /// [`on_decision`](crate::RateLimitLayer::on_decision), and
    /// [`degree_header`](crate::RateLimitLayer::degree_header) adds a field.
    ///
    /// A threshold is reached if this fraction of the [quota](crate::Limit::quota) is used, this request included: with 0.8
    /// of 10 a minute, by the eighth request and those after it. The cost of a request that is charged only
    /// [after it has ended](Self::charge_if) is not included. A denial has reached all thresholds. They are computed from what
    /// the store returns, so they cost nothing there; they change no count.
    ///
    /// Each call adds a threshold; one that is added twice counts once. By default a policy has none.
    ///
    /// ```
    /// use http::{Request, Response};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{Decision, key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Full<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let search = Policy::new("search", SlidingLog::per_minute(10)).key(key::constant("all")).warn_at(0.8);
    /// let service = RateLimitLayer::new(MemoryStore::new(), search).layer(service_fn(async |request: Request<Body>| {
    ///     let decision = request.extensions().get::<Decision>().expect("the layer decides");
    ///     let results = if decision.is_near_limit() { "5 results" } else { "50 results" };
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::from(results)))
    /// }));
    ///
    /// for request in 1..=10 {
    ///     let response = service.clone().oneshot(Request::new(Body::default())).await?;
    ///     let body = http_body_util::BodyExt::collect(response).await?.to_bytes();
    ///     assert_eq!(body, if request < 8 { "50 results" } else { "5 results" });
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the fraction is not above 0 and at most 1. [`try_warn_at`](Self::try_warn_at) returns an error instead.
    #[track_caller]
    pub fn warn_at(self, fraction: f64) -> Self {
        match self.try_warn_at(fraction) {
            Ok(policy) => policy,
            Err(error) => panic!("{error}"),
        }
    }

    /// A [threshold](Self::warn_at) from configuration.
    ///
    /// ```
    /// use tower_quota::{Policy, SlidingLog};
    ///
    /// let search = || Policy::new("search", SlidingLog::per_minute(10));
    /// assert!(search().try_warn_at(0.8).is_ok());
    /// assert!(search().try_warn_at(80.0).is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// If the fraction is not above 0 and at most 1, in steps of a billionth.
    pub fn try_warn_at(mut self, fraction: f64) -> Result<Self, ConfigError> {
        self.settings.thresholds.try_add(fraction)?;
        Ok(self)
    }
}
