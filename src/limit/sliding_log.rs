use std::{collections::VecDeque, fmt, time::Duration};

use super::{BOUND, Limit, Rule, SLACK, Span, fault};
use crate::ConfigError;

/// Sliding window log: never more than so many in any window of a length.
///
/// Every admission is kept with its time for one window, and a request fits while the last window has room for it. The
/// promise is exact for every half-open window `[t, t + window)`, wherever it starts.
///
/// # A timeline
///
/// Two in any 30 seconds, asked at 0 s, 20 s, 25 s and 30 s:
///
/// ```
/// use std::{sync::atomic::{AtomicU64, Ordering}, sync::Arc, time::Duration};
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let seconds = Arc::new(AtomicU64::new(0));
/// let clock = seconds.clone();
/// let store = MemoryStore::new().clock(move || Duration::from_secs(clock.load(Ordering::Relaxed)));
/// let limiter = Limiter::new(store, Policy::new("hello", SlidingLog::new(2, Duration::from_secs(30))));
///
/// // 0 s: the first request, one is left.
/// assert_eq!(limiter.check("42").await?.remaining(), 1);
///
/// // 20 s: the second, none is left.
/// seconds.store(20, Ordering::Relaxed);
/// assert_eq!(limiter.check("42").await?.remaining(), 0);
///
/// // 25 s: denied, until the first is 30 seconds old.
/// seconds.store(25, Ordering::Relaxed);
/// let denied = limiter.check("42").await?;
/// assert_eq!(denied.retry_after(), Some(Duration::from_secs(5)));
///
/// // 30 s: admitted; the next is when the second leaves, at 50 s.
/// seconds.store(30, Ordering::Relaxed);
/// assert!(limiter.check("42").await?.is_allowed());
/// assert_eq!(limiter.check("42").await?.retry_after(), Some(Duration::from_secs(20)));
/// # Ok(())
/// # }
/// ```
///
/// # What it costs
///
/// One entry for each admission in the last window: in Redis a member of a sorted set, about 20 bytes while there are
/// few and 120 when there are many. That is why a log is for at most [`MAX_QUOTA`](Self::MAX_QUOTA) admissions. A
/// request of any cost is one entry. Denied requests add nothing.
///
/// One call reads or removes at most 1,000 entries. Where more than that have expired at once while some of them weigh
/// more than 1, `remaining` is a lower bound until the next calls have removed them; and a wait that depends on more
/// than 1,000 such entries is a lower bound too.
///
/// # When the clock of Redis is set
///
/// Entries more than a second (or one window, if that is less) ahead of the clock are forgotten. So a clock that is set
/// back lets nobody who asks wait for longer than a window and that second, and admits at most one window's worth more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct SlidingLog {
    quota: u64,
    window: Duration,
}

/// Constructors.
impl SlidingLog {
    /// `limit` in any `window`.
    ///
    /// # Panics
    ///
    /// If the limit is 0 or above 999,999,999,999,999, or the window is not a whole number of microseconds between 1 ms
    /// and 10 years; at compile time in a `const`. [`try_new`](Self::try_new) returns an error instead.
    ///
    /// ```compile_fail
    /// # use tower_quota::SlidingLog;
    /// const NONE: SlidingLog = SlidingLog::per_minute(0);
    /// # let _ = NONE;
    /// ```
    #[track_caller]
    pub const fn new(limit: u64, window: Duration) -> Self {
        if let Some(fault) = fault(limit, window) {
            panic!("{}", fault);
        }
        Self { quota: limit, window }
    }

    /// `limit` in any `window`, or what is wrong with these numbers.
    ///
    /// # Errors
    ///
    /// For the numbers that [`new`](Self::new) panics on.
    pub fn try_new(limit: u64, window: Duration) -> Result<Self, ConfigError> {
        match fault(limit, window) {
            Some(fault) => Err(ConfigError::new(fault)),
            None => Ok(Self { quota: limit, window }),
        }
    }

    /// `limit` in any second: 60 means sixty a second.
    ///
    /// # Panics
    ///
    /// If the limit is 0 or above 999,999,999,999,999.
    #[track_caller]
    pub const fn per_second(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(1))
    }

    /// `limit` in any 60 seconds.
    ///
    /// # Panics
    ///
    /// If the limit is 0 or above 999,999,999,999,999.
    #[track_caller]
    pub const fn per_minute(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(60))
    }

    /// `limit` in any 60 minutes.
    ///
    /// # Panics
    ///
    /// If the limit is 0 or above 999,999,999,999,999.
    #[track_caller]
    pub const fn per_hour(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(3_600))
    }

    /// `limit` in any 24 hours.
    ///
    /// # Panics
    ///
    /// If the limit is 0 or above 999,999,999,999,999.
    #[track_caller]
    pub const fn per_day(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(86_400))
    }
}

/// Questions.
impl SlidingLog {
    /// The most admissions that a log keeps one by one.
    pub const MAX_QUOTA: u64 = 100_000;

    pub(crate) const NAME: &'static str = "log";

    /// How many are admitted in any window.
    #[must_use]
    pub const fn quota(&self) -> u64 {
        self.quota
    }

    /// The length of the window.
    #[must_use]
    pub const fn window(&self) -> Duration {
        self.window
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        if self.quota > Self::MAX_QUOTA {
            return Err(ConfigError::new(format!(
                "a sliding log keeps every admission, so its limit is at most {}, not {}; use a shorter window with a \
                 smaller limit",
                Self::MAX_QUOTA,
                self.quota,
            )));
        }
        Ok(())
    }

    pub(crate) fn window_us(&self) -> u64 {
        self.window.as_micros() as u64
    }

    fn slack(&self) -> u64 {
        SLACK.min(self.window_us())
    }
}

impl fmt::Display for SlidingLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sliding-log {}/{}", self.quota, Span(self.window))
    }
}

impl From<SlidingLog> for Limit {
    fn from(log: SlidingLog) -> Self {
        Self::SlidingLog(log)
    }
}

/// The admissions of one key, oldest first.
#[derive(Debug)]
pub(crate) struct Log {
    entries: VecDeque<Entry>,
    /// The weight that counts.
    total: u64,
    /// Whether an entry heavier than 1 was added since the log was last empty.
    weighted: bool,
    /// How many entries at the front have expired and could not be removed yet.
    late: usize,
    /// How many entries may still be looked at in this call.
    budget: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: u64,
    weight: u64,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            total: 0,
            weighted: false,
            late: 0,
            budget: BOUND,
        }
    }
}

impl Log {
    /// How many entries are not later than `at`.
    fn until(&self, at: u64) -> usize {
        self.entries.partition_point(|entry| entry.at <= at)
    }

    fn forget(&mut self, entry: Option<Entry>) {
        let weight = entry.map_or(0, |entry| entry.weight);
        self.total = self.total.saturating_sub(weight);
        self.budget -= 1;
    }
}

impl Rule for SlidingLog {
    type State = Log;

    fn settle(&self, log: &mut Log, now: u64) {
        let latest = now + self.slack();
        log.budget = BOUND;

        // Half-open windows: what was admitted one whole window ago no longer counts.
        log.late = now
            .checked_sub(self.window_us())
            .map_or(0, |expired| log.until(expired));
        for _ in 0..log.late.min(log.budget - 2) {
            let oldest = log.entries.pop_front();
            log.forget(oldest);
            log.late -= 1;
        }

        let mut gone = log.entries.len() - log.until(latest);
        for _ in 0..gone.min(log.budget - 2) {
            let newest = log.entries.pop_back();
            log.forget(newest);
            gone -= 1;
        }

        if log.entries.is_empty() {
            log.weighted = false;
        }
        if !log.weighted {
            log.total = (log.entries.len() - log.late - gone) as u64;
        }
    }

    fn room(&self, log: &Log) -> u64 {
        self.quota.saturating_sub(log.total)
    }

    fn add(&self, log: &mut Log, now: u64, weight: u64) {
        if weight > 1 && !log.weighted {
            log.weighted = true;
            log.total = log.entries.len() as u64;
        }

        let entry = Entry { at: now, weight };
        match log.until(now) {
            end if end == log.entries.len() => log.entries.push_back(entry),
            // The clock was set back: entries ahead of it stay behind this one.
            middle => log.entries.insert(middle, entry),
        }
        log.total += weight;
    }

    fn wait(&self, log: &Log, now: u64, cost: u64) -> u64 {
        let need = (log.total + cost).saturating_sub(self.quota).min(log.total);
        if need == 0 {
            return self.window_us();
        }

        // The entry that frees enough weight, or, past the budget, the last one looked at.
        let at = if log.weighted {
            let mut freed = 0;
            let mut last = now;
            for entry in log.entries.iter().take(log.budget - 1) {
                last = entry.at;
                freed += entry.weight;
                if freed >= need {
                    break;
                }
            }
            last
        } else {
            log.entries
                .get(log.late + need as usize - 1)
                .map_or(now, |entry| entry.at)
        };
        (at + self.window_us()).saturating_sub(now).max(1)
    }

    fn reset(&self, log: &Log, now: u64) -> u64 {
        let counted = log.until(now + self.slack());
        if counted <= log.late {
            return 0;
        }
        log.entries
            .get(counted - 1)
            .map_or(0, |newest| (newest.at + self.window_us()).saturating_sub(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_names_the_algorithm_the_limit_and_the_window() {
        assert_eq!(SlidingLog::per_minute(100).to_string(), "sliding-log 100/60s");
        assert_eq!(
            SlidingLog::new(2, Duration::from_millis(1_500)).to_string(),
            "sliding-log 2/1500ms"
        );
        assert_eq!(
            SlidingLog::new(2, Duration::from_micros(1_001)).to_string(),
            "sliding-log 2/1001us"
        );
    }

    #[test]
    fn wrong_numbers_are_errors_that_show_right_ones() {
        for (limit, window) in [(0, 60_000_000), (1, 0), (1, 999), (1, u64::MAX)] {
            let error = SlidingLog::try_new(limit, Duration::from_micros(window)).unwrap_err();
            assert!(error.to_string().contains("SlidingLog::"), "{error}");
        }
    }
}
