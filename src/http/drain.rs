use std::{
    num::NonZeroU64,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{
    HeaderValue, Response, Version,
    header::{CONNECTION, CONTENT_LENGTH, EXPECT, TRANSFER_ENCODING},
    request::Parts,
};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};

/// How much of the body of a rejected request is read, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(super) bytes: u64,
    pub(super) time: Duration,
}

pin_project! {
    /// Reads a body to its end, within bounds; or of a short one only what has arrived.
    pub(super) struct Drain<B> {
        #[pin]
        body: B,
        left: u64,
        // Boxed, so that requests that are not drained move fewer bytes. None if nothing is waited for.
        deadline: Option<Pin<Box<Sleep>>>,
        // Whether there was a frame since the server ran, which hands over one after the other.
        has_frame: bool,
    }
}

impl<B: Body> Drain<B> {
    /// The future that reads the content, if the client then receives the response.
    #[cold]
    pub(super) fn new(body: B, Bounds { bytes, time }: Bounds, rejected: &mut Rejected) -> Option<Self> {
        rejected.closes_unread |= body.size_hint().lower() > bytes;
        let reads = rejected.gains_by_reading && body.size_hint().lower() <= bytes;
        // Without a runtime of tokio there is no timer.
        (reads && tokio::runtime::Handle::try_current().is_ok()).then(|| Self {
            body,
            left: bytes,
            deadline: Some(Box::pin(sleep(time))),
            has_frame: false,
        })
    }

    /// The future that takes what has arrived of short content. A server closes the connection unless that is all of it.
    pub(super) fn of_arrived(body: B, rejected: &Rejected) -> Option<Self> {
        let left = rejected.may_have_arrived?.get();
        Some(Self {
            body,
            left,
            deadline: None,
            has_frame: false,
        })
    }
}

impl<B: Body> Future for Drain<B> {
    type Output = Content;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Content> {
        let mut this = self.project();
        loop {
            // The body itself may end only after the server has run again.
            if this.deadline.is_none() && *this.left == 0 {
                return Poll::Ready(Content::Read);
            }
            let frame = match this.body.as_mut().poll_frame(cx) {
                Poll::Ready(None) => return Poll::Ready(Content::Read),
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Content::Begun),
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Pending => {
                    if let Some(deadline) = this.deadline {
                        ready!(deadline.as_mut().poll(cx));
                    } else if std::mem::take(this.has_frame) {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    return Poll::Ready(Content::Begun);
                }
            };
            *this.has_frame = true;
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
    pub(super) response: Response<Bytes>,
    /// Whether the request is HTTP/1.x, where unread content lies before the next request.
    shares_stream: bool,
    /// Whether reading the content helps the client.
    gains_by_reading: bool,
    /// Whether a server that responds without reading the content closes the connection: the content was not read with the head of the
    /// request, or is longer than what is to be read of it, or the client sends it only after `100 Continue`.
    closes_unread: bool,
    /// The length of content on a shared stream that may have arrived with the head.
    may_have_arrived: Option<NonZeroU64>,
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

/// hyper reads the head of a request into a buffer of this size. Content that is not in it is not read for a response
/// that does not need it.
const READ_WITH_THE_HEAD: u64 = 8_192;

impl Rejected {
    #[inline]
    pub(crate) fn new(response: Response<Bytes>, request: &Parts) -> Self {
        let headers = &request.headers;
        let length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        let declared = length.and_then(|length| length.parse().ok()).unwrap_or(0);
        // Where chunks end is known when the last one is read.
        let is_long = declared > READ_WITH_THE_HEAD || headers.contains_key(TRANSFER_ENCODING);
        let expected = headers.get(EXPECT).and_then(|expected| expected.to_str().ok());
        let awaits_continue = expected.is_some_and(|expected| expected.trim().eq_ignore_ascii_case("100-continue"));
        let shares_stream = request.version <= Version::HTTP_11;
        let closes_unread = is_long || awaits_continue;
        Self {
            response,
            shares_stream,
            // Reading would send `100 Continue`, and the client would send what it now keeps (RFC 9110 §10.1.1). On a stream of
            // its own, content without a length may have no end before the response, such as that of a gRPC call.
            gains_by_reading: (shares_stream || length.is_some()) && !awaits_continue,
            closes_unread,
            may_have_arrived: NonZeroU64::new(declared).filter(|_| shares_stream && !closes_unread),
        }
    }

    /// The response to send.
    pub(crate) fn into_response(mut self, content: Content) -> Response<Bytes> {
        let closes = match content {
            Content::Unread => self.closes_unread,
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
