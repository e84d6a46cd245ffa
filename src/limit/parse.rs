use std::{fmt, str::FromStr, time::Duration};

#[cfg(feature = "calendar")]
use super::calendar::Calendar;
use super::{
    concurrency::Concurrency,
    fixed_window::FixedWindow,
    limit::Limit,
    rate::{Rate, parse_length, whole_number},
    sliding_counter::SlidingCounter,
    sliding_log::SlidingLog,
    token_bucket::TokenBucket,
};
use crate::ConfigError;

/// The name of the algorithm, the quota and the window, and the settings of the algorithm. The
/// [table](crate::limit#limits-as-text) has all spellings.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{Limit, SlidingLog};
///
/// let limit = SlidingLog::new(1_000_000, Duration::from_secs(10)).precision(1_000);
/// assert_eq!("sliding-log 1000000/10s precision 1000".parse(), Ok(Limit::from(limit)));
///
/// let error = "sliding-log 0/min".parse::<Limit>().unwrap_err().to_string();
/// assert!(error.contains("`deny-all`") && error.ends_with("one looks like `sliding-log 100/min`"), "{error}");
/// ```
impl FromStr for Limit {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let text = text.trim();
        if text.split([',', ';']).filter(|part| part.contains('/')).count() > 1 {
            return Err(fault(
                format_args!("`{text}` is several limits; a policy has one, and a layer has several policies"),
                LOG,
            ));
        }
        let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim_start();
        let (rate, example, limit): (_, _, fn(&Rate<'_>, &[&str]) -> _) = match name {
            "sliding-log" => (rest, LOG, sliding_log),
            "sliding-counter" => (rest, COUNTER, sliding_counter),
            "fixed-window" => (rest, WINDOW, fixed_window),
            "token-bucket" => (rest, BUCKET, token_bucket),
            "concurrency" => return concurrency(rest),
            "unlimited" if rest.is_empty() => return Ok(Self::Unlimited),
            "deny-all" if rest.is_empty() => return Ok(Self::DenyAll),
            _ if name.trim_start_matches('-').starts_with(|c: char| c.is_ascii_digit()) => (text, LOG, unnamed),
            _ => {
                return Err(fault(
                    format_args!(
                        "`{text}` is not a limit: it begins with `sliding-log`, `sliding-counter`, `fixed-window`, \
                         `token-bucket`, `concurrency` or a number, or is `unlimited` or `deny-all`"
                    ),
                    LOG,
                ));
            }
        };
        let (rate, options) = Rate::parse(rate, example)?;
        limit(&rate, &options)
    }
}

/// Parses the text.
impl TryFrom<&str> for Limit {
    type Error = ConfigError;

    fn try_from(text: &str) -> Result<Self, ConfigError> {
        text.parse()
    }
}

/// Parses the text, such as that of a variable of the environment.
///
/// ```
/// use tower_quota::{Limit, Policy, SlidingLog};
///
/// let limit = String::from("5/min");
/// assert_eq!(Policy::new("mails", limit).limit(), Some(&Limit::from(SlidingLog::per_minute(5))));
/// ```
impl TryFrom<String> for Limit {
    type Error = ConfigError;

    fn try_from(text: String) -> Result<Self, ConfigError> {
        text.parse()
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
const PREFETCH: &str = "sliding-log 100000/s precision 100 prefetch 10ms";
const SLOTS: &str = "concurrency 3";
const LEASED_SLOTS: &str = "concurrency 3 lease 30s";

fn sliding_log(rate: &Rate<'_>, options: &[&str]) -> Result<Limit, ConfigError> {
    let log = SlidingLog::new(rate.quota, rate.window()?);
    let (options, ahead) = split_prefetch(options)?;
    let log = match options {
        [] if rate.quota > SlidingLog::MAX_QUOTA => Err(fault(
            format_args!("a sliding log of more than {} needs a precision", SlidingLog::MAX_QUOTA),
            format_args!("{log} precision 1000"),
        )),
        [] => Ok(log),
        ["precision", n] => {
            let n = u32::try_from(whole_number(n, COARSE_LOG)?).unwrap_or(u32::MAX);
            log.try_precision(n).map_err(invalid(COARSE_LOG))
        }
        _ => Err(unknown(options, "sliding-log", COARSE_LOG)),
    }?;
    Ok(log.try_prefetch(ahead).map_err(invalid(PREFETCH))?.into())
}

/// The other settings, and for how long units are taken ahead, which is the last one.
fn split_prefetch<'a, 'b>(options: &'a [&'b str]) -> Result<(&'a [&'b str], Duration), ConfigError> {
    match options.iter().position(|word| *word == "prefetch") {
        Some(at) => Ok((&options[..at], length(&options[at + 1..], PREFETCH)?)),
        None => Ok((options, Duration::ZERO)),
    }
}

/// A length of time: one word, or a number and its unit.
fn length(words: &[&str], example: &str) -> Result<Duration, ConfigError> {
    let is_split = |number: &str, unit: &str| {
        number.ends_with(|last: char| last.is_ascii_digit()) && unit.starts_with(char::is_alphabetic)
    };
    let length = match words {
        [word] => parse_length(word),
        [number, unit] if is_split(number, unit) => parse_length(&words.concat()),
        _ => None,
    };
    length.ok_or_else(|| fault(format_args!("`{}` is not a length of time", words.join(" ")), example))
}

fn sliding_counter(rate: &Rate<'_>, options: &[&str]) -> Result<Limit, ConfigError> {
    match options {
        [] => Ok(SlidingCounter::new(rate.quota, rate.window()?).into()),
        _ => Err(unknown(options, "sliding-counter", COUNTER)),
    }
}

fn fixed_window(rate: &Rate<'_>, options: &[&str]) -> Result<Limit, ConfigError> {
    let (others, ahead) = split_prefetch(options)?;
    let fixed = match others {
        [] => FixedWindow::new(rate.quota, rate.window()?),
        ["aligned"] => FixedWindow::new(rate.quota, rate.window()?).aligned(),
        [zone] => calendar(rate, zone)?,
        _ => return Err(unknown(others, "fixed-window", ALIGNED_WINDOW)),
    };
    Ok(fixed.try_prefetch(ahead).map_err(invalid(PREFETCH))?.into())
}

#[cfg(feature = "calendar")]
fn calendar(rate: &Rate<'_>, zone: &str) -> Result<FixedWindow, ConfigError> {
    // Another word is not judged by the window.
    let of_zone = |calendar| FixedWindow::calendar(rate.quota, calendar, zone).map_err(invalid(CALENDAR));
    of_zone(Calendar::Month).and_then(|_| of_zone(rate.calendar()?))
}

#[cfg(not(feature = "calendar"))]
fn calendar(_: &Rate<'_>, zone: &str) -> Result<FixedWindow, ConfigError> {
    Err(fault(
        format_args!(
            "`{zone}` is not a setting of `fixed-window`; time zones need the feature `calendar` of tower-quota"
        ),
        ALIGNED_WINDOW,
    ))
}

fn token_bucket(rate: &Rate<'_>, options: &[&str]) -> Result<Limit, ConfigError> {
    let bucket = TokenBucket::new(rate.quota, rate.window()?);
    let (others, ahead) = split_prefetch(options)?;
    let bucket = match others {
        [] => bucket,
        ["burst", burst] => {
            let burst = whole_number(burst, BUCKET)?;
            bucket.try_burst(burst).map_err(invalid(BUCKET))?
        }
        _ => return Err(unknown(others, "token-bucket", BUCKET)),
    };
    let bucket = bucket.try_prefetch(ahead).map_err(invalid(PREFETCH))?;
    bucket.validate().map_err(invalid(BUCKET))?;
    Ok(bucket.into())
}

fn concurrency(text: &str) -> Result<Limit, ConfigError> {
    let words: Vec<_> = text.split_whitespace().collect();
    let [slots, setting @ ..] = &words[..] else {
        return Err(fault("it needs a number of slots", SLOTS));
    };
    if slots.contains('/') {
        return Err(fault(
            format_args!("`{text}` has a window, and slots have none: they are held until requests end"),
            SLOTS,
        ));
    }
    let slots = Concurrency::try_new(whole_number(slots, SLOTS)?).map_err(invalid(SLOTS))?;
    match setting {
        [] => Ok(slots.into()),
        ["lease", lease @ ..] => {
            let slots = slots.try_lease(length(lease, LEASED_SLOTS)?);
            Ok(slots.map_err(invalid(LEASED_SLOTS))?.into())
        }
        _ => Err(unknown(setting, "concurrency", LEASED_SLOTS)),
    }
}

/// A limit without the name of its algorithm: windows of a calendar are fixed, all others are those of a sliding log.
fn unnamed(rate: &Rate<'_>, options: &[&str]) -> Result<Limit, ConfigError> {
    match split_prefetch(options)?.0 {
        [zone] if !matches!(*zone, "aligned" | "precision") => fixed_window(rate, options),
        ["aligned"] => Err(unknown(options, "sliding-log", fixed_window(rate, options)?)),
        ["burst", _] => Err(unknown(options, "sliding-log", token_bucket(rate, options)?)),
        _ => sliding_log(rate, options),
    }
}

fn unknown(options: &[&str], algorithm: &str, example: impl fmt::Display) -> ConfigError {
    fault(
        format_args!("`{}` is not a setting of `{algorithm}`", options.join(" ")),
        example,
    )
}

fn invalid(example: &str) -> impl Fn(ConfigError) -> ConfigError {
    move |error| fault(error, example)
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
        deserialize_text(
            deserializer,
            "one limit such as \"sliding-log 100/min\"; several are several policies",
            str::parse,
        )
    }
}

/// Reads what is written as a text, with what is expected, for errors.
#[cfg(feature = "serde")]
pub(crate) fn deserialize_text<'de, D: serde::Deserializer<'de>, T>(
    deserializer: D,
    expected: &'static str,
    parse: fn(&str) -> Result<T, ConfigError>,
) -> Result<T, D::Error> {
    struct Text<T>(&'static str, fn(&str) -> Result<T, ConfigError>);

    impl<T> serde::de::Visitor<'_> for Text<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
            (self.1)(text).map_err(E::custom)
        }
    }

    deserializer.deserialize_str(Text(expected, parse))
}

/// The error of a text that is not a limit, with an example of the correct spelling.
pub(super) fn fault(fault: impl fmt::Display, example: impl fmt::Display) -> ConfigError {
    ConfigError::new(format!("{fault}; one looks like `{example}`"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::limit::rate::UNITS;

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
            "sliding-log 100000/s prefetch 10ms",
            "sliding-log 1000000/10s precision 1000 prefetch 10ms",
            "fixed-window 3/d prefetch 1s",
            "fixed-window 3/2w aligned prefetch 1500us",
            "token-bucket 10000/s prefetch 100ms",
            "token-bucket 10000/s burst 20000 prefetch 100ms",
            "concurrency 3",
            "concurrency 3 lease 1min",
            "concurrency 3 lease 1500ms",
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
    fn the_spellings_that_are_tried_first_are_read() {
        for (texts, displayed) in [
            (
                &[
                    "100/minute",
                    "100 per minute",
                    "100/m",
                    "100 / min",
                    "100/1 min",
                    "100 per 60 seconds",
                    " 100/60s ",
                    "sliding-log\t100/mins",
                ][..],
                "sliding-log 100/min",
            ),
            (
                &["5/15m", "5/15 min", "5/15minutes", "5 per 15 minutes"],
                "sliding-log 5/15min",
            ),
            (
                &["1 per 500ms", "1/500 milliseconds", "1/500000us"],
                "sliding-log 1/500ms",
            ),
            (&["10/s", "10/sec", "10/second", "10 per 1s"], "sliding-log 10/s"),
            (&["1/h", "1/hour", "1/60min", "1 per hr"], "sliding-log 1/h"),
            (&["1/d", "1/day", "1/24 hours", "1 per day"], "sliding-log 1/d"),
            (&["1/w", "1/week", "1/7days"], "sliding-log 1/w"),
            (&["1/30d", "1/30 days"], "sliding-log 1/30d"),
            (
                &[
                    "1_000_000/10s precision 1_000",
                    "sliding-log 1000000 per 10s   precision 1000",
                ],
                "sliding-log 1000000/10s precision 1000",
            ),
            (&["fixed-window 3/day", "fixed-window 3 per 24h"], "fixed-window 3/d"),
            (&["fixed-window 3 per hour aligned"], "fixed-window 3/h aligned"),
            (&["token-bucket 10 per second burst 30"], "token-bucket 10/s burst 30"),
            (&["sliding-counter 1_000/hour"], "sliding-counter 1000/h"),
            (
                &[
                    "concurrency 3",
                    "concurrency  3 lease 10s",
                    "concurrency 3  lease  10 secs ",
                ],
                "concurrency 3",
            ),
            (&["concurrency 1_000 lease minute"], "concurrency 1000 lease 1min"),
            (
                &[
                    "token-bucket 10000/s prefetch 10 ms",
                    "token-bucket 10000 per s prefetch  10ms",
                ],
                "token-bucket 10000/s prefetch 10ms",
            ),
            (&[" unlimited "], "unlimited"),
            #[cfg(feature = "calendar")]
            (
                &[
                    "3/day Europe/Berlin",
                    "3/d Europe/Berlin",
                    "3 per day Europe/Berlin",
                    "3/1 day Europe/Berlin",
                    "fixed-window 3/day Europe/Berlin",
                ],
                "fixed-window 3/day Europe/Berlin",
            ),
            #[cfg(feature = "calendar")]
            (
                &["1_000/months UTC", "1000 per month UTC"],
                "fixed-window 1000/month UTC",
            ),
            #[cfg(feature = "calendar")]
            (
                &["3/day Europe/Berlin prefetch 10ms"],
                "fixed-window 3/day Europe/Berlin prefetch 10ms",
            ),
        ] {
            for text in texts {
                let limit = text.parse::<Limit>().map(|limit| limit.to_string());
                assert_eq!(limit.as_deref(), Ok(displayed), "{text}");
            }
        }
    }

    /// The cells of each row of the section of the docs, without the rows of headings.
    fn documented() -> Vec<Vec<&'static str>> {
        let (_, docs) = include_str!("mod.rs").split_once("# Limits as text").unwrap();
        let (docs, _) = docs.split_once("//! # ").unwrap();
        let rows = docs.lines().filter_map(|line| line.strip_prefix("//! | `"));
        rows.map(|row| row.trim_end_matches('|').split('|').map(str::trim).collect())
            .collect()
    }

    fn spellings(cell: &str) -> Vec<&str> {
        cell.trim_matches('`').split("`, `").collect()
    }

    #[test]
    #[cfg(feature = "calendar")]
    fn the_docs_have_what_is_read_and_displayed() {
        use super::super::calendar::Calendar;

        macro_rules! limits {
            ($($limit:expr,)+) => {
                [$((stringify!($limit).replace(char::is_whitespace, "").replace(".unwrap()", "?"), Limit::from($limit)),)+]
            };
        }
        let limits = limits![
            SlidingLog::per_minute(100),
            SlidingLog::new(5, Duration::from_secs(900)),
            SlidingLog::new(1, Duration::from_millis(500)),
            SlidingLog::new(1_000_000, Duration::from_secs(10)).precision(1_000),
            SlidingLog::per_second(100_000)
                .precision(100)
                .prefetch(Duration::from_millis(10)),
            SlidingCounter::per_hour(1_000),
            FixedWindow::per_day(3),
            FixedWindow::per_hour(3).aligned(),
            FixedWindow::calendar(3, Calendar::Day, "Europe/Berlin").unwrap(),
            TokenBucket::per_second(10).burst(30),
            Concurrency::new(3),
            Concurrency::new(3).lease(Duration::from_secs(30)),
            Limit::Unlimited,
            Limit::DenyAll,
        ];

        let examples: Vec<_> = documented().into_iter().filter(|row| row.len() == 3).collect();
        assert_eq!(examples.len(), limits.len());
        for (row, (code, limit)) in examples.iter().zip(limits) {
            assert_eq!(row[1].trim_matches('`').replace(' ', ""), code);
            assert_eq!(row[2].trim_matches('`'), limit.to_string());
            for text in spellings(row[0]) {
                assert_eq!(text.parse(), Ok(limit.clone()), "{text}");
            }
        }
    }

    #[test]
    fn the_docs_have_every_unit() {
        let documented = documented();
        for unit in UNITS {
            let named = |row: &&Vec<&str>| row.len() == 2 && row[0].split('`').next() == Some(unit.name);
            let row = documented.iter().find(named).expect(unit.name);
            assert_eq!(spellings(row[1]), unit.others, "{}", unit.name);
        }
        assert_eq!(
            documented.iter().filter(|row| row.len() == 2).count(),
            UNITS.len() + 1,
            "and `/`"
        );
    }

    #[test]
    fn the_error_of_wrong_numbers_in_code_has_correct_ones() {
        for (limit, window) in [(0, 60_000_000), (1, 0), (1, 999), (1, u64::MAX)] {
            let error = SlidingLog::try_new(limit, Duration::from_micros(window)).unwrap_err();
            assert!(error.to_string().contains("SlidingLog::"), "{error}");
        }
    }

    #[test]
    fn the_error_of_a_wrong_text_names_the_fault_and_has_a_correct_one() {
        for (text, fault) in [
            ("", "is not a limit"),
            ("minute", "is not a limit"),
            ("unlimited 5", "is not a limit"),
            ("deny-all 5/min", "is not a limit"),
            ("sliding_log 100/min", "begins with `sliding-log`"),
            ("100", "no `/` or `per`"),
            ("100 min", "no `/` or `per`"),
            ("100 requests per minute", "no `/` or `per`"),
            ("100/", "no unit"),
            ("100/60", "no unit"),
            ("sliding-log", "a quota and a window"),
            ("sliding-log 100", "no `/` or `per`"),
            ("sliding-log 100/M", "`M` can be read as minutes and as months"),
            ("sliding-log 100/mo", "`mo` can be read as minutes and as months"),
            (
                "sliding-log 100/fortnight",
                "the units are `us`, `ms`, `s`, `min`, `h`, `d`, `w`",
            ),
            ("100/MIN", "`MIN` is not a unit"),
            ("100/min/s", "`min/s` is not a unit"),
            ("sliding-log 100/month", "calendar"),
            ("100 per year", "calendar"),
            ("sliding-log +1/min", "`+1` is not a whole number"),
            (
                "1.5/s",
                "`1.5` is not a whole number; half a request a second is `1/2s`, and 1.5 are `3/2s`",
            ),
            ("concurrency", "it needs a number of slots"),
            ("concurrency 3/s", "slots have none"),
            (
                "concurrency 1.5",
                "`1.5` is not a whole number; one looks like `concurrency 3`",
            ),
            ("concurrency three", "`three` is not a whole number"),
            ("concurrency 0", "between 1 and 999999999 slots"),
            ("concurrency 3 burst 5", "`burst 5` is not a setting of `concurrency`"),
            ("concurrency 3 lease 10", "`10` is not a length of time"),
            ("concurrency 3 lease _1_s", "`_1_s` is not a length of time"),
            ("concurrency 3 lease 1 0 s", "`1 0 s` is not a length of time"),
            ("concurrency 3 lease 1 0s", "`1 0s` is not a length of time"),
            ("concurrency 3 lease 10m in", "`10m in` is not a length of time"),
            ("concurrency 3 lease", "`` is not a length of time"),
            ("10/s prefetch 1 0 ms", "`1 0 ms` is not a length of time"),
            ("concurrency 3 lease 1ms", "between 1 s and 1 h"),
            ("1,000/s", "`1,000` is not a whole number"),
            ("_1/s", "is not a limit"),
            ("-5/min", "`-5` is not a whole number"),
            ("1_/s", "`1_` is not a whole number"),
            ("99999999999999999999/s", "is too large"),
            ("sliding-log 0/min", "at least 1"),
            ("0/month", "at least 1"),
            ("sliding-log 100001/min", "needs a precision"),
            (
                "sliding-log 100/min burst 3",
                "`burst 3` is not a setting of `sliding-log`",
            ),
            ("10/s burst 30", "one looks like `token-bucket 10/s burst 30`"),
            ("10/s burst 0", "at least 1"),
            ("10/s aligned", "one looks like `fixed-window 10/s aligned`"),
            ("10/s precision", "`precision` is not a setting"),
            ("sliding-log 100/min precision 0", "between 1 and 100000"),
            ("sliding-log 100/min precision 100001", "between 1 and 100000"),
            ("sliding-log 1/us", "between 1 ms and 10 years"),
            // In microseconds it is a little more than 2^64.
            ("sliding-log 1/30500569w", "between 1 ms and 10 years"),
            ("fixed-window 1000000000000000/h", "at most 999999999999999"),
            ("sliding-counter 1/99999999999999999999w", "is too large"),
            (
                "sliding-counter 1/s aligned",
                "`aligned` is not a setting of `sliding-counter`",
            ),
            ("fixed-window 3/h sideways", "`sideways`"),
            ("fixed-window 3/month", "calendar"),
            ("fixed-window 3/month Europe/Atlantis", "Europe/Atlantis"),
            ("fixed-window 3/min Europe/Berlin", ""),
            ("10/s nodelay", "`nodelay` is not a "),
            ("100/min; 1000/h", "several limits"),
            ("fixed-window 3/2days Europe/Berlin", ""),
            ("token-bucket 10/s burst 0", "at least 1"),
            ("token-bucket 10/s 30", "`30` is not a setting of `token-bucket`"),
            ("token-bucket 999999937/s burst 999999999999999", "too large"),
            ("unlimited please", "is not a limit"),
        ] {
            let error = text.parse::<Limit>().unwrap_err().to_string();
            assert!(error.contains(fault), "`{fault}` is not in: {error}");
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
