//! What every store promises under every algorithm, with the clock handed in.

use std::time::Duration;

use tower_quota::{
    Key, Limit, SlidingLog,
    store::{Charge, Operation, Outcome, Request},
};

use crate::support::Bench;

/// Makes a limit of one algorithm: so many per window.
type Algorithm = fn(u64, Duration) -> Limit;

fn sliding_log(quota: u64, window: Duration) -> Limit {
    SlidingLog::new(quota, window).into()
}

/// The suite, for one store under each of these algorithms.
macro_rules! store_tests {
    ($store:ident: $($algorithm:ident),*) => {
        mod $store {$(
            mod $algorithm {
                promises! { $store $algorithm
                    limit_3_admits_3_and_not_4
                    one_admission_of_the_whole_limit_fits
                    retry_after_is_exact
                    retry_after_is_exact_for_a_cost_above_one
                    retry_after_is_exact_after_the_limit_was_lowered
                    retry_after_is_exact_after_the_window_was_shortened
                    windows_are_half_open
                    a_denied_request_does_not_prolong_the_block
                    a_denied_request_adds_no_weight
                    remaining_is_true
                    waiting_reset_after_restores_everything
                    peek_counts_nothing
                    peek_says_what_a_check_would
                    a_charge_may_exceed_the_limit_and_later_requests_pay
                    reset_forgets
                    several_charges_are_all_or_nothing
                    several_charges_that_fit_all_count
                    requests_of_one_batch_are_decided_one_after_the_other
                    two_policies_never_share_a_count
                    two_keys_never_share_a_count
                    a_clock_set_back_blocks_for_one_window_and_a_second_at_most
                    what_a_clock_that_is_gone_has_left_blocks_nobody
                    a_clock_set_back_admits_one_limit_more_at_most
                    a_clock_set_back_a_little_resets_nothing
                }
            }
        )*}
    };
}

macro_rules! promises {
    ($store:ident $algorithm:ident $($promise:ident)*) => {$(
        #[tokio::test]
        async fn $promise() {
            let bench = crate::support::Bench::$store().await;
            crate::conformance::$promise(&bench, crate::conformance::$algorithm).await;
        }
    )*};
}

store_tests!(memory_store: sliding_log);
store_tests!(redis_store: sliding_log);

const WINDOW: Duration = Duration::from_secs(10);
const SECOND: Duration = Duration::from_secs(1);
const MICROSECOND: Duration = Duration::from_micros(1);

fn remaining(outcome: &Outcome) -> u64 {
    outcome.verdicts[0].remaining
}

fn reset_after(outcome: &Outcome) -> Duration {
    outcome.verdicts[0].reset_after
}

/// The wait of a denied request.
fn wait(outcome: &Outcome) -> Duration {
    assert!(!outcome.allowed, "only a denied request waits: {outcome:?}");
    outcome.verdicts[0].retry_after.expect("waiting helps")
}

/// Admits one after the other, a second apart.
async fn admit(bench: &Bench, limit: &Limit, costs: &[u64]) {
    for cost in costs {
        assert!(bench.check(limit, *cost).await.allowed, "cost {cost} fits {limit}");
        bench.advance(SECOND).await;
    }
}

/// Waits as long as a denied request is told to, and looks around a microsecond before; returns the wait.
async fn wait_exactly(bench: &Bench, limit: &Limit, cost: u64) -> Duration {
    let told = wait(&bench.check(limit, cost).await);

    bench.advance(told - MICROSECOND).await;
    assert_eq!(
        wait(&bench.check(limit, cost).await),
        MICROSECOND,
        "after {told:?} less 1 µs"
    );
    bench.advance(MICROSECOND).await;
    assert!(bench.check(limit, cost).await.allowed, "after {told:?}");
    told
}

async fn limit_3_admits_3_and_not_4(bench: &Bench, limit: Algorithm) {
    let limit = limit(3, WINDOW);
    for remains in [2, 1, 0] {
        let admitted = bench.check(&limit, 1).await;
        assert!(admitted.allowed);
        assert_eq!(remaining(&admitted), remains);
    }
    assert!(!bench.check(&limit, 1).await.allowed);
}

async fn one_admission_of_the_whole_limit_fits(bench: &Bench, limit: Algorithm) {
    let limit = limit(100_000, WINDOW);
    let admitted = bench.check(&limit, 100_000).await;
    assert!(admitted.allowed);
    assert_eq!(remaining(&admitted), 0);
    assert!(!bench.check(&limit, 1).await.allowed);
}

async fn retry_after_is_exact(bench: &Bench, limit: Algorithm) {
    let limit = limit(3, WINDOW);
    admit(bench, &limit, &[1, 1, 1]).await;
    assert_eq!(wait_exactly(bench, &limit, 1).await, WINDOW - 3 * SECOND);
    // And the next one waits for the second admission.
    assert_eq!(wait_exactly(bench, &limit, 1).await, SECOND);
}

async fn retry_after_is_exact_for_a_cost_above_one(bench: &Bench, limit: Algorithm) {
    let limit = limit(6, WINDOW);
    admit(bench, &limit, &[1, 2, 1, 1]).await;
    // 5 of 6 are used, and 4 are to fit: the second admission must leave too.
    assert_eq!(wait_exactly(bench, &limit, 4).await, SECOND + WINDOW - 4 * SECOND);
}

async fn retry_after_is_exact_after_the_limit_was_lowered(bench: &Bench, limit: Algorithm) {
    admit(bench, &limit(5, WINDOW), &[1, 1, 1, 1, 1]).await;
    // All but one must leave, the fourth of which came at 3 s.
    let told = wait_exactly(bench, &limit(2, WINDOW), 1).await;
    assert_eq!(told, 3 * SECOND + WINDOW - 5 * SECOND);
}

async fn retry_after_is_exact_after_the_window_was_shortened(bench: &Bench, limit: Algorithm) {
    admit(bench, &limit(3, WINDOW), &[1, 1, 1]).await;
    // Of the last four seconds, all three are left.
    assert_eq!(wait_exactly(bench, &limit(3, 4 * SECOND), 1).await, SECOND);
}

async fn windows_are_half_open(bench: &Bench, limit: Algorithm) {
    let limit = limit(1, WINDOW);
    assert!(bench.check(&limit, 1).await.allowed);
    bench.advance(WINDOW - MICROSECOND).await;
    assert!(!bench.check(&limit, 1).await.allowed);
    bench.advance(MICROSECOND).await;
    assert!(bench.check(&limit, 1).await.allowed);
}

async fn a_denied_request_does_not_prolong_the_block(bench: &Bench, limit: Algorithm) {
    let limit = limit(2, WINDOW);
    bench.check(&limit, 2).await;
    for second in 0..10 {
        let denied = bench.check(&limit, 1).await;
        assert_eq!(wait(&denied), WINDOW - second * SECOND);
        assert_eq!(reset_after(&denied), WINDOW - second * SECOND);
        bench.advance(SECOND).await;
    }
    assert!(bench.check(&limit, 1).await.allowed);
}

async fn a_denied_request_adds_no_weight(bench: &Bench, limit: Algorithm) {
    let limit = limit(5, WINDOW);
    bench.check(&limit, 2).await;
    for cost in [4, 5, 4] {
        let denied = bench.check(&limit, cost).await;
        assert!(!denied.allowed);
        assert_eq!(remaining(&denied), 3);
    }
    assert!(bench.check(&limit, 3).await.allowed);
}

async fn remaining_is_true(bench: &Bench, limit: Algorithm) {
    let limit = limit(7, WINDOW);
    for cost in [1, 3] {
        let left = remaining(&bench.check(&limit, cost).await);
        assert!(bench.peek(&limit, left).await.allowed);
        assert!(!bench.peek(&limit, left + 1).await.allowed);
    }

    let left = remaining(&bench.peek(&limit, 1).await);
    for _ in 0..left {
        assert!(bench.check(&limit, 1).await.allowed);
    }
    assert!(!bench.check(&limit, 1).await.allowed);
}

async fn waiting_reset_after_restores_everything(bench: &Bench, limit: Algorithm) {
    let limit = limit(5, WINDOW);
    admit(bench, &limit, &[1, 2]).await;
    let whole = reset_after(&bench.check(&limit, 1).await);

    bench.advance(whole - MICROSECOND).await;
    let almost = bench.peek(&limit, 1).await;
    assert!(remaining(&almost) < 5, "{almost:?}");
    assert_eq!(reset_after(&almost), MICROSECOND);

    bench.advance(MICROSECOND).await;
    let restored = bench.peek(&limit, 1).await;
    assert_eq!(remaining(&restored), 5);
    assert_eq!(reset_after(&restored), Duration::ZERO);
}

async fn peek_counts_nothing(bench: &Bench, limit: Algorithm) {
    let limit = limit(2, WINDOW);
    for _ in 0..3 {
        let peeked = bench.peek(&limit, 2).await;
        assert!(peeked.allowed);
        assert_eq!(remaining(&peeked), 2);
        assert_eq!(reset_after(&peeked), Duration::ZERO);
    }
    assert!(bench.check(&limit, 2).await.allowed);
}

async fn peek_says_what_a_check_would(bench: &Bench, limit: Algorithm) {
    let limit = limit(2, WINDOW);
    admit(bench, &limit, &[1, 1]).await;
    let peeked = bench.peek(&limit, 1).await;
    assert!(!peeked.allowed);
    assert_eq!(peeked, bench.check(&limit, 1).await);
}

async fn a_charge_may_exceed_the_limit_and_later_requests_pay(bench: &Bench, limit: Algorithm) {
    let limit = limit(3, WINDOW);
    bench.check(&limit, 1).await;
    let charged = bench.charge(&limit, 5).await;
    assert!(charged.allowed);
    assert_eq!(charged.verdicts[0].retry_after, None);
    assert_eq!(remaining(&charged), 0);

    bench.advance(SECOND).await;
    assert!(!bench.check(&limit, 1).await.allowed);
    wait_exactly(bench, &limit, 1).await;
}

async fn reset_forgets(bench: &Bench, limit: Algorithm) {
    let limit = limit(3, WINDOW);
    admit(bench, &limit, &[1, 2]).await;
    assert!(!bench.check(&limit, 1).await.allowed);

    let reset = bench.reset(&limit).await;
    assert!(reset.allowed);
    assert_eq!(remaining(&reset), 3);
    assert_eq!(reset_after(&reset), Duration::ZERO);
    assert!(bench.check(&limit, 3).await.allowed);
}

/// Asks for both policies on one request, one of cost 1 each.
async fn check_both(bench: &Bench, policies: [(&str, &Limit); 2]) -> Outcome {
    let key = Key::from("both");
    let charges = policies.map(|(name, limit)| Charge::new(name, limit, &key, 1));
    let answer = bench.store.decide(&[Request::new(Operation::Check, &charges)]).await;
    answer.expect("the store answers").outcomes.remove(0)
}

async fn several_charges_are_all_or_nothing(bench: &Bench, limit: Algorithm) {
    let (tight, wide) = (limit(1, WINDOW), limit(5, WINDOW));
    let (tight, wide) = (("tight", &tight), ("wide", &wide));
    assert!(check_both(bench, [tight, wide]).await.allowed);
    bench.advance(SECOND).await;

    for _ in 0..3 {
        let denied = check_both(bench, [tight, wide]).await;
        assert!(!denied.allowed);
        assert_eq!(denied.verdicts[0].retry_after, Some(WINDOW - SECOND));
        assert_eq!(denied.verdicts[1].retry_after, None);
        assert_eq!(denied.verdicts[1].remaining, 4);
        assert_eq!(denied.verdicts[1].reset_after, WINDOW - SECOND);

        let denied = check_both(bench, [wide, tight]).await;
        assert!(!denied.allowed);
        assert_eq!(denied.verdicts[0].retry_after, None);
        assert_eq!(denied.verdicts[0].remaining, 4);
        assert_eq!(denied.verdicts[1].retry_after, Some(WINDOW - SECOND));
    }
}

async fn several_charges_that_fit_all_count(bench: &Bench, limit: Algorithm) {
    let (two, five) = (limit(2, WINDOW), limit(5, WINDOW));
    for left in [[1, 4], [0, 3]] {
        let admitted = check_both(bench, [("two", &two), ("five", &five)]).await;
        assert!(admitted.allowed);
        assert_eq!([0, 1].map(|policy| admitted.verdicts[policy].remaining), left);
    }
    assert!(!check_both(bench, [("two", &two), ("five", &five)]).await.allowed);
}

async fn requests_of_one_batch_are_decided_one_after_the_other(bench: &Bench, limit: Algorithm) {
    let limit = limit(3, WINDOW);
    let (ours, theirs) = (Key::from("ours"), Key::from("theirs"));
    let (one, two) = (
        [Charge::new("test", &limit, &ours, 1)],
        [Charge::new("test", &limit, &ours, 2)],
    );
    let other = [Charge::new("test", &limit, &theirs, 1)];

    let batch = [&one, &other, &two, &one].map(|charges| Request::new(Operation::Check, charges));
    let answer = bench.store.decide(&batch).await.expect("the store answers");
    let allowed: Vec<_> = answer.outcomes.iter().map(|outcome| outcome.allowed).collect();
    let left: Vec<_> = answer.outcomes.iter().map(remaining).collect();
    assert_eq!(allowed, [true, true, true, false]);
    assert_eq!(left, [2, 2, 0, 0]);
    assert_eq!(answer.server_time.as_micros(), u128::from(bench.now()));
}

async fn two_policies_never_share_a_count(bench: &Bench, limit: Algorithm) {
    let limit = limit(1, WINDOW);
    // Twice the same numbers and key, told apart by their names alone.
    let both = check_both(bench, [("one", &limit), ("other", &limit)]).await;
    assert!(both.allowed);
    let others = check_both(bench, [("another", &limit), ("one-more", &limit)]).await;
    assert!(others.allowed);
}

async fn two_keys_never_share_a_count(bench: &Bench, limit: Algorithm) {
    let limit = limit(1, WINDOW);
    let keys = [
        Key::from("a"),
        Key::from("a").and("b"),
        Key::from("a|key=b"),
        Key::header("a", "b"),
        Key::path("a"),
        Key::constant("a"),
    ];
    for key in &keys {
        let charges = [Charge::new("test", &limit, key, 1)];
        let answer = bench.store.decide(&[Request::new(Operation::Check, &charges)]).await;
        assert!(answer.expect("the store answers").outcomes[0].allowed, "{key}");
    }
}

/// Steps that are too far to belong to the same clock.
const STEPS_BACK: [Duration; 3] = [
    Duration::from_micros(1_000_001),
    Duration::from_secs(10),
    Duration::from_secs(86_400),
];

async fn a_clock_set_back_blocks_for_one_window_and_a_second_at_most(bench: &Bench, limit: Algorithm) {
    let limit = limit(3, WINDOW);
    for step in STEPS_BACK {
        for silence in [Duration::ZERO, MICROSECOND, WINDOW / 2, WINDOW, 2 * WINDOW] {
            let bench = bench.with_a_fresh_key();
            bench.check(&limit, 1).await;
            bench.check(&limit, 2).await;
            bench.set_back(step).await;
            bench.advance(silence).await;

            if !bench.peek(&limit, 1).await.allowed {
                let told = wait_exactly(&bench, &limit, 1).await;
                assert!(told <= WINDOW + SECOND, "{told:?}, {silence:?} after {step:?} back");
            }
        }
    }
}

async fn what_a_clock_that_is_gone_has_left_blocks_nobody(bench: &Bench, limit: Algorithm) {
    let limit = limit(3, WINDOW);
    for step in STEPS_BACK {
        let bench = bench.with_a_fresh_key();
        bench.check(&limit, 1).await;
        bench.check(&limit, 2).await;
        bench.set_back(step).await;
        assert!(bench.check(&limit, 3).await.allowed, "{step:?} back");
    }
}

async fn a_clock_set_back_admits_one_limit_more_at_most(bench: &Bench, limit: Algorithm) {
    let limit = limit(3, WINDOW);
    for step in STEPS_BACK {
        let bench = bench.with_a_fresh_key();
        bench.check(&limit, 3).await;
        bench.set_back(step).await;

        let mut more = 0;
        for _ in 0..10 {
            more += u64::from(bench.check(&limit, 1).await.allowed);
            bench.advance((WINDOW - MICROSECOND) / 10).await;
        }
        assert!(more <= 3, "{more} within a window after {step:?} back");
    }
}

async fn a_clock_set_back_a_little_resets_nothing(bench: &Bench, limit: Algorithm) {
    let limit = limit(3, WINDOW);
    for step in [MICROSECOND, SECOND / 2, SECOND] {
        let bench = bench.with_a_fresh_key();
        bench.check(&limit, 1).await;
        bench.check(&limit, 2).await;
        bench.set_back(step).await;
        assert_eq!(wait_exactly(&bench, &limit, 1).await, WINDOW + step);
    }
}
