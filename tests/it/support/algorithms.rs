use std::time::Duration;

use tower_quota::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket, limit::Calendar};

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);

/// An algorithm, with limits of it for the tests.
#[derive(Clone, Copy)]
pub(crate) struct Algorithm {
    /// A limit of so many at once, for 10 seconds where that is a choice.
    limit: fn(u64) -> Limit,
    /// The same for 4 seconds, or for a day instead of a month.
    shorter: fn(u64) -> Limit,
    /// The longest time for which a full limit denies a request of cost 1.
    longest_wait: Duration,
}

impl Algorithm {
    pub(crate) const WINDOW: Duration = Duration::from_secs(10);
    const SHORTER: Duration = Duration::from_secs(4);

    pub(crate) const ALL: [Self; 8] = [
        Self::SLIDING_LOG,
        Self::COARSE_LOG,
        Self::SLIDING_COUNTER,
        Self::FIXED_WINDOW,
        Self::ALIGNED_WINDOW,
        Self::CALENDAR_MONTH,
        Self::TOKEN_BUCKET,
        Self::TOKEN_BUCKET_WITH_BURST,
    ];

    pub(crate) const SLIDING_LOG: Self = Self {
        limit: |quota| SlidingLog::new(quota, Self::WINDOW).into(),
        shorter: |quota| SlidingLog::new(quota, Self::SHORTER).into(),
        longest_wait: Self::WINDOW,
    };

    /// Merges what is admitted in 2.5 seconds, or in one of the shorter window.
    pub(crate) const COARSE_LOG: Self = Self {
        limit: |quota| SlidingLog::new(quota, Self::WINDOW).precision(4).into(),
        shorter: |quota| SlidingLog::new(quota, Self::SHORTER).precision(4).into(),
        longest_wait: Self::WINDOW,
    };

    /// Its longest wait: what fills one window counts until the end of the next one.
    pub(crate) const SLIDING_COUNTER: Self = Self {
        limit: |quota| SlidingCounter::new(quota, Self::WINDOW).into(),
        shorter: |quota| SlidingCounter::new(quota, Self::SHORTER).into(),
        longest_wait: Duration::from_secs(20),
    };

    pub(crate) const FIXED_WINDOW: Self = Self {
        limit: |quota| FixedWindow::new(quota, Self::WINDOW).into(),
        shorter: |quota| FixedWindow::new(quota, Self::SHORTER).into(),
        longest_wait: Self::WINDOW,
    };

    pub(crate) const ALIGNED_WINDOW: Self = Self {
        limit: |quota| FixedWindow::new(quota, Self::WINDOW).aligned().into(),
        shorter: |quota| FixedWindow::new(quota, Self::SHORTER).aligned().into(),
        longest_wait: Self::WINDOW,
    };

    pub(crate) const CALENDAR_MONTH: Self = Self {
        limit: |quota| FixedWindow::calendar(quota, Calendar::Month, BERLIN).unwrap().into(),
        shorter: |quota| FixedWindow::calendar(quota, Calendar::Day, BERLIN).unwrap().into(),
        longest_wait: Duration::from_secs(31 * DAY.as_secs() + 3_600),
    };

    pub(crate) const TOKEN_BUCKET: Self = Self {
        limit: |quota| TokenBucket::new(quota, Self::WINDOW).into(),
        shorter: |quota| TokenBucket::new(quota, Self::SHORTER).into(),
        longest_wait: Self::WINDOW,
    };

    /// So many at once, and half of that in the window.
    pub(crate) const TOKEN_BUCKET_WITH_BURST: Self = Self {
        limit: |quota| TokenBucket::new(quota.div_ceil(2), Self::WINDOW).burst(quota).into(),
        shorter: |quota| TokenBucket::new(quota.div_ceil(2), Self::SHORTER).burst(quota).into(),
        longest_wait: Self::WINDOW,
    };

    pub(crate) fn limit(self, quota: u64) -> Limit {
        (self.limit)(quota)
    }

    pub(crate) fn shorter(self, quota: u64) -> Limit {
        (self.shorter)(quota)
    }

    /// The longest time for which a request of cost 1 is denied after the clock is set back.
    pub(crate) fn longest_block(self) -> Duration {
        self.longest_wait + SECOND
    }
}

pub(crate) const BERLIN: &str = "Europe/Berlin";
