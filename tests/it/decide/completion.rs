//! Policies that refund or charge a request by how it ended.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    future::{Ready, pending, poll_fn},
    panic::{self, AssertUnwindSafe},
    pin::pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
};

use axum::{Router, routing::get as route};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use tokio::{
    sync::{Notify, Semaphore},
    task::{JoinSet, yield_now},
};
use tower::{BoxError, Layer, ServiceExt, service_fn};
use tower_quota::{
    Completion, Decision, FailureMode, Key, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, key,
    store::{ErrorKind, Operation, Store, StoreError, StoreFuture, StoreId, StoreRequest},
};

use crate::support::{Browser, Gated, Later, Log, Proxy, Redis, connected, each_store, eventually, patient, serve};

each_store! { with crate::support::Unclocked:
    a_request_is_refunded_if_the_condition_holds
    what_is_charged_first_exceeds_the_limit_at_no_time
    refunds_at_once_leave_what_is_to_count
    a_handler_with_the_receipt_decides_itself
    a_handler_with_one_receipt_leaves_the_rules_of_the_others
    a_policy_of_several_layers_is_refunded_whole
    a_denial_of_an_inner_layer_completes_the_request
    a_refund_ends_denials_at_once
    a_request_that_is_dropped_during_its_check_is_cancelled
}

type Body = Empty<Bytes>;
type Condition = fn(&Completion<'_>) -> bool;

const QUOTA: u64 = 100;

fn policy(name: &'static str) -> Policy {
    Policy::new(name, SlidingLog::per_hour(QUOTA)).key(key::constant("all"))
}

fn request(path: &str) -> Request<Body> {
    Request::get(path).body(Body::new()).expect("a good request")
}

/// What counts for a policy.
async fn counted(store: &(impl Store + Clone), name: &'static str) -> u64 {
    // A task that was spawned before sends its request before this one.
    for _ in 0..3 {
        yield_now().await;
    }
    let peeked = Limiter::new(store.clone(), policy(name))
        .peek(Key::constant("all"))
        .await;
    QUOTA - peeked.expect("the store replies").remaining()
}

/// Ends a request as its path has it.
async fn end(request: Request<Body>, reached: Arc<Notify>) -> Result<Response<Body>, BoxError> {
    match request.uri().path() {
        "/error" => Err("an error".into()),
        "/panic" => panic!("a panic"),
        "/never" => {
            reached.notify_one();
            pending().await
        }
        path => Ok(Response::builder().status(&path[1..]).body(Body::new())?),
    }
}

/// Sends a request through a layer. One that never ends is dropped.
async fn send(layer: &RateLimitLayer, path: &'static str) {
    let reached = Arc::new(Notify::new());
    let notified = reached.clone();
    let service = layer.layer(service_fn(move |request| end(request, notified.clone())));
    let call = tokio::spawn(service.oneshot(request(path)));
    match path {
        "/never" => {
            reached.notified().await;
            call.abort();
            assert!(call.await.expect_err("it does not end").is_cancelled());
        }
        "/panic" => assert!(call.await.expect_err("it does not end").is_panic()),
        "/error" => assert_eq!(
            call.await.expect("no panic").expect_err("it fails").to_string(),
            "an error"
        ),
        path => {
            let response = call.await.expect("no panic").expect("a response");
            assert_eq!(response.status().as_str(), &path[1..]);
        }
    }
}

const ENDS: [&str; 11] = [
    "/200", "/204", "/303", "/401", "/404", "/429", "/500", "/503", "/error", "/panic", "/never",
];

/// Conditions, each with the ends for which it holds.
const CONDITIONS: [(&str, Condition, &[&str]); 7] = [
    ("success", |completion| completion.is_success(), &["/200", "/204"]),
    (
        "client-error",
        |completion| completion.is_client_error(),
        &["/401", "/404", "/429"],
    ),
    (
        "server-error",
        |completion| completion.is_server_error(),
        &["/500", "/503", "/error", "/panic"],
    ),
    (
        "error",
        |completion| completion.is_error(),
        &["/401", "/404", "/429", "/500", "/503", "/error", "/panic"],
    ),
    ("cancelled", |completion| completion.is_cancelled(), &["/never"]),
    (
        "no-response",
        |completion| completion.status().is_none() && completion.headers().is_none(),
        &["/error", "/panic", "/never"],
    ),
    ("grpc", |completion| completion.grpc_status().is_some(), &[]),
];

async fn a_request_is_refunded_if_the_condition_holds(store: Arc<dyn Store>) {
    for (name, condition, holds) in CONDITIONS {
        let layer = RateLimitLayer::new(store.clone(), policy(name).refund_if(condition));
        let mut expected = 0;
        for end in ENDS {
            send(&layer, end).await;
            expected += u64::from(!holds.contains(&end));
            assert_eq!(counted(&store, name).await, expected, "{name} after {end}");
        }
        assert_eq!(layer.lost_settlements(), 0);
    }
}

#[tokio::test]
async fn a_condition_reads_the_head_of_the_inner_service() {
    #[derive(Clone)]
    struct WrongPassword(u8);

    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = seen.clone();
    let policy = policy("p").refund_if(move |completion| {
        let field = completion.headers().and_then(|headers| headers.get("x-login"));
        let extension = completion.extension::<WrongPassword>().map(|wrong| wrong.0);
        let limited = completion
            .headers()
            .is_some_and(|headers| headers.contains_key("ratelimit"));
        let line = format!("{:?} {field:?} {extension:?} {limited}", completion.status());
        sink.lock().expect("no panic").push(line);
        extension.is_none()
    });
    let store = MemoryStore::new();
    let service = RateLimitLayer::new(store.clone(), policy).layer(service_fn(async |request: Request<Body>| {
        let mut response = Response::new(Body::new());
        if request.uri().path() == "/wrong" {
            response.headers_mut().insert("x-login", "no".parse()?);
            response.extensions_mut().insert(WrongPassword(7));
        }
        Ok::<_, BoxError>(response)
    }));
    for path in ["/right", "/wrong"] {
        let response = service.clone().oneshot(request(path)).await.expect("a response");
        assert!(response.headers().contains_key("ratelimit"));
    }
    assert_eq!(
        *seen.lock().expect("no panic"),
        [r#"Some(200) None None false"#, r#"Some(200) Some("no") Some(7) false"#]
    );
    assert_eq!(counted(&store, "p").await, 1);
}

/// Sends requests at the same time, whose handlers wait for all others, and returns how many the layer admitted.
async fn at_once(layer: &RateLimitLayer, requests: usize) -> usize {
    let (arrived, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let shared = (arrived.clone(), gate.clone());
    let service = layer.layer(service_fn(move |_: Request<Body>| {
        let (arrived, gate) = shared.clone();
        async move {
            arrived.add_permits(1);
            drop(gate.acquire().await);
            Ok::<_, Infallible>(Response::new(Body::new()))
        }
    }));

    let mut calls = JoinSet::new();
    for _ in 0..requests {
        let (service, arrived) = (service.clone(), arrived.clone());
        calls.spawn(async move {
            let Ok(response) = service.oneshot(request("/")).await;
            if response.status() == StatusCode::TOO_MANY_REQUESTS {
                arrived.add_permits(1);
            }
            response.status()
        });
    }
    let all = arrived.acquire_many(requests as u32).await;
    drop(all.expect("the semaphore stays"));
    gate.add_permits(requests);
    let statuses = calls.join_all().await;
    statuses.into_iter().filter(|status| *status == StatusCode::OK).count()
}

async fn what_is_charged_first_exceeds_the_limit_at_no_time(store: Arc<dyn Store>) {
    let policy = policy("p").cost(30).refund_if(|completion| completion.is_success());
    let layer = RateLimitLayer::new(store.clone(), policy);
    for _ in 0..3 {
        assert_eq!(at_once(&layer, 20).await, 3);
        assert_eq!(counted(&store, "p").await, 0);
    }
}

async fn refunds_at_once_leave_what_is_to_count(store: Arc<dyn Store>) {
    let policy = policy("p").refund_if(|completion| completion.is_success() || completion.is_cancelled());
    let layer = RateLimitLayer::new(store.clone(), policy);
    let mut calls = JoinSet::new();
    for _ in 0..40 {
        let layer = layer.clone();
        calls.spawn(async move {
            let end = fastrand::choice(ENDS).expect("an end");
            send(&layer, end).await;
            u64::from(!["/200", "/204", "/never"].contains(&end))
        });
    }
    let counts: u64 = calls.join_all().await.into_iter().sum();
    assert_eq!(counted(&store, "p").await, counts);
    assert_eq!(layer.lost_settlements(), 0);
}

async fn a_handler_with_the_receipt_decides_itself(store: Arc<dyn Store>) {
    let through = async |policy: Policy, settle: Option<u64>| {
        let service = RateLimitLayer::new(store.clone(), policy).layer(service_fn(async |request: Request<Body>| {
            let decision = request.extensions().get::<Decision>().expect("a decision");
            let receipt = decision.take_receipt();
            if let Some(actual) = settle {
                receipt.settle(actual).await.expect("the store replies");
            }
            Ok::<_, Infallible>(Response::new(Body::new()))
        }));
        service.oneshot(request("/")).await.expect("a response");
    };

    // What counts before is not refunded in place of it.
    let limiter = Limiter::new(store.clone(), policy("p"));
    let earlier = limiter.request(Key::constant("all")).cost(10).charge().await;
    assert!(earlier.expect("the store replies").is_allowed());
    let mut expected = 10;
    for (settle, counts) in [(None, 5), (Some(0), 0), (Some(3), 3), (Some(7), 7)] {
        through(policy("p").cost(5).refund_if(|_| true), settle).await;
        expected += counts;
        assert_eq!(counted(&store, "p").await, expected, "with {settle:?}");
    }
}

async fn a_handler_with_one_receipt_leaves_the_rules_of_the_others(store: Arc<dyn Store>) {
    let policies = [
        policy("requests").refund_if(|completion| completion.is_success()),
        policy("tokens")
            .cost(30)
            .refund_if(|completion| completion.is_success()),
        policy("failures").refund_if(|completion| !completion.is_success()),
    ];
    let service = RateLimitLayer::new(store.clone(), policies).layer(service_fn(async |request: Request<Body>| {
        let decision = request.extensions().get::<Decision>().expect("a decision");
        let receipt = decision.take_receipt_of("tokens");
        receipt.settle(12).await.expect("the store replies");
        Ok::<_, Infallible>(Response::new(Body::new()))
    }));
    service.oneshot(request("/")).await.expect("a response");
    assert_eq!(counted(&store, "requests").await, 0);
    assert_eq!(counted(&store, "tokens").await, 12);
    assert_eq!(counted(&store, "failures").await, 1);
}

async fn a_policy_of_several_layers_is_refunded_whole(store: Arc<dyn Store>) {
    for (outer, inner, charged) in [(1, 4, 4), (4, 1, 4), (2, 2, 2)] {
        let refunding = |cost| policy("p").cost(cost).refund_if(|completion| completion.is_success());
        let layer = |cost| RateLimitLayer::new(store.clone(), refunding(cost));
        let service = layer(outer).layer(layer(inner).layer(service_fn(async |request: Request<Body>| {
            let status = request.uri().path()[1..].parse::<StatusCode>()?;
            Ok::<_, BoxError>(Response::builder().status(status).body(Body::new())?)
        })));
        service.clone().oneshot(request("/200")).await.expect("a response");
        assert_eq!(counted(&store, "p").await, 0);
        service.oneshot(request("/500")).await.expect("a response");
        assert_eq!(counted(&store, "p").await, charged);
        let limiter = Limiter::new(store.clone(), policy("p"));
        limiter.reset(Key::constant("all")).await.expect("the store replies");
    }
}

async fn a_denial_of_an_inner_layer_completes_the_request(store: Arc<dyn Store>) {
    let outer = [
        policy("refunded").refund_if(|completion| completion.is_client_error()),
        policy("kept").refund_if(|completion| completion.is_success()),
    ];
    let inner = Policy::new("inner", SlidingLog::per_hour(1)).key(key::constant("all"));
    let inner = RateLimitLayer::new(store.clone(), inner);
    let service = RateLimitLayer::new(store.clone(), outer).layer(inner.layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::builder().status(401).body(Body::new()).expect("a response"))
    })));
    for (status, counts) in [(401, [0, 1]), (429, [0, 2])] {
        let response = service.clone().oneshot(request("/")).await.expect("a response");
        assert_eq!(response.status(), status);
        for (name, counts) in ["refunded", "kept"].into_iter().zip(counts) {
            assert_eq!(counted(&store, name).await, counts, "{name} after {status}");
        }
    }
}

/// The deny cache of the Redis store, too.
async fn a_refund_ends_denials_at_once(store: Arc<dyn Store>) {
    let policy = policy("p").cost(QUOTA).refund_if(|completion| completion.is_success());
    let layer = RateLimitLayer::new(store.clone(), policy);
    for _ in 0..10 {
        assert_eq!(at_once(&layer, 4).await, 1);
        assert_eq!(counted(&store, "p").await, 0);
    }
}

async fn a_request_that_is_dropped_during_its_check_is_cancelled(store: Arc<dyn Store>) {
    for (name, condition, counts) in [
        ("kept", (|completion| completion.is_success()) as Condition, 1),
        ("refunded", |completion| completion.is_cancelled(), 0),
    ] {
        let gated = Gated::new(Later(store.clone()));
        let layer = RateLimitLayer::new(gated.clone(), policy(name).refund_if(condition));
        let service = layer.layer(service_fn(
            async |_: Request<Body>| -> Result<Response<Body>, Infallible> { panic!("the check has not ended") },
        ));
        {
            let mut call = pin!(service.oneshot(request("/")));
            let polled = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
            assert!(polled.is_pending());
        }
        // The responses to the check and to the refund.
        gated.open(2);
        eventually("the request is settled", async || counted(&store, name).await == counts).await;
        assert_eq!(layer.lost_settlements(), 0);
    }
}

#[tokio::test]
async fn a_layer_that_drains_bodies_refunds_too() {
    let store = MemoryStore::new();
    let policy = policy("p").refund_if(|completion| completion.is_success());
    let layer = RateLimitLayer::new(store.clone(), policy).drain_body(1, std::time::Duration::from_secs(1));
    let service = layer.layer(service_fn(|request| end(request, Arc::new(Notify::new()))));
    for (path, counts) in [("/200", 0), ("/500", 1), ("/200", 1)] {
        service.clone().oneshot(request(path)).await.expect("a response");
        assert_eq!(counted(&store, "p").await, counts);
    }
}

/// A store that fails while the test sets it to fail, for all operations or for all but checks.
#[derive(Clone)]
struct Failing {
    store: MemoryStore,
    checks: bool,
}

impl Store for Failing {
    fn id(&self) -> Option<StoreId> {
        self.store.id()
    }

    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let check = matches!(requests[0].operation(), Operation::Check | Operation::Peek);
        match check && !self.checks {
            true => self.store.decide(requests),
            false => StoreFuture::ready(Err(StoreError::new(ErrorKind::Timeout, "no reply"))),
        }
    }
}

#[tokio::test]
async fn settlements_that_fail_are_counted_and_logged_once() {
    let log = Log::capture();
    let store = Failing {
        store: MemoryStore::new(),
        checks: false,
    };
    let policy = policy("refunds").refund_if(|_| true);
    let at_once = RateLimitLayer::new(store.clone(), policy.clone());
    let later = RateLimitLayer::new(Later(store.clone()), policy);
    for layer in [at_once, later] {
        for lost in 1..=3 {
            send(&layer.clone(), "/200").await;
            counted(&store, "refunds").await;
            assert_eq!(layer.lost_settlements(), lost);
        }
    }
    assert_eq!(counted(&store, "refunds").await, 6);
    let text = log.text();
    let lines: Vec<_> = text.lines().filter(|line| line.contains("was lost")).collect();
    assert_eq!(lines.len(), 2, "one for each layer: {text}");
    assert!(
        lines
            .iter()
            .all(|line| line.contains("no reply") && line.contains("lost_settlements")),
        "{text}"
    );
}

#[test]
fn a_settlement_without_a_runtime_is_lost_unless_the_store_replies_at_once() {
    for (later, lost) in [(false, 0), (true, 1)] {
        let policy = policy("p").refund_if(|_| true);
        let layer = match later {
            true => RateLimitLayer::new(Later(MemoryStore::new()), policy),
            false => RateLimitLayer::new(MemoryStore::new(), policy),
        };
        let service = layer.layer(service_fn(async |_: Request<Body>| {
            Ok::<_, Infallible>(Response::new(Body::new()))
        }));
        let mut call = pin!(service.oneshot(request("/")));
        let mut cx = Context::from_waker(Waker::noop());
        while call.as_mut().poll(&mut cx).is_pending() {}
        assert_eq!(layer.lost_settlements(), lost);
    }
}

#[tokio::test]
async fn a_settlement_whose_connection_breaks_is_lost_and_made_once_at_most() {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    // The end of the connection is noticed at once.
    let store = connected(patient(), &proxy.url()).await;
    let direct = connected(patient(), &redis.url()).await;
    let layer = RateLimitLayer::new(store.clone(), policy("refunds").refund_if(|_| true));

    let service = layer.layer(service_fn(async |_: Request<Body>| {
        proxy.cut_before_the_next_answer();
        Ok::<_, Infallible>(Response::new(Body::new()))
    }));
    let response = service.oneshot(request("/")).await.expect("a response");
    assert_eq!(response.status(), StatusCode::OK);
    eventually("the loss is counted", async || layer.lost_settlements() == 1).await;
    let limiter = Limiter::new(store.clone(), policy("other").failure_mode(FailureMode::Closed));
    eventually("the store is connected", async || limiter.peek("k").await.is_ok()).await;
    // Redis had received it, and nothing was sent again.
    assert_eq!(counted(&direct, "refunds").await, 0);
}

#[tokio::test]
async fn what_was_counted_in_the_process_is_refunded_there() {
    let store = Failing {
        store: MemoryStore::new(),
        checks: true,
    };
    for mode in [FailureMode::Local, FailureMode::local_share(1, 4)] {
        let quota = if mode == FailureMode::Local { QUOTA } else { QUOTA / 4 };
        for (name, policy, counts) in [
            (
                "refunded",
                policy("refunded").refund_if(|completion| completion.is_success()),
                0,
            ),
            ("kept", policy("kept").refund_if(|completion| completion.is_error()), 1),
        ] {
            let layer = RateLimitLayer::new(store.clone(), policy.cost(10).failure_mode(mode));
            send(&layer, "/200").await;
            let limiter = Limiter::new(
                store.clone(),
                crate::decide::completion::policy(name).failure_mode(mode),
            );
            let peeked = limiter.peek(Key::constant("all")).await.expect("a decision");
            assert_eq!(peeked.remaining(), quota - 10 * counts, "{name} in mode {mode}");
            assert_eq!(layer.lost_settlements(), 0);
            limiter.reset(Key::constant("all")).await.expect_err("the store fails");
        }
    }
}

/// A client that leaves while the handler works.
async fn a_client_that_leaves_is_refunded(browser: Browser) {
    let store = MemoryStore::new();
    let policy = policy("p").refund_if(|completion| completion.is_cancelled());
    let layer = RateLimitLayer::new(store.clone(), policy);
    let reached = Arc::new(Notify::new());
    let notified = reached.clone();
    let app = Router::new().route(
        "/",
        route(async move || {
            notified.notify_one();
            pending::<()>().await;
        }),
    );
    let url = serve(app.layer(layer)).await;
    {
        let mut call = pin!(browser.get(&url));
        tokio::select! {
            _ = &mut call => panic!("it does not end"),
            () = reached.notified() => {}
        }
        assert_eq!(counted(&store, "p").await, 1);
    }
    drop(browser);
    eventually("the request is refunded", async || counted(&store, "p").await == 0).await;
}

#[tokio::test]
async fn a_client_that_leaves_is_refunded_over_http1() {
    a_client_that_leaves_is_refunded(Browser::http1()).await;
}

#[tokio::test]
async fn a_client_that_leaves_is_refunded_over_http2() {
    a_client_that_leaves_is_refunded(Browser::http2()).await;
}

/// A service whose `call` panics.
#[derive(Clone)]
struct PanicsInCall;

impl tower::Service<Request<Body>> for PanicsInCall {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        panic!("a panic")
    }
}

#[tokio::test]
async fn a_panic_is_an_error_of_the_server_wherever_it_is_and_whenever_it_is_caught() {
    let refunding = || policy("p").refund_if(|completion| completion.is_server_error() && !completion.is_cancelled());
    // In `call`, for a store that replies at once and for one that replies later.
    let store = MemoryStore::new();
    let at_once = RateLimitLayer::new(store.clone(), refunding()).layer(PanicsInCall);
    let later = RateLimitLayer::new(Later(store.clone()), refunding()).layer(PanicsInCall);
    for call in [
        tokio::spawn(at_once.oneshot(request("/"))),
        tokio::spawn(later.oneshot(request("/"))),
    ] {
        assert!(call.await.expect_err("it panics").is_panic());
        assert_eq!(counted(&store, "p").await, 0);
    }

    // In a future that is dropped later.
    let layer = RateLimitLayer::new(store.clone(), refunding());
    let service = layer.layer(service_fn(|request| end(request, Arc::new(Notify::new()))));
    let mut call = Box::pin(service.oneshot(request("/panic")));
    let polled = poll_fn(|cx| {
        let polled = panic::catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx)));
        Poll::Ready(polled.is_err())
    });
    assert!(polled.await, "it panics");
    assert_eq!(counted(&store, "p").await, 1);
    drop(call);
    assert_eq!(counted(&store, "p").await, 0);
}

#[test]
fn a_completion_is_shown_without_header_fields() {
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let sink = seen.clone();
    let policy =
        policy("p").refund_if(move |completion| sink.lock().expect("no panic").insert(format!("{completion:?}")));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime");
    runtime.block_on(send(&RateLimitLayer::new(MemoryStore::new(), policy), "/303"));
    let seen = seen.lock().expect("no panic");
    assert_eq!(
        seen.iter().collect::<Vec<_>>(),
        ["Completion { status: Some(303), grpc_status: None, end: Head, .. }"]
    );
}

/// Policies that only observe depend on the completion by themselves.
#[tokio::test]
async fn policies_that_observe_refund_what_they_would_have_admitted() {
    let store = MemoryStore::new();
    let tight = |name| {
        Policy::new(name, SlidingLog::per_hour(1))
            .key(key::constant("all"))
            .observe_only()
    };
    let layer = RateLimitLayer::new(
        store.clone(),
        [
            tight("refunded").refund_if(|completion| completion.is_success()),
            tight("kept").refund_if(|completion| completion.is_error()),
            policy("enforced").refund_if(|completion| completion.is_server_error()),
        ],
    );
    // The second success would have been denied by `kept`, so that it is not charged.
    for (end, counts) in [
        ("/401", [1, 0, 1]),
        ("/200", [1, 1, 2]),
        ("/200", [1, 1, 3]),
        ("/500", [1, 1, 3]),
    ] {
        send(&layer, end).await;
        for (name, counts) in ["refunded", "kept", "enforced"].into_iter().zip(counts) {
            assert_eq!(counted(&store, name).await, counts, "{name} after {end}");
        }
    }
}
