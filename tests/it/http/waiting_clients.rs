//! Clients of real servers that close while their requests wait take nothing with them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, routing::get};
use fastrand::Rng;
use http::{Request, StatusCode};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_quota::{Policy, RateLimitLayer, RedisStore, SlidingLog, key};

use crate::support::{Clock, Redis};

const SECOND: Duration = Duration::from_secs(1);
const LENGTH: Duration = Duration::from_secs(6);
const ROUTES: [&str; 2] = ["leave", "stay"];

/// Serves 20 a second on each of these routes, for which requests wait 3 s, counts them, and returns the URL.
async fn serve(store: &RedisStore, served: &[Arc<AtomicUsize>; 2]) -> String {
    let mut app: Router = Router::new();
    for (name, served) in ROUTES.into_iter().zip(served) {
        let policy = Policy::new(name, SlidingLog::per_second(20)).key(key::constant("all"));
        let layer = RateLimitLayer::new(store.clone(), policy.wait_up_to(3 * SECOND));
        let served = served.clone();
        let handler = get(async move || {
            served.fetch_add(1, Ordering::Relaxed);
        });
        app = app.route(&format!("/{name}"), handler.layer(layer));
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            let service = TowerToHyperService::new(app.clone());
            tokio::spawn(async move {
                // A client closes its connection at any time.
                let _ = auto::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    format!("http://{addr}/")
}

/// How many requests are served of clients that leave after about a second, and of others that stay, on a route of their own.
async fn served_of_clients(over_http2: bool) -> [usize; 2] {
    let (redis, clock) = (Redis::start(), Clock::new());
    let served = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let urls = [
        serve(&clock.redis_store(&redis).await, &served).await,
        serve(&clock.redis_store_on_redis_rs(&redis).await, &served).await,
    ];
    let client = Client::builder(TokioExecutor::new())
        .http2_only(over_http2)
        .build_http::<Body>();
    clock.run(&redis, call(client, urls)).await;
    served.map(|served| served.load(Ordering::Relaxed))
}

async fn call(client: Client<HttpConnector, Body>, urls: [String; 2]) {
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for caller in 0..80 {
        let stays = caller % 2;
        let url = format!("{}{}", urls[caller / 2 % 2], ROUTES[stays]);
        let client = client.clone();
        let mut rng = Rng::with_seed(caller as u64);
        tasks.spawn(async move {
            while start.elapsed() < LENGTH {
                let patience = match stays {
                    0 => SECOND * rng.u32(67..133) / 100,
                    _ => LENGTH,
                };
                let request = Request::get(&url).body(Body::empty()).expect("a good request");
                match timeout(patience.min(LENGTH - start.elapsed()), client.request(request)).await {
                    Ok(Ok(response)) if response.status() == StatusCode::OK => {}
                    Ok(_) => sleep(SECOND / 10).await,
                    Err(_) => {}
                }
            }
        });
    }
    tasks.join_all().await;
}

/// Those that leave have most of the 120, and of what others have on the same machine in the same time.
fn assert_nothing_was_taken([left, stayed]: [usize; 2]) {
    assert!(
        left >= 108 && 10 * left >= 9 * stayed,
        "{left} of 120, and {stayed} of those that stay"
    );
}

#[tokio::test]
async fn clients_that_close_their_connections_take_nothing_with_them() {
    assert_nothing_was_taken(served_of_clients(false).await);
}

#[tokio::test]
async fn clients_that_reset_their_streams_take_nothing_with_them() {
    assert_nothing_was_taken(served_of_clients(true).await);
}
