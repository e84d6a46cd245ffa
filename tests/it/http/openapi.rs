//! The components of OpenAPI, compared with the responses that they describe.

use axum::{Router, routing::get as route};
use http::StatusCode;
use serde_json::{Value, json};
use tower_quota::{FailureMode, Headers, Limit, MemoryStore, Plans, Policy, RateLimitLayer, SlidingLog, key};

use crate::support::{Broken, get, send};

fn policy() -> Policy {
    Policy::new("api", SlidingLog::per_minute(1)).key(key::constant("all"))
}

/// Each field of the response and of its content is described, and each that is described is there.
fn assert_describes(components: &Value, name: &str, received: &crate::support::Received) {
    let described = &components["responses"][name];
    let headers = described["headers"].as_object().expect("fields");
    for (field, header) in headers {
        let value = received.field(field).unwrap_or_else(|| panic!("no {field}"));
        let is_number = value.parse::<u64>().is_ok();
        assert_eq!(header["schema"]["type"] == "integer", is_number, "{field}: {value}");
    }
    let lower: Vec<String> = headers.keys().map(|name| name.to_lowercase()).collect();
    for field in received
        .headers
        .keys()
        .filter(|field| field.as_str().contains("ratelimit"))
    {
        assert!(lower.contains(&field.to_string()), "{field} is not described");
    }
    assert_describes_content(described, received);
}

fn assert_describes_content(described: &Value, received: &crate::support::Received) {
    let schema = &described["content"]["application/problem+json"]["schema"];
    let content = received.json();
    let properties = schema["properties"].as_object().expect("properties");
    assert!(
        content
            .as_object()
            .expect("an object")
            .keys()
            .all(|key| properties.contains_key(key))
    );
    assert!(
        schema["required"]
            .as_array()
            .expect("a list")
            .iter()
            .all(|key| !content[key.as_str().unwrap()].is_null())
    );
    assert_eq!(properties["status"]["enum"], json!([content["status"]]));
}

#[tokio::test]
async fn the_components_describe_the_responses() {
    for headers in [
        Headers::Draft08.and(Headers::LegacyEpoch),
        Headers::Draft07.and(Headers::LegacyEpoch),
        Headers::Draft06.and(Headers::LegacyEpoch),
        Headers::LegacyEpoch,
        Headers::None,
    ] {
        let trial = Policy::new("trial", SlidingLog::per_hour(9))
            .key(key::ip())
            .observe_only();
        let layer = RateLimitLayer::new(MemoryStore::new(), [policy(), trial]).headers(headers);
        let layer = layer.observed_header(true);
        let components = layer.openapi();
        assert!(components["responses"]["ServiceUnavailable"].is_null());
        let app = Router::new().route("/", route(async || "hi").layer(layer));
        send(&app, get("/")).await;
        let denied = send(&app, get("/")).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
        assert_describes(&components, "TooManyRequests", &denied);
    }

    let layer = RateLimitLayer::new(Broken::default(), policy().failure_mode(FailureMode::Closed));
    let components = layer.openapi();
    let app = Router::new().route("/", route(async || "hi").layer(layer));
    assert_describes(&components, "ServiceUnavailable", &send(&app, get("/")).await);
}

#[tokio::test]
async fn the_detail_of_a_cost_above_the_limit_is_described() {
    let layer = RateLimitLayer::new(MemoryStore::new(), policy().cost_fn(|_| 2));
    let components = layer.openapi();
    let app = Router::new().route("/", route(async || "hi").layer(layer));
    let denied = send(&app, get("/")).await;
    assert_eq!(denied.json()["detail"], "api: costs 2, the limit is 1");
    assert_describes_content(&components["responses"]["TooManyRequests"], &denied);
}

/// A public document has no limits that are tried out.
#[test]
fn a_policy_that_observes_is_not_described() {
    let trial = || policy().failure_mode(FailureMode::Closed);
    for (trial, description) in [
        (trial().observe_only(), "A limit denies the request."),
        (
            trial().enforce_share(0.1),
            "A limit denies the request: `api` (sliding-log 1/min).",
        ),
    ] {
        let is_closed = description.contains("api");
        let responses = RateLimitLayer::new(MemoryStore::new(), trial).openapi()["responses"].take();
        assert_eq!(responses["TooManyRequests"]["description"], description);
        assert_eq!(responses["ServiceUnavailable"].is_object(), is_closed);
    }
}

#[test]
fn the_description_names_plans_and_limits_that_are_chosen() {
    let chosen = Policy::with_limit_fn("chosen", |_| SlidingLog::per_minute(1)).key(key::constant("all"));
    let unlimited = Policy::new("api", Limit::Unlimited).key(key::constant("all"));
    let plans = Plans::new("free", policy())
        .plan("staff", unlimited)
        .in_each(chosen)
        .by(|_| Some("free"));
    let layer = RateLimitLayer::new(MemoryStore::new(), plans);
    let description = layer.openapi()["responses"]["TooManyRequests"]["description"].clone();
    let expected =
        "A limit denies the request: `api` of the plan `free` (sliding-log 1/min), `chosen` (chosen for each request).";
    assert_eq!(description, expected);
}
