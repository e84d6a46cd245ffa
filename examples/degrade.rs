//! Responses while a limit denies, and while Redis is down.
//!
//! The store connects to Redis at `REDIS_URL`, by default on port 6379. Without a server there:
//!
//! ```console
//! $ cargo run --example degrade --features axum
//!
//! $ curl -i http://127.0.0.1:3000/download
//! HTTP/1.1 200 OK
//! ratelimit-policy: "download";q=8;w=60
//! ratelimit: "download";r=1;t=60
//!
//! $ curl -i http://127.0.0.1:3000/download
//! $ curl -i http://127.0.0.1:3000/download
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//! ratelimit: "download";r=0;t=60
//!
//! $ curl -i http://127.0.0.1:3000/news
//! HTTP/1.1 200 OK
//!
//! $ curl -i http://127.0.0.1:3000/login
//! HTTP/1.1 503 Service Unavailable
//! retry-after: 1
//!
//! $ curl -i http://127.0.0.1:3000/search
//! HTTP/1.1 200 OK
//!
//! popular results of yesterday
//! ```

use std::{env, error::Error, net::SocketAddr};

use axum::{Router, routing::get};
use bytes::Bytes;
use http::{Response, request::Parts};
use tokio::net::TcpListener;
use tower_quota::{
    FailureMode, Policy, RateLimitLayer, RedisStore, SlidingLog, key,
    response::{Problem, Rejection, ResponseFormat},
    store::StoreError,
};

/// A cheap result in the place of an error.
fn popular(rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
    match rejection {
        Rejection::Limited(_) => Response::new("popular results\n".into()),
        Rejection::Failed { .. } => Response::new("popular results of yesterday\n".into()),
        refused => Problem.respond(refused, parts),
    }
}

fn log(error: &StoreError) {
    eprintln!("{:?}: {error}", error.kind());
}

pub(crate) fn app(redis: &RedisStore) -> Router {
    let policy = |name: &'static str| Policy::new(name, SlidingLog::per_minute(8)).key(key::ip());
    let limit = |policy| RateLimitLayer::new(redis.clone(), policy).on_failure(log);

    // One of four replicas: 2 a minute in this process while Redis is down.
    let download = limit(policy("download").failure_mode(FailureMode::local_share(1, 4)));
    let news = limit(policy("news").failure_mode(FailureMode::Open));
    let login = limit(policy("login").failure_mode(FailureMode::Closed));
    let search = limit(policy("search").failure_mode(FailureMode::Closed)).format(popular);

    Router::new()
        .route("/download", get(async || "a file\n").layer(download))
        .route("/news", get(async || "the news\n").layer(news))
        .route("/login", get(async || "welcome\n").layer(login))
        .route("/search", get(async || "results\n").layer(search))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".into());
    // Starts while Redis is down. `connect` returns an error then, and also finds a wrong password at the start.
    let redis = RedisStore::connect_lazy(&url)?;

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let service = app(&redis).into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await?;
    Ok(())
}
