use std::{sync::LazyLock, time::Duration};

use bytes::{Bytes, BytesMut};
use smallvec::SmallVec;

use super::{
    ask::{Ask, Debit},
    link::Failure,
};
use crate::{
    Limit,
    store::{ChargeState, ErrorKind, Operation, Outcome, StoreError},
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
    include_str!("../../../lua/short_way.lua"),
    include_str!("../../../lua/common.lua"),
    include_str!("../../../lua/sliding_log.lua"),
    include_str!("../../../lua/sliding_counter.lua"),
    include_str!("../../../lua/fixed_window.lua"),
    include_str!("../../../lua/token_bucket.lua"),
    include_str!("../../../lua/trial.lua"),
    include_str!("../../../lua/driver.lua"),
);

impl Script {
    fn new(source: &'static str) -> Self {
        Self {
            source,
            sha1: sha1_smol::Sha1::from(source).hexdigest(),
        }
    }

    /// The script for tests that hand the clock in: it reads the microseconds that a Redis key holds, and its keys do not
    /// expire, since the time in the test is not that of Redis.
    pub(super) fn with_clock_in(key: &str) -> &'static Self {
        let source = SOURCE
            .replacen("call('TIME')", &format!("{{ '', call('GET', '{key}') }}"), 1)
            .replacen("(at + SLACK)", "(at + 4000000000000000)", 1);
        Box::leak(Box::new(Self::new(source.leak())))
    }
}

/// How the script is named to Redis.
#[derive(Clone, Copy, Debug)]
pub(super) enum Program {
    /// By its hash.
    Known,
    /// By its text, which Redis remembers.
    Taught,
}

/// What equal requests ask together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question<'a> {
    pub(super) ask: &'a Ask,
    /// How many there are.
    pub(super) times: u64,
}

/// A call of the script: what it is given, and what its reply will look like.
pub(super) struct Call {
    pub(super) keys: SmallVec<[Bytes; 1]>,
    pub(super) arguments: SmallVec<[Bytes; 2]>,
    /// For each question, how often it is asked and how many keys it has.
    shape: SmallVec<[(u64, usize); 1]>,
    /// The debits with windows of a calendar, and where they stand among the arguments.
    calendars: Vec<(usize, Debit)>,
}

/// What the script replies: little-endian doubles, and why requests failed.
#[derive(Clone, Debug, Default)]
pub(super) struct RawReply {
    pub(super) numbers: Bytes,
    pub(super) errors: Vec<String>,
}

impl RawReply {
    /// The numbers, then the errors.
    pub(super) fn from_texts(texts: impl IntoIterator<Item = Result<Bytes, Failure>>) -> Result<Self, Failure> {
        let mut texts = texts.into_iter();
        let numbers = texts.next().ok_or_else(malformed)??;
        let errors = texts.map(|text| Ok(String::from_utf8_lossy(&text?).into_owned()));
        Ok(Self {
            numbers,
            errors: errors.collect::<Result<_, Failure>>()?,
        })
    }
}

impl Call {
    /// A call that asks these questions, where `guess` is about the time that Redis has.
    pub(super) fn new(questions: &[Question<'_>], guess: u64) -> Self {
        let mut call = Self {
            keys: SmallVec::new(),
            arguments: SmallVec::new(),
            shape: questions
                .iter()
                .map(|question| (question.times, question.ask.debits.len()))
                .collect(),
            calendars: Vec::new(),
        };

        // All texts lie in one buffer.
        let debits = || questions.iter().flat_map(|question| &question.ask.debits);
        let length = debits().map(|debit| debit.key.len()).sum::<usize>();
        let mut texts = BytesMut::with_capacity(length + 256);
        call.keys.extend(debits().map(|debit| {
            texts.extend_from_slice(&debit.key);
            texts.split().freeze()
        }));
        // Questions that differ in nothing but their keys and how often they are asked are described once.
        for run in questions.chunk_by(same_shape) {
            let Some(first) = run.first() else { continue };
            write_words(&mut texts, operation_name(first.ask.operation), [run.len() as u64]);
            write_times(&mut texts, run, first.times);
            write_words(&mut texts, "", [first.ask.debits.len() as u64]);
            if let Operation::Refund { admitted_at } = first.ask.operation {
                write_words(&mut texts, "", [admitted_at.as_micros() as u64]);
            }
            call.arguments.push(texts.split().freeze());
            for debit in &first.ask.debits {
                if matches!(&debit.limit, Limit::FixedWindow(fixed) if fixed.length().is_none()) {
                    call.calendars.push((call.arguments.len(), debit.clone()));
                }
                write_debit(&mut texts, debit, guess);
                call.arguments.push(texts.split().freeze());
            }
        }
        call
    }

    /// A call that asks nothing, of the place where this key lies.
    pub(super) fn probe(key: Option<Bytes>) -> Self {
        let mut call = Self::new(&[], 0);
        call.keys.extend(key);
        call
    }

    /// A call that tries each command of the scripts on this key.
    pub(super) fn trial(key: Bytes) -> Self {
        let mut call = Self::probe(Some(key));
        call.arguments.push(Bytes::from_static(b"trial"));
        call
    }

    /// The time of Redis, if the guess was so far off that nothing was decided.
    pub(super) fn missed(&self, reply: &RawReply) -> Option<u64> {
        let mut numbers = numbers(&reply.numbers);
        match (numbers.next(), numbers.next()) {
            (Some(now), None) if !self.calendars.is_empty() => Some(now as u64),
            _ => None,
        }
    }

    /// Guesses again.
    pub(super) fn guess(&mut self, now: u64) {
        for (position, debit) in &self.calendars {
            let mut text = BytesMut::new();
            write_debit(&mut text, debit, now);
            self.arguments[*position] = text.freeze();
        }
    }
}

/// `log 1 5 60000000 0`: the algorithm, the cost, and what the algorithm reads.
fn write_debit(text: &mut BytesMut, debit: &Debit, guess: u64) {
    let (limit, cost) = (&debit.limit, debit.cost);
    write_words(text, limit.algorithm(), [cost, limit.quota()]);
    match limit {
        Limit::SlidingLog(log) => write_words(text, "", [log.window_us(), log.grain_us()]),
        Limit::SlidingCounter(counter) => write_words(text, "", [counter.window_us(), counter.tick(), counter.cap()]),
        Limit::FixedWindow(fixed) => {
            let (window, aligned) = fixed.length().unwrap_or((0, true));
            write_words(text, "", [window, u64::from(!aligned)]);
            write_words(text, "", fixed.boundaries(guess).into_iter().flatten());
        }
        Limit::TokenBucket(bucket) => {
            let (rate, period) = bucket.reduced();
            write_words(text, "", [rate, period, bucket.cap()]);
        }
        Limit::Unlimited | Limit::DenyAll => {}
    }
}

fn write_words(text: &mut BytesMut, word: &str, numbers: impl IntoIterator<Item = u64>) {
    text.extend_from_slice(word.as_bytes());
    for number in numbers {
        text.extend_from_slice(b" ");
        text.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    }
}

/// How often each question of a run is asked: ` 3` each, or ` 1,5,2`.
fn write_times(text: &mut BytesMut, run: &[Question<'_>], times: u64) {
    if run.iter().all(|question| question.times == times) {
        write_words(text, "", [times]);
        return;
    }

    let mut delimiter = b" ";
    for question in run {
        text.extend_from_slice(delimiter);
        text.extend_from_slice(itoa::Buffer::new().format(question.times).as_bytes());
        delimiter = b",";
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

fn same_shape(a: &Question<'_>, b: &Question<'_>) -> bool {
    let alike = |(a, b): (&Debit, &Debit)| a.cost == b.cost && a.limit == b.limit;
    let (a_debits, b_debits) = (&a.ask.debits, &b.ask.debits);
    a.ask.operation == b.ask.operation && a_debits.len() == b_debits.len() && a_debits.iter().zip(b_debits).all(alike)
}

/// What the script says.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) server_time: Duration,
    /// For each question, what it says or why it could not.
    pub(super) tallies: SmallVec<[Result<Tally, StoreError>; 1]>,
}

/// What the script says to one question.
#[derive(Debug)]
pub(super) struct Tally {
    /// How many of those who ask are admitted: the first ones.
    pub(super) admitted: u64,
    /// How each key stands after the last of them.
    pub(super) states: SmallVec<[ChargeState; 1]>,
}

impl Tally {
    /// What the nth of those who ask is told, from 0.
    pub(super) fn outcome(&self, ask: &Ask, nth: u64) -> Outcome {
        if nth >= self.admitted {
            return Outcome::new(false, ask.folds.unfold(&self.states));
        }

        let later = self.admitted - 1 - nth;
        let mut states = self.states.clone();
        for (verdict, debit) in states.iter_mut().zip(&ask.debits) {
            let weight = later.saturating_mul(debit.cost);
            verdict.remaining = verdict.remaining.saturating_add(weight);
            verdict.retry_after = None;
            verdict.reset_after = verdict.reset_after.saturating_sub(debit.delay(weight));
        }
        Outcome::new(true, ask.folds.unfold(&states))
    }
}

impl Call {
    /// Reads a reply: the time, then for each key of each question how many are admitted and three numbers; or in their
    /// place, which of the errors says why it could not be decided.
    pub(super) fn decode(&self, reply: &RawReply) -> Result<Said, Failure> {
        let mut numbers = numbers(&reply.numbers);
        let mut next = || numbers.next().ok_or_else(malformed);
        let server_time = duration(next()?)?;
        let mut tallies = SmallVec::with_capacity(self.shape.len());
        for (times, keys) in &self.shape {
            let mut admitted = None;
            let mut states = SmallVec::<[ChargeState; 1]>::with_capacity(*keys);
            for _ in 0..*keys {
                let (callers, remaining, wait, reset_after) = (next()?, count(next()?)?, duration(next()?)?, next()?);
                admitted = Some(callers);
                states.push(ChargeState::new(
                    remaining,
                    (!wait.is_zero()).then_some(wait),
                    duration(reset_after)?,
                ));
            }
            let admitted = admitted.unwrap_or_default();
            if admitted < 0.0 {
                let error = reply.errors.get(count(-admitted - 1.0)? as usize);
                tallies.push(Err(refused(error.ok_or_else(malformed)?)));
                continue;
            }
            let admitted = count(admitted)?;
            // Where somebody is denied it is said why, and nowhere else.
            let denies = states.iter().any(|verdict| verdict.retry_after.is_some());
            if admitted > *times || denies != (admitted < *times) {
                return Err(malformed());
            }
            tallies.push(Ok(Tally { admitted, states }));
        }

        match next() {
            Err(_) if reply.numbers.len().is_multiple_of(8) => Ok(Said { server_time, tallies }),
            _ => Err(malformed()),
        }
    }
}

fn numbers(packed: &[u8]) -> impl Iterator<Item = f64> {
    let (numbers, _) = packed.as_chunks::<8>();
    numbers.iter().map(|number| f64::from_le_bytes(*number))
}

/// An integer of the script, which are exact below 2^53.
fn count(number: f64) -> Result<u64, Failure> {
    const EXACT: f64 = (1_u64 << 53) as f64;
    match (0.0..EXACT).contains(&number) && number.fract() == 0.0 {
        true => Ok(number as u64),
        false => Err(malformed()),
    }
}

fn duration(number: f64) -> Result<Duration, Failure> {
    count(number).map(Duration::from_micros)
}

pub(super) fn refused(error: &str) -> StoreError {
    StoreError::new(ErrorKind::Refused, format!("Redis answered: {error}"))
}

fn malformed() -> Failure {
    Failure::Protocol("the reply of Redis is not one of this script")
}

#[cfg(test)]
mod tests {
    use proptest::{
        prelude::{ProptestConfig, any, prop_assert_eq, proptest},
        sample,
    };

    use super::*;
    use crate::{
        FixedWindow, Key, Policy, SlidingLog, TokenBucket,
        key::Secret,
        store::{Charge, StoreRequest, redis::ask::Names},
    };

    fn names() -> Names {
        Names::new("quota", None)
    }

    fn ask(charges: &[Charge<'_>]) -> Ask {
        Ask::new(&names(), &StoreRequest::new(Operation::Check, charges))
    }

    fn reply(numbers: &[i64]) -> RawReply {
        RawReply {
            numbers: numbers
                .iter()
                .flat_map(|number| (*number as f64).to_le_bytes())
                .collect(),
            errors: Vec::new(),
        }
    }

    fn call(asks: &[Ask]) -> Call {
        let questions: Vec<_> = asks.iter().map(|ask| Question { ask, times: 1 }).collect();
        Call::new(&questions, 0)
    }

    #[test]
    fn requests_that_look_alike_are_described_once() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let [on_a, on_b, dear] =
            [(&a, 1), (&b, 1), (&b, 3)].map(|(key, cost)| ask(&[Charge::new("p", &limit, key, cost)]));
        let question = |ask, times| Question { ask, times };
        let text = |texts: &[Bytes]| -> Vec<_> {
            let texts = texts.iter().map(|text| String::from_utf8(text.to_vec()).unwrap());
            texts.collect()
        };

        let call = Call::new(&[question(&on_a, 1), question(&on_b, 1), question(&dear, 1)], 0);
        let on_a_and_b = ["quota:1:log:p:{key=a}", "quota:1:log:p:{key=b}"];
        assert_eq!(text(&call.keys), [on_a_and_b[0], on_a_and_b[1], on_a_and_b[1]]);
        assert_eq!(
            text(&call.arguments),
            ["check 2 1 1", "log 1 5 60000000 0", "check 1 1 1", "log 3 5 60000000 0"]
        );

        let call = Call::new(&[question(&on_a, 1), question(&on_b, 30)], 0);
        assert_eq!(text(&call.keys), on_a_and_b);
        assert_eq!(text(&call.arguments), ["check 2 1,30 1", "log 1 5 60000000 0"]);
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

        let asks = [ask(&charges)];
        let call = call(&asks);
        assert_eq!(call.keys.len(), 2);

        let said = call.decode(&reply(&[9, 1, 2, 0, 60, 1, 4, 0, 70])).unwrap();
        let outcome = said.tallies[0].as_ref().unwrap().outcome(&asks[0], 0);
        let remaining: Vec<_> = outcome.states.iter().map(|verdict| verdict.remaining).collect();
        assert_eq!(remaining, [2, 4, 2]);
    }

    #[test]
    fn of_those_who_ask_alike_the_first_are_admitted_and_each_is_told_what_it_would_be_alone() {
        // A token comes every second.
        let limit = Limit::from(TokenBucket::per_minute(60));
        let key = Key::from("a");
        let ask = ask(&[Charge::new("p", &limit, &key, 2)]);
        let call = Call::new(&[Question { ask: &ask, times: 4 }], 0);

        // 5 were there: after the second one of cost 2, 1 is left, and in 59 seconds all.
        let said = call.decode(&reply(&[9, 2, 1, 1_000_000, 59_000_000])).unwrap();
        let tally = said.tallies[0].as_ref().unwrap();
        let told: Vec<_> = (0..4)
            .map(|nth| {
                let outcome = tally.outcome(&ask, nth);
                let verdict = outcome.states[0];
                (outcome.allowed, verdict.remaining, verdict.reset_after.as_secs())
            })
            .collect();
        assert_eq!(told, [(true, 3, 57), (true, 1, 59), (false, 1, 59), (false, 1, 59)]);
    }

    #[test]
    fn a_request_that_cannot_be_decided_leaves_its_neighbors_alone() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let (a, b) = (Key::from("a"), Key::from("b"));
        let call = call(&[
            ask(&[Charge::new("p", &limit, &a, 1)]),
            ask(&[Charge::new("p", &limit, &b, 1)]),
        ]);

        let mut reply = reply(&[9, -1, 0, 0, 0, 1, 4, 0, 60]);
        assert!(
            matches!(call.decode(&reply), Err(Failure::Protocol(_))),
            "without the text"
        );

        reply.errors = vec!["WRONGTYPE Operation against a key".into()];
        let said = call.decode(&reply).unwrap();
        assert_eq!(said.tallies[0].as_ref().unwrap_err().kind(), ErrorKind::Refused);
        assert!(said.tallies[1].is_ok());
    }

    #[test]
    fn a_reply_of_another_shape_is_an_error() {
        let limit = Limit::from(SlidingLog::per_minute(5));
        let key = Key::from("a");
        let call = call(&[ask(&[Charge::new("p", &limit, &key, 1)])]);

        let good = [1_000_000, 1, 4, 0, 60_000_000];
        assert!(call.decode(&reply(&good)).is_ok());
        let [negative, long, many, silent, large] = [
            &[1, 1, -4, 0, 0][..],
            &[1, 1, 4, 0, 0, 0],
            &[1, 2, 4, 0, 0],
            &[1, 0, 4, 0, 0],
            &[1, 1, 1 << 53, 0, 0],
        ];
        for bad in [&good[..4], &good[..1], &[], negative, long, many, silent, large] {
            assert!(matches!(call.decode(&reply(bad)), Err(Failure::Protocol(_))), "{bad:?}");
        }
        for number in [0.5, f64::NAN, f64::INFINITY] {
            let mut numbers = [1.0, 1.0, 4.0, 0.0, 60.0];
            numbers[2] = number;
            let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
            let mut reply = RawReply {
                numbers: numbers.collect(),
                errors: Vec::new(),
            };
            assert!(matches!(call.decode(&reply), Err(Failure::Protocol(_))), "{number}");
            reply.numbers.truncate(39);
            assert!(matches!(call.decode(&reply), Err(Failure::Protocol(_))), "cut off");
        }
    }

    /// The prefix, the algorithm, the policy and the subject, read back from a Redis key.
    fn read_back(redis_key: &str) -> Option<(String, String, String, String)> {
        let (name, subject) = redis_key.strip_suffix('}')?.split_once(":{")?;
        let mut parts = name.rsplitn(4, ':').map(str::to_owned);
        let (policy, algorithm, layout, prefix) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        (layout == "1").then_some((prefix, algorithm, policy, subject.to_owned()))
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
            secret in proptest::option::of(any::<[u8; 16]>()),
        ) {
            assert!(Policy::try_new(policy.clone(), limit.clone()).is_ok());
            let secret = secret.map(|secret| Secret::for_stored_keys(secret).unwrap());
            let names = Names::new(&prefix, secret.clone());
            let mut key = Key::header(&name, value).and(Key::path(&path));
            key.bound();

            let redis_key = names.redis_key(&Charge::new(&policy, &limit, &key, 1));
            let redis_key = std::str::from_utf8(&redis_key).unwrap();

            prop_assert_eq!(redis_key.matches('{').count(), 1);
            prop_assert_eq!(redis_key.matches('}').count(), 1);
            let subject = secret.as_ref().map_or(key.clone(), |secret| key.hashed(secret)).to_string();
            let parts = (prefix, limit.algorithm().to_owned(), policy, subject);
            prop_assert_eq!(read_back(redis_key), Some(parts));
        }
    }
}
