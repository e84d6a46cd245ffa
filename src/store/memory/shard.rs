use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
    mem,
};

use hashbrown::HashTable;
use smallvec::SmallVec;

use super::charging::Kept;
use crate::{
    Key,
    limit::{Banned, SLACK, Shape, State},
    store::Charge,
};

/// The identity of a count: policy, shape and key; or of the bans of a policy and key.
pub(super) struct Id<'a> {
    pub(super) hash: u64,
    charge: &'a Charge,
    shape: Shape,
}

impl<'a> Id<'a> {
    #[inline]
    pub(super) fn new(charge: &'a Charge) -> Self {
        Self {
            hash: charge.hash,
            charge,
            shape: charge.limit.shape,
        }
    }

    /// The bans of the same policy and key.
    pub(super) fn bans(&self) -> Self {
        Self {
            shape: Shape::BANS,
            ..*self
        }
    }

    /// The state of a key that nothing was counted on.
    pub(super) fn new_state(&self) -> State {
        if self.shape == Shape::BANS {
            return State::Banned(Banned::default());
        }
        State::new(self.charge.limit())
    }

    #[inline]
    fn is_of(&self, entry: &Entry) -> bool {
        let count = &entry.count;
        entry.hash == self.hash
            && count.shape == self.shape
            && count.key == *self.charge.key()
            && *count.policy == *self.charge.policy().as_bytes()
    }
}

/// A part of the keys of a store. Two shards do not share a cache line.
#[repr(align(64))]
pub(super) struct Shard {
    counts: HashTable<Entry>,
    /// In no order. Policies without keys are removed when a key is added.
    policies: Vec<Queues>,
    capacity: usize,
    serial: u64,
}

/// The keys of one policy, in the order of their eviction.
///
/// A decision about a known key seldom changes a queue. The place of a key may be too early, and is corrected when its turn
/// comes. It is never too late: after a decision that moves it forward, or if the key begins to deny, it is
/// [listed again](Shard::relist).
struct Queues {
    /// The hash of its name.
    policy: u64,
    keys: usize,
    /// By the time of expiry. Some of the places may be invalid.
    free: BinaryHeap<Reverse<Place>>,
    /// By the end of the denial: counts, and what is [held](Count::is_held).
    denying: [BTreeSet<Place>; 2],
}

/// A time, and the serial and the hash of the key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place(u64, u64, u64);

/// Small, since a growing table moves all of its entries at once.
struct Entry {
    hash: u64,
    count: Box<Count>,
}

/// What a store has counted on one key of one policy.
pub(super) struct Count {
    key: Key,
    /// Inline, since a pointer would be a cache miss.
    policy: SmallVec<[u8; 24]>,
    shape: Shape,
    /// Identifies the valid place in the queues.
    serial: u64,
    /// The end of the denial by which it has its place; zero if it has one by its expiry.
    listed_until: u64,
    pub(super) state: State,
    expires_at: u64,
    /// The time until which a check of the last cost is denied, or slots are held.
    denies_until: u64,
    /// The cost of the charge that was added last.
    pub(super) last_cost: u64,
}

impl Count {
    /// Stores a decision, and returns whether the key must be [listed again](Shard::relist).
    #[inline]
    #[must_use]
    pub(super) fn update(&mut self, kept: Kept, now: u64) -> bool {
        let denies_until = match kept.expires_at {
            Some(_) => kept.denies_until,
            // A check of the last cost is denied for as long as before, or longer if that of a lower one is.
            None if kept.cost <= self.last_cost => kept.denies_until.max(self.denies_until),
            None => return false,
        };
        let denied_until = mem::replace(&mut self.denies_until, denies_until);
        let expired_at = self.expires_at;
        if let Some(expires_at) = kept.expires_at {
            (self.expires_at, self.last_cost) = (expires_at, kept.cost);
        }
        let denies_shorter = self.denies_until < denied_until && denied_until > now;
        let begins_to_deny = self.listed_until == 0 && self.denies_until > now;
        self.expires_at < expired_at || denies_shorter || begins_to_deny
    }

    /// Whether it is a ban, or has slots.
    fn is_held(&self) -> bool {
        matches!(self.state, State::Banned(_) | State::Leases(_))
    }

    /// Its place while it denies.
    fn denial(&self, hash: u64) -> Place {
        Place(self.listed_until, self.serial, hash)
    }
}

/// Up to this number of keys, expired ones are not removed.
const FEW: usize = 16;

/// The most keys whose denial is ended in one call.
const MOST_ENDED: usize = 32;

/// This fraction of the capacity is for keys that do not deny: if those that deny could take all of it, new keys would evict each other
/// before their limits are used up.
const RESERVE: usize = 8;

impl Shard {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            counts: HashTable::new(),
            policies: Vec::new(),
            capacity,
            serial: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }

    fn is_full(&self) -> bool {
        self.counts.len() >= self.capacity
    }

    /// The count, for a decision after which it is [updated](Count::update).
    #[inline]
    pub(super) fn find(&mut self, id: &Id<'_>) -> Option<&mut Count> {
        let entry = self.counts.find_mut(id.hash, |entry| id.is_of(entry))?;
        Some(&mut entry.count)
    }

    /// Takes the state out of a count, with the last cost; [`put_back`](Self::put_back) returns it.
    pub(super) fn take(&mut self, id: &Id<'_>) -> Option<(State, u64)> {
        let count = self.find(id)?;
        Some((mem::replace(&mut count.state, id.new_state()), count.last_cost))
    }

    /// Stores a state and the decision about it.
    pub(super) fn put_back(&mut self, id: &Id<'_>, state: State, kept: Kept, now: u64) {
        if let Some(count) = self.find(id) {
            count.state = state;
            if count.update(kept, now) {
                self.relist(id, now);
            }
        }
    }

    /// Adds a count for a new key, and returns whether a key that had not expired was evicted for it.
    #[inline(never)]
    pub(super) fn insert(&mut self, id: &Id<'_>, state: State, kept: Kept, expires_at: u64, now: u64) -> bool {
        let policy = id.charge.limit.name_hash;
        if self.counts.len() >= FEW.min(self.capacity) {
            // Unless room is needed, keys stay a little longer: admissions ahead of a clock that was set back still count.
            let slack = if self.is_full() { 0 } else { SLACK };
            self.expire(now, now.saturating_sub(slack));
        }
        let evicted = self.is_full() && self.evict(policy, now).is_some_and(|expires_at| expires_at > now);

        self.serial += 1;
        let count = Count {
            key: id.charge.key().clone(),
            policy: id.charge.policy().as_bytes().into(),
            shape: id.shape,
            serial: self.serial,
            listed_until: 0,
            state,
            expires_at,
            denies_until: kept.denies_until,
            last_cost: kept.cost,
        };
        let mut entry = Entry {
            hash: id.hash,
            count: Box::new(count),
        };
        let position = self.policies.iter().position(|queues| queues.policy == policy);
        let position = position.unwrap_or_else(|| {
            self.policies.push(Queues::new(policy));
            self.policies.len() - 1
        });
        let queues = &mut self.policies[position];
        queues.keys += 1;
        queues.enlist(&mut entry, now);
        self.counts.insert_unique(id.hash, entry, |entry| entry.hash);
        evicted
    }

    /// Removes a key, if it is there.
    pub(super) fn remove(&mut self, id: &Id<'_>) {
        let Ok(entry) = self.counts.find_entry(id.hash, |entry| id.is_of(entry)) else {
            return;
        };
        let (Entry { count, hash }, _) = entry.remove();
        if let Some(queues) = self.queues(id) {
            queues.keys -= 1;
            queues.denying[usize::from(count.is_held())].remove(&count.denial(hash));
        }
        self.compact(id);
    }

    /// Gives a key a new place.
    #[cold]
    pub(super) fn relist(&mut self, id: &Id<'_>, now: u64) {
        self.serial += 1;
        let (serial, policy) = (self.serial, id.charge.limit.name_hash);
        let entry = self.counts.find_mut(id.hash, |entry| id.is_of(entry));
        let queues = self.policies.iter_mut().find(|queues| queues.policy == policy);
        let (Some(entry), Some(queues)) = (entry, queues) else {
            return;
        };
        queues.denying[usize::from(entry.count.is_held())].remove(&entry.count.denial(id.hash));
        entry.count.serial = serial;
        queues.enlist(entry, now);
        self.compact(id);
    }

    fn queues(&mut self, id: &Id<'_>) -> Option<&mut Queues> {
        let policy = id.charge.limit.name_hash;
        self.policies.iter_mut().find(|queues| queues.policy == policy)
    }

    /// Removes invalid places, of which there would be many if keys are added and removed often.
    fn compact(&mut self, id: &Id<'_>) {
        let (policy, counts) = (id.charge.limit.name_hash, &self.counts);
        let Some(queues) = self.policies.iter_mut().find(|queues| queues.policy == policy) else {
            return;
        };
        if queues.free.len() > 2 * queues.keys + 64 {
            queues.free.retain(|Reverse(place)| place.find(counts).is_some());
        }
    }

    /// Removes a few expired keys, more than are added one by one, and makes keys whose denial is over evictable.
    fn expire(&mut self, now: u64, expired: u64) {
        self.policies.retain(|queues| queues.keys > 0);
        for queues in &mut self.policies {
            queues.end_denials(&mut self.counts, now);
            queues.expire(&mut self.counts, now, expired);
        }
    }

    /// Evicts a key for a new one of a policy, and returns the expiry of the evicted key.
    fn evict(&mut self, newcomer: u64, now: u64) -> Option<u64> {
        let reserve = self.capacity / RESERVE;
        let (counts, policies) = (&mut self.counts, &mut self.policies);
        let free: usize = policies.iter().map(Queues::free_keys).sum();
        if free > reserve {
            let is_first = |queues: &&mut Queues| queues.policy == newcomer && queues.free_keys() > reserve;
            let queues = match policies.iter_mut().find(is_first) {
                Some(first) => first,
                None => policies.iter_mut().max_by_key(|queues| queues.free_keys())?,
            };
            return queues.evict_free(counts, now);
        }
        [0, 1].into_iter().find_map(|held| {
            let queues = policies.iter_mut().max_by_key(|queues| queues.denying[held].len())?;
            queues.evict_denying(held, counts, now)
        })
    }
}

impl Queues {
    fn new(policy: u64) -> Self {
        Self {
            policy,
            keys: 0,
            free: BinaryHeap::new(),
            denying: [BTreeSet::new(), BTreeSet::new()],
        }
    }

    /// The number of keys that are not known to deny.
    fn free_keys(&self) -> usize {
        self.keys - self.denying[0].len() - self.denying[1].len()
    }

    fn enlist(&mut self, entry: &mut Entry, now: u64) {
        let count = &mut *entry.count;
        if count.denies_until > now {
            count.listed_until = count.denies_until;
            self.denying[usize::from(count.is_held())].insert(count.denial(entry.hash));
        } else {
            count.listed_until = 0;
            self.free
                .push(Reverse(Place(count.expires_at, count.serial, entry.hash)));
        }
    }

    /// Makes keys whose denial is over evictable.
    fn end_denials(&mut self, counts: &mut HashTable<Entry>, now: u64) {
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
    fn expire(&mut self, counts: &mut HashTable<Entry>, now: u64, expired: u64) {
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
    fn evict_free(&mut self, counts: &mut HashTable<Entry>, now: u64) -> Option<u64> {
        while let Some(Reverse(place)) = self.free.pop() {
            match place.find_mut(counts) {
                Some(entry) if entry.count.expires_at > place.0 => self.enlist(entry, now),
                Some(_) => return self.remove(counts, place),
                None => {}
            }
        }
        None
    }

    /// Evicts the key whose denial ends first, of counts or of what is [held](Count::is_held), and returns its expiry.
    fn evict_denying(&mut self, held: usize, counts: &mut HashTable<Entry>, now: u64) -> Option<u64> {
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
    /// The entry of the key, if this is its valid place.
    fn find<'a>(&self, counts: &'a HashTable<Entry>) -> Option<&'a Entry> {
        let Self(_, serial, hash) = *self;
        counts.find(hash, |entry| entry.count.serial == serial)
    }

    fn find_mut<'a>(&self, counts: &'a mut HashTable<Entry>) -> Option<&'a mut Entry> {
        let Self(_, serial, hash) = *self;
        counts.find_mut(hash, |entry| entry.count.serial == serial)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limit, SlidingLog};

    impl Shard {
        pub(in crate::store::memory) fn capacity(&self) -> usize {
            self.capacity
        }
    }

    #[test]
    fn keys_that_come_and_go_leave_few_places() {
        let limit = Limit::from(SlidingLog::per_hour(5));
        let keys: Vec<Key> = (0..200).map(|number| Key::from(number.to_string().as_str())).collect();
        let charges: Vec<_> = keys.iter().map(|key| Charge::new("a", &limit, key, 1)).collect();
        let ids: Vec<_> = charges.iter().map(Id::new).collect();
        let kept = Kept {
            expires_at: Some(2),
            denies_until: 0,
            cost: 1,
        };
        let mut shard = Shard::new(1_000);
        let (stay, go) = ids.split_at(100);
        for id in stay {
            shard.insert(id, State::new(&limit), kept, 2, 1);
        }
        for round in 0..50 {
            for id in go {
                shard.insert(id, State::new(&limit), kept, 2, 1);
            }
            for id in go {
                shard.remove(id);
            }
            // Of the places of keys that are gone, some more than there are keys stay, and are removed at once.
            let places = shard.policies[0].free.len();
            assert!(
                (100..=2 * 200 + 64).contains(&places),
                "{places} places in round {round}"
            );
        }
        let places = shard.policies[0].free.len();
        assert!(places <= 2 * 100 + 64, "{places}");
        assert_eq!(shard.len(), 100);
    }
}
