use std::sync::Arc;

use http::request::Parts;

use super::{Cost, Policy};
use crate::{ConfigError, store::FailureMode};

/// Settings.
impl<K> Policy<K> {
    /// The cost of each request, in units of the limit.
    ///
    /// A request that costs more than the limit is never admitted: it is denied without a call of the store, without
    /// `Retry-After`, and for the reason [`CostAboveLimit`](crate::Denial::CostAboveLimit). Setting it again, or setting
    /// `cost_fn`, replaces it. The default is 1.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let export = Limiter::new(MemoryStore::new(), Policy::new("export", SlidingLog::per_hour(100)).cost(40));
    /// assert_eq!(export.check("42").await?.remaining(), 60);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the cost is 0. [`try_cost`](Self::try_cost) returns an error instead.
    #[track_caller]
    pub fn cost(self, cost: u64) -> Self {
        match self.try_cost(cost) {
            Ok(policy) => policy,
            Err(error) => panic!("{error}"),
        }
    }

    /// The [cost](Self::cost) of each request, from configuration.
    ///
    /// ```
    /// use tower_quota::{Policy, SlidingLog};
    ///
    /// let export = || Policy::new("export", SlidingLog::per_hour(100));
    /// assert!(export().try_cost(40).is_ok());
    /// assert!(export().try_cost(0).is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// If the cost is 0.
    pub fn try_cost(mut self, cost: u64) -> Result<Self, ConfigError> {
        if cost == 0 {
            return Err(ConfigError::new(
                "a request costs at least 1; with `Limit::Unlimited` a policy counts nothing",
            ));
        }
        self.settings.cost = Some(Cost::Fixed(cost));
        Ok(self)
    }

    /// The cost of each request, computed from the request, in units of the limit; with 0 the policy does not apply.
    ///
    /// A request that costs more than the limit is denied as with a fixed [`cost`](Self::cost). A
    /// [`Limiter`](crate::Limiter), which has no requests, does not take such a policy.
    ///
    /// ```
    /// use http::{Method, Request, Response};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, TokenBucket};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // A write costs as much as ten reads.
    /// let api = Policy::new("api", TokenBucket::per_second(100)).key(key::constant("all")).cost_fn(|parts| {
    ///     if parts.method.is_safe() { 1 } else { 10 }
    /// });
    /// let service = RateLimitLayer::new(MemoryStore::new(), api).layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    ///
    /// for (method, remaining) in [(Method::GET, "99"), (Method::POST, "89")] {
    ///     let request = Request::builder().method(method).body(Body::new())?;
    ///     let response = service.clone().oneshot(request).await?;
    ///     assert!(response.headers()["ratelimit"].to_str()?.starts_with(&format!("\"api\";r={remaining};")));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn cost_fn(mut self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.settings.cost = Some(Cost::Computed(Arc::new(cost)));
        self
    }

    /// The condition under which the policy applies to a request.
    ///
    /// Where a layer is around all methods of a service, as around tonic's router, this selects some of them. A
    /// [`Limiter`](crate::Limiter), which has no requests, does not take such a policy. Setting it again replaces it. By default
    /// the policy applies to all requests.
    ///
    /// ```
    /// use http::{Request, Response};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let sign_up = Policy::new("sign-up", SlidingLog::per_hour(3))
    ///     .key(key::constant("all"))
    ///     .apply_if(|parts| parts.uri.path() == "/shop.Accounts/SignUp");
    /// let service = RateLimitLayer::new(MemoryStore::new(), sign_up).layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    ///
    /// for (path, counted) in [("/shop.Accounts/SignUp", true), ("/shop.Accounts/SignIn", false)] {
    ///     let response = service.clone().oneshot(Request::post(path).body(Body::new())?).await?;
    ///     assert_eq!(response.headers().contains_key("ratelimit"), counted);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn apply_if(mut self, condition: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.settings.applies = Some(Arc::new(condition));
        self
    }

    /// Counts requests and denies none, to see what a limit would do before it is enforced.
    ///
    /// The policy counts the requests that it would have admitted. It is decided apart from the other policies of a layer or a
    /// [`Limiter`](crate::Limiter), in the same call of the store: neither changes what the other decides. So a candidate for a
    /// limit is an observing policy beside the enforced one, under a name of its own.
    ///
    /// What it would have done is in [`Decision::policies`](crate::Decision::policies), which
    /// [`on_decision`](crate::RateLimitLayer::on_decision) reads too: [`is_observed`](crate::PolicyDecision::is_observed),
    /// [`denial`](crate::PolicyDecision::denial), [`remaining`](crate::PolicyDecision::remaining). The other methods of the
    /// decision and the rate limit fields are those of the enforced policies;
    /// [`observed_header`](crate::RateLimitLayer::observed_header) adds a field.
    ///
    /// The request is admitted whatever happens to the policy: its cost is above the limit, its key is missing, or the store
    /// fails and the mode is [`Closed`](FailureMode::Closed). If Redis fails for this policy alone, as when its key lies on
    /// another node of a cluster, the decision is that of the others, without this one. A [`Receipt`](crate::Receipt) refunds
    /// what it has counted of an admitted request. Slots of a [`Concurrency`](crate::Concurrency) limit that it has taken for a
    /// request which another policy denies are released at once. Denials of policies beside it are not cached in the process,
    /// since each request must be counted. By default a policy is enforced.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// static WOULD_DENY: AtomicU64 = AtomicU64::new(0);
    ///
    /// let enforced = Policy::new("mails", SlidingLog::per_hour(100));
    /// let candidate = Policy::new("mails-candidate", SlidingLog::per_hour(2)).observe_only();
    /// let limiter = Limiter::new(MemoryStore::new(), [enforced, candidate]).on_decision(|decision| {
    ///     let denials = decision.policies().filter(|policy| policy.is_observed() && policy.denial().is_some());
    ///     WOULD_DENY.fetch_add(denials.count() as u64, Ordering::Relaxed);
    /// });
    ///
    /// for remaining in [99, 98, 97, 96, 95] {
    ///     let decision = limiter.check("42").await?;
    ///     assert!(decision.is_allowed());
    ///     assert_eq!(decision.remaining(), remaining);
    /// }
    /// assert_eq!(WOULD_DENY.load(Ordering::Relaxed), 3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn observe_only(mut self) -> Self {
        self.settings.observed = true;
        self
    }

    /// What happens to requests while the store fails.
    ///
    /// Of several policies that a request counts against, one that is [`Closed`](FailureMode::Closed) closes the request,
    /// unless it [only observes](Self::observe_only). The
    /// default is [`FailureMode::Local`]: each process counts by itself. See [`FailureMode`] for an example of each mode.
    pub fn failure_mode(mut self, failure_mode: FailureMode) -> Self {
        self.settings.failure_mode = Some(failure_mode);
        self
    }
}
