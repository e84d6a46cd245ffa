use std::{fmt, time::Duration};

/// The units of time in the text form of a limit, in microseconds.
///
/// There is no `m`, which could be a minute or a month. The lengths of months and years depend on the calendar.
pub(super) const UNITS: [(u128, &str); 7] = [
    (1, "us"),
    (1_000, "ms"),
    (1_000_000, "s"),
    (60_000_000, "min"),
    (3_600_000_000, "h"),
    (86_400_000_000, "d"),
    (604_800_000_000, "w"),
];

/// Displays the length of a window in the largest unit that divides it.
pub(super) struct WindowText(pub(super) Duration);

impl fmt::Display for WindowText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.as_micros();
        let (unit, name) = UNITS
            .into_iter()
            .rev()
            .find(|(unit, _)| us.is_multiple_of(*unit))
            .unwrap_or((1, "us"));
        match us / unit {
            1 => f.write_str(name),
            count => write!(f, "{count}{name}"),
        }
    }
}
