use std::{sync::Arc, time::Duration};

use bench_harness::Server;
use tower_quota::{
    ClientLibrary, FailureMode, FixedWindow, Headers, Limit, MemoryStore, Policy, RateLimitLayer, RedisStore,
    SlidingCounter, SlidingLog, TokenBucket, key, store::Store,
};

use crate::{
    HOUR,
    peer::{Peer, version},
};

/// The largest quota of a log without precision.
const AMPLE: u64 = 100_000;

pub(crate) async fn distributed(server: &Server) -> Vec<Peer> {
    let over = async |library| {
        let patient = RedisStore::builder()
            .deadline(Duration::from_secs(10))
            .client_library(library);
        Arc::new(patient.url(&server.url()).connect().await.expect("a store")) as Arc<dyn Store>
    };
    let window = Duration::from_secs(1);

    let clients = [
        ("fred", over(ClientLibrary::Fred).await),
        ("redis", over(ClientLibrary::RedisRs).await),
    ];
    let peers = clients.iter().flat_map(|(client, store)| {
        let limits = limits(AMPLE, window).into_iter().zip(limits(1, HOUR));
        limits.map(move |((algorithm, ample), (_, scarce))| {
            // Each row has keys of its own.
            let admitting = layer(store, format!("{client}.admitting"), ample, Headers::default());
            let denying = layer(store, format!("{client}.denying"), scarce, Headers::default());
            let client = format!("{client} {}", version(client));
            Peer::new("tower-quota", algorithm, client, &admitting, &denying)
        })
    });
    peers.collect()
}

fn limits(quota: u64, window: Duration) -> [(&'static str, Limit); 4] {
    [
        ("sliding log", SlidingLog::new(quota, window).into()),
        ("sliding counter", SlidingCounter::new(quota, window).into()),
        ("fixed window", FixedWindow::new(quota, window).into()),
        ("token bucket", TokenBucket::new(quota, window).into()),
    ]
}

pub(crate) fn in_process() -> Vec<Peer> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let bucket = TokenBucket::per_second(1_000).burst(1_000_000_000);
    // Short, so that a loop of requests does not reach the limit.
    let log = SlidingLog::new(AMPLE, Duration::from_millis(10));

    let buckets = || (Limit::from(bucket), Limit::from(TokenBucket::per_hour(1)));
    let logs = || (Limit::from(log), Limit::from(SlidingLog::per_hour(1)));
    let (headers, none) = (Headers::default(), Headers::None);
    let rows = [
        ("token bucket, headers and extensions", buckets(), headers.clone(), true),
        ("token bucket, headers", buckets(), headers.clone(), false),
        ("token bucket, extensions", buckets(), none.clone(), true),
        ("token bucket", buckets(), none.clone(), false),
        ("sliding log, headers and extensions", logs(), headers.clone(), true),
        ("sliding log", logs(), none, false),
    ];
    let peers = rows.map(|(title, (ample, scarce), headers, extensions)| {
        let admitting = layer(&store, "admitting".to_owned(), ample, headers.clone()).extensions(extensions);
        let denying = layer(&store, "denying".to_owned(), scarce, headers).extensions(extensions);
        Peer::new("tower-quota", title, "", &admitting, &denying)
    });
    peers.into()
}

fn layer(store: &Arc<dyn Store>, name: String, limit: Limit, headers: Headers) -> RateLimitLayer {
    let policy = Policy::new(name, limit)
        .key(key::ip())
        .failure_mode(FailureMode::Closed);
    RateLimitLayer::new(store.clone(), policy).headers(headers)
}
