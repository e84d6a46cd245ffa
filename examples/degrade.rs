//! What callers receive when they are limited, and while Redis is down.
//!
//! ```text
//! cargo run --example degrade --features axum
//!
//! curl -i http://127.0.0.1:3000/download  # while Redis is down, this process counts: its quarter of the limit
//! curl -i http://127.0.0.1:3000/news      # passes uncounted while Redis is down
//! curl -i http://127.0.0.1:3000/login     # is closed while Redis is down
//! curl -i http://127.0.0.1:3000/search    # has a cheaper answer for limited requests and while Redis is down
//! ```
//!
//! It connects to Redis at `REDIS_URL`, by default on port 6379. Stop and start that server between the calls.

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

/// A response that costs no work, in the place of an error.
fn say_less(rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
    match rejection {
        Rejection::Limited(_) => Response::new("what others found today\n".into()),
        Rejection::Failed { error, .. } => {
            Response::new(format!("what others found yesterday ({:?})\n", error.kind()).into())
        }
        refused => Problem.respond(refused, parts),
    }
}

fn log(error: &StoreError) {
    eprintln!("{:?}: {error}", error.kind());
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".into());
    // It starts while Redis is down. Most services use `connect`, which finds a wrong password when they start.
    let redis = RedisStore::connect_lazy(&url)?;

    let policy = |name: &'static str, limit| Policy::new(name, SlidingLog::per_minute(limit)).key(key::ip());
    let limit = |policy| RateLimitLayer::new(redis.clone(), policy).on_failure(log);

    // This is one of four replicas: five a minute while Redis is down.
    let download = limit(policy("download", 20).failure_mode(FailureMode::local_share(1, 4)));
    let news = limit(policy("news", 20).failure_mode(FailureMode::Open));
    let login = limit(policy("login", 20).failure_mode(FailureMode::Closed));
    let search = limit(policy("search", 2).failure_mode(FailureMode::Closed)).format(say_less);

    let app = Router::new()
        .route("/news", get(async || "the news\n").layer(news))
        .route("/login", get(async || "welcome\n").layer(login))
        .route("/search", get(async || "what you searched for\n").layer(search))
        .route("/download", get(async || "a file\n").layer(download));

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
