use std::mem;

use hashbrown::HashTable;
use smallvec::SmallVec;

use super::{charging::Kept, eviction::Queues};
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
    fn new_state(&self) -> State {
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

/// Small, since a growing table moves all of its entries at once.
pub(super) struct Entry {
    pub(super) hash: u64,
    pub(super) count: Box<Count>,
}

/// What a store has counted on one key of one policy.
pub(super) struct Count {
    key: Key,
    /// Inline, since a pointer would be a cache miss.
    policy: SmallVec<[u8; 24]>,
    shape: Shape,
    /// Identifies the valid place in the queues.
    pub(super) serial: u64,
    /// The end of the denial by which it has its place; zero if it has one by its expiry.
    pub(super) listed_until: u64,
    pub(super) state: State,
    pub(super) expires_at: u64,
    /// The time until which a check of the last cost is denied, or slots are held.
    pub(super) denies_until: u64,
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
    pub(super) fn is_held(&self) -> bool {
        matches!(self.state, State::Banned(_) | State::Leases(_))
    }
}

/// Up to this number of keys, expired ones are not removed.
const FEW: usize = 16;

/// This fraction of the capacity is for keys that do not deny: if those that deny could take all of it, new keys would evict each
/// other before their limits are used up.
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

    /// Takes the state out of a count, with the last cost; [`put_back`](Self::put_back) returns it. A new state if there is no count.
    pub(super) fn take(&mut self, id: &Id<'_>) -> (State, Option<u64>) {
        match self.find(id) {
            Some(count) => (mem::replace(&mut count.state, id.new_state()), Some(count.last_cost)),
            None => (id.new_state(), None),
        }
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
        if let Some(queues) = Self::queues(&mut self.policies, id) {
            queues.keys -= 1;
            queues.unlist(&count, hash);
            queues.compact(&mut self.counts);
        }
    }

    /// Gives a key a new place.
    #[cold]
    pub(super) fn relist(&mut self, id: &Id<'_>, now: u64) {
        self.serial += 1;
        let entry = self.counts.find_mut(id.hash, |entry| id.is_of(entry));
        let (Some(entry), Some(queues)) = (entry, Self::queues(&mut self.policies, id)) else {
            return;
        };
        queues.unlist(&entry.count, id.hash);
        entry.count.serial = self.serial;
        queues.enlist(entry, now);
        queues.compact(&mut self.counts);
    }

    fn queues<'a>(policies: &'a mut [Queues], id: &Id<'_>) -> Option<&'a mut Queues> {
        let policy = id.charge.limit.name_hash;
        policies.iter_mut().find(|queues| queues.policy == policy)
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
        loop {
            let evicted = self.evict_next(newcomer, now);
            // Without one, all places of a queue were too early, and their keys are in others by now.
            if evicted.is_some() || self.counts.is_empty() {
                return evicted;
            }
        }
    }

    fn evict_next(&mut self, newcomer: u64, now: u64) -> Option<u64> {
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

    #[test]
    fn a_key_that_is_listed_again_and_again_leaves_few_places() {
        let (limit, key) = (Limit::from(SlidingLog::per_hour(5)), Key::from("a"));
        let charge = Charge::new("a", &limit, &key, 1);
        let (id, mut shard) = (Id::new(&charge), Shard::new(1_000));
        let kept = |expires_at| Kept {
            expires_at: Some(expires_at),
            denies_until: 0,
            cost: 1,
        };
        shard.insert(&id, State::new(&limit), kept(1_000), 1_000, 1);
        for expires_at in (2..1_000).rev() {
            shard.put_back(&id, State::new(&limit), kept(expires_at), 1);
        }
        let places = shard.policies[0].free.len();
        assert!(places <= 2 + 64, "{places}");
    }
}
