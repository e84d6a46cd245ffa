use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    num::NonZeroU64,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    ban::Banned, concurrency::Leases, fixed_window::Window, limit::Limit, line::LONGEST_WAIT_US,
    sliding_counter::Counter, sliding_log::Log, token_bucket::Bucket,
};

/// The contract of an algorithm, which is written with the same names in `lua/`.
///
/// Times are microseconds since the Unix epoch, lengths of time are microseconds. From one `read` to the next a rule reads or removes at
/// most [`BOUND`] entries.
pub(crate) trait Rule {
    /// What is stored for one key. The default is the state of a key that nothing was counted on.
    type State: Default;

    /// Forgets what does not count, and returns the weight that fits.
    ///
    /// Entries that are ahead of the clock, because it was set back, are removed if `needed` does not fit beside them.
    fn read(&self, state: &mut Self::State, now: u64, needed: u64) -> u64;

    /// Adds the weight of so many requests, whether it fits or not.
    fn add(&self, state: &mut Self::State, now: u64, weight: u64, count: u64);

    /// Takes back weight that was added at the time `at`, as far as it still counts, beside `kept`, which was added with it and
    /// stays. Returns whether the state changed.
    fn give_back(&self, state: &mut Self::State, now: u64, at: u64, weight: u64, kept: u64) -> bool;

    /// Time until `cost`, which does not fit now, fits if nothing else is added; at least 1.
    fn wait(&self, state: &Self::State, now: u64, cost: u64) -> u64;

    /// Time until `cost` fits when `before` was added, each part of it as soon as it fits, or less than that, where both do not fit now;
    /// `None` if each quota takes a [cycle](Limit::cycle_us).
    fn wait_behind(&self, _: &Self::State, _now: u64, _before: u64, _cost: u64) -> Option<u64> {
        None
    }

    /// Time until nothing counts, if nothing else is added.
    fn reset(&self, state: &Self::State, now: u64) -> u64;

    /// The weight that leases leave, for an algorithm with leases.
    fn room_of_leases(&self, _: &Self::State) -> Option<u64> {
        None
    }

    /// Makes a change, for an algorithm with leases that of this lease. Returns whether the state changed.
    #[inline(always)]
    fn change(&self, state: &mut Self::State, now: u64, change: Change, cost: u64, _: Option<LeaseId>) -> bool {
        match change {
            Change::Nothing | Change::Renew | Change::End => false,
            Change::Add { count } => {
                self.add(state, now, cost.saturating_mul(count), count);
                true
            }
            Change::GiveBack { at, kept } => self.give_back(state, now, at, cost, kept),
        }
    }
}

/// What a decision does to a state.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Nothing,
    /// Adds the costs of so many requests.
    Add {
        count: u64,
    },
    /// Takes back what was added at that time, or ends the lease.
    GiveBack {
        at: u64,
        kept: u64,
    },
    /// Renews a lease, or adds it again.
    Renew,
    /// Ends a lease.
    End,
}

/// The most entries that one charge reads or removes.
pub(crate) const BOUND: usize = 1_000;

/// The largest time by which an entry may be ahead of the clock and still belong to it, in microseconds.
pub(crate) const SLACK: u64 = 1_000_000;

/// The largest quota: the largest integer of a structured field (RFC 9651 §3.3.1).
pub(crate) const MAX_QUOTA: u64 = 999_999_999_999_999;

/// Numbers in Lua are exact below this.
pub(crate) const MAX_EXACT: u64 = 1 << 53;

/// The largest weight that is stored for one key, at which Lua still has halves. A larger debt makes no difference.
pub(crate) const MAX_TOTAL: u64 = MAX_EXACT / 4;

/// What is stored for one key: the state of the algorithm that the key is counted by, or of bans.
#[derive(Debug)]
pub(crate) enum State {
    Log(Log),
    Counter(Counter),
    Window(Window),
    Bucket(Bucket),
    Banned(Banned),
    Leases(Leases),
}

/// Calls a rule with the state of its algorithm. A store has neither a state nor a charge of a limit that counts nothing.
macro_rules! dispatch {
    ($limit:expr, $state:expr, |$rule:ident, $inner:ident| $call:expr) => {
        match ($limit, $state) {
            (Limit::SlidingLog($rule), State::Log($inner)) => $call,
            (Limit::SlidingCounter($rule), State::Counter($inner)) => $call,
            (Limit::FixedWindow($rule), State::Window($inner)) => $call,
            (Limit::TokenBucket($rule), State::Bucket($inner)) => $call,
            (Limit::Concurrency($rule), State::Leases($inner)) => $call,
            _ => mismatch(),
        }
    };
}

impl State {
    /// The state of a key that nothing was counted on.
    pub(crate) fn new(limit: &Limit) -> Self {
        match limit {
            Limit::SlidingLog(_) => Self::Log(Log::default()),
            Limit::SlidingCounter(_) => Self::Counter(Counter::default()),
            Limit::FixedWindow(_) => Self::Window(Window::default()),
            Limit::TokenBucket(_) => Self::Bucket(Bucket::default()),
            Limit::Concurrency(_) => Self::Leases(Leases::default()),
            Limit::Unlimited | Limit::DenyAll => mismatch(),
        }
    }

    /// What to [restore](Self::restore) if a decision changes nothing; `None` if what [`Limit::read`] does is kept.
    ///
    /// In Redis, too, such a decision stores nothing, except that a log loses its expired entries, and slots their expired
    /// leases.
    #[inline]
    pub(crate) fn saved(&self) -> Option<Saved> {
        match self {
            Self::Log(_) | Self::Leases(_) | Self::Banned(_) => None,
            Self::Counter(counter) => Some(Saved::Counter(*counter)),
            Self::Window(window) => Some(Saved::Window(*window)),
            Self::Bucket(bucket) => Some(Saved::Bucket(*bucket)),
        }
    }

    pub(crate) fn restore(&mut self, saved: Saved) {
        *self = match saved {
            Saved::Counter(counter) => Self::Counter(counter),
            Saved::Window(window) => Self::Window(window),
            Saved::Bucket(bucket) => Self::Bucket(bucket),
        };
    }
}

/// A state of an algorithm that stores a few numbers.
#[derive(Clone, Copy)]
pub(crate) enum Saved {
    Counter(Counter),
    Window(Window),
    Bucket(Bucket),
}

/// The result of a [`Change`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effect {
    /// Whether the change has added or subtracted anything.
    pub(crate) changed: bool,
    /// The weight that fits then, where it is known without reading the state again.
    pub(crate) room: Option<u64>,
    /// The time until nothing counts, for which the state is stored.
    pub(crate) reset: u64,
}

/// The steps of a decision. The state is [new](State::new) of a limit of the same [shape](Limit::shape), and times are in microseconds.
///
/// All states of a request are read before any is changed, since a request is admitted if all of them fit.
impl Limit {
    /// Forgets what does not count, and returns the weight that fits.
    #[inline]
    pub(crate) fn read(&self, state: &mut State, now: u64, needed: u64) -> u64 {
        dispatch!(self, state, |rule, state| rule.read(state, now, needed))
    }

    /// Makes a change, of this lease if the algorithm has leases.
    #[inline(always)]
    pub(crate) fn change(
        &self,
        state: &mut State,
        now: u64,
        change: Change,
        cost: u64,
        lease: Option<LeaseId>,
    ) -> Effect {
        dispatch!(self, state, |rule, state| {
            let changed = rule.change(state, now, change, cost, lease);
            Effect {
                changed,
                room: rule.room_of_leases(state),
                reset: rule.reset(state, now),
            }
        })
    }

    /// Whether the slots of this lease are held.
    pub(crate) fn holds(&self, state: &State, lease: Option<LeaseId>, weight: u64) -> bool {
        matches!((self, state), (Self::Concurrency(rule), State::Leases(leases)) if rule.holds(leases, lease, weight))
    }

    /// Time until a cost fits behind those before it, with this room now, or less than that. By default each quota beyond the first
    /// takes a [cycle](Self::cycle_us) more.
    #[cold]
    pub(crate) fn time_until(&self, state: &State, now: u64, room: u64, (before, cost): (u64, u64)) -> u64 {
        // More waits than Lua counts exactly.
        let before = before.min(MAX_TOTAL);
        if before + cost <= room {
            return 0;
        }
        let behind = dispatch!(self, state, |rule, state| rule.wait_behind(state, now, before, cost));
        if let Some(wait) = behind {
            return wait.min(LONGEST_WAIT_US);
        }
        let (quota, weight) = (self.quota(), before + cost);
        let cycles = if self.is_held() {
            0
        } else {
            weight.saturating_sub(1) / quota
        };
        let rest = weight - cycles * quota;
        let wait = if rest <= room { 0 } else { self.wait(state, now, rest) };
        let cycles_us = cycles.saturating_mul(self.cycle_us());
        cycles_us.saturating_add(wait).min(LONGEST_WAIT_US)
    }

    /// The time in which the quota is restored, for windows of a calendar the least; 0 if it is not known.
    pub(crate) fn cycle_us(&self) -> u64 {
        match self {
            Self::Concurrency(_) => 0,
            // The window that counts, which is longer with units that are taken ahead.
            Self::SlidingLog(log) => log.window_us(),
            Self::FixedWindow(fixed) => fixed.shortest_us(),
            Self::SlidingCounter(_) | Self::TokenBucket(_) | Self::Unlimited | Self::DenyAll => {
                self.window().map_or(1, |window| window.as_micros() as u64)
            }
        }
    }

    /// Time until `cost`, which does not fit now, fits if nothing else is added; at least 1.
    pub(crate) fn wait(&self, state: &State, now: u64, cost: u64) -> u64 {
        dispatch!(self, state, |rule, state| rule.wait(state, now, cost))
    }
}

#[cold]
fn mismatch() -> ! {
    unreachable!("a state is looked up by its algorithm, and nothing is sent to a store for other limits")
}

/// The id of a lease: what holds slots of a [`Concurrency`](crate::Concurrency) limit, until it ends or expires.
///
/// It consists of two integers below 2^53, which a double holds exactly: a number that is unique in the process, and the random
/// number of the process.
///
/// ```
/// use tower_quota::store::LeaseId;
///
/// let id = LeaseId::random();
/// assert_ne!(id, LeaseId::random());
/// assert!(id.parts().iter().all(|part| *part < 1 << 53));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(NonZeroU64, u64);

impl LeaseId {
    /// An id that was not used yet.
    #[must_use]
    #[inline(never)]
    pub fn random() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);

        // No process takes as many as are exact in a double.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN), Self::process())
    }

    /// The number of this process, which is the second part of its ids.
    pub(crate) fn process() -> u64 {
        static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0) >> 11);
        *PROCESS
    }

    /// The two integers below 2^53 that a store keeps.
    #[must_use]
    pub fn parts(self) -> [u64; 2] {
        [self.0.get(), self.1]
    }
}

/// In hexadecimal digits.
impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaseId({:x}-{:x})", self.0, self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One limit of each algorithm that counts. The `match` does not compile without a new one.
    fn limits() -> Vec<Limit> {
        let texts = [
            "sliding-log 1/s",
            "sliding-counter 1/s",
            "fixed-window 1/s",
            "token-bucket 1/s",
            "concurrency 1",
        ];
        let limits = texts.map(|text| text.parse::<Limit>().unwrap()).to_vec();
        let variants = limits.iter().map(|limit| match limit {
            Limit::SlidingLog(_) => 0,
            Limit::SlidingCounter(_) => 1,
            Limit::FixedWindow(_) => 2,
            Limit::TokenBucket(_) => 3,
            Limit::Concurrency(_) => 4,
            Limit::Unlimited | Limit::DenyAll => 5,
        });
        assert_eq!(variants.collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        limits
    }

    #[test]
    fn each_algorithm_that_counts_denies_the_request_after_the_last_one() {
        for limit in limits() {
            let mut state = State::new(&limit);
            assert_eq!(limit.read(&mut state, 1, 1), 1, "{limit}");
            limit.change(&mut state, 1, Change::Add { count: 1 }, 1, None);
            assert_eq!(limit.read(&mut state, 1, 1), 0, "{limit}");
        }
    }

    #[cfg(feature = "_redis")]
    impl LeaseId {
        /// The id with these parts, of which the first is not 0.
        pub(crate) fn of_parts([high, low]: [u64; 2]) -> Option<Self> {
            Some(Self(NonZeroU64::new(high)?, low))
        }
    }
}
