use std::time::{Duration, SystemTime};

use bytes::{BufMut, Bytes, BytesMut};
use smallvec::SmallVec;

use super::{
    key_format::{KeyFormat, are_in_several_slots},
    request::{Entry, MergedRequest},
    script::{RULES, ScriptName, boundaries, parameters, rule_of},
};
use crate::{
    Ban, Limit,
    limit::{Arrival, MAX_EXACT, MAX_QUOTA},
    store::{Charge, LeaseId, Operation},
};

/// One call of the script: its keys and its arguments.
pub(super) struct ScriptCall {
    /// The keys that Redis is told of; of a call across slots the first one, which names the node.
    pub(super) keys: SmallVec<[Bytes; 1]>,
    pub(super) arguments: SmallVec<[Bytes; 1]>,
    pub(super) script: ScriptName,
    /// Whether the keys lie in several slots of a cluster. They are arguments then.
    pub(super) is_across: bool,
    /// Whether the reply is that of the node alone, also if it is a redirection.
    is_probe: bool,
    /// Whether none of its windows of calendars may enclose the time of Redis.
    pub(super) has_calendars: bool,
}

impl ScriptCall {
    /// A call for these requests, to a server or a node of a cluster, at about this time of Redis in microseconds.
    pub(super) fn new(merged: &[MergedRequest<'_>], key_format: &KeyFormat, clustered: bool, now_us: u64) -> Self {
        let charges = merged.iter().flat_map(|merged| merged.request.charges());
        let is_across = clustered && are_in_several_slots(charges);
        let mut call = Self {
            is_across,
            ..Self::of(ScriptName::Driver, [])
        };

        // All keys and arguments share one buffer.
        let mut buffer = BytesMut::with_capacity(128 * merged.len() + 256);
        let mut keys = SmallVec::new();
        let mut write_key = |parts: [&[u8]; 8]| {
            parts.iter().for_each(|part| buffer.extend_from_slice(part));
            keys.push(buffer.split().freeze());
        };
        // The rules of all that is read, by their positions. Bans are none of them.
        let (mut rules, mut has_lines) = (0_u32, false);
        for MergedRequest { request, .. } in merged {
            for entry in request.entries() {
                rules |= entry.limit().map_or(u32::MAX, |limit| 1 << rule_of(limit));
                write_key(key_format.of_entry(entry));
                if let Entry::Count(charge) = entry
                    && charge.line_for(request.operation).is_some()
                {
                    has_lines = true;
                    write_key(key_format.of_line(charge));
                }
            }
        }
        let only_rule = rules.is_power_of_two().then(|| rules.trailing_zeros() as usize);
        if has_lines {
            call.script = ScriptName::DriverWithLines;
        } else if let Some(rule) = only_rule.filter(|_| are_checks(merged, is_across)) {
            call.script = ScriptName::Checks(rule);
            call.push_checks(&mut buffer, merged);
            call.set_keys(keys);
            return call;
        } else if let Some(rule) = only_rule {
            call.script = ScriptName::DriverOf(rule);
        }
        // Requests that differ only in their keys and numbers share an argument.
        let is_same = |a: &_, b: &_| same_arguments(a, b) && (!is_across || spans_slots(a) == spans_slots(b));
        let runs = || merged.chunk_by(is_same);
        let entries = merged.iter().flat_map(|merged| merged.request.entries());
        write_numbers(&mut buffer, enclosed(entries.filter_map(Entry::limit), now_us));
        // How many runs come before the keys.
        write_numbers(&mut buffer, [if is_across { runs().count() as u64 } else { 0 }]);
        call.arguments.push(buffer.split().freeze());
        for run in runs() {
            call.push_run(&mut buffer, run, now_us);
        }
        call.set_keys(keys);
        call
    }

    /// The keys of a call across slots are arguments.
    fn set_keys(&mut self, mut keys: SmallVec<[Bytes; 1]>) {
        if self.is_across {
            self.keys.extend(keys.first().cloned());
            self.arguments.append(&mut keys);
        } else {
            self.keys = keys;
        }
    }

    /// The arguments of a call of checks: for each run its charges, and unless it is one request, how many there are.
    fn push_checks(&mut self, buffer: &mut BytesMut, merged: &[MergedRequest<'_>]) {
        let runs = || merged.chunk_by(same_arguments);
        let before_keys = if self.is_across { 2 * runs().count() as u64 } else { 0 };
        for run in runs() {
            let Some(first) = run.first() else { continue };
            let times = same_times(run);
            for charge in first.request.charges() {
                write_numbers(buffer, [times, charge.cost(), charge.limit().quota()]);
                write_numbers(buffer, parameters(charge.limit(), charge.lease));
            }
            self.arguments.push(buffer.split().freeze());
            if merged.len() > 1 {
                write_numbers(buffer, [run.len() as u64, before_keys]);
                if times == 0 {
                    write_numbers(buffer, run.iter().map(|merged| merged.times));
                }
                self.arguments.push(buffer.split().freeze());
            }
        }
    }

    fn push_run(&mut self, buffer: &mut BytesMut, run: &[MergedRequest<'_>], now_us: u64) {
        let Some(first) = run.first() else { return };
        let operation = first.request.operation;
        let times = same_times(run);
        let is_denial = first.request.is_of_bans && operation == Operation::Check;
        write_word(buffer, if is_denial { "deny" } else { operation_name(operation) });
        write_numbers(
            buffer,
            [run.len() as u64, first.request.entries().count() as u64, times],
        );
        write_numbers(buffer, [u64::from(self.is_across && spans_slots(first))]);
        if let Operation::Refund { admitted_at } = operation {
            write_numbers(buffer, [admitted_at.as_micros() as u64]);
        }
        if matches!(operation, Operation::Wait | Operation::Peek) {
            write_waiting(buffer, first.request.waiting.as_deref());
        }
        for entry in first.request.entries() {
            write_entry(buffer, operation, entry);
            if let Some(limit) = entry.limit()
                && let Some(boundaries) = boundaries(limit, now_us)
            {
                self.has_calendars = true;
                write_numbers(buffer, boundaries);
            }
        }
        if times == 0 {
            write_numbers(buffer, run.iter().map(|merged| merged.times));
        }
        self.arguments.push(buffer.split().freeze());
    }

    /// A call without requests, sent to the node of this key.
    pub(super) fn probe(key: Option<Bytes>) -> Self {
        Self {
            is_probe: true,
            ..Self::empty(ScriptName::Driver, key)
        }
    }

    /// A call of a script with these keys and no arguments.
    pub(super) fn of(script: ScriptName, keys: impl IntoIterator<Item = Bytes>) -> Self {
        Self {
            keys: keys.into_iter().collect(),
            arguments: SmallVec::new(),
            script,
            is_across: false,
            is_probe: false,
            has_calendars: false,
        }
    }

    /// A call of a script that decides nothing.
    pub(super) fn empty(script: ScriptName, keys: impl IntoIterator<Item = Bytes>) -> Self {
        let mut call = Self::of(script, keys);
        if !matches!(script, ScriptName::Checks(_)) {
            let mut header = BytesMut::new();
            write_numbers(&mut header, [0, MAX_EXACT, 0]);
            call.arguments.push(header.freeze());
        }
        call
    }

    /// Whether the call is sent to the node to which the reply redirects.
    ///
    /// That of a call across slots must not be, since its other keys are not declared: with `ASKING` it would create them. That of
    /// a probe is the reply which it is sent for, and the other node may hang.
    #[cfg_attr(not(feature = "cluster"), expect(dead_code, reason = "only clusters redirect"))]
    pub(super) fn follows_redirections(&self) -> bool {
        !self.is_across && !self.is_probe
    }

    /// Whether `ASKING` is sent before the call although its slot is not being moved: a trial finds a missing permission.
    #[cfg_attr(not(feature = "cluster"), expect(dead_code, reason = "only clusters redirect"))]
    pub(super) fn is_asking(&self) -> bool {
        self.script == ScriptName::Trial && !self.is_across
    }

    /// A call that runs each command of the script on the first of these keys, or on one that is not declared.
    pub(super) fn trial(declared: impl IntoIterator<Item = Bytes>, other: Option<Bytes>) -> Self {
        let mut call = Self::of(ScriptName::Trial, declared);
        call.is_across = other.is_some();
        call.arguments.extend(other);
        call
    }
}

/// The time of this process in microseconds, to find the windows of a calendar around the time of Redis.
pub(super) fn process_time_us() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros() as u64
}

/// The time that the boundaries of all calendars enclose.
fn enclosed<'a>(limits: impl Iterator<Item = &'a Limit>, now_us: u64) -> [u64; 2] {
    let boundaries = limits.filter_map(|limit| boundaries(limit, now_us));
    boundaries.fold([0, MAX_EXACT], |all, [from, _, _, until, _]| {
        [all[0].max(from), all[1].min(until)]
    })
}

/// Whether all of these, which have no bans and no lines, are checks without calendars, each in one slot.
fn are_checks(merged: &[MergedRequest<'_>], is_across: bool) -> bool {
    merged.iter().all(|merged| {
        let mut charges = merged.request.charges();
        merged.request.is_check()
            && charges.all(|charge| boundaries(charge.limit(), 0).is_none())
            && !(is_across && spans_slots(merged))
    })
}

/// How many callers send each request of a run; 0 if a number for each request follows.
fn same_times(run: &[MergedRequest<'_>]) -> u64 {
    let first = run.first().map_or(0, |first| first.times);
    if run.iter().all(|merged| merged.times == first) {
        first
    } else {
        0
    }
}

/// The rule, the cost, the quota and the parameters of the algorithm, and of a refund what stays of the charge; or the same of bans,
/// with their length as the cost.
fn write_entry(buffer: &mut BytesMut, operation: Operation, entry: Entry<'_>) {
    match entry {
        Entry::Count(charge) => {
            let limit = charge.limit();
            if let Some(line) = charge.line_for(operation) {
                write_word(buffer, "line");
                let leads = u64::from(line.leads.is_some()) + 2 * u64::from(line.leads_elsewhere);
                write_numbers(buffer, [line.longest_us]);
                buffer.put_f64_le(line.leads.map_or(line.ahead as f64, |known| known as f64));
                write_numbers(buffer, [line.number, limit.cycle_us(), leads]);
            }
            write_word(buffer, RULES[rule_of(limit)].0);
            write_numbers(buffer, [charge.cost(), limit.quota()]);
            write_numbers(buffer, parameters(limit, charge.lease));
            if let Operation::Refund { .. } = operation {
                write_numbers(buffer, [charge.kept]);
            }
        }
        Entry::Bans(_, ban) => {
            let length = if let Operation::Ban { length } = operation {
                length
            } else {
                Duration::ZERO
            };
            let length_us = u64::try_from(length.as_micros()).unwrap_or(MAX_QUOTA).min(MAX_QUOTA);
            write_word(buffer, Ban::NAME);
            write_numbers(buffer, [length_us, ban.quota()]);
            write_numbers(buffer, ban.lengths_us());
        }
    }
}

/// The process of requests that wait, how many of them stand in the line of a charge and one more, and their arrivals and costs.
fn write_waiting(buffer: &mut BytesMut, waiting: Option<&[Arrival]>) {
    let count = waiting.map_or(0, |waiting| waiting.len() as u64 + 1);
    write_numbers(buffer, [LeaseId::process(), count]);
    for Arrival { at, weight } in waiting.unwrap_or_default() {
        write_numbers(buffer, [*at, *weight]);
    }
}

fn operation_name(operation: Operation) -> &'static str {
    match operation {
        Operation::Check => "check",
        Operation::Wait => "wait",
        Operation::Charge => "charge",
        Operation::Peek => "peek",
        Operation::Reset => "reset",
        Operation::Refund { .. } => "refund",
        Operation::RenewLease => "renew",
        Operation::EndLease => "end",
        Operation::Ban { .. } => "ban",
    }
}

fn same_arguments(a: &MergedRequest<'_>, b: &MergedRequest<'_>) -> bool {
    let (a, b) = (a.request, b.request);
    let same = |(one, other): (&Charge, &Charge)| {
        // Each charge of slots has an id of its own.
        let is_held = one.limit().is_held();
        let bans = one.ban_for(a.operation) == other.ban_for(a.operation);
        let numbers = one.cost() == other.cost() && one.kept == other.kept;
        numbers && one.limit() == other.limit() && bans && one.line == other.line && !is_held
    };
    let is_same_kind = a.operation == b.operation && a.is_of_bans == b.is_of_bans;
    let is_same = is_same_kind && a.waiting.is_none() && b.waiting.is_none();
    is_same && a.charge_count() == b.charge_count() && a.charges().zip(b.charges()).all(same)
}

fn spans_slots(merged: &MergedRequest<'_>) -> bool {
    are_in_several_slots(merged.request.charges())
}

/// Writes a word and a zero byte.
fn write_word(buffer: &mut BytesMut, word: &str) {
    buffer.extend_from_slice(word.as_bytes());
    buffer.put_u8(0);
}

/// Writes numbers as little-endian doubles, which Lua computes with. They are exact below 2^53.
fn write_numbers(buffer: &mut BytesMut, numbers: impl IntoIterator<Item = u64>) {
    for number in numbers {
        buffer.put_f64_le(number as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Key, Limit, SlidingLog,
        store::{Charge, ChargeLine, Operation, StoreRequest, redis::request::OwnedRequest},
    };

    /// Words that end with a zero byte, and numbers.
    fn packed(words: &str, numbers: &[u64]) -> Vec<u8> {
        let numbers = numbers.iter().flat_map(|number| (*number as f64).to_le_bytes());
        words.bytes().chain(numbers).collect()
    }

    /// The first argument of the driver, without calendars.
    fn header(runs_before_keys: u64) -> Vec<u8> {
        packed("", &[0, MAX_EXACT, runs_before_keys])
    }

    fn call_of(merged: &[MergedRequest<'_>]) -> ScriptCall {
        ScriptCall::new(merged, &KeyFormat::new("quota", None), false, 0)
    }

    fn request(charges: &[Charge]) -> OwnedRequest {
        let request = StoreRequest::new(Operation::Check, charges);
        request.to_owned(|_| {})
    }

    #[test]
    fn checks_of_one_rule_have_a_script_of_their_own() {
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let request = request(&[Charge::new("p", &limit, &key, 3)]);
        let merged = MergedRequest {
            request: &request,
            times: 2,
        };
        let call = call_of(&[merged]);
        assert_eq!(call.script, ScriptName::Checks(0));
        assert_eq!(call.arguments[..], [packed("", &[2, 3, 5, 60_000_000, 0, 0])]);
    }

    #[test]
    fn requests_with_equal_arguments_are_described_once() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let [on_a, on_b, expensive] =
            [(&a, 1), (&b, 1), (&b, 3)].map(|(key, cost)| request(&[Charge::new("p", &limit, key, cost)]));
        let merged = |request, times| MergedRequest { request, times };

        let call = call_of(&[merged(&on_a, 1), merged(&on_b, 1), merged(&expensive, 1)]);
        let on_a_and_b = ["quota:1:log/1min:p:{key=a}", "quota:1:log/1min:p:{key=b}"];
        assert_eq!(call.keys[..], [on_a_and_b[0], on_a_and_b[1], on_a_and_b[1]]);
        let charge = |times, cost| packed("", &[times, cost, 5, 60_000_000, 0, 0]);
        let layout = |numbers: &[u64]| packed("", numbers);
        assert_eq!(
            call.arguments[..],
            [charge(1, 1), layout(&[2, 0]), charge(1, 3), layout(&[1, 0])]
        );

        let call = call_of(&[merged(&on_a, 1), merged(&on_b, 30)]);
        assert_eq!(call.keys[..], on_a_and_b);
        assert_eq!(call.arguments[..], [charge(0, 1), layout(&[2, 0, 1, 30])]);
    }

    #[test]
    fn other_requests_with_equal_arguments_are_described_once() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let requests = [&a, &b].map(|key| {
            let charges = [Charge::new("p", &limit, key, 1)];
            StoreRequest::new(Operation::Charge, &charges).to_owned(|_| {})
        });
        let merged = [(0, 1), (1, 30)].map(|(index, times)| MergedRequest {
            request: &requests[index],
            times,
        });
        let call = call_of(&merged);
        assert_eq!(call.script, ScriptName::DriverOf(0));
        let charge = packed("log\0", &[1, 5, 60_000_000, 0, 0]);
        let run = [packed("charge\0", &[2, 1, 0, 0]), charge, packed("", &[1, 30])];
        assert_eq!(call.arguments[..], [header(0), run.concat()]);
    }

    #[test]
    fn bans_come_before_the_count_and_alone_with_a_length() {
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let ban = Ban::after(3, Duration::from_secs(60));
        let charges = [Charge::new("p", &limit, &key, 1).ban(&ban)];
        let of = |operation| {
            let request = StoreRequest::new(operation, &charges).to_owned(|_| {});
            let merged = MergedRequest {
                request: &request,
                times: 1,
            };
            call_of(&[merged])
        };
        let bans = |length_us| packed("ban\0", &[length_us, 3, 60_000_000, 60_000_000, 86_400_000_000]);
        let keys = ["quota:1:ban:p:{key=a}", "quota:1:log/1min:p:{key=a}"];

        let check = of(Operation::Check);
        assert_eq!(check.keys[..], keys);
        let count = packed("log\0", &[1, 5, 60_000_000, 0, 0]);
        assert_eq!(
            check.arguments[..],
            [header(0), [packed("check\0", &[1, 2, 1, 0]), bans(0), count].concat()]
        );

        let length = Duration::from_secs(9);
        let ban = of(Operation::Ban { length });
        assert_eq!(ban.keys[..], keys[..1]);
        assert_eq!(
            ban.arguments[..],
            [header(0), [packed("ban\0", &[1, 1, 1, 0]), bans(9_000_000)].concat()]
        );

        assert_eq!(of(Operation::Charge).keys[..], keys[1..], "which regards no bans");
    }

    #[test]
    fn the_keys_of_a_call_across_slots_are_arguments() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let both = [&a, &b].map(|key| Charge::new("p", &limit, key, 1));
        let requests = [&both[..1], &both[1..], &both[..]].map(request);
        let merged = requests.each_ref().map(|request| MergedRequest { request, times: 1 });
        let [key_of_a, key_of_b] =
            ["quota:1:log/1min:p:{key=a}", "quota:1:log/1min:p:{key=b}"].map(|key| key.as_bytes().to_vec());

        let call = ScriptCall::new(&merged, &KeyFormat::new("quota", None), true, 0);
        assert!(call.is_across);
        assert!(call.keys.iter().eq([&key_of_a]));
        assert_eq!(
            call.script,
            ScriptName::DriverOf(0),
            "a request has keys in several slots"
        );
        let charge = packed("log\0", &[1, 5, 60_000_000, 0, 0]);
        let arguments = [
            header(2),
            [packed("check\0", &[2, 1, 1, 0]), charge.clone()].concat(),
            [packed("check\0", &[1, 2, 1, 1]), charge.clone(), charge].concat(),
            key_of_a.clone(),
            key_of_b.clone(),
            key_of_a.clone(),
            key_of_b.clone(),
        ];
        assert_eq!(call.arguments[..], arguments);

        let key_format = KeyFormat::new("quota", None);
        let call = ScriptCall::new(&merged[..2], &key_format, true, 0);
        assert_eq!(call.script, ScriptName::Checks(0));
        let charge = packed("", &[1, 1, 5, 60_000_000, 0, 0]);
        let arguments = [charge, packed("", &[2, 2]), key_of_a, key_of_b];
        assert_eq!(call.arguments[..], arguments);

        let call = ScriptCall::new(&merged[..1], &key_format, true, 0);
        assert!(!call.is_across && call.keys.len() == 1, "all keys are in one slot");
    }

    /// The number of its line is the one that is woken.
    #[test]
    fn checks_of_two_lines_are_described_apart() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let requests = [("a", 1), ("b", 2)].map(|(key, number)| {
            let line = ChargeLine {
                number,
                longest_us: 1,
                ahead: 0,
                leads: None,
                leads_elsewhere: false,
            };
            request(&[Charge::new("p", &limit, &Key::from(key), 1).in_line(Some(line))])
        });
        let merged = requests.each_ref().map(|request| MergedRequest { request, times: 1 });
        let call = call_of(&merged);
        assert_eq!(call.arguments.len(), 3, "the header, and one for each");
    }

    #[test]
    fn refunds_that_leave_other_amounts_are_described_apart() {
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let requests = [1, 2].map(|kept| {
            let admitted_at = Duration::from_secs(9);
            let charge = Charge::new("p", &limit, &key, 1).keeping(kept);
            StoreRequest::new(Operation::Refund { admitted_at }, [&charge]).to_owned(|_| {})
        });
        let merged = requests.each_ref().map(|request| MergedRequest { request, times: 1 });
        let call = call_of(&merged);
        assert_eq!(call.arguments.len(), 3, "the header, and one for each");
    }
}
