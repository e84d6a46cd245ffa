//! Requests wait in a line: nothing of them is counted before they are admitted, in every store.

use std::{
    future::poll_fn,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use fastrand::Rng;
use tokio::{
    runtime::Builder,
    task::{JoinHandle, JoinSet, spawn_blocking},
    time::{Instant, interval, sleep, sleep_until, timeout},
};
use tower::{Layer, ServiceExt};
use tower_quota::{
    AcquireError, Ban, Concurrency, Decision, Denial, FailureMode, FixedWindow, Limit, Limiter, MemoryStore, Policy,
    RateLimitLayer, SlidingCounter, SlidingLog, TokenBucket, key, limit::Calendar, store::Store,
};

use crate::support::{Clock, Cluster, Counted, Gaps, Gated, PATIENCE, Redis, connected, eventually, patient, timed};

const SECOND: Duration = Duration::from_secs(1);
const MILLISECOND: Duration = Duration::from_millis(1);

fn log_and_bucket(rate: u64) -> [Limit; 2] {
    [
        SlidingLog::per_second(rate).into(),
        // With a burst of 1, each delay of a reply would be lost.
        TokenBucket::per_second(rate).burst(2).into(),
    ]
}

/// How many of the calls of patient callers are admitted in this time.
async fn admitted_of_callers(limiters: Vec<Limiter>, callers: usize, patience: f64, length: Duration) -> usize {
    let (start, admitted) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for caller in 0..callers {
        let (limiter, admitted) = (limiters[caller % limiters.len()].clone(), admitted.clone());
        let mut rng = Rng::with_seed(caller as u64);
        tasks.spawn(async move {
            sleep(Duration::from_secs_f64(rng.f64() / 10.0)).await;
            while start.elapsed() < length {
                let patience = Duration::from_secs_f64(patience * (2.0 + 2.0 * rng.f64()) / 3.0);
                let call = limiter.acquire("k").into_future();
                let end = (Instant::now() + patience).min(start + length);
                match timeout(end - Instant::now(), call).await {
                    Ok(Ok(_)) => drop(admitted.fetch_add(1, Ordering::Relaxed)),
                    // A caller that is denied tries again after a while.
                    Ok(Err(_)) => sleep_until((Instant::now() + SECOND / 10).min(end)).await,
                    Err(_) => {}
                }
            }
        });
    }
    tasks.join_all().await;
    admitted.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn callers_that_leave_take_nothing_with_them() {
    for limit in log_and_bucket(20) {
        let policy = Policy::new("p", limit.clone()).wait_up_to(3 * SECOND);
        let limiter = Limiter::new(MemoryStore::new(), policy);
        let admitted = admitted_of_callers(vec![limiter], 40, 1.0, 10 * SECOND).await;
        assert!(admitted >= 190, "{limit}: {admitted} of 200");
    }
}

#[tokio::test]
async fn callers_of_redis_that_leave_take_nothing_with_them() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let stores = [
        clock.redis_store(&redis).await,
        clock.redis_store_on_redis_rs(&redis).await,
    ];
    let admits_all = async |limit: Limit| {
        let limiters = stores.iter().map(|store| {
            let policy = Policy::new(limit.algorithm(), limit.clone());
            Limiter::new(store.clone(), policy.wait_up_to(3 * SECOND))
        });
        let admitted = admitted_of_callers(limiters.collect(), 40, 1.0, 10 * SECOND).await;
        assert!(admitted >= 190, "{limit}: {admitted} of 200");
    };
    let [log, bucket] = log_and_bucket(20).map(admits_all);
    clock.run(&redis, async { tokio::join!(log, bucket) }).await;
}

async fn redis_limiter(redis: &Redis, policies: impl Fn() -> Policy<()>) -> Limiter {
    let store = connected(patient(), &redis.url()).await;
    Limiter::new(store, policies())
}

/// Callers that begin to wait now, in this order.
async fn waiting(limiter: &Limiter, callers: usize) -> Vec<JoinHandle<Result<Decision, AcquireError>>> {
    let spawn = |_| {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire("k").await })
    };
    let callers = (0..callers).map(spawn).collect();
    sleep(SECOND / 100).await;
    callers
}

/// As many as have room then, in each process; the others wait on.
async fn a_reset_admits_those_that_wait(limiter: &Limiter, other: &Limiter) {
    assert!(limiter.check("k").await.expect("the store replies").is_allowed());
    let mut callers = waiting(limiter, 2).await;
    let last = callers.pop().expect("two");
    other.reset("k").await.expect("the store replies");
    let first = timeout(60 * SECOND, callers.remove(0)).await.expect("it is admitted");
    let first = first.expect("no panic").expect("it is admitted");
    assert!(first.waited() <= 60 * SECOND, "{:?}", first.waited());
    assert!(!last.is_finished());
    last.abort();
}

#[tokio::test(start_paused = true)]
async fn a_reset_in_memory_admits_those_that_wait() {
    for limit in [Limit::from(SlidingLog::per_hour(1)), TokenBucket::per_hour(1).into()] {
        let policy = Policy::new("p", limit).wait_up_to(7_200 * SECOND);
        let limiter = Limiter::new(MemoryStore::new(), policy);
        a_reset_admits_those_that_wait(&limiter, &limiter).await;
    }
}

#[tokio::test]
async fn a_reset_by_another_process_admits_those_that_wait() {
    let redis = Redis::start();
    let policy = || Policy::new("p", SlidingLog::per_hour(1)).wait_up_to(7_200 * SECOND);
    let (limiter, other) = (redis_limiter(&redis, policy).await, redis_limiter(&redis, policy).await);
    a_reset_admits_those_that_wait(&limiter, &other).await;
}

#[tokio::test(start_paused = true)]
async fn the_next_caller_does_not_wait_for_those_that_have_left() {
    for limit in log_and_bucket(1) {
        let policy = Policy::new("p", limit.clone()).wait_up_to(20 * SECOND);
        let limiter = Limiter::new(MemoryStore::new(), policy);
        assert!(limiter.acquire("k").await.is_ok());
        for caller in waiting(&limiter, 10).await.into_iter().skip(1) {
            caller.abort();
        }
        let start = Instant::now();
        let permit = limiter.acquire("k").await.expect("it is admitted");
        let delay = permit.waited();
        assert!(start.elapsed() <= 2_100 * MILLISECOND, "{limit}: {:?}", start.elapsed());
        assert!(start.elapsed() - delay <= 5 * MILLISECOND, "{limit}: {delay:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_rate_beside_slots_holds_at_the_instants_at_which_callers_continue() {
    for order in [[0, 1], [1, 0]] {
        let policies = [
            Policy::new("rate", SlidingLog::per_second(2)).wait_up_to(20 * SECOND),
            Policy::new("slots", Concurrency::new(2)).wait_up_to(20 * SECOND),
        ];
        let limiter = Limiter::new(MemoryStore::new(), order.map(|nth| policies[nth].clone()));
        let mut tasks = JoinSet::new();
        for _ in 0..12 {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let _permit = limiter.acquire("k").await.expect("it is admitted");
                let at = Instant::now();
                sleep(SECOND / 10).await;
                at
            });
        }
        let admitted = tasks.join_all().await;
        for from in &admitted {
            let within = admitted.iter().filter(|at| (*from..*from + SECOND).contains(at));
            assert!(within.count() <= 2, "{order:?}: {admitted:?}");
        }
    }
}

/// How many calls are admitted in 30 s, of callers that take the slots of both policies, in these orders.
async fn admitted_in_orders(orders: [[usize; 2]; 2]) -> usize {
    let store = MemoryStore::new();
    let policies = [("user", 2), ("all", 3)];
    let policies = policies.map(|(name, slots)| Policy::new(name, Concurrency::new(slots)).wait_up_to(20 * SECOND));
    let (start, admitted) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for caller in 0..12 {
        let policies = match caller {
            0 => vec![policies[0].clone()],
            1 | 2 => vec![policies[1].clone()],
            _ => orders[caller % 2].map(|nth| policies[nth].clone()).to_vec(),
        };
        let counts = policies.len() > 1;
        let (limiter, admitted) = (Limiter::new(store.clone(), policies), admitted.clone());
        let mut rng = Rng::with_seed(caller as u64);
        tasks.spawn(async move {
            while start.elapsed() < 30 * SECOND {
                let permit = limiter.acquire("k").await.expect("it waits for less");
                admitted.fetch_add(usize::from(counts), Ordering::Relaxed);
                sleep(rng.u32(1..40) * MILLISECOND).await;
                drop(permit);
                sleep(rng.u32(0..20) * MILLISECOND).await;
            }
        });
    }
    tasks.join_all().await;
    admitted.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn slots_in_two_orders_are_taken_as_in_one() {
    let one = admitted_in_orders([[0, 1], [0, 1]]).await;
    let other = admitted_in_orders([[1, 0], [1, 0]]).await;
    let two = admitted_in_orders([[0, 1], [1, 0]]).await;
    assert!(one > 500, "{one}");
    for two in [two, other] {
        assert!(two * 100 >= one * 95, "{two} of {one}");
    }
}

/// One waits for a slot of `y`, and an equal one behind it for slots of both. Then all slots are free at once.
#[tokio::test(start_paused = true)]
async fn a_request_is_not_overtaken_by_an_equal_one_that_lacks_more() {
    let policies = [("x", 1), ("y", 2)];
    let policies = policies.map(|(name, slots)| Policy::new(name, Concurrency::new(slots)).wait_up_to(20 * SECOND));
    for order in [[0, 1], [1, 0]] {
        let store = MemoryStore::new();
        let [x, y] = policies.clone().map(|policy| Limiter::new(store.clone(), policy));
        let both = Limiter::new(store, order.map(|nth: usize| policies[nth].clone()));
        let _y = (y.acquire("k").await, y.acquire("k").await);
        let first = waiting(&both, 1).await.remove(0);
        let _x = x.acquire("k").await;
        let mut second = Box::pin(both.acquire("k"));
        begin(&mut second).await;
        both.reset("k").await.expect("in memory");
        sleep(MILLISECOND).await;
        assert!(first.is_finished(), "{order:?}");
        begin(&mut second).await;
    }
}

/// How many requests stand in the only line.
pub(super) async fn in_line(redis: &Redis) -> usize {
    let mut standing = 0;
    for key in redis.command::<Vec<String>>("KEYS", ["quota:1:line:*"]).await {
        let text: Option<Bytes> = redis.command("GET", [key]).await;
        let text = text.unwrap_or_default();
        let mut numbers = text
            .chunks_exact(8)
            .map(|number| f64::from_le_bytes(number.try_into().expect("8 bytes")));
        // The process, its line, and when the place expires; then how many requests it has, each with two numbers.
        while let Some(requests) = numbers.nth(3) {
            standing += requests as usize;
            if requests > 0.0 {
                numbers.nth(2 * requests as usize - 1);
            }
        }
    }
    standing
}

pub(super) async fn stand_in_line(redis: &Redis, requests: usize) {
    eventually("so many stand in the line", async || in_line(redis).await == requests).await;
}

#[tokio::test]
async fn processes_are_admitted_in_the_order_of_arrival() {
    let redis = Redis::start();
    // There is room for one at most, so that the order shows, however late a check is.
    let (log, bucket) = (SlidingLog::new(1, SECOND / 20), TokenBucket::per_second(20).burst(1));
    for limit in [Limit::from(log), Limit::from(bucket)] {
        let policy = || Policy::new(limit.algorithm(), limit.clone()).wait_up_to(60 * SECOND);
        let limiters = [
            redis_limiter(&redis, policy).await,
            redis_limiter(&redis, policy).await,
            redis_limiter(&redis, policy).await,
        ];
        unless_places_expire(&redis, async |round| {
            let (mut tasks, mut admitted) = (JoinSet::new(), Vec::new());
            for caller in 0..60 {
                let limiter = limiters[caller % 3].clone();
                tasks.spawn(async move {
                    let permit = limiter.acquire(round).await.expect("it is admitted");
                    (permit.server_time(), caller)
                });
                // The next one arrives when this one stands in the line, or is admitted.
                while admitted.len() + in_line(&redis).await <= caller {
                    sleep(MILLISECOND).await;
                    while let Some(result) = tasks.try_join_next() {
                        admitted.push(result.expect("no panic"));
                    }
                }
            }
            admitted.extend(tasks.join_all().await);
            admitted.sort();
            let order: Vec<_> = admitted.iter().map(|(_, caller)| *caller).collect();
            match order.is_sorted() {
                true => Ok(()),
                false => Err(format!("{limit}: {order:?}")),
            }
        })
        .await;
    }
}

/// Makes rounds until the order of one, by its number as the key, is right, which only a place that expired may prevent. A process that
/// is held up for more than 0.3 s may lose its places, which expire after 1.5 s.
pub(super) async fn unless_places_expire(redis: &Redis, mut round: impl AsyncFnMut(u64) -> Result<(), String>) {
    for number in 0.. {
        stand_in_line(redis, 0).await;
        let gaps = Gaps::of(redis).await;
        let Err(wrong) = round(number).await else { return };
        assert!(gaps.longest() > 300 * MILLISECOND && number < 20, "{wrong}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_free_slot_is_taken_at_once() {
    let policy = Policy::new("slots", Concurrency::new(1)).wait_up_to(20 * SECOND);
    let limiter = Limiter::new(MemoryStore::new(), policy);
    let mut permit = limiter.acquire("k").await.expect("it is free");
    for _ in 0..5 {
        let mut callers = waiting(&limiter, 1).await;
        let released = Instant::now();
        drop(permit);
        permit = callers.remove(0).await.expect("no panic").expect("it is admitted");
        assert!(released.elapsed() <= MILLISECOND, "{:?}", released.elapsed());
    }
}

#[tokio::test]
async fn a_slot_that_another_process_releases_is_taken_at_once() {
    let redis = Redis::start();
    let policy = || Policy::new("slots", Concurrency::new(1)).wait_up_to(20 * SECOND);
    let limiters = [redis_limiter(&redis, policy).await, redis_limiter(&redis, policy).await];
    let mut permit = limiters[0].acquire("k").await.expect("it is free");
    let mut delays = Vec::new();
    for round in 1..=10 {
        let mut callers = waiting(&limiters[round % 2], 1).await;
        stand_in_line(&redis, 1).await;
        drop(permit);
        let (admitted, delay) = timed(callers.remove(0)).await;
        permit = admitted.expect("no panic").expect("it is admitted");
        delays.push(delay);
    }
    // Without the message it would take a second.
    delays.sort();
    assert!(delays[5] <= SECOND / 10, "{delays:?}");
}

#[tokio::test]
async fn the_place_of_a_process_that_dies_expires() {
    let redis = Redis::start();
    let policy = || Policy::new("slots", Concurrency::new(1)).wait_up_to(20 * SECOND);
    let limiter = redis_limiter(&redis, policy).await;
    let permit = limiter.acquire("k").await.expect("it is free");
    let (url, (dies, death)) = (redis.url(), mpsc::channel::<()>());
    let died = spawn_blocking(move || {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let limiter = runtime.block_on(async {
            let store = connected(patient(), &url).await;
            Limiter::new(store, policy())
        });
        let waiting = limiter.clone();
        runtime.spawn(async move { waiting.acquire("k").await.map(drop) });
        let _ = death.recv();
        runtime.shutdown_background();
    });
    stand_in_line(&redis, 1).await;
    drop(dies);
    died.await.expect("no panic");
    let mut callers = waiting(&limiter, 1).await;
    let gaps = Gaps::of(&redis).await;
    drop(permit);
    let (admitted, waited) = timed(callers.remove(0)).await;
    assert!(admitted.expect("no panic").is_ok());
    let most = 2_700 * MILLISECOND + gaps.longest();
    assert!(waited < most, "{waited:?} of {most:?}");
}

#[test]
fn a_long_line_needs_no_stack() {
    const CALLERS: usize = 10_000;
    let thread = std::thread::Builder::new().stack_size(256 * 1_024);
    let thread = thread.spawn(|| {
        let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(async {
            let policy = Policy::new("p", TokenBucket::per_second(CALLERS as u64)).wait_up_to(20 * SECOND);
            let limiter = Limiter::new(MemoryStore::new(), policy.max_waiting(CALLERS as u64));
            assert!(
                limiter
                    .request("k")
                    .cost(CALLERS as u64)
                    .check()
                    .await
                    .expect("it replies")
                    .is_allowed()
            );
            let start = Instant::now();
            for caller in waiting(&limiter, CALLERS).await {
                assert!(caller.await.expect("no panic").is_ok());
            }
            assert!(start.elapsed() <= 1_100 * MILLISECOND, "{:?}", start.elapsed());

            // They leave at once.
            sleep(SECOND).await;
            assert!(
                limiter
                    .request("k")
                    .cost(CALLERS as u64)
                    .check()
                    .await
                    .expect("it replies")
                    .is_allowed()
            );
            let callers = (0..CALLERS).map(|_| Box::pin(limiter.acquire("k")));
            let mut callers: Vec<_> = callers.collect();
            for caller in &mut callers {
                let _ = poll_fn(|cx| Poll::Ready(caller.as_mut().poll(cx).is_pending())).await;
            }
            drop(callers);
            sleep(SECOND).await;
            let start = Instant::now();
            assert!(
                limiter
                    .request("k")
                    .cost(CALLERS as u64)
                    .check()
                    .await
                    .expect("it replies")
                    .is_allowed(),
                "the line is empty"
            );
            assert_eq!(start.elapsed(), Duration::ZERO);
        });
    });
    thread.expect("a thread").join().expect("no overflow");
}

/// Whether a check of 1 beside one of 2 that waits is admitted, before and after that one leaves; the closure returns when so many
/// requests stand in the line.
async fn overtakes(limiter: &Limiter, standing: impl AsyncFn(usize)) -> [bool; 2] {
    let _held = limiter.check("k").await.expect("it replies");
    let waits = limiter.clone();
    let waits = tokio::spawn(async move { waits.request("k").cost(2).acquire().await.map(drop) });
    standing(1).await;
    let before = limiter.check("k").await.expect("it replies").is_allowed();
    waits.abort();
    standing(0).await;
    let after = limiter.check("k").await.expect("it replies").is_allowed();
    [before, after]
}

fn two_of_each() -> [Limit; 5] {
    [
        Concurrency::new(2).into(),
        SlidingLog::new(2, 10 * SECOND).into(),
        SlidingCounter::new(2, 10 * SECOND).into(),
        FixedWindow::new(2, 10 * SECOND).into(),
        TokenBucket::new(2, 10 * SECOND).into(),
    ]
}

#[tokio::test(start_paused = true)]
async fn a_check_does_not_overtake_those_that_wait() {
    for limit in two_of_each() {
        let policy = Policy::new("p", limit.clone()).wait_up_to(30 * SECOND);
        let limiter = Limiter::new(MemoryStore::new(), policy);
        let standing = async |_| sleep(50 * MILLISECOND).await;
        assert_eq!(overtakes(&limiter, standing).await, [false, true], "{limit}");
    }
}

#[tokio::test]
async fn a_check_of_redis_does_not_overtake_those_that_wait() {
    let redis = Redis::start();
    for limit in two_of_each() {
        let policy = || Policy::new("p", limit.clone()).wait_up_to(30 * SECOND);
        let limiter = redis_limiter(&redis, policy).await;
        let standing = async |requests| stand_in_line(&redis, requests).await;
        assert_eq!(overtakes(&limiter, standing).await, [false, true], "{limit}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_line_denies() {
    let policy = Policy::new("p", SlidingLog::per_second(1))
        .wait_up_to(20 * SECOND)
        .max_waiting(2);
    let limiter = Limiter::new(MemoryStore::new(), policy);
    assert!(limiter.acquire("k").await.is_ok());
    let callers = waiting(&limiter, 3).await;
    let mut admitted = Vec::new();
    for caller in callers {
        admitted.push(caller.await.expect("no panic"));
    }
    let [Ok(_), Ok(_), Err(AcquireError::LineFull(denied))] = &admitted[..] else {
        panic!("{admitted:?}");
    };
    let denial = denied.decision().policies().next().and_then(|policy| policy.denial());
    assert_eq!(denial, Some(Denial::LineFull));
    assert!(denied.decision().retry_after().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_request_is_denied_at_once_or_at_its_bound() {
    let policy = Policy::new("p", SlidingLog::per_second(1)).wait_up_to(1_500 * MILLISECOND);
    let limiter = Limiter::new(MemoryStore::new(), policy);
    assert!(limiter.acquire("k").await.is_ok());
    let mut callers = waiting(&limiter, 1).await;
    let start = Instant::now();
    let Err(AcquireError::Denied(denied)) = limiter.acquire("k").await else {
        panic!("two seconds are too long");
    };
    assert_eq!(start.elapsed(), Duration::ZERO);
    let wait = denied.decision().retry_after().expect("it has a wait");
    assert!(wait > 1_900 * MILLISECOND && wait <= 2 * SECOND, "{wait:?}");
    let permit = callers.remove(0).await.expect("no panic").expect("it is admitted");
    let delay = permit.waited();
    assert!(delay >= 980 * MILLISECOND && delay <= SECOND, "{delay:?}");

    // When slots will be free is not known.
    let policy = Policy::new("slots", Concurrency::new(1)).wait_up_to(SECOND);
    let limiter = Limiter::new(MemoryStore::new(), policy);
    let _permit = limiter.acquire("k").await.expect("it is free");
    let start = Instant::now();
    assert!(limiter.acquire("k").await.is_err());
    assert!(start.elapsed() >= SECOND && start.elapsed() <= SECOND + 5 * MILLISECOND);
}

#[tokio::test]
async fn two_keys_in_two_slots_of_a_cluster_are_one_limit_for_all() {
    const CALLERS: usize = 12;
    let cluster = Cluster::start_patient().await;
    let [one, two, _] = &cluster.keys().await;
    let mut tasks = JoinSet::new();
    let admitted = Arc::new(Mutex::new([vec![], vec![]]));
    for _ in 0..2 {
        let store = connected(patient(), &cluster.url()).await;
        cluster.serves(&store).await;
        let policy = |name, quota, key: &str| {
            let policy = Policy::new(name, SlidingLog::per_second(quota)).key(key::constant(key));
            policy.failure_mode(FailureMode::Closed).wait_up_to(20 * SECOND)
        };
        let layer = RateLimitLayer::new(store, [policy("one", 3, one), policy("two", 4, two)]);
        let settled = admitted.clone();
        let layer = layer.on_settled(move |usage| {
            settled.lock().unwrap()[usize::from(usage.policy == "two")].push(usage.admitted_at);
        });
        for _ in 0..CALLERS / 2 {
            let service = layer.layer(tower::service_fn(
                async |_: http::Request<http_body_util::Empty<bytes::Bytes>>| {
                    Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
                },
            ));
            tasks.spawn(async move {
                let response = service
                    .oneshot(http::Request::new(http_body_util::Empty::new()))
                    .await
                    .expect("it never fails");
                response.status()
            });
        }
    }
    let (statuses, took) = timed(tasks.join_all()).await;
    assert!(statuses.iter().all(http::StatusCode::is_success), "{statuses:?}");
    // By the clock of the node of each slot.
    for (quota, at) in [3, 4].into_iter().zip(&mut *admitted.lock().unwrap()) {
        at.sort();
        assert_eq!(at.len(), CALLERS);
        let last = at.iter().skip(quota);
        for (first, last) in at.iter().zip(last) {
            assert!(last.duration_since(*first).unwrap() >= SECOND, "{quota} of {at:?}");
        }
    }
    assert!(took < 12 * SECOND, "{took:?}");
}

/// A request is checked every second while it waits, and each of its keys is in a call of its own.
#[tokio::test]
async fn one_that_waits_in_two_slots_of_a_cluster_is_not_denied_for_a_ban_again_and_again() {
    let cluster = Cluster::start_patient().await;
    let [one, two, _] = cluster.keys().await;
    let store = connected(patient(), &cluster.url()).await;
    cluster.serves(&store).await;
    let policy = |name, seconds| {
        let policy = Policy::new(name, SlidingLog::new(1, seconds * SECOND));
        policy.failure_mode(FailureMode::Closed).wait_up_to(20 * SECOND)
    };
    let banning = policy("banning", 3).ban(Ban::after(3, 3_600 * SECOND));
    let limiter = Limiter::new(store, [banning, policy("slow", 4)]);
    let request = || limiter.request(&*one).key_of("slow", &*two);
    let first = request().check().await.expect("a cluster");
    assert!(first.is_allowed());

    let admitted = request().acquire().await.expect("no ban begins");
    // The clocks of two nodes of this machine.
    let after = admitted.server_time() - first.server_time();
    assert!(after > 3 * SECOND, "{after:?}");
}

/// None of those that wait is denied when it arrives.
#[tokio::test]
async fn those_that_arrive_with_keys_in_two_slots_of_a_cluster_and_wait_begin_no_ban() {
    let cluster = Cluster::start_patient().await;
    let [one, two, _] = cluster.keys().await;
    let store = connected(patient(), &cluster.url()).await;
    cluster.serves(&store).await;
    let policy = |name, quota| {
        let policy = Policy::new(name, SlidingLog::per_second(quota));
        policy.failure_mode(FailureMode::Closed).wait_up_to(20 * SECOND)
    };
    let banning = policy("banning", 1).ban(Ban::after(3, 3_600 * SECOND));
    let limiter = Limiter::new(store, [banning, policy("other", 9)]);
    let request = || limiter.request(&*one).key_of("other", &*two);
    let (a, b, c, d) = tokio::join!(
        request().acquire(),
        request().acquire(),
        request().acquire(),
        request().acquire()
    );
    for admitted in [a, b, c, d] {
        drop(admitted.expect("no ban begins"));
    }
    // A denial of one that does not wait counts. One that comes later than a second is admitted.
    let (mut denials, mut admissions) = (0, 0);
    while denials < 3 {
        match request().wait_up_to(Duration::ZERO).acquire().await {
            Ok(_) => admissions += 1,
            Err(_) => denials += 1,
        }
        assert!(admissions < 20, "nothing is denied");
    }
    let banned = request().check().await.expect("a cluster");
    assert!(banned.retry_after() > Some(30 * SECOND), "{banned:?}");
}

/// A store in memory and one in Redis.
async fn both_stores(redis: &Redis) -> [Arc<dyn Store>; 2] {
    [
        Arc::new(MemoryStore::new()),
        Arc::new(connected(patient(), &redis.url()).await),
    ]
}

/// Of hours, each of which may be one in which the clocks change, so that it is half as long.
#[tokio::test]
async fn those_that_would_wait_for_more_hours_than_they_may_are_denied_at_once() {
    let redis = Redis::start();
    for store in both_stores(&redis).await {
        let hourly = FixedWindow::calendar(1, Calendar::Hour, "UTC").expect("a zone");
        let limiter = Limiter::new(store, Policy::new("p", hourly).wait_up_to(100 * 60 * SECOND));
        assert!(limiter.check("k").await.expect("it replies").is_allowed());
        let callers = waiting(&limiter, 10).await;
        eventually("half of them are denied", async || {
            callers.iter().filter(|caller| caller.is_finished()).count() >= 5
        })
        .await;
        let (ended, waiting): (Vec<_>, Vec<_>) = callers.into_iter().partition(JoinHandle::is_finished);
        waiting.iter().for_each(JoinHandle::abort);
        let mut admitted = 0;
        for caller in ended {
            admitted += usize::from(caller.await.expect("no panic").is_ok());
        }
        assert!(admitted <= 1, "{admitted}, where an hour may just have begun");
    }
}

/// Equal requests are checked together.
#[tokio::test]
async fn those_that_wait_for_a_limit_of_their_own_hold_nothing_of_another_one() {
    let redis = Redis::start();
    for store in both_stores(&redis).await {
        store.receive_wakes();
        let store = Counted::new(store);
        let of = |name, quota, seconds| {
            Policy::new(name, SlidingLog::new(quota, seconds * SECOND)).wait_up_to(86_400 * SECOND)
        };
        let both = Limiter::new(store.clone(), [of("all", 2, 1), of("own", 1, 7_200)]);
        let request = |both: Limiter| async move { both.request("all").key_of("own", "a").acquire().await.map(drop) };
        request(both.clone()).await.expect("there is room");
        let waiting = [(); 3].map(|()| tokio::spawn(request(both.clone())));
        // Their arrivals, and checks of all that wait, one each second.
        eventually("they wait", async || store.calls() >= 10).await;

        let other = Limiter::new(store.clone(), of("all", 2, 1));
        assert!(other.check("all").await.expect("it replies").is_allowed());
        let calls = store.calls();
        sleep(SECOND).await;
        assert!(store.calls() - calls < 20, "{} calls a second", store.calls() - calls);
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// The calls of the script, and the commands that scripts have run.
async fn commands(redis: &Redis) -> [u64; 2] {
    const WITHIN: [&str; 11] = [
        "get",
        "set",
        "setrange",
        "time",
        "zadd",
        "zcard",
        "zrevrank",
        "zrange",
        "zremrangebyscore",
        "pexpireat",
        "publish",
    ];
    let calls = redis.all_calls().await;
    let within = WITHIN.iter().filter_map(|command| calls.get(*command));
    [redis.script_calls().await, within.sum()]
}

#[tokio::test]
async fn an_admission_that_waited_takes_few_calls() {
    const CALLERS: usize = 90;

    let redis = Redis::start();
    let policy = || Policy::new("p", SlidingLog::per_second(20)).wait_up_to(20 * SECOND);
    let mut limiters = Vec::new();
    for _ in 0..3 {
        limiters.push(redis_limiter(&redis, policy).await);
    }
    let all = limiters[0].request("k").cost(20).check().await.expect("it replies");
    assert!(all.is_allowed());
    let before = redis.script_calls().await;
    let mut tasks = JoinSet::new();
    // As many arrive in a second, however late the ticks are.
    let mut ticks = interval(40 * MILLISECOND);
    for caller in 0..CALLERS {
        ticks.tick().await;
        let limiter = limiters[caller % 3].clone();
        tasks.spawn(async move { limiter.acquire("k").await.expect("it is admitted").waited() });
    }
    let delays = tasks.join_all().await;
    let after = redis.script_calls().await;
    let waited = delays.iter().filter(|delay| **delay > MILLISECOND).count() as f64;
    assert!(waited > 45.0, "{waited} waited");
    let calls = (after - before) as f64 - (CALLERS as f64 - waited);
    assert!(calls / waited <= 2.5, "{calls} calls for {waited}");
}

#[tokio::test]
async fn denials_at_a_full_line_share_checks() {
    const DENIALS: u64 = 3_000;

    let redis = Redis::start();
    for limit in [SlidingLog::per_hour(1).into(), Limit::from(Concurrency::new(1))] {
        let policy = || {
            let policy = Policy::new(limit.algorithm(), limit.clone());
            policy.wait_up_to(7_200 * SECOND).max_waiting(2)
        };
        let limiter = redis_limiter(&redis, policy).await;
        let _permit = limiter.acquire("k").await.expect("it is free");
        let callers = waiting(&limiter, 2).await;
        let before = redis.script_calls().await;
        let start = Instant::now();
        for _ in 0..DENIALS {
            let Err(AcquireError::LineFull(denied)) = limiter.acquire("k").await else {
                panic!("two wait");
            };
            let wait = denied.decision().retry_after().expect("it has a wait");
            assert!(!wait.is_zero() && wait <= 3 * 3_600 * SECOND, "{wait:?}");
        }
        let milliseconds = start.elapsed().as_millis() as u64;
        let after = redis.script_calls().await;
        // One in ten milliseconds, and those of the line.
        assert!(
            after - before <= 10 + milliseconds / 5,
            "{} calls in {milliseconds} ms",
            after - before
        );

        // Another one may wait as soon as one has left.
        callers.into_iter().for_each(|caller| caller.abort());
        tokio::task::yield_now().await;
        assert!(timeout(SECOND / 10, limiter.acquire("k")).await.is_err());
    }
}

/// A limiter of a policy and one of it beside another one, in a store that does not reply at once. One request waits, and no more may.
async fn full_line(memory: &MemoryStore, room: usize) -> (Gated<MemoryStore>, [Limiter; 2]) {
    let store = Gated::new(memory.clone());
    let policy = |name| {
        let policy = Policy::new(name, SlidingLog::per_hour(room as u64));
        policy.wait_up_to(7_200 * SECOND).max_waiting(1)
    };
    let limiters = [
        Limiter::new(store.clone(), policy("p")),
        Limiter::new(store.clone(), [policy("p"), policy("other")]),
    ];
    store.open(room + 1);
    for _ in 0..room {
        let _ = limiters[0].acquire("k").await.expect("it fits");
    }
    waiting(&limiters[0], 1).await;
    (store, limiters)
}

/// The wait of a request that is denied now, since the line is full, and the number of its policies.
async fn denied_at_a_full_line(limiter: &Limiter) -> (Duration, usize) {
    let Err(AcquireError::LineFull(denied)) = limiter.acquire("k").await else {
        panic!("one waits");
    };
    let decision = denied.decision();
    (
        decision.retry_after().expect("it has a wait"),
        decision.policies().count(),
    )
}

#[tokio::test(start_paused = true)]
async fn a_denial_at_a_full_line_holds_for_equal_requests_of_ten_milliseconds() {
    let (store, [limiter, other]) = full_line(&MemoryStore::new(), 1).await;
    store.open(100);
    let (first, _) = denied_at_a_full_line(&limiter).await;
    let mut waits = Vec::new();
    for _ in 0..4 {
        sleep(3 * MILLISECOND).await;
        waits.push(denied_at_a_full_line(&limiter).await.0);
    }
    assert!(waits[..2] == [first; 2] && waits[3] < first, "{first:?}, {waits:?}");
    assert_eq!(denied_at_a_full_line(&other).await.1, 2);
}

/// The key has been reset, and those that wait are not yet checked.
#[tokio::test]
async fn an_admission_at_a_full_line_is_that_of_one_request() {
    let memory = MemoryStore::new();
    let (store, [limiter, _]) = full_line(&memory, 3).await;
    let direct = Limiter::new(memory, Policy::new("p", SlidingLog::per_hour(3)));
    direct.reset("k").await.expect("in memory");
    let mut context = Context::from_waker(Waker::noop());
    let mut admitted = Box::pin(limiter.acquire("k"));
    assert!(admitted.as_mut().poll(&mut context).is_pending());
    store.open(1);
    assert!(matches!(admitted.as_mut().poll(&mut context), Poll::Ready(Ok(_))));
    let mut next = Box::pin(limiter.acquire("k"));
    assert!(next.as_mut().poll(&mut context).is_pending(), "the store decides");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_during_its_check_makes_room_in_a_full_line() {
    let store = Gated::new(MemoryStore::new());
    let policy = Policy::new("p", SlidingLog::per_hour(1)).wait_up_to(36_000 * SECOND);
    let limiter = Limiter::new(store.clone(), policy.max_waiting(1));
    store.open(2);
    let _ = limiter.acquire("k").await.expect("it fits");
    let callers = waiting(&limiter, 1).await;
    // The next check has been sent, and its reply is held back.
    sleep(2 * SECOND).await;
    callers.into_iter().for_each(|caller| caller.abort());
    store.open(100);
    sleep(SECOND / 10).await;
    let next = timeout(SECOND / 10, limiter.acquire("k").into_future()).await;
    assert!(next.is_err(), "it is not full: {next:?}");
}

#[tokio::test(start_paused = true)]
async fn a_policy_for_which_no_request_waits_has_no_full_line() {
    let store = MemoryStore::new();
    let policy = |name| Policy::new(name, SlidingLog::per_hour(1));
    let waits = || policy("waits").wait_up_to(7_200 * SECOND).max_waiting(1);
    let one = Limiter::new(store.clone(), waits());
    let both = Limiter::new(store, [waits(), policy("other")]);
    let _ = both.acquire("k").await.expect("it fits");
    waiting(&one, 1).await;
    let Err(AcquireError::LineFull(denied)) = both.acquire("k").await else {
        panic!("one waits");
    };
    let denials: Vec<_> = denied.decision().policies().map(|policy| policy.denial()).collect();
    assert_eq!(denials, [Some(Denial::LineFull), Some(Denial::QuotaExceeded)]);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_has_waited_in_vain_has_no_receipt() {
    let slots = Policy::new("slots", Concurrency::new(1)).wait_up_to(SECOND);
    let observes = Policy::new("observes", SlidingLog::per_hour(9)).observe_only();
    let limiter = Limiter::new(MemoryStore::new(), [slots, observes]);
    let _held = limiter.acquire("k").await.expect("it fits");
    let Err(AcquireError::Denied(denied)) = limiter.acquire("k").await else {
        panic!("the slot is held");
    };
    assert!(denied.decision().take_receipt().is_empty());
}

/// Its check has added it to the place of the process.
#[tokio::test(start_paused = true)]
async fn a_request_that_finds_a_line_full_after_its_check_leaves_the_place() {
    let store = Gated::new(MemoryStore::new());
    let policy = Policy::new("p", SlidingLog::per_hour(1)).wait_up_to(36_000 * SECOND);
    let limiter = Limiter::new(store.clone(), policy.max_waiting(1));
    store.open(1);
    let _ = limiter.acquire("k").await.expect("it fits");
    let callers = waiting(&limiter, 2).await;
    store.open(100);
    sleep(SECOND / 10).await;
    let over = callers.iter().filter(|caller| caller.is_finished());
    assert_eq!(over.count(), 1);
    let denied = limiter.check("k").await.expect("in memory");
    let wait = denied.retry_after().expect("one waits");
    assert!(wait <= 7_200 * SECOND, "{wait:?}");
}

#[tokio::test]
async fn a_check_of_a_policy_with_waits_takes_one_command_more() {
    let redis = Redis::start();
    let mut taken = Vec::new();
    for wait in [Duration::ZERO, 20 * SECOND] {
        let policy = || Policy::new(format!("p{wait:?}"), SlidingLog::per_hour(9)).wait_up_to(wait);
        let limiter = redis_limiter(&redis, policy).await;
        assert!(limiter.check("k").await.expect("it replies").is_allowed());
        let before = commands(&redis).await;
        assert!(limiter.check("k").await.expect("it replies").is_allowed());
        let checked = commands(&redis).await;
        assert!(limiter.acquire("k").await.is_ok());
        let acquired = commands(&redis).await;
        taken.push([0, 1].map(|nth| [checked[nth] - before[nth], acquired[nth] - checked[nth]]));
    }
    let [[calls, commands], [calls_with_line, commands_with_line]] = taken[..] else {
        panic!("{taken:?}")
    };
    assert_eq!((calls, calls_with_line), ([1; 2], [1; 2]));
    assert_eq!(commands[0], commands[1]);
    assert_eq!(commands_with_line, commands.map(|commands| commands + 1));
}

/// Each pause ends before the request is checked again, and another one has begun.
#[test]
fn many_short_pauses_need_no_stack() {
    const PAUSES: u32 = 10_000;

    let thread = std::thread::Builder::new().stack_size(256 * 1024).spawn(|| {
        let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(async {
            let store = MemoryStore::new();
            let policy = Policy::new("api", SlidingLog::per_second(1));
            let bans = Limiter::new(store.clone(), policy.clone().ban(tower_quota::Ban::by_hand()));
            let policy = policy
                .key(key::constant("k"))
                .learn_from_responses()
                .wait_up_to(200 * SECOND);
            let service = RateLimitLayer::new(store, policy).layer(tower::service_fn(
                async |_: http::Request<http_body_util::Empty<bytes::Bytes>>| {
                    Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
                },
            ));
            let start = Instant::now();
            bans.ban(tower_quota::Key::constant("k"), 8 * MILLISECOND)
                .await
                .expect("in memory");
            let waits = tokio::spawn(service.oneshot(http::Request::new(http_body_util::Empty::new())));
            for _ in 0..PAUSES {
                sleep(7 * MILLISECOND).await;
                assert!(!waits.is_finished());
                bans.ban(tower_quota::Key::constant("k"), 8 * MILLISECOND)
                    .await
                    .expect("in memory");
            }
            let response = waits.await.expect("no panic").expect("it never fails");
            assert!(response.status().is_success());
            assert!(start.elapsed() < PAUSES * 7 * MILLISECOND + SECOND / 10);
        });
    });
    thread.expect("a thread").join().expect("no overflow");
}

/// What is in the line of a key is read as text of doubles, whoever has written it.
#[tokio::test]
async fn forged_places_and_wakes_delay_until_they_expire_and_admit_nobody() {
    let redis = Redis::start();
    let policy = || Policy::new("p", SlidingLog::new(1, SECOND)).wait_up_to(20 * SECOND);
    let limiter = redis_limiter(&redis, policy).await;
    let mut first = limiter.acquire("k").await.expect("it is free");
    let mut callers = waiting(&limiter, 1).await;
    let started = Instant::now();
    let line = loop {
        assert!(started.elapsed() < PATIENCE, "it does not stand in a line");
        let lines: Vec<String> = redis.command("KEYS", ["quota:1:line:*"]).await;
        if let Some(line) = lines.into_iter().next() {
            break line;
        }
        if callers[0].is_finished() {
            // The second has passed before it was found.
            first = callers.remove(0).await.expect("no panic").expect("it is admitted");
            callers = waiting(&limiter, 1).await;
        }
    };
    for channel in redis.command::<Vec<String>>("PUBSUB", ["CHANNELS", "*wake*"]).await {
        for message in ["", "x", "-1", "18446744073709551616", &"9".repeat(10_000)] {
            redis.command::<i64>("PUBLISH", [&channel, message]).await;
        }
    }
    let admitted = callers.remove(0).await.expect("no panic").expect("it is admitted");
    let waited = admitted.server_time() - first.server_time();
    assert!(waited >= SECOND, "a wake admits nobody: {admitted:?}");

    let now = admitted.server_time().as_micros() as f64;
    let numbers = |numbers: &[f64]| {
        numbers
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let place = |until: f64, size: f64| numbers(&[7.0, 7.0, until, size, 1.0, 1e15]);
    for (forged, most) in [
        (place(now + 2e6, 1.0), 2 * SECOND),
        // Of a clock that is gone, or no place.
        (place(now + 1e12, 1.0), SECOND),
        (place(f64::NAN, 1.0), SECOND),
        (place(f64::INFINITY, f64::INFINITY), SECOND),
        (place(now + 2e6, -1.0), SECOND),
        (vec![0; 31], SECOND),
        (vec![255; 100_000], SECOND),
    ] {
        let words = vec![line.clone().into_bytes(), forged.clone()];
        redis.command_of_bytes::<()>("SET", words).await;
        let (admitted, waited) = timed(limiter.acquire("k")).await;
        let admitted = admitted.expect("it is admitted");
        assert!(admitted.store_error().is_none(), "{admitted:?}");
        // A second for the one before.
        assert!(waited <= most + SECOND, "{waited:?} for {:?}", &forged[..16]);
    }
}

/// Polls a call once.
pub(super) async fn begin<F: Future>(call: &mut std::pin::Pin<Box<F>>) {
    let is_pending = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_pending())).await;
    assert!(is_pending);
}

#[tokio::test(start_paused = true)]
async fn what_is_admitted_as_its_caller_leaves_is_given_back() {
    let limiter = Limiter::new(
        MemoryStore::new(),
        Policy::new("p", SlidingLog::new(1, 10 * SECOND)).wait_up_to(20 * SECOND),
    );
    assert!(limiter.acquire("k").await.is_ok());
    let mut call = Box::pin(limiter.acquire("k"));
    begin(&mut call).await;
    sleep(10 * SECOND + MILLISECOND).await;
    assert_eq!(
        limiter.peek("k").await.expect("in memory").remaining(),
        0,
        "it is admitted"
    );
    drop(call);
    assert!(limiter.check("k").await.expect("in memory").is_allowed());
}

#[tokio::test]
async fn callers_that_leave_during_their_first_check_take_nothing_with_them() {
    let redis = Redis::start();
    let policy = || Policy::new("p", SlidingLog::per_second(1)).wait_up_to(20 * SECOND);
    let [limiter, other] = [redis_limiter(&redis, policy).await, redis_limiter(&redis, policy).await];
    assert!(other.acquire("k").await.is_ok());
    // Less than may be before one that waits for 20 s.
    for _ in 0..15 {
        begin(&mut Box::pin(limiter.acquire("k"))).await;
    }
    let ((), left) = timed(stand_in_line(&redis, 0)).await;
    assert!(left < SECOND, "after {left:?}, when places expire");
    let (admitted, waited) = timed(other.acquire("k")).await;
    assert!(admitted.is_ok());
    // With their places it would be after their expiry.
    assert!(waited < 1_400 * MILLISECOND, "{waited:?}");
}

/// Two requests that wait for the same two keys, each of them by another limit of each.
#[tokio::test]
async fn requests_of_other_limits_do_not_wake_each_other_without_an_end() {
    let redis = Redis::start();
    for store in both_stores(&redis).await {
        // What counts the calls does not pass this on.
        store.receive_wakes();
        let store = Counted::new(store);
        let slots = |name: &'static str, quota: u64| {
            let limit = Concurrency::try_new(quota).expect("it is valid");
            Policy::new(name, limit).cost(2).wait_up_to(20 * SECOND)
        };
        let limiter = |one, other| Limiter::new(store.clone(), [slots("one", one), slots("other", other)]);
        let held = limiter(4, 4).acquire("k").await.expect("there is room");
        // The first lacks one key; the second would have room for that, and lacks the other key.
        let first = tokio::spawn({
            let limiter = limiter(3, 4);
            async move { limiter.acquire("k").await.map(drop) }
        });
        while store.calls() < 2 {
            sleep(MILLISECOND).await;
        }
        let second = tokio::spawn({
            let limiter = limiter(4, 3);
            async move { limiter.acquire("k").await.map(drop) }
        });
        sleep(SECOND / 2).await;
        assert!((3..50).contains(&store.calls()), "{} calls", store.calls());

        drop(held);
        assert!(first.await.expect("no panic").is_ok());
        assert!(second.await.expect("no panic").is_ok());
    }
}
