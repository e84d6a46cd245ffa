//! A client of a third-party API with a layer around it: `reqwest` sends five requests in a second at most, and holds the others.
//!
//! ```console
//! $ cargo run --example reqwest --features axum
//! 12 requests were served in 2.2 s, and the API has denied none
//! ```
//!
//! With a `RedisStore`, all replicas of the client share the quota. `learn_from_responses` is for an API that other programs use
//! too: a `429` bans the key until its `Retry-After` has passed, for at most 1 h by default. A request that would wait for more
//! than ten seconds, or that is sent during a pause, has a `429` of the layer, whose `Decision` is in the extensions.

use std::{
    error::Error,
    future::IntoFuture,
    time::{Duration, Instant},
};

use axum::{Router, routing::get};
use http::{Request, Response, StatusCode};
use tokio::{net::TcpListener, task::JoinSet};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{Headers, MemoryStore, Policy, RateLimitLayer, ResponseBody, SlidingLog, key};

const QUOTA: u64 = 5;
const WINDOW: Duration = Duration::from_secs(1);
/// Requests arrive closer together than they were admitted, so the window of the client is longer than that of the API.
const MARGIN: Duration = Duration::from_millis(100);

/// The third-party API.
fn api() -> Router {
    let limit = Policy::new("api", SlidingLog::new(QUOTA, WINDOW)).key(key::constant("client"));
    Router::new().route(
        "/",
        get(async || "hi").layer(RateLimitLayer::new(MemoryStore::new(), limit)),
    )
}

/// `reqwest` as a service of requests of the crate `http`.
async fn execute(
    client: reqwest::Client,
    request: Request<reqwest::Body>,
) -> Result<Response<reqwest::Body>, reqwest::Error> {
    Ok(client.execute(request.try_into()?).await?.into())
}

/// Returns how long it took until each request was served.
pub(crate) async fn run() -> Result<Duration, Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(axum::serve(listener, api()).into_future());

    let outbound = Policy::new("outbound", SlidingLog::new(QUOTA, WINDOW + MARGIN))
        .key(key::constant("token-1"))
        .wait_up_to(Duration::from_secs(10))
        .learn_from_responses();
    let limit = RateLimitLayer::new(MemoryStore::new(), outbound).headers(Headers::None);
    let reqwest = reqwest::Client::new();
    let client = limit.layer(service_fn(move |request| execute(reqwest.clone(), request)));

    let (start, mut sending) = (Instant::now(), JoinSet::new());
    for _ in 0..12 {
        let request = Request::get(&url).body(reqwest::Body::default())?;
        sending.spawn(client.clone().oneshot(request));
    }
    while let Some(sent) = sending.join_next().await {
        // A `reqwest::Response` again, with its methods.
        let response = reqwest::Response::from(sent??.map(reqwest::Body::wrap::<ResponseBody<_>>));
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.text().await?, "hi");
    }
    Ok(start.elapsed())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let took = run().await?;
    println!(
        "12 requests were served in {:.1} s, and the API has denied none",
        took.as_secs_f64()
    );
    Ok(())
}
