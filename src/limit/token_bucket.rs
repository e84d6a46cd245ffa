use std::{fmt, time::Duration};

use super::{MAX_EXACT, MAX_QUOTA, Rule, SLACK, Share, Span, constructors};
use crate::ConfigError;

/// Token bucket: so many on average, and up to `burst` at once.
///
/// A bucket holds up to `burst` tokens, gains them one by one at an even rate, and a request takes as many as it costs. It
/// is reckoned as the generic cell rate algorithm does (GCRA, ITU-T I.371), with integers, so that 7 in 3 seconds do not
/// drift.
///
/// # A timeline
///
/// One a second, and up to three at once:
///
/// ```
/// use std::{sync::atomic::{AtomicU64, Ordering}, sync::Arc, time::Duration};
/// use tower_quota::{Limiter, MemoryStore, Policy, TokenBucket};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let millis = Arc::new(AtomicU64::new(0));
/// let clock = millis.clone();
/// let store = MemoryStore::new().clock(move || Duration::from_millis(clock.load(Ordering::Relaxed)));
/// let limiter = Limiter::new(store, Policy::new("hello", TokenBucket::per_second(1).burst(3)));
///
/// // 0 s: the bucket is full, and three requests empty it.
/// for remaining in [2, 1, 0] {
///     assert_eq!(limiter.check("42").await?.remaining(), remaining);
/// }
/// assert_eq!(limiter.check("42").await?.retry_after(), Some(Duration::from_secs(1)));
///
/// // 1.5 s: one token and a half are there.
/// millis.store(1_500, Ordering::Relaxed);
/// assert_eq!(limiter.check("42").await?.remaining(), 0);
/// assert_eq!(limiter.check("42").await?.retry_after(), Some(Duration::from_millis(500)));
///
/// // 10 s: full again.
/// millis.store(10_000, Ordering::Relaxed);
/// assert_eq!(limiter.check("42").await?.remaining(), 2);
/// # Ok(())
/// # }
/// ```
///
/// # What it costs
///
/// Three numbers for each key, whatever the limit. In any time it admits at most `burst` and what the rate gives in that
/// time; in one window that is up to 2 N - 1 of a limit of N with the default burst. The [module](crate::limit) compares it
/// with the other algorithms.
///
/// # Refunds
///
/// A refund gives back the tokens of a charge that have not come back already. After the last charge of a bucket these are
/// known. After an earlier one, the bucket cannot tell which charge the tokens that came since then belong to, and takes them
/// for those of the refunded charge. So a refund never leaves more than if the request had not been charged, and may leave
/// less: of 5 tokens that were taken 4 seconds ago, at one token a second, it gives back 1.
///
/// # When the clock of Redis is set
///
/// A bucket from which something was taken more than a second ahead of the clock (or the time in which it becomes full, if
/// that is less) is full again. So a clock that is set back makes nobody wait for more than that second longer, and admits
/// at most one burst more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct TokenBucket {
    /// So many tokens come
    rate: u64,
    /// in this time.
    period: Duration,
    burst: u64,
    /// The rate in its lowest terms: so many tokens in so many microseconds.
    reduced: (u64, u64),
    /// The most tokens that are reckoned with: below it all products are exact in Lua.
    cap: u64,
}

constructors!(TokenBucket, |quota, window| Self::with(quota, window, quota));

/// Settings.
impl TokenBucket {
    /// How many tokens the bucket holds, and so how many requests of cost 1 are admitted at once.
    ///
    /// The default is as many as come in the window.
    ///
    /// A burst that is too large to be reckoned exactly is an error when the [`Policy`](crate::Policy::try_new) is built. At
    /// one token a second 4 billion fit, and at three a day 150,000:
    ///
    /// ```
    /// use tower_quota::{Policy, TokenBucket};
    ///
    /// assert!(Policy::try_new("a", TokenBucket::per_second(1).burst(4_000_000_000)).is_ok());
    /// assert!(Policy::try_new("a", TokenBucket::per_day(3).burst(150_000)).is_ok());
    /// assert!(Policy::try_new("a", TokenBucket::per_day(3).burst(160_000)).is_err());
    /// ```
    ///
    /// # Panics
    ///
    /// If the burst is 0; at compile time in a `const`.
    #[track_caller]
    pub const fn burst(mut self, burst: u64) -> Self {
        assert!(
            burst > 0,
            "a burst is at least 1, as in `TokenBucket::per_second(10).burst(30)`"
        );
        self.burst = burst;
        self
    }
}

/// Questions.
impl TokenBucket {
    const fn with(rate: u64, period: Duration, burst: u64) -> Self {
        let reduced = reduced(rate, period);
        Self {
            rate,
            period,
            burst,
            reduced,
            cap: cap(reduced),
        }
    }

    pub(crate) const NAME: &'static str = "bucket";

    /// How many requests of cost 1 are admitted at once: the burst.
    #[must_use]
    pub const fn quota(&self) -> u64 {
        self.burst
    }

    /// The time in which an empty bucket becomes full.
    #[must_use]
    pub fn window(&self) -> Duration {
        Duration::from_micros(self.time(self.burst))
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let (rate, _) = self.reduced();
        if self.burst > MAX_QUOTA || self.burst.saturating_add(rate) > self.cap() {
            return Err(ConfigError::new(format!(
                "the numbers of `{self}` are too large to be reckoned exactly; use a smaller burst, or a rounder rate",
            )));
        }
        Ok(())
    }

    /// A share of the burst, and of the rate where that can be reckoned exactly.
    pub(crate) fn scaled(self, share: Share) -> Self {
        let burst = share.part_of(self.burst);
        let exact = || {
            let period = self.period.checked_mul(share.of)?;
            let rate = self.rate.checked_mul(share.parts.into())?;
            let scaled = Self::with(rate, period, burst);
            let exact = period.as_micros() < MAX_EXACT.into() && scaled.validate().is_ok();
            exact.then_some(scaled)
        };
        exact().unwrap_or(Self { burst, ..self })
    }

    pub(crate) fn reduced(&self) -> (u64, u64) {
        self.reduced
    }

    pub(crate) fn cap(&self) -> u64 {
        self.cap
    }

    /// How long it takes until this many tokens have come, rounded up.
    #[inline]
    pub(crate) fn time(&self, tokens: u64) -> u64 {
        let (rate, period) = self.reduced();
        if let Some(product) = tokens.checked_mul(period) {
            return product.div_ceil(rate);
        }
        let time = (u128::from(tokens) * u128::from(period)).div_ceil(u128::from(rate));
        u64::try_from(time).unwrap_or(u64::MAX)
    }

    /// Whether so many tokens come in this time.
    fn come(&self, tokens: u64, time: u64) -> bool {
        let (rate, period) = self.reduced();
        u128::from(tokens) * u128::from(period) <= u128::from(time) * u128::from(rate)
    }

    fn time_rounded_down(&self, tokens: u64) -> u64 {
        let (rate, period) = self.reduced();
        let time = u128::from(tokens) * u128::from(period) / u128::from(rate);
        u64::try_from(time).unwrap_or(u64::MAX)
    }

    /// How many tokens come in this time.
    #[inline]
    fn tokens(&self, time: u64) -> u64 {
        let (rate, period) = self.reduced();
        if let Some(product) = time.checked_mul(rate) {
            return product / period;
        }
        let tokens = u128::from(time) * u128::from(rate) / u128::from(period);
        u64::try_from(tokens).unwrap_or(u64::MAX)
    }
}

const fn reduced(rate: u64, period: Duration) -> (u64, u64) {
    let period = period.as_micros() as u64;
    let divisor = gcd(rate, period);
    (rate / divisor, period / divisor)
}

const fn cap((rate, period): (u64, u64)) -> u64 {
    let most = period / rate + 1;
    MAX_EXACT / 2 / if most > rate { most } else { rate }
}

const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl fmt::Display for TokenBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token-bucket {}/{}", self.rate, Span(self.period))?;
        if self.burst == self.rate {
            return Ok(());
        }
        write!(f, " burst {}", self.burst)
    }
}

/// What was taken from the bucket of one key since it was last full.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bucket {
    since: u64,
    spent: u64,
    /// When something was last taken.
    at: u64,
}

impl Rule for TokenBucket {
    type State = Bucket;

    #[inline]
    fn settle(&self, bucket: &mut Bucket, now: u64, _: u64) {
        bucket.spent = bucket.spent.min(self.cap());
        let gone = bucket.at > now && bucket.at > now + SLACK.min(self.time(self.burst));
        if gone || self.come(bucket.spent, now.saturating_sub(bucket.since)) {
            *bucket = Bucket {
                since: now,
                spent: 0,
                at: now,
            };
        }
    }

    #[inline]
    fn room(&self, bucket: &Bucket, now: u64) -> u64 {
        let come = self.tokens(now.saturating_sub(bucket.since));
        self.burst.saturating_add(come).saturating_sub(bucket.spent)
    }

    #[inline]
    fn add(&self, bucket: &mut Bucket, now: u64, weight: u64) {
        if bucket.spent == 0 {
            bucket.since = now;
        }
        bucket.at = bucket.at.max(now);

        // Whole periods are settled before the numbers grow too large.
        if bucket.spent + weight > self.cap() {
            let (rate, period) = self.reduced();
            let periods = now.saturating_sub(bucket.since) / period;
            bucket.since += periods * period;
            bucket.spent -= (periods * rate).min(bucket.spent);
        }
        bucket.spent = (bucket.spent + weight).min(self.cap());
    }

    fn wait(&self, bucket: &Bucket, now: u64, cost: u64) -> u64 {
        let missing = (bucket.spent + cost).saturating_sub(self.burst).min(bucket.spent);
        (bucket.since + self.time(missing)).saturating_sub(now).max(1)
    }

    #[inline]
    fn reset(&self, bucket: &Bucket, now: u64) -> u64 {
        match bucket.spent {
            0 => 0,
            spent => (bucket.since + self.time(spent)).saturating_sub(now),
        }
    }

    fn refund(&self, bucket: &mut Bucket, now: u64, at: u64, weight: u64) -> bool {
        // If nothing was taken after them, the tokens that have not come back are all that are missing. Else, those that came
        // since then may all have been theirs: they are given back no second time, nor is the time in which the next comes.
        let (mut come, mut left) = (0, 0);
        if at < bucket.at {
            let passed = now.saturating_sub(at);
            come = self.tokens(passed);
            left = passed - self.time_rounded_down(come);
        }
        // What was taken before the bucket was last full has come back already.
        let counts = bucket.spent > 0 && weight > come && at >= bucket.since;
        if counts {
            bucket.spent = bucket.spent.saturating_sub(weight - come);
            bucket.since += left;
            self.settle(bucket, now, 0);
        }
        counts
    }
}
