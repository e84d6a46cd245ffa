use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tower_quota::{ClientLibrary, MemoryStore, RedisStore, RedisStoreBuilder};

use super::{
    connected::{connected, patient},
    redis::Redis,
};

/// A clock that a test sets, and the stores that go by it.
#[derive(Clone)]
pub(crate) struct Clock(Arc<AtomicU64>);

impl Clock {
    const KEY: &str = "test-clock";

    /// A clock that shows 2027-01-15 08:00:00 UTC.
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicU64::new(1_800_000_000_000_000)))
    }

    /// The microseconds since the Unix epoch.
    pub(crate) fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, now: u64) {
        self.0.store(now, Ordering::Relaxed);
    }

    pub(crate) fn advance(&self, by: Duration) {
        self.set(self.now() + by.as_micros() as u64);
    }

    pub(crate) fn memory_store(&self) -> MemoryStore {
        let clock = self.clone();
        MemoryStore::builder()
            .clock(move || Duration::from_micros(clock.now()))
            .build()
    }

    /// A store in this Redis; it goes by the clock after [`tell`](Self::tell).
    pub(crate) async fn redis_store(&self, redis: &Redis) -> RedisStore {
        // On the client that the test has already: a store of its own takes its time to connect.
        let client = redis.client().await.clone();
        Self::builder().client(client).expect("the client will do")
    }

    /// The same through redis-rs.
    pub(crate) async fn redis_store_on_redis_rs(&self, redis: &Redis) -> RedisStore {
        // A script that is to go by a clock fails as long as there is none.
        self.tell(redis).await;
        let builder = Self::builder().client_library(ClientLibrary::RedisRs);
        connected(builder, &redis.url()).await
    }

    fn builder() -> RedisStoreBuilder {
        patient().clock_in(Self::KEY)
    }

    /// Tells the time to the scripts in this Redis.
    pub(crate) async fn tell(&self, redis: &Redis) {
        redis.command::<()>("SET", [Self::KEY, &self.now().to_string()]).await;
    }
}
