use std::{fmt, time::Duration};

#[cfg(feature = "calendar")]
use jiff::{Timestamp, Zoned, civil::Weekday, tz::TimeZone};

use super::{MAX_TOTAL, Rule, SLACK, Span, constructors};

/// Fixed window: so many in each window, and the windows follow one another.
///
/// A window opens with the first request that finds none open. [`aligned`](Self::aligned) ones open with the clock
/// instead, and [`calendar`](Self::calendar) ones with the calendar of a time zone.
///
/// # A timeline
///
/// Three an hour, aligned: a request at 1:59 and one at 2:01 fall into different windows.
///
/// ```
/// use std::{sync::atomic::{AtomicU64, Ordering}, sync::Arc, time::Duration};
/// use tower_quota::{FixedWindow, Limiter, MemoryStore, Policy};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let minutes = Arc::new(AtomicU64::new(0));
/// let clock = minutes.clone();
/// let store = MemoryStore::new().clock(move || Duration::from_secs(60 * clock.load(Ordering::Relaxed)));
/// let limiter = Limiter::new(store, Policy::new("hourly", FixedWindow::per_hour(3).aligned()));
///
/// // 1:59: three requests use up the window from 1:00 to 2:00.
/// minutes.store(119, Ordering::Relaxed);
/// for _ in 0..3 {
///     assert!(limiter.check("42").await?.is_allowed());
/// }
/// assert_eq!(limiter.check("42").await?.retry_after(), Some(Duration::from_secs(60)));
///
/// // 2:01: the next window has room for three more, six within two minutes.
/// minutes.store(121, Ordering::Relaxed);
/// assert_eq!(limiter.check("42").await?.remaining(), 2);
/// # Ok(())
/// # }
/// ```
///
/// # What it costs
///
/// Two numbers for each key, whatever the limit. At the boundary of two windows up to twice the limit N is admitted in a
/// moment: 2 N of aligned windows, and 2 N - 1 of others, since one request must have opened the first.
/// [`SlidingLog`](crate::SlidingLog) and [`SlidingCounter`](crate::SlidingCounter) look back over the boundary, and the
/// [module](crate::limit) compares them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct FixedWindow {
    quota: u64,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Anchored(Duration),
    Aligned(Duration),
    #[cfg(feature = "calendar")]
    Calendar(Calendar, TimeZone),
}

/// A window of the calendar.
#[cfg(feature = "calendar")]
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

constructors!(FixedWindow, |quota, window| Self {
    quota,
    kind: Kind::Anchored(window)
});

/// Settings.
impl FixedWindow {
    /// Lets windows open with the clock instead of with the first request: at multiples of their length since the Unix
    /// epoch, so hourly ones at each full hour of UTC.
    ///
    /// A calendar window stays what it is.
    pub fn aligned(mut self) -> Self {
        if let Kind::Anchored(window) = self.kind {
            self.kind = Kind::Aligned(window);
        }
        self
    }

    /// `limit` in each hour, day, week, month or year of the calendar in a time zone.
    ///
    /// # Panics
    ///
    /// If the limit is 0 or above 999,999,999,999,999.
    ///
    /// ```
    /// use jiff::tz::TimeZone;
    /// use tower_quota::{FixedWindow, Limit, limit::Calendar};
    ///
    /// let leave_requests = FixedWindow::calendar(3, Calendar::Month, TimeZone::get("Europe/Berlin")?);
    /// assert_eq!("fixed-window 3/month Europe/Berlin".parse(), Ok(Limit::from(leave_requests)));
    /// # Ok::<(), jiff::Error>(())
    /// ```
    #[cfg(feature = "calendar")]
    #[track_caller]
    pub fn calendar(limit: u64, calendar: Calendar, zone: TimeZone) -> Self {
        if let Some(fault) = super::fault(limit, Duration::from_secs(1)) {
            panic!("{fault}");
        }
        Self {
            quota: limit,
            kind: Kind::Calendar(calendar, zone),
        }
    }
}

/// Questions.
impl FixedWindow {
    pub(crate) const NAME: &'static str = "fixed";

    /// How many are admitted in each window.
    #[must_use]
    pub const fn quota(&self) -> u64 {
        self.quota
    }

    /// The length of each window; `None` for those of a calendar.
    #[must_use]
    pub const fn window(&self) -> Option<Duration> {
        match self.kind {
            Kind::Anchored(window) | Kind::Aligned(window) => Some(window),
            #[cfg(feature = "calendar")]
            Kind::Calendar(..) => None,
        }
    }

    /// For `lua/fixed_window.lua`: the length, and whether windows are aligned.
    #[cfg(feature = "fred")]
    pub(crate) fn length(&self) -> Option<(u64, bool)> {
        match self.kind {
            Kind::Anchored(window) => Some((window.as_micros() as u64, false)),
            Kind::Aligned(window) => Some((window.as_micros() as u64, true)),
            #[cfg(feature = "calendar")]
            Kind::Calendar(..) => None,
        }
    }

    /// The window around `now`, which for anchored windows is the one that would open.
    pub(crate) fn around(&self, now: u64) -> (u64, u64) {
        match &self.kind {
            Kind::Anchored(window) => (now, now + window.as_micros() as u64),
            Kind::Aligned(window) => {
                let window = window.as_micros() as u64;
                let start = now - now % window;
                (start, start + window)
            }
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar, zone) => calendar.around(now, zone),
        }
    }

    /// For `lua/fixed_window.lua`: the boundaries of calendar windows around a guess of the time; none for other windows.
    #[cfg(feature = "fred")]
    pub(crate) fn boundaries(&self, guess: u64) -> Option<[u64; 4]> {
        if self.length().is_some() {
            return None;
        }
        let (start, end) = self.around(guess);
        Some([self.around(start.saturating_sub(1)).0, start, end, self.around(end).1])
    }

    /// Where the window ends that opened at `start`, given the one around now.
    fn finish(&self, start: u64, (opens, closes): (u64, u64), now: u64) -> u64 {
        match self.kind {
            Kind::Anchored(window) => start + window.as_micros() as u64,
            // The clock was set back over a boundary.
            _ if start > now => start + (closes - opens),
            _ => closes,
        }
    }
}

impl fmt::Display for FixedWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fixed-window {}/", self.quota)?;
        match &self.kind {
            Kind::Anchored(window) => Span(*window).fmt(f),
            Kind::Aligned(window) => write!(f, "{} aligned", Span(*window)),
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar, zone) => write!(f, "{} {}", calendar.name(), zone.iana_name().unwrap_or("UTC")),
        }
    }
}

#[cfg(feature = "calendar")]
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
    fn around(self, now: u64, zone: &TimeZone) -> (u64, u64) {
        let window = i64::try_from(now)
            .ok()
            .and_then(|now| Timestamp::from_microsecond(now).ok())
            .and_then(|now| {
                let now = now.to_zoned(zone.clone());
                let start = self.start(&now).ok()?;
                let end = self.end(&start).ok()?;
                Some((micros(&start), micros(&end)))
            });
        window.unwrap_or((0, super::MAX_EXACT - 1))
    }

    fn start(self, now: &Zoned) -> Result<Zoned, jiff::Error> {
        let date = now.date();
        let first = match self {
            Self::Hour => {
                // By the time that has passed in it: an hour that the clocks repeat comes twice.
                let into = jiff::SignedDuration::new(
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
            Self::Hour => return start.checked_add(jiff::SignedDuration::from_hours(1)),
            Self::Day => date.tomorrow()?,
            Self::Week => date.checked_add(jiff::Span::new().weeks(1))?,
            Self::Month => date.checked_add(jiff::Span::new().months(1))?,
            Self::Year => date.checked_add(jiff::Span::new().years(1))?,
        };
        next.to_zoned(start.time_zone().clone())?.start_of_day()
    }
}

#[cfg(feature = "calendar")]
fn micros(at: &Zoned) -> u64 {
    at.timestamp().as_microsecond().try_into().unwrap_or_default()
}

/// The open window of one key, if it has used any of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Window {
    start: u64,
    finish: u64,
    used: u64,
}

impl Rule for FixedWindow {
    type State = Window;

    fn settle(&self, window: &mut Window, now: u64) {
        let (opens, closes) = self.around(now);
        let finish = self.finish(window.start, (opens, closes), now);
        let slack = SLACK.min(closes - opens);

        let open = match self.kind {
            Kind::Anchored(_) => now < finish,
            _ => window.start >= opens,
        };
        if window.used > 0 && open && window.start <= now + slack {
            window.finish = finish;
        } else {
            *window = Window {
                start: opens,
                finish: closes,
                used: 0,
            };
        }
    }

    fn room(&self, window: &Window, _: u64) -> u64 {
        self.quota.saturating_sub(window.used)
    }

    fn add(&self, window: &mut Window, _: u64, weight: u64) {
        window.used = (window.used + weight).min(MAX_TOTAL);
    }

    fn wait(&self, window: &Window, now: u64, _: u64) -> u64 {
        window.finish.saturating_sub(now).max(1)
    }

    fn reset(&self, window: &Window, now: u64) -> u64 {
        match window.used {
            0 => 0,
            _ => window.finish.saturating_sub(now),
        }
    }

    fn refund(&self, window: &mut Window, _: u64, at: u64, weight: u64) -> bool {
        let counts = window.used > 0 && (window.start..window.finish).contains(&at);
        if counts {
            window.used = window.used.saturating_sub(weight);
        }
        counts
    }
}

#[cfg(all(test, feature = "calendar"))]
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
