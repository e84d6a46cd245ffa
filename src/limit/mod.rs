//! How much: the algorithms, and the arithmetic that decides.
//!
//! Reach for [`SlidingLog`] first. It keeps the time of every admission of the last window, so it never admits more than
//! its limit in any window of that length, wherever the window starts.
//!
//! Nothing in this module reads a clock, waits or knows of HTTP: the time is handed in, in microseconds, and each rule is
//! written twice with the same names, here for [`MemoryStore`](crate::MemoryStore) and in `lua/` for Redis.

mod sliding_log;

use std::{fmt, time::Duration};

pub use self::sliding_log::SlidingLog;

pub(crate) use self::sliding_log::Log;

use crate::ConfigError;

/// How much a caller may use.
///
/// Every algorithm is a type of its own, with only the settings that mean something for it, and turns into a `Limit`:
///
/// ```
/// use tower_quota::{Limit, SlidingLog};
///
/// let limit = Limit::from(SlidingLog::per_minute(100));
/// assert_eq!(limit.quota(), 100);
/// assert_eq!(limit.window().as_secs(), 60);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// So many in any window of a length, exactly.
    SlidingLog(SlidingLog),
}

impl Limit {
    /// How many requests of cost 1 are admitted at once when nothing was used yet.
    #[must_use]
    pub fn quota(&self) -> u64 {
        match self {
            Self::SlidingLog(log) => log.quota(),
        }
    }

    /// The length of the window that the quota is for.
    #[must_use]
    pub fn window(&self) -> Duration {
        match self {
            Self::SlidingLog(log) => log.window(),
        }
    }

    /// The name of the algorithm in the keys of a store.
    pub(crate) fn algorithm(&self) -> &'static str {
        match self {
            Self::SlidingLog(_) => SlidingLog::NAME,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        match self {
            Self::SlidingLog(log) => log.validate(),
        }
    }
}

/// `sliding-log 100/60s`
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SlidingLog(log) => log.fmt(f),
        }
    }
}

/// The algorithm contract: what one rule does with what is stored for one key.
///
/// A store settles the state, asks how much room there is, adds what it admits, and reports. A rule does no more than
/// [`BOUND`] steps in one round of these.
pub(crate) trait Rule {
    /// What is stored for a key.
    type State: Default;

    /// Forgets what no longer counts at `now`.
    fn settle(&self, state: &mut Self::State, now: u64);

    /// How much weight fits.
    fn room(&self, state: &Self::State) -> u64;

    /// Adds weight, whether it fits or not.
    fn add(&self, state: &mut Self::State, now: u64, weight: u64);

    /// How long until `cost`, which does not fit, will fit if nothing else is added; at least 1.
    fn wait(&self, state: &Self::State, now: u64, cost: u64) -> u64;

    /// How long until nothing counts anymore.
    fn reset(&self, state: &Self::State, now: u64) -> u64;
}

/// What is stored for one key, by algorithm.
#[derive(Debug)]
pub(crate) enum State {
    Log(Log),
}

impl State {
    pub(crate) fn fresh(limit: &Limit) -> Self {
        match limit {
            Limit::SlidingLog(_) => Self::Log(Log::default()),
        }
    }
}

/// Calls the rule that belongs to a state; a state of another algorithm starts afresh.
macro_rules! dispatch {
    ($limit:expr, $state:expr, $rule:ident, $inner:ident => $call:expr) => {
        match ($limit, $state) {
            (Limit::SlidingLog($rule), State::Log($inner)) => $call,
        }
    };
}

impl Limit {
    pub(crate) fn settle(&self, state: &mut State, now: u64) {
        dispatch!(self, state, rule, inner => rule.settle(inner, now));
    }

    pub(crate) fn room(&self, state: &State) -> u64 {
        dispatch!(self, state, rule, inner => rule.room(inner))
    }

    pub(crate) fn add(&self, state: &mut State, now: u64, weight: u64) {
        dispatch!(self, state, rule, inner => rule.add(inner, now, weight));
    }

    pub(crate) fn wait(&self, state: &State, now: u64, cost: u64) -> u64 {
        dispatch!(self, state, rule, inner => rule.wait(inner, now, cost))
    }

    pub(crate) fn reset(&self, state: &State, now: u64) -> u64 {
        dispatch!(self, state, rule, inner => rule.reset(inner, now))
    }
}

/// How many entries one charge may read or remove.
pub(crate) const BOUND: usize = 1_000;

/// How far ahead of the clock an entry may be and still belong to it, in microseconds.
pub(crate) const SLACK: u64 = 1_000_000;

/// The largest quota: the largest integer of a structured field (RFC 9651 §3.3.1).
const MAX_QUOTA: u64 = 999_999_999_999_999;

const MIN_WINDOW: Duration = Duration::from_millis(1);
const MAX_WINDOW: Duration = Duration::from_secs(10 * 366 * 86_400);

/// What is wrong with the numbers of a limit, if anything.
///
/// A message, not an error type, since it is also what the `const` constructors panic with.
const fn fault(quota: u64, window: Duration) -> Option<&'static str> {
    if quota == 0 {
        return Some("a limit must be at least 1, as in `SlidingLog::per_minute(100)`");
    }
    if quota > MAX_QUOTA {
        return Some("a limit must be at most 999999999999999");
    }
    if window.as_micros() < MIN_WINDOW.as_micros() || window.as_micros() > MAX_WINDOW.as_micros() {
        return Some(
            "a window must be between 1 ms and 10 years, as in `SlidingLog::new(100, Duration::from_secs(60))`",
        );
    }
    if !window.subsec_nanos().is_multiple_of(1_000) {
        return Some("a window must be a whole number of microseconds");
    }
    None
}

/// A window as its text form spells it, in the largest unit that divides it.
struct Span(Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.as_micros();
        match us {
            _ if us.is_multiple_of(1_000_000) => write!(f, "{}s", us / 1_000_000),
            _ if us.is_multiple_of(1_000) => write!(f, "{}ms", us / 1_000),
            _ => write!(f, "{us}us"),
        }
    }
}
