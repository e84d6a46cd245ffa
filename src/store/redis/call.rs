use bytes::{Bytes, BytesMut};
use smallvec::SmallVec;

use super::{
    algorithm,
    bounds::Bounds,
    request::{OwnedCharge, OwnedRequest},
    words::{write_numbers, write_word},
};
use crate::{
    Limit,
    store::{ChargeRole, Operation, Waiting},
};

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
    pub(super) arguments: SmallVec<[Bytes; 1]>,
    /// For each merged request, what its reply consists of.
    pub(super) shape: SmallVec<[ReplyShape; 1]>,
    /// For each key, the bounds of its state in the reply.
    pub(super) bounds: SmallVec<[Bounds; 1]>,
    calendars: Vec<CalendarWindows>,
}

/// Where the boundaries of the windows of a calendar are in a call.
struct CalendarWindows {
    limit: Limit,
    /// The position of the argument, and of the first boundary in it.
    argument: usize,
    offset: usize,
}

/// What the reply to a merged request consists of.
#[derive(Clone, Copy)]
pub(super) struct ReplyShape {
    /// The number of requests.
    pub(super) times: u64,
    pub(super) keys: usize,
    /// Whether one of the charges is a marker, which has a wait if it has no room, even if the request is admitted.
    pub(super) has_marker: bool,
    /// Whether the request is denied if there is no room.
    pub(super) requires_room: bool,
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
                    requires_room: merged.request.operation.requires_room(),
                })
                .collect(),
            bounds: merged.iter().flat_map(|merged| Bounds::of(merged.request)).collect(),
            calendars: Vec::new(),
        };

        // All keys and arguments share one buffer.
        let charges = || merged.iter().flat_map(|merged| &merged.request.charges);
        let length = charges().map(|charge| charge.key.len()).sum::<usize>();
        let mut buffer = BytesMut::with_capacity(length + 256);
        call.keys.extend(charges().map(|charge| {
            buffer.extend_from_slice(&charge.key);
            buffer.split().freeze()
        }));
        if let Some(within) = within(charges().map(|charge| &charge.limit), now_us) {
            call.arguments.push(within);
        }
        // Requests that differ only in their keys and numbers share an argument.
        for run in merged.chunk_by(same_arguments) {
            call.push_run(&mut buffer, run, now_us);
        }
        call
    }

    /// The number of requests.
    pub(super) fn requests(&self) -> u64 {
        self.shape.iter().map(|shape| shape.times).sum()
    }

    fn push_run(&mut self, buffer: &mut BytesMut, run: &[MergedRequest<'_>], now_us: u64) {
        let Some(first) = run.first() else { return };
        let (operation, charges) = (first.request.operation, &first.request.charges);
        // 0 if a number for each request follows.
        let times = if run.iter().all(|merged| merged.times == first.times) {
            first.times
        } else {
            0
        };
        write_word(buffer, operation_name(operation));
        write_numbers(buffer, [run.len() as u64, charges.len() as u64, times]);
        if let Operation::Refund { admitted_at } = operation {
            write_numbers(buffer, [admitted_at.as_micros() as u64]);
        }
        for charge in charges {
            write_charge(buffer, charge);
            if let Some(boundaries) = algorithm::boundaries(&charge.limit, now_us) {
                self.calendars.push(CalendarWindows {
                    limit: charge.limit.clone(),
                    argument: self.arguments.len(),
                    offset: buffer.len(),
                });
                write_numbers(buffer, boundaries);
            }
            if operation == Operation::Reserve {
                let Waiting { longest_us, most } = charge.waiting;
                write_numbers(buffer, [longest_us, most]);
            }
        }
        if times == 0 {
            write_numbers(buffer, run.iter().map(|merged| merged.times));
        }
        self.arguments.push(buffer.split().freeze());
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
        for CalendarWindows {
            limit,
            argument,
            offset,
        } in &self.calendars
        {
            let mut numbers = BytesMut::new();
            write_numbers(&mut numbers, algorithm::boundaries(limit, now_us).into_iter().flatten());
            let argument = &mut self.arguments[*argument];
            let mut replaced = BytesMut::from(&**argument);
            replaced[*offset..offset + numbers.len()].copy_from_slice(&numbers);
            *argument = replaced.freeze();
        }
        if let Some(within) = within(self.calendars.iter().map(|windows| &windows.limit), now_us) {
            self.arguments[0] = within;
        }
    }
}

/// `within` and the time that the boundaries of all calendars enclose, if there are calendars.
fn within<'a>(limits: impl Iterator<Item = &'a Limit>, now_us: u64) -> Option<Bytes> {
    let boundaries = limits.filter_map(|limit| algorithm::boundaries(limit, now_us));
    let enclosed = boundaries.map(|[from, .., until]| (from, until));
    let (from, until) = enclosed.reduce(|all, one| (all.0.max(one.0), all.1.min(one.1)))?;
    let mut buffer = BytesMut::new();
    write_word(&mut buffer, "within");
    write_numbers(&mut buffer, [from, until, 0]);
    Some(buffer.freeze())
}

/// The algorithm, the role, the cost, the quota and the parameters of the algorithm.
fn write_charge(buffer: &mut BytesMut, charge: &OwnedCharge) {
    let limit = &charge.limit;
    write_word(buffer, limit.algorithm());
    write_word(buffer, role_name(charge.role));
    write_numbers(buffer, [charge.cost, limit.quota()]);
    write_numbers(buffer, algorithm::parameters(limit, charge.lease));
}

fn role_name(role: ChargeRole) -> &'static str {
    match role {
        ChargeRole::Counted => "",
        ChargeRole::CheckedOnly => "checked",
        ChargeRole::Once => "once",
        ChargeRole::Ban => "ban",
    }
}

fn operation_name(operation: Operation) -> &'static str {
    match operation {
        Operation::Check => "check",
        Operation::Reserve => "reserve",
        Operation::Charge => "charge",
        Operation::Peek => "peek",
        Operation::Reset => "reset",
        Operation::Refund { .. } => "refund",
        Operation::RenewLease => "renew",
        Operation::EndLease => "end",
    }
}

fn same_arguments(a: &MergedRequest<'_>, b: &MergedRequest<'_>) -> bool {
    let same = |(a, b): (&OwnedCharge, &OwnedCharge)| {
        // Each charge of slots has an id of its own.
        let is_held = a.limit.is_held();
        a.cost == b.cost && a.limit == b.limit && a.role == b.role && a.waiting == b.waiting && !is_held
    };
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

    /// Words that end with a zero byte, and numbers.
    fn packed(words: &str, numbers: &[u64]) -> Vec<u8> {
        let numbers = numbers.iter().flat_map(|number| (*number as f64).to_le_bytes());
        words.bytes().chain(numbers).collect()
    }

    fn request(charges: &[Charge<'_>]) -> OwnedRequest {
        let request = StoreRequest::new(Operation::Check, charges);
        OwnedRequest::of(&KeyFormat::new("quota", None), &request)
    }

    #[test]
    fn requests_with_equal_arguments_are_described_once() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let [on_a, on_b, expensive] =
            [(&a, 1), (&b, 1), (&b, 3)].map(|(key, cost)| request(&[Charge::new("p", &limit, key, cost)]));
        let merged = |request, times| MergedRequest { request, times };

        let call = ScriptCall::new(&[merged(&on_a, 1), merged(&on_b, 1), merged(&expensive, 1)], 0);
        let on_a_and_b = ["quota:1:log:p:{key=a}", "quota:1:log:p:{key=b}"];
        assert_eq!(call.keys[..], [on_a_and_b[0], on_a_and_b[1], on_a_and_b[1]]);
        let once = |count, cost| {
            [
                packed("check\0", &[count, 1, 1]),
                packed("log\0\0", &[cost, 5, 60_000_000, 0, 0]),
            ]
        };
        assert_eq!(call.arguments[..], [once(2, 1).concat(), once(1, 3).concat()]);

        let call = ScriptCall::new(&[merged(&on_a, 1), merged(&on_b, 30)], 0);
        assert_eq!(call.keys[..], on_a_and_b);
        let [_, charge] = once(2, 1);
        let run = [packed("check\0", &[2, 1, 0]), charge, packed("", &[1, 30])];
        assert_eq!(call.arguments[..], [run.concat()]);
    }

    #[test]
    fn a_charge_that_is_not_counted_has_its_role() {
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let charge = Charge::new("p", &limit, &key, 1);
        for (charge, role) in [
            (charge.once(), "once"),
            (charge.checked_only(), "checked"),
            (charge, ""),
        ] {
            let request = request(&[charge]);
            let merged = MergedRequest {
                request: &request,
                times: 1,
            };
            let call = ScriptCall::new(&[merged], 0);
            let words = format!("log\0{role}\0");
            let run = [packed("check\0", &[1, 1, 1]), packed(&words, &[1, 5, 60_000_000, 0, 0])];
            assert_eq!(call.arguments[..], [run.concat()]);
        }
    }
}
