use std::{
    collections::HashMap,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use smallvec::SmallVec;

use super::{
    bans::AdvancedBans,
    charging::{Advanced, AdvancedLine, Decided, Kept, check},
    clock::Clock,
    shard::{Id, Shard},
};
use crate::{
    limit::{Line, Shape, State},
    observe::MemoryMetrics,
    store::{Charge, ChargeState, Operation, Outcome, StoreRequest, StoreResponse, wakes::wake_line},
    sync::lock,
};

/// The counts of a memory store, divided into shards by the hashes of charges.
pub(super) struct Shards {
    /// Their number is a power of two. The sum of their capacities is the capacity of the store.
    shards: Box<[Mutex<Shard>]>,
    pub(super) capacity: usize,
    evictions: AtomicU64,
    metrics: MemoryMetrics,
    lines: Mutex<Lines>,
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
            lines: Mutex::default(),
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

/// The lines of keys that requests wait for.
type Lines = HashMap<LineKey, Line>;

/// The hash of a policy and a key, and the shape of the limit.
type LineKey = (u64, Shape);

impl Shards {
    #[inline]
    pub(super) fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreResponse {
        if let [request] = requests
            && let Some(charge) = request.plain_check()
        {
            return self.check_one(charge);
        }
        self.decide_all(requests)
    }

    /// Decides one charge. The state is changed in place.
    #[inline]
    fn check_one(&self, charge: &Charge) -> StoreResponse {
        let id = Id::new(charge);
        let place = self.place(id.hash);
        let mut shard = self.lock(place);
        // Under the lock, so that the decisions about a key are in the order of their times.
        let now = self.clock.now();
        let (mut counted, mut new) = (shard.find(&id), None);
        let state = match &mut counted {
            Some(count) => &mut count.state,
            None => new.insert(State::new(charge.limit())),
        };
        let (allowed, charge_state, kept) = check(charge, state, now);

        if let Some(count) = counted {
            if count.update(kept, now) {
                shard.relist(&id, now);
            }
        } else if let (Some(state), Some(expires_at)) = (new, kept.expires_at) {
            let evicted = shard.insert(&id, state, kept, expires_at, now);
            drop(shard);
            self.count(evicted.into());
        } else {
            drop(shard);
        }
        StoreResponse {
            server_time: Duration::from_micros(now),
            outcomes: SmallVec::from_buf([Outcome {
                allowed,
                units: allowed.into(),
                is_cached: false,
                is_of_first: false,
                states: SmallVec::from_buf([charge_state]),
            }]),
        }
    }

    /// Decides all requests at one time, with all shards of their keys locked.
    #[inline(never)] // inlined, it would enlarge the stack frame of `check_one`
    fn decide_all(&self, requests: &[StoreRequest<'_>]) -> StoreResponse {
        let ids = requests.iter().map(Self::ids);
        let ids: SmallVec<[SmallVec<[Id<'_>; 4]>; 1]> = ids.collect();
        let has_line = |request: &StoreRequest<'_>| {
            let mut charges = request.charges();
            charges.any(|charge| charge.line_for(request.operation()).is_some())
        };
        let has_lines = requests.iter().any(has_line);
        // Before the shards, in all calls.
        let lines = has_lines.then(|| lock(&self.lines));
        let locked = self.lock_all(ids.iter().flatten().map(|id| id.hash));
        let mut decisions = Decisions {
            shards: self,
            lines,
            locked,
            now: self.clock.now(),
            evicted: 0,
            woken: Vec::new(),
        };
        let all = requests.iter().zip(&ids);
        let outcomes = all.map(|(request, ids)| decisions.decide(request, ids)).collect();
        drop((decisions.lines, decisions.locked));
        self.count(decisions.evicted);
        decisions.woken.into_iter().for_each(wake_line);
        StoreResponse {
            server_time: Duration::from_micros(decisions.now),
            outcomes,
        }
    }

    /// What a request reads: for each charge its bans, if they are regarded, and its count.
    fn ids<'a>(request: &'a StoreRequest<'_>) -> SmallVec<[Id<'a>; 4]> {
        let operation = request.operation();
        let counts = !matches!(operation, Operation::Ban { .. });
        let ids = request.charges().flat_map(|charge| {
            let id = Id::new(charge);
            let bans = charge.ban_for(operation).map(|_| id.bans());
            bans.into_iter().chain(counts.then_some(id))
        });
        ids.collect()
    }

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

    fn place(&self, hash: u64) -> usize {
        // The table within the shard uses the bits at both ends.
        (hash >> 32) as usize & (self.shards.len() - 1)
    }

    fn lock(&self, place: usize) -> MutexGuard<'_, Shard> {
        // No code panics while a shard is locked, except for a clock. Its counts remain valid.
        lock(&self.shards[place])
    }

    /// The shards of these keys, in order of their places.
    fn lock_all(&self, hashes: impl Iterator<Item = u64>) -> SmallVec<[(usize, MutexGuard<'_, Shard>); 1]> {
        let mut places: SmallVec<[usize; 4]> = hashes.map(|hash| self.place(hash)).collect();
        places.sort_unstable(); // one order for all calls, so that no two wait for each other
        places.dedup();
        places.into_iter().map(|place| (place, self.lock(place))).collect()
    }
}

/// The decisions about a list of requests.
struct Decisions<'a> {
    shards: &'a Shards,
    /// `None` if no request has a line.
    lines: Option<MutexGuard<'a, Lines>>,
    locked: SmallVec<[(usize, MutexGuard<'a, Shard>); 1]>,
    now: u64,
    /// The number of keys that were evicted before they expired.
    evicted: u64,
    /// The lines whose first requests fit now.
    woken: Vec<u64>,
}

impl Decisions<'_> {
    fn decide(&mut self, request: &StoreRequest<'_>, ids: &[Id<'_>]) -> Outcome {
        if request.operation() == Operation::Reset {
            return self.reset(request, ids);
        }
        if let Operation::Ban { length } = request.operation() {
            return self.ban(request, length, ids);
        }
        let (operation, units) = (request.operation(), request.units.into());
        let taken = ids.iter().map(|id| self.shard_of(id).take(id));
        let (mut states, last_costs): (SmallVec<[State; 4]>, SmallVec<[Option<u64>; 4]>) = taken.unzip();
        let with_lines = request.charges().filter(|charge| charge.line_for(operation).is_some());
        let mut lines: SmallVec<[(LineKey, Line); 1]> = with_lines.map(|charge| self.take_line(charge)).collect();

        let mut left = states.iter_mut().zip(last_costs.iter().copied());
        let mut left_lines = lines.iter_mut();
        let now = self.now;
        let advanced = request.charges().filter_map(|charge| {
            let bans = match charge.ban_for(operation) {
                Some(ban) => Some(AdvancedBans::new(ban, left.next()?.0, now)),
                None => None,
            };
            let line = match charge.line_for(operation) {
                Some(own) => Some(AdvancedLine::new(own, &mut left_lines.next()?.1, request)),
                None => None,
            };
            Some(Advanced::new(operation, (charge, units), bans, line, left.next()?, now))
        });
        let mut advanced: SmallVec<[Advanced<'_>; 4]> = advanced.collect();
        let judged = Advanced::judge(operation, &mut advanced, units);
        let woken = &mut self.woken;
        let decided = advanced
            .into_iter()
            .map(|charge| charge.decide(operation, judged, woken));
        let decided: SmallVec<[Decided; 4]> = decided.collect();

        let kept = decided
            .iter()
            .flat_map(|decided| decided.kept_bans.into_iter().chain([decided.kept]));
        let counts = ids.iter().zip(states).zip(kept).zip(last_costs);
        // New keys follow the known ones, whose places in the order of eviction depend on this decision.
        let (known, new): (SmallVec<[_; 4]>, SmallVec<[_; 4]>) = counts.partition(|(_, last_cost)| last_cost.is_some());
        for (((id, state), kept), last_cost) in known.into_iter().chain(new) {
            self.keep(id, state, kept, last_cost.is_some());
        }
        lines.retain(|(_, line)| !line.is_empty());
        if let Some(stored) = self.lines.as_mut().filter(|_| !lines.is_empty()) {
            if stored.len() == stored.capacity() {
                // Before it grows: those of keys that no request waits for anymore.
                stored.retain(|_, line| !line.live(self.now).is_empty());
            }
            stored.extend(lines);
        }
        let states = decided.iter().map(|decided| decided.charge_state);
        Outcome::new(judged.is_some(), states).of_units(judged.unwrap_or(0) as u32)
    }

    fn reset(&mut self, request: &StoreRequest<'_>, ids: &[Id<'_>]) -> Outcome {
        for id in ids {
            self.shard_of(id).remove(id);
        }
        let state = |charge: &Charge| {
            let quota = charge.limit().quota();
            let has_line = charge.line_for(Operation::Reset).is_some();
            let lines = self.lines.as_ref().filter(|_| has_line);
            let line = lines.and_then(|lines| Some(lines.get(&line_key(charge))?.live(self.now)));
            let line = line.unwrap_or_default();
            self.woken.extend(line.ready(quota, None, false));
            ChargeState::new(quota.saturating_sub(line.weight()), None, Duration::ZERO)
        };
        Outcome::new(true, request.charges().map(state))
    }

    fn ban(&mut self, request: &StoreRequest<'_>, length: Duration, ids: &[Id<'_>]) -> Outcome {
        let length = length.as_micros().try_into().unwrap_or(u64::MAX);
        let bans = request
            .charges()
            .filter_map(|charge| charge.ban_for(request.operation()));
        let states = bans.zip(ids).map(|(ban, id)| {
            let (mut state, last_cost) = self.shard_of(id).take(id);
            let (charge_state, kept) = AdvancedBans::new(ban, &mut state, self.now).begin(length);
            self.keep(id, state, kept, last_cost.is_some());
            charge_state
        });
        Outcome::new(true, states)
    }

    fn shard_of(&mut self, id: &Id<'_>) -> &mut Shard {
        let place = self.shards.place(id.hash);
        let position = self.locked.partition_point(|(other, _)| *other < place);
        &mut self.locked[position].1
    }

    /// Stores a state that was taken and decided about.
    fn keep(&mut self, id: &Id<'_>, state: State, kept: Kept, known: bool) {
        let now = self.now;
        if known {
            self.shard_of(id).put_back(id, state, kept, now);
        } else if let Some(expires_at) = kept.expires_at {
            self.evicted += u64::from(self.shard_of(id).insert(id, state, kept, expires_at, now));
        }
    }

    fn take_line(&mut self, charge: &Charge) -> (LineKey, Line) {
        let key = line_key(charge);
        let line = self.lines.as_mut().and_then(|lines| lines.remove(&key));
        (key, line.map(|line| line.live(self.now)).unwrap_or_default())
    }
}

fn line_key(charge: &Charge) -> LineKey {
    (charge.hash, charge.limit.shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Key, Limit, ManualClock, SlidingLog, store::ChargeLine};

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
            held[shards.place(charge.hash)] += 1;
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

    #[test]
    fn lines_in_which_no_request_waits_anymore_are_forgotten() {
        let clock = ManualClock::new();
        let read = clock.clone();
        let shards = Shards::new(100_000, Clock::Custom(Box::new(move || read.now())));
        let limit = Limit::from(SlidingLog::per_hour(1));
        for number in 0..2_000 {
            let line = ChargeLine {
                number,
                longest_us: u64::MAX >> 12,
                ahead: 0,
                leads: None,
                leads_elsewhere: false,
            };
            let charge = Charge::new("p", &limit, &Key::from(number), 1).in_line(Some(line));
            // The second one waits, and its process ends.
            for allowed in [true, false] {
                let response = shards.decide(&[StoreRequest::new(Operation::Wait, [&charge])]);
                assert_eq!(response.outcomes[0].allowed, allowed);
            }
            assert!(lock(&shards.lines).contains_key(&line_key(&charge)));
            clock.advance(Duration::from_millis(100));
        }
        let lines = lock(&shards.lines).capacity();
        assert!(lines < 200, "{lines}");
    }
}
