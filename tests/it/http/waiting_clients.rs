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
    client::legacy::Client,
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_quota::{Policy, RateLimitLayer, SlidingLog, key};

use crate::support::{Redis, connected, patient};

const SECOND: Duration = Duration::from_secs(1);
const LENGTH: Duration = Duration::from_secs(6);

/// Serves 20 a second, for which requests wait 3 s, and returns the URL.
async fn serve(redis: &Redis) -> String {
    let policy = Policy::new("api", SlidingLog::per_second(20)).key(key::constant("all"));
    let layer = RateLimitLayer::new(connected(patient(), &redis.url()).await, policy.wait_up_to(3 * SECOND));
    let app: Router = Router::new().route("/", get(async || "hi").layer(layer));
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

/// How many of the requests are admitted of clients that leave after about a second.
async fn admitted_of_clients(over_http2: bool) -> usize {
    let redis = Redis::start();
    let urls = [serve(&redis).await, serve(&redis).await];
    let client = Client::builder(TokioExecutor::new())
        .http2_only(over_http2)
        .build_http::<Body>();
    let (start, admitted) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for caller in 0..40 {
        let (client, admitted, url) = (client.clone(), admitted.clone(), urls[caller % 2].clone());
        let mut rng = Rng::with_seed(caller as u64);
        tasks.spawn(async move {
            while start.elapsed() < LENGTH {
                let patience = SECOND * rng.u32(67..133) / 100;
                let request = Request::get(&url).body(Body::empty()).expect("a good request");
                match timeout(patience.min(LENGTH - start.elapsed()), client.request(request)).await {
                    Ok(Ok(response)) if response.status() == StatusCode::OK => {
                        admitted.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(_) => sleep(SECOND / 10).await,
                    Err(_) => {}
                }
            }
        });
    }
    tasks.join_all().await;
    admitted.load(Ordering::Relaxed)
}

#[tokio::test]
async fn clients_that_close_their_connections_take_nothing_with_them() {
    let admitted = admitted_of_clients(false).await;
    assert!(admitted >= 108, "{admitted} of 120");
}

#[tokio::test]
async fn clients_that_reset_their_streams_take_nothing_with_them() {
    let admitted = admitted_of_clients(true).await;
    assert!(admitted >= 108, "{admitted} of 120");
}
