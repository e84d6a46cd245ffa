use std::time::Duration;

use super::Policy;
use crate::{ConfigError, store::Waiting};

/// Waiting.
impl<K> Policy<K> {
    /// Holds a request that does not fit until it does, for at most this time; a request that would wait longer is denied at
    /// once.
    ///
    /// It applies to [layers](crate::RateLimitLayer) and to [`Limiter::acquire`](crate::Limiter::acquire); the other methods of a
    /// limiter do not wait. The check reserves the time at which the request is admitted, its turn, and the request sleeps until
    /// then: one call of the store a request, and no polling. Requests are admitted in the order of their checks, across all
    /// replicas. A turn counts from the check on, so checks of requests that do not wait queue behind those that do. When slots of
    /// [`Concurrency`](crate::Concurrency) will be free is not known: a request has a place in their queue in place of a turn.
    ///
    /// | algorithm | can wait |
    /// | --- | --- |
    /// | [`SlidingLog`](crate::SlidingLog) | yes; no window holds more than the quota, where each request counts at its turn |
    /// | `SlidingLog` with a precision | no: its entries are those of many requests |
    /// | [`TokenBucket`](crate::TokenBucket) | yes: the tokens are taken in advance |
    /// | [`FixedWindow`](crate::FixedWindow), [`SlidingCounter`](crate::SlidingCounter) | no: they store the counts of the current window only |
    /// | [`Concurrency`](crate::Concurrency) | yes: a slot that is released wakes the request that has [waited](crate::Concurrency#waiting-for-a-slot) longest |
    ///
    /// Of several policies, a request waits for the latest turn, and each of them must allow the wait for its own. Policies
    /// that do not wait must have room at once. So must policies with [`charge_if`](Self::charge_if), which reserve nothing. Slots
    /// are taken at the turn.
    ///
    /// Only a `SlidingLog` without a precision counts the request at that turn, even if the policy does not wait itself. A bucket
    /// takes its tokens when it has them, and the other algorithms count the request at the check. So at a turn these
    /// policies may exceed their limits by the requests that waited for another policy. If that matters, use a `SlidingLog` in
    /// every policy of a request that waits.
    ///
    /// A request that waits for its turn takes units of the other policies meanwhile: of a sliding log from the check to its turn
    /// and a window more. A caller that waits for its own limit
    /// could thereby exhaust a limit that it shares with others. So in a layer, each policy with another key must permit the
    /// wait with its own `wait_up_to`; if one does not, the request does not wait. To wait nevertheless, put the shared policy
    /// in an inner layer, which checks it when the request is admitted. Slots are not part of this: a request that waits for its
    /// turn has none, and one that waits for slots takes no units of other policies.
    ///
    /// If the caller leaves, the request is refunded: a log has room for another one then. The next request may get that turn
    /// before others that wait already, whose turns stay as they are; if they were kept, the turns of callers that leave
    /// together would block the log. A bucket takes tokens back only from the request with the last turn; the other tokens come
    /// back with time.
    ///
    /// A request that waits holds nothing of the inner service: its readiness, such as a permit of a bound on concurrency or of a
    /// buffer, is given back, and at its turn the request waits until the service is ready. So a bound inside of the layer, or
    /// `tower::load_shed`, applies to requests that are admitted; outside of it, also to those that wait. `poll_ready` of the
    /// layer does not wait for turns. The runtime of tokio needs its timers (`enable_time`).
    ///
    /// A policy that [learns](Self::learn_from_responses), and has no bans of its own, waits out a pause that ends in time: the
    /// request holds nothing meanwhile, and is checked again when the pause has ended.
    ///
    /// A request whose key is [banned](Self::ban) while it waits is denied at its turn: a policy with bans, or one that
    /// [learns](Self::learn_from_responses), reads them then, which is a second call of the store. If that fails, the request is
    /// admitted as it was.
    ///
    /// The rate limit fields of the response have what was left at the check, and resets as of the turn.
    /// [`Decision::delay`](crate::Decision::delay) is the wait. By default requests do not wait.
    ///
    /// The wait is in microseconds, rounded down. A wait of zero admits what fits at once; any longer one is possible, and one
    /// of more than 31 years counts as that.
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
    /// // Its turn would be in 2 s.
    /// let third = third?;
    /// assert_eq!(third.status(), StatusCode::TOO_MANY_REQUESTS);
    /// assert_eq!(third.headers()["retry-after"], "2");
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_up_to(mut self, longest: Duration) -> Self {
        self.settings.longest_wait = Some(longest);
        self
    }

    /// The most units that wait for each key, from 1 to 999,999,999,999,999; a request is denied at once if more would.
    ///
    /// It applies with [`wait_up_to`](Self::wait_up_to). Units are those of the cost, and one that waits is one that must expire,
    /// or a token that must come, before the request is admitted; of slots, one of a request in the queue. The default is 500. Of
    /// a sliding log with requests of different costs, the 990 oldest entries are read at most, so that no more than those can be
    /// waited for, and at most 999 requests wait for slots.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let mails = Policy::new("mails", SlidingLog::per_second(1)).wait_up_to(Duration::from_secs(60)).max_waiting(2);
    /// let mails = Limiter::new(MemoryStore::new(), mails);
    ///
    /// let send = || async { mails.acquire("42").await.is_ok() };
    /// assert_eq!(tokio::join!(send(), send(), send(), send()), (true, true, true, false));
    /// # }
    /// ```
    pub fn max_waiting(mut self, units: u64) -> Self {
        self.settings.max_waiting = Some(units);
        self.noting(match Waiting::POSSIBLE.contains(&units) {
            true => Ok(()),
            false => Err(ConfigError::new(
                "1 to 999999999999999 units wait for a limit; without `.wait_up_to(..)` none does",
            )),
        })
    }
}
