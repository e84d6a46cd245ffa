//! Settings of the requests that a policy counts, and of their costs.

use std::sync::Arc;

use http::request::Parts;

use super::Policy;
use crate::{Completion, decision::Cost};

pub(super) const COST_FAULT: &str = "a request costs at least 1; a policy with the limit `unlimited` counts nothing";

/// The requests that are counted, and their costs.
impl<K> Policy<K> {
    /// The cost of each request, in units of the limit, from 1.
    ///
    /// A cost above the limit admits no request, so the policy is not [valid](Self::validate). A limit that is
    /// [chosen](crate::Policy::with_limit_fn) for a request may be below it: the request is denied without
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
    /// If the cost is 0.
    #[track_caller]
    pub fn cost(mut self, cost: u64) -> Self {
        assert!(cost > 0, "{COST_FAULT}");
        self.settings.cost = Some(Cost::Fixed(cost));
        self
    }

    /// The cost of each request, computed from the request, in units of the limit; with 0 the policy does not apply.
    ///
    /// A request that costs more than the limit is denied for the reason [`CostAboveLimit`](crate::Denial::CostAboveLimit), as with
    /// a fixed [`cost`](Self::cost). A [`Limiter`](crate::Limiter), which has no requests, does not take such a policy.
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
}

/// Counting by completion.
impl<K> Policy<K> {
    /// Refunds a request after it has ended, if `condition` returns `true` for its [`Completion`].
    ///
    /// A request is charged when it is checked, so the limit holds at any time, also for requests at the same time. Its
    /// response has the fields of the check, before the refund. [`Completion`] describes how the request ended. For a
    /// policy that counts only requests with a certain end, such as 404, the condition holds for all others. A login that responds
    /// with a redirect is no [success](Completion::is_success), which is 2xx: [logins](crate::guide::recipes#logins) has its condition.
    ///
    /// The refund does not delay the response. It is made in a task of its own, or at once in a
    /// [`MemoryStore`](crate::MemoryStore). If the store fails then, or no tokio runtime is there, it is lost: the charge
    /// stays, and [`RateLimitLayer::lost_settlements`](crate::RateLimitLayer::lost_settlements) counts it. A request that
    /// is dropped before its response, or whose handler panics, has ended too. Nothing is refunded if the handler has taken
    /// the [receipt](crate::Decision::take_receipt): what becomes of the charge is in its hands.
    ///
    /// A caller can leave at any time, also when the work is done and only the response is missing. So let the condition hold for
    /// something that the response has, such as [`is_success`](Completion::is_success) or [`is_error`](Completion::is_error).
    /// `!is_success()` is also true for a [cancelled](Completion::is_cancelled) request. With that condition, a caller that
    /// disconnects before each response is never limited.
    ///
    /// The condition is evaluated where the request ends, also while a dropped request is destroyed, so it must be quick. If
    /// it panics, nothing is refunded. Setting it again replaces it. By default each admitted request counts. A
    /// [`Limiter`](crate::Limiter), whose decisions have receipts, does not take such a policy.
    ///
    /// ```
    /// use http::{Request, Response, StatusCode};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // Two failed logins a minute. Successful ones are free.
    /// let logins = Policy::new("logins", SlidingLog::per_minute(2))
    ///     .key(key::constant("all"))
    ///     .refund_if(|completion| completion.is_success());
    /// let service = RateLimitLayer::new(MemoryStore::new(), logins).layer(service_fn(async |request: Request<Body>| {
    ///     let mut response = Response::new(Body::new());
    ///     if !request.headers().contains_key("x-password") {
    ///         *response.status_mut() = StatusCode::UNAUTHORIZED;
    ///     }
    ///     Ok::<_, std::convert::Infallible>(response)
    /// }));
    ///
    /// let statuses = [(true, 200), (false, 401), (true, 200), (false, 401), (false, 429), (true, 429)];
    /// for (has_password, status) in statuses {
    ///     let mut request = Request::new(Body::new());
    ///     if has_password {
    ///         request.headers_mut().insert("x-password", "..".parse()?);
    ///     }
    ///     assert_eq!(service.clone().oneshot(request).await?.status(), status);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn refund_if(mut self, condition: impl Fn(&Completion<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.settings.refund_if = Some(Arc::new(condition));
        self
    }
}
