//! Settings of what a policy does with requests that its limit does not admit.

use super::Policy;
use crate::{Ban, decide::EnforcedShare, error::or_panic, store::FailureMode};

/// What is done with a request above the limit.
impl<K> Policy<K> {
    /// Counts requests and denies none, to see what a limit would do before it is enforced.
    ///
    /// The policy counts the requests that it would have admitted. It is decided apart from the other policies of a layer or a
    /// [`Limiter`](crate::Limiter), in the same call of the store: neither changes what the other decides. So a candidate for a
    /// limit is an observing policy beside the enforced one, under a name of its own. No request [waits](Self::wait_up_to) for it.
    /// Where requests wait for a policy beside it, it is decided when they arrive: it has also counted those that leave, and those
    /// that have waited hold no slots of it.
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
    /// observed. With a share below 1, so is a request without a key; one whose key is malformed is refused, unless the share is 0. In a
    /// [file](crate::Policies) it is `enforce-share`; of both, the smaller share holds. By default a policy is enforced for all keys.
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
        self.settings.enforced = or_panic(EnforcedShare::new(share));
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

/// Bans.
impl<K> Policy<K> {
    /// Bans a caller that this policy denies too often: for the length of a ban, all its requests are denied.
    ///
    /// A ban begins when a key reaches the number of denials that the [`Ban`] permits in its [window](Ban::after). By default
    /// the first ban lasts 1 minute. Each further ban lasts twice as long as the previous one, up to 1 day. Each window without a
    /// ban undoes one doubling. Denials during a ban do not make it longer.
    ///
    /// While a ban is in force, all requests of the key are denied with the reason [`Banned`](crate::Denial::Banned). Neither
    /// this policy nor a policy that is decided together with it counts them. This also applies to [`peek`](crate::Limiter::peek). A
    /// [`reset`](crate::Limiter::reset) ends a ban and forgets those before; [`Limiter::ban`](crate::Limiter::ban) begins one by
    /// hand. A policy that [only observes](Self::observe_only) reports its bans and denies nothing. If all policies that deny
    /// do so by a ban, the response has the problem type `abnormal-usage-detected` in place of `quota-exceeded`, as
    /// [`Problem`](crate::http::response::Problem) lists them.
    ///
    /// A denial counts if the policy itself has no room for the request. These do not: a denial by another policy only; one
    /// for a cost [above the limit](crate::Denial::CostAboveLimit); a request that is refused without a key,
    /// [blocked](crate::RateLimitLayer::block) or [skipped](crate::RateLimitLayer::skip). Nor does a denial for
    /// [`Limit::DenyAll`](crate::Limit::DenyAll). In a cluster the policies of several keys are decided one after the other, and
    /// only the denial of the first one that denies counts: not if requests may wait for that one, and are denied for a later one.
    ///
    /// Setting it again replaces it. By default a policy has no bans.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Ban, Denial, Limiter, ManualClock, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let minute = Duration::from_secs(60);
    /// let clock = ManualClock::new();
    /// let codes = Policy::new("codes", SlidingLog::per_minute(5)).ban(Ban::after(3, 60 * minute).first(10 * minute));
    /// let codes = Limiter::new(MemoryStore::builder().manual_clock(&clock).build(), codes);
    ///
    /// let mut denials = Vec::new();
    /// for _ in 0..9 {
    ///     let decision = codes.check("42").await?;
    ///     denials.extend(decision.policies().filter_map(|policy| policy.denial()));
    /// }
    /// assert_eq!(denials, [Denial::QuotaExceeded, Denial::QuotaExceeded, Denial::Banned, Denial::Banned]);
    ///
    /// clock.advance(minute);
    /// assert_eq!(codes.check("42").await?.retry_after(), Some(9 * minute));
    /// clock.advance(9 * minute);
    /// assert!(codes.check("42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Denials begin a ban; failures that the handler reports do not. With 5 logins a minute and a [refund](Self::refund_if) of the
    /// successful ones, the sixth attempt within a minute is the first denial, whatever its password. For a ban by the number of failures
    /// give the limit the window in which they count, such as 5 a day, or call [`Limiter::ban`](crate::Limiter::ban).
    ///
    /// # What attackers can do
    ///
    /// A ban is for a key, and not for a person:
    ///
    /// * By [address](crate::key::ip()), one caller behind a NAT, a proxy or a VPN bans all that share its address. Prefer a key
    ///   that authentication has verified; for addresses choose short bans and many denials.
    /// * By a name that the request contains, such as the account of a login form, anyone can ban the account of another by
    ///   sending wrong passwords for it. Use a key of name and address together, as `(key::ip(), key::header(..))`.
    /// * By a [header](fn@crate::key::header) that the client chooses, a caller is free of its ban with another value.
    /// * A page of another site makes the browser of its visitor send a form, and bans the visitor's address. Refuse requests with
    ///   `Sec-Fetch-Site: cross-site` before they are counted, by [`block`](crate::RateLimitLayer::block) or an earlier layer.
    /// * A source address that can be spoofed, as that of UDP, bans its owner. TCP and QUIC have verified it.
    ///
    /// # What it costs
    ///
    /// A second key beside the count, `quota:1:ban:<policy>:{<key>}` in Redis, from the first denial on until it is forgotten.
    /// A check reads it in the same call of the store: one `GET` more. It is not sent together with equal checks, and denials
    /// that count are not cached in the process; those by a ban in force are. Other policies pay nothing.
    ///
    /// # What ends a ban
    ///
    /// A ban lasts as long as it was begun for, also if other numbers apply meanwhile: those of another process, such as one with a
    /// newer version of the service, or those after a reload of a file. If the longest length is lowered, bans in force do not
    /// become shorter; a [`reset`](crate::Limiter::reset) ends one.
    ///
    /// If the clock of the store is set ahead, bans end early. If it is set back by more than a second, a ban ends that would then
    /// last for more than the [longest](Ban::longest) one. While the store fails and this process counts, it has bans of
    /// its own.
    ///
    /// # Panics
    ///
    /// If a number of the ban is out of range, a time is not in whole microseconds, or the first length is above the longest one.
    #[track_caller]
    pub fn ban(mut self, ban: Ban) -> Self {
        or_panic(ban.validate());
        self.settings.ban = Some(ban);
        self
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
    /// | gRPC `RESOURCE_EXHAUSTED`, `UNAVAILABLE`, in the head or in the trailers | `RetryInfo` in the details, else `grpc-retry-pushback-ms` |
    /// | `429` | `Retry-After` in seconds or as a date; else that of gRPC; else the reset of the limits of which nothing remains; else 1 s |
    /// | `503` | `Retry-After`; else that of gRPC; else that reset |
    /// | any other, a success too, with a limit of which nothing remains | `Retry-After`; else that reset |
    ///
    /// Of a pause in the head and one in the trailers the longer one holds.
    ///
    /// The next request would be denied where nothing remains: `RateLimit` with `r=0` and `t` (drafts -08 to -11) or with
    /// `remaining=0` and `reset` (draft -07), `RateLimit-Remaining: 0` (draft -06), `X-RateLimit-Remaining: 0`,
    /// `X-Rate-Limit-Remaining: 0`, and OpenAI's `x-ratelimit-remaining-requests: 0` and `x-ratelimit-remaining-tokens: 0`, each
    /// with its reset, of which the longest holds. A reset is a number of seconds, an epoch in seconds or milliseconds (from 10⁹
    /// on), or a duration such as `6m0s`. Some servers write the time until all of the limit is restored, and accept a request
    /// sooner: the pause is longer than needed then. A layer of this crate is such a server. A client with the limit of the
    /// server, which sends as fast as that permits, reaches half of it if it learns, and all of it if it does not. These fields
    /// are not read on a response from a cache, which has a positive `Age`, nor those of slots (`qu="concurrent-requests"`),
    /// which may be free long before; nor on a response to which a layer of this process inside of this one has added its own. A
    /// layer that learns without [`extensions`](crate::RateLimitLayer::extensions) does not notice that: layers inside of it are
    /// to have no fields ([`Headers::None`](crate::Headers::None)).
    ///
    /// [`Decision::requested_pause`](crate::Decision::requested_pause) has the pause. A date is compared with the `Date` of the
    /// response. The pause is at most an hour, or the [longest](crate::Ban::longest) [ban](Self::ban) of the policy; a longer ban
    /// by a policy of the same name elsewhere applies as it is. It applies to each later check of each process. Unless the policy
    /// has a ban of its own, requests that [wait](Self::wait_up_to) wait until it ends, if that is in time; others are denied.
    /// Those that were sent before are not stopped. The request that received the response stays counted;
    /// [`refund_if`](Self::refund_if) can refund it. Denials by a layer or handler of this process are ignored.
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
    /// let layer = RateLimitLayer::new(MemoryStore::new(), api).headers(Headers::None).response_extensions(true);
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
