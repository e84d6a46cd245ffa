//! Exports that are streamed: three at once for each user, however many replicas there are.
//!
//! ```console
//! $ cargo run --example concurrency --features axum
//!
//! $ curl -i http://127.0.0.1:3000/export
//! HTTP/1.1 200 OK
//! ratelimit-policy: "exports";q=3;qu="concurrent-requests"
//! ratelimit: "exports";r=2;t=10
//! ```
//!
//! The response takes six seconds, and a client that leaves releases its slot at once. While three of them run, in other
//! terminals:
//!
//! ```text
//! $ curl -i http://127.0.0.1:3000/export
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 1
//! ratelimit: "exports";r=0;t=1
//! ```

use std::{convert::Infallible, env, error::Error, time::Duration};

use axum::{Extension, Router, body::Body, routing::get};
use tokio::{net::TcpListener, signal, time::sleep};
use tokio_stream::{Stream, StreamExt};
use tower_quota::{Concurrency, MemoryStore, Policy, RateLimitLayer, key, store::Store};

/// The user that authentication found.
#[derive(Clone)]
struct UserId(u64);

/// The store is a `RedisStore` where there are several replicas.
fn limit(store: impl Store) -> RateLimitLayer {
    let exports = Policy::new("exports", Concurrency::new(3)).key(key::extension("user", |user: &UserId| user.0));
    RateLimitLayer::new(store, exports)
}

/// A row each second.
fn rows() -> impl Stream<Item = Result<&'static str, Infallible>> {
    tokio_stream::iter([
        "id,name\n",
        "1,Ada\n",
        "2,Grace\n",
        "3,Barbara\n",
        "4,Frances\n",
        "5,Radia\n",
    ])
    .then(async |row| {
        sleep(Duration::from_secs(1)).await;
        Ok(row)
    })
}

pub(crate) fn app(store: impl Store) -> Router {
    // The extension stands for authentication.
    let layers = (Extension(UserId(42)), limit(store));
    Router::new().route("/export", get(async || Body::from_stream(rows())).layer(layers))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let store = MemoryStore::new();
    axum::serve(listener, app(store.clone()))
        .with_graceful_shutdown(async { drop(signal::ctrl_c().await) })
        .await?;
    // The last releases.
    store.drained(Duration::from_secs(5)).await?;
    Ok(())
}
