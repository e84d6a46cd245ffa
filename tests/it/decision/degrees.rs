//! Requests that are near a limit, in every store.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, routing};
use tower_quota::{
    Decision, FailureMode, Headers, Key, Limiter, MemoryStore, Policies, Policy, RateLimitLayer, SlidingLog, Unkeyed,
    key,
};

use crate::support::{Algorithm, Bench, Broken, each_store, get, send};

each_store! {
    a_degree_is_the_number_of_thresholds_that_are_reached
    the_cost_of_the_request_is_included
    a_denial_by_another_policy_leaves_a_degree_as_it_is
}

fn policy(name: &'static str, quota: u64) -> Policy<Unkeyed> {
    Policy::new(name, SlidingLog::per_minute(quota))
}

async fn degrees(limiter: &Limiter, cost: u64) -> (bool, usize, Vec<usize>) {
    let decision = limiter.check_n("k", cost).await.expect("the store replies");
    let degrees = decision.policies().map(|policy| policy.degree()).collect();
    assert_eq!(decision.degree() > 0, decision.degree() > 0);
    (decision.is_allowed(), decision.degree(), degrees)
}

async fn a_degree_is_the_number_of_thresholds_that_are_reached(bench: Bench) {
    for algorithm in Algorithm::ALL {
        let policy = Policy::new("test", algorithm.limit(10)).warn_at(0.8).warn_at(0.3);
        let limiter = Limiter::new(bench.store.clone(), policy);
        limiter.reset("k").await.expect("the store replies");
        let mut reached = Vec::new();
        for _ in 0..11 {
            let (_, degree, of_policies) = degrees(&limiter, 1).await;
            assert_eq!(of_policies, [degree]);
            reached.push(degree);
        }
        assert_eq!(reached, [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2], "{}", algorithm.limit(10));
        assert_eq!(limiter.peek("k").await.expect("the store replies").degree(), 2);
    }
}

async fn the_cost_of_the_request_is_included(bench: Bench) {
    let limiter = Limiter::new(bench.store.clone(), policy("test", 10).warn_at(0.5).warn_at(1.0));
    assert_eq!(degrees(&limiter, 5).await, (true, 1, vec![1]));
    // It does not fit, and nothing more is used.
    assert_eq!(degrees(&limiter, 6).await, (false, 2, vec![2]));
    assert_eq!(degrees(&limiter, 4).await, (true, 1, vec![1]));
    assert_eq!(degrees(&limiter, 1).await, (true, 2, vec![2]));
    bench.advance(Duration::from_secs(60)).await;
    assert_eq!(degrees(&limiter, 4).await, (true, 0, vec![0]));
}

async fn a_denial_by_another_policy_leaves_a_degree_as_it_is(bench: Bench) {
    let policies = [
        policy("small", 1).warn_at(0.5),
        policy("large", 4).warn_at(0.5),
        policy("silent", 4),
    ];
    let limiter = Limiter::new(bench.store.clone(), policies);
    assert_eq!(degrees(&limiter, 1).await, (true, 1, vec![1, 0, 0]));
    assert_eq!(degrees(&limiter, 1).await, (false, 1, vec![1, 0, 0]));
}

#[tokio::test]
async fn a_policy_that_observes_has_a_degree_of_its_own() {
    let policies = [
        policy("candidate", 1).warn_at(0.5).observe_only(),
        policy("enforced", 4).warn_at(0.5),
    ];
    let limiter = Limiter::new(MemoryStore::new(), policies);
    for expected in [(true, 0, vec![1, 0]), (true, 1, vec![1, 1])] {
        assert_eq!(degrees(&limiter, 1).await, expected);
    }
}

#[tokio::test]
async fn a_share_of_a_limit_has_its_own_degrees_while_the_store_fails() {
    let policy = policy("test", 40)
        .warn_at(0.5)
        .warn_at(1.0)
        .failure_mode(FailureMode::local_share(1, 10));
    let limiter = Limiter::new(Broken::default(), policy);
    for degree in [0, 1, 1, 2, 2] {
        assert_eq!(degrees(&limiter, 1).await.1, degree);
    }
}

fn app(layer: RateLimitLayer) -> Router {
    Router::new().route("/", routing::get(async || "hi")).layer(layer)
}

#[tokio::test]
async fn a_callback_sees_the_degree_and_a_header_is_added_by_choice() {
    let seen: Arc<Mutex<Vec<usize>>> = Arc::default();
    let observer = seen.clone();
    let layer = |policy: Policy<Unkeyed>| RateLimitLayer::new(MemoryStore::new(), policy.key(key::constant("k")));
    let observed = layer(policy("test", 2).warn_at(1.0))
        .on_decision(move |decision: &Decision| observer.lock().expect("no panic").push(decision.degree()));
    let silent = app(observed.clone());
    assert_eq!(send(&silent, get("/")).await.field("ratelimit-degree"), None);
    let shown = app(observed.degree_header(true).headers(Headers::None));
    for (status, degree) in [(200, "1"), (429, "1")] {
        let received = send(&shown, get("/")).await;
        assert_eq!(received.status.as_u16(), status);
        assert_eq!(received.field("ratelimit-degree"), Some(degree));
    }
    assert_eq!(*seen.lock().expect("no panic"), [0, 1, 1]);

    let without_thresholds = app(layer(policy("test", 2)).degree_header(true));
    assert_eq!(
        send(&without_thresholds, get("/")).await.field("ratelimit-degree"),
        None
    );
}

#[tokio::test]
async fn of_nested_layers_the_header_has_the_largest_degree() {
    for (outer, inner) in [(0.1, 0.9), (0.9, 0.1)] {
        let layer = |name, threshold| {
            let policy = policy(name, 2).warn_at(threshold).key(key::constant("k"));
            RateLimitLayer::new(MemoryStore::new(), policy).degree_header(true)
        };
        let app = app(layer("inner", inner)).layer(layer("outer", outer));
        assert_eq!(send(&app, get("/")).await.field("ratelimit-degree"), Some("1"));
    }
}

#[tokio::test]
async fn files_have_thresholds_which_those_in_code_replace() {
    let file = |line: &str| Policies::from_toml(&format!("[policies.api]\nlimit = \"sliding-log 4/min\"\n{line}\n"));
    let degrees_of = async |policy| {
        let limiter = Limiter::new(MemoryStore::new(), policy);
        let mut reached = Vec::new();
        for _ in 0..4 {
            let key = Key::from("k");
            reached.push(limiter.check(key).await.expect("memory replies").degree());
        }
        reached
    };
    for (line, expected) in [
        ("", [0, 0, 0, 0]),
        ("warn-at = 0.5", [0, 1, 1, 1]),
        ("warn-at = 1", [0, 0, 0, 1]),
        ("warn-at = [0.75, 0.5]", [0, 1, 2, 2]),
    ] {
        let policy = file(line).and_then(|file| file.unkeyed("api")).expect(line);
        assert_eq!(degrees_of(policy.clone()).await, expected, "{line}");
        assert_eq!(degrees_of(policy.warn_at(0.25)).await, [1, 1, 1, 1], "{line}");
    }
    for wrong in [
        "warn-at = 80",
        "warn-at = 0",
        "warn-at = []",
        "warn-at = \"0.8\"",
        "warn-at = [0.5, -1]",
    ] {
        let error = file(wrong).expect_err(wrong).to_string();
        assert!(
            error.contains("line 3") && error.contains("fraction") || error.contains("empty list"),
            "{error}"
        );
    }
}
