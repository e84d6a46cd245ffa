//! A candidate for a lower limit, which observes beside the enforced one before it replaces it.
//!
//! ```console
//! $ cargo run --example observe --features axum
//!
//! $ curl -i http://127.0.0.1:3000/search
//! HTTP/1.1 200 OK
//! ratelimit-observed: "search-candidate";r=0;t=60
//! ratelimit-policy: "search";q=2;w=60
//! ratelimit: "search";r=1;t=60
//!
//! $ curl -i http://127.0.0.1:3000/search
//! HTTP/1.1 200 OK
//! ratelimit-observed: "search-candidate";r=0;t=60;denied
//! ratelimit: "search";r=0;t=60
//!
//! $ curl -i http://127.0.0.1:3000/search
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//! ratelimit: "search";r=0;t=60
//!
//! $ curl -i http://127.0.0.1:3000/report
//! HTTP/1.1 200 OK
//!
//! search-candidate: 2 of 3 requests would have been denied
//! ```

use std::{
    env,
    error::Error,
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use axum::{Router, routing::get};
use tokio::net::TcpListener;
use tower_quota::{Decision, MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

static REQUESTS: AtomicU64 = AtomicU64::new(0);
static WOULD_DENY: AtomicU64 = AtomicU64::new(0);

fn count(decision: &Decision) {
    for policy in decision.policies().filter(|policy| policy.is_observed()) {
        REQUESTS.fetch_add(1, Relaxed);
        WOULD_DENY.fetch_add(policy.denial().is_some().into(), Relaxed);
    }
}

async fn report() -> String {
    let (requests, denied) = (REQUESTS.load(Relaxed), WOULD_DENY.load(Relaxed));
    format!("search-candidate: {denied} of {requests} requests would have been denied\n")
}

pub(crate) fn app() -> Router {
    let policy = |name: &'static str, quota| Policy::new(name, SlidingLog::per_minute(quota)).key(key::ip());
    let policies = [policy("search", 2), policy("search-candidate", 1).observe_only()];
    let limit = RateLimitLayer::new(MemoryStore::new(), policies);

    Router::new()
        .route(
            "/search",
            get(async || "results\n").layer(limit.observed_header(true).on_decision(count)),
        )
        .route("/report", get(report))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
