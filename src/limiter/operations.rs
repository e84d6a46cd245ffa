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
    /// Counts the cost of the policies if it fits; the default cost is 1. A [`request`](Self::request) has other costs.
    ///
    /// # Errors
    ///
    /// If the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn check(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        self.request(key).check().await
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
