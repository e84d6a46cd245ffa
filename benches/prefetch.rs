//! What units that are taken ahead save: a hot key on Redis beside the same key in memory, and a limit that three processes share under
//! three times its load. `cargo bench --bench prefetch --all-features`.
//!
//! All of it runs on one core, and Redis on another; what is compared takes turns, and a ratio is the median of those within a round.

#[path = "support/bare.rs"]
#[expect(dead_code, reason = "other benchmarks use the rest of it")]
mod bare;

use std::time::{Duration, Instant};

use bench_harness::{Options, Server, Table, count, decimal, median, times};
use http::StatusCode;
use tokio::{task::JoinSet, time::sleep};
use tower::{Layer, Service, ServiceExt};
use tower_quota::{Limit, Limiter, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, key, store::Store};

use self::bare::{Bare, request};

const SECOND: Duration = Duration::from_secs(1);
const TIME: Duration = Duration::from_millis(10);
/// The longest one of a window of a second.
const LONGEST: Duration = Duration::from_millis(100);
const CALLERS: usize = 256;

fn main() {
    let options = Options::from_command_line();
    bench_harness::run(async |server| {
        hot_key(server, &options).await;
        behind_a_layer(server, &options).await;
        shared_limit(server).await;
    });
}

fn ample() -> SlidingLog {
    SlidingLog::new(1_000_000_000, SECOND).precision(100)
}

fn limiter(store: impl Store, limit: impl Into<Limit>) -> Limiter {
    Limiter::new(store, Policy::new("hot", limit.into()))
}

async fn store(server: &Server) -> RedisStore {
    let builder = RedisStore::builder()
        .deadline(Duration::from_secs(10))
        .url(&server.url());
    builder.connect().await.expect("a store")
}

/// How many checks of one key are admitted and denied in so long, with a pause after each 16 of a caller.
async fn send(limiter: &Limiter, key: &'static str, length: Duration, pause: Duration) -> [u64; 2] {
    let mut callers = JoinSet::new();
    let started = Instant::now();
    for _ in 0..CALLERS {
        let limiter = limiter.clone();
        callers.spawn(async move {
            let mut counts = [0, 0];
            while started.elapsed() < length {
                for _ in 0..16 {
                    let decision = limiter.check(key).await.expect("the store replies");
                    counts[usize::from(!decision.is_allowed())] += 1;
                }
                match pause.is_zero() {
                    true => tokio::task::yield_now().await,
                    false => sleep(pause).await,
                }
            }
            counts
        });
    }
    let counts = callers.join_all().await;
    [0, 1].map(|which| counts.iter().map(|counts| counts[which]).sum())
}

async fn hot_key(server: &Server, options: &Options) {
    let memory = limiter(MemoryStore::new(), ample());
    let plain = limiter(store(server).await, ample());
    let ahead = limiter(store(server).await, ample().prefetch(TIME));
    let longer = limiter(store(server).await, ample().prefetch(LONGEST));
    let mut rounds = [const { Vec::new() }; 4];
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        for (limiter, rounds) in [&memory, &plain, &ahead, &longer].into_iter().zip(&mut rounds) {
            let [admitted, _] = send(limiter, "k", SECOND, Duration::ZERO).await;
            rounds.push(admitted as f64);
        }
    }
    let mut table = Table::new(&["a hot key", "checks/s", "of memory"]);
    let names = [
        "MemoryStore",
        "RedisStore",
        "RedisStore, prefetch 10ms",
        "RedisStore, prefetch 100ms",
    ];
    for (name, figures) in names.iter().zip(&rounds) {
        let ratios: Vec<_> = figures
            .iter()
            .zip(&rounds[0])
            .map(|(own, memory)| own / memory)
            .collect();
        table.row([(*name).to_owned(), count(median(figures)), times(median(&ratios))]);
    }
    println!("{table}");
}

/// How many requests of one key a layer admits in a second, and the median of the time of one in 16, in microseconds.
async fn send_requests(layer: &RateLimitLayer) -> [f64; 2] {
    let mut callers = JoinSet::new();
    let started = Instant::now();
    for _ in 0..CALLERS {
        let mut service = layer.layer(Bare);
        callers.spawn(async move {
            let mut times = Vec::new();
            while started.elapsed() < SECOND {
                for number in 0..16 {
                    let sent = (number == 0).then(Instant::now);
                    let Ok(ready) = service.ready().await;
                    let Ok(response) = ready.call(request(1)).await;
                    assert_eq!(response.status(), StatusCode::OK);
                    times.extend(sent.map(|sent| sent.elapsed().as_secs_f64() * 1e6));
                }
                tokio::task::yield_now().await;
            }
            times
        });
    }
    let times = callers.join_all().await.concat();
    [times.len() as f64 * 16.0, median(&times)]
}

async fn behind_a_layer(server: &Server, options: &Options) {
    let policy = |limit: SlidingLog| Policy::new("hot", limit).key(key::ip());
    let layers = [
        ("MemoryStore", RateLimitLayer::new(MemoryStore::new(), policy(ample()))),
        ("RedisStore", RateLimitLayer::new(store(server).await, policy(ample()))),
        (
            "RedisStore, prefetch 10ms",
            RateLimitLayer::new(store(server).await, policy(ample().prefetch(TIME))),
        ),
        (
            "RedisStore, prefetch 100ms",
            RateLimitLayer::new(store(server).await, policy(ample().prefetch(LONGEST))),
        ),
    ];
    let mut rounds = layers.each_ref().map(|_| Vec::new());
    for _ in 0..options.rounds {
        for ((_, layer), rounds) in layers.iter().zip(&mut rounds) {
            rounds.push(send_requests(layer).await);
        }
    }
    let mut table = Table::new(&["a hot key behind a layer", "requests/s", "of memory", "p50, us"]);
    for ((name, _), figures) in layers.iter().zip(&rounds) {
        let all = |which: fn((&[f64; 2], &[f64; 2])) -> f64| -> Vec<f64> {
            figures.iter().zip(&rounds[0]).map(which).collect()
        };
        table.row([
            (*name).to_owned(),
            count(median(&all(|(own, _)| own[0]))),
            times(median(&all(|(own, memory)| own[0] / memory[0]))),
            decimal(median(&all(|(own, _)| own[1]))),
        ]);
    }
    println!("{table}");
}

/// A limit of 100,000 a second, and three stores that want three times as much.
async fn shared_limit(server: &Server) {
    const QUOTA: u64 = 100_000;
    const SECONDS: u64 = 10;
    /// For 300,000 a second by the callers of all three.
    const PAUSE: Duration = Duration::from_millis(16 * 3 * CALLERS as u64 / 300);

    let mut table = Table::new(&[
        "100,000/s by three",
        "admitted of the limit",
        "script calls per admission",
        "load",
    ]);
    for (name, limit) in [
        ("without", SlidingLog::per_second(QUOTA).precision(100)),
        (
            "prefetch 10ms",
            SlidingLog::per_second(QUOTA).precision(100).prefetch(TIME),
        ),
    ] {
        server.flush().await;
        let stores = [store(server).await, store(server).await, store(server).await];
        server.commands().await;
        let mut running = JoinSet::new();
        for store in stores {
            let limiter = limiter(store, limit);
            running.spawn(async move { send(&limiter, "shared", SECONDS as u32 * SECOND, PAUSE).await });
        }
        let counts = running.join_all().await;
        let [admitted, denied] = [0, 1].map(|which| counts.iter().map(|counts| counts[which]).sum::<u64>() as f64);
        let calls = server.commands().await.scripts;
        let most = (QUOTA * SECONDS) as f64;
        table.row([
            name.to_owned(),
            format!("{:.3}", admitted / most),
            format!("{:.4}", calls as f64 / admitted),
            decimal((admitted + denied) / most),
        ]);
    }
    println!("{table}");
}
