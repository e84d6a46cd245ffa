//! The gRPC status of a request that is not admitted.

use std::{borrow::Cow, time::Duration};

use http::HeaderValue;

use super::{format::Rejection, problem::detail};
use crate::{Decision, Limit, PolicyDecision};

// google.rpc.Code
pub(super) const INVALID_ARGUMENT: u8 = 3;
const PERMISSION_DENIED: u8 = 7;
pub(crate) const RESOURCE_EXHAUSTED: u8 = 8;
const INTERNAL: u8 = 13;
pub(crate) const UNAVAILABLE: u8 = 14;
/// The last code.
pub(super) const UNAUTHENTICATED: u8 = 16;

/// The status of a call that is not admitted.
pub(crate) struct GrpcStatus {
    pub(crate) code: u8,
    pub(crate) message: Cow<'static, str>,
    /// A `google.rpc.Status`, encoded; empty if there is nothing to add to the code and the message.
    pub(crate) details: Vec<u8>,
    /// The value of `grpc-retry-pushback-ms`.
    pub(crate) pushback: HeaderValue,
}

impl GrpcStatus {
    pub(crate) fn new(rejection: Rejection<'_>) -> Self {
        let (code, message): (_, Cow<'static, str>) = match rejection {
            Rejection::Limited(decision) => (RESOURCE_EXHAUSTED, limited(decision)),
            Rejection::Refused(error) if error.is_misconfigured() => (INTERNAL, "internal error".into()),
            Rejection::Refused(error) => (INVALID_ARGUMENT, error.to_string().into()),
            Rejection::Blocked => (PERMISSION_DENIED, "permission denied".into()),
            Rejection::Failed { .. } => (UNAVAILABLE, "temporarily unavailable".into()),
        };
        let message = shortened(message);
        // With a wait of zero a client would try again in a loop.
        let wait = rejection.retry_after().map(|wait| wait.max(SHORTEST_WAIT));
        Self {
            code,
            details: encoded(code, &message, &details(rejection, wait)),
            message,
            pushback: pushback(wait),
        }
    }
}

/// The message as every library sends it in 1 KiB: cut between characters, as long as it would be with all of them escaped that some
/// library escapes, and without spaces around it (RFC 9113 §8.2.1).
pub(super) fn shortened(message: Cow<'static, str>) -> Cow<'static, str> {
    let mut length = 0;
    let cut = message.char_indices().find(|(_, char)| {
        length += if char.is_ascii_alphanumeric() {
            1
        } else {
            3 * char.len_utf8()
        };
        length > MAX_MESSAGE
    });
    let short = message[..cut.map_or(message.len(), |(at, _)| at)].trim_matches(' ');
    match short.len() == message.len() {
        true => message,
        false => short.to_owned().into(),
    }
}

const MAX_MESSAGE: usize = 1_024;

const SHORTEST_WAIT: Duration = Duration::from_micros(1);

/// gRFC A6: milliseconds, or a negative number for a call that must not be retried.
fn pushback(wait: Option<Duration>) -> HeaderValue {
    let Some(wait) = wait else {
        return const { HeaderValue::from_static("-1") };
    };
    let ms = wait.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as u32;
    ms.into()
}

/// The message of a denial, with the costs that are above a limit.
fn limited(decision: &Decision) -> Cow<'static, str> {
    match &*detail(decision) {
        "" => "rate limit exceeded".into(),
        detail => format!("rate limit exceeded: {detail}").into(),
    }
}

/// `google.rpc.Status` with encoded details; empty without details.
fn encoded(code: u8, text: &str, details: &[u8]) -> Vec<u8> {
    let mut status = Vec::new();
    if !details.is_empty() {
        field_varint(&mut status, 1, code.into());
        status.extend(message(&[(2, text.as_bytes())]));
        status.extend(details);
    }
    status
}

/// The wait, and the policies that deny.
fn details(rejection: Rejection<'_>, wait: Option<Duration>) -> Vec<u8> {
    let mut details = wait.map_or_else(Vec::new, |wait| detail_of("google.rpc.RetryInfo", &retry_info(wait)));
    if let Rejection::Limited(decision) = rejection {
        // A violation for each policy that denies.
        let failure: Vec<u8> = decision.deniers().flat_map(violation).collect();
        details.extend(detail_of("google.rpc.QuotaFailure", &failure));
    }
    details
}

/// `google.rpc.RetryInfo`: the wait as a `google.protobuf.Duration`, at most [`MAX_WAIT`].
fn retry_info(wait: Duration) -> Vec<u8> {
    let wait = wait.min(MAX_WAIT);
    let mut duration = Vec::new();
    field_varint(&mut duration, 1, wait.as_secs());
    field_varint(&mut duration, 2, wait.subsec_nanos().into());
    message(&[(1, &duration)])
}

/// About 10,000 years, the longest `google.protobuf.Duration`.
const MAX_WAIT: Duration = Duration::from_secs(315_576_000_000);

/// One violation of a `google.rpc.QuotaFailure`: the policy and its limit. Not the key, which may be an address or a user.
fn violation(policy: &PolicyDecision) -> Vec<u8> {
    let subject = format!("policy:{}", policy.name());
    let description = description(&policy.named().limit, policy.window());
    let violation = message(&[(1, subject.as_bytes()), (2, description.as_bytes())]);
    message(&[(1, &violation)])
}

fn description(limit: &Limit, window: Option<Duration>) -> String {
    let quota = limit.quota();
    if *limit == Limit::DenyAll {
        return "no requests".to_owned();
    }
    if limit.is_held() {
        return format!("{quota} requests at once");
    }
    let per = window.map(|window| format!("{}s", window.as_micros() as f64 / 1e6));
    format!("{quota} requests per {}", per.as_deref().unwrap_or("calendar window"))
}

/// A detail of a `google.rpc.Status`, which is a `google.protobuf.Any`.
fn detail_of(name: &str, value: &[u8]) -> Vec<u8> {
    let url = format!("type.googleapis.com/{name}");
    message(&[(3, &message(&[(1, url.as_bytes()), (2, value)]))])
}

/// A field of a protocol buffer. An absent field means zero.
fn field_varint(message: &mut Vec<u8>, field: u8, value: u64) {
    if value > 0 {
        message.push(field << 3);
        varint(message, value);
    }
}

/// A message with these fields, each of text, bytes or another message.
fn message(fields: &[(u8, &[u8])]) -> Vec<u8> {
    let mut message = Vec::new();
    for (field, content) in fields {
        message.push(field << 3 | 2);
        varint(&mut message, content.len() as u64);
        message.extend_from_slice(content);
    }
    message
}

fn varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

/// Denials and failures as a status of tonic.
#[cfg(feature = "tonic")]
mod tonic {
    use std::sync::Arc;

    use http::{HeaderMap, header::RETRY_AFTER};
    use tonic::{Code, Status, metadata::MetadataMap};

    use super::{GrpcStatus, Rejection};
    use crate::{Denied, http::headers::GRPC_RETRY_PUSHBACK, store::StoreError};

    /// The status that [`Grpc`](crate::http::response::Grpc) responds with, always with the pushback, and the rate limit fields as
    /// metadata. In a stream that has begun they become trailers, where the draft of the rate limit fields permits none.
    impl From<Denied> for Status {
        fn from(denied: Denied) -> Self {
            let decision = denied.decision();
            let mut metadata = decision.headers();
            // The wait is part of the status.
            metadata.remove(RETRY_AFTER);
            let mut status = status(GrpcStatus::new(Rejection::Limited(decision)), metadata);
            status.set_source(Arc::new(denied));
            status
        }
    }

    /// `UNAVAILABLE`, as [`Grpc`](crate::http::response::Grpc) responds; of what is [not possible](crate::store::ErrorKind::Invalid) the
    /// status of the layer for such a call, or `INTERNAL`.
    impl From<StoreError> for Status {
        fn from(error: StoreError) -> Self {
            let mut status = status(Rejection::of_error(&error, GrpcStatus::new), HeaderMap::new());
            status.set_source(Arc::new(error));
            status
        }
    }

    fn status(status: GrpcStatus, mut metadata: HeaderMap) -> Status {
        metadata.insert(GRPC_RETRY_PUSHBACK, status.pushback);
        let (code, metadata) = (Code::from(i32::from(status.code)), MetadataMap::from_headers(metadata));
        Status::with_details_and_metadata(code, status.message, status.details.into(), metadata)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};

    use super::*;
    use crate::{Concurrency, Denial, Key, MemoryStore, Policy, SlidingLog, policy};

    fn denied(wait: Duration) -> Decision {
        let policy = Policy::new("default", SlidingLog::per_minute(100));
        let context = Arc::new(policy::context(MemoryStore::new(), &[policy]));
        let policy = PolicyDecision {
            denial: Some(Denial::QuotaExceeded),
            retry_after: Some(wait),
            reset_after: wait,
            ..PolicyDecision::plain(&context, 0, Key::from("k"))
        };
        Decision::new(false, [policy].into())
    }

    /// The details of a denial, the first `count` of them.
    fn encoded(wait: Duration, count: usize) -> String {
        let details = match count {
            1 => detail_of("google.rpc.RetryInfo", &retry_info(wait)),
            _ => details(Rejection::Limited(&denied(wait)), Some(wait)),
        };
        STANDARD_NO_PAD.encode(super::encoded(RESOURCE_EXHAUSTED, "rate limit exceeded", &details))
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

    #[test]
    fn a_violation_describes_the_limit() {
        let described = |limit: Limit| description(&limit, limit.window());
        assert_eq!(described(SlidingLog::per_minute(100).into()), "100 requests per 60s");
        let half = SlidingLog::new(5, Duration::from_millis(500));
        assert_eq!(described(half.into()), "5 requests per 0.5s");
        let sevenths = crate::TokenBucket::per_second(7).burst(20);
        assert_eq!(described(sevenths.into()), "20 requests per 2.857143s");
        #[cfg(feature = "calendar")]
        {
            let monthly = crate::FixedWindow::calendar(5, crate::limit::Calendar::Month, "UTC");
            let described = described(monthly.expect("a time zone").into());
            assert_eq!(described, "5 requests per calendar window");
        }
        assert_eq!(described(Concurrency::new(3).into()), "3 requests at once");
        assert_eq!(described(Limit::DenyAll), "no requests");
    }

    #[test]
    fn a_wait_of_zero_is_shown_as_the_shortest_one() {
        let of = |wait| GrpcStatus::new(Rejection::Limited(&denied(wait)));
        let (zero, shortest) = (of(Duration::ZERO), of(SHORTEST_WAIT));
        assert_eq!(
            (&zero.pushback, &zero.details),
            (&HeaderValue::from(1), &shortest.details)
        );
    }

    #[test]
    fn a_wait_is_no_longer_than_durations_of_protobuf() {
        assert_eq!(retry_info(Duration::MAX), retry_info(MAX_WAIT));
        assert_ne!(retry_info(MAX_WAIT - SHORTEST_WAIT), retry_info(MAX_WAIT));
    }

    // GR-18.
    #[test]
    fn pushback_is_rounded_up_to_milliseconds() {
        assert_eq!(pushback(Some(Duration::from_nanos(1_234_500_000))), "1235");
        assert_eq!(pushback(Some(Duration::MAX)), "2147483647");
        assert_eq!(pushback(None), "-1", "GR-25");
    }

    #[cfg(feature = "tonic")]
    #[test]
    fn what_never_becomes_possible_is_not_to_be_retried() {
        let status = ::tonic::Status::from(crate::store::StoreError::invalid("the limiter has no plan `none`"));
        assert_eq!(status.code(), ::tonic::Code::Internal);
        assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "-1");
        let source = std::error::Error::source(&status).expect("the error of the store, for logs");
        assert_eq!(source.to_string(), "the limiter has no plan `none`");
    }
}
