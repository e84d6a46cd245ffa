//! The promises of each algorithm on random histories. `model` has what each decision is.

use std::time::Duration;

use proptest::{
    collection::vec,
    prelude::{Just, Strategy, TestCaseError, any, prop_assert, prop_assert_eq, prop_oneof},
    test_runner::{Config, TestRunner},
};
use tower_quota::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket, limit::Calendar, store::Outcome};

use crate::support::{BERLIN, Bench, each_store};

/// The window of all limits here: 10 ms, or an hour for those of a calendar, in `units` of a microsecond.
const WINDOW: u64 = 10_000;
const MICROSECOND: Duration = Duration::from_micros(1);

/// Requests, and then one more.
#[derive(Clone, Debug)]
struct History {
    quota: u64,
    arrivals: Vec<Arrival>,
    last: Arrival,
    /// How far the clock is set back before the last request.
    step_back: u64,
}

#[derive(Clone, Debug)]
struct Arrival {
    /// The units of time since the previous request.
    after: u64,
    cost: u64,
}

fn histories() -> impl Strategy<Value = History> {
    const MOST: u64 = 8;
    let after = prop_oneof![
        3 => Just(0),
        2 => 0..=3u64,
        6 => 0..=WINDOW / 4,
        1 => WINDOW - 1..=WINDOW + 1,
        1 => 0..=2 * WINDOW,
    ];
    let cost = prop_oneof![3 => Just(1), 2 => 1..=MOST];
    let arrival = (after, cost).prop_map(|(after, cost)| Arrival { after, cost });
    let step_back = prop_oneof![0..=WINDOW, 0..=20 * WINDOW];
    // In half of the histories all costs are 1, which a log stores in another way.
    let histories = (1..=MOST, vec(arrival.clone(), 0..40), arrival, step_back, any::<bool>());
    histories.prop_map(|(quota, mut arrivals, mut last, step_back, light)| {
        let most = if light { 1 } else { quota };
        for arrival in &mut arrivals {
            arrival.cost = arrival.cost.min(most);
        }
        last.cost = last.cost.min(quota);
        History {
            quota,
            arrivals,
            last,
            step_back,
        }
    })
}

/// An algorithm, and its promise by a model.
#[derive(Clone, Copy)]
struct Algorithm {
    limit: fn(u64) -> Limit,
    /// The microseconds in a unit of time.
    units: u64,
    /// The most that is admitted in a half-open window, wherever it starts.
    most: fn(u64) -> u64,
    /// The most units that a request of cost 1 is delayed after the clock was set back: the slack, which is one window here, since
    /// windows are shorter than a second, and the longest wait.
    longest_block: u64,
}

const LOG: Algorithm = Algorithm {
    limit: |quota| SlidingLog::new(quota, Duration::from_micros(WINDOW)).into(),
    units: 1,
    most: |quota| quota,
    longest_block: 2 * WINDOW,
};

const COARSE_LOG: Algorithm = Algorithm {
    limit: |quota| {
        SlidingLog::new(quota, Duration::from_micros(WINDOW))
            .precision(7)
            .into()
    },
    units: 1,
    most: |quota| quota,
    longest_block: 2 * WINDOW,
};

const COUNTER: Algorithm = Algorithm {
    limit: |quota| SlidingCounter::new(quota, Duration::from_micros(WINDOW)).into(),
    units: 1,
    // The quota at the end of one window, and all but one before the end of the next one.
    most: |quota| 2 * quota - 1,
    longest_block: WINDOW + 2 * WINDOW,
};

const FIXED_WINDOW: Algorithm = Algorithm {
    limit: |quota| FixedWindow::new(quota, Duration::from_micros(WINDOW)).into(),
    units: 1,
    most: |quota| 2 * quota,
    longest_block: 2 * WINDOW,
};

const ALIGNED_WINDOW: Algorithm = Algorithm {
    limit: |quota| FixedWindow::new(quota, Duration::from_micros(WINDOW)).aligned().into(),
    units: 1,
    most: |quota| 2 * quota,
    longest_block: 2 * WINDOW,
};

const CALENDAR_HOUR: Algorithm = Algorithm {
    limit: |quota| FixedWindow::calendar(quota, Calendar::Hour, BERLIN).into(),
    units: 3_600_000_000 / WINDOW,
    ..ALIGNED_WINDOW
};

/// Between any two times: at most a burst and the tokens that came in between.
const fn bucket<const RATE: u64>(limit: fn(u64) -> Limit) -> Algorithm {
    Algorithm {
        limit,
        units: 1,
        most: |burst| burst + if RATE > 0 { RATE } else { burst },
        longest_block: 4 * WINDOW,
    }
}

const TOKEN_BUCKET: Algorithm = bucket::<0>(|quota| TokenBucket::new(quota, Duration::from_micros(WINDOW)).into());

/// Three in each window, whatever the burst.
const BURSTS_OF_THREE_PER_WINDOW: Algorithm =
    bucket::<3>(|burst| TokenBucket::new(3, Duration::from_micros(WINDOW)).burst(burst).into());

impl Algorithm {
    fn limit(self, quota: u64) -> Limit {
        (self.limit)(quota)
    }

    fn duration(self, units: u64) -> Duration {
        Duration::from_micros(units * self.units)
    }

    fn now(self, bench: &Bench) -> u64 {
        bench.now() / self.units
    }
}

/// All admissions: their times in units, and their costs.
#[derive(Debug, Default)]
struct Model(Vec<(u64, u64)>);

impl Model {
    /// The sum of the costs that were admitted from one time to another, both included.
    fn admitted(&self, from: u64, to: u64) -> u64 {
        let span = from..=to;
        self.0
            .iter()
            .filter(|(at, _)| span.contains(at))
            .map(|(_, cost)| cost)
            .sum()
    }

    /// The most that was admitted in any half-open window. A window that begins with an admission has the most.
    fn most(&self) -> u64 {
        let windows = self.0.iter().map(|(at, _)| self.admitted(*at, at + WINDOW - 1));
        windows.max().unwrap_or(0)
    }
}

/// One algorithm in one store.
struct Case {
    bench: Bench,
    algorithm: Algorithm,
}

impl Case {
    async fn wait(&self, units: u64) {
        self.bench.advance(self.algorithm.duration(units)).await;
    }

    /// Checks these requests under this quota, and returns the admissions.
    async fn run(&self, quota: u64, arrivals: &[Arrival]) -> Model {
        let limit = self.algorithm.limit(quota);
        let mut model = Model::default();
        for arrival in arrivals {
            self.wait(arrival.after).await;
            if self.bench.check(&limit, arrival.cost).await.allowed {
                model.0.push((self.algorithm.now(&self.bench), arrival.cost));
            }
        }
        model
    }

    /// Checks the requests of the history before the last one, and returns the admissions.
    async fn run_until_the_last(&self, history: &History) -> Model {
        let model = self.run(history.quota, &history.arrivals).await;
        self.wait(history.last.after).await;
        model
    }
}

fn remaining(outcome: &Outcome) -> u64 {
    outcome.states()[0].remaining
}

async fn no_window_holds_more_than_the_promise(case: Case, history: History) -> Result<(), TestCaseError> {
    let model = case.run_until_the_last(&history).await;
    let most = (case.algorithm.most)(history.quota);
    prop_assert!(
        model.most() <= most,
        "{} are more than {}: {:?}",
        model.most(),
        most,
        model
    );
    Ok(())
}

async fn a_denied_request_adds_no_weight_and_no_time_to_live(
    case: Case,
    history: History,
) -> Result<(), TestCaseError> {
    case.run_until_the_last(&history).await;
    let (bench, limit) = (&case.bench, case.algorithm.limit(history.quota));
    let before = bench.peek(&limit, 1).await;
    let expires_at = bench.expires_at().await;

    let cost = remaining(&before) + history.last.cost;
    for _ in 0..3 {
        let denied = bench.check(&limit, cost).await;
        prop_assert!(!denied.allowed);
        prop_assert_eq!(denied.states()[0].reset_after, before.states()[0].reset_after);
    }
    prop_assert_eq!(bench.peek(&limit, 1).await, before);
    // Expired entries may be removed, and with them the key.
    let after = bench.expires_at().await;
    prop_assert!(
        after.is_none() || after == expires_at,
        "{after:?} instead of {expires_at:?}"
    );
    Ok(())
}

async fn a_clock_set_back_keeps_the_promise_from_then_on(case: Case, history: History) -> Result<(), TestCaseError> {
    case.run_until_the_last(&history).await;
    case.bench.set_back(case.algorithm.duration(history.step_back)).await;

    // At most one quota more than without the step.
    let model = case.run(history.quota, &history.arrivals).await;
    let most = (case.algorithm.most)(history.quota);
    prop_assert!(
        model.most() <= most,
        "{} are more than {}: {:?}",
        model.most(),
        most,
        model
    );
    Ok(())
}

async fn a_clock_set_back_delays_no_request_for_long(case: Case, history: History) -> Result<(), TestCaseError> {
    case.run_until_the_last(&history).await;
    let (bench, limit) = (&case.bench, case.algorithm.limit(history.quota));
    bench.set_back(case.algorithm.duration(history.step_back)).await;

    let longest = case.algorithm.duration(case.algorithm.longest_block);
    let wait = bench.peek(&limit, 1).await.states()[0].retry_after.unwrap_or_default();
    prop_assert!(wait <= longest, "{wait:?}");
    bench.advance(wait).await;
    prop_assert!(bench.check(&limit, 1).await.allowed, "after {wait:?}");
    Ok(())
}

/// Runs the property on this many histories, each with a key of its own, and shrinks the failing one.
fn holds<P>(cases: u32, bench: impl Future<Output = Bench>, algorithm: Algorithm, property: P)
where
    P: AsyncFn(Case, History) -> Result<(), TestCaseError>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let bench = runtime.block_on(bench);

    let mut runner = TestRunner::new(Config::with_cases(cases));
    let result = runner.run(&histories(), |history| {
        let bench = bench.with_a_fresh_key();
        runtime.block_on(property(Case { bench, algorithm }, history))
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

macro_rules! each_algorithm {
    ($($algorithm:ident $named:ident)*) => {
        mod in_memory {$(
            properties! { memory_store, 200, $algorithm $named }
        )*}

        mod in_redis {$(
            properties! { redis_store, 20, $algorithm $named }
        )*}
    };
}

macro_rules! properties {
    ($store:ident, $cases:expr, $algorithm:ident $named:ident) => {
        mod $algorithm {
            tests! { $store, $cases, $named;
                no_window_holds_more_than_the_promise
                a_denied_request_adds_no_weight_and_no_time_to_live
                a_clock_set_back_keeps_the_promise_from_then_on
                a_clock_set_back_delays_no_request_for_long
            }
        }
    };
}

macro_rules! tests {
    ($store:ident, $cases:expr, $algorithm:ident; $($property:ident)*) => {$(
        #[test]
        fn $property() {
            use crate::{properties, support::Bench};
            properties::holds($cases, Bench::$store(), properties::$algorithm, properties::$property);
        }
    )*};
}

each_algorithm! {
    sliding_log LOG
    coarse_log COARSE_LOG
    sliding_counter COUNTER
    fixed_window FIXED_WINDOW
    aligned_window ALIGNED_WINDOW
    calendar_hour CALENDAR_HOUR
    token_bucket TOKEN_BUCKET
    bursts_of_three_per_window BURSTS_OF_THREE_PER_WINDOW
}

// The largest numbers, and long runs.

each_store! {
    the_largest_limit_admits_itself_and_no_more
    seven_in_three_seconds_do_not_drift
    a_million_in_thirty_days_do_not_drift
    a_prime_number_in_thirty_days_does_not_drift
}

async fn the_largest_limit_admits_itself_and_no_more(bench: Bench) {
    const LARGEST: u64 = 999_999_999_999_999;
    let ten_years = Duration::from_secs(10 * 365 * 86_400);
    for window in [Duration::from_secs(1), ten_years] {
        let limits: [Limit; 5] = [
            SlidingLog::new(LARGEST, window).precision(100).into(),
            SlidingCounter::new(LARGEST, window).into(),
            FixedWindow::new(LARGEST, window).into(),
            FixedWindow::new(LARGEST, window).aligned().into(),
            FixedWindow::calendar(LARGEST, Calendar::Year, BERLIN).into(),
        ];
        for limit in limits {
            let bench = bench.with_a_fresh_key();
            assert_eq!(remaining(&bench.check(&limit, 1).await), LARGEST - 1, "{limit}");
            assert_eq!(remaining(&bench.check(&limit, LARGEST - 2).await), 1, "{limit}");
            assert!(!bench.check(&limit, 2).await.allowed, "{limit}");
            assert_eq!(remaining(&bench.check(&limit, 1).await), 0, "{limit}");

            let denied = bench.check(&limit, LARGEST).await;
            let wait = denied.states()[0]
                .retry_after
                .unwrap_or_else(|| panic!("{limit} denies"));
            bench.advance(wait - MICROSECOND).await;
            assert!(
                !bench.check(&limit, LARGEST).await.allowed,
                "{limit}: 1 µs before {wait:?}"
            );
            bench.advance(MICROSECOND).await;
            assert!(bench.check(&limit, LARGEST).await.allowed, "{limit}: after {wait:?}");
        }
    }
}

/// Empties a bucket, then takes this many tokens at once as soon as they have come, and compares the times with the rate. The
/// bucket holds more than that, since tokens that come while it is full are lost.
async fn does_not_drift(bench: &Bench, rate: u64, period: Duration, at_once: u64, periods: u64) {
    let limit = Limit::from(TokenBucket::new(rate, period).burst(2 * at_once));
    let began = bench.now();
    assert!(bench.check(&limit, 2 * at_once).await.allowed);

    let mut taken = 0;
    while taken + at_once <= rate * periods {
        let wait = bench.check(&limit, at_once).await.states()[0].retry_after;
        bench.advance(wait.expect("the bucket is empty")).await;
        assert!(bench.check(&limit, at_once).await.allowed);
        taken += at_once;

        // The microsecond in which the last of these tokens comes.
        let due = (u128::from(taken) * period.as_micros()).div_ceil(u128::from(rate));
        assert_eq!(u128::from(bench.now() - began), due, "{taken} of {limit}");
    }
}

async fn seven_in_three_seconds_do_not_drift(bench: Bench) {
    does_not_drift(&bench, 7, Duration::from_secs(3), 1, 100).await;
    does_not_drift(&bench.with_a_fresh_key(), 7, Duration::from_secs(3), 5, 300).await;
}

async fn a_million_in_thirty_days_do_not_drift(bench: Bench) {
    does_not_drift(&bench, 1_000_000, Duration::from_secs(30 * 86_400), 10_000, 5).await;
}

async fn a_prime_number_in_thirty_days_does_not_drift(bench: Bench) {
    does_not_drift(&bench, 999_983, Duration::from_secs(30 * 86_400), 7_001, 5).await;
}
