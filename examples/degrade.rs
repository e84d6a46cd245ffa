//! What callers get when there is too much of them, and while Redis does not answer.
//!
//! ```text
//! cargo run --example degrade --features axum
//!
//! curl -i http://127.0.0.1:3000/news      # passes while Redis is away
//! curl -i http://127.0.0.1:3000/login     # is closed while Redis is away
//! curl -i http://127.0.0.1:3000/search    # says less, to who asks too often and while Redis is away
//! curl -i http://127.0.0.1:3000/download  # counts in memory while Redis is away
//! ```
//!
//! It looks for Redis at `REDIS_URL`, else on port 6379; stop and start that while you ask.

use std::{env, error::Error, net::SocketAddr};

use axum::{Router, routing::get};
use bytes::Bytes;
use http::{Response, request::Parts};
use tokio::net::TcpListener;
use tower_quota::{
    FailureMode, Fallback, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, key,
    response::{self, Problem, Rejection, ResponseFormat},
    store::StoreError,
};

/// Answers with something that needs no work instead of with an error.
fn say_less(rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
    match rejection {
        Rejection::Limited(_) => Response::new("what others found today\n".into()),
        Rejection::Failed(error) => Response::new(format!("what others found yesterday ({:?})\n", error.kind()).into()),
        refused => Problem.respond(refused, parts),
    }
}

fn log(error: &StoreError) {
    eprintln!("{:?}: {error}", error.kind());
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".into());
    let redis = RedisStore::connect(&url).await?;
    // This is one of four replicas, and on its own it takes a quarter: five a minute.
    let fallback = Fallback::new(redis.clone(), MemoryStore::new())
        .share(1, 4)
        .on_failure(log);

    let policy = |name: &'static str, limit| Policy::new(name, SlidingLog::per_minute(limit)).key(key::ip());
    let limit = |policy| RateLimitLayer::new(redis.clone(), policy).on_failure(log);

    let news = limit(policy("news", 20));
    let login = limit(policy("login", 20).failure_mode(FailureMode::Closed));
    let search = limit(policy("search", 2).failure_mode(FailureMode::Closed)).format(response::from_fn(say_less));
    let download = RateLimitLayer::new(fallback, policy("download", 20));

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
