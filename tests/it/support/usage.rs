use std::{fmt, time::Duration};

use tower_quota::{
    FixedWindow, Key, Limit, RedisStore, SlidingCounter, SlidingLog, TokenBucket,
    store::{Charge, Operation, Store, StoreRequest},
};

use super::{clock::Clock, redis::Redis};

/// The memory and the commands that a limit needs in Redis for one key, `quota:1:<algorithm>:login:{header:x-user-id=42}`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) bytes_of_one: u64,
    pub(crate) bytes_of_hundred: u64,
    pub(crate) bytes_when_full: u64,
    pub(crate) commands_admitted: u64,
    /// For an admission when what was admitted one window ago expires.
    pub(crate) commands_after_expiry: u64,
    pub(crate) commands_denied: u64,
}

/// The limits whose figures are in the docs.
pub(crate) fn limits() -> [Limit; 8] {
    [
        SlidingLog::per_minute(100).into(),
        SlidingLog::per_minute(10_000).into(),
        SlidingLog::new(1_000_000, Duration::from_secs(10))
            .precision(1_000)
            .into(),
        SlidingLog::new(1_000_000, Duration::from_secs(10))
            .precision(100)
            .into(),
        SlidingCounter::per_minute(100).into(),
        FixedWindow::per_minute(100).into(),
        FixedWindow::per_minute(100).aligned().into(),
        TokenBucket::per_minute(100).into(),
    ]
}

impl Usage {
    /// Measures it in an empty Redis, which is empty again afterwards.
    pub(crate) async fn of(limit: &Limit, redis: &Redis) -> Self {
        let clock = Clock::new();
        let keys = Keys {
            limit,
            store: clock.redis_store(redis).await,
            clock,
            redis,
        };
        let usage = keys.measure().await;
        keys.forget().await;
        usage
    }
}

/// The cells of a table.
impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            bytes_of_one,
            bytes_of_hundred,
            bytes_when_full,
            commands_admitted,
            commands_after_expiry,
            commands_denied,
        } = self;
        write!(f, "{bytes_of_one} | {bytes_of_hundred} | {bytes_when_full} | ")?;
        write!(f, "{commands_admitted} | {commands_after_expiry} | {commands_denied}")
    }
}

struct Keys<'a> {
    limit: &'a Limit,
    clock: Clock,
    redis: &'a Redis,
    store: RedisStore,
}

impl Keys<'_> {
    async fn measure(&self) -> Usage {
        let quota = self.limit.quota();
        let window = self.limit.window().expect("no window of a calendar");
        // As many steps as a coarse log has grains; a bucket is emptied at once, since it fills up meanwhile.
        let steps = match self.limit {
            Limit::SlidingLog(log) if *log == log.precision(100) => 100,
            Limit::SlidingLog(log) if *log == log.precision(1_000) => 1_000,
            Limit::TokenBucket(_) => 1,
            _ => quota,
        };
        let start = self.clock.now();
        let step = window / steps as u32;

        self.go_to(start).await;
        self.check(1).await;
        let bytes_of_one = self.bytes().await;
        for admitted in 1..100 {
            self.go_to(start + admitted * 1_000).await;
            self.check(1).await;
        }
        let bytes_of_hundred = self.bytes().await;
        self.forget().await;

        for taken in 0..steps {
            self.go_to(start + taken * step.as_micros() as u64).await;
            assert!(self.check(quota / steps).await, "{} fills up", self.limit);
        }
        let bytes_when_full = self.bytes().await;
        let commands_denied = self.commands(false).await;
        self.go_to(start + (window + step).as_micros() as u64).await;
        let commands_after_expiry = self.commands(true).await;
        self.forget().await;

        self.go_to(start).await;
        self.check(1).await;
        self.go_to(start + 1_000).await;
        let commands_admitted = self.commands(true).await;

        Usage {
            bytes_of_one,
            bytes_of_hundred,
            bytes_when_full,
            commands_admitted,
            commands_after_expiry,
            commands_denied,
        }
    }

    async fn go_to(&self, now: u64) {
        self.clock.set(now);
        self.clock.write_to(self.redis).await;
    }

    async fn forget(&self) {
        self.redis.command::<()>("FLUSHALL", ["SYNC"]).await;
    }

    async fn check(&self, cost: u64) -> bool {
        let key = Key::header("x-user-id", "42");
        let charges = [Charge::new("login", self.limit, &key, cost)];
        let answer = self
            .store
            .decide(&[StoreRequest::new(Operation::Check, &charges)])
            .await;
        let answer = answer.unwrap_or_else(|error| panic!("{error}: {:?}", std::error::Error::source(&error)));
        answer.outcomes()[0].allowed
    }

    async fn bytes(&self) -> u64 {
        let keys: Vec<String> = self.redis.command("KEYS", ["quota:*"]).await;
        let key = keys[0].clone();
        self.redis
            .command("MEMORY", ["USAGE".into(), key, "SAMPLES".into(), "0".into()])
            .await
    }

    /// How many commands the script of one check runs, which must be admitted or not.
    async fn commands(&self, admitted: bool) -> u64 {
        self.redis.command::<()>("CONFIG", ["RESETSTAT"]).await;
        assert_eq!(self.check(1).await, admitted, "{}", self.limit);

        let mut calls = self.redis.all_calls().await;
        // A check looks for an expiry that is lost at some times only.
        let is_counted = |name: &str| {
            !["eval", "config", "info", "pttl"]
                .iter()
                .any(|other| name.starts_with(other))
        };
        calls.retain(|name, _| is_counted(name));
        calls.values().sum()
    }
}
