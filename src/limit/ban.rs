use std::{fmt, time::Duration};

use super::{
    rate::{LengthText, MIN_WINDOW, WindowText},
    rule::{MAX_QUOTA, SLACK},
};
use crate::ConfigError;

/// Bans of a policy: how long a caller is denied everything after it was denied too often.
///
/// [`Policy::ban`](crate::Policy::ban) describes what a ban does, and what attackers can do with it.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::Ban;
///
/// const HOUR: Duration = Duration::from_secs(3_600);
/// let ban = Ban::after(10, HOUR).first(Duration::from_secs(60)).longest(24 * HOUR);
/// assert_eq!(ban.to_string(), "ban after 10/h first 1min longest 1d");
/// ```
///
/// Each ban is twice as long as the one before, up to the longest: 1, 2, 4 and 8 minutes, and 1 day from the twelfth on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Ban {
    /// None if no denial begins a ban.
    after: Option<u64>,
    within: Duration,
    first: Duration,
    pub(crate) longest: Duration,
}

/// Constructors. [`Policy::ban`](crate::Policy::ban) refuses numbers out of range.
impl Ban {
    /// Bans a key after `denials` denials (1 to 1,000,000) within a window of length `within` (1 ms to 366 days).
    ///
    /// The time begins with the first denial. It is also the time without a ban after which the next ban is shorter by one
    /// step.
    pub const fn after(denials: u64, within: Duration) -> Self {
        Self::new(Some(denials), within)
    }

    /// A ban that no denial begins: only [`Limiter::ban`](crate::Limiter::ban) does.
    pub const fn by_hand() -> Self {
        Self::new(None, Duration::from_secs(3_600))
    }

    const fn new(after: Option<u64>, within: Duration) -> Self {
        Self {
            after,
            within,
            first: Duration::from_secs(60),
            longest: Duration::from_secs(86_400),
        }
    }
}

/// Settings.
impl Ban {
    /// The length of the first ban: at least 1 ms, and at most that of the [longest](Self::longest). The default is 1 minute.
    ///
    /// Choose a first ban that is longer than the window of the limit. A shorter ban may end while the limit itself still denies:
    /// it is not noticed, and the next one is twice as long. For 5 requests in 15 minutes, set a first ban of more than 15 minutes.
    pub const fn first(mut self, length: Duration) -> Self {
        self.first = length;
        self
    }

    /// The length of the longest ban that this policy begins, at most 366 days. The default is 1 day.
    ///
    /// A ban that another policy has begun under the same name, with another longest length, applies until its end.
    pub const fn longest(mut self, length: Duration) -> Self {
        self.longest = length;
        self
    }
}

/// Accessors.
impl Ban {
    #[cfg(feature = "_redis")]
    pub(crate) const NAME: &'static str = "ban";

    /// The length of the next ban after this number of bans.
    fn length_us(&self, bans_before: u32) -> u64 {
        let [_, first, longest] = self.lengths_us();
        first.saturating_mul(2_u64.saturating_pow(bans_before)).min(longest)
    }

    /// The number of denials as a quota.
    pub(crate) fn quota(&self) -> u64 {
        self.after.unwrap_or(MAX_QUOTA)
    }

    /// The window, the first and the longest length.
    pub(crate) fn lengths_us(&self) -> [u64; 3] {
        [self.within, self.first, self.longest].map(|length| length.as_micros() as u64)
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        if self.after.is_some_and(|denials| !(1..NEVER).contains(&denials)) {
            return Err(ConfigError::new("a ban begins after 1 to 1000000 denials, such as 10"));
        }
        for (name, length) in [
            ("window", self.within),
            ("first length", self.first),
            ("longest length", self.longest),
        ] {
            if !(MIN_WINDOW..=MAX_BAN).contains(&length) || length.subsec_nanos() % 1_000 > 0 {
                return Err(ConfigError::new(format!(
                    "the {name} of a ban is a whole number of microseconds between 1 ms and 366 days, such as an hour"
                )));
            }
        }
        if self.first > self.longest {
            return Err(ConfigError::new(format!(
                "the first ban lasts {}, longer than the longest one of {}; set `longest` to at least `first`",
                LengthText(self.first),
                LengthText(self.longest)
            )));
        }
        Ok(())
    }
}

/// More denials than those that a ban can begin after.
pub(crate) const NEVER: u64 = 1_000_001;

/// The longest ban that a policy can have.
pub(crate) const MAX_BAN: Duration = Duration::from_secs(366 * 86_400);

/// More levels than there are: 366 days are less than 2^35 times 1 ms.
#[cfg(feature = "_redis")]
pub(crate) const LEVELS: u64 = 64;

impl fmt::Display for Ban {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.after {
            Some(denials) => {
                let window = WindowText(self.within);
                write!(f, "ban after {denials}/{window} first {}", LengthText(self.first))?;
            }
            None => f.write_str("ban by hand")?,
        }
        write!(f, " longest {}", LengthText(self.longest))
    }
}

/// What is stored for one key: the denials that were counted after the last ban, and that ban.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Banned {
    /// When the first of the denials was; without denials, when the last ban began.
    since: u64,
    denials: u64,
    /// The end of the last ban.
    until: u64,
    /// How often the next ban is doubled, one less for each window after the last ban.
    level: u64,
    /// When all of it is forgotten, by any policy of this name.
    expires_at: u64,
}

impl Banned {
    /// The rest of the ban that is in force; 0 without one.
    pub(crate) fn rest(&self, now: u64) -> u64 {
        self.until.saturating_sub(now)
    }

    /// The level at a time after the last ban.
    fn decayed(&self, now: u64, window: u64) -> u64 {
        self.level.saturating_sub(now.saturating_sub(self.until) / window)
    }
}

/// The steps of a decision. Times are in microseconds.
impl Ban {
    /// Removes what no longer counts.
    pub(crate) fn advance(&self, banned: &mut Banned, now: u64) {
        let [window, _, longest] = self.lengths_us();
        if banned.since > now + SLACK.min(window) {
            // The clock was set back. A ban that ends within the longest one stays, whichever policy has begun it.
            banned.denials = 0;
            if banned.since > now + SLACK {
                banned.expires_at = 0;
                if banned.until > now + longest {
                    *banned = Banned::default();
                }
            }
        } else if banned.denials > 0 && banned.since + window <= now {
            banned.denials = 0;
        }
    }

    /// Begins a ban of this length, unless a longer one is in force.
    pub(crate) fn begin(&self, banned: &mut Banned, now: u64, length: u64) {
        let [window, _, longest] = self.lengths_us();
        let until = now + length.min(longest);
        if until > banned.until {
            *banned = Banned {
                since: now,
                denials: 0,
                until,
                // A window that has begun undoes a step too, so that the next ban after denials is no longer for this one.
                level: banned.decayed(until + window - 1, window),
                ..*banned
            };
        }
    }

    /// Counts a denial, and returns whether the state changed.
    pub(crate) fn deny(&self, banned: &mut Banned, now: u64) -> bool {
        if self.after.is_none() {
            return false;
        }
        banned.denials += 1;
        if banned.denials == 1 {
            banned.since = now;
        }
        if banned.denials >= self.quota() {
            let [window, _, longest] = self.lengths_us();
            let level = banned.decayed(now, window);
            let length = self.length_us(level as u32);
            *banned = Banned {
                since: now,
                denials: 0,
                until: now + length,
                level: level + u64::from(length < longest),
                ..*banned
            };
        }
        true
    }

    /// The denials that remain until a ban begins; 0 while one is in force.
    pub(crate) fn room(&self, banned: &Banned, now: u64) -> u64 {
        match banned.rest(now) {
            0 => self.quota().saturating_sub(banned.denials).max(1),
            _ => 0,
        }
    }

    /// Time until the ban, the denials and the number of bans are forgotten.
    pub(crate) fn reset(&self, banned: &Banned, now: u64) -> u64 {
        let [window, ..] = self.lengths_us();
        let denials_end = if banned.denials > 0 { banned.since + window } else { 0 };
        let forgotten = denials_end.max(banned.until + banned.level * window);
        forgotten.saturating_sub(now)
    }

    /// The time at which what has changed expires: no earlier than before, since a policy of the same name may have a longer window.
    pub(crate) fn keep(&self, banned: &mut Banned, now: u64) -> u64 {
        let before = banned.expires_at.min(now + MAX_BAN.as_micros() as u64);
        banned.expires_at = before.max(now + self.reset(banned, now));
        banned.expires_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_ban_out_of_range_is_refused() {
        let ban = Ban::after(10, SECOND);
        let day = Duration::from_secs(86_400);
        for valid in [
            ban,
            Ban::by_hand(),
            Ban::after(1, Duration::from_millis(1)),
            Ban::after(1_000_000, 366 * day).longest(366 * day),
            ban.first(SECOND).longest(SECOND),
        ] {
            assert!(valid.validate().is_ok(), "{valid}");
        }
        for wrong in [
            Ban::after(0, SECOND),
            Ban::after(1_000_001, SECOND),
            Ban::after(MAX_QUOTA, SECOND),
            Ban::after(1 << 53, SECOND),
            Ban::after(u64::MAX, SECOND),
            Ban::after(1, Duration::ZERO),
            Ban::after(1, 367 * day),
            ban.first(Duration::ZERO),
            ban.longest(367 * day),
            ban.first(Duration::from_nanos(1_000_001)),
            ban.first(2 * SECOND).longest(SECOND),
        ] {
            let error = wrong.validate().unwrap_err().to_string();
            assert!(error.contains("ban"), "{error}");
        }
    }

    #[test]
    fn the_length_of_a_ban_does_not_overflow() {
        let ban = Ban::after(1, SECOND).first(MAX_BAN).longest(MAX_BAN);
        for bans_before in [0, 1, 31, 32, 63, u32::MAX] {
            assert_eq!(ban.length_us(bans_before), MAX_BAN.as_micros() as u64);
        }
        let small = Ban::after(1, SECOND).first(Duration::from_millis(1)).longest(MAX_BAN);
        assert_eq!(small.length_us(34), 1_000 << 34);
        assert_eq!(small.length_us(35), MAX_BAN.as_micros() as u64);
    }
}
