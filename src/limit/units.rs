use std::{fmt, time::Duration};

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

/// A length of time such as `2s` or `500 ms`.
#[cfg(feature = "serde")]
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (count, unit) = text.split_at(digits);
    Some(Unit::named(unit.trim())?.times(count.parse().ok()?))
}

/// Displays the length of a window in the largest unit that divides it.
pub(super) struct WindowText(pub(super) Duration);

impl fmt::Display for WindowText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.as_micros();
        let [smallest, ..] = UNITS;
        let Unit { us: unit, name, .. } = UNITS
            .into_iter()
            .rev()
            .find(|unit| us.is_multiple_of(unit.us))
            .unwrap_or(smallest);
        match us / unit {
            1 => f.write_str(name),
            count => write!(f, "{count}{name}"),
        }
    }
}
