//! Which requests are admitted, on a real Redis by its own clock.

use std::time::Duration;

use fred::types::Value;
use tokio::task::JoinSet;
use tower_quota::{
    Decision, Limit, Limiter, Policy, RedisStore, SlidingLog,
    store::{ErrorKind, Operation, StoreError},
};

use crate::support::{Redis, Worker, connected, decide, eventually, less_patient, patient, try_decide, work};

/// Where [`decide`] counts for the key `k`.
const LOG: &str = "quota:1:log/1h:test:{key=k}";

/// A store that caches no denials.
async fn patient_store(redis: &Redis) -> RedisStore {
    connected(patient().deny_cache(false), &redis.url()).await
}

/// A limiter that counts where [`decide`] does.
async fn limiter(redis: &Redis, limit: SlidingLog) -> Limiter {
    Limiter::new(patient_store(redis).await, Policy::new("test", limit))
}

async fn check(limiter: &Limiter) -> Decision {
    limiter.check("k").await.expect("Redis answers")
}

/// Checks this many times at once on the connection of this limiter.
async fn check_at_once(limiter: &Limiter, times: usize) -> Vec<Decision> {
    let mut checks = JoinSet::new();
    for _ in 0..times {
        let limiter = limiter.clone();
        checks.spawn(async move { check(&limiter).await });
    }
    checks.join_all().await
}

fn admitted(decisions: &[Decision]) -> usize {
    decisions.iter().filter(|decision| decision.is_allowed()).count()
}

async fn members(redis: &Redis) -> u64 {
    redis.command("ZCOUNT", [LOG, "(0", "+inf"]).await
}

#[tokio::test]
async fn a_worker_checks_what_it_is_sent() {
    work().await;
}

#[tokio::test]
async fn eight_processes_are_admitted_exactly_the_limit_ten_times_in_a_row() {
    let redis = Redis::start();
    let mut workers: Vec<_> = (0..8).map(|_| Worker::start(&redis)).collect();
    for round in 0..10 {
        let key = format!("round-{round}");
        for worker in &mut workers {
            worker.order(&key, 100, 150);
        }
        let admitted: Vec<_> = workers.iter_mut().map(|worker| worker.outcome().0).collect();
        assert_eq!(admitted.iter().sum::<u64>(), 100, "{round}: {admitted:?}");
    }
}

#[tokio::test]
async fn twenty_thousand_checks_on_one_connection_all_count() {
    let redis = Redis::start();
    let limiter = limiter(&redis, SlidingLog::per_hour(30_000)).await;
    let decisions = check_at_once(&limiter, 20_000).await;
    assert_eq!(admitted(&decisions), 20_000);
    let peeked = limiter.peek("k").await.expect("Redis answers");
    assert_eq!(peeked.remaining(), 10_000);
}

// Errors of four well-known limiters.

#[tokio::test]
#[ignore = "needs faketime: `.ci/test`"]
async fn a_host_whose_clock_is_an_hour_off_makes_the_same_decisions() {
    let redis = Redis::start();
    let limiter = limiter(&redis, SlidingLog::per_hour(3)).await;
    let mut on_time = Worker::start(&redis);
    let mut ahead = Worker::start_an_hour_ahead(&redis);
    let off = ahead.clock().saturating_sub(on_time.clock());
    assert!(off > Duration::from_secs(3_590), "its clock is {off:?} ahead");

    let first = limiter.check("k").await.expect("Redis answers");
    ahead.order("k", 3, 1);
    assert_eq!(ahead.outcome().0, 1);
    on_time.order("k", 3, 2);
    assert_eq!(on_time.outcome().0, 1);

    // The wait of both ends when the first admission expires.
    let before = check(&limiter).await;
    ahead.order("k", 3, 1);
    let (admitted, wait) = ahead.outcome();
    let after = check(&limiter).await;
    assert_eq!(admitted, 0);
    assert!(before.retry_after() >= Some(wait) && Some(wait) >= after.retry_after());
    assert_eq!(
        after.server_time() + after.retry_after().expect("it is denied"),
        first.server_time() + first.reset_after()
    );
}

// What may happen to a Redis.

/// Waits until Redis replies to the store again, and returns the errors until then.
async fn recover(store: &RedisStore, limit: &Limit) -> Vec<ErrorKind> {
    let mut errors = Vec::new();
    eventually("the store is answered", async || {
        let peeked = try_decide(store, Operation::Peek, limit, "k", 1).await;
        errors.extend(peeked.as_ref().err().map(StoreError::kind));
        peeked.is_ok()
    })
    .await;
    errors
}

/// The number of admitted checks of 100, to all of which the store replies.
async fn admitted_of_100(store: &RedisStore, limit: &Limit) -> usize {
    let mut admitted = 0;
    for _ in 0..100 {
        let outcome = decide(store, Operation::Check, limit, "k", 1).await;
        admitted += usize::from(outcome.allowed);
    }
    admitted
}

#[tokio::test]
async fn flushed_scripts_are_loaded_again_without_an_error() {
    let redis = Redis::start();
    let limiter = limiter(&redis, SlidingLog::per_hour(3)).await;
    for remaining in [2, 1, 0] {
        redis.command::<()>("SCRIPT", ["FLUSH"]).await;
        let decision = check(&limiter).await;
        assert!(decision.is_allowed());
        assert_eq!(decision.remaining(), remaining);
    }
    redis.command::<()>("SCRIPT", ["FLUSH"]).await;
    assert!(!check(&limiter).await.is_allowed());
    assert_eq!(members(&redis).await, 3);
}

#[tokio::test]
async fn after_a_killed_connection_the_store_reconnects_and_the_count_continues() {
    let redis = Redis::start();
    let limit = Limit::from(SlidingLog::per_minute(3));
    let store = patient_store(&redis).await;
    assert!(decide(&store, Operation::Check, &limit, "k", 1).await.allowed);

    let killed: u64 = redis.command("CLIENT", ["KILL", "TYPE", "normal"]).await;
    assert_eq!(killed, 1);
    let errors = recover(&store, &limit).await;
    assert!(errors.iter().all(|kind| *kind == ErrorKind::Unreachable), "{errors:?}");
    assert_eq!(admitted_of_100(&store, &limit).await, 2);
}

#[tokio::test]
async fn after_a_restart_without_data_counts_are_empty_and_errors_end() {
    let mut redis = Redis::start();
    let limit = Limit::from(SlidingLog::per_minute(3));
    let store = connected(less_patient(), &redis.url()).await;
    assert!(decide(&store, Operation::Check, &limit, "k", 3).await.allowed);

    redis.kill();
    assert!(try_decide(&store, Operation::Check, &limit, "k", 1).await.is_err());
    redis.restart();
    let errors = recover(&store, &limit).await;
    let silent = |kind: &ErrorKind| matches!(kind, ErrorKind::Timeout | ErrorKind::Unreachable);
    assert!(errors.iter().all(silent), "{errors:?}");
    let patient = connected(patient(), &redis.url()).await;
    let peeked = decide(&patient, Operation::Peek, &limit, "k", 1).await;
    assert_eq!(peeked.states()[0].remaining, 3);
}

// Bounded work.

const HOUR: Duration = Duration::from_secs(3_600);

/// Fills the log with this many admissions of this weight, a microsecond apart, the last of them this long ago.
async fn fill(redis: &Redis, key: &str, count: u64, weight: u64, ago: Duration) {
    const FILL: &str = "
        local key, count, weight, ago = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
        local time = redis.call('TIME')
        local first = tonumber(time[1]) * 1000000 + tonumber(time[2]) - ago - count
        local chunk = {}
        for i = 1, count do
            local at = string.format('%.0f', first + i)
            chunk[#chunk + 1] = at
            chunk[#chunk + 1] = at .. (weight > 1 and ':' .. weight or '')
            if #chunk == 2000 or i == count then
                redis.call('ZADD', key, unpack(chunk))
                chunk = {}
            end
        end
        if weight > 1 then
            redis.call('ZADD', key, -count * weight, '#')
        else
            redis.call('ZADD', key, 0, '=')
        end
        redis.call('PEXPIRE', key, 3600000)";
    let key = format!("quota:1:log/1h:test:{{key={key}}}");
    let numbers = [count, weight, ago.as_micros() as u64].map(|number| number.to_string());
    let arguments = [FILL.to_owned(), "1".to_owned(), key].into_iter().chain(numbers);
    redis.command::<()>("EVAL", arguments).await;
}

/// The number of members that a denial of cost 10,000 reads from a full log of 100,000 with members of this weight.
async fn members_read_by_a_denial(weight: u64) -> i64 {
    let redis = Redis::start();
    let store = patient_store(&redis).await;
    fill(&redis, "full", 100_000 / weight, weight, Duration::ZERO).await;
    redis
        .command::<()>("CONFIG", ["SET", "slowlog-log-slower-than", "0"])
        .await;

    let limit = Limit::from(SlidingLog::new(100_000, HOUR));
    let outcome = decide(&store, Operation::Check, &limit, "full", 10_000).await;
    assert!(!outcome.allowed);

    // The slow log of Redis has the commands of a script.
    let log: Vec<Value> = redis.command("SLOWLOG", ["GET", "-1"]).await;
    let commands = log.into_iter().map(|entry| -> Vec<String> {
        let words = entry.into_array()[3].clone().into_array();
        words.into_iter().filter_map(|word| word.as_string()).collect()
    });
    let ranges = commands.filter_map(|command| match &*command {
        [name, _, from, upto] if name == "ZRANGE" => {
            let rank = |text: &str| text.parse::<i64>().expect("a rank");
            Some(rank(upto) - rank(from) + 1)
        }
        _ => None,
    });
    ranges.sum()
}

#[tokio::test]
async fn a_denial_on_a_full_log_reads_two_members() {
    // The newest, and the one that it waits for.
    assert_eq!(members_read_by_a_denial(1).await, 2);
}

#[tokio::test]
async fn a_denial_on_a_full_log_of_heavy_members_reads_a_thousand_at_most() {
    let read = members_read_by_a_denial(2).await;
    assert!((500..=1_002).contains(&read), "{read}");
}
