//! A Redis whose clock is set while it counts.

use std::time::Duration;

use tower_quota::{
    Key, Limit, Limiter, Policy, RedisStore, SlidingLog,
    store::{Charge, Operation, Store, StoreRequest},
};

use crate::support::{Faketime, Redis, decide, eventually, patient};

const QUOTA: usize = 5;
const SECOND: u64 = 1_000_000;
const WINDOW: u64 = 2 * SECOND;
const HOUR: i64 = 3_600_000_000;

/// A limit of [`QUOTA`] in each [`WINDOW`], the most that it admits in any window, and the most windows for which it denies
/// a caller.
const LIMITS: [(&str, usize, u64); 6] = [
    ("sliding-log 5/2s", QUOTA, 1),
    ("sliding-log 5/2s precision 4", QUOTA, 1),
    ("sliding-counter 5/2s", 2 * QUOTA - 1, 2),
    ("fixed-window 5/2s", 2 * QUOTA - 1, 1),
    ("fixed-window 5/2s aligned", 2 * QUOTA, 1),
    ("token-bucket 5/2s", 2 * QUOTA - 1, 1),
];

/// A clock that moves only in steps of the test, a Redis that uses it, and a store in this Redis.
struct Bench {
    clock: Faketime,
    redis: Redis,
    store: RedisStore,
}

impl Bench {
    /// 2027-01-15 08:00:00 UTC.
    const START: u64 = 1_800_000_000 * SECOND;
    /// The time by which the clock moves in a tick.
    const TICK: u64 = SECOND / 64;

    async fn start() -> Self {
        let clock = Faketime::new();
        clock.stop_at(Self::START);
        let redis = clock.start_redis();
        // Denials are not cached: the cache uses another clock.
        let store = patient()
            .deny_cache(false)
            .overrides(true)
            .url(&redis.url())
            .connect()
            .await;
        let store = store.expect("the URL is good");
        store.ready().await.expect("Redis answers");
        Self { clock, redis, store }
    }

    /// Sets the clock, and waits until Redis uses it.
    ///
    /// Valkey reads the clock of the system from time to time only, and adds what has passed since by a monotonic one.
    async fn set(&self, now: u64) {
        self.clock.stop_at(now);
        eventually("the clock of Redis is set", async || {
            let [seconds, us]: [u64; 2] = self.redis.command("TIME", [""; 0]).await;
            (now..now + Self::TICK).contains(&(seconds * SECOND + us))
        })
        .await;
    }

    /// Checks, and returns the time of Redis if the check is admitted.
    async fn admits(&self, limit: &Limit) -> Option<u64> {
        let key = Key::from(limit.to_string());
        let charges = [Charge::new("test", limit, &key, 1)];
        let answer = self
            .store
            .decide(&[StoreRequest::new(Operation::Check, &charges)])
            .await;
        let answer = answer.expect("Redis answers");
        let admitted = answer.outcomes()[0].allowed;
        admitted.then_some(answer.server_time.as_micros() as u64)
    }
}

/// A caller that checks at each tick, and when it was admitted: by a clock without a step.
struct Caller {
    limit: Limit,
    admissions: Vec<u64>,
    /// The most that Redis was ahead of its clock at an admission: 0 except on Valkey.
    ahead: u64,
}

impl Caller {
    fn new(limit: &str) -> Self {
        Self {
            limit: limit.parse().expect("a limit"),
            admissions: Vec::new(),
            ahead: 0,
        }
    }

    async fn check(&mut self, bench: &Bench, now: u64, step: i64) {
        while let Some(at) = bench.admits(&self.limit).await {
            let at = at.checked_add_signed(-step).expect("a time after 1970");
            self.ahead = self.ahead.max(at - now);
            self.admissions.push(now);
        }
    }

    fn most_in_a_window(&self) -> usize {
        let within = |first: &u64| {
            let window = *first..*first + WINDOW - self.ahead;
            self.admissions.iter().filter(|at| window.contains(at)).count()
        };
        self.admissions.iter().map(within).max().unwrap_or_default()
    }

    /// The longest time without an admission between these two.
    fn longest_block(&self, since: u64, until: u64) -> u64 {
        let mut times = vec![since, until];
        times.extend(self.admissions.iter().filter(|at| (since..until).contains(at)));
        times.sort_unstable();
        let blocks = times.windows(2).map(|pair| pair[1] - pair[0]);
        blocks.max().unwrap_or_default()
    }
}

/// Sets the clock of a Redis that denies every caller, by whole windows or less, and asserts that at most one quota more is admitted, that
/// no caller is denied for more than its windows and a second, and that every key has its expiry.
async fn a_step_is_over_within_a_window(step: i64) {
    let bench = Bench::start().await;
    let mut callers = LIMITS.map(|(limit, ..)| Caller::new(limit));
    for caller in &mut callers {
        caller.check(&bench, Bench::START, 0).await;
    }

    let (start, end) = (Bench::START, Bench::START + 3 * WINDOW);
    for now in (start..=end).step_by(Bench::TICK as usize) {
        bench
            .set(now.checked_add_signed(step).expect("a time after 1970"))
            .await;
        for caller in &mut callers {
            caller.check(&bench, now, step).await;
        }
    }

    for (caller, (limit, most, windows)) in callers.iter().zip(LIMITS) {
        let admitted = caller.most_in_a_window();
        assert!(admitted <= most + QUOTA, "{limit}: {admitted} in a window");
        let block = caller.longest_block(start, end);
        assert!(
            block <= windows * WINDOW + SECOND + Bench::TICK,
            "{limit}: denied for {block} us"
        );
    }
    let keys: Vec<String> = bench.redis.command("KEYS", ["*"]).await;
    assert_eq!(keys.len(), LIMITS.len(), "{keys:?}");
    for key in keys {
        let ttl: i64 = bench.redis.command("PTTL", [&key]).await;
        assert!((1..=5_000).contains(&ttl), "{key}: {ttl} ms");
    }
}

#[tokio::test]
#[ignore = "needs faketime: `.ci/test`"]
async fn an_hour_forward() {
    a_step_is_over_within_a_window(HOUR).await;
}

#[tokio::test]
#[ignore = "needs faketime: `.ci/test`"]
async fn an_hour_back() {
    a_step_is_over_within_a_window(-HOUR).await;
}

#[tokio::test]
#[ignore = "needs faketime: `.ci/test`"]
async fn a_window_back() {
    a_step_is_over_within_a_window(-2_000_000).await;
}

#[tokio::test]
#[ignore = "needs faketime: `.ci/test`"]
async fn half_a_second_back() {
    a_step_is_over_within_a_window(-500_000).await;
}

#[tokio::test]
#[ignore = "needs faketime: `.ci/test`"]
async fn windows_of_a_calendar_follow_the_clock_of_redis() {
    const DAY: i64 = 24 * HOUR;
    let bench = Bench::start().await;
    let limit: Limit = "fixed-window 5/day Europe/Berlin".parse().expect("a limit");
    for days in [0, 40, -40, 0] {
        let now = Bench::START.checked_add_signed(days * DAY);
        bench.set(now.expect("a time after 1970")).await;
        for remaining in (0..5).rev() {
            let admitted = decide(&bench.store, Operation::Check, &limit, "k", 1).await;
            assert!(admitted.allowed, "{days} days off");
            assert_eq!(admitted.states()[0].remaining, remaining);
        }
        let denied = decide(&bench.store, Operation::Check, &limit, "k", 1).await;
        let wait = denied.states()[0].retry_after.expect("it is denied");
        assert!(wait <= Duration::from_secs(25 * 3_600), "{wait:?}");
    }
}

#[tokio::test]
async fn an_override_that_ends_by_a_clock_ahead_applies_again() {
    let bench = Bench::start().await;
    let limiter = Limiter::new(bench.store.clone(), Policy::new("mails", SlidingLog::per_hour(1)));
    let raise = async |key: &str| {
        let nine: Limit = "sliding-log 9/h".parse().expect("a limit");
        let lasts = Duration::from_secs(1_800);
        limiter
            .override_limit("mails", key, nine, lasts)
            .await
            .expect("Redis answers");
    };
    let raised = || -> Vec<_> { limiter.overrides().into_iter().map(|one| one.key.to_string()).collect() };

    raise("a").await;
    bench.set(Bench::START + HOUR as u64).await;
    raise("b").await;
    assert_eq!(raised(), ["key=b"]);

    bench.set(Bench::START + SECOND).await;
    eventually("both apply", async || raised() == ["key=a", "key=b"]).await;
    assert_eq!(limiter.peek("a").await.expect("Redis answers").limit(), 9);
}
