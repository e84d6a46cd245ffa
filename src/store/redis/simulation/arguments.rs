//! The arguments of a script call, read back.

use std::time::Duration;

use bytes::Bytes;

use crate::{
    FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket,
    limit::Calendar,
    store::{ChargeRole, Operation},
};

/// A request that the script reads from its arguments.
pub(super) struct ParsedRequest {
    pub(super) operation: Operation,
    pub(super) times: u64,
    pub(super) charges: Vec<ParsedCharge>,
}

#[derive(Clone)]
pub(super) struct ParsedCharge {
    pub(super) limit: Limit,
    pub(super) cost: u64,
    pub(super) role: ChargeRole,
}

/// The requests in the arguments of a call; `None` if no window of a calendar encloses the time.
pub(super) fn parse_requests(arguments: &[Bytes], now: u64) -> Option<Vec<ParsedRequest>> {
    let mut words = arguments.iter().map(|argument| {
        std::str::from_utf8(argument)
            .expect("text")
            .split(' ')
            .collect::<Vec<_>>()
    });
    let mut requests = Vec::new();
    while let Some(run) = words.next() {
        let [operation, count, times, size, rest @ ..] = &run[..] else {
            panic!("{run:?} does not begin a run")
        };
        let operation = match (*operation, rest) {
            ("check", []) => Operation::Check,
            ("charge", []) => Operation::Charge,
            ("peek", []) => Operation::Peek,
            ("reset", []) => Operation::Reset,
            ("refund", [at]) => Operation::Refund {
                admitted_at: Duration::from_micros(number(at)),
            },
            _ => panic!("{run:?} is no operation"),
        };
        let size = number(size) as usize;
        let charges: Option<Vec<_>> = words.by_ref().take(size).map(|words| charge(&words, now)).collect();
        let charges = charges?;
        let times: Vec<_> = times.split(',').map(number).collect();
        for position in 0..number(count) as usize {
            requests.push(ParsedRequest {
                operation,
                times: times[position.min(times.len() - 1)],
                charges: charges.clone(),
            });
        }
    }
    Some(requests)
}

/// A limit, a cost and a role, as `log 1 5 60000000 0 checked`.
fn charge(words: &[&str], now: u64) -> Option<ParsedCharge> {
    let (role, words) = match words {
        [words @ .., "checked"] => (ChargeRole::CheckedOnly, words),
        [words @ .., "once"] => (ChargeRole::Once, words),
        _ => (ChargeRole::Counted, words),
    };
    let numbers: Vec<u64> = words[1..].iter().map(|word| number(word)).collect();
    let window = Duration::from_micros;
    let limit = match (words[0], &numbers[1..]) {
        ("log", [quota, span, 0]) => SlidingLog::new(*quota, window(*span)).into(),
        ("log", [quota, span, grain]) => SlidingLog::new(*quota, window(*span))
            .precision(span.div_ceil(*grain) as u32)
            .into(),
        ("counter", [quota, span, _, _]) => SlidingCounter::new(*quota, window(*span)).into(),
        ("bucket", [quota, rate, period, _]) => TokenBucket::new(*rate, window(*period)).burst(*quota).into(),
        ("fixed", [quota, span, 1]) => FixedWindow::new(*quota, window(*span)).into(),
        ("fixed", [quota, span, 0]) => FixedWindow::new(*quota, window(*span)).aligned().into(),
        ("fixed", [quota, 0, 0, boundaries @ ..]) => {
            if !(boundaries[0] <= now && now < boundaries[boundaries.len() - 1]) {
                return None;
            }
            FixedWindow::calendar(*quota, Calendar::Hour, "UTC").into()
        }
        _ => panic!("{words:?} is no limit"),
    };
    let cost = numbers[0];
    Some(ParsedCharge { limit, cost, role })
}

fn number(word: &str) -> u64 {
    word.parse().expect("a number")
}
