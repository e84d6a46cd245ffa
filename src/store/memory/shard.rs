use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    hash::{BuildHasher, RandomState},
    mem,
};

use hashbrown::{HashTable, hash_table::Entry};

use crate::{Key, limit::State, store::Charge};

/// What a count is stored under.
pub(super) struct Id<'a> {
    pub(super) hash: u64,
    charge: &'a Charge<'a>,
}

impl<'a> Id<'a> {
    pub(super) fn new(charge: &'a Charge<'a>, hasher: &RandomState) -> Self {
        let hash = hasher.hash_one((charge.limit().algorithm(), charge.policy(), charge.key()));
        Self { hash, charge }
    }

    fn is_of(&self, count: &Count) -> bool {
        count.hash == self.hash
            && count.key == *self.charge.key()
            && *count.policy == *self.charge.policy()
            && count.algorithm == self.charge.limit().algorithm()
    }
}

/// A part of the keys.
#[derive(Default)]
pub(super) struct Shard {
    counts: HashTable<Count>,
    expiries: BinaryHeap<Reverse<Expiry>>,
    serial: u64,
}

/// When a key expires, or earlier, with its serial and hash: the time is corrected when its turn comes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Expiry(u64, u64, u64);

/// What is counted for one key.
struct Count {
    algorithm: &'static str,
    policy: Box<str>,
    key: Key,
    hash: u64,
    serial: u64,
    state: State,
    expires_at: u64,
}

/// So few keys are not worth the trouble of forgetting them when they expire.
const FEW: usize = 16;

/// How many outdated times are corrected before a key is evicted that may not be the first to expire.
const CORRECTIONS: usize = 32;

impl Shard {
    /// Takes out what is counted; [`put`](Self::put) brings it back.
    pub(super) fn take(&mut self, id: &Id<'_>) -> Option<State> {
        let count = self.counts.find_mut(id.hash, |count| id.is_of(count))?;
        Some(mem::replace(&mut count.state, State::fresh(id.charge.limit())))
    }

    /// Keeps what is counted, until `expires_at` if that has changed. A new key is to be [enlisted](Self::enlist).
    pub(super) fn put(&mut self, id: &Id<'_>, state: State, expires_at: Option<u64>) -> Option<Expiry> {
        match self.counts.entry(id.hash, |count| id.is_of(count), |count| count.hash) {
            Entry::Occupied(mut count) => {
                let count = count.get_mut();
                count.state = state;
                count.expires_at = expires_at.unwrap_or(count.expires_at);
                None
            }
            Entry::Vacant(vacant) => {
                let expires_at = expires_at.unwrap_or_default();
                self.serial += 1;
                vacant.insert(Count {
                    algorithm: id.charge.limit().algorithm(),
                    policy: id.charge.policy().into(),
                    key: id.charge.key().clone(),
                    hash: id.hash,
                    serial: self.serial,
                    state,
                    expires_at,
                });
                Some(Expiry(expires_at, self.serial, id.hash))
            }
        }
    }

    /// Lets a key expire, and be evicted.
    pub(super) fn enlist(&mut self, expiry: Expiry) {
        self.expiries.push(Reverse(expiry));
    }

    /// Forgets a key, and whether there was one.
    pub(super) fn remove(&mut self, id: &Id<'_>) -> bool {
        let Ok(count) = self.counts.find_entry(id.hash, |count| id.is_of(count)) else {
            return false;
        };
        count.remove();

        // What is left in `expiries` must not pile up where keys come and go.
        if self.expiries.len() > 2 * self.counts.len() + 64 {
            self.expiries = self
                .counts
                .iter()
                .map(|count| Reverse(Expiry(count.expires_at, count.serial, count.hash)))
                .collect();
        }
        true
    }

    /// Forgets a few keys that have expired, more than come in one by one, and how many.
    pub(super) fn expire(&mut self, now: u64) -> usize {
        let mut expired = 0;
        if self.counts.len() <= FEW {
            return expired;
        }
        for _ in 0..4 {
            match self.expiries.peek() {
                Some(Reverse(Expiry(at, ..))) if *at <= now => expired += usize::from(self.pop(now).is_some()),
                _ => break,
            }
        }
        expired
    }

    /// When the first key expires, or earlier.
    pub(super) fn soonest(&self) -> u64 {
        self.expiries.peek().map_or(u64::MAX, |Reverse(Expiry(at, ..))| *at)
    }

    /// Forgets the key that expires first, and says when it would have.
    pub(super) fn evict(&mut self) -> Option<u64> {
        for _ in 0..CORRECTIONS {
            if let Some(expiry) = self.pop(self.soonest()) {
                return Some(expiry);
            }
        }
        self.pop(u64::MAX)
    }

    /// Forgets the key whose turn it is if it expires by `now`, and says when it would have; else corrects its time.
    fn pop(&mut self, now: u64) -> Option<u64> {
        let Reverse(Expiry(_, serial, hash)) = self.expiries.pop()?;
        let count = self.counts.find_entry(hash, |count| count.serial == serial).ok()?; // else it was removed

        let expires_at = count.get().expires_at;
        if expires_at > now {
            self.expiries.push(Reverse(Expiry(expires_at, serial, hash)));
            return None;
        }
        count.remove();
        Some(expires_at)
    }
}
