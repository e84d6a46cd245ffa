use std::{fmt::Write, sync::LazyLock, time::Duration};

use bytes::Bytes;
use smallvec::SmallVec;

use crate::{
    Limit,
    store::{Answer, Charge, ErrorKind, Operation, Outcome, Request, StoreError, Verdict},
};

/// A script, and what Redis knows it by.
pub(super) struct Script {
    pub(super) source: &'static str,
    pub(super) sha1: String,
}

/// The script of the store.
pub(super) static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(SOURCE));

const SOURCE: &str = concat!(
    include_str!("../../../lua/prelude.lua"),
    include_str!("../../../lua/sliding_log.lua"),
    include_str!("../../../lua/driver.lua"),
);

impl Script {
    fn new(source: &'static str) -> Self {
        Self {
            source,
            sha1: sha1_smol::Sha1::from(source).hexdigest(),
        }
    }

    /// The script for tests that hand the clock in: it reads the microseconds that a Redis key holds, and its keys live
    /// an hour longer than they matter, since the time in the test is not that of Redis.
    pub(super) fn with_clock_in(key: &str) -> &'static Self {
        let source = SOURCE
            .replacen("call('TIME')", &format!("{{ '0', call('GET', '{key}') }}"), 1)
            .replacen("(us + SLACK)", "(us + 3600000000)", 1);
        Box::leak(Box::new(Self::new(source.leak())))
    }
}

/// The version of what lies in Redis, part of every key.
const LAYOUT: u32 = 1;

/// How the script is named to Redis.
#[derive(Clone, Copy, Debug)]
pub(super) enum Program {
    /// By its hash.
    Known,
    /// By its text, which Redis remembers.
    Taught,
}

/// A call of the script: what it is given, and what its reply will look like.
pub(super) struct Call {
    pub(super) keys: SmallVec<[Bytes; 1]>,
    pub(super) arguments: SmallVec<[Argument; 16]>,
    shape: SmallVec<[usize; 1]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Argument {
    Word(&'static str),
    Number(u64),
}

/// An element of the script's reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Number(i64),
}

impl Call {
    pub(super) fn new(prefix: &str, requests: &[Request<'_>]) -> Self {
        let mut call = Self {
            keys: SmallVec::new(),
            arguments: SmallVec::new(),
            shape: SmallVec::new(),
        };

        let mut limits: SmallVec<[&Limit; 4]> = SmallVec::new();
        for charge in requests.iter().flat_map(|request| request.charges()) {
            if !limits.contains(&charge.limit()) {
                limits.push(charge.limit());
            }
        }
        call.number(limits.len() as u64);
        for limit in &limits {
            call.limit(limit);
        }

        // Requests that differ in nothing but their keys are described once.
        for run in requests.chunk_by(|a, b| same_shape(a, b)) {
            let Some(request) = run.first() else { continue };
            call.word(operation_name(request.operation()));
            call.number(run.len() as u64);
            call.number(1);
            call.number(request.charges().len() as u64);
            for charge in request.charges() {
                let position = limits
                    .iter()
                    .position(|limit| *limit == charge.limit())
                    .unwrap_or_default();
                call.number(position as u64 + 1);
                call.number(charge.cost());
            }
            for request in run {
                call.keys
                    .extend(request.charges().iter().map(|charge| redis_key(prefix, charge)));
                call.shape.push(request.charges().len());
            }
        }
        call
    }

    /// How many charges each request has.
    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn word(&mut self, word: &'static str) {
        self.arguments.push(Argument::Word(word));
    }

    fn number(&mut self, number: u64) {
        self.arguments.push(Argument::Number(number));
    }

    fn limit(&mut self, limit: &Limit) {
        self.word(limit.algorithm());
        match limit {
            Limit::SlidingLog(log) => {
                self.number(log.quota());
                self.number(log.window_us());
            }
        }
    }
}

fn operation_name(operation: Operation) -> &'static str {
    match operation {
        Operation::Check => "check",
        Operation::Charge => "charge",
        Operation::Peek => "peek",
        Operation::Reset => "reset",
    }
}

fn same_shape(a: &Request<'_>, b: &Request<'_>) -> bool {
    let shape = |charge: &Charge<'_>| charge.cost();
    a.operation() == b.operation()
        && a.charges().iter().map(shape).eq(b.charges().iter().map(shape))
        && a.charges()
            .iter()
            .map(Charge::limit)
            .eq(b.charges().iter().map(Charge::limit))
}

/// `quota:1:log:say-hi:{ip=203.0.113.7|path=/hello/sayHi}`
///
/// The braces are the hash tag of Redis Cluster: all policies of one subject lie in one slot. Nothing within them, nor
/// before them, can hold a brace.
fn redis_key(prefix: &str, charge: &Charge<'_>) -> Bytes {
    let (algorithm, policy, subject) = (charge.limit().algorithm(), charge.policy(), charge.key().as_str());
    let mut key = String::with_capacity(prefix.len() + algorithm.len() + policy.len() + subject.len() + 8);
    let _ = write!(key, "{prefix}:{LAYOUT}:{algorithm}:{policy}:{{{subject}}}");
    key.into()
}

/// Reads a reply: the time, then for each request how many are admitted, and for each charge three numbers.
pub(super) fn decode(items: &[Item], shape: &[usize]) -> Result<Answer, StoreError> {
    let mut items = items.iter();
    let mut number = || match items.next() {
        Some(Item::Number(number)) => u64::try_from(*number).map_err(|_| malformed()),
        None => Err(malformed()),
    };

    let server_time = Duration::from_micros(number()?);
    let mut outcomes = SmallVec::<[Outcome; 1]>::with_capacity(shape.len());
    for charges in shape {
        let allowed = number()? > 0;
        let mut verdicts = SmallVec::<[Verdict; 1]>::with_capacity(*charges);
        for _ in 0..*charges {
            let remaining = number()?;
            let wait = number()?;
            let reset_after = Duration::from_micros(number()?);
            verdicts.push(Verdict::new(
                remaining,
                (wait > 0).then(|| Duration::from_micros(wait)),
                reset_after,
            ));
        }
        outcomes.push(Outcome::new(allowed, verdicts));
    }

    match items.next() {
        None => Ok(Answer::new(server_time, outcomes)),
        Some(_) => Err(malformed()),
    }
}

fn malformed() -> StoreError {
    StoreError::new(ErrorKind::Protocol, "the reply of Redis is not one of this script")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Key, SlidingLog};

    #[test]
    fn requests_that_look_alike_are_described_once() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let (on_a, on_b, dear) = (
            [Charge::new("p", &limit, &a, 1)],
            [Charge::new("p", &limit, &b, 1)],
            [Charge::new("p", &limit, &b, 3)],
        );
        let requests = [&on_a, &on_b, &dear].map(|charges: &[Charge<'_>; 1]| Request::new(Operation::Check, charges));

        let call = Call::new("quota", &requests);

        let keys: Vec<_> = call.keys.iter().map(|key| std::str::from_utf8(key).unwrap()).collect();
        assert_eq!(
            keys,
            [
                "quota:1:log:p:{key=a}",
                "quota:1:log:p:{key=b}",
                "quota:1:log:p:{key=b}"
            ]
        );
        let arguments: Vec<_> = call
            .arguments
            .iter()
            .map(|argument| match argument {
                Argument::Word(word) => (*word).to_owned(),
                Argument::Number(number) => number.to_string(),
            })
            .collect();
        assert_eq!(arguments.join(" "), "1 log 5 60000000 check 2 1 1 1 1 check 1 1 1 1 3");
        assert_eq!(call.shape(), [1, 1, 1]);
    }

    #[test]
    fn a_reply_of_another_shape_is_an_error() {
        let good = [1_000_000, 1, 4, 0, 60_000_000].map(Item::Number);
        assert!(decode(&good, &[1]).is_ok());
        for bad in [
            &good[..4],
            &good[..1],
            &[],
            &[1, 1, -4, 0, 0].map(Item::Number),
            &[1, 1, 4, 0, 0, 0].map(Item::Number),
        ] {
            assert_eq!(decode(bad, &[1]).unwrap_err().kind(), ErrorKind::Protocol);
        }
    }
}
