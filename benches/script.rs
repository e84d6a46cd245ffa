//! The time of a check in Redis, in microseconds, for each algorithm and shape of call.
//! `cargo bench --bench script --all-features`; with `TOWER_QUOTA_SCRIPT=path` a second text of the script is measured too.
//!
//! Redis measures each call (`SLOWLOG`), so the time excludes client and connection.

#[path = "../tests/it/support/redis.rs"]
#[allow(dead_code)]
mod redis;

use std::ops::Range;

use fred::types::Value;
use tower_quota::RedisStore;

use self::redis::Redis;

/// Checks in one call of a batch.
const BATCH: u64 = 128;
/// Rounds; the median counts.
const ROUNDS: usize = 5;

/// A charge as the script reads it, of cost 1 against `quota` in a `window` of microseconds.
type Charge = fn(quota: u64, window: u64) -> String;

const CHARGES: [(&str, Charge); 6] = [
    ("log", |quota, window| format!("log 1 {quota} {window} 0")),
    ("log, coarse", |quota, window| {
        format!("log 1 {quota} {window} {}", window / 100)
    }),
    ("counter", |quota, window| {
        format!("counter 1 {quota} {window} 1 {}", (1_u64 << 52) / window)
    }),
    ("fixed", |quota, window| format!("fixed 1 {quota} {window} 1")),
    ("fixed, aligned", |quota, window| format!("fixed 1 {quota} {window} 0")),
    ("bucket", |quota, window| {
        format!(
            "bucket 1 {quota} 1 {} {}",
            window / quota,
            (1_u64 << 52) / (window / quota + 1)
        )
    }),
];

/// A sequence of calls.
struct Shape {
    name: &'static str,
    quota: u64,
    /// In microseconds.
    window: u64,
    /// Number of keys, which are used in turn.
    keys: u64,
    /// Checks in one call, each of another key.
    checks: u64,
    /// Number of merged requests in each check.
    callers: u64,
    /// Calls that are not measured, before those that are.
    warm: u64,
    calls: u64,
}

const MINUTE: u64 = 60_000_000;

const SHAPES: [Shape; 6] = [
    Shape {
        name: "one check a call",
        quota: 1_000,
        window: MINUTE,
        keys: 10_000,
        checks: 1,
        callers: 1,
        warm: 2_000,
        calls: 2_000,
    },
    Shape {
        name: "batches, new keys",
        quota: 1_000,
        window: MINUTE,
        keys: 50_000,
        checks: BATCH,
        callers: 1,
        warm: 0,
        calls: 300,
    },
    Shape {
        name: "batches, filling",
        quota: 1_000,
        window: MINUTE,
        keys: 10_000,
        checks: BATCH,
        callers: 1,
        warm: 100,
        calls: 300,
    },
    Shape {
        name: "batches, expiring",
        quota: 100,
        window: 20_000,
        keys: 10 * BATCH,
        checks: BATCH,
        callers: 1,
        warm: 50,
        calls: 200,
    },
    Shape {
        name: "128 callers of a key",
        quota: 100_000_000,
        window: MINUTE,
        keys: 1,
        checks: 1,
        callers: 128,
        warm: 200,
        calls: 1_000,
    },
    Shape {
        name: "batches, denied",
        quota: 5,
        window: MINUTE,
        keys: 10_000,
        checks: BATCH,
        callers: 1,
        warm: 450,
        calls: 200,
    },
];

impl Shape {
    fn arguments(&self, charge: Charge) -> [String; 2] {
        let Self { checks, callers, .. } = self;
        [format!("check {checks} {callers} 1"), charge(self.quota, self.window)]
    }

    async fn run(&self, redis: &Redis, sha1: &str, charge: Charge, calls: Range<u64>) {
        let arguments = self.arguments(charge);
        for call in calls {
            let mut words = vec![sha1.to_owned(), self.checks.to_string()];
            let keys = (call * self.checks..).take(self.checks as usize);
            words.extend(keys.map(|key| format!("quota:1:x:test:{{ip=203.0.113.{}}}", key % self.keys)));
            words.extend(arguments.iter().cloned());
            redis.command::<()>("EVALSHA", words).await;
        }
    }

    /// The time of one check in Redis, in microseconds.
    async fn measure(&self, redis: &Redis, sha1: &str, charge: Charge) -> f64 {
        redis.command::<()>("FLUSHALL", ["SYNC"]).await;
        self.run(redis, sha1, charge, 0..self.warm).await;
        redis.command::<()>("SLOWLOG", ["RESET"]).await;
        self.run(redis, sha1, charge, self.warm..self.warm + self.calls).await;

        let log: Vec<Vec<Value>> = redis.command("SLOWLOG", ["GET", "-1"]).await;
        // Other work of the machine distorts some calls, so this is the mean between the quartiles.
        let calls = log
            .iter()
            .filter(|entry| entry[3].clone().into_array()[0].as_str().as_deref() == Some("EVALSHA"));
        let mut spent: Vec<u64> = calls.filter_map(|entry| entry[2].as_u64()).collect();
        spent.sort_unstable();
        let middle = &spent[spent.len() / 4..spent.len() * 3 / 4];
        middle.iter().sum::<u64>() as f64 / (middle.len() as u64 * self.checks) as f64
    }
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    // In microseconds: longer than any command within the script, shorter than any call of it.
    let redis = Redis::start_with(&["--slowlog-log-slower-than", "4", "--slowlog-max-len", "5000"]);
    let mut scripts = vec![RedisStore::scripts()[0].to_owned()];
    if let Some(path) = std::env::var_os("TOWER_QUOTA_SCRIPT") {
        scripts.push(std::fs::read_to_string(path).expect("the other script"));
    }
    let mut known: Vec<String> = Vec::new();
    for script in &scripts {
        known.push(redis.command("SCRIPT", ["LOAD", script]).await);
    }
    let only = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));

    println!(
        "microseconds of Redis for one check{}",
        if known.len() > 1 {
            ", and of the other script"
        } else {
            ""
        }
    );
    println!();
    println!("| charge | {} |", SHAPES.map(|shape| shape.name).join(" | "));
    println!("| --- |{}", " ---: |".repeat(SHAPES.len()));
    for (name, charge) in CHARGES {
        if only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            continue;
        }
        let mut cells = Vec::new();
        for shape in &SHAPES {
            let mut rounds = vec![Vec::new(); known.len()];
            for _ in 0..ROUNDS {
                for (sha1, rounds) in known.iter().zip(&mut rounds) {
                    rounds.push(shape.measure(&redis, sha1, charge).await);
                }
            }
            let figures = rounds.into_iter().map(|rounds| format!("{:.2}", median(rounds)));
            cells.push(figures.collect::<Vec<_>>().join(" / "));
        }
        println!("| {name} | {} |", cells.join(" | "));
    }
}
