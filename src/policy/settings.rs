//! Settings of the requests that a policy counts, of their costs, and of how they wait.

use std::{sync::Arc, time::Duration};

use http::request::Parts;

use super::Policy;
use crate::{
    Completion, KeyExtractor,
    decide::{Cost, LongestWait, POSSIBLE_WAITING},
};

pub(super) const COST_FAULT: &str = "a request costs at least 1; a policy with the limit `unlimited` counts nothing";

pub(super) const WAITING_FAULT: &str =
    "1 to 999999999999999 units wait for a limit; of a policy without a wait none does";

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
    /// For a body by its bytes, this is its `Content-Length`. Without one, an HTTP/1.1 request has no body (RFC 9112 §6.3), unless it has
    /// `Transfer-Encoding`. Charge a body in chunks, or on HTTP/2 without a length, as the longest one that the server accepts, and
    /// [settle](crate::Receipt::settle) what was read.
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
    /// disconnects before each response is never limited, nor is one that sends gRPC-Web to a layer outside of the one that translates it.
    /// Of gRPC calls, callers can also cause a [server
    /// error](Completion::is_server_error): `UNIMPLEMENTED` by a method that does not exist, and `DEADLINE_EXCEEDED` by a short
    /// `grpc-timeout`.
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

/// Waiting.
impl<K> Policy<K> {
    /// Lets a request that does not fit wait until it does, for at most this time. By default requests do not wait.
    ///
    /// It applies to [layers](crate::RateLimitLayer) and to [`Limiter::acquire`](crate::Limiter::acquire); the other methods of a
    /// limiter do not wait. All algorithms can wait.
    ///
    /// A request that waits stands in a line. Nothing is counted for it and it holds nothing, so a caller that leaves takes nothing
    /// with it. It is admitted when all of its policies have room for it, at one instant, and in the order of arrival in all
    /// replicas: [the promises](crate::guide::promises) have what that means exactly. A check that does not wait does not overtake
    /// those that do. Each policy that lacks room must let the request wait.
    ///
    /// A request is denied at once if the wait for all that are before it is longer than this, or if
    /// [too much waits](Self::max_waiting) already; and after this time otherwise. When slots of
    /// [`Concurrency`](crate::Concurrency#waiting-for-a-slot) will be free is not known, so a request waits for these until its time
    /// is over. A policy that [learns](Self::learn_from_responses), and has no bans of its own, waits out a pause that ends in time.
    /// Where a [ban](Self::ban) begins meanwhile, the request is denied when it is checked next.
    ///
    /// In a layer, the deadline of a gRPC call (`grpc-timeout`) bounds its wait too. Choose a wait below the timeouts of clients and
    /// proxies, as [Clients](crate::guide::clients) explains: a request whose caller has left is not admitted, but one that is
    /// admitted just before counts.
    ///
    /// While it waits, a request holds nothing of the inner service: its readiness, such as a permit of a bound on concurrency, is
    /// given back, and the service is asked again when the request is admitted. `poll_ready` of the layer does not wait. The runtime
    /// of tokio needs its timers (`enable_time`).
    ///
    /// [`Decision::waited`](crate::Decision::waited) is the time for which a request has waited.
    ///
    /// The wait is in microseconds, rounded down. A wait of zero admits what fits at once, and one of more than 31 years counts as
    /// that. A wait of less than a hundredth of the time in which room for one request returns is an
    /// [error](Self::validate), since hardly a request would be admitted, unless the policy
    /// [refunds](Self::refund_if).
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::{Request, Response, StatusCode};
    /// use tokio::time::Instant;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let api = Policy::new("api", SlidingLog::per_second(1))
    ///     .key(key::constant("all"))
    ///     .wait_up_to(Duration::from_millis(1_500));
    /// let service = RateLimitLayer::new(MemoryStore::new(), api).layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    /// let call = || service.clone().oneshot(Request::new(Body::new()));
    ///
    /// let start = Instant::now();
    /// let (first, second, third) = tokio::join!(call(), call(), call());
    /// let (first, second) = (first?, second?);
    /// assert_eq!([first.status(), second.status()], [StatusCode::OK; 2]);
    /// assert_eq!(start.elapsed().as_secs(), 1);
    /// assert_eq!(second.headers()["ratelimit"], r#""api";r=0;t=1"#);
    ///
    /// // It would wait for 2 s.
    /// let third = third?;
    /// assert_eq!(third.status(), StatusCode::TOO_MANY_REQUESTS);
    /// assert_eq!(third.headers()["retry-after"], "2");
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_up_to(mut self, longest: Duration) -> Self {
        self.settings.longest_wait = Some(LongestWait::Fixed(longest));
        self
    }

    /// The longest wait of each request, in place of [one for all](Self::wait_up_to); with zero the request does not wait.
    /// Setting it again, or `wait_up_to`, replaces it.
    ///
    /// A [`Limiter`](crate::Limiter), which has no requests, does not take such a policy: each of its calls has
    /// [`wait_up_to`](crate::LimiterRequest::wait_up_to).
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::{Request, Response, StatusCode};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // A job can wait, a person does not want to.
    /// let api = Policy::new("api", SlidingLog::per_second(1)).key(key::constant("all")).wait_up_to_fn(|parts| {
    ///     if parts.headers.contains_key("x-job") { Duration::from_secs(5) } else { Duration::ZERO }
    /// });
    /// let service = RateLimitLayer::new(MemoryStore::new(), api).layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    /// let send = |request| service.clone().oneshot(request);
    ///
    /// let of_person = || Request::new(Body::new());
    /// assert_eq!(send(of_person()).await?.status(), StatusCode::OK);
    /// assert_eq!(send(of_person()).await?.status(), StatusCode::TOO_MANY_REQUESTS);
    /// let of_job = Request::builder().header("x-job", "7").body(Body::new())?;
    /// assert_eq!(send(of_job).await?.status(), StatusCode::OK);
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_up_to_fn(mut self, longest: impl Fn(&Parts) -> Duration + Send + Sync + 'static) -> Self {
        self.settings.longest_wait = Some(LongestWait::Computed(Arc::new(longest)));
        self
    }

    /// The most units that wait for each key in this process, from 1 to 999,999,999,999,999; a request is denied at once if more
    /// would, with [`Denial::LineFull`](crate::Denial::LineFull). The default is 500.
    ///
    /// Units are those of the cost. By default one request of any cost may wait alone. In Redis a process has a place for 32 requests
    /// of each key, whatever the number is. Requests that have waited for another policy are not denied when they come to wait for this
    /// one.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{AcquireError, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let mails = Policy::new("mails", SlidingLog::per_second(1)).wait_up_to(Duration::from_secs(60)).max_waiting(2);
    /// let mails = Limiter::new(MemoryStore::new(), mails);
    ///
    /// let send = || async { mails.acquire("42").await };
    /// let (first, second, third, fourth) = tokio::join!(send(), send(), send(), send());
    /// assert!(first.is_ok() && second.is_ok() && third.is_ok());
    /// assert!(matches!(fourth, Err(AcquireError::LineFull(_))));
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the number is out of range.
    #[track_caller]
    pub fn max_waiting(mut self, units: u64) -> Self {
        assert!(POSSIBLE_WAITING.contains(&units), "{WAITING_FAULT}");
        self.settings.max_waiting = Some(units);
        self
    }
}

/// The order in which the requests of a process wait. Among processes it is that of arrival.
impl<K> Policy<K> {
    /// Lets requests with different keys of this extractor take turns while they wait: one of each key, then the next one of each.
    ///
    /// Without it, a request waits for all that have arrived before it: for 40 of tenant A, where it would wait for one of these with
    /// `fair_by(key::header("tenant"))`. Requests without such a key take turns as if they had one. A key that comes anew has its first
    /// turn at once, so clients must not be able to choose keys: those with a new one each go before the second request of any other. A
    /// [`Limiter`](crate::Limiter) has [`LimiterRequest::fair_by`](crate::LimiterRequest::fair_by). By default requests wait in the
    /// order of arrival.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let model = Policy::new("model", SlidingLog::per_second(1)).wait_up_to(Duration::from_secs(60));
    /// let model = Limiter::new(MemoryStore::new(), model);
    ///
    /// let call = async |tenant| {
    ///     let decision = model.request("gpu").fair_by(tenant).acquire().await.expect("it waits for less");
    ///     (tenant, decision.waited().as_secs())
    /// };
    /// let calls = tokio::join!(call("a"), call("a"), call("a"), call("b"));
    /// assert_eq!(calls, (("a", 0), ("a", 1), ("a", 3), ("b", 2)));
    /// # }
    /// ```
    pub fn fair_by(mut self, key: impl KeyExtractor) -> Self {
        self.settings.fair_by = Some(Arc::new(key));
        self
    }

    /// Lets requests of higher priority wait before all others in this process. By default all have the priority 0.
    ///
    /// While there are always requests of higher priority, those of a lower one wait until their time is over. A
    /// [`Limiter`](crate::Limiter) has [`LimiterRequest::priority`](crate::LimiterRequest::priority).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let mails = Policy::new("mails", SlidingLog::per_second(1)).wait_up_to(Duration::from_secs(60));
    /// let mails = Limiter::new(MemoryStore::new(), mails);
    ///
    /// let send = async |priority| {
    ///     let decision = mails.request("smtp").priority(priority).acquire().await.expect("it waits for less");
    ///     decision.waited().as_secs()
    /// };
    /// assert_eq!(tokio::join!(send(0), send(0), send(0), send(9)), (0, 2, 3, 1));
    /// # }
    /// ```
    pub fn priority_fn(mut self, priority: impl Fn(&Parts) -> i32 + Send + Sync + 'static) -> Self {
        self.settings.priority = Some(Arc::new(priority));
        self
    }
}
