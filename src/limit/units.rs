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

/// A unit of time, or a number of them: `min`, `15min`, `15 minutes`.
pub(crate) fn parse_length(text: &str) -> Option<Duration> {
    let (count, unit) = text.split_at(
        text.find(|c: char| !c.is_ascii_digit() && c != '_')
            .unwrap_or(text.len()),
    );
    let count = match count {
        "" => 1,
        count => count.replace('_', "").parse().ok()?,
    };
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
    let units = UNITS.into_iter().rev();
    let unit = units
        .into_iter()
        .find(|unit| us.is_multiple_of(unit.us))
        .unwrap_or(smallest);
    (us / unit.us, unit.name)
}
