//! How requests wait for a policy.

use std::{sync::Arc, time::Duration};

use http::request::Parts;

use super::Policy;
use crate::{
    KeyExtractor,
    decision::{LongestWait, POSSIBLE_WAITING},
};

pub(super) const WAITING_FAULT: &str =
    "1 to 999999999999999 units wait for a limit; of a policy without a wait none does";

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
    /// [`Decision::delay`](crate::Decision::delay) is the time for which a request has waited.
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
    ///
    /// A [`Limiter`](crate::Limiter), which has no requests, does not take such a policy: it has
    /// [`max_wait`](crate::LimiterRequest::max_wait).
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
    /// Units are those of the cost. In Redis a process has a place for 32 requests of each key, whatever the number is.
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
    /// `fair_by(key::header("tenant"))`. Requests without such a key take turns as if they had one. A
    /// [`Limiter`](crate::Limiter) has [`LimiterRequest::fair_by`](crate::LimiterRequest::fair_by).
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
    ///     (tenant, decision.delay().as_secs())
    /// };
    /// let calls = tokio::join!(call("a"), call("a"), call("a"), call("b"));
    /// assert_eq!(calls, (("a", 0), ("a", 1), ("a", 3), ("b", 2)));
    /// # }
    /// ```
    pub fn fair_by(mut self, key: impl KeyExtractor) -> Self {
        self.settings.wait_order.fair_by = Some(Arc::new(key));
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
    ///     decision.delay().as_secs()
    /// };
    /// assert_eq!(tokio::join!(send(0), send(0), send(0), send(9)), (0, 2, 3, 1));
    /// # }
    /// ```
    pub fn priority_fn(mut self, priority: impl Fn(&Parts) -> i32 + Send + Sync + 'static) -> Self {
        self.settings.wait_order.priority = Some(Arc::new(priority));
        self
    }
}
