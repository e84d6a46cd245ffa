use std::time::Duration;

use super::rule::MAX_QUOTA;

pub(super) const MIN_WINDOW: Duration = Duration::from_millis(1);
pub(super) const MAX_WINDOW: Duration = Duration::from_secs(10 * 366 * 86_400);

/// What is wrong with the quota or the window of a limit.
pub(super) const fn fault_of(quota: u64, window: Duration) -> Option<&'static str> {
    if quota == 0 {
        return Some(
            "a limit is at least 1; `DenyAll`, as text `deny-all`, admits nothing, and `Unlimited` everything",
        );
    }
    if quota > MAX_QUOTA {
        return Some("a limit is at most 999999999999999; `Unlimited`, as text `unlimited`, admits everything");
    }
    if window.as_micros() < MIN_WINDOW.as_micros() || window.as_micros() > MAX_WINDOW.as_micros() {
        return Some("a window is between 1 ms and 10 years long");
    }
    if !window.subsec_nanos().is_multiple_of(1_000) {
        return Some("a window is a whole number of microseconds long");
    }
    None
}

/// The constructors of an algorithm, each for a quota and a window.
macro_rules! constructors {
    ($name:ident, |$quota:ident, $window:ident| $build:expr) => {
        /// Constructors.
        impl $name {
            /// `quota` requests in a `window`.
            ///
            /// # Panics
            ///
            /// If the quota is 0 or above 999,999,999,999,999, or the window is not a whole number of microseconds
            /// between 1 ms and 10 years; at compile time in a `const`. `try_from((quota, window))` returns an error instead:
            ///
            /// ```
            /// # use std::time::Duration;
            /// # use tower_quota::*;
            #[doc = concat!("const LIMIT: ", stringify!($name), " = ", stringify!($name), "::new(2, Duration::from_secs(30));")]
            /// assert_eq!(Limit::from(LIMIT).window(), Some(Duration::from_secs(30)));
            #[doc = concat!("assert!(", stringify!($name), "::try_from((0, Duration::from_secs(30))).is_err());")]
            /// ```
            ///
            /// ```compile_fail,E0080
            /// # use tower_quota::*;
            #[doc = concat!("const NONE: ", stringify!($name), " = ", stringify!($name), "::per_minute(0);")]
            /// # let _ = NONE;
            /// ```
            #[track_caller]
            pub const fn new($quota: u64, $window: std::time::Duration) -> Self {
                if let Some(fault) = $crate::limit::constructors::fault_of($quota, $window) {
                    panic!("{}", fault);
                }
                $build
            }

            constructors!(@per $name, per_second, 1, "`quota` requests in one second: 60 is sixty a second.");
            constructors!(@per $name, per_minute, 60, "`quota` requests in 60 seconds.");
            constructors!(@per $name, per_hour, 3_600, "`quota` requests in 60 minutes.");
            constructors!(@per $name, per_day, 86_400, "`quota` requests in 24 hours.");
        }

        /// A quota and a window, or an error if `new` panics on them.
        impl TryFrom<(u64, std::time::Duration)> for $name {
            type Error = $crate::ConfigError;

            fn try_from(($quota, $window): (u64, std::time::Duration)) -> Result<Self, $crate::ConfigError> {
                match $crate::limit::constructors::fault_of($quota, $window) {
                    Some(fault) => Err($crate::ConfigError::new(format!(
                        "{fault}; one looks like `{}::new(100, Duration::from_secs(60))`",
                        stringify!($name)
                    ))),
                    None => Ok($build),
                }
            }
        }
    };
    (@per $name:ident, $per:ident, $seconds:literal, $what:literal) => {
        #[doc = $what]
        ///
        /// # Panics
        ///
        /// If the quota is 0 or above 999,999,999,999,999; at compile time in a `const`.
        ///
        /// ```
        /// # use std::time::Duration;
        /// # use tower_quota::*;
        #[doc = concat!("let window = Duration::from_secs(", stringify!($seconds), ");")]
        #[doc = concat!("assert_eq!(", stringify!($name), "::", stringify!($per), "(60), ", stringify!($name), "::new(60, window));")]
        /// ```
        #[track_caller]
        pub const fn $per(quota: u64) -> Self {
            Self::new(quota, std::time::Duration::from_secs($seconds))
        }
    };
}

pub(super) use constructors;
