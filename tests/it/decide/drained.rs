//! What a store waits for before its process ends.

use std::{
    convert::Infallible,
    env,
    future::poll_fn,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    task::Poll,
    thread,
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Empty;
use tokio::{
    runtime::Builder,
    spawn,
    task::yield_now,
    time::{Instant, advance},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    Concurrency, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, key,
    store::{ErrorKind, Store, StoreError, StoreFuture, StoreId, StoreRequest},
};

use crate::support::{Broken, Gated, PATIENCE, this_binary};

/// A store whose responses the test lets pass. The pointer gives it an identity.
type Slow = Arc<Gated<MemoryStore>>;

fn slow() -> Slow {
    Arc::new(Gated::new(MemoryStore::new()))
}

fn log() -> Policy<()> {
    Policy::new("log", SlidingLog::per_hour(10))
}

fn slots() -> Policy<()> {
    Policy::new("slots", Concurrency::new(1))
}

/// The settlements and releases that are not confirmed now.
async fn owed(store: &(impl Store + ?Sized)) -> (u64, u64) {
    let drained = store.drained(Duration::ZERO).await;
    drained.map_or_else(|undrained| numbers(&undrained), |()| (0, 0))
}

/// The settlements and releases of an error.
fn numbers(undrained: &StoreError) -> (u64, u64) {
    let numbers = undrained.to_string();
    let mut numbers = numbers.split(' ').filter_map(|word| word.parse().ok());
    let mut next = || numbers.next().expect("two numbers");
    (next(), next())
}

/// Asserts that the store waits for this and for nothing else, and that its next responses end it.
async fn assert_waits_for(store: &Slow, settlements: u64, releases: u64) {
    assert_eq!(owed(store).await, (settlements, releases));
    let waiting = spawn(store.drained(PATIENCE));
    yield_now().await;
    assert!(!waiting.is_finished());
    store.open(10);
    assert!(waiting.await.expect("no panic").is_ok());
}

async fn is_pending<F: Future>(future: &mut Pin<&mut F>) -> bool {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await
}

/// The remaining units, with the gate open.
async fn remaining(limiter: &Limiter) -> u64 {
    limiter.peek("k").await.expect("the store replies").remaining()
}

#[tokio::test(start_paused = true)]
async fn a_store_without_requests_is_drained_at_once() {
    let (memory, store) = (MemoryStore::new(), slow());
    store.open(1);
    assert!(
        Limiter::new(store.clone(), log())
            .check("k")
            .await
            .unwrap()
            .is_allowed()
    );
    assert!(
        Limiter::new(memory.clone(), log())
            .check("k")
            .await
            .unwrap()
            .is_allowed()
    );
    assert!(store.drained(PATIENCE).await.is_ok());
    assert!(memory.drained(PATIENCE).await.is_ok());
}

#[test]
fn a_store_without_requests_is_drained_without_a_runtime() {
    let mut drained = MemoryStore::new().drained(PATIENCE);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(matches!(drained.as_mut().poll(&mut context), Poll::Ready(Ok(()))));
}

#[tokio::test(start_paused = true)]
async fn a_refund_after_the_response_is_waited_for() {
    let store = slow();
    let policy = log().key(key::constant("k")).refund_if(|_| true);
    let service = RateLimitLayer::new(store.clone(), policy).layer(service_fn(async |_: Request<Empty<Bytes>>| {
        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
    }));
    store.open(1);
    let response = service.oneshot(Request::new(Empty::new())).await;
    assert_eq!(response.expect("it does not fail").status(), 200);
    assert_waits_for(&store, 1, 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_is_waited_for_while_its_decision_is_observed() {
    // Both are there all the time, so that neither has the identity of the other.
    let (memory, store) = (MemoryStore::new(), slow());
    store.open(2);
    assert_waited_for_while_observed(store.clone()).await;
    assert_waited_for_while_observed(memory.clone()).await;
}

async fn assert_waited_for_while_observed(store: impl Store + Clone) {
    let policy = log().key(key::constant("k")).refund_if(|_| true);
    let seen = Arc::new(AtomicBool::new(false));
    let (observed, drained) = (seen.clone(), store.clone());
    let layer = RateLimitLayer::new(store, policy).on_decision(move |_| {
        let mut drained = drained.drained(Duration::ZERO);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let drained = drained.as_mut().poll(&mut context);
        observed.store(!matches!(drained, Poll::Ready(Ok(()))), Ordering::Relaxed);
    });
    let service = layer.layer(service_fn(async |_: Request<Empty<Bytes>>| {
        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
    }));
    let response = service.oneshot(Request::new(Empty::new())).await;
    assert_eq!(response.expect("it does not fail").status(), 200);
    assert!(seen.load(Ordering::Relaxed), "its refund is owed");
}

#[tokio::test(start_paused = true)]
async fn a_request_with_a_completion_rule_is_waited_for_until_it_is_cancelled_and_refunded() {
    let store = slow();
    let policy = log().key(key::constant("k")).refund_if(|end| end.is_cancelled());
    let never =
        service_fn(|_: Request<Empty<Bytes>>| std::future::pending::<Result<Response<Empty<Bytes>>, Infallible>>());
    let service = RateLimitLayer::new(store.clone(), policy).layer(never);
    {
        let mut response = pin!(service.oneshot(Request::new(Empty::new())));
        assert!(is_pending(&mut response).await, "it is checked");
        assert_eq!(owed(&store).await, (1, 0));
        store.open(1);
        assert!(is_pending(&mut response).await, "it is served");
        assert_eq!(owed(&store).await, (1, 0));
    }
    assert_waits_for(&store, 1, 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_settlement_is_waited_for_before_its_task_has_run() {
    let store = slow();
    let limiter = Limiter::new(store.clone(), log());
    store.open(1);
    let receipt = limiter.request("k").cost(5).check().await.unwrap().take_receipt();
    spawn(async move { receipt.settle(2).await });
    assert_waits_for(&store, 1, 0).await;
    assert_eq!(remaining(&limiter).await, 8);
}

#[tokio::test(start_paused = true)]
async fn a_settlement_whose_future_is_dropped_is_waited_for() {
    let store = slow();
    let limiter = Limiter::new(store.clone(), log());
    store.open(1);
    let decision = limiter.request("k").cost(5).check().await.unwrap();
    assert!(is_pending(&mut pin!(decision.take_receipt().settle(2))).await);
    assert_waits_for(&store, 1, 0).await;
    assert_eq!(remaining(&limiter).await, 8);
}

#[tokio::test(start_paused = true)]
async fn a_receipt_is_waited_for_until_it_is_dropped() {
    let store = slow();
    store.open(1);
    let decision = Limiter::new(store.clone(), log()).check("k").await.unwrap();
    assert_eq!(owed(&store).await, (0, 0));
    let receipt = decision.take_receipt();
    assert_eq!(owed(&store).await, (1, 0));
    drop(receipt);
    assert!(store.drained(PATIENCE).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn slots_are_waited_for_until_their_release_is_confirmed() {
    let store = slow();
    let limiter = Limiter::new(store.clone(), slots());
    store.open(1);
    let held = limiter.check("k").await.unwrap().take_slots().expect("it is admitted");
    assert_eq!(owed(&store).await, (0, 1));
    drop(held);
    assert_waits_for(&store, 0, 1).await;
    assert_eq!(remaining(&limiter).await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_its_caller_waits_for_is_waited_for() {
    let store = slow();
    let limiter = Limiter::new(store.clone(), slots());
    store.open(1);
    let held = limiter.check("k").await.unwrap().take_slots().expect("it is admitted");
    spawn(held.release());
    assert_waits_for(&store, 0, 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_release_after_a_renewal_is_waited_for() {
    let store = slow();
    let limiter = Limiter::new(
        store.clone(),
        Policy::new("slots", Concurrency::new(1).lease(Duration::from_secs(60))),
    );
    store.open(1);
    let held = limiter.check("k").await.unwrap();
    advance(Duration::from_secs(21)).await;
    for _ in 0..10 {
        yield_now().await;
    }
    drop(held); // The renewal is in flight.
    assert_waits_for(&store, 0, 1).await;
    assert_eq!(remaining(&limiter).await, 1);
}

#[tokio::test(start_paused = true)]
async fn the_slots_of_a_permit_are_waited_for() {
    let store = slow();
    store.open(1);
    let permit = Limiter::new(store.clone(), slots()).acquire("k").await;
    drop(permit.expect("there is room"));
    assert_waits_for(&store, 0, 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_in_a_line_is_not_waited_for() {
    let store = slow();
    let limiter = Limiter::new(store.clone(), Policy::new("log", SlidingLog::per_hour(1)));
    store.open(2);
    assert!(limiter.check("k").await.unwrap().is_allowed());
    {
        let mut waiting = pin!(
            limiter
                .request("k")
                .wait_up_to(Duration::from_secs(3_600))
                .acquire()
                .into_future()
        );
        assert!(is_pending(&mut waiting).await);
        assert_eq!(owed(&store).await, (0, 0));
    }
    assert_eq!(owed(&store).await, (0, 0), "nothing of it was counted");
}

#[tokio::test(start_paused = true)]
async fn a_check_whose_caller_has_left_is_waited_for() {
    let store = slow();
    let limiter = Limiter::new(store.clone(), slots());
    assert!(is_pending(&mut pin!(limiter.check("k"))).await);
    assert_waits_for(&store, 0, 1).await;
    assert_eq!(remaining(&limiter).await, 1);

    let store = slow();
    let limiter = Limiter::new(store.clone(), log());
    assert!(is_pending(&mut pin!(limiter.acquire("k").into_future())).await);
    assert_waits_for(&store, 1, 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_reset_whose_caller_has_left_is_waited_for() {
    let store = slow();
    let limiter = Limiter::new(store.clone(), log());
    assert!(is_pending(&mut pin!(limiter.reset("k"))).await);
    assert_waits_for(&store, 1, 0).await;
}

#[tokio::test(start_paused = true)]
async fn what_begins_meanwhile_is_waited_for_too() {
    let store = slow();
    let limiter = Limiter::new(store.clone(), log());
    store.open(2);
    let [first, second] = [limiter.check("k").await, limiter.check("k").await].map(|decision| decision.unwrap());
    let receipt = first.take_receipt();
    let waiting = spawn(store.drained(PATIENCE));
    yield_now().await;
    spawn(async move { second.take_receipt().refund().await });
    yield_now().await;
    drop(receipt);
    yield_now().await;
    assert!(!waiting.is_finished(), "the refund of the second one is not confirmed");
    store.open(1);
    assert!(waiting.await.expect("no panic").is_ok());
    assert_eq!(owed(&store).await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn it_ends_after_its_time() {
    let store = slow();
    store.open(1);
    let held = Limiter::new(store.clone(), slots()).check("k").await.unwrap();
    let start = Instant::now();
    let undrained = store.drained(Duration::from_secs(5)).await.unwrap_err();
    assert_eq!(start.elapsed().as_secs(), 5);
    assert_eq!(numbers(&undrained), (0, 1));
    drop(held);
}

/// A store that passes on to another one, under its identity.
struct Around(Gated<MemoryStore>, MemoryStore);

impl Store for Around {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        self.0.decide(requests)
    }

    fn id(&self) -> Option<StoreId> {
        self.1.id()
    }
}

#[tokio::test(start_paused = true)]
async fn all_stores_of_one_identity_are_drained_together() {
    let memory = MemoryStore::new();
    let gated = Gated::new(memory.clone());
    gated.open(1);
    let around: Arc<dyn Store> = Arc::new(Around(gated.clone(), memory.clone()));
    let held = Limiter::new(around.clone(), slots()).check("k").await.unwrap();
    drop(held);
    assert_eq!(owed(&*around).await, (0, 1));
    assert_eq!(owed(&Box::new(around)).await, (0, 1));
    assert_eq!(owed(&memory.clone()).await, (0, 1));
    assert_eq!(owed(&MemoryStore::new()).await, (0, 0));
    gated.open(1);
    assert!(memory.drained(PATIENCE).await.is_ok());
}

/// In a process of its own, since what is owed to stores without identity is one number.
#[test]
fn a_store_without_identity_is_drained() {
    const TEST: &str = "decide::drained::a_store_without_identity_is_drained";
    const ALONE: &str = "TOWER_QUOTA_ALONE";
    if env::var_os(ALONE).is_none() {
        let output = this_binary(TEST).env(ALONE, "").output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }

    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().start_paused(true).build().expect("a runtime");
    runtime.block_on(async {
        let store = Gated::new(MemoryStore::new());
        store.open(1);
        drop(Limiter::new(store.clone(), slots()).check("k").await.unwrap());
        assert_eq!(owed(&store).await, (0, 1));
        store.open(1);
        assert!(store.drained(PATIENCE).await.is_ok());
    });
}

#[tokio::test(start_paused = true)]
async fn what_this_process_counts_while_the_store_fails_is_given_back_at_once() {
    let store = Arc::new(Broken::default());
    let limiter = Limiter::new(store.clone(), slots());
    let held = limiter.check("k").await.unwrap();
    assert!(held.is_allowed() && held.store_error().is_some());
    assert_eq!(owed(&store).await, (0, 1));
    drop(held);
    // The release after the check, whose outcome is unknown, has failed before.
    assert!(store.drained(PATIENCE).await.is_ok());
}

/// A store that breaks.
#[derive(Default)]
struct Breaking {
    store: MemoryStore,
    is_broken: AtomicBool,
}

impl Store for Breaking {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        if self.is_broken.load(Ordering::Relaxed) {
            return StoreFuture::pending(async { Err(StoreError::new(ErrorKind::Unreachable, "the store is away")) });
        }
        self.store.decide(requests)
    }
}

#[tokio::test(start_paused = true)]
async fn what_fails_meanwhile_is_reported_once() {
    let store = Arc::new(Breaking::default());
    let decision = Limiter::new(store.clone(), [log(), slots()]).check("k").await.unwrap();
    store.is_broken.store(true, Ordering::Relaxed);
    spawn(async move { decision.take_receipt().refund().await });
    let undrained = store.drained(PATIENCE).await.unwrap_err();
    assert_eq!(numbers(&undrained), (1, 1));
    assert!(store.drained(PATIENCE).await.is_ok());
}

#[tokio::test]
async fn a_task_that_ends_with_its_runtime_is_reported_as_lost() {
    let store = slow();
    let (its_store, (begun, has_begun), (end, ends)) = (store.clone(), mpsc::channel(), mpsc::channel::<()>());
    let other = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            its_store.open(1);
            let decision = Limiter::new(its_store, [log(), slots()]).check("k").await.unwrap();
            assert!(is_pending(&mut pin!(decision.take_receipt().refund())).await);
        });
        begun.send(()).expect("the test waits");
        let _ = ends.recv();
    });
    has_begun.recv().expect("it is sent");
    assert_eq!(owed(&store).await, (1, 1));
    let waiting = store.drained(PATIENCE);
    drop(end);
    let undrained = waiting.await.unwrap_err();
    assert_eq!(numbers(&undrained), (1, 1));
    other.join().expect("no panic");
}
