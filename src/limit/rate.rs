use std::{fmt, time::Duration};

#[cfg(feature = "calendar")]
use super::calendar::Calendar;
use super::{
    parse::fault,
    rule::MAX_QUOTA,
    token_bucket::{TokenBucket, gcd},
};
use crate::ConfigError;

/// A quota and a window in the text form of a limit: `100/min`, `5 per 15 minutes`.
pub(super) struct Rate<'a> {
    pub(super) quota: u64,
    /// The number of units in the window.
    count: u64,
    unit: &'a str,
    /// An example of a correct limit with the same algorithm.
    example: &'static str,
}

impl<'a> Rate<'a> {
    /// Splits a text into a rate and the words after it.
    pub(super) fn parse(text: &'a str, example: &'static str) -> Result<(Self, Vec<&'a str>), ConfigError> {
        let error = |what: fmt::Arguments<'_>| fault(what, example);
        if text.is_empty() {
            return Err(error(format_args!("it needs a quota and a window")));
        }

        let (quota, rest) = split_before(text, |c| c == '/' || c.is_whitespace());
        if quota.contains('.') {
            return Err(error(format_args!(
                "`{quota}` is not a whole number; half a request a second is `1/2s`, and 1.5 are `3/2s`"
            )));
        }
        let quota = whole_number(quota, example)?;
        let Some(window) = after_separator(rest.trim_start()) else {
            return Err(error(format_args!(
                "`{text}` has no `/` or `per` between its quota and its window"
            )));
        };

        let (count, rest) = split_count(window.trim_start(), example)?;
        let (unit, rest) = split_before(rest.trim_start(), char::is_whitespace);
        let rate = Self {
            quota,
            count,
            unit,
            example,
        };
        Ok((rate, rest.split_whitespace().collect()))
    }

    /// The length of the window, where the quota and the window are possible.
    pub(super) fn window(&self) -> Result<Duration, ConfigError> {
        self.check(Duration::from_secs(1))?;
        let unit = Unit::named(self.unit).ok_or_else(|| self.no_unit())?;
        let window = unit.times(self.count);
        self.check(window)?;
        Ok(window)
    }

    /// The window of the calendar.
    #[cfg(feature = "calendar")]
    pub(super) fn calendar(&self) -> Result<Calendar, ConfigError> {
        self.check(Duration::from_secs(1))?;
        let name = Unit::named(self.unit).map_or(self.unit, |unit| unit.name);
        match (self.count, name) {
            (1, "h") => Ok(Calendar::Hour),
            (1, "d") => Ok(Calendar::Day),
            (1, "w") => Ok(Calendar::Week),
            (1, "month" | "months") => Ok(Calendar::Month),
            (1, "year" | "years") => Ok(Calendar::Year),
            _ => Err(fault(
                "a window with a time zone is one `hour`, `day`, `week`, `month` or `year` of the calendar",
                format_args!("fixed-window {}/month Europe/Berlin", self.quota),
            )),
        }
    }

    fn check(&self, window: Duration) -> Result<(), ConfigError> {
        match fault_of(self.quota, window) {
            Some(wrong) => Err(fault(wrong, self.example)),
            None => Ok(()),
        }
    }

    fn no_unit(&self) -> ConfigError {
        let unit = self.unit;
        match unit {
            "" => fault("the window has no unit of time", self.example),
            "month" | "months" | "year" | "years" => self.depends_on_calendar(),
            "M" | "mo" | "mon" | "mth" => fault(
                format_args!(
                    "`{unit}` can be read as minutes and as months: write `min`, or `month` with a time zone in a \
                     `fixed-window`"
                ),
                self.example,
            ),
            _ => {
                let names = UNITS.map(|unit| format!("`{}`", unit.name)).join(", ");
                fault(
                    format_args!("`{unit}` is not a unit of time; the units are {names}"),
                    self.example,
                )
            }
        }
    }

    #[cfg(feature = "calendar")]
    fn depends_on_calendar(&self) -> ConfigError {
        let unit = self.unit.trim_end_matches('s');
        fault(
            format_args!("a `{unit}` is as long as the calendar of a time zone has it"),
            format_args!("fixed-window {}/{unit} Europe/Berlin", self.quota),
        )
    }

    #[cfg(not(feature = "calendar"))]
    fn depends_on_calendar(&self) -> ConfigError {
        fault(
            "windows of a calendar need the feature `calendar` of tower-quota",
            format_args!("fixed-window {}/30d", self.quota),
        )
    }
}

/// A number in decimal digits, with `_` between them if it is long.
pub(super) fn whole_number(text: &str, example: &str) -> Result<u64, ConfigError> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || byte == b'_';
    let well_formed = text.bytes().all(is_digit) && !text.starts_with('_') && !text.ends_with('_');
    match text.replace('_', "").parse() {
        Ok(number) if well_formed => Ok(number),
        Err(_) if well_formed && !text.is_empty() => Err(fault(format_args!("`{text}` is too large"), example)),
        _ => Err(fault(format_args!("`{text}` is not a whole number"), example)),
    }
}

fn after_separator(text: &str) -> Option<&str> {
    text.strip_prefix('/').or_else(|| {
        let window = text.strip_prefix("per")?;
        window.starts_with(char::is_whitespace).then_some(window)
    })
}

/// The number of units, which is 1 if it is not written, and the unit.
fn split_count<'a>(text: &'a str, example: &str) -> Result<(u64, &'a str), ConfigError> {
    match split_before(text, |c| !c.is_ascii_digit() && c != '_') {
        ("", unit) => Ok((1, unit)),
        (count, unit) => Ok((whole_number(count, example)?, unit)),
    }
}

/// The text before the first character of this kind, and the rest.
fn split_before(text: &str, is_end: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(is_end).unwrap_or(text.len()))
}

/// A unit of time in the text form of a limit.
pub(super) struct Unit {
    us: u128,
    /// The name that is displayed.
    pub(super) name: &'static str,
    pub(super) others: &'static [&'static str],
}

/// All units, the shortest first. The lengths of months and years depend on the calendar.
pub(super) const UNITS: [Unit; 7] = [
    unit(1, "us", &["microsecond", "microseconds"]),
    unit(1_000, "ms", &["millisecond", "milliseconds"]),
    unit(1_000_000, "s", &["sec", "secs", "second", "seconds"]),
    unit(60_000_000, "min", &["m", "mins", "minute", "minutes"]),
    unit(3_600_000_000, "h", &["hr", "hrs", "hour", "hours"]),
    unit(86_400_000_000, "d", &["day", "days"]),
    unit(604_800_000_000, "w", &["week", "weeks"]),
];

const fn unit(us: u128, name: &'static str, others: &'static [&'static str]) -> Unit {
    Unit { us, name, others }
}

impl Unit {
    pub(super) fn named(name: &str) -> Option<Self> {
        UNITS
            .into_iter()
            .find(|unit| unit.name == name || unit.others.contains(&name))
    }

    /// The length of so many of this unit.
    pub(super) fn times(&self, count: u64) -> Duration {
        let us = u64::try_from(u128::from(count) * self.us).unwrap_or(u64::MAX);
        Duration::from_micros(us)
    }
}

/// A unit of time, or a number of them: `min`, `15min`, `15 minutes`.
pub(crate) fn parse_length(text: &str) -> Option<Duration> {
    let (count, unit) = split_count(text, "").ok()?;
    Some(Unit::named(unit.trim())?.times(count))
}

/// Displays the length of a window in the largest unit that divides it.
pub(super) struct WindowText(pub(super) Duration);

impl fmt::Display for WindowText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match in_units(self.0) {
            (1, name) => f.write_str(name),
            (count, name) => write!(f, "{count}{name}"),
        }
    }
}

/// Displays a length of time with its number of units.
pub(crate) struct LengthText(pub(crate) Duration);

impl fmt::Display for LengthText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, name) = in_units(self.0);
        write!(f, "{count}{name}")
    }
}

/// The number of the largest units that divide a length of time.
fn in_units(length: Duration) -> (u128, &'static str) {
    let us = length.as_micros();
    let [smallest, ..] = UNITS;
    let unit = UNITS.into_iter().rfind(|unit| us.is_multiple_of(unit.us));
    let unit = unit.unwrap_or(smallest);
    (us / unit.us, unit.name)
}

pub(super) const MIN_WINDOW: Duration = Duration::from_millis(1);
pub(super) const MAX_WINDOW: Duration = Duration::from_secs(3_653 * 86_400);

/// What is wrong with the quota or the window of a limit.
pub(super) const fn fault_of(quota: u64, window: Duration) -> Option<&'static str> {
    if quota == 0 {
        return Some(
            "a limit is at least 1; `DenyAll`, as text `deny-all`, admits nothing, and `Unlimited` everything",
        );
    }
    if quota > MAX_QUOTA {
        return Some("a limit is at most 999999999999999; `Unlimited`, as text `unlimited`, admits everything");
    }
    if window.as_micros() < MIN_WINDOW.as_micros() || window.as_micros() > MAX_WINDOW.as_micros() {
        return Some("a window is between 1 ms and 10 years long");
    }
    if !window.subsec_nanos().is_multiple_of(1_000) {
        return Some("a window is a whole number of microseconds long");
    }
    None
}

/// The constructors of an algorithm, each for a quota and a window.
macro_rules! constructors {
    ($name:ident, |$quota:ident, $window:ident| $build:expr) => {
        /// Constructors.
        impl $name {
            /// `quota` requests in a `window`.
            ///
            /// # Panics
            ///
            /// If the quota is 0 or above 999,999,999,999,999, or the window is not a whole number of microseconds
            /// between 1 ms and 10 years; at compile time in a `const`. [`try_new`](Self::try_new) returns an error instead:
            ///
            /// ```
            /// # use std::time::Duration;
            /// # use tower_quota::*;
            #[doc = concat!("const LIMIT: ", stringify!($name), " = ", stringify!($name), "::new(2, Duration::from_secs(30));")]
            /// assert_eq!(Limit::from(LIMIT).window(), Some(Duration::from_secs(30)));
            #[doc = concat!("assert!(", stringify!($name), "::try_new(0, Duration::from_secs(30)).is_err());")]
            /// ```
            ///
            /// ```compile_fail,E0080
            /// # use tower_quota::*;
            #[doc = concat!("const NONE: ", stringify!($name), " = ", stringify!($name), "::per_minute(0);")]
            /// # let _ = NONE;
            /// ```
            #[track_caller]
            pub const fn new($quota: u64, $window: std::time::Duration) -> Self {
                if let Some(fault) = $crate::limit::rate::fault_of($quota, $window) {
                    panic!("{}", fault);
                }
                $build
            }

            constructors!(@per $name, per_second, 1, "`quota` requests in one second: 60 is sixty a second.");
            constructors!(@per $name, per_minute, 60, "`quota` requests in 60 seconds.");
            constructors!(@per $name, per_hour, 3_600, "`quota` requests in 60 minutes.");
            constructors!(@per $name, per_day, 86_400, "`quota` requests in 24 hours.");

            /// Like [`new`](Self::new), with an error in place of a panic, for numbers from configuration.
            ///
            /// # Errors
            ///
            /// If `new` panics on them.
            pub fn try_new($quota: u64, $window: std::time::Duration) -> Result<Self, $crate::ConfigError> {
                match $crate::limit::rate::fault_of($quota, $window) {
                    Some(fault) => Err($crate::ConfigError::new(format!(
                        "{fault}; one looks like `{}::new(100, Duration::from_secs(60))`",
                        stringify!($name)
                    ))),
                    None => Ok($build),
                }
            }
        }
    };
    (@per $name:ident, $per:ident, $seconds:literal, $what:literal) => {
        #[doc = $what]
        ///
        /// # Panics
        ///
        /// If the quota is 0 or above 999,999,999,999,999; at compile time in a `const`.
        ///
        /// ```
        /// # use std::time::Duration;
        /// # use tower_quota::*;
        #[doc = concat!("let window = Duration::from_secs(", stringify!($seconds), ");")]
        #[doc = concat!("assert_eq!(", stringify!($name), "::", stringify!($per), "(60), ", stringify!($name), "::new(60, window));")]
        /// ```
        #[track_caller]
        pub const fn $per(quota: u64) -> Self {
            Self::new(quota, std::time::Duration::from_secs($seconds))
        }
    };
}

pub(super) use constructors;

/// Constructors.
impl TokenBucket {
    /// A number of tokens a second, as configuration may have it: a fraction that agrees with it in six digits, so that `1.33333` is
    /// four tokens in three seconds.
    ///
    /// The default [burst](TokenBucket::try_burst) is the rate, rounded up.
    ///
    /// ```
    /// use tower_quota::TokenBucket;
    ///
    /// assert_eq!(TokenBucket::try_per_second(0.5)?.burst(5).to_string(), "token-bucket 1/2s burst 5");
    /// assert_eq!(TokenBucket::try_per_second(1.0 / 3.0)?.burst(1).to_string(), "token-bucket 1/3s");
    /// assert_eq!(TokenBucket::try_per_second(1.33333)?.to_string(), "token-bucket 4/3s burst 2");
    /// assert_eq!(TokenBucket::try_per_second(2.25)?.to_string(), "token-bucket 9/4s burst 3");
    /// assert!(TokenBucket::try_per_second(0.0).is_err());
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the number is not above 0, is above 999,999,999,999,999, or is less than one in 10 years.
    pub fn try_per_second(per_second: f64) -> Result<Self, ConfigError> {
        if per_second.is_nan() || per_second <= 0.0 {
            return Err(ConfigError::new(format!(
                "a rate of {per_second} tokens a second is not above 0; `DenyAll` admits nothing"
            )));
        }
        let (tokens, seconds) = fraction(per_second.clamp(1e-12, 1e18));
        Self::try_new(tokens, Duration::from_secs(seconds))?.try_burst(tokens.div_ceil(seconds))
    }
}

/// A number of six digits as a fraction: that of a number with three decimals, else the first convergent of its continued fraction
/// that differs from it by half of the last digit at most.
fn fraction(number: f64) -> (u64, u64) {
    const NOISE: f64 = 1e-9;
    let digit = 10_f64.powf(number.log10().floor() - 5.0);
    let number = (number / digit).round() * digit;
    let thousandths = (number * 1e3).round();
    if (thousandths / 1e3 - number).abs() <= NOISE * number {
        let divisor = gcd(thousandths as u64, 1_000);
        return (thousandths as u64 / divisor, 1_000 / divisor);
    }
    let (mut numerators, mut denominators, mut rest) = ([0.0, 1.0], [1.0, 0.0], number);
    loop {
        let whole = (rest * (1.0 + NOISE)).floor();
        numerators = [numerators[1], whole * numerators[1] + numerators[0]];
        denominators = [denominators[1], whole * denominators[1] + denominators[0]];
        let [numerator, denominator] = [numerators[1], denominators[1]];
        if (numerator / denominator - number).abs() <= digit / 2.0 {
            return (numerator as u64, denominator as u64);
        }
        rest = 1.0 / (rest - whole);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_of_a_float_has_six_digits() {
        for digits in [100_000, 123_456, 333_333, 500_001, 999_999] {
            for exponent in -13..7 {
                let rate = f64::from(digits) * 10_f64.powi(exponent);
                let bucket = TokenBucket::try_per_second(rate).expect("a rate");
                let (tokens, period) = bucket.reduced;
                let error = tokens as f64 * 1e6 / period as f64 / rate - 1.0;
                assert!(error.abs() < 5e-6, "{rate}: {bucket}, {error}");
                assert_eq!(bucket.burst(1).validate(), Ok(()), "{rate}: {bucket}");
            }
        }
        for (rate, text) in [
            (123_456_789.0, "token-bucket 123457000/s"),
            (1e8 / 3.0, "token-bucket 33333300/s"),
            (3.000_000_000_000_000_4, "token-bucket 3/s"),
            (1.234_567_89, "token-bucket 100/81s burst 2"),
            (4.0 / 3.0, "token-bucket 4/3s burst 2"),
            (0.333_333, "token-bucket 1/3s"),
            (1.003, "token-bucket 1003/1000s burst 2"),
            (1.002, "token-bucket 501/500s burst 2"),
            (1.000_01, "token-bucket 100001/100000s burst 2"),
            (100.0 / 7.0, "token-bucket 100/7s burst 15"),
            (999_999.6, "token-bucket 1000000/s"),
            (0.75, "token-bucket 3/4s burst 1"),
            (0.6, "token-bucket 3/5s burst 1"),
        ] {
            let bucket = TokenBucket::try_per_second(rate).expect("a rate");
            assert_eq!(bucket.to_string(), text);
            assert_eq!(bucket.validate(), Ok(()), "{text}");
        }
        let impossible = [f64::NAN, f64::INFINITY, -0.5, 0.0, f64::MIN_POSITIVE, 1e-9, 1e15];
        for rate in impossible {
            TokenBucket::try_per_second(rate).expect_err("no rate");
        }
    }
}
