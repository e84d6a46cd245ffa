//! Two replicas of the gateway on one Redis.

#[path = "app.rs"]
mod app;
#[path = "../../tests/it/support/redis.rs"]
#[allow(dead_code)]
mod redis;

use std::{
    future::Future,
    process::Stdio,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, Response, StatusCode, header::AUTHORIZATION},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    process::Command,
    sync::watch,
    time::timeout,
};
use tower::ServiceExt;
use tower_quota::{ManualClock, MemoryStore, RedisStore};

use self::redis::Redis;

/// Two replicas, and the Redis that both count in, which run until these are dropped.
async fn replicas() -> ([Router; 2], (Redis, watch::Sender<()>)) {
    let (server, (running, stopped)) = (Redis::start(), watch::channel(()));
    let replicas = [replica(&server, &stopped).await, replica(&server, &stopped).await];
    (replicas, (server, running))
}

async fn replica(server: &Redis, stopped: &watch::Receiver<()>) -> Router {
    // A busy machine is no fault.
    let store = RedisStore::builder()
        .url(&server.url())
        .deadline(Duration::from_secs(60));
    let store = store.connect().await.expect("Redis replies");
    app::gateway(store, stopped.clone()).customers
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

/// The tokens of a stream that ends as a whole one.
async fn tokens(response: Response<Body>) -> usize {
    let body = text(response).await;
    assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
    body.matches("token").count()
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
    let ([one, two], (server, _running)) = replicas().await;
    let long = json!({ "max_tokens": 100_000 / 4 });
    let first = complete(&one, "sk-pro", &long).await;
    let second = complete(&two, "sk-pro", &long).await;
    assert_eq!([first.status(), second.status()], [StatusCode::OK; 2]);
    assert_eq!(left(&one, "sk-pro", "streams").await, 0);

    let waiting = {
        let two = two.clone();
        tokio::spawn(async move { complete(&two, "sk-pro", json!({ "max_tokens": 2 })).await })
    };
    eventually("it waits", async || {
        let lines = server.command::<Vec<String>>("KEYS", ["quota:1:line:*"]).await;
        !lines.is_empty()
    })
    .await;
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
    let broken = || Body::from_stream(tokio_stream::once(Err::<&str, _>("cut off")));
    for (method, status) in [("POST", 400), ("GET", 405), ("PUT", 405)] {
        let request = Request::builder().method(method).uri("/v1/chat/completions");
        let request = request.header(AUTHORIZATION, "bearer sk-free").body(broken());
        let Ok(response) = one.clone().oneshot(request.expect("a request")).await;
        assert_eq!(response.status(), status, "{method}");
    }
    assert_eq!(left(&one, "sk-free", "requests").await, 3, "none of them counts");
}

#[tokio::test]
async fn a_request_without_a_content_type_is_served() {
    let (_running, stopped) = watch::channel(());
    let replica = app::gateway(MemoryStore::new(), stopped).customers;
    let request = Request::post("/v1/chat/completions").header(AUTHORIZATION, "Bearer sk-free");
    let body = json!({ "max_tokens": 4 }).to_string();
    let Ok(response) = replica
        .oneshot(request.body(Body::from(body)).expect("a request"))
        .await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(tokens(response).await, 2);
}

#[tokio::test]
async fn a_reset_is_rounded_up() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let (_running, stopped) = watch::channel(());
    let replica = app::gateway(store, stopped).customers;
    let _served = complete(&replica, "sk-free", json!({ "max_tokens": 4 })).await;
    clock.advance(Duration::from_micros(1));
    let denied = complete(&replica, "sk-free", json!({ "max_tokens": 1_001 })).await;
    assert_eq!(denied.headers()["x-ratelimit-reset-tokens"], "60000ms");
}

#[tokio::test]
async fn operators_have_a_page_and_customers_have_not() {
    let (_running, stopped) = watch::channel(());
    let app::Gateway { customers, operators } = app::gateway(MemoryStore::new(), stopped);
    let operators = app::behind_password(operators, "change-me");
    for (routes, credentials, status) in [
        (&operators, "Basic b3BlcmF0b3I6Y2hhbmdlLW1l", 200),
        (&operators, "Basic b3BlcmF0b3I6Y2hhbmdlLW1", 401),
        (&operators, "", 401),
        (&customers, "Basic b3BlcmF0b3I6Y2hhbmdlLW1l", 401),
    ] {
        let request = Request::get("/").header("authorization", credentials);
        let Ok(response) = routes
            .clone()
            .oneshot(request.body(Body::empty()).expect("a request"))
            .await;
        assert_eq!(response.status(), status, "{credentials}");
    }
}

#[tokio::test]
async fn operators_need_a_password() {
    let gateway = Command::new(env!("CARGO_BIN_EXE_gateway"))
        .envs([("ADDR", "127.0.0.1:0"), ("OPERATORS_ADDR", "127.0.0.1:0")])
        .env("OPERATORS_PASSWORD", "")
        .env_remove("REDIS_URL")
        .kill_on_drop(true)
        .output();
    let output = timeout(Duration::from_secs(60), gateway).await.expect("it ends");
    let error = String::from_utf8(output.expect("the gateway starts").stderr).expect("text");
    assert!(error.contains("`OPERATORS_PASSWORD`"), "{error}");
}

#[tokio::test]
async fn a_signal_cuts_off_the_streams_which_are_charged_what_they_had() {
    let server = Redis::start();
    let mut gateway = Command::new(env!("CARGO_BIN_EXE_gateway"))
        .envs([("REDIS_URL", &*server.url()), ("ADDR", "127.0.0.1:0")])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the gateway starts");
    let mut lines = BufReader::new(gateway.stdout.take().expect("a pipe")).lines();
    let addr = loop {
        let line = lines.next_line().await.expect("text").expect("its address");
        if let Some(addr) = line.strip_prefix("listening on http://") {
            break addr.to_owned();
        }
    };

    let body = json!({ "max_tokens": 25_000 }).to_string();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer sk-pro\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let connect = async || {
        let mut stream = TcpStream::connect(&addr).await.expect("a connection");
        stream.write_all(request.as_bytes()).await.expect("it is sent");
        stream
    };
    let mut streams = Vec::new();
    for _ in 0..2 {
        let (mut stream, mut received) = (connect().await, Vec::new());
        while String::from_utf8_lossy(&received).matches("data:").count() < 3 {
            assert!(stream.read_buf(&mut received).await.expect("a part") > 0);
        }
        streams.push((stream, received));
    }
    let mut waiting = connect().await;
    eventually("it waits", async || {
        let lines = server.command::<Vec<String>>("KEYS", ["quota:1:line:*"]).await;
        !lines.is_empty()
    })
    .await;
    let pid = gateway.id().expect("it runs").to_string();
    let killed = Command::new("kill").args(["-TERM", &pid]).status().await;
    assert!(killed.is_ok_and(|status| status.success()));
    let mut tokens = 0;
    for (mut stream, mut received) in streams {
        stream.read_to_end(&mut received).await.expect("the rest");
        let text = String::from_utf8_lossy(&received).into_owned();
        assert!(
            text.starts_with("HTTP/1.1 200") && !text.ends_with("0\r\n\r\n") && !text.contains("[DONE]"),
            "it ends as a whole one: {text}"
        );
        tokens += text.matches("data:").count();
    }
    let mut refused = String::new();
    waiting.read_to_string(&mut refused).await.expect("a response");
    // On a busy machine it has waited for as long as it may.
    let ends = ["HTTP/1.1 503", "HTTP/1.1 429"];
    assert!(ends.iter().any(|status| refused.starts_with(status)), "{refused}");
    assert!(gateway.wait().await.expect("it ends").success());

    let (_running, stopped) = watch::channel(());
    let other = replica(&server, &stopped).await;
    assert_eq!(left(&other, "sk-pro", "tokens").await, 100_000 - tokens as u64);
    assert_eq!(left(&other, "sk-pro", "streams").await, 2);
}

#[tokio::test]
async fn operators_see_how_long_checks_take() {
    let recorder = app::prometheus().expect("buckets").build_recorder();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let (_running, stopped) = watch::channel(());
    let replica = app::gateway(MemoryStore::new(), stopped).customers;
    let _ = complete(&replica, "sk-free", json!({ "max_tokens": 1 })).await;
    let page = recorder.handle().render();
    assert!(page.contains("tower_quota_check_duration_seconds_bucket"), "{page}");
}
