use std::{
    cmp::Ordering,
    collections::{BTreeSet, HashMap},
    fmt,
    hash::{BuildHasher, RandomState},
    num::NonZeroU64,
    sync::{
        LazyLock,
        atomic::{self, AtomicU64},
    },
};

use super::{
    Concurrency,
    concurrency::{HEAVIEST, RETRY_US},
    rule::{BOUND, Change, Rule},
};

/// The leases of one key.
#[derive(Debug, Default)]
pub(crate) struct Leases(pub(super) Option<Box<Held>>);

#[derive(Debug, Default)]
pub(super) struct Held {
    /// The sum of their weights.
    pub(super) total: u64,
    /// In the order of their expiries.
    pub(super) order: BTreeSet<(u64, Lease)>,
    pub(super) expiries: HashMap<Lease, u64>,
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
    fn lease_of(&self, id: LeaseId, weight: u64) -> Lease {
        Lease {
            id,
            length: self.lease_us(),
            weight: weight.min(HEAVIEST),
        }
    }
}

/// The counterpart of `lua/slots.lua`.
impl Rule for Concurrency {
    type State = Leases;

    fn read(&self, state: &mut Leases, now: u64, needed: u64) -> u64 {
        let Some(held) = &mut state.0 else {
            return self.quota;
        };
        held.remove_expired(now);
        if held.total + needed > self.quota {
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
        newest.map_or(0, |(expires_at, _)| expires_at.saturating_sub(now))
    }

    fn give_back(&self, _: &mut Leases, _: u64, _: u64, _: u64) -> bool {
        false
    }

    fn room_of_leases(&self, state: &Leases) -> Option<u64> {
        let held = state.0.as_ref().map_or(0, |held| held.total);
        Some(self.quota.saturating_sub(held))
    }

    fn holds(&self, state: &Leases, weight: u64, id: Option<LeaseId>) -> bool {
        let (Some(held), Some(id)) = (&state.0, id) else {
            return false;
        };
        held.expiries.contains_key(&self.lease_of(id, weight))
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
        let number = NEXT.fetch_add(1, atomic::Ordering::Relaxed);
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

    #[cfg(feature = "_redis")]
    impl LeaseId {
        /// The id with these parts, of which the first is not 0.
        pub(crate) fn of_parts([high, low]: [u64; 2]) -> Option<Self> {
            Some(Self(NonZeroU64::new(high)?, low))
        }
    }
}
