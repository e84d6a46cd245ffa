//! Three processes wait for one limit in Redis: what they wait, in which order, and how many checks that takes.

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use tokio::{task::JoinSet, time::Instant};
use tower_quota::{Limiter, Policy, SlidingLog, TokenBucket};

use crate::support::{Redis, connected, patient};

/// The environment variables of a worker: the URL of its Redis, and the limit.
const URL: &str = "TOWER_QUOTA_WAITING_REDIS";
const LIMIT: &str = "TOWER_QUOTA_WAITING_LIMIT";
/// The start of each line that is a report.
const REPORT: &str = "admitted: ";
/// The test that is the worker.
const TEST: &str = "check::wait_processes::a_worker_acquires_what_it_is_started_for";

const PROCESSES: usize = 3;
const TASKS: usize = 10;
const CALLS: usize = 4;

/// A call of a worker, in microseconds of the clock of Redis.
#[derive(Clone, Copy, Debug)]
struct Call {
    checked_at: u64,
    turn: u64,
    /// How much later than the turn the caller went on, by the clock of its process.
    late: u64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_acquires_what_it_is_started_for() {
    let (Ok(url), Ok(limit)) = (env::var(URL), env::var(LIMIT)) else {
        return;
    };
    let policy = Policy::new("mails", limit.parse::<tower_quota::Limit>().expect("a limit"));
    let limiter = Limiter::new(connected(patient(), &url).await, policy);
    let _ = limiter.peek("smtp").await.expect("Redis answers");
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            for _ in 0..CALLS {
                let asked = Instant::now();
                let permit = limiter
                    .request("smtp")
                    .max_wait(Duration::from_secs(60))
                    .acquire()
                    .await
                    .expect("it may wait");
                let decision = permit;
                let late = asked.elapsed().saturating_sub(decision.delay());
                let (checked_at, delay) = (decision.server_time().as_micros(), decision.delay().as_micros());
                println!("{REPORT}{checked_at} {} {}", checked_at + delay, late.as_micros());
            }
        });
    }
    tasks.join_all().await;
}

/// Runs the workers on a limit, and returns their calls and the number of script calls that Redis has run for them.
async fn run(limit: &str) -> (Vec<Call>, u64) {
    let redis = Redis::start();
    // The script is known, and the workers are connected before they check.
    let store = connected(patient(), &redis.url()).await;
    drop(store);
    let before = script_calls(&redis).await;
    let workers = (0..PROCESSES).map(|_| {
        let mut worker = Command::new(env::current_exe().expect("this binary"))
            .args(["--exact", TEST, "--nocapture"])
            .env(URL, redis.url())
            .env(LIMIT, limit)
            .stdout(Stdio::piped())
            .spawn()
            .expect("a worker");
        let stdout = worker.stdout.take().expect("a pipe");
        thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map(|line| line.expect("text"));
            let calls = lines.filter_map(|line| {
                let (_, report) = line.split_once(REPORT)?;
                let mut numbers = report.split(' ').map(|word| word.parse().expect("a number"));
                let mut number = || numbers.next().expect("three numbers");
                Some(Call {
                    checked_at: number(),
                    turn: number(),
                    late: number(),
                })
            });
            let calls: Vec<Call> = calls.collect();
            assert!(worker.wait().expect("the worker ends").success());
            calls
        })
    });
    let workers: Vec<_> = workers.collect();
    let calls = tokio::task::spawn_blocking(move || {
        workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("no panic"))
            .collect::<Vec<_>>()
    });
    let calls = calls.await.expect("no panic");
    (calls, script_calls(&redis).await - before)
}

/// How many scripts Redis has run.
async fn script_calls(redis: &Redis) -> u64 {
    let info: String = redis.command("INFO", ["commandstats"]).await;
    let calls = info
        .lines()
        .filter(|line| line.starts_with("cmdstat_evalsha:") || line.starts_with("cmdstat_eval:"));
    calls
        .filter_map(|line| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok())
        .sum()
}

fn verify(calls: &mut [Call], script_calls: u64, ideal: Duration) {
    assert_eq!(calls.len(), PROCESSES * TASKS * CALLS);
    // Each process connects, which is a trial, and peeks.
    let checks = script_calls.saturating_sub(4 * PROCESSES as u64);
    let longest = calls
        .iter()
        .map(|call| Duration::from_micros(call.turn - call.checked_at))
        .max();
    let longest = longest.expect("calls");
    let late = calls.iter().map(|call| call.late).max();
    println!(
        "{checks} checks of {} calls, longest wait {longest:?} of {ideal:?}, at most {late:?} us late",
        calls.len()
    );
    assert!(checks * 10 <= calls.len() as u64 * 11, "{checks} checks");
    assert!(longest.mul_f64(100.0) <= ideal.mul_f64(115.0), "{longest:?}");

    // Admitted in the order of the checks, by the clock of Redis.
    calls.sort_by_key(|call| (call.checked_at, call.turn));
    for pair in calls.windows(2) {
        assert!(pair[0].turn <= pair[1].turn, "{pair:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_wait_for_a_log_in_order_with_a_check_each() {
    let limit = SlidingLog::per_second(10);
    let (mut calls, script_calls) = run(&limit.to_string()).await;
    // Thirty callers at ten a second: each waits for the two or three windows before it.
    verify(&mut calls, script_calls, Duration::from_secs(3));

    let mut turns: Vec<u64> = calls.iter().map(|call| call.turn).collect();
    turns.sort_unstable();
    for window in turns.windows(11) {
        assert!(window[10] - window[0] >= 1_000_000, "eleven in a window: {window:?}");
    }
    // No turn is left out either.
    let took = turns[turns.len() - 1] - turns[0];
    assert!(took <= 12_000_000, "{took}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_wait_for_a_bucket_in_order_with_a_check_each() {
    let limit = TokenBucket::per_second(10).burst(1);
    let (mut calls, script_calls) = run(&limit.to_string()).await;
    verify(&mut calls, script_calls, Duration::from_secs(3));
    let mut turns: Vec<u64> = calls.iter().map(|call| call.turn).collect();
    turns.sort_unstable();
    for pair in turns.windows(2) {
        assert!(pair[1] - pair[0] >= 100_000, "{pair:?}");
    }
}
