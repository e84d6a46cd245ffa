use bytes::Bytes;
use http::{
    HeaderValue, Response, Version,
    header::{CONNECTION, CONTENT_LENGTH, EXPECT, TRANSFER_ENCODING},
    request::Parts,
};

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
