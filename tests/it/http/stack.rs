//! The layer among layers of tower-http, around axum, hyper and tonic, over real connections.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    net::SocketAddr,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, routing::get};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, request::Builder};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::net::TcpListener;
use tonic::{
    Status,
    body::Body,
    server::NamedService,
    transport::{Server, server::TcpIncoming},
};
use tower::{Service, ServiceBuilder, service_fn};
use tower_http::{
    compression::CompressionLayer,
    cors::{Any, CorsLayer},
    timeout::TimeoutLayer,
    trace::TraceLayer,
};
use tower_quota::{Headers, Policy, RateLimitLayer, SlidingLog, key};

use crate::support::{Browser, Clock, Received, serve, serve_by_hyper};

/// Two a minute for each address.
fn limit() -> RateLimitLayer {
    let policy = Policy::new("hello", SlidingLog::per_minute(2)).key(key::ip());
    RateLimitLayer::new(Clock::new().memory_store(), policy)
}

fn cors() -> CorsLayer {
    CorsLayer::new().allow_origin(Any).expose_headers(Headers::names())
}

fn timeout() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_secs(3_600))
}

/// Our layer next to the service: the layers around it see its responses.
macro_rules! innermost {
    () => {
        ServiceBuilder::new()
            .layer(TraceLayer::new_for_http())
            .layer(cors())
            .layer(CompressionLayer::new())
            .layer(timeout())
            .layer(limit())
    };
}

/// Our layer first: a denied request does not reach the other ones.
macro_rules! outermost {
    () => {
        ServiceBuilder::new()
            .layer(limit())
            .layer(TraceLayer::new_for_http())
            .layer(cors())
            .layer(CompressionLayer::new())
            .layer(timeout())
    };
}

/// Long enough that it is compressed.
const GREETING: &str = "Hello, hello, hello, hello, hello, hello, hello, hello!";

fn router() -> Router {
    Router::new().route("/", get(async || GREETING))
}

async fn greet(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from(GREETING)))
}

/// A gRPC service without methods that responds `OK` to each call.
#[derive(Clone)]
struct Ping;

impl NamedService for Ping {
    const NAME: &'static str = "test.Ping";
}

impl Service<Request<Body>> for Ping {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        ready(Ok(Status::ok("").into_http()))
    }
}

async fn listen() -> (TcpIncoming, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    (TcpIncoming::from(listener), addr)
}

/// A request of a script of another origin.
fn cross_origin(method: Method, url: &str) -> Builder {
    Request::builder()
        .method(method)
        .uri(url)
        .header("origin", "https://example.com")
        .header("accept-encoding", "gzip")
}

async fn preflight(browser: &Browser, url: &str) -> Received {
    let request = cross_origin(Method::OPTIONS, url).header("access-control-request-method", "GET");
    browser.send(request).await
}

/// Two requests are admitted and the third is denied; every response is one that browsers show to the script.
async fn limits_behind_the_other_layers(url: &str) {
    let browser = Browser::http1();
    for _ in 0..3 {
        let preflight = preflight(&browser, url).await;
        assert_eq!(preflight.status, StatusCode::OK);
        assert_eq!(preflight.field("access-control-allow-origin"), Some("*"));
        preflight.assert_silent();
    }

    for remaining in ["\"hello\";r=1;t=60", "\"hello\";r=0;t=60"] {
        let admitted = browser.send(cross_origin(Method::GET, url)).await;
        assert_eq!(admitted.status, StatusCode::OK);
        assert_eq!(admitted.field("ratelimit"), Some(remaining));
        assert_eq!(admitted.field("content-encoding"), Some("gzip"));
        assert_eq!(admitted.field("access-control-allow-origin"), Some("*"));
    }

    let denied = browser.send(cross_origin(Method::GET, url)).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.field("retry-after"), Some("60"));
    assert_eq!(denied.field("content-encoding"), Some("gzip"));
    assert_eq!(denied.field("access-control-allow-origin"), Some("*"));
    let exposed = denied.field("access-control-expose-headers").expect("exposed fields");
    assert!(exposed.contains("retry-after"), "{exposed}");

    let plain = browser.get(url).await;
    assert_eq!(plain.json()["violated-policies"], serde_json::json!(["hello"]));
}

/// A preflight is a request like any other one, and a denial passes no other layer.
async fn limits_before_the_other_layers(url: &str) {
    let browser = Browser::http1();
    let preflight_of_first = preflight(&browser, url).await;
    assert_eq!(preflight_of_first.status, StatusCode::OK);
    assert_eq!(preflight_of_first.field("access-control-allow-origin"), Some("*"));
    assert_eq!(preflight_of_first.field("ratelimit"), Some("\"hello\";r=1;t=60"));

    let admitted = browser.send(cross_origin(Method::GET, url)).await;
    assert_eq!(admitted.status, StatusCode::OK);
    assert_eq!(admitted.field("ratelimit"), Some("\"hello\";r=0;t=60"));
    assert_eq!(admitted.field("content-encoding"), Some("gzip"));

    for denied in [
        browser.send(cross_origin(Method::GET, url)).await,
        preflight(&browser, url).await,
    ] {
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(denied.field("retry-after"), Some("60"));
        assert_eq!(denied.field("access-control-allow-origin"), None);
        assert_eq!(denied.json()["violated-policies"], serde_json::json!(["hello"]));
    }
}

/// A call with an empty message, and its gRPC status.
async fn ping(browser: &Browser, url: &str) -> (Received, Option<String>) {
    let answered = browser.post(url, "application/grpc", &[0; 5][..]).await;
    let status = answered.field("grpc-status").map(str::to_owned);
    (answered, status)
}

#[tokio::test]
async fn next_to_the_handlers_of_axum_by_calls_of_layer() {
    let app = router()
        .layer(limit())
        .layer(timeout())
        .layer(CompressionLayer::new())
        .layer(cors())
        .layer(TraceLayer::new_for_http());
    limits_behind_the_other_layers(&serve(app).await).await;
}

#[tokio::test]
async fn next_to_the_handlers_of_axum_in_a_service_builder() {
    limits_behind_the_other_layers(&serve(router().layer(innermost!())).await).await;
}

#[tokio::test]
async fn around_the_other_layers_of_axum_by_calls_of_layer() {
    let app = router()
        .layer(timeout())
        .layer(CompressionLayer::new())
        .layer(cors())
        .layer(TraceLayer::new_for_http())
        .layer(limit());
    limits_before_the_other_layers(&serve(app).await).await;
}

#[tokio::test]
async fn around_the_other_layers_of_axum_in_a_service_builder() {
    limits_before_the_other_layers(&serve(router().layer(outermost!())).await).await;
}

#[tokio::test]
async fn next_to_a_service_of_hyper() {
    let service = innermost!().service(service_fn(greet));
    limits_behind_the_other_layers(&serve_by_hyper(service).await).await;
}

#[tokio::test]
async fn around_the_other_layers_of_hyper() {
    let service = outermost!().service(service_fn(greet));
    limits_before_the_other_layers(&serve_by_hyper(service).await).await;
}

#[tokio::test]
async fn next_to_the_services_of_tonic() {
    let (incoming, addr) = listen().await;
    let server = Server::builder().layer(innermost!()).add_service(Ping);
    tokio::spawn(server.serve_with_incoming(incoming));
    let (browser, url) = (Browser::http2(), format!("http://{addr}/test.Ping/Call"));

    let preflight = preflight(&browser, &url).await;
    assert_eq!(preflight.status, StatusCode::OK);
    preflight.assert_silent();

    for status in ["0", "0", "8"] {
        let (answered, grpc_status) = ping(&browser, &url).await;
        assert_eq!(answered.status, StatusCode::OK);
        assert_eq!(grpc_status.as_deref(), Some(status));
        assert_eq!(answered.field("access-control-allow-origin"), Some("*"));
    }
}

#[tokio::test]
async fn around_the_other_layers_of_tonic() {
    let (incoming, addr) = listen().await;
    let server = Server::builder().layer(outermost!()).add_service(Ping);
    tokio::spawn(server.serve_with_incoming(incoming));
    let (browser, url) = (Browser::http2(), format!("http://{addr}/test.Ping/Call"));

    let preflight = preflight(&browser, &url).await;
    assert_eq!(preflight.status, StatusCode::OK);
    assert_eq!(preflight.field("ratelimit"), Some("\"hello\";r=1;t=60"));

    for (status, origin) in [("0", Some("*")), ("8", None)] {
        let (answered, grpc_status) = ping(&browser, &url).await;
        assert_eq!(answered.status, StatusCode::OK);
        assert_eq!(grpc_status.as_deref(), Some(status));
        assert_eq!(answered.field("access-control-allow-origin"), origin);
    }
}
