//! How gRPC calls end for the policies that depend on it: by the head, by the trailers, or without either.

use std::{
    convert::Infallible,
    pin::{Pin, pin},
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, uri::PathAndQuery};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, StreamBody};
use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tonic::{
    Status,
    body::Body,
    client,
    server::{self, NamedService},
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};
use tonic_prost::ProstCodec;
use tonic_web::GrpcWebLayer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{Completion, MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

use crate::support::{Browser, eventually};

/// The completions of requests, as lines.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<String>>>);

impl Seen {
    /// A layer that records completions.
    fn layer(&self) -> RateLimitLayer {
        let seen = self.clone();
        let policy = Policy::new("p", SlidingLog::per_hour(100)).key(key::constant("all"));
        RateLimitLayer::new(
            MemoryStore::new(),
            policy.refund_if(move |completion| {
                seen.0.lock().expect("no panic").push(line(completion));
                false
            }),
        )
    }

    /// The only completion since the last call.
    async fn next(&self) -> String {
        eventually("a request has ended", async || {
            !self.0.lock().expect("no panic").is_empty()
        })
        .await;
        let mut seen = self.0.lock().expect("no panic");
        assert_eq!(seen.len(), 1, "{seen:?}");
        seen.remove(0)
    }
}

fn line(completion: &Completion<'_>) -> String {
    let is = [
        (completion.is_success(), "success"),
        (completion.is_client_error(), "client error"),
        (completion.is_server_error(), "server error"),
        (completion.is_cancelled(), "cancelled"),
    ];
    let is: Vec<_> = is.into_iter().filter_map(|(is, name)| is.then_some(name)).collect();
    let status = completion.status().map(|status| status.as_u16());
    let has_content_type = completion
        .headers()
        .is_some_and(|headers| headers.contains_key("content-type"));
    assert_eq!(has_content_type, status.is_some());
    assert_eq!(
        completion.is_error(),
        completion.is_client_error() || completion.is_server_error()
    );
    format!("{status:?} {:?} {}", completion.grpc_status(), is.join(", "))
}

#[derive(Clone, PartialEq, prost::Message)]
struct Number {
    #[prost(int32, tag = "1")]
    number: i32,
}

/// Ends calls with the status that the message has; its path is the form of the response.
#[derive(Clone)]
struct Ends;

impl NamedService for Ends {
    const NAME: &'static str = "test.Ends";
}

type Numbers = Pin<Box<dyn tokio_stream::Stream<Item = Result<Number, Status>> + Send>>;

impl Service<Request<Body>> for Ends {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = server::Grpc::new(ProstCodec::<Number, Number>::default());
            let response = match request.uri().path() {
                "/test.Ends/Unary" => grpc.unary(service_fn(unary), request).await,
                "/test.Ends/Stream" => grpc.server_streaming(service_fn(stream), request).await,
                path => Status::unimplemented(path).into_http(),
            };
            Ok(response)
        })
    }
}

async fn unary(request: tonic::Request<Number>) -> Result<tonic::Response<Number>, Status> {
    match request.into_inner() {
        Number { number: 0 } => Ok(tonic::Response::new(Number { number: 0 })),
        Number { number } => Err(Status::new(number.into(), "an error")),
    }
}

/// A message, and then the end; for a negative number, messages without end.
async fn stream(request: tonic::Request<Number>) -> Result<tonic::Response<Numbers>, Status> {
    let message = Number { number: 0 };
    let numbers: Numbers = match request.into_inner().number {
        0 => Box::pin(tokio_stream::iter([Ok(message)])),
        number @ 1.. => Box::pin(tokio_stream::iter([
            Ok(message),
            Err(Status::new(number.into(), "an error")),
        ])),
        _ => Box::pin(tokio_stream::iter([Ok(message)]).chain(tokio_stream::pending())),
    };
    Ok(tonic::Response::new(numbers))
}

/// A client of a server with this layer.
async fn client(layer: RateLimitLayer) -> client::Grpc<Channel> {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    let server = Server::builder().layer(layer).add_service(Ends);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let endpoint = Endpoint::try_from(format!("http://{addr}")).expect("a good address");
    client::Grpc::new(endpoint.connect().await.expect("the server listens"))
}

#[tokio::test]
async fn a_unary_call_ends_with_the_status_in_its_head_or_trailers() {
    let seen = Seen::default();
    let mut client = client(seen.layer()).await;
    for (code, is) in [
        (0, "success"),
        (1, "client error"),
        (2, "server error"),
        (3, "client error"),
        (4, "server error"),
        (5, "client error"),
        (6, "client error"),
        (7, "client error"),
        (8, "client error"),
        (9, "client error"),
        (10, "client error"),
        (11, "client error"),
        (12, "server error"),
        (13, "server error"),
        (14, "server error"),
        (15, "server error"),
        (16, "client error"),
    ] {
        client.ready().await.expect("the connection lives");
        let path = PathAndQuery::from_static("/test.Ends/Unary");
        let codec = ProstCodec::<Number, Number>::default();
        let response = client
            .unary(tonic::Request::new(Number { number: code }), path, codec)
            .await;
        assert_eq!(response.err().map_or(0, |status| status.code().into()), code);
        assert_eq!(seen.next().await, format!("Some(200) Some({code}) {is}"));
    }
}

#[tokio::test]
async fn a_streaming_call_ends_with_the_status_in_its_trailers() {
    let seen = Seen::default();
    let mut client = client(seen.layer()).await;
    for (code, is) in [(0, "success"), (8, "client error"), (13, "server error")] {
        client.ready().await.expect("the connection lives");
        let path = PathAndQuery::from_static("/test.Ends/Stream");
        let codec = ProstCodec::<Number, Number>::default();
        let response = client
            .server_streaming(tonic::Request::new(Number { number: code }), path, codec)
            .await;
        let mut stream = response.expect("a response").into_inner();
        assert!(stream.next().await.expect("a message").is_ok());
        let end = stream
            .next()
            .await
            .map_or(0, |end| end.expect_err("the end").code().into());
        assert_eq!(end, code);
        assert_eq!(seen.next().await, format!("Some(200) Some({code}) {is}"));
    }
}

#[tokio::test]
async fn a_streaming_call_whose_client_leaves_is_cancelled() {
    let seen = Seen::default();
    let mut client = client(seen.layer()).await;
    let path = PathAndQuery::from_static("/test.Ends/Stream");
    let codec = ProstCodec::<Number, Number>::default();
    client.ready().await.expect("the connection lives");
    let response = client
        .server_streaming(tonic::Request::new(Number { number: -1 }), path, codec)
        .await;
    let mut stream = response.expect("a response").into_inner();
    assert!(stream.next().await.expect("a message").is_ok());
    assert!(seen.0.lock().expect("no panic").is_empty(), "it has not ended");
    drop(stream);
    assert_eq!(seen.next().await, "Some(200) None cancelled");
}

#[tokio::test]
async fn a_call_of_grpc_web_ends_with_the_trailers_of_the_layer_inside() {
    let seen = Seen::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    let server = Server::builder()
        .accept_http1(true)
        .layer(GrpcWebLayer::new())
        .layer(seen.layer())
        .add_service(Ends);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    // Field 1 is 8.
    let call = Bytes::from_static(&[0, 0, 0, 0, 2, 0x08, 8]);
    let url = format!("http://{addr}/test.Ends/Stream");
    let response = Browser::http1().post(&url, "application/grpc-web+proto", call).await;
    assert_eq!(response.status, 200);
    assert_eq!(seen.next().await, "Some(200) Some(8) client error");
}

/// A frame of a body, or what happens in its place.
#[derive(Clone, Copy)]
enum Step {
    Data,
    /// The last frame of a body that knows its end.
    LastData,
    Trailers(Option<&'static str>),
    Error,
    Panic,
    Wait,
}

/// A body that takes these steps.
struct Steps(std::slice::Iter<'static, Step>, bool);

impl http_body::Body for Steps {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        Poll::Ready(self.0.next().map(|step| match step {
            Step::Data => Ok(Frame::data(Bytes::from_static(b"data"))),
            Step::LastData => {
                self.1 = true;
                Ok(Frame::data(Bytes::from_static(b"data")))
            }
            Step::Trailers(status) => {
                let mut trailers = HeaderMap::new();
                if let Some(status) = status {
                    trailers.insert("grpc-status", status.parse().expect("a value"));
                }
                Ok(Frame::trailers(trailers))
            }
            Step::Error => Err("an error"),
            Step::Panic => panic!("a panic"),
            Step::Wait => Ok(Frame::data(Bytes::new())),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.1
    }
}

#[tokio::test]
async fn a_body_of_a_call_ends_once() {
    let done = "Some(200) Some(0) success";
    let unknown = "Some(200) Some(2) server error";
    let failed = "Some(200) None server error";
    let cancelled = "Some(200) None cancelled";
    let cases: [(&'static [Step], &str); 11] = [
        (&[Step::Data, Step::Trailers(Some("0"))], done),
        (&[Step::Trailers(Some("0")), Step::Error], done),
        (&[Step::Trailers(Some("0")), Step::Panic], done),
        (&[Step::Trailers(None)], unknown),
        (&[Step::Trailers(Some("no number"))], unknown),
        (&[Step::Data], unknown),
        (&[], unknown),
        (&[Step::LastData], unknown),
        (&[Step::Data, Step::Error], failed),
        (&[Step::Data, Step::Panic], failed),
        (&[Step::Data, Step::Wait], cancelled),
    ];
    for (steps, expected) in cases {
        let seen = Seen::default();
        let service = seen.layer().layer(service_fn(async |_: Request<Empty<Bytes>>| {
            let response = Response::builder().header("content-type", "application/grpc+proto");
            Ok::<_, Infallible>(response.body(Steps(steps.iter(), false)).expect("a response"))
        }));
        let response = service.oneshot(Request::new(Empty::new())).await.expect("a response");
        assert!(seen.0.lock().expect("no panic").is_empty(), "the call has not ended");

        let read = tokio::spawn(async move {
            let mut body = pin!(response.into_body());
            let frames = steps.iter().take_while(|step| !matches!(step, Step::Wait));
            // After the last frame, the end is read, except after one that is known to be the last.
            for _ in 0..frames.count() + usize::from(!matches!(steps.last(), Some(Step::Wait | Step::LastData))) {
                if !matches!(body.frame().await, Some(Ok(_))) {
                    return;
                }
            }
        });
        let _ = read.await; // it may panic
        assert_eq!(seen.next().await, expected);
    }
}

#[tokio::test]
async fn a_condition_reads_the_extensions_of_the_head_at_the_end_of_a_call() {
    #[derive(Clone)]
    struct Rows(u8);

    let policy = Policy::new("p", SlidingLog::per_hour(100)).key(key::constant("all"));
    let policy = policy.refund_if(|completion| {
        let rows = completion.extension::<Rows>().map(|rows| rows.0);
        completion.grpc_status() == Some(0) && rows == Some(0)
    });
    let store = MemoryStore::new();
    let service =
        RateLimitLayer::new(store.clone(), policy.clone()).layer(service_fn(async |_: Request<Empty<Bytes>>| {
            let response = Response::builder().header("content-type", "application/grpc");
            let body = Steps([Step::Trailers(Some("0"))].iter(), false);
            Ok::<_, Infallible>(response.extension(Rows(0)).body(body).expect("a response"))
        }));
    let response = service.oneshot(Request::new(Empty::new())).await.expect("a response");
    let _ = response.into_body().collect().await.expect("a body");
    let layer = RateLimitLayer::new(store, policy);
    let left = layer.peek(&Request::new(()).into_parts().0).await.expect("a decision");
    assert_eq!(left.remaining(), 100);
}

/// The completion of a response with these fields, whose body is not read.
async fn of_head(fields: &[(&'static str, &'static str)]) -> String {
    let seen = Seen::default();
    let service = seen.layer().layer(service_fn(async |_: Request<Empty<Bytes>>| {
        let mut response = Response::builder();
        for (name, value) in fields {
            response = response.header(*name, *value);
        }
        Ok::<_, Infallible>(response.body(Empty::<Bytes>::new()).expect("a response"))
    }));
    drop(service.oneshot(Request::new(Empty::new())).await.expect("a response"));
    seen.next().await
}

#[tokio::test]
async fn the_head_decides_where_it_has_the_status_or_where_there_are_no_trailers() {
    for (content_type, status, expected) in [
        ("application/grpc", Some("5"), "Some(200) Some(5) client error"),
        ("application/grpc;x=y", Some("0"), "Some(200) Some(0) success"),
        ("application/grpc+proto", Some("zero"), "Some(200) Some(2) server error"),
        (
            "application/grpc-web+proto",
            Some("13"),
            "Some(200) Some(13) server error",
        ),
        // Its status is in the body.
        ("application/grpc-web", None, "Some(200) None "),
        ("text/html", Some("13"), "Some(200) None success"),
        ("text/html", None, "Some(200) None success"),
        ("Application/gRPC", Some("5"), "Some(200) Some(5) client error"),
        ("application/grpcx", Some("5"), "Some(200) None success"),
        ("application/grpcx", None, "Some(200) None success"),
        ("application/grpc-webby", None, "Some(200) None success"),
        ("application/grpc", None, "Some(200) None cancelled"),
        ("Application/gRPC", None, "Some(200) None cancelled"),
        (" application/GRPC+proto ; x=y", None, "Some(200) None cancelled"),
    ] {
        let mut fields = vec![("content-type", content_type)];
        fields.extend(status.map(|status| ("grpc-status", status)));
        assert_eq!(of_head(&fields).await, expected, "{fields:?}");
    }
}

/// A server does so, and sends the head as the end of the stream.
#[tokio::test]
async fn an_empty_body_that_is_not_read_has_ended_without_a_status() {
    let seen = Seen::default();
    let service = seen.layer().layer(service_fn(async |_: Request<Empty<Bytes>>| {
        let response = Response::builder().header("content-type", "application/grpc");
        Ok::<_, Infallible>(response.body(Empty::<Bytes>::new()).expect("a response"))
    }));
    let response = service.oneshot(Request::new(Empty::new())).await.expect("a response");
    assert!(http_body::Body::is_end_stream(response.body()));
    assert!(seen.0.lock().expect("no panic").is_empty(), "the response is not sent");
    drop(response);
    assert_eq!(seen.next().await, "Some(200) Some(2) server error");
}

#[tokio::test]
async fn a_stream_of_another_type_ends_with_its_head() {
    let seen = Seen::default();
    let service = seen.layer().layer(service_fn(async |_: Request<Empty<Bytes>>| {
        let frames = tokio_stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"data")))]);
        let response = Response::builder().header("content-type", "text/event-stream");
        Ok::<_, Infallible>(response.body(StreamBody::new(frames)).expect("a response"))
    }));
    let response = service.oneshot(Request::new(Empty::new())).await.expect("a response");
    assert_eq!(seen.next().await, "Some(200) None success");
    assert_eq!(response.into_body().collect().await.expect("a body").to_bytes(), "data");
    assert!(seen.0.lock().expect("no panic").is_empty(), "it ends once");
}
