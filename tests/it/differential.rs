//! The Rust rules and the Lua scripts, side by side on the same random timelines.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use proptest::{
    prelude::{BoxedStrategy, Just, Strategy, prop_oneof},
    strategy::ValueTree,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use tower_quota::{
    FixedWindow, Key, Limit, SlidingCounter, SlidingLog, TokenBucket,
    limit::Calendar,
    store::{Charge, Operation, Outcome, Request, Store},
};

use crate::support::{Clock, Redis};

/// How many steps each timeline has; `TOWER_QUOTA_STEPS` makes it more.
fn steps() -> usize {
    std::env::var("TOWER_QUOTA_STEPS")
        .ok()
        .and_then(|steps| steps.parse().ok())
        .unwrap_or(20_000)
}

/// Another timeline each time; `TOWER_QUOTA_SEED` repeats one.
fn seed() -> u64 {
    let given = std::env::var("TOWER_QUOTA_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    given.unwrap_or_else(|| RandomState::new().hash_one(0))
}

/// What happens next on a timeline.
#[derive(Clone, Debug)]
struct Step {
    /// How the clock moves, in microseconds.
    moves: i64,
    operation: Operation,
    /// Which of the admissions so far is given back.
    admission: usize,
    /// The position of the limit and the cost of each charge.
    charges: Vec<(usize, u64)>,
    /// How many ask at once, of each of some keys.
    callers: Vec<usize>,
}

fn moves(window: Duration) -> BoxedStrategy<i64> {
    let window = window.as_micros() as i64;
    prop_oneof![
        8 => Just(0),
        8 => 0..=3i64,
        16 => 0..=window / 4,
        4 => Just(window),
        2 => 0..=3 * window,
        1 => -window / 2..=0,
        1 => -3 * window..=0,
    ]
    .boxed()
}

fn step(window: Duration, policies: usize) -> impl Strategy<Value = Step> {
    let operation = prop_oneof![
        16 => Just(Operation::Check),
        2 => Just(Operation::Peek),
        2 => Just(Operation::Charge),
        3 => Just(Operation::Refund { admitted_at: Duration::ZERO }),
        1 => Just(Operation::Reset),
    ];
    let cost = prop_oneof![6 => Just(1u64), 2 => 1..=4u64];
    let charges = proptest::collection::vec((0..policies, cost), 1..=policies);
    let callers = prop_oneof![
        12 => Just(vec![1]),
        3 => proptest::collection::vec(1..=4usize, 1..=3),
        1 => (30..=40usize).prop_map(|callers| vec![callers]),
    ];
    (moves(window), operation, 0..8usize, charges, callers).prop_map(
        |(moves, operation, admission, charges, callers)| Step {
            moves,
            operation,
            admission,
            charges,
            callers,
        },
    )
}

/// Runs both stores along one timeline. Each policy is given the versions that its limit has, one after the other.
async fn agree(window: Duration, policies: &[&[Limit]]) {
    let redis = Redis::start();
    let clock = Clock::new();
    let memory = clock.memory_store();
    let shared = clock.redis_store(&redis).await;

    let seed = seed();
    println!("TOWER_QUOTA_SEED={seed}");
    let mut seeds = [0; 32];
    seeds[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seeds);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let strategy = step(window, policies.len());

    let mut keys = ["j", "k", "l"].map(Key::from);
    let mut latest = 0;
    let names = ["a", "b", "c", "d"];
    let mut admissions = Vec::new();
    let mut recent = Vec::new();
    for number in 0..steps() {
        let mut next = strategy.new_tree(&mut runner).expect("a step").current();
        // Long before the year 2100, and with it the largest number of Lua, the clock starts again.
        let now = clock.now().saturating_add_signed(next.moves);
        clock.set(now);
        if now > 4_000_000_000_000_000 {
            clock.set(Clock::new().now());
            keys = ["j", "k", "l"].map(|name| Key::from(name).and(number as u64));
            latest = 0;
        }
        clock.tell(&redis).await;
        // One by one, the first ones would be told what is left beside entries that lie ahead of the clock, and those after
        // them what is left without.
        latest = latest.max(clock.now());
        let shortest = (window / 4).min(Duration::from_secs(1));
        if latest > clock.now() + shortest.as_micros() as u64 {
            next.callers = vec![1];
        }
        if let Operation::Refund { admitted_at } = &mut next.operation {
            let earlier = admissions.len().saturating_sub(next.admission + 1);
            *admitted_at = Duration::from_micros(admissions.get(earlier).copied().unwrap_or_default());
        }

        let limit_of = |policy: usize| &policies[policy][number / 64 % policies[policy].len()];
        let charges_on = |key| -> Vec<_> {
            let charges = next.charges.iter();
            charges
                .map(|(policy, cost)| Charge::new(names[*policy], limit_of(*policy), key, *cost))
                .collect()
        };
        recent.push(format!("{} {next:?}", clock.now()));
        let charges: Vec<_> = keys.iter().map(charges_on).collect();
        let requests = charges.iter().zip(&next.callers);
        let requests: Vec<_> = requests
            .flat_map(|(charges, callers)| vec![Request::new(next.operation, charges); *callers])
            .collect();
        let in_memory = memory.decide(&requests).await.expect("memory answers");
        let in_redis = shared.decide(&requests).await.expect("Redis answers");
        assert_eq!(
            in_memory,
            in_redis,
            "memory, then Redis: step {number} under {policies:?}, after {:#?}",
            &recent[recent.len().saturating_sub(20)..],
        );

        let admits = matches!(next.operation, Operation::Check | Operation::Charge);
        if admits && in_redis.outcomes.iter().any(|outcome: &Outcome| outcome.allowed) {
            admissions.push(clock.now());
        }
    }
}

const WINDOW: Duration = Duration::from_millis(10);

#[tokio::test]
async fn the_sliding_log_decides_alike_in_rust_and_in_lua() {
    agree(
        WINDOW,
        &[&[SlidingLog::new(6, WINDOW).into(), SlidingLog::new(3, WINDOW).into()]],
    )
    .await;
}

#[tokio::test]
async fn a_sliding_log_that_many_ask_at_once_decides_alike_in_rust_and_in_lua() {
    agree(
        WINDOW,
        &[&[SlidingLog::new(60, WINDOW).into(), SlidingLog::new(25, WINDOW).into()]],
    )
    .await;
}

#[tokio::test]
async fn the_coarse_sliding_log_decides_alike_in_rust_and_in_lua() {
    let coarse = |limit, window| Limit::from(SlidingLog::new(limit, window).precision(7));
    let versions = [
        coarse(9, WINDOW),
        SlidingLog::new(9, WINDOW).into(),
        coarse(20, WINDOW / 4),
    ];
    agree(WINDOW, &[&versions]).await;
}

#[tokio::test]
async fn the_sliding_counter_decides_alike_in_rust_and_in_lua() {
    let versions = [
        SlidingCounter::new(6, WINDOW).into(),
        SlidingCounter::new(13, WINDOW).into(),
        SlidingCounter::new(13, WINDOW / 4).into(),
    ];
    agree(WINDOW, &[&versions]).await;
}

#[tokio::test]
async fn a_sliding_counter_with_large_numbers_decides_alike_in_rust_and_in_lua() {
    let month = Duration::from_secs(30 * 86_400);
    agree(
        month,
        &[&[
            SlidingCounter::new(7, month).into(),
            SlidingCounter::new(1_000_000_007, month).into(),
        ]],
    )
    .await;
}

#[tokio::test]
async fn the_fixed_window_decides_alike_in_rust_and_in_lua() {
    let versions = [
        FixedWindow::new(6, WINDOW).into(),
        FixedWindow::new(4, WINDOW * 2).into(),
    ];
    agree(WINDOW, &[&versions]).await;
}

#[tokio::test]
async fn the_aligned_fixed_window_decides_alike_in_rust_and_in_lua() {
    let versions = [
        FixedWindow::new(6, WINDOW).aligned().into(),
        FixedWindow::new(4, WINDOW * 2).aligned().into(),
        FixedWindow::new(4, WINDOW).into(),
    ];
    agree(WINDOW, &[&versions]).await;
}

#[tokio::test]
async fn calendar_windows_decide_alike_in_rust_and_in_lua() {
    let calendar = |calendar| {
        let berlin = jiff::tz::TimeZone::get("Europe/Berlin").expect("a zone");
        Limit::from(FixedWindow::calendar(9, calendar, berlin))
    };
    let versions = [
        Calendar::Hour,
        Calendar::Day,
        Calendar::Week,
        Calendar::Month,
        Calendar::Year,
    ]
    .map(calendar);
    agree(Duration::from_secs(86_400), &[&versions]).await;
}

#[tokio::test]
async fn the_token_bucket_decides_alike_in_rust_and_in_lua() {
    let versions = [
        TokenBucket::new(7, WINDOW).into(),
        TokenBucket::new(7, WINDOW).burst(3).into(),
        TokenBucket::new(3, WINDOW).burst(11).into(),
    ];
    agree(WINDOW, &[&versions]).await;
}

#[tokio::test]
async fn a_token_bucket_with_large_numbers_decides_alike_in_rust_and_in_lua() {
    let month = Duration::from_secs(30 * 86_400);
    let versions = [
        TokenBucket::new(999_983, month).burst(5).into(),
        TokenBucket::new(999_983, month).burst(999_983).into(),
        TokenBucket::new(1, Duration::from_secs(10 * 365 * 86_400)).into(),
    ];
    agree(month / 999_983 * 5, &[&versions]).await;
}

#[tokio::test]
async fn several_policies_decide_alike_in_rust_and_in_lua() {
    agree(
        WINDOW,
        &[
            &[
                SlidingLog::new(6, WINDOW).into(),
                SlidingLog::new(9, WINDOW).precision(5).into(),
            ],
            &[SlidingCounter::new(7, WINDOW * 2).into()],
            &[
                FixedWindow::new(8, WINDOW).into(),
                FixedWindow::new(8, WINDOW).aligned().into(),
            ],
            &[TokenBucket::new(5, WINDOW).burst(6).into()],
        ],
    )
    .await;
}
