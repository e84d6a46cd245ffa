//! Units that are taken ahead, during a fault: what is lost or late is used by no request.

use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, interval, sleep},
};
use tower_quota::{
    FixedWindow, Key, Limit, RedisStore, SlidingLog, TokenBucket,
    store::{Charge, Operation, Store, StoreRequest},
};

use super::{
    fault::{Fault, Leaves},
    history::most_within,
    modes::{fresh_key, log, until},
    run::Setup,
};

const N: u64 = 400;
const WINDOW: Duration = Duration::from_secs(1);
const TIME: Duration = Duration::from_millis(50);
/// How many stores there are, how many tasks each has for a limit, and the time between two requests of a task.
const REPLICAS: usize = 3;
const TASKS: usize = 2;
const PAUSE: Duration = Duration::from_millis(5);
/// For how long they send three times what is admitted, and for how long nothing, so that there is room to take units of.
const BUSY_MS: u128 = 400;
const IDLE_MS: u128 = 300;

/// The limits, and the most that each admits in any window.
fn limits() -> [(Limit, u64); 3] {
    [
        (SlidingLog::new(N, WINDOW).precision(20).prefetch(TIME).into(), N),
        (FixedWindow::new(N, WINDOW).prefetch(TIME).into(), 2 * N - 1),
        (TokenBucket::new(N, WINDOW).prefetch(TIME).into(), 2 * N - 1),
    ]
}

/// The result for one fault.
pub(super) struct Row {
    fault: Fault,
    /// Of each limit.
    tallies: Vec<Tally>,
}

/// The replies about one limit.
#[derive(Default)]
struct Tally {
    /// When each request that was admitted was sent and when it was answered, in microseconds, and its cost.
    admitted: Vec<(u64, u64, u64)>,
    /// How many of them needed no call.
    ahead: usize,
    errors: usize,
}

/// What the tasks of all replicas have seen of one limit.
#[derive(Default)]
struct Seen {
    tally: Mutex<Tally>,
    ends: AtomicBool,
}

/// Sends requests during a fault that lasts for `time`, and before and after it until some are admitted without a call.
pub(super) async fn run(fault: Fault, setup: Setup, time: Duration) -> Row {
    let mut place = fault.place().await;
    let key = fresh_key(&place).await;
    let seen: Vec<_> = limits().iter().map(|_| Arc::<Seen>::default()).collect();
    let (mut tasks, started) = (JoinSet::new(), Instant::now());
    for _ in 0..REPLICAS {
        let store = setup.connect(&place.url()).await;
        for ((limit, _), seen) in limits().into_iter().zip(&seen) {
            for _ in 0..TASKS {
                let send = send(
                    store.clone(),
                    limit.clone(),
                    Key::from(key.clone()),
                    seen.clone(),
                    started,
                );
                tasks.spawn(send);
            }
        }
    }

    let ahead = || -> Vec<usize> {
        seen.iter()
            .map(|seen| seen.tally.lock().expect("no panic").ahead)
            .collect()
    };
    let takes_ahead = async |what: &str| {
        let before = ahead();
        until(what, || ahead().iter().zip(&before).all(|(now, before)| now > before)).await;
    };
    takes_ahead("units are taken ahead").await;
    fault.strike(&mut place, &[log(&key)], sleep(time)).await;
    takes_ahead("units are taken ahead again").await;
    sleep(WINDOW).await;

    for seen in &seen {
        seen.ends.store(true, Ordering::Relaxed);
    }
    tasks.join_all().await;
    let tallies = seen
        .iter()
        .map(|seen| std::mem::take(&mut *seen.tally.lock().expect("no panic")));
    Row {
        fault,
        tallies: tallies.collect(),
    }
}

async fn send(store: RedisStore, limit: Limit, key: Key, seen: Arc<Seen>, started: Instant) {
    let mut ticks = interval(PAUSE);
    while !seen.ends.load(Ordering::Relaxed) {
        ticks.tick().await;
        let sent = started.elapsed();
        if sent.as_millis() % (BUSY_MS + IDLE_MS) >= BUSY_MS {
            continue;
        }
        let charges = [Charge::new("ahead", &limit, &key, 1)];
        let reply = store
            .decide(&[StoreRequest::new(Operation::Check, &charges)])
            .try_ready();
        let (is_ahead, reply) = match reply {
            Ok(reply) => (true, reply),
            Err(later) => (false, later.await),
        };
        let span = (sent.as_micros() as u64, started.elapsed().as_micros() as u64, 1);
        let mut tally = seen.tally.lock().expect("no panic");
        match reply {
            Ok(reply) if reply.outcomes()[0].allowed => {
                tally.admitted.push(span);
                tally.ahead += usize::from(is_ahead);
            }
            Ok(_) => {}
            Err(_) => tally.errors += 1,
        }
    }
}

impl Tally {
    /// How many more than this many were admitted in some window.
    fn over(&self, most: u64) -> u64 {
        most_within(&mut self.admitted.clone(), WINDOW.as_micros() as u64).saturating_sub(most)
    }
}

impl Row {
    pub(super) const HEAD: &str = "\
| Redis is | admitted | of them without a call | errors | admitted above the limit |
| --- | --- | --- | --- | --- |";

    fn over(&self) -> impl Iterator<Item = (Limit, u64)> {
        let limits = limits().into_iter().zip(&self.tallies);
        limits.map(|((limit, most), tally)| (limit, tally.over(most)))
    }

    /// Asserts what must hold, whatever went wrong.
    pub(super) fn verify(&self) {
        let lost = match self.fault.leaves() {
            Leaves::Everything => 0,
            Leaves::Part | Leaves::AnotherTime => N,
        };
        for (limit, over) in self.over() {
            assert!(over <= lost, "{}: {limit}: {over} above the limit", self.fault);
        }
    }

    fn sum(&self, of: impl Fn(&Tally) -> usize) -> usize {
        self.tallies.iter().map(of).sum()
    }
}

/// A row of the table.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (admitted, ahead) = (self.sum(|tally| tally.admitted.len()), self.sum(|tally| tally.ahead));
        let share = 100 * ahead / admitted.max(1);
        let (errors, over) = (self.sum(|tally| tally.errors), self.over().map(|(_, over)| over).max());
        write!(
            f,
            "| {} | {admitted} | {share} % | {errors} | {} |",
            self.fault,
            over.unwrap_or_default()
        )
    }
}
