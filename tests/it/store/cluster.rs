//! A store in a cluster: which nodes it calls, also while slots move and nodes fail.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    runtime::Builder,
    task::{JoinSet, spawn_blocking},
};
use tower::{Layer, ServiceExt};
use tower_quota::{
    Concurrency, Decision, FailureMode, Key, Limit, Limiter, Policy, RateLimitLayer, RedisStore, RedisStoreBuilder,
    SlidingLog, TokenBucket, key,
    store::{Charge, ErrorKind, LeaseId, NodeState, Operation, Store, StoreRequest, StoreResponse},
};

use crate::support::{self, Cluster, Log, Proxy, connected, decide, eventually, free_port, patient, timed, try_decide};

/// For the tests in which a primary does not answer.
const DEADLINE: Duration = Duration::from_secs(1);
/// What calls of other nodes may add to it.
const SLACK: Duration = Duration::from_millis(400);

fn limit(quota: u64) -> Limit {
    SlidingLog::per_hour(quota).into()
}

async fn store(cluster: &Cluster) -> RedisStore {
    connect(cluster, patient()).await
}

async fn connect(cluster: &Cluster, builder: RedisStoreBuilder) -> RedisStore {
    let store = connected(builder, &cluster.url()).await;
    cluster.serves(&store).await;
    store
}

/// A cluster whose replicas take over, and a store with a short deadline.
async fn that_fails_over() -> (Cluster, RedisStore) {
    let cluster = Cluster::start_that_fails_over().await;
    let store = connect(&cluster, RedisStore::builder().deadline(DEADLINE)).await;
    (cluster, store)
}

/// The Redis key of a key under the limits of these tests.
fn redis_key(key: &str) -> String {
    format!("quota:1:log/1h:test:{{key={key}}}")
}

async fn remaining(store: &RedisStore, limit: &Limit, key: &str) -> u64 {
    decide(store, Operation::Peek, limit, key, 1).await.states()[0].remaining
}

#[tokio::test]
async fn keys_spread_over_the_primaries() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    // The braces of a key are no hash tag.
    for number in 0..60 {
        decide(&store, Operation::Check, &limit(5), &format!("{{x}}/{number}"), 1).await;
    }

    for primary in &cluster.primaries {
        let keys: u64 = primary.command("DBSIZE", [""; 0]).await;
        assert!((5..=40).contains(&keys), "{keys} of 60 keys");
    }
}

#[tokio::test]
async fn all_policies_of_one_caller_are_decided_together() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (log, bucket) = (limit(5), Limit::from(TokenBucket::per_minute(3)));
    for number in 0..20 {
        let key = Key::path(&format!("/{number}"));
        let charges = [Charge::new("a", &log, &key, 1), Charge::new("b", &bucket, &key, 1)];
        for admitted in [true, true, true, false] {
            let answer = store.decide(&[StoreRequest::new(Operation::Check, &charges)]).await;
            let answer = answer.expect("both are in one slot");
            let outcome = &answer.outcomes()[0];
            assert_eq!(outcome.allowed, admitted);
            assert!(outcome.states()[0].remaining >= 2, "a denial charges neither");
        }
    }
}

#[tokio::test]
async fn a_moving_slot_is_served_by_the_node_that_has_the_key() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (old, new) = ("old", "new");
    let slot = cluster.slot(&redis_key(old)).await;
    let from = Cluster::owner(slot);
    let to = (from + 1) % 3;

    decide(&store, Operation::Check, &limit(10), old, 1).await;
    cluster.begin_to_move(slot, from, to).await;
    // Not there yet, so still with the old owner.
    decide(&store, Operation::Check, &limit(10), old, 1).await;

    cluster.move_keys(slot, from, to).await;
    // The old owner replies `ASK`.
    decide(&store, Operation::Check, &limit(10), old, 1).await;
    assert_eq!(remaining(&store, &limit(10), old).await, 7);

    cluster.end_moving(slot, to).await;
    // And now `MOVED`.
    decide(&store, Operation::Check, &limit(10), old, 1).await;
    assert_eq!(remaining(&store, &limit(10), old).await, 6);
    assert!(decide(&store, Operation::Check, &limit(10), new, 1).await.allowed);
}

/// On a node from which its slot is moving, a key that is gone cannot be created again.
#[tokio::test]
async fn an_expired_or_reset_key_in_a_moving_slot_fails_no_request() {
    const WINDOW: Duration = Duration::from_millis(50);
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let short = Limit::from(SlidingLog::new(5, WINDOW));
    let coarse = Limit::from(SlidingLog::new(5, WINDOW).precision(10));
    let bucket = Limit::from(TokenBucket::per_hour(5));
    let key = Key::from("k");
    let charge = |policy, limit, cost| Charge::new(policy, limit, &key, cost);
    let requests = [
        vec![charge("plain", &short, 1)],
        vec![charge("heavy", &short, 2)],
        vec![charge("coarse", &coarse, 1)],
        vec![charge("one", &short, 1), charge("other", &short, 1)],
        vec![charge("bucket", &bucket, 1)],
        vec![charge("reset", &short, 1)],
        vec![charge("reset-too", &short, 1), charge("reset-bucket", &bucket, 1)],
    ];
    let decide = async |operation, charges: &[Charge]| {
        let answer = store.decide(&[StoreRequest::new(operation, charges)]).await;
        answer.unwrap_or_else(|error| panic!("{operation:?} of {}: {error}", charges[0].policy()))
    };
    let mut counted_at = Duration::ZERO;
    for charges in &requests {
        let checked = decide(Operation::Check, charges).await;
        assert!(checked.outcomes()[0].allowed);
        counted_at = checked.server_time;
    }
    let slot = cluster.slot(&redis_key("k")).await;
    let from = Cluster::owner(slot);
    cluster.begin_to_move(slot, from, (from + 1) % 3).await;

    eventually("all logs have expired", async || {
        let [seconds, micros]: [u64; 2] = cluster.primaries[from].command("TIME", [""; 0]).await;
        Duration::from_secs(seconds) + Duration::from_micros(micros) >= counted_at + WINDOW
    })
    .await;
    for charges in &requests[5..] {
        let reset = decide(Operation::Reset, charges).await;
        assert_eq!(reset.outcomes()[0].states()[0].remaining, 5);
    }
    for charges in &requests[..5] {
        let admitted = decide(Operation::Check, charges).await;
        assert!(admitted.outcomes()[0].allowed, "{}", charges[0].policy());
    }
}

/// On a node from which its slot is moving, a key that has lost its last lease cannot be read again.
#[tokio::test]
async fn an_expired_lease_in_a_moving_slot_is_renewed_and_ended() {
    const EXPIRED: &str = "
        local time = redis.call('TIME')
        return redis.call('ZCOUNT', KEYS[1], '(' .. time[1] .. string.format('%06d', time[2]), '+inf')";
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (limit, key) = (
        Limit::from(Concurrency::new(5).lease(Duration::from_secs(1))),
        Key::from("k"),
    );
    let slot = cluster.slot(&redis_key("k")).await;
    let from = Cluster::owner(slot);
    let decide = async |operation, charge: &Charge| {
        let response = store
            .decide(&[StoreRequest::new(operation, std::slice::from_ref(charge))])
            .await;
        let response = response.unwrap_or_else(|error| panic!("{operation:?} of {}: {error}", charge.policy()));
        response.outcomes()[0].clone()
    };
    let refund = Operation::Refund {
        admitted_at: Duration::ZERO,
    };
    let mut leases = Vec::new();
    for operation in [Operation::RenewLease, Operation::EndLease, refund] {
        for cost in [1, 3] {
            let policy = format!("{}", leases.len());
            let charge = Charge::new(&policy, &limit, &key, cost).lease(LeaseId::random());
            assert!(decide(Operation::Check, &charge).await.allowed);
            // The key stays however long the test takes.
            let name = support::redis_key(&policy, &limit, &key);
            cluster.primaries[from].command::<()>("PERSIST", [&name]).await;
            leases.push((operation, cost, charge, name));
        }
    }
    cluster.begin_to_move(slot, from, (from + 1) % 3).await;
    for (.., name) in &leases {
        eventually("the lease expires", async || {
            let held: u32 = cluster.primaries[from].command("EVAL", [EXPIRED, "1", name]).await;
            held == 0
        })
        .await;
    }

    for (operation, cost, charge, _) in &leases {
        let outcome = decide(*operation, charge).await;
        let renewed = if *operation == Operation::RenewLease { *cost } else { 0 };
        assert!(outcome.allowed, "{operation:?} of {cost}");
        assert_eq!(outcome.states()[0].remaining, 5 - renewed, "{operation:?} of {cost}");
        let again = decide(*operation, charge).await;
        assert_eq!(again.states()[0].remaining, 5 - renewed, "{operation:?} of {cost}");
    }
}

#[tokio::test]
async fn requests_of_one_call_are_served_when_their_keys_are_on_two_nodes() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let (log, key) = (limit(10), Key::from("k"));
    let [a, b] = ["a", "b"].map(|policy| [Charge::new(policy, &log, &key, 1)]);
    let check = |charges: &[Charge; 1]| store.decide(&[StoreRequest::new(Operation::Check, charges)]);
    let (first, second) = tokio::join!(check(&a), check(&b));
    assert!(first.is_ok() && second.is_ok());

    let slot = cluster.slot(&redis_key("k")).await;
    let from = Cluster::owner(slot);
    let to = (from + 1) % 3;
    cluster.begin_to_move(slot, from, to).await;
    cluster.move_key("quota:1:log/1h:a:{key=k}", from, to).await;
    // The first two are calls of their own, and the others wait meanwhile.
    let checks: JoinSet<_> = [&a, &b, &a, &b, &a, &b].into_iter().map(check).collect();
    for answer in checks.join_all().await {
        answer.expect("each is in one place");
    }
    for charges in [&a, &b] {
        let answer = check(charges).await.expect("it is in one place");
        assert_eq!(answer.outcomes()[0].states()[0].remaining, 5);
    }
    // What is sent again has not failed.
    let status = store.status().expect("it has one");
    assert!(status.nodes.iter().all(|node| node.failed == 0), "{status:?}");
}

/// Policies about the callers of these names, which lie in different slots.
async fn check_both(store: &RedisStore, limits: [&Limit; 2], callers: [&str; 2]) -> StoreResponse {
    let keys = callers.map(Key::from);
    let charges = [
        Charge::new("test", limits[0], &keys[0], 1),
        Charge::new("test", limits[1], &keys[1], 1),
    ];
    let answer = store.decide(&[StoreRequest::new(Operation::Check, &charges)]).await;
    answer.expect("the cluster answers")
}

#[tokio::test]
async fn a_denial_across_slots_is_refunded_when_the_check_is_dropped() {
    let cluster = Cluster::start().await;
    let builder = RedisStore::builder()
        .deadline(Duration::from_secs(60))
        .deny_cache(false);
    let store = builder.url(&cluster.url()).connect().await.expect("the URL is good");
    let [one, two, three] = &cluster.keys().await;
    let (many, few) = (limit(10_000), limit(1));
    decide(&store, Operation::Check, &few, three, 1).await;

    let keys = [one, two, three].map(|key| Key::from(&**key));
    let charges = [
        Charge::new("test", &many, &keys[0], 1),
        Charge::new("test", &many, &keys[1], 1),
        Charge::new("test", &few, &keys[2], 1),
    ];
    for run in 0..300 {
        let check = store.decide(&[StoreRequest::new(Operation::Check, &charges)]);
        let _ = tokio::time::timeout(Duration::from_micros(run * 10), check).await;
    }
    eventually("all charges are refunded", async || {
        remaining(&store, &many, one).await + remaining(&store, &many, two).await == 20_000
    })
    .await;
}

#[tokio::test]
async fn a_denial_across_slots_is_refunded_after_the_runtime_of_its_caller_has_ended() {
    let cluster = Cluster::start_patient().await;
    let store = store(&cluster).await;
    let [one, two, _] = &cluster.keys().await;
    let (many, few) = (limit(100), limit(1));
    decide(&store, Operation::Check, &few, two, 1).await;

    let frozen = cluster.primaries[1].freeze();
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    runtime.spawn({
        let (store, many, few) = (store.clone(), many.clone(), few.clone());
        let (one, two) = (one.clone(), two.clone());
        async move { check_both(&store, [&many, &few], [&one, &two]).await }
    });
    eventually("the first slot is charged", async || {
        remaining(&store, &many, one).await == 99
    })
    .await;
    spawn_blocking(move || drop(runtime)).await.expect("no panic");
    drop(frozen);
    let drained = store.drained(Duration::from_secs(60)).await;
    drained.expect("the refund is sent");
    assert_eq!(remaining(&store, &many, one).await, 100);
}

#[tokio::test]
async fn a_denial_across_slots_is_cached() {
    let cluster = Cluster::start().await;
    let builder = RedisStore::builder().deadline(Duration::from_secs(60));
    let store = builder.url(&cluster.url()).connect().await.expect("the URL is good");
    let [one, two, _] = &cluster.keys().await;
    let (many, few) = (limit(100), limit(1));
    decide(&store, Operation::Check, &few, two, 1).await;

    let keys = [one, two].map(|key| Key::from(&**key));
    let charges = [
        Charge::new("test", &many, &keys[0], 1),
        Charge::new("test", &few, &keys[1], 1),
    ];
    let check = [StoreRequest::new(Operation::Check, &charges)];
    assert!(!store.decide(&check).await.expect("the cluster replies").outcomes()[0].allowed);
    // The refund of its own charge does not keep the denial out of the cache.
    let cached = store.decide(&check).try_ready();
    assert!(
        matches!(&cached, Ok(Ok(answer)) if !answer.outcomes()[0].allowed),
        "{cached:?}"
    );
    assert_eq!(remaining(&store, &many, one).await, 100);

    // A refund by another request does.
    let answer = store
        .decide(&[StoreRequest::new(Operation::Check, &charges[..1])])
        .await;
    let refund = Operation::Refund {
        admitted_at: answer.expect("the cluster replies").server_time,
    };
    store
        .decide(&[StoreRequest::new(refund, &charges[..1])])
        .await
        .expect("the cluster replies");
    assert!(store.decide(&check).try_ready().is_err());
}

#[tokio::test]
async fn policies_in_different_slots_are_charged_in_turn_and_refunded_when_a_later_one_denies() {
    let cluster = Cluster::start().await;
    let store = connect(&cluster, patient().deny_cache(false)).await;
    let [one, two, _] = &cluster.keys().await;
    let (many, few) = (limit(10), limit(2));

    for left in [1, 0] {
        let answer = check_both(&store, [&many, &few], [one, two]).await;
        assert!(answer.outcomes()[0].allowed);
        assert_eq!(answer.outcomes()[0].states()[1].remaining, left);
    }
    for _ in 0..5 {
        let answer = check_both(&store, [&many, &few], [one, two]).await;
        let [first, second] = answer.outcomes()[0].states() else {
            panic!("two states: {answer:?}")
        };
        assert!(!answer.outcomes()[0].allowed);
        assert_eq!(
            (first.remaining, first.retry_after),
            (8, None),
            "it has its charge back"
        );
        assert!(second.retry_after.is_some());
    }
    assert_eq!(remaining(&store, &many, one).await, 8);

    // In the other order the second one is not charged, and its state is returned.
    let answer = check_both(&store, [&few, &many], [two, one]).await;
    assert!(!answer.outcomes()[0].allowed);
    assert_eq!(answer.outcomes()[0].states()[1].remaining, 8);
}

#[tokio::test]
async fn a_check_across_slots_charges_nothing_when_a_later_slot_replies_with_an_error() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let [one, two, _] = &cluster.keys().await;
    let wrong = redis_key(two);
    cluster.primaries[1].command::<()>("SET", [&*wrong, "x"]).await;
    let (limit, keys) = (limit(5), [one, two].map(|key| Key::from(&**key)));
    let charges = keys.each_ref().map(|key| Charge::new("test", &limit, key, 1));
    for _ in 0..5 {
        let error = store.decide(&[StoreRequest::new(Operation::Check, &charges)]).await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains("WRONGTYPE"), "{error}");
    }
    assert_eq!(remaining(&store, &limit, one).await, 5);
}

#[tokio::test]
async fn a_request_waits_beside_a_policy_that_observes_in_another_slot() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let [one, two, _] = &cluster.keys().await;
    let window = Duration::from_millis(300);
    let waiting = Policy::new("waiting", SlidingLog::new(1, window))
        .key(key::constant(one))
        .failure_mode(FailureMode::Closed)
        .wait_up_to(Duration::from_secs(20));
    let observing = Policy::new("observing", SlidingLog::per_hour(1)).key(key::constant(two));
    let layer = RateLimitLayer::new(store, [waiting, observing.observe_only()]);
    let service = layer.layer(tower::service_fn(async |_: http::Request<String>| {
        Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
    }));

    let started = Instant::now();
    for _ in 0..3 {
        let response = service.clone().oneshot(http::Request::new(String::new())).await;
        let response = response.expect("it never fails");
        assert!(response.status().is_success(), "{}", response.status());
    }
    assert!(started.elapsed() >= window + window / 2, "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_refund_whose_node_hangs_prevents_no_refund_in_another() {
    // The others must not take the hung node for failed: it would serve nothing for a while after it goes on.
    let cluster = Cluster::start_patient().await;
    let store = connect(&cluster, RedisStore::builder().deadline(DEADLINE)).await;
    let limit = limit(5);
    let [one, two, _] = &cluster.keys().await;
    let keys = [one, two].map(|caller| Key::from(&**caller));
    let charges = [&keys[0], &keys[1]].map(|key| Charge::new("test", &limit, key, 1));

    for is_one_request in [false, true] {
        let mut admitted_at = Duration::ZERO;
        for charge in charges.chunks(1) {
            let check = [StoreRequest::new(Operation::Check, charge)];
            admitted_at = store.decide(&check).await.expect("the cluster answers").server_time;
        }
        let operation = Operation::Refund { admitted_at };
        let size = if is_one_request { 2 } else { 1 };
        let refunds = charges
            .chunks(size)
            .map(|charges| StoreRequest::new(operation, charges));
        let frozen = cluster.primaries[0].freeze();
        let refunded = store.decide(&refunds.collect::<Vec<_>>()).await;
        refunded.expect_err("the first node hangs");
        assert_eq!(remaining(&store, &limit, two).await, 5, "one request: {is_one_request}");
        drop(frozen);
        cluster.serves(&store).await;
    }
}

#[tokio::test]
async fn a_node_that_hangs_is_not_taken_for_the_one_that_has_got_its_first_slot() {
    let cluster = Cluster::start_patient().await;
    let builder = RedisStore::builder().deadline(DEADLINE).deny_cache(false);
    let store = connect(&cluster, builder).await;
    let [first, ..] = &cluster.keys().await;
    let slot = cluster.slot(&redis_key(first)).await;
    cluster.begin_to_move(slot, 0, 1).await;
    cluster.move_keys(slot, 0, 1).await;
    cluster.end_moving(slot, 1).await;
    let mut staying = first.clone();
    for number in 0.. {
        let slot_of_key = cluster.slot(&redis_key(&staying)).await;
        if slot_of_key != slot && Cluster::owner(slot_of_key) == 0 {
            break;
        }
        staying = number.to_string();
    }
    decide(&store, Operation::Check, &limit(5), first, 1).await;

    let frozen = cluster.primaries[0].freeze();
    let mut checks = JoinSet::new();
    for _ in 0..200 {
        let (store, staying) = (store.clone(), staying.clone());
        checks.spawn(async move {
            try_decide(&store, Operation::Check, &limit(5), &staying, 1)
                .await
                .is_err()
        });
    }
    assert!(checks.join_all().await.into_iter().all(|failed| failed));
    let nodes = store.status().expect("a status").nodes;
    let failing: Vec<_> = nodes
        .into_iter()
        .filter(|node| node.failed > 0)
        .map(|node| node.address)
        .collect();
    let hung = format!("127.0.0.1:{}", cluster.primaries[0].port());
    assert_eq!(failing, [Some(hung)]);
    drop(frozen);
}

#[tokio::test]
async fn the_keys_of_a_node_are_served_while_one_to_which_it_redirects_hangs() {
    // The others must not take the hung node for failed.
    let cluster = Cluster::start_patient().await;
    let store = connect(&cluster, RedisStore::builder().deadline(DEADLINE)).await;
    let slot = cluster.slot(&redis_key("moving")).await;
    let from = Cluster::owner(slot);
    let to = (from + 1) % 3;
    let staying = &cluster.keys().await[from];
    assert_ne!(cluster.slot(&redis_key(staying)).await, slot);

    // No key of the slot is there, so the node redirects each call.
    cluster.begin_to_move(slot, from, to).await;
    let frozen = cluster.primaries[to].freeze();
    for _ in 0..3 {
        let checked = try_decide(&store, Operation::Check, &limit(5), "moving", 1).await;
        assert!(checked.is_err());
    }
    eventually("the node is called again", async || {
        try_decide(&store, Operation::Check, &limit(1_000_000), staying, 1).await
    })
    .await;
    drop(frozen);
}

#[tokio::test]
async fn a_node_that_has_left_the_cluster_is_called_no_more() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let [_, leaving, _] = &cluster.keys().await;
    let slot = cluster.slot(&redis_key(leaving)).await.to_string();
    // It serves none of the calls between, from which the store would learn of it.
    cluster.primaries[1].command::<()>("CLUSTER", ["RESET", "SOFT"]).await;
    let id = cluster.id(0).await;
    for node in [0, 2] {
        let claim = ["SETSLOT", &slot, "NODE", &id];
        cluster.primaries[node].command::<()>("CLUSTER", claim).await;
    }
    eventually("the new node serves the slot", async || {
        try_decide(&store, Operation::Peek, &limit(1), leaving, 1).await
    })
    .await;
}

/// A node that has left the cluster goes on with its connections, and gets no messages of the others.
#[tokio::test]
async fn wakes_are_not_received_from_a_node_that_has_left_the_cluster() {
    let cluster = Cluster::start().await;
    let (leaving, mut subscribed) = (&cluster.primaries[1], Vec::new());
    let subscriptions = async || {
        let mut subscriptions = 0;
        for node in &cluster.primaries {
            subscriptions += node.wake_subscriptions().await;
        }
        subscriptions
    };
    // Each subscribes to one of the nodes.
    while leaving.wake_subscriptions().await == 0 {
        let store = store(&cluster).await;
        store.receive_wakes();
        subscribed.push(store);
        eventually("it is subscribed", async || {
            subscriptions().await == subscribed.len() as u64
        })
        .await;
    }

    let id = cluster.id(1).await;
    leaving.command::<()>("CLUSTER", ["RESET", "SOFT"]).await;
    for node in [0, 2] {
        cluster.primaries[node].command::<()>("CLUSTER", ["FORGET", &id]).await;
    }
    let key = &cluster.keys().await[1];
    for store in &subscribed {
        // The reply says that the node has left.
        let _ = try_decide(store, Operation::Peek, &limit(1), key, 1).await;
    }
    eventually("all are subscribed to other nodes", async || {
        leaving.wake_subscriptions().await == 0 && subscriptions().await == subscribed.len() as u64
    })
    .await;
}

#[tokio::test]
async fn a_receipt_for_several_slots_refunds_each_of_them() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let [one, two, _] = &cluster.keys().await;
    let policies = [(one, "one"), (two, "two")].map(|(caller, name)| {
        let policy = Policy::new(name, SlidingLog::per_hour(5));
        policy.key(key::constant(caller))
    });
    let layer = RateLimitLayer::new(store.clone(), policies.to_vec());
    let service = layer.layer(tower::service_fn(async |request: http::Request<String>| {
        let decision = request.extensions().get::<Decision>().expect("it was counted");
        let receipt = decision.take_receipt();
        receipt.refund().await.expect("the cluster answers");
        Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Empty::<bytes::Bytes>::new()))
    }));

    for _ in 0..20 {
        let response = service
            .clone()
            .oneshot(http::Request::new(String::new()))
            .await
            .expect("it never fails");
        assert!(response.status().is_success(), "each gave its charge back");
    }
}

/// Tasks that check without pause, each against a key and a limit of its own.
struct Load {
    running: Arc<AtomicBool>,
    callers: JoinSet<Seen>,
}

struct Seen {
    key: String,
    quota: u64,
    admitted: u64,
    failed: Vec<String>,
    longest: Duration,
}

impl Load {
    fn start(store: &RedisStore, keys: impl IntoIterator<Item = String>) -> Self {
        let running = Arc::new(AtomicBool::new(true));
        let mut callers = JoinSet::new();
        for (number, key) in keys.into_iter().enumerate() {
            let (store, running) = (store.clone(), running.clone());
            callers.spawn(async move {
                // Each task recognizes replies to other tasks.
                let quota = 1_000_000 + 1_000_000 * number as u64;
                let limit = Limit::from(TokenBucket::per_hour(quota).burst(quota));
                let mut seen = Seen {
                    key,
                    quota,
                    admitted: 0,
                    failed: Vec::new(),
                    longest: Duration::ZERO,
                };
                while running.load(Ordering::Relaxed) || seen.admitted <= 10 {
                    let (outcome, took) = timed(try_decide(&store, Operation::Check, &limit, &seen.key, 1)).await;
                    seen.longest = seen.longest.max(took);
                    match outcome {
                        Ok(outcome) => {
                            assert!(outcome.allowed, "there is room for {}", seen.key);
                            seen.admitted += 1;
                            let left = outcome.states()[0].remaining;
                            let own = (quota - 400_000..quota).contains(&left);
                            assert!(own, "{left} left of {quota} is the reply to another task");
                        }
                        Err(error) => {
                            assert_ne!(error.kind(), ErrorKind::Protocol, "{error}");
                            seen.failed
                                .push(format!("{error}; {:?}", std::error::Error::source(&error)));
                            tokio::time::sleep(Duration::from_millis(5)).await;
                        }
                    }
                }
                seen
            });
        }
        Self { running, callers }
    }

    async fn stop(self) -> Vec<Seen> {
        self.running.store(false, Ordering::Relaxed);
        self.callers.join_all().await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_slots_move_no_check_is_counted_twice_or_gets_the_reply_to_another() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let keys: Vec<String> = (0..12).map(|number| format!("caller-{number}")).collect();
    let (started, load) = (Instant::now(), Load::start(&store, keys.iter().cloned()));

    for key in &keys {
        let slot = cluster.slot(&format!("{{key={key}}}")).await;
        let from = Cluster::owner(slot);
        let to = (from + 1) % 3;
        cluster.begin_to_move(slot, from, to).await;
        cluster.move_keys(slot, from, to).await;
        cluster.end_moving(slot, to).await;
    }

    for seen in load.stop().await {
        assert_eq!(seen.failed, [""; 0], "a slot on its way is served");
        let limit = Limit::from(TokenBucket::per_hour(seen.quota).burst(seen.quota));
        let left = remaining(&store, &limit, &seen.key).await;
        let counted = seen.quota - left;
        // A bucket of so many an hour gives some back meanwhile.
        let back = seen.quota.div_ceil(3_600) * (started.elapsed().as_secs() + 1);
        assert!(counted <= seen.admitted, "{counted} of {} counted", seen.admitted);
        assert!(
            counted + back >= seen.admitted,
            "{counted} of {} counted",
            seen.admitted
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_slot_moves_a_log_counts_exactly() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    const QUOTA: u64 = 400;
    let slot = cluster.slot(&redis_key("hot")).await;
    let (admitted, moving) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(true)));
    let mut callers = JoinSet::new();
    for _ in 0..8 {
        let (store, admitted, moving) = (store.clone(), admitted.clone(), moving.clone());
        callers.spawn(async move {
            let mut checks = 0;
            while checks < 100 || moving.load(Ordering::Relaxed) {
                checks += 1;
                // So that some are admitted after each move.
                tokio::time::sleep(Duration::from_millis(5)).await;
                if decide(&store, Operation::Check, &limit(QUOTA), "hot", 1).await.allowed {
                    admitted.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }

    let mut from = Cluster::owner(slot);
    for _ in 0..10 {
        let to = (from + 1) % 3;
        cluster.begin_to_move(slot, from, to).await;
        cluster.move_keys(slot, from, to).await;
        cluster.end_moving(slot, to).await;
        from = to;
    }
    moving.store(false, Ordering::Relaxed);
    callers.join_all().await;
    assert_eq!(admitted.load(Ordering::Relaxed), QUOTA);
}

#[tokio::test]
async fn a_node_without_the_script_gets_it_again() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    let keys = cluster.keys().await;
    for key in &keys {
        decide(&store, Operation::Check, &limit(10), key, 1).await;
    }

    cluster.primaries[1].command::<()>("SCRIPT", ["FLUSH"]).await;
    for key in &keys {
        let outcome = decide(&store, Operation::Check, &limit(10), key, 1).await;
        assert_eq!(outcome.states()[0].remaining, 8);
    }
}

#[tokio::test]
async fn a_dead_primary_fails_only_its_own_keys_until_its_replica_takes_over() {
    let (mut cluster, store) = that_fails_over().await;
    let keys = cluster.keys().await;
    for key in &keys {
        decide(&store, Operation::Check, &limit(1_000), key, 1).await;
    }
    let load = Load::start(&store, [keys[0].clone(), keys[2].clone()]);

    cluster.primaries[1].kill();
    let limited = limit(1_000);
    let (outcome, took) = timed(try_decide(&store, Operation::Check, &limited, &keys[1], 1)).await;
    let error = outcome.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Timeout),
        "{error:?}"
    );
    assert!(took < DEADLINE + SLACK, "{took:?}");

    eventually("the replica has taken over", async || {
        let replication: String = cluster.replicas[1].command("INFO", ["replication"]).await;
        replication.contains("role:master")
    })
    .await;
    eventually("the store calls the new primary", async || {
        try_decide(&store, Operation::Check, &limit(1_000), &keys[1], 1).await
    })
    .await;
    for seen in load.stop().await {
        assert_eq!(seen.failed, [""; 0], "{} has a primary that lives", seen.key);
        assert!(seen.longest < DEADLINE, "{:?}", seen.longest);
    }
}

/// One of them lives, and replies later than nodes on the same machine.
#[tokio::test]
async fn dead_nodes_in_the_url_delay_no_connection() {
    let cluster = Cluster::start().await;
    let living = Proxy::start(cluster.primaries[0].port()).await;
    living.delay(Duration::from_millis(20));
    let mut ports: Vec<u16> = (0..8).map(|_| free_port()).collect();
    ports.push(living.port());
    let others: Vec<String> = ports.iter().map(|port| format!("node=127.0.0.1:{port}")).collect();
    let url = format!("redis-cluster://127.0.0.1:{}?{}", free_port(), others.join("&"));
    let store = RedisStore::connect(&url).await.expect("a node of the URL lives");
    cluster.serves(&store).await;
}

#[tokio::test]
async fn a_store_that_starts_while_a_primary_is_dead_sends_checks_of_several_slots_in_one_call() {
    const CHECKS: usize = 100;
    let mut cluster = Cluster::start().await;
    let slot = |key: &str| crc16::State::<crc16::XMODEM>::calculate(format!("key={key}").as_bytes()) % 16_384;
    let keys = (0..).map(|number| format!("k{number}"));
    let keys: Vec<String> = keys.filter(|key| slot(key) < 16_384 / 3).take(CHECKS).collect();
    cluster.primaries[1].kill();
    let store = RedisStore::builder().url(&cluster.url()).connect_lazy().expect("a URL");

    let calls = async || cluster.primaries[0].script_calls().await;
    // Before the limit is used up: denials are cached.
    eventually("calls have checks of several slots", async || {
        let before = calls().await;
        let checks = keys.iter().map(|key| {
            let (store, key) = (store.clone(), key.clone());
            async move {
                try_decide(&store, Operation::Check, &limit(100_000), &key, 1)
                    .await
                    .is_ok()
            }
        });
        let checked = checks.collect::<JoinSet<_>>().join_all().await;
        checked.into_iter().all(|checked| checked) && calls().await - before < CHECKS as u64 / 4
    })
    .await;
}

/// With `no`, it is its own keys that fail.
#[tokio::test]
async fn where_full_coverage_is_required_a_dead_primary_fails_all_keys_and_that_is_logged_before() {
    const LINE: &str = "cluster-require-full-coverage";
    let log = Log::capture();
    let mut cluster = Cluster::start_with(&["--cluster-require-full-coverage", "yes"]).await;
    let store = connect(&cluster, RedisStore::builder().deadline(DEADLINE)).await;
    assert_eq!(log.text().matches(LINE).count(), 1, "{}", log.text());

    let [one, _, two] = cluster.keys().await;
    cluster.primaries[1].kill();
    for key in [one, two] {
        eventually("a check of another key fails", async || {
            let checked = try_decide(&store, Operation::Check, &limit(9), &key, 1).await;
            checked.is_err_and(|error| error.to_string().contains("CLUSTERDOWN"))
        })
        .await;
    }
}

#[tokio::test]
async fn a_dead_primary_is_one_line_in_the_log_until_it_is_back() {
    let mut cluster = Cluster::start().await;
    let store = connect(&cluster, RedisStore::builder().deadline(DEADLINE)).await;
    let [one, dead, two] = cluster.keys().await;
    let address = format!("127.0.0.1:{}", cluster.primaries[1].port());
    let limiter = Limiter::new(store.clone(), Policy::new("test", SlidingLog::per_hour(100_000)));
    let log = Log::capture();
    let check = async || {
        for _ in 0..15 {
            for key in [&one, &two] {
                let decision = limiter.check(key.clone()).await.expect("a decision");
                assert!(decision.store_error().is_none());
            }
        }
        let decision = limiter.check(dead.clone()).await.expect("this process counts");
        tokio::time::sleep(Duration::from_millis(1)).await;
        decision.store_error().is_some()
    };
    let states = || {
        let mut nodes = store.status().expect("a status").nodes;
        nodes.sort_by_key(|node| node.address.as_ref() != Some(&address));
        nodes.into_iter().map(|node| node.state).collect::<Vec<_>>()
    };

    cluster.primaries[1].kill();
    let ok = NodeState::Ok;
    eventually("it is down", async || {
        check().await && states() == [NodeState::Down, ok, ok]
    })
    .await;
    // A third of the checks is far from a change of state.
    for _ in 0..100 {
        assert!(check().await);
    }
    // A client of the test logs too.
    let lines = || log.text().matches("tower_quota::").count();
    let text = log.text();
    assert_eq!(lines(), 1, "{text}");
    assert!(text.contains("the rate limit store fails; until it replies"), "{text}");
    assert!(
        text.contains(&format!("node=\"{address}\" decided=0 failed=")),
        "{text}"
    );

    cluster.primaries[1].restart();
    eventually("it is back", async || !check().await && states() == [ok; 3]).await;
    eventually("it is logged", async || lines() > 1).await;
    let text = log.text();
    assert_eq!(text.matches("the rate limit store replies again").count(), 1, "{text}");
    assert_eq!(text.matches("the rate limit store fails").count(), 1, "{text}");
}

#[tokio::test]
async fn a_node_that_a_check_in_another_runtime_met_first_outlives_that_runtime() {
    let (cluster, store) = that_fails_over().await;
    let [key, ..] = cluster.keys().await;
    // The store knows nothing of the replica to which its primary redirects from now on.
    let mut asked = None::<Instant>;
    eventually("the roles are exchanged", async || {
        // A failover by hand is given up after five seconds, without a vote of the other primaries.
        if asked.is_none_or(|asked| asked.elapsed() > Duration::from_secs(6)) {
            asked = Some(Instant::now());
            let failover = b"FAILOVER".to_vec();
            let _ = cluster.replicas[0]
                .try_command_of_bytes::<()>("CLUSTER", [failover])
                .await;
        }
        let replication: String = cluster.primaries[0].command("INFO", ["replication"]).await;
        replication.contains("role:slave")
    })
    .await;

    let check = {
        let (store, key) = (store.clone(), key.clone());
        async move || {
            let limit = limit(1_000);
            let decided = try_decide(&store, Operation::Check, &limit, &key, 1);
            decided.await.is_ok()
        }
    };
    let there = check.clone();
    let met = spawn_blocking(|| {
        let runtime = Builder::new_current_thread().enable_all().build();
        runtime
            .expect("a runtime")
            .block_on(eventually("the new primary decides", there));
    });
    met.await.expect("no panic");
    eventually("it decides without that runtime", check).await;
}

#[tokio::test]
async fn a_hung_primary_delays_only_its_own_keys_until_its_replica_takes_over() {
    let (cluster, store) = that_fails_over().await;
    let keys = cluster.keys().await;
    for key in &keys {
        decide(&store, Operation::Check, &limit(1_000), key, 1).await;
    }
    let load = Load::start(&store, [keys[0].clone(), keys[2].clone()]);

    let frozen = cluster.primaries[1].freeze();
    let mut longest = Duration::ZERO;
    eventually("the replica has taken over", async || {
        let limited = limit(1_000);
        let (outcome, took) = timed(try_decide(&store, Operation::Check, &limited, &keys[1], 1)).await;
        longest = longest.max(took);
        outcome
    })
    .await;
    assert!(longest < DEADLINE + SLACK, "{longest:?}");
    for seen in load.stop().await {
        assert_eq!(seen.failed, [""; 0], "{} has a primary that answers", seen.key);
        assert!(seen.longest < DEADLINE, "{:?}", seen.longest);
    }
    drop(frozen);
}

#[tokio::test]
async fn replicas_receive_no_calls() {
    let cluster = Cluster::start().await;
    let store = store(&cluster).await;
    for key in cluster.keys().await {
        decide(&store, Operation::Check, &limit(10), &key, 1).await;
        decide(&store, Operation::Peek, &limit(10), &key, 1).await;
    }
    for replica in &cluster.replicas {
        // What the primary sends it does not count as a script.
        assert_eq!(replica.script_calls().await, 0);
    }
}

#[tokio::test]
async fn a_cluster_client_of_the_application_names_the_nodes() {
    let cluster = Cluster::start().await;
    let url = format!("redis://127.0.0.1:{}", cluster.primaries[2].port());
    let nodes = [redis::Client::open(url).expect("a good URL")];
    let store = patient().client(nodes).connect();
    let store = store.await.expect("the node is there");
    cluster.serves(&store).await;
    let mut owners = HashSet::new();
    for key in cluster.keys().await {
        assert!(decide(&store, Operation::Check, &limit(10), &key, 1).await.allowed);
        owners.insert(Cluster::owner(cluster.slot(&redis_key(&key)).await));
    }
    assert_eq!(owners.len(), 3);
}

#[tokio::test]
async fn a_wrong_password_for_a_cluster_is_an_error_that_does_not_contain_it() {
    let cluster = Cluster::start_with(&["--user", "limiter", "on", ">right-one", "~*", "+@all"]).await;
    let url = |password| cluster.url().replace("://", &format!("://limiter:{password}@"));
    let error = RedisStore::connect(&url("wrong-one")).await.unwrap_err();
    assert!(error.to_string().contains("credentials"), "{error}");
    assert!(!format!("{error} {error:?}").contains("wrong-one"), "{error:?}");

    let store = RedisStore::connect(&url("right-one"))
        .await
        .expect("the password is right");
    eventually("the store is answered", async || {
        try_decide(&store, Operation::Peek, &limit(1), "k", 1).await
    })
    .await;
}
