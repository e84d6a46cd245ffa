use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use hashbrown::HashTable;
use smallvec::SmallVec;

use super::{
    reply_bounds::Bounds,
    request::{OwnedCharge, OwnedRequest},
};
use crate::{
    Limit,
    store::{ChargeRole, LeaseId, Operation, Waiting},
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
            if let Some(boundaries) = boundaries(&charge.limit, now_us) {
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
            write_numbers(&mut numbers, boundaries(limit, now_us).into_iter().flatten());
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
    let boundaries = limits.filter_map(|limit| boundaries(limit, now_us));
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
    write_numbers(buffer, parameters(limit, charge.lease));
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

/// Where a request is in a call: its merged request, and how many requests of that come before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchPosition {
    pub(super) merged: usize,
    pub(super) nth: u64,
}

/// Merges equal checks, and returns the position of each request.
///
/// A check is merged into an earlier one only if no other request between them has one of its keys, so the outcomes are those
/// of the requests one after the other.
pub(super) fn merge<'a>(
    requests: impl ExactSizeIterator<Item = &'a [OwnedRequest]>,
) -> (Vec<MergedRequest<'a>>, Vec<BatchPosition>) {
    let count = requests.len();
    let mut merged = Vec::<MergedRequest<'_>>::with_capacity(count);
    let mut positions = Vec::with_capacity(count);
    // The last merged request with each key.
    let mut latest = HashTable::<(&OwnedCharge, usize)>::with_capacity(count);

    for request in requests.flatten() {
        let mut earlier = request.charges.iter().map(|charge| {
            let same_key = latest.find(charge.hash, |(other, _)| other.key == charge.key);
            same_key.map(|(_, index)| *index)
        });
        let equal = earlier
            .next()
            .flatten()
            .filter(|index| earlier.all(|other| other == Some(*index)) && request.merges_with(merged[*index].request));
        let index = equal.unwrap_or_else(|| {
            for charge in &request.charges {
                let same_key = |(other, _): &(&OwnedCharge, usize)| other.key == charge.key;
                let entry = latest.entry(charge.hash, same_key, |(other, _)| other.hash);
                entry.insert((charge, merged.len()));
            }
            merged.push(MergedRequest { request, times: 0 });
            merged.len() - 1
        });

        let nth = merged[index].times;
        positions.push(BatchPosition { merged: index, nth });
        merged[index].times += u64::from(request.units);
    }
    (merged, positions)
}

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

/// Writes a word and a zero byte.
pub(super) fn write_word(buffer: &mut BytesMut, word: &str) {
    buffer.extend_from_slice(word.as_bytes());
    buffer.put_u8(0);
}

/// Writes numbers as little-endian doubles, which Lua computes with. They are exact below 2^53.
pub(super) fn write_numbers(buffer: &mut BytesMut, numbers: impl IntoIterator<Item = u64>) {
    for number in numbers {
        buffer.put_f64_le(number as f64);
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::LazyLock, time::Duration};

    use super::*;
    use crate::{
        Key, Limit, SlidingLog, TokenBucket,
        store::{Charge, Operation, StoreRequest, redis::key_format::KeyFormat},
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

    static KEY_FORMAT: LazyLock<KeyFormat> = LazyLock::new(|| KeyFormat::new("quota", None));

    /// A request that charges these keys of one policy.
    fn request_of(operation: Operation, limit: &Limit, keys: &[&str]) -> OwnedRequest {
        let keys: Vec<_> = keys.iter().map(|key| Key::from(*key)).collect();
        let charges: Vec<_> = keys.iter().map(|key| Charge::new("p", limit, key, 1)).collect();
        OwnedRequest::of(&KEY_FORMAT, &StoreRequest::new(operation, &charges))
    }

    /// For each request its merged request, and the number of requests in each merged request.
    fn merged(requests: &[OwnedRequest]) -> (Vec<usize>, Vec<u64>) {
        let (merged, positions) = merge(requests.chunks(1));
        (
            positions.iter().map(|position| position.merged).collect(),
            merged.iter().map(|merged| merged.times).collect(),
        )
    }

    #[test]
    fn equal_checks_are_merged() {
        let limit = SlidingLog::per_minute(5).into();
        let [a, b] = ["a", "b"].map(|key| move |limit: &Limit| request_of(Operation::Check, limit, &[key]));
        let requests = [a(&limit), b(&limit), a(&limit), a(&limit), b(&limit)];
        assert_eq!(merged(&requests), (vec![0, 1, 0, 0, 1], vec![3, 2]));
        let (_, positions) = merge(requests.chunks(1));
        assert_eq!(positions[3], BatchPosition { merged: 0, nth: 2 });
    }

    #[test]
    fn checks_with_another_request_on_their_key_between_them_are_not_merged() {
        let limit = SlidingLog::per_minute(5).into();
        let check = |keys| request_of(Operation::Check, &limit, keys);
        for between in [
            request_of(Operation::Reset, &limit, &["a"]),
            check(&["a", "b"]),
            check(&["b", "a"]),
            request_of(Operation::Check, &SlidingLog::per_minute(6).into(), &["a"]),
        ] {
            let requests = [check(&["a"]), between, check(&["a"])];
            assert_eq!(merged(&requests), (vec![0, 1, 2], vec![1, 1, 1]));
        }

        let pairs = [check(&["a", "b"]), check(&["b"]), check(&["a", "b"])];
        assert_eq!(merged(&pairs), (vec![0, 1, 2], vec![1, 1, 1]));
        let pairs = [check(&["a", "b"]), check(&["c"]), check(&["a", "b"])];
        assert_eq!(merged(&pairs), (vec![0, 1, 0], vec![2, 1]));
    }

    #[test]
    fn only_checks_are_merged() {
        let limit = SlidingLog::per_minute(5).into();
        let refund = Operation::Refund {
            admitted_at: Duration::ZERO,
        };
        for operation in [Operation::Charge, Operation::Peek, Operation::Reset, refund] {
            let requests = [0; 2].map(|_| request_of(operation, &limit, &["a"]));
            assert_eq!(merged(&requests), (vec![0, 1], vec![1, 1]), "{operation:?}");
        }
    }

    #[test]
    fn checks_of_a_bucket_whose_tokens_take_fractions_of_microseconds_are_not_merged() {
        for (limit, count) in [(TokenBucket::per_second(7), 2), (TokenBucket::per_second(8), 1)] {
            let requests = [0; 2].map(|_| request_of(Operation::Check, &limit.into(), &["a"]));
            assert_eq!(merged(&requests).1.len(), count, "{limit}");
        }
    }

    #[test]
    fn requests_with_a_marker_are_not_merged_and_those_with_a_charge_that_is_only_checked_are() {
        let (limit, key, id) = (SlidingLog::per_minute(5).into(), Key::from("a"), Key::from("id"));
        let charge = Charge::new("p", &limit, &key, 1);
        let marker = Charge::new("p", &limit, &id, 1).once();
        let twice = |charges: &[Charge<'_>]| {
            [0; 2].map(|_| OwnedRequest::of(&KEY_FORMAT, &StoreRequest::new(Operation::Check, charges)))
        };
        assert_eq!(merged(&twice(&[charge.checked_only()])).1, [2]);
        assert_eq!(merged(&twice(&[marker, charge])).1, [1, 1]);

        let [counted, _] = twice(&[charge]);
        let [checked, _] = twice(&[charge.checked_only()]);
        assert_eq!(merged(&[counted, checked]).1, [1, 1]);
    }
}
