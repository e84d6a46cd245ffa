//! Replicas of services, each with metrics of its own, which Prometheus scrapes.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use axum::{Router, routing::get as route};
use http::request::Builder;
use metrics::set_default_local_recorder;
use tokio::{
    runtime,
    sync::oneshot,
    time::{MissedTickBehavior, interval, sleep},
};
use tower_quota::{
    FailureMode, MemoryStore, Policies, Policy, RateLimitLayer, RedisStore, SlidingLog, key, store::Store,
};

use crate::support::{get, send, serve};

#[path = "../../examples/metrics.rs"]
#[allow(dead_code)]
mod example;

/// A replica of a service: a thread with a recorder, which serves `/metrics` and sends requests to itself.
pub(crate) struct Replica {
    pub(crate) url: String,
    /// Whether the requests are those of the fault.
    pub(crate) has_fault: Arc<AtomicBool>,
    _end: oneshot::Sender<()>,
}

/// The requests of a replica: the one of this number, and whether there is a fault.
type Requests = fn(u64, bool) -> Builder;

impl Replica {
    pub(crate) fn start<A>(app: impl FnOnce() -> A + Send + 'static, per_second: u32, requests: Requests) -> Self
    where
        A: Future<Output = Router>,
    {
        let (tell_url, url) = mpsc::channel();
        let (end, ended) = oneshot::channel();
        let has_fault = Arc::new(AtomicBool::new(false));
        let shared = has_fault.clone();
        thread::spawn(move || {
            let recorder = example::prometheus().expect("buckets").build_recorder();
            let handle = recorder.handle();
            let _guard = set_default_local_recorder(&recorder);
            let runtime = runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let app = app().await;
                let metrics = Router::new().route("/metrics", route(async move || handle.render()));
                tell_url.send(serve(metrics).await).expect("the test waits");
                tokio::select! {
                    () = load(app, per_second, requests, &shared) => {}
                    _ = ended => {}
                }
            });
        });
        Self {
            url: url.recv().expect("the replica serves"),
            has_fault,
            _end: end,
        }
    }

    pub(crate) fn set_fault(&self, has_fault: bool) {
        self.has_fault.store(has_fault, Ordering::Relaxed);
    }
}

async fn load(app: Router, per_second: u32, requests: Requests, has_fault: &AtomicBool) {
    let mut ticks = interval(Duration::from_secs(1) / per_second);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 0.. {
        ticks.tick().await;
        let (app, request) = (app.clone(), requests(number, has_fault.load(Ordering::Relaxed)));
        tokio::spawn(async move { send(&app, request).await });
    }
}

fn by_user(name: &'static str, limit: SlidingLog) -> Policy {
    Policy::new(name, limit).key(key::header("user"))
}

/// A service with three policies in Redis, of which one is closed if Redis fails, and one refunds.
pub(crate) async fn with_redis(url: String) -> Router {
    // A busy machine is no fault.
    let builder = RedisStore::builder().deadline(Duration::from_secs(3));
    let store = builder.url(&url).connect_lazy().expect("a store");
    let layer = |policy| RateLimitLayer::new(store.clone(), policy);
    let much = || SlidingLog::per_minute(100_000);
    Router::new()
        .route("/api", route(async || "hi").layer(layer(by_user("api", much()))))
        .route(
            "/pay",
            route(async || "paid").layer(layer(by_user("pay", much()).failure_mode(FailureMode::Closed))),
        )
        .route(
            "/export",
            route(async || sleep(Duration::from_secs(1)).await)
                .layer(layer(by_user("exports", much()).refund_if(|_| true))),
        )
}

/// Requests for each route of it.
pub(crate) fn for_redis(number: u64, _: bool) -> Builder {
    let path = ["/api", "/pay", "/export"][number as usize % 3];
    // A Redis without memory refuses new keys, and few additions to others.
    get(path).header("user", number)
}

/// The same of seven callers, with their keys in as many slots of a cluster.
pub(crate) fn for_seven_callers(number: u64, _: bool) -> Builder {
    let path = ["/api", "/pay", "/export"][number as usize % 3];
    get(path).header("user", number % 7)
}

/// A service with one policy.
pub(crate) async fn with_memory(store: impl Store, limit: SlidingLog) -> Router {
    Router::new()
        .fallback(async || "hi")
        .layer(RateLimitLayer::new(store, by_user("api", limit)))
}

/// A service that follows a file.
pub(crate) async fn with_file(path: PathBuf) -> Router {
    let policies = Policies::from_file(path).expect("a file");
    policies.reload_on_change(Duration::from_millis(50)).expect("a runtime");
    let layer = policies.layer(MemoryStore::new(), ["api"]).expect("a policy");
    Router::new().fallback(async || "hi").layer(layer)
}
