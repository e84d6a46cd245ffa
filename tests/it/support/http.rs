use std::{convert::Infallible, net::SocketAddr};

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{Extensions, HeaderMap, Request, Response, StatusCode, request::Builder};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::net::TcpListener;
use tower::{Service, ServiceExt};
use tower_quota::key::PeerAddr;

/// A response whose body was read.
pub(crate) struct Received {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) extensions: Extensions,
    pub(crate) body: Bytes,
}

impl Received {
    pub(crate) async fn read<B>(response: Response<B>) -> Self
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::fmt::Debug,
    {
        let (parts, body) = response.into_parts();
        Self {
            status: parts.status,
            headers: parts.headers,
            extensions: parts.extensions,
            body: body.collect().await.expect("the body ends").to_bytes(),
        }
    }

    /// The value of a field, which has one line at most.
    #[track_caller]
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.headers.get_all(name).iter();
        let first = lines.next();
        assert!(
            lines.next().is_none(),
            "more than one line of {name}: {:?}",
            self.headers
        );
        first.map(|value| value.to_str().expect("fields are text"))
    }

    /// Panics if the response has a field about limits.
    #[track_caller]
    pub(crate) fn assert_silent(&self) {
        for name in ["ratelimit", "ratelimit-policy", "retry-after"] {
            assert_eq!(self.field(name), None);
        }
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("the body is JSON")
    }
}

/// A request from 203.0.113.7.
pub(crate) fn get(uri: &str) -> Builder {
    get_from("203.0.113.7", uri)
}

/// A request from this address.
pub(crate) fn get_from(address: &str, uri: &str) -> Builder {
    let peer = SocketAddr::new(address.parse().expect("an address"), 4711);
    Request::get(uri).extension(PeerAddr(peer))
}

/// Sends a request through a router, without a connection.
pub(crate) async fn send(app: &Router, request: Builder) -> Received {
    let request = request.body(Body::empty()).expect("a good request");
    let Ok(response) = app.clone().oneshot(request).await;
    Received::read(response).await
}

/// Serves a router over TCP, as an application does, and returns its address as a URL.
pub(crate) async fn serve(app: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async { axum::serve(listener, service).await });
    format!("http://{addr}")
}

/// Serves a Tower service by hyper, with the peer address in the extensions of its requests, and returns its URL.
pub(crate) async fn serve_by_hyper<S, C>(service: S) -> String
where
    S: Service<Request<Incoming>, Response = Response<C>, Error = Infallible, Future: Send>,
    S: Clone + Send + Sync + 'static,
    C: http_body::Body<Data = Bytes, Error: Into<tower::BoxError>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound port");
    tokio::spawn(async move {
        loop {
            let (stream, peer) = listener.accept().await.expect("a connection");
            let service = service.clone().map_request(move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(PeerAddr(peer));
                request
            });
            tokio::spawn(async move {
                auto::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
                    .await
            });
        }
    });
    format!("http://{addr}")
}

/// A client for real connections.
pub(crate) struct Browser(Client<HttpConnector, Body>);

impl Browser {
    pub(crate) fn http1() -> Self {
        Self(Client::builder(TokioExecutor::new()).build_http())
    }

    pub(crate) fn http2() -> Self {
        Self(Client::builder(TokioExecutor::new()).http2_only(true).build_http())
    }

    pub(crate) async fn get(&self, url: impl AsRef<str>) -> Received {
        self.send(Request::get(url.as_ref())).await
    }

    pub(crate) async fn head(&self, url: impl AsRef<str>) -> Received {
        self.send(Request::head(url.as_ref())).await
    }

    /// Posts a body of this content type, and accepts the same in the response.
    pub(crate) async fn post(&self, url: &str, content_type: &str, body: impl Into<Body>) -> Received {
        let request = Request::post(url)
            .header("content-type", content_type)
            .header("accept", content_type)
            .header("te", "trailers");
        self.request(request.body(body.into()).expect("a good request")).await
    }

    pub(crate) async fn send(&self, request: Builder) -> Received {
        self.request(request.body(Body::empty()).expect("a good request")).await
    }

    async fn request(&self, request: Request<Body>) -> Received {
        Received::read(self.0.request(request).await.expect("the server answers")).await
    }
}
