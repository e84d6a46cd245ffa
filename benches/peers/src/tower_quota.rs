use std::{sync::Arc, time::Duration};

use bench_harness::Server;
use tower_quota::{
    FailureMode, FixedWindow, Headers, Limit, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingCounter,
    SlidingLog, TokenBucket, key, store::Store,
};

use crate::{
    HOUR,
    peer::{Peer, version},
};

/// As much as a plain log may hold.
const AMPLE: u64 = 100_000;

pub(crate) async fn distributed(server: &Server) -> Vec<Peer> {
    let patient = RedisStore::builder().deadline(Duration::from_secs(10));
    let over_fred = patient.connect(&server.url()).await.expect("a store");
    let window = Duration::from_secs(1);

    let clients: [(_, Arc<dyn Store>); 1] = [("fred", Arc::new(over_fred))];
    let peers = clients.iter().flat_map(|(client, store)| {
        let limits = limits(AMPLE, window).into_iter().zip(limits(1, HOUR));
        limits.map(move |((algorithm, ample), (_, scarce))| {
            let admitting = layer(store, "admitting", ample, Headers::default());
            let denying = layer(store, "denying", scarce, Headers::default());
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

    let algorithms: [(_, Limit, Limit, _); 4] = [
        (
            "token bucket, headers",
            bucket.into(),
            TokenBucket::per_hour(1).into(),
            Headers::default(),
        ),
        (
            "token bucket",
            bucket.into(),
            TokenBucket::per_hour(1).into(),
            Headers::None,
        ),
        (
            "sliding log, headers",
            log.into(),
            SlidingLog::per_hour(1).into(),
            Headers::default(),
        ),
        ("sliding log", log.into(), SlidingLog::per_hour(1).into(), Headers::None),
    ];
    let peers = algorithms.map(|(algorithm, ample, scarce, headers)| {
        let admitting = layer(&store, "admitting", ample, headers);
        let denying = layer(&store, "denying", scarce, headers);
        Peer::new("tower-quota", algorithm, "", &admitting, &denying)
    });
    peers.into()
}

fn layer(store: &Arc<dyn Store>, name: &'static str, limit: Limit, headers: Headers) -> RateLimitLayer {
    let policy = Policy::new(name, limit)
        .key(key::ip())
        .failure_mode(FailureMode::Closed);
    RateLimitLayer::new(store.clone(), policy).headers(headers)
}
