//! A charge is counted once or not at all, whatever fails.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::task::JoinSet;
use tower_quota::{
    ClientLibrary, Limit, RedisStore, SlidingLog,
    store::{ErrorKind, Operation},
};

use crate::support::{
    Cluster, Proxy, Redis, Sentinel, connected, decide, each_client, eventually, patient, try_decide,
};

each_client! {
    a_check_whose_reply_is_lost_is_counted_once
    a_connection_that_is_killed_under_load_counts_no_check_twice
    a_connection_that_falls_silent_counts_no_check_twice
    a_check_that_is_dropped_is_counted_at_most_once
    a_failover_counts_no_check_twice
}

const QUOTA: u64 = 1_000_000;

fn limit() -> Limit {
    SlidingLog::per_hour(QUOTA).precision(1_000).into()
}

async fn connect(library: ClientLibrary, url: &str) -> RedisStore {
    let builder = patient().client_library(library);
    connected(builder.deadline(Duration::from_millis(500)), url).await
}

/// The count of the key, read by another store. After a failover a node may not have heard of the new primary yet.
async fn counted(url: &str) -> u64 {
    let store = connected(patient(), url).await;
    let mut peeked = None;
    eventually("the store replies", async || {
        peeked = try_decide(&store, Operation::Peek, &limit(), "k", 1).await.ok();
        peeked.is_some()
    })
    .await;
    QUOTA - peeked.expect("it has answered").states()[0].remaining
}

/// Tasks that check one key without pause.
struct Load {
    running: Arc<AtomicBool>,
    admitted: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    callers: JoinSet<()>,
}

impl Load {
    fn start(store: &RedisStore) -> Self {
        let mut load = Self {
            running: Arc::new(AtomicBool::new(true)),
            admitted: Arc::default(),
            failed: Arc::default(),
            callers: JoinSet::new(),
        };
        for _ in 0..8 {
            let store = store.clone();
            let (running, admitted, failed) = (load.running.clone(), load.admitted.clone(), load.failed.clone());
            load.callers.spawn(async move {
                while running.load(Ordering::Relaxed) {
                    match try_decide(&store, Operation::Check, &limit(), "k", 1).await {
                        Ok(outcome) => {
                            assert!(outcome.allowed, "there is room");
                            admitted.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(_) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                            tokio::time::sleep(Duration::from_millis(2)).await;
                        }
                    }
                }
            });
        }
        load
    }

    /// Waits for this number of further admissions.
    async fn goes_on(&self, more: u64) {
        let target = self.admitted.load(Ordering::Relaxed) + more;
        eventually("callers are admitted again", async || {
            self.admitted.load(Ordering::Relaxed) >= target
        })
        .await;
    }

    /// The number of admitted and of failed checks.
    async fn stop(self) -> (u64, u64) {
        self.running.store(false, Ordering::Relaxed);
        self.callers.join_all().await;
        (
            self.admitted.load(Ordering::Relaxed),
            self.failed.load(Ordering::Relaxed),
        )
    }
}

async fn a_check_whose_reply_is_lost_is_counted_once(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    // The end of the connection is noticed at once.
    let store = connected(patient().client_library(library), &proxy.url()).await;
    eventually("the store is answered", async || {
        try_decide(&store, Operation::Peek, &limit(), "k", 1).await
    })
    .await;

    for lost in 1..=3 {
        proxy.cut_before_the_next_answer();
        let mut error = None;
        eventually("an answer is lost", async || {
            // Nothing is sent until it is connected again.
            error = try_decide(&store, Operation::Check, &limit(), "k", 1).await.err();
            proxy.has_cut()
        })
        .await;
        assert_eq!(error.expect("no answer").kind(), ErrorKind::Unreachable);
        eventually("the store is answered", async || {
            try_decide(&store, Operation::Peek, &limit(), "k", 1).await
        })
        .await;
        assert_eq!(counted(&redis.url()).await, lost);
    }
}

async fn a_connection_that_is_killed_under_load_counts_no_check_twice(library: ClientLibrary) {
    let redis = Redis::start();
    let store = connect(library, &redis.url()).await;
    let load = Load::start(&store);
    for _ in 0..5 {
        load.goes_on(100).await;
        redis
            .command::<()>("CLIENT", ["KILL", "TYPE", "normal", "SKIPME", "yes"])
            .await;
    }
    load.goes_on(100).await;

    let (admitted, failed) = load.stop().await;
    let counted = counted(&redis.url()).await;
    assert!(
        (admitted..=admitted + failed).contains(&counted),
        "{counted} counted, {admitted} admitted, {failed} not answered"
    );
}

async fn a_connection_that_falls_silent_counts_no_check_twice(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let store = connect(library, &proxy.url()).await;
    let load = Load::start(&store);
    for _ in 0..2 {
        load.goes_on(100).await;
        proxy.blackhole_and_go_to(redis.port());
    }
    load.goes_on(100).await;

    let (admitted, failed) = load.stop().await;
    let counted = counted(&redis.url()).await;
    assert!(
        (admitted..=admitted + failed).contains(&counted),
        "{counted} counted, {admitted} admitted, {failed} not answered"
    );
}

async fn a_check_that_is_dropped_is_counted_at_most_once(library: ClientLibrary) {
    const CALLERS: u64 = 50;
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let store = connected(patient().client_library(library), &proxy.url()).await;

    proxy.delay(Duration::from_millis(20));
    for caller in 0..CALLERS {
        let limit = limit();
        let check = try_decide(&store, Operation::Check, &limit, "k", 1);
        let _ = tokio::time::timeout(Duration::from_millis(caller % 10), check).await;
    }
    proxy.delay(Duration::ZERO);
    // After all that was sent before it.
    decide(&store, Operation::Check, &limit(), "k", 1).await;
    let counted = counted(&redis.url()).await;
    assert!((2..=CALLERS + 1).contains(&counted), "{counted} counted");
}

async fn a_failover_counts_no_check_twice(library: ClientLibrary) {
    let mut sentinel = Sentinel::start_that_fails_over().await;
    let store = connect(library, &sentinel.url()).await;
    let load = Load::start(&store);
    load.goes_on(100).await;
    sentinel.primary.kill();
    let promoted = sentinel.promoted().await;
    load.goes_on(100).await;

    let (admitted, failed) = load.stop().await;
    let counted = counted(&promoted.url()).await;
    // What the replica had not received yet is lost.
    assert!(
        counted <= admitted + failed,
        "{counted} counted, {admitted} admitted, {failed} not answered"
    );
    assert!(counted > 100, "{counted} counted, {admitted} admitted");
}

#[tokio::test]
async fn a_failover_in_a_cluster_counts_no_check_twice() {
    let mut cluster = Cluster::start_that_fails_over().await;
    let store = connect(ClientLibrary::RedisRs, &cluster.url()).await;
    let slot = cluster.slot("quota:1:log/1h/3600ms:test:{key=k}").await;
    let load = Load::start(&store);
    load.goes_on(100).await;
    cluster.primaries[Cluster::owner(slot)].kill();
    load.goes_on(100).await;

    let (admitted, failed) = load.stop().await;
    let counted = counted(&cluster.replicas_url()).await;
    assert!(
        counted <= admitted + failed,
        "{counted} counted, {admitted} admitted, {failed} not answered"
    );
    assert!(counted > 100, "{counted} counted, {admitted} admitted");
}
