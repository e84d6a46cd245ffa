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
    Concurrency, FailureMode, MemoryStore, Policies, Policy, RateLimitLayer, RedisStore, SlidingLog, key, store::Store,
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
    let store = RedisStore::builder().url(&url).connect_lazy().expect("a store");
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

/// A service with policies of each kind, of which one is in a file.
pub(crate) async fn of_the_picture(url: String, path: PathBuf) -> Router {
    let store = RedisStore::builder().url(&url).connect_lazy().expect("a store");
    store.ready().await.expect("Redis runs");
    let policies = Policies::from_file(path).expect("a file");
    policies.reload_on_change(Duration::from_secs(1)).expect("a runtime");
    let api = policies.layer(store.clone(), ["api"]).expect("a policy");
    let layer = |policy| RateLimitLayer::new(store.clone(), policy);
    let all = |name, limit: SlidingLog| Policy::new(name, limit).key(key::constant("all"));
    let pay = by_user("pay", SlidingLog::per_minute(60)).failure_mode(FailureMode::Closed);
    let exports = by_user("exports", SlidingLog::per_minute(60)).refund_if(|_| true);
    let mails = all("mails", SlidingLog::per_second(15)).wait_up_to(Duration::from_secs(2));
    let uploads = Policy::new("uploads", Concurrency::new(20)).key(key::constant("all"));
    let slow = async || sleep(Duration::from_secs(1)).await;
    Router::new()
        .route("/api", route(async || "hi").layer(api))
        .route("/pay", route(async || "paid").layer(layer(pay)))
        .route("/export", route(slow).layer(layer(exports)))
        .route("/mail", route(async || "sent").layer(layer(mails)))
        .route("/upload", route(slow).layer(layer(uploads)))
}

/// Requests for each route of it; one caller sends half of them in an attack.
pub(crate) fn of_the_callers(number: u64, has_fault: bool) -> Builder {
    if has_fault && number.is_multiple_of(2) {
        return get("/api").header("user", "attacker");
    }
    let path = ["/api", "/pay", "/export", "/mail", "/upload"][number as usize / 2 % 5];
    get(path).header("user", number / 10 % 18)
}
