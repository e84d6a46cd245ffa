//! Handlers that deny their requests themselves, with and without layers around them.

use std::time::Duration;

use axum::{
    Router,
    extract::Request,
    middleware::{self, Next},
    response::{IntoResponse, Response, Result},
    routing::get as route,
};
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, request::Parts};
use tower_quota::{
    AcquireError, Concurrency, Decision, Denied, FailureMode, Headers, Limit, Limiter, MemoryStore, Policy,
    RateLimitLayer, SlidingLog, key,
    response::{self, Grpc, Rejection},
    store::{ErrorKind, StoreError},
};

use crate::support::{Broken, Clock, Received, get, send};

/// One export an hour, which a handler checks.
fn exports() -> Limiter {
    Limiter::new(
        Clock::new().memory_store(),
        Policy::new("exports", SlidingLog::per_hour(1)),
    )
}

/// A layer of ten requests a minute.
fn layer(name: &'static str) -> RateLimitLayer {
    let policy = Policy::new(name, SlidingLog::per_minute(10)).key(key::constant("all"));
    RateLimitLayer::new(Clock::new().memory_store(), policy)
}

/// A handler that this limiter limits.
fn app(limiter: Limiter) -> Router {
    let handler = async move || -> Result<String> {
        let _permit = limiter.check("42").await?.require()?;
        Ok("the export".to_owned())
    };
    Router::new().route("/export", route(handler))
}

/// The response to the second request, which the handler denies.
async fn denied(app: &Router) -> Received {
    assert_eq!(send(app, get("/export")).await.status, StatusCode::OK);
    send(app, get("/export")).await
}

/// The fields about limits, in the order of their names.
fn fields(headers: &HeaderMap) -> Vec<String> {
    let fields = headers.iter().filter(|(name, _)| name.as_str().contains("rate"));
    let mut lines: Vec<_> = fields
        .map(|(name, value)| format!("{name}: {}", value.to_str().expect("text")))
        .collect();
    lines.sort();
    lines
}

/// Each dialect, with its fields of a denial by `exports`.
fn dialects() -> [(Headers, &'static [&'static str]); 5] {
    [
        (
            Headers::Draft08,
            &[
                r#"ratelimit-policy: "exports";q=1;w=3600"#,
                r#"ratelimit: "exports";r=0;t=3600"#,
            ],
        ),
        (
            Headers::Draft07,
            &[
                "ratelimit-policy: 1;w=3600",
                "ratelimit: limit=1, remaining=0, reset=3600",
            ],
        ),
        (
            Headers::Draft06,
            &[
                "ratelimit-limit: 1",
                "ratelimit-policy: 1;w=3600",
                "ratelimit-remaining: 0",
                "ratelimit-reset: 3600",
            ],
        ),
        (
            Headers::LegacyDelta,
            &[
                "x-ratelimit-limit: 1",
                "x-ratelimit-remaining: 0",
                "x-ratelimit-reset: 3600",
            ],
        ),
        (Headers::None, &[]),
    ]
}

#[tokio::test]
async fn a_handler_denies_as_a_layer_does() {
    let denied = denied(&app(exports())).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.field("retry-after"), Some("3600"));
    assert_eq!(denied.field("cache-control"), Some("no-store"));
    assert_eq!(denied.field("content-type"), Some("application/problem+json"));
    assert_eq!(denied.json()["violated-policies"], serde_json::json!(["exports"]));

    let policy = Policy::new("exports", SlidingLog::per_hour(1)).key(key::constant("all"));
    let layer = RateLimitLayer::new(Clock::new().memory_store(), policy);
    let by_layer = self::denied(&Router::new().route("/export", route(async || "hi").layer(layer))).await;
    assert_eq!((denied.headers, denied.body), (by_layer.headers, by_layer.body));
}

#[tokio::test]
async fn the_fields_are_those_of_the_limiter_in_each_dialect() {
    for (headers, expected) in dialects() {
        let denied = denied(&app(exports().headers(headers.clone()))).await;
        assert_eq!(fields(&denied.headers), expected, "{headers:?}");
        assert_eq!(denied.field("retry-after"), Some("3600"), "{headers:?}");
    }
}

#[tokio::test]
async fn a_layer_outside_adds_its_fields_to_what_it_admits_and_not_to_the_denial() {
    for (headers, expected) in dialects() {
        for (outer, _) in dialects() {
            let app = app(exports().headers(headers.clone())).layer(layer("api").headers(outer.clone()));
            let admitted = send(&app, get("/export")).await;
            assert_eq!(fields(&admitted.headers).is_empty(), matches!(outer, Headers::None));

            let denied = send(&app, get("/export")).await;
            assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(fields(&denied.headers), expected, "{headers:?} in {outer:?}");
        }
    }
}

#[tokio::test]
async fn nested_layers_do_not_add_their_fields_to_the_denial() {
    let legacy = layer("api").headers(Headers::Draft08.and(Headers::LegacyDelta));
    let denied = denied(&app(exports()).layer(layer("routes")).layer(legacy)).await;
    let (_, expected) = dialects()[0];
    assert_eq!(fields(&denied.headers), expected);
}

#[tokio::test]
async fn middleware_finds_the_denial_and_the_decisions_of_the_layers() {
    let layer = |name| layer(name).response_extensions(true);
    let denied = denied(&app(exports()).layer(layer("inner")).layer(layer("outer"))).await;

    let denial = denied.extensions.get::<Denied>().expect("a denial");
    assert_eq!(denial.decision().retry_after(), Some(Duration::from_secs(3_600)));
    let layers = denied.extensions.get::<Decision>().expect("a decision");
    let names: Vec<_> = layers.policies().map(|policy| policy.name()).collect();
    assert!(layers.is_allowed());
    assert_eq!(names, ["outer", "inner"]);
}

#[tokio::test]
async fn the_body_is_in_the_format_of_the_limiter() {
    let plain = denied(&app(exports().format(response::text(|_, _| "later")))).await;
    assert_eq!(plain.body, "later");

    let teapot = response::axum(|rejection: Rejection<'_>, _: &Parts| {
        (StatusCode::IM_A_TEAPOT, format!("{:?}", rejection.retry_after()))
    });
    let teapot = denied(&app(exports().format(teapot))).await;
    assert_eq!(
        (teapot.status, &*teapot.body),
        (StatusCode::IM_A_TEAPOT, &b"Some(3600s)"[..])
    );
    assert_eq!(teapot.field("ratelimit"), Some(r#""exports";r=0;t=3600"#));
}

/// A denial of a limiter.
async fn denial(limiter: &Limiter) -> Denied {
    loop {
        if let Err(denied) = limiter.check("42").await.expect("a decision").require() {
            return denied;
        }
    }
}

#[tokio::test]
async fn the_response_to_a_grpc_call_is_a_grpc_status() {
    let denied = denial(&exports()).await;
    let call = Request::post("/test.Echo/Once").header("content-type", "application/grpc");
    let (parts, ()) = call.body(()).expect("a good request").into_parts();

    let response = denied.response_to(&parts);
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["grpc-status"], "8");
    assert_eq!(response.headers()["grpc-retry-pushback-ms"], "3600000");
    assert_eq!(response.headers()["ratelimit"], r#""exports";r=0;t=3600"#);
    assert!(!response.headers().contains_key("retry-after"));
    assert!(response.body().is_empty());
}

#[tokio::test]
async fn the_response_to_a_head_has_a_length_and_no_body() {
    let denied = denial(&exports()).await;
    let request = |method| Request::builder().method(method).body(()).expect("a good request");
    let to = |method| denied.response_to(&request(method).into_parts().0);

    let (to_get, to_head) = (to(Method::GET), to(Method::HEAD));
    assert!(!to_get.body().is_empty() && to_head.body().is_empty());
    assert_eq!(to_head.headers()["content-length"], *to_get.body().len().to_string());

    let with_length = exports().format(|_: Rejection<'_>, _: &Parts| {
        let response = http::Response::builder().status(429).header("content-length", "5");
        response.body(Bytes::new()).expect("a response")
    });
    let to_head = denial(&with_length)
        .await
        .response_to(&request(Method::HEAD).into_parts().0);
    assert_eq!(to_head.headers()["content-length"], "5");

    for status in [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED] {
        let limiter = exports().format(move |_: Rejection<'_>, _: &Parts| {
            let mut response = http::Response::default();
            *response.status_mut() = status;
            response
        });
        let denied = denial(&limiter).await;
        let to_head = denied.response_to(&request(Method::HEAD).into_parts().0);
        assert!(!to_head.headers().contains_key("content-length"), "{status}");
    }
}

#[tokio::test]
async fn a_denial_where_waiting_does_not_help_has_no_retry_after() {
    let limiter = exports();
    let denied = limiter
        .request("42")
        .cost(2)
        .check()
        .await
        .expect("a decision")
        .require();
    let denied = denied.expect_err("denied");
    assert_eq!(
        denied.to_string(),
        "rate limit exceeded: exports; exports: costs 2, the limit is 1"
    );
    assert!(!denied.decision().headers().contains_key("retry-after"));
    assert!(!denied.into_response().headers().contains_key("retry-after"));
}

#[tokio::test]
async fn slots_are_held_while_the_required_decision_is() {
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(1)));
    let require = async || limiter.check("42").await.expect("a decision").require();
    let permit = require().await.expect("a slot is free");
    assert!(require().await.is_err());
    drop(permit);
    assert!(require().await.is_ok());
}

#[tokio::test]
async fn an_error_names_each_policy_that_denies() {
    let two = [
        Policy::new("a", SlidingLog::per_minute(1)),
        Policy::new("b", SlidingLog::per_minute(9)),
        Policy::new("c", SlidingLog::per_second(1)),
    ];
    let denied = denial(&Limiter::new(Clock::new().memory_store(), two)).await;
    assert_eq!(denied.to_string(), "rate limit exceeded: a, c; try again in 60 s");
}

#[tokio::test]
async fn the_text_of_a_denial_has_the_wait_of_retry_after() {
    let clock = Clock::new();
    let limiter = Limiter::new(clock.memory_store(), Policy::new("a", SlidingLog::per_minute(1)));
    let decision = limiter.check("42").await.expect("a decision");
    assert!(decision.require().expect("admitted").is_allowed());
    for (passed, wait) in [(0, "60"), (47_750, "13"), (11_250, "1"), (999, "1")] {
        clock.advance(Duration::from_millis(passed));
        let denied = limiter.check("42").await.expect("a decision").require().unwrap_err();
        assert_eq!(
            denied.to_string(),
            format!("rate limit exceeded: a; try again in {wait} s")
        );
        assert_eq!(denied.decision().headers()["retry-after"], *wait);
    }
}

#[tokio::test]
async fn a_store_that_fails_closed_is_503_in_a_handler() {
    let closed = Policy::new("exports", SlidingLog::per_hour(1)).failure_mode(FailureMode::Closed);
    let app = app(Limiter::new(Broken::default(), closed)).layer(layer("api"));
    let failed = send(&app, get("/export")).await;
    assert_eq!(failed.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(failed.field("retry-after"), Some("1"));
    assert_eq!(failed.field("cache-control"), Some("no-store"));
    assert_eq!(failed.field("content-type"), Some("application/problem+json"));
    assert!(
        !String::from_utf8_lossy(&failed.body).contains("away"),
        "no cause for callers"
    );
}

/// Builds each denied response anew, outside of a layer.
async fn build_anew(request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    let denial = response.extensions().get::<Decision>().cloned().map(Decision::require);
    match denial {
        Some(Err(denied)) => denied.into_response(),
        _ => response,
    }
}

#[tokio::test]
async fn a_denial_of_a_layer_is_built_anew_with_its_format_fields_and_jitter() {
    let policy = Policy::new("once", SlidingLog::per_minute(1)).key(key::constant("all"));
    let layer = RateLimitLayer::new(Clock::new().memory_store(), policy);
    let layer = layer
        .format(response::text(|_, _| "later"))
        .headers(Headers::Draft07)
        .retry_jitter(Duration::from_secs(3_600));
    let app = |around: bool, layer: &RateLimitLayer| {
        let inner = Router::new()
            .route("/export", route(async || "hi"))
            .layer(layer.clone());
        let inner = if around {
            inner.layer(middleware::from_fn(build_anew))
        } else {
            inner
        };
        inner.layer(self::layer("api"))
    };
    assert_eq!(send(&app(true, &layer), get("/export")).await.status, StatusCode::OK);

    for anew in [true, false] {
        let denied = send(&app(anew, &layer), get("/export")).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(denied.body, "later");
        let wait = denied.field("retry-after").expect("a wait");
        let ratelimit = format!("limit=1, remaining=0, reset={wait}");
        assert_eq!(denied.field("ratelimit"), Some(&*ratelimit), "{anew}");
        // Of both layers, which decided.
        assert_eq!(
            denied.field("ratelimit-policy"),
            Some(r#"1;w=60, "api";q=10;w=60"#),
            "{anew}"
        );
    }
}

#[tokio::test]
async fn the_fields_of_a_decision_are_those_of_its_response() {
    for (outer, _) in dialects() {
        for (inner, _) in dialects() {
            let layers = (
                layer("outer").headers(outer.clone()),
                layer("inner").headers(inner.clone()).response_extensions(true),
            );
            let app = Router::new().route("/", route(async || "hi").layer(layers));
            let response = send(&app, get("/")).await;
            let decision = response.extensions.get::<Decision>().expect("a decision");
            assert_eq!(
                fields(&decision.headers()),
                fields(&response.headers),
                "{outer:?}, {inner:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_decision_without_policies_has_no_fields() {
    let none = Limiter::new(MemoryStore::new(), Vec::<Policy>::new());
    let decision = none.check("42").await.expect("a decision");
    assert!(decision.headers().is_empty());
    assert!(decision.require().is_ok());
}

#[tokio::test]
async fn a_grpc_format_of_a_limiter_is_for_grpc_calls_only() {
    let denied = denial(&exports().format(Grpc::new())).await.into_response();
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(!denied.headers().contains_key("grpc-status"));
}

/// `main` prints the `Debug` of its error.
#[tokio::test]
async fn the_debug_of_an_error_is_its_message() {
    let denied = denial(&exports()).await;
    let message = "rate limit exceeded: exports; try again in 3600 s";
    assert_eq!(format!("{denied:?}"), message);
    assert_eq!(format!("{:?}", AcquireError::LineFull(denied)), message);

    let cause = std::io::Error::other("connection refused");
    let error = StoreError::new(ErrorKind::Unreachable, "there is no connection").with_source(cause);
    let message = "there is no connection: connection refused";
    assert_eq!(format!("{error:?}"), message);
    assert_eq!(format!("{:?}", AcquireError::Store(error)), message);
    assert_eq!(format!("{:?}", key::KeyError::absent("no tenant")), "no tenant");
    let error = "sliding-log 5".parse::<Limit>().unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
}

/// Whatever its cause is.
#[test]
fn a_store_that_is_unreachable_is_no_fault_of_the_request() {
    let cause = key::KeyError::malformed("the name of the server is malformed");
    let error = StoreError::new(ErrorKind::Unreachable, "there is no connection").with_source(cause);
    let response = error.into_response();
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "1");
}
