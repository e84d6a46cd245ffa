//! The Rust rules and the Lua scripts, side by side on the same random timelines.

use proptest::{
    prelude::{Just, Strategy, prop_oneof},
    strategy::ValueTree,
    test_runner::TestRunner,
};
use std::time::Duration;
use tower_quota::{Limit, SlidingLog, store::Operation};

use crate::support::{Clock, Redis, decide};

/// How many steps each algorithm is run for; `TOWER_QUOTA_STEPS` makes it more.
fn steps() -> usize {
    std::env::var("TOWER_QUOTA_STEPS")
        .ok()
        .and_then(|steps| steps.parse().ok())
        .unwrap_or(20_000)
}

/// What happens next on a timeline.
#[derive(Clone, Debug)]
struct Step {
    /// How the clock moves, in microseconds.
    moves: i64,
    operation: Operation,
    key: &'static str,
    cost: u64,
}

fn step(window: Duration) -> impl Strategy<Value = Step> {
    let window = window.as_micros() as i64;
    let moves = prop_oneof![
        4 => Just(0),
        4 => 0..=3i64,
        8 => 0..=window / 4,
        2 => Just(window),
        1 => 0..=3 * window,
        1 => -window / 2..=0,
        1 => -3 * window..=0,
    ];
    let operation = prop_oneof![
        16 => Just(Operation::Check),
        2 => Just(Operation::Peek),
        2 => Just(Operation::Charge),
        1 => Just(Operation::Reset),
    ];
    let cost = prop_oneof![6 => Just(1u64), 2 => 1..=4u64];
    (moves, operation, cost).prop_map(|(moves, operation, cost)| Step {
        moves,
        operation,
        key: "k",
        cost,
    })
}

async fn agree(redis: &Redis, limits: &[Limit], steps: usize) {
    let clock = Clock::new();
    let memory = clock.memory_store();
    let shared = clock.redis_store(redis).await;
    let mut runner = TestRunner::default();
    let strategy = step(limits[0].window());

    let mut history = Vec::new();
    for number in 0..steps {
        let next = strategy.new_tree(&mut runner).expect("a step").current();
        clock.set(clock.now().saturating_add_signed(next.moves));
        clock.tell(redis).await;
        history.push(next.clone());

        // Live changes of the numbers, every now and then.
        let limit = &limits[number / 64 % limits.len()];
        let in_memory = decide(&memory, next.operation, limit, next.key, next.cost).await;
        let in_redis = decide(&shared, next.operation, limit, next.key, next.cost).await;
        let recent = &history[history.len().saturating_sub(20)..];
        assert_eq!(
            in_memory,
            in_redis,
            "step {number} at {} under {limit}, after {recent:#?}",
            clock.now()
        );
    }
}

#[tokio::test]
async fn the_sliding_log_decides_alike_in_rust_and_in_lua() {
    let redis = Redis::start();
    let window = Duration::from_millis(10);
    let limits = [SlidingLog::new(6, window), SlidingLog::new(3, window)].map(Limit::from);
    agree(&redis, &limits, steps()).await;
}
