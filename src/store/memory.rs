mod shard;

use std::{
    fmt,
    hash::RandomState,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use smallvec::SmallVec;
use tokio::time::Instant;

use self::shard::{Id, Shard};
use super::{
    Charge, ChargeState, Operation, Outcome, Store, StoreFuture, StoreId, StoreRequest, StoreResponse,
    fold::{Folded, fold},
};
use crate::limit::{Change, Standing, State};

/// Keeps counts in the memory of one process.
///
/// It decides exactly like [`RedisStore`](crate::RedisStore), but every replica of a service counts for itself. Clones
/// share their counts.
///
/// ```
/// use http::{Request, StatusCode};
/// use http_body_util::Empty;
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # type Body = Empty<bytes::Bytes>;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let policy = Policy::new("hello", SlidingLog::per_minute(1)).key(key::constant("all"));
/// let hello = RateLimitLayer::new(MemoryStore::new(), policy)
///     .layer(service_fn(async |_: Request<Body>| Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))));
///
/// assert_eq!(hello.clone().oneshot(Request::new(Body::new())).await?.status(), StatusCode::OK);
/// assert_eq!(hello.clone().oneshot(Request::new(Body::new())).await?.status(), StatusCode::TOO_MANY_REQUESTS);
/// # Ok(())
/// # }
/// ```
///
/// # Memory
///
/// The store holds at most 100,000 keys, or as many as [`with_capacity`](Self::with_capacity) sets. Expired keys are removed
/// as new ones come, without a thread. When the store is full, a new key evicts another one:
///
/// 1. an expired key;
/// 2. a key of the same policy that does not deny now, the one that expires first;
/// 3. a key of another policy that does not deny now, of the policy with the most keys;
/// 4. if all keys deny now, one of the same policy, the one whose denial lasts longest; then one of another policy.
///
/// A key denies now if a check of cost 1 is denied. A policy with less than a 64th of the capacity keeps its keys while another
/// policy has more: 2 to 4 apply to the other ones first.
///
/// So under a flood of made-up keys, such as paths, a limit that is used up stays so unless all keys deny. The flood evicts the
/// keys of its own policy; if its keys deny at once, as with a limit of 1, it also evicts those of other policies that do not
/// deny. A store of its own keeps a policy free of evictions by others.
///
/// An eviction of a key that has not expired resets its limit early: [`evictions`](Self::evictions) counts these, and the first
/// one is logged as a warning (feature `tracing`).
///
/// A store for more than 1,024 keys is divided into parts by a hash with a secret, each of at most 1,024 keys, up to 4 million
/// keys in total. Each part has its share of the capacity and evicts by itself, so a part may be full when the store holds
/// nine tenths of its capacity.
///
/// # Time
///
/// It reads a monotonic clock, that of [`tokio::time`], so setting the system's clock changes nothing and a test with a
/// paused runtime moves it with [`advance`](https://docs.rs/tokio/latest/tokio/time/fn.advance.html).
#[derive(Clone)]
#[must_use]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

struct Shared {
    /// As many as a power of two. The sum of their capacities is that of the store.
    shards: Box<[Mutex<Shard>]>,
    capacity: usize,
    evictions: AtomicU64,
    hasher: RandomState,
    clock: Clock,
}

enum Clock {
    /// The time when it started, since the Unix epoch.
    Monotonic {
        started: Instant,
        epoch: u64,
    },
    Custom(Box<dyn Fn() -> Duration + Send + Sync>),
}

/// Constructors.
impl MemoryStore {
    /// An empty store for 100,000 keys.
    pub fn new() -> Self {
        Self::build(DEFAULT_CAPACITY, Clock::monotonic())
    }

    /// An empty store for this many keys.
    ///
    /// The default is 100,000.
    ///
    /// # Panics
    ///
    /// If the capacity is 0.
    #[track_caller]
    pub fn with_capacity(capacity: usize) -> Self {
        assert!(capacity > 0, "a memory store holds at least 1 key");
        Self::build(capacity, Clock::monotonic())
    }

    /// An empty store of the same capacity that reads the time, since the Unix epoch, from a function.
    ///
    /// The function is called once for each call of the store. Time may stand still, jump and go back. A part of the store
    /// is locked meanwhile, so the function must not use the store.
    pub fn clock(self, now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self::build(self.shared.capacity, Clock::Custom(Box::new(now)))
    }

    fn build(capacity: usize, clock: Clock) -> Self {
        let shards = shards_for(capacity);
        let of_shard = |place| capacity / shards + usize::from(place < capacity % shards);
        let shared = Shared {
            shards: (0..shards)
                .map(|place| Mutex::new(Shard::new(of_shard(place))))
                .collect(),
            capacity,
            evictions: AtomicU64::new(0),
            hasher: RandomState::new(),
            clock,
        };
        Self {
            shared: Arc::new(shared),
        }
    }
}

/// Questions.
impl MemoryStore {
    /// The most keys it holds.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared.capacity
    }

    /// How many keys it holds, expired ones that no new one has replaced yet included.
    #[must_use]
    pub fn len(&self) -> usize {
        let places = 0..self.shared.shards.len();
        places.map(|place| self.shared.lock(place).len()).sum()
    }

    /// Whether it holds no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many keys were evicted before they expired.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.shared.evictions.load(Ordering::Relaxed)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("capacity", &self.capacity())
            .field("len", &self.len())
            .field("evictions", &self.evictions())
            .finish()
    }
}

impl Store for MemoryStore {
    fn id(&self) -> Option<StoreId> {
        Some(StoreId::of(&self.shared))
    }

    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let (now, outcomes) = self.shared.decide(requests);
        StoreFuture::ready(Ok(StoreResponse {
            server_time: Duration::from_micros(now),
            outcomes,
        }))
    }
}

const DEFAULT_CAPACITY: usize = 100_000;
const MAX_NOW: u64 = 1 << 52;

/// The most keys of a shard, unless there are [too many](SHARDS): few enough that its table grows in microseconds.
const SHARD: usize = 1_024;

/// The most shards.
const SHARDS: usize = 4_096;

fn shards_for(capacity: usize) -> usize {
    capacity.div_ceil(SHARD).next_power_of_two().min(SHARDS)
}

impl Clock {
    fn monotonic() -> Self {
        let epoch = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Self::Monotonic {
            started: Instant::now(),
            epoch: micros(epoch),
        }
    }

    fn now(&self) -> u64 {
        let now = match self {
            Self::Monotonic { started, epoch } => epoch + micros(started.elapsed()),
            Self::Custom(now) => micros(now()),
        };
        // As far as the rules can reckon, which is the year 2112.
        now.min(MAX_NOW)
    }
}

fn micros(time: Duration) -> u64 {
    time.as_secs()
        .saturating_mul(1_000_000)
        .saturating_add(time.subsec_micros().into())
}

impl Shared {
    #[inline]
    fn decide(&self, requests: &[StoreRequest<'_>]) -> (u64, SmallVec<[Outcome; 1]>) {
        if let [request] = requests
            && let [charge] = request.charges()
            && request.operation() != Operation::Reset
        {
            let (now, outcome) = self.decide_one(request.operation(), charge);
            return (now, [outcome].into());
        }
        self.decide_all(requests)
    }

    /// The plain case: the count is changed where it lies.
    #[inline]
    fn decide_one(&self, operation: Operation, charge: &Charge<'_>) -> (u64, Outcome) {
        let id = Id::new(charge, &self.hasher);
        let place = self.place(id.hash);
        let mut shard = self.lock(place);
        // Under the lock: decisions about one key come in the order of their times.
        let now = self.clock.now();
        let decide = |state: &mut State| {
            let step = Step::settle(operation, charge, state, now);
            let allowed = allows(operation, step.fits);
            (allowed, step.finish(operation, allowed))
        };

        let (allowed, decided) = if let Some(count) = shard.find(&id) {
            let (allowed, decided) = decide(&mut count.state);
            if count.update(&decided, now) {
                shard.relist(&id);
            }
            (allowed, decided)
        } else {
            let mut state = State::fresh(charge.limit());
            let (allowed, decided) = decide(&mut state);
            if let Some(expires_at) = decided.expires_at {
                let evicted = shard.insert(&id, state, &decided, expires_at, now);
                drop(shard);
                self.count(evicted.into());
            }
            (allowed, decided)
        };
        let outcome = Outcome {
            allowed,
            states: [decided.verdict].into(),
        };
        (now, outcome)
    }

    /// All requests are decided at one time, under the locks of all of their keys.
    #[inline(never)] // it would make the frame of the plain case large
    fn decide_all(&self, requests: &[StoreRequest<'_>]) -> (u64, SmallVec<[Outcome; 1]>) {
        let folded: SmallVec<[Folded<'_>; 1]> = requests.iter().map(fold).collect();
        let ids = folded.iter().map(|request| {
            let charges = request.charges.iter();
            charges.map(|charge| Id::new(charge, &self.hasher)).collect()
        });
        let ids: SmallVec<[SmallVec<[Id<'_>; 4]>; 1]> = ids.collect();
        let mut shards = self.lock_all(ids.iter().flatten().map(|id| id.hash));
        let now = self.clock.now();

        let mut evicted = 0;
        let decide = |(request, ids): (&Folded<'_>, &SmallVec<[Id<'_>; 4]>)| match request.operation {
            Operation::Reset => Self::reset(request, ids, &mut shards),
            _ => Self::decide_several(request, ids, &mut shards, now, &mut evicted),
        };
        let outcomes = folded.iter().zip(&ids).map(decide).collect();
        drop(shards);
        self.count(evicted);
        (now, outcomes)
    }

    fn reset(request: &Folded<'_>, ids: &[Id<'_>], shards: &mut Locked<'_>) -> Outcome {
        for id in ids {
            shards.of(id.hash).remove(id);
        }
        let untouched = |charge: &Charge<'_>| ChargeState::new(charge.limit().quota(), None, Duration::ZERO);
        let states: SmallVec<[ChargeState; 4]> = request.charges.iter().map(untouched).collect();
        Outcome::new(true, request.folds.unfold(&states))
    }

    fn decide_several(
        request: &Folded<'_>,
        ids: &[Id<'_>],
        shards: &mut Locked<'_>,
        now: u64,
        evicted: &mut u64,
    ) -> Outcome {
        let Folded {
            operation,
            charges,
            folds,
        } = request;
        let operation = *operation;

        let counted: SmallVec<[Option<State>; 4]> = ids.iter().map(|id| shards.of(id.hash).take(id)).collect();
        let known: SmallVec<[bool; 4]> = counted.iter().map(Option::is_some).collect();
        let mut states: SmallVec<[State; 4]> = counted
            .into_iter()
            .zip(&**charges)
            .map(|(state, charge)| state.unwrap_or_else(|| State::fresh(charge.limit())))
            .collect();

        let steps = charges.iter().zip(&mut states);
        let steps: SmallVec<[Step<'_>; 4]> = steps
            .map(|(charge, state)| Step::settle(operation, charge, state, now))
            .collect();
        let allowed = allows(operation, steps.iter().all(|step| step.fits));
        let steps = steps.into_iter().map(|step| step.finish(operation, allowed));
        let decided: SmallVec<[Decided; 4]> = steps.collect();

        let counts = ids.iter().zip(states).zip(&decided).zip(known);
        let (known, new): (SmallVec<[_; 4]>, SmallVec<[_; 4]>) = counts.partition(|(_, known)| *known);
        for (((id, state), decided), _) in known {
            shards.of(id.hash).put_back(id, state, decided, now);
        }
        // After those that were there before, so that the keys to evict are chosen by what was decided now.
        for (((id, state), decided), _) in new {
            if let Some(expires_at) = decided.expires_at {
                let shard = shards.of(id.hash);
                *evicted += u64::from(shard.insert(id, state, decided, expires_at, now));
            }
        }
        let states: SmallVec<[ChargeState; 4]> = decided.iter().map(|decided| decided.verdict).collect();
        Outcome::new(allowed, folds.unfold(&states))
    }
}

/// Evictions.
impl Shared {
    /// Counts evictions of keys that had not expired. No shard may be locked: a subscriber of `tracing` may use the store.
    #[inline]
    fn count(&self, evicted: u64) {
        if evicted > 0 && self.evictions.fetch_add(evicted, Ordering::Relaxed) == 0 {
            #[cfg(feature = "tracing")]
            tracing::warn!(
                capacity = self.capacity,
                "the memory store is full: new keys evict others, whose limits start afresh; use \
                 `MemoryStore::with_capacity` for more keys"
            );
        }
    }
}

/// Locks.
impl Shared {
    fn place(&self, hash: u64) -> usize {
        // The table within the shard uses the bits at both ends.
        (hash >> 32) as usize & (self.shards.len() - 1)
    }

    fn lock(&self, place: usize) -> MutexGuard<'_, Shard> {
        // Nothing panics while one is locked; and if it did, limits would be better than none.
        self.shards[place].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_all(&self, hashes: impl Iterator<Item = u64>) -> Locked<'_> {
        let mut places: SmallVec<[usize; 4]> = hashes.map(|hash| self.place(hash)).collect();
        places.sort_unstable(); // always in the same order, so that no two calls wait for each other
        places.dedup();
        let shards = places.into_iter().map(|place| (place, self.lock(place)));
        Locked(self, shards.collect())
    }
}

/// The shards that a request needs, in order of their places.
struct Locked<'a>(&'a Shared, SmallVec<[(usize, MutexGuard<'a, Shard>); 1]>);

impl Locked<'_> {
    fn of(&mut self, hash: u64) -> &mut Shard {
        let place = self.0.place(hash);
        let position = self.1.partition_point(|(other, _)| *other < place);
        &mut self.1[position].1
    }
}

/// Whether a request passes, all of whose charges fit or not.
fn allows(operation: Operation, fit: bool) -> bool {
    fit || !matches!(operation, Operation::Check | Operation::Peek)
}

/// A charge on its way through the driver, which does as `lua/driver.lua` does.
struct Step<'a> {
    charge: &'a Charge<'a>,
    state: &'a mut State,
    unsettled: Option<State>,
    /// How much weight fits before the change.
    room: u64,
    fits: bool,
    now: u64,
}

/// What was decided about a charge.
struct Decided {
    verdict: ChargeState,
    /// When the count expires, if anything was added or taken back.
    expires_at: Option<u64>,
    /// Until when a check of cost 1 is denied; 0 if it is not.
    denies_until: u64,
}

impl<'a> Step<'a> {
    #[inline]
    fn settle(operation: Operation, charge: &'a Charge<'a>, state: &'a mut State, now: u64) -> Self {
        let unsettled = state.unsettled();
        let refunds = matches!(operation, Operation::Refund { .. });
        let room = charge
            .limit()
            .settle(state, now, if refunds { 0 } else { charge.cost() });
        Self {
            charge,
            state,
            unsettled,
            room,
            fits: room >= charge.cost(),
            now,
        }
    }

    #[inline]
    fn finish(self, operation: Operation, allowed: bool) -> Decided {
        let Self {
            charge,
            state,
            unsettled,
            room,
            now,
            ..
        } = self;
        let (limit, cost) = (charge.limit(), charge.cost());

        let change = match operation {
            Operation::Refund { admitted_at } => Change::Refund {
                at: admitted_at.as_micros() as u64,
            },
            Operation::Check | Operation::Charge if allowed => Change::Add,
            _ => Change::Nothing,
        };
        let standing = limit.change(state, now, change, cost);
        let Standing { changed, reset, .. } = standing;
        let room = match change {
            Change::Add if changed => room.saturating_sub(cost),
            Change::Add | Change::Nothing | Change::Refund { .. } => standing.room,
        };
        let denies = !allowed && room < cost && limit.is_counted();
        let wait = |cost| limit.wait(state, now, cost);
        let wait_for_one = if room == 0 { wait(1) } else { 0 };
        let retry_after = denies.then(|| match cost {
            1 => Duration::from_micros(wait_for_one),
            cost => Duration::from_micros(wait(cost)),
        });
        if let (false, Some(unsettled)) = (changed, unsettled) {
            *state = unsettled;
        }
        Decided {
            verdict: ChargeState::new(room, retry_after, Duration::from_micros(reset)),
            expires_at: changed.then_some(now + reset),
            denies_until: if room == 0 { now.saturating_add(wait_for_one) } else { 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Key, Limit, SlidingLog};

    #[test]
    fn a_million_similar_keys_are_spread_evenly() {
        let store = MemoryStore::with_capacity(1_000_000);
        let limit = Limit::from(SlidingLog::per_minute(1));
        let mut held = vec![0_u32; store.shared.shards.len()];
        for n in 0..1_000_000_u64 {
            let key = Key::from(n);
            let id = Charge::new("login", &limit, &key, 1);
            held[store.shared.place(Id::new(&id, &store.shared.hasher).hash)] += 1;
        }

        // Six standard deviations of what chance does.
        let mean = 1_000_000 / held.len() as u32;
        let (least, most) = (held.iter().min().unwrap(), held.iter().max().unwrap());
        assert!(
            mean - least < 6 * mean.isqrt() && most - mean < 6 * mean.isqrt(),
            "{least} to {most}"
        );
    }

    #[test]
    fn a_shard_holds_few_keys_and_all_together_the_capacity() {
        for capacity in [1, 2, 1_024, 1_025, 100_000, 1_000_000, SHARD * SHARDS] {
            let store = MemoryStore::with_capacity(capacity);
            let of_shards = store.shared.shards.iter();
            let of_shards: Vec<usize> = of_shards.map(|shard| shard.lock().unwrap().capacity()).collect();
            assert!(of_shards.iter().all(|&of_shard| of_shard <= SHARD), "{capacity}");
            assert_eq!(of_shards.iter().sum::<usize>(), capacity);
        }
    }
}
