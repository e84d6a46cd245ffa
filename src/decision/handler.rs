use std::time::Duration;

use smallvec::SmallVec;

use super::{Decision, PolicyDecision};
use crate::Key;

/// Waiting.
impl Decision {
    /// The time for which an admitted request is held after the decision: until its turn, from
    /// [`server_time`](Self::server_time) on. Zero for a request that does not [wait](crate::Policy::wait_up_to).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::AcquireError> {
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_second(1)));
    /// for seconds in [0, 1] {
    ///     let permit = mails.acquire("42").max_wait(Duration::from_secs(5)).await?;
    ///     assert_eq!(permit.decision().delay(), Duration::from_secs(seconds));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn delay(&self) -> Duration {
        if !self.is_allowed() {
            return Duration::ZERO;
        }
        let turn = self.enforced().map(|policy| policy.decided_at).max();
        turn.map_or(Duration::ZERO, |turn| turn.saturating_sub(self.server_time()))
    }

    /// Whether a request may wait for one of the policies.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.as_slice().first().is_some_and(|policy| policy.context.waits)
    }

    /// Lets the request wait for a policy only as long as each one with another key allows, before there are clones. Returns
    /// whether it may wait for any.
    #[cold]
    pub(crate) fn agree_on_waits(&mut self) -> bool {
        let policies = self.as_slice().iter();
        let holding = policies.filter(|policy| !policy.is_observed() && !policy.is_charged_later());
        let holding: SmallVec<[(Key, u64); 4]> = holding
            .map(|policy| (policy.key.clone(), policy.waiting.longest_us))
            .collect();
        let agreed = |policy: &PolicyDecision| {
            let others = holding.iter().filter(|(key, _)| *key != policy.key);
            let others = others.map(|(_, longest_us)| *longest_us).min();
            policy.waiting.longest_us.min(others.unwrap_or(u64::MAX))
        };
        for policy in self.undecided_mut() {
            policy.waiting.longest_us = agreed(policy);
        }
        self.as_slice().iter().any(|policy| policy.waiting.longest_us > 0)
    }
}
