//! A service that ends while requests are in flight.

use std::{
    future::poll_fn,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    thread,
};

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn},
    routing::get,
};
use tokio::{net::TcpListener, runtime::Builder, sync::oneshot, time::timeout};
use tower_quota::{
    ClientLibrary, FailureMode, Key, Limit, Limiter, Policy, RateLimitLayer, RedisStore, SlidingLog, key,
    store::{self, Charge, Operation, Store},
};

use crate::support::{Browser, PATIENCE, Proxy, Redis, each_client, eventually, patient};

each_client! {
    requests_in_flight_are_decided_before_the_connection_ends
    a_runtime_that_ends_before_its_call_is_sent_blocks_no_other_user_of_the_store
    a_connection_is_replaced_after_a_runtime_has_ended_with_a_call_in_flight
}

async fn a_runtime_that_ends_before_its_call_is_sent_blocks_no_other_user_of_the_store(library: ClientLibrary) {
    let redis = Redis::start();
    let store = patient();
    let store = store.client_library(library).url(&redis.url()).connect().await;
    let store = store.expect("the URL is good");
    store.ready().await.expect("Redis answers");
    let limit = Limit::from(SlidingLog::per_hour(5));
    let charge = move |store: &RedisStore| {
        let key = Key::from("k");
        let charges = [Charge::new("test", &limit, &key, 1)];
        store.decide(&[store::StoreRequest::new(Operation::Charge, &charges)])
    };

    let (brief, charge_briefly) = (store.clone(), charge.clone());
    let ended = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let mut answer = pin!(charge_briefly(&brief));
            // Queued, and the task that is to send it has not run.
            let waits = poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx).is_pending())).await;
            assert!(waits);
        });
    });
    ended.join().expect("no panic");

    let answer = timeout(PATIENCE, charge(&store)).await;
    let answer = answer.expect("the store replies in time").expect("Redis answers");
    assert_eq!(
        answer.outcomes()[0].states()[0].remaining,
        4,
        "a dropped charge is not counted"
    );
}

async fn a_connection_is_replaced_after_a_runtime_has_ended_with_a_call_in_flight(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let store = RedisStore::builder().connect_timeout(PATIENCE).client_library(library);
    let store = store.url(&proxy.url()).connect().await.expect("Redis replies");
    let policy = Policy::new("test", SlidingLog::per_hour(1_000)).failure_mode(FailureMode::Closed);
    let limiter = Limiter::new(store, policy);
    eventually("checks are decided", async || limiter.check("k").await.is_ok()).await;

    let held = proxy.hold();
    let brief = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let limiter_there = limiter.clone();
    brief.spawn(async move { limiter_there.check("there").await });
    // Not a check from before, whose reply was late.
    eventually("the call is in flight", async || {
        redis.cli(&["KEYS", "quota:*there*"]).trim() != ""
    })
    .await;
    brief.shutdown_background();
    drop(held);
    eventually("checks are decided again", async || limiter.check("k").await.is_ok()).await;

    proxy.blackhole_and_go_to(redis.port());
    eventually("the connection is replaced", async || limiter.check("k").await.is_ok()).await;
}

async fn requests_in_flight_are_decided_before_the_connection_ends(library: ClientLibrary) {
    let redis = Redis::start();
    let connections = async || {
        let list: String = redis.command("CLIENT", ["LIST"]).await;
        list.lines().count()
    };
    let before = connections().await;

    let builder = patient();
    let store = builder.client_library(library).url(&redis.url()).connect().await;
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
    let received = tokio::spawn(async move { Browser::http1().get(url).await });
    eventually("the request is on its way", async || came.load(Ordering::Relaxed)).await;
    stop.send(()).expect("it serves");
    drop(frozen);

    let response = received.await.expect("no panic");
    assert_eq!(response.status, 200);
    assert_eq!(response.field("ratelimit"), Some(r#""test";r=4;t=3600"#));
    server.await.expect("it ends");
    eventually("the connection is closed", async || connections().await == before).await;
}
