use std::{ops::RangeInclusive, time::Duration};

use crate::limit::MAX_QUOTA;

/// How long a charge may wait for its limit, and how many units may wait for it at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// In microseconds; 0 if the charge has to fit at once.
    pub(crate) longest_us: u64,
    pub(crate) most: u64,
}

impl Waiting {
    /// The most units that wait by default. A log finds the turn of each of them within the entries that one call reads.
    pub(crate) const MOST: u64 = 500;

    /// The numbers of units that may be the most.
    pub(crate) const POSSIBLE: RangeInclusive<u64> = 1..=MAX_QUOTA;

    pub(crate) const NONE: Self = Self {
        longest_us: 0,
        most: Self::MOST,
    };

    pub(crate) fn up_to(longest: Duration, most: u64) -> Self {
        let longest_us = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        Self {
            longest_us: longest_us.min(MAX_QUOTA),
            most,
        }
    }
}
