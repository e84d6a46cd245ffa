use std::{error::Error, fmt, time::Duration};

use super::Limiter;
use crate::{Decision, Key, Limit, PolicyDecision, check::bans, limit::LengthText, store::StoreError};

/// Bans by hand.
impl Limiter {
    /// Bans a key for a time, in all policies of the limiter that have [bans](crate::Policy::ban).
    ///
    /// Until then its requests are denied, with the reason [`Banned`](crate::Denial::Banned), also by other processes, and by
    /// policies of the same name whose [longest](crate::Ban::longest) ban is shorter. The time is in microseconds, rounded down. A
    /// ban that lasts longer stays. Denials before a ban by hand no longer count, and the next ban after denials is no longer for
    /// it. A [`reset`](Self::reset) ends it. A policy whose limit is [`Unlimited`](crate::Limit::Unlimited), such as while limits
    /// are off in a file, admits the requests of a banned key; the ban applies when the policy has a limit again.
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
    /// * [`BanError::TooLong`] if a policy has bans whose [longest length](crate::Ban::max_length) is shorter. Then no policy bans
    ///   the key.
    pub async fn ban(&self, key: impl Into<Key>, length: Duration) -> Result<(), BanError> {
        let mut key = key.into();
        key.bound();
        let (decision, longest) = {
            let context = self.policies.newest().context.clone();
            // Also those that are not limited now: the ban applies when they are.
            let policies = 0..context.policies.len();
            let undecided =
                policies.map(|position| PolicyDecision::undecided(context.clone(), position, key.clone(), 1));
            let bans = context.policies.iter().filter_map(|policy| policy.ban.as_ref());
            let longest = bans.filter_map(Limit::longest_ban).min();
            (Decision::new(true, undecided.collect()), longest)
        };
        if let Some(longest) = longest.filter(|longest| length.as_micros() > longest.as_micros()) {
            return Err(BanError::TooLong { longest });
        }
        let Some(response) = bans::send(&decision, length, |_| true) else {
            return Err(BanError::NoBans);
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
    /// The time is longer than a policy bans.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Ban, BanError, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), BanError> {
    /// const DAY: Duration = Duration::from_secs(86_400);
    /// let calls = |ban| Limiter::new(MemoryStore::new(), Policy::new("calls", SlidingLog::per_minute(60)).ban(ban));
    /// let error = calls(Ban::by_hand()).ban("42", 7 * DAY).await.unwrap_err();
    /// assert!(matches!(error, BanError::TooLong { longest: DAY, .. }));
    /// assert_eq!(error.to_string(), "a policy of the limiter bans for at most 1d; set `.longest(..)` of its bans");
    ///
    /// calls(Ban::by_hand().longest(7 * DAY)).ban("42", 7 * DAY).await?;
    /// # Ok(())
    /// # }
    /// ```
    #[non_exhaustive]
    TooLong {
        /// The length of the longest ban, the shortest of all policies.
        longest: Duration,
    },
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
            Self::TooLong { longest } => {
                let longest = LengthText(*longest);
                write!(
                    f,
                    "a policy of the limiter bans for at most {longest}; set `.longest(..)` of its bans"
                )
            }
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl Error for BanError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::NoBans | Self::TooLong { .. } => None,
            Self::Store(error) => error.source(),
        }
    }
}
