use std::{fmt::Write, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header::CONTENT_TYPE, request::Parts};

use super::{Rejection, ResponseFormat};
use crate::{Decision, Limit, decision::PolicyDecision};

/// Answers as a gRPC server does that has failed a call: with HTTP 200 and the status in the header section
/// ("trailers-only" in *gRPC over HTTP2*).
///
/// | why | status | details |
/// | --- | --- | --- |
/// | limited | `RESOURCE_EXHAUSTED` (8) | `google.rpc.RetryInfo` with the wait, `google.rpc.QuotaFailure` with the policies |
/// | refused | `INVALID_ARGUMENT` (3), or `INTERNAL` (13) if the server is at fault | |
/// | failed | `UNAVAILABLE` (14) | |
///
/// gRPC-Web calls are answered in their own content type. A streaming call counts once, when it begins.
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct Grpc {
    pushback: bool,
}

impl Grpc {
    /// Answers with the details of the table above.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `grpc-retry-pushback-ms`, by which clients with a retry policy wait as long as they should (gRFC A6).
    ///
    /// The default is not to: clients without that policy would retry.
    pub fn pushback(mut self) -> Self {
        self.pushback = true;
        self
    }

    /// Whether a request is a gRPC call, by its content type.
    pub(super) fn answers(parts: &Parts) -> bool {
        content_type(&parts.headers).is_some()
    }
}

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_STATUS_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
const GRPC_RETRY_PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

// google.rpc.Code
const INVALID_ARGUMENT: u8 = 3;
const RESOURCE_EXHAUSTED: u8 = 8;
const INTERNAL: u8 = 13;
const UNAVAILABLE: u8 = 14;

impl ResponseFormat for Grpc {
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        let (code, message) = match rejection {
            Rejection::Limited(_) => (RESOURCE_EXHAUSTED, "rate limit exceeded".to_owned()),
            Rejection::Refused(error) if error.is_misconfigured() => (INTERNAL, "internal error".to_owned()),
            Rejection::Refused(error) => (INVALID_ARGUMENT, error.to_string()),
            Rejection::Failed(_) => (UNAVAILABLE, "temporarily unavailable".to_owned()),
        };

        // The body is empty: status and message are in the header section, which ends the stream.
        let mut response = Response::new(Bytes::new());
        let headers = response.headers_mut();
        let content_type = content_type(&parts.headers).unwrap_or(HeaderValue::from_static("application/grpc"));
        headers.insert(CONTENT_TYPE, content_type);
        headers.insert(GRPC_STATUS, u16::from(code).into());
        if let Ok(message) = HeaderValue::try_from(percent_encoded(&message)) {
            headers.insert(GRPC_MESSAGE, message);
        }

        if let Rejection::Limited(decision) = rejection {
            let status = status(code, &message, decision);
            // Without padding: clients accept both, and some choke on wrong padding.
            if let Ok(details) = HeaderValue::try_from(STANDARD_NO_PAD.encode(status)) {
                headers.insert(GRPC_STATUS_DETAILS, details);
            }
            if let Some(wait) = decision.retry_after().filter(|_| self.pushback) {
                headers.insert(GRPC_RETRY_PUSHBACK, pushback(wait));
            }
        }
        response
    }
}

/// The content type to answer a gRPC call in; none for any other request.
fn content_type(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = headers.get(CONTENT_TYPE)?.to_str().ok()?.trim();
    let begins_alike = asked.get(..16)?.eq_ignore_ascii_case("application/grpc");
    let asked = begins_alike.then(|| asked.to_ascii_lowercase())?;
    let essence = asked.split(';').next().unwrap_or_default().trim_end();
    let (family, _) = essence.split_once('+').unwrap_or((essence, ""));

    match family {
        "application/grpc" => Some(HeaderValue::from_static("application/grpc")),
        "application/grpc-web" | "application/grpc-web-text" => HeaderValue::try_from(essence).ok(),
        _ => None,
    }
}

/// The message as *gRPC over HTTP2* wants it: bytes from space to `~` but `%` as they are, the rest as `%XX`.
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

fn pushback(wait: Duration) -> HeaderValue {
    let ms = wait.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as u32;
    ms.into()
}

/// `google.rpc.Status`, encoded.
fn status(code: u8, message: &str, decision: &Decision) -> Vec<u8> {
    let mut status = Vec::new();
    field_varint(&mut status, 1, code.into());
    field_bytes(&mut status, 2, message.as_bytes());

    if let Some(wait) = decision.retry_after() {
        field_bytes(&mut status, 3, &any("google.rpc.RetryInfo", &retry_info(wait)));
    }
    let violations: Vec<u8> = decision
        .policies()
        .filter(|policy| policy.denies())
        .flat_map(violation)
        .collect();
    field_bytes(&mut status, 3, &any("google.rpc.QuotaFailure", &violations));
    status
}

/// `google.rpc.RetryInfo`: the wait as a `google.protobuf.Duration`, which has an end.
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

/// One violation of a `google.rpc.QuotaFailure`: the policy, and what it allows. Not the key.
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

/// A field of a protocol buffer; zero is what an absent one means.
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
    use crate::{Denial, Key, MemoryStore, Policy, SlidingLog, policy::Terms};

    fn denied(wait: Duration) -> Decision {
        let policy = Policy::new("default", SlidingLog::per_minute(100));
        let terms = Arc::new(Terms::new(MemoryStore::new(), &[policy]));
        let policy = PolicyDecision {
            denial: Some(Denial::QuotaExceeded),
            retry_after: Some(wait),
            reset_after: wait,
            ..PolicyDecision::undecided(terms, 0, Key::from("k"), 1)
        };
        Decision::new(false, [policy].into())
    }

    /// Without the policies, which come last.
    fn retry_info_alone(wait: Duration) -> String {
        let whole = status(RESOURCE_EXHAUSTED, "rate limit exceeded", &denied(wait));
        let violations: Vec<u8> = denied(wait).policies().flat_map(violation).collect();
        let mut quota_failure = Vec::new();
        field_bytes(&mut quota_failure, 3, &any("google.rpc.QuotaFailure", &violations));
        STANDARD_NO_PAD.encode(whole.strip_suffix(&quota_failure[..]).unwrap())
    }

    // The rows GR-14, GR-15 and GR-17 of `tests/vectors/grpc.md`.
    #[test]
    fn the_details_are_those_of_google_rpc() {
        assert_eq!(
            retry_info_alone(Duration::from_secs(30)),
            "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIHg",
        );
        assert_eq!(
            retry_info_alone(Duration::from_millis(1_500)),
            "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaNgoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIKCggIARCAyrXuAQ",
        );
        assert_eq!(
            STANDARD_NO_PAD.encode(status(8, "rate limit exceeded", &denied(Duration::from_secs(30)))),
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
        assert_eq!(pushback(Duration::from_nanos(1_234_500_000)), "1235");
        assert_eq!(pushback(Duration::MAX), "2147483647");
    }

    // GR-04 and GR-06.
    #[test]
    fn grpc_is_known_by_its_content_type_alone() {
        for (asked, answered) in [
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
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(asked));
            let value = content_type(&headers);
            assert_eq!(value.as_ref().map(|value| value.to_str().unwrap()), answered, "{asked}");
        }
    }
}
