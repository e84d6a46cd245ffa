//! Latency of a check of cost 10,000 divided by that of a check of cost 1: one caller, alternating, ratio of the medians.
//! `cargo bench --bench cost --all-features`.

#[path = "../tests/it/support/redis.rs"]
#[allow(dead_code)]
mod redis;

use std::time::{Duration, Instant};

use tower_quota::{
    FixedWindow, Key, Limit, MemoryStore, RedisStore, SlidingCounter, SlidingLog, TokenBucket,
    store::{Charge, Operation, Store, StoreRequest},
};

const ROUNDS: usize = 4_000;
const COSTS: [u64; 2] = [1, 10_000];

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let redis = redis::Redis::start();
    let shared = RedisStore::builder()
        .deadline(Duration::from_secs(10))
        .connect(&redis.url())
        .await
        .expect("a store");
    let memory = MemoryStore::new();

    // Eight checks on each key, all of which are admitted.
    let limit = 100_000;
    let hour = Duration::from_secs(3_600);
    let limits: [Limit; 6] = [
        SlidingLog::new(limit, hour).into(),
        SlidingLog::new(limit, hour).precision(100_000).into(),
        SlidingLog::new(limit, hour).precision(100).into(),
        SlidingCounter::new(limit, hour).into(),
        FixedWindow::new(limit, hour).into(),
        TokenBucket::new(limit, hour).into(),
    ];

    println!(
        "{:<44} {:>16} {:>16}",
        "cost 10,000 / cost 1, medians", "MemoryStore", "RedisStore, fred"
    );
    for limit in limits {
        let in_memory = ratio(&memory, &limit).await;
        let in_redis = ratio(&shared, &limit).await;
        println!("{:<44} {in_memory:>16.2} {in_redis:>16.2}", limit.to_string());
    }
}

/// Median latency at cost 10,000 divided by the median at cost 1.
async fn ratio(store: &impl Store, limit: &Limit) -> f64 {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for (times, cost) in times.iter_mut().zip(COSTS) {
            let key = Key::from(format!("{limit} {cost} {}", round / 8));
            let charges = [Charge::new("bench", limit, &key, cost)];
            let start = Instant::now();
            let answer = store
                .decide(&[StoreRequest::new(Operation::Check, &charges)])
                .await
                .expect("an answer");
            times.push(start.elapsed());
            assert!(answer.outcomes().iter().all(|outcome| outcome.allowed));
        }
    }

    let [cheap, dear] = times.map(|mut times| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64()
    });
    dear / cheap
}
