//! The promises of each algorithm on random histories, against models with a list of all admissions.

use std::time::Duration;

use proptest::{
    collection::vec,
    option,
    prelude::{Just, Strategy, TestCaseError, any, prop_assert, prop_assert_eq, prop_oneof},
    test_runner::{Config, TestRunner},
};
use tower_quota::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket, limit::Calendar, store::Outcome};

use crate::support::{BERLIN, Bench};

/// The window of all limits here: 10 ms, or an hour for those of a calendar, in `units` of a microsecond.
const WINDOW: u64 = 10_000;
const MICROSECOND: Duration = Duration::from_micros(1);

/// Requests, and then one more.
#[derive(Clone, Debug)]
struct History {
    quota: u64,
    arrivals: Vec<Arrival>,
    last: Arrival,
    /// The quota for the last request, at most the one before.
    lowered: u64,
    /// The units by which the clock is set forward or back before the last request.
    step: i64,
    settings: Settings,
}

/// Which of the settings of its arrivals a history uses.
#[derive(Clone, Copy, Debug)]
struct Settings {
    settles: bool,
}

impl Settings {
    const NONE: Self = Self {
        settles: false,
    };
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
    let cost = || prop_oneof![3 => Just(1), 2 => 1..=MOST];
    let actual = prop_oneof![3 => Just(0), 2 => 0..=2 * MOST];
    let settles = option::weighted(0.4, (0..4usize, actual));
    let arrival = (after, cost(), settles).prop_map(|(after, cost, settles)| Arrival {
        after,
        cost,
        settles,
    });
    let most = 20 * WINDOW as i64;
    let step = prop_oneof![-(WINDOW as i64)..=WINDOW as i64, -most..=most];
    // In half of the histories all costs are 1, which a log stores in another way.
    let histories = (
        1..=MOST,
        vec(arrival.clone(), 0..40),
        arrival,
        1..=MOST,
        step,
        any::<(bool, bool)>(),
    );
    histories.prop_map(
        |(quota, mut arrivals, mut last, lowered, step, (light, settles))| {
            let lowered = lowered.min(quota);
            let most = if light { 1 } else { quota };
            for arrival in &mut arrivals {
                arrival.cost = arrival.cost.min(most);
            }
            last.cost = last.cost.min(lowered);
            History {
                quota,
                arrivals,
                last,
                lowered,
                step,
                settings: Settings { settles },
            }
        },
    )
}

/// An algorithm, and its promise by a model.
#[derive(Clone, Copy)]
struct Algorithm {
    limit: fn(u64) -> Limit,
    /// The microseconds in a unit of time.
    units: u64,
    /// Whether a request of this cost fits now; `None` where both results are correct.
    fits: fn(&Model, u64, u64, u64) -> Option<bool>,
    /// The most that is admitted in a half-open window, wherever it starts.
    most: fn(u64) -> u64,
    /// The same if requests are refunded or settled.
    most_settled: fn(u64) -> u64,
    /// The most quotas that a step of the clock admits in addition.
    quotas_of_a_step: u64,
    /// The settings under which its promises hold.
    settings: Settings,
    /// The most units that a request of cost 1 is delayed after the clock was set back: the slack, which is one window here, since
    /// windows are shorter than a second.
    longest_block: u64,
}

const SETTLES: Settings = Settings {
    settles: true,
};

const LOG: Algorithm = Algorithm {
    limit: |quota| SlidingLog::new(quota, Duration::from_micros(WINDOW)).into(),
    units: 1,
    fits: |model, quota, now, cost| Some(model.admitted(now + 1 - WINDOW, now) + cost <= quota),
    most: |quota| quota,
    most_settled: |quota| quota,
    quotas_of_a_step: 1,
    settings: Settings {
        settles: true,
    },
    longest_block: 2 * WINDOW,
};

const COARSE_LOG: Algorithm = Algorithm {
    limit: |quota| {
        SlidingLog::new(quota, Duration::from_micros(WINDOW))
            .precision(7)
            .into()
    },
    units: 1,
    fits: |model, quota, now, cost| {
        let (on_time, late) = (now + 1 - WINDOW, now + 1 - WINDOW - WINDOW.div_ceil(7));
        match () {
            () if model.admitted(on_time, now) + cost > quota => Some(false),
            // An admission counts too long by less than one seventh of the window.
            () if model.admitted(late + 1, now) + cost <= quota => Some(true),
            () => None,
        }
    },
    most: |quota| quota,
    most_settled: |quota| quota,
    quotas_of_a_step: 1,
    settings: SETTLES,
    longest_block: 2 * WINDOW,
};

const COUNTER: Algorithm = Algorithm {
    limit: |quota| SlidingCounter::new(quota, Duration::from_micros(WINDOW)).into(),
    units: 1,
    fits: |model, quota, now, cost| {
        let start = now - now % WINDOW;
        let (current, previous) = (model.admitted(start, now), model.admitted(start - WINDOW, start - 1));
        let share = (previous * (WINDOW - now % WINDOW)).div_ceil(WINDOW);
        Some(current + share + cost <= quota)
    },
    // The quota at the end of one window, and all but one before the end of the next one.
    most: |quota| 2 * quota - 1,
    most_settled: |quota| 2 * quota - 1,
    quotas_of_a_step: 1,
    settings: SETTLES,
    longest_block: WINDOW + 2 * WINDOW,
};

const FIXED_WINDOW: Algorithm = Algorithm {
    limit: |quota| FixedWindow::new(quota, Duration::from_micros(WINDOW)).into(),
    units: 1,
    fits: |model, quota, now, cost| {
        let mut opened = 0;
        for (at, _) in &model.0 {
            if *at >= opened + WINDOW {
                opened = *at;
            }
        }
        let used = if now < opened + WINDOW {
            model.admitted(opened, now)
        } else {
            0
        };
        Some(used + cost <= quota)
    },
    // A request has opened the first window, and is not left for its end unless it is refunded.
    most: |quota| 2 * quota - 1,
    most_settled: |quota| 2 * quota,
    quotas_of_a_step: 1,
    settings: SETTLES,
    longest_block: 2 * WINDOW,
};

const ALIGNED_WINDOW: Algorithm = Algorithm {
    limit: |quota| FixedWindow::new(quota, Duration::from_micros(WINDOW)).aligned().into(),
    units: 1,
    fits: |model, quota, now, cost| Some(model.admitted(now - now % WINDOW, now) + cost <= quota),
    most: |quota| 2 * quota,
    most_settled: |quota| 2 * quota,
    // A boundary before the step, and one after it.
    quotas_of_a_step: 2,
    settings: SETTLES,
    longest_block: 2 * WINDOW,
};

const CALENDAR_HOUR: Algorithm = Algorithm {
    limit: |quota| FixedWindow::calendar(quota, Calendar::Hour, BERLIN).unwrap().into(),
    units: 3_600_000_000 / WINDOW,
    ..ALIGNED_WINDOW
};

/// Between any two times: at most a burst and the tokens that came in between.
const fn bucket<const RATE: u64>(limit: fn(u64) -> Limit) -> Algorithm {
    Algorithm {
        limit,
        units: 1,
        fits: |model, burst, now, cost| {
            let rate = if RATE > 0 { RATE } else { burst };
            let room = |since: u64| burst * WINDOW + (now - since) * rate;
            let starts = model.0.iter().map(|(at, _)| *at).chain([now]);
            Some(
                starts
                    .into_iter()
                    .all(|since| (model.admitted(since, now) + cost) * WINDOW <= room(since)),
            )
        },
        most: |burst| burst - 1 + if RATE > 0 { RATE } else { burst },
        most_settled: |burst| burst - 1 + if RATE > 0 { RATE } else { burst },
        quotas_of_a_step: 1,
        settings: Settings {
            settles: true,
        },
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

/// All admissions: their times in units, by a clock without a step, and their costs. A cost that was settled above the estimate is
/// the estimate: the bounds are exceeded by that debt.
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

    /// Checks these requests under this quota, and returns the admissions by a clock that is so much later.
    async fn run(&self, quota: u64, arrivals: &[Arrival], settings: Settings, later: i64) -> Model {
        let limit = self.algorithm.limit(quota);
        let mut model = Model::default();
        // The times of the store, until they are settled.
        let mut receipts = Vec::new();
        for arrival in arrivals {
            self.wait(arrival.after).await;
            let cost = arrival.cost;
            let outcome = self.bench.check(&limit, cost).await;
            if outcome.allowed {
                let now = self.bench.now();
                receipts.push(Some(now));
                let at = (now / self.algorithm.units).checked_add_signed(later);
                model.0.push((at.expect("a time after 1970"), cost));
            }
            let settled = arrival.settles.filter(|_| settings.settles);
            if let Some((back, actual)) = settled
                && let Some(position) = receipts.len().checked_sub(back + 1)
                && let Some(admitted_at) = receipts[position].take()
            {
                let (_, cost) = &mut model.0[position];
                if actual < *cost {
                    self.bench.refund(&limit, *cost - actual, admitted_at).await;
                    *cost = actual;
                } else if actual > *cost {
                    self.bench.charge(&limit, actual - *cost).await;
                }
            }
        }
        model
    }

    /// The settings of a history that the algorithm has.
    fn settings(&self, history: &History) -> Settings {
        let (own, of_history) = (self.algorithm.settings, history.settings);
        Settings {
            settles: own.settles && of_history.settles,
        }
    }

    /// The most that is admitted in any window under these settings.
    fn most(&self, quota: u64, settings: Settings) -> u64 {
        match settings.settles {
            true => (self.algorithm.most_settled)(quota),
            false => (self.algorithm.most)(quota),
        }
    }

    /// Checks the requests of the history before the last one, and returns the admissions.
    async fn run_until_the_last(&self, history: &History) -> Model {
        let settings = self.settings(history);
        let model = self.run(history.quota, &history.arrivals, settings, 0).await;
        self.wait(history.last.after).await;
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

async fn no_window_holds_more_than_the_promise(case: Case, history: History) -> Result<(), TestCaseError> {
    let model = case.run_until_the_last(&history).await;
    let most = case.most(history.quota, case.settings(&history));
    prop_assert!(
        model.most() <= most,
        "{} are more than {}: {:?}",
        model.most(),
        most,
        model
    );
    Ok(())
}

async fn a_request_is_admitted_if_and_only_if_it_fits_in_the_model(
    case: Case,
    history: History,
) -> Result<(), TestCaseError> {
    let limit = case.algorithm.limit(history.quota);
    let mut model = Model::default();
    for arrival in history.arrivals.iter().chain([&history.last]) {
        case.wait(arrival.after).await;
        let now = case.algorithm.now(&case.bench);
        let fits = (case.algorithm.fits)(&model, history.quota, now, arrival.cost);

        let outcome = case.bench.check(&limit, arrival.cost).await;
        prop_assert_eq!(
            outcome.allowed,
            fits.unwrap_or(outcome.allowed),
            "{:?} at {}: {:?}",
            arrival,
            now,
            model
        );
        if outcome.allowed {
            model.0.push((now, arrival.cost));
        }
    }
    Ok(())
}

async fn retry_after_is_exact_at_its_edge(case: Case, history: History) -> Result<(), TestCaseError> {
    case.run_until_the_last(&history).await;
    let (bench, limit, cost) = (&case.bench, case.algorithm.limit(history.lowered), history.last.cost);
    let outcome = bench.check(&limit, cost).await;
    let Some(retry_after) = outcome.states()[0].retry_after else {
        prop_assert!(outcome.allowed);
        return Ok(());
    };

    prop_assert!(!outcome.allowed);
    bench.advance(retry_after - MICROSECOND).await;
    let early = bench.check(&limit, cost).await;
    prop_assert!(!early.allowed, "1 µs before {retry_after:?}");
    prop_assert_eq!(early.states()[0].retry_after, Some(MICROSECOND));
    bench.advance(MICROSECOND).await;
    let in_time = bench.check(&limit, cost).await;
    prop_assert!(in_time.allowed, "after {retry_after:?}: {in_time:?}");
    Ok(())
}

async fn remaining_is_admitted_and_not_one_more(case: Case, history: History) -> Result<(), TestCaseError> {
    case.run_until_the_last(&history).await;
    let (bench, limit) = (&case.bench, case.algorithm.limit(history.lowered));
    let remaining = remaining(&bench.check(&limit, history.last.cost).await);

    if remaining > 0 {
        let whole = bench.peek(&limit, remaining).await;
        prop_assert!(whole.allowed, "{remaining} at once: {whole:?}");
    }
    for admitted in 0..remaining {
        let outcome = bench.check(&limit, 1).await;
        prop_assert!(outcome.allowed, "{admitted} of {remaining}: {outcome:?}");
    }
    prop_assert!(!bench.check(&limit, 1).await.allowed, "one more than {remaining}");
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

async fn reset_after_is_exact_at_its_edge(case: Case, history: History) -> Result<(), TestCaseError> {
    case.run_until_the_last(&history).await;
    let (bench, limit) = (&case.bench, case.algorithm.limit(history.quota));
    let reset_after = bench.check(&limit, history.last.cost).await.states()[0].reset_after;

    bench.advance(reset_after - MICROSECOND).await;
    prop_assert!(remaining(&bench.peek(&limit, 1).await) < history.quota);
    bench.advance(MICROSECOND).await;
    let restored = bench.peek(&limit, history.quota).await;
    prop_assert!(restored.allowed);
    prop_assert_eq!(restored.states()[0].reset_after, Duration::ZERO);
    Ok(())
}

/// At most one quota more than without the step, or two in windows that open by the clock; and from then on no more.
async fn a_step_of_the_clock_admits_its_quotas_once(case: Case, history: History) -> Result<(), TestCaseError> {
    let settings = Settings {
        ..case.settings(&history)
    };
    let most = case.most(history.quota, settings);
    let mut model = case.run(history.quota, &history.arrivals, settings, 0).await;
    case.step(&history).await;
    let after = case
        .run(history.quota, &history.arrivals, settings, -history.step)
        .await;
    prop_assert!(after.most() <= most, "{} are more than {most}: {after:?}", after.most());

    model.0.extend(after.0);
    let most = most + case.algorithm.quotas_of_a_step * history.quota;
    prop_assert!(model.most() <= most, "{} are more than {most}: {model:?}", model.most());
    Ok(())
}

async fn a_step_of_the_clock_delays_no_request_for_long(case: Case, history: History) -> Result<(), TestCaseError> {
    let quota = history.quota;
    let limit = case.algorithm.limit(quota);
    case.run(quota, &history.arrivals, Settings::NONE, 0).await;
    case.step(&history).await;

    let longest = case.algorithm.duration(case.algorithm.longest_block);
    let wait = case.bench.peek(&limit, 1).await.states()[0]
        .retry_after
        .unwrap_or_default();
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
                no_window_holds_more_than_the_promise
                a_request_is_admitted_if_and_only_if_it_fits_in_the_model
                retry_after_is_exact_at_its_edge
                remaining_is_admitted_and_not_one_more
                a_denied_request_adds_no_weight_and_no_time_to_live
                reset_after_is_exact_at_its_edge
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
    let ten_years = Duration::from_secs(10 * 365 * 86_400);
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
