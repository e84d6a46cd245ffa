//! Code of the application that runs while a handler unwinds. A second panic would abort the process, so each case has one.

use std::{
    env,
    future::poll_fn,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, Empty};
use tokio::task::LocalSet;
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    Concurrency, Decision, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, key,
    store::{Operation, Store, StoreFuture, StoreRequest},
};

use crate::support::{eventually, this_binary};

const CASE: &str = "TOWER_QUOTA_UNWINDING_CASE";

#[test]
fn a_panic_of_the_application_while_a_handler_unwinds_does_not_abort_the_process() {
    let aborted = ["condition", "settlement", "release", "taken slots", "body", "waiting"]
        .into_iter()
        .filter(|case| {
            let mut process = this_binary("decide::unwinding::a_process_unwinds");
            let output = process.env(CASE, case).output().expect("this binary starts");
            let text = String::from_utf8_lossy(&output.stdout);
            !output.status.success() || !text.contains("the process goes on")
        });
    assert_eq!(aborted.collect::<Vec<_>>(), [""; 0]);
}

/// A store that panics from when a handler has panicked.
#[derive(Clone, Default)]
struct Panicking {
    inner: MemoryStore,
    is_due: Arc<AtomicBool>,
    /// Whether it has admitted a request that waits.
    has_admitted: Arc<AtomicBool>,
}

impl Panicking {
    fn panic(&self) -> ! {
        self.is_due.store(true, Ordering::Relaxed);
        panic!("the handler");
    }
}

impl Store for Panicking {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        assert!(!self.is_due.load(Ordering::Relaxed), "the store");
        let response = self
            .inner
            .decide(requests)
            .try_ready()
            .unwrap_or_else(|_| panic!("it replies at once"));
        let is_allowed = response
            .as_ref()
            .is_ok_and(|response| response.outcomes().iter().any(|outcome| outcome.allowed));
        if is_allowed && requests.iter().any(|request| request.operation() == Operation::Wait) {
            self.has_admitted.store(true, Ordering::Relaxed);
        }
        StoreFuture::ready(response)
    }
}

/// A body that panics.
struct Broken;

impl http_body::Body for Broken {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        panic!("the body")
    }
}

fn policy(name: &'static str) -> Policy {
    Policy::new(name, SlidingLog::per_hour(1)).key(key::constant("all"))
}

#[tokio::test]
async fn a_process_unwinds() {
    let Ok(case) = env::var(CASE) else { return };
    let store = Panicking::default();
    let policies = match &*case {
        "condition" | "body" => vec![
            policy("a").refund_if(|completion| completion.grpc_status().expect("it has ended well") == 0),
            policy("b").refund_if(|_| true),
        ],
        "settlement" => vec![policy("a").refund_if(|_| true)],
        _ => vec![Policy::new("a", Concurrency::new(1)).key(key::constant("all"))],
    };
    let layer = RateLimitLayer::new(store.clone(), policies);
    let panicking = store.clone();
    let of_case = case.clone();
    let service = layer.layer(service_fn(move |request: Request<Empty<Bytes>>| {
        let (store, case) = (panicking.clone(), of_case.clone());
        async move {
            let decision = request.extensions().get::<Decision>().filter(|_| case == "taken slots");
            let _slots = decision.map(Decision::take_slots);
            match &*case {
                "body" => {
                    let response = Response::builder().header("content-type", "application/grpc");
                    Ok::<_, std::convert::Infallible>(response.body(Broken).expect("a response"))
                }
                "condition" => panic!("the handler"),
                _ => store.panic(),
            }
        }
    }));
    let tasks = LocalSet::new();
    let unwinds = tasks.spawn_local(async move {
        if case == "waiting" {
            let limiter = Limiter::new(
                store.clone(),
                Policy::new("a", SlidingLog::per_hour(1)).wait_up_to(Duration::from_secs(7_200)),
            );
            let _ = limiter.check("42").await.expect("a memory store does not fail");
            let mut waiting = pin!(limiter.acquire("42"));
            let is_ready = poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_ready())).await;
            assert!(!is_ready, "it waits");
            limiter.reset("42").await.expect("a memory store does not fail");
            eventually("it is admitted", async || store.has_admitted.load(Ordering::Relaxed)).await;
            store.panic();
        }
        let Ok(response) = service.oneshot(Request::new(Empty::new())).await;
        let _ = response.into_body().collect().await;
    });
    assert!(tasks.run_until(unwinds).await.expect_err("it panics").is_panic());
    println!("the process goes on");
}

/// One condition that panics leaves the settlements of the others, also where nothing unwinds.
#[tokio::test]
async fn a_condition_that_panics_refunds_nothing_and_the_others_do() {
    let store = MemoryStore::new();
    let layer = RateLimitLayer::new(
        store.clone(),
        [
            policy("a").refund_if(|_| panic!("the condition")),
            policy("b").refund_if(|_| true),
        ],
    );
    let service = layer.layer(service_fn(async |_: Request<Empty<Bytes>>| {
        Ok::<_, std::convert::Infallible>(Response::new(Empty::<Bytes>::new()))
    }));
    let Ok(response) = service.oneshot(Request::new(Empty::new())).await;
    assert!(response.status().is_success() && response.body().is_end_stream());
    for (name, remaining) in [("a", 0), ("b", 1)] {
        let limiter = Limiter::new(store.clone(), Policy::new(name, SlidingLog::per_hour(1)));
        let peeked = limiter.peek(tower_quota::Key::constant("all")).await;
        assert_eq!(
            peeked.expect("a memory store does not fail").remaining(),
            remaining,
            "{name}"
        );
    }
}
