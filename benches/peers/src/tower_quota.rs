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

    // The same rules as the other limiters have, and the log.
    let clients: [(_, Arc<dyn Store>); 1] = [("fred", Arc::new(over_fred))];
    let peers = clients.iter().flat_map(|(client, store)| {
        let algorithms: [(_, fn(u64, Duration) -> Limit); 4] = [
            ("sliding log", |quota, window| SlidingLog::new(quota, window).into()),
            ("sliding counter", |quota, window| {
                SlidingCounter::new(quota, window).into()
            }),
            ("fixed window", |quota, window| FixedWindow::new(quota, window).into()),
            ("token bucket", |quota, window| TokenBucket::new(quota, window).into()),
        ];
        algorithms.map(|(algorithm, limit)| {
            let admitting = layer(store, "admitting", limit(AMPLE, window), Headers::default());
            let denying = layer(store, "denying", limit(1, HOUR), Headers::default());
            Peer::new(
                "tower-quota",
                algorithm,
                format!("{client} {}", version(client)),
                &admitting,
                &denying,
            )
        })
    });
    peers.collect()
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
