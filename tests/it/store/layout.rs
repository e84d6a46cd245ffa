//! The layout of what Redis has stored, `quota:1`. Versions of the crate with one layout share their counts.
//!
//! `tests/vectors/layout/<version>.txt` has what a version stores after the same requests, as commands of Redis, and what a peek
//! returns then. This version stores the same as the newest of them, and reads what each of them has stored. A change of these
//! bytes needs another `LAYOUT` in `src/store/redis/key_format.rs`, or a file of the version that makes it, if older versions
//! read them too. The script of a version is not kept: its arguments are not a part of the layout, so only the crate of that
//! version can call it.

use std::{fmt::Write, fs, path::Path, time::Duration};

use fred::types::Value;
use tower_quota::{
    Ban, Key, Limit, RedisStore,
    store::{Charge, LeaseId, Operation, Store, StoreRequest},
};

use crate::support::{Clock, Redis};

/// One limit of each kind of state.
const LIMITS: [&str; 9] = [
    "sliding-log 7/10s",
    "sliding-log 5000/10s precision 4",
    "sliding-counter 7/4s",
    "fixed-window 7/20s",
    "fixed-window 7/20s aligned",
    "fixed-window 7/day Europe/Berlin",
    "token-bucket 7/10s burst 9",
    "concurrency 7",
    BAN,
];
/// A ban beside the limit that denies.
const BAN: &str = "fixed-window 1/20s";

/// Costs, and the microseconds before them.
const REQUESTS: [(u64, u64); 4] = [(1, 0), (2, 3_000_001), (1, 0), (1, 999_999)];

/// The charges of a request for one of the limits.
struct Request {
    limit: Limit,
    ban: Option<Ban>,
    key: Key,
}

impl Request {
    fn new(limit: &str) -> Self {
        Self {
            limit: limit.parse().expect("a limit"),
            ban: (limit == BAN).then(|| Ban::after(2, Duration::from_secs(10)).first(Duration::from_secs(60))),
            key: Key::from("k"),
        }
    }

    async fn send(&self, store: &RedisStore, operation: Operation, cost: u64, lease: LeaseId) -> String {
        let charge = Charge::new("p", &self.limit, &self.key, cost).lease(lease);
        let charges = [charge.ban(self.ban.as_ref())];
        let reads = Operation::Ban { length: Duration::ZERO };
        let requests = [operation, reads].map(|operation| StoreRequest::new(operation, &charges));
        let requests = &requests[..1 + usize::from(self.ban.is_some())];
        let response = store.decide(requests).await.expect("the store replies");
        // The bans, then the limit.
        let states = response.outcomes().iter().rev().map(|outcome| outcome.states()[0]);
        let (bans, limit) = (states.clone().count() - 1, states);
        let texts = limit.enumerate().map(|(position, state)| {
            let wait = if position < bans {
                state.banned_for()
            } else {
                state.retry_after
            };
            let wait = wait.map_or("-".into(), |wait| wait.as_micros().to_string());
            format!("{} {wait} {}", state.remaining, state.reset_after.as_micros())
        });
        texts.collect::<Vec<_>>().join(", ")
    }
}

/// Bytes as `redis-cli` reads them.
fn quoted(bytes: &[u8]) -> String {
    let is_plain = !bytes.is_empty()
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_graphic() && !b"\"\\".contains(byte));
    let hex = || -> String { bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect() };
    if is_plain {
        String::from_utf8_lossy(bytes).into_owned()
    } else {
        format!("\"{}\"", hex())
    }
}

/// The words of a line that [`quoted`] has written.
fn words(line: &str) -> Vec<Vec<u8>> {
    let word = |word: &str| match word.strip_prefix('"') {
        None => word.as_bytes().to_vec(),
        Some(hex) => {
            let bytes = hex.trim_end_matches('"').split("\\x").skip(1);
            bytes
                .map(|byte| u8::from_str_radix(byte, 16).expect("a byte"))
                .collect()
        }
    };
    line.split(' ').map(word).collect()
}

/// The commands that write what is stored now, with the ids of leases as numbers in the order of the requests.
async fn stored(redis: &Redis, clock: &Clock, leases: &[LeaseId]) -> String {
    let id = |lease: &LeaseId| lease.parts().map(|part| (part as f64).to_le_bytes()).concat();
    let ids: Vec<_> = leases.iter().map(id).collect();
    let plain = |mut bytes: Vec<u8>| {
        if let Some(number) = ids.iter().position(|id| bytes.starts_with(id)) {
            bytes[..8].copy_from_slice(&((number + 1) as f64).to_le_bytes());
            bytes[8..16].fill(0);
        }
        quoted(&bytes)
    };
    let mut keys: Vec<String> = redis.command("KEYS", ["quota:*"]).await;
    keys.sort();
    let mut lines = String::new();
    for key in keys {
        let kind: String = redis.command("TYPE", [key.clone()]).await;
        let (command, words) = match kind.as_str() {
            "string" => {
                let value: Value = redis.command("GET", [key.clone()]).await;
                ("SET", plain(value.into_owned_bytes().expect("bytes").to_vec()))
            }
            "zset" => {
                let range = [key.as_str(), "0", "-1", "WITHSCORES"];
                let entries: Vec<(Value, f64)> = redis.command("ZRANGE", range).await;
                let entries = entries
                    .into_iter()
                    .map(|(member, score)| (score, plain(member.into_owned_bytes().expect("bytes").to_vec())));
                let mut entries: Vec<_> = entries.collect();
                // Redis sorts those of one score by the ids of leases, which are random.
                entries.sort_by(|(score, member), (other, other_member)| {
                    score.total_cmp(other).then_with(|| member.cmp(other_member))
                });
                let entries = entries.iter().map(|(score, member)| format!("{score} {member}"));
                ("ZADD", entries.collect::<Vec<_>>().join(" "))
            }
            _ => panic!("{key} is a {kind}"),
        };
        let _ = writeln!(lines, "{command} {} {words}", quoted(key.as_bytes()));
        let now = clock.expiry(Duration::from_secs(1)) as i64;
        let _ = writeln!(lines, "expires after {} ms", redis.expires_at(&key).await - now);
    }
    lines
}

/// What each limit stores after the requests, and what a peek returns then.
async fn layout() -> String {
    let (redis, mut text) = (Redis::start(), String::new());
    for limit in LIMITS {
        let clock = Clock::new();
        let (store, request) = (clock.redis_store(&redis).await, Request::new(limit));
        redis.command::<()>("FLUSHALL", [""; 0]).await;
        let mut leases = Vec::new();
        for (cost, wait) in REQUESTS {
            clock.advance(Duration::from_micros(wait));
            clock.write_to(&redis).await;
            leases.push(LeaseId::random());
            request
                .send(&store, Operation::Check, cost, leases[leases.len() - 1])
                .await;
        }
        let peek = request.send(&store, Operation::Peek, 1, LeaseId::random()).await;
        let stored = stored(&redis, &clock, &leases).await;
        let _ = writeln!(text, "\n{limit}\n{stored}peek: {peek}");
    }
    text
}

/// The texts of the versions of this layout, from the oldest to the newest.
fn versions() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/layout");
    let files = fs::read_dir(&folder)
        .expect("the folder")
        .map(|file| file.expect("a file").path());
    let number = |version: &str| {
        version
            .split('.')
            .map(|part| part.parse().expect("a number"))
            .collect::<Vec<u32>>()
    };
    let mut versions: Vec<_> = files
        .map(|file| {
            let version = file
                .file_stem()
                .expect("a name")
                .to_str()
                .expect("a version")
                .to_owned();
            (version, fs::read_to_string(&file).expect("a text"))
        })
        .collect();
    versions.sort_by_key(|(version, _)| number(version));
    versions
}

#[tokio::test]
async fn what_is_stored_changes_with_the_version_of_the_layout() {
    let (version, text) = versions().pop().expect("a version");
    let stored = layout().await;
    let (_, cases) = text.split_once("\n\n").expect("a comment, then the limits");
    for (case, now) in cases.trim_end().split("\n\n").zip(stored.trim().split("\n\n")) {
        assert!(
            case == now,
            "this version does not store what {version} does\n{case}\nbut\n{now}\nand in all{stored}"
        );
    }
    assert_eq!(cases.split("\n\n").count(), LIMITS.len());
}

#[tokio::test]
async fn each_version_reads_what_earlier_ones_have_stored() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let store = clock.redis_store(&redis).await;
    clock.advance(Duration::from_micros(REQUESTS.iter().map(|(_, wait)| wait).sum()));
    for (version, text) in versions() {
        let mut cases = 0;
        for case in text.split("\n\n").skip(1) {
            redis.command::<()>("FLUSHALL", [""; 0]).await;
            clock.write_to(&redis).await;
            let (limit, lines) = case.split_once('\n').expect("a limit");
            for line in lines.lines() {
                match line.split_once(' ').expect("words") {
                    ("SET", rest) => redis.command_of_bytes::<()>("SET", words(rest)).await,
                    ("ZADD", rest) => redis.command_of_bytes::<()>("ZADD", words(rest)).await,
                    ("expires", _) => {}
                    ("peek:", states) => {
                        let peek = Request::new(limit)
                            .send(&store, Operation::Peek, 1, LeaseId::random())
                            .await;
                        assert_eq!(peek, states, "{limit}, as {version} stores it");
                        cases += 1;
                    }
                    _ => panic!("{line}"),
                }
            }
        }
        assert!(cases > 5, "{version} has {cases} limits");
    }
}
