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
    /// As many as a power of two.
    shards: Box<[Mutex<Shard>]>,
    /// When the first key of each shard expires, or earlier: where to look when there is no room.
    soonest: Box<[AtomicU64]>,
    capacity: usize,
    keys: AtomicUsize,
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
    /// The function is called once for each decision. Time may stand still, jump and go back.
    pub fn clock(self, now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self::build(self.shared.capacity, Clock::Custom(Box::new(now)))
    }

    fn build(capacity: usize, clock: Clock) -> Self {
        let shards = shards_for(capacity);
        let shared = Shared {
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            soonest: (0..shards).map(|_| AtomicU64::new(u64::MAX)).collect(),
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
        let outcomes = match requests {
            [request] => [self.shared.decide(request, now)].into(),
            several => several.iter().map(|request| self.shared.decide(request, now)).collect(),
        };
        Reply::Ready(Ok(Answer {
            server_time: Duration::from_micros(now),
            outcomes,
            origin: None,
        }))
    }
}

const DEFAULT_CAPACITY: usize = 100_000;
const MAX_NOW: u64 = 1 << 52;

/// How many keys a shard is for: few enough that its table grows in microseconds.
const SHARD: usize = 1_024;

fn shards_for(capacity: usize) -> usize {
    (capacity / SHARD).clamp(64, 4_096).next_power_of_two()
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
    fn decide(&self, request: &Request<'_>, now: u64) -> Outcome {
        match (request.operation(), request.charges()) {
            (Operation::Reset, charges) => self.reset(charges),
            (operation, [charge]) => self.decide_one(operation, charge, now),
            _ => self.decide_several(request, now),
        }
    }

    #[inline(never)]
    fn reset(&self, charges: &[Charge<'_>]) -> Outcome {
        let (ids, mut shards) = self.lock_all(charges);
        let forgotten = ids.iter().filter(|id| shards.of(id.hash).remove(id)).count();
        self.keys.fetch_sub(forgotten, Ordering::Relaxed);

        let untouched = |charge: &Charge<'_>| Verdict::new(charge.limit().quota(), None, Duration::ZERO);
        Outcome::new(true, charges.iter().map(untouched))
    }

    /// The plain case: the count is changed where it lies.
    #[inline]
    fn decide_one(&self, operation: Operation, charge: &Charge<'_>, now: u64) -> Outcome {
        let id = Id::new(charge, &self.hasher);
        let place = self.place(id.hash);
        let mut shard = self.lock(place);
        let decide = |state: &mut State| {
            let step = Step::settle(operation, charge, state, now);
            let allowed = allows(operation, step.fits);
            (allowed, step.finish(operation, allowed))
        };

        let (allowed, decided) = if let Some(count) = shard.find(&id) {
            let (allowed, decided) = decide(&mut count.state);
            count.expires_at = decided.expires_at.unwrap_or(count.expires_at);
            (allowed, decided)
        } else {
            let mut state = State::fresh(charge.limit());
            let (allowed, decided) = decide(&mut state);
            if let Some(expires_at) = decided.expires_at {
                let newcomer = shard.insert(&id, state, expires_at);
                self.welcome(&[newcomer], Locked(self, [(place, shard)].into()), now);
            }
            (allowed, decided)
        };
        Outcome {
            allowed,
            verdicts: [decided.verdict].into(),
        }
    }

    #[inline(never)] // it would make the frame of the plain case large
    fn decide_several(&self, request: &Request<'_>, now: u64) -> Outcome {
        let Folded {
            operation,
            charges,
            folds,
        } = fold(request);
        let (ids, mut shards) = self.lock_all(&charges);

        let counted: SmallVec<[Option<State>; 4]> = ids.iter().map(|id| shards.of(id.hash).take(id)).collect();
        let known: SmallVec<[bool; 4]> = counted.iter().map(Option::is_some).collect();
        let mut states: SmallVec<[State; 4]> = counted
            .into_iter()
            .zip(&*charges)
            .map(|(state, charge)| state.unwrap_or_else(|| State::fresh(charge.limit())))
            .collect();

        let steps = charges.iter().zip(&mut states);
        let steps: SmallVec<[Step<'_>; 4]> = steps
            .map(|(charge, state)| Step::settle(operation, charge, state, now))
            .collect();
        let allowed = allows(operation, steps.iter().all(|step| step.fits));
        let steps = steps.into_iter().map(|step| step.finish(operation, allowed));
        let decided: SmallVec<[Decided; 4]> = steps.collect();

        let mut newcomers: SmallVec<[Expiry; 4]> = SmallVec::new();
        let counts = ids.iter().zip(states).zip(known).zip(&decided);
        for (((id, state), known), Decided { expires_at, .. }) in counts {
            match (known, *expires_at) {
                (true, expires_at) => shards.of(id.hash).put_back(id, state, expires_at),
                (false, Some(expires_at)) => newcomers.push(shards.of(id.hash).insert(id, state, expires_at)),
                (false, None) => {}
            }
        }
        if !newcomers.is_empty() {
            self.welcome(&newcomers, shards, now);
        }
        let verdicts: SmallVec<[Verdict; 4]> = decided.iter().map(|decided| decided.verdict).collect();
        Outcome::new(allowed, folds.unfold(&verdicts))
    }
}

/// Room.
impl Shared {
    /// Keeps the number of keys within the capacity, at the cost of those that were there before.
    #[inline(never)]
    fn welcome(&self, newcomers: &[Expiry], mut shards: Locked<'_>, now: u64) {
        let expired: usize = shards.iter_mut().map(|shard| shard.expire(now)).sum();
        let before = self.keys.fetch_add(newcomers.len(), Ordering::Relaxed);
        self.keys.fetch_sub(expired, Ordering::Relaxed);

        let excess = (before + newcomers.len()).saturating_sub(expired + self.capacity);
        if excess == 0 {
            for newcomer in newcomers {
                shards.of(newcomer.hash()).enlist(*newcomer);
            }
            return;
        }

        drop(shards); // others are locked one by one
        for _ in 0..excess {
            self.evict(now);
        }
        for newcomer in newcomers {
            self.lock_one(newcomer.hash()).of(newcomer.hash()).enlist(*newcomer);
        }
    }

    /// Forgets the key that expires first.
    fn evict(&self, now: u64) {
        let soonest = self.soonest.iter().map(|soonest| soonest.load(Ordering::Relaxed));
        let Some((place, _)) = soonest.enumerate().min_by_key(|(_, soonest)| *soonest) else {
            return;
        };
        let mut shard = Locked(self, [(place, self.lock(place))].into());
        if let Some(expires_at) = shard.iter_mut().find_map(Shard::evict) {
            self.keys.fetch_sub(1, Ordering::Relaxed);
            self.evictions.fetch_add((expires_at > now).into(), Ordering::Relaxed);
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

    fn lock_one(&self, hash: u64) -> Locked<'_> {
        let place = self.place(hash);
        Locked(self, [(place, self.lock(place))].into())
    }

    fn lock_all<'a>(&self, charges: &'a [Charge<'a>]) -> (SmallVec<[Id<'a>; 4]>, Locked<'_>) {
        let ids: SmallVec<[Id<'a>; 4]> = charges.iter().map(|charge| Id::new(charge, &self.hasher)).collect();
        let mut places: SmallVec<[usize; 4]> = ids.iter().map(|id| self.place(id.hash)).collect();
        places.sort_unstable(); // always in the same order, so that no two requests wait for each other
        places.dedup();
        let shards = places.into_iter().map(|place| (place, self.lock(place)));
        (ids, Locked(self, shards.collect()))
    }
}

/// The shards that a request needs, in order of their places, while its keys come and go.
struct Locked<'a>(&'a Shared, SmallVec<[(usize, MutexGuard<'a, Shard>); 1]>);

impl Locked<'_> {
    fn iter_mut(&mut self) -> impl Iterator<Item = &mut Shard> {
        self.1.iter_mut().map(|(_, shard)| &mut **shard)
    }

    fn of(&mut self, hash: u64) -> &mut Shard {
        let place = self.0.place(hash);
        let position = self.1.partition_point(|(other, _)| *other < place);
        &mut self.1[position].1
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        for (place, shard) in &self.1 {
            self.0.soonest[*place].store(shard.soonest(), Ordering::Relaxed);
        }
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
    fits: bool,
    now: u64,
}

/// What was decided about a charge.
struct Decided {
    verdict: Verdict,
    /// When the count expires, if anything was added or taken back.
    expires_at: Option<u64>,
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
        let Standing { changed, room, reset } = limit.change(state, now, change, cost);
        let denies = !allowed && room < cost;
        let retry_after = denies.then(|| Duration::from_micros(limit.wait(state, now, cost)));
        if let (false, Some(unsettled)) = (changed, unsettled) {
            *state = unsettled;
        }
        Decided {
            verdict: Verdict::new(room, retry_after, Duration::from_micros(reset)),
            expires_at: changed.then_some(now + reset),
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
    fn a_shard_holds_few_keys_whatever_the_capacity() {
        for capacity in [1, 100_000, 1_000_000] {
            assert!(capacity / shards_for(capacity) <= SHARD, "{capacity}");
        }
    }
}
