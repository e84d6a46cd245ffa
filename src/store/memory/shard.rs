use std::{cmp::Reverse, collections::BinaryHeap, hash::RandomState, mem};

use hashbrown::HashTable;
use smallvec::SmallVec;

use crate::{Key, limit::State, store::Charge};

/// What a count is stored under.
pub(super) struct Id<'a> {
    pub(super) hash: u64,
    charge: &'a Charge<'a>,
}

impl<'a> Id<'a> {
    #[inline]
    pub(super) fn new(charge: &'a Charge<'a>, hasher: &RandomState) -> Self {
        Self {
            hash: charge.hash(hasher),
            charge,
        }
    }

    #[inline]
    fn is_of(&self, entry: &Entry) -> bool {
        let count = &entry.count;
        entry.hash == self.hash
            && count.key == *self.charge.key()
            && *count.policy == *self.charge.policy().as_bytes()
            && count.state.is_of(self.charge.limit())
    }
}

/// A part of the keys. Two do not share a cache line.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct Shard {
    counts: HashTable<Entry>,
    expiries: BinaryHeap<Reverse<Expiry>>,
    serial: u64,
}

/// When a key expires, or earlier, with its serial and hash: the time is corrected when its turn comes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Expiry(u64, u64, u64);

impl Expiry {
    pub(super) fn hash(&self) -> u64 {
        self.2
    }
}

/// Small, since a table that grows moves all of its entries at once.
struct Entry {
    hash: u64,
    count: Box<Count>,
}

/// What is counted for one key.
pub(super) struct Count {
    key: Key,
    /// Here and not behind a pointer, since memory that is far away is what takes time.
    policy: SmallVec<[u8; 24]>,
    serial: u64,
    pub(super) state: State,
    pub(super) expires_at: u64,
}

/// So few keys are not worth the trouble of forgetting them when they expire.
const FEW: usize = 16;

/// How many outdated times are corrected before a key is evicted that may not be the first to expire.
const CORRECTIONS: usize = 32;

impl Shard {
    #[inline]
    pub(super) fn find(&mut self, id: &Id<'_>) -> Option<&mut Count> {
        let entry = self.counts.find_mut(id.hash, |entry| id.is_of(entry))?;
        Some(&mut entry.count)
    }

    /// Takes out what is counted; [`put_back`](Self::put_back) brings it back.
    pub(super) fn take(&mut self, id: &Id<'_>) -> Option<State> {
        let count = self.find(id)?;
        Some(mem::replace(&mut count.state, State::fresh(id.charge.limit())))
    }

    /// Keeps what is counted, until `expires_at` if that has changed.
    pub(super) fn put_back(&mut self, id: &Id<'_>, state: State, expires_at: Option<u64>) {
        if let Some(count) = self.find(id) {
            count.state = state;
            count.expires_at = expires_at.unwrap_or(count.expires_at);
        }
    }

    /// Keeps what is counted for a new key, which is to be [enlisted](Self::enlist).
    pub(super) fn insert(&mut self, id: &Id<'_>, state: State, expires_at: u64) -> Expiry {
        self.serial += 1;
        let count = Count {
            key: id.charge.key().clone(),
            policy: id.charge.policy().as_bytes().into(),
            serial: self.serial,
            state,
            expires_at,
        };
        let entry = Entry {
            hash: id.hash,
            count: Box::new(count),
        };
        self.counts.insert_unique(id.hash, entry, |entry| entry.hash);
        Expiry(expires_at, self.serial, id.hash)
    }

    /// Lets a key expire, and be evicted.
    pub(super) fn enlist(&mut self, expiry: Expiry) {
        self.expiries.push(Reverse(expiry));
    }

    /// Forgets a key, and whether there was one.
    pub(super) fn remove(&mut self, id: &Id<'_>) -> bool {
        let Ok(entry) = self.counts.find_entry(id.hash, |entry| id.is_of(entry)) else {
            return false;
        };
        entry.remove();

        // What is left in `expiries` must not pile up where keys come and go.
        if self.expiries.len() > 2 * self.counts.len() + 64 {
            self.expiries = self
                .counts
                .iter()
                .map(|entry| Reverse(Expiry(entry.count.expires_at, entry.count.serial, entry.hash)))
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
        let entry = self
            .counts
            .find_entry(hash, |entry| entry.count.serial == serial)
            .ok()?; // else it was removed

        let expires_at = entry.get().count.expires_at;
        if expires_at > now {
            self.expiries.push(Reverse(Expiry(expires_at, serial, hash)));
            return None;
        }
        entry.remove();
        Some(expires_at)
    }
}
