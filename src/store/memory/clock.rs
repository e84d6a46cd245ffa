use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

/// The clock of a memory store.
pub(super) enum Clock {
    Monotonic {
        started: Instant,
        /// The time at which it started, in microseconds since the Unix epoch.
        epoch: u64,
    },
    Custom(Box<dyn Fn() -> Duration + Send + Sync>),
}

/// The rules calculate with times up to here, which is in the year 2112.
const MAX_NOW: u64 = 1 << 52;

impl Clock {
    pub(super) fn monotonic() -> Self {
        let epoch = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        Self::Monotonic {
            started: Instant::now(),
            epoch: micros(epoch),
        }
    }

    /// Microseconds since the Unix epoch.
    pub(super) fn now(&self) -> u64 {
        let now = match self {
            Self::Monotonic { started, epoch } => epoch + micros(started.elapsed()),
            Self::Custom(now) => micros(now()),
        };
        now.min(MAX_NOW)
    }
}

pub(super) fn micros(time: Duration) -> u64 {
    time.as_secs()
        .saturating_mul(1_000_000)
        .saturating_add(time.subsec_micros().into())
}

/// Clock of a memory store for tests, which stands still until it is advanced.
///
/// Clones show the same time. [`MemoryStoreBuilder::manual_clock`](crate::MemoryStoreBuilder::manual_clock) sets it.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{Limiter, ManualClock, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// let clock = ManualClock::new();
/// let store = MemoryStore::builder().manual_clock(&clock).build();
/// let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_minute(1)));
///
/// assert!(limiter.check("42").await?.is_allowed());
/// clock.advance(Duration::from_secs(59));
/// assert_eq!(limiter.check("42").await?.retry_after(), Some(Duration::from_secs(1)));
/// clock.advance(Duration::from_secs(1));
/// assert!(limiter.check("42").await?.is_allowed());
/// # Ok(())
/// # }
/// ```
///
/// # Slots and requests that wait
///
/// A lease of [slots](crate::Slots) is renewed by the clock of tokio, and expires where this one is moved beyond it.
/// A request that [waits](crate::Policy::wait_up_to) sleeps by the clock of tokio, which this one does not move. A test of waits has a
/// paused runtime, in which time passes when all tasks sleep, and the clock of [`MemoryStore::new`](crate::MemoryStore::new), which
/// goes by it:
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] // of a test: `#[tokio::test(start_paused = true)]`
/// # async fn main() -> Result<(), tower_quota::AcquireError> {
/// let mails = Policy::new("mails", SlidingLog::per_hour(1)).wait_up_to(Duration::from_secs(3_600));
/// let limiter = Limiter::new(MemoryStore::new(), mails);
///
/// limiter.acquire("42").await?;
/// let waited = limiter.acquire("42").await?; // at once
/// assert_eq!(waited.waited().as_secs(), 3_600);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ManualClock {
    /// Microseconds since the Unix epoch.
    now: Arc<AtomicU64>,
}

/// 2027-01-01 00:00:00 UTC, where an hour, a day, a month and a year begin.
const START: Duration = Duration::from_secs(1_798_761_600);

impl ManualClock {
    /// A clock that shows 2027-01-01 00:00:00 UTC.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::ManualClock;
    ///
    /// assert_eq!(ManualClock::new().now(), Duration::from_secs(1_798_761_600));
    /// ```
    pub fn new() -> Self {
        Self::at(START)
    }

    /// A clock that shows this time since the Unix epoch, in whole microseconds.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::ManualClock;
    ///
    /// let clock = ManualClock::at(Duration::from_secs(1_800_000_000));
    /// assert_eq!(clock.now(), Duration::from_secs(1_800_000_000));
    /// ```
    pub fn at(since_epoch: Duration) -> Self {
        Self {
            now: Arc::new(AtomicU64::new(micros(since_epoch))),
        }
    }

    /// The time since the Unix epoch.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_micros(self.now.load(Ordering::Relaxed))
    }

    /// Advances the time, by whole microseconds.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::ManualClock;
    ///
    /// let clock = ManualClock::new();
    /// let before = clock.now();
    /// clock.clone().advance(Duration::from_millis(1_500));
    /// assert_eq!(clock.now() - before, Duration::from_millis(1_500));
    /// ```
    pub fn advance(&self, by: Duration) {
        let advanced = |now: u64| Some(now.saturating_add(micros(by)));
        let _ = self.now.fetch_update(Ordering::Relaxed, Ordering::Relaxed, advanced);
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_never_set_back_by_an_advance() {
        let clock = ManualClock::new();
        clock.advance(Duration::MAX);
        assert!(clock.now() > START);
    }
}
