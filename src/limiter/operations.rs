use std::convert::identity;

use super::Limiter;
use crate::{
    Decision, Key,
    store::{Operation, StoreError},
};

/// Operations.
///
/// A string is a key; [`Key::header`] and its siblings make the keys that a layer makes. While the store fails, the policies'
/// [`FailureMode`](crate::FailureMode)s apply to all of these but resets: by default this process counts, and
/// [`Decision::store_error`] returns the failure.
impl Limiter {
    /// Counts the cost of the policies if it fits; the default cost is 1.
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn check(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        self.request(key).check().await
    }

    /// Counts this cost if it fits, in place of the cost of the policies.
    ///
    /// A cost above the limit is denied with [`Denial::CostAboveLimit`](crate::Denial::CostAboveLimit), without a call of the
    /// store. A cost of 0 counts nothing: that is a [`peek`](Self::peek), which is denied if a cost of 1 would be.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Denial, Limiter, MemoryStore, Policy, TokenBucket};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let rows = Limiter::new(MemoryStore::new(), Policy::new("rows", TokenBucket::per_minute(1_000)));
    ///
    /// assert_eq!(rows.check_n("42", 600).await?.remaining(), 400);
    /// assert_eq!(rows.check_n("42", 600).await?.retry_after(), Some(Duration::from_secs(12)));
    ///
    /// let never = rows.check_n("42", 2_000).await?;
    /// assert_eq!(never.retry_after(), None);
    /// assert_eq!(never.policies().next().and_then(|policy| policy.denial()), Some(Denial::CostAboveLimit));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn check_n(&self, key: impl Into<Key>, cost: u64) -> Result<Decision, StoreError> {
        self.request(key).cost(cost).check().await
    }

    /// Counts the cost of the policies as many times as it fits, at most `units` times: how many of n jobs may run now.
    ///
    /// [`Decision::taken`] is how many that were; the decision is allowed if it was at least one. It is one call of the store, and
    /// of several policies all count as many. With 0 units it is a [`peek`](Self::peek).
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(10)));
    ///
    /// let decision = mails.take_up_to("42", 7).await?;
    /// assert_eq!((decision.taken(), decision.remaining()), (7, 3));
    /// let decision = mails.take_up_to("42", 7).await?;
    /// assert_eq!((decision.taken(), decision.remaining()), (3, 0));
    /// // Of the three, one was not needed.
    /// decision.take_receipt().settle(2).await?;
    /// assert_eq!(mails.take_up_to("42", 7).await?.taken(), 1);
    /// assert_eq!(mails.take_up_to("42", 7).await?.taken(), 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed). And if a policy has slots or
    /// [bans](crate::Policy::ban).
    pub async fn take_up_to(&self, key: impl Into<Key>, units: u32) -> Result<Decision, StoreError> {
        self.request(key).take_up_to(units).await
    }

    /// Counts the cost of the policies if it fits, as [`check`](Self::check) does, without a future: for code that is not
    /// `async`.
    ///
    /// It needs a store that replies at once: a [`MemoryStore`](crate::MemoryStore). A decision waits at most for the lock of a part
    /// of its keys.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// let queries = Limiter::new(MemoryStore::new(), Policy::new("queries", SlidingLog::per_second(2)));
    ///
    /// // The filter of a server that is not async.
    /// let accepts = |peer: &str| queries.check_now(peer).is_ok_and(|decision| decision.is_allowed());
    /// assert_eq!([accepts("a"), accepts("a"), accepts("a"), accepts("b")], [true, true, false, true]);
    /// ```
    ///
    /// # Errors
    ///
    /// If the store does not reply at once, such as a `RedisStore`: then nothing is sent and nothing is counted.
    pub fn check_now(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        self.request(key).check_now()
    }

    /// Counts a cost unconditionally, even if it exceeds the limit. Later requests are denied until enough of it has expired.
    ///
    /// The decision is always allowed. A cost above the limit counts in full, up to 999,999,999,999,999; a larger one counts as
    /// that. A cost of 0 counts nothing.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_quota::{Limiter, MemoryStore, Policy, TokenBucket};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let tokens = Limiter::new(MemoryStore::new(), Policy::new("tokens", TokenBucket::per_second(10)));
    ///
    /// // The response was three times as long as the limit.
    /// assert!(tokens.charge("42", 30).await?.is_allowed());
    ///
    /// // 21 tokens must be restored before one more fits.
    /// assert_eq!(tokens.check("42").await?.retry_after(), Some(Duration::from_millis(2_100)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn charge(&self, key: impl Into<Key>, cost: u64) -> Result<Decision, StoreError> {
        self.request(key).cost(cost).charge().await
    }

    /// Returns what [`check`](Self::check) would return, and counts nothing.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(3)));
    /// mails.check("42").await?;
    ///
    /// assert_eq!(mails.peek("42").await?.remaining(), 2);
    /// assert_eq!(mails.peek("42").await?.remaining(), 2);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn peek(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        self.request(key).peek().await
    }

    /// Returns what [`check_n`](Self::check_n) would return for this cost, and counts nothing. The smallest cost is 1.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let rows = Limiter::new(MemoryStore::new(), Policy::new("rows", SlidingLog::per_hour(100)));
    /// rows.check_n("42", 70).await?;
    ///
    /// assert!(rows.peek_n("42", 30).await?.is_allowed());
    /// assert!(!rows.peek_n("42", 31).await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn peek_n(&self, key: impl Into<Key>, cost: u64) -> Result<Decision, StoreError> {
        self.request(key).cost(cost.max(1)).peek().await
    }

    /// Removes all counts of the key, and its [bans](crate::Policy::ban).
    ///
    /// The counts of a policy that is now [`Limit::Unlimited`](crate::Limit::Unlimited) or
    /// [`Limit::DenyAll`](crate::Limit::DenyAll) are not removed; they expire.
    ///
    /// ```
    /// # use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let login = Limiter::new(MemoryStore::new(), Policy::new("login", SlidingLog::per_hour(1)));
    /// login.check("42").await?;
    /// assert!(!login.check("42").await?.is_allowed());
    ///
    /// // The user has reset the password.
    /// login.reset("42").await?;
    /// assert!(login.check("42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails. The counts of this process are removed then too.
    pub async fn reset(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        self.request(key).perform(Operation::Reset, identity).await.map(drop)
    }
}
