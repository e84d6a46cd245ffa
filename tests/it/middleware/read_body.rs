//! Bodies that are read before the inner service is called.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::{Json, Router, body::Body, routing::post};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use http_body_util::{Full, StreamBody};
use serde::Deserialize;
use tokio::time::Instant;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_quota::{
    MemoryStore, Policy, RateLimitLayer, ReadBodyLayer, SlidingLog, key, limit,
    response::{PlainText, Problem},
};

use super::upload::{Connection, Frames};
use crate::support::Received;

const TIME: Duration = Duration::from_secs(10);

#[derive(Clone, Deserialize)]
struct Completion {
    max_tokens: u64,
    #[serde(default)]
    team: String,
}

fn json() -> ReadBodyLayer {
    ReadBodyLayer::json::<Completion>(1_000, TIME)
}

fn of_team() -> impl tower_quota::KeyExtractor {
    key::extension("team", |completion: &Completion| completion.team.clone())
}

/// Sends a request to an echo inside of the layer.
async fn echoed<B>(layer: &ReadBodyLayer, request: Request<B>) -> Received
where
    B: http_body::Body<Data = Bytes, Error: std::fmt::Debug> + From<Bytes> + Unpin,
{
    let echo = service_fn(async |request: Request<B>| Ok::<_, Infallible>(Response::new(request.into_body())));
    let Ok(response) = layer.layer(echo).oneshot(request).await;
    Received::read(response).await
}

fn posted<B>(body: B) -> Request<B> {
    Request::post("/").body(body).expect("a good request")
}

/// A body of these parts. `None` is a pause, which does not end if it is the last part.
struct Parts(VecDeque<Option<Result<Frame<Bytes>, &'static str>>>);

impl Parts {
    fn new<const N: usize>(parts: [&'static str; N]) -> Self {
        Self(parts.map(|part| Some(Ok(Frame::data(part.into())))).into())
    }
}

impl From<Bytes> for Parts {
    fn from(bytes: Bytes) -> Self {
        Self([Some(Ok(Frame::data(bytes)))].into())
    }
}

impl http_body::Body for Parts {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        if matches!(self.0.make_contiguous(), [None]) {
            return Poll::Pending;
        }
        match self.0.pop_front() {
            Some(Some(frame)) => Poll::Ready(Some(frame)),
            Some(None) => Poll::Pending,
            None => Poll::Ready(None),
        }
    }
}

impl From<Bytes> for Frames {
    fn from(_: Bytes) -> Self {
        unreachable!("the body has no end")
    }
}

#[tokio::test(start_paused = true)]
async fn keys_costs_conditions_and_plans_depend_on_the_body() {
    let of = |parts: &http::request::Parts| parts.extensions.get::<Completion>().cloned().expect("it was read");
    let policies = [
        Policy::new("tokens", SlidingLog::per_minute(100)).cost_fn(move |parts| of(parts).max_tokens),
        Policy::new("large", SlidingLog::per_minute(1)).apply_if(move |parts| of(parts).max_tokens > 50),
        Policy::new(
            "plan",
            limit::by(move |parts| SlidingLog::per_minute(if of(parts).team == "pro" { 10 } else { 5 })),
        ),
    ];
    let policies = policies.map(|policy| policy.key(of_team()));
    let limit = ServiceBuilder::new()
        .layer(json())
        .layer(RateLimitLayer::new(MemoryStore::new(), policies));
    let app: Router = Router::new().route(
        "/",
        post(async |Json(completion): Json<Completion>| completion.team).layer(limit),
    );

    for (body, status, fields) in [
        (
            r#"{"max_tokens":60,"team":"pro"}"#,
            200,
            r#""tokens";r=40;t=60, "large";r=0;t=60, "plan";r=9;t=60"#,
        ),
        (
            r#"{"max_tokens":30,"team":"a"}"#,
            200,
            r#""tokens";r=70;t=60, "plan";r=4;t=60"#,
        ),
        (
            r#"{"max_tokens":41,"team":"pro"}"#,
            429,
            r#""tokens";r=0;t=60, "plan";r=9;t=60"#,
        ),
    ] {
        let request = Request::post("/").header("content-type", "application/json");
        let request = request.body(Body::from(body)).expect("a good request");
        let Ok(response) = app.clone().oneshot(request).await;
        let received = Received::read(response).await;
        assert_eq!(received.status, status, "{body}");
        assert_eq!(received.field("ratelimit"), Some(fields), "{body}");
        if status == 200 {
            assert!(body.contains(&*String::from_utf8_lossy(&received.body)));
        }
    }
}

#[tokio::test]
async fn the_inner_service_receives_the_same_body() {
    let layer = ReadBodyLayer::bytes(5, TIME);
    assert_eq!(echoed(&layer, posted(Full::from("hello"))).await.body, "hello");
    assert_eq!(echoed(&layer, posted(Body::from("hello"))).await.body, "hello");
    assert_eq!(
        echoed(&layer, posted(Parts::new(["he", "", "l", "lo"]))).await.body,
        "hello"
    );
    assert_eq!(echoed(&layer, posted(Parts::new([]))).await.body, "");

    let streamed = Body::new(StreamBody::new(tokio_stream::iter(
        ["hel", "lo"].map(|part| Ok::<_, Infallible>(Frame::data(Bytes::from(part)))),
    )));
    assert_eq!(echoed(&layer, posted(streamed)).await.body, "hello");
}

#[tokio::test]
async fn a_body_above_the_bound_is_too_large() {
    let layer = ReadBodyLayer::bytes(5, TIME);
    for body in [
        Parts::new(["hello!"]),
        Parts::new(["hello", "!"]),
        Parts::new(["", "he", "llo", "", "!"]),
    ] {
        assert_eq!(echoed(&layer, posted(body)).await.status, 413);
    }
    for size in [0, 1, 1_000_000] {
        let layer = ReadBodyLayer::bytes(1_000, TIME);
        let rejected = layer.layer(service_fn(async |_: Request<Frames>| {
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }));
        let Ok(rejected) = rejected.oneshot(posted(Frames(Some(size)))).await;
        assert_eq!(rejected.status(), 413, "frames of {size}");
    }
}

/// A body that must not be read.
struct Unread(SizeHint);

impl http_body::Body for Unread {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        panic!("the body is read");
    }

    fn size_hint(&self) -> SizeHint {
        self.0
    }
}

impl From<Bytes> for Unread {
    fn from(_: Bytes) -> Self {
        unreachable!("the body is not read")
    }
}

#[tokio::test]
async fn a_declared_length_above_the_bound_is_rejected_before_reading() {
    let service = ReadBodyLayer::bytes(5, TIME).layer(service_fn(async |_: Request<Unread>| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    }));
    let by_hint = posted(Unread(SizeHint::with_exact(6)));
    let by_field = Request::post("/").header("content-length", "6");
    let by_field = by_field.body(Unread(SizeHint::default())).expect("a good request");
    for request in [by_hint, by_field] {
        let Ok(rejected) = service.clone().oneshot(request).await;
        assert_eq!(rejected.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }

    // A tunnel is not read either.
    let tunnel = Request::builder().method(Method::CONNECT).uri("example.com:443");
    let tunnel = tunnel.body(Unread(SizeHint::default())).expect("a good request");
    let Ok(response) = service.oneshot(tunnel).await;
    assert_eq!(response.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_not_complete_in_time_is_too_slow() {
    let started = Instant::now();
    let mut body = Parts::new(["he"]);
    body.0.push_back(None);
    let rejected = echoed(&ReadBodyLayer::bytes(5, TIME), posted(body)).await;
    assert_eq!(
        (rejected.status, started.elapsed()),
        (StatusCode::REQUEST_TIMEOUT, TIME)
    );
    assert_eq!(rejected.field("connection"), Some("close"));
    assert_eq!(rejected.json()["detail"], "the body is not complete after 10s");
}

#[test]
fn without_a_runtime_a_body_is_read_without_a_deadline() {
    let mut body = Parts::new(["he"]);
    body.0.push_back(None);
    body.0.push_back(Some(Ok(Frame::data("llo".into()))));
    let layer = ReadBodyLayer::bytes(5, Duration::MAX);
    let mut future = pin!(echoed(&layer, posted(body)));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(future.as_mut().poll(&mut cx).is_pending());
    let Poll::Ready(received) = future.as_mut().poll(&mut cx) else {
        panic!("the body is complete")
    };
    assert_eq!(received.body, "hello");
}

#[tokio::test]
async fn a_body_of_another_kind_is_rejected_with_its_reason() {
    let nested = "[".repeat(999);
    for (layer, body, status, detail) in [
        (json(), "{\"max_tokens\":", 400, "EOF"),
        (json(), "", 400, "EOF"),
        (json(), "{'max_tokens':1}", 400, "key must be a string"),
        (json(), &*nested, 422, "invalid"),
        (json(), "{}", 422, "missing field `max_tokens`"),
        (json(), "{\"max_tokens\":-1}", 422, "invalid value"),
        (ReadBodyLayer::text(1_000, TIME), "\u{e9}", 200, ""),
        (
            ReadBodyLayer::parse(1_000, TIME, |parts, body| {
                match &body[..] == parts.uri.path().as_bytes() {
                    true => Ok(()),
                    false => Err("it is not the path"),
                }
            }),
            "/other",
            400,
            "it is not the path",
        ),
    ] {
        let received = echoed(&layer, posted(Full::from(body.to_owned()))).await;
        assert_eq!(received.status, status, "{body}");
        if status == 200 {
            assert_eq!(received.body, body);
            continue;
        }
        let problem = received.json();
        assert_eq!(received.field("content-type"), Some("application/problem+json"));
        assert_eq!(received.field("cache-control"), Some("no-store"));
        assert_eq!(problem["status"], status);
        assert_eq!(
            problem["title"],
            received.status.canonical_reason().expect("a known status")
        );
        assert!(
            problem["detail"].as_str().is_some_and(|text| text.contains(detail)),
            "{problem}"
        );
    }

    let deep = posted(Full::from("[".repeat(500_000)));
    let layer = ReadBodyLayer::json::<serde_json::Value>(1_000_000, TIME);
    assert_eq!(echoed(&layer, deep).await.status, StatusCode::BAD_REQUEST);

    let mut broken = Parts::new(["he"]);
    broken.0.push_back(Some(Err("reset")));
    let rejected = echoed(&ReadBodyLayer::bytes(5, TIME), posted(broken)).await;
    assert_eq!(
        (rejected.status, &rejected.json()["detail"]),
        (StatusCode::BAD_REQUEST, &"the body breaks off".into())
    );
}

#[tokio::test]
async fn each_format_has_the_reason() {
    let layer = ReadBodyLayer::bytes(4, TIME);
    let text = echoed(&layer.clone().format(PlainText), posted(Full::from("hello"))).await;
    assert_eq!(
        (text.status, &text.body[..]),
        (
            StatusCode::PAYLOAD_TOO_LARGE,
            &b"the body is longer than 4 bytes.\n"[..]
        )
    );

    let call = || {
        let call = Request::post("/").header("content-type", "application/grpc");
        call.body(Full::<Bytes>::from("hello")).expect("a good request")
    };
    let status = echoed(&layer, call()).await;
    assert_eq!(
        (status.status, status.field("grpc-status")),
        (StatusCode::OK, Some("8"))
    );
    assert_eq!(status.field("grpc-message"), Some("the body is longer than 4 bytes"));
    assert_eq!(
        echoed(&layer.format(Problem), call()).await.status,
        StatusCode::PAYLOAD_TOO_LARGE
    );
    let call = Request::post("/").header("content-type", "application/grpc");
    let call = call.body(Full::<Bytes>::from(&b"\xff"[..])).expect("a good request");
    let status = echoed(&ReadBodyLayer::text(5, TIME), call).await;
    assert_eq!(status.field("grpc-status"), Some("3"));
}

#[tokio::test]
async fn a_request_that_needs_no_body_passes_without_a_value() {
    for (method, body, status) in [
        (Method::GET, "", 200),
        (Method::HEAD, "", 200),
        (Method::DELETE, "", 200),
        (Method::POST, "", 400),
        (Method::PUT, "", 400),
        (Method::GET, "{", 400),
    ] {
        for streamed in [false, true] {
            let content = match streamed {
                true => Parts::new([body]),
                false => Parts::from(Bytes::from(body)),
            };
            let request = Request::builder()
                .method(&method)
                .body(content)
                .expect("a good request");
            let service = json().layer(service_fn(async |request: Request<Parts>| {
                assert!(request.extensions().get::<Completion>().is_none());
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }));
            let Ok(response) = service.oneshot(request).await;
            assert_eq!(response.status(), status, "{method} {body}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_body_holds_no_permit_and_waits_for_one_when_it_is_read() {
    let service = ConcurrencyLimit::new(
        service_fn(async |_: Request<Parts>| Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))),
        1,
    );
    let mut service = ReadBodyLayer::bytes(10, TIME).layer(service);
    let mut body = Parts::new(["he"]);
    body.0.extend([None, Some(Ok(Frame::data("llo".into())))]);
    let mut slow = pin!(service.clone().oneshot(posted(body)));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(slow.as_mut().poll(&mut cx).is_pending());

    // The permit is free, and this clone takes it.
    let other = tokio::time::timeout(TIME, service.ready())
        .await
        .expect("a permit is free");
    let Ok(other) = other;
    assert!(slow.as_mut().poll(&mut cx).is_pending(), "it waits for the permit");
    let Ok(response) = other.call(posted(Parts::new(["hi"]))).await;
    assert_eq!(response.status(), StatusCode::OK);
    let Ok(response) = slow.await;
    assert_eq!(response.status(), StatusCode::OK);
}

fn app(layer: ReadBodyLayer) -> Router {
    let closed = Policy::new("closed", tower_quota::Limit::DenyAll).key(key::constant("all"));
    let closed = closed.apply_if(|parts| parts.uri.path() == "/");
    let limit = RateLimitLayer::new(MemoryStore::new(), closed);
    Router::new()
        .fallback(async |body: Bytes| body)
        .layer(ServiceBuilder::new().layer(layer).layer(limit))
}

#[tokio::test]
async fn a_denial_after_the_body_was_read_keeps_the_connection() {
    let mut connection = Connection::to(app(ReadBodyLayer::bytes(100_000, TIME))).await;
    for fields in [
        "content-length: 100000\r\n",
        "content-length: 100000\r\nexpect: 100-continue\r\n",
    ] {
        connection.send_head(fields).await;
        if fields.contains("expect") {
            let mut go = [0; 25];
            connection.read(&mut go).await;
            assert_eq!(&go, b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        connection.send(&[b'x'; 100_000]).await;
        let head = connection.receive().await;
        assert!(
            head.starts_with("HTTP/1.1 429") && !head.contains("connection: close"),
            "{head}"
        );
    }
    assert!(connection.is_kept().await);
}

#[tokio::test]
async fn the_rest_of_a_rejected_upload_ends_the_connection_or_is_drained() {
    let layer = || ReadBodyLayer::bytes(1_000, TIME);
    let drains = layer().drain_body(1_000_000, TIME);
    for (layer, fields, kept) in [
        (layer(), "content-length: 100000\r\n", false),
        (layer(), "transfer-encoding: chunked\r\n", false),
        (layer(), "content-length: 100000\r\nexpect: 100-continue\r\n", false),
        (drains.clone(), "content-length: 100000\r\n", true),
        (drains.clone(), "transfer-encoding: chunked\r\n", true),
        (drains, "content-length: 100000\r\nexpect: 100-continue\r\n", false),
    ] {
        let mut connection = Connection::to(app(layer)).await;
        connection.send_head(fields).await;
        if fields.contains("chunked") {
            connection.send(b"186a0\r\n").await;
        }
        if !fields.contains("expect") {
            connection.send(&[b'x'; 100_000]).await;
        }
        if fields.contains("chunked") {
            connection.send(b"\r\n0\r\n\r\n").await;
        }
        let head = connection.receive().await;
        assert!(head.starts_with("HTTP/1.1 413"), "{fields}: {head}");
        assert_eq!(head.contains("connection: close"), !kept, "{fields}: {head}");
        assert_eq!(connection.is_kept().await, kept, "{fields}");
    }
}
