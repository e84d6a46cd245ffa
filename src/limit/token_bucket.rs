use std::{fmt, time::Duration};

use super::{
    limit::Share,
    prefetch::{PrefetchText, prefetch},
    rate::{WindowText, constructors},
    rule::{MAX_EXACT, MAX_QUOTA, Rule, SLACK},
};
use crate::ConfigError;

/// Token bucket: an average rate with bursts.
///
/// A bucket holds up to `burst` tokens and gains them one by one at an even rate. A request takes as many tokens as it costs,
/// and is denied if they are not there. Implemented as the generic cell rate algorithm (GCRA, ITU-T I.371) in integer
/// arithmetic, so a rate such as 7 in 3 seconds does not drift.
///
/// ```
/// use tower_quota::{Limit, TokenBucket};
///
/// assert_eq!("token-bucket 10/s".parse(), Ok(Limit::from(TokenBucket::per_second(10))));
/// assert_eq!("token-bucket 10/s burst 30".parse(), Ok(Limit::from(TokenBucket::per_second(10).burst(30))));
/// ```
///
/// `per_second(2)` is a rate of two in a second. In tower_governor, `per_second(2)` of its `GovernorConfigBuilder` is a period:
/// one in 2 seconds, which is `TokenBucket::new(1, Duration::from_secs(2))` here.
///
/// # A timeline
///
/// One token a second, up to three:
///
/// ```
/// use std::{sync::atomic::{AtomicU64, Ordering}, sync::Arc, time::Duration};
/// use tower_quota::{Limiter, MemoryStore, Policy, TokenBucket};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let millis = Arc::new(AtomicU64::new(0));
/// let clock = millis.clone();
/// let store = MemoryStore::builder().clock(move || Duration::from_millis(clock.load(Ordering::Relaxed))).build();
/// let limiter = Limiter::new(store, Policy::new("hello", TokenBucket::per_second(1).burst(3)));
///
/// // 0 s: the bucket is full, and three requests empty it.
/// for remaining in [2, 1, 0] {
///     assert_eq!(limiter.check("42").await?.remaining(), remaining);
/// }
/// assert_eq!(limiter.check("42").await?.retry_after(), Some(Duration::from_secs(1)));
///
/// // 1.5 s: the bucket has one token and a half.
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
/// Three numbers for each key, whatever the quota. In any time it admits at most `burst` and the tokens that the rate gives in
/// that time; with the default burst of N that is up to 2 N - 1 in one window. The [module](crate::limit) compares the
/// algorithms.
///
/// # Refunds
///
/// A refund returns the tokens of a charge that the rate has not returned yet. For the last charge of a bucket their number is
/// exact. For an earlier charge, all tokens that came since then are taken for those of that charge: of 5 tokens that were taken
/// 4 seconds ago, at one token a second, a refund returns 1. A [settlement](crate::Receipt::settle) of these at 3 returns 1 too,
/// since the tokens that came are first those that stay charged. So the bucket has at most as many tokens as if the actual cost had
/// been charged, and may have fewer.
///
/// # When the clock of Redis is set back
///
/// If the last charge of a bucket is ahead of the clock by more than a second (or the time in which the bucket becomes full, if
/// that is less), the bucket is full again. So a clock that is set back delays a request by at most that second, and admits at
/// most one burst more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct TokenBucket {
    /// The number of tokens that come
    rate: u64,
    /// in this time.
    period: Duration,
    burst: u64,
    /// The rate in its lowest terms: tokens, and microseconds.
    pub(crate) reduced: (u64, u64),
    /// The largest number of tokens: below it all products are exact in Lua.
    pub(crate) cap: u64,
    /// For how many microseconds units are taken ahead; 0 if they are not.
    ahead_us: u32,
}

constructors!(TokenBucket, |quota, window| Self::with(quota, window, quota));

/// Settings.
impl TokenBucket {
    /// The number of tokens that the bucket holds, and so of requests of cost 1 that are admitted at once.
    ///
    /// The default is the number of tokens that come in the window. Where requests
    /// [wait](crate::Policy::wait_up_to), a full bucket gains nothing until the next one takes its turn, some milliseconds late:
    /// with a burst of 1 they are admitted less often than the rate, so hold the tokens of 10 ms, and at least 2.
    ///
    /// A burst that is too large for exact arithmetic is an error of [`Policy::validate`](crate::Policy::validate). At one token a
    /// second 4 billion are possible, and at three a day 150,000:
    ///
    /// ```
    /// use tower_quota::{Policy, TokenBucket};
    ///
    /// assert!(Policy::new("a", TokenBucket::per_second(1).burst(4_000_000_000)).validate().is_ok());
    /// assert!(Policy::new("a", TokenBucket::per_day(3).burst(150_000)).validate().is_ok());
    /// assert!(Policy::new("a", TokenBucket::per_day(3).burst(160_000)).validate().is_err());
    /// ```
    ///
    /// # Panics
    ///
    /// If the burst is 0; at compile time in a `const`. [`try_burst`](Self::try_burst) returns an error.
    #[track_caller]
    pub const fn burst(mut self, burst: u64) -> Self {
        assert!(
            burst > 0,
            "a burst is at least 1, as in `TokenBucket::per_second(10).burst(30)`"
        );
        self.burst = burst;
        self
    }

    /// Like [`burst`](Self::burst), with an error in place of a panic, for a number from configuration.
    ///
    /// ```
    /// use tower_quota::TokenBucket;
    ///
    /// assert!(TokenBucket::per_second(10).try_burst(30).is_ok());
    /// assert!(TokenBucket::per_second(10).try_burst(0).is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// If the burst is 0.
    pub fn try_burst(self, burst: u64) -> Result<Self, ConfigError> {
        if burst == 0 {
            return Err(ConfigError::new("a burst is at least 1, such as 30"));
        }
        Ok(self.burst(burst))
    }
}

prefetch!(TokenBucket, "TokenBucket::per_second(100_000)", |bucket| Some(
    bucket.period
));

/// Accessors.
impl TokenBucket {
    const fn with(rate: u64, period: Duration, burst: u64) -> Self {
        let reduced = reduced(rate, period);
        Self {
            rate,
            period,
            burst,
            reduced,
            cap: cap(reduced),
            ahead_us: 0,
        }
    }

    /// The number of requests of cost 1 that are admitted at once if the bucket is full: the burst or, with
    /// [`prefetch`](Self::prefetch), less by the tokens that come in that time.
    #[inline]
    pub(crate) fn quota(&self) -> u64 {
        if self.ahead_us == 0 {
            return self.burst;
        }
        let come = (self.ahead_us as u128 * self.reduced.0 as u128).div_ceil(self.reduced.1 as u128);
        self.burst.saturating_sub(come as u64)
    }

    /// The time in which an empty bucket becomes full, rounded up to a microsecond.
    pub(crate) fn window(&self) -> Duration {
        Duration::from_micros(self.time(self.quota()))
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let (rate, _) = self.reduced;
        if self.quota() == 0 {
            return Err(ConfigError::new(format!(
                "the bucket of `{self}` is empty, since the tokens that come in the time of the prefetch are held back; use a \
                 larger burst, or a shorter time",
            )));
        }
        if self.burst > MAX_QUOTA || self.burst.saturating_add(rate) > self.cap {
            return Err(ConfigError::new(format!(
                "the numbers of `{self}` are too large for exact arithmetic; use a smaller burst, or a rounder rate",
            )));
        }
        Ok(())
    }

    /// A share of the quota as the burst, and of the rate if that is exact in integers. This process takes nothing ahead of itself.
    pub(crate) fn scaled(self, share: Share) -> Self {
        let burst = share.part_of(self.quota());
        let exact = || {
            let period = self.period.checked_mul(share.of)?;
            let rate = self.rate.checked_mul(share.parts.into())?;
            let scaled = Self::with(rate, period, burst);
            let exact = period.as_micros() < MAX_EXACT.into() && scaled.validate().is_ok();
            exact.then_some(scaled)
        };
        let ahead_us = 0;
        exact().unwrap_or(Self {
            burst,
            ahead_us,
            ..self
        })
    }

    /// The time in which this many tokens come, rounded up.
    #[inline]
    pub(crate) fn time(&self, tokens: u64) -> u64 {
        let (rate, period) = self.reduced;
        if let Some(product) = tokens.checked_mul(period) {
            return product.div_ceil(rate);
        }
        let time = (u128::from(tokens) * u128::from(period)).div_ceil(u128::from(rate));
        u64::try_from(time).unwrap_or(u64::MAX)
    }

    /// Whether this many tokens come in this time.
    fn come(&self, tokens: u64, time: u64) -> bool {
        let (rate, period) = self.reduced;
        u128::from(tokens) * u128::from(period) <= u128::from(time) * u128::from(rate)
    }

    fn time_rounded_down(&self, tokens: u64) -> u64 {
        let (rate, period) = self.reduced;
        let time = u128::from(tokens) * u128::from(period) / u128::from(rate);
        u64::try_from(time).unwrap_or(u64::MAX)
    }

    /// The number of tokens that come in this time, rounded down.
    #[inline]
    fn tokens(&self, time: u64) -> u64 {
        let (rate, period) = self.reduced;
        if let Some(product) = time.checked_mul(rate) {
            return product / period;
        }
        let tokens = u128::from(time) * u128::from(rate) / u128::from(period);
        u64::try_from(tokens).unwrap_or(u64::MAX)
    }

    fn tokens_rounded_up(&self, time: u64) -> u64 {
        let (rate, period) = self.reduced;
        let tokens = (u128::from(time) * u128::from(rate)).div_ceil(u128::from(period));
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

pub(super) const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl fmt::Display for TokenBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token-bucket {}/{}", self.rate, WindowText(self.period))?;
        if self.burst != self.rate {
            write!(f, " burst {}", self.burst)?;
        }
        PrefetchText(self.ahead_us).fmt(f)
    }
}

/// The tokens that were taken from the bucket of one key since it was last full.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bucket {
    pub(crate) since: u64,
    spent: u64,
    /// The time of the last charge.
    pub(crate) at: u64,
}

impl Rule for TokenBucket {
    type State = Bucket;

    #[inline]
    fn read(&self, bucket: &mut Bucket, now: u64, _: u64) -> u64 {
        bucket.spent = bucket.spent.min(self.cap);
        let gone = bucket.at > now && bucket.at > now + SLACK.min(self.time(self.quota()));
        if gone || self.come(bucket.spent, now.saturating_sub(bucket.since)) {
            *bucket = Bucket {
                since: now,
                spent: 0,
                at: now,
            };
        }
        let come = self.tokens(now.saturating_sub(bucket.since));
        self.quota().saturating_add(come).saturating_sub(bucket.spent)
    }

    #[inline]
    fn add(&self, bucket: &mut Bucket, now: u64, weight: u64, _: u64) {
        if bucket.spent == 0 {
            bucket.since = now;
        }
        bucket.at = bucket.at.max(now);

        // The tokens of whole periods are subtracted before the numbers become too large.
        if bucket.spent + weight > self.cap {
            let (rate, period) = self.reduced;
            let periods = now.saturating_sub(bucket.since) / period;
            bucket.since += periods * period;
            bucket.spent -= (periods * rate).min(bucket.spent);
        }
        bucket.spent = (bucket.spent + weight).min(self.cap);
    }

    fn wait(&self, bucket: &Bucket, now: u64, cost: u64) -> u64 {
        let missing = (bucket.spent + cost).saturating_sub(self.quota()).min(bucket.spent);
        (bucket.since + self.time(missing)).saturating_sub(now).max(1)
    }

    fn wait_behind(&self, bucket: &Bucket, now: u64, before: u64, cost: u64) -> Option<u64> {
        let missing = (bucket.spent + before + cost).saturating_sub(self.quota());
        let fills = missing.saturating_sub(1) / self.quota();
        let rest = self.time(missing - fills * self.quota());
        let fills_us = fills.saturating_mul(self.time_rounded_down(self.quota()));
        Some((bucket.since + rest).saturating_add(fills_us).saturating_sub(now))
    }

    #[inline]
    fn reset(&self, bucket: &Bucket, now: u64) -> u64 {
        match bucket.spent {
            0 => 0,
            spent => (bucket.since + self.time(spent)).saturating_sub(now),
        }
    }

    fn give_back(&self, bucket: &mut Bucket, now: u64, at: u64, weight: u64, kept: u64) -> bool {
        // After the last charge, all missing tokens are those of the charge. After an earlier one, those that came since then may
        // all be those of the charge, first of what stays of it.
        let is_last = at >= bucket.at;
        let since_kept = at.saturating_add(self.time_rounded_down(kept.min(self.cap)));
        let passed = if is_last { 0 } else { now.saturating_sub(since_kept) };
        // The rate has returned all tokens that were taken before the bucket was last full.
        let counts = bucket.spent > 0 && at >= bucket.since && !self.come(weight, passed);
        if !counts {
            return false;
        }

        // A token of which a part has come is not returned, and comes when it would have come.
        let come = self.tokens_rounded_up(passed);
        bucket.since = bucket.since.saturating_sub(self.time_rounded_down(come) - passed);
        bucket.spent = bucket.spent.saturating_sub(weight - come);
        self.read(bucket, now, 0);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::rate::MAX_WINDOW;

    #[test]
    fn tokens_of_a_long_time_at_a_high_rate_are_exact() {
        // The product of the time and the rate is beyond 64 bits.
        let bucket = TokenBucket::new(1_000_000_007, Duration::from_secs(3));
        for (time, tokens) in [(30_000_000_000, 10_000_000_070_000), (u64::MAX, u64::MAX)] {
            assert!(time > u64::MAX / 1_000_000_007);
            assert_eq!(bucket.tokens(time), tokens);
        }
        assert_eq!(bucket.tokens(30_000_000_001), 10_000_000_070_333);
    }

    #[test]
    fn a_share_of_a_rate_that_is_not_exact_takes_nothing_ahead() {
        let bucket = TokenBucket::new(1_000, MAX_WINDOW).prefetch(Duration::from_secs(1));
        assert_eq!(bucket.quota(), 999);
        let share = Share::new(1, 30).expect("a share");
        assert_eq!(bucket.scaled(share).quota(), 33);
    }
}
