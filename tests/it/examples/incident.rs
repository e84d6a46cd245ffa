//! An export that takes long, while clients and proxies retry: `examples/export.rs` under load.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, response::Response, routing::post};
use http::{Request, StatusCode};
use tokio::{
    sync::Semaphore,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tower::ServiceExt;
use tower_quota::{Decision, MemoryStore, store::Store};

use crate::{
    examples::export::{self, UserId},
    support::{PATIENCE, Redis, connected, eventually, patient},
};

/// Exports that end when the test lets them.
#[derive(Clone)]
struct Exports {
    begun: Arc<AtomicUsize>,
    ended: Arc<AtomicUsize>,
    gate: Arc<Semaphore>,
}

impl Exports {
    fn new() -> Self {
        Self {
            begun: Arc::default(),
            ended: Arc::default(),
            gate: Arc::new(Semaphore::new(0)),
        }
    }

    /// The exports that have begun, and those that have ended.
    fn numbers(&self) -> (usize, usize) {
        (self.begun.load(Ordering::Relaxed), self.ended.load(Ordering::Relaxed))
    }

    async fn export(self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.gate.acquire().await.expect("the gate stays").forget();
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    /// A replica of the service.
    fn replica(&self, store: impl Store) -> Router {
        let exports = self.clone();
        let handler = async move |decision: Decision| {
            let exported = export::run(decision, exports.export()).await;
            exported.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
        };
        Router::new().route("/export", post(handler).layer(export::limit(store)))
    }
}

async fn request(replica: Router, user: u64) -> Response {
    let request = Request::post("/export").extension(UserId(user)).body(Body::empty());
    let Ok(response) = replica.oneshot(request.expect("a good request")).await;
    response
}

/// Sends requests of user 42 until one of them begins an export.
async fn begin(replica: &Router, exports: &Exports) -> JoinHandle<Response> {
    let (begun, _) = exports.numbers();
    loop {
        let task = tokio::spawn(request(replica.clone(), 42));
        while !task.is_finished() {
            if exports.numbers().0 > begun {
                return task;
            }
            sleep(Duration::from_millis(1)).await;
        }
        // The slot may not be released yet.
        assert_eq!(task.await.expect("no panic").status(), StatusCode::TOO_MANY_REQUESTS);
    }
}

/// What each of three clients makes of a request that takes long: a proxy in front of the replicas sends it to each, three times.
async fn retries(replicas: &[Router; 2]) -> Vec<Response> {
    let attempts = (0..9)
        .flat_map(|_| replicas.clone())
        .map(|replica| tokio::spawn(request(replica, 42)));
    let mut responses = Vec::new();
    for attempt in attempts.collect::<Vec<_>>() {
        let response = timeout(PATIENCE, attempt).await.expect("a denial, and no export");
        responses.push(response.expect("no panic"));
    }
    responses
}

async fn one_export_at_a_time_and_three_an_hour<S: Store>(stores: [S; 2]) {
    let exports = Exports::new();
    let replicas = stores.map(|store| exports.replica(store));

    for number in 1..=3 {
        let caller = begin(&replicas[number % 2], &exports).await;
        for denied in retries(&replicas).await {
            assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
            let decision = denied.extensions().get::<Decision>().expect("a decision");
            let running = decision.policies().find(|policy| policy.name() == "running");
            assert!(running.is_some_and(|running| running.denies()));
        }

        // The proxy gives up, and the export goes on.
        caller.abort();
        assert!(caller.await.is_err_and(|error| error.is_cancelled()));
        assert_eq!(exports.numbers(), (number, number - 1));
        exports.gate.add_permits(1);
        eventually("the export ends", async || exports.numbers() == (number, number)).await;
    }

    // None of the retries was counted, and a fourth export is not admitted, however often it is sent.
    eventually("the last slot is released", async || {
        let denied = request(replicas[0].clone(), 42).await;
        let wait = denied.headers()["retry-after"].to_str().expect("a number");
        wait.parse::<u64>().is_ok_and(|wait| wait > 1)
    })
    .await;
    assert!(
        retries(&replicas)
            .await
            .iter()
            .all(|denied| denied.status() == StatusCode::TOO_MANY_REQUESTS)
    );
    assert_eq!(exports.numbers(), (3, 3));

    exports.gate.add_permits(1);
    assert_eq!(
        request(replicas[0].clone(), 43).await.status(),
        StatusCode::OK,
        "another user"
    );
}

#[tokio::test]
async fn one_export_at_a_time_and_three_an_hour_in_memory() {
    let store = MemoryStore::new();
    one_export_at_a_time_and_three_an_hour([store.clone(), store]).await;
}

#[tokio::test]
async fn one_export_at_a_time_and_three_an_hour_in_redis() {
    let redis = Redis::start();
    let stores = [
        connected(patient(), &redis.url()).await,
        connected(patient(), &redis.url()).await,
    ];
    one_export_at_a_time_and_three_an_hour(stores).await;
}

#[tokio::test]
async fn an_export_that_panics_admits_the_next_one() {
    let exports = Exports::new();
    let replica = exports.replica(MemoryStore::new());

    // An export on a closed gate panics.
    exports.gate.close();
    for _ in 0..3 {
        let failed = request(replica.clone(), 42).await;
        assert_eq!(failed.status(), StatusCode::INTERNAL_SERVER_ERROR, "it is admitted");
    }
    assert_eq!(request(replica, 42).await.status(), StatusCode::TOO_MANY_REQUESTS);
}
