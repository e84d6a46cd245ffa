//! Requests with a body that are rejected, over real connections.

use std::{
    convert::Infallible,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::Router;
use bytes::Bytes;
use http::{Request, Response, StatusCode, Version, header::CONNECTION};
use http_body::{Frame, SizeHint};
use http_body_util::{Full, StreamBody};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::Instant,
};
use tower::{Layer, Service, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_quota::{FailureMode, Policy, RateLimitLayer, SlidingLog, key, store::Store};

use crate::support::{Broken, Fixed, Later, serve};

const MB: usize = 1_000_000;

fn policy() -> Policy {
    Policy::new("uploads", SlidingLog::per_minute(1)).key(key::constant("all"))
}

fn on(store: impl Store) -> RateLimitLayer {
    RateLimitLayer::new(store, policy())
}

fn denied() -> RateLimitLayer {
    on(Fixed::denied(Duration::from_secs(30)))
}

/// A connection to a server whose requests are all rejected.
struct Connection(TcpStream);

impl Connection {
    async fn to(app: Router) -> Self {
        let url = serve(app).await;
        let authority = url.strip_prefix("http://").expect("a URL");
        Self(TcpStream::connect(authority).await.expect("the server listens"))
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.expect("the server reads");
    }

    async fn send_head(&mut self, fields: &str) {
        self.send(format!("POST / HTTP/1.1\r\nhost: example.com\r\n{fields}\r\n").as_bytes())
            .await;
    }

    /// The head of the next response, whose content is read too.
    async fn receive(&mut self) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.0.read_u8().await.expect("a response"));
        }
        let head = String::from_utf8(head).expect("fields are text");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length = length.expect("a length").parse().expect("a number");
        self.0.read_exact(&mut vec![0; length]).await.expect("the content");
        head
    }

    /// Whether another request has a response.
    async fn is_kept(&mut self) -> bool {
        // It may be closed already.
        let again = b"POST / HTTP/1.1\r\nhost: example.com\r\ncontent-length: 0\r\n\r\n";
        let sent = self.0.write_all(again).await;
        sent.is_ok() && matches!(self.0.read(&mut [0]).await, Ok(1))
    }
}

fn app<L>(layer: L) -> Router
where
    L: Layer<axum::routing::Route> + Clone + Send + Sync + 'static,
    L::Service: Service<Request<axum::body::Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    <L::Service as Service<Request<axum::body::Body>>>::Response: axum::response::IntoResponse + 'static,
    <L::Service as Service<Request<axum::body::Body>>>::Future: Send + 'static,
{
    Router::new().fallback(async || "hi").layer(layer)
}

fn drains(layer: RateLimitLayer) -> RateLimitLayer {
    layer.drain_body(8 * MB as u64, Duration::from_secs(60))
}

/// As Python's `http.client` does, all of the request is sent before the response is read.
async fn the_response_is_received_after_an_upload(layer: RateLimitLayer, status: &str) {
    let (body, chunk) = (vec![b'x'; 5 * MB], vec![b'x'; MB]);

    let mut connection = Connection::to(app(drains(layer))).await;
    for _ in 0..2 {
        connection.send_head("content-length: 5000000\r\n").await;
        connection.send(&body).await;
        let head = connection.receive().await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{head}");
        assert!(!head.contains("connection: close"), "{head}");

        connection.send_head("transfer-encoding: chunked\r\n").await;
        for _ in 0..5 {
            connection.send(format!("{:x}\r\n", chunk.len()).as_bytes()).await;
            connection.send(&chunk).await;
            connection.send(b"\r\n").await;
        }
        connection.send(b"0\r\n\r\n").await;
        let head = connection.receive().await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{head}");
        assert!(!head.contains("connection: close"), "{head}");
    }
    assert!(connection.is_kept().await);
}

/// Checks that the next response is a denial which closes the connection.
async fn assert_denied_and_closed(connection: &mut Connection) {
    let head = connection.receive().await;
    assert!(
        head.starts_with("HTTP/1.1 429") && head.contains("connection: close"),
        "{head}"
    );
    assert!(!connection.is_kept().await);
}

#[tokio::test]
async fn a_denial_is_received_after_an_upload() {
    the_response_is_received_after_an_upload(denied(), "429").await;
}

#[tokio::test]
async fn a_denial_by_a_store_that_replies_later_is_received_after_an_upload() {
    let store = Fixed::denied(Duration::from_secs(30));
    the_response_is_received_after_an_upload(on(Later(store)), "429").await;
}

#[tokio::test]
async fn a_refusal_and_a_failure_are_received_after_an_upload() {
    let no_user = Policy::new("uploads", SlidingLog::per_minute(1)).key(key::header("x-user-id"));
    let refuses = RateLimitLayer::new(Broken::default(), no_user);
    the_response_is_received_after_an_upload(refuses, "400").await;

    let closed = Policy::new("uploads", SlidingLog::per_minute(1)).key(key::constant("all"));
    let fails = RateLimitLayer::new(Broken::default(), closed.failure_mode(FailureMode::Closed));
    the_response_is_received_after_an_upload(fails, "503").await;
}

#[tokio::test]
async fn a_body_above_the_bound_ends_the_connection() {
    let layer = || denied().drain_body(100_000, Duration::from_secs(60));

    // With a declared length above the bound, the response is sent at once.
    let mut connection = Connection::to(app(layer())).await;
    connection.send_head("content-length: 100001\r\n").await;
    assert_denied_and_closed(&mut connection).await;

    let mut connection = Connection::to(app(layer())).await;
    connection.send_head("transfer-encoding: chunked\r\n").await;
    connection.send(b"186a1\r\n").await;
    connection.send(&[b'x'; 100_001]).await;
    assert_denied_and_closed(&mut connection).await;
}

#[tokio::test]
async fn a_body_that_takes_too_long_ends_the_connection() {
    let layer = denied().drain_body(8 * MB as u64, Duration::from_millis(20));
    let mut connection = Connection::to(app(layer)).await;
    connection.send_head("content-length: 100\r\n").await;
    assert_denied_and_closed(&mut connection).await;
}

#[tokio::test]
async fn a_client_that_waits_for_100_continue_sends_no_body() {
    for app in [app(denied()), app(drains(denied()))] {
        let mut connection = Connection::to(app).await;
        connection
            .send_head("content-length: 100\r\nexpect: 100-continue\r\n")
            .await;
        let head = connection.receive().await;
        assert!(
            head.starts_with("HTTP/1.1 429") && head.contains("connection: close"),
            "{head}"
        );
    }
}

/// Without draining.
#[tokio::test]
async fn a_response_has_connection_close_if_the_server_closes_the_connection() {
    for (fields, body, kept) in [
        ("", 0, true),
        ("content-length: 100\r\n", 100, true),
        ("content-length: 100\r\n", 0, false),
        ("content-length: 100\r\n", 99, false),
        ("content-length: 100000\r\n", 1, false),
        ("transfer-encoding: chunked\r\n", 0, false),
        ("content-length: 100\r\nexpect: 100-continue\r\n", 0, false),
        ("content-length: 100\r\nexpect: 100-Continue\r\n", 0, false),
    ] {
        let stores = [denied(), on(Later(Fixed::denied(Duration::from_secs(30))))];
        for layer in stores {
            let mut connection = Connection::to(app(layer)).await;
            let head = format!("POST / HTTP/1.1\r\nhost: example.com\r\n{fields}\r\n");
            // One packet, as small requests are.
            connection.send(&[head.as_bytes(), &vec![b'x'; body]].concat()).await;
            let head = connection.receive().await;
            assert!(head.starts_with("HTTP/1.1 429"), "{head}");
            assert_eq!(head.contains("connection: close"), !kept, "{fields}: {head}");
            assert_eq!(connection.is_kept().await, kept, "{fields}");
        }
    }
}

/// A body of frames of this size, each of which is ready at once if there is a size, and never if not.
struct Frames(Option<usize>);

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.0 {
            Some(size) => Poll::Ready(Some(Ok(Frame::data(vec![0; size].into())))),
            None => Poll::Pending,
        }
    }
}

/// A body that must not be read.
struct Unread(u64);

impl http_body::Body for Unread {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        panic!("the body is read");
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0)
    }
}

async fn hello<B>(_: Request<B>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hi")))
}

async fn reject<B: http_body::Body>(layer: RateLimitLayer, request: Request<B>) -> Response<()> {
    let Ok(response) = layer.layer(service_fn(hello)).oneshot(request).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    response.map(drop)
}

#[tokio::test(start_paused = true)]
async fn draining_ends_at_its_deadline() {
    let (started, time) = (Instant::now(), Duration::from_secs(10));
    let response = reject(denied().drain_body(1_000, time), Request::new(Frames(None))).await;
    assert_eq!(started.elapsed(), time);
    assert_eq!(response.headers()[CONNECTION], "close");
}

#[tokio::test]
async fn a_body_without_end_is_read_to_the_bound() {
    for size in [0, 1, 1_000_000] {
        let layer = denied().drain_body(1_000, Duration::from_secs(3_600));
        let response = reject(layer, Request::new(Frames(Some(size)))).await;
        assert_eq!(response.headers()[CONNECTION], "close", "frames of {size}");
    }
}

#[tokio::test]
async fn a_body_of_the_bound_is_read() {
    let layer = denied().drain_body(10_000, Duration::from_secs(3_600));
    let request = Request::post("/").header("content-length", "10000");
    let body = Full::<Bytes>::from(vec![0; 10_000]);
    let response = reject(layer, request.body(body).expect("a good request")).await;
    assert!(!response.headers().contains_key(CONNECTION));
}

/// The client has closed its half of the connection, or reset its stream.
#[tokio::test]
async fn a_body_that_ends_in_an_error_ends_the_connection() {
    let layers = [denied(), denied().drain_body(1_000, Duration::from_secs(3_600))];
    for layer in layers {
        let body = StreamBody::new(tokio_stream::iter([Err::<Frame<Bytes>, _>("it is reset")]));
        let request = Request::post("/").header("content-length", "100");
        let response = reject(layer, request.body(body).expect("a good request")).await;
        assert_eq!(response.headers()[CONNECTION], "close");
    }
}

/// There is no timer.
#[test]
fn without_a_runtime_no_body_is_read() {
    let layer = denied().drain_body(10_000, Duration::from_secs(3_600));
    let request = Request::post("/").header("content-length", "10000");
    let rejected = reject(layer, request.body(Unread(10_000)).expect("a good request"));
    let Poll::Ready(response) = pin!(rejected).poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("nothing is waited for");
    };
    assert_eq!(response.headers()[CONNECTION], "close");
}

#[tokio::test]
async fn a_body_that_cannot_keep_the_connection_is_not_read() {
    let long = || Request::post("/").header("content-length", "1001");
    let layer = || denied().drain_body(1_000, Duration::from_secs(3_600));
    let response = reject(layer(), long().body(Unread(1_001)).expect("a good request")).await;
    assert_eq!(response.headers()[CONNECTION], "close");

    // Without a length, the client may end its stream when it has the response, as of gRPC.
    for version in [Version::HTTP_2, Version::HTTP_3] {
        let request = Request::post("/").version(version);
        let response = reject(layer(), request.body(Unread(100)).expect("a good request")).await;
        assert!(!response.headers().contains_key(CONNECTION));
    }
}

/// Without draining. A middleware may have put the body into another one, which does not end with its last frame.
#[tokio::test]
async fn small_content_keeps_the_connection_if_all_of_it_has_arrived() {
    for (length, frames, kept) in [
        (100, Some(100), true),
        (100, Some(50), true),
        (100, Some(60), false),
        (100, None, false),
        (8_192, Some(8_192), true),
        (0, None, true),
    ] {
        let request = Request::post("/").header("content-length", length);
        let response = reject(denied(), request.body(Frames(frames)).expect("a good request")).await;
        let closed = response.headers().contains_key(CONNECTION);
        assert_eq!(closed, !kept, "frames of {frames:?}");
    }
}

/// Without draining.
#[tokio::test]
async fn content_that_keeps_no_connection_is_not_read() {
    let small = || Request::post("/").header("content-length", "100");
    for (request, closed) in [
        (small().version(Version::HTTP_2), false),
        (small().header("expect", "100-continue"), true),
        (small().header("expect", "100-Continue"), true),
        (small().header("transfer-encoding", "chunked"), true),
        (Request::post("/").header("content-length", "8193"), true),
        (
            Request::post("/")
                .version(Version::HTTP_10)
                .header("content-length", "8193"),
            true,
        ),
    ] {
        let response = reject(denied(), request.body(Unread(100)).expect("a good request")).await;
        assert_eq!(response.headers().contains_key(CONNECTION), closed);
    }
}

/// Content of which each byte is there when the server has run since the one before.
struct OneByOne {
    left: usize,
    has_run: bool,
}

impl http_body::Body for OneByOne {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.has_run = !self.has_run;
        if self.has_run || self.left == 0 {
            return Poll::Pending;
        }
        self.left -= 1;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x")))))
    }
}

/// As hyper hands over what it has read.
#[tokio::test]
async fn content_that_arrives_in_parts_is_read_while_there_are_any() {
    for (arrived, closed) in [(3, false), (2, true), (0, true)] {
        let body = OneByOne {
            left: arrived,
            has_run: true,
        };
        let request = Request::post("/").header("content-length", "3").body(body);
        let response = reject(denied(), request.expect("a good request")).await;
        assert_eq!(response.headers().contains_key(CONNECTION), closed, "{arrived} of 3");
    }
}

/// Such a field is malformed there (RFC 9113 §8.2.2).
#[tokio::test]
async fn a_body_above_the_bound_closes_no_connection_of_http_2() {
    let layer = denied().drain_body(1_000, Duration::from_secs(3_600));
    let request = Request::post("/")
        .version(Version::HTTP_2)
        .header("content-length", "1000000");
    let response = reject(layer, request.body(Frames(Some(100))).expect("a good request")).await;
    assert!(!response.headers().contains_key(CONNECTION));
}

/// curl 7.88 discards a response if the server ends the stream before the client has sent all of the content.
#[tokio::test]
async fn curl_receives_a_denial_after_an_upload_on_http_2() {
    let url = serve(app(drains(denied()))).await;
    for size in [100, 100_000] {
        let mut content = tempfile::NamedTempFile::new().expect("a file");
        std::io::Write::write_all(&mut content, &vec![b'x'; size]).expect("a file");
        let data = format!("@{}", content.path().display());
        for _ in 0..25 {
            let curl = tokio::process::Command::new("curl")
                .args([
                    "-q",
                    "--noproxy",
                    "*",
                    "-sS",
                    "--http2-prior-knowledge",
                    "-o",
                    "/dev/null",
                    "-w",
                    "%{http_code}",
                ])
                .args(["--data-binary", &data, &url])
                .output();
            let output = curl.await.expect("curl runs");
            assert_eq!(
                String::from_utf8_lossy(&output.stdout),
                "429",
                "{size} bytes: {output:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_admitted_request_keeps_its_body() {
    let echo =
        service_fn(async |request: Request<Full<Bytes>>| Ok::<_, Infallible>(Response::new(request.into_body())));
    let service = on(Fixed::admitted(1, 1)).drain_body(0, Duration::ZERO).layer(echo);
    let Ok(response) = service.oneshot(Request::new(Full::from("a file"))).await;
    let body = crate::support::Received::read(response).await.body;
    assert_eq!(body, "a file");
}

/// A permit of the service is free while the body of a denied request is read.
async fn a_drained_request_holds_no_permit(store: impl Store) {
    let layer = RateLimitLayer::new(store, policy().apply_if(|parts| parts.uri.path() == "/denied"));
    let layer = layer.drain_body(1_000, Duration::from_secs(3_600));
    let service = layer.layer(ConcurrencyLimit::new(service_fn(hello::<Frames>), 1));
    let get = |path: &str| Request::get(path).body(Frames(None)).expect("a good request");

    let mut denied = pin!(service.clone().oneshot(get("/denied")));
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..3 {
        assert!(denied.as_mut().poll(&mut cx).is_pending(), "the body is read");
    }
    let other = tokio::time::timeout(Duration::from_secs(10), service.oneshot(get("/")));
    let Ok(response) = other.await.expect("a permit is free");
    assert_eq!(response.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn a_drained_request_holds_no_permit_when_the_store_replies_at_once() {
    a_drained_request_holds_no_permit(Fixed::denied(Duration::from_secs(30))).await;
}

#[tokio::test(start_paused = true)]
async fn a_drained_request_holds_no_permit_when_the_store_replies_later() {
    a_drained_request_holds_no_permit(Later(Fixed::denied(Duration::from_secs(30)))).await;
}
