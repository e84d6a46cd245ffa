//! The layer in tonic: on the whole server and around one service, over real connections.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response, uri::PathAndQuery};
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
use tower::{Layer, Service, service_fn};
use tower_quota::{Decision, Policy, RateLimitLayer, SlidingLog, key};

use crate::support::Clock;

#[derive(Clone, PartialEq, prost::Message)]
struct Text {
    #[prost(string, tag = "1")]
    text: String,
}

/// Says everything back, once or twice, as what a code generator would write.
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
    let remaining = request.extensions().get::<Decision>().map(Decision::remaining);
    let text = format!("{}, {remaining:?} left", request.into_inner().text);
    Ok(tonic::Response::new(Text { text }))
}

type Texts = tokio_stream::Iter<std::array::IntoIter<Result<Text, Status>, 2>>;

async fn twice(request: tonic::Request<Text>) -> Result<tonic::Response<Texts>, Status> {
    let text = request.into_inner();
    let texts = [Ok(text.clone()), Ok(text)];
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
    let (incoming, endpoint) = listen().await;
    let server = Server::builder().add_service(limit().layer(echo));
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
        assert_ne!(denied.code(), Code::Ok);
        let denied = caller.twice("hi").await.expect_err("denied");
        assert_ne!(denied.code(), Code::Ok);
    }
    assert_eq!(echo.calls(), 2, "a denied call does not reach the service");
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

    // It counted once, for all its messages.
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

#[tokio::test]
async fn a_denied_call_is_answered_by_http_for_now() {
    let (incoming, endpoint) = listen().await;
    let url = endpoint.uri().to_string();
    let policy = Policy::new("one", SlidingLog::new(1, Duration::from_secs(60))).key(key::ip());
    let layer = RateLimitLayer::new(Clock::new().memory_store(), policy);
    tokio::spawn(
        Server::builder()
            .layer(layer)
            .add_service(Echo::default())
            .serve_with_incoming(incoming),
    );

    let browser = crate::support::Browser::http2();
    browser.get(&url).await;
    let denied = browser.get(&url).await;
    assert_eq!(denied.status, http::StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.field("retry-after"), Some("60"));
    assert_eq!(denied.json()["violated-policies"], serde_json::json!(["one"]));
}
