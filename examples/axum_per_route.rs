//! A limit for each route of an axum router, and one for all routes.
//!
//! ```console
//! $ cargo run --example axum_per_route --features axum
//!
//! $ curl -i http://127.0.0.1:3000/search
//! HTTP/1.1 200 OK
//! ratelimit: "searches";r=4;t=1, "routes";r=9;t=60
//!
//! 4 more searches
//!
//! $ curl -i -X POST http://127.0.0.1:3000/login
//! $ curl -i -X POST http://127.0.0.1:3000/login
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//! ratelimit: "logins";r=0;t=60, "routes";r=8;t=60
//!
//! $ curl -i http://127.0.0.1:3000/users/41
//! ratelimit: "routes";r=9;t=60
//!
//! $ curl -i http://127.0.0.1:3000/users/42
//! ratelimit: "routes";r=8;t=60
//! ```

use std::{env, error::Error, net::SocketAddr};

use axum::{
    Router,
    routing::{get, post},
};
use tokio::net::TcpListener;
use tower_quota::{Decision, MemoryStore, Policy, RateLimitLayer, SlidingLog, TokenBucket, key};

/// Reads the decision of the layers. It is without the policy while the store fails and the limit is open.
async fn search(decision: Decision) -> String {
    match decision.policies().find(|policy| policy.name() == "searches") {
        Some(searches) => format!("{} more searches\n", searches.remaining()),
        None => "more searches\n".into(),
    }
}

/// A decision is optional for a handler that also runs without a layer.
async fn user(decision: Option<Decision>) -> String {
    match decision.iter().flat_map(Decision::policies).next() {
        Some(policy) => format!("a user; {} more\n", policy.remaining()),
        None => "a user\n".into(),
    }
}

pub(crate) fn app() -> Router {
    let store = MemoryStore::new();
    let limit = |policy: Policy| RateLimitLayer::new(store.clone(), policy);

    let searches = Policy::new("searches", TokenBucket::per_second(1).burst(5)).key(key::ip());
    let logins = Policy::new("logins", SlidingLog::per_minute(1)).key(key::ip());
    // `key::route` is the template of the route: `/users/41` and `/users/42` share a count.
    let routes = Policy::new("routes", SlidingLog::per_minute(10)).key((key::ip(), key::route()));

    Router::new()
        .route("/search", get(search).layer(limit(searches)))
        .route("/login", post(async || "welcome\n").layer(limit(logins)))
        .route("/users/{id}", get(user))
        .layer(limit(routes))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
