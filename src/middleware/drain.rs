use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{
    HeaderValue, Request, Response, Version,
    header::{CONNECTION, CONTENT_LENGTH, EXPECT, TRANSFER_ENCODING},
    request::Parts,
};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};
use tower_layer::Layer;
use tower_service::Service;

use super::service::Completed;
use crate::{RateLimit, RateLimitLayer, ResponseBody, ResponseFuture};

/// A [`RateLimitLayer`] that reads the bodies of rejected requests, within bounds.
///
/// Made by [`RateLimitLayer::drain_body`]; see there for an example.
#[derive(Clone, Debug)]
#[must_use]
pub struct DrainBodyLayer {
    layer: RateLimitLayer,
    bounds: Bounds,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) bytes: u64,
    pub(super) time: Duration,
}

/// Large request bodies.
impl RateLimitLayer {
    /// Reads the bodies of rejected requests on HTTP/1.x before the response, up to this many bytes and for up to this long.
    ///
    /// `time` is measured from the denial. See [large request bodies](Self#large-request-bodies). The request bodies must be an
    /// [`http_body::Body`], as those of axum, tonic and hyper are, so this makes a layer of another type, and is the last
    /// setting. By default nothing is read.
    ///
    /// ```
    /// use std::time::Duration;
    /// use bytes::Bytes;
    /// use http::{Request, StatusCode};
    /// use http_body_util::{BodyExt, Full};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let uploads = Policy::new("uploads", SlidingLog::per_minute(1)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), uploads).drain_body(8 << 20, Duration::from_secs(10));
    /// let service = layer.layer(service_fn(async |request: Request<Full<Bytes>>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(request.into_body()))
    /// }));
    ///
    /// let post = || service.clone().oneshot(Request::new(Full::from("a large file")));
    /// assert_eq!(post().await?.status(), StatusCode::OK);
    ///
    /// let denied = post().await?;
    /// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    /// assert_eq!(denied.headers()["retry-after"], "60");
    /// assert!(!denied.headers().contains_key("connection"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// The layer does not panic. Its services do, on a rejected request, on a tokio runtime without a timer
    /// ([`enable_time`](tokio::runtime::Builder::enable_time)).
    pub fn drain_body(self, bytes: u64, time: Duration) -> DrainBodyLayer {
        DrainBodyLayer {
            layer: self,
            bounds: Bounds { bytes, time },
        }
    }
}

impl<S> Layer<S> for DrainBodyLayer {
    type Service = DrainBody<S>;

    fn layer(&self, inner: S) -> Self::Service {
        DrainBody {
            service: self.layer.layer(inner),
            bounds: self.bounds,
        }
    }
}

/// A [`RateLimit`] service that reads the bodies of rejected requests, within bounds.
///
/// Made by a [`DrainBodyLayer`]; see [`RateLimitLayer::drain_body`] for an example.
#[derive(Clone, Debug)]
pub struct DrainBody<S> {
    service: RateLimit<S>,
    bounds: Bounds,
}

impl<S, B, C> Service<Request<B>> for DrainBody<S>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    B: Body,
    C: Body<Data = Bytes>,
{
    type Response = Response<ResponseBody<C>>;
    type Error = S::Error;
    type Future = DrainBodyFuture<S, B, S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        DrainBodyFuture {
            state: State::Responding {
                future: self.service.call(request),
                bounds: self.bounds,
            },
        }
    }
}

#[cfg(feature = "tonic")]
impl<S: tonic::server::NamedService> tonic::server::NamedService for DrainBody<S> {
    const NAME: &'static str = S::NAME;
}

pin_project! {
    /// Response future of [`DrainBody`].
    pub struct DrainBodyFuture<S, B, F> {
        #[pin]
        state: State<S, B, F>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, F> {
        Responding {
            #[pin]
            future: ResponseFuture<S, B, F>,
            bounds: Bounds,
        },
        Draining {
            #[pin]
            drain: Drain<B>,
            rejected: Option<Rejected>,
        },
    }
}

impl<S, B, C> Future for DrainBodyFuture<S, B, S::Future>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    B: Body,
{
    type Output = Result<Response<ResponseBody<C>>, S::Error>;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProj::Responding { future, bounds } => match ready!(future.poll_completed(cx))? {
                    Completed::Admitted(response) => return Poll::Ready(Ok(response)),
                    Completed::Rejected(rejected, body) => match Drain::new(body, *bounds, &rejected) {
                        Some(drain) => State::Draining {
                            drain,
                            rejected: Some(rejected),
                        },
                        None => return Poll::Ready(Ok(rejected.into_response(Content::Unread).map(ResponseBody::own))),
                    },
                },
                StateProj::Draining { drain, rejected } => {
                    let content = ready!(drain.poll(cx));
                    let rejected = rejected.take().expect("polled after it was ready");
                    return Poll::Ready(Ok(rejected.into_response(content).map(ResponseBody::own)));
                }
            };
            this.state.set(next);
        }
    }
}

impl<S, B, F> fmt::Debug for DrainBodyFuture<S, B, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Responding { .. } => "Responding",
            State::Draining { .. } => "Draining",
        };
        write!(f, "DrainBodyFuture({state})")
    }
}

pin_project! {
    /// Reads a body to its end, within bounds.
    pub(super) struct Drain<B> {
        #[pin]
        body: B,
        left: u64,
        #[pin]
        deadline: Sleep,
    }
}

impl<B: Body> Drain<B> {
    /// The future that reads the content, if that keeps the connection open.
    pub(super) fn new(body: B, Bounds { bytes, time }: Bounds, rejected: &Rejected) -> Option<Self> {
        let reads = rejected.gains_by_reading() && body.size_hint().lower() <= bytes;
        // Without a runtime of tokio there is no timer.
        (reads && tokio::runtime::Handle::try_current().is_ok()).then(|| Self {
            body,
            left: bytes,
            deadline: sleep(time),
        })
    }
}

impl<B: Body> Future for Drain<B> {
    type Output = Content;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Content> {
        let mut this = self.project();
        loop {
            let frame = match this.body.as_mut().poll_frame(cx) {
                Poll::Ready(None) => return Poll::Ready(Content::Read),
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Content::Begun),
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Pending => {
                    ready!(this.deadline.poll(cx));
                    return Poll::Ready(Content::Begun);
                }
            };
            // An empty frame costs a byte, so that a body of such frames has an end.
            let length = frame.data_ref().map_or(0, Buf::remaining).max(1) as u64;
            match this.left.checked_sub(length) {
                Some(left) => *this.left = left,
                None => return Poll::Ready(Content::Begun),
            }
        }
    }
}

/// A response of the layer, and what the content of its request means for the connection.
pub(crate) struct Rejected {
    response: Response<Bytes>,
    /// Whether the request is HTTP/1.x, where unread content lies before the next request.
    shares_stream: bool,
    /// Whether the client sends the content only after `100 Continue`.
    awaits_continue: bool,
    /// Whether a server that has read the head of the request has not read all of the content with it.
    long: bool,
}

/// How much of the content of a rejected request was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// None of it.
    Unread,
    /// A part.
    Begun,
    /// All of it.
    Read,
}

/// A mark in the extensions of a request: its content was read before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContentIsRead;

/// hyper reads the head of a request into a buffer of this size. Content that is not in it is not read for a response
/// that does not need it.
const READ_WITH_THE_HEAD: u64 = 8_192;

impl Rejected {
    pub(crate) fn new(response: Response<Bytes>, request: &Parts) -> Self {
        let headers = &request.headers;
        let length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        let long = length.is_some_and(|length| length.parse().is_ok_and(|length: u64| length > READ_WITH_THE_HEAD));
        // Where chunks end is known when the last one is read.
        let long = long || headers.contains_key(TRANSFER_ENCODING);
        let expected = headers.get(EXPECT).and_then(|expected| expected.to_str().ok());
        let awaits_continue = expected.is_some_and(|expected| expected.trim().eq_ignore_ascii_case("100-continue"));
        let is_read = (long || awaits_continue) && request.extensions.get::<ContentIsRead>().is_some();
        Self {
            response,
            shares_stream: request.version <= Version::HTTP_11 && !is_read,
            awaits_continue,
            long,
        }
    }

    /// The same for a request whose client has received the `100 Continue` that it may have awaited.
    pub(crate) fn without_continue(mut self) -> Self {
        self.awaits_continue = false;
        self
    }

    pub(crate) fn response_mut(&mut self) -> &mut Response<Bytes> {
        &mut self.response
    }

    /// Whether reading the content keeps the connection open.
    pub(crate) fn gains_by_reading(&self) -> bool {
        // Reading would send `100 Continue`, and the client would send what it now keeps (RFC 9110 §10.1.1).
        self.shares_stream && !self.awaits_continue
    }

    /// The response to send.
    pub(crate) fn into_response(mut self, content: Content) -> Response<Bytes> {
        let closes = match content {
            Content::Unread => self.long || self.awaits_continue,
            Content::Begun => true,
            Content::Read => false,
        };
        if self.shares_stream && closes {
            // RFC 9110 §10.1.1: a server that responds instead of reading the content indicates that it closes the
            // connection.
            let close = const { HeaderValue::from_static("close") };
            self.response.headers_mut().insert(CONNECTION, close);
        }
        self.response
    }
}
