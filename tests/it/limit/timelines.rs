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
    let coarse = |millis, limit, precision| {
        Limit::from(SlidingLog::new(limit, Duration::from_millis(millis)).precision(precision))
    };
    let counter = |seconds, limit| Limit::from(SlidingCounter::new(limit, seconds * SECOND));
    vec![
        // An entry of a precision that begins before a grain of another one is not merged into it.
        Timeline {
            limits: [coarse(3, 184, 4), coarse(10, 25, 4)],
            steps: "2_300: check 1 -> 183 left, full in 3_000
             2_600: check 1 -> 182 left, full in 3_000
             4_900: check 1 of the other limit -> 22 left, full in 10_000
             4_900: peek 23 of the other limit -> denied for 7_700, 22 left, full in 10_000",
        },
        // A refund of a token of which a part had come in the last microsecond.
        Timeline::of(
            bucket(32, 315_360_000_000_001, 100),
            "0: charge 40 -> 60 left, full in 394_200_000_000_002
             305_505_000_000_001: charge 1 -> 90 left, full in 98_550_000_000_001
             305_505_000_000_001: refund 40 from 0 -> 99 left, full in 9_855_000_000_001",
        ),
        // A bucket that a refund has filled is full also for a clock that goes back.
        Timeline::of(
            per_second(2),
            "0: check 2 -> 0 left, full in 2_000_000
             1_000_000: refund 1 from 0 -> 2 left, full in 0
             500_000: peek 1 -> 2 left, full in 0",
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
        // Another limit for a log with more entries than one call removes: what has expired and is still there counts for a coarse
        // one, since its entries have weights.
        Timeline {
            limits: [log(10, 2_123), coarse(10, 1_557, 10)],
            steps: "0: charge 1 x 1_237 -> 886 left, full in 10_000
                    10_000: check 1 of the other limit -> 1_556 left, full in 10_000",
        },
        Timeline {
            limits: [log(10, 2_974), coarse(10, 2_874, 2)],
            steps: "0: check 400 -> 2_574 left, full in 10_000
                    100: charge 1 x 1_365 -> 1_209 left, full in 10_000
                    20_100: peek 1 of the other limit -> 2_874 left, full in 0",
        },
        // A clock that goes back far leaves more entries than one call removes.
        Timeline::of(
            log(10, 1_380),
            "0: check 1 -> 1_379 left, full in 10_000
             2: charge 1 x 1_423 -> 0 left, full in 10_000
             -20_000: charge 1 -> 1_379 left, full in 10_000",
        ),
        // A coarse limit for a log of which one call merges a part: the rest leaves when its time has come.
        Timeline {
            limits: [log(10_000, 3_000), coarse(10_000, 3_000, 2)],
            steps: "0: charge 1 x 600 -> 2_400 left, full in 10_000_000
                    100: charge 1 x 600 -> 1_800 left, full in 10_000_000
                    200: check 1 of the other limit -> 1_799 left, full in 10_000_000
                    10_000_000: peek 1 of the other limit -> 2_003 left, full in 200",
        },
        // A refund reads a part of the entries after it for charges beyond the limit, and takes no weight of later ones.
        Timeline {
            limits: [log(10_000, 2), log(10_000, 5_000)],
            steps: "0: charge 2 -> 0 left, full in 10_000_000
                    1: charge 1 -> 0 left, full in 10_000_000
                    2: charge 1 -> 0 left, full in 10_000_000
                    2: charge 1 x 995 of the other limit -> 4_001 left, full in 10_000_000
                    2: refund 3 from 0 of the other limit -> 4_003 left, full in 10_000_000
                    2: refund 3 from 1 of the other limit -> 4_005 left, full in 10_000_000",
        },
        Timeline {
            limits: [log(10_000, 2), log(10_000, 5_000)],
            steps: "0: charge 2 -> 0 left, full in 10_000_000
                    1: charge 1 -> 0 left, full in 10_000_000
                    2: charge 1 -> 0 left, full in 10_000_000
                    2: charge 1 x 996 of the other limit -> 4_000 left, full in 10_000_000
                    2: refund 3 from 1 of the other limit -> 4_000 left, full in 10_000_000",
        },
        // Charges beyond a coarse limit are entries like others to an exact one.
        Timeline {
            limits: [log(1_000, 4), coarse(1_000, 3, 2)],
            steps: "0: charge 2 -> 2 left, full in 1_000_000
                    3: charge 1 of the other limit -> 0 left, full in 1_000_000
                    3: charge 1 of the other limit -> 0 left, full in 1_000_000
                    10: refund 1 from 0 -> 1 left, full in 999_993",
        },
        // A refund of the next window, as after a step of the clock.
        Timeline::of(
            FixedWindow::new(5, 10 * SECOND),
            "0: check 2 -> 3 left, full in 10_000_000
             0: refund 1 from 10_000_000 -> 3 left, full in 10_000_000
             0: refund 1 from 9_999_999 -> 4 left, full in 10_000_000",
        ),
        // A window of another length, which begins as that of the clock does.
        Timeline {
            limits: [counter(60, 10), counter(50, 10)],
            steps: "60_000_000: check 1 -> 9 left, full in 120_000_000
                    60_000_000: check 1 of the other limit -> 8 left, full in 90_000_000",
        },
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
