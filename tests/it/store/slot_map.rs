//! How a store on redis-rs learns which nodes of a cluster have the slots, from a node that says what the test wants.

use std::time::{Duration, Instant};

use tokio::time::sleep;
use tower_quota::{
    ClientLibrary, Limit, RedisStore, SlidingLog,
    store::{Operation, Store},
};

use crate::support::{
    Pointer, Proxy, Redis, connected, decide, eventually, free_port, less_patient, patient, try_decide,
};

fn limit() -> Limit {
    SlidingLog::per_hour(1_000).into()
}

async fn store(pointer: &Pointer) -> RedisStore {
    connected(patient().client_library(ClientLibrary::RedisRs), &pointer.url()).await
}

async fn until_served(store: &impl Store) {
    eventually("a node decides", async || {
        try_decide(store, Operation::Check, &limit(), "k", 1).await
    })
    .await;
}

#[tokio::test]
async fn the_nodes_of_the_url_are_asked_again_when_all_that_are_known_are_gone() {
    let (old, new) = (Redis::start(), Redis::start());
    let pointer = Pointer::start(old.port()).await;
    let store = store(&pointer).await;
    until_served(&store).await;

    pointer.point_to(new.port());
    drop(old);
    until_served(&store).await;
}

#[tokio::test]
async fn a_node_that_does_not_reply_is_a_reason_to_ask_for_the_slots() {
    let (old, new) = (Redis::start(), Redis::start());
    let proxy = Proxy::start(old.port()).await;
    let pointer = Pointer::start(proxy.port()).await;
    let builder = less_patient().client_library(ClientLibrary::RedisRs);
    let store = connected(builder, &pointer.url()).await;
    until_served(&store).await;

    pointer.point_to(new.port());
    proxy.partition();
    until_served(&store).await;
}

#[tokio::test]
async fn a_node_that_cannot_decide_or_redirect_is_a_reason_to_ask_for_the_slots() {
    for error in ["MOVED 1 ?:6379", "CLUSTERDOWN The cluster is down"] {
        let (old, new) = (Redis::start(), Redis::start());
        let pointer = Pointer::redirecting(old.port()).await;
        let store = store(&pointer).await;
        // The redirections until now were reasons too.
        pointer.refuse_with(error);
        let mut lookups = 0;
        while lookups < pointer.lookups() {
            lookups = pointer.lookups();
            sleep(Duration::from_millis(500)).await;
        }
        pointer.point_to(new.port());
        until_served(&store).await;
    }
}

#[tokio::test]
async fn a_check_waits_until_the_node_that_it_is_redirected_to_is_connected() {
    let (old, new) = (Redis::start(), Redis::start());
    let pointer = Pointer::redirecting(old.port()).await;
    let store = store(&pointer).await;

    pointer.redirect_to(new.port());
    decide(&store, Operation::Check, &limit(), "k", 1).await;
}

#[tokio::test]
async fn while_the_slots_stay_nobody_is_asked_for_them() {
    let redis = Redis::start();
    let pointer = Pointer::start(redis.port()).await;
    let store = store(&pointer).await;
    until_served(&store).await;

    let lookups = pointer.lookups();
    for _ in 0..20 {
        decide(&store, Operation::Check, &limit(), "k", 1).await;
        // There is nothing to wait for: what must not happen would every 100 ms.
        sleep(Duration::from_millis(25)).await;
    }
    // The first attempt to connect may have asked for one that comes late.
    assert!(
        pointer.lookups() <= lookups + 1,
        "{} lookups",
        pointer.lookups() - lookups
    );
}

#[tokio::test]
async fn a_replica_in_many_ranges_is_asked_once_in_a_lookup() {
    let (primary, pause) = (free_port(), Duration::from_millis(100));
    let (seed, replica) = (Pointer::start(primary).await, Pointer::start(primary).await);
    seed.name_replica(&replica);
    replica.name_replica(&replica);
    let builder = patient().client_library(ClientLibrary::RedisRs);
    let store = builder.url(&seed.url()).connect_lazy().expect("a good URL");
    eventually("the store has the slots", async || seed.lookups() > 0).await;
    drop(seed);

    let begun = Instant::now();
    eventually("the replica is asked", async || {
        let checked = try_decide(&store, Operation::Check, &limit(), "k", 1).await;
        assert!(checked.is_err(), "no primary is there");
        replica.lookups() >= 2
    })
    .await;
    let most = 2 + 2 * begun.elapsed().as_millis() / pause.as_millis();
    assert!(u128::from(replica.lookups()) <= most, "{} lookups", replica.lookups());
}
