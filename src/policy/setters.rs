use std::sync::Arc;

use http::request::Parts;

use super::Policy;
use crate::{
    ConfigError,
    decision::{Cost, EnforcedShare},
    store::FailureMode,
};

/// Settings.
impl<K> Policy<K> {
    /// The cost of each request, in units of the limit, from 1.
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
    pub fn cost(mut self, cost: u64) -> Self {
        self.settings.cost = Some(Cost::Fixed(cost));
        self.noting(match cost {
            0 => Err(ConfigError::new(
                "a request costs at least 1; with `Limit::Unlimited` a policy counts nothing",
            )),
            _ => Ok(()),
        })
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
        self.settings.enforced = EnforcedShare::NONE;
        self
    }

    /// Enforces the policy for this share of its keys, from 0 to 1, and [observes](Self::observe_only) the others: to roll a limit
    /// out step by step.
    ///
    /// The keys are chosen by a hash of the name of the policy and the key, so each replica enforces the policy for the same keys,
    /// and these stay when the share grows. [`PolicyDecision::is_observed`](crate::PolicyDecision::is_observed) is whether a key is
    /// observed. With a share below 1, so is a request without a key. In a [file](crate::Policies) it is `enforce-share`; of both,
    /// the smaller share holds. By default a policy is enforced for all keys.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = |share| Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(1)).enforce_share(share));
    /// let (tenth, half) = (mails(0.1), mails(0.5));
    ///
    /// let (mut denied, mut denied_by_half) = (0, 0);
    /// for user in 0..1_000 {
    ///     let key = user.to_string();
    ///     assert!(tenth.check(&*key).await?.is_allowed() && half.check(&*key).await?.is_allowed());
    ///     let (second, second_by_half) = (tenth.check(&*key).await?, half.check(&*key).await?);
    ///     denied += u32::from(!second.is_allowed());
    ///     denied_by_half += u32::from(!second_by_half.is_allowed());
    ///     assert!(second.is_allowed() || !second_by_half.is_allowed());
    /// }
    /// assert!((70..130).contains(&denied) && (450..550).contains(&denied_by_half));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// A share that is not from 0 to 1 is an error of the layer or limiter that takes the policy.
    pub fn enforce_share(mut self, share: f64) -> Self {
        match EnforcedShare::new(share) {
            Ok(share) => {
                self.settings.enforced = share;
                self
            }
            Err(error) => self.noting(Err(error)),
        }
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
    ///     let results = if decision.degree() > 0 { "5 results" } else { "50 results" };
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
    pub fn warn_at(mut self, fraction: f64) -> Self {
        let added = self.settings.thresholds.try_add(fraction);
        self.noting(added)
    }
}

/// Limits of other servers.
impl<K> Policy<K> {
    /// Bans a key when the server behind the layer responds with `429`, or with a time to wait: for a layer around a client.
    ///
    /// A fleet that shares the quota of a third-party API puts the layer around its client, with one key for each quota, such as
    /// one for the API token. When the API denies a request all the same, the key is banned until the time that its response
    /// contains, in all processes, as by [`Limiter::ban`](crate::Limiter::ban): their requests are denied with the
    /// [wait](crate::Decision::retry_after), without being sent and without being counted.
    ///
    /// | response | pause |
    /// | --- | --- |
    /// | `429` | `Retry-After` in seconds or as a date; else the reset of the limits of which nothing remains; else 1 s |
    /// | `503` | `Retry-After`; else that reset |
    /// | gRPC `RESOURCE_EXHAUSTED`, `UNAVAILABLE`, in the head or in the trailers | `RetryInfo` in the details, else `grpc-retry-pushback-ms`; else that reset |
    /// | any other, a success too | the reset of the limits of which nothing remains; else none |
    ///
    /// The next request would be denied where nothing remains: `RateLimit` with `r=0` and `t` (drafts -08 to -11) or with
    /// `remaining=0` and `reset` (draft -07), `RateLimit-Remaining: 0` (draft -06), `X-RateLimit-Remaining: 0`, and OpenAI's
    /// `x-ratelimit-remaining-requests: 0` and `x-ratelimit-remaining-tokens: 0`, each with its reset, of which the longest holds. A
    /// reset is a number of seconds, an epoch in seconds or milliseconds (from 10⁹ on), or a duration such as `6m0s`. Some servers
    /// write the time until all of the limit is restored, and accept a request sooner: the pause is longer than needed then. On a
    /// response that a layer of this process inside of this one has admitted, these fields are not read. An inner layer without
    /// [`extensions`](crate::RateLimitLayer::extensions) leaves no mark: it is to have no fields either
    /// ([`Headers::None`](crate::Headers::None)).
    ///
    /// [`Decision::requested_pause`](crate::Decision::requested_pause) has the pause in the decision of the response. A date is compared with the `Date` of the response. The pause is at most an hour, or the
    /// [longest length](crate::Ban::max_length) of the [ban](Self::ban) of the policy; a longer ban by a policy of the same name
    /// elsewhere applies as it is. It applies to each later check of each process. Requests that [wait](Self::wait_up_to) wait
    /// until it ends, if that is in time, and are denied at their turn else; requests that were sent before are not stopped.
    /// The request that received the response stays counted; [`refund_if`](Self::refund_if) can refund it. Denials by a layer or
    /// handler of this process are ignored.
    ///
    /// The ban is sent to the store in a task of its own, as a refund is. If the store fails, this process bans the key for the
    /// time in which it counts by itself, and [`lost_settlements`](crate::RateLimitLayer::lost_settlements) counts the loss. A
    /// server that is not trusted can stop all requests to itself for the longest length. A [`Limiter`](crate::Limiter), which
    /// has no responses, does not take such a policy. By default responses are ignored.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::{Request, Response, StatusCode, header::RETRY_AFTER};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{Decision, Headers, key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let api = Policy::new("api", SlidingLog::per_minute(100)).key(key::constant("token-1")).learn_from_responses();
    /// let layer = RateLimitLayer::new(MemoryStore::new(), api).headers(Headers::None);
    /// // In place of a client, such as that of hyper-util: an API whose quota another program has used up.
    /// let client = layer.layer(service_fn(async |_: Request<Body>| {
    ///     let mut response = Response::new(Body::new());
    ///     *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    ///     response.headers_mut().insert(RETRY_AFTER, 30.into());
    ///     Ok::<_, std::convert::Infallible>(response)
    /// }));
    ///
    /// let sent = client.clone().oneshot(Request::new(Body::new())).await?;
    /// assert!(sent.extensions().get::<Decision>().is_some_and(Decision::is_allowed));
    ///
    /// let unsent = client.oneshot(Request::new(Body::new())).await?;
    /// let denied = unsent.extensions().get::<Decision>().expect("the layer decides");
    /// assert!(!denied.is_allowed());
    /// assert_eq!(denied.retry_after(), Some(Duration::from_secs(30)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Arrival is not admission
    ///
    /// The limit holds for the times at which requests are admitted, and the API counts those at which they arrive. Requests that
    /// take different times on the way can arrive closer together: with a limit equal to that of the API, more than its quota
    /// arrive in some window. Make the window longer than that of the API by a margin: the difference between the longest and
    /// the shortest time from the decision to the arrival. Then at most the quota arrives in any window.
    ///
    /// Three processes send 120 requests to an API on the same machine that admits 20 in each second, as fast as they are
    /// admitted, while the machine is busy. Three runs each of `ALONE=1 MARGIN_MS=.. cargo run --example client --features axum`:
    ///
    /// | margin | most in a second | denied by the API |
    /// | --- | --- | --- |
    /// | none | 20, 21, 23 | 3, 4, 6 |
    /// | 50 ms | 20, 20, 20 | 0, 0, 0 |
    /// | 200 ms | 20, 20, 19 | 0, 0, 0 |
    ///
    /// Over a network the times differ by more: choose the margin from the measured times. It costs as much of the throughput:
    /// 50 ms in a window of a minute are a thousandth.
    pub fn learn_from_responses(mut self) -> Self {
        self.settings.learns = true;
        self
    }
}
