//! Requests wait where something else goes wrong: a runtime ends, the store fails, or a request could never be admitted.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Waker},
    thread,
    time::Duration,
};

use fred::{
    interfaces::ClientLike,
    types::config::{CredentialProvider, Server, ServerConfig},
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tower::{Layer, Service};
use tower_quota::{
    AcquireError, Ban, ClientLibrary, Concurrency, Decision, Denial, FailureMode, FixedWindow, Limiter, ManualClock,
    MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, TokenBucket,
    store::{ChargeState, ErrorKind, Operation, Outcome, Store, StoreError, StoreFuture, StoreRequest, StoreResponse},
};

use crate::support::{
    Broken, Counted, Gated, Log, Proxy, Redis, connected, each_client, each_store, eventually, lone_sentinel, patient,
};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

fn of_log(quota: u64) -> Policy<()> {
    Policy::new("p", SlidingLog::per_hour(quota)).wait_up_to(2 * HOUR)
}

fn trial() -> Policy<()> {
    Policy::new("trial", FixedWindow::per_hour(1_000)).observe_only()
}

each_store! { with crate::support::Unclocked:
    a_request_that_is_never_admitted_takes_no_place_beside_a_trial
    a_request_that_exceeds_what_may_wait_takes_no_place_beside_a_trial
    many_units_of_a_policy_with_waits_are_taken_at_once
}

each_client! {
    a_subscription_whose_server_has_vanished_is_replaced
    a_subscription_that_fails_is_logged_once_for_each_outage
    a_subscription_that_redis_refuses_is_logged
}

async fn acquire(limiter: &Limiter, cost: u64) -> Denial {
    match limiter.request("k").cost(cost).acquire().await {
        Err(AcquireError::Denied(denied) | AcquireError::LineFull(denied)) => {
            let denials = denied.decision().policies().find_map(|policy| policy.denial());
            denials.expect("one denies")
        }
        other => panic!("{other:?}"),
    }
}

async fn check(limiter: &Limiter) -> Decision {
    limiter.check("k").await.expect("the store replies")
}

async fn a_request_that_is_never_admitted_takes_no_place_beside_a_trial(store: Arc<impl Store>) {
    let limiter = Limiter::new(store, [of_log(10), trial()]);
    assert_eq!(acquire(&limiter, 20).await, Denial::CostAboveLimit);
    let decision = check(&limiter).await;
    assert!(decision.is_allowed() && decision.remaining() == 9, "{decision:?}");
}

async fn a_request_that_exceeds_what_may_wait_takes_no_place_beside_a_trial(store: Arc<impl Store>) {
    let limiter = Limiter::new(store, [of_log(10).max_waiting(3), trial()]);
    let used = limiter.request("k").cost(8).check().await.expect("the store replies");
    assert!(used.is_allowed());
    assert_eq!(acquire(&limiter, 5).await, Denial::LineFull);
    let decision = check(&limiter).await;
    assert!(decision.is_allowed() && decision.remaining() == 1, "{decision:?}");
}

/// Within the time of a call: not one after the other.
async fn many_units_of_a_policy_with_waits_are_taken_at_once(store: Arc<impl Store>) {
    let bytes = SlidingLog::new(10_000_000_000, HOUR).precision(6);
    let limiter = Limiter::new(store, Policy::new("bytes", bytes).wait_up_to(2 * HOUR));
    for (asked, taken) in [(u32::MAX, u32::MAX), (u32::MAX, u32::MAX), (u32::MAX, 1_410_065_410)] {
        let decision = limiter.request("k").take_up_to(asked).await;
        let decision = decision.expect("the store replies");
        assert_eq!(decision.taken(), taken);
        // Also of one that has taken less than it asked for.
        let policy = decision.policies().next().expect("there is one");
        assert_eq!((policy.denial(), policy.retry_after()), (None, None));
    }
}

#[test]
fn a_request_that_arrives_as_its_runtime_ends_does_not_hang() {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let handle = runtime.handle().clone();
    let limiter = Limiter::new(MemoryStore::new(), of_log(1));
    assert!(handle.block_on(check(&limiter)).is_allowed());
    runtime.shutdown_background();

    let (sender, ended) = mpsc::channel();
    thread::spawn(move || {
        // Tokio panics where a timer of a runtime that has ended is polled.
        let waited = catch_unwind(AssertUnwindSafe(|| {
            handle.block_on(limiter.acquire("k").into_future()).is_ok()
        }));
        let _ = sender.send(waited.unwrap_or(false));
    });
    assert_eq!(ended.recv_timeout(60 * SECOND), Ok(false));
}

/// Lets a request wait for a moment in a runtime that nothing drives afterwards, and has the task of the line.
fn wait_elsewhere(limiter: Limiter) -> Runtime {
    let elsewhere = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let acquired = async { timeout(SECOND / 10, limiter.acquire("k").into_future()).await.is_err() };
        assert!(runtime.block_on(acquired), "it waits");
        runtime
    });
    elsewhere.join().expect("no panic")
}

/// The task of a line is in a runtime that nothing drives while it checks the request.
#[tokio::test(start_paused = true)]
async fn a_request_waits_not_much_longer_than_it_may_for_another_runtime() {
    const LONGEST: Duration = Duration::from_secs(60);
    let gated = Gated::new(MemoryStore::new());
    let store = Counted::new(gated.clone());
    let policy = Policy::new("p", SlidingLog::new(1, LONGEST)).wait_up_to(LONGEST);
    let limiter = Limiter::new(store.clone(), policy.failure_mode(FailureMode::Closed));
    gated.open(1);
    assert!(check(&limiter).await.is_allowed());

    gated.open(1);
    let runtime = wait_elsewhere(limiter.clone());
    let mut acquired = pin!(limiter.acquire("k").into_future());
    gated.open(1);
    let is_pending = std::future::poll_fn(|cx| Poll::Ready(acquired.as_mut().poll(cx).is_pending()));
    assert!(is_pending.await);
    assert!(
        timeout(SECOND / 10, acquired.as_mut()).await.is_err(),
        "it stands in the line"
    );
    let calls = store.calls();
    let driven = thread::spawn(move || {
        runtime.block_on(async {
            while store.calls() == calls {
                sleep(SECOND / 100).await;
            }
        });
        runtime
    });
    let runtime = driven.join().expect("no panic");

    let started = Instant::now();
    let ended = acquired.await;
    assert!(matches!(ended, Err(AcquireError::Store(_))), "{ended:?}");
    assert!(started.elapsed() <= LONGEST + 30 * SECOND, "{:?}", started.elapsed());
    runtime.shutdown_background();
}

/// The runtime is not driven any longer.
#[test]
fn a_request_does_not_wait_for_the_one_ahead_whose_check_does_not_end() {
    const LONGEST: Duration = Duration::from_secs(600);
    let paused = || {
        let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime")
    };
    let (elsewhere, driven) = (paused(), paused());
    let gated = Gated::new(MemoryStore::new());
    let store = Counted::new(gated.clone());
    let policy = Policy::new("p", SlidingLog::new(1, LONGEST / 10)).wait_up_to(LONGEST);
    let limiter = Limiter::new(store.clone(), policy);
    gated.open(2);
    elsewhere.block_on(async {
        assert!(check(&limiter).await.is_allowed());
        let ahead = limiter.clone();
        tokio::spawn(async move { ahead.acquire("k").await.map(drop) });
        while store.calls() < 3 {
            sleep(SECOND / 100).await;
        }
    });
    gated.open(1_000);
    let admitted = driven.block_on(async {
        sleep(2 * SECOND).await; // as long as the other clock has run
        limiter.acquire("k").await
    });
    let admitted = admitted.expect("it is admitted");
    assert!(admitted.waited() < LONGEST / 5, "{:?}", admitted.waited());
}

/// A `block_on` has returned, and the runtime is kept.
#[tokio::test]
async fn a_request_does_not_wait_for_the_task_of_a_runtime_that_is_not_driven() {
    const LONGEST: Duration = Duration::from_secs(60);
    let policy = Policy::new("p", SlidingLog::new(1, 5 * SECOND)).wait_up_to(LONGEST);
    let limiter = Limiter::new(MemoryStore::new(), policy);
    assert!(check(&limiter).await.is_allowed());
    let runtime = wait_elsewhere(limiter.clone());
    let admitted = limiter.acquire("k").await.expect("it is admitted");
    assert!(admitted.waited() < LONGEST / 2, "{:?}", admitted.waited());
    runtime.shutdown_background();
}

/// Its time is over; what gets free is for those that still wait.
#[tokio::test]
async fn a_request_of_a_runtime_that_is_not_driven_takes_nothing_when_its_time_is_over() {
    let store = MemoryStore::new();
    let [short, long] = [5, 20].map(|seconds| {
        let slots = Policy::new("p", Concurrency::new(1))
            .wait_up_to(seconds * SECOND)
            .max_waiting(1);
        Limiter::new(store.clone(), slots)
    });
    let held = check(&long).await;
    let waits = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.spawn(async move { short.acquire("k").await });
        runtime.block_on(async { sleep(SECOND / 10).await });
        runtime
    });
    let runtime = waits.join().expect("no panic");
    assert!(matches!(long.acquire("k").await, Err(AcquireError::LineFull(_))));
    eventually("the line has room", async || {
        timeout(SECOND / 20, long.acquire("k").into_future()).await.is_err()
    })
    .await;
    drop(held.take_slots());
    let admitted = timeout(5 * SECOND, long.acquire("k").into_future()).await;
    assert!(matches!(admitted, Ok(Ok(_))), "{admitted:?}");
    runtime.shutdown_background();
}

/// One of them is admitted by this process, and the other one waits on.
#[tokio::test]
async fn requests_wait_on_when_the_runtime_that_checks_them_ends() {
    const LONGEST: Duration = Duration::from_secs(60);
    let gated = Gated::new(MemoryStore::new());
    let store = Counted::new(gated.clone());
    let policy = Policy::new("p", SlidingLog::new(1, 2 * SECOND)).wait_up_to(LONGEST);
    let limiter = Limiter::new(store.clone(), policy);
    gated.open(4);
    assert!(check(&limiter).await.is_allowed());
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let acquire = |limiter: Limiter| async move { limiter.acquire("k").await };
    runtime.spawn(acquire(limiter.clone()));
    eventually("it stands in the line", async || store.calls() >= 2).await;
    let waiting = [limiter.clone(), limiter].map(|limiter| tokio::spawn(acquire(limiter)));
    eventually("they are being checked", async || store.calls() >= 5).await;
    runtime.shutdown_background();
    gated.open(1_000);
    for caller in waiting {
        let admitted = caller.await.expect("no panic").expect("it is admitted");
        assert!(admitted.waited() < LONGEST / 2, "{:?}", admitted.waited());
    }
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_while_the_store_fails_are_not_denied_for_a_ban() {
    let policy = Policy::new("p", SlidingLog::per_second(1)).wait_up_to(10 * SECOND);
    let limiter = Limiter::new(Broken::default(), policy.ban(Ban::after(3, HOUR)));
    assert!(check(&limiter).await.is_allowed());
    let callers: Vec<_> = (0..5)
        .map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move { limiter.acquire("k").await })
        })
        .collect();
    for (nth, caller) in (1..).zip(callers) {
        let admitted = caller.await.expect("no panic").expect("it is admitted");
        assert_eq!(admitted.waited().as_secs(), nth);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_trial_has_counted_of_a_request_that_waited_is_refunded() {
    let enforced = Policy::new("p", SlidingLog::per_second(1)).wait_up_to(5 * SECOND);
    let limiter = Limiter::new(MemoryStore::new(), [enforced, trial()]);
    assert!(check(&limiter).await.is_allowed());
    let admitted = limiter.acquire("k").await.expect("it is admitted");
    assert_eq!(admitted.waited(), SECOND);

    let left = async || {
        let peeked = limiter.peek("k").await.expect("the store replies");
        let trial = peeked.policies().find(|policy| policy.name() == "trial");
        trial.expect("it observes").remaining()
    };
    assert_eq!(left().await, 998);
    admitted.take_receipt().refund().await.expect("the store replies");
    assert_eq!(left().await, 999);
}

/// One that waits for an hour without it.
async fn an_override_admits_one_that_waits(limiter: &Limiter) {
    assert!(check(limiter).await.is_allowed());
    let caller = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire("k").await }
    });
    tokio::task::yield_now().await;
    let set = limiter.override_limit("p", "k", SlidingLog::per_hour(9), HOUR).await;
    set.expect("it is valid");
    let admitted = timeout(60 * SECOND, caller).await.expect("it is admitted soon");
    let admitted = admitted.expect("no panic").expect("it is admitted");
    assert_eq!((admitted.limit(), admitted.remaining()), (9, 7));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_learns_of_an_override_in_memory() {
    let started = Instant::now();
    an_override_admits_one_that_waits(&Limiter::new(MemoryStore::new(), of_log(1))).await;
    assert!(started.elapsed() <= 2 * SECOND, "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_request_that_waits_learns_of_an_override_in_redis() {
    let redis = Redis::start();
    let store: RedisStore = connected(patient().overrides(true), &redis.url()).await;
    an_override_admits_one_that_waits(&Limiter::new(store, of_log(1))).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_of_any_cost_waits_where_no_other_does() {
    let policy = Policy::new("bytes", TokenBucket::per_second(1_000)).wait_up_to(10 * SECOND);
    let limiter = Limiter::new(MemoryStore::new(), policy);
    let used = limiter.request("k").cost(401).check().await.expect("the store replies");
    assert!(used.is_allowed());
    let admitted = limiter.request("k").cost(600).acquire().await.expect("it waits");
    assert_eq!(admitted.waited(), SECOND / 1_000);
}

/// A store that fails while it is cut off, or once.
#[derive(Clone, Default)]
struct Unsteady {
    store: MemoryStore,
    is_cut_off: Arc<AtomicBool>,
    fails_once: Arc<AtomicBool>,
}

impl Store for Unsteady {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        match self.is_cut_off.load(Ordering::Relaxed) || self.fails_once.swap(false, Ordering::Relaxed) {
            true => StoreFuture::ready(Err(StoreError::new(ErrorKind::Timeout, "no reply"))),
            false => self.store.decide(requests),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_while_the_store_fails_is_counted_by_all_policies_afterwards() {
    let store = Unsteady::default();
    let open = Policy::new("open", SlidingLog::per_hour(9)).failure_mode(FailureMode::Open);
    let waiting = Policy::new("p", SlidingLog::new(1, 5 * SECOND)).wait_up_to(60 * SECOND);
    let limiter = Limiter::new(store.clone(), [open, waiting]);
    assert!(check(&limiter).await.is_allowed());
    store.is_cut_off.store(true, Ordering::Relaxed);
    assert!(check(&limiter).await.is_allowed(), "this process counts");

    let caller = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire("k").await }
    });
    sleep(2 * SECOND).await;
    store.is_cut_off.store(false, Ordering::Relaxed);
    let admitted = caller.await.expect("no panic").expect("it is admitted");
    let policies: Vec<_> = admitted.policies().map(|one| (one.name(), one.remaining())).collect();
    assert_eq!(policies, [("open", 7), ("p", 0)]);
    assert!(admitted.store_error().is_none());
}

/// The check of the first one has the place of the second one too, which leaves before the store replies.
#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_during_the_check_of_another_one_leaves_no_place() {
    let store = Gated::new(MemoryStore::new());
    let policy = Policy::new("p", SlidingLog::per_second(1)).wait_up_to(60 * SECOND);
    let limiter = Limiter::new(store.clone(), policy);
    let acquire = || {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire("k").await })
    };
    store.open(3);
    assert!(check(&limiter).await.is_allowed());
    let [first, second] = [acquire(), acquire()];
    sleep(SECOND + SECOND / 100).await;
    second.abort();
    assert!(second.await.is_err(), "it waits");
    store.open(100);
    let _ = first.await.expect("no panic").expect("it is admitted");
    sleep(SECOND).await;
    assert!(check(&limiter).await.is_allowed());
}

/// A store after each of whose calls another process checks a request, which arrives then.
#[derive(Clone)]
struct Contended {
    store: MemoryStore,
    other: Limiter,
    overtakes: Arc<AtomicBool>,
}

impl Store for Contended {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let answer = self.store.decide(requests);
        let arrival = pin!(self.other.check("k").into_future()).poll(&mut Context::from_waker(Waker::noop()));
        if matches!(arrival, Poll::Ready(Ok(arrival)) if arrival.is_allowed()) {
            self.overtakes.store(true, Ordering::Relaxed);
        }
        answer
    }
}

/// Its last check is sent while it stands in its place still.
#[tokio::test(start_paused = true)]
async fn a_request_whose_wait_ends_during_a_check_is_not_overtaken() {
    let store = MemoryStore::new();
    let policy = || Policy::new("p", SlidingLog::new(1, 6 * SECOND / 5)).wait_up_to(13 * SECOND / 10);
    let other = Limiter::new(store.clone(), policy());
    let overtakes = Arc::new(AtomicBool::new(false));
    let contended = Contended {
        store,
        other: other.clone(),
        overtakes: overtakes.clone(),
    };
    let store = Gated::new(contended);
    let limiter = Limiter::new(store.clone(), policy());
    assert!(check(&other).await.is_allowed());
    let caller = tokio::spawn(async move { limiter.acquire("k").await });
    store.open(1);
    // The check after a second denies it, and its reply comes when its wait is over.
    sleep(7 * SECOND / 5).await;
    store.open(10);
    assert!(caller.await.expect("no panic").is_ok());
    assert!(!overtakes.load(Ordering::Relaxed));
}

/// The reply to its first check is under way when the first one of the line is checked again.
#[tokio::test(start_paused = true)]
async fn a_request_that_arrives_during_the_check_of_another_one_is_not_overtaken() {
    let store = MemoryStore::new();
    let policy = || Policy::new("p", SlidingLog::per_second(2)).wait_up_to(60 * SECOND);
    let other = Limiter::new(store.clone(), policy());
    let late = Gated::new(store);
    let limiter = Limiter::new(late.clone(), policy());
    let acquire = || {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire("k").await })
    };
    assert!(
        other
            .request("k")
            .cost(2)
            .check()
            .await
            .expect("it replies")
            .is_allowed()
    );
    late.open(1);
    let first = acquire();
    sleep(9 * SECOND / 10).await;
    let second = acquire();
    // The first one is admitted after a second, and the second one is not checked with it.
    sleep(SECOND / 5).await;
    assert!(
        !check(&other).await.is_allowed(),
        "one that arrives after both comes first"
    );
    late.open(100);
    for caller in [first, second] {
        let _ = caller.await.expect("no panic").expect("it is admitted");
    }
    assert!(!check(&other).await.is_allowed(), "both are admitted");
}

/// The reply to its check comes after the first one was checked again, which has arrived at the same time.
#[tokio::test(start_paused = true)]
async fn a_request_with_a_late_reply_has_its_place_again() {
    let store = MemoryStore::new();
    let policy = || Policy::new("p", SlidingLog::new(1, 10 * SECOND)).wait_up_to(60 * SECOND);
    let other = Limiter::new(store.clone(), policy());
    let late = Gated::new(store);
    let limiter = Limiter::new(late.clone(), policy());
    assert!(check(&other).await.is_allowed());
    late.open(1);
    let _callers = [(); 2].map(|()| {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire("k").await })
    });
    sleep(SECOND + SECOND / 10).await;
    late.open(2);
    sleep(SECOND / 10).await;
    let wait = check(&other).await.retry_after().expect("it comes after both");
    assert!(wait > 28 * SECOND, "{wait:?}");
}

/// A store that adds a request to no line when it arrives, like Redis where its keys are in several slots of a cluster.
#[derive(Clone, Default)]
struct InSlots {
    store: MemoryStore,
    arrives: Arc<AtomicBool>,
}

impl Store for InSlots {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        if !self.arrives.swap(false, Ordering::Relaxed) {
            return self.store.decide(requests);
        }
        let checks: Vec<_> = requests
            .iter()
            .map(|request| StoreRequest::new(Operation::Check, request.charges()))
            .collect();
        self.store.decide(&checks)
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_with_keys_in_several_slots_has_its_place_when_it_has_its_first_reply() {
    let store = InSlots::default();
    let policy = || Policy::new("p", SlidingLog::new(1, 10 * SECOND)).wait_up_to(60 * SECOND);
    let other = Limiter::new(store.store.clone(), policy());
    let hourly = Policy::new("hourly", SlidingLog::per_hour(9));
    let limiter = Limiter::new(store.clone(), [policy(), hourly]);
    assert!(check(&other).await.is_allowed());
    store.arrives.store(true, Ordering::Relaxed);
    let _caller = tokio::spawn(async move { limiter.acquire("k").await });
    sleep(SECOND / 10).await;
    let wait = check(&other).await.retry_after().expect("it comes after the other one");
    assert!(wait > 19 * SECOND, "{wait:?}");
}

/// A store that replies at once says that a request is to be checked again almost at once.
#[tokio::test]
async fn a_request_that_waits_for_a_clock_that_stands_still_leaves_the_runtime_to_others() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let policy = Policy::new("p", TokenBucket::new(1, SECOND)).wait_up_to(60 * SECOND);
    let limiter = Limiter::new(store, policy);
    assert!(check(&limiter).await.is_allowed());
    let caller = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire("k").await }
    });
    tokio::task::yield_now().await;
    clock.advance(SECOND - Duration::from_micros(1));
    // The next check comes within a second, and many after it.
    for _ in 0..150 {
        sleep(SECOND / 100).await;
    }
    assert!(!caller.is_finished());
    clock.advance(Duration::from_micros(1));
    assert!(caller.await.expect("no panic").is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_while_the_store_fails_leaves_no_place() {
    let store = Unsteady::default();
    let limiter = Limiter::new(
        store.clone(),
        Policy::new("p", SlidingLog::per_second(1)).wait_up_to(60 * SECOND),
    );
    store.is_cut_off.store(true, Ordering::Relaxed);
    assert!(check(&limiter).await.is_allowed());
    let waited = timeout(SECOND - SECOND / 10, limiter.acquire("k").into_future()).await;
    assert!(waited.is_err(), "it waits");
    sleep(SECOND / 5).await;
    assert!(check(&limiter).await.is_allowed(), "this process counts");
}

/// They share no counts, so a request does not wait behind one of another store, which has its room later.
#[tokio::test(start_paused = true)]
async fn requests_of_stores_without_an_identity_wait_in_lines_of_their_own() {
    let [early, late] = [(); 2].map(|()| {
        let policy = Policy::new("p", SlidingLog::new(1, 10 * SECOND)).wait_up_to(60 * SECOND);
        Limiter::new(Counted::new(MemoryStore::new()), policy)
    });
    assert!(check(&early).await.is_allowed());
    sleep(9 * SECOND).await;
    assert!(check(&late).await.is_allowed());
    let ahead = tokio::spawn(async move { late.acquire("k").await.is_ok() });
    sleep(SECOND / 100).await;
    let admitted = early.acquire("k").await.expect("it is admitted");
    assert!(admitted.waited() <= 2 * SECOND, "{:?}", admitted.waited());
    assert!(ahead.await.expect("no panic"), "it waits long enough");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_ends_with_an_error_leaves_no_place() {
    let store = Unsteady::default();
    let policy = Policy::new("p", SlidingLog::per_second(1)).wait_up_to(60 * SECOND);
    let limiter = Limiter::new(store.clone(), policy.failure_mode(FailureMode::Closed));
    assert!(check(&limiter).await.is_allowed());
    let waiting = limiter.clone();
    let caller = tokio::spawn(async move { waiting.acquire("k").await });
    sleep(SECOND / 2).await;
    store.fails_once.store(true, Ordering::Relaxed);
    let ended = caller.await.expect("no panic");
    assert!(matches!(ended, Err(AcquireError::Store(_))), "{ended:?}");
    sleep(SECOND / 10).await;
    assert!(check(&limiter).await.is_allowed());
}

/// A store of an application may not know the wait.
struct Endless;

impl Store for Endless {
    fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
        let state = ChargeState::new(0, Some(Duration::MAX), Duration::MAX);
        let denied = StoreResponse::new(SECOND, [Outcome::new(false, [state])]);
        StoreFuture::pending(async { Ok(denied) })
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_a_key_whose_wait_has_no_end() {
    let policy = Policy::new("p", Concurrency::new(1)).wait_up_to(10 * SECOND);
    let started = Instant::now();
    assert_eq!(acquire(&Limiter::new(Endless, policy), 1).await, Denial::QuotaExceeded);
    assert_eq!(started.elapsed().as_secs(), 10);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_dropped_before_it_is_polled_leaves_no_place() {
    type Body = http_body_util::Empty<bytes::Bytes>;

    let policy = Policy::new("p", SlidingLog::per_second(1)).key(tower_quota::key::constant("k"));
    let layer = RateLimitLayer::new(MemoryStore::new(), policy.wait_up_to(60 * SECOND));
    let mut service = layer.layer(tower::service_fn(async |_: http::Request<Body>| {
        Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    }));
    let request = || http::Request::new(Body::new());
    assert!(
        service
            .call(request())
            .await
            .expect("it never fails")
            .status()
            .is_success()
    );
    drop(service.call(request()));
    sleep(SECOND).await;
    let mut hurried = request();
    hurried
        .headers_mut()
        .insert("grpc-timeout", http::HeaderValue::from_static("0m"));
    let response = service.call(hurried).await.expect("it never fails");
    assert!(response.status().is_success(), "{response:?}");
}

async fn a_subscription_whose_server_has_vanished_is_replaced(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let store = connected(patient().client_library(library), &proxy.url()).await;
    store.receive_wakes();
    eventually("it is subscribed", async || redis.wake_subscriptions().await == 1).await;
    // Redis does not notice either, so the first one stays there.
    proxy.blackhole_and_go_to(redis.port());
    eventually("there is another subscription", async || {
        redis.wake_subscriptions().await == 2
    })
    .await;
}

async fn a_subscription_that_fails_is_logged_once_for_each_outage(library: ClientLibrary) {
    let log = Log::capture_everything();
    let mut redis = Redis::not_started();
    let store = patient().client_library(library).url(&redis.url()).connect_lazy();
    let store = store.expect("Redis may come later");
    store.receive_wakes();
    for outage in 1..=2 {
        let begun = Instant::now();
        eventually("it is logged", async || {
            log.text().matches("no messages wake requests").count() == outage
        })
        .await;
        // After ten attempts: a failover is shorter.
        assert!(begun.elapsed() > 4 * SECOND, "{:?}", begun.elapsed());
        redis.restart();
        eventually("it is subscribed", async || redis.wake_subscriptions().await == 1).await;
        assert_eq!(log.text().matches("no messages wake requests").count(), outage);
        redis.kill();
    }
}

async fn a_subscription_that_redis_refuses_is_logged(library: ClientLibrary) {
    let redis = Redis::start();
    for refused in ["-subscribe", "-publish", "resetchannels"] {
        let rule = [
            "SETUSER",
            "limiter",
            "reset",
            "on",
            ">password",
            "~*",
            "&*",
            "+@all",
            refused,
        ];
        redis.command::<()>("ACL", rule).await;
        let url = redis.url().replace("://", "://limiter:password@");
        let log = Log::capture();
        let store = connected(patient().client_library(library), &url).await;
        store.receive_wakes();
        eventually(refused, async || {
            let text = log.text();
            text.contains("no messages wake requests") && text.contains("NOPERM")
        })
        .await;
    }
}

/// Credentials of a user without a password, which fred awaits without a bound before it asks a sentinel.
#[derive(Debug)]
struct SlowCredentials {
    released: watch::Sender<bool>,
    awaited: AtomicUsize,
}

impl CredentialProvider for SlowCredentials {
    fn fetch<'a, 'b, 'c>(&'a self, _: Option<&'b Server>) -> Fetched<'c>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async {
            let mut released = self.released.subscribe();
            if !*released.borrow_and_update() {
                self.awaited.fetch_add(1, Ordering::Relaxed);
                let _ = released.wait_for(|released| *released).await;
            }
            Ok((None, None))
        })
    }
}

type Fetched<'a> =
    Pin<Box<dyn Future<Output = Result<(Option<String>, Option<String>), fred::error::Error>> + Send + 'a>>;

#[tokio::test]
async fn a_subscription_that_takes_too_long_leaves_no_connection() {
    let redis = Redis::start();
    let sentinel = lone_sentinel(redis.port()).await;
    let credentials = Arc::new(SlowCredentials {
        released: watch::Sender::new(true),
        awaited: AtomicUsize::new(0),
    });
    let mut builder = redis.builder();
    builder.with_config(|config| {
        config.server = ServerConfig::new_sentinel(vec![("127.0.0.1", sentinel)], "main");
        config.credential_provider = Some(credentials.clone());
    });
    let client = builder.build().expect("a client");
    client.init().await.expect("the server answers");
    let store = patient().client(client).connect().await.expect("the client will do");
    let connections = async || redis.cli(&["CLIENT", "LIST"]).lines().count();
    let before = connections().await;

    credentials.released.send_replace(false);
    store.receive_wakes();
    eventually("another attempt is made", async || {
        credentials.awaited.load(Ordering::Relaxed) > 1
    })
    .await;
    credentials.released.send_replace(true);
    eventually("it is subscribed", async || redis.wake_subscriptions().await == 1).await;
    // With the one of the test.
    assert_eq!(connections().await, before + 2, "{}", redis.cli(&["CLIENT", "LIST"]));
}

#[tokio::test]
async fn a_client_of_the_application_receives_wakes_whether_it_fails_fast_or_waits() {
    for fail_fast in [true, false] {
        let redis = Redis::start();
        let mut builder = redis.builder();
        builder.with_config(|config| config.fail_fast = fail_fast);
        let client = builder.build().expect("a client");
        client.init().await.expect("the server answers");
        let store = patient().client(client).connect().await.expect("the client will do");
        store.receive_wakes();
        eventually("it is subscribed", async || redis.wake_subscriptions().await == 1).await;
    }
}
