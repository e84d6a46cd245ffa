//! Two replicas of the gateway on one Redis.

#[path = "app.rs"]
mod app;
#[path = "../../tests/it/support/redis.rs"]
#[allow(dead_code)]
mod redis;

use std::{
    future::Future,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, Response, StatusCode, header::AUTHORIZATION},
};
use serde_json::{Value, json};
use tower::ServiceExt;
use tower_quota::RedisStore;

use self::redis::Redis;

/// Two replicas, and the Redis that both count in.
async fn replicas() -> ([Router; 2], Redis) {
    let server = Redis::start();
    let replica = async || app::app(RedisStore::connect(&server.url()).await.expect("Redis replies"));
    ([replica().await, replica().await], server)
}

async fn complete(replica: &Router, key: &str, body: impl ToString) -> Response<Body> {
    let request = Request::post("/v1/chat/completions")
        .header(AUTHORIZATION, format!("Bearer {key}"))
        .header("content-type", "application/json")
        .body(Body::from(body.to_string()))
        .expect("a request");
    let Ok(response) = replica.clone().oneshot(request).await;
    response
}

/// The lines of a stream, until it ends.
async fn tokens(response: Response<Body>) -> usize {
    let body = to_bytes(response.into_body(), 1 << 20).await.expect("a stream");
    String::from_utf8_lossy(&body).matches("data:").count()
}

async fn text(response: Response<Body>) -> String {
    let body = to_bytes(response.into_body(), 1 << 20).await.expect("a body");
    String::from_utf8(body.to_vec()).expect("text")
}

async fn error(response: Response<Body>) -> (u16, String) {
    let status = response.status().as_u16();
    let body: Value = serde_json::from_str(&text(response).await).expect("JSON");
    (status, body["error"]["code"].as_str().expect("a code").to_owned())
}

async fn usage(replica: &Router, key: &str) -> Response<Body> {
    let request = Request::get("/v1/usage").header(AUTHORIZATION, format!("Bearer {key}"));
    let Ok(response) = replica
        .clone()
        .oneshot(request.body(Body::empty()).expect("a request"))
        .await;
    response
}

async fn left(replica: &Router, key: &str, policy: &str) -> u64 {
    let body: Value = serde_json::from_str(&text(usage(replica, key).await).await).expect("JSON");
    body["left"][policy]["remaining"].as_u64().expect("a number")
}

async fn eventually<F: Future<Output = bool>>(what: &str, holds: impl Fn() -> F) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(60), "still not: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_stream_costs_what_it_had_and_all_replicas_know() {
    let ([one, two], _server) = replicas().await;
    let response = complete(&one, "sk-free", json!({ "max_tokens": 20 })).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["x-ratelimit-remaining-requests"], "2");
    assert_eq!(response.headers()["x-ratelimit-limit-tokens"], "1000");
    assert_eq!(response.headers()["x-ratelimit-remaining-tokens"], "980");
    assert_eq!(tokens(response).await, 10);
    // Ten of the twenty come back.
    eventually("it is settled", async || left(&two, "sk-free", "tokens").await == 990).await;

    for replica in [&two, &one] {
        let response = complete(replica, "sk-free", json!({ "max_tokens": 1 })).await;
        assert_eq!(response.status(), StatusCode::OK);
        drop(response);
    }
    let denied = complete(&two, "sk-free", json!({ "max_tokens": 1 })).await;
    assert!(denied.headers().contains_key("retry-after"));
    assert_eq!(error(denied).await, (429, "rate_limit_exceeded".to_owned()));
    assert_eq!(left(&one, "sk-pro", "requests").await, 100, "another account");
}

#[tokio::test]
async fn the_replicas_respond_as_the_readme_shows() {
    let page = include_str!("README.md");
    let ([one, two], _server) = replicas().await;
    let response = complete(&one, "sk-free", json!({ "max_tokens": 4 })).await;
    for (name, value) in response.headers() {
        let line = format!("{name}: {}", value.to_str().expect("text"));
        assert!(page.lines().any(|shown| shown == line), "{line}");
    }
    assert_eq!(tokens(response).await, 2);
    eventually("it is settled", async || left(&two, "sk-free", "tokens").await == 998).await;
    eventually("the slot is free", async || left(&two, "sk-free", "streams").await == 1).await;
    let usage = text(usage(&two, "sk-free").await).await;
    let denied = text(complete(&two, "sk-free", json!({ "max_tokens": 1_001 })).await).await;
    for line in [usage, denied] {
        assert!(page.lines().any(|shown| shown == line), "{line}");
    }
}

#[tokio::test]
async fn a_third_stream_waits_until_one_of_two_ends_in_any_replica() {
    let ([one, two], _server) = replicas().await;
    let long = json!({ "max_tokens": 100_000 / 4 });
    let first = complete(&one, "sk-pro", &long).await;
    let second = complete(&two, "sk-pro", &long).await;
    assert_eq!([first.status(), second.status()], [StatusCode::OK; 2]);
    assert_eq!(left(&one, "sk-pro", "streams").await, 0);

    let waiting = {
        let two = two.clone();
        tokio::spawn(async move { complete(&two, "sk-pro", json!({ "max_tokens": 2 })).await })
    };
    // A request that waits has taken nothing.
    assert_eq!(left(&one, "sk-pro", "requests").await, 98);
    drop(first);
    let third = waiting.await.expect("it does not panic");
    assert_eq!(third.status(), StatusCode::OK);
    assert_eq!(tokens(third).await, 1);
    drop(second);
    eventually("all slots are free", async || {
        left(&one, "sk-pro", "streams").await == 2
    })
    .await;
}

#[tokio::test]
async fn what_cannot_work_is_said_in_the_shape_of_the_others() {
    let ([one, _], _server) = replicas().await;
    for (key, body, expected) in [
        (
            "sk-none",
            json!({ "max_tokens": 1 }).to_string(),
            (401, "invalid_api_key"),
        ),
        (
            "sk-free",
            json!({ "max_tokens": 1_001 }).to_string(),
            (429, "rate_limit_exceeded"),
        ),
        ("sk-free", "{".to_owned(), (400, "invalid_request_error")),
        (
            "sk-free",
            json!({ "max_tokens": "many" }).to_string(),
            (422, "invalid_request_error"),
        ),
        ("sk-free", "x".repeat(65 << 10), (413, "invalid_request_error")),
    ] {
        let (status, code) = error(complete(&one, key, body).await).await;
        assert_eq!((status, &*code), expected);
    }
    assert_eq!(left(&one, "sk-free", "requests").await, 3, "none of them counts");
}
