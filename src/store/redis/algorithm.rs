//! What differs between the algorithms on the way to the script: their parameters, and which checks can be merged.

use std::time::Duration;

use bytes::BytesMut;

use super::words::write_words;
use crate::Limit;

/// Writes the parameters of a limit after its quota, as the Lua file of the algorithm reads them.
///
/// `now_us` is an approximate time of Redis, to find the windows of a calendar around it.
pub(super) fn write_parameters(text: &mut BytesMut, limit: &Limit, now_us: u64) {
    match limit {
        Limit::SlidingLog(log) => write_words(text, "", [log.window_us(), log.grain_us()]),
        Limit::SlidingCounter(counter) => write_words(text, "", [counter.window_us(), counter.tick(), counter.cap()]),
        Limit::FixedWindow(fixed) => {
            let (window, aligned) = fixed.length().unwrap_or((0, true));
            write_words(text, "", [window, u64::from(!aligned)]);
            write_words(text, "", fixed.boundaries(now_us).into_iter().flatten());
        }
        Limit::TokenBucket(bucket) => {
            let (rate, period) = bucket.reduced();
            write_words(text, "", [rate, period, bucket.cap()]);
        }
        Limit::Unlimited | Limit::DenyAll => {}
    }
}

/// Whether the parameters depend on the time.
pub(super) fn has_calendar_windows(limit: &Limit) -> bool {
    match limit {
        Limit::FixedWindow(fixed) => fixed.length().is_none(),
        Limit::SlidingLog(_) | Limit::SlidingCounter(_) | Limit::TokenBucket(_) | Limit::Unlimited | Limit::DenyAll => {
            false
        }
    }
}

/// Whether the outcome of each of several equal checks can be computed from that of the last one.
pub(super) fn merges(limit: &Limit) -> bool {
    match limit {
        // Only if each token takes a whole number of microseconds.
        Limit::TokenBucket(bucket) => bucket.reduced().0 == 1,
        Limit::SlidingLog(_) | Limit::SlidingCounter(_) | Limit::FixedWindow(_) | Limit::Unlimited | Limit::DenyAll => {
            true
        }
    }
}

/// How much later the quota of a key in use is fully restored because of one more charge of this weight.
pub(super) fn reset_delay(limit: &Limit, weight: u64) -> Duration {
    match limit {
        Limit::TokenBucket(bucket) => Duration::from_micros(bucket.time(weight)),
        Limit::SlidingLog(_) | Limit::SlidingCounter(_) | Limit::FixedWindow(_) | Limit::Unlimited | Limit::DenyAll => {
            Duration::ZERO
        }
    }
}
