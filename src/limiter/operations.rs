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
