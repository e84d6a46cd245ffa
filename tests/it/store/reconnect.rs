//! What a lost connection costs, and how often a client connects.

use std::time::{Duration, Instant};

use tokio::{
    net::TcpListener,
    runtime::Builder,
    task::{JoinSet, spawn_blocking, yield_now},
    time::{interval, sleep, timeout},
};
use tower_quota::{ClientLibrary, Limit, RedisStore, SlidingLog, store::Operation};

use crate::support::{PATIENCE, Proxy, Redis, connected, each_client, eventually, patient, try_decide};

each_client! {
    a_lost_connection_costs_the_checks_of_a_moment
    no_check_waits_for_a_connection_that_was_lost
    what_closes_each_connection_is_not_flooded_with_them
    a_connection_is_replaced_though_the_runtime_that_has_missed_a_reply_is_not_driven
}

fn limit() -> Limit {
    SlidingLog::per_hour(1_000_000).precision(1_000).into()
}

/// The number of checks that Redis does not decide, of 200 that are made at 500 a second while the connection is lost.
async fn undecided(store: &RedisStore, redis: &Redis) -> usize {
    let mut checks = JoinSet::new();
    let mut ticks = interval(Duration::from_millis(2));
    for check in 0..200 {
        ticks.tick().await;
        if check == 100 {
            // The reply arrives after the connection of the store is closed.
            redis
                .command::<()>("CLIENT", ["KILL", "TYPE", "normal", "SKIPME", "yes"])
                .await;
        }
        let store = store.clone();
        checks.spawn(async move { try_decide(&store, Operation::Check, &limit(), "k", 1).await.is_err() });
    }
    checks.join_all().await.into_iter().filter(|failed| *failed).count()
}

/// A pause of 100 ms before the first attempt costs 25 checks or more each time. On a busy machine an attempt may take as long,
/// but not each.
async fn a_lost_connection_costs_the_checks_of_a_moment(library: ClientLibrary) {
    const MOMENT: usize = 10;
    let redis = Redis::start();
    let builder = RedisStore::builder().connect_timeout(PATIENCE);
    let store = connected(builder.client_library(library), &redis.url()).await;
    let started = Instant::now();
    let mut costs = Vec::new();
    while costs.iter().min().is_none_or(|least| *least > MOMENT) {
        assert!(started.elapsed() < PATIENCE, "{costs:?} checks are not decided");
        costs.push(undecided(&store, &redis).await);
        eventually("it is connected", async || {
            try_decide(&store, Operation::Peek, &limit(), "k", 1).await
        })
        .await;
    }
}

/// Not even one that is made between the end of a connection and the moment when its keeper notices that.
async fn no_check_waits_for_a_connection_that_was_lost(library: ClientLibrary) {
    let redis = Redis::start();
    // Each check is a call, whether another one has a reply or not.
    let store = patient().client_library(library).group_commit(false);
    let store = connected(store, &redis.url()).await;
    for _ in 0..5 {
        eventually("it is connected", async || {
            try_decide(&store, Operation::Check, &limit(), "k", 1).await
        })
        .await;
        let mut checks = JoinSet::new();
        for _ in 0..20 {
            let store = store.clone();
            checks.spawn(async move {
                sleep(Duration::from_millis(1)).await;
                try_decide(&store, Operation::Check, &limit(), "k", 1).await
            });
        }
        yield_now().await;
        // While this thread is blocked, the connection is lost, and the checks become due.
        redis.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
        let ended = timeout(PATIENCE / 2, checks.join_all()).await;
        assert!(ended.is_ok(), "a check waits for its deadline");
    }
}

/// As a proxy does whose Redis is down.
async fn what_closes_each_connection_is_not_flooded_with_them(library: ClientLibrary) {
    const CONNECTIONS: u32 = 6;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("redis://{}", listener.local_addr().expect("a bound port"));
    let store = RedisStore::builder().client_library(library).url(&url).connect_lazy();
    let _store = store.expect("the URL is good");

    let started = Instant::now();
    for _ in 0..=CONNECTIONS {
        drop(listener.accept().await.expect("a connection"));
    }
    let elapsed = started.elapsed();
    assert!(elapsed > CONNECTIONS * Duration::from_millis(100), "in {elapsed:?}");
}

/// What a store depends on does not run in the runtime of a caller.
async fn a_connection_is_replaced_though_the_runtime_that_has_missed_a_reply_is_not_driven(library: ClientLibrary) {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.port()).await;
    let builder = RedisStore::builder().connect_timeout(PATIENCE);
    let store = connected(builder.client_library(library), &proxy.url()).await;
    proxy.blackhole_and_go_to(redis.port());
    let caller = store.clone();
    let missed = spawn_blocking(move || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let decided = runtime.block_on(try_decide(&caller, Operation::Check, &limit(), "k", 1));
        assert!(decided.is_err());
        runtime
    });
    let runtime = missed.await.expect("no panic");
    eventually("the connection is replaced", async || {
        try_decide(&store, Operation::Check, &limit(), "k", 1).await
    })
    .await;
    runtime.shutdown_background();
}
