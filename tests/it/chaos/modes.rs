//! What each failure mode admits during a fault and after it, from empty counts.

use std::{fmt, num::ParseIntError, str::FromStr, time::Duration};

use tokio::{
    io::AsyncBufReadExt,
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tower_quota::{FailureMode, Limiter, Policy, SlidingLog};

use super::{
    callers::PAUSE,
    fault::{Fault, Place},
    process::{PROCESSES, Processes, connect, now, report},
    run::Setup,
};
use crate::support::{Cluster, PATIENCE};

/// The modes, each with the name of its policy.
const MODES: [(&str, FailureMode); 4] = [
    ("local", FailureMode::Local),
    ("share", FailureMode::local_share(1, PROCESSES as u32)),
    ("open", FailureMode::Open),
    ("closed", FailureMode::Closed),
];
/// The limit of each policy in an hour, which is longer than a run.
const LIMIT: u64 = 30;
/// How many checks of each mode each process makes during the fault, or more.
const CHECKS: usize = 2 * LIMIT as usize;
/// The key that is checked before the fault.
const BEFORE: &str = "before";

/// The test that calls [`call`].
const TEST: &str = "chaos::a_process_checks_with_each_failure_mode";

/// A check of a key that was not used before the fault.
struct Check {
    /// The position of its mode.
    mode: usize,
    before_the_fault: bool,
    /// In microseconds since the Unix epoch, as is `decided`.
    sent: u64,
    decided: u64,
    admitted: bool,
    /// Whether the store failed.
    failed: bool,
}

/// The result for one fault.
pub(super) struct Row {
    fault: Fault,
    /// The checks of each process.
    histories: Vec<Vec<Check>>,
    /// When the fault ended.
    ended: u64,
}

/// Checks with each mode during a fault and after it until Redis denies. The fault lasts for `time`, or longer until there are
/// enough checks.
pub(super) async fn run(fault: Fault, setup: Setup, time: Duration) -> Row {
    let mut place = fault.place().await;
    let key = fresh_key(&place).await;
    let processes = Processes::<Check>::start(TEST, &place.url(), setup, 0);
    let all = |holds: &dyn Fn(&[Check], usize) -> bool| {
        processes.all(|checks| (0..MODES.len()).all(|mode| holds(checks, mode)))
    };

    until("Redis decides", || {
        all(&|checks, mode| checks.iter().any(|check| check.mode == mode && !check.failed))
    })
    .await;
    let checked = async {
        processes.order(&key);
        sleep(time).await;
        until("there are enough checks", || {
            let counted = |check: &&Check| !check.before_the_fault;
            all(&|checks, mode| checks.iter().filter(counted).filter(|check| check.mode == mode).count() >= CHECKS)
        })
        .await;
        now()
    };
    let ended = fault.strike(&mut place, &[log(&key)], checked).await;
    let healed = now();
    until("Redis denies each mode in each process", || {
        let denied = |check: &Check| check.sent > healed && !check.failed && !check.admitted;
        all(&|checks, mode| checks.iter().rev().any(|check| check.mode == mode && denied(check)))
    })
    .await;

    let mut histories = processes.stop();
    for checks in &mut histories {
        checks.retain(|check| !check.before_the_fault);
    }
    Row {
        fault,
        histories,
        ended,
    }
}

/// Waits for a condition.
pub(super) async fn until(what: &str, holds: impl Fn() -> bool) {
    let held = async {
        while !holds() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    // Sentinels on a busy machine may pause for half a minute.
    timeout(PATIENCE, held)
        .await
        .unwrap_or_else(|_| panic!("waited too long until {what}"));
}

/// The log of a key in Redis, which has the slot of all logs of the key.
pub(super) fn log(key: &str) -> String {
    format!("quota:1:log/1h:local:{{key={key}}}")
}

/// A key that is not used before the fault. In a cluster it belongs to the node that fails.
pub(super) async fn fresh_key(place: &Place) -> String {
    let Place::Cluster(cluster) = place else {
        return "fresh".to_owned();
    };
    let mut number = 0;
    loop {
        let key = format!("fresh-{number}");
        if Cluster::owner(cluster.slot(&log(&key)).await) == 1 {
            return key;
        }
        number += 1;
    }
}

/// In a process: checks with each mode until its input is closed. A line of input is the key to check from then on.
pub(super) async fn call() {
    let Some((store, _)) = connect().await else {
        return;
    };
    let limiters = MODES.map(|(name, mode)| {
        let policy = Policy::new(name, SlidingLog::per_hour(LIMIT)).failure_mode(mode);
        Limiter::new(store.clone(), policy)
    });
    let mut key = BEFORE.to_owned();
    let (mut ticks, mut checks) = (interval(PAUSE), JoinSet::new());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut orders = tokio::io::BufReader::new(tokio::io::stdin()).lines();
    loop {
        tokio::select! {
            line = orders.next_line() => match line {
                Ok(Some(line)) => key = line,
                _ => break,
            },
            Some(_) = checks.join_next() => {}
            _ = ticks.tick() => for (mode, limiter) in limiters.iter().enumerate() {
                let (limiter, key) = (limiter.clone(), key.clone());
                checks.spawn(async move { report(check(&limiter, mode, key).await) });
            },
        }
    }
    checks.join_all().await;
}

async fn check(limiter: &Limiter, mode: usize, key: String) -> Check {
    let before_the_fault = key == BEFORE;
    let (sent, started) = (now(), Instant::now());
    let decision = limiter.check(key).await;
    Check {
        mode,
        before_the_fault,
        sent,
        decided: sent + started.elapsed().as_micros() as u64,
        admitted: decision.as_ref().is_ok_and(|decision| decision.is_allowed()),
        failed: decision.map_or(true, |decision| decision.store_error().is_some()),
    }
}

impl Row {
    pub(super) const HEAD: &str = "\
| Redis is | requests | `Local` | `local_share(1, 3)` | `Open` | `Closed` |
| --- | --- | --- | --- | --- | --- |";

    /// Asserts the promise of each mode.
    pub(super) fn verify(&self) {
        for (position, (name, mode)) in MODES.into_iter().enumerate() {
            self.verify_mode(position, mode, &format!("{}, {name}", self.fault));
        }
    }

    fn verify_mode(&self, position: usize, mode: FailureMode, what: &str) {
        let processes = PROCESSES as u64;
        // What a process admits of the checks that the store failed, from empty counts.
        let promise = |failed: u64| match mode {
            FailureMode::Local => failed.min(LIMIT),
            FailureMode::LocalShare { .. } => failed.min(LIMIT / processes),
            FailureMode::Open => failed,
            FailureMode::Closed => 0,
            other => unreachable!("{other} is not measured"),
        };
        for checks in &self.histories {
            let checks = checks.iter().filter(|check| check.mode == position && check.failed);
            let failed = checks.clone().count() as u64;
            let admitted = checks.filter(|check| check.admitted).count() as u64;
            assert_eq!(admitted, promise(failed), "{what}: {failed} checks failed");
        }

        // The key is not used before the fault, so only counts that are lost in a failover can be admitted again.
        let most = match self.fault {
            Fault::SentinelFailover | Fault::ClusterFailover => 2 * LIMIT,
            _ => LIMIT,
        };
        let by_redis = self.count(position, |check| check.admitted && !check.failed);
        assert!(by_redis <= most, "{what}: Redis admitted {by_redis}");

        if self.fault.is_outage() {
            let during = |check: &Check| check.decided <= self.ended;
            let failed = self.count(position, |check| during(check) && check.failed);
            assert!(failed >= processes * CHECKS as u64, "{what}: {failed} checks failed");
            let admitted = self.count(position, |check| during(check) && check.admitted);
            let most = match mode {
                FailureMode::Open => failed,
                _ => processes * promise(u64::MAX),
            };
            assert_eq!(admitted, most, "{what}: in an outage");
        }
    }

    fn count(&self, mode: usize, counts: impl Fn(&Check) -> bool) -> u64 {
        let checks = self.histories.iter().flatten();
        checks.filter(|check| check.mode == mode && counts(check)).count() as u64
    }
}

/// A row of the table, in multiples of the limit.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = |checks: u64| checks as f64 / LIMIT as f64;
        let during = |check: &Check| check.decided <= self.ended;
        let requests = self.count(0, during);
        write!(f, "| {} | {:.2} |", self.fault, limits(requests))?;
        for mode in 0..MODES.len() {
            let first = self.count(mode, |check| check.admitted && during(check));
            let all = self.count(mode, |check| check.admitted);
            write!(f, " {:.2}, {:.2} |", limits(first), limits(all))?;
        }
        Ok(())
    }
}

/// A line of a report, which [`FromStr`] reads.
impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            mode, sent, decided, ..
        } = self;
        let [before, admitted, failed] = [self.before_the_fault, self.admitted, self.failed].map(u64::from);
        write!(f, "{mode} {before} {sent} {decided} {admitted} {failed}")
    }
}

impl FromStr for Check {
    type Err = ParseIntError;

    fn from_str(line: &str) -> Result<Self, ParseIntError> {
        let numbers = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        let [mode, before, sent, decided, admitted, failed] = numbers[..] else {
            panic!("{line:?} is not a check");
        };
        Ok(Self {
            mode: mode as usize,
            before_the_fault: before == 1,
            sent,
            decided,
            admitted: admitted == 1,
            failed: failed == 1,
        })
    }
}
