//! The metrics, as Prometheus would scrape them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    pin::pin,
    sync::Mutex,
    task::{Context, Waker},
    time::{Duration, SystemTime},
};

use ::metrics::{
    Counter, Gauge, Histogram, Key as MetricKey, KeyName, LocalRecorderGuard, Metadata, Recorder, SharedString, Unit,
    set_default_local_recorder, with_local_recorder,
};
use axum::{Router, extract::Request, response::Response, routing::get as route};
use http::request::Parts;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::{runtime::Builder, task::JoinSet, time::sleep};
use tower::ServiceExt;
use tower_quota::{
    AcquireError, Ban, ClientLibrary, Concurrency, FailureMode, Limit, Limiter, MemoryStore, Plans, Policies, Policy,
    RateLimitLayer, RedisStore, SlidingLog, key,
    response::Problem,
    store::{ErrorKind, Operation, Store, StoreError, StoreFuture, StoreRequest},
};

use crate::support::{Broken, Later, Redis, connected, each_client, eventually, get, get_from, patient, send};

#[path = "../../../examples/metrics.rs"]
#[allow(dead_code)]
mod example;

/// A recorder for this thread, and what it exposes.
struct Metrics {
    handle: PrometheusHandle,
    _guard: LocalRecorderGuard<'static>,
}

impl Metrics {
    fn install() -> Self {
        let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
        Self {
            handle: recorder.handle(),
            _guard: set_default_local_recorder(recorder),
        }
    }

    /// The values of all series, by their names with labels.
    fn series(&self) -> BTreeMap<String, f64> {
        let text = self.handle.render();
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let values = lines.map(|line| {
            let (name, value) = line.rsplit_once(' ').expect("a name and a value");
            (name.to_owned(), value.parse().expect("a number"))
        });
        values.collect()
    }

    #[track_caller]
    fn value(&self, series: &str) -> f64 {
        let all = self.series();
        *all.get(series)
            .unwrap_or_else(|| panic!("no {series}; there are {:#?}", all.keys()))
    }

    /// The outcomes of a policy that are not 0.
    fn outcomes(&self, policy: &str) -> Vec<(String, f64)> {
        let begin = format!("tower_quota_decisions_total{{policy=\"{policy}\",outcome=\"");
        let of_policy = self.series().into_iter().filter_map(|(name, value)| {
            let outcome = name.strip_prefix(&begin)?.strip_suffix("\"}")?;
            (value > 0.0).then(|| (outcome.to_owned(), value))
        });
        of_policy.collect()
    }

    #[track_caller]
    fn assert_outcomes(&self, policy: &str, expected: &[(&str, f64)]) {
        let expected: Vec<_> = expected
            .iter()
            .map(|(outcome, count)| ((*outcome).to_owned(), *count))
            .collect();
        assert_eq!(self.outcomes(policy), expected);
    }

    /// How many requests of a policy wait, how many were admitted after a wait, and the callers of how many have left.
    #[track_caller]
    fn assert_waits(&self, policy: &str, expected: [f64; 3]) {
        let series = [
            "requests_waiting",
            "wait_duration_seconds_count",
            "left_while_waiting_total",
        ];
        let all = self.series();
        let values = series.map(|name| all.get(&format!("tower_quota_{name}{{policy=\"{policy}\"}}")));
        // A histogram has no series before its first value.
        assert_eq!(values.map(|value| value.copied().unwrap_or_default()), expected);
    }
}

/// So many a minute for all callers.
fn policy(quota: u64) -> Policy {
    Policy::new("api", SlidingLog::per_minute(quota)).key(key::constant("all"))
}

fn app(layer: RateLimitLayer) -> Router {
    Router::new().fallback(route(async || "hi")).layer(layer)
}

async fn send_to(app: &Router, paths: &[&str]) {
    for path in paths {
        send(app, get(path)).await;
    }
}

fn is(path: &'static str) -> impl Fn(&Parts) -> bool + Send + Sync + 'static {
    move |parts| parts.uri.path() == path
}

async fn redis_store(redis: &Redis, library: ClientLibrary) -> RedisStore {
    connected(patient().client_library(library), &redis.url()).await
}

// Decisions.

/// A client selects the format of the response by its content type, and so the HTTP status. The metrics do not depend on it.
#[tokio::test]
async fn a_denial_counts_as_limited_in_every_format() {
    let metrics = Metrics::install();
    let [negotiated, without_grpc] = ["negotiated", "without-grpc"].map(|name| {
        let policy = Policy::new(name, SlidingLog::per_minute(1)).key(key::constant("all"));
        RateLimitLayer::new(MemoryStore::new(), policy)
    });
    let app = |layer| Router::new().fallback(async || "hi").layer(layer);
    let formats = [
        (app(negotiated), "negotiated", 200),
        (app(without_grpc.format(Problem)), "without-grpc", 429),
    ];
    for (app, policy, of_grpc) in formats {
        let mut statuses = Vec::new();
        for content_type in [
            "application/json",
            "application/json",
            "application/grpc",
            "application/grpc-web",
        ] {
            let request = get("/").method("POST").header("content-type", content_type);
            statuses.push(send(&app, request).await.status.as_u16());
        }
        assert_eq!(statuses, [200, 429, of_grpc, of_grpc], "{policy}");
        metrics.assert_outcomes(policy, &[("admitted", 1.0), ("limited", 3.0)]);
    }
}

async fn counts_the_decisions_of_a_layer_and_a_limiter(store: impl Store + Clone) {
    let metrics = Metrics::install();
    send_to(&app(RateLimitLayer::new(store.clone(), policy(2))), &["/"; 5]).await;
    metrics.assert_outcomes("api", &[("admitted", 2.0), ("limited", 3.0)]);
    assert_eq!(metrics.value("tower_quota_check_duration_seconds_count"), 5.0);

    let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_minute(1)));
    for _ in 0..3 {
        let _ = limiter.check("42").await.expect("the store replies");
    }
    // These decide nothing.
    let _ = limiter.peek("42").await.expect("the store replies");
    let _ = limiter.request("42").cost(1).charge().await.expect("the store replies");
    limiter.reset("42").await.expect("the store replies");
    metrics.assert_outcomes("mails", &[("admitted", 1.0), ("limited", 2.0)]);
}

#[tokio::test]
async fn decisions_are_counted_in_memory() {
    counts_the_decisions_of_a_layer_and_a_limiter(MemoryStore::new()).await;
}

#[tokio::test]
async fn decisions_are_counted_that_come_later() {
    counts_the_decisions_of_a_layer_and_a_limiter(Later(MemoryStore::new())).await;
}

async fn decisions_are_counted_in_redis(library: ClientLibrary) {
    let redis = Redis::start();
    counts_the_decisions_of_a_layer_and_a_limiter(redis_store(&redis, library).await).await;
}

#[tokio::test]
async fn a_denial_without_a_call_of_the_store_is_counted() {
    for observed in [false, true] {
        let metrics = Metrics::install();
        let mut policy = Policy::new("api", Limit::DenyAll).key(key::constant("all"));
        if observed {
            policy = policy.observe_only();
        }
        send_to(&app(RateLimitLayer::new(MemoryStore::new(), policy)), &["/"]).await;
        let outcome = if observed { "observed" } else { "limited" };
        metrics.assert_outcomes("api", &[(outcome, 1.0)]);
    }
}

#[tokio::test]
async fn a_policy_that_another_one_denies_counts_no_outcome() {
    let metrics = Metrics::install();
    let other = Policy::new("other", SlidingLog::per_minute(9)).key(key::constant("all"));
    let layer = RateLimitLayer::new(MemoryStore::new(), [policy(1), other]);
    send_to(&app(layer), &["/"; 3]).await;
    metrics.assert_outcomes("api", &[("admitted", 1.0), ("limited", 2.0)]);
    metrics.assert_outcomes("other", &[("admitted", 1.0)]);
}

#[tokio::test]
async fn what_an_observing_policy_would_deny_is_observed() {
    let metrics = Metrics::install();
    let layer = RateLimitLayer::new(MemoryStore::new(), policy(1).observe_only());
    send_to(&app(layer), &["/"; 3]).await;
    metrics.assert_outcomes("api", &[("admitted", 1.0), ("observed", 2.0)]);
}

#[tokio::test]
async fn a_request_of_a_banned_key_is_banned() {
    let metrics = Metrics::install();
    let banning = Policy::new("logins", SlidingLog::per_minute(9)).ban(Ban::by_hand());
    let limiter = Limiter::new(MemoryStore::new(), banning);
    limiter
        .ban("42", Duration::from_secs(60))
        .await
        .expect("a memory store does not fail");
    for key in ["42", "43"] {
        let _ = limiter.check(key).await.expect("a memory store does not fail");
    }
    metrics.assert_outcomes("logins", &[("admitted", 1.0), ("banned", 1.0)]);
}

#[tokio::test]
async fn a_request_that_a_policy_does_not_regard_is_skipped() {
    let metrics = Metrics::install();
    let selective = policy(9)
        .apply_if(|parts| parts.uri.path() != "/health")
        .cost_fn(|parts| (parts.uri.path() != "/free").into());
    let other = Policy::new("other", SlidingLog::per_minute(9)).key(key::constant("all"));
    let one = RateLimitLayer::new(MemoryStore::new(), selective.clone()).skip(is("/skipped"));
    let two = RateLimitLayer::new(MemoryStore::new(), [selective, other]).skip(is("/skipped"));
    for layer in [one, two] {
        send_to(&app(layer), &["/", "/health", "/free", "/skipped"]).await;
    }
    metrics.assert_outcomes("api", &[("admitted", 2.0), ("skipped", 6.0)]);
    metrics.assert_outcomes("other", &[("admitted", 3.0), ("skipped", 1.0)]);

    let unlimited = Limiter::new(MemoryStore::new(), Policy::new("unlimited", Limit::Unlimited));
    let _ = unlimited.check("42").await.expect("a memory store does not fail");
    let _ = unlimited.peek("42").await.expect("a memory store does not fail");
    metrics.assert_outcomes("unlimited", &[("skipped", 1.0)]);
}

#[tokio::test]
async fn a_request_that_the_layer_blocks_is_blocked() {
    let metrics = Metrics::install();
    let layer = RateLimitLayer::new(MemoryStore::new(), policy(9)).block(is("/admin"));
    send_to(&app(layer), &["/", "/admin"]).await;
    metrics.assert_outcomes("api", &[("admitted", 1.0), ("blocked", 1.0)]);
}

#[tokio::test]
async fn a_request_without_a_key_is_refused_or_observed() {
    let metrics = Metrics::install();
    let by_user = |name| Policy::new(name, SlidingLog::per_minute(9)).key(key::header("user"));
    for policy in [by_user("enforced"), by_user("observing").observe_only()] {
        send_to(&app(RateLimitLayer::new(MemoryStore::new(), policy)), &["/"]).await;
    }
    metrics.assert_outcomes("enforced", &[("refused", 1.0)]);
    metrics.assert_outcomes("observing", &[("observed", 1.0)]);
}

#[tokio::test]
async fn a_peek_of_a_layer_counts_no_outcome() {
    let metrics = Metrics::install();
    let by_user = || {
        let by_user = Policy::new("api", SlidingLog::per_minute(9)).key(key::header("user"));
        by_user.apply_if(|parts| parts.uri.path() != "/health")
    };
    let store = MemoryStore::new;
    for layer in [
        RateLimitLayer::new(store(), by_user()),
        RateLimitLayer::new(
            store(),
            [Policy::new("other", "9/min").key(key::constant("all")), by_user()],
        ),
    ] {
        let layer = layer.skip(is("/skipped")).block(is("/admin"));
        for (path, is_decided) in [("/skipped", true), ("/health", true), ("/admin", false), ("/", false)] {
            let (parts, ()) = get(path).body(()).expect("a request").into_parts();
            assert_eq!(layer.peek(&parts).await.is_ok(), is_decided, "{path}");
        }
    }
    metrics.assert_outcomes("api", &[]);
    metrics.assert_outcomes("other", &[]);
}

#[tokio::test]
async fn a_request_that_no_plan_regards_is_counted_once_for_all_of_them() {
    let metrics = Metrics::install();
    let is = |path: &'static str| move |parts: &Parts| parts.uri.path() == path;
    let of_plan = |n| Policy::new("api", SlidingLog::per_minute(n)).key(key::constant("all"));
    let plans = Plans::new("free", of_plan(1))
        .plan("pro", of_plan(9))
        .by(|_: &Parts| None);
    let layer = RateLimitLayer::new(MemoryStore::new(), plans);
    let layer = layer.skip(is("/skipped")).block(is("/blocked"));
    send_to(&app(layer), &["/", "/skipped", "/blocked", "/blocked"]).await;
    metrics.assert_outcomes("api", &[("admitted", 1.0), ("blocked", 2.0), ("skipped", 1.0)]);
}

#[tokio::test]
async fn requests_while_the_store_fails_are_counted_by_what_the_failure_mode_does() {
    for (mode, outcomes) in [
        (
            FailureMode::Local,
            &[("admitted_locally", 1.0), ("limited_locally", 2.0)][..],
        ),
        (FailureMode::Open, &[("uncounted", 3.0)]),
        (FailureMode::Closed, &[("failed", 3.0)]),
    ] {
        let metrics = Metrics::install();
        let layer = RateLimitLayer::new(Later(Broken::default()), policy(1).failure_mode(mode));
        send_to(&app(layer), &["/"; 3]).await;
        metrics.assert_outcomes("api", outcomes);
        let errors = metrics.value("tower_quota_store_errors_total{kind=\"unreachable\"}");
        assert_eq!(errors, 3.0, "{mode}");
        assert_eq!(metrics.value("tower_quota_store_errors_total{kind=\"timeout\"}"), 0.0);
        assert_eq!(metrics.value("tower_quota_check_duration_seconds_count"), 3.0);
    }
}

#[tokio::test]
async fn a_policy_that_is_open_has_no_outcome_if_another_one_denies() {
    let metrics = Metrics::install();
    let open = Policy::new("open", SlidingLog::per_minute(9)).key(key::constant("all"));
    let policies = [
        policy(1).failure_mode(FailureMode::Local),
        open.failure_mode(FailureMode::Open),
    ];
    send_to(&app(RateLimitLayer::new(Later(Broken::default()), policies)), &["/"; 3]).await;
    metrics.assert_outcomes("api", &[("admitted_locally", 1.0), ("limited_locally", 2.0)]);
    metrics.assert_outcomes("open", &[("uncounted", 1.0)]);
}

#[tokio::test]
async fn all_policies_of_a_request_that_fails_have_failed() {
    let metrics = Metrics::install();
    let closed = Policy::new("closed", SlidingLog::per_minute(9)).key(key::constant("all"));
    let policies = [policy(1), closed.failure_mode(FailureMode::Closed)];
    send_to(&app(RateLimitLayer::new(Later(Broken::default()), policies)), &["/"; 2]).await;
    for policy in ["api", "closed"] {
        metrics.assert_outcomes(policy, &[("failed", 2.0)]);
    }
}

#[tokio::test]
async fn each_kind_of_error_is_counted_by_itself() {
    for (kind, label) in [
        (ErrorKind::Timeout, "timeout"),
        (ErrorKind::Unreachable, "unreachable"),
        (ErrorKind::Refused, "refused"),
        (ErrorKind::Protocol, "protocol"),
    ] {
        let metrics = Metrics::install();
        let store = Failing {
            store: MemoryStore::new(),
            fails: |_| true,
            kind,
        };
        let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_minute(1)));
        let _ = limiter.check("42").await.expect("this process counts");
        for other in ["timeout", "unreachable", "refused", "protocol"] {
            let errors = metrics.value(&format!("tower_quota_store_errors_total{{kind=\"{other}\"}}"));
            assert_eq!(errors > 0.0, other == label, "{kind:?} as {other}");
        }
    }
}

#[tokio::test]
async fn admitted_requests_near_the_limit_are_counted() {
    let metrics = Metrics::install();
    let share = FailureMode::local_share(1, 10);
    let failing = Failing {
        store: MemoryStore::new(),
        fails: |_| true,
        kind: ErrorKind::Timeout,
    };
    let policy = |name, quota| Policy::new(name, SlidingLog::per_minute(quota)).key(key::constant("all"));
    for (name, layer) in [
        (
            "default",
            RateLimitLayer::new(MemoryStore::new(), policy("default", 10)),
        ),
        (
            "share",
            RateLimitLayer::new(failing, policy("share", 100).failure_mode(share)),
        ),
    ] {
        send_to(&app(layer), &["/"; 12]).await;
        let series = format!("tower_quota_near_limit_total{{policy=\"{name}\"}}");
        assert_eq!(metrics.value(&series), 3.0, "{name}");
    }
}

#[tokio::test]
async fn requests_without_a_call_are_near_the_limit_by_what_all_processes_have_left() {
    let (metrics, redis) = (Metrics::install(), Redis::start());
    let store = connected(patient(), &redis.url()).await;
    let limit = SlidingLog::per_hour(1_000).prefetch(Duration::from_secs(1));
    let limiter = Limiter::new(store, Policy::new("hot", limit));
    while limiter.check("k").await.expect("Redis answers").is_allowed() {
        tokio::task::yield_now().await;
    }
    let near = metrics.value("tower_quota_near_limit_total{policy=\"hot\"}");
    assert!((150.0..400.0).contains(&near), "{near}");
}

#[tokio::test(start_paused = true)]
async fn a_check_takes_the_time_until_the_reply_of_the_store() {
    let metrics = Metrics::install();
    for (delay, sum) in [(Duration::ZERO, 0.0), (Duration::from_millis(250), 0.25)] {
        let limiter = Limiter::new(
            Slow(MemoryStore::new(), delay),
            Policy::new("mails", SlidingLog::per_minute(9)),
        );
        let _ = limiter.check("42").await.expect("a memory store does not fail");
        let measured = metrics.value("tower_quota_check_duration_seconds_sum");
        assert!((measured - sum).abs() < 0.01, "{measured}");
    }
    assert_eq!(metrics.value("tower_quota_check_duration_seconds_count"), 2.0);
}

#[tokio::test(start_paused = true)]
async fn the_duration_of_each_check_of_a_request_that_waits_is_recorded() {
    let metrics = Metrics::install();
    let limiter = Limiter::new(
        Slow(MemoryStore::new(), Duration::from_millis(250)),
        Policy::new("mails", SlidingLog::per_second(1)).wait_up_to(Duration::from_secs(9)),
    );
    for _ in 0..2 {
        let _ = limiter.request("42").acquire().await.expect("it waits long enough");
    }
    let [count, sum] = ["count", "sum"].map(|of| metrics.value(&format!("tower_quota_check_duration_seconds_{of}")));
    assert!(
        count >= 3.0 && (sum - 0.25 * count).abs() < 0.01,
        "{count} checks in {sum} s"
    );
}

/// A store that replies after this time.
struct Slow(MemoryStore, Duration);

impl Store for Slow {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let (reply, delay) = (self.0.decide(requests), self.1);
        StoreFuture::pending(async move {
            sleep(delay).await;
            reply.await
        })
    }
}

// Stores.

each_client! {
    decisions_are_counted_in_redis
    the_requests_of_a_script_call_are_recorded
    hits_of_the_deny_cache_are_counted
    hits_of_units_taken_ahead_are_counted
    an_open_breaker_is_counted_until_it_closes
}

async fn the_requests_of_a_script_call_are_recorded(library: ClientLibrary) {
    let (metrics, redis) = (Metrics::install(), Redis::start());
    let store = redis_store(&redis, library).await;
    let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_minute(99)));
    let mut checks = JoinSet::new();
    for key in 0..100 {
        let limiter = limiter.clone();
        // Equal ones are sent once.
        checks.spawn(async move { limiter.check(format!("{}", key % 5)).await.is_ok() });
    }
    assert_eq!(checks.join_all().await, [true; 100]);
    assert_eq!(metrics.value("tower_quota_redis_call_requests_sum"), 100.0);
    let calls = metrics.value("tower_quota_redis_call_requests_count");
    assert!((2.0..100.0).contains(&calls), "{calls} calls");
}

async fn hits_of_the_deny_cache_are_counted(library: ClientLibrary) {
    let (metrics, redis) = (Metrics::install(), Redis::start());
    let store = redis_store(&redis, library).await;
    let app = app(RateLimitLayer::new(store, policy(1)));
    eventually("a denial is cached", async || {
        send_to(&app, &["/"; 5]).await;
        metrics.value("tower_quota_deny_cache_hits_total") > 0.0
    })
    .await;
    let (hits, sent) = (
        metrics.value("tower_quota_deny_cache_hits_total"),
        metrics.value("tower_quota_redis_call_requests_sum"),
    );
    let requests: f64 = metrics.outcomes("api").iter().map(|(_, count)| count).sum();
    assert_eq!(hits + sent, requests);
}

async fn hits_of_units_taken_ahead_are_counted(library: ClientLibrary) {
    let (metrics, redis) = (Metrics::install(), Redis::start());
    let store = redis_store(&redis, library).await;
    let limit = SlidingLog::per_minute(100_000).prefetch(Duration::from_secs(1));
    let limiter = Limiter::new(store, Policy::new("hot", limit));
    let hits = || metrics.value("tower_quota_prefetch_hits_total");
    let mut checks = 0.0;
    eventually("units are taken ahead", async || {
        checks += 1.0;
        assert!(limiter.check("k").await.expect("Redis answers").is_allowed());
        hits() >= 20.0
    })
    .await;
    // The first 8 of a key are decided by Redis.
    assert!(hits() <= checks - 8.0, "{} of {checks}", hits());
    let sent = metrics.value("tower_quota_redis_call_requests_sum");
    assert!(hits() + sent >= checks, "{} and {sent} of {checks}", hits());
}

async fn an_open_breaker_is_counted_until_it_closes(library: ClientLibrary) {
    const OPEN: &str = "tower_quota_breakers_open";

    let (metrics, redis) = (Metrics::install(), Redis::start());
    let builder = patient().client_library(library);
    let store = connected(builder.deadline(Duration::from_millis(100)), &redis.url()).await;
    let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_minute(9)));
    let check = async || {
        let _ = limiter.check("42").await.expect("this process counts");
    };
    check().await;
    assert_eq!(metrics.value(OPEN), 0.0);

    let frozen = redis.freeze();
    eventually("it opens", async || {
        check().await;
        metrics.value(OPEN) == 1.0
    })
    .await;
    drop(frozen);
    eventually("it closes", async || metrics.value(OPEN) == 0.0).await;

    let _frozen = redis.freeze();
    eventually("it opens", async || {
        check().await;
        metrics.value(OPEN) == 1.0
    })
    .await;
    drop(limiter);
    eventually("it is dropped", async || metrics.value(OPEN) == 0.0).await;
}

#[tokio::test]
async fn evictions_of_a_full_memory_store_are_counted() {
    let metrics = Metrics::install();
    let store = MemoryStore::builder().capacity(1).build();
    let limiter = Limiter::new(store.clone(), Policy::new("mails", SlidingLog::per_minute(9)));
    let first = limiter.check("0").await.expect("a memory store does not fail");
    assert!(first.is_allowed());
    assert_eq!(metrics.value("tower_quota_memory_evictions_total"), 0.0);
    for key in 1..10 {
        let _ = limiter
            .check(format!("{key}"))
            .await
            .expect("a memory store does not fail");
    }
    assert_eq!(metrics.value("tower_quota_memory_evictions_total"), 9.0);
    assert_eq!(store.evictions(), 9);
}

/// A store that fails some operations.
#[derive(Clone)]
struct Failing {
    store: MemoryStore,
    fails: fn(Operation) -> bool,
    kind: ErrorKind,
}

impl Store for Failing {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        match (self.fails)(requests[0].operation()) {
            true => StoreFuture::ready(Err(StoreError::new(self.kind, "no reply"))),
            false => self.store.decide(requests),
        }
    }
}

/// A store without refunds.
fn without_refunds() -> Failing {
    Failing {
        store: MemoryStore::new(),
        fails: |operation| matches!(operation, Operation::Refund { .. }),
        kind: ErrorKind::Timeout,
    }
}

#[tokio::test]
async fn lost_settlements_are_counted() {
    const LOST: &str = "tower_quota_lost_settlements_total";

    let metrics = Metrics::install();
    let refunding = app(RateLimitLayer::new(without_refunds(), policy(9).refund_if(|_| true)));
    send_to(&refunding, &["/"; 2]).await;
    assert_eq!(metrics.value(LOST), 2.0);
    send_to(
        &app(RateLimitLayer::new(
            Later(without_refunds()),
            policy(9).refund_if(|_| true),
        )),
        &["/"],
    )
    .await;
    eventually("the third one is lost", async || metrics.value(LOST) == 3.0).await;

    let limiter = Limiter::new(without_refunds(), Policy::new("mails", SlidingLog::per_minute(9)));
    let admitted = limiter.check("42").await.expect("the check is decided");
    admitted.take_receipt().refund().await.expect_err("no refund is");
    assert_eq!(metrics.value(LOST), 4.0);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_lost_of_a_request_that_no_longer_waits() {
    let metrics = Metrics::install();
    let second = || Policy::new("mails", SlidingLog::per_second(1));
    for limiter in [
        Limiter::new(without_refunds(), second()),
        Limiter::new(Later(without_refunds()), second()),
    ] {
        let acquire = || limiter.request("42").wait_up_to(Duration::from_secs(9)).acquire();
        drop(acquire().await.expect("there is room"));
        let timeout = tokio::time::timeout(Duration::from_millis(100), async { acquire().await }).await;
        assert!(timeout.is_err(), "it waits");
        sleep(Duration::from_millis(1)).await;
        assert_eq!(metrics.value("tower_quota_lost_settlements_total"), 0.0);
    }
}

// Requests that wait, and slots.

#[tokio::test(start_paused = true)]
async fn what_an_observing_policy_would_do_with_a_request_that_waits_is_counted_once() {
    let metrics = Metrics::install();
    let waiting = || Policy::new("mails", SlidingLog::per_second(1)).wait_up_to(Duration::from_secs(2));
    let trial = Policy::new("trial", SlidingLog::per_hour(1)).observe_only();
    let limiter = Limiter::new(MemoryStore::new(), [waiting(), trial]);
    let _ = limiter.check("42").await.expect("a memory store does not fail");
    let _ = limiter.acquire("42").await.expect("it waits long enough");
    metrics.assert_outcomes("mails", &[("admitted", 2.0)]);
    metrics.assert_outcomes("trial", &[("admitted", 1.0), ("observed", 1.0)]);

    // One that is denied at the end of its time, which is too late for the others.
    let mut sent = JoinSet::new();
    for _ in 0..3 {
        let limiter = limiter.clone();
        sent.spawn(async move { limiter.acquire("42").await.is_ok() });
    }
    let admitted = sent.join_all().await;
    assert_eq!(admitted.iter().filter(|is| **is).count(), 2);
    metrics.assert_outcomes("mails", &[("admitted", 4.0), ("limited", 1.0)]);
    metrics.assert_outcomes("trial", &[("admitted", 1.0), ("observed", 4.0)]);
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_are_counted_until_their_turn() {
    const WAITING: &str = "tower_quota_requests_waiting{policy=\"mails\"}";

    let metrics = Metrics::install();
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_second(1)));
    let mut sent = JoinSet::new();
    for _ in 0..4 {
        let limiter = limiter.clone();
        sent.spawn(async move {
            limiter
                .request("42")
                .wait_up_to(Duration::from_secs(2))
                .acquire()
                .await
                .is_ok()
        });
    }
    for waiting in [2.0, 1.0, 0.0] {
        sleep(Duration::from_millis(500)).await;
        assert_eq!(metrics.value(WAITING), waiting);
        sleep(Duration::from_millis(500)).await;
    }
    let admitted = sent.join_all().await;
    assert_eq!(admitted.into_iter().filter(|admitted| *admitted).count(), 3);
    metrics.assert_outcomes("mails", &[("admitted", 3.0), ("limited", 1.0)]);
    let wait = |part| metrics.value(&format!("tower_quota_wait_duration_seconds_{part}{{policy=\"mails\"}}"));
    assert_eq!((wait("count"), wait("sum").round()), (2.0, 3.0));
    // A wait is not a part of a check.
    assert!(metrics.value("tower_quota_check_duration_seconds_sum") < 0.5);
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_ends_with_a_denial_has_no_duration() {
    let metrics = Metrics::install();
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", Concurrency::new(1)));
    let _held = limiter.check("42").await.expect("a memory store does not fail");
    let call = limiter.request("42").wait_up_to(Duration::from_secs(2)).acquire().await;
    assert!(matches!(call, Err(AcquireError::Denied(_))), "{call:?}");
    metrics.assert_outcomes("mails", &[("admitted", 1.0), ("limited", 1.0)]);
    metrics.assert_waits("mails", [0.0; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_has_left_while_it_waited() {
    let metrics = Metrics::install();
    let waiting = policy(1).wait_up_to(Duration::from_secs(600));
    let app = app(RateLimitLayer::new(Later(MemoryStore::new()), waiting));
    send_to(&app, &["/"]).await;
    let held = tokio::time::timeout(Duration::from_secs(5), send(&app, get("/"))).await;
    assert!(held.is_err(), "it is held");
    metrics.assert_outcomes("api", &[("admitted", 1.0)]);
    metrics.assert_waits("api", [0.0, 0.0, 1.0]);
}

#[test]
fn a_request_has_left_whose_runtime_ends_when_its_time_is_over() {
    let metrics = Metrics::install();
    let paused = || {
        let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime")
    };
    let (elsewhere, driven) = (paused(), paused());
    let slots = Policy::new("mails", Concurrency::new(1)).wait_up_to(Duration::from_secs(5));
    let limiter = Limiter::new(MemoryStore::new(), slots);
    let waiting = limiter.clone();
    let _held = elsewhere.block_on(async {
        let held = limiter.acquire("42").await.expect("there is a slot");
        tokio::spawn(async move { waiting.acquire("42").await.map(drop) });
        sleep(Duration::from_millis(1)).await;
        held
    });
    driven.block_on(async {
        assert!(limiter.acquire("42").await.is_err(), "the slot is held");
        sleep(Duration::from_secs(5)).await;
    });
    metrics.assert_waits("mails", [1.0, 0.0, 0.0]);
    drop(elsewhere);
    metrics.assert_waits("mails", [0.0, 0.0, 1.0]);
}

/// The check of a request that waits continues without its caller. It is sent when the wait is over, or after a second.
#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_during_a_check_is_counted_once() {
    for (limit, leaves_after, outcome) in [
        (SlidingLog::per_second(1), 850, [("admitted", 2.0)]),
        (SlidingLog::per_minute(1), 1_100, [("admitted", 1.0)]),
    ] {
        let metrics = Metrics::install();
        let store = Slow(MemoryStore::new(), Duration::from_millis(250));
        let limiter = Limiter::new(store, Policy::new("mails", limit).wait_up_to(Duration::from_secs(60)));
        drop(limiter.acquire("42").await.expect("there is room"));
        let call = limiter.acquire("42").into_future();
        let held = tokio::time::timeout(Duration::from_millis(leaves_after), call).await;
        assert!(held.is_err(), "it waits");
        metrics.assert_waits("mails", [0.0; 3]);

        sleep(Duration::from_secs(5)).await;
        metrics.assert_outcomes("mails", &outcome);
        metrics.assert_waits("mails", [0.0, 0.0, 2.0 - outcome[0].1]);
    }
}

/// A request that would wait has no outcome; one that is denied for good has.
#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_during_the_first_check_is_counted_if_its_request_is_decided() {
    for (wait, outcomes) in [
        (120, &[("admitted", 1.0)][..]),
        (10, &[("admitted", 1.0), ("limited", 1.0)]),
    ] {
        let metrics = Metrics::install();
        let store = Slow(MemoryStore::new(), Duration::from_millis(250));
        let mails = Policy::new("mails", SlidingLog::per_minute(1)).wait_up_to(Duration::from_secs(wait));
        let limiter = Limiter::new(store, mails);
        drop(limiter.acquire("42").await.expect("there is room"));
        let call = limiter.acquire("42").into_future();
        let checked = tokio::time::timeout(Duration::from_millis(100), call).await;
        assert!(checked.is_err(), "it is being checked");

        sleep(Duration::from_secs(5)).await;
        metrics.assert_outcomes("mails", outcomes);
        metrics.assert_waits("mails", [0.0; 3]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_is_full_while_the_store_fails_too() {
    let metrics = Metrics::install();
    let mails = Policy::new("mails", SlidingLog::per_second(1)).wait_up_to(Duration::from_secs(9));
    let limiter = Limiter::new(Broken::default(), mails.max_waiting(1));
    drop(limiter.acquire("42").await.expect("this process counts"));
    let waiting = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire("42").await.is_ok() }
    });
    sleep(Duration::from_millis(1)).await;
    let denied = limiter.acquire("42").await;
    assert!(matches!(denied, Err(AcquireError::LineFull(_))), "{denied:?}");
    assert!(waiting.await.expect("no panic"), "it waits long enough");
    metrics.assert_outcomes("mails", &[("admitted_locally", 2.0), ("line_full", 1.0)]);
}

#[tokio::test(start_paused = true)]
async fn a_denial_for_a_full_line_is_an_outcome_of_its_own() {
    let metrics = Metrics::install();
    let mails = Policy::new("mails", SlidingLog::per_second(1)).wait_up_to(Duration::from_secs(9));
    let limiter = Limiter::new(MemoryStore::new(), mails.max_waiting(2));
    let mut sent = JoinSet::new();
    for _ in 0..5 {
        let limiter = limiter.clone();
        sent.spawn(async move { limiter.acquire("42").await.is_ok() });
    }
    let admitted = sent.join_all().await;
    assert_eq!(admitted.into_iter().filter(|admitted| *admitted).count(), 3);
    metrics.assert_outcomes("mails", &[("admitted", 3.0), ("line_full", 2.0)]);
    metrics.assert_waits("mails", [0.0, 2.0, 0.0]);
}

#[tokio::test]
async fn slots_are_counted_while_they_are_held() {
    const HELD: &str = "tower_quota_slots_held{policy=\"exports\"}";

    let metrics = Metrics::install();
    let policy = Policy::new("exports", Concurrency::new(5)).key(key::constant("all"));
    let layer = RateLimitLayer::new(MemoryStore::new(), policy.clone());
    let app = app(layer);
    let request = || Request::new(axum::body::Body::empty());
    let responses: [Response; 2] = [
        app.clone().oneshot(request()).await.expect("it is infallible"),
        app.clone().oneshot(request()).await.expect("it is infallible"),
    ];
    assert_eq!(metrics.value(HELD), 2.0);
    drop(responses);
    assert_eq!(metrics.value(HELD), 0.0);

    let limiter = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(5)));
    let decision = limiter
        .request("42")
        .cost(3)
        .check()
        .await
        .expect("a memory store does not fail");
    assert_eq!(metrics.value(HELD), 3.0);
    let slots = decision.take_slots().expect("it is admitted");
    drop(decision);
    assert_eq!(metrics.value(HELD), 3.0);
    slots.release().await.expect("a memory store does not fail");
    assert_eq!(metrics.value(HELD), 0.0);
}

// All metrics.

#[tokio::test]
async fn the_series_do_not_depend_on_keys_addresses_and_paths() {
    let metrics = Metrics::install();
    let by_all = || Policy::new("api", SlidingLog::per_minute(2)).key((key::ip(), key::path(), key::header("user")));
    let layer = RateLimitLayer::new(MemoryStore::builder().capacity(100).build(), by_all());
    let app = app(layer);
    let flood = async |numbers: std::ops::Range<u32>| {
        for n in numbers {
            let address = std::net::Ipv4Addr::from(0x0a00_0000 + n).to_string();
            send(&app, get_from(&address, &format!("/{n}")).header("user", n)).await;
        }
    };
    flood(0..200).await;
    let few: Vec<_> = metrics.series().into_keys().collect();
    flood(200..10_200).await;
    let many: Vec<_> = metrics.series().into_keys().collect();
    assert_eq!(few, many);
    let of_policy = |name: &&String| name.contains("policy=\"api\"") && !name.contains("_duration_");
    assert_eq!(many.iter().filter(of_policy).count(), 17);
    metrics.assert_outcomes("api", &[("admitted", 10_200.0)]);
}

#[tokio::test]
async fn the_series_are_zero_before_the_first_request() {
    let (metrics, redis) = (Metrics::install(), Redis::start());
    let store = redis_store(&redis, ClientLibrary::Fred).await;
    let before = metrics.series();
    let app = app(RateLimitLayer::new(store, policy(1)));
    let built = metrics.series();
    let counts = |(name, value): (&String, &f64)| (!name.contains("_hash")).then_some(*value);
    assert!(
        before.iter().chain(&built).filter_map(counts).all(|value| value == 0.0),
        "{built:?}"
    );

    send_to(&app, &["/"; 2]).await;
    let is_counter = |name: &&String| !name.contains("_duration_") && !name.contains("_call_requests");
    let after = metrics.series();
    let after: Vec<_> = after.keys().filter(is_counter).collect();
    assert_eq!(after, built.keys().filter(is_counter).collect::<Vec<_>>());
    let node = format!(
        "tower_quota_redis_checks_total{{node=\"127.0.0.1:{}\",outcome=\"failed\"}}",
        redis.port()
    );
    assert_eq!((before[&node], before["tower_quota_breakers_open"]), (0.0, 0.0));
}

// Limits in force.

const HASH: &str = "tower_quota_limits_hash{policy=\"api\"}";

#[tokio::test]
async fn replicas_with_the_same_limits_have_the_same_hash() {
    let hash = |policies: Vec<Policy>| {
        let metrics = Metrics::install();
        let _layer = RateLimitLayer::new(MemoryStore::new(), policies);
        metrics.value(HASH)
    };
    let other = || Policy::new("other", SlidingLog::per_minute(9)).key(key::constant("all"));
    let ten = hash(vec![policy(10)]);
    assert_eq!(hash(vec![other(), policy(10).observe_only()]), ten);
    let per_hour = Policy::new("api", SlidingLog::per_hour(10)).key(key::constant("all"));
    let precise = Policy::new("api", SlidingLog::per_minute(10).precision(6)).key(key::constant("all"));
    for different in [policy(11), per_hour, precise] {
        assert_ne!(hash(vec![different]), ten);
    }
}

/// The metrics of the second policy are made when the request that waits for the first one is decided.
#[tokio::test(start_paused = true)]
async fn a_request_of_before_a_reload_leaves_the_hash_of_the_limits_in_force() {
    // Tests in one process share what is in force by a name.
    let metrics = Metrics::install();
    let hash = || metrics.value("tower_quota_limits_hash{policy=\"tariff\"}");
    let text = |quota| {
        format!(
            "policies.waits = {{ limit = 'sliding-log 1/s', key = 'constant:all', wait = '9 s' }}
             policies.tariff = {{ limit = 'sliding-log {quota}/min', key = 'constant:all' }}"
        )
    };
    let file = Policies::from_toml(&text(10)).expect("policies");
    let store = MemoryStore::new();
    let [all, one] = [&["waits", "tariff"][..], &["waits"]]
        .map(|names| app(file.layer(store.clone(), names.iter().copied()).expect("a layer")));
    send_to(&one, &["/"]).await;
    let waits = tokio::spawn(async move { send_to(&all, &["/"]).await });
    tokio::task::yield_now().await;
    let (before, newest) = (hash(), Policies::from_toml(&text(20)).expect("policies"));
    file.replace(&newest).expect("it is applied");
    let after = hash();
    assert_ne!(before, after);
    waits.await.expect("no panic");
    assert_eq!(hash(), after);
}

#[test]
fn policies_of_no_file_have_no_series_of_a_file() {
    let metrics = Metrics::install();
    let policies = |quota| Policies::from_toml(&format!("policies.api = {{ limit = 'sliding-log {quota}/min' }}"));
    let file = policies(10).expect("policies");
    file.replace(&policies(20).expect("policies")).expect("it is applied");
    let of_files = metrics.series();
    let of_files: Vec<_> = of_files.keys().filter(|name| name.contains("_file_")).collect();
    assert!(of_files.is_empty(), "{of_files:?}");
}

#[test]
fn the_hash_is_that_of_the_limits_of_all_plans() {
    let hash = |text: &str| {
        let metrics = Metrics::install();
        let file = Policies::from_toml(text).expect("plans");
        let _layer = file.layer(MemoryStore::new(), ["api"]).expect("a layer");
        metrics.value(HASH)
    };
    let plans = |free, pro| {
        format!(
            "plan = 'header:plan'
             policies.api = {{ limit = 'sliding-log 5/min', key = 'ip' }}
             [plans.free]
             api = {{ limit = 'sliding-log {free}/min', key = 'ip' }}
             [plans.pro]
             api = {{ limit = 'sliding-log {pro}/min', key = 'ip' }}"
        )
    };
    let usual = hash(&plans(1, 10));
    assert_eq!(hash(&plans(1, 10)), usual);
    assert_ne!(hash(&plans(2, 10)), usual);
    assert_ne!(hash(&plans(1, 20)), usual);
}

#[test]
fn a_reload_changes_the_gauges_of_the_file_and_its_limits() {
    let metrics = Metrics::install();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("limits.toml");
    let write = |text: &str| fs::write(&path, text).expect("a file");
    let gauge = |name| metrics.value(&format!("tower_quota_file_{name}{{file=\"{}\"}}", path.display()));
    let all = || [metrics.value(HASH), gauge("hash"), gauge("loaded_timestamp_seconds")];
    let one = "policies.api = { limit = 'sliding-log 1/min', key = 'ip' }";

    write(one);
    let began = SystemTime::now();
    let policies = Policies::from_file(&path).expect("policies");
    let _layer = policies.layer(MemoryStore::new(), ["api"]).expect("a layer");
    let first = all();
    let since = began
        .duration_since(SystemTime::UNIX_EPOCH)
        .expect("a time")
        .as_secs_f64();
    assert!((since..since + 60.0).contains(&first[2]), "{first:?}");
    assert_eq!(gauge("refused"), 0.0);

    write("policies.api = { limit = 'sliding-log 2', key = 'ip' }");
    assert!(policies.reload().is_err());
    assert_eq!((all(), gauge("refused")), (first, 1.0));

    write("policies.api = { limit = 'sliding-log 2/min', key = 'ip' }");
    policies.reload().expect("it is valid");
    let second = all();
    assert!(
        first[0] != second[0] && first[1] != second[1] && first[2] < second[2],
        "{second:?}"
    );
    assert_eq!(gauge("refused"), 0.0);

    write(one);
    policies.reload().expect("it is valid");
    assert_eq!(all()[..2], first[..2]);

    // No content of the file is in force.
    let in_code = Policies::from_toml("policies.api = { limit = 'sliding-log 3/min', key = 'ip' }").expect("policies");
    policies.replace(&in_code).expect("it is valid");
    assert_eq!(gauge("hash"), 0.0);
}

#[test]
fn the_gauges_of_a_file_are_those_of_the_policies_that_layers_follow() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("limits.toml");
    let write = |quota: &str| {
        let text = format!("policies.api = {{ limit = 'sliding-log {quota}', key = 'ip' }}");
        fs::write(&path, text).expect("a file");
        Policies::from_file(&path)
    };
    let policies = write("1/min").expect("policies");

    let metrics = Metrics::install();
    let gauge = |name| metrics.value(&format!("tower_quota_file_{name}{{file=\"{}\"}}", path.display()));
    let all = || ["refused", "hash", "loaded_timestamp_seconds"].map(gauge);
    let _layer = policies.layer(MemoryStore::new(), ["api"]).expect("a layer");
    let first = all();
    assert!(first[0] == 0.0 && first[1] > 0.0 && first[2] > 0.0, "{first:?}");

    // Another one of this path, such as to validate it.
    let validated = write("2/min").expect("policies");
    validated.reload().expect("it is applied");
    assert_eq!(all(), first);
    assert!(write("2").is_err());
    policies.reload().unwrap_err();
    drop(write("3/min").expect("policies"));
    assert_eq!(all(), [1.0, first[1], first[2]]);
}

#[tokio::test]
async fn a_recorder_that_is_installed_after_the_layer_is_built_counts_all() {
    let app = app(RateLimitLayer::new(MemoryStore::new(), policy(1)));
    let metrics = Metrics::install();
    send_to(&app, &["/"; 2]).await;
    metrics.assert_outcomes("api", &[("admitted", 1.0), ("limited", 1.0)]);
    assert!(metrics.value(HASH) > 0.0);
}

#[tokio::test(start_paused = true)]
async fn the_example_exposes_what_it_shows() {
    let recorder = example::prometheus().expect("buckets").build_recorder();
    let _guard = set_default_local_recorder(&recorder);
    let app = example::app(MemoryStore::new(), recorder.handle());
    for status in [200, 200, 429] {
        assert_eq!(send(&app, get_from("127.0.0.1", "/")).await.status.as_u16(), status);
    }
    let page = send(&app, get("/metrics")).await;
    let page = String::from_utf8(page.body.to_vec()).expect("text");
    let shown = include_str!("../../../examples/metrics.rs").lines();
    let shown: Vec<_> = shown.filter_map(|line| line.strip_prefix("//! tower_quota_")).collect();
    assert_eq!(shown.len(), 3);
    for line in shown {
        assert!(page.contains(&format!("\ntower_quota_{line}\n")), "{line} in {page}");
    }
    assert!(
        page.contains("tower_quota_check_duration_seconds_bucket{le=\"+Inf\"} 3"),
        "{page}"
    );
}

/// The histogram of the dashboard shows a wait of a minute, and not the longest bucket of a check in its place.
#[tokio::test(start_paused = true)]
async fn the_buckets_of_the_example_and_of_the_docs_cover_the_documented_waits() {
    let docs = include_str!("../../../docs/start.md");
    let list = |line: &str| -> Vec<f64> {
        let (_, list) = line.split_once("= [").expect("a list");
        let numbers = list.trim_end_matches("];").split(", ");
        numbers.map(|number| number.parse().expect("a number")).collect()
    };
    let mut documented = docs.lines().filter(|line| line.trim().starts_with("let waits = ["));
    let documented = list(documented.next().expect("the buckets of waits"));

    let recorder = example::prometheus().expect("buckets").build_recorder();
    let _guard = set_default_local_recorder(&recorder);
    let longest = Duration::from_secs(60);
    let mails = Policy::new("mails", SlidingLog::per_minute(1)).wait_up_to(longest);
    let mails = Limiter::new(MemoryStore::new(), mails);
    for _ in 0..2 {
        let _ = mails.acquire("42").await.expect("it is admitted");
    }
    let page = recorder.handle().render();
    for bucket in documented {
        let waited = u8::from(bucket >= longest.as_secs_f64());
        let line = format!("tower_quota_wait_duration_seconds_bucket{{policy=\"mails\",le=\"{bucket}\"}} {waited}\n");
        assert!(page.contains(&line), "{line} in {page}");
    }
}

/// The names in the first column of the table of `docs/metrics.md`.
fn documented() -> BTreeSet<String> {
    let page = include_str!("../../../docs/metrics.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `tower_quota_"));
    let names = rows.map(|row| {
        let (name, _) = row.split_once('`').expect("the end of a name");
        format!("tower_quota_{name}")
    });
    names.collect()
}

#[test]
fn the_page_lists_each_name_once_with_its_kind_and_labels() {
    let source = include_str!("../../../src/observe/metrics.rs");
    let names = source.lines().filter_map(|line| {
        let (_, name) = line.split_once(" = \"tower_quota_")?;
        let (name, _) = name.split_once('"')?;
        Some(format!("tower_quota_{name}"))
    });
    let names: BTreeSet<_> = names.collect();
    assert!(names.len() > 10, "the names were found");
    assert_eq!(documented(), names);

    let page = include_str!("../../../docs/metrics.md");
    let outcomes = include_str!("../../../src/observe/mod.rs");
    for outcome in outcomes
        .lines()
        .filter_map(|line| line.trim().strip_prefix('"')?.strip_suffix("\","))
    {
        assert!(page.contains(&format!("| `{outcome}` |")), "{outcome}");
    }
    for name in names {
        let row = page
            .lines()
            .find(|line| line.starts_with(&format!("| `{name}`")))
            .expect("a row");
        let kind = row.split('|').nth(2).expect("a kind").trim();
        assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
        assert!(["counter", "gauge", "histogram"].contains(&kind), "{name}: {kind}");
        let unit = row.split('|').nth(3).expect("a unit").trim();
        assert_eq!(unit == "seconds", name.ends_with("_seconds"), "{name}: {unit}");
    }
}

/// A recorder that keeps descriptions alone, as a (name, kind, unit) each.
#[derive(Default)]
struct Descriptions(Mutex<BTreeSet<[String; 3]>>);

impl Descriptions {
    fn add(&self, name: &KeyName, kind: &str, unit: Option<Unit>, description: &str) {
        assert!(!description.is_empty(), "{name:?}");
        let unit = unit.map_or("", |unit| unit.as_str());
        let described = [name.as_str(), kind, unit].map(str::to_owned);
        self.0.lock().expect("no thread panics").insert(described);
    }
}

impl Recorder for Descriptions {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.add(&name, "counter", unit, &description);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.add(&name, "gauge", unit, &description);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.add(&name, "histogram", unit, &description);
    }

    fn register_counter(&self, _: &MetricKey, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &MetricKey, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &MetricKey, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[tokio::test]
async fn each_name_is_described_with_the_kind_and_the_unit_of_the_page() {
    let recorder = Descriptions::default();
    with_local_recorder(&recorder, || {
        let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_minute(1)));
        let check = pin!(limiter.check("42")).poll(&mut Context::from_waker(Waker::noop()));
        assert!(check.is_ready(), "a memory store replies at once");
    });
    let page = include_str!("../../../docs/metrics.md");
    let rows = page.lines().filter(|line| line.starts_with("| `tower_quota_"));
    let shown = rows.map(|row| {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let unit = if cells[3] == "seconds" { "seconds" } else { "count" };
        [cells[1].trim_matches('`'), cells[2], unit].map(str::to_owned)
    });
    assert_eq!(recorder.0.into_inner().expect("no thread panics"), shown.collect());
}

/// The words of an expression of PromQL, without texts in quotes.
fn words(expression: &str) -> impl Iterator<Item = &str> {
    let unquoted = expression.split('"').step_by(2);
    unquoted.flat_map(|part| part.split(|char: char| !char.is_alphanumeric() && char != '_' && char != '$'))
}

#[test]
fn each_query_of_the_dashboard_and_the_pages_has_names_and_outcomes_that_exist() {
    let page = include_str!("../../../docs/metrics.md");
    let dashboard: serde_json::Value =
        serde_json::from_str(include_str!("../../../docs/grafana.json")).expect("the dashboard is JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().expect("targets"));
    for panel in panels
        .iter()
        .filter(|panel| panel["fieldConfig"]["defaults"]["unit"] == "reqps")
    {
        let overrides = panel["fieldConfig"]["overrides"].to_string();
        for target in panel["targets"].as_array().expect("targets") {
            let (query, id) = (target["expr"].as_str().expect("text"), &target["refId"]);
            let has_its_own_unit = overrides.contains(&format!("\"byFrameRefID\",\"options\":{id}"));
            assert!(query.contains("rate(") != has_its_own_unit, "`{query}` is no rate");
        }
    }
    let mut queries: Vec<_> = targets
        .map(|target| target["expr"].as_str().expect("text").to_owned())
        .collect();
    assert!(queries.len() > 15, "the queries were found");
    let shown: BTreeSet<_> = queries
        .iter()
        .flat_map(|query| words(query))
        .map(str::to_owned)
        .collect();

    let operating = include_str!("../../../docs/operating.md");
    let in_pages = page
        .split_once("## Queries")
        .expect("queries")
        .1
        .split('`')
        .chain(operating.split('`'));
    queries.extend(in_pages.filter(|code| code.contains("tower_quota_")).map(str::to_owned));
    queries.extend(alerts().into_iter().map(str::to_owned));
    assert!(queries.len() > 23, "those of the pages were found");

    let kind = |name: &str| {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{name}`")))?;
        row.split('|').nth(2).map(str::trim)
    };
    for query in &queries {
        for word in words(query).filter(|word| word.starts_with("tower_quota_")) {
            let parts = ["_bucket", "_sum", "_count"];
            let of_histogram = parts.iter().find_map(|part| word.strip_suffix(part));
            let exists = match of_histogram {
                Some(name) => kind(name) == Some("histogram"),
                None => matches!(kind(word), Some("counter" | "gauge")),
            };
            assert!(exists, "`{word}` in `{query}`");
        }
    }
    for name in documented() {
        let is_shown = shown.iter().any(|word| word.starts_with(&name));
        assert!(is_shown, "{name} is in no panel");
    }
    // The outcomes of an expression, such as `limited.*|banned`, each begin or end one.
    for query in &queries {
        for matched in query.split("outcome=").skip(1) {
            let matched = matched.split('"').nth(1).expect("a value in quotes");
            for one in matched.split(['|', '\\']).filter(|one| !one.is_empty()) {
                let (begin, end) = one.split_once(".*").unwrap_or((one, ""));
                let exists = page
                    .lines()
                    .filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
                let exists = exists
                    .into_iter()
                    .any(|(outcome, _)| outcome.starts_with(begin) && outcome.ends_with(end));
                assert!(exists, "`{one}` in `{query}`");
            }
        }
    }
}

/// The expressions of `docs/alerts.yml`.
fn alerts() -> Vec<&'static str> {
    let rules = include_str!("../../../docs/alerts.yml");
    let expressions = rules.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    expressions.collect()
}

#[test]
fn the_page_about_operating_has_the_alerts_of_the_rules() {
    let page = include_str!("../../../docs/operating.md");
    let (_, table) = page.split_once("| alert | condition |").expect("the table");
    let (table, _) = table.split_once("\n\n").expect("its end");
    let rows = table.lines().skip(2);
    let shown: Vec<_> = rows.map(|row| row.split('`').nth(1).expect("a name")).collect();
    let rules = include_str!("../../../docs/alerts.yml");
    let alerts = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    assert_eq!(shown, alerts.collect::<Vec<_>>());
}
