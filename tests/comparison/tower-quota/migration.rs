//! The application after its migration from tower_governor, with a count that all replicas share.

use std::{env, error::Error, net::SocketAddr, time::Duration};

use axum::{Router, routing::get};
use tokio::net::TcpListener;
use tower_quota::{Policy, RateLimitLayer, RedisStore, TokenBucket, key, store::Store}; // limits

pub(crate) fn app(store: impl Store) -> Router {
    let peers = Policy::new("peers", TokenBucket::new(1, Duration::from_secs(2)).burst(5)).key(key::ip()); // limits
    Router::new()
        .route("/", get(async || "hi\n"))
        .layer(RateLimitLayer::new(store, peers)) // limits
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = RedisStore::connect(&env::var("REDIS_URL")?).await?; // limits
    let service = app(store).into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(TcpListener::bind("127.0.0.1:3000").await?, service).await?;
    Ok(())
}
