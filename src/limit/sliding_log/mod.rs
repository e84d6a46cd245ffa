mod rule;

use std::{fmt, time::Duration};

use super::{
    prefetch::{PrefetchText, prefetch},
    rate::{WindowText, constructors},
};
use crate::ConfigError;

pub(crate) use self::rule::Log;
#[cfg(feature = "_redis")]
pub(crate) use self::rule::{BUDGET, FEW};

/// Sliding window log: at most the quota in any window, exactly.
///
/// Each admission is stored with its time for one window, and a request is admitted if the last window has room for it. The
/// quota holds for every half-open window `[t, t + window)`, wherever it starts.
///
/// ```
/// use tower_quota::{Limit, SlidingLog};
///
/// assert_eq!("sliding-log 100/min".parse(), Ok(Limit::from(SlidingLog::per_minute(100))));
/// assert_eq!("sliding-log 100/min precision 60".parse(), Ok(Limit::from(SlidingLog::per_minute(100).precision(60))));
/// ```
///
/// # A timeline
///
/// Two in any 30 seconds, with requests at 0 s, 20 s, 25 s and 30 s:
///
/// ```
/// use std::{sync::atomic::{AtomicU64, Ordering}, sync::Arc, time::Duration};
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let seconds = Arc::new(AtomicU64::new(0));
/// let clock = seconds.clone();
/// let store = MemoryStore::builder().clock(move || Duration::from_secs(clock.load(Ordering::Relaxed))).build();
/// let limiter = Limiter::new(store, Policy::new("hello", SlidingLog::new(2, Duration::from_secs(30))));
///
/// // 0 s: the first request; 1 remains.
/// assert_eq!(limiter.check("42").await?.remaining(), 1);
///
/// // 20 s: the second request; 0 remain.
/// seconds.store(20, Ordering::Relaxed);
/// assert_eq!(limiter.check("42").await?.remaining(), 0);
///
/// // 25 s: denied until the first request is 30 seconds old.
/// seconds.store(25, Ordering::Relaxed);
/// let denied = limiter.check("42").await?;
/// assert_eq!(denied.retry_after(), Some(Duration::from_secs(5)));
///
/// // 30 s: admitted. The next one is admitted when the second request expires, at 50 s.
/// seconds.store(30, Ordering::Relaxed);
/// assert!(limiter.check("42").await?.is_allowed());
/// assert_eq!(limiter.check("42").await?.retry_after(), Some(Duration::from_secs(20)));
/// # Ok(())
/// # }
/// ```
///
/// # What it costs
///
/// One entry for each admission in the last window: in Redis a member of a sorted set, about 20 bytes up to 128 of them
/// and 130 above, and one member beside them. So a log has at most [`MAX_QUOTA`](Self::MAX_QUOTA) admissions; larger quotas need a
/// [`precision`](Self::precision). A request of any cost is one entry. Denied requests add nothing. The
/// [module](crate::limit) compares the algorithms.
///
/// [Charges](crate::LimiterRequest::charge) beyond the limit are merged with the newest entry within one thousandth of the window, which
/// counts until the last of them is one window old. So they add at most 1,001 entries, and each counts too long by less than a
/// thousandth of the window.
///
/// One charge reads or removes at most 1,000 entries, and a refund 2,000. If more than that have expired at once and some of them
/// weigh more than 1, `remaining` is a lower bound until the next calls have removed them; and a wait that depends on more than
/// 1,000 such entries is a lower bound too.
///
/// # When the clock of Redis is set back
///
/// Entries that are ahead of the clock by more than a second (or one window, if that is less) are removed before a request is
/// denied because of them. So a clock that is set back delays a request by at most a window and that second, and admits at
/// most one quota more. Until then `remaining` counts these entries, and `reset_after` is one window at most. With a precision all
/// entries are removed then, at once; otherwise an admission is added to the newest entry that is ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct SlidingLog {
    pub(super) quota: u64,
    pub(super) window: Duration,
    /// The number of parts that the window is divided into; 0 for no division.
    precision: u32,
    /// For how many microseconds units are taken ahead; 0 if they are not.
    ahead_us: u32,
}

constructors!(SlidingLog, |quota, window| Self {
    quota,
    window,
    precision: 0,
    ahead_us: 0
});

/// Settings.
impl SlidingLog {
    /// The largest quota without a [`precision`](Self::precision): 100,000.
    pub const MAX_QUOTA: u64 = 100_000;

    /// Merges the admissions within one `n`-th of the window into one entry, so that the log has at most `n` + 1 entries, with a
    /// prefetch up to a tenth more. Such a part is rounded up to a microsecond, and begins at a multiple of its length since the Unix epoch.
    ///
    /// The quota holds in any window, as without it. An entry counts until the last of its admissions is one window old, so
    /// each admission counts too long by less than one `n`-th of the window. `remaining`, `retry_after` and `reset_after`
    /// include that.
    ///
    /// The default is one entry for each admission. A log with another precision has
    /// [counts of its own](crate::limit#when-a-limit-changes).
    ///
    /// # Panics
    ///
    /// If `n` is 0 or above 100,000; at compile time in a `const`. [`try_precision`](Self::try_precision) returns an error.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Policy, SlidingLog};
    ///
    /// // A million in any 10 seconds, each counted at most 10 ms too long, in 25 KB.
    /// let limit = SlidingLog::new(1_000_000, Duration::from_secs(10)).precision(1_000);
    /// assert!(Policy::new("ingest", limit).validate().is_ok());
    /// ```
    #[track_caller]
    pub const fn precision(mut self, n: u32) -> Self {
        assert!(
            Self::is_precision(n),
            "a precision is between 1 and 100000, as in `.precision(1000)`"
        );
        self.precision = n;
        self
    }

    /// Like [`precision`](Self::precision), with an error in place of a panic, for a number from configuration.
    ///
    /// ```
    /// use tower_quota::SlidingLog;
    ///
    /// assert!(SlidingLog::per_second(9_000_000).try_precision(1_000).is_ok());
    /// assert!(SlidingLog::per_second(9_000_000).try_precision(0).is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// If `n` is 0 or above 100,000.
    pub fn try_precision(self, n: u32) -> Result<Self, ConfigError> {
        if !Self::is_precision(n) {
            return Err(ConfigError::new("a precision is between 1 and 100000"));
        }
        Ok(self.precision(n))
    }

    const fn is_precision(n: u32) -> bool {
        n > 0 && n as u64 <= Self::MAX_QUOTA
    }
}

prefetch!(
    SlidingLog,
    "SlidingLog::per_second(100_000).precision(100)",
    |log| Some(log.window)
);

impl SlidingLog {
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        if self.precision == 0 && self.quota > Self::MAX_QUOTA {
            return Err(ConfigError::new(format!(
                "a sliding log stores every admission, so its limit is at most {}, not {}; merge them with \
                 `.precision(1000)`",
                Self::MAX_QUOTA,
                self.quota,
            )));
        }
        Ok(())
    }

    /// For how long an admission counts: one window, and the time for which its unit may have been taken ahead.
    pub(crate) fn window_us(&self) -> u64 {
        self.window.as_micros() as u64 + u64::from(self.ahead_us)
    }

    /// The time within which admissions are one entry, in microseconds; 0 without a precision.
    pub(crate) fn grain_us(&self) -> u64 {
        match self.precision {
            0 => 0,
            n => (self.window.as_micros() as u64).div_ceil(n.into()),
        }
    }

    /// The time within which charges beyond the limit are one entry.
    fn step(&self) -> u64 {
        self.window_us().div_ceil(STEPS)
    }
}

/// The number of steps that the window is divided into. Charges beyond the limit within one step are one entry.
pub(crate) const STEPS: u64 = 1_000;

impl fmt::Display for SlidingLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sliding-log {}/{}", self.quota, WindowText(self.window))?;
        if self.precision > 0 {
            write!(f, " precision {}", self.precision)?;
        }
        PrefetchText(self.ahead_us).fmt(f)
    }
}
