//! Short timelines with their answers, through states in which an error of a microsecond or of one unit shows.

use std::{fmt::Write as _, time::Duration};

use tower_quota::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket, store::Outcome};

use crate::support::Bench;

const SECOND: Duration = Duration::from_secs(1);

/// What happens to one key.
struct Timeline {
    /// Of the first step, and of steps that end with `of the other limit`.
    limits: [Limit; 2],
    /// The time of each step in microseconds since the first moment, which is the beginning of an hour, and its answer. A refund
    /// gives back what was counted `from` a time. `check 2 x 5` is 5 equal requests of one call, and `charge 1 x 5` are 5 charges
    /// of 1.
    steps: &'static str,
}

impl Timeline {
    fn of(limit: impl Into<Limit>, steps: &'static str) -> Self {
        let limit = limit.into();
        Self {
            limits: [limit.clone(), limit],
            steps,
        }
    }

    /// The answers that are others than they should be.
    async fn wrong_answers(&self, bench: &Bench) -> Vec<String> {
        const HOUR: u64 = 3_600_000_000;
        let bench = bench.with_a_fresh_key();
        bench.advance(Duration::from_micros(HOUR - bench.now() % HOUR)).await;
        let start = bench.now();

        let expected = self.steps.lines().map(str::trim).filter(|line| !line.is_empty());
        let mut wrong = Vec::new();
        for line in expected {
            let line = line.replace('_', "");
            let (step, expected) = line.split_once(" -> ").expect("a step and its answer");
            let answer = self.step(&bench, start, step).await;
            if answer != expected {
                wrong.push(format!("{}: {line}, but: {answer}", self.limits[0]));
            }
        }
        wrong
    }

    async fn step(&self, bench: &Bench, start: u64, step: &str) -> String {
        let (step, limit) = match step.strip_suffix(" of the other limit") {
            Some(step) => (step, &self.limits[1]),
            None => (step, &self.limits[0]),
        };
        let number = |text: &str| text.parse::<i64>().expect("a number");
        let (at, step) = step.split_once(": ").expect("a time and a step");
        let at = start.checked_add_signed(number(at)).expect("no earlier than 1970");
        bench.set_to(at).await;
        let words: Vec<&str> = step.split(' ').collect();
        let cost = number(words[1]) as u64;
        let outcome = match words[0] {
            "check" if words.len() > 2 => {
                let outcomes = bench.check_times(limit, cost, number(words[3]) as usize).await;
                let admitted = outcomes.iter().filter(|outcome| outcome.allowed).count();
                let last = outcomes.last().expect("an outcome");
                return format!("{admitted} admitted, the last {}", answer(last));
            }
            "check" => bench.check(limit, cost).await,
            "peek" => bench.peek(limit, cost).await,
            "charge" if words.len() > 2 => bench.charge_each(limit, number(words[3]) as usize).await,
            "charge" => bench.charge(limit, cost).await,
            "refund" => {
                let admitted_at = start.checked_add_signed(number(words[3]));
                bench
                    .refund(limit, cost, admitted_at.expect("no earlier than 1970"))
                    .await
            }
            other => panic!("{other} is not a step"),
        };
        answer(&outcome)
    }
}

fn answer(outcome: &Outcome) -> String {
    let state = outcome.states()[0];
    let mut answer = String::new();
    match (outcome.allowed, state.retry_after) {
        (true, None) => Ok(()),
        (_, wait) => write!(answer, "denied for {}, ", wait.expect("waiting helps").as_micros()),
    }
    .expect("to a string");
    let (remaining, reset) = (state.remaining, state.reset_after.as_micros());
    write!(answer, "{remaining} left, full in {reset}").expect("to a string");
    answer
}

/// `limit` tokens in so many microseconds.
fn bucket(limit: u64, micros: u64, burst: u64) -> TokenBucket {
    TokenBucket::new(limit, Duration::from_micros(micros)).burst(burst)
}

fn timelines() -> Vec<Timeline> {
    // A debt of this bucket is one token more at most.
    const LARGE: u64 = 4_503_595_122;
    let per_second = |burst| TokenBucket::per_second(1).burst(burst);
    let log = |millis, limit| Limit::from(SlidingLog::new(limit, Duration::from_millis(millis)));
    let counter = |seconds, limit| Limit::from(SlidingCounter::new(limit, seconds * SECOND));
    vec![
        // A refund of a token of which a part had come in the last microsecond.
        Timeline::of(
            bucket(32, 315_360_000_000_001, 100),
            "0: charge 40 -> 60 left, full in 394_200_000_000_002
             305_505_000_000_001: charge 1 -> 90 left, full in 98_550_000_000_001
             305_505_000_000_001: refund 40 from 0 -> 99 left, full in 9_855_000_000_001",
        ),
        // So many tokens come in just this time, and Lua rounds the product of the time and the rate down.
        Timeline::of(
            bucket(14_747, 50_000_000, 2_000_000_000),
            "0: charge 2_000_000_000 -> 0 left, full in 6_781_040_211_569
             6_553_656_408_083: peek 1 -> 1_932_935_421 left, full in 227_383_803_486",
        ),
        // A bucket that a refund has filled is full also for a clock that goes back.
        Timeline::of(
            per_second(2),
            "0: check 2 -> 0 left, full in 2_000_000
             1_000_000: refund 1 from 0 -> 2 left, full in 0
             500_000: peek 1 -> 2 left, full in 0",
        ),
        Timeline::of(
            per_second(2),
            "0: check 1 -> 1 left, full in 1_000_000
             0: refund 1 from 0 -> 2 left, full in 0
             -500_000: peek 1 -> 2 left, full in 0",
        ),
        Timeline::of(
            per_second(LARGE),
            "0: charge 10 -> 4_503_595_112 left, full in 10_000_000
             1_000_000: charge 4_503_595_113 -> 0 left, full in 4_503_595_122_000_000
             1_000_000: refund 10 from 0 -> 9 left, full in 4_503_595_113_000_000",
        ),
        Timeline::of(
            bucket(5_000, 1_000, 3),
            "0: charge 999_999_999_999_999 -> 0 left, full in 180_143_985_094_820",
        ),
        // A clock that goes back far leaves more entries than one call removes.
        Timeline::of(
            log(10, 1_380),
            "0: check 1 -> 1_379 left, full in 10_000
             2: charge 1 x 1_423 -> 0 left, full in 10_000
             -20_000: charge 1 -> 993 left, full in 10_000",
        ),
        // Charges beyond the limit are merged with the newest entry of their step, from which refunds take them.
        Timeline::of(
            log(10_000, 2),
            "0: charge 2 -> 0 left, full in 10_000_000
             1: charge 1 -> 0 left, full in 10_000_000
             2: charge 1 -> 0 left, full in 10_000_000
             2: refund 3 from 0 -> 0 left, full in 10_000_000
             2: refund 3 from 1 -> 2 left, full in 0",
        ),
        // A lowered and a raised quota keep the count.
        Timeline {
            limits: [log(10_000, 2), log(10_000, 5_000)],
            steps: "0: check 2 -> 0 left, full in 10_000_000
                    2: charge 1 x 995 of the other limit -> 4_003 left, full in 10_000_000
                    3: check 1 -> denied for 9_999_999, 0 left, full in 9_999_999",
        },
        // A refund of the next window, as after a step of the clock.
        Timeline::of(
            FixedWindow::new(5, 10 * SECOND),
            "0: check 2 -> 3 left, full in 10_000_000
             0: refund 1 from 10_000_000 -> 3 left, full in 10_000_000
             0: refund 1 from 9_999_999 -> 4 left, full in 10_000_000",
        ),
        // A clock set back over a boundary by the slack.
        Timeline {
            limits: [counter(60, 5), counter(60, 5)],
            steps: "0: check 5 -> 0 left, full in 120_000_000
                    -1_000_000: check 1 -> denied for 73_000_000, 0 left, full in 121_000_000",
        },
    ]
}

async fn assert_answers(bench: Bench) {
    let mut wrong = Vec::new();
    for timeline in timelines() {
        wrong.extend(timeline.wrong_answers(&bench).await);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn answers_in_memory_are_exact() {
    assert_answers(Bench::memory_store().await).await;
}

#[tokio::test]
async fn answers_of_redis_are_exact() {
    assert_answers(Bench::redis_store().await).await;
}
