//! A limit for each route of an axum router, and one for all of them.
//!
//! ```text
//! cargo run --example axum_per_route --features axum
//!
//! curl -i http://127.0.0.1:3000/search
//! curl -i -X POST http://127.0.0.1:3000/login
//! curl -i http://127.0.0.1:3000/users/41
//! curl -i http://127.0.0.1:3000/users/42
//! ```

use std::{env, error::Error, net::SocketAddr};

use axum::{
    Router,
    routing::{get, post},
};
use tokio::net::TcpListener;
use tower_quota::{Decision, MemoryStore, Policy, RateLimitLayer, SlidingLog, TokenBucket, key};

/// A handler finds out how the caller stands.
async fn search(decision: Decision) -> String {
    format!("found; {} more searches are free\n", decision.remaining())
}

/// Where a limit may be missing, or the store may fail, there is not always a decision.
async fn user(decision: Option<Decision>) -> String {
    match decision {
        Some(decision) => format!("a user; {} more\n", decision.remaining()),
        None => "a user\n".into(),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = MemoryStore::new();
    let limit = |policy: Policy| RateLimitLayer::new(store.clone(), policy);

    let searches = Policy::new("searches", TokenBucket::per_second(1).burst(5)).key(key::ip());
    let logins = Policy::new("logins", SlidingLog::per_minute(3)).key(key::ip());
    // Ten a minute for each address and template: `/users/41` and `/users/42` are one.
    let everything = Policy::new("everything", SlidingLog::per_minute(10)).key((key::ip(), key::route()));

    let app = Router::new()
        .route("/search", get(search).layer(limit(searches)))
        .route("/login", post(async || "welcome\n").layer(limit(logins)))
        .route("/users/{id}", get(user))
        .layer(limit(everything));

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
