//! What is logged about requests and changes of state.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use axum::{Router, routing::get as route};
use http::{StatusCode, request::Parts};
use tokio::time::sleep;
use tower_quota::{
    ClientLibrary, Decision, FailureMode, Limiter, MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, key,
    store::{ErrorKind, Store, StoreError, StoreFuture, StoreRequest},
};
use tracing::{Instrument, field::Empty};

use crate::support::{Broken, Log, PATIENCE, Redis, connected, each_client, eventually, get, send};

/// So many a minute for all callers.
fn policy(quota: u64) -> Policy {
    Policy::new("api", SlidingLog::per_minute(quota)).key(key::constant("all"))
}

async fn send_to(layer: RateLimitLayer, path: &str) {
    let app = Router::new().fallback(route(async || "hi")).layer(layer);
    send(&app, get(path)).await;
}

fn is(path: &'static str) -> impl Fn(&Parts) -> bool + Send + Sync + 'static {
    move |parts| parts.uri.path() == path
}

#[tokio::test]
async fn each_decision_is_an_event_at_the_level_debug_without_its_key() {
    let log = Log::capture_everything();
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_minute(1)));
    for _ in 0..2 {
        let _ = limiter.check("secret").await.expect("a memory store does not fail");
    }
    send_to(RateLimitLayer::new(MemoryStore::new(), policy(9)).skip(is("/")), "/").await;
    let text = log.text();
    let lines: Vec<_> = text.lines().filter(|line| line.contains("policy=")).collect();
    for (line, fields) in lines.iter().zip([
        r#"policy="mails" outcome="admitted" cost=1 limit=1 remaining=0"#,
        r#"policy="mails" outcome="limited" cost=1 limit=1 remaining=0 retry_after="#,
        r#"policy="api" outcome="skipped""#,
    ]) {
        assert!(line.contains("DEBUG") && line.contains(fields), "{line}");
    }
    assert_eq!(lines.len(), 3, "{text}");
    assert!(!text.contains("secret"), "{text}");
    let log = Log::capture();
    let _ = limiter.check("secret").await.expect("a memory store does not fail");
    assert_eq!(log.text(), "");
}

/// The lines of a handler within a span that declares the fields of a decision, and of what follows the layer.
async fn spans(layer: RateLimitLayer, paths: &[&str]) -> Vec<String> {
    let log = Log::capture();
    for path in paths {
        let span = tracing::info_span!(
            "request",
            rate_limit.outcome = Empty,
            rate_limit.policy = Empty,
            rate_limit.limit = Empty,
            rate_limit.remaining = Empty,
            rate_limit.retry_after = Empty,
        );
        async {
            send_to(layer.clone(), path).await;
            tracing::info!("the end");
        }
        .instrument(span)
        .await;
    }
    let text = log.text();
    let ends = text.lines().filter(|line| line.ends_with("the end"));
    ends.map(|line| line[line.find("request").expect("a span")..].to_owned())
        .collect()
}

#[tokio::test(start_paused = true)]
async fn the_decision_about_a_request_that_waited_is_in_the_fields_of_its_span() {
    let policy = Policy::new("api", SlidingLog::per_second(1)).key(key::constant("all"));
    let layer = RateLimitLayer::new(MemoryStore::new(), policy.wait_up_to(Duration::from_secs(2)));
    let spans = spans(layer, &["/", "/"]).await;
    let admitted = r#"rate_limit.outcome="admitted" rate_limit.policy="api""#;
    assert!(
        spans.len() == 2 && spans.iter().all(|span| span.contains(admitted)),
        "{spans:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_decision_is_in_the_fields_of_the_span_around_it() {
    let policies = [
        Policy::new("many", SlidingLog::per_hour(100)).key(key::constant("all")),
        Policy::new("few", SlidingLog::per_minute(1)).key(key::constant("all")),
        Policy::new("trial", SlidingLog::per_day(1))
            .key(key::constant("all"))
            .observe_only(),
    ];
    let lines = spans(RateLimitLayer::new(MemoryStore::new(), policies), &["/", "/"]).await;
    assert!(
        lines[0].starts_with(
            r#"request{rate_limit.outcome="admitted" rate_limit.policy="few" rate_limit.limit=1 rate_limit.remaining=0}"#
        ),
        "{}",
        lines[0]
    );
    let (fields, wait) = lines[1].split_once(" rate_limit.retry_after=").expect("a wait");
    assert_eq!(
        fields,
        r#"request{rate_limit.outcome="limited" rate_limit.policy="few" rate_limit.limit=1 rate_limit.remaining=0"#
    );
    let wait: f64 = wait
        .split('}')
        .next()
        .and_then(|wait| wait.parse().ok())
        .expect("seconds");
    assert!((1.0..=60.0).contains(&wait), "{wait}");
}

/// A store that fails after two calls.
#[derive(Default)]
struct FailsLater {
    store: MemoryStore,
    calls: AtomicUsize,
}

impl Store for FailsLater {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        match self.calls.fetch_add(1, Ordering::Relaxed) < 2 {
            true => self.store.decide(requests),
            false => StoreFuture::ready(Err(StoreError::new(ErrorKind::Timeout, "no reply"))),
        }
    }
}

/// The task of the line has it checked.
#[tokio::test(start_paused = true)]
async fn what_is_not_decided_of_a_request_that_waited_is_in_the_fields_of_its_span() {
    for (mode, fields) in [
        (
            FailureMode::Closed,
            r#"{rate_limit.outcome="failed" rate_limit.policy="api"}"#,
        ),
        (
            FailureMode::Open,
            r#"{rate_limit.outcome="uncounted" rate_limit.policy="api"}"#,
        ),
        (
            FailureMode::Local,
            r#"{rate_limit.outcome="admitted_locally" rate_limit.policy="api" rate_limit.limit=1"#,
        ),
    ] {
        let policy = policy(1).wait_up_to(Duration::from_secs(90)).failure_mode(mode);
        let lines = spans(RateLimitLayer::new(FailsLater::default(), policy), &["/", "/"]).await;
        let shown = lines[1].strip_prefix("request").expect("a span");
        assert!(shown.starts_with(fields), "{fields}: {}", lines[1]);
    }
}

#[tokio::test]
async fn what_is_not_decided_is_in_the_fields_of_the_span_too() {
    let unkeyed = Policy::new("api", SlidingLog::per_minute(9)).key(key::header("x-user-id"));
    let all = |mode| policy(9).failure_mode(mode);
    for (layer, fields) in [
        (
            RateLimitLayer::new(Broken::default(), all(FailureMode::Closed)),
            r#"{rate_limit.outcome="failed" rate_limit.policy="api"}"#,
        ),
        (
            RateLimitLayer::new(Broken::default(), all(FailureMode::Open)),
            r#"{rate_limit.outcome="uncounted" rate_limit.policy="api"}"#,
        ),
        (
            RateLimitLayer::new(Broken::default(), all(FailureMode::Local)),
            r#"{rate_limit.outcome="admitted_locally" rate_limit.policy="api" rate_limit.limit=9 rate_limit.remaining=8}"#,
        ),
        (
            RateLimitLayer::new(MemoryStore::new(), unkeyed),
            r#"{rate_limit.outcome="refused" rate_limit.policy="api"}"#,
        ),
        (
            RateLimitLayer::new(MemoryStore::new(), all(FailureMode::Closed)).block(is("/")),
            r#"{rate_limit.outcome="blocked" rate_limit.policy=""}"#,
        ),
        // No policy has regarded it.
        (
            RateLimitLayer::new(MemoryStore::new(), all(FailureMode::Closed)).skip(is("/")),
            ": ",
        ),
    ] {
        let lines = spans(layer, &["/"]).await;
        let shown = lines[0].strip_prefix("request").expect("a span");
        assert!(shown.starts_with(fields), "{fields}: {}", lines[0]);
    }
}

#[tokio::test]
async fn a_policy_that_only_observes_is_in_the_fields_of_the_span() {
    let layer = RateLimitLayer::new(MemoryStore::new(), policy(1).observe_only());
    let lines = spans(layer, &["/", "/"]).await;
    for (line, outcome) in lines.iter().zip(["admitted", "observed"]) {
        let fields = format!(r#"request{{rate_limit.outcome="{outcome}" rate_limit.policy="api" rate_limit.limit=1"#);
        assert!(line.starts_with(&fields), "{line}");
    }
}

#[tokio::test]
async fn a_policy_that_finds_no_key_is_logged_once_by_its_name() {
    struct User;
    let by_user = || Policy::new("by-user", SlidingLog::per_minute(9)).key(key::extension("user", |_: &User| 42));
    for by_user in [by_user(), by_user().observe_only()] {
        let log = Log::capture();
        let layer = RateLimitLayer::new(MemoryStore::new(), [policy(9), by_user]);
        for _ in 0..3 {
            send_to(layer.clone(), "/").await;
        }
        let text = log.text();
        let [line] = text.lines().collect::<Vec<_>>()[..] else {
            panic!("{text}")
        };
        for part in [
            " ERROR ",
            "requests are refused, or pass",
            r#"policy="by-user""#,
            "::User",
        ] {
            assert!(line.contains(part), "{line}");
        }
    }
}

#[tokio::test]
async fn a_receipt_of_a_policy_that_there_is_not_is_logged_once() {
    let log = Log::capture();
    let free = || Policy::new("free", SlidingLog::per_minute(9)).key(key::constant("all"));
    let policies = [policy(9), free().apply_if(is("/free"))];
    let layer = RateLimitLayer::new(MemoryStore::new(), policies);
    let app = |name: &'static str| {
        let handler = async move |decision: Decision| {
            let receipt = decision.take_receipt_of(name);
            receipt.settle(5).await.expect("a memory store does not fail");
        };
        Router::new().fallback(route(handler)).layer(layer.clone())
    };
    // Both are policies of the layer, and one does not apply to the request.
    for name in ["api", "free"] {
        send(&app(name), get("/")).await;
    }
    assert_eq!(log.text(), "");

    for _ in 0..3 {
        send(&app("apis"), get("/")).await;
    }
    let text = log.text();
    let [line] = text.lines().collect::<Vec<_>>()[..] else {
        panic!("{text}")
    };
    for part in [
        " WARN ",
        "the receipt of an unknown policy is empty",
        r#"policy="apis" policies=["api", "free"]"#,
    ] {
        assert!(line.contains(part), "{line}");
    }
}

#[tokio::test]
async fn a_handler_that_lacks_a_decision_is_logged_once() {
    let log = Log::capture();
    let app = Router::new().fallback(async |_: Decision| "hi");
    for _ in 0..3 {
        assert_eq!(send(&app, get("/")).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    }
    // Without nextest, another test of the process may have logged it before.
    let least = usize::from(std::env::var_os("NEXTEST").is_some());
    let logged = log.text().matches("a handler cannot run").count();
    assert!((least..=1).contains(&logged), "{}", log.text());
}

each_client! {
    the_warning_about_redis_names_the_cause_in_plain_words
}

async fn the_warning_about_redis_names_the_cause_in_plain_words(library: ClientLibrary) {
    let (log, redis) = (Log::capture(), Redis::not_started());
    let (mut pause, mut lines) = (Duration::from_millis(10), 0);
    let line = loop {
        let store = RedisStore::builder().client_library(library).url(&redis.url());
        let store = store.connect_lazy().expect("a good URL");
        // A check before the first attempt to connect has failed has another cause.
        sleep(pause).await;
        pause *= 2;
        let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_minute(9)));
        for _ in 0..5 {
            let _ = limiter.check("42").await.expect("this process counts");
        }
        eventually("it is logged", async || log.text().lines().count() > lines).await;
        let text = log.text();
        lines = text.lines().count();
        // That Redis cannot be used yet is logged too, after a while.
        let mut fails = text.lines().filter(|line| line.contains("the rate limit store fails"));
        if let Some(line) = fails.find(|line| line.contains("onnection refused")) {
            break line.to_owned();
        }
    };
    for part in [" WARN ", "error=\"there is no connection to Redis\" source=\""] {
        assert!(line.contains(part), "{line}");
    }
    for debug in ["Os {", "Err(", "Error {", "Some(", "kind:"] {
        assert!(!log.text().contains(debug), "{}", log.text());
    }
}

#[tokio::test]
async fn a_fred_client_that_delays_small_writes_is_a_warning() {
    let redis = Redis::not_started();
    for (nodelay, warnings) in [(None, 1), (Some(false), 1), (Some(true), 0)] {
        let mut builder = redis.builder();
        builder.with_connection_config(|connection| connection.tcp.nodelay = nodelay);
        let client = builder.build().expect("a client");
        let log = Log::capture();
        let store = RedisStore::builder().client(client).connect_lazy();
        assert_eq!(
            log.text().matches("set `config.tcp.nodelay = Some(true)`").count(),
            warnings
        );
        drop(store.expect("the client will do"));
    }
}

#[tokio::test]
async fn while_redis_is_down_fred_logs_at_most_once_that_its_connection_is_given_up() {
    let mut redis = Redis::start();
    for is_killed in [false, true] {
        let builder = RedisStore::builder().connect_timeout(PATIENCE);
        let store = connected(builder.client_library(ClientLibrary::Fred), &redis.url()).await;
        let limiter = Limiter::new(store, Policy::new("mails", SlidingLog::per_minute(9)));
        let log = Log::capture();
        let frozen = match is_killed {
            true => {
                redis.kill();
                None
            }
            false => Some(redis.freeze()),
        };
        let (began, mut checks) = (Instant::now(), 0);
        while began.elapsed() < Duration::from_secs(5) || checks < 100 {
            checks += 1;
            let _ = limiter.check("42").await.expect("this process counts");
            sleep(Duration::from_millis(10)).await;
        }
        drop(frozen);
        assert!(log.text().matches("QUIT").count() <= 1, "{}", log.text());
    }
}
