//! Key flooding: a million new keys against memory stores of less and of larger capacity. Prints the slowest decision and the
//! median of the same run. `cargo bench --bench attack`.
//!
//! The unit is processor time of the thread, so that a pause by the operating system does not count. Each row is the best of
//! three runs, without the time to read the clock.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tower_quota::{
    Key, Limit, MemoryStore, SlidingLog, TokenBucket,
    store::{Charge, Operation, Store, StoreRequest},
};

const CALLERS: u64 = 1_000_000;
const RUNS: usize = 3;

fn main() {
    println!(
        "| capacity | limit | held | live ones evicted | median | hundredth slowest | slowest | slowest / median |"
    );
    println!("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    let limits: [Limit; 2] = [SlidingLog::per_hour(10).into(), TokenBucket::per_second(10).into()];
    for capacity in [10_000, 100_000, 2_000_000] {
        for limit in &limits {
            let runs = (0..RUNS).map(|_| Run::of(capacity, limit));
            let Run {
                held,
                evicted,
                median,
                hundredth,
                slowest,
            } = runs.min_by_key(|run| run.slowest).expect("some runs");
            let ratio = slowest.as_nanos() / median.as_nanos().max(1);
            println!(
                "| {capacity} | `{limit}` | {held} | {evicted} | {median:?} | {hundredth:?} | {slowest:?} | {ratio} |"
            );
        }
    }
}

struct Run {
    held: usize,
    evicted: u64,
    median: Duration,
    hundredth: Duration,
    slowest: Duration,
}

impl Run {
    fn of(capacity: usize, limit: &Limit) -> Self {
        let reading = (0..1_000).map(|_| {
            let start = on_processor();
            on_processor() - start
        });
        let reading = reading.min().unwrap_or_default();

        let store = MemoryStore::builder().capacity(capacity).build();
        let mut times: Vec<Duration> = Vec::with_capacity(CALLERS as usize);
        for caller in 0..CALLERS {
            let key = Key::from(caller);
            let charges = [Charge::new("bench", limit, &key, 1)];
            let start = on_processor();
            let reply = store.decide(&[StoreRequest::new(Operation::Check, &charges)]);
            times.push((on_processor() - start).saturating_sub(reading));
            assert!(matches!(reply.try_ready(), Ok(Ok(answer)) if answer.outcomes()[0].allowed));
        }

        times.sort_unstable();
        Self {
            held: store.len(),
            evicted: store.evictions(),
            median: times[times.len() / 2],
            hundredth: times[times.len() - 100],
            slowest: times[times.len() - 1],
        }
    }
}

/// Processor time of this thread.
fn on_processor() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
