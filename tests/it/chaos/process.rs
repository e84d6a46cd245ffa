use std::{
    env,
    fmt::Debug,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    str::FromStr,
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::SystemTime,
};

use tower_quota::{ClientLibrary, RedisStore};

use super::run::Setup;
use crate::support::this_binary;

/// Processes of an application that report each of their checks as a line.
pub(super) struct Processes<C>(Vec<Process<C>>);

/// This test binary again, which runs one test only.
struct Process<C> {
    child: Child,
    /// The process ends when this is closed.
    orders: Option<ChildStdin>,
    checks: Arc<Mutex<Vec<C>>>,
    reading: Option<thread::JoinHandle<()>>,
}

/// How many processes run.
pub(super) const PROCESSES: usize = 3;

/// The environment variable with the setup of a process.
const SETUP: &str = "TOWER_QUOTA_CHAOS";
/// The start of each line that is a report. The test harness prints other lines.
const REPORT: &str = "process: ";

impl<C: FromStr<Err: Debug> + Send + 'static> Processes<C> {
    /// Starts the processes with this test and waits until all are connected.
    ///
    /// The test receives `argument` from [`connect`].
    pub(super) fn start(test: &str, url: &str, setup: Setup, argument: u64) -> Self {
        let setup = format!("{url} {:?} {} {argument}", setup.library, setup.together);
        let starting: Vec<_> = (0..PROCESSES).map(|_| spawn(test, &setup)).collect();
        Self(starting.into_iter().map(Process::listen).collect())
    }

    /// Whether this holds for the checks of each process so far.
    pub(super) fn all(&self, holds: impl Fn(&[C]) -> bool) -> bool {
        self.0.iter().all(|process| holds(&process.checks()))
    }

    /// Writes a line to the input of each process.
    pub(super) fn order(&self, line: &str) {
        for process in &self.0 {
            let mut orders = process.orders.as_ref().expect("the input is open until the end");
            writeln!(orders, "{line}").expect("the process reads its input");
        }
    }

    /// The resident memory of the largest process, in KiB.
    pub(super) fn memory(&self) -> u64 {
        let memory = self.0.iter().map(|process| {
            let ps = Command::new("ps")
                .args(["-o", "rss=", "-p", &process.child.id().to_string()])
                .output()
                .expect("ps runs");
            let text = String::from_utf8_lossy(&ps.stdout);
            text.trim().parse().expect("ps prints a number")
        });
        memory.max().unwrap_or_default()
    }

    /// Ends the processes and returns the checks of each.
    pub(super) fn stop(mut self) -> Vec<Vec<C>> {
        for process in &mut self.0 {
            process.orders = None;
        }
        let histories = self.0.iter_mut().map(|process| {
            let reading = process.reading.take().expect("it is read once");
            reading.join().expect("a process reports all checks");
            std::mem::take(&mut *process.checks())
        });
        histories.collect()
    }
}

fn spawn(test: &str, setup: &str) -> Child {
    this_binary(test)
        .env(SETUP, setup)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this binary starts")
}

impl<C: FromStr<Err: Debug> + Send + 'static> Process<C> {
    /// Waits for the first report and collects all others.
    fn listen(mut child: Child) -> Self {
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut reports = stdout.lines().filter_map(|line| {
            let line = line.expect("a process prints text");
            line.split_once(REPORT).map(|(_, report)| report.to_owned())
        });
        assert_eq!(reports.next().as_deref(), Some("ready"), "a process is connected");

        let checks = Arc::new(Mutex::new(Vec::new()));
        let collected = checks.clone();
        let reading = thread::spawn(move || {
            for report in reports {
                let check = report.parse().expect("a check");
                collected.lock().expect("no thread panics").push(check);
            }
        });
        Self {
            orders: child.stdin.take(),
            child,
            checks,
            reading: Some(reading),
        }
    }
}

impl<C> Process<C> {
    fn checks(&self) -> MutexGuard<'_, Vec<C>> {
        self.checks.lock().expect("no thread panics")
    }
}

impl<C> Drop for Process<C> {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

/// Microseconds since the Unix epoch, by the clock of the processes.
pub(super) fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.expect("a time after 1970").as_micros() as u64
}

/// In a process: the store that its setup describes and the argument; `None` in the test run itself.
pub(super) async fn connect() -> Option<(RedisStore, u64)> {
    let setup = env::var(SETUP).ok()?;
    let [url, library, together, argument] = setup.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{setup:?} is not a setup");
    };
    let library = match library {
        "Fred" => ClientLibrary::Fred,
        _ => ClientLibrary::RedisRs,
    };
    let together = together == "true";
    let store = Setup { library, together }.connect(url).await;
    store.ready().await.expect("Redis replies");
    report("ready");
    Some((store, argument.parse().expect("a number")))
}

/// In a process: reports a check.
pub(super) fn report(check: impl std::fmt::Display) {
    println!("{REPORT}{check}");
}
