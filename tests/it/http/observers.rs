//! The callbacks of an application: which requests each of them observes.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{Router, routing};
use tower_quota::{
    Ban, Decision, Denial, FailureMode, Key, Limit, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog,
    TokenBucket, key,
    store::{ErrorKind, Store},
};

use crate::support::{Broken, Clock, Later, get, send};

/// Two a minute for all callers.
fn policy() -> Policy {
    Policy::new("p", SlidingLog::per_minute(2)).key(key::constant("all"))
}

/// The decisions and failures that a layer has observed.
#[derive(Clone, Default)]
struct Observed(Arc<Mutex<Vec<Decision>>>, Arc<Mutex<Vec<String>>>);

impl Observed {
    fn by(&self, layer: RateLimitLayer) -> RateLimitLayer {
        let (decisions, failures) = (self.0.clone(), self.1.clone());
        layer
            .on_decision(move |decision| {
                let mut decisions = decisions.lock().unwrap_or_else(PoisonError::into_inner);
                decisions.push(decision.clone());
            })
            .on_failure(move |error| {
                let mut failures = failures.lock().unwrap_or_else(PoisonError::into_inner);
                failures.push(error.to_string());
            })
    }

    fn decisions(&self) -> Vec<Decision> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn failures(&self) -> usize {
        std::mem::take(&mut *self.1.lock().unwrap_or_else(PoisonError::into_inner)).len()
    }
}

fn app(layer: RateLimitLayer) -> Router {
    Router::new().route("/", routing::get(async || "hi").layer(layer))
}

async fn statuses<const N: usize>(layer: RateLimitLayer) -> [u16; N] {
    let app = app(layer);
    let mut statuses = [0; N];
    for status in &mut statuses {
        *status = send(&app, get("/")).await.status.as_u16();
    }
    statuses
}

async fn each_decision_is_observed(store: impl Store) {
    let observed = Observed::default();
    let layer = observed.by(RateLimitLayer::new(store, policy()));
    assert_eq!(statuses(layer).await, [200, 200, 429]);

    let decisions = observed.decisions();
    let seen: Vec<_> = decisions
        .iter()
        .map(|decision| (decision.is_allowed(), decision.remaining()))
        .collect();
    assert_eq!(seen, [(true, 1), (true, 0), (false, 0)]);
    assert_eq!(decisions[2].policies().next().map(|policy| policy.name()), Some("p"));
    assert_eq!(observed.failures(), 0);
}

#[tokio::test]
async fn each_decision_is_observed_admitted_or_denied() {
    each_decision_is_observed(Clock::new().memory_store()).await;
}

#[tokio::test]
async fn each_decision_is_observed_of_a_store_that_replies_later() {
    each_decision_is_observed(Later(Clock::new().memory_store())).await;
}

#[tokio::test]
async fn a_denial_without_a_call_of_the_store_is_observed() {
    let observed = Observed::default();
    let all = || key::constant("all");
    let bucket = TokenBucket::per_second(1);
    let expensive = Policy::new("p", bucket).key(all()).cost_fn(|_| 2);
    let chosen = Policy::with_limit_fn("p", move |_| bucket).key(all()).cost(2);
    let closed = Policy::new("q", Limit::DenyAll).key(all());
    for (policy, denial) in [
        (expensive, Denial::CostAboveLimit),
        (chosen, Denial::CostAboveLimit),
        (closed, Denial::DenyAll),
    ] {
        let layer = observed.by(RateLimitLayer::new(Broken::default(), policy));
        assert_eq!(statuses(layer).await, [429]);
        let [decision] = observed.decisions().try_into().expect("one decision");
        assert_eq!(
            decision.policies().next().and_then(|policy| policy.denial()),
            Some(denial)
        );
    }
}

#[tokio::test]
async fn a_denial_is_observed_with_the_jitter_of_its_response() {
    let observed = Observed::default();
    let hour = Duration::from_secs(3_600);
    let trial = Policy::new("trial", SlidingLog::new(2, hour)).key(key::constant("all"));
    let policies = [trial.observe_only(), policy()];
    let layer = RateLimitLayer::new(Clock::new().memory_store(), policies).retry_jitter(hour);
    let app = app(observed.by(layer));
    for _ in 0..2 {
        send(&app, get("/")).await;
    }
    let denied = send(&app, get("/")).await;

    let decision = &observed.decisions()[2];
    let wait = decision.retry_after().expect("a wait");
    let rounded_up = wait.as_nanos().div_ceil(1_000_000_000).to_string();
    assert_eq!(denied.field("retry-after"), Some(&*rounded_up));
    let of_trial = decision.policies().next().and_then(|trial| trial.retry_after());
    assert_eq!(of_trial, Some(hour), "no client waits for it");
}

/// Another caller takes the room for which the request waits.
#[tokio::test(start_paused = true)]
async fn a_denial_after_a_wait_is_observed_with_the_wait_and_the_jitter() {
    let (observed, second) = (Observed::default(), Duration::from_secs(1));
    let policy = || Policy::new("p", SlidingLog::new(1, 10 * second)).key(key::constant("all"));
    let store = MemoryStore::new();
    let layer = RateLimitLayer::new(store.clone(), policy().wait_up_to(15 * second)).retry_jitter(second);
    let app = app(observed.by(layer));
    send(&app, get("/")).await;
    let waits = tokio::spawn(async move { send(&app, get("/")).await });
    tokio::time::sleep(9 * second).await;
    let other = Limiter::new(store, policy());
    let charged = other.request(Key::constant("all")).charge().await;
    assert!(charged.is_ok());
    assert_eq!(waits.await.expect("no panic").status, 429);

    let denied = observed.decisions().pop().expect("two decisions");
    assert!(denied.waited() >= 9 * second, "{:?}", denied.waited());
    assert_ne!(
        denied.retry_after().expect("a wait").subsec_nanos(),
        0,
        "with the jitter"
    );
}

#[tokio::test]
async fn a_request_without_a_decision_is_not_observed() {
    let observed = Observed::default();
    let unlimited = Policy::new("p", Limit::Unlimited).key(key::constant("all"));
    let other_path = policy().apply_if(|parts| parts.uri.path() != "/");
    let no_key = Policy::new("p", SlidingLog::per_minute(2)).key(key::header("x-user-id"));
    for (policy, status) in [(unlimited, 200), (other_path, 200), (no_key, 400)] {
        let layer = observed.by(RateLimitLayer::new(MemoryStore::new(), policy));
        assert_eq!(statuses(layer).await, [status]);
        assert_eq!((observed.decisions().len(), observed.failures()), (0, 0));
    }
}

#[tokio::test]
async fn while_the_store_fails_only_local_decisions_are_observed() {
    for (mode, expected, decisions) in [
        (FailureMode::Local, [200, 200, 429], 3),
        (FailureMode::local_share(1, 2), [200, 429, 429], 3),
        (FailureMode::Open, [200, 200, 200], 0),
        (FailureMode::Closed, [503, 503, 503], 0),
    ] {
        let observed = Observed::default();
        let layer = RateLimitLayer::new(Broken::default(), policy().failure_mode(mode));
        let layer = layer.retry_jitter(Duration::from_secs(1));
        assert_eq!(statuses(observed.by(layer)).await, expected, "{mode}");

        let observed_decisions = observed.decisions();
        assert_eq!(observed_decisions.len(), decisions, "{mode}");
        assert!(
            observed_decisions
                .iter()
                .all(|decision| decision.store_error().is_some())
        );
        assert_eq!(observed.failures(), 3, "{mode}");
    }
}

#[tokio::test]
async fn nested_layers_observe_their_own_decisions() {
    let (outer, inner) = (Observed::default(), Observed::default());
    let store = Clock::new().memory_store();
    let wide = Policy::new("wide", SlidingLog::per_minute(10)).key(key::constant("all"));
    let app =
        app(inner.by(RateLimitLayer::new(store.clone(), policy()))).layer(outer.by(RateLimitLayer::new(store, wide)));
    for status in [200, 200, 429] {
        assert_eq!(send(&app, get("/")).await.status, status);
    }

    for (observed, name, denials) in [(outer, "wide", 0), (inner, "p", 1)] {
        let decisions = observed.decisions();
        let names: Vec<_> = decisions
            .iter()
            .flat_map(Decision::policies)
            .map(|policy| policy.name())
            .collect();
        assert_eq!(names, [name; 3]);
        assert_eq!(
            decisions.iter().filter(|decision| !decision.is_allowed()).count(),
            denials
        );
    }
}

#[tokio::test]
async fn a_limiter_observes_what_counts_and_no_peek() {
    let observed = Arc::new(Mutex::new(Vec::new()));
    let events = observed.clone();
    let limiter = Limiter::new(Clock::new().memory_store(), policy()).on_decision(move |decision| {
        let mut events = events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push((decision.is_allowed(), decision.remaining()));
    });

    assert!(limiter.check("42").await.expect("a decision").is_allowed());
    assert!(limiter.peek("42").await.expect("a decision").is_allowed());
    assert!(
        limiter
            .request("42")
            .cost(1)
            .charge()
            .await
            .expect("a decision")
            .is_allowed()
    );
    assert!(
        !limiter
            .request("42")
            .cost(2)
            .check()
            .await
            .expect("a decision")
            .is_allowed()
    );
    // A peek, by which one more does not fit.
    assert!(
        !limiter
            .request("42")
            .cost(0)
            .check()
            .await
            .expect("a decision")
            .is_allowed()
    );
    limiter.reset("42").await.expect("a reset");
    assert!(limiter.check("42").await.expect("a decision").is_allowed());
    let _ = limiter.acquire("42").await.expect("a permit");
    assert!(limiter.acquire("42").await.is_err());

    let observed = observed.lock().unwrap_or_else(PoisonError::into_inner);
    let of_checks = [(true, 1), (true, 0), (false, 0)];
    let of_others = [(true, 1), (true, 0), (false, 0)];
    assert_eq!(*observed, [of_checks, of_others].concat());
}

#[tokio::test]
async fn a_limiter_whose_store_fails_observes_local_decisions() {
    for (mode, expected) in [
        (FailureMode::Local, 1),
        (FailureMode::Open, 0),
        (FailureMode::Closed, 0),
    ] {
        let observed = Arc::new(Mutex::new(0));
        let events = observed.clone();
        let limiter = Limiter::new(Broken::default(), policy().failure_mode(mode))
            .on_decision(move |_| *events.lock().unwrap_or_else(PoisonError::into_inner) += 1);
        let _ = limiter.check("42").await;
        assert_eq!(
            *observed.lock().unwrap_or_else(PoisonError::into_inner),
            expected,
            "{mode}"
        );
    }
}

#[tokio::test]
async fn a_limiter_observes_each_failure_in_every_mode() {
    for mode in [
        FailureMode::Local,
        FailureMode::local_share(1, 2),
        FailureMode::Open,
        FailureMode::Closed,
    ] {
        let observed = Arc::new(Mutex::new(Vec::new()));
        let events = observed.clone();
        let banning = policy().failure_mode(mode).ban(Ban::by_hand());
        let limiter = Limiter::new(Broken::default(), banning).on_failure(move |error| {
            let mut events = events.lock().unwrap_or_else(PoisonError::into_inner);
            events.push(error.kind());
        });
        let results = [
            limiter.check("42").await.is_ok(),
            limiter.request("42").cost(1).charge().await.is_ok(),
            limiter.peek("42").await.is_ok(),
        ];
        assert_eq!(results, [mode != FailureMode::Closed; 3], "{mode}");
        assert!(limiter.reset("42").await.is_err(), "{mode}");
        assert!(limiter.ban("42", Duration::from_secs(60)).await.is_err(), "{mode}");

        let observed = observed.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(*observed, [ErrorKind::Unreachable; 5], "{mode}");
    }
}

#[tokio::test]
async fn a_limiter_whose_store_replies_observes_no_failure() {
    let limiter = Limiter::new(Later(Clock::new().memory_store()), policy())
        .on_failure(|error| panic!("the store replied, and {error} was observed"));
    for allowed in [true, true, false] {
        assert_eq!(limiter.check("42").await.expect("a decision").is_allowed(), allowed);
    }
}
