use std::{fmt::Write, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use bytes::Bytes;
use http::{HeaderValue, Method, Response, header::CONTENT_TYPE, request::Parts};

use super::{format::ResponseFormat, rejection::Rejection, status_only::StatusOnly};
use crate::{
    Decision, Limit, PolicyDecision,
    headers::{GRPC_MESSAGE, GRPC_RETRY_PUSHBACK, GRPC_STATUS, GRPC_STATUS_DETAILS},
};

/// Responds with a gRPC status, as HTTP 200 with the status in the header section ("trailers-only" in *gRPC over HTTP2*).
///
/// | rejection | status | details | pushback |
/// | --- | --- | --- | --- |
/// | limited | `RESOURCE_EXHAUSTED` (8) | `google.rpc.RetryInfo` with the wait, `google.rpc.QuotaFailure` with the policies | the wait |
/// | limited, and waiting does not help | `RESOURCE_EXHAUSTED` (8) | `google.rpc.QuotaFailure` | -1 |
/// | refused | `INVALID_ARGUMENT` (3), or `INTERNAL` (13) if the server is at fault | | -1 |
/// | failed | `UNAVAILABLE` (14) | `google.rpc.RetryInfo` with the wait | the wait |
///
/// A streaming call counts once, when it begins. A gRPC call is a `POST` with the content type `application/grpc`,
/// `application/grpc-web` or `application/grpc-web-text`; any other request gets the response of [`StatusOnly`].
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
}

impl Grpc {
    /// Responds as in the [table](Self), with pushback.
    pub fn new() -> Self {
        Self { pushback: true }
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

    /// Whether a request is a gRPC call.
    pub(super) fn is_call(parts: &Parts) -> bool {
        content_type(parts).is_some()
    }
}

impl Default for Grpc {
    fn default() -> Self {
        Self::new()
    }
}

// google.rpc.Code
const INVALID_ARGUMENT: u8 = 3;
const RESOURCE_EXHAUSTED: u8 = 8;
const INTERNAL: u8 = 13;
const UNAVAILABLE: u8 = 14;

impl ResponseFormat for Grpc {
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        let Some(content_type) = content_type(parts) else {
            return StatusOnly.respond(rejection, parts);
        };
        let (code, message) = match rejection {
            Rejection::Limited(_) => (RESOURCE_EXHAUSTED, "rate limit exceeded".to_owned()),
            Rejection::Refused(error) if error.is_misconfigured() => (INTERNAL, "internal error".to_owned()),
            Rejection::Refused(error) => (INVALID_ARGUMENT, error.to_string()),
            Rejection::Failed { .. } => (UNAVAILABLE, "temporarily unavailable".to_owned()),
        };

        // The body is empty: status and message are in the header section, which ends the stream.
        let mut response = Response::new(Bytes::new());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, content_type);
        headers.insert(GRPC_STATUS, u16::from(code).into());
        if let Ok(message) = HeaderValue::try_from(percent_encoded(&message)) {
            headers.insert(GRPC_MESSAGE, message);
        }

        let details = details(rejection);
        if !details.is_empty() {
            let status = status(code, &message, &details);
            // Without padding: clients accept both, and some fail on wrong padding.
            if let Ok(status) = HeaderValue::try_from(STANDARD_NO_PAD.encode(status)) {
                headers.insert(GRPC_STATUS_DETAILS, status);
            }
        }
        if self.pushback {
            headers.insert(GRPC_RETRY_PUSHBACK, pushback(rejection.retry_after()));
        }
        response
    }
}

/// The content type of the response to a gRPC call; none for any other request.
fn content_type(parts: &Parts) -> Option<HeaderValue> {
    // *gRPC over HTTP2*: a call is a POST. By its content type alone, a GET of any page would get a 200 that caches store.
    if parts.method != Method::POST {
        return None;
    }
    let requested = parts.headers.get(CONTENT_TYPE)?.to_str().ok()?.trim();
    let begins_alike = requested.get(..16)?.eq_ignore_ascii_case("application/grpc");
    let requested = begins_alike.then(|| requested.to_ascii_lowercase())?;
    let essence = requested.split(';').next().unwrap_or_default().trim_end();
    let (family, _) = essence.split_once('+').unwrap_or((essence, ""));

    match family {
        "application/grpc" => Some(HeaderValue::from_static("application/grpc")),
        "application/grpc-web" | "application/grpc-web-text" => HeaderValue::try_from(essence).ok(),
        _ => None,
    }
}

/// The message as *gRPC over HTTP2* defines it: bytes from space to `~` except `%` as they are, all others as `%XX`.
fn percent_encoded(message: &str) -> String {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        if encoded.len() + 3 > MAX_MESSAGE {
            break;
        }
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => {
                let _ = write!(encoded, "%{byte:02X}");
            }
        }
    }
    encoded
}

const MAX_MESSAGE: usize = 1_024;

/// gRFC A6: milliseconds, or a negative number for a call that must not be retried.
fn pushback(wait: Option<Duration>) -> HeaderValue {
    let Some(wait) = wait else {
        return const { HeaderValue::from_static("-1") };
    };
    let ms = wait.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as u32;
    ms.into()
}

/// `google.rpc.Status`, encoded.
fn status(code: u8, message: &str, details: &[Vec<u8>]) -> Vec<u8> {
    let mut status = Vec::new();
    field_varint(&mut status, 1, code.into());
    field_bytes(&mut status, 2, message.as_bytes());
    for detail in details {
        field_bytes(&mut status, 3, detail);
    }
    status
}

/// The wait, and the policies that deny.
fn details(rejection: Rejection<'_>) -> Vec<Vec<u8>> {
    let retry_info = rejection
        .retry_after()
        .map(|wait| any("google.rpc.RetryInfo", &retry_info(wait)));
    let quota_failure = match rejection {
        Rejection::Limited(decision) => Some(any("google.rpc.QuotaFailure", &quota_failure(decision))),
        Rejection::Refused(_) | Rejection::Failed { .. } => None,
    };
    retry_info.into_iter().chain(quota_failure).collect()
}

/// `google.rpc.QuotaFailure`: a violation for each policy that denies.
fn quota_failure(decision: &Decision) -> Vec<u8> {
    decision
        .policies()
        .filter(|policy| policy.denies())
        .flat_map(violation)
        .collect()
}

/// `google.rpc.RetryInfo`: the wait as a `google.protobuf.Duration`, at most [`MAX_WAIT`].
fn retry_info(wait: Duration) -> Vec<u8> {
    let wait = wait.min(MAX_WAIT);
    let mut duration = Vec::new();
    field_varint(&mut duration, 1, wait.as_secs());
    field_varint(&mut duration, 2, wait.subsec_nanos().into());

    let mut info = Vec::new();
    field_bytes(&mut info, 1, &duration);
    info
}

/// About 10,000 years, the longest `google.protobuf.Duration`.
const MAX_WAIT: Duration = Duration::from_secs(315_576_000_000);

/// One violation of a `google.rpc.QuotaFailure`: the policy and its limit. Not the key, which may be an address or a user.
fn violation(policy: &PolicyDecision) -> Vec<u8> {
    let subject = format!("policy:{}", policy.name());
    let description = match (&policy.quota().limit, policy.window()) {
        (Limit::DenyAll, _) => "no requests".to_owned(),
        (limit, Some(window)) => format!("{} requests per {}s", limit.quota(), window.as_secs_f64()),
        (limit, None) => format!("{} requests per calendar window", limit.quota()),
    };

    let mut violation = Vec::new();
    field_bytes(&mut violation, 1, subject.as_bytes());
    field_bytes(&mut violation, 2, description.as_bytes());
    let mut field = Vec::new();
    field_bytes(&mut field, 1, &violation);
    field
}

/// `google.protobuf.Any`
fn any(name: &str, value: &[u8]) -> Vec<u8> {
    let mut any = Vec::new();
    field_bytes(&mut any, 1, format!("type.googleapis.com/{name}").as_bytes());
    field_bytes(&mut any, 2, value);
    any
}

/// A field of a protocol buffer. An absent field means zero.
fn field_varint(message: &mut Vec<u8>, field: u8, value: u64) {
    if value > 0 {
        message.push(field << 3);
        varint(message, value);
    }
}

fn field_bytes(message: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    message.push(field << 3 | 2);
    varint(message, bytes.len() as u64);
    message.extend_from_slice(bytes);
}

fn varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Denial, Key, MemoryStore, Policy, SlidingLog, policy};

    fn denied(wait: Duration) -> Decision {
        let policy = Policy::new("default", SlidingLog::per_minute(100));
        let context = Arc::new(policy::context(MemoryStore::new(), &[policy]));
        let policy = PolicyDecision {
            denial: Some(Denial::QuotaExceeded),
            retry_after: Some(wait),
            reset_after: wait,
            ..PolicyDecision::undecided(context, 0, Key::from("k"), 1)
        };
        Decision::new(false, [policy].into())
    }

    /// The details of a denial, the first `count` of them.
    fn encoded(wait: Duration, count: usize) -> String {
        let details = details(Rejection::Limited(&denied(wait)));
        STANDARD_NO_PAD.encode(status(RESOURCE_EXHAUSTED, "rate limit exceeded", &details[..count]))
    }

    // The rows GR-14, GR-15 and GR-17 of `tests/vectors/grpc.md`.
    #[test]
    fn the_details_are_those_of_google_rpc() {
        assert_eq!(
            encoded(Duration::from_secs(30), 1),
            "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIHg",
        );
        assert_eq!(
            encoded(Duration::from_millis(1_500), 1),
            "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaNgoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIKCggIARCAyrXuAQ",
        );
        assert_eq!(
            encoded(Duration::from_secs(30), 2),
            "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIHhpXCit0eXBl\
             Lmdvb2dsZWFwaXMuY29tL2dvb2dsZS5ycGMuUXVvdGFGYWlsdXJlEigKJgoOcG9saWN5OmRlZmF1bHQSFDEwMCByZXF1ZXN0cyBwZXIgNjBz",
        );
    }

    // GR-10, GR-11 and GR-13.
    #[test]
    fn a_message_cannot_carry_a_header() {
        assert_eq!(percent_encoded("rate limit exceeded"), "rate limit exceeded");
        assert_eq!(percent_encoded("50% used"), "50%25 used");
        assert_eq!(percent_encoded("a\r\nb"), "a%0D%0Ab");
        assert_eq!(percent_encoded("é"), "%C3%A9");
        assert!(percent_encoded(&"é".repeat(10_000)).len() <= MAX_MESSAGE);
    }

    // GR-18.
    #[test]
    fn pushback_is_rounded_up_to_milliseconds() {
        assert_eq!(pushback(Some(Duration::from_nanos(1_234_500_000))), "1235");
        assert_eq!(pushback(Some(Duration::MAX)), "2147483647");
        assert_eq!(pushback(None), "-1", "GR-25");
    }

    // GR-04, GR-06 and GR-23.
    #[test]
    fn a_call_is_recognized_by_its_method_and_content_type() {
        for (requested, expected) in [
            ("application/grpc", Some("application/grpc")),
            ("application/grpc+proto", Some("application/grpc")),
            ("application/grpc+json", Some("application/grpc")),
            ("application/grpc;charset=utf-8", Some("application/grpc")),
            (" APPLICATION/GRPC ", Some("application/grpc")),
            ("application/grpc-web", Some("application/grpc-web")),
            ("application/grpc-web+proto", Some("application/grpc-web+proto")),
            ("application/grpc-web-text", Some("application/grpc-web-text")),
            ("application/grpc-webby", None),
            ("application/grpcx", None),
            ("application/json", None),
            ("", None),
        ] {
            for method in [Method::POST, Method::GET, Method::HEAD, Method::PUT, Method::OPTIONS] {
                let request = http::Request::builder().method(&method).header(CONTENT_TYPE, requested);
                let (parts, ()) = request.body(()).unwrap().into_parts();
                let value = content_type(&parts);
                let expected = expected.filter(|_| method == Method::POST);
                assert_eq!(
                    value.as_ref().map(|value| value.to_str().unwrap()),
                    expected,
                    "{method} {requested}"
                );
            }
        }
    }
}
