use std::{convert::identity, error::Error, fmt, time::Duration};

use super::{Limiter, undecided_by};
use crate::{
    Key, bans,
    store::{Operation, StoreError},
};

/// Bans by hand.
impl Limiter {
    /// Bans a key for a time, in all policies of the limiter that have [bans](crate::Policy::ban).
    ///
    /// Until then its requests are denied, with the reason [`Banned`](crate::Denial::Banned), also by other processes. The
    /// time is in microseconds, rounded down, and at most the [longest length](crate::Ban::max_length) of the ban. A ban that
    /// lasts longer stays, and the next ban after denials is no longer for it. A [`reset`](Self::reset) ends it. A policy whose
    /// limit is [`Unlimited`](crate::Limit::Unlimited), such as while limits are off in a file, bans nothing.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Ban, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
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
    /// * [`BanError::Store`] if the store fails. The key is banned in this process then, for the time in which it counts by
    ///   itself.
    /// * [`BanError::NoBans`] if no policy has bans.
    pub async fn ban(&self, key: impl Into<Key>, length: Duration) -> Result<(), BanError> {
        let mut key = key.into();
        key.bound();
        let (decision, has_bans) = self.policies.with_newest(|newest| {
            let has_bans = newest.context.policies.iter().any(|policy| policy.ban.is_some());
            let decision = undecided_by(newest, Operation::Charge, (&key, None), Some(1), identity);
            (decision, has_bans)
        });
        if !has_bans {
            return Err(BanError::NoBans);
        }
        let Some(response) = bans::send(&decision, length, |_| true) else {
            return Ok(());
        };
        match response.await {
            Ok(_) => Ok(()),
            Err(error) => {
                self.on_failure.notify(&error);
                Err(error.into())
            }
        }
    }
}

/// The error of [`Limiter::ban`].
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{BanError, Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let calls = Limiter::new(MemoryStore::new(), Policy::new("calls", SlidingLog::per_minute(60)));
/// let error = calls.ban("42", Duration::from_secs(30)).await.unwrap_err();
/// assert!(matches!(error, BanError::NoBans));
/// assert_eq!(error.to_string(), "no policy of the limiter has bans; set `.ban(Ban::by_hand())`");
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum BanError {
    /// No policy of the limiter has [bans](crate::Policy::ban).
    NoBans,
    /// The store fails.
    Store(StoreError),
}

impl From<StoreError> for BanError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl fmt::Display for BanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoBans => f.write_str("no policy of the limiter has bans; set `.ban(Ban::by_hand())`"),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl Error for BanError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::NoBans => None,
            Self::Store(error) => error.source(),
        }
    }
}
