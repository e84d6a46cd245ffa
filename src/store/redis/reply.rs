use std::{mem, time::Duration};

use bytes::Bytes;
use smallvec::SmallVec;

use super::{
    failure::{Failure, of_script, shortened_bytes},
    request::{Entry, MergedRequest, OwnedRequest},
    script::{longest, reset_delay},
};
use crate::{
    Ban,
    limit::{LEVELS, LONGEST_WAIT_US, MAX_BAN, MAX_EXACT, SLACK},
    store::{Charge, ChargeState, Operation, Outcome},
};

/// The reply of the script as it was received: little-endian doubles, and the errors of requests.
#[derive(Clone, Debug, Default)]
pub(super) struct RawReply {
    pub(super) numbers: Bytes,
    pub(super) errors: Vec<String>,
}

/// The decoded reply of the script.
#[derive(Debug)]
pub(super) struct ScriptReply {
    pub(super) server_time: Duration,
    /// For each merged request of the call, its reply or its error; none if it was not executed, since its slot is elsewhere or
    /// moves.
    pub(super) replies: SmallVec<[Option<Result<RequestReply, Failure>>; 1]>,
}

/// The reply to one merged request.
#[derive(Debug)]
pub(super) struct RequestReply {
    /// How many of the requests are admitted: the first ones.
    pub(super) admitted: u64,
    /// The state of each key after the last request.
    pub(super) states: SmallVec<[ChargeState; 1]>,
}

impl RawReply {
    /// The numbers, then the errors.
    pub(super) fn from_texts(texts: impl IntoIterator<Item = Result<Bytes, Failure>>) -> Result<Self, Failure> {
        let mut texts = texts.into_iter();
        let numbers = texts.next().ok_or_else(Failure::malformed_reply)??;
        let errors = texts.map(|text| Ok(of_script(&shortened_bytes(&text?)).to_owned()));
        Ok(Self {
            numbers,
            errors: errors.collect::<Result<_, Failure>>()?,
        })
    }

    /// The time of Redis in microseconds if the reply contains nothing else: no request was decided, because no window of a
    /// calendar in the call enclosed it.
    pub(super) fn lone_time(&self) -> Option<u64> {
        match self.numbers.as_chunks() {
            ([now], []) => integer(*now).ok(),
            _ => None,
        }
    }
}

/// A little-endian double.
type Double = [u8; 8];

/// Takes an integer from the reply of another script.
pub(super) fn take_integer(bytes: &mut &[u8]) -> Result<u64, Failure> {
    let (number, rest) = bytes.split_first_chunk().ok_or_else(Failure::malformed_reply)?;
    *bytes = rest;
    integer(*number)
}

impl ScriptReply {
    /// Reads the time, then for each key of each merged request the number of admitted requests and the three numbers of its
    /// state; or in place of the former, the negated position of an error, from 1.
    ///
    /// Numbers out of their [bounds](Bounds) are an error of their request: a value that another program has written to a key
    /// is none of the other requests.
    pub(super) fn decode(merged: &[MergedRequest<'_>], is_across: bool, raw: &RawReply) -> Result<Self, Failure> {
        let (numbers, tail) = raw.numbers.as_chunks();
        let Some((now, states)) = numbers.split_first() else {
            return Err(Failure::malformed_reply());
        };
        let (mut states, rest) = states.as_chunks();
        let keys = |merged: &MergedRequest<'_>| merged.request.entries().count();
        let is_complete = tail.is_empty() && rest.is_empty() && states.len() == merged.iter().map(keys).sum::<usize>();
        if !is_complete || raw.errors.len() > merged.len() {
            return Err(Failure::malformed_reply());
        }

        let server_time = duration(*now, u64::MAX)?;
        let replies = merged.iter().map(|merged| {
            let states = states.split_off(..keys(merged)).unwrap_or_default();
            match RequestReply::decode(merged, states, &raw.errors) {
                Err(failure) if is_across && failure.is_elsewhere() => None,
                reply => Some(reply),
            }
        });
        Ok(Self {
            server_time,
            replies: replies.collect(),
        })
    }
}

impl RequestReply {
    fn decode(merged: &MergedRequest<'_>, numbers: &[[Double; 4]], errors: &[String]) -> Result<Self, Failure> {
        let MergedRequest { request, times } = *merged;
        let requires_room = request.operation.requires_room() && !request.is_of_bans;
        let mut admitted = None;
        let mut banned_for = Duration::ZERO;
        let mut states = SmallVec::with_capacity(numbers.len());
        for ([count, remaining, wait, reset_after], bounds) in numbers.iter().zip(Bounds::of(request)) {
            let count = f64::from_le_bytes(*count);
            if count < 0.0 {
                let position = exact(-count - 1.0)?;
                let error = errors.get(position as usize).ok_or_else(Failure::malformed_reply)?;
                return Err(Failure::Refused(error.clone()));
            }
            let count = exact(count)?;
            // All charges of a request are counted as often.
            if count > times || admitted.is_some_and(|admitted| admitted != count) {
                return Err(Failure::malformed_reply());
            }
            admitted = Some(count);

            let remaining = integer(*remaining)?;
            if remaining.saturating_add(count.saturating_mul(bounds.counted)) > bounds.remaining {
                return Err(Failure::malformed_reply());
            }
            let reset_after = duration(*reset_after, bounds.reset_us)?;
            if bounds.is_of_bans {
                let rest = duration(*wait, bounds.wait_us)?;
                if request.is_of_bans || matches!(request.operation, Operation::Ban { .. }) {
                    states.push(ChargeState::new(remaining, None, reset_after).banned(rest));
                } else {
                    banned_for = rest;
                }
                continue;
            }
            let wait = Some(duration(*wait, bounds.wait_us)?).filter(|wait| !wait.is_zero());
            states.push(ChargeState::new(remaining, wait, reset_after).banned(mem::take(&mut banned_for)));
        }

        let admitted = admitted.unwrap_or_default();
        // A state has a wait if and only if a request is denied.
        let waits = states
            .iter()
            .any(|state: &ChargeState| state.retry_after.is_some() || requires_room && state.banned_for().is_some());
        let denies = admitted < times;
        if times > 0 && denies != waits || denies && !requires_room {
            return Err(Failure::malformed_reply());
        }
        Ok(Self { admitted, states })
    }

    /// The outcome of the nth of the requests, from 0.
    pub(super) fn outcome(&self, request: &OwnedRequest, nth: u64) -> Outcome {
        let mut states = self.states.clone();
        let units = u32::try_from(self.admitted).unwrap_or(u32::MAX);
        if request.operation == Operation::Wait {
            return Outcome::new(units > 0 || request.units == 0, states).of_units(units);
        }
        if nth >= self.admitted {
            return Outcome::new(false, states);
        }

        // A request of several units is not merged with others.
        let (units, admitted_later) = match request.units > 1 {
            true => (units, 0),
            false => (1, self.admitted - 1 - nth),
        };
        for (state, charge) in states.iter_mut().zip(request.charges()) {
            let weight = admitted_later.saturating_mul(charge.cost());
            state.remaining = state.remaining.saturating_add(weight);
            state.retry_after = None;
            let delay = reset_delay(charge.limit(), weight);
            state.reset_after = state.reset_after.saturating_sub(delay);
        }
        Outcome::new(true, states).of_units(units)
    }
}

fn integer(number: Double) -> Result<u64, Failure> {
    exact(f64::from_le_bytes(number))
}

/// An integer of the script; integers are exact below 2^53.
fn exact(number: f64) -> Result<u64, Failure> {
    let is_exact = (0.0..MAX_EXACT as f64).contains(&number) && number.fract() == 0.0;
    is_exact.then_some(number as u64).ok_or_else(Failure::malformed_reply)
}

/// A number of microseconds, at most so many.
fn duration(number: Double, most: u64) -> Result<Duration, Failure> {
    let micros = Some(integer(number)?).filter(|micros| *micros <= most);
    micros.map(Duration::from_micros).ok_or_else(Failure::malformed_reply)
}

/// The largest numbers in the state of one charge, from the rules of the algorithms.
///
/// They hold for each clock of Redis that was set back by less than [`FAR_US`], and whatever limits were configured before.
#[derive(Clone, Copy)]
struct Bounds {
    /// No rule has more room than its quota.
    remaining: u64,
    /// The units of each admitted request, which had room for them: they remain no more. 0 if they may not be counted.
    counted: u64,
    wait_us: u64,
    reset_us: u64,
    is_of_bans: bool,
}

impl Bounds {
    /// The bounds for each key of a request.
    fn of(request: &OwnedRequest) -> impl Iterator<Item = Self> + use<'_> {
        let counts = matches!(request.operation, Operation::Check | Operation::Wait);
        request.entries().map(move |entry| match entry {
            Entry::Bans(_, ban) => Self::of_bans(*ban),
            Entry::Count(charge) => Self::of_charge(charge, counts),
        })
    }

    fn of_charge(charge: &Charge, counts: bool) -> Self {
        let [wait_us, reset_us] = longest(charge.limit());
        Self {
            remaining: charge.limit().quota(),
            counted: if counts { charge.cost() } else { 0 },
            // Behind others a request waits for longer than alone.
            wait_us: if charge.line.is_some() {
                LONGEST_WAIT_US
            } else {
                wait_us
            },
            reset_us,
            is_of_bans: false,
        }
    }

    /// A ban of another policy may be as long as any, and may have begun ahead by the slack. Each level is forgotten in a window.
    fn of_bans(ban: Ban) -> Self {
        let ([window, ..], longest) = (ban.lengths_us(), MAX_BAN.as_micros() as u64 + SLACK);
        Self {
            remaining: ban.quota(),
            counted: 0,
            wait_us: longest,
            reset_us: longest + LEVELS * window,
            is_of_bans: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;
    use crate::{
        Ban, Key, Limit, SlidingLog, TokenBucket,
        store::{Charge, ErrorKind, StoreRequest, redis::script::FAR_US},
    };

    fn check(charges: &[Charge]) -> OwnedRequest {
        let request = StoreRequest::new(Operation::Check, charges);
        request.to_owned(|_| {})
    }

    fn raw(numbers: &[i64]) -> RawReply {
        RawReply {
            numbers: numbers
                .iter()
                .flat_map(|number| (*number as f64).to_le_bytes())
                .collect(),
            errors: Vec::new(),
        }
    }

    fn decode(requests: &[OwnedRequest], times: u64, raw: &RawReply) -> Result<ScriptReply, Failure> {
        let merged: Vec<_> = requests
            .iter()
            .map(|request| MergedRequest { request, times })
            .collect();
        ScriptReply::decode(&merged, false, raw)
    }

    fn nth(reply: &ScriptReply, position: usize) -> &Result<RequestReply, Failure> {
        reply.replies[position].as_ref().expect("it was executed")
    }

    /// Whether the first request fails because of the reply.
    fn is_malformed(requests: &[OwnedRequest], raw: &RawReply) -> bool {
        let error = match decode(requests, 1, raw) {
            Ok(reply) => nth(&reply, 0).as_ref().err().cloned(),
            Err(failure) => Some(failure),
        };
        error.is_some_and(|error| error.kind() == ErrorKind::Protocol)
    }

    #[test]
    fn a_reply_with_more_than_the_states_is_malformed() {
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let requests = [check(&[Charge::new("p", &limit, &key, 1)])];
        let whole = raw(&[9, 1, 2, 0, 60]);
        assert!(decode(&requests, 1, &whole).is_ok());
        for more in 1..=8 {
            let mut longer = raw(&[9, 1, 2, 0, 60]);
            longer.numbers = [&whole.numbers[..], &vec![0; more]].concat().into();
            assert!(decode(&requests, 1, &longer).is_err(), "{more} bytes");
        }
    }

    #[test]
    fn the_first_of_merged_requests_are_admitted_each_with_the_outcome_it_would_have_alone() {
        // One token per second.
        let limit = Limit::from(TokenBucket::per_minute(60));
        let key = Key::from("a");
        let request = check(&[Charge::new("p", &limit, &key, 2)]);
        // Of 5 tokens, 1 is left after the second request of cost 2, and all are back after 59 seconds.
        let reply = decode(slice::from_ref(&request), 4, &raw(&[9, 2, 1, 1_000_000, 59_000_000])).unwrap();
        let reply = nth(&reply, 0).as_ref().unwrap();
        let outcomes: Vec<_> = (0..4)
            .map(|nth| {
                let outcome = reply.outcome(&request, nth);
                let state = outcome.states[0];
                (outcome.allowed, state.remaining, state.reset_after.as_secs())
            })
            .collect();
        assert_eq!(outcomes, [(true, 3, 57), (true, 1, 59), (false, 1, 59), (false, 1, 59)]);
    }

    #[test]
    fn the_error_of_one_request_is_no_error_of_the_others() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let requests = [
            check(&[Charge::new("p", &limit, &a, 1)]),
            check(&[Charge::new("p", &limit, &b, 1)]),
        ];

        let mut raw = raw(&[9, -1, 0, 0, 0, 1, 4, 0, 60]);
        let reply = decode(&requests, 1, &raw).unwrap();
        assert_eq!(
            nth(&reply, 0).as_ref().unwrap_err().kind(),
            ErrorKind::Protocol,
            "without the text"
        );
        assert!(nth(&reply, 1).is_ok());

        raw.errors = vec!["WRONGTYPE Operation against a key".into()];
        let reply = decode(&requests, 1, &raw).unwrap();
        assert_eq!(nth(&reply, 0).as_ref().unwrap_err().kind(), ErrorKind::Refused);
        assert!(nth(&reply, 1).is_ok());
    }

    #[test]
    fn a_reply_of_another_shape_is_an_error() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let key = Key::from("a");
        let requests = [check(&[Charge::new("p", &limit, &key, 1)])];

        let good = [1_000_000, 1, 4, 0, 60_000_000];
        assert!(!is_malformed(&requests, &raw(&good)));
        let [negative, long, many, no_wait, large] = [
            &[1, 1, -4, 0, 0][..],
            &[1, 1, 4, 0, 0, 0],
            &[1, 2, 4, 0, 0],
            &[1, 0, 4, 0, 0],
            &[1, 1, 1 << 53, 0, 0],
        ];
        for bad in [&good[..4], &good[..1], &[], negative, long, many, no_wait, large] {
            assert!(is_malformed(&requests, &raw(bad)), "{bad:?}");
        }
        for number in [0.5, f64::NAN, f64::INFINITY] {
            let mut numbers = [1.0, 1.0, 4.0, 0.0, 60.0];
            numbers[2] = number;
            let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
            let mut raw = RawReply {
                numbers: numbers.collect(),
                errors: Vec::new(),
            };
            assert!(is_malformed(&requests, &raw), "{number}");
            raw.numbers.truncate(39);
            assert!(is_malformed(&requests, &raw), "cut off");
        }
    }

    #[test]
    fn the_rest_of_a_ban_is_part_of_the_state_of_its_charge() {
        let (limit, ban) = (Limit::from(SlidingLog::per_minute(5)), Ban::by_hand());
        let (key, other) = (Key::from("a"), Key::from("b"));
        let charge = Charge::new("p", &limit, &key, 1);
        let (banned, free) = (charge.ban(&ban), Charge::new("p", &limit, &other, 1));
        let of = |operation, charges: &[Charge]| StoreRequest::new(operation, charges).to_owned(|_| {});
        let outcome = |request: &OwnedRequest, raw: &RawReply| {
            let reply = decode(slice::from_ref(request), 1, raw).unwrap();
            nth(&reply, 0).as_ref().unwrap().outcome(request, 0)
        };
        let seconds = Duration::from_micros(40);

        let check = of(Operation::Check, &[banned.clone(), free]);
        let denied = outcome(&check, &raw(&[9, 0, 0, 40, 50, 0, 4, 0, 60, 0, 5, 0, 0]));
        assert!(!denied.allowed);
        let states: Vec<_> = denied
            .states
            .iter()
            .map(|state| (state.banned_for(), state.remaining, state.retry_after))
            .collect();
        assert_eq!(states, [(Some(seconds), 4, None), (None, 5, None)]);
        let admitted = raw(&[9, 1, 0, 40, 50, 1, 4, 0, 60, 1, 4, 0, 60]);
        assert!(is_malformed(&[check], &admitted), "while a ban is in force");

        let ban = of(Operation::Ban { length: seconds }, &[banned]);
        let begun = outcome(&ban, &raw(&[9, 1, 0, 40, 50]));
        let state = ChargeState::new(0, None, Duration::from_micros(50)).banned(seconds);
        assert_eq!((begun.allowed, &begun.states[..]), (true, &[state][..]));
    }

    /// Whether the reply with this state of one charge is accepted.
    fn is_accepted(operation: Operation, charge: &Charge, times: u64, state: [f64; 4]) -> bool {
        let request = StoreRequest::new(operation, [charge]).to_owned(|_| {});
        let numbers = [0.0].into_iter().chain(state).flat_map(f64::to_le_bytes);
        let raw = RawReply {
            numbers: Bytes::from_iter(numbers),
            errors: Vec::new(),
        };
        match nth(&decode(&[request], times, &raw).expect("a complete reply"), 0) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::Protocol => false,
            Err(error) => panic!("{error:?}"),
        }
    }

    #[test]
    fn the_times_of_a_reply_are_those_that_the_limit_can_have() {
        const SECOND: u64 = 1_000_000;
        const DAY: u64 = 86_400 * SECOND;
        let of = |text: &str| text.parse::<Limit>().unwrap();
        for (limit, wait, reset) in [
            (of("sliding-log 5/min"), 60 * SECOND + FAR_US, 60 * SECOND + FAR_US),
            (of("sliding-counter 5/min"), 121 * SECOND, 121 * SECOND),
            (of("fixed-window 5/min"), 61 * SECOND, 61 * SECOND),
            (of("fixed-window 5/min aligned"), 61 * SECOND, 61 * SECOND),
            #[cfg(feature = "calendar")]
            (of("fixed-window 5/year UTC"), 367 * DAY + SECOND, 367 * DAY + SECOND),
            // 2^51 tokens of a microsecond, half as many as are exact.
            (of("token-bucket 1000/ms"), (1 << 51) + SECOND, (1 << 51) + SECOND),
            (of("concurrency 5"), SECOND, DAY / 12),
        ] {
            let key = Key::from("k");
            let charge = Charge::new("p", &limit, &key, 1);
            for (micros, fits) in [(wait, true), (wait + 1, false)] {
                let denied = [0.0, 0.0, micros as f64, 0.0];
                assert_eq!(
                    is_accepted(Operation::Check, &charge, 1, denied),
                    fits,
                    "{limit} waits {micros}"
                );
            }
            for (micros, fits) in [(reset, true), (reset + 1, false)] {
                let admitted = [1.0, 0.0, 0.0, micros as f64];
                assert_eq!(
                    is_accepted(Operation::Check, &charge, 1, admitted),
                    fits,
                    "{limit} resets in {micros}"
                );
            }
        }
    }

    #[test]
    fn the_times_of_bans_are_those_that_a_policy_can_have() {
        const DAY: u64 = 86_400 * 1_000_000;
        let ban = Ban::after(3, Duration::from_secs(10)).first(Duration::from_secs(5));
        let (limit, key) = (Limit::from(SlidingLog::per_minute(10)), Key::from("k"));
        let charge = Charge::new("p", &limit, &key, 1).ban(&ban);
        let (wait, reset) = (366 * DAY + 1_000_000, 366 * DAY + 641_000_000);
        let reads = Operation::Ban { length: Duration::ZERO };
        for (state, fits) in [
            ([1.0, 3.0, wait as f64, reset as f64], true),
            ([1.0, 4.0, 0.0, 0.0], false),
            ([1.0, 0.0, (wait + 1) as f64, 0.0], false),
            ([1.0, 0.0, 0.0, (reset + 1) as f64], false),
        ] {
            assert_eq!(is_accepted(reads, &charge, 1, state), fits, "{state:?}");
        }
    }

    #[test]
    fn no_more_remains_than_the_quota_without_what_was_counted() {
        let (limit, key) = (Limit::from(crate::SlidingLog::per_minute(10)), Key::from("k"));
        let charge = Charge::new("p", &limit, &key, 2);
        for (operation, times, admitted, most) in [
            (Operation::Check, 3, 3.0, 4.0),
            (Operation::Check, 1, 1.0, 8.0),
            (Operation::Peek, 1, 1.0, 10.0),
            (Operation::Charge, 1, 1.0, 10.0),
        ] {
            for (remaining, fits) in [(most, true), (most + 1.0, false)] {
                let state = [admitted, remaining, 0.0, 0.0];
                assert_eq!(
                    is_accepted(operation, &charge, times, state),
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
            let accepted = is_accepted(operation, &charge, 1, denied);
            assert_eq!(accepted, operation.requires_room(), "{operation:?}");
        }
    }
}
