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

use crate::{RateLimit, RateLimitLayer, ResponseBody, ResponseFuture, future::Outcome};

/// A [`RateLimitLayer`] that reads the bodies of rejected requests, within bounds.
///
/// Made by [`RateLimitLayer::drain_body`], whose docs have an example.
#[derive(Clone, Debug)]
#[must_use]
pub struct DrainBodyLayer {
    layer: RateLimitLayer,
    bounds: Bounds,
}

#[derive(Clone, Copy, Debug)]
struct Bounds {
    bytes: u64,
    time: Duration,
}

impl DrainBodyLayer {
    pub(crate) fn new(layer: RateLimitLayer, bytes: u64, time: Duration) -> Self {
        let bounds = Bounds { bytes, time };
        Self { layer, bounds }
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
/// Made by a [`DrainBodyLayer`].
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
    /// The future of a [`DrainBody`] service.
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
    S: Service<Request<B>, Response = Response<C>>,
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
                StateProj::Responding { future, bounds } => match ready!(future.poll_outcome(cx))? {
                    Outcome::Passed(response) => return Poll::Ready(Ok(response.map(ResponseBody::passed))),
                    Outcome::Rejected(rejected, body) => match rejected.drain(body, *bounds) {
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

/// A response of the layer, and what the content of its request means for the connection.
pub(crate) struct Rejected {
    response: Response<Bytes>,
    /// Whether it is HTTP/1.x, where unread content lies before the next request.
    shares_stream: bool,
    /// Whether the client sends the content only after `100 Continue`.
    awaits_continue: bool,
    /// Whether a server that has read the head of the request has not read all of the content with it.
    long: bool,
}

/// hyper reads the head of a request into a buffer of this size. Content that is not in it is not read for a response
/// that does not need it.
const READ_WITH_THE_HEAD: u64 = 8_192;

impl Rejected {
    pub(crate) fn new(response: Response<Bytes>, parts: &Parts) -> Self {
        let headers = &parts.headers;
        let length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        let long = length.is_some_and(|length| length.parse().is_ok_and(|length: u64| length > READ_WITH_THE_HEAD));
        let expected = headers.get(EXPECT).and_then(|expected| expected.to_str().ok());
        Self {
            response,
            shares_stream: parts.version <= Version::HTTP_11,
            awaits_continue: expected.is_some_and(|expected| expected.trim().eq_ignore_ascii_case("100-continue")),
            // Where chunks end is known when the last one is read.
            long: long || headers.contains_key(TRANSFER_ENCODING),
        }
    }

    pub(crate) fn response_mut(&mut self) -> &mut Response<Bytes> {
        &mut self.response
    }

    /// The future that reads the content, if that keeps the connection.
    fn drain<B: Body>(&self, body: B, Bounds { bytes, time }: Bounds) -> Option<Drain<B>> {
        // Reading would send `100 Continue`, and the client would send what it now keeps (RFC 9110 §10.1.1).
        let keeps = self.shares_stream && !self.awaits_continue && body.size_hint().lower() <= bytes;
        // Without a runtime of tokio there is no timer.
        (keeps && tokio::runtime::Handle::try_current().is_ok()).then(|| Drain {
            body,
            left: bytes,
            deadline: sleep(time),
        })
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

pin_project! {
    /// Reads a body to its end, within bounds.
    struct Drain<B> {
        #[pin]
        body: B,
        left: u64,
        #[pin]
        deadline: Sleep,
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
