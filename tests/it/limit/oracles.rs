//! Decisions compared with others: those of the token bucket of governor, and those without the requests that are refunded.

use std::{num::NonZeroU32, time::Duration};

use governor::{
    Quota, RateLimiter,
    clock::{Clock as _, FakeRelativeClock},
};
use proptest::{
    collection::vec,
    option,
    prelude::{Just, Strategy, TestCaseError, prop_assert, prop_assert_eq, prop_oneof},
    test_runner::{Config, TestRunner},
};
use tower_quota::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket, store::Outcome};

use crate::support::Bench;

pub(crate) const WINDOW: u64 = 10_000;

pub(crate) fn micros(time: u64) -> Duration {
    Duration::from_micros(time)
}

fn remaining(outcome: &Outcome) -> u64 {
    outcome.states()[0].remaining
}

/// Runs a property on this many timelines, each on a key of its own, and shrinks the failing one.
pub(crate) fn holds<T, P>(
    cases: u32,
    bench: impl Future<Output = Bench>,
    timelines: impl Strategy<Value = T>,
    property: P,
) where
    T: std::fmt::Debug,
    P: AsyncFn(Bench, T) -> Result<(), TestCaseError>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let bench = runtime.block_on(bench);
    let mut runner = TestRunner::new(Config::with_cases(cases));
    let result = runner.run(&timelines, |timeline| {
        runtime.block_on(property(bench.with_a_fresh_key(), timeline))
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

/// A bucket of `burst` tokens that gains one each `period` microseconds, and checks with their pauses and costs.
#[derive(Clone, Debug)]
struct Checks {
    burst: u32,
    period: u64,
    checks: Vec<(u64, u32)>,
}

fn checks(length: usize) -> impl Strategy<Value = Checks> {
    (1..=20u32, prop_oneof![1..=10u64, 1..=5_000u64]).prop_flat_map(move |(burst, period)| {
        let pause = prop_oneof![3 => Just(0), 3 => 0..=period, 1 => 0..=period * u64::from(burst) * 2];
        let cost = prop_oneof![2 => Just(1), 1 => 1..=burst];
        vec((pause, cost), length).prop_map(move |checks| Checks { burst, period, checks })
    })
}

async fn a_bucket_decides_as_governor_does(bench: Bench, timeline: Checks) -> Result<(), TestCaseError> {
    let Checks { burst, period, checks } = timeline;
    let clock = FakeRelativeClock::default();
    let quota = Quota::with_period(micros(period)).expect("a period");
    let burst = NonZeroU32::new(burst).expect("a burst");
    let governor = RateLimiter::direct_with_clock(quota.allow_burst(burst), clock.clone());
    // A window of 1,000 periods, since it is at least 1 ms long.
    let limit = TokenBucket::new(1_000, micros(1_000 * period))
        .burst(burst.get().into())
        .into();

    for (pause, cost) in checks {
        clock.advance(micros(pause));
        bench.advance(micros(pause)).await;
        let cost = NonZeroU32::new(cost).expect("a cost");
        let expected = governor.check_n(cost).expect("within the burst");
        let outcome = bench.check(&limit, cost.get().into()).await;
        let wait = expected.err().map(|denied| denied.wait_time_from(clock.now()));
        prop_assert_eq!(outcome.states()[0].retry_after, wait);
        prop_assert_eq!(outcome.allowed, wait.is_none());
    }
    Ok(())
}

#[test]
fn a_bucket_in_memory_decides_as_governor_does() {
    holds(
        200,
        Bench::memory_store(),
        checks(500),
        a_bucket_decides_as_governor_does,
    );
}

#[test]
fn a_bucket_in_redis_decides_as_governor_does() {
    holds(20, Bench::redis_store(), checks(200), a_bucket_decides_as_governor_does);
}

/// All limits except windows that open with the first request, which may be refunded.
pub(crate) fn limits() -> impl Strategy<Value = Limit> {
    const QUOTA: u64 = 10;
    let window = micros(WINDOW);
    let limits: Vec<Limit> = [
        SlidingLog::new(QUOTA, window).into(),
        SlidingLog::new(QUOTA, window).precision(7).into(),
        SlidingCounter::new(QUOTA, window).into(),
        FixedWindow::new(QUOTA, window).aligned().into(),
        TokenBucket::new(QUOTA, window).into(),
        TokenBucket::new(7, window).burst(QUOTA).into(),
    ]
    .into();
    proptest::sample::select(limits)
}

/// Runs a timeline with refunds, and then one without the refunded requests, on another clock.
async fn refunds_leave_no_more_than_if_nothing_had_been_charged(
    bench: Bench,
    (limit, checks): (Limit, Vec<(u64, u64, Option<usize>)>),
) -> Result<(), TestCaseError> {
    // The clock of the other timeline starts at the same time.
    let other = Bench::memory_store().await;
    let start = bench.now().max(other.now());
    other.advance(micros(start - other.now())).await;
    bench.advance(micros(start - bench.now())).await;

    let mut admissions = Vec::new();
    // The costs that were not refunded, with the times of their charges.
    let mut net: Vec<(u64, u64)> = Vec::new();
    for (pause, cost, refunds) in checks {
        bench.advance(micros(pause)).await;
        if bench.check(&limit, cost).await.allowed {
            admissions.push(Some((bench.now(), cost)));
            net.push((bench.now(), cost));
        }
        let position = refunds.and_then(|back| admissions.len().checked_sub(back + 1));
        if let Some(position) = position
            && let Some((at, cost)) = admissions[position].take()
        {
            let before = remaining(&bench.peek(&limit, 1).await);
            let after = remaining(&bench.refund(&limit, cost, at).await);
            prop_assert!(before <= after && after - before <= cost, "{before} to {after}");
            net[position].1 = 0;
        }
    }

    for (at, cost) in admissions.into_iter().flatten() {
        other.advance(micros(at - other.now())).await;
        other.charge(&limit, cost).await;
    }
    other.advance(micros(bench.now() - other.now())).await;
    let (left, most) = (
        remaining(&bench.peek(&limit, 1).await),
        remaining(&other.peek(&limit, 1).await),
    );
    prop_assert!(left <= most, "{left} of {most} remain under {limit}");

    if let Limit::TokenBucket(bucket) = limit {
        let (burst, window) = (bucket.quota(), bucket.window().as_micros() as u64);
        for (first, (from, _)) in net.iter().enumerate() {
            let mut admitted = 0;
            for (at, weight) in &net[first..] {
                admitted += weight;
                let most = burst + (burst * (at - from)).div_ceil(window);
                prop_assert!(
                    admitted <= most,
                    "{admitted} from {from} to {at} under {bucket}: {net:?}"
                );
            }
        }
    }
    Ok(())
}

fn refunds() -> impl Strategy<Value = (Limit, Vec<(u64, u64, Option<usize>)>)> {
    let pause = prop_oneof![2 => Just(0), 2 => 0..=20u64, 4 => 0..=WINDOW / 3, 1 => 0..=2 * WINDOW];
    let cost = prop_oneof![2 => Just(1), 3 => 1..=10u64];
    (limits(), vec((pause, cost, option::weighted(0.4, 0..4usize)), 0..30))
}

#[test]
fn refunds_in_memory_leave_no_more_than_if_nothing_had_been_charged() {
    holds(
        3_000,
        Bench::memory_store(),
        refunds(),
        refunds_leave_no_more_than_if_nothing_had_been_charged,
    );
}

#[test]
fn refunds_in_redis_leave_no_more_than_if_nothing_had_been_charged() {
    holds(
        60,
        Bench::redis_store(),
        refunds(),
        refunds_leave_no_more_than_if_nothing_had_been_charged,
    );
}
