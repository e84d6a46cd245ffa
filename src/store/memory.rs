mod shard;

use std::{
    fmt,
    hash::RandomState,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use smallvec::SmallVec;
use tokio::time::Instant;

use self::shard::{Expiry, Id, Shard};
use super::{
    Answer, Charge, Operation, Outcome, Reply, Request, Store, Verdict,
    fold::{Folded, fold},
};
use crate::limit::State;

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
/// let policy = Policy::new("hello", SlidingLog::per_minute(1)).key(key::path());
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
/// It holds at most 100,000 keys ([`capacity`](Self::capacity)), and forgets expired ones as new ones come, without a
/// thread. When it is full of keys that have not expired, the one that would be restored soonest makes room for the new
/// one, which resets a limit early; [`evictions`](Self::evictions) counts these. Where callers can make up keys, such as
/// paths, and the windows of policies differ, short ones leave first: give policies that must hold a store of their own.
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
    shards: Box<[Mutex<Shard>]>,
    capacity: usize,
    keys: AtomicUsize,
    evictions: AtomicU64,
    hasher: RandomState,
    clock: Clock,
}

enum Clock {
    Monotonic { started: Instant, epoch: Duration },
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
    /// The function is called once for each decision. Time may stand still, jump and go back.
    pub fn clock(self, now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self::build(self.shared.capacity, Clock::Custom(Box::new(now)))
    }

    fn build(capacity: usize, clock: Clock) -> Self {
        let shared = Shared {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            capacity,
            keys: AtomicUsize::new(0),
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
        self.shared.keys.load(Ordering::Relaxed)
    }

    /// Whether it holds no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many keys were forgotten before they expired, for want of room.
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
    fn decide(&self, requests: &[Request<'_>]) -> Reply {
        let now = self.shared.clock.now();
        let outcomes = requests.iter().map(|request| self.shared.decide(request, now));
        Reply::Ready(Ok(Answer::new(Duration::from_micros(now), outcomes)))
    }
}

const DEFAULT_CAPACITY: usize = 100_000;
const SHARDS: usize = 64;
const MAX_NOW: u64 = 1 << 52;

impl Clock {
    fn monotonic() -> Self {
        let epoch = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Self::Monotonic {
            started: Instant::now(),
            epoch,
        }
    }

    fn now(&self) -> u64 {
        let now = match self {
            Self::Monotonic { started, epoch } => *epoch + started.elapsed(),
            Self::Custom(now) => now(),
        };
        // As far as the rules can reckon, which is the year 2112.
        u64::try_from(now.as_micros()).unwrap_or(u64::MAX).min(MAX_NOW)
    }
}

impl Shared {
    fn decide(&self, request: &Request<'_>, now: u64) -> Outcome {
        let Folded {
            operation,
            charges,
            folds,
        } = fold(request);
        let ids: SmallVec<[Id<'_>; 1]> = charges.iter().map(|charge| Id::new(charge, &self.hasher)).collect();
        let mut places: SmallVec<[usize; 4]> = ids.iter().map(place).collect();
        places.sort_unstable(); // always in the same order, so that no two requests wait for each other
        places.dedup();
        let mut shards: SmallVec<[MutexGuard<'_, Shard>; 1]> = places.iter().map(|place| self.lock(*place)).collect();
        let shard_of = |id: &Id<'_>| places.partition_point(|other| *other < place(id));

        if operation == Operation::Reset {
            let forgotten = ids.iter().filter(|id| shards[shard_of(id)].remove(id)).count();
            self.keys.fetch_sub(forgotten, Ordering::Relaxed);
            let verdicts = request.charges().iter().map(|charge| untouched(charge));
            return Outcome::new(true, verdicts);
        }

        let taken: SmallVec<[Option<State>; 1]> = ids.iter().map(|id| shards[shard_of(id)].take(id)).collect();
        let known: SmallVec<[bool; 4]> = taken.iter().map(Option::is_some).collect();
        let states = taken.into_iter().zip(&charges);
        let mut states: SmallVec<[State; 1]> = states
            .map(|(state, charge)| state.unwrap_or_else(|| State::fresh(charge.limit())))
            .collect();

        let decided = decide(operation, &charges, &mut states, now);

        let mut newcomers: SmallVec<[(usize, Expiry); 1]> = SmallVec::new();
        for (position, (id, state)) in ids.iter().zip(states).enumerate() {
            let (known, changed) = (known[position], decided.changed[position]);
            if known || changed {
                let reset_after = decided.verdicts[position].reset_after.as_micros() as u64;
                let newcomer = shards[shard_of(id)].put(id, state, changed.then_some(now + reset_after));
                newcomers.extend(newcomer.map(|expiry| (shard_of(id), expiry)));
            }
        }
        if !newcomers.is_empty() {
            self.welcome(&newcomers, shards, &places, now);
        }
        Outcome::new(decided.allowed, folds.unfold(&decided.verdicts))
    }

    /// Keeps the number of keys within the capacity, at the cost of those that were there before.
    fn welcome(
        &self,
        newcomers: &[(usize, Expiry)],
        mut shards: SmallVec<[MutexGuard<'_, Shard>; 1]>,
        places: &[usize],
        now: u64,
    ) {
        let expired: usize = shards.iter_mut().map(|shard| shard.expire(now)).sum();
        let before = self.keys.fetch_add(newcomers.len(), Ordering::Relaxed);
        self.keys.fetch_sub(expired, Ordering::Relaxed);

        let excess = (before + newcomers.len()).saturating_sub(expired + self.capacity);
        if excess == 0 {
            for (shard, expiry) in newcomers {
                shards[*shard].enlist(*expiry);
            }
            return;
        }

        drop(shards); // others are locked one by one
        for _ in 0..excess {
            let soonest = (0..SHARDS)
                .min_by_key(|place| self.lock(*place).soonest())
                .unwrap_or_default();
            if let Some(expires_at) = self.lock(soonest).evict() {
                self.keys.fetch_sub(1, Ordering::Relaxed);
                self.evictions.fetch_add((expires_at > now).into(), Ordering::Relaxed);
            }
        }
        for (shard, expiry) in newcomers {
            self.lock(places[*shard]).enlist(*expiry);
        }
    }

    fn lock(&self, place: usize) -> MutexGuard<'_, Shard> {
        // Nothing panics while one is locked; and if it did, limits would be better than none.
        self.shards[place].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn place(id: &Id<'_>) -> usize {
    // The table within the shard uses the bits at both ends.
    (id.hash >> 32) as usize % SHARDS
}

fn untouched(charge: &Charge<'_>) -> Verdict {
    Verdict::new(charge.limit().quota(), None, Duration::ZERO)
}

struct Decided {
    allowed: bool,
    /// For each charge, whether anything was added or taken back.
    changed: SmallVec<[bool; 4]>,
    verdicts: SmallVec<[Verdict; 1]>,
}

/// The driver, as in `lua/driver.lua`.
fn decide(operation: Operation, charges: &[Charge<'_>], states: &mut [State], now: u64) -> Decided {
    let unsettled: SmallVec<[Option<State>; 1]> = states.iter().map(State::unsettled).collect();
    let mut fits = true;
    for (charge, state) in charges.iter().zip(&mut *states) {
        charge.limit().settle(state, now);
        fits &= charge.limit().room(state, now) >= charge.cost();
    }

    let (allowed, counted) = match operation {
        Operation::Check => (fits, fits),
        Operation::Charge => (true, true),
        Operation::Peek => (fits, false),
        Operation::Reset | Operation::Refund { .. } => (true, false),
    };
    let mut changed: SmallVec<[bool; 4]> = SmallVec::new();
    for (charge, state) in charges.iter().zip(&mut *states) {
        changed.push(match operation {
            Operation::Refund { admitted_at } => {
                charge
                    .limit()
                    .refund(state, now, admitted_at.as_micros() as u64, charge.cost())
            }
            _ => counted,
        });
        if counted {
            charge.limit().add(state, now, charge.cost());
        }
    }

    let verdicts = charges.iter().zip(&*states).map(|(charge, state)| {
        let room = charge.limit().room(state, now);
        let denies = !allowed && room < charge.cost();
        let retry_after = denies.then(|| Duration::from_micros(charge.limit().wait(state, now, charge.cost())));
        Verdict::new(
            room,
            retry_after,
            Duration::from_micros(charge.limit().reset(state, now)),
        )
    });
    let verdicts = verdicts.collect();
    for ((state, unsettled), changed) in states.iter_mut().zip(unsettled).zip(&changed) {
        match unsettled {
            Some(unsettled) if !changed => *state = unsettled,
            _ => {}
        }
    }
    Decided {
        allowed,
        changed,
        verdicts,
    }
}
