use jiff::{SignedDuration, Span, Timestamp, Zoned, civil::Weekday, tz::TimeZone};

use super::MAX_EXACT;

/// A window of the calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Calendar {
    /// From one full hour to the next.
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
    pub(super) const ALL: [Self; 5] = [Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// What the text form of a limit calls it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// The window around `now`; beyond the years that a calendar knows, everything is one window.
    pub(super) fn around(self, now: u64, zone: &TimeZone) -> (u64, u64) {
        let window = i64::try_from(now)
            .ok()
            .and_then(|now| Timestamp::from_microsecond(now).ok())
            .and_then(|now| {
                let now = now.to_zoned(zone.clone());
                let start = self.start(&now).ok()?;
                let end = self.end(&start).ok()?;
                Some((micros(&start), micros(&end)))
            });
        window.unwrap_or((0, MAX_EXACT - 1))
    }

    fn start(self, now: &Zoned) -> Result<Zoned, jiff::Error> {
        let date = now.date();
        let first = match self {
            Self::Hour => {
                // By the time that has passed in it: an hour that the clocks repeat comes twice.
                let into = SignedDuration::new(
                    i64::from(now.minute()) * 60 + i64::from(now.second()),
                    now.subsec_nanosecond(),
                );
                return now.checked_sub(into);
            }
            Self::Day => date,
            Self::Week => match date.weekday() {
                Weekday::Monday => date,
                _ => date.nth_weekday(-1, Weekday::Monday)?,
            },
            Self::Month => date.first_of_month(),
            Self::Year => date.first_of_year(),
        };
        // Where a change of clocks skips midnight, the day starts after it.
        first.to_zoned(now.time_zone().clone())?.start_of_day()
    }

    fn end(self, start: &Zoned) -> Result<Zoned, jiff::Error> {
        let date = start.date();
        let next = match self {
            Self::Hour => return start.checked_add(SignedDuration::from_hours(1)),
            Self::Day => date.tomorrow()?,
            Self::Week => date.checked_add(Span::new().weeks(1))?,
            Self::Month => date.checked_add(Span::new().months(1))?,
            Self::Year => date.checked_add(Span::new().years(1))?,
        };
        next.to_zoned(start.time_zone().clone())?.start_of_day()
    }
}

fn micros(at: &Zoned) -> u64 {
    at.timestamp().as_microsecond().try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The window around a moment, in the words of its time zone.
    fn window(calendar: Calendar, moment: &str) -> (String, String) {
        let moment: Zoned = moment.parse().unwrap();
        let (start, end) = calendar.around(micros(&moment), moment.time_zone());
        let show = |at: u64| {
            let at = Timestamp::from_microsecond(at as i64)
                .unwrap()
                .to_zoned(moment.time_zone().clone());
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
}
