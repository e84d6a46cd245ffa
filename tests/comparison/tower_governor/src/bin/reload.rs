//! Limits in a file that is read again on SIGHUP. Counts start at zero then.

use std::net::SocketAddr;

use axum::{
    Router,
    routing::{get, post},
};
// limits
use std::{collections::HashMap, error::Error, fs, net::IpAddr, num::NonZeroU32, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use axum::{
    body::Body,
    extract::{ConnectInfo, Request, State},
    middleware::{Next, from_fn_with_state},
    response::Response,
};
use governor::{
    DefaultKeyedRateLimiter, Quota, RateLimiter,
    clock::{Clock, DefaultClock},
};
use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};
use tower_governor::GovernorError;

#[derive(Deserialize)]
struct Line {
    burst: NonZeroU32,
    period_ms: u64,
}

type Limiters = HashMap<String, DefaultKeyedRateLimiter<IpAddr>>;

fn read(file: &str) -> Result<Limiters, Box<dyn Error>> {
    let lines: HashMap<String, Line> = toml::from_str(&fs::read_to_string(file)?)?;
    let limiters = lines.into_iter().map(|(name, line)| {
        let quota = Quota::with_period(Duration::from_millis(line.period_ms));
        let quota = quota.ok_or_else(|| format!("{name}: period_ms must not be 0"))?;
        Ok((name, RateLimiter::keyed(quota.allow_burst(line.burst))))
    });
    let limiters: Limiters = limiters.collect::<Result<_, Box<dyn Error>>>()?;
    for name in ["search", "login"] {
        limiters.get(name).ok_or_else(|| format!("{name} is missing"))?;
    }
    Ok(limiters)
}

async fn limit(
    State((limiters, name)): State<(Arc<ArcSwap<Limiters>>, &'static str)>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Response {
    let checked = limiters.load()[name].check_key(&peer.ip());
    let Err(denied) = checked else {
        return next.run(request).await;
    };
    let wait_time = denied.wait_time_from(DefaultClock::default().now()).as_secs() + 1;
    let headers = Some([(http::header::RETRY_AFTER, wait_time.into())].into_iter().collect());
    http::Response::<Body>::from(GovernorError::TooManyRequests { wait_time, headers })
}
// rest

#[tokio::main]
async fn main() {
    // limits
    let file = std::env::var("LIMITS").expect("LIMITS is set");
    let limiters = Arc::new(ArcSwap::from_pointee(read(&file).expect("the file is valid")));
    let reloaded = limiters.clone();
    tokio::spawn(async move {
        let mut hangups = signal(SignalKind::hangup()).expect("a signal handler");
        while hangups.recv().await.is_some() {
            match read(&file) {
                Ok(limiters) => reloaded.store(Arc::new(limiters)),
                Err(error) => eprintln!("limits not reloaded: {error}"),
            }
        }
    });
    let swept = limiters.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(60)).await;
            swept.load().values().for_each(DefaultKeyedRateLimiter::retain_recent);
        }
    });
    let limit = |name| from_fn_with_state((limiters.clone(), name), limit);
    // rest
    let app = Router::new()
        .route("/search", get(async || "results\n").layer(limit("search"))) // limits
        .route("/login", post(async || "welcome\n").layer(limit("login"))); // limits
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000")
        .await
        .expect("the port is free");
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await.expect("the server runs");
}
