//! A limit on what only the handler knows: one code a minute for each phone number, inside of a limit for each address.
//!
//! ```console
//! $ cargo run --example handler --features axum
//!
//! $ curl -i -X POST http://127.0.0.1:3000/codes/+4930901820
//! HTTP/1.1 200 OK
//! ratelimit: "codes";r=0;t=60, "addresses";r=4;t=60
//!
//! $ curl -i -X POST http://127.0.0.1:3000/codes/+4930901820
//! HTTP/1.1 429 Too Many Requests
//! content-type: application/problem+json
//! retry-after: 60
//! ratelimit: "codes";r=0;t=60
//! ```
//!
//! The handler denies the second request. Its response has the fields of that denial, without those of the layer.

use std::{env, error::Error, net::SocketAddr};

use axum::{
    Router,
    extract::{Path, State},
    http::HeaderMap,
    response::Result,
    routing::post,
};
use tokio::net::TcpListener;
use tower_quota::{Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

async fn send_code(State(codes): State<Limiter>, Path(number): Path<String>) -> Result<(HeaderMap, &'static str)> {
    let decision = codes.check(number).await?;
    decision.require()?;

    // Here the message is sent.
    Ok((decision.headers(), "sent\n"))
}

pub(crate) fn app() -> Router {
    let store = MemoryStore::new();
    let codes = Limiter::new(store.clone(), Policy::new("codes", SlidingLog::per_minute(1)));
    let addresses = Policy::new("addresses", SlidingLog::per_minute(5)).key(key::ip());

    Router::new()
        .route("/codes/{number}", post(send_code))
        .with_state(codes)
        .layer(RateLimitLayer::new(store, addresses))
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
