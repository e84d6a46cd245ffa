//! What differs between the algorithms on the way to the script: their parameters, and which checks can be merged.

use std::time::Duration;

use crate::{
    Limit,
    store::{LeaseId, Waiting},
};

/// The parameters of a limit besides its quota, in the order in which the Lua file of the algorithm reads them.
pub(super) fn parameters(limit: &Limit, lease: Option<LeaseId>) -> [u64; 3] {
    match limit {
        Limit::SlidingLog(log) => [log.window_us(), log.grain_us(), 0],
        Limit::SlidingCounter(counter) => [counter.window_us(), counter.tick(), counter.cap()],
        Limit::FixedWindow(fixed) => {
            let (window, aligned) = fixed.length().unwrap_or((0, true));
            [window, u64::from(!aligned), 0]
        }
        Limit::TokenBucket(bucket) => {
            let (rate, period) = bucket.reduced();
            [rate, period, bucket.cap()]
        }
        Limit::Ban(ban) => ban.lengths_us(),
        Limit::Concurrency(slots) => {
            let [high, low] = lease.unwrap_or_else(LeaseId::random).parts();
            [slots.lease_us(), high, low]
        }
        Limit::Unlimited | Limit::DenyAll => [0; 3],
    }
}

/// The boundaries of the windows of a calendar around an approximate time of Redis in microseconds; `None` without a calendar.
pub(super) fn boundaries(limit: &Limit, now_us: u64) -> Option<[u64; 4]> {
    match limit {
        Limit::FixedWindow(fixed) => fixed.boundaries(now_us),
        Limit::SlidingLog(_)
        | Limit::SlidingCounter(_)
        | Limit::TokenBucket(_)
        | Limit::Ban(_)
        | Limit::Concurrency(_)
        | Limit::Unlimited
        | Limit::DenyAll => None,
    }
}

/// Whether the outcome of each of several equal checks can be computed from that of the last one.
pub(super) fn merges(limit: &Limit) -> bool {
    match limit {
        // Only if each token takes a whole number of microseconds.
        Limit::TokenBucket(bucket) => bucket.reduced().0 == 1,
        Limit::Ban(_) => false,
        Limit::SlidingLog(_) | Limit::SlidingCounter(_) | Limit::FixedWindow(_) | Limit::Unlimited | Limit::DenyAll => {
            true
        }
        // Each has a lease of its own.
        Limit::Concurrency(_) => false,
    }
}

/// How much later the quota of a key in use is fully restored because of one more charge of this weight.
pub(super) fn reset_delay(limit: &Limit, weight: u64) -> Duration {
    match limit {
        Limit::TokenBucket(bucket) => Duration::from_micros(bucket.time(weight)),
        Limit::SlidingLog(_)
        | Limit::SlidingCounter(_)
        | Limit::FixedWindow(_)
        | Limit::Ban(_)
        | Limit::Concurrency(_)
        | Limit::Unlimited
        | Limit::DenyAll => Duration::ZERO,
    }
}

/// The longest time before the turn of a denied charge at which it can be reserved; zero if it has to fit at once.
pub(super) fn longest_wait(limit: &Limit, waiting: Waiting) -> Duration {
    let longest_us = match limit {
        Limit::SlidingLog(log) if log.grain().is_none() => waiting.longest_us,
        // It is known when so many tokens come, and not when so many units of a log expire.
        Limit::TokenBucket(bucket) => waiting.longest_us.min(bucket.time(waiting.most)),
        Limit::SlidingLog(_)
        | Limit::SlidingCounter(_)
        | Limit::FixedWindow(_)
        | Limit::Ban(_)
        | Limit::Concurrency(_)
        | Limit::Unlimited
        | Limit::DenyAll => 0,
    };
    Duration::from_micros(longest_us)
}
