//! How much: the algorithms, and the arithmetic that decides.
//!
//! Reach for [`SlidingLog`] first. It keeps the time of every admission of the last window, so it never admits more than
//! its limit in any window of that length, wherever the window starts.
//!
//! Nothing in this module reads a clock, waits or knows of HTTP: the time is handed in, in microseconds, and each rule is
//! written twice with the same names, here for [`MemoryStore`](crate::MemoryStore) and in `lua/` for Redis.

mod fixed_window;
mod parse;
mod sliding_counter;
mod sliding_log;
mod token_bucket;

use std::{fmt, time::Duration};

#[cfg(feature = "calendar")]
pub use self::fixed_window::Calendar;
pub use self::{
    fixed_window::FixedWindow, parse::ParseLimitError, sliding_counter::SlidingCounter, sliding_log::SlidingLog,
    token_bucket::TokenBucket,
};

use self::{fixed_window::Window, sliding_counter::Counter, sliding_log::Log, token_bucket::Bucket};
use crate::ConfigError;

/// How much a caller may use.
///
/// Every algorithm is a type of its own, with only the settings that mean something for it, and turns into a `Limit`.
/// A limit is also a line of text, as in a file of limits:
///
/// ```
/// use tower_quota::{Limit, SlidingLog, TokenBucket};
///
/// assert_eq!("sliding-log 100/min".parse(), Ok(Limit::from(SlidingLog::per_minute(100))));
/// assert_eq!("token-bucket 10/s burst 30".parse(), Ok(Limit::from(TokenBucket::per_second(10).burst(30))));
///
/// let error = "100 per minute".parse::<Limit>().unwrap_err();
/// assert!(error.to_string().contains("`sliding-log 100/min`"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// So many in any window of a length, exactly.
    SlidingLog(SlidingLog),
    /// So many in any window of a length, nearly, in little memory.
    SlidingCounter(SlidingCounter),
    /// So many in each window, one after the other.
    FixedWindow(FixedWindow),
    /// So many on average, with bursts.
    TokenBucket(TokenBucket),
    /// Everything; nothing is counted, and no response tells of it.
    Unlimited,
    /// Nothing, without asking the store.
    DenyAll,
}

/// Questions.
impl Limit {
    /// How many requests of cost 1 are admitted at once when nothing was used yet.
    #[must_use]
    pub fn quota(&self) -> u64 {
        match self {
            Self::SlidingLog(log) => log.quota(),
            Self::SlidingCounter(counter) => counter.quota(),
            Self::FixedWindow(fixed) => fixed.quota(),
            Self::TokenBucket(bucket) => bucket.quota(),
            Self::Unlimited => u64::MAX,
            Self::DenyAll => 0,
        }
    }

    /// The length of the window that the quota is for; `None` if it is not always the same.
    ///
    /// For a token bucket, the time in which an empty one becomes full.
    #[must_use]
    pub fn window(&self) -> Option<Duration> {
        match self {
            Self::SlidingLog(log) => Some(log.window()),
            Self::SlidingCounter(counter) => Some(counter.window()),
            Self::FixedWindow(fixed) => fixed.window(),
            Self::TokenBucket(bucket) => Some(bucket.window()),
            Self::Unlimited | Self::DenyAll => None,
        }
    }

    /// The name of the algorithm in the keys of a store.
    pub(crate) fn algorithm(&self) -> &'static str {
        match self {
            Self::SlidingLog(_) => SlidingLog::NAME,
            Self::SlidingCounter(_) => SlidingCounter::NAME,
            Self::FixedWindow(_) => FixedWindow::NAME,
            Self::TokenBucket(_) => TokenBucket::NAME,
            Self::Unlimited => "unlimited",
            Self::DenyAll => "deny-all",
        }
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        match self {
            Self::SlidingLog(log) => log.validate(),
            Self::SlidingCounter(_) | Self::FixedWindow(_) | Self::Unlimited | Self::DenyAll => Ok(()),
            Self::TokenBucket(bucket) => bucket.validate(),
        }
    }
}

/// The line of text that parses to the same limit.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SlidingLog(log) => log.fmt(f),
            Self::SlidingCounter(counter) => counter.fmt(f),
            Self::FixedWindow(fixed) => fixed.fmt(f),
            Self::TokenBucket(bucket) => bucket.fmt(f),
            Self::Unlimited => f.write_str("unlimited"),
            Self::DenyAll => f.write_str("deny-all"),
        }
    }
}

/// The algorithm contract: what one rule does with what is stored for one key.
///
/// A store settles the state, asks how much room there is, adds what it admits, and reports. The time is in microseconds,
/// and in one round of these a rule looks at [`BOUND`] entries at most.
pub(crate) trait Rule {
    /// What is stored for a key.
    type State: Default;

    /// Forgets what no longer counts at `now`.
    fn settle(&self, state: &mut Self::State, now: u64);

    /// How much weight fits.
    fn room(&self, state: &Self::State, now: u64) -> u64;

    /// Adds weight, whether it fits or not.
    fn add(&self, state: &mut Self::State, now: u64, weight: u64);

    /// How long until `cost`, which does not fit, will fit if nothing else is added; at least 1.
    fn wait(&self, state: &Self::State, now: u64, cost: u64) -> u64;

    /// How long until nothing counts anymore.
    fn reset(&self, state: &Self::State, now: u64) -> u64;

    /// Takes back weight that was added `at` a time, as far as it still counts, and says whether it was there.
    fn refund(&self, state: &mut Self::State, now: u64, at: u64, weight: u64) -> bool;
}

/// What is stored for one key, by algorithm.
#[derive(Debug)]
pub(crate) enum State {
    Log(Log),
    Counter(Counter),
    Window(Window),
    Bucket(Bucket),
    Nothing,
}

impl State {
    pub(crate) fn fresh(limit: &Limit) -> Self {
        match limit {
            Limit::SlidingLog(_) => Self::Log(Log::default()),
            Limit::SlidingCounter(_) => Self::Counter(Counter::default()),
            Limit::FixedWindow(_) => Self::Window(Window::default()),
            Limit::TokenBucket(_) => Self::Bucket(Bucket::default()),
            Limit::Unlimited | Limit::DenyAll => Self::Nothing,
        }
    }

    /// What to go back to when nothing is added: settling alone changes nothing in Redis either, except that a log drops
    /// what has expired.
    pub(crate) fn unsettled(&self) -> Option<Self> {
        match self {
            Self::Log(_) | Self::Nothing => None,
            Self::Counter(counter) => Some(Self::Counter(*counter)),
            Self::Window(window) => Some(Self::Window(*window)),
            Self::Bucket(bucket) => Some(Self::Bucket(*bucket)),
        }
    }
}

/// Calls the rule that belongs to a state. The algorithm is part of what a state is stored under, so they always match.
macro_rules! dispatch {
    ($limit:expr, $state:expr, $rule:ident, $inner:ident => $call:expr, else $otherwise:expr) => {
        match ($limit, $state) {
            (Limit::SlidingLog($rule), State::Log($inner)) => $call,
            (Limit::SlidingCounter($rule), State::Counter($inner)) => $call,
            (Limit::FixedWindow($rule), State::Window($inner)) => $call,
            (Limit::TokenBucket($rule), State::Bucket($inner)) => $call,
            _ => $otherwise,
        }
    };
}

impl Limit {
    pub(crate) fn settle(&self, state: &mut State, now: u64) {
        dispatch!(self, state, rule, inner => rule.settle(inner, now), else ());
    }

    pub(crate) fn room(&self, state: &State, now: u64) -> u64 {
        dispatch!(self, state, rule, inner => rule.room(inner, now), else self.quota())
    }

    pub(crate) fn add(&self, state: &mut State, now: u64, weight: u64) {
        dispatch!(self, state, rule, inner => rule.add(inner, now, weight), else ());
    }

    pub(crate) fn wait(&self, state: &State, now: u64, cost: u64) -> u64 {
        dispatch!(self, state, rule, inner => rule.wait(inner, now, cost), else 1)
    }

    pub(crate) fn reset(&self, state: &State, now: u64) -> u64 {
        dispatch!(self, state, rule, inner => rule.reset(inner, now), else 0)
    }

    pub(crate) fn refund(&self, state: &mut State, now: u64, at: u64, weight: u64) -> bool {
        dispatch!(self, state, rule, inner => rule.refund(inner, now, at, weight), else false)
    }
}

/// How many entries one charge may read or remove.
pub(crate) const BOUND: usize = 1_000;

/// How far ahead of the clock an entry may be and still belong to it, in microseconds.
pub(crate) const SLACK: u64 = 1_000_000;

/// The largest quota: the largest integer of a structured field (RFC 9651 §3.3.1).
pub(crate) const MAX_QUOTA: u64 = 999_999_999_999_999;

/// Lua's numbers are exact below this.
const MAX_EXACT: u64 = 1 << 53;

/// The most that is counted on one key; debts that are larger make no difference.
const MAX_TOTAL: u64 = MAX_EXACT / 2;

const MIN_WINDOW: Duration = Duration::from_millis(1);
const MAX_WINDOW: Duration = Duration::from_secs(10 * 366 * 86_400);

/// What is wrong with the numbers of a limit, if anything.
///
/// A message, not an error type, since it is also what the `const` constructors panic with.
const fn fault(quota: u64, window: Duration) -> Option<&'static str> {
    if quota == 0 {
        return Some(
            "a limit is at least 1, as in `SlidingLog::per_minute(100)`; `Limit::DenyAll` denies everything, and \
             `Limit::Unlimited` nothing",
        );
    }
    if quota > MAX_QUOTA {
        return Some("a limit is at most 999999999999999; `Limit::Unlimited` admits everything");
    }
    if window.as_micros() < MIN_WINDOW.as_micros() || window.as_micros() > MAX_WINDOW.as_micros() {
        return Some(
            "a window is between 1 ms and 10 years long, as in `SlidingLog::new(100, Duration::from_secs(60))`",
        );
    }
    if !window.subsec_nanos().is_multiple_of(1_000) {
        return Some("a window is a whole number of microseconds long");
    }
    None
}

/// The constructors that all algorithms share.
macro_rules! constructors {
    ($name:ident, |$quota:ident, $window:ident| $build:expr) => {
        /// Constructors.
        impl $name {
            /// `limit` in a `window`.
            ///
            /// # Panics
            ///
            /// If the limit is 0 or above 999,999,999,999,999, or the window is not a whole number of microseconds
            /// between 1 ms and 10 years; at compile time in a `const`. [`try_new`](Self::try_new) returns an error
            /// instead.
            ///
            /// ```compile_fail
            #[doc = concat!("# use tower_quota::", stringify!($name), ";")]
            #[doc = concat!("const NONE: ", stringify!($name), " = ", stringify!($name), "::per_minute(0);")]
            /// # let _ = NONE;
            /// ```
            #[track_caller]
            pub const fn new($quota: u64, $window: std::time::Duration) -> Self {
                if let Some(fault) = $crate::limit::fault($quota, $window) {
                    panic!("{}", fault);
                }
                $build
            }

            /// `limit` in a `window`, or what is wrong with these numbers.
            ///
            /// # Errors
            ///
            /// For the numbers that [`new`](Self::new) panics on.
            pub fn try_new($quota: u64, $window: std::time::Duration) -> Result<Self, $crate::ConfigError> {
                match $crate::limit::fault($quota, $window) {
                    Some(fault) => Err($crate::ConfigError::new(fault)),
                    None => Ok($build),
                }
            }

            /// `limit` in a second: 60 means sixty a second.
            ///
            /// # Panics
            ///
            /// If the limit is 0 or above 999,999,999,999,999.
            #[track_caller]
            pub const fn per_second(limit: u64) -> Self {
                Self::new(limit, std::time::Duration::from_secs(1))
            }

            /// `limit` in 60 seconds.
            ///
            /// # Panics
            ///
            /// If the limit is 0 or above 999,999,999,999,999.
            #[track_caller]
            pub const fn per_minute(limit: u64) -> Self {
                Self::new(limit, std::time::Duration::from_secs(60))
            }

            /// `limit` in 60 minutes.
            ///
            /// # Panics
            ///
            /// If the limit is 0 or above 999,999,999,999,999.
            #[track_caller]
            pub const fn per_hour(limit: u64) -> Self {
                Self::new(limit, std::time::Duration::from_secs(3_600))
            }

            /// `limit` in 24 hours.
            ///
            /// # Panics
            ///
            /// If the limit is 0 or above 999,999,999,999,999.
            #[track_caller]
            pub const fn per_day(limit: u64) -> Self {
                Self::new(limit, std::time::Duration::from_secs(86_400))
            }
        }

        impl From<$name> for $crate::Limit {
            fn from(limit: $name) -> Self {
                Self::$name(limit)
            }
        }
    };
}

use constructors;

/// A window as its text form spells it, in the largest unit that divides it.
struct Span(Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.as_micros();
        let (unit, name) = parse::UNITS
            .into_iter()
            .rev()
            .find(|(unit, _)| us.is_multiple_of(*unit))
            .unwrap_or((1, "us"));
        match us / unit {
            1 => f.write_str(name),
            count => write!(f, "{count}{name}"),
        }
    }
}
