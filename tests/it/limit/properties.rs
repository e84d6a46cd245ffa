//! What a step of the clock admits and delays on random histories, against a list of all admissions; the largest numbers, and long
//! runs. Histories without a step are those of `model`.

use std::time::Duration;

use proptest::{
    collection::vec,
    option,
    prelude::{Just, Strategy, TestCaseError, any, prop_assert, prop_oneof},
    test_runner::{Config, TestRunner},
};
use tower_quota::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket, limit::Calendar, store::Outcome};

use crate::support::{BERLIN, Bench};

/// The window of all limits here: 10 ms, or an hour for those of a calendar, in `units` of a microsecond.
const WINDOW: u64 = 10_000;
const MICROSECOND: Duration = Duration::from_micros(1);

/// Requests, and a step of the clock after them.
#[derive(Clone, Debug)]
struct History {
    quota: u64,
    arrivals: Vec<Arrival>,
    /// The units by which the clock is set forward or back.
    step: i64,
    /// Whether admissions are settled.
    settles: bool,
}

#[derive(Clone, Debug)]
struct Arrival {
    /// The units of time since the previous request.
    after: u64,
    cost: u64,
    /// Then one of the last admissions is settled at an actual cost, 0 for a refund.
    settles: Option<(usize, u64)>,
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
    let actual = prop_oneof![3 => Just(0), 2 => 0..=2 * MOST];
    let settles = option::weighted(0.4, (0..4usize, actual));
    let arrival = (after, cost, settles).prop_map(|(after, cost, settles)| Arrival { after, cost, settles });
    let most = 20 * WINDOW as i64;
    let step = prop_oneof![-(WINDOW as i64)..=WINDOW as i64, -most..=most];
    // In half of the histories all costs are 1, which a log stores in another way.
    let histories = (1..=MOST, vec(arrival, 0..40), step, any::<(bool, bool)>());
    histories.prop_map(|(quota, mut arrivals, step, (light, settles))| {
        for arrival in &mut arrivals {
            arrival.cost = arrival.cost.min(if light { 1 } else { quota });
        }
        History {
            quota,
            arrivals,
            step,
            settles,
        }
    })
}

/// An algorithm, and its promise about a step.
#[derive(Clone, Copy)]
struct Algorithm {
    limit: fn(u64) -> Limit,
    /// The microseconds in a unit of time.
    units: u64,
    /// The most that is admitted in a half-open window without a step; the second number is 1 if requests are settled.
    most: fn(u64, u64) -> u64,
    /// The most quotas that a step of the clock admits in addition.
    quotas_of_a_step: u64,
    /// The most units that a request of cost 1 is delayed after the clock was set back: the slack, which is one window here, since
    /// windows are shorter than a second.
    longest_block: u64,
}

const LOG: Algorithm = Algorithm {
    limit: |quota| SlidingLog::new(quota, Duration::from_micros(WINDOW)).into(),
    units: 1,
    most: |quota, _| quota,
    quotas_of_a_step: 1,
    longest_block: 2 * WINDOW,
};

const COARSE_LOG: Algorithm = Algorithm {
    limit: |quota| {
        SlidingLog::new(quota, Duration::from_micros(WINDOW))
            .precision(7)
            .into()
    },
    ..LOG
};

const COUNTER: Algorithm = Algorithm {
    limit: |quota| SlidingCounter::new(quota, Duration::from_micros(WINDOW)).into(),
    // The quota at the end of one window, and all but one before the end of the next one.
    most: |quota, _| 2 * quota - 1,
    longest_block: WINDOW + 2 * WINDOW,
    ..LOG
};

const FIXED_WINDOW: Algorithm = Algorithm {
    limit: |quota| FixedWindow::new(quota, Duration::from_micros(WINDOW)).into(),
    // A request has opened the first window, and is not left for its end unless it is refunded.
    most: |quota, settled| 2 * quota - 1 + settled,
    ..LOG
};

const ALIGNED_WINDOW: Algorithm = Algorithm {
    limit: |quota| FixedWindow::new(quota, Duration::from_micros(WINDOW)).aligned().into(),
    most: |quota, _| 2 * quota,
    // A boundary before the step, and one after it.
    quotas_of_a_step: 2,
    ..LOG
};

const CALENDAR_HOUR: Algorithm = Algorithm {
    limit: |quota| FixedWindow::calendar(quota, Calendar::Hour, BERLIN).unwrap().into(),
    units: 3_600_000_000 / WINDOW,
    ..ALIGNED_WINDOW
};

const TOKEN_BUCKET: Algorithm = Algorithm {
    limit: |quota| TokenBucket::new(quota, Duration::from_micros(WINDOW)).into(),
    most: |burst, _| burst - 1 + burst,
    longest_block: 4 * WINDOW,
    ..LOG
};

/// Three in each window, whatever the burst.
const BURSTS_OF_THREE_PER_WINDOW: Algorithm = Algorithm {
    limit: |burst| TokenBucket::new(3, Duration::from_micros(WINDOW)).burst(burst).into(),
    most: |burst, _| burst - 1 + 3,
    ..TOKEN_BUCKET
};

impl Algorithm {
    fn limit(self, quota: u64) -> Limit {
        (self.limit)(quota)
    }

    fn duration(self, units: u64) -> Duration {
        Duration::from_micros(units * self.units)
    }
}

/// All admissions: their times in units, by a clock without a step, and their costs. A cost that was settled above the estimate is
/// the estimate: the bounds are exceeded by that debt.
#[derive(Debug, Default)]
struct Model(Vec<(u64, u64)>);

impl Model {
    /// The most that was admitted in any half-open window. A window that begins with an admission has the most.
    fn most(&self) -> u64 {
        let admitted = |from: u64| {
            let within = self.0.iter().filter(|(at, _)| (from..from + WINDOW).contains(at));
            within.map(|(_, cost)| cost).sum()
        };
        self.0.iter().map(|(at, _)| admitted(*at)).max().unwrap_or(0)
    }
}

/// One algorithm in one store.
struct Case {
    bench: Bench,
    algorithm: Algorithm,
}

impl Case {
    /// Checks the requests of a history, and returns the admissions by a clock that is so much later.
    async fn run(&self, history: &History, settles: bool, later: i64) -> Model {
        let limit = self.algorithm.limit(history.quota);
        let mut model = Model::default();
        // The times of the store, until they are settled.
        let mut receipts = Vec::new();
        for arrival in &history.arrivals {
            self.bench.advance(self.algorithm.duration(arrival.after)).await;
            if self.bench.check(&limit, arrival.cost).await.allowed {
                let now = self.bench.now();
                receipts.push(Some(now));
                let at = (now / self.algorithm.units).checked_add_signed(later);
                model.0.push((at.expect("a time after 1970"), arrival.cost));
            }
            if let Some((back, actual)) = arrival.settles.filter(|_| settles)
                && let Some(position) = receipts.len().checked_sub(back + 1)
                && let Some(admitted_at) = receipts[position].take()
            {
                let (_, cost) = &mut model.0[position];
                if actual < *cost {
                    self.bench
                        .refund_beside(actual, &limit, *cost - actual, admitted_at)
                        .await;
                    *cost = actual;
                } else if actual > *cost {
                    self.bench.charge(&limit, actual - *cost).await;
                }
            }
        }
        model
    }

    /// Sets the clock forward or back.
    async fn step(&self, history: &History) {
        let step = history.step * self.algorithm.units as i64;
        let now = self.bench.now().checked_add_signed(step);
        self.bench.set_to(now.expect("a time after 1970")).await;
    }
}

fn remaining(outcome: &Outcome) -> u64 {
    outcome.states()[0].remaining
}

/// At most one quota more than without the step, or two in windows that open by the clock; and from then on no more.
async fn a_step_of_the_clock_admits_its_quotas_once(case: Case, history: History) -> Result<(), TestCaseError> {
    let most = (case.algorithm.most)(history.quota, history.settles.into());
    let mut model = case.run(&history, history.settles, 0).await;
    case.step(&history).await;
    let after = case.run(&history, history.settles, -history.step).await;
    prop_assert!(after.most() <= most, "{} are more than {most}: {after:?}", after.most());

    model.0.extend(after.0);
    let most = most + case.algorithm.quotas_of_a_step * history.quota;
    prop_assert!(model.most() <= most, "{} are more than {most}: {model:?}", model.most());
    Ok(())
}

async fn a_step_of_the_clock_delays_no_request_for_long(case: Case, history: History) -> Result<(), TestCaseError> {
    let limit = case.algorithm.limit(history.quota);
    case.run(&history, false, 0).await;
    case.step(&history).await;

    let longest = case.algorithm.duration(case.algorithm.longest_block);
    let denied = case.bench.peek(&limit, 1).await;
    let wait = denied.states()[0].retry_after.unwrap_or_default();
    prop_assert!(wait <= longest, "{wait:?}");
    case.bench.advance(wait).await;
    prop_assert!(case.bench.check(&limit, 1).await.allowed, "after {wait:?}");
    Ok(())
}

/// Runs the property on random histories, each with a key of its own, and shrinks the failing one.
fn holds<P>(bench: impl Future<Output = Bench>, algorithm: Algorithm, property: P)
where
    P: AsyncFn(Case, History) -> Result<(), TestCaseError>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let bench = runtime.block_on(bench);

    let cases = if bench.is_in_redis() { 20 } else { 200 };
    let mut runner = TestRunner::new(Config::with_cases(cases));
    let result = runner.run(&histories(), |history| {
        let bench = bench.with_a_fresh_key();
        runtime.block_on(property(Case { bench, algorithm }, history))
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

macro_rules! properties {
    ($($algorithm:ident $named:ident)*) => {$(
        mod $algorithm {
            crate::support::each_store! { by crate::limit::properties::holds, crate::limit::properties::$named;
                a_step_of_the_clock_admits_its_quotas_once
                a_step_of_the_clock_delays_no_request_for_long
            }
        }
    )*};
}

properties! {
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

crate::support::each_store! {
    a_window_whose_first_request_is_refunded_admits_twice_the_quota_around_its_end
    windows_by_the_clock_admit_two_quotas_more_around_a_step
    a_cost_above_the_quota_has_the_wait_until_the_quota_fits
    the_largest_limit_admits_itself_and_no_more
    seven_in_three_seconds_do_not_drift
    a_million_in_thirty_days_do_not_drift
    a_prime_number_in_thirty_days_does_not_drift
}

/// Admits this many requests of cost 1 and no more, then a microsecond passes.
async fn admits(bench: &Bench, limit: &Limit, count: u64) {
    for _ in 0..count {
        assert!(bench.check(limit, 1).await.allowed, "{limit}");
    }
    assert!(!bench.check(limit, 1).await.allowed, "{limit}");
    bench.advance(MICROSECOND).await;
}

async fn a_window_whose_first_request_is_refunded_admits_twice_the_quota_around_its_end(bench: Bench) {
    let (limit, opened) = (FIXED_WINDOW.limit(5), bench.now());
    assert!(bench.check(&limit, 1).await.allowed);
    bench.advance(Duration::from_micros(WINDOW - 1)).await;
    for _ in 0..4 {
        assert!(bench.check(&limit, 1).await.allowed);
    }
    bench.refund(&limit, 1, opened).await;
    admits(&bench, &limit, 1).await;
    admits(&bench, &limit, 5).await;
}

async fn windows_by_the_clock_admit_two_quotas_more_around_a_step(bench: Bench) {
    let limit = ALIGNED_WINDOW.limit(5);
    for windows in [-1_000, -2, 2, 1_000] {
        let bench = bench.with_a_fresh_key();
        let before_a_boundary = bench.now() / WINDOW * WINDOW + 2_000 * WINDOW - 1;
        let after_the_step = before_a_boundary.checked_add_signed(windows * WINDOW as i64);
        let after_the_step = after_the_step.expect("a time after 1970");
        for start in [before_a_boundary, after_the_step] {
            bench.set_to(start).await;
            admits(&bench, &limit, 5).await;
            admits(&bench, &limit, 5).await;
        }
    }
}

async fn a_cost_above_the_quota_has_the_wait_until_the_quota_fits(bench: Bench) {
    let algorithms = [
        LOG,
        COARSE_LOG,
        COUNTER,
        FIXED_WINDOW,
        ALIGNED_WINDOW,
        CALENDAR_HOUR,
        TOKEN_BUCKET,
    ];
    for (algorithm, used) in algorithms
        .into_iter()
        .flat_map(|algorithm| [(algorithm, 0), (algorithm, 3)])
    {
        let (bench, limit) = (bench.with_a_fresh_key(), algorithm.limit(5));
        if used > 0 {
            assert!(bench.check(&limit, used).await.allowed);
        }
        let wait = bench.check(&limit, 6).await.states()[0].retry_after;
        let wait = wait.unwrap_or_else(|| panic!("{limit} denies"));
        assert!(wait <= algorithm.duration(2 * WINDOW), "{limit}: {wait:?}");
        bench.advance(wait - MICROSECOND).await;
        assert_eq!(
            bench.peek(&limit, 5).await.allowed,
            used == 0,
            "{limit}: 1 µs before {wait:?}"
        );
        bench.advance(MICROSECOND).await;
        assert!(bench.peek(&limit, 5).await.allowed, "{limit}: after {wait:?}");
    }
}

async fn the_largest_limit_admits_itself_and_no_more(bench: Bench) {
    const LARGEST: u64 = 999_999_999_999_999;
    let ten_years = Duration::from_secs(3_653 * 86_400);
    for window in [Duration::from_secs(1), ten_years] {
        let limits: [Limit; 5] = [
            SlidingLog::new(LARGEST, window).precision(100).into(),
            SlidingCounter::new(LARGEST, window).into(),
            FixedWindow::new(LARGEST, window).into(),
            FixedWindow::new(LARGEST, window).aligned().into(),
            FixedWindow::calendar(LARGEST, Calendar::Year, BERLIN).unwrap().into(),
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
