use std::fmt::Write;

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use bytes::Bytes;
use http::{HeaderValue, Method, Response, header::CONTENT_TYPE, request::Parts};

use super::{
    format::{Rejection, ResponseFormat},
    grpc_status::{GrpcStatus, INVALID_ARGUMENT, UNAUTHENTICATED},
    text::status_only,
};
use crate::{
    decide::{GRPC, grpc_content_type},
    http::headers::{GRPC_MESSAGE, GRPC_RETRY_PUSHBACK, GRPC_STATUS, GRPC_STATUS_DETAILS},
};

/// Responds with a gRPC status, as HTTP 200 with the status in the header section ("trailers-only" in *gRPC over HTTP2*).
///
/// | rejection | status | details | pushback |
/// | --- | --- | --- | --- |
/// | limited | `RESOURCE_EXHAUSTED` (8) | `google.rpc.RetryInfo` with the wait, `google.rpc.QuotaFailure` with the policies | the wait, at most 24 days |
/// | limited, and waiting does not help | `RESOURCE_EXHAUSTED` (8) | `google.rpc.QuotaFailure` | -1 |
/// | refused | `INVALID_ARGUMENT` (3), or `INTERNAL` (13) if the server is at fault | | -1 |
/// | blocked | `PERMISSION_DENIED` (7) | | -1 |
/// | failed | `UNAVAILABLE` (14) | `google.rpc.RetryInfo` with the wait | the wait |
///
/// A streaming call counts once, when it begins. A gRPC call is a `POST` with the content type `application/grpc`,
/// `application/grpc-web` or `application/grpc-web-text`; any other request gets the
/// status without content, or the response of the format in [`or`](Self::or).
///
/// # gRPC-Web
///
/// A gRPC-Web call gets the status in the header section too, in its own content type. A browser hides these fields from
/// scripts of another origin unless CORS exposes them: [`Headers::names`](crate::Headers::names) has their names.
///
/// ```
/// use http::Request;
/// use tower_quota::{key, response::{Grpc, Rejection, ResponseFormat}, KeyExtractor};
///
/// let call = Request::post("/hello.Greeter/SayHello").header("content-type", "application/grpc");
/// let (parts, ()) = call.body(())?.into_parts();
/// let error = key::ip().extract(&parts).unwrap_err();
///
/// let refused = Grpc::new().respond(Rejection::Refused(&error), &parts);
/// assert_eq!(refused.status(), 200);
/// assert_eq!(refused.headers()["grpc-status"], "13");
/// assert_eq!(refused.headers()["grpc-message"], "internal error");
/// assert_eq!(refused.headers()["grpc-retry-pushback-ms"], "-1");
/// # Ok::<_, http::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Grpc {
    pushback: bool,
    without_key: u8,
}

impl Grpc {
    /// Responds as in the [table](Self), with pushback.
    pub fn new() -> Self {
        Self {
            pushback: true,
            without_key: INVALID_ARGUMENT,
        }
    }

    /// Whether `grpc-retry-pushback-ms` is sent.
    ///
    /// A client retries a call only if its service config has a retry policy for the status. Such a client waits for the
    /// time in this field, and does not retry if it is negative (gRFC A6). Without the field it retries after its own
    /// backoff, which uses up all attempts long before the limit admits the call. The default is `true`.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{key, response::{Grpc, Rejection, ResponseFormat}, KeyExtractor};
    ///
    /// let call = Request::post("/hello.Greeter/SayHello").header("content-type", "application/grpc");
    /// let (parts, ()) = call.body(())?.into_parts();
    /// let error = key::ip().extract(&parts).unwrap_err();
    ///
    /// let refused = Grpc::new().pushback(false).respond(Rejection::Refused(&error), &parts);
    /// assert!(!refused.headers().contains_key("grpc-retry-pushback-ms"));
    /// # Ok::<_, http::Error>(())
    /// ```
    pub fn pushback(mut self, pushback: bool) -> Self {
        self.pushback = pushback;
        self
    }

    /// Sets the status of a call whose key is [absent](crate::key::KeyError::absent), such as `tonic::Code::Unauthenticated` or
    /// 16.
    ///
    /// The status of a malformed key and that of a misconfigured server stay as they are. The default is `INVALID_ARGUMENT`
    /// (3).
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{key::KeyError, response::{Grpc, Rejection, ResponseFormat}};
    ///
    /// const UNAUTHENTICATED: i32 = 16;
    /// let format = Grpc::new().without_key(UNAUTHENTICATED);
    ///
    /// let call = Request::post("/hello.Greeter/SayHello").header("content-type", "application/grpc");
    /// let (parts, ()) = call.body(())?.into_parts();
    /// for (error, status) in [
    ///     (KeyError::absent("the call has no token"), "16"),
    ///     (KeyError::malformed("the call has two tokens"), "3"),
    ///     (KeyError::misconfigured("no user on the request"), "13"),
    /// ] {
    ///     let refused = format.respond(Rejection::Refused(&error), &parts);
    ///     assert_eq!(refused.headers()["grpc-status"], status);
    /// }
    /// # Ok::<_, http::Error>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If the code is not that of an error, from 1 to 16.
    #[track_caller]
    pub fn without_key(mut self, code: impl Into<i32>) -> Self {
        let code = code.into();
        match u8::try_from(code) {
            Ok(error @ 1..=UNAUTHENTICATED) => self.without_key = error,
            _ => {
                panic!("{code} is not the code of a gRPC error; one is from 1 to 16, such as 16 for `UNAUTHENTICATED`")
            }
        }
        self
    }

    /// Responds to requests that are not gRPC calls in another format.
    ///
    /// `Grpc::new().or(Problem)` is the default of layers and limiters.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{key, response::{self, Grpc, Rejection, ResponseFormat}, KeyExtractor};
    ///
    /// let format = Grpc::new().pushback(false).or(response::text(|rejection, _| rejection.status()));
    ///
    /// for (content_type, of_response) in [
    ///     ("application/grpc", "application/grpc"),
    ///     ("application/json", "text/plain; charset=utf-8"),
    /// ] {
    ///     let (parts, ()) = Request::post("/").header("content-type", content_type).body(())?.into_parts();
    ///     let error = key::ip().extract(&parts).unwrap_err();
    ///     let refused = format.respond(Rejection::Refused(&error), &parts);
    ///     assert_eq!(refused.headers()["content-type"], of_response);
    /// }
    /// # Ok::<_, http::Error>(())
    /// ```
    pub fn or(self, otherwise: impl ResponseFormat) -> impl ResponseFormat {
        move |rejection: Rejection<'_>, parts: &Parts| match content_type(parts) {
            Some(content_type) => self.respond_as(content_type, rejection),
            None => otherwise.respond(rejection, parts),
        }
    }

    fn respond_as(&self, content_type: HeaderValue, rejection: Rejection<'_>) -> Response<Bytes> {
        let mut status = GrpcStatus::new(rejection);
        if matches!(rejection, Rejection::Refused(error) if error.is_absent()) {
            status.code = self.without_key;
        }

        // The body is empty: status and message are in the header section, which ends the stream.
        let mut response = Response::new(Bytes::new());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, content_type);
        headers.insert(GRPC_STATUS, u16::from(status.code).into());
        if let Ok(message) = HeaderValue::try_from(percent_encoded(&status.message)) {
            headers.insert(GRPC_MESSAGE, message);
        }
        if !status.details.is_empty() {
            // Without padding: clients accept both, and some fail on wrong padding.
            if let Ok(details) = HeaderValue::try_from(STANDARD_NO_PAD.encode(&status.details)) {
                headers.insert(GRPC_STATUS_DETAILS, details);
            }
        }
        if self.pushback {
            headers.insert(GRPC_RETRY_PUSHBACK, status.pushback);
        }
        response
    }
}

impl Default for Grpc {
    fn default() -> Self {
        Self::new()
    }
}

impl ResponseFormat for Grpc {
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        let otherwise = |rejection: Rejection<'_>, _: &Parts| status_only(rejection);
        self.or(otherwise).respond(rejection, parts)
    }
}

/// The content type of the response to a gRPC call; none for any other request.
fn content_type(parts: &Parts) -> Option<HeaderValue> {
    // *gRPC over HTTP2*: a call is a POST. By its content type alone, a GET of any page would get a 200 that caches store.
    if parts.method != Method::POST {
        return None;
    }
    match grpc_content_type(&parts.headers)? {
        (GRPC, _) => Some(HeaderValue::from_static(GRPC)),
        (family, written) => {
            // What follows the family is of the client.
            let is_token = |byte: &u8| byte.is_ascii_alphanumeric() || b"/+-.".contains(byte);
            let is_type = written.iter().all(is_token) && !written.ends_with(b"+");
            let own = if is_type { written } else { family.as_bytes() };
            HeaderValue::try_from(own.to_ascii_lowercase()).ok()
        }
    }
}

/// The message as *gRPC over HTTP2* defines it: bytes from space to `~` except `%` as they are, all others as `%XX`.
fn percent_encoded(message: &str) -> String {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(byte.into()),
            _ => _ = write!(encoded, "%{byte:02X}"),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::{super::grpc_status::shortened, *};

    // GR-10, GR-11 and GR-13.
    #[test]
    fn a_message_cannot_carry_a_header() {
        assert_eq!(percent_encoded("rate limit exceeded"), "rate limit exceeded");
        assert_eq!(percent_encoded("50% used"), "50%25 used");
        assert_eq!(percent_encoded("a\r\nb"), "a%0D%0Ab");
        assert_eq!(percent_encoded("é"), "%C3%A9");
    }

    #[test]
    fn a_message_is_cut_before_the_character_that_does_not_fit() {
        let encoded = |message: String| percent_encoded(&shortened(message.into()));
        assert_eq!(encoded("\u{1}".repeat(10_000)), "%01".repeat(1_024 / 3));
        assert_eq!(encoded("\u{1}".repeat(341)), "%01".repeat(341));
        assert_eq!(encoded("é".repeat(400)), "%C3%A9".repeat(1_024 / 6));
        assert_eq!(encoded("a".repeat(1_025)), "a".repeat(1_024));
        // tonic escapes spaces. None is around a field (RFC 9113 §8.2.1).
        assert_eq!(encoded("no ".repeat(500)), "no ".repeat(204) + "no");
        assert_eq!(encoded(" no tenant: ".into()), "no tenant:");
    }

    // GR-04, GR-06 and GR-23.
    #[test]
    fn a_call_is_recognized_by_its_method_and_content_type() {
        for (requested, expected) in [
            ("application/grpc", Some("application/grpc")),
            ("application/grpc+proto", Some("application/grpc")),
            ("application/grpc+json", Some("application/grpc")),
            ("application/grpc+\u{e9}", Some("application/grpc")),
            ("application/grpc;charset=utf-8", Some("application/grpc")),
            ("application/grpc ;charset=utf-8", Some("application/grpc")),
            (" APPLICATION/GRPC ", Some("application/grpc")),
            ("application/grpc-web", Some("application/grpc-web")),
            ("application/grpc-web+proto", Some("application/grpc-web+proto")),
            ("application/grpc-web-text", Some("application/grpc-web-text")),
            ("application/grpc-web+", Some("application/grpc-web")),
            ("application/grpc-web-text+a b", Some("application/grpc-web-text")),
            ("application/grpc-web+\u{e9}", Some("application/grpc-web")),
            ("application/grpc-webby", None),
            ("application/grpcx", None),
            ("application/json", None),
            ("", None),
        ] {
            for method in [Method::POST, Method::GET, Method::HEAD, Method::PUT, Method::OPTIONS] {
                let requested = HeaderValue::from_bytes(requested.as_bytes()).unwrap();
                let request = http::Request::builder()
                    .method(&method)
                    .header(CONTENT_TYPE, &requested);
                let (parts, ()) = request.body(()).unwrap().into_parts();
                let value = content_type(&parts);
                let expected = expected.filter(|_| method == Method::POST);
                assert_eq!(
                    value.as_ref().map(|value| value.to_str().unwrap()),
                    expected,
                    "{method} {requested:?}"
                );
            }
        }
    }
}
