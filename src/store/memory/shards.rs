use std::{
    borrow::Cow,
    hash::RandomState,
    slice,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use smallvec::SmallVec;

use super::{
    charging::{Advanced, Decided, Verdict},
    clock::Clock,
    shard::{Id, Shard},
};
use crate::{
    Limit,
    limit::State,
    observe::MemoryMetrics,
    store::{
        Charge, ChargeRole, ChargeState, LeaseId, Operation, Outcome, StoreRequest, StoreResponse,
        request::{Folded, Folds, fold},
        wakes::wake_all,
    },
};

/// The counts of a memory store, divided into shards by a hash with a secret.
pub(super) struct Shards {
    /// Their number is a power of two. The sum of their capacities is the capacity of the store.
    shards: Box<[Mutex<Shard>]>,
    pub(super) capacity: usize,
    evictions: AtomicU64,
    metrics: MemoryMetrics,
    hasher: RandomState,
    clock: Clock,
}

/// The most keys of a shard, unless there are [too many](MAX_SHARDS). A table of that size grows within microseconds.
const MAX_SHARD: usize = 1_024;

const MAX_SHARDS: usize = 4_096;

impl Shards {
    pub(super) fn new(capacity: usize, clock: Clock) -> Self {
        let shards = capacity.div_ceil(MAX_SHARD).next_power_of_two().min(MAX_SHARDS);
        let capacity_of = |place| capacity / shards + usize::from(place < capacity % shards);
        Self {
            shards: (0..shards)
                .map(|place| Mutex::new(Shard::new(capacity_of(place))))
                .collect(),
            capacity,
            evictions: AtomicU64::new(0),
            metrics: MemoryMetrics::default(),
            hasher: RandomState::new(),
            clock,
        }
    }

    pub(super) fn len(&self) -> usize {
        let places = 0..self.shards.len();
        places.map(|place| self.lock(place).len()).sum()
    }

    /// The time, since the Unix epoch.
    pub(super) fn now(&self) -> Duration {
        Duration::from_micros(self.clock.now())
    }

    pub(super) fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
    }
}

/// What follows from decisions when no shard is locked.
#[derive(Default)]
struct Unlocked {
    /// The number of keys that were evicted before they expired.
    evicted: u64,
    /// The requests that wait for slots and may take them now.
    woken: Vec<LeaseId>,
}

/// Decisions.
impl Shards {
    #[inline]
    pub(super) fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreResponse {
        if let [request] = requests
            && let [charge] = request.charges()
            && request.operation() != Operation::Reset
            && request.unit_count() == 1
        {
            return self.decide_one(request.operation(), charge);
        }
        self.decide_all(requests)
    }

    /// Decides one charge. The state is changed in place.
    #[inline]
    fn decide_one(&self, operation: Operation, charge: &Charge<'_>) -> StoreResponse {
        let id = Id::new(charge, &self.hasher);
        let place = self.place(id.hash);
        let mut shard = self.lock(place);
        // Under the lock, so that the decisions about a key are in the order of their times.
        let now = self.clock.now();
        let (mut counted, mut new) = (shard.find(&id), None);
        let state = match &mut counted {
            Some(count) => &mut count.state,
            None => new.insert(State::new(charge.limit())),
        };

        let mut advanced = Advanced::new(operation, charge, state, now);
        let verdict = Advanced::judge(operation, slice::from_mut(&mut advanced), now);
        let decided = advanced.decide(operation, verdict);

        if let Some(count) = counted {
            if count.update(&decided, now) {
                shard.relist(&id);
            }
        } else if let (Some(state), Some(expires_at)) = (new, decided.expires_at) {
            let evicted = shard.insert(&id, state, &decided, expires_at, now);
            drop(shard);
            self.count(evicted.into());
        } else {
            drop(shard);
        }
        wake_all(&decided.woken);
        let allowed = matches!(verdict, Verdict::Allowed(_));
        StoreResponse {
            server_time: Duration::from_micros(now),
            outcomes: SmallVec::from_buf([Outcome {
                allowed,
                units: allowed.into(),
                is_cached: false,
                is_waiting: verdict == Verdict::Waits,
                states: SmallVec::from_buf([decided.charge_state]),
            }]),
        }
    }

    /// Decides all requests at one time, with all shards of their keys locked.
    #[inline(never)] // inlined, it would enlarge the stack frame of `decide_one`
    fn decide_all(&self, requests: &[StoreRequest<'_>]) -> StoreResponse {
        let folded: SmallVec<[Folded<'_>; 1]> = requests.iter().map(fold).collect();
        let ids = folded.iter().map(|request| {
            let charges = request.charges.iter();
            charges.map(|charge| Id::new(charge, &self.hasher)).collect()
        });
        let ids: SmallVec<[SmallVec<[Id<'_>; 4]>; 1]> = ids.collect();
        let mut shards = self.lock_all(ids.iter().flatten().map(|id| id.hash));
        let now = self.clock.now();

        let mut unlocked = Unlocked::default();
        let decide = |(request, ids): (&Folded<'_>, &SmallVec<[Id<'_>; 4]>)| match request.operation {
            Operation::Reset => Self::reset(request, ids, &mut shards),
            Operation::Check if request.units > 1 => Self::decide_units(request, ids, &mut shards, now, &mut unlocked),
            Operation::Check
            | Operation::Reserve
            | Operation::Charge
            | Operation::Peek
            | Operation::Refund { .. }
            | Operation::RenewLease
            | Operation::EndLease => Self::decide_several(request, ids, &mut shards, now, &mut unlocked),
        };
        let outcomes = folded.iter().zip(&ids).map(decide).collect();
        drop(shards);
        self.count(unlocked.evicted);
        wake_all(&unlocked.woken);
        StoreResponse {
            server_time: Duration::from_micros(now),
            outcomes,
        }
    }

    fn reset(request: &Folded<'_>, ids: &[Id<'_>], shards: &mut Locked<'_>) -> Outcome {
        for id in ids {
            shards.of(id.hash).remove(id);
        }
        let untouched = |charge: &Charge<'_>| ChargeState::new(charge.limit().quota(), None, Duration::ZERO);
        let states: SmallVec<[ChargeState; 4]> = request.charges.iter().map(untouched).collect();
        Outcome::new(true, request.folds.unfold(&states))
    }

    /// Admits as many units of a request as fit.
    fn decide_units(
        request: &Folded<'_>,
        ids: &[Id<'_>],
        shards: &mut Locked<'_>,
        now: u64,
        unlocked: &mut Unlocked,
    ) -> Outcome {
        let peek = Folded {
            operation: Operation::Peek,
            charges: Cow::Borrowed(&request.charges),
            folds: Folds::default(),
            units: 1,
        };
        let peeked = Self::decide_several(&peek, ids, shards, now, unlocked);
        let charges = request.charges.iter();
        let fitting = charges
            .zip(peeked.states())
            .map(|(charge, state)| state.remaining / charge.cost());
        let fitting = fitting.min().unwrap_or_default().min(request.units.into());

        let charges = request.charges.iter();
        let charges = charges.map(|charge| charge.with(charge.limit(), charge.cost().saturating_mul(fitting.max(1))));
        let check = Folded {
            operation: Operation::Check,
            charges: Cow::Owned(charges.collect()),
            folds: request.folds.clone(),
            units: 1,
        };
        let decided = Self::decide_several(&check, ids, shards, now, unlocked);
        decided.of_units(u32::try_from(fitting).unwrap_or(u32::MAX))
    }

    fn decide_several(
        request: &Folded<'_>,
        ids: &[Id<'_>],
        shards: &mut Locked<'_>,
        now: u64,
        unlocked: &mut Unlocked,
    ) -> Outcome {
        let Folded {
            operation,
            charges,
            folds,
            ..
        } = request;
        let never = |charge: &Charge<'_>| *charge.limit() == Limit::DenyAll && charge.role() != ChargeRole::Once;
        // It waits for nothing, and counts nothing.
        let operation = match operation.decides() && charges.iter().any(never) {
            true => Operation::Peek,
            false => *operation,
        };

        let counted: SmallVec<[Option<State>; 4]> = ids.iter().map(|id| shards.of(id.hash).take(id)).collect();
        let known: SmallVec<[bool; 4]> = counted.iter().map(Option::is_some).collect();
        let mut states: SmallVec<[State; 4]> = counted
            .into_iter()
            .zip(&**charges)
            .map(|(state, charge)| state.unwrap_or_else(|| State::new(charge.limit())))
            .collect();

        let advanced = charges.iter().zip(&mut states);
        let mut advanced: SmallVec<[Advanced<'_>; 4]> = advanced
            .map(|(charge, state)| Advanced::new(operation, charge, state, now))
            .collect();
        Advanced::apply_markers(&mut advanced);
        if matches!(operation, Operation::Refund { .. }) {
            Advanced::keep_repeated(&mut advanced);
        }
        Advanced::apply_bans(operation, &mut advanced);
        let verdict = Advanced::judge(operation, &mut advanced, now);
        let decided = advanced.into_iter().map(|charge| charge.decide(operation, verdict));
        let decided: SmallVec<[Decided; 4]> = decided.collect();
        unlocked.woken.extend(decided.iter().flat_map(|decided| &decided.woken));

        let counts = ids.iter().zip(states).zip(&decided).zip(known);
        let (known, new): (SmallVec<[_; 4]>, SmallVec<[_; 4]>) = counts.partition(|(_, known)| *known);
        for (((id, state), decided), _) in known {
            shards.of(id.hash).put_back(id, state, decided, now);
        }
        // After the known keys, whose places in the order of eviction depend on this decision.
        for (((id, state), decided), _) in new {
            if let Some(expires_at) = decided.expires_at {
                let shard = shards.of(id.hash);
                unlocked.evicted += u64::from(shard.insert(id, state, decided, expires_at, now));
            }
        }
        let states: SmallVec<[ChargeState; 4]> = decided.iter().map(|decided| decided.charge_state).collect();
        Outcome {
            is_waiting: verdict == Verdict::Waits,
            ..Outcome::new(matches!(verdict, Verdict::Allowed(_)), folds.unfold(&states))
        }
    }
}

/// Evictions.
impl Shards {
    /// Counts evictions of keys that had not expired. No shard may be locked: a subscriber of `tracing` may use the store.
    #[inline]
    fn count(&self, evicted: u64) {
        if evicted == 0 {
            return;
        }
        self.metrics.evicted(evicted);
        if self.evictions.fetch_add(evicted, Ordering::Relaxed) == 0 {
            tracing::warn!(
                capacity = self.capacity,
                "the memory store is full: new keys evict others, which resets their limits; \
                 `MemoryStoreBuilder::capacity` sets the number of keys"
            );
        }
    }
}

/// Locks.
impl Shards {
    fn place(&self, hash: u64) -> usize {
        // The table within the shard uses the bits at both ends.
        (hash >> 32) as usize & (self.shards.len() - 1)
    }

    fn lock(&self, place: usize) -> MutexGuard<'_, Shard> {
        // No code panics while a shard is locked, except for a clock. Its counts remain valid.
        self.shards[place].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_all(&self, hashes: impl Iterator<Item = u64>) -> Locked<'_> {
        let mut places: SmallVec<[usize; 4]> = hashes.map(|hash| self.place(hash)).collect();
        places.sort_unstable(); // one order for all calls, so that no two wait for each other
        places.dedup();
        let shards = places.into_iter().map(|place| (place, self.lock(place)));
        Locked(self, shards.collect())
    }
}

/// The shards that a request needs, in order of their places.
struct Locked<'a>(&'a Shards, SmallVec<[(usize, MutexGuard<'a, Shard>); 1]>);

impl Locked<'_> {
    fn of(&mut self, hash: u64) -> &mut Shard {
        let place = self.0.place(hash);
        let position = self.1.partition_point(|(other, _)| *other < place);
        &mut self.1[position].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Key, SlidingLog};

    fn shards(capacity: usize) -> Shards {
        Shards::new(capacity, Clock::monotonic())
    }

    #[test]
    fn a_million_similar_keys_are_spread_evenly() {
        let shards = shards(1_000_000);
        let limit = Limit::from(SlidingLog::per_minute(1));
        let mut held = vec![0_u32; shards.shards.len()];
        for n in 0..1_000_000_u64 {
            let key = Key::from(n);
            let charge = Charge::new("login", &limit, &key, 1);
            held[shards.place(Id::new(&charge, &shards.hasher).hash)] += 1;
        }

        // Six standard deviations of a random distribution.
        let mean = 1_000_000 / held.len() as u32;
        let (least, most) = (held.iter().min().unwrap(), held.iter().max().unwrap());
        assert!(
            mean - least < 6 * mean.isqrt() && most - mean < 6 * mean.isqrt(),
            "{least} to {most}"
        );
    }

    #[test]
    fn a_shard_holds_few_keys_and_all_together_the_capacity() {
        for capacity in [1, 2, 1_024, 1_025, 100_000, 1_000_000, MAX_SHARD * MAX_SHARDS] {
            let shards = shards(capacity);
            let of_shards = shards.shards.iter();
            let of_shards: Vec<usize> = of_shards.map(|shard| shard.lock().unwrap().capacity()).collect();
            assert!(of_shards.iter().all(|&of_shard| of_shard <= MAX_SHARD), "{capacity}");
            assert_eq!(of_shards.iter().sum::<usize>(), capacity);
        }
    }
}
