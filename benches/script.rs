//! The instructions of Redis for a check, for each algorithm and shape of call, as in "Work in Redis" of `docs/speed.md`. They
//! do not depend on the load of the machine. Requires valgrind. `cargo bench --bench script`; a part of the name of a row is an
//! argument, and `cluster` measures calls to a node of a cluster with keys of several slots.
//!
//! Callgrind counts within `EVALSHA`, so the instructions exclude the connection. They include the garbage collection of Lua.

#[path = "../tests/it/support/packed.rs"]
mod packed;
#[path = "../tests/it/support/redis.rs"]
#[allow(dead_code)]
mod redis;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use tower_quota::RedisStore;

use self::{packed::packed, redis::Redis};

/// Checks in one call of a batch.
const BATCH: usize = 128;
/// How often each key is checked while instructions are counted.
const ROUNDS: u64 = 8;
/// The script as applications write it, for comparison.
const TEXTBOOK: &str = include_str!("whole/sliding_log.lua");

const MINUTE: u64 = 60_000_000;
const DAY: u64 = 24 * 60 * MINUTE;

/// The rules in the order of their scripts for checks.
const RULES: [&str; 6] = ["log", "precise", "counter", "fixed", "bucket", "concurrency"];

/// A charge of cost 1 against a quota, as the scripts read it.
type Charge = fn(quota: u64) -> String;

const LOG: Charge = |quota| log(quota, MINUTE, 0);

/// The rows of the table; the second number is how often each key was checked before.
const ROWS: [(&str, &[Charge], u64); 10] = [
    ("a sliding log", &[LOG], 3),
    ("a sliding log, on a key that is new", &[LOG], 0),
    (
        "a sliding log in which all entries have expired",
        &[|quota| log(quota, 1_000, 0)],
        3,
    ),
    (
        "a sliding log with a precision, the first of a grain",
        &[|quota| log(quota, MINUTE, 1)],
        3,
    ),
    (
        "a sliding log with a precision, another of the same grain",
        &[|quota| log(quota, DAY, DAY)],
        3,
    ),
    (
        "a sliding counter",
        &[|quota| format!("counter 1 {quota} {MINUTE} 1 {}", (1_u64 << 52) / MINUTE)],
        3,
    ),
    ("a fixed window", &[|quota| format!("fixed 1 {quota} {MINUTE} 1 0")], 3),
    (
        "a token bucket",
        &[|quota| {
            let period = 100 * MINUTE / 60 / quota;
            format!("bucket 1 {quota} 1 {period} {}", (1_u64 << 52) / (period + 1))
        }],
        3,
    ),
    ("slots", &[|quota| format!("concurrency 1 {quota} {MINUTE} 1 1")], 3),
    ("two sliding logs", &[LOG, |quota| log(2 * quota, MINUTE, 0)], 3),
];

fn log(quota: u64, window: u64, grain: u64) -> String {
    let rule = if grain == 0 { "log" } else { "precise" };
    format!("{rule} 1 {quota} {window} {grain} 0")
}

/// A server under callgrind.
struct Server {
    redis: Redis,
    /// Where callgrind writes what was executed since the last `LOLWUT`, with the number of the dump at the end.
    dumps: PathBuf,
    count: usize,
    clustered: bool,
}

impl Server {
    /// Starts a server, or a node of a cluster with all slots.
    async fn start(folder: &Path, clustered: bool) -> Self {
        let dumps = folder.join(if clustered { "node" } else { "dump" });
        let mut valgrind = Command::new("valgrind");
        valgrind
            .args([
                "--tool=callgrind",
                "--toggle-collect=evalShaCommand",
                "--dump-before=lolwutCommand",
            ])
            .arg(format!("--callgrind-out-file={}", dumps.display()))
            .arg(redis::server().get_program());
        if clustered {
            valgrind.args(["--cluster-enabled", "yes"]);
        }
        let redis = Redis::start_by(valgrind);
        if clustered {
            let slots = (0..16_384).map(|slot: u16| slot.to_string());
            let addslots = std::iter::once("ADDSLOTS".to_owned()).chain(slots);
            redis.command::<()>("CLUSTER", addslots).await;
            while !redis
                .command::<String>("CLUSTER", ["INFO"])
                .await
                .contains("cluster_state:ok")
            {
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
        Self {
            redis,
            dumps,
            count: 0,
            clustered,
        }
    }

    /// The instructions within `EVALSHA` since this was called before.
    async fn instructions(&mut self) -> u64 {
        self.redis.command::<()>("LOLWUT", [""; 0]).await;
        self.count += 1;
        let dump = format!("{}.{}", self.dumps.display(), self.count);
        let dump = fs::read_to_string(dump).expect("callgrind writes before the reply");
        let mut lines = dump.lines();
        let total = lines.find_map(|line| line.strip_prefix("totals: ").or(line.strip_prefix("summary: ")));
        total.and_then(|total| total.trim().parse().ok()).expect("a total")
    }

    async fn load(&self, script: &str) -> String {
        self.redis.command("SCRIPT", ["LOAD", script]).await
    }

    async fn call(&self, sha1: &str, keys: &[String], arguments: &[Vec<u8>]) {
        let mut words = vec![sha1.into(), keys.len().to_string().into_bytes()];
        words.extend(keys.iter().map(|key| key.clone().into_bytes()));
        words.extend_from_slice(arguments);
        self.redis.command_of_bytes::<()>("EVALSHA", words).await;
    }

    /// The instructions of one check on keys that were checked `before` times each.
    async fn measure(
        &mut self,
        scripts: &[String],
        charges: &[Charge],
        quota: u64,
        checks: usize,
        callers: u64,
        before: u64,
    ) -> u64 {
        self.redis.command::<()>("FLUSHALL", ["SYNC"]).await;
        let parts: Vec<_> = charges.iter().map(|charge| charge(quota)).collect();
        let size = parts.len();
        let (rule, _) = parts[0].split_once(' ').expect("a rule and its numbers");
        let of_rule = RULES.iter().position(|name| *name == rule).expect("a rule");
        let sha1 = &scripts[of_rule];
        // In a cluster the keys of a batch lie in several slots, and are arguments. Each request has its own in one slot.
        let is_across = self.clustered && checks > 1;
        let numbers = parts.iter().map(|part| part.replace(rule, &callers.to_string()));
        let mut runs = vec![packed(&numbers.collect::<Vec<_>>().join(" "))];
        if checks > 1 {
            runs.push(packed(&format!("{checks} {}", if is_across { 2 } else { 0 })));
        }
        // So few keys that none expires meanwhile.
        let (rounds, keys) = match before {
            0 => (1, 2 * BATCH),
            _ => (ROUNDS, checks.max(32)),
        };
        for round in 0..before + rounds {
            if round == before {
                self.instructions().await;
            }
            for call in 0..keys / checks {
                let keys = (0..checks).flat_map(|check| {
                    let address = call * checks + check;
                    (0..size).map(move |policy| format!("quota:1:log:policy-{policy}:{{ip=203.0.113.{address}}}"))
                });
                let keys: Vec<_> = keys.collect();
                if is_across {
                    let mut arguments = runs.clone();
                    arguments.extend(keys.iter().map(|key| key.clone().into_bytes()));
                    self.call(sha1, &keys[..1], &arguments).await;
                } else {
                    self.call(sha1, &keys, &runs).await;
                }
            }
        }
        self.instructions().await / (rounds * keys as u64)
    }

    /// The instructions of one check of the textbook script.
    async fn measure_textbook(&mut self) -> u64 {
        let sha1 = self.load(TEXTBOOK).await;
        let calls = 2 * BATCH;
        self.redis.command::<()>("FLUSHALL", ["SYNC"]).await;
        for round in 0..4 {
            if round == 3 {
                self.instructions().await;
            }
            for call in 0..calls {
                let arguments =
                    ["1000", "60000", &format!("member-{round}-{call}")].map(|text| text.as_bytes().to_vec());
                self.call(&sha1, &[format!("quota:{call}")], &arguments).await;
            }
        }
        self.instructions().await / calls as u64
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let folder = tempfile::tempdir().expect("a folder for the dumps");
    let only = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let mut server = Server::start(folder.path(), only.as_deref() == Some("cluster")).await;
    let only = only.filter(|_| !server.clustered);
    let mut scripts = Vec::new();
    for script in RedisStore::scripts() {
        scripts.push(server.load(script).await);
    }
    let is_chosen = |name: &str| only.as_ref().is_none_or(|only| name.contains(only.as_str()));

    println!("| a check of | in a batch of {BATCH} | alone in its call | denied, in a batch | denied, alone |");
    println!("| --- | ---: | ---: | ---: | ---: |");
    if is_chosen("textbook") {
        let alone = thousands(server.measure_textbook().await);
        println!("| the textbook script for a sliding log | | {alone} | | |");
    }
    for (name, charges, before) in ROWS {
        if !is_chosen(name) {
            continue;
        }
        let mut cells = vec![name.to_owned()];
        for quota in [1_000, before] {
            for checks in [BATCH, 1] {
                // Keys with expired entries alone, and new ones, deny nothing.
                let denies = quota == 1_000 || !["expired", "new", "slots"].iter().any(|word| name.contains(word));
                cells.push(match denies {
                    true => thousands(server.measure(&scripts, charges, quota, checks, 1, before).await),
                    false => String::new(),
                });
            }
        }
        println!("| {} |", cells.join(" | "));
    }
    if is_chosen("hot key") {
        let hot = server.measure(&scripts, &[LOG], 100_000, 1, 128, 3).await;
        println!(
            "| a sliding log by {BATCH} callers of a hot key, together | | {} | | |",
            thousands(hot)
        );
    }
}

/// Rounded to thousands.
fn thousands(instructions: u64) -> String {
    format!("{},000", (instructions + 500) / 1_000)
}
