//! Payments that are counted once for each `Idempotency-Key`, so that a retry takes nothing from the quota.
//!
//! ```console
//! $ cargo run --example idempotency --features axum
//!
//! $ curl -i -X POST -H 'x-user-id: 42' -H 'idempotency-key: "8e03978e"' http://127.0.0.1:3000/payments
//! HTTP/1.1 200 OK
//! ratelimit: "payments";r=1;t=60
//!
//! paid
//!
//! $ curl -i -X POST -H 'x-user-id: 42' -H 'idempotency-key: "8e03978e"' http://127.0.0.1:3000/payments
//! HTTP/1.1 200 OK
//! ratelimit: "payments";r=1;t=60
//!
//! already paid
//!
//! $ curl -i -X POST -H 'x-user-id: 42' -H 'idempotency-key: "5c2b1f90"' http://127.0.0.1:3000/payments
//! $ curl -i -X POST -H 'x-user-id: 42' -H 'idempotency-key: "d41e7a63"' http://127.0.0.1:3000/payments
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//! ratelimit: "payments";r=0;t=60
//!
//! $ curl -i -X POST -H 'x-user-id: 42' -H 'idempotency-key: "8e03978e"' http://127.0.0.1:3000/payments
//! HTTP/1.1 200 OK
//! ratelimit: "payments";r=0;t=60
//!
//! already paid
//! ```

use std::{
    collections::HashSet,
    env,
    error::Error,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, HeaderValue},
    routing::post,
};
use tokio::net::TcpListener;
use tower_quota::{MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

/// The users and keys of the payments that were made. In a real service, a table beside the payments.
type Paid = Arc<Mutex<HashSet<[Option<HeaderValue>; 2]>>>;

/// The limit admits a retry without counting it. That it pays once is up to the handler.
async fn pay(State(paid): State<Paid>, headers: HeaderMap) -> &'static str {
    let payment = ["x-user-id", "idempotency-key"].map(|name| headers.get(name).cloned());
    let mut paid = paid.lock().unwrap_or_else(PoisonError::into_inner);
    match payment[1].is_none() || paid.insert(payment) {
        true => "paid\n",
        false => "already paid\n",
    }
}

pub(crate) fn app() -> Router {
    // A proxy in front sets the user.
    let payments = Policy::new("payments", SlidingLog::per_minute(2))
        .key(key::header("x-user-id"))
        .once_per(key::header("idempotency-key"));

    Router::new()
        .route("/payments", post(pay))
        .layer(RateLimitLayer::new(MemoryStore::new(), payments))
        .with_state(Paid::default())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app()).await?;
    Ok(())
}
