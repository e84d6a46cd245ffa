//! The pause that a response of another server asks for.

mod date;
mod rate_limit;
mod retry_info;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{
    HeaderMap, HeaderName, StatusCode,
    header::{DATE, RETRY_AFTER},
};

use self::{date::seconds_of, rate_limit::wait_of_exhausted, retry_info::retry_delay};
use crate::headers::{GRPC_RETRY_PUSHBACK, GRPC_STATUS, GRPC_STATUS_DETAILS};

/// The pause after a `429` that has no wait, which RFC 6585 §4 permits.
const WITHOUT_WAIT: Duration = Duration::from_secs(1);

/// The pause that the head of a response asks for, if it does.
///
/// * `429`: `Retry-After`, else the wait of `RateLimit` where nothing remains, else 1 s.
/// * `503` with `Retry-After`.
/// * gRPC `RESOURCE_EXHAUSTED` and `UNAVAILABLE` with `RetryInfo` or `grpc-retry-pushback-ms`.
pub(crate) fn requested_by(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    match status {
        StatusCode::TOO_MANY_REQUESTS => Some(
            retry_after(headers)
                .or_else(|| wait_of_exhausted(headers))
                .unwrap_or(WITHOUT_WAIT),
        ),
        StatusCode::SERVICE_UNAVAILABLE => retry_after(headers),
        _ => requested_by_grpc(headers),
    }
}

/// The pause that the status of a gRPC call asks for: in the head or in the trailers.
///
/// Without a wait it may be about something else, such as a message that is too large.
pub(crate) fn requested_by_grpc(fields: &HeaderMap) -> Option<Duration> {
    const RESOURCE_EXHAUSTED: &str = "8";
    const UNAVAILABLE: &str = "14";

    let status = text(fields, &GRPC_STATUS)?;
    if status != RESOURCE_EXHAUSTED && status != UNAVAILABLE {
        return None;
    }
    let details = fields.get(GRPC_STATUS_DETAILS);
    let delay = details.and_then(|details| retry_delay(details.as_bytes()));
    delay.or_else(|| {
        // gRFC A6: a negative number asks for no retry, and has no wait.
        let pushback = text(fields, &GRPC_RETRY_PUSHBACK)?;
        pushback.parse().ok().map(Duration::from_millis)
    })
}

/// RFC 9110 §10.2.3: seconds, or a date. The date is compared with that of the response, whose clock it is of; without one, with
/// that of its receipt (§6.6.1).
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = text(headers, &RETRY_AFTER)?;
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let until = seconds_of(value)?;
    let sent = text(headers, &DATE).and_then(seconds_of);
    let now = sent.or_else(|| Some(SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs()))?;
    Some(Duration::from_secs(until.saturating_sub(now)))
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn requested(status: u16, fields: &[(&'static str, &'static str)]) -> Option<u64> {
        let fields = fields
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let pause = requested_by(StatusCode::from_u16(status).unwrap(), &fields.collect());
        pause.map(|pause| pause.as_millis() as u64)
    }

    #[test]
    fn a_response_asks_for_a_pause_by_its_status_and_fields() {
        let date = ("date", "Sun, 06 Nov 1994 08:49:37 GMT");
        for (status, fields, expected) in [
            (429, &[("retry-after", "30")][..], Some(30_000)),
            (429, &[("retry-after", " 30 ")], Some(30_000)),
            (
                429,
                &[("retry-after", "30"), ("ratelimit", "\"a\";r=0;t=9")],
                Some(30_000),
            ),
            (
                429,
                &[("retry-after", "Sun, 06 Nov 1994 08:50:37 GMT"), date],
                Some(60_000),
            ),
            (429, &[("retry-after", "Sun, 06 Nov 1994 08:48:37 GMT"), date], Some(0)),
            (429, &[("retry-after", "Sun, 06 Nov 1994 08:48:37 GMT")], Some(0)),
            (429, &[("ratelimit", "\"a\";r=0;t=9")], Some(9_000)),
            (429, &[("ratelimit", "\"a\";r=5;t=9")], Some(1_000)),
            (429, &[("retry-after", "soon")], Some(1_000)),
            (429, &[("retry-after", "-5")], Some(1_000)),
            (429, &[], Some(1_000)),
            (503, &[("retry-after", "30")], Some(30_000)),
            (503, &[("ratelimit", "\"a\";r=0;t=9")], None),
            (503, &[], None),
            (200, &[("retry-after", "30"), ("ratelimit", "\"a\";r=0;t=9")], None),
            (301, &[("retry-after", "30")], None),
            (
                200,
                &[("grpc-status", "8"), ("grpc-retry-pushback-ms", "1500")],
                Some(1_500),
            ),
            (
                200,
                &[("grpc-status", "14"), ("grpc-retry-pushback-ms", "1500")],
                Some(1_500),
            ),
            (200, &[("grpc-status", "8"), ("grpc-retry-pushback-ms", "-1")], None),
            (200, &[("grpc-status", "8")], None),
            (200, &[("grpc-status", "0"), ("grpc-retry-pushback-ms", "1500")], None),
        ] {
            assert_eq!(requested(status, fields), expected, "{status} {fields:?}");
        }
    }

    #[test]
    fn without_the_date_of_the_response_a_date_is_compared_with_the_clock() {
        let until = SystemTime::now() + Duration::from_secs(3_600);
        let fields = [(RETRY_AFTER, httpdate::fmt_http_date(until).parse().unwrap())];
        let pause = requested_by(StatusCode::TOO_MANY_REQUESTS, &fields.into_iter().collect());
        let pause = pause.expect("a pause").as_secs();
        assert!((3_000..=3_600).contains(&pause), "{pause}");
    }

    #[test]
    fn a_number_that_is_too_large_is_the_longest_pause() {
        let pause = requested(429, &[("retry-after", "99999999999999999999999")]);
        assert!(pause.is_some_and(|pause| pause > 1 << 40));
    }
}
