//! The numbers in the fields.

use std::time::Duration;

use http::HeaderValue;

use super::text::Text;
use crate::PolicyDecision;

/// What remains, and the time until all is restored; of a policy that denies, 0, and the wait if waiting helps.
pub(super) fn standing(policy: &PolicyDecision) -> (u64, Option<Duration>) {
    match policy.denial().is_some() {
        true => (0, policy.retry_after().map(|wait| wait.max(Duration::from_secs(1)))),
        false => (policy.remaining().min(MAX_INTEGER), Some(policy.reset_after())),
    }
}

/// The value of `Retry-After`.
pub(crate) fn retry_after(wait: Duration) -> HeaderValue {
    Text::from(delay_secs(wait)).into()
}

/// RFC 9110 §10.2.3: delay-seconds is a non-negative integer, so round up; and at least 1, since 0 invites a loop.
pub(crate) fn delay_secs(wait: Duration) -> u64 {
    ceil_secs(wait).clamp(1, MAX_DELAY)
}

/// The largest delay that every recipient can hold in 32 bits (RFC 9111 §1.2.2).
const MAX_DELAY: u64 = i32::MAX as u64;

/// RFC 9651 §3.3.1: an integer has at most 15 digits. The number of a store may be larger.
const MAX_INTEGER: u64 = 999_999_999_999_999;

pub(super) fn ceil_secs(duration: Duration) -> u64 {
    let seconds = duration
        .as_secs()
        .saturating_add(u64::from(duration.subsec_nanos() > 0));
    seconds.min(MAX_INTEGER)
}

#[cfg(test)]
mod tests {
    use super::*;

    // The rows HD-10, HD-12 and HD-13 of `tests/vectors/http.md`.
    #[test]
    fn retry_after_is_in_whole_seconds_and_at_least_one() {
        for (wait, value) in [
            (0, "1"),
            (1_000, "1"),
            (1_001, "2"),
            (41_200, "42"),
            (1_000_000_000_000_000, "2147483647"),
        ] {
            assert_eq!(retry_after(Duration::from_millis(wait)), value);
        }
    }
}
