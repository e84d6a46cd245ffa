//! The tail of a check at 30, 50 and 70 % of what one `EVALSHA` for each check sustains over 10,000 keys.
//! `cargo bench --bench tail --all-features -- --seconds 60`, with `-- --help` for the options.
//!
//! Requests arrive at random times, and a latency counts from the time at which the request was due. The subjects take turns
//! in slices of a second; a figure is the median of the slices, so that a pause of the machine distorts one slice only.

#[path = "whole/evalsha.rs"]
#[allow(dead_code)]
mod evalsha;

use std::{sync::Arc, time::Duration};

use bench_harness::{Bare, Options, Row, Server, Subject, Table, Traffic, count, decimal, times};
use tower_layer::Layer;
use tower_quota::{
    ClientLibrary, Limit, Policy, RateLimitLayer, RedisStore, SlidingLog, TokenBucket, key, store::Store,
};

use self::evalsha::Evalsha;

/// The largest quota of a log without precision.
const AMPLE: u64 = 100_000;
const WINDOW: Duration = Duration::from_secs(1);
const SLICE: Duration = Duration::from_secs(1);

/// Shares of the throughput of the reference.
const LOADS: [f64; 3] = [0.3, 0.5, 0.7];
const QUANTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];

fn main() {
    let mut options = Options::from_command_line();
    let slice = if options.quick { options.time } else { SLICE };
    options.time = options.time.max(slice);
    bench_harness::run(async |server| {
        let subjects = subjects(server).await;
        let traffic = Arc::new(Traffic::many());
        let capacity = capacity(&*subjects[0].1, &traffic, &options).await;
        println!("{}", server.machine());
        println!(
            "one EVALSHA per check sustains {} a second; {:?} at each load, in turns of {slice:?}\n",
            count(capacity),
            options.time
        );
        for load in LOADS {
            let rows = measure(&subjects, &traffic, load * capacity, &options, slice).await;
            print(&rows, load * capacity, load);
        }
    });
}

async fn subjects(server: &Server) -> Vec<(String, Box<dyn Subject>)> {
    let reference = Evalsha::sliding_log(&server.url(), AMPLE as i64, WINDOW).await;
    let mut subjects: Vec<(String, Box<dyn Subject>)> = vec![(
        "one EVALSHA per check, sliding log, fred".to_owned(),
        Box::new(reference.around(Bare)),
    )];
    for (client, library) in [("fred", ClientLibrary::Fred), ("redis-rs", ClientLibrary::RedisRs)] {
        let store = RedisStore::builder()
            .deadline(Duration::from_secs(10))
            .client_library(library)
            .url(&server.url());
        let store: Arc<dyn Store> = Arc::new(store.connect().await.expect("a store"));
        let limits: [(&str, Limit); 2] = [
            ("sliding log", SlidingLog::new(AMPLE, WINDOW).into()),
            ("token bucket", TokenBucket::new(AMPLE, WINDOW).into()),
        ];
        for (algorithm, limit) in limits {
            let policy = Policy::new(format!("{algorithm} {client}").replace(' ', "-"), limit).key(key::ip());
            let subject = RateLimitLayer::new(store.clone(), policy).layer(Bare);
            subjects.push((format!("{algorithm}, {client}"), Box::new(subject)));
        }
    }
    subjects
}

/// Checks per second of 256 callers of the reference.
async fn capacity(reference: &dyn Subject, traffic: &Arc<Traffic>, options: &Options) -> f64 {
    let (time, mut rounds) = (if options.quick { options.time } else { SLICE }, Vec::new());
    for _ in 0..options.rounds {
        let load = reference.closed_loop(traffic, time, time).await;
        rounds.push(load.per_second());
    }
    bench_harness::median(&rounds)
}

async fn measure(
    subjects: &[(String, Box<dyn Subject>)],
    traffic: &Arc<Traffic>,
    per_second: f64,
    options: &Options,
    slice: Duration,
) -> Vec<Row> {
    let mut rows: Vec<_> = subjects.iter().map(|(name, _)| Row::new(name, "", "")).collect();
    let slices = options.time.div_duration_f64(slice).ceil() as usize;
    for _ in 0..slices {
        for ((_, subject), row) in subjects.iter().zip(&mut rows) {
            let latencies = subject.open_loop(traffic, per_second, slice).await;
            for (name, share) in QUANTILES {
                row.note(name, latencies.quantile(share));
            }
        }
    }
    rows
}

fn print(rows: &[Row], per_second: f64, load: f64) {
    let title = format!("{:.0} %: {} a second", load * 100.0, count(per_second));
    let mut table = Table::new(&[&title, "p50, us", "x", "p99, us", "x", "p99.9, us", "x"]);
    for row in rows {
        let figures = QUANTILES
            .into_iter()
            .flat_map(|(name, _)| [decimal(row.median(name)), times(row.ratio(name, &rows[0]))]);
        table.row([row.title()].into_iter().chain(figures));
    }
    println!("{table}");
}
