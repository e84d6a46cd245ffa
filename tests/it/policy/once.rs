//! Requests with an id are counted once, in every store.

use std::{
    collections::HashSet,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::{Request, Response, StatusCode, request::Builder};
use http_body_util::Empty;
use tokio::{task::JoinSet, time::Instant};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    Decision, FixedWindow, Key, Limit, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, key, limit,
    limit::Calendar,
    store::{Store, StoreFuture, StoreId, StoreRequest},
};

use crate::support::{Algorithm, Bench, Broken, Cluster, Received, Redis, connected, each_store, patient};

each_store! {
    an_id_is_counted_once_in_a_window_of_each_algorithm
    a_repetition_is_admitted_when_the_limit_is_used_up
    after_the_repetitions_an_id_is_counted_again
    a_window_of_a_log_holds_at_most_twenty_repetitions_of_each_unit
    a_denied_request_is_not_remembered
    each_key_and_each_policy_has_its_own_ids
    a_refund_forgets_the_id_and_a_settlement_does_not
    a_request_that_was_repeated_is_not_refunded
    a_request_of_another_cost_is_no_repetition
    a_repetition_has_no_receipt
    an_id_stays_counted_when_the_limit_changes
    policies_that_are_decided_together_each_have_the_id
    a_policy_that_observes_has_ids_of_its_own
    the_id_of_a_calendar_window_ends_with_it
    a_hundred_requests_at_once_with_one_id_are_counted_once
    a_hundred_requests_at_once_with_one_id_are_admitted_at_most_as_often_as_it_may_be_repeated
}

const WINDOW: Duration = Algorithm::WINDOW;

fn limiter(bench: &Bench, limit: impl Into<Limit>) -> Limiter {
    Limiter::new(bench.store.clone(), Policy::new("mails", limit.into()))
}

async fn check(limiter: &Limiter, id: &str) -> Decision {
    limiter.check_once("k", id).await.expect("the store answers")
}

/// Whether a request is admitted, whether it is a repetition, and what remains.
async fn checked(limiter: &Limiter, id: &str) -> (bool, bool, u64) {
    let decision = check(limiter, id).await;
    (decision.is_allowed(), is_repetition(&decision), decision.remaining())
}

fn is_repetition(decision: &Decision) -> bool {
    let mut policies = decision.policies().map(|policy| policy.is_repetition());
    let first = policies.next().expect("a policy");
    assert!(policies.all(|other| other == first));
    first
}

const DENIED: (bool, bool, u64) = (false, false, 0);

const DENIED_WITH_3: (bool, bool, u64) = (false, false, 3);

fn counted(remaining: u64) -> (bool, bool, u64) {
    (true, false, remaining)
}

fn repeated(remaining: u64) -> (bool, bool, u64) {
    (true, true, remaining)
}

async fn an_id_is_counted_once_in_a_window_of_each_algorithm(bench: Bench) {
    for algorithm in Algorithm::ALL {
        let limit = algorithm.limit(5);
        let limiter = Limiter::new(bench.store.clone(), Policy::new("mails", limit.clone()));
        limiter.reset("k").await.expect("the store answers");
        let id = limit.to_string();
        assert_eq!(checked(&limiter, &id).await, counted(4), "{limit}");
        let length = limit.window().unwrap_or(WINDOW);
        bench.advance(length - Duration::from_micros(1)).await;
        assert!(is_repetition(&check(&limiter, &id).await), "{limit}");
    }
}

async fn a_repetition_is_admitted_when_the_limit_is_used_up(bench: Bench) {
    let limiter = limiter(&bench, SlidingLog::new(2, WINDOW));
    assert_eq!(checked(&limiter, "a").await, counted(1));
    assert_eq!(checked(&limiter, "a").await, repeated(1));
    assert_eq!(checked(&limiter, "b").await, counted(0));
    assert_eq!(checked(&limiter, "c").await, DENIED);
    assert_eq!(checked(&limiter, "a").await, repeated(0));
    assert!(!limiter.check("k").await.expect("the store answers").is_allowed());

    bench.advance(WINDOW).await;
    assert_eq!(checked(&limiter, "a").await, counted(1));
    assert_eq!(checked(&limiter, "a").await, repeated(1));
}

async fn after_the_repetitions_an_id_is_counted_again(bench: Bench) {
    let twice = Policy::new("mails", SlidingLog::new(3, WINDOW)).max_repetitions(2);
    let limiter = Limiter::new(bench.store.clone(), twice);
    let expected = [
        counted(2),
        repeated(2),
        repeated(2),
        counted(1),
        counted(0),
        DENIED,
        DENIED,
    ];
    for (request, expected) in expected.into_iter().enumerate() {
        assert_eq!(checked(&limiter, "a").await, expected, "request {request}");
    }
    bench.advance(WINDOW).await;
    assert_eq!(checked(&limiter, "a").await, counted(2));
}

/// Those of one window of the ids, and then the requests of the next one with theirs.
async fn a_window_of_a_log_holds_at_most_twenty_repetitions_of_each_unit(bench: Bench) {
    let (limiter, moment) = (limiter(&bench, SlidingLog::new(2, WINDOW)), Duration::from_micros(1));
    for (requests, then) in [(1, WINDOW - moment), (10, moment), (1 + 10, moment)] {
        for id in ["a", "b"] {
            for _ in 0..requests {
                assert!(check(&limiter, id).await.is_allowed(), "{id}: {requests}");
            }
        }
        for id in ["a", "b"].into_iter().filter(|_| requests > 1) {
            assert!(!check(&limiter, id).await.is_allowed(), "{id}: {requests}");
        }
        bench.advance(then).await;
    }
}

async fn a_denied_request_is_not_remembered(bench: Bench) {
    let limiter = limiter(&bench, SlidingLog::new(1, WINDOW));
    assert_eq!(checked(&limiter, "a").await, counted(0));
    for _ in 0..2 {
        assert_eq!(checked(&limiter, "b").await, DENIED);
    }
    bench.advance(WINDOW).await;
    assert_eq!(checked(&limiter, "b").await, counted(0));
}

async fn each_key_and_each_policy_has_its_own_ids(bench: Bench) {
    let limiter = |name: &'static str| {
        let policy = Policy::new(name, SlidingLog::new(5, WINDOW));
        Limiter::new(bench.store.clone(), policy)
    };
    for limiter in [limiter("mails"), limiter("calls")] {
        for key in ["k", "l", "k|once=l"] {
            let decision = limiter.check_once(key, "a").await.expect("the store answers");
            assert!(!is_repetition(&decision), "{key}");
        }
    }
}

async fn a_refund_forgets_the_id_and_a_settlement_does_not(bench: Bench) {
    let limiter = limiter(&bench, SlidingLog::new(9, WINDOW));
    let check_n = async |expected| {
        let decision = check(&limiter, "a").await;
        assert_eq!(is_repetition(&decision), expected);
        decision.take_receipt()
    };
    let first = check_n(false).await;
    first.refund().await.expect("the store answers");
    assert_eq!(checked(&limiter, "a").await, counted(8));

    let settled = check(&limiter, "b").await.take_receipt();
    settled.settle(3).await.expect("the store answers");
    assert_eq!(checked(&limiter, "b").await, repeated(5));
}

/// What one request is charged admits at most its repetitions, whenever it is refunded.
async fn a_request_that_was_repeated_is_not_refunded(bench: Bench) {
    const REPETITIONS: usize = 2;
    let policy = Policy::new("mails", SlidingLog::new(3, WINDOW)).max_repetitions(REPETITIONS as u64);
    let limiter = Limiter::new(bench.store.clone(), policy);
    let mut admitted = 0;
    for cycle in 0..20 {
        let id = format!("{cycle}");
        let first = check(&limiter, &id).await;
        for _ in 0..REPETITIONS {
            admitted += usize::from(check(&limiter, &id).await.is_allowed());
        }
        admitted += usize::from(first.is_allowed());
        first.take_receipt().refund().await.expect("the store answers");
    }
    assert_eq!(admitted, 3 * (1 + REPETITIONS));

    // A request that is counted after the repetitions of another one is its own.
    bench.advance(WINDOW).await;
    let again = async || check(&limiter, "a").await.take_receipt();
    let [first, second, third, fourth] = [again().await, again().await, again().await, again().await];
    assert!(!first.is_empty() && second.is_empty() && third.is_empty());
    fourth.refund().await.expect("the store answers");
    assert_eq!(checked(&limiter, "b").await, counted(1));
    assert_eq!(
        checked(&limiter, "a").await,
        counted(0),
        "there are no more repetitions"
    );
}

async fn a_request_of_another_cost_is_no_repetition(bench: Bench) {
    let limiter = |cost| {
        let policy = Policy::new("mails", SlidingLog::new(9, WINDOW)).cost(cost);
        Limiter::new(bench.store.clone(), policy)
    };
    for (cost, expected) in [
        (1, counted(8)),
        (5, counted(3)),
        (1, repeated(3)),
        (5, repeated(3)),
        (4, DENIED_WITH_3),
    ] {
        assert_eq!(checked(&limiter(cost), "a").await, expected, "{cost}");
    }
}

async fn a_repetition_has_no_receipt(bench: Bench) {
    let limiter = limiter(&bench, SlidingLog::new(9, WINDOW));
    assert!(!check(&limiter, "a").await.take_receipt().is_empty());
    assert!(check(&limiter, "a").await.take_receipt().is_empty());
}

async fn an_id_stays_counted_when_the_limit_changes(bench: Bench) {
    let log = |quota, window| Limit::from(SlidingLog::new(quota, window));
    assert_eq!(checked(&limiter(&bench, log(2, WINDOW)), "a").await, counted(1));
    for (changed, remaining) in [
        (log(5, WINDOW), 4),
        (log(1, WINDOW), 0),
        (log(5, 3 * WINDOW), 4),
        (FixedWindow::new(5, WINDOW).into(), 5),
    ] {
        assert_eq!(checked(&limiter(&bench, changed), "a").await, repeated(remaining));
    }
}

async fn policies_that_are_decided_together_each_have_the_id(bench: Bench) {
    let policies = [("burst", 5, WINDOW), ("daily", 2, 3 * WINDOW)];
    let policies = policies.map(|(name, quota, window)| Policy::new(name, SlidingLog::new(quota, window)));
    let limiter = Limiter::new(bench.store.clone(), policies);
    let remaining = async |id: &str| {
        let decision = check(&limiter, id).await;
        let remaining: Vec<_> = decision.policies().map(|policy| policy.remaining()).collect();
        (decision.is_allowed(), remaining)
    };
    for id in ["a", "a"] {
        assert_eq!(remaining(id).await, (true, vec![4, 1]));
    }
    assert_eq!(remaining("b").await, (true, vec![3, 0]));
    assert_eq!(remaining("c").await, (false, vec![3, 0]));

    // Counted again by one of them, as a repetition by the other.
    bench.advance(WINDOW).await;
    let decision = check(&limiter, "a").await;
    let repetitions: Vec<_> = decision.policies().map(|policy| policy.is_repetition()).collect();
    assert_eq!((decision.is_allowed(), repetitions), (true, vec![false, true]));
}

async fn a_policy_that_observes_has_ids_of_its_own(bench: Bench) {
    let policies = [
        Policy::new("candidate", SlidingLog::new(1, WINDOW)).observe_only(),
        Policy::new("enforced", SlidingLog::new(5, WINDOW)),
    ];
    let limiter = Limiter::new(bench.store.clone(), policies);
    for (id, expected) in [
        ("a", [(false, false, 0), (false, false, 4)]),
        ("a", [(false, true, 0), (false, true, 4)]),
        ("b", [(true, false, 0), (false, false, 3)]),
        ("b", [(true, false, 0), (false, true, 3)]),
        ("a", [(false, true, 0), (false, true, 3)]),
    ] {
        let decision = check(&limiter, id).await;
        assert!(decision.is_allowed());
        let states = decision.policies();
        let states: Vec<_> = states
            .map(|policy| (policy.denial().is_some(), policy.is_repetition(), policy.remaining()))
            .collect();
        assert_eq!(states, expected, "{id}");
    }
}

async fn the_id_of_a_calendar_window_ends_with_it(bench: Bench) {
    bench.set("2027-03-14T23:59:00+01:00[Europe/Berlin]").await;
    let limiter = limiter(
        &bench,
        FixedWindow::calendar(5, Calendar::Day, "Europe/Berlin").unwrap(),
    );
    assert_eq!(checked(&limiter, "a").await, counted(4));
    bench.advance(Duration::from_secs(59)).await;
    assert_eq!(checked(&limiter, "a").await, repeated(4));
    bench.advance(Duration::from_secs(1)).await;
    assert_eq!(checked(&limiter, "a").await, counted(4));
}

/// The decisions about a hundred requests at once with one id.
async fn at_once(limiter: &Limiter) -> Vec<Decision> {
    let mut checks = JoinSet::new();
    for _ in 0..100 {
        let limiter = limiter.clone();
        checks.spawn(async move { check(&limiter, "a").await });
    }
    checks.join_all().await
}

async fn a_hundred_requests_at_once_with_one_id_are_counted_once(bench: Bench) {
    let policy = Policy::new("mails", SlidingLog::new(5, WINDOW)).max_repetitions(99);
    let limiter = Limiter::new(bench.store.clone(), policy);
    let decisions = at_once(&limiter).await;
    assert!(decisions.iter().all(Decision::is_allowed));
    let counted = decisions.iter().filter(|decision| !is_repetition(decision));
    assert_eq!(counted.count(), 1);
    assert_eq!(limiter.peek("k").await.expect("the store answers").remaining(), 4);
}

async fn a_hundred_requests_at_once_with_one_id_are_admitted_at_most_as_often_as_it_may_be_repeated(bench: Bench) {
    let limiter = limiter(&bench, SlidingLog::new(5, WINDOW));
    let decisions = at_once(&limiter).await;
    let admitted = || decisions.iter().filter(|decision| decision.is_allowed());
    let repetitions = admitted().filter(|decision| is_repetition(decision)).count();
    assert_eq!((admitted().count(), repetitions), (15, 10));
}

/// An id that one replica has counted is a repetition for another one.
#[tokio::test]
async fn replicas_share_the_ids() {
    let redis = Redis::start();
    let mut replicas = Vec::new();
    for _ in 0..2 {
        let store = connected(patient(), &redis.url()).await;
        replicas.push(Limiter::new(store, Policy::new("mails", SlidingLog::per_hour(5))));
    }
    assert_eq!(checked(&replicas[0], "a").await, counted(4));
    assert_eq!(checked(&replicas[1], "a").await, repeated(4));
    assert_eq!(checked(&replicas[1], "b").await, counted(3));
    assert_eq!(checked(&replicas[0], "b").await, repeated(3));
}

/// The key of the marker, its time to live in milliseconds and its bytes in Redis.
async fn marker_in(redis: &Redis) -> (String, i64, u64) {
    let keys: Vec<String> = redis.command("KEYS", ["*once=*"]).await;
    let [marker] = &keys[..] else { panic!("{keys:?}") };
    (
        marker.clone(),
        redis.command("PTTL", [marker]).await,
        redis.command("MEMORY", ["USAGE", marker]).await,
    )
}

#[tokio::test]
async fn a_marker_in_redis_is_one_small_key_beside_the_count_until_its_window_ends() {
    let redis = Redis::start();
    let user = Key::header("x-user-id", "42");
    let policy = || Policy::new("payments", SlidingLog::per_hour(5));
    let limiter = Limiter::new(connected(patient(), &redis.url()).await, policy());
    for _ in 0..3 {
        let decision = limiter
            .check_once(user.clone(), "8e03978e-40d5-43dd-bc93-6894a57f9324")
            .await;
        assert!(decision.expect("Redis answers").is_allowed());
    }
    let (key, ttl, bytes) = marker_in(&redis).await;
    let digest = key
        .strip_prefix("quota:1:fixed:payments:{header:x-user-id=42}|once=")
        .expect("beside the count");
    assert_eq!(digest.len(), 32);
    assert!(!key.contains("8e03978e"));
    assert!((3_500_000..=3_602_000).contains(&ttl), "{ttl}");
    assert!((150..=250).contains(&bytes), "about 200 bytes, as documented: {bytes}");

    // Another secret hashes the caller and the id.
    redis.command::<()>("FLUSHALL", ["SYNC"]).await;
    let hashed = patient().hash_keys("0123456789abcdef");
    let limiter = Limiter::new(connected(hashed, &redis.url()).await, policy());
    for is_repeated in [false, true] {
        let decision = limiter
            .check_once(user.clone(), "8e03978e-40d5-43dd-bc93-6894a57f9324")
            .await;
        assert_eq!(is_repetition(&decision.expect("Redis answers")), is_repeated);
    }
    let (key, ..) = marker_in(&redis).await;
    assert!(key.starts_with("quota:1:fixed:payments:{keyed="), "{key}");
    assert!(!key.ends_with(digest), "the id is hashed with the secret");
}

#[tokio::test]
async fn in_a_cluster_a_marker_lies_beside_its_count_and_is_refunded_with_it() {
    let cluster = Cluster::start().await;
    let store = connected(patient(), &cluster.url()).await;
    cluster.serves(&store).await;
    let daily = Limit::from(SlidingLog::per_day(3));
    let mails = Limiter::new(store.clone(), Policy::new("mails", daily.clone()));
    for number in 0..20 {
        for is_repeated in [false, true] {
            let decision = mails
                .check_once(number, "a")
                .await
                .expect("the marker is in the slot of the count");
            assert_eq!((is_repetition(&decision), decision.remaining()), (is_repeated, 2));
        }
    }

    // By user in one slot, then by address in another, which denies.
    let layer = RateLimitLayer::new(
        store.clone(),
        [
            Policy::new("mails", daily.clone())
                .key(key::header("x-user"))
                .once_per(key::header("x-id")),
            Policy::new("addresses", SlidingLog::per_day(1)).key(key::header("x-address")),
        ],
    );
    let service = layer.layer(service_fn(respond));
    let send = async |user: &str, id: &str, address: &str| {
        let request = Request::get("/")
            .header("x-user", user)
            .header("x-id", id)
            .header("x-address", address);
        let request = request.body(Body::new()).expect("a good request");
        service.clone().oneshot(request).await.expect("infallible").status()
    };
    let remaining = async |user: &str| {
        let peeked = mails.peek(Key::header("x-user", user)).await;
        peeked.expect("the cluster answers").remaining()
    };
    for number in 0..10 {
        let (user, address) = (format!("user-{number}"), format!("address-{number}"));
        assert_eq!(send(&user, "a", &address).await, StatusCode::OK);
        assert_eq!(remaining(&user).await, 2);
        // A repetition for the first policy, which has nothing to refund, and denied by the second.
        assert_eq!(send(&user, "a", &address).await, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(remaining(&user).await, 2);
        // Counted and refunded, with its marker.
        assert_eq!(send(&user, "b", &address).await, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(remaining(&user).await, 2);
        assert_eq!(send(&user, "b", &format!("other-{number}")).await, StatusCode::OK);
        assert_eq!(remaining(&user).await, 1);
    }
}

type Body = Empty<bytes::Bytes>;

async fn respond(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::new()))
}

async fn send(layer: &RateLimitLayer, request: Builder) -> Received {
    let request = request.body(Body::new()).expect("a good request");
    let response = layer.layer(service_fn(respond)).oneshot(request).await;
    Received::read(response.expect("infallible")).await
}

fn payments(quota: u64) -> Policy {
    Policy::new("payments", SlidingLog::per_hour(quota))
        .key(key::constant("all"))
        .once_per(key::header("idempotency-key"))
}

fn with_id(id: &str) -> Builder {
    Request::post("/").header("idempotency-key", id)
}

#[tokio::test]
async fn a_layer_reads_the_id_from_a_header_and_lists_no_marker() {
    let layer = RateLimitLayer::new(MemoryStore::new(), payments(2));
    for (id, remaining) in [("a", 1), ("a", 1), ("b", 0), ("a", 0)] {
        let response = send(&layer, with_id(id)).await;
        assert_eq!(response.status, StatusCode::OK);
        assert_eq!(response.field("ratelimit-policy"), Some("\"payments\";q=2;w=3600"));
        let field = response.field("ratelimit").expect("the field");
        assert!(field.starts_with(&format!("\"payments\";r={remaining};")), "{field}");
    }
    let denied = send(&layer, with_id("c")).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.json()["violated-policies"], serde_json::json!(["payments"]));
}

#[tokio::test]
async fn a_request_without_an_id_is_counted_and_one_with_a_malformed_id_is_refused() {
    let layer = RateLimitLayer::new(MemoryStore::new(), payments(3));
    for status in [200, 200, 200, 429] {
        assert_eq!(send(&layer, Request::post("/")).await.status, status);
    }
    let malformed = send(&layer, with_id("a").header("idempotency-key", "b")).await;
    assert_eq!(malformed.status, StatusCode::BAD_REQUEST);

    let none = RateLimitLayer::new(
        MemoryStore::new(),
        payments(1).once_per(key::from_fn(|_| None::<String>)),
    );
    for status in [200, 429] {
        assert_eq!(send(&none, with_id("a")).await.status, status);
    }
}

#[tokio::test]
async fn an_id_of_a_limiter_is_that_of_a_layer() {
    let store = MemoryStore::new();
    let layer = RateLimitLayer::new(store.clone(), payments(5));
    send(&layer, with_id("a")).await;
    let limiter = Limiter::new(store, Policy::new("payments", SlidingLog::per_hour(5)));
    for (id, expected) in [("a", true), ("b", false)] {
        let id = Key::header("idempotency-key", id);
        let decision = limiter.check_once(Key::constant("all"), id).await;
        assert_eq!(is_repetition(&decision.expect("the store answers")), expected);
    }
}

#[test]
fn a_limiter_refuses_a_policy_that_reads_the_id_from_requests() {
    let error = Limiter::try_new(MemoryStore::new(), payments(5))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`.once_per(..)`") && error.contains("`check_once`"),
        "{error}"
    );
}

#[tokio::test]
async fn nested_layers_count_a_repetition_in_neither() {
    let store = MemoryStore::new();
    let [outer, inner] = [1, 20].map(|cost| RateLimitLayer::new(store.clone(), payments(100).cost(cost)));
    let service = outer.layer(inner.layer(service_fn(respond)));
    let limiter = Limiter::new(store, Policy::new("payments", SlidingLog::per_hour(100)));
    for (id, remaining) in [("a", 80), ("a", 80), ("b", 60), ("a", 60)] {
        let request = with_id(id).body(Body::new()).expect("a good request");
        let response = service.clone().oneshot(request).await.expect("infallible");
        assert_eq!(response.status(), StatusCode::OK);
        let peeked = limiter.peek(Key::constant("all")).await.expect("the store answers");
        assert_eq!(peeked.remaining(), remaining, "{id}");
    }
}

#[tokio::test]
async fn an_id_stays_counted_when_a_user_changes_the_plan() {
    let plans = limit::by(|parts| match parts.headers.contains_key("x-pro") {
        true => SlidingLog::per_hour(100),
        false => SlidingLog::per_minute(2),
    });
    let policy = Policy::new("api", plans)
        .key(key::constant("all"))
        .once_per(key::header("idempotency-key"));
    let layer = RateLimitLayer::new(MemoryStore::new(), policy);
    let remaining = async |request: Builder| {
        let field = send(&layer, request).await;
        let field = field.field("ratelimit").expect("the field");
        field.split([';', '=']).nth(2).expect("r").to_owned()
    };
    assert_eq!(remaining(with_id("a")).await, "1");
    assert_eq!(remaining(with_id("a").header("x-pro", "")).await, "99");
    assert_eq!(remaining(with_id("b").header("x-pro", "")).await, "98");
    assert_eq!(remaining(with_id("b")).await, "0");
}

/// What remains of a policy when requests with these ids, of which some succeed, are completed.
async fn remaining_after(policy: Policy, requests: &[(&'static str, bool)]) -> Vec<(bool, u64)> {
    let store = MemoryStore::new();
    let layer = RateLimitLayer::new(store.clone(), policy.max_repetitions(2));
    let limiter = Limiter::new(store, Policy::new("payments", SlidingLog::per_hour(5)));
    let mut remaining = Vec::new();
    for (id, succeeds) in requests {
        let status = match succeeds {
            true => StatusCode::OK,
            false => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let service = layer.layer(service_fn(move |request: Request<Body>| async move {
            let decision = request.extensions().get::<Decision>().expect("a decision");
            let mut response = Response::new(Body::new());
            *response.status_mut() = status;
            response.extensions_mut().insert(is_repetition(decision));
            Ok::<_, Infallible>(response)
        }));
        let request = with_id(id).body(Body::new()).expect("a good request");
        let response = service.oneshot(request).await.expect("infallible");
        let is_repetition = *response.extensions().get().expect("it was admitted");
        http_body_util::BodyExt::collect(response).await.expect("infallible");
        let peeked = limiter.peek(Key::constant("all")).await.expect("the store answers");
        remaining.push((is_repetition, peeked.remaining()));
    }
    remaining
}

#[tokio::test]
async fn an_id_that_is_charged_later_is_charged_again_after_its_repetitions() {
    let failures = payments(5).charge_if(|completion| !completion.is_success());
    let requests = [
        ("a", true),
        ("a", false),
        ("a", true),
        ("a", false),
        ("a", false),
        ("a", false),
        ("b", false),
    ];
    assert_eq!(
        remaining_after(failures, &requests).await,
        [
            (false, 5),
            (false, 4),
            (true, 4),
            (true, 4),
            (true, 4),
            (false, 3),
            (false, 2)
        ]
    );
}

/// Else the caller would be admitted at once by the ids of requests that wait, and leave before their turns.
#[tokio::test(start_paused = true)]
async fn requests_with_the_id_of_one_that_waits_wait_too() {
    const SECOND: Duration = Duration::from_secs(1);
    let policy = Policy::new("payments", SlidingLog::per_second(1))
        .key(key::constant("all"))
        .wait_up_to(9 * SECOND)
        .once_per(key::header("idempotency-key"));
    let layer = RateLimitLayer::new(MemoryStore::new(), policy);
    let service = layer.layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Body::new()))
    }));
    let start = Instant::now();
    let call = |id: &'static str| {
        let request = with_id(id).body(Body::new()).expect("a good request");
        let response = service.clone().oneshot(request);
        tokio::spawn(async move {
            let response = response.await.expect("infallible");
            assert_eq!(response.status(), StatusCode::OK);
            start.elapsed().as_secs()
        })
    };
    let mut turns = Vec::new();
    for call in ["a", "a", "b", "b", "b"].map(call) {
        turns.push(call.await.expect("a response"));
    }
    // The first is repeated, as it does not wait.
    assert_eq!(turns, [0, 0, 1, 2, 3]);
}

#[tokio::test]
async fn an_id_whose_request_is_refunded_is_counted_again() {
    let successes = payments(5).refund_if(|completion| !completion.is_success());
    let requests = [("a", false), ("a", true), ("a", false), ("a", true), ("a", true)];
    assert_eq!(
        remaining_after(successes, &requests).await,
        [(false, 5), (false, 4), (true, 4), (true, 4), (false, 3)]
    );
}

/// A store that fails while the test sets it to fail.
#[derive(Clone)]
struct Flaky(MemoryStore, Arc<AtomicBool>);

impl Store for Flaky {
    fn id(&self) -> Option<StoreId> {
        self.0.id()
    }

    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        match self.1.load(Ordering::Relaxed) {
            true => Broken::default().decide(requests),
            false => self.0.decide(requests),
        }
    }
}

#[tokio::test]
async fn while_the_store_fails_this_process_has_ids_of_its_own() {
    let store = Flaky(MemoryStore::new(), Arc::default());
    let fails = store.1.clone();
    let policy =
        Policy::new("mails", SlidingLog::per_hour(8)).failure_mode(tower_quota::FailureMode::local_share(1, 4));
    let limiter = Limiter::new(store, policy);
    assert_eq!(checked(&limiter, "a").await, counted(7));

    fails.store(true, Ordering::Relaxed);
    assert_eq!(checked(&limiter, "a").await, counted(1));
    let first = check(&limiter, "b").await;
    assert!(first.store_error().is_some());
    first.take_receipt().refund().await.expect("this process answers");
    assert_eq!(checked(&limiter, "b").await, counted(0));
    // The share is of the limit, and not of the repetitions.
    for _ in 0..10 {
        assert_eq!(checked(&limiter, "b").await, repeated(0));
    }
    assert_eq!(checked(&limiter, "b").await, DENIED);

    fails.store(false, Ordering::Relaxed);
    assert_eq!(checked(&limiter, "a").await, repeated(7));
    assert_eq!(checked(&limiter, "b").await, counted(6));
}

#[tokio::test]
async fn many_ids_evict_each_other_and_no_counts() {
    let store = MemoryStore::builder().capacity(1_000).build();
    let policy = |quota| Policy::new("mails", SlidingLog::per_hour(quota));
    let limiter = Limiter::new(store.clone(), policy(100_000));
    for user in 0..500_u64 {
        let _ = limiter.check(user).await.expect("memory answers");
    }
    for id in 0..5_000_u64 {
        let decision = limiter.check_once("k", id).await.expect("memory answers");
        assert!(decision.is_allowed());
    }
    assert!(store.evictions() > 0);
    for user in 0..500_u64 {
        let peeked = limiter.peek(user).await.expect("memory answers");
        assert_eq!(peeked.remaining(), 99_999, "{user}");
    }
}

/// Whatever is sent, a caller is admitted at most 1 + repetitions times for each request that is counted.
#[tokio::test]
async fn ids_that_a_caller_makes_up_gain_nothing() {
    let limiter = Limiter::new(
        MemoryStore::new(),
        Policy::new("mails", SlidingLog::per_hour(5)).max_repetitions(2),
    );
    let mut rng = fastrand::Rng::with_seed(7);
    let mut admitted = 0;
    let mut ids = HashSet::new();
    for _ in 0..1_000 {
        let id = rng.u64(..8);
        if limiter.check_once("k", id).await.expect("memory answers").is_allowed() {
            admitted += 1;
            ids.insert(id);
        }
    }
    assert!(ids.len() <= 5 && admitted <= 15, "{admitted} with {} ids", ids.len());
    assert!(
        !limiter
            .check_once("k", "new")
            .await
            .expect("memory answers")
            .is_allowed()
    );
}
