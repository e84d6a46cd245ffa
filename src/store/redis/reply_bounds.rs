//! The largest numbers in a reply of the script, from the rules of the algorithms.
//!
//! They hold for each clock of Redis that was set back by less than [`FAR_US`], and whatever limits and waits were configured before.

use super::request::{OwnedCharge, OwnedRequest};
use crate::{
    Limit,
    limit::{LEVELS, MAX_BAN, MAX_QUOTA, RETRY_US, SLACK},
    store::{ChargeRole, Operation},
};

/// The bounds of the state of one charge.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// No rule has more room than its quota.
    pub(super) remaining: u64,
    /// The units of each admitted request, which had room for them: they remain no more. 0 if they may not be counted.
    pub(super) counted: u64,
    pub(super) wait_us: u64,
    pub(super) reset_us: u64,
    /// The time until a reservation counts: that of a request is the latest turn of its charges, each of which is within the
    /// longest wait of the charge.
    pub(super) turn_us: u64,
    /// Whether the request may wait for slots of this charge.
    pub(super) may_queue: bool,
}

impl Bounds {
    /// The bounds for each charge of a request.
    pub(super) fn of(request: &OwnedRequest) -> impl Iterator<Item = Self> {
        let longest = request.charges.iter().map(|charge| charge.waiting.longest_us).max();
        let turn_us = longest.filter(|_| request.operation == Operation::Reserve);
        // A marker may exempt the other charges.
        let counts = request.is_check() && !request.has_marker();
        request.charges.iter().map(move |charge| Self {
            may_queue: turn_us.is_some() && charge.limit.is_held(),
            turn_us: turn_us.unwrap_or_default(),
            ..Self::of_charge(charge, counts)
        })
    }

    fn of_charge(charge: &OwnedCharge, counts: bool) -> Self {
        let [wait_us, reset_us] = longest(&charge.limit);
        Self {
            remaining: charge.limit.quota(),
            counted: match counts && charge.role == ChargeRole::Counted {
                true => charge.cost,
                false => 0,
            },
            wait_us,
            reset_us,
            turn_us: 0,
            may_queue: false,
        }
    }
}

/// How far ahead of the clock an entry may be: the longest wait of a reservation, 31 years.
const FAR_US: u64 = MAX_QUOTA;
/// A leap year, and a day for a time zone that changes sides of the date line.
const LONGEST_PERIOD_US: u64 = 367 * 86_400 * 1_000_000;

/// The longest wait of a denied charge, and the longest time until nothing counts, in microseconds.
fn longest(limit: &Limit) -> [u64; 2] {
    match limit {
        // An entry counts for a window. One may be ahead: a reservation, which was made with the longest wait of its time, or
        // one of many of a clock that is gone, of which a call removes a part.
        Limit::SlidingLog(log) => [log.window_us() + FAR_US; 2],
        // The current window may be ahead by the slack. Its count is the previous one of the next window.
        Limit::SlidingCounter(counter) => [2 * counter.window_us() + SLACK; 2],
        // The window may be ahead by the slack.
        Limit::FixedWindow(fixed) => [fixed.length().map_or(LONGEST_PERIOD_US, |(window, _)| window) + SLACK; 2],
        // A debt is at most the cap, and may have begun ahead by the slack.
        Limit::TokenBucket(bucket) => [bucket.time(bucket.cap()) + SLACK; 2],
        // A ban of another policy may be as long as any, and may have begun ahead by the slack. Each level is forgotten in a
        // window.
        Limit::Ban(ban) => {
            let ([window, ..], longest) = (ban.lengths_us(), MAX_BAN.as_micros() as u64 + SLACK);
            [longest, longest + LEVELS * window]
        }
        // Leases of a clock that is gone stay until a request is denied.
        Limit::Concurrency(_) => [RETRY_US, FAR_US],
        Limit::Unlimited | Limit::DenyAll => [0; 2],
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;

    use super::*;
    use crate::{
        Ban, Key,
        store::{
            Charge, ErrorKind, StoreRequest,
            redis::{
                call::ScriptCall,
                key_format::KeyFormat,
                merge::MergedRequest,
                reply::{RawReply, ScriptReply},
            },
        },
    };

    /// Whether the reply with this state of one charge is accepted.
    fn is_accepted(operation: Operation, charge: Charge<'_>, times: u64, state: [f64; 4]) -> bool {
        let charges = [charge];
        let request = OwnedRequest::of(&KeyFormat::new("quota", None), &StoreRequest::new(operation, &charges));
        let call = ScriptCall::at(
            &[MergedRequest {
                request: &request,
                times,
            }],
            0,
        );
        let numbers = [0.0].into_iter().chain(state).flat_map(f64::to_le_bytes);
        let raw = RawReply {
            numbers: Bytes::from_iter(numbers),
            errors: Vec::new(),
        };
        match &ScriptReply::decode(&call, &raw).expect("a complete reply").replies[..] {
            [Ok(_)] => true,
            [Err(error)] if error.error.kind() == ErrorKind::Protocol => false,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_times_of_a_reply_are_those_that_the_limit_can_have() {
        const SECOND: u64 = 1_000_000;
        const DAY: u64 = 86_400 * SECOND;
        let of = |text: &str| text.parse::<Limit>().unwrap();
        let ban = Ban::after(3, Duration::from_secs(10)).first(Duration::from_secs(5));
        for (limit, wait, reset) in [
            (of("sliding-log 5/min"), 60 * SECOND + FAR_US, 60 * SECOND + FAR_US),
            (of("sliding-counter 5/min"), 121 * SECOND, 121 * SECOND),
            (of("fixed-window 5/min"), 61 * SECOND, 61 * SECOND),
            (of("fixed-window 5/min aligned"), 61 * SECOND, 61 * SECOND),
            #[cfg(feature = "calendar")]
            (of("fixed-window 5/year UTC"), 367 * DAY + SECOND, 367 * DAY + SECOND),
            // 2^51 tokens of a microsecond, half as many as are exact.
            (of("token-bucket 1000/ms"), (1 << 51) + SECOND, (1 << 51) + SECOND),
            (of("concurrency 5"), SECOND, FAR_US),
            (Limit::Ban(ban), 366 * DAY + SECOND, 366 * DAY + 641 * SECOND),
        ] {
            let key = Key::from("k");
            let charge = Charge::new("p", &limit, &key, 1);
            for (micros, fits) in [(wait, true), (wait + 1, false)] {
                let denied = [0.0, 0.0, micros as f64, 0.0];
                assert_eq!(
                    is_accepted(Operation::Check, charge, 1, denied),
                    fits,
                    "{limit} waits {micros}"
                );
            }
            for (micros, fits) in [(reset, true), (reset + 1, false)] {
                let admitted = [1.0, 0.0, 0.0, micros as f64];
                assert_eq!(
                    is_accepted(Operation::Check, charge, 1, admitted),
                    fits,
                    "{limit} resets in {micros}"
                );
            }
        }
    }

    #[test]
    fn no_more_remains_than_the_quota_without_what_was_counted() {
        let (limit, key) = (Limit::from(crate::SlidingLog::per_minute(10)), Key::from("k"));
        let charge = Charge::new("p", &limit, &key, 2);
        for (operation, charge, times, admitted, most) in [
            (Operation::Check, charge, 3, 3.0, 4.0),
            (Operation::Check, charge, 1, 1.0, 8.0),
            (Operation::Check, charge.checked_only(), 1, 1.0, 10.0),
            (Operation::Check, charge.once(), 1, 1.0, 10.0),
            (Operation::Peek, charge, 1, 1.0, 10.0),
            (Operation::Charge, charge, 1, 1.0, 10.0),
        ] {
            for (remaining, fits) in [(most, true), (most + 1.0, false)] {
                let state = [admitted, remaining, 0.0, 0.0];
                assert_eq!(
                    is_accepted(operation, charge, times, state),
                    fits,
                    "{operation:?}: {remaining}"
                );
            }
        }
    }

    #[test]
    fn an_operation_that_needs_no_room_is_not_denied() {
        let (limit, key) = (Limit::from(crate::SlidingLog::per_minute(10)), Key::from("k"));
        let charge = Charge::new("p", &limit, &key, 1);
        for operation in [Operation::Check, Operation::Peek, Operation::Charge, Operation::Reset] {
            let denied = [0.0, 0.0, 1.0, 1.0];
            let accepted = is_accepted(operation, charge, 1, denied);
            assert_eq!(accepted, operation.requires_room(), "{operation:?}");
        }
    }
}
