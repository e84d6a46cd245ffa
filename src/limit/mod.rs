//! How much: the algorithms, and the arithmetic that decides.
//!
//! # Which one
//!
//! Reach for [`SlidingLog`] first. It promises what most people expect: never more than the limit in any window, wherever
//! the window starts. Take another one when
//!
//! * the limit is high, above some thousand: a [`SlidingLog`] with a [`precision`](SlidingLog::precision). The promise is
//!   the same, and what was admitted comes back a little late.
//! * an average is what matters, and bursts are welcome: a [`TokenBucket`].
//! * people count along, by the clock or by the calendar, "three a month": a [`FixedWindow`], which is
//!   [`aligned`](FixedWindow::aligned) or of the [`calendar`](FixedWindow::calendar).
//! * there are so many callers that each may take a few numbers only: a [`SlidingCounter`], if a bad window may hold nearly
//!   twice the limit and a caller may be denied too early.
//!
//! # What each promises
//!
//! For a limit of N in each window:
//!
//! | algorithm | kept for each key | most in any window | denied with room for ten in a hundred | when |
//! | --- | --- | --- | --- | --- |
//! | [`SlidingLog`] | one entry for each admission of the last window | N | never | up to 100,000 a window |
//! | with [`precision`](SlidingLog::precision) | at most `n` + 1 entries | N | none measured; an admission comes back late by less than one `n`-th of the window | large limits |
//! | [`SlidingCounter`] | 3 numbers | 2 N - 1 | up to 31 % of requests; [its table](SlidingCounter#error) | many keys |
//! | [`FixedWindow`] | 2 numbers | 2 N - 1 | never | counts that people check by hand |
//! | [`aligned`](FixedWindow::aligned) | 2 numbers | 2 N | never | the same, by the clock |
//! | [`TokenBucket`] | 3 numbers | burst + N - 1 | never | an average, with bursts |
//!
//! The most in any window is what a caller gets who knows the algorithm and times its requests: for windows, all at the end
//! of one and all at the start of the next; for a bucket, all that is in it and then each token as it comes. An anchored
//! [`FixedWindow`] needs one request to open the first window, so that one is lost. Tests send that traffic and count.
//!
//! # What each costs
//!
//! Measured on Redis 7.0.15 with jemalloc, as `MEMORY USAGE` says, for a key named
//! `quota:1:log:login:{header:x-user-id=42}`; and how many commands the script of one check runs, the reading of the time
//! included. On Valkey 9.1 a large log needs a third less:
//!
//! | limit | bytes, 1 admitted | 100 admitted | full | commands, admitted | after expiry | denied |
//! | --- | ---: | ---: | ---: | ---: | ---: | ---: |
//! | `sliding-log 100/min` | 120 | 2,136 | 2,136 | 5 | 6 | 5 |
//! | `sliding-log 10000/min` | 120 | 2,136 | 1,291,808 | 5 | 7 | 5 |
//! | `sliding-log 1000000/10s precision 1000` | 136 | 472 | 118,496 | 9 | 11 | 8 |
//! | `sliding-log 1000000/10s precision 100` | 136 | 136 | 3,672 | 9 | 11 | 8 |
//! | `sliding-counter 100/min` | 136 | 136 | 136 | 3 | 3 | 4 |
//! | `fixed-window 100/min` | 136 | 136 | 136 | 3 | 3 | 4 |
//! | `fixed-window 100/min aligned` | 136 | 136 | 136 | 3 | 3 | 4 |
//! | `token-bucket 100/min` | 136 | 136 | 136 | 3 | 3 | 4 |
//!
//! A log takes about 20 bytes for an entry up to 128 entries, and 130 above, where Redis changes its encoding. *After
//! expiry* is an admission that also removes what has left the window. `cargo bench --bench figures --all-features`
//! measures all of this again.
//!
//! A check is one script call whatever the algorithm, and a request of any cost is one entry. A key expires by itself, one
//! second after it stops to matter.
//!
//! # When a limit changes
//!
//! Counts are stored under the name of the policy and of the algorithm.
//!
//! * Other numbers: what was counted stays, and is judged by the new ones. After a lower limit, callers may have to wait
//!   until enough has expired. Where the window got another length, the promise holds one new window later, since what
//!   the old one had forgotten is gone.
//! * Another algorithm, or another name of the policy: counts start afresh, and the old ones expire.
//!
//! While old and new replicas of a service run side by side, each judges the same counts by its own numbers.
//!
//! ```
//! use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog, TokenBucket};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_quota::store::StoreError> {
//! let store = MemoryStore::new();
//! let before = Limiter::new(store.clone(), Policy::new("mail", SlidingLog::per_minute(5)));
//! assert_eq!(before.check("42").await?.remaining(), 4);
//!
//! // The one that was counted still is.
//! let raised = Limiter::new(store.clone(), Policy::new("mail", SlidingLog::per_minute(10)));
//! assert_eq!(raised.check("42").await?.remaining(), 8);
//!
//! // A bucket of its own, and full.
//! let other = Limiter::new(store, Policy::new("mail", TokenBucket::per_minute(10)));
//! assert_eq!(other.check("42").await?.remaining(), 9);
//! # Ok(())
//! # }
//! ```
//!
//! # The rules
//!
//! Nothing in this module reads a clock, waits or knows of HTTP: the time is handed in, in microseconds, and each rule is
//! written twice with the same names, here for [`MemoryStore`](crate::MemoryStore) and in `lua/` for Redis.

#[cfg(feature = "calendar")]
mod calendar;
mod fixed_window;
mod parse;
mod sliding_counter;
mod sliding_log;
mod token_bucket;

use std::{fmt, time::Duration};

#[cfg(feature = "calendar")]
pub use self::calendar::Calendar;
pub use self::{
    fixed_window::FixedWindow, parse::ParseLimitError, sliding_counter::SlidingCounter, sliding_log::SlidingLog,
    token_bucket::TokenBucket,
};

use self::{fixed_window::Window, sliding_counter::Counter, sliding_log::Log, token_bucket::Bucket};
use crate::ConfigError;

/// How much a caller may use.
///
/// Every algorithm is a type of its own, with only the settings that mean something for it, and turns into a `Limit`. The
/// [module](self) helps to choose. A limit is also a line of text, as in a file of limits:
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

    /// The same limit, for who has a share of it.
    pub(crate) fn scaled(&self, share: Share) -> Self {
        match self {
            Self::SlidingLog(log) => log.scaled(share).into(),
            Self::SlidingCounter(counter) => counter.scaled(share).into(),
            Self::FixedWindow(fixed) => fixed.clone().scaled(share).into(),
            Self::TokenBucket(bucket) => bucket.scaled(share).into(),
            Self::Unlimited => Self::Unlimited,
            Self::DenyAll => Self::DenyAll,
        }
    }

    /// Whether there is a count to keep.
    #[inline]
    pub(crate) fn is_counted(&self) -> bool {
        match self {
            Self::SlidingLog(_) | Self::SlidingCounter(_) | Self::FixedWindow(_) | Self::TokenBucket(_) => true,
            Self::Unlimited | Self::DenyAll => false,
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

    /// Forgets what no longer counts at `now`. What a clock that is gone has left may stay while it leaves room for `weight`.
    fn settle(&self, state: &mut Self::State, now: u64, weight: u64);

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

    /// Whether it is what this limit counts by.
    #[inline]
    pub(crate) fn is_of(&self, limit: &Limit) -> bool {
        dispatch!(limit, self, _rule, _inner => true, else matches!(self, Self::Nothing))
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

/// What is done to the count of a key, once it is known whether the request passes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Nothing,
    Add,
    /// Takes back what was added at that time.
    Refund {
        at: u64,
    },
}

/// How a key stands after that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    /// Whether anything was added or taken back.
    pub(crate) changed: bool,
    pub(crate) room: u64,
    pub(crate) reset: u64,
}

/// The two halves of a decision; between them it is known whether all charges of the request fit.
impl Limit {
    /// Forgets what no longer counts, and says how much weight fits.
    #[inline]
    pub(crate) fn settle(&self, state: &mut State, now: u64, weight: u64) -> u64 {
        dispatch!(self, state, rule, inner => {
            rule.settle(inner, now, weight);
            rule.room(inner, now)
        }, else self.quota())
    }

    /// Makes the change, by a weight.
    #[inline]
    pub(crate) fn change(&self, state: &mut State, now: u64, change: Change, weight: u64) -> Standing {
        dispatch!(self, state, rule, inner => {
            let changed = match change {
                Change::Nothing => false,
                Change::Add => {
                    rule.add(inner, now, weight);
                    true
                }
                Change::Refund { at } => rule.refund(inner, now, at, weight),
            };
            Standing {
                changed,
                room: rule.room(inner, now),
                reset: rule.reset(inner, now),
            }
        }, else Standing { changed: false, room: self.quota(), reset: 0 })
    }

    /// How long until `cost`, which does not fit, will fit if nothing else is added; at least 1.
    pub(crate) fn wait(&self, state: &State, now: u64, cost: u64) -> u64 {
        dispatch!(self, state, rule, inner => rule.wait(inner, now, cost), else 1)
    }
}

/// A share of a limit: a fraction above 0 and at most 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    parts: u32,
    of: u32,
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.parts, self.of)
    }
}

impl Share {
    pub(crate) const WHOLE: Self = Self { parts: 1, of: 1 };

    /// `parts` of `of` parts; `None` if that is nothing, or more than the whole.
    #[must_use]
    pub const fn new(parts: u32, of: u32) -> Option<Self> {
        if parts == 0 || parts > of {
            return None;
        }
        Some(Self { parts, of })
    }

    /// The share of this quota, rounded down, and at least 1.
    pub(crate) fn part_of(self, quota: u64) -> u64 {
        let part = u128::from(quota) * u128::from(self.parts) / u128::from(self.of);
        u64::try_from(part).unwrap_or(quota).max(1)
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
