use std::{fmt, time::Duration};

use tokio::time::{sleep, timeout};
use tower_quota::{ClientLibrary, RedisStore};

use super::{
    callers::Callers,
    fault::{Fault, Leaves, Place},
    history::{Check, Held, KEYS, Quota, Verdict, cost_of, held, quotas},
    process::now,
};
use crate::support::PATIENCE;

/// The settings of the callers.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    pub(super) library: ClientLibrary,
    /// With group commit and deny cache.
    pub(super) together: bool,
}

impl Setup {
    /// A store with these settings.
    pub(super) async fn connect(self, url: &str) -> RedisStore {
        RedisStore::builder()
            .client_library(self.library)
            .group_commit(self.together)
            .deny_cache(self.together)
            .connect_timeout(PATIENCE)
            .url(url)
            .connect()
            .await
            .expect("Redis replies")
    }
}

/// The result of a run.
pub(super) struct Row {
    fault: Fault,
    requests: usize,
    errors: usize,
    /// The longest time in which one caller had no decision on one key.
    silence: Duration,
    p99: Duration,
    quotas: Vec<Quota>,
    verdicts: Vec<Verdict>,
    immortal: usize,
    /// The resident memory of a caller before the fault and after it, in KiB.
    memory: [u64; 2],
}

/// Runs callers for this time, and the fault in the middle half of it.
pub(super) async fn run(fault: Fault, setup: Setup, time: Duration) -> Row {
    let mut place = fault.place().await;
    let sent = cost_of(Callers::checks_in(time) / KEYS as u64);
    let quotas = quotas(sent);
    let logs: Vec<String> = (0..KEYS).map(Quota::log).collect();

    let callers = Callers::start(&place.url(), setup, sent);
    sleep(time / 4).await;
    let before = callers.memory();
    fault.strike(&mut place, &logs, sleep(time / 2)).await;
    let healed = now();
    let answered = async {
        while !callers.are_answered_since(healed) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    // Sentinels that were held up by a busy machine do nothing for half a minute.
    let answered = timeout(PATIENCE, answered).await;
    answered.expect("each caller is answered again about each key");
    sleep(time / 4).await;
    let after = callers.memory();
    let histories = callers.stop();

    let verdicts = quotas.iter().enumerate().map(|(key, quota)| {
        let checks = histories.iter().flatten().filter(|check| check.key == key);
        let held = quota.keeps_all.then(|| held_of(&place, &logs[key]));
        Verdict::of(checks, quota, held.as_ref())
    });
    let verdicts = verdicts.collect();
    let mut took: Vec<_> = histories.iter().flatten().map(|check| check.took).collect();
    took.sort_unstable();
    Row {
        fault,
        requests: took.len(),
        errors: histories
            .iter()
            .flatten()
            .filter(|check| check.reply.is_error())
            .count(),
        silence: longest_silence(&histories),
        p99: took[took.len() * 99 / 100],
        quotas,
        verdicts,
        immortal: immortal(&place),
        memory: [before, after],
    }
}

/// What the log of this name holds.
fn held_of(place: &Place, log: &str) -> Held {
    let primaries = place.primaries();
    let members = primaries.iter().map(|redis| redis.cli(&["ZRANGE", log, "0", "-1"]));
    // In a cluster, all nodes but the owner reply with an error.
    members
        .map(|members| held(&members))
        .find(|held| !held.is_empty())
        .unwrap_or_default()
}

/// How many keys have no expiry.
fn immortal(place: &Place) -> usize {
    let mut immortal = 0;
    for redis in place.primaries() {
        let keys = redis.cli(&["KEYS", "*"]);
        immortal += keys
            .lines()
            .filter(|key| redis.cli(&["PTTL", key]).trim() == "-1")
            .count();
    }
    immortal
}

fn longest_silence(histories: &[Vec<Check>]) -> Duration {
    let mut longest = Duration::ZERO;
    for history in histories {
        for key in 0..KEYS {
            let mut since = None;
            for check in history.iter().filter(|check| check.key == key) {
                let (start, end) = (*since.get_or_insert(check.after), check.after + check.took);
                longest = longest.max(end.saturating_sub(start));
                if !check.reply.is_error() {
                    since = Some(end.max(start));
                }
            }
        }
    }
    longest
}

impl Row {
    pub(super) const HEAD: &str = "\
| Redis is | requests | errors | longest without a decision | p99 of a check | admitted above the limit | admissions lost |
| --- | --- | --- | --- | --- | --- | --- |";

    /// Asserts what must hold, whatever went wrong.
    pub(super) fn verify(&self) {
        let (fault, leaves) = (self.fault, self.fault.leaves());
        for (key, (verdict, quota)) in self.verdicts.iter().zip(&self.quotas).enumerate() {
            let limit = &quota.limit;
            let lost = match leaves {
                Leaves::Everything => 0,
                Leaves::Part if quota.keeps_all => verdict.lost,
                Leaves::Part | Leaves::AnotherTime => limit.quota(),
            };
            assert!(verdict.over <= lost, "{fault}: {key}, {limit}: {verdict:?}");
            assert_eq!(verdict.twice, 0, "{fault}: {key}, {limit}: {verdict:?}");
            if leaves == Leaves::Everything {
                assert_eq!(verdict.lost, 0, "{fault}: {key}, {limit}: {verdict:?}");
            }
        }
        assert_eq!(self.immortal, 0, "{fault}: keys live forever");
        // What a busy machine may need.
        assert!(self.p99 < Duration::from_secs(2), "{fault}: {:?}", self.p99);
        let [before, after] = self.memory;
        assert!(after < before + 32 * 1_024, "{fault}: {before} KiB grew to {after} KiB");
    }
}

/// A row of the table.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            fault,
            requests,
            errors,
            silence,
            p99,
            ..
        } = self;
        let (silence, p99) = (silence.as_secs_f64(), p99.as_secs_f64() * 1_000.0);
        let over = self
            .verdicts
            .iter()
            .map(|verdict| verdict.over)
            .max()
            .unwrap_or_default();
        let lost: u64 = self.verdicts.iter().map(|verdict| verdict.lost).sum();
        write!(
            f,
            "| {fault} | {requests} | {errors} | {silence:.2} s | {p99:.1} ms | {over} | {lost} |"
        )
    }
}
