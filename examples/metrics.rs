//! Two policies, whose metrics Prometheus scrapes at `/metrics`.
//!
//! ```console
//! $ cargo run --example metrics --features axum,metrics
//!
//! $ curl -i http://127.0.0.1:3000/
//! HTTP/1.1 200 OK
//! ratelimit: "burst";r=1;t=10, "daily";r=99;t=86400
//!
//! $ curl -i http://127.0.0.1:3000/
//! $ curl -i http://127.0.0.1:3000/
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 10
//!
//! $ curl -s http://127.0.0.1:3000/metrics | grep 'decisions_total.*ed"} [1-9]'
//! tower_quota_decisions_total{policy="burst",outcome="admitted"} 2
//! tower_quota_decisions_total{policy="burst",outcome="limited"} 1
//! tower_quota_decisions_total{policy="daily",outcome="admitted"} 2
//! ```
//!
//! `docs/grafana.json` is a dashboard of these metrics. What is shown here is asserted by `tests/it/observe/metrics.rs`.

use std::{env, error::Error, net::SocketAddr, time::Duration};

use axum::{Router, routing::get};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::{net::TcpListener, time::interval};
use tower_quota::{MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, key, store::Store};

/// Seconds, from a check in memory to one that fails by its deadline.
const DURATIONS: [f64; 13] = [
    0.000_001, 0.000_01, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
];

/// Seconds for which admitted requests have waited. The last is the longest `wait_up_to` of the application, or above it:
/// what is longer is shown as that.
const WAITS: [f64; 14] = [
    0.001, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0,
];

/// Requests, from one to the most of a script call.
const REQUESTS: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

pub(crate) fn prometheus() -> Result<PrometheusBuilder, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_duration_seconds".into()), &DURATIONS)?
        .set_buckets_for_metric(Matcher::Full("tower_quota_wait_duration_seconds".into()), &WAITS)?
        .set_buckets_for_metric(Matcher::Suffix("_call_requests".into()), &REQUESTS)
}

pub(crate) fn app(store: impl Store, metrics: PrometheusHandle) -> Router {
    let burst = Policy::new("burst", SlidingLog::new(2, Duration::from_secs(10))).key(key::ip());
    let daily = Policy::new("daily", SlidingLog::per_day(100)).key(key::ip());
    Router::new()
        .route("/", get(async || "hi\n"))
        .layer(RateLimitLayer::new(store, [burst, daily]))
        // On a port that only Prometheus reaches, if the service is public.
        .route("/metrics", get(async move || metrics.render()))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let metrics = prometheus()?.install_recorder()?;
    // Without it the values of histograms stay in memory until the next scrape.
    let upkeep = metrics.clone();
    tokio::spawn(async move {
        let mut ticks = interval(Duration::from_secs(5));
        loop {
            ticks.tick().await;
            upkeep.run_upkeep();
        }
    });

    let app = match env::var("REDIS_URL") {
        Ok(url) => app(RedisStore::connect(&url).await?, metrics),
        Err(_) => app(MemoryStore::new(), metrics),
    };
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
