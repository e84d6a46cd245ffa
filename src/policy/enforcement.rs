//! Settings of what a policy does with requests that its limit does not admit.

use std::time::Duration;

use super::Policy;
use crate::{
    decision::EnforcedShare,
    store::{FailureMode, Waiting},
};

/// What is done with a request above the limit.
impl<K> Policy<K> {
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
    /// # Panics
    ///
    /// If the share is not from 0 to 1.
    #[track_caller]
    pub fn enforce_share(mut self, share: f64) -> Self {
        match EnforcedShare::new(share) {
            Ok(share) => self.settings.enforced = share,
            Err(error) => panic!("{error}"),
        }
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

pub(super) const WAITING_FAULT: &str =
    "1 to 999999999999999 units wait for a limit; without `.wait_up_to(..)`, in a file `wait`, none does";

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
    /// that do not wait must have room at once.  Slots
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
    ///
    /// # Panics
    ///
    /// If the number is out of range.
    #[track_caller]
    pub fn max_waiting(mut self, units: u64) -> Self {
        assert!(Waiting::POSSIBLE.contains(&units), "{WAITING_FAULT}");
        self.settings.max_waiting = Some(units);
        self
    }
}
