//! The layer in tonic: on the whole server and around one service, over real connections.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use base64::{
    Engine,
    engine::general_purpose::{STANDARD, STANDARD_NO_PAD},
};
use http::{Request, Response, StatusCode, uri::PathAndQuery};
use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tonic::{
    Code, Status,
    body::Body,
    client,
    server::{self, NamedService},
    service::Routes,
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};
use tonic_prost::ProstCodec;
use tonic_types::{ErrorDetails, StatusExt};
use tonic_web::GrpcWebLayer;
use tower::{Layer, Service, ServiceExt, service_fn, util::MapRequestLayer};
use tower_quota::{
    Decision, FailureMode, Key, KeyExtractor, Limit, Limiter, MemoryStore, Policies, Policy, RateLimitLayer,
    SlidingLog,
    key::{self, KeyError},
    response::{Grpc, Problem},
};

use crate::support::{self, Broken, Browser, Clock, Fixed, Received, frames};

#[derive(Clone, PartialEq, prost::Message)]
struct Text {
    #[prost(string, tag = "1")]
    text: String,
}

/// Returns each message once or twice; written by hand, as a code generator would.
#[derive(Clone, Default)]
struct Echo {
    calls: Arc<AtomicUsize>,
}

impl Echo {
    const ONCE: &str = "/test.Echo/Once";
    const TWICE: &str = "/test.Echo/Twice";

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

impl NamedService for Echo {
    const NAME: &'static str = "test.Echo";
}

impl Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            let mut grpc = server::Grpc::new(ProstCodec::<Text, Text>::default());
            let response = match request.uri().path() {
                Self::ONCE => grpc.unary(service_fn(once), request).await,
                Self::TWICE => grpc.server_streaming(service_fn(twice), request).await,
                path => Status::unimplemented(path).into_http(),
            };
            Ok(response)
        })
    }
}

async fn once(request: tonic::Request<Text>) -> Result<tonic::Response<Text>, Status> {
    if let Some(limiter) = request.extensions().get::<Limiter>() {
        let _permit = limiter.check("42").await?.require()?;
    }
    let remaining = request.extensions().get::<Decision>().map(Decision::remaining);
    let text = format!("{}, {remaining:?} left", request.into_inner().text);
    Ok(tonic::Response::new(Text { text }))
}

type Texts = tokio_stream::Iter<std::array::IntoIter<Result<Text, Status>, 2>>;

/// Returns the message twice; a limiter denies each time for itself.
async fn twice(request: tonic::Request<Text>) -> Result<tonic::Response<Texts>, Status> {
    let limiter = request.extensions().get::<Limiter>().cloned();
    let text = request.into_inner();
    let mut texts = [Ok(text.clone()), Ok(text)];
    if let Some(limiter) = limiter {
        for text in &mut texts {
            if let Err(denied) = limiter.check("42").await?.require() {
                *text = Err(denied.into());
            }
        }
    }
    Ok(tonic::Response::new(tokio_stream::iter(texts)))
}

/// Two a minute for each address.
fn limit() -> RateLimitLayer {
    let policy = Policy::new("per-address", SlidingLog::per_minute(2)).key(key::ip());
    RateLimitLayer::new(Clock::new().memory_store(), policy)
}

async fn listen() -> (TcpIncoming, Endpoint) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    let endpoint = Endpoint::try_from(format!("http://{addr}")).expect("a good address");
    (TcpIncoming::from(listener), endpoint)
}

/// A server with the layer on all its services.
async fn with_the_layer_on_the_server(echo: Echo) -> Endpoint {
    let (incoming, endpoint) = listen().await;
    let server = Server::builder().layer(limit()).add_service(echo);
    tokio::spawn(server.serve_with_incoming(incoming));
    endpoint
}

/// A server with the layer around one of its services.
async fn with_the_layer_around_a_service(echo: Echo) -> Endpoint {
    with_a_layer_around_a_service(limit(), echo).await
}

async fn with_a_layer_around_a_service(layer: RateLimitLayer, echo: Echo) -> Endpoint {
    let (incoming, endpoint) = listen().await;
    let server = Server::builder().add_service(layer.layer(echo));
    tokio::spawn(server.serve_with_incoming(incoming));
    endpoint
}

/// A caller with a connection of its own.
struct Caller(client::Grpc<Channel>);

impl Caller {
    async fn new(endpoint: &Endpoint) -> Self {
        Self(client::Grpc::new(endpoint.connect().await.expect("the server listens")))
    }

    async fn once(&mut self, text: &str) -> Result<String, Status> {
        self.0.ready().await.expect("the connection lives");
        let request = tonic::Request::new(Text { text: text.into() });
        let path = PathAndQuery::from_static(Echo::ONCE);
        let response = self.0.unary(request, path, ProstCodec::<Text, Text>::default()).await?;
        Ok(response.into_inner().text)
    }

    /// The texts, and the status of the trailers.
    async fn twice(&mut self, text: &str) -> Result<(Vec<String>, Option<String>), Status> {
        self.0.ready().await.expect("the connection lives");
        let request = tonic::Request::new(Text { text: text.into() });
        let path = PathAndQuery::from_static(Echo::TWICE);
        let codec = ProstCodec::<Text, Text>::default();
        let mut stream = self.0.server_streaming(request, path, codec).await?.into_inner();

        let mut texts = Vec::new();
        while let Some(text) = stream.next().await {
            texts.push(text?.text);
        }
        let trailers = stream.trailers().await?.expect("trailers");
        let status = trailers
            .get("grpc-status")
            .map(|status| status.to_str().expect("a number").to_owned());
        Ok((texts, status))
    }
}

async fn two_clients_share_the_count_of_their_address(echo: Echo, endpoint: Endpoint) {
    let (mut one, mut other) = (Caller::new(&endpoint).await, Caller::new(&endpoint).await);

    assert_eq!(one.once("hi").await.expect("admitted"), "hi, Some(1) left");
    assert_eq!(other.once("hello").await.expect("admitted"), "hello, Some(0) left");
    assert_eq!(echo.calls(), 2);

    for caller in [&mut one, &mut other] {
        let denied = caller.once("hi").await.expect_err("denied");
        assert_eq!(denied.code(), Code::ResourceExhausted);
        let denied = caller.twice("hi").await.expect_err("denied");
        assert_eq!(denied.code(), Code::ResourceExhausted);
    }
    assert_eq!(echo.calls(), 2, "a denied call does not reach the service");
}

/// tonic matches all methods of a service by one route.
#[tokio::test]
async fn a_file_limits_one_method_of_a_service_and_blocks_another() {
    let file = r#"
        policies.sign-in = { limit = "2/min", key = "ip", routes = "/test.Echo/Once" }
        block = { routes = "/test.Echo/{*rest}", methods = "GET" }
    "#;
    let blocked = r#"
        policies.sign-in = { limit = "2/min", key = "ip", routes = "/test.Echo/Once" }
        block = { routes = "/test.Echo/Twice" }
    "#;
    for (file, twice) in [(file, None), (blocked, Some(Code::PermissionDenied))] {
        let policy = Policies::from_toml(file).and_then(|policies| policies.get("sign-in"));
        let layer = RateLimitLayer::new(Clock::new().memory_store(), policy.expect("a policy"));
        let endpoint = with_a_layer_around_a_service(layer, Echo::default()).await;
        let mut caller = Caller::new(&endpoint).await;
        for code in [None, None, Some(Code::ResourceExhausted)] {
            assert_eq!(caller.once("hi").await.err().map(|status| status.code()), code);
        }
        assert_eq!(caller.twice("hi").await.err().map(|status| status.code()), twice);
    }
}

#[tokio::test]
async fn two_clients_share_the_count_of_their_address_on_a_server() {
    let echo = Echo::default();
    let endpoint = with_the_layer_on_the_server(echo.clone()).await;
    two_clients_share_the_count_of_their_address(echo, endpoint).await;
}

#[tokio::test]
async fn two_clients_share_the_count_of_their_address_at_a_service() {
    let echo = Echo::default();
    let endpoint = with_the_layer_around_a_service(echo.clone()).await;
    two_clients_share_the_count_of_their_address(echo, endpoint).await;
}

async fn a_streaming_call_passes_with_its_trailers(endpoint: Endpoint) {
    let mut caller = Caller::new(&endpoint).await;
    let (texts, status) = caller.twice("hi").await.expect("admitted");
    assert_eq!(texts, ["hi", "hi"]);
    assert_eq!(status.as_deref(), Some("0"));

    // The call counts once, for all its messages.
    assert_eq!(caller.once("hi").await.expect("admitted"), "hi, Some(0) left");
}

#[tokio::test]
async fn a_streaming_call_passes_with_its_trailers_through_a_server() {
    a_streaming_call_passes_with_its_trailers(with_the_layer_on_the_server(Echo::default()).await).await;
}

#[tokio::test]
async fn a_streaming_call_passes_with_its_trailers_through_a_service() {
    a_streaming_call_passes_with_its_trailers(with_the_layer_around_a_service(Echo::default()).await).await;
}

#[tokio::test]
async fn the_name_of_a_service_passes_through() {
    fn name<S: NamedService>(_: &S) -> &'static str {
        S::NAME
    }
    assert_eq!(name(&limit().layer(Echo::default())), "test.Echo");
}

#[tokio::test]
async fn the_other_services_of_the_server_are_not_limited() {
    let (incoming, endpoint) = listen().await;
    /// The same under another name.
    #[derive(Clone, Default)]
    struct Other(Echo);

    impl NamedService for Other {
        const NAME: &'static str = "test.Other";
    }

    impl Service<Request<Body>> for Other {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = <Echo as Service<Request<Body>>>::Future;

        fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            self.0.poll_ready(cx)
        }

        fn call(&mut self, mut request: Request<Body>) -> Self::Future {
            *request.uri_mut() = http::Uri::from_static(Echo::ONCE);
            self.0.call(request)
        }
    }

    let routes = Routes::new(limit().layer(Echo::default())).add_service(Other::default());
    tokio::spawn(Server::builder().add_routes(routes).serve_with_incoming(incoming));

    let mut grpc = client::Grpc::new(endpoint.connect().await.expect("the server listens"));
    for _ in 0..5 {
        grpc.ready().await.expect("the connection lives");
        let request = tonic::Request::new(Text { text: "hi".into() });
        let path = PathAndQuery::from_static("/test.Other/Once");
        let response = grpc.unary(request, path, ProstCodec::<Text, Text>::default()).await;
        assert_eq!(response.expect("admitted").into_inner().text, "hi, None left");
    }
}

/// A server with this layer on all its services, and its authority.
async fn serve(layer: RateLimitLayer, echo: Echo) -> (Endpoint, String) {
    let (incoming, endpoint) = listen().await;
    let authority = endpoint.uri().authority().expect("an authority").to_string();
    let server = Server::builder().layer(layer).add_service(echo);
    tokio::spawn(server.serve_with_incoming(incoming));
    (endpoint, authority)
}

#[tokio::test]
async fn a_skipped_service_of_a_server_is_not_limited() {
    for (name, served) in [("test.Echo", 5), ("grpc.health.v1.Health", 1)] {
        let limit = Policy::new("api", SlidingLog::per_hour(1)).key(key::ip());
        let layer = RateLimitLayer::new(MemoryStore::new(), limit).skip_services([name]);
        let (endpoint, _) = serve(layer, Echo::default()).await;
        let mut caller = Caller::new(&endpoint).await;
        let mut answers = Vec::new();
        for _ in 0..5 {
            answers.push(caller.once("hi").await.is_ok());
        }
        assert_eq!(answers.iter().filter(|answered| **answered).count(), served, "{name}");
    }
}

/// The policy of the vectors: 100 a minute for each address.
fn default() -> Policy {
    Policy::new("default", SlidingLog::per_minute(100)).key(key::ip())
}

fn denied(wait: Duration) -> RateLimitLayer {
    RateLimitLayer::new(Fixed::denied(wait), default())
}

fn admitted() -> RateLimitLayer {
    RateLimitLayer::new(Fixed::admitted(60, 58_200), default())
}

/// The status that a tonic client reads from the response.
async fn status_from(layer: RateLimitLayer) -> Status {
    let echo = Echo::default();
    let (endpoint, _) = serve(layer, echo.clone()).await;
    let status = Caller::new(&endpoint).await.once("hi").await.expect_err("denied");
    assert_eq!(echo.calls(), 0, "a denied call does not reach the service");
    status
}

/// The field of a status, which has one line.
fn field<'a>(status: &'a Status, name: &str) -> Option<&'a str> {
    let mut lines = status.metadata().get_all(name).iter();
    let value = lines.next()?.to_str().expect("fields are text");
    assert!(lines.next().is_none(), "one line of {name}");
    Some(value)
}

#[tokio::test]
async fn gr_20_a_client_reads_the_wait_and_the_policy() {
    for wait in [
        Duration::from_secs(30),
        Duration::from_millis(1_500),
        Duration::from_micros(1),
    ] {
        let status = status_from(denied(wait)).await;
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.message(), "rate limit exceeded", "GR-10");
        assert_eq!(
            status.get_details_retry_info().expect("RetryInfo").retry_delay,
            Some(wait)
        );

        let failure = status.get_details_quota_failure().expect("QuotaFailure");
        let violations: Vec<_> = failure
            .violations
            .iter()
            .map(|violation| (violation.subject.as_str(), violation.description.as_str()))
            .collect();
        assert_eq!(violations, [("policy:default", "100 requests per 60s")]);
    }
}

#[tokio::test]
async fn the_code_and_the_message_of_the_details_are_those_of_the_fields() {
    let status = status_from(denied(Duration::from_secs(30))).await;
    let details: tonic_types::pb::Status = prost::Message::decode(status.details()).expect("a google.rpc.Status");
    assert_eq!((details.code, &*details.message), (8, status.message()));
}

/// The rows were encoded by hand.
#[test]
fn gr_14_gr_15_and_gr_17_are_decoded_by_tonic_types() {
    let retry_info = |wait| ErrorDetails::with_retry_info(Some(wait));
    let mut both = retry_info(Duration::from_secs(30));
    both.add_quota_failure_violation("policy:default", "100 requests per 60s");
    for (id, details) in [
        ("GR-14", retry_info(Duration::from_secs(30))),
        ("GR-15", retry_info(Duration::from_millis(1_500))),
        ("GR-17", both),
    ] {
        let status = Status::with_error_details(Code::ResourceExhausted, "rate limit exceeded", details);
        let encoded = STANDARD_NO_PAD.encode(status.details());
        let row = include_str!("../../vectors/grpc.md")
            .lines()
            .find(|line| line.contains(id))
            .expect("a row");
        assert!(row.contains(&format!("{encoded}`")), "{id}: {encoded}");
    }
}

#[tokio::test]
async fn gr_17_is_what_the_layer_sends() {
    let status = status_from(denied(Duration::from_secs(30))).await;
    let row = include_str!("../../vectors/grpc.md")
        .lines()
        .find(|line| line.contains("GR-17"))
        .expect("a row");
    assert!(row.contains(&format!("{}`", STANDARD_NO_PAD.encode(status.details()))));
}

#[tokio::test]
async fn gr_18_pushback_is_the_wait_in_milliseconds() {
    let wait = Duration::from_micros(1_234_500);
    for layer in [denied(wait), denied(wait).format(Grpc::new())] {
        let status = status_from(layer).await;
        assert_eq!(field(&status, "grpc-retry-pushback-ms"), Some("1235"));
        assert_eq!(
            status.get_details_retry_info().expect("RetryInfo").retry_delay,
            Some(wait)
        );
    }
}

#[tokio::test]
async fn pushback_can_be_turned_off() {
    let layer = denied(Duration::from_secs(30)).format(Grpc::new().pushback(false).or(Problem));
    let status = status_from(layer).await;
    assert_eq!(field(&status, "grpc-retry-pushback-ms"), None);
    assert!(status.get_details_retry_info().is_some());
}

#[tokio::test]
async fn gr_25_where_waiting_does_not_help_the_call_is_not_to_be_retried() {
    let none = Policy::new("none", Limit::DenyAll).key(key::ip());
    for policies in [
        vec![default().cost_fn(|_| 101)],
        vec![none.clone()],
        vec![default(), none],
    ] {
        let layer = RateLimitLayer::new(Clock::new().memory_store(), policies);
        let status = status_from(layer.retry_jitter(Duration::from_secs(9))).await;
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.get_details_retry_info().is_none());
        assert!(status.get_details_quota_failure().is_some());
        assert_eq!(field(&status, "grpc-retry-pushback-ms"), Some("-1"));
    }
    let layer = RateLimitLayer::new(Clock::new().memory_store(), default().cost_fn(|_| 101));
    let status = status_from(layer).await;
    assert_eq!(
        status.message(),
        "rate limit exceeded: default: costs 101, the limit is 100"
    );
}

#[tokio::test]
async fn gr_26_a_store_that_fails_closed_is_unavailable_for_a_second() {
    let status = status_from(RateLimitLayer::new(
        Broken::default(),
        default().failure_mode(FailureMode::Closed),
    ))
    .await;
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(
        status.get_details_retry_info().expect("RetryInfo").retry_delay,
        Some(Duration::from_secs(1))
    );
    assert!(status.get_details_quota_failure().is_none(), "no quota is exceeded");
    assert_eq!(field(&status, "grpc-retry-pushback-ms"), Some("1000"));
    assert_eq!(field(&status, "ratelimit"), None);
    assert_eq!(field(&status, "retry-after"), None, "HTTP succeeded");
}

/// RetryInfo and pushback, in milliseconds rounded up.
fn waits(status: &Status) -> [u128; 2] {
    let retry_info = status.get_details_retry_info().expect("RetryInfo");
    let pushback = field(status, "grpc-retry-pushback-ms").expect("pushback");
    [
        retry_info.retry_delay.expect("a wait").as_nanos().div_ceil(1_000_000),
        pushback.parse().expect("a number"),
    ]
}

#[tokio::test]
async fn hd_32_jitter_is_the_same_in_each_field_of_grpc() {
    let jitter = Duration::from_secs(1_000);
    let closed = RateLimitLayer::new(Broken::default(), default().failure_mode(FailureMode::Closed));
    for layer in [denied(Duration::from_secs(30)), closed] {
        let mut seen = BTreeSet::new();
        for _ in 0..10 {
            let [retry_info, pushback] = waits(&status_from(layer.clone().retry_jitter(jitter)).await);
            assert_eq!(retry_info, pushback);
            seen.insert(retry_info);
        }
        assert!(seen.len() > 2, "{seen:?}");
    }
}

#[tokio::test]
async fn gr_23_and_gr_24_only_a_post_gets_a_grpc_status_and_no_response_may_be_stored() {
    let wait = Duration::from_secs(30);
    for layer in [denied(wait), denied(wait).format(Grpc::new())] {
        let app = axum::Router::new().fallback(async || "hi").layer(layer);
        for content_type in [
            "application/grpc",
            "application/grpc-web+proto",
            "application/grpc-web-text",
        ] {
            for method in ["GET", "HEAD", "PUT", "post"] {
                let request = support::get("/app.js")
                    .method(method)
                    .header("content-type", content_type);
                let denied = support::send(&app, request).await;
                assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS, "{method}");
                assert_eq!(denied.field("grpc-status"), None, "{method}");
                assert_eq!(denied.field("retry-after"), Some("30"), "{method}");
                assert_eq!(denied.field("cache-control"), Some("no-store"), "{method}");
            }

            let request = support::get("/app.js")
                .method("POST")
                .header("content-type", content_type);
            let denied = support::send(&app, request).await;
            assert_eq!(denied.status, StatusCode::OK);
            assert_eq!(denied.field("grpc-status"), Some("8"));
            assert_eq!(denied.field("cache-control"), Some("no-store"), "GR-24");
        }
    }
}

#[tokio::test]
async fn gr_25_a_wait_for_one_policy_does_not_help_where_another_never_admits_the_call() {
    let small = Policy::new("small", SlidingLog::per_minute(1))
        .key(key::ip())
        .cost_fn(|_| 2);
    let store = Clock::new().memory_store();
    let full = || Policy::new("full", SlidingLog::per_minute(1)).key(key::ip());
    let (endpoint, _) = serve(RateLimitLayer::new(store.clone(), full()), Echo::default()).await;
    Caller::new(&endpoint).await.once("hi").await.expect("admitted");
    let status = status_from(RateLimitLayer::new(store, [full(), small])).await;
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.get_details_retry_info().is_none());
    assert_eq!(field(&status, "grpc-retry-pushback-ms"), Some("-1"));
}

#[tokio::test]
async fn a_call_without_a_key_is_refused_in_grpc() {
    struct User;

    let by = |key: Arc<dyn KeyExtractor>| {
        let policy = Policy::new("default", SlidingLog::per_minute(100)).key(key);
        RateLimitLayer::new(Clock::new().memory_store(), policy)
    };
    let status = status_from(by(Arc::new(key::header("x-user-id")))).await;
    assert_eq!(status.code(), Code::InvalidArgument);
    let status = status_from(by(Arc::new(key::extension("user", |_: &User| "")))).await;
    assert_eq!((status.code(), status.message()), (Code::Internal, "internal error"));
    assert_eq!(field(&status, "grpc-retry-pushback-ms"), Some("-1"));
}

#[tokio::test]
async fn gr_11_and_gr_13_a_message_arrives_as_it_was_written() {
    for message in ["50% used", "a\r\nx-evil: 1", "schön", "\n", "\ta\n\n"] {
        let key = key::from_fn(move |_: &http::request::Parts| Err::<Key, _>(KeyError::malformed(message)));
        let policy = Policy::new("default", SlidingLog::per_minute(100)).key(key);
        let status = status_from(RateLimitLayer::new(Clock::new().memory_store(), policy)).await;
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, message));
        assert_eq!(field(&status, "x-evil"), None);
    }
}

#[tokio::test]
async fn gr_01_and_gr_03_the_response_is_a_header_section_without_a_body() {
    for (id, content_type) in [
        ("GR-01", "application/grpc"),
        ("GR-04", "application/grpc+proto"),
        ("GR-04", "application/grpc+json"),
        ("GR-04", "application/grpc;charset=utf-8"),
        ("GR-04", "APPLICATION/GRPC"),
    ] {
        let unreached =
            service_fn(async |_: Request<Body>| -> Result<Response<Body>, Infallible> { unreachable!("it is denied") });
        let request = support::get("/any.Service/Method")
            .method("POST")
            .header("content-type", content_type);
        let request = request.body(Body::empty()).expect("a good request");
        let Ok(response) = denied(Duration::from_secs(30)).layer(unreached).oneshot(request).await;
        assert!(http_body::Body::is_end_stream(response.body()), "GR-03, {id}");
        assert_eq!(
            http_body::Body::size_hint(response.body()).exact(),
            Some(0),
            "GR-03, {id}"
        );

        let received = Received::read(response).await;
        assert_eq!(received.status, StatusCode::OK, "{id}");
        assert_eq!(received.field("content-type"), Some("application/grpc"), "{id}");
        assert_eq!(received.field("grpc-status"), Some("8"), "{id}");
        assert!(
            received
                .field("grpc-status-details-bin")
                .expect("details")
                .find('=')
                .is_none(),
            "{id}"
        );
        assert_eq!(received.field("retry-after"), None, "{id}: HTTP succeeded");
        assert_eq!(received.field("ratelimit"), Some("\"default\";r=0;t=30"), "{id}");
    }
}

/// A message of gRPC: `text: "hi"`.
const HI: &[u8] = b"\0\0\0\0\x04\x0A\x02hi";

#[tokio::test]
async fn gr_02_a_denial_is_one_headers_frame_that_ends_the_stream() {
    let closed = RateLimitLayer::new(Broken::default(), default().failure_mode(FailureMode::Closed));
    for layer in [denied(Duration::from_secs(30)), closed] {
        let (_, authority) = serve(layer, Echo::default()).await;
        for path in [Echo::ONCE, Echo::TWICE] {
            assert_eq!(frames(&authority, path, HI).await, ["HEADERS END_STREAM"]);
        }
    }
}

#[tokio::test]
async fn gr_22_the_response_of_the_service_passes_frame_by_frame() {
    let (endpoint, authority) = serve(admitted(), Echo::default()).await;
    // A method that does not exist is an error without a body.
    assert_eq!(frames(&authority, "/test.Echo/None", HI).await, ["HEADERS END_STREAM"]);
    let normal = frames(&authority, Echo::TWICE, HI).await;
    assert_eq!(normal.first().map(String::as_str), Some("HEADERS"));
    assert_eq!(
        normal.last().map(String::as_str),
        Some("HEADERS END_STREAM"),
        "trailers"
    );
    assert!(
        normal[1..normal.len() - 1].iter().all(|frame| frame == "DATA"),
        "{normal:?}"
    );

    let (texts, status) = Caller::new(&endpoint).await.twice("hi").await.expect("admitted");
    assert_eq!((texts.len(), status.as_deref()), (2, Some("0")));

    let mut grpc = client::Grpc::new(endpoint.connect().await.expect("the server listens"));
    grpc.ready().await.expect("the connection lives");
    let none = PathAndQuery::from_static("/test.Echo/None");
    let request = tonic::Request::new(Text { text: "hi".into() });
    let error = grpc
        .unary(request, none, ProstCodec::<Text, Text>::default())
        .await
        .expect_err("no such method");
    assert_eq!(
        (error.code(), error.message()),
        (Code::Unimplemented, "/test.Echo/None")
    );
}

#[tokio::test]
async fn gr_06_a_request_without_a_content_type_of_grpc_gets_an_http_status() {
    let (endpoint, _) = serve(denied(Duration::from_secs(30)), Echo::default()).await;
    let url = format!("{}a.B/C", endpoint.uri());

    // Over HTTP/2, with `te: trailers`.
    let received = Browser::http2().post(&url, "application/json", "{}").await;
    assert_eq!(received.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(received.field("retry-after"), Some("30"));
    assert_eq!(received.field("grpc-status"), None);
    assert_eq!(received.json()["violated-policies"], serde_json::json!(["default"]));
}

/// Posts a gRPC-Web call over HTTP/1.1, as browsers do.
async fn web_call(endpoint: &Endpoint, content_type: &str) -> Received {
    let url = format!("{}test.Echo/Once", endpoint.uri());
    let body = match content_type.contains("text") {
        true => STANDARD.encode(HI).into_bytes(),
        false => HI.to_vec(),
    };
    Browser::http1().post(&url, content_type, body).await
}

#[tokio::test]
async fn gr_07_a_web_call_gets_its_own_content_type_when_the_layer_is_outside() {
    let (incoming, endpoint) = listen().await;
    let mut server = Server::builder()
        .accept_http1(true)
        .layer(limit())
        .layer(GrpcWebLayer::new());
    tokio::spawn(server.add_service(Echo::default()).serve_with_incoming(incoming));

    for content_type in ["application/grpc-web+proto", "application/grpc-web-text+proto"] {
        let admitted = web_call(&endpoint, content_type).await;
        assert_eq!(admitted.status, StatusCode::OK);
        assert_eq!(admitted.field("grpc-status"), None, "it is in the body");
        assert!(!admitted.body.is_empty());
    }
    for content_type in [
        "application/grpc-web+proto",
        "application/grpc-web-text+proto",
        "application/grpc-web",
        "application/grpc-web-text",
    ] {
        let denied = web_call(&endpoint, content_type).await;
        assert_eq!(denied.status, StatusCode::OK);
        assert_eq!(denied.field("content-type"), Some(content_type));
        assert_eq!(denied.field("grpc-status"), Some("8"));
        assert!(denied.body.is_empty());
    }
}

#[tokio::test]
async fn gr_09_a_web_call_gets_its_own_content_type_when_the_layer_is_inside() {
    let (incoming, endpoint) = listen().await;
    let mut server = Server::builder()
        .accept_http1(true)
        .layer(GrpcWebLayer::new())
        .layer(limit());
    tokio::spawn(server.add_service(Echo::default()).serve_with_incoming(incoming));

    for content_type in ["application/grpc-web+proto", "application/grpc-web-text+proto"] {
        let admitted = web_call(&endpoint, content_type).await;
        assert_eq!(admitted.status, StatusCode::OK);
        assert_eq!(admitted.field("grpc-status"), None, "it is in the body");
        assert!(!admitted.body.is_empty());
    }
    for content_type in ["application/grpc-web+proto", "application/grpc-web-text+proto"] {
        let denied = web_call(&endpoint, content_type).await;
        assert_eq!(denied.status, StatusCode::OK);
        assert_eq!(denied.field("content-type"), Some(content_type));
        assert_eq!(denied.field("grpc-status"), Some("8"));
    }
}

#[tokio::test]
async fn a_route_and_a_method_share_one_budget() {
    let store = Clock::new().memory_store();
    let layer = || {
        let policy = Policy::new("global", SlidingLog::per_minute(3)).key(key::constant("all"));
        RateLimitLayer::new(store.clone(), policy)
    };
    let app = axum::Router::new()
        .route("/", axum::routing::get(async || "hi"))
        .layer(layer());
    let (endpoint, _) = serve(layer(), Echo::default()).await;
    let mut caller = Caller::new(&endpoint).await;

    assert_eq!(support::send(&app, support::get("/")).await.status, StatusCode::OK);
    assert_eq!(caller.once("hi").await.expect("admitted"), "hi, Some(1) left");
    let third = support::send(&app, support::get("/")).await;
    assert_eq!(third.field("ratelimit"), Some("\"global\";r=0;t=60"));

    assert_eq!(
        caller.once("hi").await.expect_err("denied").code(),
        Code::ResourceExhausted
    );
    assert_eq!(
        support::send(&app, support::get("/")).await.status,
        StatusCode::TOO_MANY_REQUESTS
    );
    assert_eq!(store.len(), 1);
}

#[tokio::test]
async fn a_policy_is_for_one_method_only() {
    let policy = Policy::new("twice", SlidingLog::per_minute(1))
        .key(key::ip())
        .apply_if(|parts| parts.uri.path() == Echo::TWICE);
    let (endpoint, _) = serve(
        RateLimitLayer::new(Clock::new().memory_store(), policy),
        Echo::default(),
    )
    .await;
    let mut caller = Caller::new(&endpoint).await;

    let not_limited = format!("hi, {:?} left", Some(u64::MAX));
    for _ in 0..3 {
        assert_eq!(caller.once("hi").await.expect("not limited"), not_limited);
    }
    assert!(caller.twice("hi").await.is_ok());
    assert_eq!(
        caller.twice("hi").await.expect_err("denied").code(),
        Code::ResourceExhausted
    );
    assert_eq!(caller.once("hi").await.expect("not limited"), not_limited);
}

#[cfg(feature = "tonic-tls")]
#[tokio::test]
async fn the_peer_is_found_behind_tls() {
    use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig, server::TcpConnectInfo};

    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let certificate = certified.cert.pem();
    let identity = Identity::from_pem(&certificate, certified.signing_key.serialize_pem());

    let (incoming, endpoint) = listen().await;
    let server = Server::builder().tls_config(ServerTlsConfig::new().identity(identity));
    // Where the application accepts TLS, tonic inserts what it has of TLS alone.
    let of_tls_alone = MapRequestLayer::new(|mut request: Request<Body>| {
        assert!(request.extensions_mut().remove::<TcpConnectInfo>().is_some());
        request
    });
    let server = server
        .expect("a good certificate")
        .layer(of_tls_alone)
        .layer(limit())
        .add_service(Echo::default());
    tokio::spawn(server.serve_with_incoming(incoming));

    let authority = endpoint.uri().authority().expect("an authority");
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&certificate))
        .domain_name("localhost");
    let endpoint = Endpoint::try_from(format!("https://{authority}")).expect("a good address");
    let endpoint = endpoint.tls_config(tls).expect("a good certificate");

    // Two connections, one address.
    let (mut one, mut other) = (Caller::new(&endpoint).await, Caller::new(&endpoint).await);
    assert_eq!(one.once("hi").await.expect("admitted"), "hi, Some(1) left");
    assert_eq!(other.once("hi").await.expect("admitted"), "hi, Some(0) left");
    assert_eq!(
        one.once("hi").await.expect_err("denied").code(),
        Code::ResourceExhausted
    );
}

#[tokio::test]
async fn a_server_applies_the_limits_of_its_file_after_a_reload() {
    let describe = |limit: &str| {
        let file = format!("[policies.per-address]\nlimit = \"{limit}\"\nkey = \"ip\"\n");
        Policies::from_toml(&file).expect("a policy")
    };
    let policies = describe("sliding-log 2/min");
    let policy = policies.get("per-address").expect("the policy has a key");
    let layer = RateLimitLayer::new(Clock::new().memory_store(), policy);
    let (incoming, endpoint) = listen().await;
    let server = Server::builder().layer(layer).add_service(Echo::default());
    tokio::spawn(server.serve_with_incoming(incoming));

    // The connection stays open.
    let mut caller = Caller::new(&endpoint).await;
    assert_eq!(caller.once("hi").await.expect("admitted"), "hi, Some(1) left");
    policies
        .replace(&describe("sliding-log 4/min"))
        .expect("the policy has a key");
    assert_eq!(caller.once("hi").await.expect("admitted"), "hi, Some(2) left");
    policies
        .replace(&describe("sliding-log 1/min"))
        .expect("the policy has a key");
    let denied = caller.once("hi").await.expect_err("denied");
    assert_eq!(denied.code(), Code::ResourceExhausted);
}

/// The server of a handler that this limiter limits, behind a layer.
async fn with_a_limiter_in_the_handler(limiter: Limiter) -> Endpoint {
    let (incoming, endpoint) = listen().await;
    let extend = MapRequestLayer::new(move |mut request: Request<Body>| {
        request.extensions_mut().insert(limiter.clone());
        request
    });
    let mut server = Server::builder().layer(admitted()).layer(extend);
    tokio::spawn(server.add_service(Echo::default()).serve_with_incoming(incoming));
    endpoint
}

fn exports(limit: u64) -> Limiter {
    Limiter::new(
        Clock::new().memory_store(),
        Policy::new("exports", SlidingLog::per_hour(limit)),
    )
}

/// Asserts that a status is that of a denial by `exports`, without the fields of the layer outside.
fn assert_denied_by_exports(status: &Status) {
    assert_eq!(
        (status.code(), status.message()),
        (Code::ResourceExhausted, "rate limit exceeded")
    );
    assert_eq!(field(status, "ratelimit"), Some("\"exports\";r=0;t=3600"));
    assert_eq!(field(status, "grpc-retry-pushback-ms"), Some("3600000"));
    assert_eq!(field(status, "retry-after"), None);

    let wait = status.get_details_retry_info().expect("RetryInfo").retry_delay;
    assert_eq!(wait, Some(Duration::from_secs(3_600)));
    let violations = status.get_details_quota_failure().expect("QuotaFailure").violations;
    assert_eq!(violations[0].subject, "policy:exports");
}

#[tokio::test]
async fn a_handler_denies_a_call_with_a_status_of_its_own_fields() {
    let mut caller = Caller::new(&with_a_limiter_in_the_handler(exports(1)).await).await;
    assert!(caller.once("hi").await.is_ok());
    let status = caller.once("hi").await.expect_err("denied");
    assert_denied_by_exports(&status);
    assert!(field(&status, "ratelimit-policy").is_some_and(|policies| !policies.contains("default")));
}

#[tokio::test]
async fn a_handler_denies_in_the_middle_of_a_stream() {
    let mut caller = Caller::new(&with_a_limiter_in_the_handler(exports(1)).await).await;
    let status = caller.twice("hi").await.expect_err("the second message is denied");
    assert_denied_by_exports(&status);
}

#[tokio::test]
async fn a_store_that_fails_closed_is_unavailable_in_a_handler() {
    let closed = Policy::new("exports", SlidingLog::per_hour(1)).failure_mode(FailureMode::Closed);
    let limiter = Limiter::new(Broken::default(), closed);
    let mut caller = Caller::new(&with_a_limiter_in_the_handler(limiter).await).await;
    let status = caller.once("hi").await.expect_err("the store fails");
    assert_eq!(
        (status.code(), status.message()),
        (Code::Unavailable, "temporarily unavailable")
    );
    assert_eq!(field(&status, "grpc-retry-pushback-ms"), Some("1000"));
    let wait = status.get_details_retry_info().expect("RetryInfo").retry_delay;
    assert_eq!(wait, Some(Duration::from_secs(1)));
}

#[tokio::test]
async fn the_status_of_a_call_without_a_key_is_a_choice() {
    let by_token = || {
        let policy = Policy::new("tokens", SlidingLog::per_minute(2)).key(key::header("x-token"));
        RateLimitLayer::new(Clock::new().memory_store(), policy)
    };
    let unauthenticated = Grpc::new().without_key(Code::Unauthenticated).or(Problem);
    assert_eq!(status_from(by_token()).await.code(), Code::InvalidArgument);
    let status = status_from(by_token().format(unauthenticated)).await;
    assert_eq!(status.code(), Code::Unauthenticated);
    assert_eq!(status.message(), "the request has no header `x-token`");
}
