//! Fields with one value each that name what remains of a limit and when it is restored.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, header::DATE};

use super::{seconds_of, text_of};

/// The names of what remains and of its reset: of draft -06, those that no standard defines, and those of OpenAI.
const PAIRS: [[&str; 2]; 5] = [
    ["ratelimit-remaining", "ratelimit-reset"],
    ["x-ratelimit-remaining", "x-ratelimit-reset"],
    ["x-rate-limit-remaining", "x-rate-limit-reset"],
    ["x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"],
    ["x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
];

/// The longest wait of the limits of which nothing remains.
pub(super) fn wait_of_exhausted(headers: &HeaderMap) -> Option<Duration> {
    let waits = PAIRS.iter().filter_map(|[remaining, reset]| {
        // Some services write a negative number, or `0.0`.
        let remaining: f64 = text_of(headers, remaining)?.parse().ok()?;
        (remaining <= 0.0).then(|| wait(text_of(headers, reset)?, headers))?
    });
    waits.max()
}

/// The least number that is an epoch in seconds, and the least that is one in milliseconds; below it is a wait in seconds.
const EPOCHS: [f64; 2] = [1e9, 1e12];

/// Seconds from now, an epoch in seconds or milliseconds, or a duration such as `6m0s`.
fn wait(reset: &str, headers: &HeaderMap) -> Option<Duration> {
    let Ok(number) = reset.parse::<f64>() else {
        return duration(reset);
    };
    let [seconds, milliseconds] = EPOCHS;
    let wait = match number {
        epoch if epoch >= milliseconds => epoch / 1_000.0 - now(headers)?,
        epoch if epoch >= seconds => epoch - now(headers)?,
        wait => wait,
    };
    Duration::try_from_secs_f64(wait.max(0.0)).ok()
}

/// The time of the response by the clock of its server; without one, that of its receipt.
fn now(headers: &HeaderMap) -> Option<f64> {
    if let Some(sent) = text_of(headers, DATE.as_str()).and_then(seconds_of) {
        return Some(sent as f64);
    }
    Some(SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64())
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

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn waits(fields: &[(&'static str, &'static str)]) -> Option<u64> {
        let fields = fields
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        wait_of_exhausted(&fields.collect()).map(|wait| wait.as_millis() as u64)
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
                &[("x-ratelimit-remaining", "0.0"), ("x-ratelimit-reset", "1.5")],
                Some(1_500),
            ),
            (
                &[("x-ratelimit-remaining", "-2"), ("x-ratelimit-reset", "7")],
                Some(7_000),
            ),
            (&[("x-ratelimit-remaining", "1"), ("x-ratelimit-reset", "30")], None),
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
    fn a_duration_of_another_form_is_none() {
        for text in ["", "m", "6x", "6m5", "1.2.3s", "-5s", "6 m", "1e400s"] {
            assert_eq!(duration(text), None, "{text}");
        }
        assert_eq!(duration("1d2h3m4s5ms6us7ns").map(|wait| wait.as_secs()), Some(93_784));
        assert_eq!(duration(&format!("{}h", "9".repeat(400))), None);
    }
}
