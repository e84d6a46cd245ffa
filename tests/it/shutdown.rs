//! A service that ends while requests are on their way.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn},
    routing::get,
};
use tokio::{net::TcpListener, sync::oneshot};
use tower_quota::{ClientLibrary, Policy, RateLimitLayer, RedisStore, SlidingLog, key};

use crate::support::{Browser, Redis, each_client, eventually};

each_client! {
    requests_on_their_way_are_decided_and_then_the_connection_ends
}

async fn requests_on_their_way_are_decided_and_then_the_connection_ends(library: ClientLibrary) {
    let redis = Redis::start();
    let connections = async || {
        let list: String = redis.command("CLIENT", ["LIST"]).await;
        list.lines().count()
    };
    let before = connections().await;

    let builder = RedisStore::builder().deadline(Duration::from_secs(10));
    let store = builder.client_library(library).connect(&redis.url()).await;
    let store = store.expect("the URL is good");
    store.ready().await.expect("Redis answers");
    let policy = Policy::new("test", SlidingLog::per_hour(5)).key(key::constant("k"));
    let came = Arc::new(AtomicBool::new(false));
    let seen = came.clone();
    let app = Router::new()
        .route("/", get(async || "hi").layer(RateLimitLayer::new(store, policy)))
        .layer(from_fn(move |request: Request, next: Next| {
            seen.store(true, Ordering::Relaxed);
            next.run(request)
        }));

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound port");
    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>());
    let server = tokio::spawn(async move {
        let stopped = async { drop(stopped.await) };
        server.with_graceful_shutdown(stopped).await.expect("it serves");
    });

    let frozen = redis.freeze();
    let url = format!("http://{address}/");
    let asked = tokio::spawn(async move { Browser::http1().get(url).await });
    eventually("the request is on its way", async || came.load(Ordering::Relaxed)).await;
    stop.send(()).expect("it serves");
    drop(frozen);

    let response = asked.await.expect("no panic");
    assert_eq!(response.status, 200);
    assert_eq!(response.field("ratelimit"), Some(r#""test";r=4;t=3600"#));
    server.await.expect("it ends");
    eventually("the connection is closed", async || connections().await == before).await;
}
