use std::{fmt::Write, sync::LazyLock, time::Duration};

use bytes::Bytes;
use smallvec::SmallVec;

use crate::{
    FixedWindow, Limit,
    key::Secret,
    store::{
        Answer, Charge, ErrorKind, Operation, Outcome, Request, StoreError, Verdict,
        fold::{Folded, Folds, fold},
    },
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
    include_str!("../../../lua/sliding_counter.lua"),
    include_str!("../../../lua/fixed_window.lua"),
    include_str!("../../../lua/token_bucket.lua"),
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
    /// For each request, which of its keys each charge is on.
    shape: SmallVec<[Folds; 1]>,
    /// Where the boundaries of calendar windows stand among the arguments.
    calendars: Vec<(usize, FixedWindow)>,
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
    /// A call for these requests, where `guess` is about the time that Redis has.
    pub(super) fn new(names: &Names, requests: &[Request<'_>], guess: u64) -> Self {
        let mut call = Self {
            keys: SmallVec::new(),
            arguments: SmallVec::new(),
            shape: SmallVec::new(),
            calendars: Vec::new(),
        };

        let mut limits: SmallVec<[&Limit; 4]> = SmallVec::new();
        for charge in requests.iter().flat_map(|request| request.charges()) {
            if !limits.contains(&charge.limit()) {
                limits.push(charge.limit());
            }
        }
        call.number(limits.len() as u64);
        for limit in &limits {
            call.limit(limit, guess);
        }

        let folded: SmallVec<[Folded<'_>; 1]> = requests.iter().map(fold).collect();
        // Requests that differ in nothing but their keys are described once.
        for run in folded.chunk_by(same_shape) {
            let Some(first) = run.first() else { continue };
            call.word(operation_name(first.operation));
            call.number(run.len() as u64);
            call.number(1);
            call.number(first.charges.len() as u64);
            for charge in &first.charges {
                let position = limits
                    .iter()
                    .position(|limit| *limit == charge.limit())
                    .unwrap_or_default();
                call.number(position as u64 + 1);
                call.number(charge.cost());
            }
            if let Operation::Refund { admitted_at } = first.operation {
                call.number(admitted_at.as_micros() as u64);
            }
            call.keys.extend(
                run.iter()
                    .flat_map(|request| &request.charges)
                    .map(|charge| names.redis_key(charge)),
            );
        }
        call.shape.extend(folded.into_iter().map(|request| request.folds));
        call
    }

    /// The time of Redis, if the guess was so far off that nothing was decided.
    pub(super) fn missed(&self, items: &[Item]) -> Option<u64> {
        match items {
            [Item::Number(now)] if !self.calendars.is_empty() => u64::try_from(*now).ok(),
            _ => None,
        }
    }

    /// Guesses again.
    pub(super) fn guess(&mut self, now: u64) {
        for (position, window) in &self.calendars {
            let boundaries = window.boundaries(now).into_iter().flatten();
            for (argument, boundary) in self.arguments[*position..].iter_mut().zip(boundaries) {
                *argument = Argument::Number(boundary);
            }
        }
    }

    fn word(&mut self, word: &'static str) {
        self.arguments.push(Argument::Word(word));
    }

    fn number(&mut self, number: u64) {
        self.arguments.push(Argument::Number(number));
    }

    fn numbers(&mut self, numbers: impl IntoIterator<Item = u64>) {
        self.arguments.extend(numbers.into_iter().map(Argument::Number));
    }

    fn limit(&mut self, limit: &Limit, guess: u64) {
        self.word(limit.algorithm());
        match limit {
            Limit::SlidingLog(log) => self.numbers([log.quota(), log.window_us(), log.grain()]),
            Limit::SlidingCounter(counter) => {
                self.numbers([counter.quota(), counter.window_us(), counter.tick(), counter.cap()]);
            }
            Limit::FixedWindow(fixed) => {
                let (window, aligned) = fixed.length().unwrap_or((0, true));
                let boundaries = fixed.boundaries(guess);
                let count = boundaries.map_or(0, |boundaries| boundaries.len() as u64);
                self.numbers([fixed.quota(), window, u64::from(!aligned), count]);
                if let Some(boundaries) = boundaries {
                    self.calendars.push((self.arguments.len(), fixed.clone()));
                    self.numbers(boundaries);
                }
            }
            Limit::TokenBucket(bucket) => {
                let (rate, period) = bucket.reduced();
                self.numbers([bucket.quota(), rate, period, bucket.cap()]);
            }
            Limit::Unlimited | Limit::DenyAll => {}
        }
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

fn same_shape(a: &Folded<'_>, b: &Folded<'_>) -> bool {
    let alike = |(a, b): (&Charge<'_>, &Charge<'_>)| a.cost() == b.cost() && a.limit() == b.limit();
    a.operation == b.operation && a.charges.len() == b.charges.len() && a.charges.iter().zip(&b.charges).all(alike)
}

/// How the keys of a store are named.
#[derive(Clone)]
pub(super) struct Names {
    pub(super) prefix: Box<str>,
    pub(super) secret: Option<Secret>,
}

impl Names {
    /// `quota:1:log:say-hi:{ip=203.0.113.7|path=/hello/sayHi}`
    ///
    /// The braces are the hash tag of Redis Cluster: all policies of one subject lie in one slot. Nothing within them, nor
    /// before them, can hold a brace.
    fn redis_key(&self, charge: &Charge<'_>) -> Bytes {
        let (prefix, algorithm, policy) = (&self.prefix, charge.limit().algorithm(), charge.policy());
        let hashed = self.secret.as_ref().map(|secret| charge.key().hashed(secret));
        let subject = hashed.as_ref().unwrap_or(charge.key()).as_str();

        let mut key = String::with_capacity(prefix.len() + algorithm.len() + policy.len() + subject.len() + 8);
        let _ = write!(key, "{prefix}:{LAYOUT}:{algorithm}:{policy}:{{{subject}}}");
        key.into()
    }
}

impl Call {
    /// Reads a reply: the time, then for each request how many are admitted, and for each key three numbers.
    pub(super) fn decode(&self, items: &[Item]) -> Result<Answer, StoreError> {
        let mut items = items.iter();
        let mut number = || match items.next() {
            Some(Item::Number(number)) => u64::try_from(*number).map_err(|_| malformed()),
            None => Err(malformed()),
        };

        let server_time = Duration::from_micros(number()?);
        let mut outcomes = SmallVec::<[Outcome; 1]>::with_capacity(self.shape.len());
        for folds in &self.shape {
            let allowed = number()? > 0;
            let mut verdicts = SmallVec::<[Verdict; 1]>::new();
            for _ in 0..folds.keys() {
                let remaining = number()?;
                let wait = number()?;
                let reset_after = Duration::from_micros(number()?);
                verdicts.push(Verdict::new(
                    remaining,
                    (wait > 0).then(|| Duration::from_micros(wait)),
                    reset_after,
                ));
            }
            // Whoever is denied is told why, and nobody else.
            if allowed == verdicts.iter().any(|verdict| verdict.retry_after.is_some()) {
                return Err(malformed());
            }
            outcomes.push(Outcome::new(allowed, folds.unfold(&verdicts)));
        }

        match items.next() {
            None => Ok(Answer::new(server_time, outcomes)),
            Some(_) => Err(malformed()),
        }
    }
}

fn malformed() -> StoreError {
    StoreError::new(ErrorKind::Protocol, "the reply of Redis is not one of this script")
}

#[cfg(test)]
mod tests {
    use proptest::{
        prelude::{ProptestConfig, any, prop_assert_eq, proptest},
        sample,
    };

    use super::*;
    use crate::{FixedWindow, Key, Policy, SlidingLog};

    fn names() -> Names {
        Names {
            prefix: "quota".into(),
            secret: None,
        }
    }

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

        let call = Call::new(&names(), &requests, 0);

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
        assert_eq!(
            arguments.join(" "),
            "1 log 5 60000000 0 check 2 1 1 1 1 check 1 1 1 1 3"
        );
    }

    #[test]
    fn charges_on_one_key_are_added_up_and_share_a_verdict() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let charges = [
            Charge::new("p", &limit, &a, 1),
            Charge::new("p", &limit, &b, 1),
            Charge::new("p", &limit, &a, 2),
        ];

        let call = Call::new(&names(), &[Request::new(Operation::Check, &charges)], 0);
        assert_eq!(call.keys.len(), 2);

        let answer = call.decode(&[9, 1, 2, 0, 60, 4, 0, 70].map(Item::Number)).unwrap();
        let remaining: Vec<_> = answer.outcomes[0]
            .verdicts
            .iter()
            .map(|verdict| verdict.remaining)
            .collect();
        assert_eq!(remaining, [2, 4, 2]);
    }

    #[test]
    fn a_reply_of_another_shape_is_an_error() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let key = Key::from("a");
        let call = Call::new(
            &names(),
            &[Request::new(Operation::Check, &[Charge::new("p", &limit, &key, 1)])],
            0,
        );

        let good = [1_000_000, 1, 4, 0, 60_000_000].map(Item::Number);
        assert!(call.decode(&good).is_ok());
        let negative = [1, 1, -4, 0, 0].map(Item::Number);
        let long = [1, 1, 4, 0, 0, 0].map(Item::Number);
        for bad in [&good[..4], &good[..1], &[], &negative, &long] {
            assert_eq!(call.decode(bad).unwrap_err().kind(), ErrorKind::Protocol);
        }
    }

    /// The prefix, the algorithm, the policy and the subject, read back from a Redis key.
    fn read_back(redis_key: &str) -> Option<(String, String, String, String)> {
        let (name, subject) = redis_key.strip_suffix('}')?.split_once(":{")?;
        let mut parts = name.rsplitn(4, ':').map(str::to_owned);
        let (policy, algorithm, layout, prefix) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        (layout == LAYOUT.to_string()).then_some((prefix, algorithm, policy, subject.to_owned()))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        #[test]
        fn a_redis_key_has_one_tag_and_can_be_read_back(
            prefix in "[A-Za-z0-9._:-]{1,12}|quota:1:log:a|1:log:a:1|:::",
            policy in "[a-z][a-z0-9_.-]{0,8}",
            name in ".{0,6}",
            value in any::<Vec<u8>>(),
            path in "[/{}|=^:]{0,9}|\\PC{0,9}",
            limit in sample::select(vec![Limit::from(SlidingLog::per_minute(5)), FixedWindow::per_minute(5).into()]),
            secret in proptest::option::of(any::<[u8; 4]>()),
        ) {
            assert!(Policy::try_new(policy.clone(), limit.clone()).is_ok());
            let names = Names { prefix: prefix.clone().into(), secret: secret.map(Secret::new) };
            let key = Key::header(&name, value).and(Key::path(&path)).bounded();

            let redis_key = names.redis_key(&Charge::new(&policy, &limit, &key, 1));
            let redis_key = std::str::from_utf8(&redis_key).unwrap();

            prop_assert_eq!(redis_key.matches('{').count(), 1);
            prop_assert_eq!(redis_key.matches('}').count(), 1);
            let subject = names.secret.as_ref().map_or(key.clone(), |secret| key.hashed(secret)).to_string();
            let parts = (prefix, limit.algorithm().to_owned(), policy, subject);
            prop_assert_eq!(read_back(redis_key), Some(parts));
        }
    }
}
