use std::{
    env,
    io::{BufRead, BufReader},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant, SystemTime},
};

use tokio::{
    io::AsyncBufReadExt,
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};
use tower_quota::{
    ClientLibrary, Key, RedisStore,
    store::{Charge, ErrorKind, Operation, Reply, Request, Store, StoreError},
};

use super::{
    history::{Check, KEYS, POLICY, Quota, Told, quotas},
    run::Setup,
};

/// Processes of an application that check at a steady rate, whatever becomes of it.
pub(super) struct Callers(Vec<Caller>);

/// It is this test binary again, told to run nothing but [`call`].
struct Caller {
    process: Child,
    orders: Option<ChildStdin>,
    checks: Arc<Mutex<Vec<Check>>>,
    reading: Option<thread::JoinHandle<()>>,
}

const CALLERS: usize = 3;
/// How often a caller checks, and how many times at once: half of them the same as the other half.
const PAUSE: Duration = Duration::from_millis(20);
const CHECKS: usize = 4;

/// Where a caller is to count, and how.
const ORDERS: &str = "TOWER_QUOTA_CHAOS";
/// What its reports begin with, since the test harness prints too.
const REPORT: &str = "caller: ";
/// The test that calls [`call`].
const TEST: &str = "chaos::a_caller_checks_until_it_is_told_to_stop";

impl Callers {
    /// How many checks they make in this time.
    pub(super) fn checks_in(time: Duration) -> u64 {
        (CALLERS * CHECKS) as u64 * (time.as_millis() / PAUSE.as_millis()) as u64
    }

    /// Starts them, and waits until all are connected.
    pub(super) fn start(url: &str, setup: Setup, checks: u64) -> Self {
        let orders = format!("{url} {:?} {} {checks}", setup.library, setup.together);
        let starting: Vec<_> = (0..CALLERS).map(|_| Caller::spawn(&orders)).collect();
        Self(starting.into_iter().map(Caller::listen).collect())
    }

    /// Whether each of them has heard from Redis of each key since then.
    pub(super) fn are_answered_since(&self, since: u64) -> bool {
        self.0.iter().all(|caller| {
            let checks = caller.checks();
            let answered = |key| {
                let mut latest = checks.iter().rev().take_while(|check| check.told_at() > since);
                latest.any(|check| check.key == key && check.sent > since && check.told.is_by_redis())
            };
            (0..KEYS).all(answered)
        })
    }

    /// The resident memory of the largest, in KiB.
    pub(super) fn memory(&self) -> u64 {
        let memory = self.0.iter().map(|caller| {
            let ps = Command::new("ps")
                .args(["-o", "rss=", "-p", &caller.process.id().to_string()])
                .output()
                .expect("ps runs");
            let text = String::from_utf8_lossy(&ps.stdout);
            text.trim().parse().expect("ps prints a number")
        });
        memory.max().unwrap_or_default()
    }

    /// Ends them, and hands out all that each was told.
    pub(super) fn stop(mut self) -> Vec<Vec<Check>> {
        for caller in &mut self.0 {
            caller.orders = None;
        }
        let histories = self.0.iter_mut().map(|caller| {
            let reading = caller.reading.take().expect("it is read once");
            reading.join().expect("a caller reports in full");
            let mut checks = std::mem::take(&mut *caller.checks());
            checks.sort_by_key(|check| check.sent);
            checks
        });
        histories.collect()
    }
}

impl Caller {
    fn spawn(orders: &str) -> Child {
        Command::new(env::current_exe().expect("this binary"))
            .args(["--exact", TEST, "--nocapture"])
            .env(ORDERS, orders)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this binary starts")
    }

    /// Waits for the first report, and collects all others.
    fn listen(mut process: Child) -> Self {
        let stdout = BufReader::new(process.stdout.take().expect("a pipe"));
        let mut reports = stdout.lines().filter_map(|line| {
            let line = line.expect("a caller prints text");
            line.split_once(REPORT).map(|(_, report)| report.to_owned())
        });
        assert_eq!(reports.next().as_deref(), Some("ready"), "a caller is connected");

        let checks = Arc::new(Mutex::new(Vec::new()));
        let collected = checks.clone();
        let reading = thread::spawn(move || {
            for report in reports {
                let check = report.parse().expect("a check");
                collected.lock().expect("nobody panics").push(check);
            }
        });
        Self {
            orders: process.stdin.take(),
            process,
            checks,
            reading: Some(reading),
        }
    }

    fn checks(&self) -> MutexGuard<'_, Vec<Check>> {
        self.checks.lock().expect("nobody panics")
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        // Without orders it goes home.
        drop(self.orders.take());
        let _ = self.process.wait();
    }
}

/// Microseconds since the Unix epoch, by the clock of the callers.
pub(super) fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.expect("a time after 1970").as_micros() as u64
}

/// The caller's side: checks until nobody gives orders anymore.
pub(super) async fn call() {
    let Ok(orders) = env::var(ORDERS) else {
        return;
    };
    let [url, library, together, checks] = orders.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{orders:?} are no orders");
    };
    let library = match library {
        "Fred" => ClientLibrary::Fred,
        _ => ClientLibrary::RedisRs,
    };
    let together = together == "true";
    let store = RedisStore::builder()
        .client_library(library)
        .group_commit(together)
        .deny_cache(together)
        .connect(url)
        .await
        .expect("the URL is good");
    store.ready().await.expect("Redis answers");
    println!("{REPORT}ready");

    let quotas: Arc<[Quota]> = quotas(checks.parse().expect("a number")).into();
    let (mut ticks, mut checks) = (interval(PAUSE), JoinSet::new());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let begun = Instant::now();
    let mut pairs = (0..KEYS).cycle();
    let mut orders = tokio::io::BufReader::new(tokio::io::stdin()).lines();
    loop {
        tokio::select! {
            _ = orders.next_line() => break,
            Some(_) = checks.join_next() => {}
            _ = ticks.tick() => for key in pairs.by_ref().take(CHECKS / 2) {
                for _ in 0..2 {
                    let (store, quotas) = (store.clone(), quotas.clone());
                    checks.spawn(async move { println!("{REPORT}{}", check(&store, &quotas, key, begun).await) });
                }
            },
        }
    }
    checks.join_all().await;
}

async fn check(store: &RedisStore, quotas: &[Quota], key: usize, begun: Instant) -> Check {
    let (sent, started) = (now(), Instant::now());
    let name = Key::from(Quota::name(key));
    let charges = [Charge::new(POLICY, &quotas[key].limit, &name, 1)];
    let told = match store.decide(&[Request::new(Operation::Check, &charges)]) {
        // What is answered at once was not sent.
        Reply::Ready(Ok(_)) => Told::DeniedFromMemory,
        Reply::Ready(Err(_)) => Told::NotAsked,
        Reply::Pending(answer) => match answer.await {
            Ok(answer) if answer.outcomes[0].allowed => {
                let at = answer.outcomes[0].verdicts[0].decided_at.unwrap_or(answer.server_time);
                Told::Admitted(at.as_micros() as u64)
            }
            Ok(_) => Told::Denied,
            Err(error) => failed(&error),
        },
    };
    Check {
        key,
        sent,
        after: started - begun,
        took: started.elapsed(),
        told,
    }
}

fn failed(error: &StoreError) -> Told {
    match error.kind() {
        ErrorKind::Refused => Told::Refused,
        _ => Told::Nothing,
    }
}
