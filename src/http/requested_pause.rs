//! The pause that a response of another server asks for.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use http::{
    HeaderMap, StatusCode,
    header::{AGE, DATE, RETRY_AFTER},
};

use super::{
    headers::{GRPC_RETRY_PUSHBACK, GRPC_STATUS_DETAILS, RATELIMIT, RATELIMIT_POLICY, count, limits, split},
    response::{RESOURCE_EXHAUSTED, UNAVAILABLE},
};
use crate::decide::grpc_status_in;

/// The pause after a `429` that has no wait, which RFC 6585 §4 permits.
const WITHOUT_WAIT: Duration = Duration::from_secs(1);

/// The pause that the head of a response asks for, if it does.
///
/// * `429`: `Retry-After`, else that of a gRPC status, else the wait of a limit of which nothing remains, else 1 s.
/// * `503`: `Retry-After`, else that of a gRPC status, else that wait.
/// * gRPC `RESOURCE_EXHAUSTED` and `UNAVAILABLE` with `RetryInfo` or `grpc-retry-pushback-ms`.
/// * Any other response with a limit of which nothing remains: `Retry-After`, which takes precedence, else that wait.
///
/// The rate limit fields are not read if they are those of a layer of this process, or of a response from a cache
/// (draft-ietf-httpapi-ratelimit-headers).
pub(crate) fn requested_by(status: StatusCode, headers: &HeaderMap, are_own: bool) -> Option<Duration> {
    let by_grpc = || requested_by_grpc(headers);
    let exhausted = || {
        let are_read = !are_own && !is_stored(headers);
        are_read.then(|| wait_of_exhausted(headers).max(wait_in_single_fields(headers)))?
    };
    let wait = retry_after(headers);
    match status {
        StatusCode::TOO_MANY_REQUESTS => wait.or_else(by_grpc).or_else(exhausted).or(Some(WITHOUT_WAIT)),
        StatusCode::SERVICE_UNAVAILABLE => wait.or_else(by_grpc).or_else(exhausted),
        _ => by_grpc().or_else(|| exhausted().map(|until_reset| wait.unwrap_or(until_reset))),
    }
}

/// Whether a response is of a cache: its age is positive. Of a list of ages, the first one counts (RFC 9111 §5.1).
fn is_stored(headers: &HeaderMap) -> bool {
    let ages = text_of(headers, AGE.as_str()).unwrap_or_default();
    let age = ages.split(',').next().unwrap_or_default().trim_end();
    age.bytes().all(|byte| byte.is_ascii_digit()) && age.bytes().any(|byte| byte != b'0')
}

/// The pause that the status of a gRPC call asks for: in the head or in the trailers.
///
/// Without a wait it may be about something else, such as a message that is too large.
pub(crate) fn requested_by_grpc(fields: &HeaderMap) -> Option<Duration> {
    if ![RESOURCE_EXHAUSTED, UNAVAILABLE]
        .map(i32::from)
        .contains(&grpc_status_in(fields)?)
    {
        return None;
    }
    let details = fields.get(GRPC_STATUS_DETAILS);
    let delay = details.and_then(|details| retry_delay(details.as_bytes()));
    delay.or_else(|| {
        // gRFC A6: a negative number asks for no retry, and has no wait.
        let pushback = text_of(fields, GRPC_RETRY_PUSHBACK.as_str())?;
        pushback.parse().ok().map(Duration::from_millis)
    })
}

/// RFC 9110 §10.2.3: seconds, or a date. The date is compared with that of the response, whose clock it is of; without one, with
/// that of its receipt (§6.6.1).
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = text_of(headers, RETRY_AFTER.as_str())?;
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let until = httpdate::parse_http_date(value).ok()?;
    Some(until.duration_since(now(headers)).unwrap_or_default())
}

fn text_of<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    lines_of(headers, name).next()?
}

/// The longest wait of the policies in `RateLimit` of which nothing remains, in the syntax of any draft from -07 on.
fn wait_of_exhausted(headers: &HeaderMap) -> Option<Duration> {
    let lines: Vec<&str> = lines_of(headers, RATELIMIT.as_str()).flatten().collect();
    // Lines are one list, or one dictionary (RFC 9651 §4.2).
    let joined = lines.join(",");
    // A slot may be free long before its lease would have expired.
    let policies: Vec<&str> = lines_of(headers, RATELIMIT_POLICY.as_str()).flatten().collect();
    let policies = policies.join(",");
    let of_slots = split(&policies, ',').filter(|policy| parts(policy).any(|part| part == CONCURRENT_REQUESTS));
    let of_slots: BTreeSet<_> = of_slots.filter_map(|policy| parts(policy).next()).collect();
    let is_of_slots = |limit| parts(limit).next().is_some_and(|name| of_slots.contains(name));
    let limits = lines.iter().copied().chain([&*joined]).flat_map(limits);
    let waits = limits.filter_map(|(limit, [remaining, wait])| {
        let is_exhausted = count(remaining?) == Some(0) && !is_of_slots(limit);
        is_exhausted.then(|| wait?.parse().ok())?
    });
    waits.max().map(Duration::from_secs)
}

/// The value and the parameters of the member of a list.
fn parts(member: &str) -> impl Iterator<Item = &str> {
    split(member, ';').map(str::trim)
}

/// The quota unit of a policy of slots.
const CONCURRENT_REQUESTS: &str = r#"qu="concurrent-requests""#;

/// The lines of a field; `None` for one that is not text.
fn lines_of<'a>(headers: &'a HeaderMap, name: &str) -> impl Iterator<Item = Option<&'a str>> {
    let lines = headers.get_all(name).iter();
    lines.map(|line| line.to_str().ok().map(str::trim))
}

/// The names of what remains and of its reset: of draft -06, those that no standard defines, and those of OpenAI.
const PAIRS: [[&str; 2]; 5] = [
    ["ratelimit-remaining", "ratelimit-reset"],
    ["x-ratelimit-remaining", "x-ratelimit-reset"],
    ["x-rate-limit-remaining", "x-rate-limit-reset"],
    ["x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"],
    ["x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
];

/// The longest wait of the limits of which nothing remains, in fields with one value each. Several values are of several limits.
fn wait_in_single_fields(headers: &HeaderMap) -> Option<Duration> {
    // A proxy may have joined lines (RFC 9110 §5.3).
    let values_of = |name| lines_of(headers, name).flat_map(|line| line.unwrap_or("?").split(',').map(str::trim));
    let waits = PAIRS.iter().flat_map(|[remaining, reset]| {
        let values = values_of(remaining).zip(values_of(reset));
        values.filter_map(|(remaining, reset)| {
            // Some services write a negative number, or `0.0`.
            let remaining: f64 = remaining.parse().ok()?;
            (remaining <= 0.0).then(|| wait_until(reset, headers))?
        })
    });
    waits.max()
}

/// Seconds from now, an epoch in seconds or milliseconds, or a duration such as `6m0s`.
fn wait_until(reset: &str, headers: &HeaderMap) -> Option<Duration> {
    let Ok(number) = reset.parse::<f64>() else {
        return duration(reset);
    };
    let now = now(headers).duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = now.as_secs_f64();
    let wait = match number {
        1e12.. => number / 1_000.0 - now,
        1e9.. => number - now,
        _ => number,
    };
    Duration::try_from_secs_f64(wait.max(0.0)).ok()
}

/// The time of the response by the clock of its server; without one, that of its receipt.
fn now(headers: &HeaderMap) -> SystemTime {
    let sent = text_of(headers, DATE.as_str()).and_then(|date| httpdate::parse_http_date(date).ok());
    sent.unwrap_or_else(SystemTime::now)
}

/// A duration as Go writes it: `6m0s`, `1.5s`, `20ms`.
fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let (number, tail) = rest.split_at(rest.find(|char: char| !char.is_ascii_digit() && char != '.')?);
        let (unit, tail) = tail.split_at(
            tail.find(|char: char| char.is_ascii_digit() || char == '.')
                .unwrap_or(tail.len()),
        );
        let scale = match unit {
            "d" => 86_400.0,
            "h" => 3_600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "\u{b5}s" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        seconds += number.parse::<f64>().ok()? * scale;
        rest = tail;
    }
    (!text.is_empty()).then(|| Duration::try_from_secs_f64(seconds).ok())?
}

/// gRPC sends binary fields without padding, and some servers with it.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The delay of the `google.rpc.RetryInfo` in a `google.rpc.Status`, the value of `grpc-status-details-bin`.
fn retry_delay(details: &[u8]) -> Option<Duration> {
    let status = BASE64.decode(details).ok()?;
    let mut details = ProtobufFields(&status).filter(|field| field.tag == 3 << 3 | BYTES);
    let delay = details.find_map(|any| {
        let url = ProtobufFields(any.bytes).bytes_of(1)?;
        let info = ProtobufFields(any.bytes).bytes_of(2)?;
        let is_retry_info = url.ends_with(b"/google.rpc.RetryInfo");
        is_retry_info.then(|| ProtobufFields(info).bytes_of(1))?
    })?;

    let (mut seconds, mut nanos) = (0, 0);
    for Field { tag, number, .. } in ProtobufFields(delay) {
        match tag {
            SECONDS => seconds = number,
            NANOS => nanos = number,
            _ => {}
        }
    }
    // A negative number is large as an unsigned one.
    let nanos = u32::try_from(nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    i64::try_from(seconds).ok().map(|_| Duration::new(seconds, nanos))
}

/// The fields of a message, up to the first one that is malformed.
struct ProtobufFields<'a>(&'a [u8]);

struct Field<'a> {
    /// Its number, times 8, and its type.
    tag: u64,
    /// The value of a field of type 0.
    number: u64,
    /// That of one of another type.
    bytes: &'a [u8],
}

/// The type of texts, bytes and messages.
const BYTES: u64 = 2;

/// The tags of the fields of a `google.protobuf.Duration`.
const SECONDS: u64 = 1 << 3;
const NANOS: u64 = 2 << 3;

impl<'a> Iterator for ProtobufFields<'a> {
    type Item = Field<'a>;

    fn next(&mut self) -> Option<Field<'a>> {
        let tag = self.varint()?;
        let (number, length) = match tag & 7 {
            0 => (self.varint()?, 0),
            1 => (0, 8),
            BYTES => (0, self.varint()?),
            5 => (0, 4),
            _ => return None,
        };
        let (bytes, rest) = self.0.split_at_checked(usize::try_from(length).ok()?)?;
        self.0 = rest;
        Some(Field { tag, number, bytes })
    }
}

impl<'a> ProtobufFields<'a> {
    /// The first text, bytes or message with this number.
    fn bytes_of(mut self, number: u64) -> Option<&'a [u8]> {
        let field = self.find(|field| field.tag == number << 3 | BYTES)?;
        Some(field.bytes)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for position in 0..10 {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << (7 * position);
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn requested(status: u16, fields: &[(&'static str, &'static str)]) -> Option<u64> {
        let fields = fields
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let pause = requested_by(StatusCode::from_u16(status).unwrap(), &fields.collect(), false);
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
            (
                429,
                &[("retry-after", "Sunday, 06-Nov-94 08:50:37 GMT"), date],
                Some(60_000),
            ),
            (429, &[("retry-after", "Sun Nov  6 08:50:37 1994"), date], Some(60_000)),
            (429, &[("retry-after", "Sun, 06 Nov 1994 08:48:37 GMT"), date], Some(0)),
            (429, &[("retry-after", "Sun, 06 Nov 1994 08:48:37 GMT")], Some(0)),
            (429, &[("ratelimit", "\"a\";r=0;t=9")], Some(9_000)),
            (429, &[("ratelimit", "\"a\";r=5;t=9")], Some(1_000)),
            (429, &[("retry-after", "soon")], Some(1_000)),
            (429, &[("retry-after", "-5")], Some(1_000)),
            (429, &[], Some(1_000)),
            (503, &[("retry-after", "30")], Some(30_000)),
            (503, &[("ratelimit", "\"a\";r=0;t=9")], Some(9_000)),
            (503, &[], None),
            (
                200,
                &[("retry-after", "30"), ("ratelimit", "\"a\";r=0;t=9")],
                Some(30_000),
            ),
            (
                403,
                &[("retry-after", "30"), ("ratelimit", "\"a\";r=0;t=9")],
                Some(30_000),
            ),
            (200, &[("age", "600"), ("ratelimit", "\"a\";r=0;t=9")], None),
            (
                200,
                &[
                    ("age", "600"),
                    ("x-ratelimit-remaining", "0"),
                    ("x-ratelimit-reset", "5"),
                ],
                None,
            ),
            (200, &[("age", "5, 10"), ("ratelimit", "\"a\";r=0;t=9")], None),
            (200, &[("age", "5 , 10"), ("ratelimit", "\"a\";r=0;t=9")], None),
            (200, &[("age", "0,10"), ("ratelimit", "\"a\";r=0;t=9")], Some(9_000)),
            (200, &[("age", "0"), ("ratelimit", "\"a\";r=0;t=9")], Some(9_000)),
            (200, &[("age", "-1"), ("ratelimit", "\"a\";r=0;t=9")], Some(9_000)),
            (
                200,
                &[("age", "99999999999999999999"), ("ratelimit", "\"a\";r=0;t=9")],
                None,
            ),
            (
                200,
                &[
                    (
                        "ratelimit-policy",
                        "\"b\";q=9;w=60, \"a\";q=1;qu=\"concurrent-requests\"",
                    ),
                    ("ratelimit", "\"a\";r=0;t=9"),
                ],
                None,
            ),
            (
                200,
                &[
                    (
                        "ratelimit-policy",
                        "\"a\";q=1;qu=\"concurrent-requests\", \"b\";q=9;w=60",
                    ),
                    ("ratelimit", "\"a\";r=0;t=9, \"b\";r=0;t=4"),
                ],
                Some(4_000),
            ),
            (
                429,
                &[("grpc-status", "8"), ("grpc-retry-pushback-ms", "7000")],
                Some(7_000),
            ),
            (
                429,
                &[
                    ("retry-after", "3"),
                    ("grpc-status", "8"),
                    ("grpc-retry-pushback-ms", "7000"),
                ],
                Some(3_000),
            ),
            (
                429,
                &[
                    ("grpc-status", "8"),
                    ("grpc-retry-pushback-ms", "7000"),
                    ("ratelimit", "\"a\";r=0;t=9"),
                ],
                Some(7_000),
            ),
            (
                503,
                &[("grpc-status", "14"), ("grpc-retry-pushback-ms", "7000")],
                Some(7_000),
            ),
            (200, &[("ratelimit", "\"a\";r=1;t=9")], None),
            (404, &[("ratelimit", "limit=10, remaining=0, reset=7")], Some(7_000)),
            (
                200,
                &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "5")],
                Some(5_000),
            ),
            (
                429,
                &[
                    ("retry-after", "3"),
                    ("x-ratelimit-remaining-requests", "0"),
                    ("x-ratelimit-reset-requests", "6m0s"),
                ],
                Some(3_000),
            ),
            (
                429,
                &[
                    ("ratelimit", "\"a\";r=0;t=9"),
                    ("x-ratelimit-remaining-tokens", "0"),
                    ("x-ratelimit-reset-tokens", "10s"),
                ],
                Some(10_000),
            ),
            // An epoch from 10^9 on.
            (
                200,
                &[
                    ("x-ratelimit-remaining", "0"),
                    ("x-ratelimit-reset", "1000000000"),
                    ("date", "Sun, 09 Sep 2001 01:46:30 GMT"),
                ],
                Some(10_000),
            ),
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
        let pause = requested_by(StatusCode::TOO_MANY_REQUESTS, &fields.into_iter().collect(), false);
        let pause = pause.expect("a pause").as_secs();
        assert!((3_000..=3_600).contains(&pause), "{pause}");
    }

    /// Each is looked up among all: the time must not grow with the product of their numbers.
    #[test]
    fn many_members_and_policies_are_read_at_once() {
        let list = |member: &str| HeaderValue::from_str(&vec![member; 100_000].join(",")).expect("text");
        let headers = [(RATELIMIT, list("a")), (RATELIMIT_POLICY, list("b"))];
        assert_eq!(wait_of_exhausted(&headers.into_iter().collect()), None);
    }

    #[test]
    fn a_number_that_is_too_large_is_the_longest_pause() {
        let pause = requested(429, &[("retry-after", "99999999999999999999999")]);
        assert!(pause.is_some_and(|pause| pause > 1 << 40));
    }

    #[test]
    fn the_wait_is_that_of_the_policies_of_which_nothing_remains() {
        for (lines, expected) in [
            (&["\"default\";r=0;t=30"][..], Some(30)),
            (&["\"a\";r=0;t=3, \"b\";r=0;t=30, \"c\";r=1;t=300"], Some(30)),
            (&["\"a\";r=0;t=3", "\"b\";r=0;t=30"], Some(30)),
            (&["\"a\";r=0;pk=:cHsdsRa894==:;t=7"], Some(7)),
            (&["limit=10, remaining=0, reset=30"], Some(30)),
            (&["limit=10,remaining=0,reset=30"], Some(30)),
            (&["limit=10, remaining=3, reset=30"], None),
            (&["\"a\";r=0"], None),
            (&["\"a\";r=0;t=soon"], None),
            (&["\"a\";r=0;t=-3"], None),
            (&["\"x;r=0;t=99;\";r=5;t=1"], None),
            (&["\"x, \\\";r=0;t=99\";r=0;t=1"], Some(1)),
            (&["\"a\";r=0;t=3;t=4"], Some(4)),
            (&["limit=10;x=1, remaining=0;x=1, reset=30;y"], Some(30)),
            (&["limit=10, remaining=0", "reset=30"], Some(30)),
            (
                &["limit=10, remaining=0, reset=30", "limit=5, remaining=3, reset=10"],
                Some(30),
            ),
            // Some services go below 0.
            (&["\"a\";r=-1;t=30"], Some(30)),
            (&["limit=10, remaining=-1, reset=30"], Some(30)),
            (&["\"a\";r=none;t=30"], None),
            (&["10"], None),
            (&[], None),
        ] {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(RATELIMIT, HeaderValue::from_static(line));
            }
            assert_eq!(
                wait_of_exhausted(&headers),
                expected.map(Duration::from_secs),
                "{lines:?}"
            );
        }
    }

    fn waits(fields: &[(&'static str, &'static str)]) -> Option<u64> {
        let fields = fields
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        wait_in_single_fields(&fields.collect()).map(|wait| wait.as_millis() as u64)
    }

    #[test]
    fn the_wait_is_that_of_the_limits_of_which_nothing_remains() {
        let date = ("date", "Fri, 15 Jan 2027 08:00:00 GMT"); // 1,800,000,000 s
        for (fields, expected) in [
            (
                &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "30")][..],
                Some(30_000),
            ),
            (
                &[
                    ("x-ratelimit-remaining", "0"),
                    ("x-ratelimit-reset", "1800000030"),
                    date,
                ],
                Some(30_000),
            ),
            (
                &[
                    ("x-ratelimit-remaining", "0"),
                    ("x-ratelimit-reset", "1800000030500"),
                    date,
                ],
                Some(30_500),
            ),
            (
                &[
                    ("x-ratelimit-remaining", "0"),
                    ("x-ratelimit-reset", "1799999999"),
                    date,
                ],
                Some(0),
            ),
            (
                &[("x-ratelimit-remaining", "0, 5"), ("x-ratelimit-reset", "30,60")],
                Some(30_000),
            ),
            (
                &[("x-ratelimit-remaining", "0.0"), ("x-ratelimit-reset", "1.5")],
                Some(1_500),
            ),
            (
                &[("x-ratelimit-remaining", "-2"), ("x-ratelimit-reset", "7")],
                Some(7_000),
            ),
            (&[("x-ratelimit-remaining", "1"), ("x-ratelimit-reset", "30")], None),
            (
                &[
                    ("x-ratelimit-remaining", "5"),
                    ("x-ratelimit-remaining", "0"),
                    ("x-ratelimit-remaining", "0"),
                    ("x-ratelimit-reset", "90"),
                    ("x-ratelimit-reset", "30"),
                    ("x-ratelimit-reset", "7"),
                ],
                Some(30_000),
            ),
            (
                &[
                    ("x-ratelimit-remaining", "0"),
                    ("x-ratelimit-remaining", "5"),
                    ("x-ratelimit-reset", "30"),
                    ("x-ratelimit-reset", "90"),
                ],
                Some(30_000),
            ),
            (&[("x-ratelimit-remaining", "0")], None),
            (&[("x-ratelimit-reset", "30")], None),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "soon")], None),
            (&[("x-ratelimit-remaining", "none"), ("x-ratelimit-reset", "30")], None),
            (&[("x-ratelimit-remaining", "NaN"), ("x-ratelimit-reset", "30")], None),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "NaN")], Some(0)),
            (&[("ratelimit-remaining", "0"), ("ratelimit-reset", "9")], Some(9_000)),
            (
                &[("x-rate-limit-remaining", "0"), ("x-rate-limit-reset", "9")],
                Some(9_000),
            ),
            (
                &[
                    ("x-ratelimit-remaining-requests", "0"),
                    ("x-ratelimit-reset-requests", "6m0s"),
                    ("x-ratelimit-remaining-tokens", "149984"),
                    ("x-ratelimit-reset-tokens", "10h"),
                ],
                Some(360_000),
            ),
            (
                &[
                    ("x-ratelimit-remaining-requests", "0"),
                    ("x-ratelimit-reset-requests", "8.64s"),
                    ("x-ratelimit-remaining-tokens", "0"),
                    ("x-ratelimit-reset-tokens", "1m6.5s"),
                ],
                Some(66_500),
            ),
            (
                &[
                    ("x-ratelimit-remaining-tokens", "0"),
                    ("x-ratelimit-reset-tokens", "20ms"),
                ],
                Some(20),
            ),
            (
                &[
                    ("x-ratelimit-remaining-tokens", "0"),
                    ("x-ratelimit-reset-tokens", "20"),
                ],
                Some(20_000),
            ),
        ] {
            assert_eq!(waits(fields), expected, "{fields:?}");
        }
    }

    #[test]
    fn a_delay_that_no_duration_has_is_none() {
        let field = |number: u8, content: &[u8]| [&[number << 3 | 2, content.len() as u8], content].concat();
        let requested = |delay: &[u8]| {
            let url = field(1, b"type.googleapis.com/google.rpc.RetryInfo");
            let info = field(2, &field(1, delay));
            retry_delay(BASE64.encode(field(3, &[url, info].concat())).as_bytes())
        };
        const SECONDS: u8 = 1 << 3;
        const NANOS: u8 = 2 << 3;
        let negative = [[0xff; 9].as_slice(), &[1]].concat();

        assert_eq!(requested(&[SECONDS, 5, NANOS, 7]), Some(Duration::new(5, 7)));
        assert_eq!(
            requested(&[SECONDS, 5, NANOS, 0x80, 0x94, 0xeb, 0xdc, 0x03]),
            None,
            "1 s"
        );
        assert_eq!(requested(&[[SECONDS].as_slice(), &negative].concat()), None);
        assert_eq!(requested(&[[NANOS].as_slice(), &negative].concat()), None);
        // A number of more than ten bytes is malformed, and what is before it counts.
        let long = [[SECONDS, 5, NANOS].as_slice(), &[0x80; 10], &[1]].concat();
        assert_eq!(requested(&long), Some(Duration::from_secs(5)));
    }

    #[test]
    fn a_duration_of_another_form_is_none() {
        for text in ["", "m", "6x", "6m5", "1.2.3s", "-5s", "6 m", "1e400s"] {
            assert_eq!(duration(text), None, "{text}");
        }
        assert_eq!(duration("1d2h3m4s5ms6us7ns").map(|wait| wait.as_secs()), Some(93_784));
        assert_eq!(duration(&format!("{}h", "9".repeat(400))), None);
    }
}

#[cfg(all(test, feature = "tonic"))]
mod grpc_tests {
    use proptest::{collection::vec, prelude::any, proptest};
    use tonic_types::{ErrorDetails, StatusExt};

    use super::*;

    fn details(details: ErrorDetails) -> Vec<u8> {
        let status = tonic::Status::with_error_details(tonic::Code::ResourceExhausted, "slow down", details);
        status.details().to_vec()
    }

    #[test]
    fn the_delay_is_read_from_what_tonic_writes() {
        for delay in [
            Duration::ZERO,
            Duration::from_millis(1_500),
            Duration::from_secs(86_400),
            Duration::new(3, 1),
        ] {
            let mut all = ErrorDetails::new();
            all.add_quota_failure_violation("policy:a", "10 a minute")
                .set_retry_info(Some(delay))
                .set_request_info("id", "data");
            let written = details(all);
            assert_eq!(retry_delay(BASE64.encode(&written).as_bytes()), Some(delay));
            let padded = base64::engine::general_purpose::STANDARD.encode(&written);
            assert_eq!(retry_delay(padded.as_bytes()), Some(delay));
        }
        let without = details(ErrorDetails::with_request_info("id", "data"));
        assert_eq!(retry_delay(BASE64.encode(without).as_bytes()), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(mut bytes in vec(any::<u8>(), 0..64), cut in 0..80_usize) {
            let _ = retry_delay(&bytes);
            let _ = retry_delay(BASE64.encode(&bytes).as_bytes());
            let written = details(ErrorDetails::with_retry_info(Some(Duration::from_millis(1_500))));
            bytes.splice(0..0, written.into_iter().take(cut));
            let _ = retry_delay(BASE64.encode(&bytes).as_bytes());
        }
    }
}
