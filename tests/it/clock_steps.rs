//! A Redis whose clock is set while it counts.

use std::time::{Duration, Instant};

use tokio::time::sleep;
use tower_quota::{
    Limit, RedisStore,
    store::{Operation, Store},
};

use crate::support::{Faketime, Redis, decide};

const QUOTA: usize = 5;
const WINDOW: Duration = Duration::from_secs(2);
const HOUR_MS: i64 = 3_600_000;

/// A limit of [`QUOTA`] in each [`WINDOW`], what it admits in any of them at most, and how many of them it keeps a caller
/// out, at most.
const LIMITS: [(&str, usize, u32); 6] = [
    ("sliding-log 5/2s", QUOTA, 1),
    ("sliding-log 5/2s precision 4", QUOTA, 1),
    ("sliding-counter 5/2s", 2 * QUOTA - 1, 2),
    ("fixed-window 5/2s", 2 * QUOTA - 1, 1),
    ("fixed-window 5/2s aligned", 2 * QUOTA, 1),
    ("token-bucket 5/2s", 2 * QUOTA - 1, 1),
];

/// How much sooner or later than Redis the test may see what it does.
const NOISE: Duration = Duration::from_millis(300);

async fn store_in(redis: &Redis) -> RedisStore {
    let builder = RedisStore::builder().deadline(Duration::from_secs(10));
    builder.connect(&redis.url()).await.expect("the URL is good")
}

async fn time_ms(redis: &Redis) -> i64 {
    let [seconds, us]: [i64; 2] = redis.command("TIME", [""; 0]).await;
    seconds * 1_000 + us / 1_000
}

/// A caller that asks all the time, and when it was admitted.
struct Caller {
    limit: Limit,
    admissions: Vec<Instant>,
}

impl Caller {
    async fn ask(&mut self, store: &impl Store) {
        let key = self.limit.to_string();
        while decide(store, Operation::Check, &self.limit, &key, 1).await.allowed {
            self.admissions.push(Instant::now());
        }
    }

    /// The most that it was admitted in what was surely less than a window.
    fn most_in_a_window(&self) -> usize {
        let within = |first: &Instant| {
            let end = *first + WINDOW - NOISE;
            self.admissions.iter().filter(|at| (first..&&end).contains(at)).count()
        };
        self.admissions.iter().map(within).max().unwrap_or_default()
    }

    /// The longest that it was kept out after this.
    fn longest_block_after(&self, since: Instant) -> Duration {
        let times: Vec<_> = [since]
            .into_iter()
            .chain(self.admissions.iter().copied().filter(|at| *at > since))
            .collect();
        let blocks = times.windows(2).map(|pair| pair[1] - pair[0]);
        let last = times.last().expect("the first is there").elapsed();
        blocks.chain([last]).max().unwrap_or_default()
    }
}

/// Sets the clock of a Redis that denies everybody, and asserts that at most one window's worth more is admitted, that
/// nobody is kept out for more than a window and a second, and that every key has its expiry.
async fn a_step_is_over_within_a_window(step_ms: i64) {
    let clock = Faketime::new();
    let redis = clock.start_redis();
    let store = store_in(&redis).await;
    let mut callers = LIMITS.map(|(limit, ..)| Caller {
        limit: limit.parse().expect("a limit"),
        admissions: Vec::new(),
    });
    for caller in &mut callers {
        caller.ask(&store).await;
    }

    let before = time_ms(&redis).await;
    clock.set(step_ms);
    let moved = time_ms(&redis).await - before;
    assert!((moved - step_ms).abs() < 300, "the clock of Redis moved by {moved} ms");
    let stepped = Instant::now();
    while stepped.elapsed() < 3 * WINDOW {
        for caller in &mut callers {
            caller.ask(&store).await;
        }
        sleep(Duration::from_millis(5)).await;
    }

    for (caller, (limit, most, windows)) in callers.iter().zip(LIMITS) {
        let admitted = caller.most_in_a_window();
        assert!(admitted <= most + QUOTA, "{limit}: {admitted} in a window");
        let block = caller.longest_block_after(stepped);
        assert!(
            block <= windows * WINDOW + Duration::from_secs(1) + NOISE,
            "{limit}: kept out for {block:?}"
        );
    }
    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert_eq!(keys.len(), LIMITS.len(), "{keys:?}");
    for key in keys {
        let ttl: i64 = redis.command("PTTL", [&key]).await;
        assert!((1..=5_000).contains(&ttl), "{key}: {ttl} ms");
    }
}

#[tokio::test]
async fn an_hour_forward() {
    a_step_is_over_within_a_window(HOUR_MS).await;
}

#[tokio::test]
async fn an_hour_back() {
    a_step_is_over_within_a_window(-HOUR_MS).await;
}

#[tokio::test]
async fn a_window_back() {
    a_step_is_over_within_a_window(-2_000).await;
}

#[tokio::test]
async fn half_a_second_back() {
    a_step_is_over_within_a_window(-500).await;
}

#[tokio::test]
async fn windows_of_a_calendar_follow_the_clock_of_redis() {
    let clock = Faketime::new();
    let redis = clock.start_redis();
    let store = store_in(&redis).await;
    let limit: Limit = "fixed-window 5/day Europe/Berlin".parse().expect("a limit");
    for days in [0, 40, -40, 0] {
        clock.set(days * 24 * HOUR_MS);
        for remaining in (0..5).rev() {
            let admitted = decide(&store, Operation::Check, &limit, "k", 1).await;
            assert!(admitted.allowed, "{days} days off");
            assert_eq!(admitted.verdicts[0].remaining, remaining);
        }
        let denied = decide(&store, Operation::Check, &limit, "k", 1).await;
        let wait = denied.verdicts[0].retry_after.expect("it is denied");
        assert!(wait <= Duration::from_secs(25 * 3_600), "{wait:?}");
    }
}
