use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use tokio::{
    task::{spawn_blocking, yield_now},
    time::{advance, pause, resume},
};
use tower_quota::{ClientLibrary, MemoryStore, RedisStore, RedisStoreBuilder};

use super::{
    connected::{connected, patient},
    redis::Redis,
};

/// A clock that a test sets, and stores that use it.
#[derive(Clone)]
pub(crate) struct Clock(Arc<AtomicU64>);

impl Clock {
    /// The Redis keys of the seconds and of the microseconds after them.
    const KEYS: [&str; 2] = ["test-clock-seconds", "test-clock-microseconds"];

    /// How much later keys expire in Redis than they matter, in microseconds.
    const LATER: u64 = 4_000_000_000_000_000;

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

    /// A store in this Redis, which uses the clock after [`write_to`](Self::write_to).
    pub(crate) async fn redis_store(&self, redis: &Redis) -> RedisStore {
        // A script that reads a clock fails while there is none.
        self.write_to(redis).await;
        // On the client that the test has already: connecting another one takes long.
        let client = redis.client().await.clone();
        let store = Self::builder().client(client).connect().await;
        store.expect("the client will do")
    }

    /// The same with a deny cache, which uses the clock of tokio.
    pub(crate) async fn redis_store_with_a_deny_cache(&self, redis: &Redis) -> RedisStore {
        let client = redis.client().await.clone();
        let builder = Self::builder().deny_cache(true).client(client);
        builder.connect_lazy().expect("the client will do")
    }

    /// The same through redis-rs.
    pub(crate) async fn redis_store_on_redis_rs(&self, redis: &Redis) -> RedisStore {
        self.redis_store_at(redis, &redis.url()).await
    }

    /// The same through a server in front of this Redis.
    pub(crate) async fn redis_store_at(&self, redis: &Redis, url: &str) -> RedisStore {
        // A script that reads a clock fails while there is none.
        self.write_to(redis).await;
        let builder = Self::builder().client_library(ClientLibrary::RedisRs);
        connected(builder, url).await
    }

    /// Denials are not cached, since the deny cache goes by another clock.
    fn builder() -> RedisStoreBuilder {
        patient().scripts(Self::script).deny_cache(false)
    }

    /// The earliest time, in milliseconds since the Unix epoch, at which a key in Redis may expire that is reset after this time.
    pub(crate) fn expiry(&self, reset: Duration) -> u64 {
        let slack = 1_000_000;
        (self.now() + reset.as_micros() as u64 + Self::LATER - slack) / 1_000
    }

    /// A script of the store, with the time from Redis keys, and keys that expire [`LATER`](Self::LATER), since the time of the test is
    /// not that of Redis.
    fn script(script: &str) -> String {
        let [seconds, micros] = Self::KEYS;
        let with_time = script.replacen("call('TIME')", &format!("call('MGET', '{seconds}', '{micros}')"), 1);
        assert_ne!(with_time, script, "the script reads the time");
        let later = format!("at = at + {}", Self::LATER);
        let script = with_time.replacen("at = at + 1000000", &later, 1);
        assert_ne!(script, with_time, "the script sets expiry times");
        script
    }

    /// The output of a future in this single-threaded runtime while this clock, that of a Redis and that of tokio advance in
    /// steps. Each begins when no script was called after the one before, so nothing depends on the speed of the machine.
    pub(crate) async fn run<F: Future>(&self, redis: &Redis, future: F) -> F::Output {
        let mut future = pin!(future);
        // The clock of tokio does not advance by itself while a task blocks.
        let (end, ended) = mpsc::channel::<()>();
        spawn_blocking(move || ended.recv());
        pause();
        let output = loop {
            tokio::select! {
                biased;
                output = &mut future => break output,
                () = self.step(redis) => {}
            }
        };
        resume();
        drop(end);
        output
    }

    async fn step(&self, redis: &Redis) {
        const STEP: Duration = Duration::from_millis(10);
        let (mut quiet, mut before) = (0, None);
        while quiet < 3 {
            for _ in 0..10 {
                yield_now().await;
            }
            let calls = Some(redis.script_calls().await);
            quiet = if calls == before { quiet + 1 } else { 0 };
            before = calls;
        }
        self.advance(STEP);
        self.write_to(redis).await;
        advance(STEP).await;
    }

    /// Writes the time to this Redis, where the script reads it.
    pub(crate) async fn write_to(&self, redis: &Redis) {
        let [seconds, micros] = Self::KEYS;
        let (now, second) = (self.now(), 1_000_000);
        let words = [
            seconds,
            &(now / second).to_string(),
            micros,
            &(now % second).to_string(),
        ];
        redis.command::<()>("MSET", words).await;
    }
}
