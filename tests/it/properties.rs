//! The promises of a limit on random histories, against a model that looks at every admission.

use std::time::Duration;

use proptest::{
    collection::vec,
    prelude::{Just, Strategy, TestCaseError, any, prop_assert, prop_assert_eq, prop_oneof},
    test_runner::{Config, TestRunner},
};
use tower_quota::{Limit, SlidingLog};

use crate::support::Bench;

const WINDOW: u64 = 10_000;
const MICROSECOND: Duration = Duration::from_micros(1);

/// Requests as they come, and then one more.
#[derive(Clone, Debug)]
struct History {
    quota: u64,
    arrivals: Vec<Arrival>,
    last: Arrival,
    /// What the limit is lowered to before the last request.
    lowered: u64,
}

#[derive(Clone, Debug)]
struct Arrival {
    /// The microseconds since the one before.
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
    // Half of the histories have nothing heavier than 1, which is stored in another way.
    let histories = (1..=MOST, vec(arrival.clone(), 0..40), arrival, 1..=MOST, any::<bool>());
    histories.prop_map(|(quota, mut arrivals, mut last, lowered, light)| {
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
        }
    })
}

fn limit(quota: u64) -> Limit {
    SlidingLog::new(quota, Duration::from_micros(WINDOW)).into()
}

/// When what was admitted, by the book.
#[derive(Debug, Default)]
struct Model(Vec<(u64, u64)>);

impl Model {
    /// How much was admitted in the half-open window `[from, from + WINDOW)`.
    fn admitted_from(&self, from: u64) -> u64 {
        let window = from..from + WINDOW;
        self.0
            .iter()
            .filter(|(at, _)| window.contains(at))
            .map(|(_, cost)| cost)
            .sum()
    }

    /// The most that was admitted in any half-open window; one that begins with an admission has the most.
    fn most(&self) -> u64 {
        self.0.iter().map(|(at, _)| self.admitted_from(*at)).max().unwrap_or(0)
    }
}

/// Lives through the history and notes what was admitted.
async fn live(bench: &Bench, history: &History) -> Model {
    let mut model = Model::default();
    for arrival in &history.arrivals {
        bench.advance(Duration::from_micros(arrival.after)).await;
        if bench.check(&limit(history.quota), arrival.cost).await.allowed {
            model.0.push((bench.now(), arrival.cost));
        }
    }
    bench.advance(Duration::from_micros(history.last.after)).await;
    model
}

async fn no_window_holds_more_than_the_limit(bench: Bench, history: History) -> Result<(), TestCaseError> {
    let model = live(&bench, &history).await;
    prop_assert!(model.most() <= history.quota, "{model:?}");
    Ok(())
}

async fn whatever_fits_is_admitted(bench: Bench, history: History) -> Result<(), TestCaseError> {
    let model = live(&bench, &history).await;
    let used = model.admitted_from(bench.now() - WINDOW + 1);
    let fits = used + history.last.cost <= history.quota;

    let outcome = bench.check(&limit(history.quota), history.last.cost).await;
    prop_assert_eq!(outcome.allowed, fits, "{} are used: {:?}", used, outcome);
    Ok(())
}

async fn retry_after_is_exact_at_its_edge(bench: Bench, history: History) -> Result<(), TestCaseError> {
    live(&bench, &history).await;
    let (limit, cost) = (limit(history.lowered), history.last.cost);
    let outcome = bench.check(&limit, cost).await;
    let Some(told) = outcome.verdicts[0].retry_after else {
        prop_assert!(outcome.allowed);
        return Ok(());
    };

    prop_assert!(!outcome.allowed);
    bench.advance(told - MICROSECOND).await;
    let early = bench.check(&limit, cost).await;
    prop_assert!(!early.allowed, "1 µs before {told:?}");
    prop_assert_eq!(early.verdicts[0].retry_after, Some(MICROSECOND));
    bench.advance(MICROSECOND).await;
    let in_time = bench.check(&limit, cost).await;
    prop_assert!(in_time.allowed, "after {told:?}: {in_time:?}");
    Ok(())
}

async fn remaining_is_admitted_and_not_one_more(bench: Bench, history: History) -> Result<(), TestCaseError> {
    live(&bench, &history).await;
    let limit = limit(history.lowered);
    let remaining = bench.check(&limit, history.last.cost).await.verdicts[0].remaining;

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

async fn reset_after_is_exact_at_its_edge(bench: Bench, history: History) -> Result<(), TestCaseError> {
    live(&bench, &history).await;
    let limit = limit(history.quota);
    let told = bench.check(&limit, history.last.cost.min(history.quota)).await.verdicts[0].reset_after;

    bench.advance(told - MICROSECOND).await;
    prop_assert!(bench.peek(&limit, 1).await.verdicts[0].remaining < history.quota);
    bench.advance(MICROSECOND).await;
    prop_assert_eq!(bench.peek(&limit, 1).await.verdicts[0].remaining, history.quota);
    Ok(())
}

/// Tries the property on this many histories, each with a key of its own, and shrinks the one that fails.
fn holds<P>(cases: u32, bench: impl Future<Output = Bench>, property: P)
where
    P: AsyncFn(Bench, History) -> Result<(), TestCaseError>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let bench = runtime.block_on(bench);

    let mut runner = TestRunner::new(Config::with_cases(cases));
    let result = runner.run(&histories(), |history| {
        runtime.block_on(property(bench.with_a_fresh_key(), history))
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

macro_rules! properties {
    ($store:ident, $cases:expr; $($property:ident)*) => {
        mod $store {$(
            #[test]
            fn $property() {
                super::holds($cases, crate::support::Bench::$store(), super::$property);
            }
        )*}
    };
}

properties! { memory_store, 2_000;
    no_window_holds_more_than_the_limit
    whatever_fits_is_admitted
    retry_after_is_exact_at_its_edge
    remaining_is_admitted_and_not_one_more
    reset_after_is_exact_at_its_edge
}

properties! { redis_store, 200;
    no_window_holds_more_than_the_limit
    whatever_fits_is_admitted
    retry_after_is_exact_at_its_edge
    remaining_is_admitted_and_not_one_more
    reset_after_is_exact_at_its_edge
}
