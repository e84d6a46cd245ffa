use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tower_quota::{
    Decision, Key, Limit, Limiter, Policy, RedisStore,
    store::{Charge, Operation, Outcome, Store, StoreRequest},
};

use super::{Clock, Redis, decide};

/// A store with a clock that the test sets, and a key.
pub(crate) struct Bench {
    pub(crate) store: Arc<dyn Store>,
    clock: Clock,
    redis: Option<Arc<Redis>>,
    key: String,
}

/// Benches.
impl Bench {
    pub(crate) async fn memory_store() -> Self {
        let clock = Clock::new();
        Self::new(Arc::new(clock.memory_store()), clock, None).await
    }

    pub(crate) async fn redis_store() -> Self {
        let clock = Clock::new();
        let redis = Redis::start();
        let store = clock.redis_store(&redis).await;
        Self::new(Arc::new(store), clock, Some(Arc::new(redis))).await
    }

    pub(crate) fn is_in_redis(&self) -> bool {
        self.redis.is_some()
    }

    /// The same store and clock, and a key that was not used yet.
    pub(crate) fn with_a_fresh_key(&self) -> Self {
        static KEYS: AtomicU64 = AtomicU64::new(0);
        Self {
            store: self.store.clone(),
            clock: self.clock.clone(),
            redis: self.redis.clone(),
            key: format!("k{}", KEYS.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// A store with a deny cache in the Redis of this bench.
    pub(crate) async fn store_with_a_deny_cache(&self) -> RedisStore {
        let redis = self.redis.as_ref().expect("a bench of Redis");
        self.clock.redis_store_with_a_deny_cache(redis).await
    }

    /// The number of calls of the script.
    pub(crate) async fn script_calls(&self) -> u64 {
        self.redis.as_ref().expect("a bench of Redis").script_calls().await
    }

    async fn new(store: Arc<dyn Store>, clock: Clock, redis: Option<Arc<Redis>>) -> Self {
        let bench = Self {
            store,
            clock,
            redis,
            key: "k".into(),
        };
        bench.write_time().await;
        bench
    }
}

/// The clock.
impl Bench {
    /// The microseconds since the Unix epoch.
    pub(crate) fn now(&self) -> u64 {
        self.clock.now()
    }

    pub(crate) async fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.write_time().await;
    }

    /// Sets the clock to this many microseconds since the Unix epoch.
    pub(crate) async fn set_to(&self, now: u64) {
        self.clock.set(now);
        self.write_time().await;
    }

    pub(crate) async fn set_back(&self, by: Duration) {
        self.set_to(self.now() - by.as_micros() as u64).await;
    }

    /// Sets the clock to a moment such as `2028-02-29T23:59:59.999999+01:00[Europe/Berlin]`.
    pub(crate) async fn set(&self, moment: &str) {
        let moment: jiff::ZonedDateTime = moment.parse().expect("a moment and its zone");
        self.set_to(moment.timestamp().as_microsecond() as u64).await;
    }

    async fn write_time(&self) {
        if let Some(redis) = &self.redis {
            self.clock.write_to(redis).await;
        }
    }
}

/// The operations.
impl Bench {
    /// The time at which the key expires, if the store has such times and the key one.
    pub(crate) async fn expires_at(&self) -> Option<i64> {
        let redis = self.redis.as_ref()?;
        let keys: Vec<String> = redis.command("KEYS", [format!("*{{key={}}}", self.key)]).await;
        Some(redis.expires_at(keys.first()?).await)
    }

    /// How many members the sorted set of the key has, apart from those that describe the others, if the store has one.
    pub(crate) async fn members(&self) -> Option<u64> {
        let redis = self.redis.as_ref()?;
        let keys: Vec<String> = redis.command("KEYS", [format!("*{{key={}}}", self.key)]).await;
        Some(redis.command("ZCOUNT", [keys.first()?, "(0", "+inf"]).await)
    }

    /// What Redis holds of the key, if the store is in Redis: the contents of each of its counts, and the times at which they expire.
    pub(crate) async fn dump(&self) -> Vec<(String, Vec<u8>, i64)> {
        let Some(redis) = &self.redis else { return Vec::new() };
        let mut keys: Vec<String> = redis.command("KEYS", [format!("*{{key={}}}", self.key)]).await;
        keys.sort_unstable();
        let mut dump = Vec::new();
        for key in keys {
            let contents: Vec<u8> = redis.command("DUMP", [&key]).await;
            let expires_at = redis.expires_at(&key).await;
            dump.push((key, contents, expires_at));
        }
        dump
    }

    pub(crate) async fn check(&self, limit: &Limit, cost: u64) -> Outcome {
        decide(&self.store, Operation::Check, limit, &self.key, cost).await
    }

    /// Sends so many equal requests in one call.
    pub(crate) async fn check_times(&self, limit: &Limit, cost: u64, times: usize) -> Vec<Outcome> {
        let key = Key::from(self.key.as_str());
        let charges = [Charge::new("test", limit, &key, cost)];
        let requests = vec![StoreRequest::new(Operation::Check, &charges); times];
        let response = self.store.decide(&requests).await.expect("the store replies");
        response.outcomes().to_vec()
    }

    pub(crate) async fn peek(&self, limit: &Limit, cost: u64) -> Outcome {
        decide(&self.store, Operation::Peek, limit, &self.key, cost).await
    }

    pub(crate) async fn charge(&self, limit: &Limit, cost: u64) -> Outcome {
        decide(&self.store, Operation::Charge, limit, &self.key, cost).await
    }

    /// The decision of a limiter about this cost.
    pub(crate) async fn decision(&self, limit: &Limit, cost: u64) -> Decision {
        let limiter = Limiter::new(self.store.clone(), Policy::new("test", limit.clone()));
        let decision = limiter.request(self.key.as_str()).cost(cost).check().await;
        decision.expect("the store replies")
    }

    /// Checks an estimate, which fits, and settles it a microsecond later; returns the state after that.
    pub(crate) async fn settle(&self, limit: &Limit, estimate: u64, actual: u64) -> Outcome {
        let receipt = self.decision(limit, estimate).await.take_receipt();
        self.advance(Duration::from_micros(1)).await;
        receipt.settle(actual).await.expect("the store replies");
        self.peek(limit, 1).await
    }

    /// Charges 1 so many times in one call, and returns the last outcome.
    pub(crate) async fn charge_each(&self, limit: &Limit, times: usize) -> Outcome {
        let key = Key::from(self.key.as_str());
        let charges = [Charge::new("test", limit, &key, 1)];
        let charges = vec![StoreRequest::new(Operation::Charge, &charges); times];
        let response = self.store.decide(&charges).await.expect("the store replies");
        response.outcomes().last().expect("an outcome").clone()
    }

    /// Gives back what was counted at that time of the clock.
    pub(crate) async fn refund(&self, limit: &Limit, cost: u64, admitted_at: u64) -> Outcome {
        self.refund_beside(0, limit, cost, admitted_at).await
    }

    /// Refunds a part of a charge, of which so much stays.
    pub(crate) async fn refund_beside(&self, kept: u64, limit: &Limit, cost: u64, admitted_at: u64) -> Outcome {
        let admitted_at = Duration::from_micros(admitted_at);
        let charge = Charge::new("test", limit, &Key::from(&*self.key), cost).keeping(kept);
        let request = StoreRequest::new(Operation::Refund { admitted_at }, [&charge]);
        let response = self.store.decide(&[request]).await.expect("the store replies");
        response.outcomes()[0].clone()
    }

    pub(crate) async fn reset(&self, limit: &Limit) -> Outcome {
        decide(&self.store, Operation::Reset, limit, &self.key, 1).await
    }
}
