//! Three processes share the quota of a third-party API: 20 requests and 1,000 tokens in each second.
//!
//! The processes count in Redis at `REDIS_URL`, by default on port 6379. This starts the API, uses it up as another program
//! would, and starts itself three times:
//!
//! ```console
//! $ cargo run --example client --features axum
//! ```
//!
//! A request waits for the limit of requests. It does not wait for that of tokens: it is denied, and sent again after
//! `retry_after`.
//!
//! It asserts that each request is eventually served. It prints how many requests the API denied, and how many arrived in the
//! busiest second. With `ALONE=1` no other program uses the quota, so the API denies only requests that arrive too close
//! together. `MARGIN_MS` is by how much the window of the fleet is longer than that of the API, 200 by default.

use std::{
    collections::VecDeque,
    env,
    error::Error,
    net::SocketAddr,
    process::Stdio,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::{Router, body::Body, extract::Path, routing::post};
use http::{Request, StatusCode};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::{net::TcpListener, process::Command, task::JoinSet, time::sleep};
use tower::{Layer, ServiceExt};
use tower_quota::{
    Decision, FailureMode, Headers, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, key, store::Store,
};

const WINDOW: Duration = Duration::from_secs(1);
const REQUESTS: u64 = 20;
const TOKENS: u64 = 1_000;
/// What a request is charged before its response has the number of tokens.
const ESTIMATE: u64 = 100;
const PROCESSES: usize = 3;
/// The requests that a process has on the way at once, and those that it sends.
pub(crate) const AT_ONCE: usize = 8;
pub(crate) const EACH: usize = 40;

/// What the API has seen.
#[derive(Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<Arrivals>>);

#[derive(Default)]
struct Arrivals {
    last_window: VecDeque<Instant>,
    most: usize,
    complaints: usize,
}

impl Seen {
    fn arrival(&self, is_allowed: bool) {
        let (now, mut arrivals) = (Instant::now(), self.0.lock().expect("no panic"));
        arrivals.last_window.push_back(now);
        while arrivals.last_window.front().is_some_and(|first| *first + WINDOW <= now) {
            arrivals.last_window.pop_front();
        }
        arrivals.most = arrivals.most.max(arrivals.last_window.len());
        arrivals.complaints += usize::from(!is_allowed);
    }

    /// The most requests in a window, and the number of complaints; starts again.
    pub(crate) fn take(&self) -> (usize, usize) {
        let Arrivals { most, complaints, .. } = std::mem::take(&mut *self.0.lock().expect("no panic"));
        (most, complaints)
    }
}

/// The third-party API. A request costs the tokens of its path, which a client learns from the response.
pub(crate) fn api(seen: Seen) -> Router {
    let tokens = |path: &str| path.trim_start_matches('/').parse().unwrap_or(ESTIMATE);
    let policies = [
        Policy::new("requests", SlidingLog::new(REQUESTS, WINDOW)).key(key::constant("client")),
        Policy::new("tokens", SlidingLog::new(TOKENS, WINDOW))
            .key(key::constant("client"))
            .cost_fn(move |parts| tokens(parts.uri.path())),
    ];
    let limit = RateLimitLayer::new(MemoryStore::new(), policies);
    let limit = limit.on_decision(move |decision| seen.arrival(decision.is_allowed()));
    let complete = async |Path(tokens): Path<String>| [("x-tokens", tokens)];
    Router::new().route("/{tokens}", post(complete).layer(limit))
}

/// Sends requests to the API, as many as are admitted, and returns how many were served.
pub(crate) async fn work(store: impl Store, api: SocketAddr, margin: Duration) -> Result<usize, Box<dyn Error>> {
    let policy = |name: &'static str, quota| {
        Policy::new(name, SlidingLog::new(quota, WINDOW + margin))
            .key(key::constant("token-1"))
            // Alone, a process would send more than its part.
            .failure_mode(FailureMode::Closed)
    };
    let policies = [
        policy("requests", REQUESTS).wait_up_to(WINDOW).learn_from_responses(),
        policy("tokens", TOKENS).cost(ESTIMATE),
    ];
    let limit = RateLimitLayer::new(store, policies)
        .headers(Headers::None)
        .response_extensions(true);
    let client = limit.layer(Client::builder(TokioExecutor::new()).build_http::<Body>());

    let mut sending = JoinSet::new();
    for lane in 0..AT_ONCE {
        let client = client.clone();
        sending.spawn(async move {
            let mut served = 0;
            while served < EACH / AT_ONCE {
                let uri = format!("http://{api}/{}", 10 + (lane * 31 + served * 17) % 90);
                let request = Request::post(uri).body(Body::empty()).expect("a good request");
                let response = client
                    .clone()
                    .oneshot(request)
                    .await
                    .map_err(|error| error.to_string())?;
                let decision = response.extensions().get::<Decision>().cloned();
                let decision = decision.ok_or("Redis does not reply")?;
                if let Some(wait) = decision.retry_after() {
                    sleep(wait).await;
                    continue;
                }
                let tokens = response
                    .headers()
                    .get("x-tokens")
                    .and_then(|tokens| tokens.to_str().ok());
                let tokens = tokens.and_then(|tokens| tokens.parse().ok()).unwrap_or(0);
                decision
                    .take_receipt_of("tokens")
                    .settle(tokens)
                    .await
                    .map_err(|error| error.to_string())?;
                served += usize::from(response.status() == StatusCode::OK);
            }
            Ok::<_, String>(served)
        });
    }
    let mut served = 0;
    while let Some(lane) = sending.join_next().await {
        served += lane??;
    }
    Ok(served)
}

/// Another program, which uses up the quota.
pub(crate) async fn use_up(api: SocketAddr) -> Result<(), Box<dyn Error>> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    for _ in 0..REQUESTS {
        let request = Request::post(format!("http://{api}/1")).body(Body::empty())?;
        client.request(request).await?;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    if let Ok(api) = env::var("API") {
        let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".into());
        let store = RedisStore::builder()
            .deadline(Duration::from_secs(10))
            .url(&url)
            .connect()
            .await?;
        let margin = env::var("MARGIN_MS")
            .ok()
            .and_then(|margin| margin.parse().ok())
            .unwrap_or(200);
        let served = work(store, api.parse()?, Duration::from_millis(margin)).await?;
        assert_eq!(served, EACH);
        return Ok(());
    }

    let (seen, listener) = (Seen::default(), TcpListener::bind("127.0.0.1:0").await?);
    let address = listener.local_addr()?;
    tokio::spawn(axum::serve(listener, api(seen.clone())).into_future());
    if env::var_os("ALONE").is_none() {
        use_up(address).await?;
    }
    assert_eq!(seen.take().1, 0);

    let mut processes = Vec::new();
    for _ in 0..PROCESSES {
        let mut process = Command::new(env::current_exe()?);
        let process = process
            .env("API", address.to_string())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        processes.push(process.spawn()?);
    }
    for mut process in processes {
        assert!(process.wait().await?.success());
    }
    let (most, complaints) = seen.take();
    println!(
        "{} requests served, {complaints} complaints, at most {most} in a second",
        PROCESSES * EACH
    );
    // Each process may have some on the way when the first one learns of the other program.
    assert!(complaints <= PROCESSES * AT_ONCE);
    Ok(())
}
