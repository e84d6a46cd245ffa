//! A limit on an axum route: 2 requests in any 30 seconds for each address and path.
//!
//! Requests are counted in memory, or in Redis if `REDIS_URL` is set, as in `REDIS_URL=redis://127.0.0.1:6379`.
//!
//! `http://127.0.0.1:3000` is a page that calls the route and draws the limit; `hello/page.rs` has it.
//!
//! ```console
//! $ cargo run --example hello --features axum
//!
//! $ curl -i http://127.0.0.1:3000/hello/sayHi
//! HTTP/1.1 200 OK
//! ratelimit-policy: "say-hi";q=2;w=30
//! ratelimit: "say-hi";r=1;t=30
//!
//! $ curl -i http://127.0.0.1:3000/hello/sayHi
//! HTTP/1.1 200 OK
//! ratelimit: "say-hi";r=0;t=30
//!
//! $ curl -i http://127.0.0.1:3000/hello/sayHi
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 30
//! ratelimit: "say-hi";r=0;t=30
//! ```

use std::{env, error::Error, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, routing::get};
use tokio::net::TcpListener;
use tower_quota::{MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, key, store::Store};

#[path = "hello/page.rs"]
mod page;

pub(crate) fn app(store: impl Store + Clone) -> Router {
    let say_hi = Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30))).key((key::ip(), key::path()));
    let page = page::routes(&store);
    Router::new()
        .route(
            "/hello/sayHi",
            get(async || "hi\n").layer(RateLimitLayer::new(store, say_hi)),
        )
        .merge(page)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store: Arc<dyn Store> = match env::var("REDIS_URL") {
        Ok(url) => Arc::new(RedisStore::connect(&url).await?),
        Err(_) => Arc::new(MemoryStore::new()),
    };

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("open http://{}", listener.local_addr()?);
    // Provides the address of the peer to `key::ip`.
    let service = app(store).into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await?;
    Ok(())
}
