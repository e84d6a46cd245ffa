//! How near a request is to its limits.

use super::{Decision, PolicyDecision};
use crate::Limit;

/// Degrees.
impl Decision {
    /// The number of [thresholds](crate::Policy::warn_at) that are reached: of the policy with the most.
    ///
    /// With it an application degrades before a limit denies: a smaller page, a cheaper model. It is 0 if no policy has a
    /// threshold. Policies that [only observe](PolicyDecision::is_observed) are left out.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let answers = Policy::new("answers", SlidingLog::per_minute(10)).warn_at(0.5).warn_at(0.8);
    /// let answers = Limiter::new(MemoryStore::new(), answers);
    ///
    /// let mut models = Vec::new();
    /// for _ in 0..10 {
    ///     models.push(match answers.check("42").await?.degree() {
    ///         0 => "large",
    ///         1 => "small",
    ///         _ => "tiny",
    ///     });
    /// }
    /// assert_eq!(models[..4], ["large"; 4]);
    /// assert_eq!(models[4..7], ["small"; 3]);
    /// assert_eq!(models[7..], ["tiny"; 3]);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn degree(&self) -> usize {
        self.enforced().map(PolicyDecision::degree).max().unwrap_or(0)
    }

    /// Whether a [threshold](crate::Policy::warn_at) is reached, so that [`degree`](Self::degree) is above 0.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = Policy::new("mails", SlidingLog::per_hour(4)).warn_at(0.75);
    /// let mails = Limiter::new(MemoryStore::new(), mails);
    /// for is_near in [false, false, true, true] {
    ///     assert_eq!(mails.check("42").await?.is_near_limit(), is_near);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn is_near_limit(&self) -> bool {
        self.degree() > 0
    }

    /// Whether a policy that is enforced has a threshold.
    pub(crate) fn has_thresholds(&self) -> bool {
        self.enforced().any(|policy| !policy.policy().thresholds.is_empty())
    }
}

/// Degrees.
impl PolicyDecision {
    /// The number of [thresholds](crate::Policy::warn_at) of this policy that are reached; all of them with a
    /// [`denial`](Self::denial).
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let limiter = Limiter::new(MemoryStore::new(), [
    ///     Policy::new("burst", SlidingLog::per_second(2)).warn_at(0.5).warn_at(1.0),
    ///     Policy::new("daily", SlidingLog::per_day(100)).warn_at(0.5),
    /// ]);
    /// let decision = limiter.check("42").await?;
    /// let degrees: Vec<_> = decision.policies().map(|policy| policy.degree()).collect();
    /// assert_eq!(degrees, [1, 0]);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn degree(&self) -> usize {
        let thresholds = &self.policy().thresholds;
        if thresholds.is_empty() {
            return 0;
        }
        if self.denial().is_some() {
            return thresholds.len();
        }
        let quota = self.counted_quota();
        thresholds.reached(quota.saturating_sub(self.remaining()), quota)
    }

    /// Whether the first threshold is reached: that of 80 % without others.
    #[inline]
    pub(super) fn is_near(&self) -> bool {
        match self.policy().thresholds.is_empty() {
            true => self.remaining().saturating_mul(5) <= self.counted_quota(),
            false => self.degree() > 0,
        }
    }

    /// The quota that [`remaining`](Self::remaining) is the rest of: that of a share, where this process has one.
    fn counted_quota(&self) -> u64 {
        let limit: &Limit = &self.named().limit;
        match self.failure_mode().share().filter(|_| self.is_local) {
            Some(share) => limit.scaled(share).quota(),
            None => limit.quota(),
        }
    }
}
