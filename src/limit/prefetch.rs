//! Units that are taken ahead.

use std::{fmt, time::Duration};

use super::rate::LengthText;

/// The times for which units may be taken ahead.
const SHORTEST: u128 = 1_000;
const LONGEST: u128 = 1_000_000;

/// Whether units may be taken ahead for this time by a limit with this window, or with windows of a calendar.
pub(super) const fn is_prefetch(time: Duration, window: Option<Duration>) -> bool {
    let micros = time.as_micros();
    let most = match window {
        Some(window) => window.as_micros() / 10,
        None => LONGEST,
    };
    micros >= SHORTEST && micros <= LONGEST && micros <= most && time.subsec_nanos().is_multiple_of(1_000)
}

pub(super) const FAULT: &str =
    "units are taken ahead for 1 ms to 1 s, in whole microseconds, and at most for a tenth of the window";

/// The setting `prefetch` of an algorithm, with its window.
macro_rules! prefetch {
    ($name:ident, $example:literal, |$limit:ident| $window:expr) => {
        /// Units that are taken ahead.
        impl $name {
            /// Lets a process take units ahead for this time, so that requests of a hot key are decided without a call of Redis.
            ///
            /// No window holds more than without it, but for the cases in
            /// [units that are taken ahead](crate::limit#units-that-are-taken-ahead), which has how, and what it costs. By default no units are taken ahead.
            ///
            /// # Panics
            ///
            /// If the time is not a whole number of microseconds from 1 ms to 1 s, or longer than a tenth of the window that the limit was made with; at compile
            /// time in a `const`. [`try_prefetch`](Self::try_prefetch) returns an error.
            ///
            /// ```
            /// # use std::time::Duration;
            /// # use tower_quota::*;
            #[doc = concat!("let limit = Limit::from(", $example, ".prefetch(Duration::from_millis(10)));")]
            /// assert!(limit.to_string().ends_with(" prefetch 10ms"));
            /// assert_eq!(limit.to_string().parse(), Ok(limit));
            /// ```
            #[track_caller]
            pub const fn prefetch(mut self, time: std::time::Duration) -> Self {
                let $limit = &self;
                assert!(
                    $crate::limit::prefetch::is_prefetch(time, $window),
                    "{}",
                    $crate::limit::prefetch::FAULT
                );
                self.ahead_us = time.as_micros() as u32;
                self
            }

            /// Like [`prefetch`](Self::prefetch), with an error in place of a panic, for a time from configuration. Zero is the default,
            /// by which none are taken ahead.
            ///
            /// ```
            /// # use std::time::Duration;
            /// # use tower_quota::*;
            #[doc = concat!("assert!(", $example, ".try_prefetch(Duration::from_millis(10)).is_ok());")]
            #[doc = concat!("assert!(", $example, ".try_prefetch(Duration::from_secs(10)).is_err());")]
            #[doc = concat!("let limit = ", $example, ".prefetch(Duration::from_millis(10));")]
            #[doc = concat!("assert_eq!(limit.try_prefetch(Duration::ZERO), Ok(", $example, "));")]
            /// ```
            ///
            /// # Errors
            ///
            /// If the time is neither zero nor a whole number of microseconds from 1 ms to 1 s, or longer than a tenth of the window that the limit was made with.
            pub fn try_prefetch(mut self, time: std::time::Duration) -> Result<Self, $crate::ConfigError> {
                let $limit = &self;
                if time.is_zero() {
                    self.ahead_us = 0;
                    return Ok(self);
                }
                if !$crate::limit::prefetch::is_prefetch(time, $window) {
                    return Err($crate::ConfigError::new($crate::limit::prefetch::FAULT));
                }
                Ok(self.prefetch(time))
            }

            /// For how long units are taken ahead; zero if they are not.
            pub(crate) const fn ahead(&self) -> std::time::Duration {
                std::time::Duration::from_micros(self.ahead_us as u64)
            }
        }
    };
}
pub(super) use prefetch;

/// The setting in a text, if it is set.
pub(super) struct PrefetchText(pub(super) u32);

impl fmt::Display for PrefetchText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            micros => write!(f, " prefetch {}", LengthText(Duration::from_micros(micros.into()))),
        }
    }
}
