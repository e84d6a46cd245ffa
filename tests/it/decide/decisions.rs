//! Scenes in which decisions were wrong, in every store.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use tower_quota::{
    FixedWindow, Key, Limit, MemoryStore, SlidingCounter, SlidingLog, TokenBucket,
    limit::Calendar,
    store::{Charge, Operation, Outcome, Store, StoreRequest},
};

use crate::support::{BERLIN, Bench, Clock, Redis, decide, each_store};

each_store! {
    a_flood_of_charges_beyond_the_limit_is_a_bounded_number_of_entries
    a_log_from_which_1000_entries_expire_with_a_heavy_one_admits_what_the_others_leave
    of_a_batch_of_which_some_fit_the_others_wait_no_longer_than_they_have_to
    a_clock_set_back_after_1000_entries_expired_loses_no_entry
    a_debt_of_many_full_charges_is_clamped_and_forgotten_in_order
    one_check_removes_fewer_than_1000_of_the_entries_that_have_expired
    while_more_than_1000_entries_have_expired_of_which_one_is_heavy_remaining_is_a_lower_bound
    a_heavy_charge_beside_entries_that_have_expired_stays_when_they_are_removed
    a_wait_looks_past_entries_that_have_expired_and_are_still_there
    a_wait_that_would_read_more_than_1000_entries_is_a_lower_bound
    a_reset_looks_past_entries_of_a_clock_that_is_gone
    a_refund_reads_fewer_than_1000_entries
    a_refund_finds_its_entry_where_more_have_expired_than_one_call_removes
    a_bucket_at_its_largest_debt_settles_what_has_come
    the_tokens_that_come_after_a_charge_of_a_bucket_are_first_those_that_stay_charged
    a_window_at_its_largest_debt_counts_no_more
    a_counter_at_its_largest_count_counts_no_more
    a_peek_changes_nothing
}

const SECOND: Duration = Duration::from_secs(1);
const MILLISECOND: Duration = Duration::from_millis(1);
const WINDOW: Duration = Duration::from_secs(10);

fn remaining(outcome: &Outcome) -> u64 {
    outcome.states()[0].remaining
}

async fn a_heavy_charge_beside_entries_that_have_expired_stays_when_they_are_removed(bench: Bench) {
    let limit = SlidingLog::new(3_000, WINDOW).into();
    for _ in 0..2_000 {
        bench.check(&limit, 1).await;
    }
    bench.advance(WINDOW).await;
    assert!(bench.check(&limit, 2).await.allowed);
    for _ in 0..5 {
        bench.check(&limit, 1).await;
    }
    assert_eq!(remaining(&bench.peek(&limit, 1).await), 3_000 - 7);
}

async fn a_peek_changes_nothing(bench: Bench) {
    let limits: [Limit; 8] = [
        SlidingLog::per_minute(5).into(),
        SlidingLog::per_second(2).into(),
        SlidingLog::per_minute(5).precision(4).into(),
        SlidingCounter::per_second(5).into(),
        FixedWindow::per_second(5).into(),
        FixedWindow::per_second(5).aligned().into(),
        TokenBucket::per_second(5).into(),
        tower_quota::Concurrency::new(2).into(),
    ];
    for limit in &limits {
        for cost in [1, 2] {
            let bench = bench.with_a_fresh_key();
            for _ in 0..5 {
                bench.check(limit, cost).await;
            }
            bench.advance(SECOND / 2).await;
            let before = bench.dump().await;
            for peeked in &limits {
                bench.peek(peeked, 1).await;
                bench.peek(peeked, 3).await;
            }
            assert_eq!(bench.dump().await, before, "{limit}");
        }
    }
}

async fn a_flood_of_charges_beyond_the_limit_is_a_bounded_number_of_entries(bench: Bench) {
    let limit = SlidingLog::new(10, 2 * SECOND).into();
    for _ in 0..4 {
        bench.charge_each(&limit, 500).await;
        bench.advance(MILLISECOND / 2).await;
    }
    if let Some(members) = bench.members().await {
        assert!(members <= 13, "{members} members");
    }
    // In order, they leave the window with the last one of their two milliseconds.
    bench.advance(2 * SECOND).await;
    assert_eq!(remaining(&bench.peek(&limit, 1).await), 10);
}

async fn a_log_from_which_1000_entries_expire_with_a_heavy_one_admits_what_the_others_leave(bench: Bench) {
    let limit = SlidingLog::new(5_000, 10 * SECOND).into();
    assert!(bench.check(&limit, 100).await.allowed);
    bench.advance(MILLISECOND).await;
    bench.charge_each(&limit, 1_500).await;
    bench.advance(5 * SECOND).await;
    bench.charge_each(&limit, 500).await;
    bench.advance(5 * SECOND).await;
    // The heavy one is removed, and the others that have expired weigh 1: none of them counts.
    let admitted = bench.check(&limit, 4_000).await;
    assert!(admitted.allowed, "{admitted:?}");
    assert_eq!(remaining(&admitted), 500);
    assert_eq!(remaining(&bench.peek(&limit, 1).await), 500);
}

async fn of_a_batch_of_which_some_fit_the_others_wait_no_longer_than_they_have_to(bench: Bench) {
    let limits: [Limit; 2] = [
        SlidingLog::new(5_000, 10 * SECOND).precision(100_000).into(),
        SlidingLog::new(5_000, 10 * SECOND).into(),
    ];
    for limit in &limits {
        let key = limit.to_string();
        for _ in 0..2_000 {
            assert!(decide(&bench.store, Operation::Check, limit, &key, 2).await.allowed);
            bench.advance(MILLISECOND / 2).await;
        }
        bench.advance(8 * SECOND).await;
        assert!(decide(&bench.store, Operation::Check, limit, &key, 900).await.allowed);
        bench.advance(3 * SECOND).await;

        let charges = [Charge::new("test", limit, &Key::from(key.as_str()), 10)];
        let requests = vec![StoreRequest::new(Operation::Check, &charges); 256];
        let response = bench.store.decide(&requests).await.expect("the store replies");
        let denied: Vec<_> = response.outcomes().iter().filter(|outcome| !outcome.allowed).collect();
        // Each of them removes more, except in a script for the precise log.
        let fits_in_part = bench.is_in_redis() && *limit == limits[0];
        assert_eq!(denied.is_empty(), !fits_in_part);
        for denied in denied {
            let wait = denied.states()[0].retry_after;
            assert!(wait.is_some_and(|wait| wait < SECOND), "{denied:?}");
        }
    }
}

async fn a_clock_set_back_after_1000_entries_expired_loses_no_entry(bench: Bench) {
    let limit = SlidingLog::new(6_000, 10 * SECOND).into();
    bench.charge_each(&limit, 5_000).await;
    bench.advance(12 * SECOND).await;
    bench.check(&limit, 6_000).await;
    bench.set_back(1_500 * MILLISECOND).await;
    // 998 of the expired ones at most were removed, and the heavy one lies ahead.
    for _ in 0..3 {
        let outcome = bench.peek(&limit, 1).await;
        assert_eq!(outcome.states().len(), 1);
    }
    let denied = bench.check(&limit, 6_000).await;
    assert!(!denied.allowed || remaining(&denied) == 0);
}

async fn a_debt_of_many_full_charges_is_clamped_and_forgotten_in_order(bench: Bench) {
    const LARGEST: u64 = 999_999_999_999_999;
    let limit = SlidingLog::new(10, 20 * SECOND).into();
    for _ in 0..12 {
        bench.charge(&limit, LARGEST).await;
        bench.advance(SECOND).await;
    }
    assert_eq!(remaining(&bench.peek(&limit, 1).await), 0);
    // Five were counted, the fifth in part, and of each later one 1.
    bench.advance(12 * SECOND).await;
    assert_eq!(remaining(&bench.peek(&limit, 1).await), 3);
    bench.advance(3 * SECOND).await;
    assert_eq!(remaining(&bench.peek(&limit, 1).await), 6);
}

async fn one_check_removes_fewer_than_1000_of_the_entries_that_have_expired(bench: Bench) {
    let limit = SlidingLog::new(5_000, 10 * SECOND).into();
    bench.charge_each(&limit, 3_000).await;
    bench.advance(10 * SECOND).await;
    for left in [2_006, 1_012, 18, 1] {
        assert!(bench.check(&limit, 1).await.allowed);
        bench.advance(MILLISECOND).await;
        if let Some(members) = bench.members().await {
            assert!(
                (left..=left + 4).contains(&members),
                "{members} members instead of {left}"
            );
        }
    }
}

/// The heavy one is the last that calls remove.
async fn while_more_than_1000_entries_have_expired_of_which_one_is_heavy_remaining_is_a_lower_bound(bench: Bench) {
    let limit = SlidingLog::new(5_000, 10 * SECOND).into();
    bench.charge_each(&limit, 2_500).await;
    bench.advance(MILLISECOND).await;
    assert!(bench.check(&limit, 1_000).await.allowed);
    bench.advance(10 * SECOND).await;

    let mut left = vec![remaining(&bench.peek(&limit, 1).await)];
    for used in 1..=3 {
        left.push(remaining(&bench.check(&limit, 1).await));
        assert!(left.iter().all(|left| *left <= 5_000), "{left:?}");
        if used == 3 {
            assert_eq!(left[3], 5_000 - used, "{left:?}");
        }
    }
    assert!(left[0] < 5_000, "{left:?}");
}

async fn a_wait_looks_past_entries_that_have_expired_and_are_still_there(bench: Bench) {
    let limit = SlidingLog::new(3_000, 10 * SECOND).into();
    bench.charge_each(&limit, 2_000).await;
    bench.advance(5 * SECOND).await;
    bench.charge_each(&limit, 1_000).await;
    bench.advance(5 * SECOND).await;
    let denied = bench.check(&limit, 3_000).await;
    assert_eq!(denied.states()[0].retry_after, Some(5 * SECOND));
    assert_eq!(remaining(&denied), 2_000);
}

async fn a_wait_that_would_read_more_than_1000_entries_is_a_lower_bound(bench: Bench) {
    let limit = SlidingLog::new(4_000, 10 * SECOND).into();
    bench.charge_each(&limit, 1_500).await;
    bench.advance(5 * SECOND).await;
    bench.charge_each(&limit, 1_500).await;
    bench.charge(&limit, 2).await;
    bench.advance(5 * SECOND).await;
    let denied = bench.check(&limit, 4_000).await;
    assert_eq!(denied.states()[0].retry_after, Some(Duration::from_micros(1)));
    let denied = bench.check(&limit, 4_000).await;
    assert_eq!(denied.states()[0].retry_after, Some(5 * SECOND));
}

async fn a_reset_looks_past_entries_of_a_clock_that_is_gone(bench: Bench) {
    let limit = SlidingLog::new(3_000, 10 * SECOND).into();
    bench.charge_each(&limit, 2_500).await;
    bench.set_back(20 * SECOND).await;
    assert!(bench.check(&limit, 1).await.allowed);
    bench.advance(SECOND).await;
    for _ in 0..2 {
        assert!(!bench.peek(&limit, 3_000).await.allowed);
    }
    let denied = bench.peek(&limit, 3_000).await;
    assert!(!denied.allowed);
    assert_eq!(denied.states()[0].reset_after, 9 * SECOND);
}

async fn a_refund_reads_fewer_than_1000_entries(bench: Bench) {
    let limit = SlidingLog::new(3_000, 10 * SECOND).into();
    let admitted_at = bench.now();
    bench.charge_each(&limit, 2_000).await;
    // Memory and Redis read equally many, so that they decide alike.
    assert_eq!(remaining(&bench.refund(&limit, 2_000, admitted_at).await), 1_996);
}

async fn a_refund_finds_its_entry_where_more_have_expired_than_one_call_removes(bench: Bench) {
    let limit = SlidingLog::new(3_000, 10 * SECOND).into();
    bench.charge_each(&limit, 996).await;
    bench.advance(5 * SECOND).await;
    let admitted_at = bench.now();
    assert!(bench.check(&limit, 1).await.allowed);
    bench.advance(5 * SECOND).await;
    assert_eq!(remaining(&bench.refund(&limit, 1, admitted_at).await), 3_000);
}

async fn a_bucket_at_its_largest_debt_settles_what_has_come(bench: Bench) {
    let limit = TokenBucket::new(7, 10 * MILLISECOND).into();
    let full = |outcome: &Outcome| outcome.states()[0].reset_after;
    let most = full(&bench.charge(&limit, 999_999_999_999_999).await);
    bench.advance(30 * MILLISECOND).await;
    // 21 tokens have come, and one is taken.
    let charged = full(&bench.charge(&limit, 1).await);
    let due = most - 30 * MILLISECOND + Duration::from_micros(1_429);
    assert!(
        charged.abs_diff(due) <= Duration::from_micros(1),
        "{charged:?} instead of {due:?}"
    );
}

async fn the_tokens_that_come_after_a_charge_of_a_bucket_are_first_those_that_stay_charged(bench: Bench) {
    let limit = TokenBucket::per_minute(60_000).into();
    // Of a charge of 4,000 before another one, this part stays, and so much has come; so much is returned of the rest.
    for (kept, come, returned) in [
        (2_500, 2_000, 1_500),
        (2_500, 3_000, 1_000),
        (0, 3_000, 1_000),
        (2_500, 5_000, 0),
    ] {
        let bench = bench.with_a_fresh_key();
        let admitted_at = bench.now();
        bench.check(&limit, 4_000).await;
        bench.advance(MILLISECOND).await;
        bench.check(&limit, 4_000).await;
        bench.advance((come - 1) * MILLISECOND).await;
        let refunded = bench.refund_beside(kept, &limit, 4_000 - kept, admitted_at).await;
        assert_eq!(
            remaining(&refunded),
            52_000 + u64::from(come) + returned,
            "{kept}, {come}"
        );
    }
}

async fn a_window_at_its_largest_debt_counts_no_more(bench: Bench) {
    const LARGEST: u64 = 999_999_999_999_999;
    let limit = FixedWindow::new(10, WINDOW).into();
    let admitted_at = bench.now();
    for _ in 0..4 {
        bench.charge(&limit, LARGEST).await;
    }
    // Less than three of them were counted.
    for left in [0, 0, 10] {
        assert_eq!(remaining(&bench.refund(&limit, LARGEST, admitted_at).await), left);
    }
}

async fn a_counter_at_its_largest_count_counts_no_more(bench: Bench) {
    const LARGEST: u64 = (1 << 52) / 3_600_000_000;
    let limit = SlidingCounter::per_hour(10).into();
    bench.set("2027-01-15T08:00Z[UTC]").await;
    let admitted_at = bench.now();
    bench.charge(&limit, LARGEST - 1).await;
    bench.charge(&limit, LARGEST).await;
    let refunded = bench.refund(&limit, LARGEST - 4, admitted_at).await;
    assert_eq!(remaining(&refunded), 6);
}

/// By its clock, the calendar that the store guesses does not fit.
#[tokio::test]
async fn a_calendar_that_is_guessed_wrong_charges_no_other_request_of_the_call_twice() {
    let (redis, clock) = (Redis::start(), Clock::new());
    clock.set(
        "2062-05-04T12:00Z"
            .parse::<jiff::Timestamp>()
            .expect("a moment")
            .as_microsecond() as u64,
    );
    clock.write_to(&redis).await;
    let store = clock.redis_store(&redis).await;
    let log = SlidingLog::per_minute(5).into();
    let month = FixedWindow::calendar(9, Calendar::Month, BERLIN).unwrap().into();
    let keys = ["a", "b", "c"].map(Key::from);
    let others = [
        [Charge::new("log", &log, &keys[0], 1)],
        [Charge::new("log", &log, &keys[1], 1)],
        [Charge::new("month", &month, &keys[2], 1)],
    ];
    let checks = others
        .each_ref()
        .map(|charges| StoreRequest::new(Operation::Check, charges));
    let answer = store.decide(&checks).await.expect("Redis answers");
    let left: Vec<_> = answer.outcomes().iter().map(remaining).collect();
    assert_eq!(left, [4, 4, 8]);
}

/// Each reading of the clock takes a microsecond, and another thread may run before the time is used.
#[test]
fn decisions_about_one_key_come_in_the_order_of_their_times() {
    const CHECKS: u64 = 2_000;
    let time = Arc::new(AtomicU64::new(1_800_000_000_000_000));
    let clock = move || {
        let now = time.fetch_add(1, Ordering::Relaxed);
        thread::yield_now();
        Duration::from_micros(now)
    };
    let store = MemoryStore::builder().clock(clock).build();
    let limit: Limit = FixedWindow::per_day(1_000_000).into();
    for charges in [1, 2] {
        let (store, limit) = (&store, &limit);
        let mut seen: Vec<(Duration, u64)> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(move || {
                        let keys = [Key::from("k"), Key::from("l")];
                        let charges: Vec<_> = keys[..charges]
                            .iter()
                            .map(|key| Charge::new("test", limit, key, 1))
                            .collect();
                        let check = || match store
                            .decide(&[StoreRequest::new(Operation::Check, &charges)])
                            .try_ready()
                        {
                            Ok(answer) => answer.expect("memory answers"),
                            Err(_) => panic!("memory answers at once"),
                        };
                        let answers = (0..CHECKS).map(|_| check());
                        answers
                            .map(|answer| (answer.server_time, remaining(&answer.outcomes()[0])))
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            let seen = threads.into_iter().map(|thread| thread.join().expect("no panic"));
            seen.flatten().collect()
        });

        seen.sort_unstable();
        let early = seen.windows(2).find(|pair| pair[0].1 <= pair[1].1);
        assert_eq!(early, None, "what remains is less at a later time");
    }
}

#[tokio::test]
async fn a_batch_is_decided_at_one_time() {
    let time = Arc::new(AtomicU64::new(1_800_000_000_000_000));
    let store = MemoryStore::builder()
        .clock(move || Duration::from_micros(time.fetch_add(1, Ordering::Relaxed)))
        .build();
    let limit = Limit::from(FixedWindow::per_day(5));
    let keys = ["a", "b", "a", "c"].map(Key::from);
    let charges = keys.each_ref().map(|key| [Charge::new("test", &limit, key, 1)]);
    let mut requests: Vec<_> = charges
        .iter()
        .map(|charges| StoreRequest::new(Operation::Check, charges))
        .collect();
    // A key that comes and goes with one call is not among the keys.
    requests.push(StoreRequest::new(Operation::Reset, &charges[1]));
    let answer = store.decide(&requests).await.expect("memory answers");
    let resets: Vec<_> = answer.outcomes()[..4]
        .iter()
        .map(|outcome| outcome.states()[0].reset_after)
        .collect();
    assert!(resets.iter().all(|reset| *reset == resets[0]), "{resets:?}");
    assert_eq!((store.len(), remaining(&answer.outcomes()[2])), (2, 3));
    assert_eq!(remaining(&decide(&store, Operation::Peek, &limit, "b", 1).await), 5);
}
