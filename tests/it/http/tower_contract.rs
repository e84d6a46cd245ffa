//! The contract of Tower, towards the inner service and towards callers.

use std::{
    convert::Infallible,
    error::Error,
    fmt,
    future::{Future, Ready, poll_fn, ready},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, buffer::Buffer, limit::ConcurrencyLimit, service_fn};
use tower_quota::{FailureMode, MemoryStore, Policy, RateLimit, RateLimitLayer, SlidingLog, key, store::Store};

use crate::support::{Broken, Clock, Gated, Later, Log, PATIENCE, Received, Redis, eventually};

type Body = Full<Bytes>;

fn request(user: &str) -> Request<Body> {
    Request::get("/")
        .header("user", user)
        .body(Body::default())
        .expect("a good request")
}

/// One a minute for each user.
fn one_each() -> Policy {
    Policy::new("one-each", SlidingLog::per_minute(1)).key(key::header("user"))
}

fn memory() -> MemoryStore {
    Clock::new().memory_store()
}

/// A service that works in `call`, as some do, and must be ready before.
#[derive(Default)]
struct Eager {
    calls: Arc<AtomicUsize>,
    ready: bool,
}

impl Eager {
    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Clone for Eager {
    fn clone(&self) -> Self {
        // A clone of a ready instance is not ready.
        Self {
            calls: self.calls.clone(),
            ready: false,
        }
    }
}

impl Service<Request<Body>> for Eager {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(self.ready, "called on an instance that was not ready");
        self.ready = false;
        self.calls.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Response::default()))
    }
}

async fn a_denied_request_does_not_reach_the_service(store: impl Store) {
    let inner = Eager::default();
    let mut service = RateLimitLayer::new(store, one_each()).layer(inner.clone());
    let mut call = async |user| {
        service
            .ready()
            .await
            .unwrap()
            .call(request(user))
            .await
            .unwrap()
            .status()
    };

    assert_eq!(call("a").await, StatusCode::OK);
    assert_eq!(inner.calls(), 1);
    for _ in 0..3 {
        assert_eq!(call("a").await, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(inner.calls(), 1);
    }
    assert_eq!(call("b").await, StatusCode::OK);
    assert_eq!(inner.calls(), 2);
}

#[tokio::test]
async fn a_denied_request_does_not_reach_the_service_when_the_store_replies_at_once() {
    a_denied_request_does_not_reach_the_service(memory()).await;
}

#[tokio::test]
async fn a_denied_request_does_not_reach_the_service_when_the_store_replies_later() {
    a_denied_request_does_not_reach_the_service(Later(memory())).await;
}

#[tokio::test]
async fn a_denied_request_does_not_reach_the_service_when_redis_replies() {
    let (clock, redis) = (Clock::new(), Redis::start());
    clock.write_to(&redis).await;
    a_denied_request_does_not_reach_the_service(clock.redis_store(&redis).await).await;
}

#[tokio::test]
async fn the_service_is_not_called_before_the_decision() {
    let (store, inner) = (Gated::new(memory()), Eager::default());
    let service = RateLimitLayer::new(store.clone(), one_each()).layer(inner.clone());

    let call = tokio::spawn(service.oneshot(request("a")));
    tokio::task::yield_now().await;
    assert_eq!(inner.calls(), 0);
    store.open(1);
    assert_eq!(call.await.unwrap().unwrap().status(), StatusCode::OK);
    assert_eq!(inner.calls(), 1);
}

#[tokio::test]
async fn calls_that_overlap_are_each_made_on_a_ready_instance() {
    let (store, inner) = (Gated::new(memory()), Eager::default());
    let mut service = RateLimitLayer::new(store.clone(), one_each()).layer(inner.clone());

    let mut calls = Vec::new();
    for user in ["a", "b", "c"] {
        calls.push(tokio::spawn(service.ready().await.unwrap().call(request(user))));
    }
    store.open(3);
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().status(), StatusCode::OK);
    }
    assert_eq!(inner.calls(), 3);
}

/// Responds at once.
async fn hello(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::default())
}

/// A permit is taken when the service is ready, and calling an instance that has none panics.
async fn permits_are_used(store: impl Store) {
    let limited = ConcurrencyLimit::new(service_fn(hello), 1);
    let service = RateLimitLayer::new(store, one_each()).layer(limited);

    for (user, status) in [("a", 200), ("a", 429), ("b", 200), ("a", 429), ("b", 429), ("c", 200)] {
        let call = service.clone().oneshot(request(user));
        let response = tokio::time::timeout(PATIENCE, call).await.expect("a permit is free");
        assert_eq!(response.unwrap().status(), status, "{user}");
    }
}

#[tokio::test]
async fn permits_are_used_and_given_back_when_the_store_replies_at_once() {
    permits_are_used(memory()).await;
}

#[tokio::test]
async fn permits_are_used_and_given_back_when_the_store_replies_later() {
    permits_are_used(Later(memory())).await;
}

/// A denied caller that keeps its clone of the service holds no permit.
async fn a_denial_gives_the_permit_back(store: impl Store) {
    let limited = ConcurrencyLimit::new(service_fn(hello), 1);
    let mut service = RateLimitLayer::new(store, one_each()).layer(limited);
    for status in [200, 429] {
        let response = service.ready().await.unwrap().call(request("a")).await.unwrap();
        assert_eq!(response.status(), status);
    }

    let other = service.clone().oneshot(request("b"));
    let response = tokio::time::timeout(PATIENCE, other).await.expect("a permit is free");
    assert_eq!(response.unwrap().status(), StatusCode::OK);
    drop(service);
}

#[tokio::test(start_paused = true)]
async fn a_denial_gives_the_permit_back_when_the_store_replies_at_once() {
    a_denial_gives_the_permit_back(memory()).await;
}

#[tokio::test(start_paused = true)]
async fn a_denial_gives_the_permit_back_when_the_store_replies_later() {
    a_denial_gives_the_permit_back(Later(memory())).await;
}

/// A buffer of one panics too if it was not ready, and is full while a slot of it is lost.
async fn buffers_are_used(store: impl Store) {
    let buffered = Buffer::new(service_fn(hello), 1);
    let mut service = RateLimitLayer::new(store, one_each()).layer(buffered);

    for (user, status) in [("a", 200), ("a", 429), ("a", 429), ("b", 200), ("b", 429), ("c", 200)] {
        let ready = tokio::time::timeout(PATIENCE, service.ready())
            .await
            .expect("a free slot");
        assert_eq!(
            ready.unwrap().call(request(user)).await.unwrap().status(),
            status,
            "{user}"
        );
    }
}

#[tokio::test]
async fn a_buffer_is_called_on_the_instance_that_was_ready_when_the_store_replies_at_once() {
    buffers_are_used(memory()).await;
}

#[tokio::test]
async fn a_buffer_is_called_on_the_instance_that_was_ready_when_the_store_replies_later() {
    buffers_are_used(Later(memory())).await;
}

#[tokio::test]
async fn the_layer_is_ready_when_the_service_is() {
    let limited = ConcurrencyLimit::new(service_fn(hello), 1);
    let mut holder = limited.clone();
    holder.ready().await.unwrap();
    let mut service = RateLimitLayer::new(memory(), one_each()).layer(limited);

    let mut cx = Context::from_waker(Waker::noop());
    assert!(service.poll_ready(&mut cx).is_pending(), "another clone has the permit");
    drop(holder);
    poll_fn(|cx| service.poll_ready(cx)).await.unwrap();
    assert_eq!(service.call(request("a")).await.unwrap().status(), StatusCode::OK);
}

/// An error of the inner service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OutOfPaper(u32);

impl fmt::Display for OutOfPaper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of paper in tray {}", self.0)
    }
}

impl Error for OutOfPaper {}

async fn an_error_of_the_service_comes_out_unchanged(store: impl Store) {
    let printer = service_fn(async |_: Request<Body>| Err::<Response<Body>, _>(OutOfPaper(2)));
    let policy = Policy::new("prints", SlidingLog::per_minute(2))
        .key(key::constant("all"))
        .failure_mode(FailureMode::Closed);
    let service = RateLimitLayer::new(store, policy).layer(printer);

    for _ in 0..2 {
        assert_eq!(service.clone().oneshot(request("a")).await.unwrap_err(), OutOfPaper(2));
    }
    let counted = service.oneshot(request("a")).await.expect("an answer of the limiter");
    assert_eq!(
        counted.status(),
        StatusCode::TOO_MANY_REQUESTS,
        "what failed was counted"
    );
}

#[tokio::test]
async fn an_error_of_the_service_comes_out_unchanged_when_the_store_replies_at_once() {
    an_error_of_the_service_comes_out_unchanged(memory()).await;
}

#[tokio::test]
async fn an_error_of_the_service_comes_out_unchanged_when_the_store_replies_later() {
    an_error_of_the_service_comes_out_unchanged(Later(memory())).await;
}

#[tokio::test]
async fn an_error_of_readiness_comes_out_unchanged() {
    /// A service that will never be ready again.
    #[derive(Clone)]
    struct Gone;

    impl Service<Request<Body>> for Gone {
        type Response = Response<Body>;
        type Error = OutOfPaper;
        type Future = Ready<Result<Response<Body>, OutOfPaper>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), OutOfPaper>> {
            Poll::Ready(Err(OutOfPaper(1)))
        }

        fn call(&mut self, _: Request<Body>) -> Self::Future {
            unreachable!("it was not ready")
        }
    }

    let mut service = RateLimitLayer::new(memory(), one_each()).layer(Gone);
    assert_eq!(service.ready().await.map(drop), Err(OutOfPaper(1)));
}

async fn call<S>(service: &RateLimit<S>) -> Received
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let Ok(response) = service.clone().oneshot(request("a")).await;
    Received::read(response).await
}

async fn a_store_that_fails_open_admits_requests_without_fields(store: impl Store) {
    let log = Log::capture();
    let inner = Eager::default();
    let open = one_each().failure_mode(FailureMode::Open);
    let service = RateLimitLayer::new(store, open).layer(inner.clone());

    for _ in 0..3 {
        let passed = call(&service).await;
        assert_eq!(passed.status, StatusCode::OK);
        passed.assert_silent();
        assert!(
            passed.extensions.get::<tower_quota::Decision>().is_none(),
            "nothing was decided"
        );
    }
    assert_eq!(inner.calls(), 3);
    let line = "the rate limit store fails";
    eventually("it is logged", async || log.text().contains(line)).await;
    let log = log.text();
    assert_eq!(
        log.matches("the rate limit store fails").count(),
        1,
        "one warning in {log}"
    );
}

#[tokio::test]
async fn a_store_that_fails_open_at_once_admits_requests_without_fields() {
    a_store_that_fails_open_admits_requests_without_fields(Broken::default()).await;
}

#[tokio::test]
async fn a_store_that_fails_open_later_admits_requests_without_fields() {
    a_store_that_fails_open_admits_requests_without_fields(Later(Broken::default())).await;
}

async fn a_store_that_fails_closed_is_503_and_never_429(store: impl Store) {
    let inner = Eager::default();
    let service = RateLimitLayer::new(store, one_each().failure_mode(FailureMode::Closed)).layer(inner.clone());

    for _ in 0..3 {
        let failed = call(&service).await;
        assert_eq!(failed.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(failed.field("retry-after"), Some("1"));
        assert_eq!(failed.field("cache-control"), Some("no-store"));
        assert_eq!(failed.field("ratelimit"), None);
        assert_eq!(failed.field("ratelimit-policy"), None);
        assert_eq!(failed.field("content-type"), Some("application/problem+json"));
        let problem = failed.json();
        assert_eq!(
            problem["type"],
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
        );
        assert_eq!(problem["status"], 503);
        assert!(problem.get("violated-policies").is_none());
    }
    assert_eq!(inner.calls(), 0);
}

#[tokio::test]
async fn a_store_that_fails_closed_at_once_is_503_and_never_429() {
    a_store_that_fails_closed_is_503_and_never_429(Broken::default()).await;
}

#[tokio::test]
async fn a_store_that_fails_closed_later_is_503_and_never_429() {
    a_store_that_fails_closed_is_503_and_never_429(Later(Broken::default())).await;
}

#[tokio::test]
async fn a_refused_request_does_not_call_the_store() {
    let (store, inner) = (Broken::default(), Eager::default());
    let service = RateLimitLayer::new(store.clone(), one_each()).layer(inner.clone());

    let refused = service.oneshot(Request::new(Body::default())).await.unwrap();
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    assert_eq!((store.calls(), inner.calls()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn the_future_can_be_dropped_at_any_point() {
    // Dropped before it is polled, while the decision is pending, and while the inner service works: the permit is released.
    for polls in 0..3 {
        let (store, entered) = (Gated::new(memory()), Arc::new(AtomicUsize::new(0)));
        let slow = {
            let entered = entered.clone();
            service_fn(move |request: Request<Body>| {
                entered.fetch_add(1, Ordering::Relaxed);
                async move {
                    if request.headers()["user"] == "slow" {
                        std::future::pending::<()>().await;
                    }
                    Ok::<_, Infallible>(Response::<Body>::default())
                }
            })
        };
        let service = ServiceBuilder::new()
            .layer(RateLimitLayer::new(store.clone(), one_each()))
            .service(ConcurrencyLimit::new(slow, 1));

        {
            let mut service = service.clone();
            let mut call = pin!(service.ready().await.unwrap().call(request("slow")));
            let mut cx = Context::from_waker(Waker::noop());
            if polls > 0 {
                assert!(call.as_mut().poll(&mut cx).is_pending());
            }
            if polls > 1 {
                store.open(1);
                assert!(call.as_mut().poll(&mut cx).is_pending());
            }
            assert_eq!(
                entered.load(Ordering::Relaxed),
                usize::from(polls > 1),
                "after {polls} polls"
            );
        }

        store.open(2);
        let next = tokio::time::timeout(PATIENCE, service.oneshot(request("next")));
        let response = next.await.expect("a permit is free").unwrap();
        assert_eq!(response.status(), StatusCode::OK, "after {polls} polls");
    }
}

#[tokio::test]
async fn the_body_of_the_service_passes_through() {
    let inner = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::from("hello"))));
    let service = RateLimitLayer::new(memory(), one_each()).layer(inner);

    let Ok(response) = service.oneshot(request("a")).await;
    assert_eq!(http_body::Body::size_hint(response.body()).exact(), Some(5));
    assert_eq!(Received::read(response).await.body, "hello");
}
