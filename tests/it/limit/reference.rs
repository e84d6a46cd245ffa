//! Tables and scenarios of other projects, each with its source.

use std::time::Duration;

use tower_quota::{FixedWindow, Limit, SlidingLog, TokenBucket, limit::Calendar, store::Outcome};

use crate::support::{BERLIN, Bench, Clock, Redis, decide, each_store};

// The clock of the test is years ahead of that of this process, from which a store in Redis guesses the calendar.
each_store! {
    a_token_bucket_decides_as_redis_cell_does
    three_in_a_clock_hour_are_three_more_after_the_full_hour
    three_in_any_hour_are_no_more_after_the_full_hour
    three_leave_requests_a_month_in_february_of_a_leap_year
    three_leave_requests_a_month_in_february_of_another_year
    three_leave_requests_a_month_when_summer_time_begins
    three_leave_requests_a_month_when_summer_time_ends
    three_leave_requests_a_month_over_new_year
}

const SECOND: Duration = Duration::from_secs(1);

/// The reply of `CL.THROTTLE`: limited, limit, remaining, and the seconds to retry (-1: now) and to reset.
fn as_redis_cell(limit: &Limit, outcome: &Outcome) -> [i64; 5] {
    let state = outcome.states()[0];
    let seconds = |duration: Duration| duration.as_secs_f64().ceil() as i64;
    [
        i64::from(!outcome.allowed),
        limit.quota() as i64,
        state.remaining as i64,
        state.retry_after.map_or(-1, seconds),
        seconds(state.reset_after),
    ]
}

/// The README of <https://github.com/brandur/redis-cell>: the reply to `CL.THROTTLE user123 15 30 60 1` is 0, 16, 15, -1, 2.
///
/// Its `max_burst` comes on top of the first request: 15 is a burst of 16.
async fn a_token_bucket_decides_as_redis_cell_does(bench: Bench) {
    let limit = TokenBucket::per_minute(30).burst(16).into();
    assert_eq!(as_redis_cell(&limit, &bench.check(&limit, 1).await), [0, 16, 15, -1, 2]);

    for remaining in (0..15).rev() {
        let reset = 2 * (16 - remaining);
        let reply = as_redis_cell(&limit, &bench.check(&limit, 1).await);
        assert_eq!(reply, [0, 16, remaining, -1, reset]);
    }
    assert_eq!(as_redis_cell(&limit, &bench.check(&limit, 1).await), [1, 16, 0, 2, 32]);

    bench.advance(SECOND).await;
    assert_eq!(as_redis_cell(&limit, &bench.check(&limit, 1).await), [1, 16, 0, 1, 31]);
    bench.advance(SECOND).await;
    assert_eq!(as_redis_cell(&limit, &bench.check(&limit, 1).await), [0, 16, 0, -1, 32]);
}

/// Three requests at 1:59 and three at 2:01; returns how many of each are admitted.
///
/// The scenario by which <https://limits.readthedocs.io/en/stable/strategies.html> distinguishes fixed and moving windows.
async fn around_two_o_clock(bench: &Bench, limit: &Limit) -> [usize; 2] {
    let mut admitted = [0; 2];
    for (admitted, moment) in admitted.iter_mut().zip(["01:59:00+00:00[UTC]", "02:01:00+00:00[UTC]"]) {
        bench.set(&format!("2027-03-01T{moment}")).await;
        for _ in 0..3 {
            *admitted += usize::from(bench.check(limit, 1).await.allowed);
        }
    }
    admitted
}

async fn three_in_a_clock_hour_are_three_more_after_the_full_hour(bench: Bench) {
    let hours = FixedWindow::calendar(3, Calendar::Hour, BERLIN).unwrap();
    for limit in [FixedWindow::per_hour(3).aligned(), hours] {
        assert_eq!(
            around_two_o_clock(&bench.with_a_fresh_key(), &limit.into()).await,
            [3, 3]
        );
    }
}

async fn three_in_any_hour_are_no_more_after_the_full_hour(bench: Bench) {
    for limit in [SlidingLog::per_hour(3), SlidingLog::per_hour(3).precision(60)] {
        assert_eq!(
            around_two_o_clock(&bench.with_a_fresh_key(), &limit.into()).await,
            [3, 0]
        );
    }
    // A window that opens with the first request is still open too.
    assert_eq!(
        around_two_o_clock(&bench, &FixedWindow::per_hour(3).into()).await,
        [3, 0]
    );
}

/// Uses up a month one microsecond before its end, so that the wait is one microsecond, and then the whole next one.
///
/// Both moments are local times of Europe/Berlin, whose clocks change at 1:00 UTC on the last Sundays of March and
/// October (Directive 2000/84/EC).
async fn a_month_ends(bench: &Bench, last: &str, first: &str, next_month: Duration) {
    const MICROSECOND: Duration = Duration::from_micros(1);
    let limit = FixedWindow::calendar(3, Calendar::Month, BERLIN).unwrap().into();

    bench.set(&format!("{last}[Europe/Berlin]")).await;
    assert!(bench.check(&limit, 3).await.allowed);
    assert_eq!(bench.check(&limit, 1).await.states()[0].retry_after, Some(MICROSECOND));

    bench.set(&format!("{first}[Europe/Berlin]")).await;
    for remaining in [2, 1, 0] {
        let admitted = bench.check(&limit, 1).await;
        assert!(admitted.allowed);
        assert_eq!(admitted.states()[0].remaining, remaining);
        assert_eq!(admitted.states()[0].reset_after, next_month);
    }
    let denied = bench.check(&limit, 1).await;
    assert_eq!(denied.states()[0].retry_after, Some(next_month));

    bench.advance(next_month - MICROSECOND).await;
    assert!(!bench.check(&limit, 1).await.allowed);
    bench.advance(MICROSECOND).await;
    assert!(bench.check(&limit, 3).await.allowed);
}

const fn hours(hours: u64) -> Duration {
    Duration::from_secs(3_600 * hours)
}

async fn three_leave_requests_a_month_in_february_of_a_leap_year(bench: Bench) {
    let (last, first) = ("2028-01-31T23:59:59.999999+01:00", "2028-02-01T00:00:00+01:00");
    a_month_ends(&bench, last, first, hours(29 * 24)).await;
}

async fn three_leave_requests_a_month_in_february_of_another_year(bench: Bench) {
    let (last, first) = ("2027-01-31T23:59:59.999999+01:00", "2027-02-01T00:00:00+01:00");
    a_month_ends(&bench, last, first, hours(28 * 24)).await;
}

async fn three_leave_requests_a_month_when_summer_time_begins(bench: Bench) {
    let (last, first) = ("2027-02-28T23:59:59.999999+01:00", "2027-03-01T00:00:00+01:00");
    a_month_ends(&bench, last, first, hours(31 * 24 - 1)).await;
}

async fn three_leave_requests_a_month_when_summer_time_ends(bench: Bench) {
    let (last, first) = ("2027-09-30T23:59:59.999999+02:00", "2027-10-01T00:00:00+02:00");
    a_month_ends(&bench, last, first, hours(31 * 24 + 1)).await;
}

async fn three_leave_requests_a_month_over_new_year(bench: Bench) {
    let (last, first) = ("2027-12-31T23:59:59.999999+01:00", "2028-01-01T00:00:00+01:00");
    a_month_ends(&bench, last, first, hours(31 * 24)).await;
}

#[tokio::test]
async fn the_time_of_redis_chooses_the_month_and_the_wrong_guess_is_not_charged() {
    let redis = Redis::start();
    let clock = Clock::new();
    let at = |moment: &str| moment.parse::<jiff::Timestamp>().expect("a moment").as_microsecond() as u64;
    clock.write_to(&redis).await;
    let store = clock.redis_store(&redis).await;
    let limit = Limit::from(FixedWindow::calendar(3, Calendar::Month, BERLIN).unwrap());
    let check = async |key| decide(&store, tower_quota::store::Operation::Check, &limit, key, 1).await;
    // The script is there, and the process has learned of another time.
    clock.set(at("2061-05-04T12:00Z"));
    clock.write_to(&redis).await;
    check("other").await;
    clock.set(at("2062-05-04T12:00Z"));
    clock.write_to(&redis).await;
    redis.command::<()>("CONFIG", ["RESETSTAT"]).await;

    let admitted = check("k").await;
    assert_eq!(admitted.states()[0].remaining, 2, "it was charged once");
    assert_eq!(
        admitted.states()[0].reset_after,
        Duration::from_micros(at("2062-06-01T00:00+02:00") - clock.now())
    );

    assert_eq!(redis.calls("evalsha").await, 2, "the guess was far off");
    assert_eq!(redis.calls("set").await, 1, "and charged nothing");
}
