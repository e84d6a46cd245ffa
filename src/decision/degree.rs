//! How near a request is to its limits.

use super::{Decision, PolicyDecision};
use crate::{ConfigError, Limit};

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

    /// Whether a policy that is enforced has a threshold.
    pub(crate) fn has_thresholds(&self) -> bool {
        self.enforced()
            .any(|policy| !policy.policy().settings.thresholds.is_empty())
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
        let thresholds = &self.policy().settings.thresholds;
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
        match self.policy().settings.thresholds.is_empty() {
            true => self.remaining().saturating_mul(5) <= self.counted_quota(),
            false => self.degree() > 0,
        }
    }

    /// The quota that [`remaining`](Self::remaining) is the rest of: that of a share, where this process has one.
    #[inline]
    fn counted_quota(&self) -> u64 {
        let limit: &Limit = &self.named().limit;
        match self.is_local {
            true => self.local_quota(limit),
            false => limit.quota(),
        }
    }

    #[cold]
    fn local_quota(&self, limit: &Limit) -> u64 {
        match self.failure_mode().share() {
            Some(share) => limit.scaled(share).quota(),
            None => limit.quota(),
        }
    }
}

/// Fractions of a quota in billionths, the smallest first, each of them once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Thresholds(Vec<u32>);

/// A fraction of 1. Integers, since `0.07 * 100.0` is above 7.
const WHOLE: u32 = 1_000_000_000;

impl Thresholds {
    /// Adds a fraction, unless it is there.
    pub(crate) fn try_add(&mut self, fraction: f64) -> Result<(), ConfigError> {
        let billionths = (fraction * f64::from(WHOLE)).round();
        if !(1.0..=f64::from(WHOLE)).contains(&billionths) {
            return Err(ConfigError::new(format!(
                "{fraction} is not a fraction of a quota, which is above 0 and at most 1, as in `.warn_at(0.8)`"
            )));
        }
        self.0.push(billionths as u32);
        self.0.sort_unstable();
        self.0.dedup();
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The number of fractions that are reached when so much of a quota is used.
    pub(super) fn reached(&self, used: u64, quota: u64) -> usize {
        let used = u128::from(used) * u128::from(WHOLE);
        self.0
            .partition_point(|threshold| u128::from(*threshold) * u128::from(quota) <= used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thresholds(fractions: &[f64]) -> Thresholds {
        let mut thresholds = Thresholds::default();
        for fraction in fractions {
            thresholds.try_add(*fraction).unwrap();
        }
        thresholds
    }

    /// Computed without a product of floating-point numbers.
    #[test]
    fn a_hundredth_is_reached_by_one_of_a_hundred() {
        for hundredths in 1..=100 {
            let thresholds = thresholds(&[hundredths as f64 / 100.0]);
            for used in 0..=100 {
                let reached = usize::from(used >= hundredths);
                assert_eq!(thresholds.reached(used, 100), reached, "{used} of {hundredths}");
            }
        }
    }

    #[test]
    fn thresholds_are_counted_once_and_in_any_order() {
        let thresholds = thresholds(&[1.0, 0.5, 0.8, 0.5]);
        let reached = [0, 4, 5, 7, 8, 9, 10, 11].map(|used| thresholds.reached(used, 10));
        assert_eq!(reached, [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(thresholds.len(), 3);
    }

    #[test]
    fn a_large_quota_does_not_overflow() {
        let thresholds = thresholds(&[0.5, 1.0]);
        assert_eq!(thresholds.reached(u64::MAX - 1, u64::MAX), 1);
        assert_eq!(thresholds.reached(u64::MAX, u64::MAX), 2);
    }

    #[test]
    fn a_fraction_is_above_0_and_at_most_1() {
        for wrong in [0.0, -0.5, 1.000_001, 80.0, 1e-12, f64::NAN, f64::INFINITY] {
            let error = Thresholds::default().try_add(wrong).unwrap_err();
            assert!(error.to_string().contains("`.warn_at(0.8)`"), "{error}");
        }
    }
}
