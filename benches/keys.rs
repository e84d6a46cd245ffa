//! A Redis with many keys: what a key takes, what a check costs when its key is not in a cache of the processor, and what saves,
//! replication, expiry and failovers do meanwhile. `cargo bench --bench keys --all-features`; the number of keys is an argument,
//! 10,000,000 by default.

#[path = "../tests/it/support/redis.rs"]
#[allow(dead_code)]
mod redis;
#[path = "../tests/it/support/sentinel.rs"]
#[allow(dead_code)]
mod sentinel;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bench_harness::{Server, Table, count};
use tokio::{runtime::Runtime, task::JoinSet, time::sleep};
use tower_quota::{Limit, Limiter, Policy, RedisStore, SlidingLog, TokenBucket};

use self::{redis::Redis, sentinel::Sentinel};

const CALLERS: u64 = 512;
const FEW: u64 = 10_000;
/// Checks of a measurement.
const CHECKS: u64 = 1_000_000;

fn main() {
    let number = std::env::args().skip(1).find_map(|argument| argument.parse().ok());
    let keys = number.unwrap_or(10_000_000);
    let day = Duration::from_secs(86_400);
    let limits: [Limit; 2] = [TokenBucket::new(1_000, day).into(), SlidingLog::new(1_000, day).into()];
    // The harness would put all of its servers on the core of the client.
    Runtime::new()
        .expect("a runtime")
        .block_on(failovers(limits[0].clone(), keys));
    bench_harness::run(async |server| {
        println!("{}", server.machine());
        println!(
            "{} keys with one admission each; us of Redis for a check, in batches\n",
            count(keys as f64)
        );
        let mut table = Table::new(&[
            "limit",
            "bytes a key",
            "check, 10,000 keys",
            "check, all keys",
            "AOF bytes a check",
            "bytes to a replica",
            "fork, ms",
            "save, s",
            "slowest check in a save, ms",
            "slowest while all expire, ms",
        ]);
        for limit in limits {
            server.flush().await;
            table.row(measure(server, limit, keys).await);
        }
        println!("{table}");
    });
}

async fn measure(server: &Server, limit: Limit, keys: u64) -> Vec<String> {
    let empty = server.figure("memory", "used_memory").await;
    let limiter = Arc::new(limiter(&server.url(), limit.clone()).await);
    let few = time_of_a_check(server, &limiter, FEW).await;
    send(&limiter, 0..keys).await;
    let bytes = (server.figure("memory", "used_memory").await - empty) / keys as f64;
    let all = time_of_a_check(server, &limiter, keys).await;

    let replica = Redis::start_with(&["--replicaof", "127.0.0.1", &server.port().to_string()]);
    server.reaches("replication", "connected_slaves", 1.0).await;
    let offset = server.figure("replication", "master_repl_offset").await;
    send(&limiter, 0..FEW).await;
    let replicated = (server.figure("replication", "master_repl_offset").await - offset) / FEW as f64;
    drop(replica);

    server.set("appendonly", "yes").await;
    server.reaches("persistence", "aof_rewrite_in_progress", 0.0).await;
    let size = server.figure("persistence", "aof_current_size").await;
    send(&limiter, 0..FEW).await;
    let appended = (server.figure("persistence", "aof_current_size").await - size) / FEW as f64;
    server.set("appendonly", "no").await;

    server.save().await;
    let during_a_save = slowest_until(server, &limiter, keys, "rdb_bgsave_in_progress").await;
    let save = server.figure("persistence", "rdb_last_bgsave_time_sec").await;
    let fork = server.figure("stats", "latest_fork_usec").await / 1e3;
    let while_expiring = slowest_while_expiring(server, limit.clone()).await;
    let mut cells = vec![limit.to_string(), count(bytes)];
    cells.extend([few, all].map(|us| format!("{us:.1}")));
    cells.extend([appended, replicated].map(count));
    cells.push(format!("{fork:.0}"));
    cells.push(format!("{save:.0}"));
    cells.extend([during_a_save, while_expiring].map(|ms| format!("{ms:.0}")));
    cells
}

async fn limiter(url: &str, limit: Limit) -> Limiter {
    let store = RedisStore::builder().deadline(Duration::from_secs(60)).url(url);
    let store = store.connect().await.expect("a store");
    Limiter::new(store, Policy::new("api", limit))
}

/// Checks of these keys, by many callers; returns the slowest, in milliseconds.
async fn send(limiter: &Arc<Limiter>, keys: impl Iterator<Item = u64> + Send + 'static) -> f64 {
    let keys = Arc::new(std::sync::Mutex::new(keys));
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let (limiter, keys) = (limiter.clone(), keys.clone());
        callers.spawn(async move {
            let mut slowest = Duration::ZERO;
            loop {
                let next = keys.lock().expect("no caller panics").next();
                let Some(key) = next else {
                    return slowest;
                };
                let started = Instant::now();
                let decision = limiter.check(key.to_string()).await.expect("Redis answers");
                assert!(decision.store_error().is_none(), "{decision:?}");
                slowest = slowest.max(started.elapsed());
            }
        });
    }
    let mut slowest = Duration::ZERO;
    while let Some(one) = callers.join_next().await {
        slowest = slowest.max(one.expect("no caller panics"));
    }
    slowest.as_secs_f64() * 1e3
}

/// Different keys in a random order, which is the same on every run.
fn random(keys: u64, checks: u64) -> impl Iterator<Item = u64> + Send {
    (0..checks).map(move |n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) % keys)
}

/// Microseconds of the processor that Redis takes for a check.
async fn time_of_a_check(server: &Server, limiter: &Arc<Limiter>, keys: u64) -> f64 {
    let before = server.processor_time().await;
    send(limiter, random(keys, CHECKS)).await;
    (server.processor_time().await - before) / CHECKS as f64 * 1e6
}

/// The slowest check until this field of `INFO persistence` is 0.
async fn slowest_until(server: &Server, limiter: &Arc<Limiter>, keys: u64, field: &str) -> f64 {
    let mut slowest = 0.0;
    while server.figure("persistence", field).await > 0.0 {
        slowest = f64::max(slowest, send(limiter, random(keys, FEW)).await);
    }
    slowest
}

/// The slowest check of other keys while a million keys expire within some seconds.
async fn slowest_while_expiring(server: &Server, limit: Limit) -> f64 {
    const EXPIRING: u64 = 1_000_000;
    let soon: Limit = match limit {
        Limit::TokenBucket(_) => TokenBucket::new(1, Duration::from_secs(10)).into(),
        _ => SlidingLog::new(100, Duration::from_secs(10)).into(),
    };
    server.flush().await;
    let other = Arc::new(limiter(&server.url(), limit).await);
    let limiter = Arc::new(limiter(&server.url(), soon).await);
    send(&limiter, 1 << 32..(1 << 32) + EXPIRING).await;
    let mut slowest = 0.0;
    while server.figure("keyspace", "keys").await > EXPIRING as f64 / 100.0 {
        slowest = f64::max(slowest, send(&other, random(FEW / 10, FEW)).await);
    }
    slowest
}

/// What a failover by Sentinel takes with few keys and with all.
async fn failovers(limit: Limit, all: u64) {
    let mut table = Table::new(&[
        "failover with keys",
        "s without a decision",
        "s to sync the old primary",
    ]);
    for keys in [FEW, all] {
        let [silence, sync] = failover(limit.clone(), keys).await;
        table.row([count(keys as f64), format!("{silence:.1}"), format!("{sync:.1}")]);
    }
    println!("{table}");
}

/// Kills a primary with these keys, which Sentinel declares down after a second, and restarts it when a replica decides.
async fn failover(limit: Limit, keys: u64) -> [f64; 2] {
    let mut sentinel = Sentinel::start_that_fails_over().await;
    send(&Arc::new(limiter(&sentinel.url(), limit.clone()).await), 0..keys).await;
    sentinel.primary.command::<()>("SET", ["last", "1"]).await;
    let synced: u64 = sentinel.primary.command("WAIT", ["2", "60000"]).await;
    assert_eq!(synced, 2, "the replicas have all keys");

    let store = RedisStore::builder()
        .url(&sentinel.url())
        .connect()
        .await
        .expect("a store");
    let limiter = Limiter::new(store, Policy::new("api", limit));
    let decides = async || {
        let decision = limiter.check("1").await.expect("an ordinary check");
        decision.store_error().is_none()
    };
    assert!(decides().await, "the primary decides");
    sentinel.primary.kill();
    let killed = Instant::now();
    eventually("the replica decides", &decides).await;
    let silence = killed.elapsed();

    sentinel.primary.restart();
    let restarted = Instant::now();
    eventually("it is a replica", async || {
        sentinel
            .primary
            .cli(&["INFO", "replication"])
            .contains("master_link_status:up")
    })
    .await;
    [silence, restarted.elapsed()].map(|time| time.as_secs_f64())
}

/// Waits for a condition.
async fn eventually(_: &str, mut condition: impl AsyncFnMut() -> bool) {
    while !condition().await {
        sleep(Duration::from_millis(5)).await;
    }
}
