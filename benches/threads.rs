//! What several threads of a process, and several processes, decide together. `cargo bench --bench threads --all-features`, with
//! `-- --help` for the options.
//!
//! Threads and Redis share the cores that there are. What is compared takes turns, and a ratio is the median of those within a
//! round.

#[path = "support/bare.rs"]
#[expect(dead_code, reason = "other benchmarks use the rest of it")]
mod bare;
#[path = "../tests/it/support/redis.rs"]
#[allow(dead_code)]
mod redis;

use std::{
    convert::Infallible,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use bench_harness::{Options, Table, count, decimal, median, pin, ratio, times};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::Empty;
use tokio::{runtime::Builder, task::JoinSet};
use tower::{Layer, Service, ServiceExt};
use tower_quota::{FailureMode, Limit, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, TokenBucket, key};

use self::{
    bare::{Bare, request},
    redis::Redis,
};

const SECOND: Duration = Duration::from_secs(1);
const CALLERS: u32 = 256;
/// Requests after which a caller yields and looks at the clock.
const TURN: u32 = 64;
const THREADS: [usize; 2] = [1, 2];
const PROCESSES: [usize; 3] = [1, 2, 4];

/// Set to the URL of Redis for one of several processes.
const URL: &str = "BENCH_REDIS_URL";

enum Stored {
    Nowhere,
    InMemory,
    InRedis,
}

/// What is measured: a limit in a store, with so many keys, whose requests have this status.
struct Subject {
    name: &'static str,
    stored: Stored,
    limit: Limit,
    keys: u32,
    expects: StatusCode,
}

/// What the callers of a process have received.
#[derive(Default)]
struct Received {
    /// After the warm-up.
    per_second: f64,
    /// With the warm-up.
    total: u64,
}

fn main() {
    let options = Options::from_command_line();
    if let Ok(url) = std::env::var(URL) {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let Received { per_second, total } = runtime.block_on(send(&over_many_keys(), &url, options.time));
        println!("{per_second} {total}");
        return;
    }
    let redis = Redis::start();
    threads(&redis.url(), &options);
    if options.includes(over_many_keys().name) {
        processes(&redis, &options);
    }
}

fn over_many_keys() -> Subject {
    Subject {
        name: "Redis, 10,000 keys",
        stored: Stored::InRedis,
        limit: SlidingLog::new(100_000, SECOND).into(),
        keys: 10_000,
        expects: StatusCode::OK,
    }
}

fn subjects() -> Vec<Subject> {
    let ample = SlidingLog::new(1_000_000_000, SECOND).precision(100);
    let subject = |name, stored, limit, keys, expects| Subject {
        name,
        stored,
        limit,
        keys,
        expects,
    };
    let (ok, denied) = (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS);
    let ahead = ample.prefetch(SECOND / 10);
    // Its keys do not expire meanwhile.
    let lasting = Limit::from(TokenBucket::per_second(1).burst(100_000_000));
    vec![
        subject("no limit", Stored::Nowhere, lasting.clone(), 10_000, ok),
        subject("memory, 10,000 keys", Stored::InMemory, lasting.clone(), 10_000, ok),
        subject("memory, one key", Stored::InMemory, lasting, 1, ok),
        over_many_keys(),
        subject("Redis, one key", Stored::InRedis, ample.into(), 1, ok),
        subject("Redis, one key, prefetch 100ms", Stored::InRedis, ahead.into(), 1, ok),
        subject("Redis, denied", Stored::InRedis, bare::denying(), 1_000, denied),
    ]
}

/// Requests of 256 callers in this runtime, for as long after a warm-up of the same length.
async fn send(subject: &Subject, url: &str, time: Duration) -> Received {
    let policy = Policy::new("api", subject.limit.clone())
        .key(key::ip())
        .failure_mode(FailureMode::Closed);
    match subject.stored {
        Stored::Nowhere => send_to(Bare, subject, time).await,
        Stored::InMemory => {
            let layer = RateLimitLayer::new(MemoryStore::new(), policy);
            send_to(layer.layer(Bare), subject, time).await
        }
        Stored::InRedis => {
            let store = RedisStore::builder().deadline(10 * SECOND).url(url).connect();
            let layer = RateLimitLayer::new(store.await.expect("a store"), policy);
            send_to(layer.layer(Bare), subject, time).await
        }
    }
}

async fn send_to<S, B>(service: S, subject: &Subject, time: Duration) -> Received
where
    S: Service<Request<Empty<Bytes>>, Response = http::Response<B>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static,
    B: Send,
{
    let mut callers = JoinSet::new();
    let (keys, expects, begin) = (subject.keys, subject.expects, Instant::now() + time);
    for caller in 0..CALLERS {
        let mut service = service.clone();
        callers.spawn(async move {
            let (mut next, mut counted, mut total) = (caller * 7_919, 0, 0);
            while begin.elapsed() < time {
                let is_warm = begin.elapsed() > Duration::ZERO;
                for _ in 0..TURN {
                    next += 1;
                    let Ok(ready) = service.ready().await;
                    let Ok(response) = ready.call(request(next % keys)).await;
                    let is_expected = u64::from(response.status() == expects);
                    (counted, total) = (counted + u64::from(is_warm) * is_expected, total + is_expected);
                }
                tokio::task::yield_now().await;
            }
            (counted, total)
        });
    }
    let (mut all, mut received) = (0, Received::default());
    for (counted, total) in callers.join_all().await {
        (all, received.total) = (all + counted, received.total + total);
    }
    received.per_second = all as f64 / begin.elapsed().as_secs_f64();
    received
}

fn threads(url: &str, options: &Options) {
    let mut subjects = subjects();
    subjects.retain(|subject| options.includes(subject.name));
    let mut rounds: Vec<_> = subjects.iter().map(|_| THREADS.map(|_| Vec::new())).collect();
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        for (subject, rounds) in subjects.iter().zip(&mut rounds) {
            for (threads, figures) in THREADS.into_iter().zip(rounds) {
                let runtime = Builder::new_multi_thread().worker_threads(threads).enable_all().build();
                figures.push(
                    runtime
                        .expect("a runtime")
                        .block_on(send(subject, url, options.time))
                        .per_second,
                );
            }
        }
    }
    let mut table = Table::new(&["requests per second", "one thread", "two threads", ""]);
    for (subject, [one, two]) in subjects.iter().zip(&rounds) {
        let figures = [count(median(one)), count(median(two)), times(ratio(two, one))];
        table.row([subject.name.to_owned()].into_iter().chain(figures));
    }
    println!("{table}");
}

/// Processes of a thread each, which share a core, and Redis on another.
fn processes(redis: &Redis, options: &Options) {
    let server = redis.cli(&["INFO", "server"]);
    let id = server.lines().find_map(|line| line.strip_prefix("process_id:"));
    assert!(pin(id.unwrap_or_default(), "1"), "there is taskset");
    let mut rounds = PROCESSES.map(|_| [Vec::new(), Vec::new()]);
    for _ in 0..options.rounds {
        for (processes, [rates, batches]) in PROCESSES.into_iter().zip(&mut rounds) {
            redis.cli(&["CONFIG", "RESETSTAT"]);
            let received: Vec<_> = (0..processes).map(|_| start(&redis.url(), options.time)).collect();
            let received: Vec<_> = received.into_iter().map(received_by).collect();
            let checks = received.iter().map(|received| received.total).sum::<u64>() as f64;
            rates.push(received.iter().map(|received| received.per_second).sum());
            batches.push(checks / script_calls(redis));
        }
    }
    let mut table = Table::new(&["processes", "checks per second", "", "checks in a call"]);
    for (processes, [rates, batches]) in PROCESSES.into_iter().zip(&rounds) {
        let figures = [
            count(median(rates)),
            times(ratio(rates, &rounds[0][0])),
            decimal(median(batches)),
        ];
        table.row([processes.to_string()].into_iter().chain(figures));
    }
    println!("{table}");
}

fn start(url: &str, time: Duration) -> Child {
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", "0"]).arg(program).env(URL, url);
    command.args(["--seconds", &time.as_secs_f64().to_string()]);
    command.stdout(Stdio::piped()).spawn().expect("there is taskset")
}

fn received_by(process: Child) -> Received {
    let output = process.wait_with_output().expect("the process ends");
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut figures = output.split_whitespace();
    Received {
        per_second: figures.next().and_then(|figure| figure.parse().ok()).expect("a rate"),
        total: figures.next().and_then(|figure| figure.parse().ok()).expect("a number"),
    }
}

fn script_calls(redis: &Redis) -> f64 {
    let statistics = redis.cli(&["INFO", "commandstats"]);
    let calls = statistics
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    let calls = calls.and_then(|calls| calls.split(',').next()?.parse().ok());
    calls.expect("scripts were called")
}
