//! The arguments of a script call, read back.

use std::{collections::HashSet, time::Duration};

use bytes::Bytes;

use super::caller::hourly;
use crate::{
    Ban, Concurrency, FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket,
    limit::Arrival,
    store::{
        ChargeLine, LeaseId, Operation,
        redis::{
            call::ScriptCall,
            key_format::slot_of,
            script::{RULES, ScriptName},
        },
    },
};

/// A request that the script reads from its arguments.
pub(super) struct ParsedRequest {
    pub(super) operation: Operation,
    pub(super) times: u64,
    /// The number of its keys, without those of lines.
    pub(super) keys: usize,
    pub(super) charges: Vec<ParsedCharge>,
    /// The requests that stand in a line, of which the first are decided.
    pub(super) waiting: Option<Vec<Arrival>>,
    /// Whether its keys lie in several slots.
    pub(super) spans: bool,
}

#[derive(Clone)]
pub(super) struct ParsedCharge {
    pub(super) limit: Limit,
    pub(super) cost: u64,
    pub(super) ban: Option<Ban>,
    pub(super) line: Option<ChargeLine>,
    pub(super) lease: Option<LeaseId>,
}

/// What is left of an argument.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn word(&mut self) -> String {
        let end = self.0.iter().position(|byte| *byte == 0).expect("the end of a word");
        let (word, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        String::from_utf8(word.to_vec()).expect("text")
    }

    fn double(&mut self) -> f64 {
        let (number, rest) = self.0.split_first_chunk().expect("eight bytes");
        self.0 = rest;
        f64::from_le_bytes(*number)
    }

    fn number(&mut self) -> u64 {
        self.double() as u64
    }

    fn numbers<const N: usize>(&mut self) -> [u64; N] {
        [(); N].map(|()| self.number())
    }
}

/// The keys and arguments of a call, as a server receives them.
#[derive(Clone)]
pub(super) struct ReceivedCall {
    pub(super) keys: Vec<String>,
    script: ScriptName,
    arguments: Vec<Bytes>,
    /// Whether the keys lie in several slots, and are arguments.
    pub(super) is_across: bool,
}

impl ReceivedCall {
    pub(super) fn new(call: &ScriptCall) -> Self {
        let mut arguments = call.arguments.to_vec();
        let runs_before_keys = match (call.script, &*arguments) {
            (_, []) => 0,
            (ScriptName::Checks(_), [_]) => 0,
            // The number of arguments before the keys.
            (ScriptName::Checks(_), [_, layout, ..]) => (Reader(layout).numbers::<2>()[1] as usize).saturating_sub(1),
            (_, arguments) => Reader(&arguments[0]).numbers::<3>()[2] as usize,
        };
        let keys = match runs_before_keys {
            0 => call.keys.to_vec(),
            runs => arguments.split_off(1 + runs),
        };
        let keys = keys.iter().map(|key| String::from_utf8_lossy(key).into_owned());
        Self {
            keys: keys.collect(),
            script: call.script,
            arguments,
            is_across: runs_before_keys > 0,
        }
    }

    /// Whether a node to which their slot is moving executes it only if it has all of them.
    pub(super) fn has_several_keys(&self) -> bool {
        !self.is_across && self.keys.iter().any(|key| *key != self.keys[0])
    }

    /// That all keys lie on one node, and those of this request in one slot unless the call says otherwise.
    pub(super) fn verify_slots(&self, keys: &[String], request: &ParsedRequest) {
        let slots = |keys: &[String]| {
            keys.iter()
                .map(|key| usize::from(slot_of(key.as_bytes())))
                .collect::<HashSet<_>>()
        };
        let nodes: HashSet<_> = slots(&self.keys).into_iter().map(|slot| slot % NODES).collect();
        assert_eq!((slots(keys).len() > 1, nodes.len()), (request.spans, 1), "{keys:?}");
    }

    /// The requests of a call; `None` if the windows of calendars do not enclose the time.
    pub(super) fn requests(&self, now: u64) -> Option<Vec<ParsedRequest>> {
        if let ScriptName::Checks(rule) = self.script {
            return Some(parse_checks(RULES[rule].0, &self.arguments, now));
        }
        let [header, runs @ ..] = &*self.arguments else {
            return None;
        };
        let [from, until, _] = Reader(header).numbers();
        (from..until).contains(&now).then(|| parse_requests(runs, now))
    }
}

/// The nodes of a cluster, each with a quarter of the slots.
pub(super) const NODES: usize = 4;

/// Whether the slot of a key is among those that have moved in this call.
pub(super) fn has_moved(number: usize, key: &str) -> bool {
    (usize::from(slot_of(key.as_bytes())) / NODES + number).is_multiple_of(2)
}

/// The checks of a call of one rule.
fn parse_checks(rule: &str, runs: &[Bytes], now: u64) -> Vec<ParsedRequest> {
    let mut requests = Vec::new();
    for run in runs.chunks(2) {
        let (mut argument, mut callers, mut charges) = (Reader(&run[0]), 0, Vec::new());
        while !argument.0.is_empty() {
            callers = argument.number();
            charges.push(parse_charge(rule, &mut argument, Operation::Check, now));
        }
        let mut layout = run.get(1).map(|layout| Reader(layout));
        let count = layout.as_mut().map_or(1, |layout| layout.numbers::<2>()[0]);
        for _ in 0..count {
            let number = layout.as_mut().filter(|_| callers == 0).map(Reader::number);
            requests.push(ParsedRequest {
                operation: Operation::Check,
                times: number.unwrap_or(callers),
                keys: charges.len(),
                charges: charges.clone(),
                waiting: None,
                spans: false,
            });
        }
    }
    requests
}

fn parse_requests(runs: &[Bytes], now: u64) -> Vec<ParsedRequest> {
    let mut requests = Vec::new();
    for run in runs {
        let mut run = Reader(run);
        let operation = run.word();
        let [count, size, times, spans] = run.numbers();
        let operation = match &*operation {
            "check" => Operation::Check,
            "wait" => Operation::Wait,
            "charge" => Operation::Charge,
            "peek" => Operation::Peek,
            "reset" => Operation::Reset,
            "refund" => Operation::Refund {
                admitted_at: Duration::from_micros(run.number()),
            },
            "renew" => Operation::RenewLease,
            "end" => Operation::EndLease,
            _ => panic!("{operation} is not an operation"),
        };
        let waiting = match operation {
            Operation::Wait | Operation::Peek => read_waiting(&mut run),
            _ => None,
        };
        let mut ban = None;
        let charges = (0..size).filter_map(|_| charge(&mut run, &mut ban, operation, now));
        let charges: Vec<_> = charges.collect();
        for _ in 0..count {
            requests.push(ParsedRequest {
                operation,
                times: if times > 0 { times } else { run.number() },
                keys: size as usize,
                charges: charges.clone(),
                waiting: waiting.clone(),
                spans: spans == 1,
            });
        }
        assert!(run.0.is_empty(), "{} bytes are left", run.0.len());
    }
    requests
}

/// The requests that stand in a line; `None` for one that has just arrived.
fn read_waiting(run: &mut Reader<'_>) -> Option<Vec<Arrival>> {
    let [_process, count] = run.numbers();
    let arrival = |[at, weight]: [u64; 2]| Arrival { at, weight };
    (count > 0).then(|| (1..count).map(|_| arrival(run.numbers())).collect())
}

/// The next charge; `None` for its bans, which come before it.
fn charge(run: &mut Reader<'_>, bans: &mut Option<Ban>, operation: Operation, now: u64) -> Option<ParsedCharge> {
    let (mut algorithm, mut line) = (run.word(), None);
    if algorithm == "line" {
        let (longest_us, ahead) = (run.number(), run.double() as i64);
        let [number, _cycle, leads] = run.numbers();
        line = Some(ChargeLine {
            number,
            longest_us,
            ahead: if leads == 1 { 0 } else { ahead },
            leads: (leads == 1).then_some(ahead as u64),
            leads_elsewhere: leads == 2,
        });
        algorithm = run.word();
    }
    if algorithm == "ban" {
        let [_length, quota, span, first, longest] = run.numbers();
        let window = Duration::from_micros;
        let ban = Ban::after(quota, window(span));
        *bans = Some(ban.first(window(first)).longest(window(longest)));
        return None;
    }
    let charge = parse_charge(&algorithm, run, operation, now);
    Some(ParsedCharge {
        ban: bans.take(),
        line,
        ..charge
    })
}

/// The cost, the quota and the numbers of a charge of this rule.
fn parse_charge(rule: &str, run: &mut Reader<'_>, operation: Operation, now: u64) -> ParsedCharge {
    let [cost, quota] = run.numbers();
    let parameters = run.numbers();
    if let Operation::Refund { .. } = operation {
        let _kept = run.number();
    }
    let window = Duration::from_micros;
    let mut lease = None;
    let limit: Limit = match (rule, parameters) {
        ("log", [span, 0, 0]) => SlidingLog::new(quota, window(span)).into(),
        ("precise", [span, grain, 0]) => {
            let log = SlidingLog::new(quota, window(span));
            log.precision(span.div_ceil(grain) as u32).into()
        }
        ("counter", [span, _, _]) => SlidingCounter::new(quota, window(span)).into(),
        ("bucket", [rate, period, _]) => TokenBucket::new(rate, window(period)).burst(quota).into(),
        ("fixed", [0, 0, 0]) => {
            let boundaries: [u64; 5] = run.numbers();
            assert!((boundaries[0]..boundaries[3]).contains(&now), "{boundaries:?}");
            hourly(quota)
        }
        ("fixed", [span, 1, 0]) => FixedWindow::new(quota, window(span)).into(),
        ("fixed", [span, 0, 0]) => FixedWindow::new(quota, window(span)).aligned().into(),
        ("concurrency", [length, high, low]) => {
            lease = LeaseId::of_parts([high, low]);
            Concurrency::new(quota).lease(window(length)).into()
        }
        (_, parameters) => panic!("{rule} {parameters:?} is not a limit"),
    };
    ParsedCharge {
        limit,
        cost,
        ban: None,
        line: None,
        lease,
    }
}
