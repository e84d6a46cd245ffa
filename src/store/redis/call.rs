use bytes::{Bytes, BytesMut};
use smallvec::SmallVec;

use super::{
    algorithm,
    request::{OwnedCharge, OwnedRequest},
    words::{write_number, write_words},
};
use crate::store::{ChargeRole, Operation};

/// Equal checks that are sent once with their number, or one other request.
#[derive(Clone, Copy, Debug)]
pub(super) struct MergedRequest<'a> {
    pub(super) request: &'a OwnedRequest,
    /// The number of requests.
    pub(super) times: u64,
}

/// One call of the script: its keys, its arguments and the shape of its reply.
pub(super) struct ScriptCall {
    pub(super) keys: SmallVec<[Bytes; 1]>,
    pub(super) arguments: SmallVec<[Bytes; 2]>,
    /// For each merged request, what its reply consists of.
    pub(super) shape: SmallVec<[ReplyShape; 1]>,
    /// The charges with windows of a calendar, and their positions in the arguments.
    calendars: Vec<(usize, OwnedCharge)>,
}

/// What the reply to a merged request consists of.
#[derive(Clone, Copy)]
pub(super) struct ReplyShape {
    /// The number of requests.
    pub(super) times: u64,
    pub(super) keys: usize,
    /// Whether one of the charges is a marker, which has a wait if it has no room, also if the request is admitted.
    pub(super) has_marker: bool,
}

impl ScriptCall {
    /// A call for these requests. `now_us` is an approximate time of Redis in microseconds.
    pub(super) fn new(merged: &[MergedRequest<'_>], now_us: u64) -> Self {
        let mut call = Self {
            keys: SmallVec::new(),
            arguments: SmallVec::new(),
            shape: merged
                .iter()
                .map(|merged| ReplyShape {
                    times: merged.times,
                    keys: merged.request.charges.len(),
                    has_marker: merged.request.has_marker(),
                })
                .collect(),
            calendars: Vec::new(),
        };

        // All keys and arguments share one buffer.
        let charges = || merged.iter().flat_map(|merged| &merged.request.charges);
        let length = charges().map(|charge| charge.key.len()).sum::<usize>();
        let mut text = BytesMut::with_capacity(length + 256);
        call.keys.extend(charges().map(|charge| {
            text.extend_from_slice(&charge.key);
            text.split().freeze()
        }));
        // Requests that differ only in their keys and numbers share their arguments.
        for run in merged.chunk_by(same_arguments) {
            let Some(first) = run.first() else { continue };
            write_words(&mut text, operation_name(first.request.operation), [run.len() as u64]);
            write_times(&mut text, run, first.times);
            write_words(&mut text, "", [first.request.charges.len() as u64]);
            if let Operation::Refund { admitted_at } = first.request.operation {
                write_words(&mut text, "", [admitted_at.as_micros() as u64]);
            }
            call.arguments.push(text.split().freeze());
            for charge in &first.request.charges {
                if algorithm::has_calendar_windows(&charge.limit) {
                    call.calendars.push((call.arguments.len(), charge.clone()));
                }
                write_charge(&mut text, charge, now_us);
                call.arguments.push(text.split().freeze());
            }
        }
        call
    }

    /// A call without requests, sent to the node of this key.
    pub(super) fn probe(key: Option<Bytes>) -> Self {
        let mut call = Self::new(&[], 0);
        call.keys.extend(key);
        call
    }

    /// A call that runs each command of the script on this key.
    pub(super) fn trial(key: Bytes) -> Self {
        let mut call = Self::probe(Some(key));
        call.arguments.push(Bytes::from_static(b"trial"));
        call
    }

    /// Whether the arguments contain windows of a calendar, of which none may enclose the time of Redis.
    pub(super) fn has_calendar_windows(&self) -> bool {
        !self.calendars.is_empty()
    }

    /// Replaces the windows of calendars by those around this time of Redis.
    pub(super) fn set_time(&mut self, now_us: u64) {
        for (position, charge) in &self.calendars {
            let mut text = BytesMut::new();
            write_charge(&mut text, charge, now_us);
            self.arguments[*position] = text.freeze();
        }
    }
}

/// `log 1 5 60000000 0 checked`: the algorithm, the cost, the quota, the parameters of the algorithm, and the role unless the
/// charge is counted.
fn write_charge(text: &mut BytesMut, charge: &OwnedCharge, now_us: u64) {
    let limit = &charge.limit;
    write_words(text, limit.algorithm(), [charge.cost, limit.quota()]);
    algorithm::write_parameters(text, limit, now_us);
    let role = match charge.role {
        ChargeRole::Counted => "",
        ChargeRole::CheckedOnly => " checked",
        ChargeRole::Once => " once",
    };
    write_words(text, role, []);
}

/// The number of requests in each merged request of a run: ` 3` for all, or ` 1,5,2`.
fn write_times(text: &mut BytesMut, run: &[MergedRequest<'_>], times: u64) {
    if run.iter().all(|merged| merged.times == times) {
        write_words(text, "", [times]);
        return;
    }

    let mut delimiter = b' ';
    for merged in run {
        write_number(text, delimiter, merged.times);
        delimiter = b',';
    }
}

fn operation_name(operation: Operation) -> &'static str {
    match operation {
        Operation::Check => "check",
        Operation::Charge => "charge",
        Operation::Peek => "peek",
        Operation::Reset => "reset",
        Operation::Refund { .. } => "refund",
    }
}

fn same_arguments(a: &MergedRequest<'_>, b: &MergedRequest<'_>) -> bool {
    let same = |(a, b): (&OwnedCharge, &OwnedCharge)| a.cost == b.cost && a.limit == b.limit && a.role == b.role;
    let (a, b) = (a.request, b.request);
    a.operation == b.operation && a.charges.len() == b.charges.len() && a.charges.iter().zip(&b.charges).all(same)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Key, Limit, SlidingLog,
        store::{Charge, StoreRequest, redis::key_format::KeyFormat},
    };

    #[test]
    fn requests_with_equal_arguments_are_described_once() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let [on_a, on_b, expensive] = [(&a, 1), (&b, 1), (&b, 3)].map(|(key, cost)| {
            let charges = [Charge::new("p", &limit, key, cost)];
            let request = StoreRequest::new(Operation::Check, &charges);
            OwnedRequest::of(&KeyFormat::new("quota", None), &request)
        });
        let merged = |request, times| MergedRequest { request, times };
        let text = |texts: &[Bytes]| -> Vec<_> {
            let texts = texts.iter().map(|text| String::from_utf8(text.to_vec()).unwrap());
            texts.collect()
        };

        let call = ScriptCall::new(&[merged(&on_a, 1), merged(&on_b, 1), merged(&expensive, 1)], 0);
        let on_a_and_b = ["quota:1:log:p:{key=a}", "quota:1:log:p:{key=b}"];
        assert_eq!(text(&call.keys), [on_a_and_b[0], on_a_and_b[1], on_a_and_b[1]]);
        assert_eq!(
            text(&call.arguments),
            ["check 2 1 1", "log 1 5 60000000 0", "check 1 1 1", "log 3 5 60000000 0"]
        );

        let call = ScriptCall::new(&[merged(&on_a, 1), merged(&on_b, 30)], 0);
        assert_eq!(text(&call.keys), on_a_and_b);
        assert_eq!(text(&call.arguments), ["check 2 1,30 1", "log 1 5 60000000 0"]);
    }

    #[test]
    fn a_charge_that_is_not_counted_ends_in_its_role() {
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let charge = Charge::new("p", &limit, &key, 1);
        let charges = [charge.once(), charge.checked_only(), charge].map(|charge| OwnedCharge {
            key: KeyFormat::new("quota", None).redis_key(&charge),
            hash: 0,
            limit: limit.clone(),
            cost: 1,
            role: charge.role(),
        });
        let texts = charges.map(|charge| {
            let mut text = BytesMut::new();
            write_charge(&mut text, &charge, 0);
            String::from_utf8(text.to_vec()).unwrap()
        });
        assert_eq!(
            texts,
            [
                "log 1 5 60000000 0 once",
                "log 1 5 60000000 0 checked",
                "log 1 5 60000000 0"
            ]
        );
    }
}
