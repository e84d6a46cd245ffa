//! A request that waits holds nothing of the inner service, and calls it when that is ready.

use std::{
    convert::Infallible,
    fmt::Debug,
    future::{Ready, poll_fn, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response, StatusCode};
use tokio::{
    task::{JoinHandle, yield_now},
    time::{Instant, sleep, timeout},
};
use tower::{
    BoxError, Layer, Service, ServiceBuilder, ServiceExt, buffer::Buffer, limit::ConcurrencyLimit, service_fn,
};
use tower_quota::{
    Concurrency, Key, Limit, Limiter, Policy, RateLimitLayer, ResponseBody, SlidingLog, key, store::Store,
};

use crate::support::Later;

type Body = http_body_util::Empty<bytes::Bytes>;

const SECOND: Duration = Duration::from_secs(1);

/// Tests on a store that replies at once, and on one that replies later.
macro_rules! each_reply {
    ($($test:ident)*) => {
        mod at_once {$(
            #[tokio::test(start_paused = true)]
            async fn $test() {
                super::$test(tower_quota::MemoryStore::new()).await;
            }
        )*}

        mod later {$(
            #[tokio::test(start_paused = true)]
            async fn $test() {
                super::$test(super::Later(tower_quota::MemoryStore::new())).await;
            }
        )*}
    };
}

each_reply! {
    a_held_request_takes_no_permit_of_a_concurrency_limit
    a_held_request_takes_no_slot_of_a_buffer
    a_held_request_makes_load_shed_reject_no_other
    at_its_turn_a_request_waits_until_the_service_is_ready
    a_held_request_is_called_on_an_instance_that_was_ready_at_its_turn
    an_error_of_readiness_at_the_turn_is_the_error_of_the_request
    a_panic_of_readiness_at_the_turn_is_an_error_of_the_server
    a_caller_that_leaves_before_the_service_is_ready_has_cancelled_and_frees_its_slots
}

fn request(user: &str) -> Request<Body> {
    Request::get("/")
        .header("user", user)
        .body(Body::new())
        .expect("a good request")
}

/// One a second for each user.
fn one_each() -> Policy {
    Policy::new("api", SlidingLog::per_second(1))
        .key(key::header("user"))
        .wait_up_to(2 * SECOND)
}

/// Responds at once.
async fn hello(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::default())
}

/// Sends a request in a task. Returns its status, and the seconds until the response.
fn send<S, E>(service: &S, user: &str) -> JoinHandle<Result<(StatusCode, u64), E>>
where
    S: Service<Request<Body>, Response = Response<ResponseBody<Body>>, Error = E> + Clone + Send + 'static,
    S::Future: Send,
    E: Send + 'static,
{
    let start = Instant::now();
    let response = service.clone().oneshot(request(user));
    tokio::spawn(async move {
        let response = response.await?;
        Ok((response.status(), start.elapsed().as_secs()))
    })
}

/// Uses up the quota of a user and sends a request that is held. Another user is not affected.
async fn hold_one<S>(service: S)
where
    S: Service<Request<Body>, Response = Response<ResponseBody<Body>>> + Clone + Send + 'static,
    S::Error: Debug + Send,
    S::Future: Send,
{
    assert_eq!(send(&service, "a").await.unwrap().unwrap(), (StatusCode::OK, 0));
    let held = send(&service, "a");
    sleep(SECOND / 2).await;
    assert_eq!(send(&service, "b").await.unwrap().unwrap(), (StatusCode::OK, 0));
    assert!(!held.is_finished());
    assert_eq!(held.await.unwrap().unwrap(), (StatusCode::OK, 1));
}

async fn a_held_request_takes_no_permit_of_a_concurrency_limit(store: impl Store) {
    let (layer, inner) = (
        RateLimitLayer::new(store, one_each()),
        ConcurrencyLimit::new(service_fn(hello), 1),
    );
    hold_one(layer.clone().layer(inner.clone())).await;
    sleep(2 * SECOND).await;
    hold_one(layer.drain_body(1, SECOND).layer(inner)).await;
}

async fn a_held_request_takes_no_slot_of_a_buffer(store: impl Store) {
    hold_one(RateLimitLayer::new(store, one_each()).layer(Buffer::new(service_fn(hello), 1))).await;
}

async fn a_held_request_makes_load_shed_reject_no_other(store: impl Store) {
    let service = ServiceBuilder::new()
        .layer(RateLimitLayer::new(store, one_each()))
        .load_shed()
        .concurrency_limit(1)
        .service_fn(hello);
    hold_one(service).await;
}

async fn at_its_turn_a_request_waits_until_the_service_is_ready(store: impl Store) {
    let inner = service_fn(async |request: Request<Body>| {
        if request.headers()["user"] == "slow" {
            sleep(3 * SECOND).await;
        }
        hello(request).await
    });
    let service = RateLimitLayer::new(store, one_each()).layer(ConcurrencyLimit::new(inner, 1));

    assert_eq!(send(&service, "a").await.unwrap(), Ok((StatusCode::OK, 0)));
    let held = send(&service, "a");
    sleep(SECOND / 2).await;
    let slow = send(&service, "slow");
    assert_eq!(slow.await.unwrap(), Ok((StatusCode::OK, 3)));
    assert_eq!(held.await.unwrap(), Ok((StatusCode::OK, 3)));
}

/// A service each instance of which must be ready before a call. The readiness of each is what the test sets.
struct Checked {
    shared: Arc<Shared>,
    ready: bool,
}

#[derive(Default)]
struct Shared {
    readiness: Mutex<Readiness>,
    calls: AtomicUsize,
    /// Instances that are ready and were not called.
    ready: AtomicUsize,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Readiness {
    #[default]
    Ready,
    Busy,
    Gone,
    Panics,
}

impl Checked {
    fn new() -> (Self, Arc<Shared>) {
        let shared = Arc::<Shared>::default();
        let service = Self {
            shared: shared.clone(),
            ready: false,
        };
        (service, shared)
    }

    fn set_ready(&mut self, ready: bool) {
        match (self.ready, ready) {
            (false, true) => drop(self.shared.ready.fetch_add(1, Ordering::Relaxed)),
            (true, false) => drop(self.shared.ready.fetch_sub(1, Ordering::Relaxed)),
            (true, true) | (false, false) => {}
        }
        self.ready = ready;
    }
}

impl Shared {
    fn set(&self, readiness: Readiness) {
        *self.readiness.lock().expect("no panic") = readiness;
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    fn ready(&self) -> usize {
        self.ready.load(Ordering::Relaxed)
    }
}

impl Clone for Checked {
    fn clone(&self) -> Self {
        // A clone of a ready instance is not ready.
        Self {
            shared: self.shared.clone(),
            ready: false,
        }
    }
}

impl Drop for Checked {
    fn drop(&mut self) {
        self.set_ready(false);
    }
}

impl Service<Request<Body>> for Checked {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Ready<Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        let readiness = *self.shared.readiness.lock().expect("no panic");
        match readiness {
            Readiness::Ready => {
                self.set_ready(true);
                Poll::Ready(Ok(()))
            }
            // The test ends before it is ready.
            Readiness::Busy => Poll::Pending,
            Readiness::Gone => Poll::Ready(Err("it is gone".into())),
            Readiness::Panics => panic!("the service"),
        }
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(self.ready, "called on an instance that was not ready");
        self.set_ready(false);
        self.shared.calls.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Response::default()))
    }
}

async fn a_held_request_is_called_on_an_instance_that_was_ready_at_its_turn(store: impl Store) {
    let (inner, shared) = Checked::new();
    let mut service = RateLimitLayer::new(store, one_each()).layer(inner);
    let mut sent = Vec::new();
    for _ in 0..3 {
        let response = service.ready().await.unwrap().call(request("a"));
        sent.push(tokio::spawn(response));
    }
    sleep(SECOND / 2).await;
    assert_eq!((shared.calls(), shared.ready()), (1, 0));
    for (calls, response) in (1..).zip(sent) {
        assert_eq!(response.await.unwrap().unwrap().status(), StatusCode::OK);
        assert_eq!((shared.calls(), shared.ready()), (calls, 0));
    }
}

/// One a second and one at once for each user. Another one counts each request that fails, and each that is cancelled; a request that has not
/// ended counts as both.
fn ends() -> [Policy; 4] {
    let key = || key::header("user");
    let ended = |name: &'static str| Policy::new(name, SlidingLog::per_minute(9)).key(key());
    [
        one_each(),
        Policy::new("slots", Concurrency::new(1)).key(key()),
        ended("failed").refund_if(|completion| !completion.is_error() || completion.is_cancelled()),
        ended("cancelled").refund_if(|completion| !completion.is_cancelled()),
    ]
}

/// The slots that are free, the requests that have failed and those that were cancelled.
async fn ended(store: &(impl Store + Clone)) -> [u64; 3] {
    let remaining = async |name, limit: Limit| {
        let limiter = Limiter::new(store.clone(), Policy::new(name, limit));
        limiter
            .peek(Key::header("user", "a"))
            .await
            .expect("a decision")
            .remaining()
    };
    [
        remaining("slots", Concurrency::new(1).into()).await,
        9 - remaining("failed", SlidingLog::per_minute(9).into()).await,
        9 - remaining("cancelled", SlidingLog::per_minute(9).into()).await,
    ]
}

async fn an_error_of_readiness_at_the_turn_is_the_error_of_the_request(store: impl Store + Clone) {
    let (inner, shared) = Checked::new();
    let service = RateLimitLayer::new(store.clone(), ends()).layer(inner);
    assert_eq!(send(&service, "a").await.unwrap().unwrap(), (StatusCode::OK, 0));
    let held = send(&service, "a");
    sleep(SECOND / 2).await;
    // While it waits, nothing of it is counted.
    assert_eq!(ended(&store).await, [1, 0, 0]);
    shared.set(Readiness::Gone);
    assert_eq!(held.await.unwrap().unwrap_err().to_string(), "it is gone");
    yield_now().await;
    assert_eq!(ended(&store).await, [1, 1, 0]);
    assert_eq!(shared.calls(), 1);
}

/// The panic is caught, and the request is dropped later.
async fn a_panic_of_readiness_at_the_turn_is_an_error_of_the_server(store: impl Store + Clone) {
    let (inner, shared) = Checked::new();
    let service = RateLimitLayer::new(store.clone(), ends()).layer(inner);
    assert_eq!(send(&service, "a").await.unwrap().unwrap(), (StatusCode::OK, 0));
    let mut held = Box::pin(service.oneshot(request("a")));
    assert!(timeout(SECOND / 2, &mut held).await.is_err());
    shared.set(Readiness::Panics);
    let panicked = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| held.as_mut().poll(cx))) {
        Ok(polled) => polled.map(|_| false),
        Err(_) => Poll::Ready(true),
    });
    assert!(panicked.await);
    drop(held);
    yield_now().await;
    assert_eq!(ended(&store).await, [1, 1, 0]);
}

async fn a_caller_that_leaves_before_the_service_is_ready_has_cancelled_and_frees_its_slots(store: impl Store + Clone) {
    let (inner, shared) = Checked::new();
    let service = RateLimitLayer::new(store.clone(), ends()).layer(inner);
    assert_eq!(send(&service, "a").await.unwrap().unwrap(), (StatusCode::OK, 0));
    let held = send(&service, "a");
    sleep(SECOND / 2).await;
    shared.set(Readiness::Busy);
    sleep(5 * SECOND).await;
    assert!(!held.is_finished());
    assert_eq!(ended(&store).await, [0, 1, 1]);
    held.abort();
    assert!(held.await.unwrap_err().is_cancelled());
    yield_now().await;
    assert_eq!(ended(&store).await, [1, 0, 1]);
    assert_eq!(shared.calls(), 1);
}
