//! What the store knows of each algorithm: its rule in the scripts with the numbers that it reads, and the bounds of its replies.

use std::time::Duration;

use super::script::RULES;
use crate::{
    Limit,
    limit::{MAX_QUOTA, RETRY_US, SLACK},
    store::LeaseId,
};

/// The rule of a limit, by its position in [`RULES`].
pub(super) fn rule_of(limit: &Limit) -> usize {
    match limit {
        Limit::SlidingLog(log) if log.grain_us() == 0 => 0,
        Limit::SlidingLog(_) => 1,
        Limit::SlidingCounter(_) => 2,
        Limit::FixedWindow(_) => 3,
        Limit::TokenBucket(_) | Limit::Unlimited | Limit::DenyAll => 4,
        Limit::Concurrency(_) => 5,
    }
}

/// The name of a rule in a call.
pub(super) fn rule_name(limit: &Limit) -> &'static str {
    RULES[rule_of(limit)].0
}

/// The numbers of a limit besides its quota: x, y and z of its rule.
pub(super) fn parameters(limit: &Limit, lease: Option<LeaseId>) -> [u64; 3] {
    match limit {
        Limit::SlidingLog(log) => [log.window_us(), log.grain_us(), 0],
        Limit::SlidingCounter(counter) => [counter.window_us(), counter.tick(), counter.cap()],
        Limit::FixedWindow(fixed) => {
            let window = fixed.window().unwrap_or_default();
            [window.as_micros() as u64, u64::from(!fixed.is_aligned()), 0]
        }
        Limit::TokenBucket(bucket) => {
            let (rate, period) = bucket.reduced;
            [rate, period, bucket.cap]
        }
        Limit::Concurrency(slots) => {
            let [high, low] = lease.unwrap_or_else(LeaseId::random).parts();
            [slots.lease_us(), high, low]
        }
        Limit::Unlimited | Limit::DenyAll => [0; 3],
    }
}

/// The boundaries of the windows of a calendar around an approximate time of Redis in microseconds; `None` without a calendar.
pub(super) fn boundaries(limit: &Limit, now_us: u64) -> Option<[u64; 4]> {
    let Limit::FixedWindow(fixed) = limit else { return None };
    fixed.boundaries(now_us)
}

/// Whether the outcome of each of several equal checks can be computed from that of the last one.
pub(super) fn merges(limit: &Limit) -> bool {
    if let Limit::TokenBucket(bucket) = limit {
        // Only if each token takes a whole number of microseconds.
        return bucket.reduced.0 == 1;
    }
    // Each has a lease of its own.
    !limit.is_held()
}

/// How much later the quota of a key in use is fully restored because of one more charge of this weight.
pub(super) fn reset_delay(limit: &Limit, weight: u64) -> Duration {
    let Limit::TokenBucket(bucket) = limit else {
        return Duration::ZERO;
    };
    Duration::from_micros(bucket.time(weight))
}

/// How far ahead of the clock an entry of a clock that is gone may be: 31 years.
pub(super) const FAR_US: u64 = MAX_QUOTA;
/// A leap year, and a day for a time zone that changes sides of the date line.
const LONGEST_PERIOD: Duration = Duration::from_secs(367 * 86_400);

/// The longest wait of a denied charge, and the longest time until nothing counts, in microseconds.
pub(super) fn longest(limit: &Limit) -> [u64; 2] {
    match limit {
        // An entry counts for a window. One may be ahead: one of many of a clock that is gone, of which a call removes a part.
        Limit::SlidingLog(log) => [log.window_us() + FAR_US; 2],
        // The current window may be ahead by the slack. Its count is the previous one of the next window.
        Limit::SlidingCounter(counter) => [2 * counter.window_us() + SLACK; 2],
        // The window may be ahead by the slack.
        Limit::FixedWindow(fixed) => [fixed.window().unwrap_or(LONGEST_PERIOD).as_micros() as u64 + SLACK; 2],
        // A debt is at most the cap, and may have begun ahead by the slack.
        Limit::TokenBucket(bucket) => [bucket.time(bucket.cap) + SLACK; 2],
        // Leases of a clock that is gone stay until a request is denied.
        Limit::Concurrency(_) => [RETRY_US, FAR_US],
        Limit::Unlimited | Limit::DenyAll => [0; 2],
    }
}
