use std::{fmt, time::Duration};

use super::{
    rate::{WindowText, constructors},
    rule::{MAX_EXACT, Rule, SLACK},
};

/// Sliding window counter: about the quota in any window, with two counters.
///
/// Requests are counted in windows that follow one another, like those of an aligned [`FixedWindow`](crate::FixedWindow). The
/// count of the previous window is weighted by the part of it that the last window still covers, as if its requests had been
/// spread evenly, and rounded up. Cloudflare describes the algorithm in
/// [How we built rate limiting capable of scaling to millions of
/// domains](https://blog.cloudflare.com/counting-things-a-lot-of-different-things/).
///
/// ```
/// use tower_quota::{Limit, SlidingCounter};
///
/// assert_eq!("sliding-counter 1000/h".parse(), Ok(Limit::from(SlidingCounter::per_hour(1_000))));
/// ```
///
/// # A timeline
///
/// Ten a minute, with seven requests in the previous minute and four so far in this one, which is 15 seconds old:
///
/// ```
/// use std::{sync::atomic::{AtomicU64, Ordering}, sync::Arc, time::Duration};
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingCounter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let seconds = Arc::new(AtomicU64::new(30));
/// let clock = seconds.clone();
/// let store = MemoryStore::builder().clock(move || Duration::from_secs(clock.load(Ordering::Relaxed))).build();
/// let limiter = Limiter::new(store, Policy::new("hello", SlidingCounter::per_minute(10)));
///
/// for _ in 0..7 {
///     assert!(limiter.check("42").await?.is_allowed());
/// }
/// // 1:15: three quarters of the previous minute count, 5.25 requests, rounded up to 6. With the four, nothing remains.
/// seconds.store(75, Ordering::Relaxed);
/// for _ in 0..4 {
///     assert!(limiter.check("42").await?.is_allowed());
/// }
/// let denied = limiter.check("42").await?;
/// assert_eq!(denied.remaining(), 0);
/// // One more is admitted when only 5 of the seven count, a little after 1:17.
/// assert_eq!(denied.retry_after().map(|wait| wait.as_secs()), Some(2));
/// # Ok(())
/// # }
/// ```
///
/// # What it costs
///
/// Three numbers for each key, whatever the quota. A previous count above four times the quota, from charges or from an earlier,
/// larger quota, is reduced where the products would not be exact.
///
/// # Error
///
/// If requests are not spread evenly, more than the quota may be admitted in a window, and a request may be denied although the
/// last window has room. The sharp bound for a quota of N is 2 N - 1 in any window, and so 1 for N = 1.
///
/// Measured with 100 a minute and twice as many requests:
///
/// | traffic | most in any window, of the quota | admitted though the last window was full | denied though it had room | denied though it had room for ten |
/// | --- | ---: | ---: | ---: | ---: |
/// | even | 100 % | 0 % | 50 % | 0 % |
/// | random | 106 % | 4 % | 35 % | 0 % |
/// | bursty | 174 % | 7 % | 33 % | 18 % |
/// | adversarial | 199 % | 33 % | 34 % | 31 % |
///
/// The last three columns are shares of all requests, half of which an exact limit denies.
///
/// * Even: one request every 0.3 s. Since the previous count is rounded up, the last window holds 99 when a request is denied.
/// * Random: a Poisson process.
/// * Bursty: 20 to 100 requests within a tenth of a second, at random times.
/// * Adversarial: the worst known traffic. The quota at the end of one window, then each request as soon as it is admitted, are
///   199 admissions within a minute. The quota at the start of one window makes the next window deny requests although the last
///   minute is empty.
///
/// A [`SlidingLog`](crate::SlidingLog) has no such error, and with a [`precision`](crate::SlidingLog::precision) it is small
/// too. The [module](crate::limit) compares the algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct SlidingCounter {
    pub(super) quota: u64,
    pub(super) window: Duration,
}

constructors!(SlidingCounter, |quota, window| Self { quota, window });

/// Accessors.
impl SlidingCounter {
    pub(crate) fn window_us(&self) -> u64 {
        self.window.as_micros() as u64
    }

    /// The unit of time for the weight of the previous window, in microseconds: the smallest for which four quotas times the
    /// units of a window are exact in Lua.
    pub(crate) fn tick(&self) -> u64 {
        let product = u128::from(self.quota) * u128::from(self.window_us()) * 4;
        u64::try_from(product.div_ceil(u128::from(MAX_EXACT / 2)))
            .unwrap_or(u64::MAX)
            .max(1)
    }

    fn ticks(&self) -> u64 {
        self.window_us().div_ceil(self.tick())
    }

    /// The largest count, also of one that an earlier, larger quota has left: below it all products are exact in Lua.
    pub(crate) fn cap(&self) -> u64 {
        MAX_EXACT / 2 / self.ticks()
    }

    /// The part of the previous count that the last window covers, rounded up.
    fn share(&self, counter: &Counter, now: u64) -> u64 {
        let passed = now.saturating_sub(counter.start) / self.tick();
        let previous = counter.previous.min(self.cap());
        (previous * self.ticks().saturating_sub(passed)).div_ceil(self.ticks())
    }

    /// Time from the start of a window until the share of the previous one is at most `room`.
    fn shrinks(&self, previous: u64, room: u64) -> u64 {
        let previous = previous.min(self.cap()).max(1);
        let passed = self.ticks().saturating_sub(room * self.ticks() / previous);
        (passed * self.tick()).min(self.window_us())
    }
}

impl fmt::Display for SlidingCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sliding-counter {}/{}", self.quota, WindowText(self.window))
    }
}

/// The two counters of one key.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counter {
    start: u64,
    current: u64,
    previous: u64,
}

impl Rule for SlidingCounter {
    type State = Counter;

    fn read(&self, counter: &mut Counter, now: u64, _: u64) -> u64 {
        let window = self.window_us();
        let start = now - now % window;

        // A clock that was set back over the boundary leaves a counter of the next window.
        let is_gone = counter.start > now + SLACK.min(window);
        if is_gone || counter.start < start {
            let was_last = !is_gone && counter.start + window >= start;
            *counter = Counter {
                start,
                current: 0,
                previous: if was_last { counter.current } else { 0 },
            };
        }
        let room = self.quota.saturating_sub(counter.current);
        room.saturating_sub(self.share(counter, now))
    }

    fn add(&self, counter: &mut Counter, _: u64, weight: u64, _: u64) {
        counter.current = (counter.current + weight).min(self.cap()).max(counter.current);
    }

    fn wait(&self, counter: &Counter, now: u64, cost: u64) -> u64 {
        // A cost above the quota waits as long as the quota.
        let cost = cost.min(self.quota);
        let at = match self.quota.checked_sub(counter.current + cost) {
            Some(room) => counter.start + self.shrinks(counter.previous, room),
            // Not in this window: in the next one what counts now will be the previous.
            None => counter.start + self.window_us() + self.shrinks(counter.current, self.quota - cost),
        };
        at.saturating_sub(now).max(1)
    }

    fn wait_behind(&self, counter: &Counter, now: u64, before: u64, cost: u64) -> Option<u64> {
        let current = counter.current.min(self.quota);
        let total = current + before + cost;
        if total <= self.quota {
            return Some(self.wait(counter, now, before + cost));
        }
        // As each window admits a quota at most, and in the last one what the share of the window before leaves.
        let (windows, rest) = (total / self.quota, total % self.quota);
        let ticks = rest * self.ticks() / self.quota;
        let at = windows
            .saturating_mul(self.window_us())
            .saturating_add(ticks * self.tick());
        let behind = counter.start.saturating_add(at).saturating_sub(now);
        Some(behind.max(self.wait(counter, now, cost)))
    }

    fn reset(&self, counter: &Counter, now: u64) -> u64 {
        let at = match (counter.current, counter.previous) {
            (0, 0) => return 0,
            (0, _) => counter.start + self.window_us(),
            _ => counter.start + 2 * self.window_us(),
        };
        at.saturating_sub(now)
    }

    fn give_back(&self, counter: &mut Counter, _: u64, at: u64, weight: u64, _: u64) -> bool {
        if counter.current + counter.previous == 0 {
            return false;
        }

        if at >= counter.start {
            counter.current = counter.current.saturating_sub(weight);
        } else if at + self.window_us() >= counter.start {
            counter.previous = counter.previous.saturating_sub(weight);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{rate::MAX_WINDOW, rule::MAX_QUOTA};

    #[test]
    fn four_quotas_times_the_units_of_a_window_are_exact_in_lua() {
        for quota in [1, 1_000, MAX_QUOTA] {
            for window in [Duration::from_millis(1), Duration::from_secs(86_400), MAX_WINDOW] {
                let limit = SlidingCounter::new(quota, window);
                assert!(4 * quota * limit.ticks() <= MAX_EXACT, "{limit}");
            }
        }
    }

    #[test]
    fn what_a_larger_quota_has_counted_is_read_by_a_smaller_one() {
        let [large, small] = [MAX_QUOTA, 1].map(|quota| SlidingCounter::new(quota, MAX_WINDOW));
        let (window, mut counter) = (small.window_us(), Counter::default());
        assert_eq!(large.read(&mut counter, window, 1), MAX_QUOTA);
        large.add(&mut counter, window, MAX_QUOTA, 1);
        assert_eq!(small.read(&mut counter, 2 * window, 1), 0);
    }
}
