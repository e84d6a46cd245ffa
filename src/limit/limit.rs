use std::{
    fmt,
    mem::{Discriminant, discriminant},
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderValue;

use super::{
    concurrency::Concurrency, fixed_window::FixedWindow, rate::LengthText, sliding_counter::SlidingCounter,
    sliding_log::SlidingLog, token_bucket::TokenBucket,
};
use crate::ConfigError;

/// An algorithm with its parameters.
///
/// Each algorithm is a type of its own, with only the settings that it has, and converts into a `Limit`. The
/// [module](crate::limit) compares them. A limit is also a line of [text](crate::limit#limits-as-text), as in a file of limits:
///
/// ```
/// use tower_quota::{Limit, SlidingLog, TokenBucket};
///
/// assert_eq!("sliding-log 100/min".parse(), Ok(Limit::from(SlidingLog::per_minute(100))));
/// assert_eq!("token-bucket 10/s burst 30".parse(), Ok(Limit::from(TokenBucket::per_second(10).burst(30))));
///
/// let error = "100 a minute".parse::<Limit>().unwrap_err();
/// assert!(error.to_string().contains("`sliding-log 100/min`"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// Sliding window log: at most the quota in any window, exactly.
    SlidingLog(SlidingLog),
    /// Sliding window counter: about the quota in any window, in constant memory.
    SlidingCounter(SlidingCounter),
    /// Fixed window: the quota in each of the windows that follow one another.
    FixedWindow(FixedWindow),
    /// Token bucket: an average rate with bursts.
    TokenBucket(TokenBucket),
    /// Slots: so many requests at once.
    Concurrency(Concurrency),
    /// Admits every request. Nothing is counted, and responses have no rate-limit fields.
    Unlimited,
    /// Denies every request, without a call of the store.
    DenyAll,
}

/// Accessors.
impl Limit {
    /// The number of requests of cost 1 that are admitted at once if nothing was counted yet.
    ///
    /// ```
    /// use tower_quota::{Limit, SlidingLog, TokenBucket};
    ///
    /// assert_eq!(Limit::from(SlidingLog::per_minute(100)).quota(), 100);
    /// assert_eq!(Limit::from(TokenBucket::per_second(10).burst(30)).quota(), 30);
    /// assert_eq!(Limit::Unlimited.quota(), u64::MAX);
    /// assert_eq!(Limit::DenyAll.quota(), 0);
    /// ```
    #[must_use]
    pub fn quota(&self) -> u64 {
        match self {
            Self::SlidingLog(SlidingLog { quota, .. })
            | Self::SlidingCounter(SlidingCounter { quota, .. })
            | Self::FixedWindow(FixedWindow { quota, .. })
            | Self::Concurrency(Concurrency { quota, .. }) => *quota,
            Self::TokenBucket(bucket) => bucket.quota(),
            Self::Unlimited => u64::MAX,
            Self::DenyAll => 0,
        }
    }

    /// The length of the window that the quota applies to; `None` for windows of a calendar, `Concurrency`,
    /// `Unlimited` and `DenyAll`.
    ///
    /// The window of a token bucket is the time in which an empty bucket becomes full.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Limit, SlidingLog, TokenBucket};
    ///
    /// assert_eq!(Limit::from(SlidingLog::per_minute(100)).window(), Some(Duration::from_secs(60)));
    /// assert_eq!(Limit::from(TokenBucket::per_second(10).burst(30)).window(), Some(Duration::from_secs(3)));
    /// assert_eq!(Limit::Unlimited.window(), None);
    /// ```
    #[must_use]
    pub fn window(&self) -> Option<Duration> {
        match self {
            Self::SlidingLog(SlidingLog { window, .. }) | Self::SlidingCounter(SlidingCounter { window, .. }) => {
                Some(*window)
            }
            Self::FixedWindow(fixed) => fixed.window(),
            Self::TokenBucket(bucket) => Some(bucket.window()),
            Self::Concurrency(_) | Self::Unlimited | Self::DenyAll => None,
        }
    }

    /// The name of the algorithm in the keys of a store.
    ///
    /// A store keeps the counts of different algorithms apart, also those of one policy and key, since their states differ.
    /// The name does not depend on the parameters.
    ///
    /// ```
    /// use tower_quota::{Limit, SlidingLog, TokenBucket};
    ///
    /// assert_eq!(Limit::from(SlidingLog::per_minute(100)).algorithm(), "log");
    /// assert_eq!(Limit::from(TokenBucket::per_second(10)).algorithm(), "bucket");
    /// ```
    #[must_use]
    pub fn algorithm(&self) -> &'static str {
        match self {
            Self::SlidingLog(_) => "log",
            Self::SlidingCounter(_) => "counter",
            Self::FixedWindow(_) => "fixed",
            Self::TokenBucket(_) => "bucket",
            Self::Concurrency(_) => "concurrency",
            Self::Unlimited => "unlimited",
            Self::DenyAll => "deny-all",
        }
    }

    /// The limit of a process that has a share of this one.
    pub(crate) fn scaled(&self, share: Share) -> Self {
        let mut scaled = self.clone();
        match &mut scaled {
            Self::SlidingLog(SlidingLog { quota, .. })
            | Self::SlidingCounter(SlidingCounter { quota, .. })
            | Self::FixedWindow(FixedWindow { quota, .. })
            | Self::Concurrency(Concurrency { quota, .. }) => *quota = share.part_of(*quota),
            Self::TokenBucket(bucket) => *bucket = bucket.scaled(share),
            Self::Unlimited | Self::DenyAll => {}
        }
        scaled
    }

    /// A number in which nearly all limits differ that one policy has.
    #[inline]
    pub(crate) fn hash(&self) -> u64 {
        let length = self.window().or(self.lease_length());
        let rest = match (length, self) {
            (Some(length), _) => (length.as_micros() as u64).rotate_left(32),
            (None, Self::FixedWindow(fixed)) => fixed.hash_of_calendar(),
            (None, _) => 0,
        };
        (self.quota() ^ rest).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Whether a store counts for it.
    #[inline]
    pub(crate) fn is_counted(&self) -> bool {
        !matches!(self, Self::Unlimited | Self::DenyAll)
    }

    /// Refuses a wait that hardly ever ends in time: a hundredth of the time in which the limit has room for one more request, if
    /// it is used up, is longer.
    pub(crate) fn validate_wait(&self, longest: Duration) -> Result<(), ConfigError> {
        let returns_after = match (self, self.window()) {
            (Self::FixedWindow(fixed), _) => Duration::from_micros(fixed.shortest_us()),
            (_, Some(window)) => window / u32::try_from(self.quota()).unwrap_or(u32::MAX),
            (_, None) => return Ok(()),
        };
        if longest.is_zero() || longest >= returns_after / 100 {
            return Ok(());
        }
        Err(ConfigError::new(format!(
            "requests would wait in vain: `{self}` has room again after {} or more, and `.wait_up_to(..)`, in files `wait`, is {}; use a longer wait, or none",
            LengthText(returns_after),
            LengthText(longest),
        )))
    }

    /// The length of the leases that hold slots.
    #[inline]
    pub(crate) fn lease_length(&self) -> Option<Duration> {
        let Self::Concurrency(slots) = self else { return None };
        Some(slots.lease)
    }

    /// For how long units may be [taken ahead](SlidingLog::prefetch); `None` if they are not.
    #[inline]
    pub(crate) fn prefetch_time(&self) -> Option<Duration> {
        let ahead = match self {
            Self::SlidingLog(log) => log.ahead(),
            Self::FixedWindow(fixed) => fixed.ahead(),
            Self::TokenBucket(bucket) => bucket.ahead(),
            Self::SlidingCounter(_) | Self::Concurrency(_) | Self::Unlimited | Self::DenyAll => return None,
        };
        (!ahead.is_zero()).then_some(ahead)
    }

    /// Whether a request holds what it takes until it ends.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.lease_length().is_some()
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        match self {
            Self::SlidingLog(log) => log.validate(),
            Self::TokenBucket(bucket) => bucket.validate(),
            Self::SlidingCounter(_) | Self::FixedWindow(_) | Self::Concurrency(_) | Self::Unlimited | Self::DenyAll => {
                Ok(())
            }
        }
    }
}

macro_rules! from_algorithms {
    ($($algorithm:ident)+) => {
        $(
            impl From<$algorithm> for Limit {
                fn from(limit: $algorithm) -> Self {
                    Self::$algorithm(limit)
                }
            }
        )+
    };
}

from_algorithms!(SlidingLog SlidingCounter FixedWindow TokenBucket Concurrency);

/// The line of text that parses to the same limit, if that is [valid](crate::Policy::validate).
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SlidingLog(log) => log.fmt(f),
            Self::SlidingCounter(counter) => counter.fmt(f),
            Self::FixedWindow(fixed) => fixed.fmt(f),
            Self::TokenBucket(bucket) => bucket.fmt(f),
            Self::Concurrency(slots) => slots.fmt(f),
            Self::Unlimited | Self::DenyAll => f.write_str(self.algorithm()),
        }
    }
}

/// A fraction of a limit, above 0 and at most 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Share {
    pub(super) parts: u32,
    pub(super) of: u32,
}

impl Share {
    pub(crate) const WHOLE: Self = Self { parts: 1, of: 1 };

    /// `parts` of `of` parts; `None` if `parts` is 0 or above `of`.
    pub(crate) const fn new(parts: u32, of: u32) -> Option<Self> {
        if parts == 0 || parts > of {
            return None;
        }
        Some(Self { parts, of })
    }

    /// The share of a quota, rounded down, and at least 1.
    pub(super) fn part_of(self, quota: u64) -> u64 {
        let part = u128::from(quota) * u128::from(self.parts) / u128::from(self.of);
        u64::try_from(part).unwrap_or(quota).max(1)
    }
}

/// What shapes the state of a limit: the algorithm and the hash of its numbers. A count of another shape is another count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape(Option<Discriminant<Limit>>, u64);

impl Shape {
    pub(crate) const BANS: Self = Self(None, 0);
}

/// The shape of a limit as it is written in the keys of Redis, such as `log/30s`.
fn shape_text(limit: &Limit) -> String {
    let name = limit.algorithm();
    let us = |micros| LengthText(Duration::from_micros(micros));
    match limit {
        Limit::SlidingLog(log) if log.grain_us() == 0 => format!("{name}/{}", us(log.window_us())),
        Limit::SlidingLog(log) => format!("{name}/{}/{}", us(log.window_us()), us(log.grain_us())),
        Limit::SlidingCounter(counter) => format!("{name}/{}", us(counter.window_us())),
        Limit::FixedWindow(fixed) => format!("{name}/{}", fixed.shape_text()),
        Limit::TokenBucket(bucket) => {
            // However the rate is written.
            let (rate, period) = bucket.reduced;
            format!("{name}/{rate}/{}", us(period))
        }
        Limit::Concurrency(_) | Limit::Unlimited | Limit::DenyAll => name.to_owned(),
    }
}

/// A limit under the name of a policy, with what depends on these alone.
#[derive(Debug)]
pub(crate) struct NamedLimit {
    pub(crate) name: Arc<str>,
    /// The name under which it is counted, if that is another one.
    pub(crate) former: Option<Arc<str>>,
    pub(crate) limit: Limit,
    /// The hash of the name under which it is counted, by [`hash_text`].
    pub(crate) name_hash: u64,
    pub(crate) shape: Shape,
    /// The shape as in the keys of Redis.
    #[cfg(feature = "_redis")]
    pub(crate) shape_text: Box<str>,
    /// The member of `RateLimit-Policy`, once a response has had it.
    pub(crate) policy_item: OnceLock<HeaderValue>,
    /// The body of the response to a request that this policy alone denies, once there was one.
    pub(crate) problem: OnceLock<Bytes>,
}

impl NamedLimit {
    pub(crate) fn new(name: Arc<str>, limit: Limit) -> Self {
        let shape_text = shape_text(&limit);
        Self {
            name_hash: hash_text(&name),
            shape: Shape(Some(discriminant(&limit)), hash_text(&shape_text)),
            #[cfg(feature = "_redis")]
            shape_text: shape_text.into(),
            name,
            former: None,
            limit,
            policy_item: OnceLock::new(),
            problem: OnceLock::new(),
        }
    }

    /// The same, counted under a former name of the policy if it has one.
    pub(crate) fn formerly(mut self, former: Option<Arc<str>>) -> Self {
        self.former = former;
        self.name_hash = hash_text(self.counted_as());
        self
    }

    /// The name under which it is counted.
    #[inline]
    pub(crate) fn counted_as(&self) -> &str {
        self.former.as_ref().unwrap_or(&self.name)
    }

    /// Whether both limits share their counts, whatever their quotas.
    #[inline]
    pub(crate) fn has_counts_of(&self, other: &Self) -> bool {
        self.shape == other.shape && self.counted_as() == other.counted_as()
    }

    /// Another limit of the same policy.
    pub(crate) fn with(&self, limit: Limit) -> Self {
        Self::new(self.name.clone(), limit).formerly(self.former.clone())
    }

    /// A share of the limit. It has the same counts, but for a bucket of another rate.
    pub(crate) fn scaled(&self, share: Share) -> Self {
        self.with(self.limit.scaled(share))
    }
}

impl PartialEq for NamedLimit {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.former == other.former && self.limit == other.limit
    }
}

impl Eq for NamedLimit {}

/// The 64-bit hash of a text, such as the name of a policy: the same in each process and version.
pub(crate) fn hash_text(text: &str) -> u64 {
    hash_bytes(text.bytes())
}

/// The 64-bit FNV-1a hash of bytes, and the last step of MurmurHash3: short ones differ in the low bits of the sum alone.
pub(crate) fn hash_bytes(bytes: impl Iterator<Item = u8>) -> u64 {
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mixed = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    mixed ^ (mixed >> 33)
}
