//! Requests that hold slots, and requests that wait for a limit, during a fault.

use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{task::JoinSet, time::sleep};
use tower_quota::{Concurrency, FailureMode, Limiter, Policy, SlidingLog, Slots};

use super::{
    fault::{Fault, Leaves},
    modes::{fresh_key, log, until},
    run::Setup,
};

/// How many requests may hold slots at once.
const SLOTS: u64 = 4;
const LEASE: Duration = Duration::from_secs(1);
/// How many requests that wait may be admitted in a second.
const QUOTA: usize = 20;
/// How many stores there are, and how many tasks of either kind each has.
const REPLICAS: usize = 3;
const TASKS: usize = 4;

/// The result for one fault.
pub(super) struct Row {
    fault: Fault,
    /// How many requests held slots, and how many at once.
    held: usize,
    held_at_once: usize,
    /// When the requests that waited were admitted, in microseconds by the clock of Redis.
    admissions: Vec<u64>,
}

/// What the tasks of all replicas have seen.
#[derive(Default)]
struct Seen {
    held: Mutex<Held>,
    admissions: Mutex<Vec<u64>>,
    ends: AtomicBool,
}

#[derive(Default)]
struct Held {
    now: Vec<Arc<Slots>>,
    total: usize,
    at_once: usize,
}

impl Held {
    fn add(&mut self, slots: &Arc<Slots>) {
        self.now.push(slots.clone());
        self.total += 1;
        let kept = self.now.iter().filter(|slots| !slots.is_lost()).count();
        self.at_once = self.at_once.max(kept);
    }

    fn remove(&mut self, slots: &Arc<Slots>) {
        self.now.retain(|other| !Arc::ptr_eq(other, slots));
    }
}

/// Runs the tasks during a fault that lasts for `time`, and before and after it until some are admitted.
pub(super) async fn run(fault: Fault, setup: Setup, time: Duration) -> Row {
    let mut place = fault.place().await;
    let key = fresh_key(&place).await;
    let seen = Arc::new(Seen::default());
    let mut tasks = JoinSet::new();
    let mut limiter = None;
    for replica in 0..REPLICAS {
        let store = setup.connect(&place.url()).await;
        let exports = Policy::new("exports", Concurrency::new(SLOTS).lease(LEASE));
        let exports = Limiter::new(store.clone(), exports.failure_mode(FailureMode::Closed));
        let mails = Policy::new("mails", SlidingLog::per_second(QUOTA as u64));
        let mails = Limiter::new(store, mails.failure_mode(FailureMode::Closed));
        for task in 0..TASKS {
            // Some hold their slots for longer than a lease.
            let time = LEASE * (replica * TASKS + task) as u32 / 8;
            tasks.spawn(hold(exports.clone(), key.clone(), time, seen.clone()));
            tasks.spawn(wait(mails.clone(), key.clone(), seen.clone()));
        }
        limiter = Some(exports);
    }

    let admits = async |what: &str| {
        let held = seen.held.lock().expect("no panic").total;
        let admissions = seen.admissions.lock().expect("no panic").len();
        until(what, || {
            let is_held = seen.held.lock().expect("no panic").total > held;
            is_held && seen.admissions.lock().expect("no panic").len() > admissions
        })
        .await;
    };
    admits("Redis admits").await;
    fault.strike(&mut place, &[log(&key)], sleep(time)).await;
    admits("Redis admits again").await;

    seen.ends.store(true, Ordering::Relaxed);
    tasks.join_all().await;
    let limiter = limiter.expect("a replica");
    let free = AtomicBool::new(false);
    let peeking = async {
        loop {
            let peeked = limiter.peek(key.as_str()).await;
            let all = peeked.is_ok_and(|decision| decision.store_error().is_none() && decision.remaining() == SLOTS);
            free.store(all, Ordering::Relaxed);
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = peeking => {}
        () = until("all slots are free", || free.load(Ordering::Relaxed)) => {}
    }

    let held = std::mem::take(&mut *seen.held.lock().expect("no panic"));
    let admissions = std::mem::take(&mut *seen.admissions.lock().expect("no panic"));
    Row {
        fault,
        held: held.total,
        held_at_once: held.at_once,
        admissions,
    }
}

async fn hold(limiter: Limiter, key: String, time: Duration, seen: Arc<Seen>) {
    while !seen.ends.load(Ordering::Relaxed) {
        let decision = limiter.check(key.as_str()).await;
        let Some(slots) = decision.ok().and_then(|decision| decision.take_slots()) else {
            sleep(Duration::from_millis(5)).await;
            continue;
        };
        let slots = Arc::new(slots);
        seen.held.lock().expect("no panic").add(&slots);
        sleep(time).await;
        seen.held.lock().expect("no panic").remove(&slots);
    }
}

async fn wait(limiter: Limiter, key: String, seen: Arc<Seen>) {
    while !seen.ends.load(Ordering::Relaxed) {
        let permit = limiter
            .request(key.as_str())
            .wait_up_to(Duration::from_secs(2))
            .acquire()
            .await;
        let Ok(permit) = permit else {
            sleep(Duration::from_millis(5)).await;
            continue;
        };
        let at = permit.server_time().as_micros() as u64;
        seen.admissions.lock().expect("no panic").push(at);
    }
}

impl Row {
    pub(super) const HEAD: &str = "\
| Redis is | requests that held slots | most at once, of 4 | requests that waited | most of them in a second, of 20 |
| --- | --- | --- | --- | --- |";

    /// The most admissions in any second.
    fn admissions_in_a_second(&self) -> usize {
        let mut admissions = self.admissions.clone();
        admissions.sort_unstable();
        let ends = |from: usize| admissions.partition_point(|at| *at < admissions[from] + 1_000_000);
        (0..admissions.len())
            .map(|from| ends(from) - from)
            .max()
            .unwrap_or_default()
    }

    /// Asserts what `docs/faults.md` promises.
    pub(super) fn verify(&self) {
        let times = match self.fault.leaves() {
            Leaves::Everything => 1,
            Leaves::Part | Leaves::AnotherTime => 2,
        };
        let Self {
            fault, held_at_once, ..
        } = self;
        assert!(
            *held_at_once <= times * SLOTS as usize,
            "{fault}: {held_at_once} at once"
        );
        let admissions = self.admissions_in_a_second();
        assert!(
            admissions <= times * QUOTA,
            "{fault}: {admissions} admissions in a second"
        );
    }
}

/// A row of the table.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            fault,
            held,
            held_at_once,
            admissions,
        } = self;
        let waited = admissions.len();
        write!(
            f,
            "| {fault} | {held} | {held_at_once} | {waited} | {} |",
            self.admissions_in_a_second()
        )
    }
}
