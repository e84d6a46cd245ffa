use std::{error::Error, fmt, str::FromStr, time::Duration};

use super::{
    constructors::Fault, fixed_window::FixedWindow, limit::Limit, sliding_counter::SlidingCounter,
    sliding_log::SlidingLog, token_bucket::TokenBucket, units::UNITS,
};
use crate::ConfigError;

/// Error of a text that is not a limit. The message has an example of the correct spelling.
///
/// ```
/// use tower_quota::Limit;
///
/// let error = "sliding-log 0/min".parse::<Limit>().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "a limit is at least 1, `deny-all` admits nothing, and `unlimited` everything; one looks like `sliding-log 100/min`",
/// );
/// ```
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

/// The name of the algorithm, the quota and the window, and the settings of the algorithm:
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
/// The units of windows are `us`, `ms`, `s`, `min`, `h`, `d` and `w`, with a number before them if it is not 1: `10s`. Windows of
/// a calendar are `hour`, `day`, `week`, `month` and `year`, with a time zone after them (feature `calendar`).
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{Limit, SlidingLog};
///
/// let limit = SlidingLog::new(1_000_000, Duration::from_secs(10)).precision(1_000);
/// assert_eq!("sliding-log 1000000/10s precision 1000".parse(), Ok(Limit::from(limit)));
/// ```
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
const ALIGNED_WINDOW: &str = "fixed-window 3/h aligned";
#[cfg(feature = "calendar")]
const CALENDAR: &str = "fixed-window 3/month Europe/Berlin";
const BUCKET: &str = "token-bucket 10/s burst 30";

fn sliding_log(words: &[&str]) -> Result<Limit, ParseLimitError> {
    let (rate, options) = words.split_first().ok_or_else(|| missing("sliding-log", LOG))?;
    let (quota, window) = rate_of(rate, LOG)?;
    let log = SlidingLog::try_new(quota, window).map_err(invalid(LOG))?;

    match options {
        [] if quota > SlidingLog::MAX_QUOTA => Err(ParseLimitError::new(
            format_args!("a sliding log of more than {} needs a precision", SlidingLog::MAX_QUOTA),
            COARSE_LOG,
        )),
        [] => Ok(log.into()),
        ["precision", n] => {
            let n = u32::try_from(count(n, COARSE_LOG)?).unwrap_or(u32::MAX);
            Ok(log.try_precision(n).map_err(invalid(COARSE_LOG))?.into())
        }
        _ => Err(unknown(options, COARSE_LOG)),
    }
}

fn sliding_counter(words: &[&str]) -> Result<Limit, ParseLimitError> {
    let (rate, options) = words.split_first().ok_or_else(|| missing("sliding-counter", COUNTER))?;
    let (quota, window) = rate_of(rate, COUNTER)?;
    match options {
        [] => Ok(SlidingCounter::try_new(quota, window).map_err(invalid(COUNTER))?.into()),
        _ => Err(unknown(options, COUNTER)),
    }
}

fn fixed_window(words: &[&str]) -> Result<Limit, ParseLimitError> {
    let (rate, options) = words.split_first().ok_or_else(|| missing("fixed-window", WINDOW))?;
    if let Some(limit) = calendar(rate, options)? {
        return Ok(limit);
    }

    let (quota, window) = rate_of(rate, WINDOW)?;
    let fixed = FixedWindow::try_new(quota, window).map_err(invalid(WINDOW))?;
    match options {
        [] => Ok(fixed.into()),
        ["aligned"] => Ok(fixed.aligned().into()),
        _ => Err(unknown(options, ALIGNED_WINDOW)),
    }
}

#[cfg(feature = "calendar")]
fn calendar(rate: &str, options: &[&str]) -> Result<Option<Limit>, ParseLimitError> {
    use super::calendar::Calendar;

    let Some((quota, window)) = rate.split_once('/') else {
        return Ok(None);
    };
    let Some(calendar) = Calendar::ALL.into_iter().find(|calendar| calendar.name() == window) else {
        return Ok(None);
    };
    let quota = count(quota, CALENDAR)?;
    check(quota, Duration::from_secs(1), CALENDAR)?;

    let [zone] = options else {
        return Err(ParseLimitError::new(
            format_args!("a calendar {window} needs its time zone"),
            CALENDAR,
        ));
    };
    let fixed = FixedWindow::try_calendar(quota, calendar, zone).map_err(invalid(CALENDAR))?;
    Ok(Some(fixed.into()))
}

#[cfg(not(feature = "calendar"))]
fn calendar(rate: &str, _: &[&str]) -> Result<Option<Limit>, ParseLimitError> {
    match rate.split_once('/') {
        Some((_, "hour" | "day" | "week" | "month" | "year")) => Err(ParseLimitError::new(
            "windows of a calendar need the feature `calendar`; the units of others are `min`, `h`, `d` and `w`",
            WINDOW,
        )),
        _ => Ok(None),
    }
}

fn token_bucket(words: &[&str]) -> Result<Limit, ParseLimitError> {
    let (rate, options) = words.split_first().ok_or_else(|| missing("token-bucket", BUCKET))?;
    let (quota, window) = rate_of(rate, BUCKET)?;
    let bucket = TokenBucket::try_new(quota, window).map_err(invalid(BUCKET))?;

    let bucket = match options {
        [] => bucket,
        ["burst", burst] => {
            let burst = count(burst, BUCKET)?;
            bucket.try_burst(burst).map_err(invalid(BUCKET))?
        }
        _ => return Err(unknown(options, BUCKET)),
    };
    bucket.validate().map_err(invalid(BUCKET))?;
    Ok(bucket.into())
}

/// `100/min`
fn rate_of(text: &str, example: &str) -> Result<(u64, Duration), ParseLimitError> {
    let (quota, window) = text
        .split_once('/')
        .ok_or_else(|| ParseLimitError::new(format_args!("`{text}` is not a number and a window"), example))?;
    let (quota, window) = (count(quota, example)?, length(window, example)?);
    check(quota, window, example)?;
    Ok((quota, window))
}

fn check(quota: u64, window: Duration, example: &str) -> Result<(), ParseLimitError> {
    match Fault::of(quota, window) {
        Some(fault) => Err(ParseLimitError::new(fault.in_text(), example)),
        None => Ok(()),
    }
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
fn length(text: &str, example: &str) -> Result<Duration, ParseLimitError> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, name) = text.split_at(unit_at);
    let number = if number.is_empty() { 1 } else { count(number, example)? };

    let Some((unit, _)) = UNITS.into_iter().find(|(_, unit)| *unit == name) else {
        return Err(ParseLimitError::new(
            format_args!("`{text}` is not a window: its unit is `us`, `ms`, `s`, `min`, `h`, `d` or `w`"),
            example,
        ));
    };
    let us = u64::try_from(u128::from(number) * unit).unwrap_or(u64::MAX);
    Ok(Duration::from_micros(us))
}

fn missing(algorithm: &str, example: &str) -> ParseLimitError {
    ParseLimitError::new(format_args!("`{algorithm}` needs a number and a window"), example)
}

fn unknown(options: &[&str], example: &str) -> ParseLimitError {
    ParseLimitError::new(format_args!("`{}` is not a setting of it", options.join(" ")), example)
}

fn invalid(example: &str) -> impl Fn(ConfigError) -> ParseLimitError {
    move |error| ParseLimitError::new(error, example)
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
    fn a_printed_limit_parses_back() {
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
    fn the_error_of_wrong_numbers_in_code_has_correct_ones() {
        for (limit, window) in [(0, 60_000_000), (1, 0), (1, 999), (1, u64::MAX)] {
            let error = SlidingLog::try_new(limit, Duration::from_micros(window)).unwrap_err();
            assert!(error.to_string().contains("SlidingLog::"), "{error}");
        }
    }

    #[test]
    fn the_error_of_a_wrong_text_has_a_correct_one() {
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
            "sliding-log 100/min precision 100001",
            "sliding-log 1/us",
            "fixed-window 1000000000000000/h",
            "sliding-counter 1/99999999999999999999w",
            "fixed-window 3/h sideways",
            "fixed-window 3/month",
            "fixed-window 3/month Europe/Atlantis",
            "token-bucket 10/s burst 0",
            "token-bucket 999999937/s burst 999999999999999",
            "unlimited please",
        ] {
            let error = text.parse::<Limit>().unwrap_err().to_string();
            let (_, correct) = error.split_once("; one looks like `").unwrap_or_default();
            let correct = correct.strip_suffix('`').unwrap_or_default();
            assert!(correct.parse::<Limit>().is_ok(), "{text}: {error}");
            assert!(
                !error.contains("::") && !error.contains("`."),
                "in code, not in text: {error}"
            );
        }
    }
}
