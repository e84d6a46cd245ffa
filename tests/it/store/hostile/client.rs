use std::{
    env, fs,
    io::{self, Read},
    os::unix::process::ExitStatusExt,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::time::timeout;
use tower_quota::{AcquireError, ClientLibrary, Decision, Limiter, Policy, RedisStore, SlidingLog};

use crate::support::PATIENCE;

/// The environment variables with the URL of its server and its client library.
const URL: &str = "TOWER_QUOTA_HOSTILE_URL";
const LIBRARY: &str = "TOWER_QUOTA_HOSTILE_LIBRARY";
/// The start of the line that is its report. The test harness prints other lines.
const REPORT: &str = "report: ";
/// The test that calls [`work`].
const TEST: &str = "store::hostile::an_application_uses_the_server_that_it_is_given";

/// The bounds of the process: its address space, and its descriptors.
const ADDRESS_SPACE_KB: u64 = 4 << 20;
const DESCRIPTORS: u64 = 256;
/// The longest wait that a request allows, and the time for a reply.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_secs(1);
/// A wait of this length is one that does not end.
const ENDLESS: Duration = Duration::from_secs(60);
/// How long it uses the server, at least.
const TIME: Duration = Duration::from_millis(1_500);

/// What a process with bounds has seen of its server.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// The checks that the server has decided.
    pub(super) decided: usize,
    /// The checks for which the store has failed.
    pub(super) failed: usize,
    pub(super) slowest: Duration,
    /// The largest growth of its memory, in megabytes.
    pub(super) megabytes: usize,
    /// The most descriptors at a time.
    pub(super) descriptors: usize,
    /// The bytes of the longest error, and of the longest line of the log.
    pub(super) longest_error: usize,
    pub(super) longest_line: usize,
    /// The last error.
    pub(super) error: String,
}

/// Runs an application that uses this server. An error is the signal that has ended it.
pub(super) fn run(url: &str, library: ClientLibrary) -> Result<Report, i32> {
    let mut child = Command::new("sh")
        .args([
            "-c",
            r#"ulimit -c 0 && ulimit -v "$0" && ulimit -n "$1" && shift && exec "$@""#,
        ])
        .args([ADDRESS_SPACE_KB, DESCRIPTORS].map(|bound| bound.to_string()))
        .arg(env::current_exe().expect("this binary"))
        .args(["--exact", TEST, "--nocapture"])
        .env(URL, url)
        .env(
            LIBRARY,
            if library == ClientLibrary::Fred {
                "fred"
            } else {
                "redis-rs"
            },
        )
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    let outputs = [
        read_all(child.stdout.take().expect("a pipe")),
        read_all(child.stderr.take().expect("a pipe")),
    ];
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
        if started.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            panic!("it has not ended after {PATIENCE:?}");
        }
        thread::sleep(Duration::from_millis(10));
    };
    let [stdout, stderr] = outputs.map(|output| output.join().expect("a reader"));
    if let Some(signal) = status.signal() {
        return Err(signal);
    }
    let report = stdout.lines().find_map(|line| line.split_once(REPORT));
    let (_, report) = report.unwrap_or_else(|| panic!("no report, {status}: {stdout}\n{stderr}"));
    Ok(Report::parse(report))
}

fn read_all(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

impl Report {
    fn parse(text: &str) -> Self {
        let mut words = text.splitn(8, ' ');
        let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
        Self {
            decided: number(),
            failed: number(),
            slowest: Duration::from_millis(number() as u64),
            megabytes: number(),
            descriptors: number(),
            longest_error: number(),
            longest_line: number(),
            error: words.next().unwrap_or_default().to_owned(),
        }
    }

    fn print(&self) {
        let slowest = self.slowest.as_millis();
        println!(
            "{REPORT}{} {} {slowest} {} {} {} {} {}",
            self.decided,
            self.failed,
            self.megabytes,
            self.descriptors,
            self.longest_error,
            self.longest_line,
            self.error.lines().next().unwrap_or_default(),
        );
    }

    fn record(&mut self, decision: Option<&Decision>) {
        let error = decision.and_then(Decision::store_error);
        match error {
            None => self.decided += 1,
            Some(error) => {
                let mut text = error.to_string();
                let mut source = std::error::Error::source(error);
                while let Some(error) = source {
                    text = format!("{text}: {error}");
                    source = error.source();
                }
                self.failed += 1;
                self.longest_error = self.longest_error.max(text.len());
                text = text.chars().take(200).collect();
                self.error = text;
            }
        }
    }
}

/// In the process: uses the server, then reports.
pub(super) async fn work() {
    let (Ok(url), Ok(library)) = (env::var(URL), env::var(LIBRARY)) else {
        return;
    };
    let library = match &*library {
        "fred" => ClientLibrary::Fred,
        _ => ClientLibrary::RedisRs,
    };
    let longest_line = Arc::<Mutex<LongestLine>>::default();
    let writer = longest_line.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || Line(writer.clone()))
        .init();
    let descriptors = Arc::<AtomicUsize>::default();
    watch_descriptors(descriptors.clone());

    let memory = peak_kilobytes();
    let builder = RedisStore::builder().client_library(library).deadline(DEADLINE);
    let builder = builder.connect_timeout(Duration::from_millis(500)).deny_cache(false);
    let store = builder.url(&url).connect_lazy().expect("the URL is good");
    let limiter = Limiter::new(store, Policy::new("hostile", SlidingLog::per_hour(5)));

    let (mut report, started) = (Report::default(), Instant::now());
    while report.failed + report.decided < 60 || started.elapsed() < TIME {
        let sent = Instant::now();
        let decision = timeout(ENDLESS, limiter.check("k")).await;
        report.record(decision.expect("a check ends").ok().as_ref());

        match timeout(ENDLESS, limiter.request("k").wait_up_to(LONGEST_WAIT).acquire()).await {
            Ok(Ok(permit)) => report.record(Some(&permit)),
            Ok(Err(AcquireError::Denied(denied))) => report.record(Some(denied.decision())),
            Ok(Err(error)) => panic!("the process counts by itself: {error}"),
            // A wait that does not end is one that the server has decided.
            Err(_) => report.decided += 1,
        }
        report.slowest = report.slowest.max(sent.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    report.megabytes = (peak_kilobytes() - memory) / 1_024;
    report.descriptors = descriptors.load(Ordering::Relaxed);
    report.longest_line = longest_line.lock().expect("no writer panics").longest;
    report.print();
}

/// The most memory that the process has had.
fn peak_kilobytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").expect("the status of the process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.expect("a number of kilobytes")
}

fn watch_descriptors(most: Arc<AtomicUsize>) {
    thread::spawn(move || {
        loop {
            // An error means that none is left.
            let count = fs::read_dir("/proc/self/fd").map_or(DESCRIPTORS as usize, Iterator::count);
            most.fetch_max(count, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(5));
        }
    });
}

#[derive(Default)]
struct LongestLine {
    longest: usize,
}

struct Line(Arc<Mutex<LongestLine>>);

impl io::Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut line = self.0.lock().expect("no writer panics");
        line.longest = line.longest.max(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
