use std::{error::Error, fmt, str::FromStr, time::Duration};

use super::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket};
use crate::ConfigError;

/// What the text form of a limit calls lengths of time, in microseconds. Neither `m`, which may be a minute or a month, nor
/// months and years, which are only in a calendar.
pub(super) const UNITS: [(u128, &str); 7] = [
    (1, "us"),
    (1_000, "ms"),
    (1_000_000, "s"),
    (60_000_000, "min"),
    (3_600_000_000, "h"),
    (86_400_000_000, "d"),
    (604_800_000_000, "w"),
];

/// A text is not a limit; the message shows what one looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseLimitError {
    message: String,
}

impl ParseLimitError {
    fn new(fault: impl fmt::Display, example: &str) -> Self {
        Self {
            message: format!("{fault}; one looks like `{example}`"),
        }
    }
}

impl fmt::Display for ParseLimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for ParseLimitError {}

impl From<ConfigError> for ParseLimitError {
    fn from(error: ConfigError) -> Self {
        Self {
            message: error.to_string(),
        }
    }
}

/// The algorithm, the limit and the window, then what else the algorithm has:
///
/// ```text
/// sliding-log 100/min
/// sliding-log 1000000/10s precision 1000
/// sliding-counter 1000/h
/// fixed-window 3/h
/// fixed-window 3/h aligned
/// fixed-window 3/month Europe/Berlin
/// token-bucket 10/s burst 30
/// unlimited
/// deny-all
/// ```
///
/// Windows are `us`, `ms`, `s`, `min`, `h`, `d` and `w`, with a number before them for several: `10s`. Those of a calendar
/// are `hour`, `day`, `week`, `month` and `year`, with the time zone behind (feature `calendar`).
impl FromStr for Limit {
    type Err = ParseLimitError;

    fn from_str(text: &str) -> Result<Self, ParseLimitError> {
        let mut words = text.split_whitespace();
        let algorithm = words.next().unwrap_or_default();
        let rest: Vec<&str> = words.collect();

        match algorithm {
            "sliding-log" => sliding_log(&rest),
            "sliding-counter" => sliding_counter(&rest),
            "fixed-window" => fixed_window(&rest),
            "token-bucket" => token_bucket(&rest),
            "unlimited" if rest.is_empty() => Ok(Self::Unlimited),
            "deny-all" if rest.is_empty() => Ok(Self::DenyAll),
            _ => Err(ParseLimitError::new(
                format_args!(
                    "`{text}` is not a limit: it begins with `sliding-log`, `sliding-counter`, `fixed-window` or \
                     `token-bucket`, or is `unlimited` or `deny-all`"
                ),
                LOG,
            )),
        }
    }
}

const LOG: &str = "sliding-log 100/min";
const COARSE_LOG: &str = "sliding-log 1000000/10s precision 1000";
const COUNTER: &str = "sliding-counter 1000/h";
const WINDOW: &str = "fixed-window 3/h";
#[cfg(feature = "calendar")]
const CALENDAR: &str = "fixed-window 3/month Europe/Berlin";
const BUCKET: &str = "token-bucket 10/s burst 30";

fn sliding_log(words: &[&str]) -> Result<Limit, ParseLimitError> {
    let (rate, options) = words.split_first().ok_or_else(|| missing("sliding-log", LOG))?;
    let (limit, window) = rate_of(rate, LOG)?;
    let log = SlidingLog::try_new(limit, window)?;

    let log = match options {
        [] => log,
        ["precision", n] => match n.parse() {
            Ok(n) if n > 0 && u64::from(n) <= SlidingLog::MAX_QUOTA => log.precision(n),
            _ => return Err(ParseLimitError::new("a precision is between 1 and 100000", COARSE_LOG)),
        },
        _ => return Err(unknown(options, COARSE_LOG)),
    };
    log.validate()?;
    Ok(log.into())
}

fn sliding_counter(words: &[&str]) -> Result<Limit, ParseLimitError> {
    let (rate, options) = words.split_first().ok_or_else(|| missing("sliding-counter", COUNTER))?;
    if !options.is_empty() {
        return Err(unknown(options, COUNTER));
    }
    let (limit, window) = rate_of(rate, COUNTER)?;
    Ok(SlidingCounter::try_new(limit, window)?.into())
}

fn fixed_window(words: &[&str]) -> Result<Limit, ParseLimitError> {
    let (rate, options) = words.split_first().ok_or_else(|| missing("fixed-window", WINDOW))?;
    if let Some(limit) = calendar(rate, options)? {
        return Ok(limit);
    }

    let (limit, window) = rate_of(rate, WINDOW)?;
    let fixed = FixedWindow::try_new(limit, window)?;
    match options {
        [] => Ok(fixed.into()),
        ["aligned"] => Ok(fixed.aligned().into()),
        _ => Err(unknown(options, "fixed-window 3/h aligned")),
    }
}

#[cfg(feature = "calendar")]
fn calendar(rate: &str, options: &[&str]) -> Result<Option<Limit>, ParseLimitError> {
    use super::Calendar;

    let Some((limit, window)) = rate.split_once('/') else {
        return Ok(None);
    };
    let Some(calendar) = Calendar::ALL.into_iter().find(|calendar| calendar.name() == window) else {
        return Ok(None);
    };
    let limit = count(limit, CALENDAR)?;
    FixedWindow::try_new(limit, Duration::from_secs(1)).map(drop)?;

    let [zone] = options else {
        return Err(ParseLimitError::new(
            format_args!("a calendar {window} needs its time zone"),
            CALENDAR,
        ));
    };
    let zone = jiff::tz::TimeZone::get(zone)
        .map_err(|_| ParseLimitError::new(format_args!("`{zone}` is not a time zone"), CALENDAR))?;
    Ok(Some(FixedWindow::calendar(limit, calendar, zone).into()))
}

#[cfg(not(feature = "calendar"))]
fn calendar(rate: &str, _: &[&str]) -> Result<Option<Limit>, ParseLimitError> {
    match rate.split_once('/') {
        Some((_, "hour" | "day" | "week" | "month" | "year")) => Err(ParseLimitError::new(
            "windows of a calendar need the feature `calendar`, and others are spelled in `min`, `h`, `d` and `w`",
            WINDOW,
        )),
        _ => Ok(None),
    }
}

fn token_bucket(words: &[&str]) -> Result<Limit, ParseLimitError> {
    let (rate, options) = words.split_first().ok_or_else(|| missing("token-bucket", BUCKET))?;
    let (limit, window) = rate_of(rate, BUCKET)?;
    let bucket = TokenBucket::try_new(limit, window)?;

    let bucket = match options {
        [] => bucket,
        ["burst", burst] => match count(burst, BUCKET)? {
            0 => return Err(ParseLimitError::new("a burst is at least 1", BUCKET)),
            burst => bucket.burst(burst),
        },
        _ => return Err(unknown(options, BUCKET)),
    };
    bucket.validate()?;
    Ok(bucket.into())
}

/// `100/min`
fn rate_of(text: &str, example: &str) -> Result<(u64, Duration), ParseLimitError> {
    let (limit, window) = text
        .split_once('/')
        .ok_or_else(|| ParseLimitError::new(format_args!("`{text}` is not a number and a window"), example))?;
    Ok((count(limit, example)?, span(window, example)?))
}

fn count(text: &str, example: &str) -> Result<u64, ParseLimitError> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(count) if digits => Ok(count),
        _ => Err(ParseLimitError::new(
            format_args!("`{text}` is not a whole number"),
            example,
        )),
    }
}

/// `min`, `10s`
fn span(text: &str, example: &str) -> Result<Duration, ParseLimitError> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, name) = text.split_at(unit_at);
    let number = if number.is_empty() { 1 } else { count(number, example)? };

    let Some((unit, _)) = UNITS.into_iter().find(|(_, unit)| *unit == name) else {
        return Err(ParseLimitError::new(
            format_args!("`{text}` is not a window: its unit is `us`, `ms`, `s`, `min`, `h`, `d` or `w`"),
            example,
        ));
    };
    let us = u64::try_from(u128::from(number) * unit)
        .map_err(|_| ParseLimitError::new("a window is between 1 ms and 10 years long", example))?;
    Ok(Duration::from_micros(us))
}

fn missing(algorithm: &str, example: &str) -> ParseLimitError {
    ParseLimitError::new(format_args!("`{algorithm}` needs a number and a window"), example)
}

fn unknown(options: &[&str], example: &str) -> ParseLimitError {
    ParseLimitError::new(format_args!("`{}` means nothing here", options.join(" ")), example)
}

#[cfg(feature = "serde")]
impl serde::Serialize for Limit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Limit {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_parses_back() {
        for text in [
            "sliding-log 100/min",
            "sliding-log 2/30s",
            "sliding-log 2/1500ms",
            "sliding-log 2/1001us",
            "sliding-log 1000000/10s precision 1000",
            "sliding-counter 1000/h",
            "fixed-window 3/d",
            "fixed-window 3/2w aligned",
            "token-bucket 10/s",
            "token-bucket 10/s burst 30",
            "unlimited",
            "deny-all",
            #[cfg(feature = "calendar")]
            "fixed-window 3/month Europe/Berlin",
        ] {
            let limit: Limit = text.parse().unwrap();
            assert_eq!(limit.to_string(), text);
        }
    }

    #[test]
    fn a_text_means_what_the_constructors_mean() {
        let pairs: [(&str, Limit); 6] = [
            ("sliding-log 100/60s", SlidingLog::per_minute(100).into()),
            ("sliding-counter 5/24h", SlidingCounter::per_day(5).into()),
            ("fixed-window 3/60min", FixedWindow::per_hour(3).into()),
            ("fixed-window 3/h aligned", FixedWindow::per_hour(3).aligned().into()),
            ("token-bucket 10/s", TokenBucket::per_second(10).into()),
            (
                "  token-bucket   10/s  burst 30 ",
                TokenBucket::per_second(10).burst(30).into(),
            ),
        ];
        for (text, limit) in pairs {
            assert_eq!(text.parse(), Ok(limit), "{text}");
        }
    }

    #[test]
    fn a_wrong_text_is_answered_with_a_right_one() {
        for text in [
            "",
            "100/min",
            "sliding-log",
            "sliding-log 100",
            "sliding-log 100/m",
            "sliding-log 100/month",
            "sliding-log +1/min",
            "sliding-log 0/min",
            "sliding-log 100001/min",
            "sliding-log 100/min burst 3",
            "sliding-log 100/min precision 0",
            "sliding-counter 1/99999999999999999999w",
            "fixed-window 3/h sideways",
            "fixed-window 3/month",
            "fixed-window 3/month Europe/Atlantis",
            "token-bucket 10/s burst 0",
            "token-bucket 999999937/s burst 999999999999999",
            "unlimited please",
        ] {
            let error = text.parse::<Limit>().unwrap_err().to_string();
            assert!(error.contains('`'), "{text}: {error}");
        }
    }
}
