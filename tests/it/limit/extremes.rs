//! The smallest and largest numbers that constructors, settings and files accept: Redis replies to each, and decides as a memory
//! store does. Those beyond are refused.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tower_quota::{
    Ban, Concurrency, Decision, FailureMode, FixedWindow, Key, Limit, Limiter, Policies, Policy, SlidingCounter,
    SlidingLog, TokenBucket,
    limit::Calendar,
    store::{Charge, ChargeLine, Operation, Store, StoreRequest},
};

use crate::support::{Broken, Clock, Redis, connected, patient};

const MOST: u64 = 999_999_999_999_999;
const US: Duration = Duration::from_micros(1);
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_secs(3_653 * 86_400);
const YEAR_2096: u64 = 4_000_000_000_000_000;
const LONGEST_BAN: Duration = Duration::from_secs(366 * 86_400);

#[derive(Clone, Copy, Debug)]
enum Step {
    Check(u64),
    /// Checks 1, and replaces it by this cost.
    Settle(u64),
    Charge(u64),
    /// Arrives in the line.
    Stand(u64),
    Peek,
    Ban(Duration),
    Reset,
    /// The clock moves by the last wait.
    Wait,
}

/// A store, its limiter, and the decisions so far, which hold slots.
struct Side {
    limiter: Limiter,
    store: Arc<dyn Store>,
    limit: Limit,
    decisions: Vec<Decision>,
}

impl Side {
    fn new(store: Arc<dyn Store>, policy: &Policy<()>) -> Self {
        // Closed, so that a reply that cannot be decoded is an error.
        let policy = policy.clone().failure_mode(FailureMode::Closed);
        let limit = policy.limit().expect("one limit").clone();
        Self {
            limiter: Limiter::try_new(store.clone(), policy).expect("the policy is valid"),
            store,
            limit,
            decisions: Vec::new(),
        }
    }

    /// What a step returns, as text, and the wait.
    async fn perform(&mut self, key: &str, step: Step) -> Result<(String, Option<Duration>), String> {
        let limiter = &self.limiter;
        let decision = match step {
            Step::Check(cost) => limiter.request(key).cost(cost).check().await,
            Step::Charge(cost) => limiter.request(key).cost(cost).charge().await,
            Step::Peek | Step::Wait => limiter.peek(key).await,
            Step::Settle(actual) => {
                let checked = limiter.check(key).await;
                if let Ok(checked) = &checked {
                    let settled = checked.take_receipt().settle(actual).await;
                    settled.map_err(|error| error.to_string())?;
                }
                checked
            }
            Step::Stand(cost) => {
                let key = Key::from(key);
                let line = ChargeLine {
                    number: 1,
                    longest_us: MOST,
                    ahead: 0,
                    leads: None,
                    leads_elsewhere: false,
                };
                let charges = [Charge::new("test", &self.limit, &key, cost).in_line(Some(line))];
                let requests = [StoreRequest::new(Operation::Wait, &charges)];
                let response = self.store.decide(&requests).await.map_err(|error| error.to_string())?;
                return Ok((format!("{:?}", response.outcomes()), None));
            }
            Step::Ban(length) => {
                limiter.ban(key, length).await.map_err(|error| error.to_string())?;
                limiter.peek(key).await
            }
            Step::Reset => {
                limiter.reset(key).await.map_err(|error| error.to_string())?;
                limiter.peek(key).await
            }
        };
        let decision = decision.map_err(|error| error.to_string())?;
        let policies: Vec<_> = decision.policies().collect();
        let text = format!("{} {policies:?}", decision.is_allowed());
        let wait = decision.retry_after();
        self.decisions.push(decision);
        Ok((text, wait))
    }
}

struct Bench {
    redis: Redis,
    clock: Clock,
    /// With the clock of the test, and with that of Redis.
    shared: [Arc<dyn Store>; 2],
    policies: usize,
}

impl Bench {
    async fn start() -> Self {
        let (redis, clock) = (Redis::start(), Clock::new());
        let own_clock = connected(patient().deny_cache(false), &redis.url()).await;
        let shared: [Arc<dyn Store>; 2] = [Arc::new(clock.redis_store(&redis).await), Arc::new(own_clock)];
        Self {
            redis,
            clock,
            shared,
            policies: 0,
        }
    }

    /// Performs these steps in Redis by its own clock; and in Redis and in memory by a clock of today that the test sets.
    async fn walk(&mut self, policy: &Policy<()>, steps: &[Step]) {
        self.policies += 1;
        let key = self.policies.to_string();
        let what = format!("{:?} of {policy:?}", policy.limit());
        let [by_test, by_redis] = self.shared.clone();

        let mut real = Side::new(by_redis, policy);
        for step in steps {
            let performed = real.perform(&format!("real {key}"), *step).await;
            if let Err(error) = performed {
                panic!("{step:?} fails: {error}, {what}");
            }
        }

        let today = SystemTime::UNIX_EPOCH.elapsed().expect("it is after 1970");
        self.clock.set(today.as_micros() as u64);
        let memory = self.clock.memory_store();
        let (mut in_redis, mut in_memory) = (Side::new(by_test, policy), Side::new(Arc::new(memory), policy));
        let mut last: Option<Duration> = None;
        for (n, step) in steps.iter().enumerate() {
            // A memory store has no times after the year 2112.
            if let (Step::Wait, Some(wait)) = (step, last)
                && self.clock.now() + (wait.as_micros() as u64) < YEAR_2096
            {
                self.clock.advance(wait);
            }
            self.clock.write_to(&self.redis).await;
            let expected = in_memory.perform(&key, *step).await;
            let found = in_redis.perform(&key, *step).await;
            assert_eq!(found, expected, "Redis, then memory: step {n}, {step:?}, {what}");
            let (_, wait) = found.unwrap_or_else(|error| panic!("step {n}, {step:?} fails: {error}, {what}"));
            last = wait.or(last);
        }
    }

    async fn walk_limit(&mut self, limit: &Limit) {
        use Step::{Charge, Check, Peek, Reset, Settle, Stand, Wait};

        let policy = Policy::new("test", limit.clone());
        assert!(policy.validate().is_ok(), "{limit} is refused");
        let quota = limit.quota();
        let steps = [
            vec![Check(1), Check(1), Check(1), Wait, Check(1), Peek, Reset],
            vec![
                Check(quota),
                Check(quota),
                Check(1),
                Wait,
                Check(quota),
                Check(1),
                Wait,
                Check(1),
                Reset,
            ],
            vec![
                Check(u64::MAX),
                Check(quota / 2 + 1),
                Check(quota / 2 + 1),
                Wait,
                Check(quota / 2 + 1),
                Peek,
            ],
            vec![Settle(1), Settle(u64::MAX), Check(1), Wait, Settle(quota), Reset],
            vec![
                Stand(1),
                Stand(quota),
                Stand(quota),
                Stand(1),
                Stand(u64::MAX),
                Wait,
                Check(1),
                Reset,
            ],
            // More waits than a double counts exactly.
            [vec![Check(quota)], vec![Stand(quota); 13], vec![Check(1), Reset]].concat(),
            vec![Charge(1), Charge(quota)],
            // More than Lua counts exactly.
            vec![Charge(u64::MAX); 10],
            vec![Check(1), Check(quota), Wait, Check(1), Reset],
        ];
        self.walk(&policy, &steps.concat()).await;
        // By a file.
        let text = format!(
            "[policies.test]\nlimit = \"{limit}\"\ncost = {}",
            quota.min(i64::MAX as u64)
        );
        let by_file = Policies::from_toml(&text).and_then(|file| file.unkeyed("test"));
        assert_eq!(by_file.expect(&text).limit(), Some(limit));
    }
}

fn quotas() -> [u64; 5] {
    [1, 2, 1_000_003, MOST - 1, MOST]
}

fn windows() -> [Duration; 4] {
    [SHORTEST, SHORTEST + US, Duration::from_secs(86_400), LONGEST]
}

/// Numbers and windows that no limit has.
fn refused() -> impl Iterator<Item = (u64, Duration)> {
    let quotas = [0, MOST + 1, 1 << 53, u64::MAX].map(|quota| (quota, SHORTEST));
    let windows = [
        Duration::ZERO,
        SHORTEST - US,
        SHORTEST + US / 2,
        LONGEST + US,
        Duration::MAX,
    ];
    quotas.into_iter().chain(windows.map(|window| (1, window)))
}

fn all() -> impl Iterator<Item = (u64, Duration)> {
    quotas()
        .into_iter()
        .flat_map(|quota| windows().map(|window| (quota, window)))
}

fn panics<T>(build: impl FnOnce() -> T) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(build)).is_err()
}

#[tokio::test]
async fn each_sliding_log_is_decided() {
    let mut bench = Bench::start().await;
    for (quota, window) in all() {
        let log = SlidingLog::try_new(quota, window).expect("it is valid");
        assert_eq!(Policy::new("test", log).validate().is_ok(), quota <= 100_000, "{log}");
        if quota <= 100_000 {
            bench.walk_limit(&log.into()).await;
        }
        for precision in [1, 100_000] {
            bench.walk_limit(&log.precision(precision).into()).await;
        }
        assert!(panics(|| log.precision(0)) && panics(|| log.precision(100_001)));
    }
    bench.walk_limit(&SlidingLog::new(100_000, LONGEST).into()).await;
    assert!(
        Policy::new("test", SlidingLog::new(100_001, LONGEST))
            .validate()
            .is_err()
    );
    for (quota, window) in refused() {
        assert!(SlidingLog::try_new(quota, window).is_err(), "{quota} in {window:?}");
    }
}

#[tokio::test]
async fn each_sliding_counter_is_decided() {
    let mut bench = Bench::start().await;
    for (quota, window) in all() {
        let counter = SlidingCounter::try_new(quota, window).expect("it is valid");
        bench.walk_limit(&counter.into()).await;
    }
    for (quota, window) in refused() {
        assert!(SlidingCounter::try_new(quota, window).is_err(), "{quota} in {window:?}");
    }
}

#[tokio::test]
async fn each_fixed_window_is_decided() {
    let mut bench = Bench::start().await;
    for (quota, window) in all() {
        let fixed = FixedWindow::try_new(quota, window).expect("it is valid");
        bench.walk_limit(&fixed.clone().aligned().into()).await;
        bench.walk_limit(&fixed.into()).await;
    }
    for (quota, window) in refused() {
        assert!(FixedWindow::try_new(quota, window).is_err(), "{quota} in {window:?}");
    }
    let calendars = [
        Calendar::Hour,
        Calendar::Day,
        Calendar::Week,
        Calendar::Month,
        Calendar::Year,
    ];
    for calendar in calendars {
        for zone in ["UTC", "Asia/Kolkata", "Pacific/Apia", "America/St_Johns"] {
            for quota in [1, MOST] {
                let fixed = FixedWindow::calendar(quota, calendar, zone).expect("it is valid");
                bench.walk_limit(&fixed.into()).await;
            }
        }
        for quota in [0, MOST + 1, u64::MAX] {
            assert!(FixedWindow::calendar(quota, calendar, "UTC").is_err(), "{quota}");
        }
    }
    assert!(FixedWindow::calendar(1, Calendar::Day, "Europe/Atlantis").is_err());
    assert!(FixedWindow::calendar(1, Calendar::Day, "Etc/Unknown").is_err());
}

#[tokio::test]
async fn each_token_bucket_is_decided() {
    let mut bench = Bench::start().await;
    let is_valid = |bucket: TokenBucket| Policy::new("test", bucket).validate().is_ok();
    let mut walked = 0;
    for (quota, window) in all() {
        let bucket = TokenBucket::try_new(quota, window).expect("it is valid");
        assert!(panics(|| bucket.burst(0)));
        assert!(!is_valid(bucket.burst(u64::MAX)) && !is_valid(bucket.burst(MOST + 1)));
        // The largest burst whose arithmetic is exact.
        let bursts: Vec<u64> = (0..50).map(|bit| 1 << bit).collect();
        let largest = bursts.iter().rev().fold(0, |largest, bit| {
            let more = largest + bit;
            if is_valid(bucket.burst(more)) { more } else { largest }
        });
        if largest == 0 {
            continue;
        }
        assert!(!is_valid(bucket.burst(largest + 1)));
        for burst in [1, quota.min(largest), largest] {
            bench.walk_limit(&bucket.burst(burst).into()).await;
            walked += 1;
        }
    }
    assert!(walked > 30, "{walked} buckets");
    for (quota, window) in refused() {
        assert!(TokenBucket::try_new(quota, window).is_err(), "{quota} in {window:?}");
    }
}

#[tokio::test]
async fn each_limit_of_slots_is_decided() {
    use Step::{Charge, Check, Peek, Reset, Stand};

    let mut bench = Bench::start().await;
    let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3_600));
    for slots in [1, 2, 999_999_999] {
        for lease in [second, second + US, hour] {
            let limit = Concurrency::try_new(slots).expect("it is valid").lease(lease);
            let policy = Policy::new("test", limit);
            for cost in [1, slots, u64::MAX] {
                let mut steps = vec![Check(cost), Check(cost), Peek, Charge(cost), Stand(cost), Check(1)];
                // The leases are renewed by the time of the process: soon, those that a reset has ended would be taken again.
                if lease == hour {
                    steps.extend([Reset, Check(cost)]);
                }
                bench.walk(&policy, &steps).await;
            }
        }
    }
    for slots in [0, 1_000_000_000, u64::MAX] {
        assert!(Concurrency::try_new(slots).is_err(), "{slots}");
    }
    for lease in [Duration::ZERO, second - US, second + US / 2, hour + US, Duration::MAX] {
        assert!(panics(|| Concurrency::new(1).lease(lease)), "{lease:?}");
    }
}

#[tokio::test]
async fn each_ban_is_decided() {
    let mut bench = Bench::start().await;
    for quota in [1, 100_000] {
        let policy = Policy::new("test", SlidingLog::new(quota, SHORTEST));
        for denials in [Some(1), Some(2), Some(1_000_000), None] {
            for within in [SHORTEST, LONGEST_BAN] {
                for (first, longest) in [
                    (SHORTEST, SHORTEST),
                    (SHORTEST, LONGEST_BAN),
                    (LONGEST_BAN, LONGEST_BAN),
                ] {
                    let ban = denials.map_or(Ban::by_hand(), |denials| Ban::after(denials, within));
                    let policy = policy.clone().ban(ban.first(first).longest(longest));
                    let mut steps = vec![
                        Step::Ban(US),
                        Step::Ban(longest),
                        Step::Check(1),
                        Step::Wait,
                        Step::Reset,
                    ];
                    // Each ban is twice as long as the one before; then the longest ones follow.
                    let doublings = if first == longest { 0 } else { 36 };
                    for _ in 0..doublings + 4 {
                        steps.extend([Step::Check(quota), Step::Check(1), Step::Wait]);
                    }
                    steps.extend([
                        Step::Check(1),
                        Step::Check(1),
                        Step::Ban(longest),
                        Step::Peek,
                        Step::Check(1),
                    ]);
                    bench.walk(&policy, &steps).await;
                }
            }
        }
    }

    let policy = Policy::new("test", SlidingLog::per_second(1));
    let ban = Ban::after(1, SHORTEST);
    for wrong in [
        Ban::after(0, SHORTEST),
        Ban::after(1_000_001, SHORTEST),
        Ban::after(MOST, SHORTEST),
        Ban::after(1 << 53, SHORTEST),
        Ban::after(u64::MAX, SHORTEST),
        Ban::after(1, SHORTEST - US),
        Ban::after(1, LONGEST_BAN + US),
        Ban::after(1, SHORTEST + US / 2),
        ban.first(SHORTEST - US),
        ban.longest(LONGEST_BAN + US),
        ban.first(SHORTEST + US).longest(SHORTEST),
        ban.longest(Duration::MAX),
    ] {
        assert!(panics(|| policy.clone().ban(wrong)), "{wrong:?}");
    }
    for (line, is_valid) in [
        (
            "after = 1000000, within = \"366d\", first = \"366d\", longest = \"366d\"",
            true,
        ),
        ("after = 1, within = \"1ms\", first = \"1ms\", longest = \"1ms\"", true),
        ("after = 1000001, within = \"1h\"", false),
        ("after = 999999999999999, within = \"1h\"", false),
        ("after = 9007199254740992, within = \"1h\"", false),
        ("after = 9223372036854775807, within = \"1h\"", false),
        ("after = 1, within = \"367d\"", false),
        ("after = 1, within = \"999us\"", false),
        ("after = 1, within = \"1h\", longest = \"367d\"", false),
    ] {
        let text = format!("[policies.test]\nlimit = \"sliding-log 1/s\"\nban = {{ {line} }}");
        assert_eq!(Policies::from_toml(&text).is_ok(), is_valid, "{text}");
    }
}

#[tokio::test]
async fn each_setting_of_a_policy_is_decided() {
    use Step::{Check, Peek, Settle};

    let mut bench = Bench::start().await;
    let policies = || {
        [
            SlidingLog::new(3, LONGEST).into(),
            FixedWindow::new(3, SHORTEST).aligned().into(),
        ]
    };
    let policies = || policies().map(|limit: Limit| Policy::new("test", limit));
    let steps = [Check(1), Settle(2), Peek, Check(1), Check(1)];
    for policy in policies() {
        for cost in [1, 3, 4, MOST, MOST + 1, u64::MAX] {
            let policy = policy.clone().cost(cost);
            let is_possible = policy.limit().is_some_and(|limit| cost <= limit.quota());
            assert_eq!(policy.validate().is_ok(), is_possible, "{policy:?}");
            if is_possible {
                bench.walk(&policy, &steps).await;
            }
        }
        assert!(panics(|| policy.clone().cost(0)));
    }
    for limit in [
        Limit::from(SlidingLog::new(3, LONGEST)),
        SlidingCounter::new(3, LONGEST).into(),
        TokenBucket::new(3, LONGEST).into(),
    ] {
        let policy = Policy::new("test", limit);
        // It may wait until a third of its quota has room again, and no less than a hundredth of that time.
        let wrong = [US, LONGEST / 301].map(|longest| policy.clone().wait_up_to(longest));
        assert!(wrong.iter().all(|wrong| wrong.validate().is_err()));
        for longest in [Duration::ZERO, LONGEST / 300, LONGEST, Duration::MAX] {
            for units in [1, MOST] {
                let waiting = policy.clone().wait_up_to(longest).max_waiting(units);
                bench.walk(&waiting, &steps).await;
            }
        }
        for wrong in [0, MOST + 1, u64::MAX] {
            assert!(panics(|| policy.clone().max_waiting(wrong)), "{wrong}");
        }
    }
}

/// What a process counts while the store fails.
#[tokio::test]
async fn each_share_of_a_limit_is_decided() {
    let limits = all().flat_map(|(quota, window)| {
        [
            Limit::from(SlidingLog::new(quota, window).precision(7)),
            SlidingCounter::new(quota, window).into(),
            FixedWindow::new(quota, window).into(),
            TokenBucket::new(quota, window).into(),
            TokenBucket::new(quota, window).burst(1).into(),
        ]
    });
    let mut decided = 0;
    // It holds back what comes in the time of the prefetch.
    let ahead = TokenBucket::per_second(1_000).prefetch(Duration::from_millis(100));
    let others = [
        Concurrency::new(1).into(),
        Concurrency::new(999_999_999).into(),
        ahead.into(),
    ];
    for limit in limits.chain(others) {
        // Some buckets are not exact.
        let policy = Policy::new("test", limit.clone());
        if policy.validate().is_err() {
            continue;
        }
        for (parts, of) in [(1, 1), (1, u32::MAX), (u32::MAX - 1, u32::MAX)] {
            let share = FailureMode::local_share(parts, of);
            let limiter = Limiter::new(Broken::default(), policy.clone().failure_mode(share));
            let first = limiter.check("k").await.expect("this process counts");
            assert!(first.is_allowed(), "{limit}, {share}");
            assert!(first.remaining() < first.limit(), "{limit}, {share}: {first:?}");
            for cost in [1, limit.quota()] {
                let checked = limiter
                    .request("k")
                    .cost(cost)
                    .check()
                    .await
                    .expect("this process counts");
                assert_eq!(checked.limit(), limit.quota(), "{limit}, {share}");
            }
            let charged = limiter
                .request("k")
                .cost(u64::MAX)
                .charge()
                .await
                .expect("this process counts");
            assert_eq!(charged.remaining(), 0, "{limit}, {share}");
            decided += 1;
        }
    }
    assert!(decided > 200, "{decided}");
    for (parts, of) in [(0, 1), (2, 1), (0, 0), (1, 0)] {
        assert!(panics(|| FailureMode::local_share(parts, of)), "{parts} of {of}");
    }
}
