use std::{
    cmp::Ordering,
    collections::{BTreeSet, HashMap},
    fmt,
    time::Duration,
};

use super::{
    rate::LengthText,
    rule::{BOUND, Change, LeaseId, Rule},
};
use crate::ConfigError;

/// Limits how many requests run concurrently, across all processes.
///
/// An admitted request takes a slot for each unit of its cost, and holds it until its response body ends or is dropped. It
/// is for work that takes a while: exports, uploads, connections. A limit in a window counts how often such work begins;
/// this one, how much of it is going on.
///
/// ```
/// use tower_quota::{Concurrency, Limit};
///
/// assert_eq!("concurrency 3".parse(), Ok(Limit::from(Concurrency::new(3))));
/// ```
///
/// # A timeline
///
/// Two exports at once:
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{Concurrency, Limiter, MemoryStore, Policy};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::store::StoreError> {
/// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(2)));
///
/// let first = exports.check("42").await?;
/// let second = exports.check("42").await?;
/// assert!(first.is_allowed() && second.is_allowed());
///
/// // When a slot will be free is not known. Clients are to try again after a second.
/// let denied = exports.check("42").await?;
/// assert_eq!(denied.retry_after(), Some(Duration::from_secs(1)));
///
/// // The first export ends. Its slot is free at once.
/// drop(first);
/// assert!(exports.check("42").await?.is_allowed());
/// # Ok(())
/// # }
/// ```
///
/// # How long a slot is held
///
/// | where | the slots are held until |
/// | --- | --- |
/// | [`RateLimitLayer`](crate::RateLimitLayer) | the response body ends or is dropped. If the handler fails, panics or is cancelled: until then |
/// | [`Limiter`](crate::Limiter) | the last clone of the [`Decision`](crate::Decision) is dropped |
/// | [`Limiter::acquire`](crate::Limiter::acquire) | the last clone of its decision is dropped |
/// | [`Decision::take_slots`](crate::Decision::take_slots) | the [`Slots`](crate::Slots) are dropped, such as at the end of a WebSocket connection |
///
/// A client that reads no more of a response holds its slot for as long as the server keeps the connection. Where callers share
/// slots, add a limit of concurrency for each caller, and a timeout for writes in the server.
///
/// Keep the decision of a limiter while the work lasts: one that is dropped at once holds nothing.
///
/// A slot is not in the [receipt](crate::Decision::take_receipt) of a decision: it is released, not refunded.
///
/// # Waiting for a slot
///
/// With [`Policy::wait_up_to`](crate::Policy::wait_up_to) a request waits until slots are free, and so does a call of
/// [`Limiter::acquire`](crate::Limiter::acquire). It holds none meanwhile, and requests take them in the order of arrival, across
/// all replicas:
///
/// ```
/// use std::time::Duration;
/// use tokio::time::{Instant, sleep};
/// use tower_quota::{AcquireError, Concurrency, Limiter, MemoryStore, Policy};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), AcquireError> {
/// let streams = Policy::new("streams", Concurrency::new(1)).wait_up_to(Duration::from_secs(3));
/// let streams = Limiter::new(MemoryStore::new(), streams);
/// let start = Instant::now();
/// let stream = async || {
///     let _slot = streams.acquire("42").await?;
///     let begun = start.elapsed().as_secs();
///     sleep(Duration::from_secs(2)).await;
///     Ok::<_, AcquireError>(begun)
/// };
///
/// let (first, second, third) = tokio::join!(stream(), stream(), stream());
/// assert_eq!((first?, second?), (0, 2));
/// assert!(matches!(third, Err(AcquireError::Denied(_)))); // no slot was free for it in 3 s
/// # Ok(())
/// # }
/// ```
///
/// A slot that is released wakes the process of the first request in the line. It is checked again by all of its policies, and takes
/// its slots when all of them have room. So limits of slots in any order cannot block each other. A request of a higher cost at the
/// head of the line is not overtaken by others of a lower cost.
///
/// Slots that are free without a release, such as those of an expired lease, are noticed within a second, and so are those of requests
/// that could not wait, and those of a lost message: [Redis](crate::guide::redis#the-user) has the permissions that messages need.
///
/// # Leases
///
/// A slot is held by a lease in the store, which expires after 10 s, or as [`lease`](Self::lease) has it. A task in each runtime
/// renews the leases of the slots that were taken there, by its timers, at least every third of that time. When a process dies,
/// nothing renews its leases, and its slots are free again within one lease. Times are those of the clock of the store; the
/// clocks of processes do not matter.
///
/// A process that is stopped for two thirds of a lease, or that does not reach the store for half of one, may lose its slots to
/// others. So may a runtime that is blocked for two thirds of a lease, or is not driven, such as one of one thread after its
/// `block_on` has returned. Slots that are taken outside of a runtime are renewed only while a runtime of the process holds
/// other slots in the store; without one they expire after one lease.
///
/// The work that has lost its slots is not interrupted: [`Slots::is_lost`](crate::Slots::is_lost) reports it, and that work is
/// the only way in which more than the limit can run at once while the store replies and keeps its data and its clock is not
/// set. A lease that expired is taken up again by the next renewal if there is room. [Behavior under
/// faults](crate::guide::faults#slots) has what happens to slots when Redis, a runtime or a process fails.
///
/// # What it costs
///
/// One entry for each lease, of any cost, and two script calls for each request: one takes the slots, with those of other
/// policies of the request in one decision, and one releases them. Denials of checks with slots are not cached in
/// the process, since a slot can be free at any time. A request that waits needs one script call more when it is woken, and its
/// process one each second for each key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Concurrency {
    pub(super) quota: u64,
    pub(super) lease: Duration,
}

const LEASE: Duration = Duration::from_secs(10);
const MIN_LEASE: Duration = Duration::from_secs(1);
const MAX_LEASE: Duration = Duration::from_secs(3_600);
/// How far ahead a lease expires at most, in microseconds. One that expires later is of a clock that is gone.
pub(crate) const MOST_AHEAD_US: u64 = 2 * MAX_LEASE.as_micros() as u64;

/// The largest number of slots.
const MAX_SLOTS: u64 = 999_999_999;

/// The most slots that one charge takes. It is above each limit, so only charges that do not have to fit take so many.
pub(crate) const HEAVIEST: u64 = MAX_SLOTS + 1;

/// The wait of a denied request in microseconds: when a slot will be free is not known.
pub(crate) const RETRY_US: u64 = 1_000_000;

const QUOTA_FAULT: &str = "there are between 1 and 999999999 slots; `DenyAll`, as text `deny-all`, admits nothing, and `Unlimited` \
     everything";
const LEASE_FAULT: &str = "a lease is a whole number of microseconds between 1 s and 1 h";

/// Constructors.
impl Concurrency {
    /// `slots` requests at once.
    ///
    /// ```
    /// use tower_quota::{Concurrency, Limit};
    ///
    /// const EXPORTS: Concurrency = Concurrency::new(3);
    /// assert_eq!(Limit::from(EXPORTS).quota(), 3);
    /// ```
    ///
    /// # Panics
    ///
    /// If the number is 0 or above 999,999,999; at compile time in a `const`. [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub const fn new(slots: u64) -> Self {
        assert!(slots > 0 && slots <= MAX_SLOTS, "{}", QUOTA_FAULT);
        Self {
            quota: slots,
            lease: LEASE,
        }
    }

    /// Like [`new`](Self::new), with an error in place of a panic, for a number from configuration.
    ///
    /// # Errors
    ///
    /// If `new` panics on it.
    pub fn try_new(slots: u64) -> Result<Self, ConfigError> {
        match slots {
            1..=MAX_SLOTS => Ok(Self::new(slots)),
            _ => Err(ConfigError::new(QUOTA_FAULT)),
        }
    }
}

/// Settings.
impl Concurrency {
    /// The time after which the slots of a process that died are free again, from 1 s to 1 h.
    ///
    /// A process that is stopped for less than two thirds of it, or whose calls of the store fail for less than half of it, keeps
    /// its slots. Leases are renewed at least every third of it: shorter ones take more calls of the store. The default is 10 s.
    ///
    /// While replicas with different times run side by side, each applies its own to its leases.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Concurrency, Limit};
    ///
    /// let backups = Concurrency::new(1).lease(Duration::from_secs(60));
    /// assert_eq!(Limit::from(backups).to_string(), "concurrency 1 lease 1min");
    /// ```
    ///
    /// # Panics
    ///
    /// If the time is not a whole number of microseconds between 1 s and 1 h; at compile time in a `const`.
    #[track_caller]
    pub const fn lease(self, lease: Duration) -> Self {
        assert!(is_valid(lease), "{}", LEASE_FAULT);
        Self { lease, ..self }
    }

    /// Like [`lease`](Self::lease), with an error in place of a panic, for texts.
    pub(crate) fn try_lease(self, lease: Duration) -> Result<Self, ConfigError> {
        match is_valid(lease) {
            true => Ok(Self { lease, ..self }),
            false => Err(ConfigError::new(LEASE_FAULT)),
        }
    }
}

const fn is_valid(lease: Duration) -> bool {
    lease.as_nanos() >= MIN_LEASE.as_nanos()
        && lease.as_nanos() <= MAX_LEASE.as_nanos()
        && lease.subsec_nanos().is_multiple_of(1_000)
}

/// Accessors.
impl Concurrency {
    pub(crate) fn lease_us(&self) -> u64 {
        self.lease.as_micros() as u64
    }
}

/// `concurrency 3`, and if it is not the default, the length of a lease.
impl fmt::Display for Concurrency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "concurrency {}", self.quota)?;
        match self.lease {
            LEASE => Ok(()),
            lease => write!(f, " lease {}", LengthText(lease)),
        }
    }
}

/// The leases of one key.
#[derive(Debug, Default)]
pub(crate) struct Leases(pub(super) Option<Box<Held>>);

#[derive(Debug, Default)]
pub(super) struct Held {
    /// The sum of their weights.
    pub(super) total: u64,
    /// In the order of their expiries.
    pub(super) order: BTreeSet<(u64, Lease)>,
    expiries: HashMap<Lease, u64>,
}

/// A lease as it is stored. Those of one id differ if its length or its weight does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Lease {
    pub(super) id: LeaseId,
    pub(super) length: u64,
    pub(super) weight: u64,
}

impl Lease {
    /// The name of its member in Redis, where members of one time are in the order of their names.
    fn name(&self) -> [[u8; 8]; 4] {
        let [high, low] = self.id.parts();
        [high, low, self.length, self.weight].map(|number| (number as f64).to_le_bytes())
    }
}

impl Ord for Lease {
    fn cmp(&self, other: &Self) -> Ordering {
        self.name().cmp(&other.name())
    }
}

impl PartialOrd for Lease {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Held {
    pub(super) fn remove(&mut self, lease: &Lease) -> bool {
        let Some(expires_at) = self.expiries.remove(lease) else {
            return false;
        };
        self.total -= lease.weight;
        self.order.remove(&(expires_at, *lease))
    }

    /// Adds a lease, or renews it.
    pub(super) fn put(&mut self, lease: Lease, now: u64) {
        self.remove(&lease);
        self.total += lease.weight;
        let expires_at = now + lease.length;
        self.order.insert((expires_at, lease));
        self.expiries.insert(lease, expires_at);
    }

    /// Removes those that have expired, as many as a charge may.
    pub(super) fn remove_expired(&mut self, now: u64) {
        for _ in 0..BOUND {
            match self.order.first().copied() {
                Some((expires_at, lease)) if expires_at <= now => self.remove(&lease),
                _ => return,
            };
        }
    }

    /// Removes those of a clock that is gone, the newest first. One that is ahead by less than its length may be alive: its next
    /// renewal is by the clock that was set back.
    pub(super) fn remove_gone(&mut self, now: u64) {
        for _ in 0..BOUND {
            match self.order.last().copied() {
                Some((expires_at, lease)) if expires_at > now + 2 * lease.length => self.remove(&lease),
                _ => return,
            };
        }
    }
}

impl Concurrency {
    /// Whether the slots of this lease are held.
    pub(super) fn holds(&self, leases: &Leases, id: Option<LeaseId>, weight: u64) -> bool {
        let (Some(held), Some(id)) = (&leases.0, id) else {
            return false;
        };
        held.expiries.contains_key(&self.lease_of(id, weight))
    }

    fn lease_of(&self, id: LeaseId, weight: u64) -> Lease {
        Lease {
            id,
            length: self.lease_us(),
            weight: weight.min(HEAVIEST),
        }
    }
}

/// The counterpart of `lua/concurrency.lua`.
impl Rule for Concurrency {
    type State = Leases;

    fn read(&self, state: &mut Leases, now: u64, needed: u64) -> u64 {
        let Some(held) = &mut state.0 else {
            return self.quota;
        };
        held.remove_expired(now);
        if held.total.saturating_add(needed) > self.quota {
            held.remove_gone(now);
        }
        self.quota.saturating_sub(held.total)
    }

    fn add(&self, state: &mut Leases, now: u64, weight: u64, count: u64) {
        self.change(state, now, Change::Add { count }, weight, None);
    }

    fn wait(&self, _: &Leases, _: u64, _: u64) -> u64 {
        RETRY_US
    }

    fn reset(&self, state: &Leases, now: u64) -> u64 {
        let newest = state.0.as_ref().and_then(|held| held.order.last());
        newest.map_or(0, |(expires_at, _)| expires_at.saturating_sub(now).min(MOST_AHEAD_US))
    }

    fn give_back(&self, _: &mut Leases, _: u64, _: u64, _: u64, _: u64) -> bool {
        false
    }

    fn room_of_leases(&self, state: &Leases) -> Option<u64> {
        let held = state.0.as_ref().map_or(0, |held| held.total);
        Some(self.quota.saturating_sub(held))
    }

    fn change(&self, state: &mut Leases, now: u64, change: Change, cost: u64, id: Option<LeaseId>) -> bool {
        match change {
            Change::Nothing => false,
            Change::Add { .. } | Change::Renew => {
                let lease = self.lease_of(id.unwrap_or_else(LeaseId::random), cost);
                state.0.get_or_insert_default().put(lease, now);
                true
            }
            Change::End | Change::GiveBack { .. } => match (&mut state.0, id) {
                (Some(held), Some(id)) => held.remove(&self.lease_of(id, cost)),
                _ => false,
            },
        }
    }
}
