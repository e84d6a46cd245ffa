//! What `on_settled` observes: the units that each admitted request was charged in the end, once.

use std::{
    future::pending,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Waker},
    time::{Duration, UNIX_EPOCH},
};

use axum::{Extension, Router, body::Body, routing::get as route};
use fastrand::Rng;
use http::StatusCode;
use tokio::task::JoinSet;
use tower::ServiceExt;
use tower_quota::{
    Concurrency, Decision, FailureMode, FixedWindow, Limiter, MemoryStore, Plans, Policy, RateLimitLayer, SlidingLog,
    TokenBucket, Usage, key, store::Store,
};

use crate::support::{Broken, Clock, Gated, PATIENCE, each_store, get, send};

const SECOND: Duration = Duration::from_secs(1);

/// The policy, the key, the units, and whether this process has counted them.
type Line = (String, String, u64, bool);

#[derive(Clone, Default)]
struct Ledger(Arc<Mutex<Vec<Line>>>);

impl Ledger {
    fn observer(&self) -> impl Fn(&Usage<'_>) + Send + Sync + 'static {
        let lines = self.0.clone();
        move |usage| {
            let line = (
                usage.policy.to_owned(),
                usage.key.to_string(),
                usage.units,
                usage.is_local,
            );
            lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        }
    }

    fn units(&self) -> Vec<u64> {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(|(_, _, units, _)| *units).collect()
    }
}

fn tokens() -> Policy {
    Policy::new("tokens", FixedWindow::per_day(1_000_000))
        .key(key::header("user"))
        .cost(5)
        .refund_if(|completion| completion.is_server_error() || completion.is_cancelled())
}

/// A handler that does what the path says.
async fn handle(Extension(decision): Extension<Decision>, path: axum::http::Uri) -> StatusCode {
    let receipt = || decision.take_receipt();
    match path.path().trim_start_matches('/') {
        "admitted" => {}
        "dropped" => drop(receipt()),
        "refunded" => receipt().refund().await.expect("the store replies"),
        "hangs" => pending().await,
        "panics" => panic!("as the test wants"),
        "fails" => return StatusCode::INTERNAL_SERVER_ERROR,
        "fails-settled" => {
            receipt().settle(3).await.expect("the store replies");
            return StatusCode::INTERNAL_SERVER_ERROR;
        }
        units => receipt()
            .settle(units.parse().expect("a number"))
            .await
            .expect("the store replies"),
    }
    StatusCode::OK
}

fn app(layer: RateLimitLayer) -> Router {
    Router::new().route("/{*path}", route(handle).layer(layer))
}

#[tokio::test]
async fn a_request_is_settled_by_what_it_was_charged_in_the_end() {
    let ledger = Ledger::default();
    let clock = Clock::new();
    let now = clock.now();
    let observe = ledger.observer();
    let layer = RateLimitLayer::new(clock.memory_store(), tokens()).on_settled(move |usage| {
        assert_eq!(usage.admitted_at, UNIX_EPOCH + Duration::from_micros(now));
        assert_eq!(usage.plan, None);
        observe(usage);
    });
    let app = app(layer);
    for (path, units) in [
        ("admitted", 5),
        ("dropped", 5),
        ("refunded", 0),
        ("fails", 0),
        ("fails-settled", 3),
        ("2", 2),
        ("40", 40),
        ("0", 0),
    ] {
        send(&app, get(&format!("/{path}")).header("user", path)).await;
        let line = ("tokens".to_owned(), format!("header:user={path}"), units, false);
        assert_eq!(
            ledger.0.lock().expect("no panic").drain(..).collect::<Vec<_>>(),
            [line],
            "{path}"
        );
    }
}

async fn what_is_invoiced_is_what_is_counted(store: impl Store + Clone) {
    let ledger = Ledger::default();
    let layer = RateLimitLayer::new(store.clone(), tokens()).on_settled(ledger.observer());
    let (app, mut rng, mut requests) = (app(layer), Rng::with_seed(7), JoinSet::new());
    let paths = [
        "admitted",
        "dropped",
        "refunded",
        "hangs",
        "panics",
        "fails",
        "fails-settled",
        "0",
        "4",
        "5",
        "90",
    ];
    for _ in 0..200 {
        let (app, path, leaves) = (app.clone(), paths[rng.usize(..paths.len())], rng.u64(..30));
        requests.spawn(async move {
            let request = get(&format!("/{path}")).header("user", "ada").body(Body::empty());
            let response = app.oneshot(request.expect("a good request"));
            let _ = tokio::time::timeout(Duration::from_millis(leaves), response).await;
        });
    }
    while requests.join_next().await.is_some() {}
    store.drained(PATIENCE).await.expect("all is confirmed");

    let peek = Limiter::new(store, Policy::new("tokens", FixedWindow::per_day(1_000_000)));
    let left = peek
        .peek(tower_quota::Key::header("user", "ada"))
        .await
        .expect("the store replies");
    assert_eq!(ledger.units().iter().sum::<u64>(), 1_000_000 - left.remaining());
    assert!(ledger.units().len() > 100, "{}", ledger.units().len());
}

each_store! { with crate::support::Unclocked: what_is_invoiced_is_what_is_counted }

#[tokio::test]
async fn what_nobody_counts_is_not_settled_and_what_this_process_counts_says_so() {
    for (mode, lines) in [
        (FailureMode::Local, 1),
        (FailureMode::Open, 0),
        (FailureMode::Closed, 0),
    ] {
        let ledger = Ledger::default();
        let layer = RateLimitLayer::new(Broken::default(), tokens().failure_mode(mode)).on_settled(ledger.observer());
        send(&app(layer), get("/admitted").header("user", "ada")).await;
        let line = ("tokens".to_owned(), "header:user=ada".to_owned(), 5, true);
        assert_eq!(*ledger.0.lock().expect("no panic"), vec![line; lines], "{mode:?}");
    }
}

#[tokio::test]
async fn a_policy_of_two_layers_is_settled_by_each_for_its_part() {
    let (store, ledger) = (MemoryStore::new(), Ledger::default());
    let policy = |cost| {
        Policy::new("rows", SlidingLog::per_hour(100))
            .key(key::constant("all"))
            .cost(cost)
    };
    let layer = |cost| RateLimitLayer::new(store.clone(), policy(cost)).on_settled(ledger.observer());
    let app = Router::new()
        .route("/", route(async || "hi").layer(layer(7)))
        .layer(layer(3));
    send(&app, get("/")).await;
    assert_eq!(ledger.units().iter().sum::<u64>(), 7);
    assert_eq!(ledger.units().len(), 2);
}

#[tokio::test]
async fn the_plan_is_named_and_neither_slots_nor_what_only_observes_are_settled() {
    let plan = || Policy::new("api", SlidingLog::per_hour(9));
    let plans = Plans::new("free", plan()).plan("pro", plan());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let observed = seen.clone();
    let limiter = Limiter::new(MemoryStore::new(), plans).on_settled(move |usage| {
        observed.lock().expect("no panic").push(usage.plan.map(str::to_owned));
    });
    drop(limiter.request("k").plan("pro").check().await.expect("in memory"));
    assert_eq!(*seen.lock().expect("no panic"), [Some("pro".to_owned())]);

    let ledger = Ledger::default();
    let policies = [
        Policy::new("at-once", Concurrency::new(1)),
        Policy::new("trial", SlidingLog::per_hour(1)).observe_only(),
    ];
    let limiter = Limiter::new(MemoryStore::new(), policies).on_settled(ledger.observer());
    drop(limiter.check("k").await.expect("in memory"));
    assert!(ledger.units().is_empty());
}

#[tokio::test]
async fn a_limiter_settles_what_was_taken_and_no_denial() {
    let ledger = Ledger::default();
    let policy = Policy::new("mails", SlidingLog::per_hour(5));
    let limiter = Limiter::new(MemoryStore::new(), policy).on_settled(ledger.observer());
    drop(limiter.request("k").take_up_to(3).await.expect("in memory"));
    drop(limiter.request("k").cost(3).check().await.expect("in memory"));
    drop(limiter.peek("k").await.expect("in memory"));
    drop(limiter.request("k").cost(4).charge().await.expect("in memory"));
    assert_eq!(ledger.units(), [3, 4]);
}

#[tokio::test]
async fn a_settlement_above_the_largest_cost_counts_as_that() {
    let ledger = Ledger::default();
    let policy = Policy::new("tokens", FixedWindow::per_day(1_000_000));
    let limiter = Limiter::new(MemoryStore::new(), policy).on_settled(ledger.observer());
    let admitted = limiter.request("k").cost(5).check().await.expect("in memory");
    let settled = admitted.take_receipt().settle(u64::MAX).await;
    settled.expect("in memory");
    drop(admitted);
    assert_eq!(ledger.units(), [999_999_999_999_999]);
}

/// While the store fails, a cost above the share counts as all of it, and is invoiced in full.
#[tokio::test(start_paused = true)]
async fn a_settlement_below_the_estimate_counts_no_more_than_the_estimate_did() {
    // A share of 2, of which one comes in 30 s.
    for (settled, invoiced, wait) in [
        (None, 5, 60),
        (Some(5), 5, 60),
        (Some(3), 3, 60),
        (Some(1), 1, 30),
        (Some(7), 7, 120),
    ] {
        let ledger = Ledger::default();
        let policy = Policy::new("tokens", TokenBucket::per_minute(20)).failure_mode(FailureMode::local_share(1, 10));
        let limiter = Limiter::new(Broken::default(), policy).on_settled(ledger.observer());
        let decision = limiter.request("k").cost(5).check().await.expect("a decision");
        let receipt = decision.take_receipt();
        match settled {
            Some(units) => receipt.settle(units).await.expect("in this process"),
            None => drop(receipt),
        }
        drop(decision);
        let denied = limiter.request("k").cost(5).check().await.expect("a decision");
        let wait = Some(Duration::from_secs(wait));
        assert_eq!(
            (ledger.units(), denied.retry_after()),
            (vec![invoiced], wait),
            "{settled:?}"
        );
    }
}

/// The store admits a request whose caller has left meanwhile, and gets its units back.
#[tokio::test]
async fn a_caller_that_left_before_it_was_admitted_is_not_settled() {
    let (ledger, memory) = (Ledger::default(), MemoryStore::new());
    let gated = Gated::new(memory.clone());
    let policy = Policy::new("mails", SlidingLog::per_hour(5)).wait_up_to(3_600 * SECOND);
    let limiter = Limiter::new(gated.clone(), policy.clone()).on_settled(ledger.observer());
    let mut acquired = Box::pin(limiter.acquire("k"));
    assert!(
        acquired
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    );
    drop(acquired);
    gated.open(10);
    gated.drained(10 * SECOND).await.expect("all is given back");
    let left = Limiter::new(memory, policy).peek("k").await.expect("in memory");
    assert_eq!(left.remaining(), 5);
    assert!(ledger.units().is_empty());
}

/// A request at a full line is checked behind those that wait, and may fit when they are about to.
#[tokio::test(start_paused = true)]
async fn what_is_admitted_at_a_full_line_after_its_caller_has_left_is_given_back() {
    let memory = MemoryStore::new();
    let gated = Gated::new(memory.clone());
    let policy = Policy::new("mails", SlidingLog::per_hour(3))
        .wait_up_to(3_600 * SECOND)
        .max_waiting(1);
    let limiter = Limiter::new(gated.clone(), policy.clone());
    gated.open(4);
    for _ in 0..3 {
        let _ = limiter.acquire("k").await.expect("it fits");
    }
    let of_the_line = limiter.clone();
    let waiting = tokio::spawn(async move { of_the_line.acquire("k").await });
    tokio::time::sleep(SECOND / 1_000).await;

    let direct = Limiter::new(memory, policy);
    direct.reset("k").await.expect("in memory");
    let mut leaving = Box::pin(limiter.acquire("k"));
    let mut context = Context::from_waker(Waker::noop());
    assert!(leaving.as_mut().poll(&mut context).is_pending());
    drop(leaving);
    gated.open(100);
    let _ = waiting.await.expect("no panic").expect("it is admitted");
    gated.drained(10 * SECOND).await.expect("all is given back");
    assert_eq!(direct.peek("k").await.expect("in memory").remaining(), 2);
}

/// What the store counts is invoiced, whether or not the caller receives the decision.
#[tokio::test]
async fn a_caller_that_leaves_during_its_check_is_settled() {
    let (ledger, memory) = (Ledger::default(), MemoryStore::new());
    let gated = Gated::new(memory.clone());
    let policy = Policy::new("mails", SlidingLog::per_hour(5));
    let limiter = Limiter::new(gated.clone(), policy.clone()).on_settled(ledger.observer());
    let mut checked = Box::pin(limiter.check("k"));
    let mut context = Context::from_waker(Waker::noop());
    assert!(checked.as_mut().poll(&mut context).is_pending());
    drop(checked);
    gated.open(10);
    gated.drained(10 * SECOND).await.expect("all is settled");
    let left = Limiter::new(memory, policy).peek("k").await.expect("in memory");
    assert_eq!((left.remaining(), ledger.units()), (4, vec![1]));
}

#[tokio::test]
async fn drained_waits_for_what_is_not_settled_and_a_panic_of_the_observer_is_caught() {
    let store = MemoryStore::new();
    let policy = Policy::new("mails", SlidingLog::per_hour(5));
    let limiter = Limiter::new(store.clone(), policy).on_settled(|_| panic!("as the test wants"));
    let decision = limiter.check("k").await.expect("in memory");
    assert!(store.drained(Duration::from_millis(10)).await.is_err());
    drop(decision);
    store.drained(Duration::ZERO).await.expect("it is settled");
}
