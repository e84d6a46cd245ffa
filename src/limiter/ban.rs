use std::{convert::identity, time::Duration};

use crate::{
    Key, Limiter, bans,
    store::{Operation, StoreError},
};

/// Bans by hand.
impl Limiter {
    /// Bans a key for a time, in all policies of the limiter that have [bans](crate::Policy::ban).
    ///
    /// Until then its requests are denied, with the reason [`Banned`](crate::Denial::Banned), also by other processes. The
    /// time is in microseconds, rounded down, and at most the [longest length](crate::Ban::max_length) of the ban. A ban that
    /// lasts longer stays, and the next ban after denials is no longer for it. A [`reset`](Self::reset) ends it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Ban, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let calls = Policy::new("calls", SlidingLog::per_minute(60)).ban(Ban::by_hand());
    /// let calls = Limiter::new(MemoryStore::new(), calls);
    /// assert!(calls.check("42").await?.is_allowed());
    ///
    /// calls.ban("42", Duration::from_secs(30)).await?;
    /// assert_eq!(calls.check("42").await?.retry_after(), Some(Duration::from_secs(30)));
    ///
    /// calls.reset("42").await?;
    /// assert!(calls.check("42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the store fails, or no policy has bans. After a failure of the store the key is banned in this process, for the time
    /// in which it counts by itself.
    pub async fn ban(&self, key: impl Into<Key>, length: Duration) -> Result<(), StoreError> {
        let mut key = key.into();
        key.bound();
        let decision = self.undecided(Operation::Charge, (&key, None), Some(1), identity);
        let banned = bans::send(&decision, length, |_| true).await;
        if let Err(error) = &banned {
            self.on_failure.notify(error);
        }
        banned.map(drop)
    }
}
