//! Answers of a language model: from a small model when half of the limit is used, from a cache near its end.
//!
//! ```console
//! $ cargo run --example degrees --features axum
//!
//! $ curl -i http://127.0.0.1:3000/ask
//! HTTP/1.1 200 OK
//! ratelimit: "answers";r=3;t=60
//! ratelimit-degree: 0
//!
//! large model
//!
//! $ curl -i http://127.0.0.1:3000/ask
//! HTTP/1.1 200 OK
//! ratelimit: "answers";r=2;t=60
//! ratelimit-degree: 1
//!
//! small model
//!
//! $ curl -i http://127.0.0.1:3000/ask
//! $ curl -i http://127.0.0.1:3000/ask
//! HTTP/1.1 200 OK
//! ratelimit: "answers";r=0;t=60
//! ratelimit-degree: 2
//!
//! cached answer
//!
//! $ curl -i http://127.0.0.1:3000/ask
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//! ratelimit-degree: 2
//! ```
//!
//! The callback prints each request that is near the limit. What is shown here is asserted by `tests/it/examples/mod.rs`.

use std::{env, error::Error, net::SocketAddr};

use axum::{Router, routing::get};
use tokio::net::TcpListener;
use tower_quota::{Decision, MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

async fn answer(decision: Decision) -> &'static str {
    match decision.degree() {
        0 => "large model\n",
        1 => "small model\n",
        _ => "cached answer\n",
    }
}

fn log(decision: &Decision) {
    if decision.degree() > 0 {
        println!("degree {}, {} left", decision.degree(), decision.remaining());
    }
}

pub(crate) fn app() -> Router {
    let answers = Policy::new("answers", SlidingLog::per_minute(4))
        .key(key::ip())
        .warn_at(0.5)
        .warn_at(0.9);
    let limit = RateLimitLayer::new(MemoryStore::new(), answers)
        .degree_header(true)
        .on_decision(log);
    Router::new().route("/ask", get(answer).layer(limit))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
