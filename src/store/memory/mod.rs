mod bans;
mod charging;
mod clock;
mod eviction;
mod shard;
mod shards;

use std::{sync::Arc, time::Duration};

use self::{clock::Clock, shards::Shards};
use super::{Overrides, Store, StoreFuture, StoreId, StoreRequest, StoreStatus, overrides::OverrideSource};

pub use self::clock::ManualClock;

/// Store that keeps counts in the memory of the process.
///
/// It decides like [`RedisStore`](crate::RedisStore), but each replica of a service counts for itself. Clones share their
/// counts.
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
/// let admitted = hello.clone().oneshot(Request::new(Body::new())).await?;
/// assert_eq!(admitted.status(), StatusCode::OK);
/// assert_eq!(admitted.headers()["ratelimit"], "\"hello\";r=0;t=60");
///
/// let denied = hello.clone().oneshot(Request::new(Body::new())).await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(denied.headers()["retry-after"], "60");
/// # Ok(())
/// # }
/// ```
///
/// # Capacity and eviction
///
/// The store holds at most 100,000 keys, or the number that [`MemoryStoreBuilder::capacity`] sets. Expired keys are removed when
/// new keys are added, without a thread. If the store is full, a new key evicts another one:
///
/// 1. an expired key;
/// 2. of the keys that do not deny now, as long as these are more than an eighth of the capacity, the one that expires first: one
///    of the same policy, if that has more than an eighth, and else of the policy with the most of them;
/// 3. of the keys that deny now, the one of the denial that ends first, of the policy with the most of them;
/// 4. if nothing else is there, a ban or slots, in the same order.
///
/// A key denies now if a check is denied that costs as much as the last charge. So does a [ban](crate::Policy::ban) in force; the
/// denials before it and the length of the next one are evicted as counts are. A key of [`Concurrency`](crate::Concurrency) counts
/// as one that denies while a slot of it is held.
///
/// So under a flood of made-up keys, such as paths, a limit that is used up stays so unless seven eighths of the keys deny. New
/// keys are limited while those that do not deny, of all policies together, are at most an eighth of the capacity. A flood of keys
/// that do not deny evicts its own, once it has more than an eighth; one of keys that deny at once, as with a limit of 1, leaves an
/// eighth of the capacity to all that do not. A store of its own keeps a policy free of evictions by others.
///
/// An eviction of a key that has not expired resets its limit early. [`evictions`](Self::evictions) counts these, and the first
/// one is logged as a warning.
///
/// A store for more than 1,024 keys is divided into shards by a hash with a secret, each of at most 1,024 keys, up to 4 million
/// keys in total. Each shard has its part of the capacity and evicts by itself: eighths are those of a shard, and a shard may be
/// full when the store holds nine tenths of its capacity.
///
/// # Clock
///
/// The default clock is that of [`tokio::time`], which is monotonic: setting the system clock changes nothing, and a test with a
/// paused runtime moves it with [`advance`](https://docs.rs/tokio/latest/tokio/time/fn.advance.html).
/// [`MemoryStoreBuilder::manual_clock`] sets one that a test advances, without the feature `test-util` of tokio, and
/// [`MemoryStoreBuilder::clock`] any other one.
///
/// It begins with the time of the system, and stands still while the machine sleeps. Where windows of
/// calendars and aligned ones are to follow the system through that, give the store its time:
/// `.clock(|| UNIX_EPOCH.elapsed().unwrap_or_default())`.
#[derive(Clone)]
#[must_use]
pub struct MemoryStore {
    shards: Arc<Shards>,
    overridden: Overrides,
}

/// Constructors.
impl MemoryStore {
    /// An empty store with the default capacity and clock.
    ///
    /// ```
    /// use tower_quota::{MemoryStore, store::Store};
    ///
    /// let status = MemoryStore::new().status().expect("the numbers of a memory store");
    /// assert!(status.numbers.contains(&("capacity".into(), 100_000)));
    /// ```
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// A builder, which sets the capacity and the clock.
    pub fn builder() -> MemoryStoreBuilder {
        MemoryStoreBuilder {
            capacity: DEFAULT_CAPACITY,
            clock: None,
        }
    }
}

/// Metrics.
impl MemoryStore {
    /// The number of keys that it holds, with expired keys that are not removed yet.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let store = MemoryStore::new();
    /// let limiter = Limiter::new(store.clone(), Policy::new("mail", SlidingLog::per_hour(3)));
    /// limiter.check("42").await?;
    /// assert_eq!(store.len(), 1);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn len(&self) -> usize {
        self.shards.len()
    }

    /// Whether it holds no key.
    ///
    /// ```
    /// assert!(tower_quota::MemoryStore::new().is_empty());
    /// ```
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of keys that were evicted before they expired.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let store = MemoryStore::builder().capacity(1).build();
    /// let limiter = Limiter::new(store.clone(), Policy::new("mail", SlidingLog::per_hour(3)));
    /// limiter.check("42").await?;
    /// assert_eq!(store.evictions(), 0);
    /// limiter.check("43").await?;
    /// assert_eq!(store.evictions(), 1);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.shards.evictions()
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl_debug!(MemoryStore, store => capacity: store.shards.capacity, len: store.len(), evictions: store.evictions());

impl Store for MemoryStore {
    fn id(&self) -> Option<StoreId> {
        Some(StoreId::of(&self.shards))
    }

    fn replies_at_once(&self) -> bool {
        true
    }

    fn overrides(&self) -> Option<&Overrides> {
        Some(&self.overridden)
    }

    fn status(&self) -> Option<StoreStatus> {
        let status = StoreStatus::new("memory").number("keys", self.len() as u64);
        let status = status.number("capacity", self.shards.capacity as u64);
        Some(status.number("evictions", self.evictions()))
    }

    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        StoreFuture::ready(Ok(self.shards.decide(requests)))
    }
}

const DEFAULT_CAPACITY: usize = 100_000;

/// Settings of a [`MemoryStore`].
///
/// ```
/// use tower_quota::{ManualClock, MemoryStore};
///
/// let clock = ManualClock::new();
/// let store = MemoryStore::builder().capacity(1_000).manual_clock(&clock).build();
/// assert!(store.is_empty());
/// ```
#[must_use]
pub struct MemoryStoreBuilder {
    capacity: usize,
    clock: Option<Clock>,
}

impl_debug!(MemoryStoreBuilder, builder => capacity: builder.capacity);

impl MemoryStoreBuilder {
    /// Sets the largest number of keys. The [docs of the store](MemoryStore#capacity-and-eviction) describe which keys a full
    /// store evicts.
    ///
    /// The default is 100,000.
    ///
    /// # Panics
    ///
    /// If the capacity is 0.
    ///
    /// ```
    /// use tower_quota::{MemoryStore, store::Store};
    ///
    /// let store = MemoryStore::builder().capacity(1_000_000).build();
    /// let status = store.status().expect("the numbers of a memory store");
    /// assert!(status.numbers.contains(&("capacity".into(), 1_000_000)));
    /// ```
    #[track_caller]
    pub fn capacity(mut self, capacity: usize) -> Self {
        assert!(
            capacity > 0,
            "the capacity of a memory store is at least 1 key, not 0; the default is `.capacity(100_000)`"
        );
        self.capacity = capacity;
        self
    }

    /// Sets the clock: a function that returns the time since the Unix epoch.
    ///
    /// It is called once in each call of the store, and once more for each policy while the store has overrides. The time may stand still, jump and go back; times after the year 2112 count
    /// as that year. The function must not use the store, a part of which is locked during the call.
    ///
    /// The default is the monotonic clock of [`tokio::time`].
    ///
    /// ```
    /// use std::{sync::Arc, sync::atomic::{AtomicU64, Ordering}, time::Duration};
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let seconds = Arc::new(AtomicU64::new(0));
    /// let clock = seconds.clone();
    /// let store = MemoryStore::builder()
    ///     .clock(move || Duration::from_secs(clock.load(Ordering::Relaxed)))
    ///     .build();
    ///
    /// let limiter = Limiter::new(store, Policy::new("mail", SlidingLog::per_minute(1)));
    /// assert!(limiter.check("42").await?.is_allowed());
    /// assert!(!limiter.check("42").await?.is_allowed());
    ///
    /// seconds.store(60, Ordering::Relaxed);
    /// assert!(limiter.check("42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub fn clock(mut self, now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        self.clock = Some(Clock::Custom(Box::new(now)));
        self
    }

    /// Sets a clock that a test advances.
    ///
    /// The default is the monotonic clock of [`tokio::time`]. See [`ManualClock`] for an example.
    pub fn manual_clock(self, clock: &ManualClock) -> Self {
        let clock = clock.clone();
        self.clock(move || clock.now())
    }

    /// Builds an empty store.
    ///
    /// ```
    /// assert!(tower_quota::MemoryStore::builder().build().is_empty());
    /// ```
    pub fn build(self) -> MemoryStore {
        let clock = self.clock.unwrap_or_else(Clock::monotonic);
        let shards = Arc::new(Shards::new(self.capacity, clock));
        let clock = shards.clone();
        MemoryStore {
            overridden: Overrides::new(OverrideSource::Memory(Box::new(move || clock.now()))),
            shards,
        }
    }
}
