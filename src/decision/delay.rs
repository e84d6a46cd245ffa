use std::time::Duration;

use super::Decision;

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
}
