//! Replicas share the queue for slots in Redis: the order of all calls, the messages that wake them, and what the loss of a process
//! or of a permission costs.

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, SystemTime},
};

use tokio::{
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep},
};
use tower_quota::{
    ClientLibrary, Concurrency, Key, Limit, Limiter, Policy, RedisStore,
    store::{Charge, LeaseId, Operation, Outcome, Store, StoreRequest},
};

use crate::support::{Cluster, Log, Redis, Sentinel, connected, each_client, eventually, patient};

each_client! {
    calls_of_two_replicas_are_admitted_in_their_order_without_polling
    the_slots_and_places_of_a_process_that_died_delay_others_for_seconds_at_most
    a_reset_admits_those_that_wait_within_a_second
    without_permission_for_messages_a_slot_is_found_within_a_second
    those_that_wait_are_woken_again_after_the_connection_was_lost
    those_that_wait_are_woken_by_the_primary_of_a_sentinel
}

const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(100);

fn limit(slots: u64) -> Concurrency {
    Concurrency::new(slots).lease(Duration::from_secs(60))
}

fn policy(slots: u64) -> Policy<()> {
    Policy::new("streams", limit(slots)).wait_up_to(LONG)
}

async fn store(library: ClientLibrary, url: &str) -> RedisStore {
    connected(patient().client_library(library), url).await
}

/// How often Redis has run a command.
async fn calls(redis: &Redis, command: &str) -> u64 {
    let info: String = redis.command("INFO", ["commandstats"]).await;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.and_then(|line| line.split(',').next()?.parse().ok())
        .unwrap_or_default()
}

/// How many requests wait.
async fn waiting(redis: &Redis) -> usize {
    let keys: Vec<String> = redis.command("KEYS", ["quota:1:concurrency:*"]).await;
    match keys.first() {
        Some(key) => redis.command("ZCOUNT", [key, "4503599627370496", "+inf"]).await,
        None => 0,
    }
}

async fn until_waiting(redis: &Redis, count: usize) {
    eventually("the calls wait", async || waiting(redis).await == count).await;
}

/// How many stores have subscribed to messages.
async fn subscribed(redis: &Redis) -> usize {
    let channels: Vec<String> = redis.command("PUBSUB", ["CHANNELS", "quota:1:wake:*"]).await;
    match channels.first() {
        Some(channel) => redis.command::<(String, usize)>("PUBSUB", ["NUMSUB", channel]).await.1,
        None => 0,
    }
}

async fn until_subscribed(redis: &Redis, count: usize) {
    eventually("the stores have subscribed", async || subscribed(redis).await == count).await;
}

async fn send(store: &RedisStore, operation: Operation, limit: impl Into<Limit>, id: LeaseId) -> Outcome {
    let (limit, key) = (limit.into(), Key::from("42"));
    let charges = [Charge::new("streams", &limit, &key, 1).lease(id).wait_up_to(LONG)];
    let response = store.decide(&[StoreRequest::new(operation, &charges)]).await;
    response.expect("Redis replies").outcomes()[0].clone()
}

fn acquire(limiter: &Limiter) -> JoinHandle<Duration> {
    let limiter = limiter.clone();
    tokio::spawn(async move {
        let called = Instant::now();
        drop(limiter.acquire("42").await.expect("it may wait"));
        called.elapsed()
    })
}

async fn calls_of_two_replicas_are_admitted_in_their_order_without_polling(library: ClientLibrary) {
    for slots in [1, 2] {
        calls_are_admitted_in_their_order(library, slots).await;
    }
}

async fn calls_are_admitted_in_their_order(library: ClientLibrary, slots: usize) {
    const CALLS: usize = 10;
    let redis = Redis::start();
    let stores = [store(library, &redis.url()).await, store(library, &redis.url()).await];
    let limiters = stores.map(|store| Limiter::new(store, policy(slots as u64)));
    let mut held = Vec::new();
    for _ in 0..slots {
        held.push(limiters[0].acquire("42").await.expect("slots are free"));
    }
    let (admitted, running) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(slots)));
    let mut tasks = JoinSet::new();
    for call in 0..CALLS {
        let (limiter, admitted, running) = (limiters[call % 2].clone(), admitted.clone(), running.clone());
        tasks.spawn(async move {
            let permit = limiter.acquire("42").await.expect("it may wait");
            assert!(
                running.fetch_add(1, Ordering::SeqCst) < slots,
                "more than {slots} at once"
            );
            let at = permit.server_time();
            admitted.lock().expect("no panic").push((at, call, Instant::now()));
            sleep(Duration::from_millis(40)).await;
            running.fetch_sub(1, Ordering::SeqCst);
            drop(permit);
        });
        until_waiting(&redis, call + 1).await;
    }
    until_subscribed(&redis, 2).await;
    // Each store has tried whether it may publish.
    eventually("the stores have published", async || {
        calls(&redis, "publish").await == 2
    })
    .await;

    let (scripts, published, start) = (
        calls(&redis, "evalsha").await,
        calls(&redis, "publish").await,
        Instant::now(),
    );
    running.store(0, Ordering::SeqCst);
    drop(held);
    while let Some(task) = tasks.join_next().await {
        task.expect("no panic");
    }
    let took = start.elapsed();
    let mut admitted = admitted.lock().expect("no panic").clone();
    admitted.sort_unstable();
    let order: Vec<_> = admitted.iter().map(|(_, call, _)| *call).collect();
    // A call takes a slot only if there is one for each call before it too.
    let has_room = |(place, call): (usize, &usize)| {
        let before = order[place..].iter().filter(|other| *other < call).count();
        before < slots
    };
    assert!(order.iter().enumerate().all(has_room), "{order:?}");

    let (scripts, published) = (
        calls(&redis, "evalsha").await - scripts,
        calls(&redis, "publish").await - published,
    );
    println!("{CALLS} calls took {took:?}, {scripts} script calls, {published} messages");
    // Each call is released and checked once more, each of two calls that were held is released, and each that waits refreshes its
    // place each second. A release that is not confirmed yet wakes no one twice.
    let refreshes = CALLS as u64 * (took.as_secs() + 1);
    assert!(
        scripts <= 2 * (CALLS + slots) as u64 + refreshes,
        "{scripts} script calls in {took:?}"
    );
    assert_eq!(published, CALLS as u64, "each release wakes the next one");
    let pauses = admitted
        .windows(2)
        .map(|pair| pair[1].2.saturating_duration_since(pair[0].2));
    let mut pauses: Vec<_> = pauses.collect();
    pauses.sort_unstable();
    assert!(pauses[CALLS / 2] < Duration::from_millis(400), "{pauses:?}");
}

async fn the_slots_and_places_of_a_process_that_died_delay_others_for_seconds_at_most(library: ClientLibrary) {
    let redis = Redis::start();
    let store = store(library, &redis.url()).await;
    let short = Concurrency::new(1).lease(SECOND);
    let limiter = Limiter::new(store.clone(), Policy::new("streams", short).wait_up_to(LONG));

    // Nothing renews this lease, nor refreshes the place behind it.
    assert!(send(&store, Operation::Check, short, LeaseId::random()).await.allowed);
    assert!(
        send(&store, Operation::Reserve, short, LeaseId::random())
            .await
            .is_waiting()
    );
    let calls = [acquire(&limiter), acquire(&limiter)];
    until_waiting(&redis, 3).await;
    for call in calls {
        // Three seconds for the place, and one until a place behind it is refreshed.
        let waited = call.await.expect("no panic");
        println!("waited {waited:?}");
        assert!(waited >= 2 * SECOND && waited < 30 * SECOND, "{waited:?}");
    }
}

async fn a_reset_admits_those_that_wait_within_a_second(library: ClientLibrary) {
    let redis = Redis::start();
    let limiter = Limiter::new(store(library, &redis.url()).await, policy(1));
    let held = limiter.acquire("42").await.expect("a slot is free");
    let calls = [acquire(&limiter), acquire(&limiter)];
    until_waiting(&redis, 2).await;
    limiter.reset("42").await.expect("Redis replies");
    for call in calls {
        call.await.expect("no panic");
    }
    drop(held);
}

async fn without_permission_for_messages_a_slot_is_found_within_a_second(library: ClientLibrary) {
    let redis = Redis::start();
    let user = "ACL SETUSER limiter reset on >password ~* resetchannels +@all -publish -subscribe";
    redis.command::<()>("ACL", user.split(' ').skip(1)).await;
    let log = Log::capture();
    let url = redis.url().replace("://", "://limiter:password@");
    let limiter = Limiter::new(store(library, &url).await, policy(1));
    for _ in 0..2 {
        let held = limiter.acquire("42").await.expect("a slot is free");
        let call = acquire(&limiter);
        until_waiting(&redis, 1).await;
        eventually("it is logged", async || log.text().contains("refuses the messages")).await;
        drop(held);
        call.await.expect("no panic");
    }
    assert_eq!(log.text().matches("refuses the messages").count(), 1, "{}", log.text());
    assert!(
        !log.text().contains("ERROR") && !log.text().contains("tower_quota: WARN"),
        "{}",
        log.text()
    );
}

async fn those_that_wait_are_woken_again_after_the_connection_was_lost(library: ClientLibrary) {
    let redis = Redis::start();
    let limiter = Limiter::new(store(library, &redis.url()).await, policy(1));
    let mut hand_overs = Vec::new();
    for round in 0..3 {
        let held = limiter.acquire("42").await.expect("a slot is free");
        let (called, call) = (Instant::now(), acquire(&limiter));
        until_waiting(&redis, 1).await;
        until_subscribed(&redis, 1).await;
        // One message for each subscription, and one for each release.
        eventually("the store has published", async || {
            calls(&redis, "publish").await == 1 + 2 * round
        })
        .await;
        let released = called.elapsed();
        drop(held);
        hand_overs.push(call.await.expect("no panic").saturating_sub(released));
        assert_eq!(calls(&redis, "publish").await, 2 + 2 * round);
        redis.command::<u64>("CLIENT", ["KILL", "TYPE", "pubsub"]).await;
        eventually("the connection is lost", async || subscribed(&redis).await == 0).await;
    }
    println!("{hand_overs:?}");
    hand_overs.sort_unstable();
    assert!(hand_overs[1] < Duration::from_millis(400), "{hand_overs:?}");
}

async fn those_that_wait_are_woken_by_the_primary_of_a_sentinel(library: ClientLibrary) {
    let sentinel = Sentinel::start().await;
    let limiter = Limiter::new(store(library, &sentinel.url()).await, policy(1));
    let held = limiter.acquire("42").await.expect("a slot is free");
    let call = acquire(&limiter);
    until_waiting(&sentinel.primary, 1).await;
    until_subscribed(&sentinel.primary, 1).await;
    drop(held);
    call.await.expect("no panic");
}

#[tokio::test]
async fn those_that_wait_are_woken_by_each_node_of_a_cluster() {
    let cluster = Cluster::start().await;
    let store = store(ClientLibrary::RedisRs, &cluster.url()).await;
    cluster.serves(&store).await;
    let limiter = Limiter::new(store, policy(1));
    let mut hand_overs = Vec::new();
    for key in cluster.keys().await {
        let held = limiter.acquire(&*key).await.expect("a slot is free");
        let (of_call, key) = (limiter.clone(), key.clone());
        let call = tokio::spawn(async move {
            drop(of_call.acquire(&*key).await.expect("it may wait"));
            Instant::now()
        });
        eventually("the call waits", async || {
            let mut count = 0;
            for primary in &cluster.primaries {
                count += waiting(primary).await;
            }
            count == 1
        })
        .await;
        eventually("the store has subscribed", async || {
            let mut count = 0;
            for primary in &cluster.primaries {
                count += subscribed(primary).await;
            }
            count == 1
        })
        .await;
        let released = Instant::now();
        drop(held);
        hand_overs.push(call.await.expect("no panic") - released);
    }
    println!("{hand_overs:?}");
    hand_overs.sort_unstable();
    assert!(hand_overs[1] < Duration::from_millis(400), "{hand_overs:?}");
}

/// The environment variable of a worker, with the URL of its Redis, and the start of each line that is a report.
const URL: &str = "TOWER_QUOTA_QUEUE_REDIS";
const REPORT: &str = "held: ";
const TASKS: usize = 4;
const ROUNDS: usize = 5;

/// In another process: takes slots, and reports from when to when it has held them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_takes_slots() {
    let Ok(url) = env::var(URL) else { return };
    let store = connected(patient(), &url).await;
    let limiter = Limiter::new(store.clone(), policy(2));
    let now = || {
        SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .expect("after 1970")
            .as_micros()
    };
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            for _ in 0..ROUNDS {
                let permit = limiter.acquire("42").await.expect("it may wait");
                let from = now();
                sleep(Duration::from_millis(20)).await;
                println!("{REPORT}{from} {}", now());
                drop(permit);
            }
        });
    }
    tasks.join_all().await;
    store.drained(LONG).await.expect("Redis replies");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_hold_two_slots_at_once_and_leave_none_idle() {
    const PROCESSES: usize = 3;
    let redis = Redis::start();
    drop(connected(patient(), &redis.url()).await);
    let workers = (0..PROCESSES).map(|_| {
        let mut worker = Command::new(env::current_exe().expect("this binary"))
            .args([
                "--exact",
                "check::slot_queue_redis::a_worker_takes_slots",
                "--nocapture",
            ])
            .env(URL, redis.url())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a worker");
        let stdout = worker.stdout.take().expect("a pipe");
        thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map(|line| line.expect("text"));
            let held = lines.filter_map(|line| {
                let (_, report) = line.split_once(REPORT)?;
                let (from, until) = report.split_once(' ')?;
                Some((
                    from.parse::<u64>().expect("a number"),
                    until.parse::<u64>().expect("a number"),
                ))
            });
            let held: Vec<_> = held.collect();
            assert!(worker.wait().expect("the worker ends").success());
            held
        })
    });
    let workers: Vec<_> = workers.collect();
    let held = tokio::task::spawn_blocking(move || {
        let held = workers.into_iter().flat_map(|worker| worker.join().expect("no panic"));
        held.collect::<Vec<_>>()
    });
    let mut held = held.await.expect("no panic");
    assert_eq!(held.len(), PROCESSES * TASKS * ROUNDS);
    held.sort_unstable();
    for (from, _) in &held {
        let at_once = held
            .iter()
            .filter(|(other, until)| other <= from && from < until)
            .count();
        assert!(at_once <= 2, "{at_once} at once");
    }
    let took = Duration::from_micros(held.iter().map(|(_, until)| *until).max().expect("calls") - held[0].0);
    let ideal = Duration::from_millis(20) * (held.len() / 2) as u32;
    println!("{} calls in {took:?} of {ideal:?}", held.len());
    // Without messages, each would be found within a second only: half a minute in all.
    assert!(took < 15 * SECOND, "{took:?}");
}
