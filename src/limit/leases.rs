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

use super::rule::BOUND;

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
    /// What the charge that is decided has found, and not removed.
    expired: Ended,
    gone: Ended,
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
    pub(super) fn put(&mut self, lease: Lease, expires_at: u64) {
        self.remove(&lease);
        self.total += lease.weight;
        self.order.insert((expires_at, lease));
        self.expiries.insert(lease, expires_at);
    }

    /// Finds those that have expired.
    pub(super) fn find_expired(&mut self, now: u64) {
        let expired = self.order.iter().take_while(|(expires_at, _)| *expires_at <= now);
        self.expired = Ended::of(expired);
        self.gone = Ended::default();
    }

    /// Finds those of a clock that is gone, the newest first. One that lies ahead by less than its length may be alive: its
    /// next renewal is by the clock that was set back.
    pub(super) fn find_gone(&mut self, now: u64) {
        let order = self.order.iter().rev();
        self.gone = Ended::of(order.take_while(|(expires_at, lease)| *expires_at > now + 2 * lease.length));
    }

    pub(super) fn remove_ended(&mut self) {
        for _ in 0..std::mem::take(&mut self.expired).leases {
            self.order.first().copied().map(|(_, lease)| self.remove(&lease));
        }
        for _ in 0..std::mem::take(&mut self.gone).leases {
            self.order.last().copied().map(|(_, lease)| self.remove(&lease));
        }
    }

    /// The weight of the leases that have not ended.
    pub(super) fn counted(&self) -> u64 {
        self.total - self.expired.weight - self.gone.weight
    }

    /// When the last lease that has not ended expires.
    pub(super) fn newest(&self) -> Option<u64> {
        self.order
            .iter()
            .rev()
            .nth(self.gone.leases)
            .map(|(expires_at, _)| *expires_at)
    }
}

/// Leases that have ended, at one end of the order.
#[derive(Debug, Default)]
pub(super) struct Ended {
    leases: usize,
    weight: u64,
}

impl Ended {
    fn of<'a>(leases: impl Iterator<Item = &'a (u64, Lease)>) -> Self {
        leases.take(BOUND).fold(Self::default(), |ended, (_, lease)| Self {
            leases: ended.leases + 1,
            weight: ended.weight + lease.weight,
        })
    }
}

/// The id of a lease: what holds slots of a [`Concurrency`](crate::Concurrency) limit, until it ends or expires.
///
/// It consists of two integers below 2^53, which a double holds exactly, and is unique across processes: 106 bits of a keyed
/// hash with a random key.
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
        static SECRETS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
        static NEXT: AtomicU64 = AtomicU64::new(0);

        let number = NEXT.fetch_add(1, atomic::Ordering::Relaxed);
        let [high, low] = [&SECRETS[0], &SECRETS[1]].map(|secret| secret.hash_one(number) >> 11);
        Self(NonZeroU64::new(high).unwrap_or(NonZeroU64::MIN), low)
    }

    /// The two integers below 2^53 that a store keeps.
    #[must_use]
    pub fn parts(self) -> [u64; 2] {
        [self.0.get(), self.1]
    }

    /// The id with these parts, of which the first is not 0.
    #[cfg(all(test, any(feature = "fred", feature = "cluster")))]
    pub(crate) fn of_parts([high, low]: [u64; 2]) -> Option<Self> {
        Some(Self(NonZeroU64::new(high)?, low))
    }
}

/// In hexadecimal digits.
impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaseId({:x}-{:x})", self.0, self.1)
    }
}
