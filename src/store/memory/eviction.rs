//! The order in which a full shard evicts keys.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
};

use hashbrown::HashTable;

use super::shard::{Count, Entry};

/// The keys of one policy, in the order of their eviction.
///
/// A decision about a known key seldom changes a queue. The place of a key may be too early, and is corrected when its turn
/// comes. It is never too late: after a decision that moves it forward, or if the key begins to deny, it is
/// [listed again](Shard::relist).
#[derive(Default)]
pub(super) struct Queues {
    /// The hash of its name.
    pub(super) policy: u64,
    pub(super) keys: usize,
    /// By the time of expiry. Some of the places may be invalid.
    pub(super) free: BinaryHeap<Reverse<Place>>,
    /// By the end of the denial: counts, and what is [held](Count::is_held).
    pub(super) denying: [BTreeSet<Place>; 2],
}

/// A time, and the serial and the hash of the key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(u64, u64, u64);

/// The most denials that are ended in one call.
const MOST_ENDED: usize = 32;

impl Queues {
    pub(super) fn new(policy: u64) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }

    /// The number of keys that are not known to deny.
    pub(super) fn free_keys(&self) -> usize {
        self.keys - self.denying[0].len() - self.denying[1].len()
    }

    pub(super) fn enlist(&mut self, entry: &mut Entry, now: u64) {
        let count = &mut *entry.count;
        if count.denies_until > now {
            count.listed_until = count.denies_until;
            self.denying[usize::from(count.is_held())].insert(Place::of_denial(count, entry.hash));
        } else {
            count.listed_until = 0;
            self.free
                .push(Reverse(Place(count.expires_at, count.serial, entry.hash)));
        }
    }

    /// Removes the place of a key that denies.
    pub(super) fn unlist(&mut self, count: &Count, hash: u64) {
        self.denying[usize::from(count.is_held())].remove(&Place::of_denial(count, hash));
    }

    /// Removes invalid places, of which there would be many if keys are added and removed often.
    pub(super) fn compact(&mut self, counts: &mut HashTable<Entry>) {
        if self.free.len() > 2 * self.keys + 64 {
            self.free.retain(|Reverse(place)| place.find_mut(counts).is_some());
        }
    }

    /// Makes keys evictable when their denial is over.
    pub(super) fn end_denials(&mut self, counts: &mut HashTable<Entry>, now: u64) {
        for held in [0, 1] {
            let mut ended = 0;
            while ended < MOST_ENDED
                && let Some(place) = self.denying[held]
                    .first()
                    .copied()
                    .filter(|Place(until, ..)| *until <= now)
            {
                self.denying[held].remove(&place);
                if let Some(entry) = place.find_mut(counts) {
                    ended += usize::from(entry.count.denies_until <= now);
                    self.enlist(entry, now);
                }
            }
        }
    }

    /// Removes a few keys that have expired by the time `expired`.
    pub(super) fn expire(&mut self, counts: &mut HashTable<Entry>, now: u64, expired: u64) {
        for _ in 0..4 {
            let Some(Reverse(place)) = self.free.peek().copied().filter(|Reverse(place)| place.0 <= expired) else {
                return;
            };
            self.free.pop();
            match place.find_mut(counts) {
                Some(entry) if entry.count.expires_at > expired => self.enlist(entry, now),
                Some(_) => drop(self.remove(counts, place)),
                None => {}
            }
        }
    }

    /// Evicts the key that expires first of those that do not deny, and returns its expiry.
    pub(super) fn evict_free(&mut self, counts: &mut HashTable<Entry>, now: u64) -> Option<u64> {
        while let Some(Reverse(place)) = self.free.pop() {
            match place.find_mut(counts) {
                Some(entry) if entry.count.expires_at > place.0 => self.enlist(entry, now),
                Some(_) => return self.remove(counts, place),
                None => {}
            }
        }
        None
    }

    /// Evicts the key of the denial that ends first, of counts or of what is [held](Count::is_held), and returns its expiry.
    pub(super) fn evict_denying(&mut self, held: usize, counts: &mut HashTable<Entry>, now: u64) -> Option<u64> {
        while let Some(place) = self.denying[held].pop_first() {
            match place.find_mut(counts) {
                Some(entry) if entry.count.denies_until > place.0 => self.enlist(entry, now),
                _ => return self.remove(counts, place),
            }
        }
        None
    }

    fn remove(&mut self, counts: &mut HashTable<Entry>, Place(_, serial, hash): Place) -> Option<u64> {
        let entry = counts.find_entry(hash, |entry| entry.count.serial == serial).ok()?;
        let (Entry { count, .. }, _) = entry.remove();
        self.keys -= 1;
        Some(count.expires_at)
    }
}

impl Place {
    fn of_denial(count: &Count, hash: u64) -> Self {
        Self(count.listed_until, count.serial, hash)
    }

    /// The entry of the key, if this is its valid place.
    fn find_mut<'a>(&self, counts: &'a mut HashTable<Entry>) -> Option<&'a mut Entry> {
        let Self(_, serial, hash) = *self;
        counts.find_mut(hash, |entry| entry.count.serial == serial)
    }
}
