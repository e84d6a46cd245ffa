//! Sends queries to the example.

#[path = "../graphql.rs"]
#[allow(dead_code)]
mod graphql;

use std::{net::SocketAddr, time::Duration};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::ConnectInfo,
    http::{Request, Response, StatusCode},
};
use serde_json::{Value, json};
use tower::ServiceExt;
use tower_quota::{ManualClock, MemoryStore};

const BOOKS: &str = "{ books(first: 30) { title author } }";

fn app() -> (Router, ManualClock) {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    (graphql::app(store), clock)
}

async fn send(app: &Router, query: &str) -> Response<Body> {
    let peer = SocketAddr::from(([127, 0, 0, 1], 40_000));
    let request = Request::post("/graphql")
        .extension(ConnectInfo(peer))
        .header("content-type", "application/json")
        .body(Body::from(json!({ "query": query }).to_string()))
        .expect("a request");
    app.clone().oneshot(request).await.expect("a response")
}

/// The rate limit field and the body of a response with status 200.
async fn query(app: &Router, text: &str) -> (String, String) {
    let response = send(app, text).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(!response.headers().contains_key("retry-after"));
    let field = response.headers()["ratelimit"].to_str().expect("text").to_owned();
    let body = to_bytes(response.into_body(), 1 << 20).await.expect("a body");
    (field, String::from_utf8(body.to_vec()).expect("text"))
}

#[tokio::test]
async fn a_query_sends_what_the_example_shows() {
    let page = include_str!("../graphql.rs");
    let (app, _) = app();
    for _ in 0..2 {
        let (field, body) = query(&app, BOOKS).await;
        assert!(page.contains(&format!("//! ratelimit: {field}\n")), "{field}");
        if body.contains("errors") {
            assert!(page.contains(&format!("//! {body}\n")), "{body}");
        }
    }
}

#[tokio::test]
async fn a_denied_query_is_not_resolved_and_fits_after_its_wait() {
    let (app, clock) = app();
    for _ in 0..3 {
        query(&app, BOOKS).await;
    }
    clock.advance(Duration::from_secs(3));
    let (field, body) = query(&app, BOOKS).await;
    assert!(field.starts_with(r#""complexity";r=8;"#), "{field}");
    let body: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(body["data"]["books"].as_array().map(Vec::len), Some(30));
}

#[tokio::test]
async fn a_query_above_the_burst_has_no_retry_after() {
    let (app, _) = app();
    let (field, body) = query(&app, "{ books(first: 1000) { title } }").await;
    assert_eq!(field, r#""complexity";r=0, "requests";r=29;t=60"#);
    let body: Value = serde_json::from_str(&body).expect("JSON");
    let extensions = &body["errors"][0]["extensions"];
    assert_eq!(
        *extensions,
        json!({ "code": "RATE_LIMITED", "complexity": 1_001, "retryAfter": null })
    );
}

#[tokio::test]
async fn an_invalid_query_costs_a_request_and_no_complexity() {
    let (app, _) = app();
    let (field, body) = query(&app, "{ films }").await;
    assert_eq!(field, r#""requests";r=29;t=60"#);
    assert!(body.contains("Unknown field"), "{body}");
}

#[tokio::test]
async fn too_many_requests_are_429() {
    let (app, _) = app();
    for _ in 0..30 {
        query(&app, "{ films }").await;
    }
    let denied = send(&app, "{ films }").await;
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.headers()["retry-after"], "60");
}
