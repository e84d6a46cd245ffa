use std::{
    env,
    io::{BufRead, BufReader, Lines, Write, stdin},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, SystemTime},
};

use tokio::task::JoinSet;
use tower_quota::{ClientLibrary, Limiter, Policy, SlidingLog};

use super::{Faketime, Redis, connected, patient, this_binary};

/// Another process of an application, with its own connection to the Redis of the test.
///
/// It is this test binary, started to run [`work`] only.
pub(crate) struct Worker {
    process: Child,
    orders: Option<ChildStdin>,
    reports: Lines<BufReader<ChildStdout>>,
    clock: Duration,
}

/// The environment variable with the URL of its Redis.
const URL: &str = "TOWER_QUOTA_WORKER_REDIS";
/// Set if it uses redis-rs.
const REDIS_RS: &str = "TOWER_QUOTA_WORKER_REDIS_RS";
/// The start of each line that is a report. The test harness prints other lines.
const REPORT: &str = "worker: ";
/// The test that calls [`work`].
const TEST: &str = "decide::admission::a_worker_checks_what_it_is_sent";

impl Worker {
    pub(crate) fn start(redis: &Redis) -> Self {
        Self::spawn(this_binary(TEST), &redis.url())
    }

    /// Starts one on a host that trusts nothing but this certificate.
    pub(crate) fn start_trusting(url: &str, library: ClientLibrary, certificate: &Path) -> Self {
        let mut command = this_binary(TEST);
        command.env("SSL_CERT_FILE", certificate);
        if library == ClientLibrary::RedisRs {
            command.env(REDIS_RS, "1");
        }
        Self::spawn(command, url)
    }

    /// Starts one on a host with a clock that is an hour fast.
    pub(crate) fn start_an_hour_ahead(redis: &Redis) -> Self {
        let mut command = this_binary(TEST);
        command
            .env("LD_PRELOAD", Faketime::library())
            .env("FAKETIME", "+1h")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        Self::spawn(command, &redis.url())
    }

    fn spawn(mut command: Command, url: &str) -> Self {
        let mut process = command
            .env(URL, url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let orders = process.stdin.take();
        let stdout = process.stdout.take().expect("a pipe");

        let mut worker = Self {
            process,
            orders,
            reports: BufReader::new(stdout).lines(),
            clock: Duration::ZERO,
        };
        worker.clock = Duration::from_secs(worker.report()[0]);
        worker
    }

    /// The time since the Unix epoch by the clock of the worker.
    pub(crate) fn clock(&self) -> Duration {
        self.clock
    }

    /// Makes the worker check this many times at once, against a limit per hour.
    pub(crate) fn order(&mut self, key: &str, limit: u64, requests: u64) {
        let orders = self
            .orders
            .as_mut()
            .expect("the input is open until the worker is dropped");
        writeln!(orders, "{key} {limit} {requests}").expect("the worker reads its input");
    }

    /// The number of admitted checks, and the longest wait of a denied one.
    pub(crate) fn outcome(&mut self) -> (u64, Duration) {
        let report = self.report();
        (report[0], Duration::from_micros(report[1]))
    }

    fn report(&mut self) -> Vec<u64> {
        let line = self
            .reports
            .by_ref()
            .map(|line| line.expect("the worker prints text"))
            .find_map(|line| line.split_once(REPORT).map(|(_, report)| report.to_owned()))
            .expect("the worker reports");
        line.split(' ').map(|word| word.parse().expect("a number")).collect()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It ends when its input is closed.
        drop(self.orders.take());
        let _ = self.process.wait();
    }
}

/// In the worker: reports the time, then checks as ordered until the input is closed.
pub(crate) async fn work() {
    let Ok(url) = env::var(URL) else {
        return;
    };
    let mut builder = patient();
    if env::var(REDIS_RS).is_ok() {
        builder = builder.client_library(ClientLibrary::RedisRs);
    }
    let store = connected(builder, &url).await;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    println!("{REPORT}{}", now.expect("a time after 1970").as_secs());

    for order in stdin().lines() {
        let order = order.expect("orders are text");
        let mut words = order.split(' ');
        let mut word = || words.next().expect("an order has three words");
        let (key, limit, requests) = (word(), word(), word());

        let limit = SlidingLog::per_hour(limit.parse().expect("a number"));
        let limiter = Limiter::new(store.clone(), Policy::new("test", limit));
        let mut checks = JoinSet::new();
        for _ in 0..requests.parse().expect("a number") {
            let (limiter, key) = (limiter.clone(), key.to_owned());
            checks.spawn(async move { limiter.check(key).await.expect("Redis answers") });
        }

        let decisions = checks.join_all().await;
        let admitted = decisions.iter().filter(|decision| decision.is_allowed()).count();
        let wait = decisions.iter().filter_map(|decision| decision.retry_after()).max();
        println!("{REPORT}{admitted} {}", wait.unwrap_or_default().as_micros());
    }
}
