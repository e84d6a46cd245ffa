//! What a check costs, for each store and algorithm, beside one `EVALSHA` for each check of the same rule.
//! `cargo bench --bench whole --all-features`, with `-- --help` for the options.
//!
//! All requests go through the Tower service, key by address, in one process, on one core; Redis has another. What is
//! compared takes turns, and a ratio is the median of those within a round.

mod evalsha;

use std::{sync::Arc, time::Duration};

use bench_harness::{
    Bare, Options, Row, Server, Subject, Table, Traffic,
    allocations::{self, Counting},
    count, decimal, targets, times,
};
use serde_json::json;
use tower_layer::Layer;
use tower_quota::{
    ClientLibrary, FailureMode, FixedWindow, Limit, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingCounter,
    SlidingLog, TokenBucket, key, store::Store,
};

use self::evalsha::Evalsha;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A row of the tables and its subjects.
struct Entry {
    row: Row,
    kind: Kind,
    /// Behind a limit that is never reached.
    admitting: Box<dyn Subject>,
    /// Behind a limit of one an hour.
    denying: Option<Box<dyn Subject>>,
    /// Behind a limit of a thousand an hour.
    lasting: Option<Box<dyn Subject>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Bare,
    Reference,
    InMemory,
    InRedis,
}

/// The largest quota of a log without precision.
const AMPLE: u64 = 100_000;
const HOUR: Duration = Duration::from_secs(3_600);
/// Short, so that entries expire during a measurement. Longer in Redis, where a limit is reached later.
const MEMORY_WINDOW: Duration = Duration::from_millis(100);
const REDIS_WINDOW: Duration = Duration::from_secs(1);

fn main() {
    let options = Options::from_command_line();
    bench_harness::run(async |server| {
        let mut entries = entries(server, &options).await;
        throughput(&mut entries, &options).await;
        latency(&mut entries, &options).await;
        cost(&mut entries, &options, server).await;
        report(&entries, &options, server);
    });
}

/// The stores by name and client.
async fn stores(server: &Server) -> Vec<(Kind, &'static str, &'static str, Arc<dyn Store>)> {
    let over = async |library| {
        let patient = RedisStore::builder()
            .deadline(Duration::from_secs(10))
            .client_library(library);
        Arc::new(patient.url(&server.url()).connect().await.expect("a store"))
    };
    vec![
        (Kind::InMemory, "MemoryStore", "", Arc::new(MemoryStore::new())),
        (Kind::InRedis, "RedisStore", "fred", over(ClientLibrary::Fred).await),
        (
            Kind::InRedis,
            "RedisStore",
            "redis-rs",
            over(ClientLibrary::RedisRs).await,
        ),
    ]
}

fn limits(quota: u64, window: Duration) -> [(&'static str, Limit); 5] {
    [
        ("sliding log", SlidingLog::new(quota, window).into()),
        ("precise log", SlidingLog::new(quota, window).precision(100).into()),
        ("sliding counter", SlidingCounter::new(quota, window).into()),
        ("fixed window", FixedWindow::new(quota, window).into()),
        ("token bucket", TokenBucket::new(quota, window).into()),
    ]
}

async fn entries(server: &Server, options: &Options) -> Vec<Entry> {
    let url = server.url();
    let log = async |quota, window| {
        let limiter = Evalsha::sliding_log(&url, quota, window).await;
        Box::new(limiter.around(Bare)) as Box<dyn Subject>
    };
    let mut entries = vec![
        Entry {
            row: Row::new("no limit", "", ""),
            kind: Kind::Bare,
            admitting: Box::new(Bare),
            denying: None,
            lasting: None,
        },
        Entry {
            row: Row::new("one EVALSHA per check", "no rule", "fred"),
            kind: Kind::Reference,
            admitting: Box::new(Evalsha::nothing(&url).await.around(Bare)),
            denying: None,
            lasting: None,
        },
        Entry {
            row: Row::new("one EVALSHA per check", "sliding log", "fred"),
            kind: Kind::Reference,
            admitting: log(AMPLE as i64, REDIS_WINDOW).await,
            denying: Some(log(1, HOUR).await),
            lasting: Some(log(1_000, HOUR).await),
        },
    ];
    for (kind, name, client, store) in stores(server).await {
        let window = if kind == Kind::InMemory {
            MEMORY_WINDOW
        } else {
            REDIS_WINDOW
        };
        let admitting = limits(AMPLE, window);
        let (denying, lasting) = (limits(1, HOUR), limits(1_000, HOUR));
        for (((algorithm, admitting), (_, denying)), (_, lasting)) in admitting.into_iter().zip(denying).zip(lasting) {
            // Each row has keys of its own.
            let number = entries.len();
            let limited = |name, limit| limited(&store, format!("{name}-{number}"), limit);
            entries.push(Entry {
                row: Row::new(name, algorithm, client),
                kind,
                admitting: limited("admitting", admitting),
                denying: Some(limited("denying", denying)),
                lasting: Some(limited("lasting", lasting)),
            });
        }
    }
    entries.retain(|entry| matches!(entry.kind, Kind::Bare | Kind::Reference) || options.includes(&entry.row.title()));
    entries
}

fn limited(store: &Arc<dyn Store>, name: String, limit: Limit) -> Box<dyn Subject> {
    let policy = Policy::new(name, limit)
        .key(key::ip())
        .failure_mode(FailureMode::Closed);
    Box::new(RateLimitLayer::new(store.clone(), policy).layer(Bare))
}

const MANY: &str = "10,000 keys";
const HOT: &str = "one hot key";
const ZIPF: &str = "Zipf";
const DENIED: &str = "denied";

/// Checks per second of 256 callers.
async fn throughput(entries: &mut [Entry], options: &Options) {
    for traffic in [Traffic::many(), Traffic::hot(), Traffic::zipf()].map(Arc::new) {
        for _ in 0..options.rounds {
            for entry in &mut *entries {
                let load = entry.admitting.closed_loop(&traffic, options.time, options.time).await;
                assert_eq!(load.denied, 0, "{} admits all of {}", entry.row.title(), traffic.name);
                entry.row.note_load(traffic.name, load);
            }
        }
    }

    let traffic = Arc::new(Traffic::denied());
    for _ in 0..options.rounds {
        for entry in &mut *entries {
            if let Some(subject) = &entry.denying {
                let load = subject.closed_loop(&traffic, options.time, options.time).await;
                assert!(load.admitted <= 1_000, "{} denies all but the first", entry.row.title());
                entry.row.note_load(DENIED, load);
            }
        }
    }
}

/// Parts of a round whose latencies are measured separately. The median of the parts counts, so that a pause of the machine
/// distorts one part only.
const SLICES: u32 = 8;

/// Requests of one caller to the same subject. The first follows requests to others, so its code is not in the caches.
const IN_A_ROW: usize = 8;
const ROW: &str = "in a row, us";

/// Latency of a check: one caller alone, and many callers at half load.
async fn latency(entries: &mut [Entry], options: &Options) {
    let turns = if options.quick { 20 } else { 400 };
    let traffic = Traffic::many();
    for _ in 0..options.rounds {
        let mut times = vec![[Vec::new(), Vec::new()]; entries.len()];
        for _ in 0..turns {
            for (entry, [first, others]) in entries.iter().zip(&mut times) {
                for request in 0..IN_A_ROW {
                    let took = entry.admitting.alone(traffic.next_address()).await.as_secs_f64() * 1e6;
                    if request == 0 { &mut *first } else { &mut *others }.push(took);
                }
            }
        }
        for (entry, [first, others]) in entries.iter_mut().zip(&times) {
            entry.row.note("alone, us", bench_harness::median(first));
            entry.row.note(ROW, bench_harness::median(others));
        }
    }

    let traffic = Arc::new(traffic);
    let reference = entries[REFERENCE].row.median(MANY) / 2.0;
    let slice = options.time / SLICES;
    for _ in 0..SLICES * options.rounds as u32 {
        let ask_redis = |entry: &&mut Entry| matches!(entry.kind, Kind::Reference | Kind::InRedis);
        for entry in entries.iter_mut().filter(ask_redis) {
            let half = entry.row.median(MANY) / 2.0;
            let latencies = entry.admitting.open_loop(&traffic, half, slice).await;
            entry.row.note("p50, us", latencies.quantile(0.5));
            entry.row.note("p99, us", latencies.quantile(0.99));
            entry.row.note("p99.9, us", latencies.quantile(0.999));

            let latencies = entry.admitting.open_loop(&traffic, reference, slice).await;
            entry.row.note("p99 at the same load, us", latencies.quantile(0.99));
        }
    }
}

/// Cost of a check: allocations, commands of Redis, memory in Redis.
async fn cost(entries: &mut [Entry], options: &Options, server: &Server) {
    let mut bare = 0.0;
    for entry in entries {
        let traffic = Arc::new(Traffic::many());
        server.commands().await;
        let load = entry.admitting.closed_loop(&traffic, Duration::ZERO, options.time);
        let (_, allocations) = allocations::count(load).await;
        let (commands, checks) = (server.commands().await, traffic.requests() as f64);
        let allocations = allocations.count as f64 / checks;
        match entry.kind {
            Kind::Bare => bare = allocations,
            _ => entry.row.note("allocations", allocations - bare),
        }
        if matches!(entry.kind, Kind::Reference | Kind::InRedis) {
            entry.row.note("script calls", commands.scripts as f64 / checks);
            entry.row.note("commands within", commands.others as f64 / checks);
        }

        if let (Kind::Reference | Kind::InRedis, Some(denying)) = (entry.kind, &entry.denying) {
            let traffic = Arc::new(Traffic::denied());
            denying.closed_loop(&traffic, Duration::ZERO, options.time).await;
            server.commands().await;
            denying.closed_loop(&traffic, Duration::ZERO, options.time).await;
            let calls = server.commands().await.scripts as f64;
            entry.row.note(
                "script calls per denied key and second",
                calls / 1_000.0 / options.time.as_secs_f64(),
            );
        }

        if let (Kind::Reference | Kind::InRedis, Some(lasting)) = (entry.kind, &entry.lasting) {
            server.flush().await;
            let traffic = Traffic::single();
            for _ in 0..100 {
                lasting.alone(traffic.next_address()).await;
            }
            entry.row.note("bytes", server.bytes_per_key().await);
            server.flush().await;
        }
    }
}

/// Position of the row that the others are compared with.
const REFERENCE: usize = 2;

fn report(entries: &[Entry], options: &Options, server: &Server) {
    let reference = &entries[REFERENCE].row;
    let find = |kind: Kind, title: &str| {
        let entry = entries
            .iter()
            .find(|entry| entry.kind == kind && entry.row.title().contains(title));
        entry.map(|entry| &entry.row)
    };
    let against = |cell: &str| find(Kind::InRedis, "sliding log").map_or(f64::NAN, |log| log.ratio(cell, reference));
    let (targets, target_values) = targets(&[
        ("sliding log / EVALSHA, 10,000 keys", against(MANY), ">= 1.8"),
        ("sliding log / EVALSHA, one hot key", against(HOT), ">= 10"),
        (
            "EVALSHA / sliding log, one caller's latency",
            1.0 / against("alone, us"),
            ">= 0.95",
        ),
        (
            "sliding log / EVALSHA, p99 at half the load of EVALSHA",
            against("p99 at the same load, us"),
            "<= 1.3",
        ),
        (
            "sliding log, calls of Redis per denied key and second",
            find(Kind::InRedis, "sliding log")
                .map_or(f64::NAN, |log| log.median("script calls per denied key and second")),
            "<= 1",
        ),
    ]);

    if options.json {
        let rows: Vec<_> = entries.iter().map(|entry| entry.row.to_json()).collect();
        let report = json!({
            "machine": server.machine(),
            "rounds": options.rounds,
            "seconds": options.time.as_secs_f64(),
            "rows": rows,
            "targets": target_values,
        });
        println!("{report:#}");
        return;
    }

    println!("{}", server.machine());
    println!(
        "256 callers; medians of {} rounds of {:?}; x: times one EVALSHA per check of a sliding log\n",
        options.rounds, options.time
    );
    let mut table = Table::new(&["checks per second", MANY, "x", HOT, "x", ZIPF, "x", DENIED, "x"]);
    for Entry { row, .. } in entries {
        let cells = [MANY, HOT, ZIPF, DENIED];
        let figures = cells
            .into_iter()
            .flat_map(|cell| [count(row.median(cell)), times(row.ratio(cell, reference))]);
        table.row([row.title()].into_iter().chain(figures));
    }
    println!("{table}");

    let mut table = Table::new(&[
        "latency, us",
        "alone",
        "x",
        "in a row",
        "x",
        "p50",
        "p99",
        "p99.9",
        "p99 at the same load",
        "x",
    ]);
    for Entry { row, .. } in entries {
        let (alone, same) = ("alone, us", "p99 at the same load, us");
        table.row([
            row.title(),
            decimal(row.median(alone)),
            times(row.ratio(alone, reference)),
            decimal(row.median(ROW)),
            times(row.ratio(ROW, reference)),
            decimal(row.median("p50, us")),
            decimal(row.median("p99, us")),
            decimal(row.median("p99.9, us")),
            decimal(row.median(same)),
            times(row.ratio(same, reference)),
        ]);
    }
    println!(
        "p50, p99, p99.9 at half of the row's own throughput over 10,000 keys; the same load: half of the reference's\n"
    );
    println!("{table}");

    let cells = [
        "allocations",
        "script calls",
        "commands within",
        "script calls per denied key and second",
        "bytes",
    ];
    let mut table = Table::new(&[&["cost of a check"], &cells[..]].concat());
    for Entry { row, .. } in entries {
        let figures = cells.into_iter().map(|cell| match cell {
            "script calls" | "script calls per denied key and second" if !row.median(cell).is_nan() => {
                format!("{:.3}", row.median(cell))
            }
            _ => decimal(row.median(cell)),
        });
        table.row([row.title()].into_iter().chain(figures));
    }
    println!(
        "allocations of the whole process at 256 callers, without those of no limit; bytes of a key with 100 admitted\n"
    );
    println!("{table}");
    println!("{targets}");
    for failures in entries.iter().filter_map(|entry| entry.row.failures()) {
        println!("{failures}");
    }
}
