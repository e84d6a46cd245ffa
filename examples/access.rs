//! Requests that are not limited, or are rejected with `403`: checks of health, the networks of the company, a blocked network.
//!
//! The proxy in front records the address of the client. `curl` shows itself as one here.
//!
//! ```console
//! $ cargo run --example access --features axum
//!
//! $ curl -i -H 'x-forwarded-for: 203.0.113.7' http://127.0.0.1:3000/search
//! HTTP/1.1 200 OK
//! ratelimit: "search";r=0;t=60
//!
//! $ curl -i -H 'x-forwarded-for: 203.0.113.7' http://127.0.0.1:3000/search
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//!
//! $ curl -i -H 'x-forwarded-for: 203.0.113.7' http://127.0.0.1:3000/health
//! $ curl -i -H 'x-forwarded-for: 203.0.113.7' http://127.0.0.1:3000/health
//! HTTP/1.1 200 OK
//!
//! $ curl -i -H 'x-forwarded-for: 192.0.2.7' http://127.0.0.1:3000/search
//! $ curl -i -H 'x-forwarded-for: 192.0.2.7' http://127.0.0.1:3000/search
//! HTTP/1.1 200 OK
//!
//! $ curl -i -H 'x-forwarded-for: 198.51.100.9' http://127.0.0.1:3000/search
//! HTTP/1.1 403 Forbidden
//! content-type: application/problem+json
//! ```
//!
//! `[skip]` and `[block]` are the same in a file of limits.

use std::{env, error::Error, net::SocketAddr};

use axum::{Router, routing::get};
use tokio::net::TcpListener;
use tower_quota::{
    ConfigError, MemoryStore, Policy, RateLimitLayer, SlidingLog,
    key::{self, ClientIpSource},
};

pub(crate) fn app() -> Result<Router, ConfigError> {
    let client = key::client_ip(ClientIpSource::XForwardedFor).trusted(["127.0.0.0/8"])?;
    let search = Policy::new("search", SlidingLog::per_minute(1)).key(client.clone());
    let limit = RateLimitLayer::new(MemoryStore::new(), search)
        .skip(|parts| parts.uri.path() == "/health")
        .skip(client.clone().within(["192.0.2.0/24"])?)
        .block(client.within(["198.51.100.0/24", "2001:db8::/32"])?);

    Ok(Router::new()
        .route("/search", get(async || "results\n"))
        .route("/health", get(async || "well\n"))
        .layer(limit))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app()?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
