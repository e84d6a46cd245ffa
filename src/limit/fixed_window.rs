use std::{fmt, time::Duration};

#[cfg(feature = "calendar")]
use jiff::tz::TimeZone;

#[cfg(feature = "calendar")]
use super::Calendar;
use super::{MAX_TOTAL, Rule, SLACK, Share, Span, constructors};

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

    pub(crate) fn scaled(self, share: Share) -> Self {
        Self {
            quota: share.part_of(self.quota),
            ..self
        }
    }

    /// For `lua/fixed_window.lua`: the length, and whether windows are aligned.
    #[cfg(any(feature = "fred", feature = "redis"))]
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
    #[cfg(any(feature = "fred", feature = "redis"))]
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

/// The open window of one key, if it has used any of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Window {
    start: u64,
    finish: u64,
    used: u64,
}

impl Rule for FixedWindow {
    type State = Window;

    fn settle(&self, window: &mut Window, now: u64, _: u64) {
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
