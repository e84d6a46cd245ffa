use std::{
    cmp::Ordering,
    collections::{BTreeSet, HashMap},
};

use super::rule::BOUND;
use crate::store::LeaseId;

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
    pub(super) fn put(&mut self, lease: Lease, expires_at: u64) {
        self.remove(&lease);
        self.total += lease.weight;
        self.order.insert((expires_at, lease));
        self.expiries.insert(lease, expires_at);
    }

    /// Removes those that have expired.
    pub(super) fn expire(&mut self, now: u64) {
        for _ in 0..BOUND {
            match self.order.first().copied() {
                Some((expires_at, lease)) if expires_at <= now => self.remove(&lease),
                _ => return,
            };
        }
    }

    /// Removes those of a clock that is gone, the newest first. One that lies ahead by less than its length may be alive: its
    /// next renewal is by the clock that was set back.
    pub(super) fn forget(&mut self, now: u64) {
        for _ in 0..BOUND {
            match self.order.last().copied() {
                Some((expires_at, lease)) if expires_at > now + 2 * lease.length => self.remove(&lease),
                _ => return,
            };
        }
    }
}
