//! Policies that only observe, alone and beside enforced ones.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{Router, routing::get as route};
use http::StatusCode;
use proptest::{collection::vec, prelude::*};
use tower_quota::{
    Concurrency, Decision, Denial, FailureMode, Headers, Key, Limit, Limiter, MemoryStore, Policy, RateLimitLayer,
    SlidingLog, key,
    store::{Operation, Outcome, Store, StoreFuture, StoreRequest, StoreResponse},
};

use crate::support::{
    Algorithm, Bench, Broken, Clock, Cluster, Counted, Later, Log, Redis, connected, each_store, eventually, get,
    less_patient, patient, send,
};

each_store! {
    it_counts_what_it_would_have_admitted_and_denies_nothing
    its_denial_leaves_the_other_policies_as_they_are
    a_denial_of_the_other_policies_leaves_it_as_it_is
    a_cost_above_its_limit_is_reported_and_admitted
    a_permanent_denial_beside_it_is_still_one_and_it_counts
    a_receipt_refunds_what_it_has_counted_and_no_more
    a_limiter_peeks_charges_and_resets_it_too
    several_observe_apart_from_each_other
    it_is_charged_once_in_nested_layers
    a_layer_that_observed_a_denial_leaves_it_to_an_inner_one
    it_may_observe_a_limit_that_is_chosen_for_each_request
    slots_of_a_request_that_another_policy_denies_are_released
    a_check_is_one_call_of_the_store
}

fn hourly(name: &'static str, quota: u64) -> Policy<()> {
    Policy::new(name, SlidingLog::per_hour(quota))
}

/// What a decision has of a policy: whether it would have denied the request, and what remains.
fn state(decision: &Decision, name: &str) -> (Option<Denial>, u64) {
    let policy = decision
        .policies()
        .find(|policy| policy.name() == name)
        .expect("a policy");
    (policy.denial(), policy.remaining())
}

async fn check(limiter: &Limiter) -> Decision {
    limiter.check("k").await.expect("the store replies")
}

async fn remaining(store: &Arc<dyn Store>, policy: Policy<()>) -> u64 {
    let limiter = Limiter::new(store.clone(), policy);
    limiter.peek("k").await.expect("the store replies").remaining()
}

async fn it_counts_what_it_would_have_admitted_and_denies_nothing(bench: Bench) {
    for algorithm in Algorithm::ALL {
        let candidate = Policy::new(algorithm_name(algorithm), algorithm.limit(2)).observe_only();
        let limiter = Limiter::new(bench.store.clone(), candidate);
        let mut denials = Vec::new();
        for _ in 0..4 {
            let decision = check(&limiter).await;
            assert!(decision.is_allowed());
            assert_eq!((decision.limit(), decision.remaining()), (u64::MAX, u64::MAX));
            assert_eq!(decision.retry_after(), None);
            let policy = decision.policies().next().expect("the policy");
            assert!(policy.is_observed() && !policy.denies());
            assert_eq!(policy.retry_after().is_some(), policy.denial().is_some());
            denials.push((policy.denial(), policy.remaining()));
        }
        let denied = (Some(Denial::QuotaExceeded), 0);
        assert_eq!(denials, [(None, 1), (None, 0), denied, denied]);
    }
}

/// A policy name for each limit, which is of its own even where algorithms are the same.
fn algorithm_name(algorithm: Algorithm) -> String {
    let text = algorithm.limit(2).to_string().to_lowercase();
    text.replace(|char: char| !char.is_ascii_alphanumeric(), "-")
}

async fn its_denial_leaves_the_other_policies_as_they_are(bench: Bench) {
    for (first, observed, enforced) in [(true, "a", "b"), (false, "c", "d")] {
        let mut policies = vec![hourly(observed, 1).observe_only(), hourly(enforced, 3)];
        if !first {
            policies.reverse();
        }
        let limiter = Limiter::new(bench.store.clone(), policies);
        for (allowed, left) in [(true, 2), (true, 1), (true, 0), (false, 0)] {
            let decision = check(&limiter).await;
            assert_eq!(
                (decision.is_allowed(), decision.limit(), decision.remaining()),
                (allowed, 3, left)
            );
            assert_eq!(decision.retry_after().is_some(), !allowed);
            assert_eq!(state(&decision, enforced).1, left);
        }
        assert_eq!(remaining(&bench.store, hourly(observed, 1)).await, 0);
    }
}

async fn a_denial_of_the_other_policies_leaves_it_as_it_is(bench: Bench) {
    let limiter = Limiter::new(
        bench.store.clone(),
        [hourly("enforced", 1), hourly("candidate", 5).observe_only()],
    );
    for (allowed, left) in [(true, 4), (false, 3), (false, 2), (false, 1)] {
        let decision = check(&limiter).await;
        assert_eq!(decision.is_allowed(), allowed);
        assert_eq!(state(&decision, "candidate"), (None, left));
        assert_eq!(
            decision.take_receipt().is_empty(),
            !allowed,
            "a denied request has no receipt"
        );
    }
    assert_eq!(remaining(&bench.store, hourly("candidate", 5)).await, 1);
}

async fn a_cost_above_its_limit_is_reported_and_admitted(bench: Bench) {
    let closed = Policy::new("closed", Limit::DenyAll).observe_only();
    let small = hourly("small", 2).observe_only();
    let limiter = Limiter::new(bench.store.clone(), [closed, hourly("enforced", 5), small]);
    let request = limiter.request("k").cost_of("small", 3);
    let decision = request.check().await.expect("the store replies");
    assert!(decision.is_allowed());
    assert_eq!((decision.limit(), decision.remaining()), (5, 4));
    assert_eq!(state(&decision, "closed").0, Some(Denial::DenyAll));
    assert_eq!(state(&decision, "small").0, Some(Denial::CostAboveLimit));
    assert_eq!(remaining(&bench.store, hourly("small", 2)).await, 2);
}

async fn a_permanent_denial_beside_it_is_still_one_and_it_counts(bench: Bench) {
    let closed = Policy::new("closed", Limit::DenyAll);
    let policies = [closed, hourly("enforced", 5), hourly("candidate", 5).observe_only()];
    let limiter = Limiter::new(bench.store.clone(), policies);
    for left in [4, 3] {
        let decision = check(&limiter).await;
        assert!(!decision.is_allowed());
        assert_eq!(decision.retry_after(), None);
        assert_eq!(state(&decision, "closed").0, Some(Denial::DenyAll));
        assert_eq!(state(&decision, "candidate"), (None, left));
        assert_eq!(
            decision.policies().count(),
            2,
            "nothing is reported of a policy that was not checked"
        );
    }
    assert_eq!(remaining(&bench.store, hourly("enforced", 5)).await, 5);
}

async fn a_receipt_refunds_what_it_has_counted_and_no_more(bench: Bench) {
    let limiter = Limiter::new(
        bench.store.clone(),
        [hourly("enforced", 5), hourly("candidate", 1).observe_only()],
    );
    let (counted, uncounted) = (check(&limiter).await, check(&limiter).await);
    assert_eq!(state(&uncounted, "candidate"), (Some(Denial::QuotaExceeded), 0));

    uncounted.take_receipt().refund().await.expect("the store replies");
    assert_eq!(remaining(&bench.store, hourly("candidate", 1)).await, 0);
    assert_eq!(remaining(&bench.store, hourly("enforced", 5)).await, 4);

    counted.take_receipt().refund().await.expect("the store replies");
    assert_eq!(remaining(&bench.store, hourly("candidate", 1)).await, 1);
    assert_eq!(remaining(&bench.store, hourly("enforced", 5)).await, 5);
}

async fn a_limiter_peeks_charges_and_resets_it_too(bench: Bench) {
    let limiter = Limiter::new(
        bench.store.clone(),
        [hourly("enforced", 9), hourly("candidate", 2).observe_only()],
    );
    let charged = limiter.request("k").cost(5).charge().await.expect("the store replies");
    assert_eq!((charged.remaining(), state(&charged, "candidate")), (4, (None, 0)));

    let peeked = limiter.peek("k").await.expect("the store replies");
    assert!(peeked.is_allowed());
    assert_eq!(
        (peeked.remaining(), state(&peeked, "candidate").0),
        (4, Some(Denial::QuotaExceeded))
    );

    charged.take_receipt().refund().await.expect("the store replies");
    assert_eq!(state(&check(&limiter).await, "candidate"), (None, 1));
    limiter.reset("k").await.expect("the store replies");
    assert_eq!(remaining(&bench.store, hourly("candidate", 2)).await, 2);
}

async fn several_observe_apart_from_each_other(bench: Bench) {
    let policies = [1, 2, 3].map(|quota| hourly(["", "one", "two", "three"][quota], quota as u64).observe_only());
    let limiter = Limiter::new(bench.store.clone(), policies);
    for counted in [
        [true, true, true],
        [false, true, true],
        [false, false, true],
        [false, false, false],
    ] {
        let decision = check(&limiter).await;
        let denials = decision.policies().map(|policy| policy.denial().is_none());
        assert_eq!(denials.collect::<Vec<_>>(), counted);
    }
}

fn app(layers: impl IntoIterator<Item = RateLimitLayer>) -> Router {
    let app = Router::new().route("/", route(async || "hi"));
    let layers = layers.into_iter().map(|layer| layer.response_extensions(true));
    layers.fold(app, Router::layer)
}

async fn it_is_charged_once_in_nested_layers(bench: Bench) {
    let layer = || {
        RateLimitLayer::new(
            bench.store.clone(),
            hourly("candidate", 2).observe_only().key(key::constant("k")),
        )
    };
    let app = app([layer(), layer()]);
    for left in [1, 0, 0] {
        assert_eq!(send(&app, get("/")).await.status, StatusCode::OK);
        let limiter = Limiter::new(bench.store.clone(), hourly("candidate", 2));
        let peeked = limiter.peek(Key::constant("k")).await.expect("the store replies");
        assert_eq!(peeked.remaining(), left);
    }
}

async fn a_layer_that_observed_a_denial_leaves_it_to_an_inner_one(bench: Bench) {
    let policy = || hourly("api", 2).key(key::constant("k"));
    let layer = |policy: Policy| RateLimitLayer::new(bench.store.clone(), policy);
    let app = app([layer(policy()), layer(policy().observe_only())]);
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(send(&app, get("/")).await.status.as_u16());
    }
    assert_eq!(statuses, [200, 200, 429, 429]);
}

async fn it_may_observe_a_limit_that_is_chosen_for_each_request(bench: Bench) {
    let candidate = Policy::with_limit_fn("candidate", |parts| match parts.headers.contains_key("pro") {
        true => SlidingLog::per_hour(3),
        false => SlidingLog::per_hour(1),
    });
    let candidate = candidate.key(key::constant("k")).observe_only();
    let app = app([RateLimitLayer::new(bench.store.clone(), candidate).observed_header(true)]);
    for (pro, observed) in [
        (false, r#""candidate";r=0;t=3600"#),
        (false, r#""candidate";r=0;t=3600;denied"#),
        (true, r#""candidate";r=1;t=3600"#),
    ] {
        let request = if pro { get("/").header("pro", "1") } else { get("/") };
        assert_eq!(send(&app, request).await.field("ratelimit-observed"), Some(observed));
    }
}

async fn slots_of_a_request_that_another_policy_denies_are_released(bench: Bench) {
    let exhausted = hourly("exhausted", 1);
    drop(check(&Limiter::new(bench.store.clone(), exhausted.clone())).await);
    for enforced in [exhausted, Policy::new("closed", Limit::DenyAll), hourly("small", 1)] {
        let candidate = || Policy::new("slots", Concurrency::new(1));
        for policies in [
            [enforced.clone(), candidate().observe_only()],
            [candidate().observe_only(), enforced.clone()],
        ] {
            let limiter = Limiter::new(bench.store.clone(), policies);
            let cost = if enforced.name() == "small" { 2 } else { 1 };
            let request = limiter.request("k").cost_of(enforced.name(), cost);
            let decision = request.check().await.expect("the store replies");
            assert!(!decision.is_allowed(), "{enforced:?}");
            assert_eq!(state(&decision, "slots"), (None, 0));
            assert!(decision.take_slots().is_none());
            eventually("the slot is free", async || {
                remaining(&bench.store, candidate()).await == 1
            })
            .await;
        }
    }
}

async fn a_check_is_one_call_of_the_store(bench: Bench) {
    let store = Counted::new(bench.store.clone());
    let policies = [
        hourly("enforced", 5),
        hourly("one", 5).observe_only(),
        hourly("two", 5).observe_only(),
    ];
    let limiter = Limiter::new(store.clone(), policies);
    let _ = check(&limiter).await;
    assert_eq!(store.calls(), 1);
}

#[tokio::test]
async fn a_check_is_one_script_call() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let policies = [
        hourly("enforced", 2),
        hourly("one", 5).observe_only(),
        hourly("two", 1).observe_only(),
    ];
    let limiter = Limiter::new(store, policies);

    let _ = check(&limiter).await;
    let before = redis.script_calls().await;
    for _ in 0..5 {
        let _ = check(&limiter).await;
    }
    assert_eq!(redis.script_calls().await - before, 5);
}

#[tokio::test]
async fn a_cached_denial_hides_no_request_from_it() {
    let redis = Redis::start();
    let store: Arc<dyn Store> = Arc::new(connected(patient(), &redis.url()).await);
    let enforced = Limiter::new(store.clone(), hourly("enforced", 1));
    let beside = Limiter::new(
        store.clone(),
        [hourly("enforced", 1), hourly("candidate", 9).observe_only()],
    );
    // The second denial is one of the cache.
    for allowed in [true, false, false] {
        assert_eq!(check(&enforced).await.is_allowed(), allowed);
    }
    for left in [8, 7, 6, 5] {
        let decision = check(&beside).await;
        assert!(!decision.is_allowed());
        assert_eq!(state(&decision, "candidate"), (None, left));
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_wait_it_has_its_place_among_the_policies() {
    let waits = hourly("waits", 1).wait_up_to(Duration::from_secs(7_200));
    let limiter = Limiter::new(MemoryStore::new(), [hourly("trial", 5).observe_only(), waits]);
    assert!(check(&limiter).await.is_allowed());
    let waited = limiter.acquire("k").await.expect("there is room in an hour");
    assert_eq!(remaining_of(&waited), [("trial", 3), ("waits", 0)]);
}

#[tokio::test]
async fn responses_do_not_mention_it_by_default() {
    let candidate = || hourly("candidate", 1).observe_only().key(key::constant("k"));
    let alone = app([RateLimitLayer::new(MemoryStore::new(), candidate())]);
    for _ in 0..3 {
        let received = send(&alone, get("/")).await;
        assert_eq!(received.status, StatusCode::OK);
        received.assert_silent();
        assert_eq!(received.field("ratelimit-observed"), None);
        let decision = received.extensions.get::<Decision>().expect("a decision");
        assert_eq!(decision.policies().count(), 1);
    }

    let enforced = hourly("enforced", 2).key(key::constant("k"));
    let store = Clock::new().memory_store();
    let beside = app([RateLimitLayer::new(store, [candidate(), enforced])]);
    for (status, left) in [(200, 1), (200, 0), (429, 0)] {
        let received = send(&beside, get("/")).await;
        assert_eq!(received.status.as_u16(), status);
        assert_eq!(received.field("ratelimit-policy"), Some(r#""enforced";q=2;w=3600"#));
        assert_eq!(
            received.field("ratelimit"),
            Some(&*format!(r#""enforced";r={left};t=3600"#))
        );
        if status == 429 {
            assert_eq!(received.json()["violated-policies"], serde_json::json!(["enforced"]));
        }
    }
}

#[tokio::test]
async fn a_header_shows_it_by_choice_on_admissions_and_denials() {
    let policies = || {
        [
            hourly("enforced", 2).key(key::constant("k")),
            hourly("one", 1).observe_only().key(key::constant("k")),
            hourly("three", 3).observe_only().key(key::constant("k")),
        ]
    };
    let layer = RateLimitLayer::new(Clock::new().memory_store(), policies()).observed_header(true);
    let app = app([layer]);
    for (status, observed) in [
        (200, r#""one";r=0;t=3600, "three";r=2;t=3600"#),
        (200, r#""one";r=0;t=3600;denied, "three";r=1;t=3600"#),
        (429, r#""one";r=0;t=3600;denied, "three";r=0;t=3600"#),
    ] {
        let received = send(&app, get("/")).await;
        assert_eq!(received.status.as_u16(), status);
        assert_eq!(received.field("ratelimit-observed"), Some(observed));
        assert!(
            received
                .field("ratelimit")
                .is_some_and(|state| state.starts_with(r#""enforced";"#))
        );
    }
}

#[tokio::test]
async fn a_header_shows_it_without_other_fields() {
    let one = hourly("one", 1).observe_only().key(key::constant("k"));
    let layer = RateLimitLayer::new(Clock::new().memory_store(), one).observed_header(true);
    let received = send(&app([layer.headers(Headers::None)]), get("/")).await;
    assert_eq!(received.field("ratelimit-observed"), Some(r#""one";r=0;t=3600"#));
    received.assert_silent();
}

#[tokio::test]
async fn while_the_store_fails_it_rejects_no_request() {
    let candidate = |mode| {
        hourly("candidate", 1)
            .observe_only()
            .failure_mode(mode)
            .key(key::constant("k"))
    };
    let enforced = |mode| hourly("enforced", 2).failure_mode(mode).key(key::constant("k"));
    let (local, open, closed) = (FailureMode::Local, FailureMode::Open, FailureMode::Closed);
    // What remains for the candidate after each of three requests, if this process counts it.
    let counted = [
        Some((None, 0)),
        Some((Some(Denial::QuotaExceeded), 0)),
        Some((Some(Denial::QuotaExceeded), 0)),
    ];
    for (policies, statuses, observed) in [
        (vec![candidate(closed)], [200; 3], [None; 3]),
        (vec![candidate(open)], [200; 3], [None; 3]),
        (vec![candidate(local)], [200; 3], counted),
        (vec![candidate(closed), enforced(local)], [200, 200, 429], [None; 3]),
        (vec![candidate(local), enforced(open)], [200; 3], counted),
        (vec![candidate(local), enforced(local)], [200, 200, 429], counted),
        (vec![candidate(local), enforced(closed)], [503; 3], [None; 3]),
    ] {
        for later in [false, true] {
            let store: Arc<dyn Store> = match later {
                true => Arc::new(Later(Broken::default())),
                false => Arc::new(Broken::default()),
            };
            let app = app([RateLimitLayer::new(store, policies.clone())]);
            for (status, observed) in statuses.into_iter().zip(observed) {
                let received = send(&app, get("/")).await;
                assert_eq!(received.status.as_u16(), status, "{policies:?}");
                let decision = received.extensions.get::<Decision>();
                let candidate = decision.and_then(|decision| {
                    let policy = decision.policies().find(|policy| policy.is_observed())?;
                    Some((policy.denial(), policy.remaining()))
                });
                assert_eq!(candidate, observed, "{policies:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_permanent_denial_is_one_while_the_store_fails_too() {
    let closed = Policy::new("closed", Limit::DenyAll).failure_mode(FailureMode::Closed);
    let limiter = Limiter::new(Broken::default(), [closed, hourly("candidate", 5).observe_only()]);
    let decision = limiter.check("k").await.expect("a denial");
    assert!(!decision.is_allowed());
    assert_eq!(state(&decision, "candidate"), (None, 4));

    let closed = hourly("closed", 5).failure_mode(FailureMode::Closed);
    let limiter = Limiter::new(Broken::default(), [closed, hourly("small", 2)]);
    let decision = limiter
        .request("k")
        .cost_of("small", 3)
        .check()
        .await
        .expect("a denial");
    assert!(!decision.is_allowed());
    assert_eq!(state(&decision, "small").0, Some(Denial::CostAboveLimit));

    let small = hourly("small", 2).observe_only();
    let limiter = Limiter::new(Broken::default(), [hourly("enforced", 5), small]);
    let request = limiter.request("k").cost_of("small", 3);
    let decision = request.check().await.expect("this process counts");
    assert!(decision.is_allowed());
    assert_eq!(state(&decision, "small").0, Some(Denial::CostAboveLimit));
}

#[tokio::test]
async fn while_the_store_fails_slots_of_a_denied_request_are_released() {
    for enforced in [hourly("enforced", 1), Policy::new("closed", Limit::DenyAll)] {
        let candidate = Policy::new("slots", Concurrency::new(1)).observe_only();
        let limiter = Limiter::new(Broken::default(), [enforced, candidate]);
        drop(check(&limiter).await);
        for _ in 0..3 {
            let decision = check(&limiter).await;
            assert!(!decision.is_allowed());
            assert_eq!(state(&decision, "slots"), (None, 0));
        }
    }
}

/// A store that counts everything, and whose replies to the checks of policies that observe are lost.
struct PartlyUnanswered(MemoryStore);

impl Store for PartlyUnanswered {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let response = self.0.decide(requests).try_ready().expect("memory replies at once");
        let [first, alone @ ..] = requests else {
            unreachable!("there is a request");
        };
        if first.operation() != Operation::Check || alone.is_empty() {
            return StoreFuture::ready(response);
        }
        let response = response.expect("memory replies");
        let unknown = alone.iter().map(|_| Outcome::new(false, []));
        let outcomes = [response.outcomes()[0].clone()].into_iter().chain(unknown);
        StoreFuture::ready(Ok(StoreResponse::new(response.server_time, outcomes)))
    }
}

#[tokio::test]
async fn slots_that_may_have_been_taken_are_released_when_its_own_outcome_is_unknown() {
    let store = MemoryStore::new();
    let slots = || Policy::new("slots", Concurrency::new(1));
    let limiter = Limiter::new(
        PartlyUnanswered(store.clone()),
        [hourly("enforced", 1), slots().observe_only()],
    );
    let store: Arc<dyn Store> = Arc::new(store);
    for (allowed, left) in [(true, 0), (false, 0)] {
        let decision = check(&limiter).await;
        assert_eq!(decision.is_allowed(), allowed);
        assert_eq!(remaining_of(&decision), [("enforced", left)]);
        assert_eq!(remaining(&store, slots()).await, 1);
    }
}

#[tokio::test]
async fn a_request_without_its_key_is_admitted_uncounted() {
    let log = Log::capture();
    let by_user = hourly("users", 1).observe_only().key(key::header("user"));
    let by_peer = hourly("peers", 1)
        .observe_only()
        .key(key::extension("peer", |peer: &u64| *peer));
    let invalid = Policy::with_limit_fn("invalid", |_| SlidingLog::per_hour(SlidingLog::MAX_QUOTA + 1));
    let invalid = invalid.observe_only().key(key::constant("k"));
    let enforced = hourly("enforced", 9).key(key::constant("k"));
    let app = app([RateLimitLayer::new(
        MemoryStore::new(),
        [by_user, enforced, by_peer, invalid],
    )]);
    for _ in 0..2 {
        let received = send(&app, get("/")).await;
        assert_eq!(received.status, StatusCode::OK);
        let decision = received.extensions.get::<Decision>().expect("a decision");
        assert_eq!(
            decision.policies().map(|policy| policy.name()).collect::<Vec<_>>(),
            ["enforced"]
        );
    }
    for policy in ["peers", "invalid"] {
        let lines = log.text();
        let mut lines = lines
            .lines()
            .filter(|line| line.contains("cannot be determined") && line.contains(policy));
        assert!(
            lines.next().is_some() && lines.next().is_none(),
            "{policy}: {}",
            log.text()
        );
    }
}

#[tokio::test]
async fn callbacks_see_what_it_would_have_done() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = seen.clone();
    let candidate = hourly("candidate", 1).observe_only().key(key::constant("k"));
    let layer = RateLimitLayer::new(MemoryStore::new(), candidate).on_decision(move |decision| {
        notes
            .lock()
            .unwrap()
            .push((decision.is_allowed(), state(decision, "candidate").0));
    });
    let app = app([layer]);
    for _ in 0..2 {
        send(&app, get("/")).await;
    }
    assert_eq!(
        *seen.lock().unwrap(),
        [(true, None), (true, Some(Denial::QuotaExceeded))]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_requests_are_counted_exactly_by_both() {
    let redis = Redis::start();
    let redis: Arc<dyn Store> = Arc::new(connected(patient(), &redis.url()).await);
    for store in [redis, Arc::new(MemoryStore::new())] {
        let policies = [hourly("enforced", 10), hourly("candidate", 25).observe_only()];
        let limiter = Limiter::new(store, policies);
        let counts = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let checks: Vec<_> = (0..60)
            .map(|_| {
                let (limiter, counts) = (limiter.clone(), counts.clone());
                tokio::spawn(async move {
                    let decision = check(&limiter).await;
                    let observed = state(&decision, "candidate").0.is_none();
                    for (count, counts) in counts.iter().zip([decision.is_allowed(), observed]) {
                        count.fetch_add(u64::from(counts), Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for check in checks {
            check.await.expect("no panic");
        }
        let counts = [0, 1].map(|policy: usize| counts[policy].load(Ordering::Relaxed));
        assert_eq!(counts, [10, 25]);
    }
}

proptest! {
    /// Decisions of two limits at random times, with and without policies that observe beside them.
    #[test]
    fn it_never_changes_a_joint_decision(
        algorithm in 0..Algorithm::ALL.len(),
        requests in vec((0_u64..4_000_000, 1_u64..4), 1..30),
    ) {
        let clock = Clock::new();
        let algorithm = Algorithm::ALL[algorithm];
        let enforced = || [Policy::new("a", algorithm.limit(4)), Policy::new("b", SlidingLog::per_minute(7))];
        let observed = [Policy::new("c", algorithm.limit(2)).observe_only(), hourly("d", 5).observe_only()];
        let apart = Limiter::new(clock.memory_store(), enforced());
        let beside = Limiter::new(clock.memory_store(), [enforced().to_vec(), observed.clone().to_vec()].concat());
        let alone = observed.map(|policy| Limiter::new(clock.memory_store(), policy));

        for (passed, cost) in requests {
            clock.set(clock.now() + passed);
            let decide = |limiter: &Limiter| {
                let check = std::pin::pin!(limiter.request("k").cost(cost).check());
                let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                match check.poll(&mut cx) {
                    std::task::Poll::Ready(decision) => decision.expect("memory replies"),
                    std::task::Poll::Pending => unreachable!("memory replies at once"),
                }
            };
            let (apart, beside) = (decide(&apart), decide(&beside));
            let summary = |decision: &Decision| {
                let (limit, remaining) = (decision.limit(), decision.remaining());
                (decision.is_allowed(), limit, remaining, decision.retry_after(), decision.reset_after())
            };
            prop_assert_eq!(summary(&apart), summary(&beside));
            for alone in &alone {
                let alone = decide(alone);
                let policy = alone.policies().next().expect("a policy");
                prop_assert_eq!(state(&beside, policy.name()), (policy.denial(), policy.remaining()));
            }
        }
    }
}

/// The names of the policies of a decision, and what remains of each.
fn remaining_of(decision: &Decision) -> Vec<(&str, u64)> {
    let policies = decision.policies();
    policies.map(|policy| (policy.name(), policy.remaining())).collect()
}

#[tokio::test]
async fn while_the_node_of_its_key_is_down_the_others_are_decided_as_without_it() {
    // With one dead node, another one that is busy for so long is taken for dead too.
    let mut cluster = Cluster::start_patient().await;
    let store = connected(less_patient().deny_cache(false), &cluster.url()).await;
    cluster.serves(&store).await;
    let [one, two, three] = cluster.keys().await;
    // In the slots of these primaries.
    let by = |key: &str| {
        let key = Key::from(key);
        key::from_fn(move |_| key.clone())
    };
    let enforced = || hourly("enforced", 4).failure_mode(FailureMode::Closed).key(by(&one));
    let candidate = |name, key: &str| hourly(name, 9).observe_only().key(by(key));
    let failures = Arc::new(AtomicU64::new(0));
    let observed = failures.clone();
    let policies = [candidate("second", &two), enforced(), candidate("third", &three)];
    let layer = RateLimitLayer::new(store.clone(), policies).on_failure(move |_| {
        observed.fetch_add(1, Ordering::Relaxed);
    });
    let (app, alone) = (app([layer]), app([RateLimitLayer::new(store, enforced())]));
    let decided = async |app: &Router| {
        let received = send(app, get("/")).await;
        let decision = received.extensions.get::<Decision>().cloned();
        (received.status.as_u16(), decision)
    };

    let (status, decision) = decided(&app).await;
    let decision = decision.expect("a decision");
    assert_eq!(status, 200);
    assert_eq!(remaining_of(&decision), [("second", 8), ("enforced", 3), ("third", 8)]);

    cluster.primaries[1].kill();
    for (number, status, remaining) in [(2, 200, 2), (3, 200, 1), (4, 200, 0), (5, 429, 0), (6, 429, 0)] {
        let (answered, decision) = decided(&app).await;
        let decision = decision.expect("a decision");
        assert_eq!(answered, status, "{decision:?}");
        // One that observes counts what an enforced one denies, too.
        assert_eq!(
            remaining_of(&decision),
            [("enforced", remaining), ("third", 9 - number)]
        );
        assert!(decision.store_error().is_none());
    }
    assert_eq!(failures.load(Ordering::Relaxed), 0);
    assert_eq!(decided(&alone).await.0, 429);

    // The node of the enforced one decides about it, with or without the others.
    cluster.primaries[0].kill();
    for app in [&app, &alone] {
        assert_eq!(decided(app).await.0, 503);
    }
    assert!(failures.load(Ordering::Relaxed) > 0);
}

#[tokio::test]
async fn an_error_on_its_key_leaves_the_others_as_they_are() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let enforced = hourly("enforced", 4).failure_mode(FailureMode::Closed);
    let limiter = Limiter::new(store, [enforced, hourly("candidate", 9).observe_only()]);
    assert_eq!(
        remaining_of(&check(&limiter).await),
        [("enforced", 3), ("candidate", 8)]
    );

    let keys: Vec<String> = redis.command("KEYS", ["*:candidate:*"]).await;
    let [key] = &keys[..] else { panic!("one key: {keys:?}") };
    redis.command::<()>("SET", [key, "no log"]).await;
    for remaining in [2, 1, 0] {
        let decision = check(&limiter).await;
        assert!(decision.is_allowed() && decision.store_error().is_none());
        assert_eq!(remaining_of(&decision), [("enforced", remaining)]);
    }
    assert!(!check(&limiter).await.is_allowed());

    // Where nothing is enforced beside it, its own failure mode applies.
    let alone = Limiter::new(
        connected(patient(), &redis.url()).await,
        hourly("candidate", 9).observe_only(),
    );
    let decision = check(&alone).await;
    assert!(decision.store_error().is_some());
    assert_eq!(remaining_of(&decision), [("candidate", 8)]);
}
