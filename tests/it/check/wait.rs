//! Requests that wait for a limit instead of being denied, in every store.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use fastrand::Rng;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use tokio::{
    task::{JoinSet, yield_now},
    time::{Instant, advance, timeout},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    AcquireError, ClientLibrary, Concurrency, FailureMode, FixedWindow, Key, Limit, Limiter, MemoryStore, Policies,
    Policy, RateLimitLayer, SlidingCounter, SlidingLog, TokenBucket, key,
    store::{Charge, ErrorKind, Operation, Outcome, Store, StoreRequest},
};

use crate::support::{Bench, Broken, Clock, Cluster, Counted, Redis, connected, each_store, patient};

each_store! {
    a_reservation_counts_at_the_time_at_which_it_fits
    no_interval_of_a_bucket_holds_more_than_its_tokens_at_the_turns
    reservations_of_one_cost_have_turns_in_their_order
    a_wait_that_cannot_end_in_time_is_denied_with_its_true_length
    a_wait_of_a_microsecond_is_waited_for
    a_full_queue_is_denied_at_once
    a_caller_that_leaves_a_log_gives_its_turn_back
    a_caller_that_leaves_a_bucket_gives_back_the_last_turn_only
    a_refund_after_the_last_turn_gives_back_no_token_that_has_come
    a_request_waits_for_the_latest_turn_and_delays_no_other
    a_denied_request_names_those_that_deny_and_not_those_that_would_wait
    many_entries_of_another_clock_after_a_turn_are_removed_by_several_calls
    a_request_that_waits_for_more_entries_than_a_call_reads_is_denied
    a_reset_is_one_window_at_most_for_turns_of_another_clock
    a_turn_of_another_limit_is_counted_beside_entries_that_have_expired
    entries_of_another_clock_between_turns_stay
    turns_of_another_clock_behind_those_of_this_one_are_removed
    turns_of_another_clock_that_have_come_are_removed
    a_clock_that_is_set_back_keeps_the_turns_and_drops_what_it_has_left
    a_request_waits_although_a_clock_has_left_entries_between_turns
    a_key_lives_until_its_last_turn_has_expired
    a_turn_is_one_beneath_any_debt
    algorithms_that_cannot_wait_must_have_room_at_once
    algorithms_that_cannot_wait_count_at_once_beside_one_that_waits
}

const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(3_600);
const MOST: u64 = 500;

fn micros(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

/// The turn of the only charge of an admitted request.
fn turn(bench: &Bench, outcome: &Outcome) -> Option<u64> {
    let turn = outcome.states()[0].decided_at.map_or(bench.now(), micros);
    outcome.allowed.then_some(turn)
}

async fn a_reservation_counts_at_the_time_at_which_it_fits(bench: Bench) {
    let start = bench.now();
    for (limit, turns) in [
        (
            SlidingLog::new(2, SECOND).into(),
            [0, 0, 1_000_000, 1_000_000, 2_000_000],
        ),
        (TokenBucket::per_second(2).into(), [0, 0, 500_000, 1_000_000, 1_500_000]),
    ] {
        let bench = bench.with_a_fresh_key();
        for after in turns {
            let outcome = bench.reserve(&limit, 1, LONG, MOST).await;
            assert_eq!(turn(&bench, &outcome), Some(start + after), "{limit}");
            assert_eq!(outcome.states()[0].retry_after, None);
        }
        // A check queues behind those that wait.
        let wait = bench.check(&limit, 1).await.states()[0].retry_after;
        assert_eq!(wait, Some(2 * SECOND), "{limit}");
        assert_eq!(bench.peek(&limit, 1).await.states()[0].remaining, 0);
    }
}

/// A random timeline of reservations, checks, refunds and time; the admissions that were not refunded, by time.
async fn timeline(bench: &Bench, limit: &Limit, longest_step: u64, rng: &mut Rng) -> Vec<(u64, u64)> {
    let mut admitted: Vec<(u64, u64)> = Vec::new();
    let units = rng.bool();
    for _ in 0..120 {
        let cost = if units { 1 } else { rng.u64(1..=limit.quota().min(4)) };
        match rng.u32(..10) {
            0..=5 => {
                let longest = Duration::from_micros(rng.u64(..5 * longest_step));
                let outcome = bench.reserve(limit, cost, longest, [3, MOST][rng.usize(..2)]).await;
                if let Some(turn) = turn(bench, &outcome) {
                    assert!(turn <= bench.now() + micros(longest));
                    admitted.push((turn, cost));
                }
            }
            6 => {
                if bench.check(limit, cost).await.allowed {
                    admitted.push((bench.now(), cost));
                }
            }
            7 if !admitted.is_empty() => {
                // One that still waits leaves.
                let position = rng.usize(..admitted.len());
                let (at, cost) = admitted[position];
                let before = bench.peek(limit, 1).await;
                if at > bench.now() {
                    bench.refund(limit, cost, at).await;
                    // It may be kept: then it counts, although its caller has left.
                    if bench.peek(limit, 1).await != before {
                        admitted.swap_remove(position);
                    }
                }
            }
            _ => bench.advance(Duration::from_micros(rng.u64(..longest_step))).await,
        }
    }
    admitted.sort_unstable();
    admitted
}

async fn no_interval_of_a_bucket_holds_more_than_its_tokens_at_the_turns(bench: Bench) {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    for _ in 0..40 {
        let bench = bench.with_a_fresh_key();
        let (rate, burst) = (rng.u64(1..=7), rng.u64(1..=8));
        let limit = TokenBucket::new(rate, Duration::from_micros(10_000))
            .burst(burst)
            .into();
        let admitted = timeline(&bench, &limit, 10_000, &mut rng).await;
        for (from, (since, _)) in admitted.iter().enumerate() {
            let mut weight = 0;
            for (until, cost) in &admitted[from..] {
                weight += cost;
                // Turns are whole microseconds, rounded up.
                let tokens = (until - since + 1) * rate / 10_000;
                assert!(
                    weight <= burst + tokens,
                    "{weight} from {since} to {until} of {limit}: {admitted:?}"
                );
            }
        }
    }
}

async fn reservations_of_one_cost_have_turns_in_their_order(bench: Bench) {
    for limit in [
        Limit::from(SlidingLog::new(3, SECOND)),
        TokenBucket::per_second(3).into(),
    ] {
        let bench = bench.with_a_fresh_key();
        let mut last = 0;
        for number in 0..60 {
            let turn = turn(&bench, &bench.reserve(&limit, 1, LONG, MOST).await).expect("it may wait");
            assert!(turn >= last, "{limit}: {number}");
            last = turn;
            bench.advance(Duration::from_millis(number % 5 * 50)).await;
        }
        // As late as the limit requires, and no later.
        let start = bench.now();
        assert!(last >= start && last - start <= 20_000_000, "{limit}: {}", last - start);
    }
}

async fn a_wait_that_cannot_end_in_time_is_denied_with_its_true_length(bench: Bench) {
    for limit in [
        Limit::from(SlidingLog::new(1, SECOND)),
        TokenBucket::per_second(1).into(),
    ] {
        let bench = bench.with_a_fresh_key();
        for _ in 0..3 {
            assert!(bench.reserve(&limit, 1, LONG, MOST).await.allowed);
        }
        let short = 3 * SECOND - Duration::from_micros(1);
        let denied = bench.reserve(&limit, 1, short, MOST).await;
        assert!(!denied.allowed);
        assert_eq!(denied.states()[0].retry_after, Some(3 * SECOND), "{limit}");
        assert!(
            bench.reserve(&limit, 1, 3 * SECOND, MOST).await.allowed,
            "the denied one counts nothing"
        );

        let never = bench.reserve(&limit, 2, LONG, MOST).await;
        assert!(!never.allowed, "{limit}: a cost above the limit");
    }
}

async fn a_wait_of_a_microsecond_is_waited_for(bench: Bench) {
    let limit = SlidingLog::new(1, SECOND).into();
    assert!(bench.check(&limit, 1).await.allowed);
    bench.advance(SECOND - Duration::from_micros(1)).await;
    assert!(!bench.reserve(&limit, 1, Duration::ZERO, MOST).await.allowed);
    let reserved = bench.reserve(&limit, 1, Duration::from_micros(1), MOST).await;
    assert_eq!(turn(&bench, &reserved), Some(bench.now() + 1));
}

async fn a_full_queue_is_denied_at_once(bench: Bench) {
    for limit in [
        Limit::from(SlidingLog::new(2, SECOND)),
        TokenBucket::per_second(2).into(),
    ] {
        let bench = bench.with_a_fresh_key();
        let admitted = async |times: usize| {
            let mut admitted = 0;
            for _ in 0..times {
                admitted += u64::from(bench.reserve(&limit, 1, LONG, 5).await.allowed);
            }
            admitted
        };
        assert_eq!(admitted(20).await, 2 + 5, "{limit}");
        bench.advance(SECOND).await;
        assert_eq!(admitted(20).await, 2, "{limit}: as many as left the queue");
    }
}

async fn a_caller_that_leaves_a_log_gives_its_turn_back(bench: Bench) {
    let limit = SlidingLog::new(1, SECOND).into();
    let reserve = async || turn(&bench, &bench.reserve(&limit, 1, LONG, MOST).await).expect("it may wait");
    let [_, second, third, fourth] = [reserve().await, reserve().await, reserve().await, reserve().await];
    bench.refund(&limit, 1, fourth).await;
    assert_eq!(reserve().await, fourth);

    // The others keep their turns, and the queue is shorter by one.
    bench.refund(&limit, 1, second).await;
    assert_eq!(reserve().await, fourth + 1_000_000);
    assert_eq!(third, second + 1_000_000);
    bench.advance(4 * SECOND).await;
    assert!(!bench.check(&limit, 1).await.allowed);
    bench.advance(SECOND).await;
    assert!(bench.check(&limit, 1).await.allowed);
}

async fn a_caller_that_leaves_a_bucket_gives_back_the_last_turn_only(bench: Bench) {
    let limit = TokenBucket::per_second(1).into();
    let reserve = async || turn(&bench, &bench.reserve(&limit, 1, LONG, MOST).await).expect("it may wait");
    let [_, second, _, fourth] = [reserve().await, reserve().await, reserve().await, reserve().await];
    bench.refund(&limit, 1, fourth).await;
    assert_eq!(reserve().await, fourth);
    bench.refund(&limit, 1, second).await;
    assert_eq!(reserve().await, fourth + 1_000_000);

    // From the back, each one is given back.
    bench.refund(&limit, 1, fourth + 1_000_000).await;
    bench.refund(&limit, 1, fourth).await;
    assert_eq!(reserve().await, fourth);
}

async fn a_refund_after_the_last_turn_gives_back_no_token_that_has_come(bench: Bench) {
    let limit = TokenBucket::per_second(2).into();
    let start = bench.now();
    assert!(bench.check(&limit, 2).await.allowed);
    let waiting = bench.reserve(&limit, 1, LONG, MOST).await;
    assert_eq!(turn(&bench, &waiting), Some(start + 500_000));

    bench.advance(SECOND).await;
    bench.refund(&limit, 2, start).await;
    assert_eq!(bench.peek(&limit, 1).await.states()[0].remaining, 1);
}

async fn a_request_waits_for_the_latest_turn_and_delays_no_other(bench: Bench) {
    let (fast, slow): (Limit, Limit) = (
        SlidingLog::new(3, SECOND).into(),
        SlidingLog::new(1, 10 * SECOND).into(),
    );
    let (all, one) = (Key::from("all"), Key::from("one"));
    let charges = [
        Charge::new("fast", &fast, &all, 1).wait_up_to(LONG),
        Charge::new("slow", &slow, &one, 1).wait_up_to(LONG),
    ];
    let mut turns = Vec::new();
    for _ in 0..2 {
        let response = bench
            .store
            .decide(&[StoreRequest::new(Operation::Reserve, &charges)])
            .await
            .expect("a response");
        let states = response.outcomes()[0].states();
        turns.push(
            states
                .iter()
                .map(|state| state.decided_at.map_or(bench.now(), micros) - bench.now())
                .collect::<Vec<_>>(),
        );
    }
    assert_eq!(turns, [[0, 0], [10_000_000, 10_000_000]]);

    // The log of all callers has room for one more now, and counts the other in ten seconds.
    let mut waits = Vec::new();
    for _ in 0..3 {
        let request = [StoreRequest::new(Operation::Reserve, &charges[..1])];
        let response = bench.store.decide(&request).await.expect("a response");
        waits.push(
            response.outcomes()[0].states()[0]
                .decided_at
                .map_or(0, |turn| micros(turn) - bench.now()),
        );
    }
    assert_eq!(waits, [0, 1_000_000, 1_000_000]);

    // A policy that does not wait denies.
    let charges = [charges[0], charges[1].wait_up_to(Duration::ZERO)];
    let response = bench
        .store
        .decide(&[StoreRequest::new(Operation::Reserve, &charges)])
        .await
        .expect("a response");
    assert!(!response.outcomes()[0].allowed);
    assert_eq!(response.outcomes()[0].states()[1].retry_after, Some(20 * SECOND));
}

async fn a_denied_request_names_those_that_deny_and_not_those_that_would_wait(bench: Bench) {
    for slow in [
        Limit::from(SlidingLog::new(1, 9 * SECOND)),
        TokenBucket::new(1, 9 * SECOND).into(),
    ] {
        let (key, fast) = (Key::from(slow.to_string()), Limit::from(SlidingLog::new(1, SECOND)));
        let charges = [
            Charge::new("slow", &slow, &key, 1).wait_up_to(LONG),
            Charge::new("fast", &fast, &key, 1),
        ];
        let reserve = async || {
            let response = bench
                .store
                .decide(&[StoreRequest::new(Operation::Reserve, &charges)])
                .await;
            response.expect("a response").outcomes()[0].clone()
        };
        assert!(reserve().await.allowed);
        let denied = reserve().await;
        let waits: Vec<_> = denied.states().iter().map(|state| state.retry_after).collect();
        assert!(!denied.allowed);
        assert_eq!(waits, [None, Some(SECOND)], "{slow}");

        // After that wait it is held.
        bench.advance(SECOND).await;
        assert!(reserve().await.allowed, "{slow}");
    }
}

async fn a_turn_of_another_limit_is_counted_beside_entries_that_have_expired(bench: Bench) {
    let (short, long): (Limit, Limit) = (SlidingLog::new(1, SECOND).into(), SlidingLog::new(1, LONG).into());
    let key = Key::from("k");
    let charges =
        [("test", &short), ("long", &long)].map(|(policy, limit)| Charge::new(policy, limit, &key, 1).wait_up_to(LONG));
    for _ in 0..2 {
        let request = [StoreRequest::new(Operation::Reserve, &charges)];
        let response = bench.store.decide(&request).await.expect("a response");
        assert!(response.outcomes()[0].allowed);
        bench.advance(SECOND).await;
    }
    assert_eq!(bench.peek(&short, 1).await.states()[0].remaining, 0);
}

/// To look for them would read a long queue at each check.
async fn entries_of_another_clock_between_turns_stay(bench: Bench) {
    let (limit, higher) = (
        SlidingLog::new(2, 10 * SECOND).into(),
        SlidingLog::new(10, 10 * SECOND).into(),
    );
    // The turns are after 10 and 20 seconds, the entries of another clock after 15 and 16.
    assert!(bench.check(&limit, 2).await.allowed);
    for _ in 0..2 {
        assert!(bench.reserve(&limit, 2, LONG, MOST).await.allowed);
    }
    bench.advance(15 * SECOND).await;
    bench.charge(&limit, 1).await;
    bench.advance(SECOND).await;
    bench.charge(&limit, 1).await;
    bench.set_back(16 * SECOND).await;
    assert!(!bench.check(&limit, 1).await.allowed);
    assert_eq!(bench.peek(&higher, 1).await.states()[0].remaining, 4);
}

async fn turns_of_another_clock_behind_those_of_this_one_are_removed(bench: Bench) {
    let (limit, higher) = (
        SlidingLog::new(2, 10 * SECOND).into(),
        SlidingLog::new(10, 10 * SECOND).into(),
    );
    assert!(bench.check(&limit, 2).await.allowed);
    assert!(bench.reserve(&limit, 2, LONG, MOST).await.allowed);
    bench.advance(5 * SECOND).await;
    assert!(bench.reserve(&limit, 2, LONG, MOST).await.allowed);
    bench.set_back(5 * SECOND).await;
    assert_eq!(bench.peek(&higher, 1).await.states()[0].remaining, 4);
    assert!(!bench.check(&limit, 1).await.allowed);
    assert_eq!(bench.peek(&higher, 1).await.states()[0].remaining, 6);
}

/// They are admissions like others, whatever they weigh.
async fn turns_of_another_clock_that_have_come_are_removed(bench: Bench) {
    let limit = SlidingLog::new(2, 10 * SECOND).into();
    for cost in [1, 2] {
        let bench = bench.with_a_fresh_key();
        assert!(bench.check(&limit, 2).await.allowed);
        assert!(bench.reserve(&limit, cost, LONG, MOST).await.allowed);
        bench.advance(15 * SECOND).await;
        bench.charge(&limit, 2).await;
        bench.set_back(15 * SECOND).await;
        assert!(bench.check(&limit, 2).await.allowed, "{cost}");
    }
}

/// A call removes less than 1,000 of them.
async fn many_entries_of_another_clock_after_a_turn_are_removed_by_several_calls(bench: Bench) {
    let limit = SlidingLog::new(2, 10 * SECOND).into();
    let higher = SlidingLog::new(2_000, 10 * SECOND).into();
    assert!(bench.check(&limit, 2).await.allowed);
    assert!(bench.reserve(&limit, 1, LONG, MOST).await.allowed);
    bench.advance(5 * SECOND).await;
    for _ in 0..1_900 {
        assert!(bench.check(&higher, 1).await.allowed);
    }
    bench.set_back(5 * SECOND).await;

    for members in [908, 2, 2] {
        let denied = bench.check(&limit, 1).await.states()[0];
        assert_eq!(
            (denied.retry_after, denied.reset_after),
            (Some(10 * SECOND), 20 * SECOND)
        );
        assert_eq!(bench.members().await.unwrap_or(members), members);
    }
}

/// A wait for more entries than a call reads is a lower bound.
async fn a_request_that_waits_for_more_entries_than_a_call_reads_is_denied(bench: Bench) {
    let limit = SlidingLog::new(1_202, 10 * SECOND).into();
    assert!(bench.check(&limit, 2).await.allowed);
    for _ in 0..1_200 {
        bench.advance(Duration::from_micros(1)).await;
        assert!(bench.check(&limit, 1).await.allowed);
    }
    assert!(!bench.reserve(&limit, 998, LONG, 2_000).await.allowed);
    let start = bench.now() - 1_200;
    let reserved = bench.reserve(&limit, 997, LONG, 2_000).await;
    // The first entry weighs 2.
    assert_eq!(turn(&bench, &reserved), Some(start + 995 + 10_000_000));
}

/// What is reserved beside it may count later than its own limit requires.
async fn a_reset_is_one_window_at_most_for_turns_of_another_clock(bench: Bench) {
    let (limit, higher): (Limit, Limit) = (
        SlidingLog::new(1, 10 * SECOND).into(),
        SlidingLog::new(8, 10 * SECOND).into(),
    );
    let key = Key::from("k");
    let charges = [("test", &limit), ("higher", &higher)];
    let charges = charges.map(|(policy, limit)| Charge::new(policy, limit, &key, 1).wait_up_to(LONG));
    let reserve = async || {
        let request = [StoreRequest::new(Operation::Reserve, &charges)];
        let response = bench.store.decide(&request).await.expect("a response");
        let outcome = &response.outcomes()[0];
        assert!(outcome.allowed);
        [0, 1].map(|charge| outcome.states()[charge].reset_after)
    };
    assert_eq!(reserve().await, [10 * SECOND; 2]);
    assert_eq!(reserve().await, [20 * SECOND; 2]);
    bench.set_back(5 * SECOND).await;
    assert_eq!(reserve().await, [10 * SECOND; 2]);
    assert_eq!(reserve().await, [20 * SECOND, 10 * SECOND]);
}

async fn a_request_waits_although_a_clock_has_left_entries_between_turns(bench: Bench) {
    let limit = SlidingLog::new(2, 10 * SECOND).into();
    let start = bench.now();
    for after in [0, 0, 10_000_000, 10_000_000] {
        let outcome = bench.reserve(&limit, 1, LONG, MOST).await;
        assert_eq!(turn(&bench, &outcome), Some(start + after));
    }
    bench.advance(8 * SECOND).await;
    assert!(bench.charge(&limit, 1).await.allowed);
    bench.set_back(8 * SECOND).await;
    let outcome = bench.reserve(&limit, 1, LONG, MOST).await;
    assert_eq!(turn(&bench, &outcome), Some(start + 20_000_000));
}

async fn a_clock_that_is_set_back_keeps_the_turns_and_drops_what_it_has_left(bench: Bench) {
    let limit = SlidingLog::new(2, 10 * SECOND).into();
    assert!(bench.check(&limit, 2).await.allowed);
    bench.set_back(100 * SECOND).await;

    // What the clock has left is dropped by the first request that it would deny.
    let start = bench.now();
    for after in [0, 0, 10_000_000, 10_000_000, 20_000_000] {
        let outcome = bench.reserve(&limit, 1, LONG, MOST).await;
        assert_eq!(turn(&bench, &outcome), Some(start + after));
    }
    // The turns are further ahead than entries of this clock may be, and stay.
    for _ in 0..3 {
        assert_eq!(bench.check(&limit, 1).await.states()[0].retry_after, Some(20 * SECOND));
    }
    // Also those that were reserved when the clock was ahead by a second.
    bench.set_back(SECOND).await;
    let denied = bench.check(&limit, 1).await.states()[0];
    assert_eq!(
        (denied.retry_after, denied.reset_after),
        (Some(21 * SECOND), 31 * SECOND)
    );
    let reserved = bench.reserve(&limit, 1, LONG, MOST).await;
    assert_eq!(turn(&bench, &reserved), Some(start + 20_000_000));
    assert_eq!(reserved.states()[0].reset_after, 31 * SECOND);
    // Those of a clock that is gone are dropped too.
    // The others are dropped, and no reset is longer than a window for them.
    bench.set_back(5 * SECOND).await;
    let peeked = bench.peek(&SlidingLog::new(20, 10 * SECOND).into(), 1).await.states()[0];
    assert_eq!((peeked.remaining, peeked.reset_after), (14, 10 * SECOND));
    bench.set_back(200 * SECOND).await;
    assert!(bench.check(&limit, 2).await.allowed);

    // Also one alone.
    let bench = bench.with_a_fresh_key();
    let admitted_at = bench.now();
    assert!(bench.check(&limit, 2).await.allowed);
    assert!(bench.reserve(&limit, 2, LONG, MOST).await.allowed);
    assert_eq!(bench.refund(&limit, 2, admitted_at).await.states()[0].remaining, 0);
    bench.set_back(100 * SECOND).await;
    assert!(bench.check(&limit, 2).await.allowed);
}

async fn a_key_lives_until_its_last_turn_has_expired(bench: Bench) {
    let limit = SlidingLog::new(2, SECOND).into();
    for _ in 0..6 {
        assert!(bench.reserve(&limit, 1, LONG, MOST).await.allowed);
    }
    let last = bench.now() + 3_000_000;
    assert_eq!(bench.peek(&limit, 1).await.states()[0].reset_after, 3 * SECOND);
    let lives_until_then = async || {
        if let Some(expires_at) = bench.expires_at().await {
            let later = 4_000_000_000_000_000;
            assert!(expires_at as u64 * 1_000 >= last + later - 1_000, "{expires_at}");
        }
    };
    lives_until_then().await;
    // Also after a charge, which expires earlier.
    let state = bench.charge(&limit, 1).await.states()[0];
    assert_eq!(state.reset_after, 3 * SECOND);
    lives_until_then().await;
}

async fn a_turn_is_one_beneath_any_debt(bench: Bench) {
    let limit = Limit::from(SlidingLog::new(1, SECOND));
    assert!(bench.check(&limit, 1).await.allowed);
    let reserved = bench.reserve(&limit, 1, SECOND, MOST).await;
    assert_eq!(reserved.states()[0].reset_after, 2 * SECOND);
    for _ in 0..6 {
        let charged = bench.charge(&limit, u64::MAX).await;
        assert_eq!(charged.states()[0].reset_after, 2 * SECOND);
    }
}

async fn algorithms_that_cannot_wait_must_have_room_at_once(bench: Bench) {
    for limit in [
        Limit::from(FixedWindow::new(2, SECOND)),
        FixedWindow::new(2, SECOND).aligned().into(),
        SlidingCounter::new(2, SECOND).into(),
        SlidingLog::new(2, SECOND).precision(10).into(),
    ] {
        let bench = bench.with_a_fresh_key();
        for allowed in [true, true, false] {
            let outcome = bench.reserve(&limit, 1, LONG, MOST).await;
            assert_eq!(outcome.allowed, allowed, "{limit}");
            assert_eq!(outcome.states()[0].decided_at, None);
            assert_eq!(outcome.states()[0].retry_after.is_some(), !allowed);
        }
    }
}

async fn algorithms_that_cannot_wait_count_at_once_beside_one_that_waits(bench: Bench) {
    let waits = Limit::from(SlidingLog::new(1, SECOND));
    for limit in [
        Limit::from(SlidingCounter::new(2, SECOND)),
        SlidingLog::new(2, SECOND).precision(10).into(),
    ] {
        let key = Key::from(limit.to_string());
        for turn in [None, Some(SECOND)] {
            let charges = [("waits", &waits), ("counts", &limit)];
            let charges = charges.map(|(policy, limit)| Charge::new(policy, limit, &key, 1).wait_up_to(LONG));
            let request = [StoreRequest::new(Operation::Reserve, &charges)];
            let response = bench.store.decide(&request).await.expect("a response");
            let now = Duration::from_micros(bench.now());
            let states = response.outcomes()[0].states();
            assert_eq!(states[0].decided_at, turn.map(|turn| now + turn), "{limit}");
            assert_eq!(states[1].decided_at, None, "{limit}");
            assert!(states[1].reset_after <= 2 * SECOND, "{limit}");
        }
    }
}

fn mails(limit: impl Into<Limit>) -> Policy<()> {
    Policy::new("mails", limit.into())
}

#[tokio::test(start_paused = true)]
async fn thirty_tasks_wait_as_long_as_the_limit_requires_with_a_check_each() {
    let store = Arc::new(Counted::new(MemoryStore::new()));
    let limiter = Limiter::new(store.clone(), mails(SlidingLog::per_second(10)));
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..30 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let mut longest = Duration::ZERO;
            for _ in 0..4 {
                let asked = Instant::now();
                drop(
                    limiter
                        .request("smtp")
                        .max_wait(LONG)
                        .acquire()
                        .await
                        .expect("it may wait"),
                );
                longest = longest.max(asked.elapsed());
            }
            longest
        });
    }
    let longest = tasks.join_all().await.into_iter().max().expect("tasks");
    assert_eq!(start.elapsed().as_secs(), 11);
    assert!(longest <= Duration::from_millis(3_010), "{longest:?}");
    assert_eq!(store.calls(), 120);
}

#[tokio::test(start_paused = true)]
async fn a_reset_is_counted_from_the_turn() {
    for limit in [
        Limit::from(SlidingLog::per_second(1)),
        TokenBucket::per_second(1).into(),
    ] {
        let limiter = Limiter::new(MemoryStore::new(), mails(limit));
        let acquire = || limiter.request("42").max_wait(LONG).acquire().into_future();
        let (first, second, third) = tokio::join!(acquire(), acquire(), acquire());
        for (delay, permit) in [first, second, third].into_iter().enumerate() {
            let permit = permit.expect("it may wait");
            let decision = permit;
            assert_eq!(
                (decision.delay(), decision.reset_after()),
                (delay as u32 * SECOND, SECOND)
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_future_gives_its_turn_back() {
    for limit in [
        Limit::from(SlidingLog::per_second(1)),
        TokenBucket::per_second(1).into(),
    ] {
        let limiter = Limiter::new(MemoryStore::new(), mails(limit));
        drop(limiter.acquire("42").await.expect("it fits"));
        let left = timeout(
            Duration::from_millis(200),
            limiter.request("42").max_wait(LONG).acquire().into_future(),
        )
        .await;
        assert!(left.is_err());

        let permit = limiter
            .request("42")
            .max_wait(LONG)
            .acquire()
            .await
            .expect("it may wait");
        assert_eq!(permit.delay(), Duration::from_millis(800));
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_longest_wait_a_call_does_not_wait() {
    let limiter = Limiter::new(MemoryStore::new(), mails(SlidingLog::per_second(1)).wait_up_to(SECOND));
    for delay in [0, 1] {
        let permit = limiter.acquire("42").await.expect("it may wait");
        assert_eq!(permit.delay().as_secs(), delay);
    }
    assert!(
        !limiter.check("42").await.expect("a decision").is_allowed(),
        "a check does not wait"
    );

    let AcquireError::Denied(denied) = limiter
        .request("42")
        .max_wait(Duration::ZERO)
        .acquire()
        .await
        .unwrap_err()
    else {
        panic!("the store does not fail");
    };
    assert_eq!(denied.decision().retry_after(), Some(SECOND));
}

#[tokio::test(start_paused = true)]
async fn while_the_store_fails_this_process_reserves() {
    let limiter = Limiter::new(Broken::default(), mails(SlidingLog::per_second(1)));
    for delay in [0, 1, 1] {
        let permit = limiter
            .request("42")
            .max_wait(SECOND)
            .acquire()
            .await
            .expect("it may wait");
        assert!(permit.store_error().is_some());
        assert_eq!(permit.delay().as_secs(), delay);
    }
    let left = timeout(
        Duration::from_millis(200),
        limiter.request("42").max_wait(SECOND).acquire().into_future(),
    )
    .await;
    assert!(left.is_err());
    let permit = limiter
        .request("42")
        .max_wait(SECOND)
        .acquire()
        .await
        .expect("its turn was given back");
    assert_eq!(permit.delay(), Duration::from_millis(800));
}

#[tokio::test(start_paused = true)]
async fn a_permit_of_a_wait_can_be_refunded() {
    let limiter = Limiter::new(MemoryStore::new(), mails(SlidingLog::per_second(1)));
    drop(limiter.acquire("42").await.expect("it fits"));
    let permit = limiter
        .request("42")
        .max_wait(SECOND)
        .acquire()
        .await
        .expect("it may wait");
    let receipt = permit.take_receipt();
    assert!(!limiter.check("42").await.expect("a decision").is_allowed());
    receipt.refund().await.expect("the store does not fail");
    assert!(limiter.check("42").await.expect("a decision").is_allowed());
}

#[test]
fn a_request_outside_of_a_runtime_does_not_wait_and_is_not_counted() {
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    let clock = tower_quota::ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let limiter = Limiter::new(store, mails(SlidingLog::per_second(1)));
    let ready = || {
        let mut acquire = pin!(limiter.request("42").max_wait(SECOND).acquire().into_future());
        match acquire.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => result,
            Poll::Pending => panic!("the store is in memory"),
        }
    };
    assert!(ready().is_ok());
    for _ in 0..3 {
        let error = ready().unwrap_err();
        assert!(error.to_string().contains("in a tokio runtime"), "{error}");
    }
    clock.advance(SECOND);
    assert!(ready().is_ok());
}

type Body = Empty<bytes::Bytes>;

#[tokio::test(start_paused = true)]
async fn a_layer_holds_requests_and_calls_the_service_at_their_turn() {
    let called = Arc::new(AtomicUsize::new(0));
    let counter = called.clone();
    let inner = service_fn(move |_: Request<Body>| {
        counter.fetch_add(1, Ordering::Relaxed);
        async { Ok::<_, Infallible>(Response::new(Body::new())) }
    });
    let policy = Policy::new("api", SlidingLog::per_second(1))
        .key(key::constant("all"))
        .wait_up_to(2 * SECOND);
    let service = RateLimitLayer::new(MemoryStore::new(), policy).layer(inner);
    let call = || tokio::spawn(service.clone().oneshot(Request::new(Body::new())));

    let start = Instant::now();
    let [first, second, third, fourth] = [call(), call(), call(), call()];
    assert_eq!(first.await.unwrap().unwrap().status(), StatusCode::OK);
    let denied = fourth.await.unwrap().unwrap();
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.headers()["retry-after"], "3");
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(called.load(Ordering::Relaxed), 1);

    // The third leaves before its turn, which is used again.
    advance(Duration::from_millis(500)).await;
    third.abort();
    assert!(third.await.unwrap_err().is_cancelled());
    let fifth = call();
    assert_eq!(second.await.unwrap().unwrap().status(), StatusCode::OK);
    assert_eq!(start.elapsed().as_secs(), 1);
    let response = fifth.await.unwrap().unwrap();
    assert_eq!(start.elapsed().as_secs(), 2);
    assert_eq!(response.headers()["ratelimit"], r#""api";r=0;t=1"#, "as of its turn");
    assert_eq!(called.load(Ordering::Relaxed), 3);
}

/// What two callers share is not used up by one of them that waits for a limit of its own.
#[tokio::test(start_paused = true)]
async fn a_layer_waits_as_long_as_each_policy_with_another_key_allows() {
    let (caller, all) = (|| key::header("caller"), || key::constant("all"));
    let log = || Policy::new("shared", SlidingLog::per_minute(4));
    let slots = || Policy::new("slots", Concurrency::new(2));
    let windows = || Policy::new("windows", FixedWindow::per_minute(4));
    for (with, waits) in [
        (log().key(all()), 0),
        (slots().key(all()), 2),
        (windows().key(all()), 0),
        (log().key(all()).wait_up_to(SECOND), 1),
        (log().key(all()).wait_up_to(9 * SECOND), 2),
        (log().key(caller()), 2),
        (slots().key(caller()), 2),
        (windows().key(caller()), 2),
        (log().key(all()).observe_only(), 2),
        (log().key(all()).apply_if(|_| false), 2),
    ] {
        let name = format!("{with:?}");
        let own = Policy::new("own", SlidingLog::per_second(1))
            .key(caller())
            .wait_up_to(2 * SECOND);
        let layer = RateLimitLayer::new(Clock::new().memory_store(), [own, with]);
        let service = layer.layer(service_fn(async |_: Request<Body>| {
            Ok::<_, Infallible>(Response::new(Body::new()))
        }));
        let call = |caller: &str| {
            let request = Request::get("/").header("caller", caller).body(Body::new());
            let response = service.clone().oneshot(request.expect("a request"));
            tokio::spawn(async { response.await.expect("the service does not fail").status() })
        };

        assert_eq!(call("first").await.unwrap(), StatusCode::OK, "{name}");
        let start = Instant::now();
        let more: Vec<_> = std::iter::repeat_with(|| call("first")).take(3).collect();
        yield_now().await;
        assert_eq!(call("second").await.unwrap(), StatusCode::OK, "{name}");
        let mut admitted = 0;
        for response in more {
            admitted += u32::from(response.await.unwrap() == StatusCode::OK);
        }
        assert_eq!(
            (admitted, start.elapsed().as_secs()),
            (waits, u64::from(waits)),
            "{name}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_and_code_bound_how_long_and_how_many_wait() {
    let waiting = |text: &str| {
        let text = format!("[policies.mails]\nlimit = \"sliding-log 1/s\"\n{text}");
        Policies::from_toml(&text).map(|policies| policies.unkeyed("mails").expect("a policy"))
    };
    let long = || waiting("wait = \"9s\"").unwrap();
    for (policy, waited) in [
        (waiting("").unwrap(), 0),
        (waiting("wait = \"2s\"").unwrap(), 2),
        (waiting("wait = \"2500ms\"").unwrap(), 2),
        (waiting("wait = \"9s\"\nmax-waiting = 3").unwrap(), 3),
        (long().max_waiting(4), 4),
        (long().wait_up_to(SECOND), 1),
        (long(), 9),
    ] {
        let limiter = Limiter::new(Clock::new().memory_store(), policy);
        let (start, mut calls) = (Instant::now(), JoinSet::new());
        for _ in 0..12 {
            let limiter = limiter.clone();
            calls.spawn(async move { limiter.acquire("42").await.is_ok() });
        }
        let admitted = calls.join_all().await.into_iter().filter(|admitted| *admitted).count();
        assert_eq!(
            (admitted, start.elapsed().as_secs()),
            (1 + waited, waited as u64),
            "{limiter:?}"
        );
    }

    for (wrong, taught) in [
        ("wait = \"soon\"", "`500ms`"),
        ("max-waiting = 0", "1 to 999999999999999 units wait"),
    ] {
        let error = waiting(wrong).unwrap_err().to_string();
        assert!(error.contains(taught), "{error}");
    }
    let file = "[policies.mails]\nlimit = \"fixed-window 1/s\"\nwait = \"2s\"";
    let error = Policies::from_toml(file)
        .unwrap()
        .unkeyed("mails")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("use a sliding log without a precision, or a token bucket"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_observing_policy_does_not_hold_requests() {
    let policy = mails(SlidingLog::per_second(1)).wait_up_to(SECOND).observe_only();
    let limiter = Limiter::new(MemoryStore::new(), policy);
    for would_deny in [false, true, true] {
        let permit = limiter
            .request("42")
            .max_wait(SECOND)
            .acquire()
            .await
            .expect("nothing denies");
        assert_eq!(permit.delay(), Duration::ZERO);
        assert!(permit.policies().all(|policy| policy.denial().is_some() == would_deny));
    }
}

#[test]
fn a_policy_that_cannot_wait_is_an_error_that_names_those_that_can() {
    for limit in [
        Limit::from(FixedWindow::per_second(1)),
        SlidingCounter::per_second(1).into(),
        SlidingLog::per_second(1).precision(4).into(),
    ] {
        let error = mails(limit.clone())
            .wait_up_to(SECOND)
            .validate()
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("token bucket") && error.contains(&limit.to_string()),
            "{error}"
        );
    }
}

#[tokio::test]
async fn callers_of_redis_that_leave_before_the_reply_give_their_turns_back() {
    let redis = Redis::start();
    let limiter = Limiter::new(
        connected(patient(), &redis.url()).await,
        mails(SlidingLog::new(1, LONG)),
    );
    drop(limiter.acquire("42").await.expect("it fits"));
    for _ in 0..20 {
        let mut acquire = std::pin::pin!(limiter.request("42").max_wait(3 * LONG).acquire().into_future());
        let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(acquire.as_mut().poll(cx))).await;
        assert!(polled.is_pending());
    }
    crate::support::eventually("all have given their turns back", async || {
        let peeked = limiter.peek("42").await.expect("Redis answers");
        peeked.reset_after() <= LONG && peeked.retry_after().is_some_and(|wait| wait <= LONG)
    })
    .await;
}

#[tokio::test]
async fn requests_that_wait_already_go_on_without_redis() {
    let redis = Redis::start();
    let window = 3 * SECOND;
    let policy = mails(SlidingLog::new(1, window)).failure_mode(FailureMode::Closed);
    let limiter = Limiter::new(connected(patient(), &redis.url()).await, policy);
    drop(limiter.acquire("42").await.expect("it fits"));
    let waiting = limiter.clone();
    let waiting = tokio::spawn(async move { waiting.request("42").max_wait(LONG).acquire().await });
    crate::support::eventually("it has its turn", async || {
        let peeked = limiter.peek("42").await.expect("Redis answers");
        peeked.reset_after() > window
    })
    .await;
    drop(redis);
    assert!(waiting.await.expect("no panic").is_ok());
    let error = limiter.request("42").max_wait(LONG).acquire().await.unwrap_err();
    assert!(matches!(error, AcquireError::Store(_)), "{error}");
}

#[tokio::test]
async fn waits_for_limits_in_several_slots_of_a_cluster_are_refused() {
    let cluster = Cluster::start().await;
    let store = connected(patient().client_library(ClientLibrary::RedisRs), &cluster.url()).await;
    let limit = SlidingLog::per_second(1).into();
    let [one, other, ..] = cluster.keys().await.map(Key::from);
    let of = |key| Charge::new("p", &limit, key, 1).wait_up_to(LONG);
    let reserve = async |charges: &[Charge<'_>]| store.decide(&[StoreRequest::new(Operation::Reserve, charges)]).await;

    for turn in [0, 1, 2] {
        let response = reserve(&[of(&one)]).await.expect("one slot");
        let decided_at = response.outcomes()[0].states()[0]
            .decided_at
            .unwrap_or(response.server_time);
        let delay = decided_at - response.server_time;
        assert!(delay <= turn * SECOND && delay + SECOND > turn * SECOND, "{delay:?}");
    }
    let error = reserve(&[of(&one), of(&other)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("one slot of the cluster"), "{error}");
}
