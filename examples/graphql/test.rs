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
async fn a_part_of_a_second_is_one() {
    let (app, clock) = app();
    let (field, _) = query(&app, "{ books(first: 99) { title } }").await;
    assert!(field.contains(r#""complexity";r=0;"#), "{field}");
    // Two tokens come in 200 ms.
    clock.advance(Duration::from_micros(199_700));
    let (_, body) = query(&app, "{ books(first: 1) { title } }").await;
    let body: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(body["errors"][0]["extensions"]["retryAfter"], 1, "{body}");
}

#[tokio::test]
async fn a_query_above_the_burst_has_no_retry_after() {
    let (app, _) = app();
    let (field, body) = query(&app, "{ books(first: 100) { title author } }").await;
    assert_eq!(field, r#""complexity";r=0, "requests";r=29;t=60"#);
    let body: Value = serde_json::from_str(&body).expect("JSON");
    let extensions = &body["errors"][0]["extensions"];
    assert_eq!(
        *extensions,
        json!({ "code": "RATE_LIMITED", "complexity": 201, "retryAfter": null })
    );
}

/// The complexities of these queries are 1 if they wrap. The first one has 100,000 books.
#[tokio::test]
async fn a_number_of_books_that_wraps_the_complexity_is_invalid() {
    for text in [
        "{ x: books(first: 9223372036854775807) @skip(if: true) { title } \
           y: books(first: 9223372036854575807) @skip(if: true) { title } \
           z: books(first: 100000) { title author } }",
        "{ books(first: 4611686018427387904) { a: title b: title c: title d: title } }",
    ] {
        let (app, _) = app();
        let (field, body) = query(&app, text).await;
        assert_eq!(field, r#""requests";r=29;t=60"#);
        let body: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!(body["data"], Value::Null);
        let message = body["errors"][0]["message"].as_str().expect("an error");
        assert!(message.contains("Only integers from 0 to 255"), "{message}");
    }
}

#[tokio::test]
async fn no_more_than_100_books_are_resolved() {
    for (first, resolved) in [(99, 99), (101, 0)] {
        let (app, _) = app();
        let (_, body) = query(&app, &format!("{{ books(first: {first}) {{ __typename }} }}")).await;
        assert_eq!(body.matches("Book\"").count(), resolved, "{body}");
    }
}

/// Each fragment has the next one twice: 2^9 fields, and 2^31 with as many fragments as async-graphql permits.
#[tokio::test]
async fn fragments_that_multiply_are_not_validated() {
    let (app, _) = app();
    let spread = |n| format!("fragment f{n} on Query {{ ...f{0} ...f{0} }} ", n + 1);
    let fragments: String = (0..8).map(spread).collect();
    let text = format!("{{ ...f0 }} {fragments} fragment f8 on Query {{ __typename }}");
    let (_, body) = query(&app, &text).await;
    assert_eq!(body, r#"{"data":null,"errors":[{"message":"more than 4 fragments"}]}"#);
}

#[tokio::test]
async fn a_body_of_more_than_16_kib_is_413() {
    let (app, _) = app();
    let least = json!({ "query": "" }).to_string().len();
    for (length, status) in [(16 << 10, 200), ((16 << 10) + 1, 413)] {
        let response = send(&app, &" ".repeat(length - least)).await;
        assert_eq!(response.status(), status, "{length}");
    }
}

#[tokio::test]
async fn a_query_without_complexity_costs_1() {
    let (app, _) = app();
    let (field, body) = query(&app, "{ __typename }").await;
    assert!(field.starts_with(r#""complexity";r=99;"#), "{field}");
    assert_eq!(body, r#"{"data":{"__typename":"Query"}}"#);
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
