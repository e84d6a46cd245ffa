use std::time::Duration;

use bytes::Bytes;
use smallvec::SmallVec;

use super::{
    algorithm,
    call::ScriptCall,
    failure::{CallFailure, Failure, error_of_request},
    request::OwnedRequest,
};
use crate::store::{ChargeRole, ChargeState, Outcome};

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
    /// For each merged request of the call, its reply or its error.
    pub(super) replies: SmallVec<[Result<RequestReply, CallFailure>; 1]>,
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
        let errors = texts.map(|text| Ok(String::from_utf8_lossy(&text?).into_owned()));
        Ok(Self {
            numbers,
            errors: errors.collect::<Result<_, Failure>>()?,
        })
    }

    /// The time of Redis in microseconds if the reply contains nothing else: no request was decided, because no window of a
    /// calendar in the call enclosed it.
    pub(super) fn lone_time(&self) -> Option<u64> {
        let mut numbers = numbers(&self.numbers);
        match (numbers.next(), numbers.next()) {
            (Some(now), None) => Some(now as u64),
            _ => None,
        }
    }
}

impl ScriptReply {
    /// Reads the time, then for each key of each merged request the number of admitted requests and the three numbers of its
    /// state; or in place of the former, the negated position of an error, from 1.
    pub(super) fn decode(call: &ScriptCall, raw: &RawReply) -> Result<Self, Failure> {
        let mut numbers = numbers(&raw.numbers);
        let mut next = || numbers.next().ok_or_else(Failure::malformed_reply);
        let server_time = duration(next()?)?;
        let mut replies = SmallVec::with_capacity(call.shape.len());
        for shape in &call.shape {
            let mut admitted = None;
            let mut states = SmallVec::<[ChargeState; 1]>::with_capacity(shape.keys);
            for _ in 0..shape.keys {
                admitted = Some(next()?);
                let (remaining, wait, reset_after) = (integer(next()?)?, next()?, duration(next()?)?);
                let span = duration(wait.abs())?;
                let mut state = ChargeState::new(remaining, (wait > 0.0).then_some(span), reset_after);
                if wait < 0.0 {
                    state.decided_at = Some(server_time + span);
                }
                states.push(state);
            }
            let admitted = admitted.unwrap_or_default();
            if admitted < 0.0 {
                let error = raw.errors.get(integer(-admitted - 1.0)? as usize);
                replies.push(Err(error_of_request(error.ok_or_else(Failure::malformed_reply)?)));
                continue;
            }
            let admitted = integer(admitted)?;
            // A state has a wait if and only if a request is denied, except for that of a marker.
            let waits = states.iter().any(|state| state.retry_after.is_some());
            let denies = admitted < shape.times;
            let may_wait = denies || shape.has_marker;
            let counts_later = states.iter().any(|state| state.decided_at.is_some());
            let may_count_later = shape.reserves && !denies;
            if admitted > shape.times || denies && !waits || waits && !may_wait || counts_later && !may_count_later {
                return Err(Failure::malformed_reply());
            }
            replies.push(Ok(RequestReply { admitted, states }));
        }

        match next() {
            Err(_) if raw.numbers.len().is_multiple_of(8) => Ok(Self { server_time, replies }),
            _ => Err(Failure::malformed_reply()),
        }
    }
}

impl RequestReply {
    /// The outcome of the nth of the requests, from 0.
    pub(super) fn outcome(&self, request: &OwnedRequest, nth: u64) -> Outcome {
        if nth >= self.admitted {
            return Outcome::new(false, request.folds.unfold(&self.states));
        }

        let admitted_later = self.admitted - 1 - nth;
        let mut states = self.states.clone();
        for (state, charge) in states.iter_mut().zip(&request.charges) {
            let weight = match charge.role {
                ChargeRole::Counted => admitted_later.saturating_mul(charge.cost),
                ChargeRole::CheckedOnly => 0,
                // A request with a marker or a ban is not merged.
                ChargeRole::Once | ChargeRole::Ban => continue,
            };
            state.remaining = state.remaining.saturating_add(weight);
            state.retry_after = None;
            let delay = algorithm::reset_delay(&charge.limit, weight);
            state.reset_after = state.reset_after.saturating_sub(delay);
        }
        Outcome::new(true, request.folds.unfold(&states))
    }
}

fn numbers(packed: &[u8]) -> impl Iterator<Item = f64> {
    let (numbers, _) = packed.as_chunks::<8>();
    numbers.iter().map(|number| f64::from_le_bytes(*number))
}

/// An integer of the script; integers are exact below 2^53.
fn integer(number: f64) -> Result<u64, Failure> {
    const EXACT: f64 = (1_u64 << 53) as f64;
    match (0.0..EXACT).contains(&number) && number.fract() == 0.0 {
        true => Ok(number as u64),
        false => Err(Failure::malformed_reply()),
    }
}

fn duration(number: f64) -> Result<Duration, Failure> {
    integer(number).map(Duration::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Key, Limit, SlidingLog, TokenBucket,
        store::{
            Charge, ErrorKind, Operation, StoreRequest,
            redis::{call::MergedRequest, key_format::KeyFormat},
        },
    };

    fn check(charges: &[Charge<'_>]) -> OwnedRequest {
        let request = StoreRequest::new(Operation::Check, charges);
        OwnedRequest::of(&KeyFormat::new("quota", None), &request)
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

    fn call(requests: &[OwnedRequest]) -> ScriptCall {
        let merged: Vec<_> = requests
            .iter()
            .map(|request| MergedRequest { request, times: 1 })
            .collect();
        ScriptCall::new(&merged, 0)
    }

    #[test]
    fn charges_on_one_key_are_added_up_and_share_a_state() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let charges = [
            Charge::new("p", &limit, &a, 1),
            Charge::new("p", &limit, &b, 1),
            Charge::new("p", &limit, &a, 2),
        ];

        let requests = [check(&charges)];
        let call = call(&requests);
        assert_eq!(call.keys.len(), 2);

        let reply = ScriptReply::decode(&call, &raw(&[9, 1, 2, 0, 60, 1, 4, 0, 70])).unwrap();
        let outcome = reply.replies[0].as_ref().unwrap().outcome(&requests[0], 0);
        let remaining: Vec<_> = outcome.states.iter().map(|state| state.remaining).collect();
        assert_eq!(remaining, [2, 4, 2]);
    }

    #[test]
    fn a_reply_with_more_than_the_states_is_malformed() {
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let call = call(&[check(&[Charge::new("p", &limit, &key, 1)])]);
        let whole = raw(&[9, 1, 2, 0, 60]);
        assert!(ScriptReply::decode(&call, &whole).is_ok());
        for more in 1..=8 {
            let mut longer = raw(&[9, 1, 2, 0, 60]);
            longer.numbers = [&whole.numbers[..], &vec![0; more]].concat().into();
            assert!(ScriptReply::decode(&call, &longer).is_err(), "{more} bytes");
        }
    }

    #[test]
    fn the_first_of_merged_requests_are_admitted_each_with_the_outcome_it_would_have_alone() {
        // One token per second.
        let limit = Limit::from(TokenBucket::per_minute(60));
        let key = Key::from("a");
        let request = check(&[Charge::new("p", &limit, &key, 2)]);
        let call = ScriptCall::new(
            &[MergedRequest {
                request: &request,
                times: 4,
            }],
            0,
        );

        // Of 5 tokens, 1 is left after the second request of cost 2, and all are back after 59 seconds.
        let reply = ScriptReply::decode(&call, &raw(&[9, 2, 1, 1_000_000, 59_000_000])).unwrap();
        let reply = reply.replies[0].as_ref().unwrap();
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
        let call = call(&[
            check(&[Charge::new("p", &limit, &a, 1)]),
            check(&[Charge::new("p", &limit, &b, 1)]),
        ]);

        let mut raw = raw(&[9, -1, 0, 0, 0, 1, 4, 0, 60]);
        assert!(
            matches!(ScriptReply::decode(&call, &raw), Err(Failure::Protocol(_))),
            "without the text"
        );

        raw.errors = vec!["WRONGTYPE Operation against a key".into()];
        let reply = ScriptReply::decode(&call, &raw).unwrap();
        assert_eq!(reply.replies[0].as_ref().unwrap_err().error.kind(), ErrorKind::Refused);
        assert!(reply.replies[1].is_ok());
    }

    #[test]
    fn a_reply_of_another_shape_is_an_error() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let key = Key::from("a");
        let call = call(&[check(&[Charge::new("p", &limit, &key, 1)])]);
        let decode = |raw: &RawReply| ScriptReply::decode(&call, raw);

        let good = [1_000_000, 1, 4, 0, 60_000_000];
        assert!(decode(&raw(&good)).is_ok());
        let [negative, long, many, no_wait, large] = [
            &[1, 1, -4, 0, 0][..],
            &[1, 1, 4, 0, 0, 0],
            &[1, 2, 4, 0, 0],
            &[1, 0, 4, 0, 0],
            &[1, 1, 1 << 53, 0, 0],
        ];
        for bad in [&good[..4], &good[..1], &[], negative, long, many, no_wait, large] {
            assert!(matches!(decode(&raw(bad)), Err(Failure::Protocol(_))), "{bad:?}");
        }
        for number in [0.5, f64::NAN, f64::INFINITY] {
            let mut numbers = [1.0, 1.0, 4.0, 0.0, 60.0];
            numbers[2] = number;
            let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
            let mut raw = RawReply {
                numbers: numbers.collect(),
                errors: Vec::new(),
            };
            assert!(matches!(decode(&raw), Err(Failure::Protocol(_))), "{number}");
            raw.numbers.truncate(39);
            assert!(matches!(decode(&raw), Err(Failure::Protocol(_))), "cut off");
        }
    }

    #[test]
    fn a_marker_may_wait_in_a_request_that_is_admitted_and_no_other_charge() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (key, id) = (Key::from("a"), Key::from("id"));
        let (marker, charge) = (Charge::new("p", &limit, &id, 1), Charge::new("p", &limit, &key, 1));
        let raw = raw(&[9, 1, 0, 40, 40, 1, 4, 0, 60]);

        let marked = check(&[marker.once(), charge]);
        let call = call(std::slice::from_ref(&marked));
        let reply = ScriptReply::decode(&call, &raw).unwrap();
        let outcome = reply.replies[0].as_ref().unwrap().outcome(&marked, 0);
        assert!(outcome.allowed);
        assert_eq!(outcome.states[0].retry_after, Some(Duration::from_micros(40)));
        assert_eq!(outcome.states[1].retry_after, None);

        let call = self::call(&[check(&[marker, charge])]);
        assert!(matches!(ScriptReply::decode(&call, &raw), Err(Failure::Protocol(_))));
    }

    #[test]
    fn a_charge_may_count_later_in_a_reservation_that_is_admitted_and_in_no_other_request() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (key, id) = (Key::from("a"), Key::from("id"));
        let charges = [
            Charge::new("p", &limit, &id, 1).once(),
            Charge::new("p", &limit, &key, 1),
        ];
        let admitted = raw(&[9, 1, 0, 40, 40, 1, 0, -40, 60]);

        let reservation = OwnedRequest::of(
            &KeyFormat::new("quota", None),
            &StoreRequest::new(Operation::Reserve, &charges),
        );
        let reserving = call(std::slice::from_ref(&reservation));
        let reply = ScriptReply::decode(&reserving, &admitted).unwrap();
        let states = reply.replies[0].as_ref().unwrap().outcome(&reservation, 0).states;
        let waits = [Some(Duration::from_micros(40)), None];
        assert_eq!([states[0].retry_after, states[1].retry_after], waits);
        let times = [None, Some(Duration::from_micros(49))];
        assert_eq!(
            [states[0].decided_at, states[1].decided_at],
            times,
            "a full marker counts never"
        );

        let denied = raw(&[9, 0, 0, 40, 40, 0, 0, -40, 60]);
        assert!(matches!(
            ScriptReply::decode(&reserving, &denied),
            Err(Failure::Protocol(_))
        ));
        let checking = call(&[check(&charges)]);
        assert!(matches!(
            ScriptReply::decode(&checking, &admitted),
            Err(Failure::Protocol(_))
        ));
    }

    #[test]
    fn merged_requests_leave_no_less_of_what_is_only_checked() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let request = check(&[
            Charge::new("p", &limit, &a, 1),
            Charge::new("p", &limit, &b, 2).checked_only(),
        ]);
        let merged = [MergedRequest {
            request: &request,
            times: 3,
        }];
        let call = ScriptCall::new(&merged, 0);
        let reply = ScriptReply::decode(&call, &raw(&[9, 3, 2, 0, 60, 3, 5, 0, 60])).unwrap();
        let reply = reply.replies[0].as_ref().unwrap();
        let remaining = [0, 1, 2].map(|nth| {
            let states = reply.outcome(&request, nth).states;
            [states[0].remaining, states[1].remaining]
        });
        assert_eq!(remaining, [[4, 5], [3, 5], [2, 5]]);
    }
}
