use jiff::{
    SignedDuration, Span, Timestamp, ZonedDateTime,
    civil::{Date, Weekday},
    tz::TimeZone,
};

use super::rule::MAX_EXACT;

/// A window of the calendar, for [`FixedWindow::calendar`](crate::FixedWindow::calendar).
///
/// ```
/// use tower_quota::{FixedWindow, limit::Calendar};
///
/// let monthly = FixedWindow::calendar(3, Calendar::Month, "UTC")?;
/// assert_eq!(monthly.to_string(), "fixed-window 3/month UTC");
/// # Ok::<(), tower_quota::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Calendar {
    /// From one full hour to the next, or to a change of the clocks by a part of an hour.
    Hour,
    /// From midnight to midnight: 23 or 25 hours where the clocks change.
    Day,
    /// From Monday to Sunday (ISO 8601).
    Week,
    /// From the first of a month to its last day.
    Month,
    /// From the first of January to the end of December.
    Year,
}

impl Calendar {
    /// The name in the text form of a limit.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// The length of the shortest window, in microseconds, as long as clocks change by three hours at most, as at Casey Station, or by
    /// half an hour.
    pub(super) fn shortest_us(self) -> u64 {
        const HOUR_US: u64 = 3_600_000_000;
        let days = match self {
            Self::Hour => return HOUR_US / 2,
            Self::Day => 1,
            Self::Week => 7,
            Self::Month => 28,
            Self::Year => 365,
        };
        (24 * days - 3) * HOUR_US
    }

    /// The window around `now` in microseconds. Times outside of the years that jiff supports are in one window.
    pub(super) fn around(self, now: u64, zone: &TimeZone) -> (u64, u64) {
        self.known_around(now, zone).unwrap_or((0, MAX_EXACT - 1))
    }

    fn known_around(self, now: u64, zone: &TimeZone) -> Option<(u64, u64)> {
        let now = Timestamp::from_microsecond(now.try_into().ok()?).ok()?;
        let now = now.to_zoned_datetime(zone.clone());
        let window = match self {
            Self::Hour => hour_around(&now),
            Self::Day | Self::Week | Self::Month | Self::Year => self.days_around(&now),
        };
        let (start, end) = window.ok()?;
        Some((micros(start), micros(end)))
    }

    fn days_around(self, now: &ZonedDateTime) -> Result<(Timestamp, Timestamp), jiff::Error> {
        let zone = now.time_zone();
        let mut first = self.first_day(now.date())?;
        loop {
            let next = self.next_day(first)?;
            let end = starts(next, zone)?;
            // Where clocks are set back over midnight, the end of a day comes again after the start of the next day.
            if now.timestamp() < end {
                return Ok((starts(first, zone)?, end));
            }
            first = next;
        }
    }

    fn first_day(self, date: Date) -> Result<Date, jiff::Error> {
        Ok(match self {
            Self::Hour | Self::Day => date,
            Self::Week if date.weekday() == Weekday::Monday => date,
            Self::Week => date.nth_weekday(-1, Weekday::Monday)?,
            Self::Month => date.first_of_month(),
            Self::Year => date.first_of_year(),
        })
    }

    fn next_day(self, first: Date) -> Result<Date, jiff::Error> {
        match self {
            Self::Hour | Self::Day => first.tomorrow(),
            Self::Week => first.checked_add(Span::new().weeks(1)),
            Self::Month => first.checked_add(Span::new().months(1)),
            Self::Year => first.checked_add(Span::new().years(1)),
        }
    }
}

/// The start of a day. If a change of the clocks skips midnight, it is the end of that change.
fn starts(date: Date, zone: &TimeZone) -> Result<Timestamp, jiff::Error> {
    Ok(date.to_zoned_datetime(zone.clone())?.start_of_day()?.timestamp())
}

/// The hour around `now`, by the elapsed time: an hour that the clocks repeat is two windows. A change of the clocks by a part
/// of an hour, as on Lord Howe Island, ends an hour and starts a shorter one.
fn hour_around(now: &ZonedDateTime) -> Result<(Timestamp, Timestamp), jiff::Error> {
    const HOUR: SignedDuration = SignedDuration::from_hours(1);

    let passed = SignedDuration::new(
        i64::from(now.minute()) * 60 + i64::from(now.second()),
        now.subsec_nanosecond(),
    );
    let (zone, now) = (now.time_zone(), now.timestamp());
    let (mut start, mut end) = (now.checked_sub(passed)?, now.checked_sub(passed)?.checked_add(HOUR)?);

    let minutes_differ = |a: Timestamp, b: Timestamp| {
        let shift = i64::from(zone.to_offset(a).seconds()) - i64::from(zone.to_offset(b).seconds());
        shift % HOUR.as_secs() != 0
    };
    let just_before = |at: Timestamp| at.checked_sub(SignedDuration::from_nanos(1));
    if minutes_differ(start, now) {
        let preceding = zone.preceding(now.checked_add(SignedDuration::from_nanos(1))?);
        let mut changes = preceding.map(|change| change.timestamp());
        let change = changes.find(|at| just_before(*at).is_ok_and(|before| minutes_differ(before, now)));
        start = change.map_or(start, |change| start.max(change));
    }
    if minutes_differ(just_before(end)?, now) {
        let mut changes = zone.following(now).map(|change| change.timestamp());
        let change = changes.find(|at| minutes_differ(*at, now));
        end = change.map_or(end, |change| end.min(change));
    }
    Ok((start, end))
}

fn micros(at: Timestamp) -> u64 {
    at.as_microsecond().try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Calendar {
        const ALL: [Self; 5] = [Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];
    }

    /// The window around a moment, in the local time of its zone.
    fn window(calendar: Calendar, moment: &str) -> (String, String) {
        let moment: ZonedDateTime = moment.parse().unwrap();
        let (start, end) = calendar.around(micros(moment.timestamp()), moment.time_zone());
        let show = |at: u64| {
            let at = Timestamp::from_microsecond(at as i64)
                .unwrap()
                .to_zoned_datetime(moment.time_zone().clone());
            at.strftime("%F %H:%M%:z").to_string()
        };
        (show(start), show(end))
    }

    #[test]
    fn months_and_years_have_their_own_lengths() {
        for (calendar, moment, start, end) in [
            (
                Calendar::Month,
                "2028-02-29T23:59[Europe/Berlin]",
                "2028-02-01 00:00+01:00",
                "2028-03-01 00:00+01:00",
            ),
            (
                Calendar::Month,
                "2027-02-10T12:00[Europe/Berlin]",
                "2027-02-01 00:00+01:00",
                "2027-03-01 00:00+01:00",
            ),
            (
                Calendar::Month,
                "2027-03-31T12:00[Europe/Berlin]",
                "2027-03-01 00:00+01:00",
                "2027-04-01 00:00+02:00",
            ),
            (
                Calendar::Year,
                "2028-12-31T23:59[Asia/Tokyo]",
                "2028-01-01 00:00+09:00",
                "2029-01-01 00:00+09:00",
            ),
            (
                Calendar::Week,
                "2027-01-01T00:00[Europe/Berlin]",
                "2026-12-28 00:00+01:00",
                "2027-01-04 00:00+01:00",
            ),
            (
                Calendar::Week,
                "2027-01-04T00:00[Europe/Berlin]",
                "2027-01-04 00:00+01:00",
                "2027-01-11 00:00+01:00",
            ),
        ] {
            assert_eq!(
                window(calendar, moment),
                (start.into(), end.into()),
                "{calendar:?} around {moment}"
            );
        }
    }

    #[test]
    fn days_are_shorter_or_longer_where_the_clocks_change() {
        for (calendar, moment, start, end) in [
            (
                Calendar::Day,
                "2027-03-28T12:00[Europe/Berlin]",
                "2027-03-28 00:00+01:00",
                "2027-03-29 00:00+02:00",
            ),
            (
                Calendar::Day,
                "2027-10-31T12:00[Europe/Berlin]",
                "2027-10-31 00:00+02:00",
                "2027-11-01 00:00+01:00",
            ),
            // Midnight did not exist.
            (
                Calendar::Day,
                "2018-11-04T12:00[America/Sao_Paulo]",
                "2018-11-04 01:00-02:00",
                "2018-11-05 00:00-02:00",
            ),
            // The hour from 2 to 3 came twice.
            (
                Calendar::Hour,
                "2027-10-31T02:30+02:00[Europe/Berlin]",
                "2027-10-31 02:00+02:00",
                "2027-10-31 02:00+01:00",
            ),
            (
                Calendar::Hour,
                "2027-10-31T02:30+01:00[Europe/Berlin]",
                "2027-10-31 02:00+01:00",
                "2027-10-31 03:00+01:00",
            ),
            (
                Calendar::Hour,
                "2027-01-01T10:45[Asia/Kolkata]",
                "2027-01-01 10:00+05:30",
                "2027-01-01 11:00+05:30",
            ),
        ] {
            assert_eq!(
                window(calendar, moment),
                (start.into(), end.into()),
                "{calendar:?} around {moment}"
            );
        }
    }

    #[test]
    fn hours_are_shorter_where_the_clocks_change_by_half_an_hour() {
        for (moment, start, end) in [
            // Set back at 2:00 to 1:30.
            (
                "2027-04-04T01:45+11:00[Australia/Lord_Howe]",
                "2027-04-04 01:00+11:00",
                "2027-04-04 01:30+10:30",
            ),
            (
                "2027-04-04T01:45+10:30[Australia/Lord_Howe]",
                "2027-04-04 01:30+10:30",
                "2027-04-04 02:00+10:30",
            ),
            // Set forward at 2:00 to 2:30.
            (
                "2027-10-03T01:45[Australia/Lord_Howe]",
                "2027-10-03 01:00+10:30",
                "2027-10-03 02:30+11:00",
            ),
            (
                "2027-10-03T02:45[Australia/Lord_Howe]",
                "2027-10-03 02:30+11:00",
                "2027-10-03 03:00+11:00",
            ),
        ] {
            assert_eq!(window(Calendar::Hour, moment), (start.into(), end.into()), "{moment}");
        }
    }

    #[test]
    fn hours_keep_their_length_where_the_clocks_change_by_an_hour_in_the_middle_of_one() {
        // Set forward at 2:45 to 3:45.
        for moment in ["2027-09-26T02:30[Pacific/Chatham]", "2027-09-26T03:50[Pacific/Chatham]"] {
            let expected = ("2027-09-26 02:00+12:45".into(), "2027-09-26 04:00+13:45".into());
            assert_eq!(window(Calendar::Hour, moment), expected, "{moment}");
        }
    }

    /// In all zones, around all changes of the clocks from 1972 to 2030: every moment is within its window, and the windows
    /// before and after it adjoin it.
    #[test]
    fn windows_tile_time_whatever_the_clocks_do() {
        // Earlier changes were by other times, such as 24 hours on Samoa in 2011.
        const SHORTEST_SINCE: u64 = 1_451_606_400_000_000;
        let end = "2030-01-01T00:00Z".parse::<Timestamp>().unwrap();
        let mut seen = std::collections::HashSet::new();
        let mut changes = 0;
        for name in jiff::tz::db().available() {
            let zone = TimeZone::get(name.as_str()).unwrap();
            let from = "1972-01-08T00:00Z".parse().unwrap();
            let all = zone.following(from).map(|change| (change.timestamp(), change.offset()));
            let all: Vec<_> = all.take_while(|(at, _)| *at < end).collect();
            // Many names are those of one zone.
            if !seen.insert(all.clone()) {
                continue;
            }
            for (at, _) in all {
                changes += 1;
                for calendar in Calendar::ALL {
                    let at = micros(at);
                    for minutes in [-61, -30, -1, 0, 15, 45, 60_i64] {
                        let moment = at.checked_add_signed(minutes * 60_000_000).unwrap();
                        let (start, end) = calendar.around(moment, &zone);
                        let place = format!("{calendar:?} in {name:?} around {moment}");
                        assert!(start <= moment && moment < end, "{place}: {start} to {end}");
                        let is_short = end - start < calendar.shortest_us();
                        assert!(!is_short || moment < SHORTEST_SINCE, "{place}: {start} to {end}");
                        assert_eq!(calendar.around(start, &zone), (start, end), "{place}");
                        assert_eq!(calendar.around(end - 1, &zone), (start, end), "{place}");
                        assert_eq!(calendar.around(end, &zone).0, end, "{place}");
                        assert_eq!(calendar.around(start - 1, &zone).1, start, "{place}");
                    }
                }
            }
        }
        assert!(changes > 10_000, "{changes}");
    }
}
