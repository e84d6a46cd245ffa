//! Settings of what a policy does with requests that its limit does not admit.

use super::Policy;
use crate::{decision::EnforcedShare, store::FailureMode};

/// What is done with a request above the limit.
impl<K> Policy<K> {
    /// Counts requests and denies none, to see what a limit would do before it is enforced.
    ///
    /// The policy counts the requests that it would have admitted. It is decided apart from the other policies of a layer or a
    /// [`Limiter`](crate::Limiter), in the same call of the store: neither changes what the other decides. So a candidate for a
    /// limit is an observing policy beside the enforced one, under a name of its own. No request [waits](Self::wait_up_to) for it.
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
