//! Limits that are chosen for each request.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{Router, routing::get as route};
use http::{StatusCode, request::Parts};
use tower_quota::{
    Decision, Denial, FailureMode, Key, Limit, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, key,
    store::Store,
};

use crate::support::{
    Algorithm, Broken, Clock, Counted, Log, Received, Redis, connected, get, patient, redis_key, send,
};

/// The limits of two plans.
#[derive(Clone)]
struct Plans {
    free: Limit,
    pro: Limit,
}

impl Plans {
    fn new(free: impl Into<Limit>, pro: impl Into<Limit>) -> Self {
        Self {
            free: free.into(),
            pro: pro.into(),
        }
    }

    /// 4 and 10 in an hour.
    fn hourly() -> Self {
        Self::new(SlidingLog::per_hour(4), SlidingLog::per_hour(10))
    }

    fn of(&self, parts: &Parts) -> Limit {
        match parts.headers.get("plan").map(|plan| plan.as_bytes()) {
            Some(b"pro") => self.pro.clone(),
            Some(b"unlimited") => Limit::Unlimited,
            Some(b"blocked") => Limit::DenyAll,
            Some(b"invalid") => SlidingLog::per_hour(SlidingLog::MAX_QUOTA + 1).into(),
            _ => self.free.clone(),
        }
    }

    /// A policy for the user in a header.
    fn policy(&self) -> Policy {
        let plans = self.clone();
        Policy::with_limit_fn("api", move |parts| plans.of(parts)).key(key::header("user"))
    }

    fn layer(&self, store: impl Store) -> RateLimitLayer {
        RateLimitLayer::new(store, self.policy())
    }
}

fn app(layer: RateLimitLayer) -> Router {
    Router::new().route("/", route(async || "hi").layer(layer))
}

/// Sends a request of user 42, who has this plan now.
async fn request(app: &Router, plan: &str) -> Received {
    send(app, get("/").header("user", "42").header("plan", plan)).await
}

/// The quota and what remains, as the fields of a response have them.
fn fields(received: &Received) -> (u64, u64) {
    let number = |field: &str, name: &str| {
        let value = received.field(field).expect("a field");
        let (_, number) = value.split_once(name).expect("a parameter");
        number
            .split(';')
            .next()
            .and_then(|number| number.parse().ok())
            .expect("a number")
    };
    (number("ratelimit-policy", ";q="), number("ratelimit", ";r="))
}

async fn a_change_of_the_plan_neither_resets_nor_doubles_a_count(store: impl Store, algorithm: Algorithm) {
    let (free, pro) = (algorithm.limit(4), algorithm.limit(8));
    let key = Key::from("k");
    if redis_key("p", &free, &key) != redis_key("p", &pro, &key) {
        // Buckets of other rates have other counts.
        return;
    }
    let app = app(Plans::new(free, pro).layer(store));
    for (plan, admitted, quota, remaining) in [
        ("free", true, 4, 3),
        ("free", true, 4, 2),
        ("pro", true, 8, 5),
        ("pro", true, 8, 4),
        // A downgrade: the four count.
        ("free", false, 4, 0),
        ("pro", true, 8, 3),
        ("pro", true, 8, 2),
        ("free", false, 4, 0),
        ("pro", true, 8, 1),
        ("pro", true, 8, 0),
        ("pro", false, 8, 0),
    ] {
        let received = request(&app, plan).await;
        assert_eq!(
            received.status == StatusCode::OK,
            admitted,
            "{plan} {quota} {remaining}"
        );
        assert_eq!(fields(&received), (quota, remaining), "{plan}");
    }
}

#[tokio::test]
async fn a_change_of_the_plan_neither_resets_nor_doubles_a_count_in_memory() {
    for algorithm in Algorithm::ALL {
        let store = Clock::new().memory_store();
        a_change_of_the_plan_neither_resets_nor_doubles_a_count(store, algorithm).await;
    }
}

#[tokio::test]
async fn a_change_of_the_plan_neither_resets_nor_doubles_a_count_in_redis() {
    for algorithm in Algorithm::ALL {
        let (clock, redis) = (Clock::new(), Redis::start());
        clock.write_to(&redis).await;
        let store = clock.redis_store(&redis).await;
        a_change_of_the_plan_neither_resets_nor_doubles_a_count(store, algorithm).await;
    }
}

#[tokio::test]
async fn the_limit_of_a_request_is_that_of_its_decision_and_of_its_response() {
    let layer = Plans::hourly().layer(Clock::new().memory_store());
    let layer = layer.response_extensions(true);
    let handler = async |decision: Decision| decision.limit().to_string();
    let app = Router::new().route("/", route(handler).layer(layer));

    for (plan, quota) in [("free", 4), ("pro", 10)] {
        let received = request(&app, plan).await;
        assert_eq!(received.body, quota.to_string());
        assert_eq!(
            received.field("ratelimit-policy"),
            Some(&*format!("\"api\";q={quota};w=3600"))
        );
        let decision = received.extensions.get::<Decision>().expect("a decision");
        assert_eq!(
            decision.policies().map(|policy| policy.limit()).collect::<Vec<_>>(),
            [quota]
        );
    }

    let blocked = request(&self::app(Plans::hourly().layer(MemoryStore::new())), "blocked").await;
    assert_eq!(blocked.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(blocked.json()["violated-policies"], serde_json::json!(["api"]));
    let decision = blocked.extensions.get::<Decision>().expect("a decision");
    assert_eq!(
        decision.policies().next().and_then(|policy| policy.denial()),
        Some(Denial::DenyAll)
    );
}

#[tokio::test]
async fn a_cost_is_compared_with_the_limit_of_the_request() {
    let layer = RateLimitLayer::new(MemoryStore::new(), Plans::hourly().policy().cost(6));
    let app = app(layer.clone());
    let denied = request(&app, "free").await;
    assert_eq!(
        (denied.status, denied.field("retry-after")),
        (StatusCode::TOO_MANY_REQUESTS, None)
    );
    assert_eq!(request(&app, "pro").await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_plan_without_a_limit_needs_no_key_and_no_store() {
    let store = Counted::new(MemoryStore::new());
    let app = app(Plans::hourly().layer(store.clone()));
    let received = send(&app, get("/").header("plan", "unlimited")).await;
    assert_eq!(received.status, StatusCode::OK);
    received.assert_silent();
    assert_eq!(store.calls(), 0);
}

#[tokio::test]
async fn an_upgrade_admits_at_once_where_a_denial_is_cached() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let app = app(Plans::hourly().layer(store));
    let mut statuses = Vec::new();
    for plan in ["free", "free", "free", "free", "free", "free", "pro", "free"] {
        statuses.push(request(&app, plan).await.status.as_u16());
    }
    assert_eq!(statuses, [200, 200, 200, 200, 429, 429, 200, 429]);
}

#[tokio::test]
async fn while_the_store_fails_the_limit_of_the_request_applies() {
    let plans = Plans::hourly();
    for (mode, free, pro) in [(FailureMode::Local, 4, 10), (FailureMode::local_share(1, 2), 2, 5)] {
        let layer = RateLimitLayer::new(Broken::default(), plans.policy().failure_mode(mode));
        let app = app(layer);
        let mut admitted = [0, 0];
        for (plan, admitted) in ["free", "pro"].into_iter().zip(&mut admitted) {
            for _ in 0..20 {
                *admitted += u64::from(request(&app, plan).await.status == StatusCode::OK);
            }
        }
        // What the free plan has admitted counts in the other.
        assert_eq!(admitted, [free, pro - free], "{mode}");
    }
}

#[tokio::test]
async fn a_receipt_refunds_what_was_counted_under_another_plan() {
    let layer = Plans::hourly().layer(Clock::new().memory_store());
    let layer = layer.response_extensions(true);
    let handler = async |parts: Parts, decision: Decision| {
        if parts.headers.contains_key("fails") {
            decision.take_receipt().refund().await.expect("memory replies");
        }
    };
    let app = Router::new().route("/", route(handler).layer(layer));

    assert_eq!(fields(&request(&app, "pro").await), (10, 9));
    let failing = get("/").header("user", "42").header("plan", "pro").header("fails", "1");
    assert_eq!(fields(&send(&app, failing).await), (10, 8));
    assert_eq!(fields(&request(&app, "free").await), (4, 2));
}

#[tokio::test]
async fn nested_layers_charge_a_chosen_limit_once() {
    let store = Clock::new().memory_store();
    let layer = || Plans::hourly().layer(store.clone());
    let app = Router::new()
        .route("/", route(async || "hi"))
        .layer(layer())
        .layer(layer());
    assert_eq!(fields(&request(&app, "pro").await), (10, 9));
    assert_eq!(fields(&request(&app, "free").await), (4, 2));
}

#[tokio::test]
async fn an_invalid_limit_refuses_its_request_and_is_logged_once() {
    let log = Log::capture();
    let app = app(Plans::hourly().layer(MemoryStore::new()));
    for _ in 0..3 {
        let refused = request(&app, "invalid").await;
        assert_eq!(refused.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(
            !String::from_utf8_lossy(&refused.body).contains("limit"),
            "the fix is not for callers"
        );
        assert_eq!(request(&app, "free").await.status, StatusCode::OK);
    }
    let text = log.text();
    assert_eq!(text.matches("`.precision(1000)`").count(), 1, "{text}");
    assert!(text.contains("policy `api`"), "{text}");
}

#[tokio::test]
async fn limiters_of_each_plan_share_their_counts() {
    let store = MemoryStore::new();
    let limiter = |limit: Limit| Limiter::new(store.clone(), Policy::new("api", limit));
    let Plans { free, pro } = Plans::hourly();
    assert_eq!(limiter(free.clone()).check("42").await.unwrap().remaining(), 3);
    assert_eq!(limiter(pro).check("42").await.unwrap().remaining(), 8);
    assert_eq!(limiter(free).check("42").await.unwrap().remaining(), 1);

    let error = Limiter::try_new(store, Plans::hourly().policy())
        .unwrap_err()
        .to_string();
    for part in ["`Policy::with_limit_fn`", "`api`", "a limiter of `Plans`"] {
        assert!(error.contains(part), "{error}");
    }
}

/// Sends 40 requests of one user, every other one of another plan, at the same time, and counts what is admitted.
async fn concurrent_requests_of_two_plans_share_one_count(store: impl Store) {
    let app = app(Plans::hourly().layer(store));
    let admitted = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let requests: Vec<_> = (0..40)
        .map(|n| {
            let (app, admitted) = (app.clone(), admitted.clone());
            tokio::spawn(async move {
                let plan = ["free", "pro"][n % 2];
                if request(&app, plan).await.status == StatusCode::OK {
                    admitted[n % 2].fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    for request in requests {
        request.await.expect("no panic");
    }

    let [free, pro] = [0, 1].map(|plan| admitted[plan].load(Ordering::Relaxed));
    assert_eq!(free + pro, 10, "{free} of the free plan");
    assert!(free <= 4, "{free}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_requests_of_two_plans_share_one_count_in_memory() {
    concurrent_requests_of_two_plans_share_one_count(MemoryStore::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_requests_of_two_plans_share_one_count_in_redis() {
    let redis = Redis::start();
    concurrent_requests_of_two_plans_share_one_count(connected(patient(), &redis.url()).await).await;
}
