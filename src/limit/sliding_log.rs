use std::{collections::VecDeque, fmt, time::Duration};

use super::{BOUND, MAX_TOTAL, Rule, SLACK, Share, Span, constructors};
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
/// One entry for each admission in the last window: in Redis a member of a sorted set, about 20 bytes up to 128 of them
/// and 130 above. That is why a log is for at most [`MAX_QUOTA`](Self::MAX_QUOTA) admissions; larger ones need a
/// [`precision`](Self::precision). A request of any cost is one entry. Denied requests add nothing. The
/// [module](crate::limit) compares it with the other algorithms.
///
/// [Charges](crate::Limiter::charge) beyond the limit that come within one thousandth of the window are one entry, which
/// counts until the last of them is one window old. So a flood of them adds at most 1,001 entries, and each counts too long
/// by less than a thousandth of the window. A refund of one of them may take weight from the others of its entry.
///
/// One call reads or removes at most 1,000 entries. Where more than that have expired at once while some of them weigh
/// more than 1, `remaining` is a lower bound until the next calls have removed them; and a wait that depends on more
/// than 1,000 such entries is a lower bound too.
///
/// # When the clock of Redis is set
///
/// Entries more than a second (or one window, if that is less) ahead of the clock are forgotten as soon as somebody would
/// be denied for them. So a clock that is set back lets nobody who asks wait for longer than a window and that second, and
/// admits at most one window's worth more. Until then `remaining` counts them, and `reset_after` is one window at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct SlidingLog {
    quota: u64,
    window: Duration,
    /// Into how many parts the window is divided; 0 for no division.
    precision: u32,
}

constructors!(SlidingLog, |quota, window| Self {
    quota,
    window,
    precision: 0
});

/// Settings.
impl SlidingLog {
    /// Merges the admissions of one `n`-th of the window, so that the log has at most `n` + 1 entries.
    ///
    /// It still never admits more than its limit in any window, but what it admits is given back late, by less than one
    /// `n`-th of the window. `remaining`, `retry_after` and `reset_after` are exact for what it does.
    ///
    /// The default is to keep every admission by itself.
    ///
    /// # Panics
    ///
    /// If `n` is 0 or above 100,000; at compile time in a `const`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Policy, SlidingLog};
    ///
    /// // A million in any 10 seconds, given back at most 10 ms late, in 120 KB.
    /// let limit = SlidingLog::new(1_000_000, Duration::from_secs(10)).precision(1_000);
    /// assert!(Policy::try_new("ingest", limit).is_ok());
    /// ```
    #[track_caller]
    pub const fn precision(mut self, n: u32) -> Self {
        assert!(
            n > 0 && n as u64 <= Self::MAX_QUOTA,
            "a precision is between 1 and 100000, as in `.precision(1000)`"
        );
        self.precision = n;
        self
    }
}

/// Questions.
impl SlidingLog {
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

    /// The most admissions that a log keeps one by one: 100,000.
    pub const MAX_QUOTA: u64 = 100_000;

    pub(crate) const NAME: &'static str = "log";

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        if self.precision == 0 && self.quota > Self::MAX_QUOTA {
            return Err(ConfigError::new(format!(
                "a sliding log keeps every admission, so its limit is at most {}, not {}; merge them with \
                 `.precision(1000)`",
                Self::MAX_QUOTA,
                self.quota,
            )));
        }
        Ok(())
    }

    pub(crate) fn scaled(self, share: Share) -> Self {
        Self {
            quota: share.part_of(self.quota),
            ..self
        }
    }

    pub(crate) fn window_us(&self) -> u64 {
        self.window.as_micros() as u64
    }

    /// The time whose admissions are merged; 0 merges none.
    pub(crate) fn grain(&self) -> u64 {
        match self.precision {
            0 => 0,
            n => self.window_us().div_ceil(n.into()),
        }
    }

    fn slack(&self) -> u64 {
        SLACK.min(self.window_us())
    }

    /// The first and the last time of those whose entries are merged with one at this time: all entries if the log has a
    /// precision, else those of charges beyond the limit.
    fn step_around(&self, at: u64) -> (u64, u64) {
        let step = match self.grain() {
            0 => self.window_us().div_ceil(STEPS),
            grain => grain,
        };
        let from = at - at % step;
        (from, from + step - 1)
    }

    fn merges(&self, a: u64, b: u64) -> bool {
        self.step_around(a) == self.step_around(b)
    }
}

impl fmt::Display for SlidingLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sliding-log {}/{}", self.quota, Span(self.window))?;
        match self.precision {
            0 => Ok(()),
            n => write!(f, " precision {n}"),
        }
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
    /// How many at the back were found to belong to a clock that is gone, and could not be removed yet.
    gone: usize,
    /// How many entries may still be looked at in this call.
    budget: usize,
}

/// Ordered as the members in Redis are, by name where the times are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    at: u64,
    /// Whether it holds charges that were made when the limit was used up.
    beyond: bool,
    weight: u64,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            total: 0,
            weighted: false,
            late: 0,
            gone: 0,
            budget: BOUND - ENDS,
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

    /// After entries were forgotten: when all that are left weigh 1, weights are no longer counted, but entries are.
    fn recount(&mut self, exact: bool) {
        if exact && !self.entries.is_empty() && self.total == self.entries.len() as u64 {
            self.weighted = false;
        }
        if !self.weighted {
            self.total = (self.entries.len() - self.late - self.gone) as u64;
        }
    }

    /// Takes weight from an entry, and returns whether nothing is left of it.
    fn take_back(&mut self, position: usize, left: &mut u64) -> bool {
        let Some(mut entry) = self.entries.get(position).copied().filter(|_| *left > 0) else {
            return false;
        };
        let taken = entry.weight.min(*left);
        *left -= taken;
        self.total = self.total.saturating_sub(taken);
        self.entries.remove(position);
        entry.weight -= taken;
        if entry.weight > 0 {
            self.insert(entry);
        }
        entry.weight == 0
    }

    fn insert(&mut self, entry: Entry) {
        // Where the clock was set back, entries ahead of it stay behind this one.
        let place = match self.entries.back() {
            Some(newest) if *newest > entry => self.entries.partition_point(|other| *other <= entry),
            _ => self.entries.len(),
        };
        self.entries.insert(place, entry);
    }
}

/// How many entries are read one by one at the ends of a log: the oldest one, and the newest one before and after a removal.
const ENDS: usize = 3;

/// Into how many steps the window is divided in which charges beyond the limit are merged.
const STEPS: u64 = 1_000;

impl Rule for SlidingLog {
    type State = Log;

    fn settle(&self, log: &mut Log, now: u64, weight: u64) {
        log.budget = BOUND - ENDS;
        log.gone = 0;

        // Half-open windows: what was admitted one whole window ago no longer counts.
        log.late = now
            .checked_sub(self.window_us())
            .map_or(0, |expired| log.until(expired));
        for _ in 0..log.late.min(log.budget - 2) {
            let oldest = log.entries.pop_front();
            log.forget(oldest);
            log.late -= 1;
        }
        log.recount(self.precision == 0);

        // A request that fits does not look for what lies too far ahead.
        if self.room(log, now) >= weight {
            return;
        }
        log.gone = log.entries.len() - log.until(now + self.slack());
        for _ in 0..log.gone.min(log.budget - 2) {
            let newest = log.entries.pop_back();
            log.forget(newest);
            log.gone -= 1;
        }
        log.recount(self.precision == 0);
    }

    fn room(&self, log: &Log, _: u64) -> u64 {
        self.quota.saturating_sub(log.total)
    }

    fn add(&self, log: &mut Log, now: u64, weight: u64) {
        // Beyond the limit, which only charges go, one entry holds those of one step: a flood of them adds few entries.
        let beyond = self.precision == 0 && !log.entries.is_empty() && log.total >= self.quota;
        if (weight > 1 || self.precision > 0 || beyond) && !log.weighted {
            log.weighted = true;
            log.total = log.entries.len() as u64;
        }
        let weight = weight.min(MAX_TOTAL.saturating_sub(log.total)).max(1);
        log.total += weight;

        let mut entry = Entry {
            at: now,
            beyond,
            weight,
        };
        let merging = match (self.precision, beyond) {
            (0, false) => 0..0,
            (0, true) => {
                let newest = log.until(self.step_around(now).1);
                let merges = |newest: &Entry| newest.beyond && self.merges(newest.at, now);
                let merges = newest > 0 && log.entries.get(newest - 1).is_some_and(merges);
                newest - usize::from(merges)..newest
            }
            _ => {
                let (first, last) = self.step_around(now);
                let end = log.until(last);
                let start = log.until(first.saturating_sub(1));
                start.max(end.saturating_sub(log.budget - 1))..end
            }
        };
        for merged in log.entries.drain(merging) {
            entry.at = entry.at.max(merged.at);
            entry.weight += merged.weight;
        }
        log.insert(entry);
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
        let counted = log.entries.len() - log.gone;
        if counted <= log.late {
            return 0;
        }
        let newest = log.entries.get(counted - 1).map_or(0, |entry| entry.at);
        (newest + self.window_us()).saturating_sub(now).min(self.window_us())
    }

    fn refund(&self, log: &mut Log, now: u64, at: u64, weight: u64) -> bool {
        let expired = now.saturating_sub(self.window_us());
        let exact = self.precision == 0;
        let step = self.step_around(at);
        let (from, upto) = if exact { (at, at) } else { step };

        let first = log.until(expired.max(from.saturating_sub(1)));
        let found = log.until(upto).saturating_sub(first).min(log.budget - 1);
        let mut left = weight;
        let mut position = first;
        for _ in 0..found {
            position += usize::from(!log.take_back(position, &mut left));
        }

        // A charge beyond the limit may have been merged with later ones.
        if exact && left > 0 {
            let reads = log.budget - 1 - found;
            let end = log.until(step.1);
            let first = log.until(at.max(expired)).max(end.saturating_sub(reads));
            for position in (first..end).rev() {
                if log.entries.get(position).is_some_and(|entry| entry.beyond) {
                    log.take_back(position, &mut left);
                }
            }
        }
        left < weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_numbers_are_errors_that_show_right_ones() {
        for (limit, window) in [(0, 60_000_000), (1, 0), (1, 999), (1, u64::MAX)] {
            let error = SlidingLog::try_new(limit, Duration::from_micros(window)).unwrap_err();
            assert!(error.to_string().contains("SlidingLog::"), "{error}");
        }
    }
}
