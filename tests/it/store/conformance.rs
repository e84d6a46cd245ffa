//! The conformance suite of stores: every promise of every algorithm, on a clock that the test sets.

use std::{mem::discriminant, time::Duration};

use tower_quota::{
    Key, Limit, SlidingCounter, SlidingLog, TokenBucket,
    store::{Charge, Operation, Outcome, StoreRequest},
};

use crate::support::{Algorithm, Bench};

/// The promises of all algorithms and of this one, a test of each store for each.
macro_rules! promises {
    ($algorithm:ident $named:ident $($own:ident)*) => {
        mod $algorithm {
            crate::support::each_store! { by crate::store::conformance::holds, crate::support::Algorithm::$named;
                limit_3_admits_3_and_not_4
                one_admission_of_the_whole_limit_fits
                retry_after_is_exact
                retry_after_is_exact_for_a_cost_above_one
                retry_after_is_exact_after_the_limit_was_lowered
                a_cost_above_the_limit_waits_as_long_as_the_whole_limit
                a_denied_request_does_not_prolong_the_block
                a_denied_request_adds_no_weight
                remaining_is_true
                waiting_reset_after_restores_everything
                peek_counts_nothing
                peek_returns_what_a_check_would
                a_charge_may_exceed_the_limit_and_later_requests_pay
                a_charge_of_any_cost_is_survived
                reset_forgets
                a_refund_gives_back_what_was_charged
                a_key_expires_when_it_is_reset_after_a_refund_too
                a_refund_after_expiry_does_nothing
                a_clock_younger_than_the_window_counts_and_refunds
                a_refund_never_gives_more_than_counts
                a_refund_after_a_reset_does_nothing
                a_settlement_below_the_estimate_gives_back_the_difference
                a_settlement_above_the_estimate_is_paid_by_later_requests
                a_settlement_of_zero_is_a_refund
                a_settlement_after_expiry_gives_nothing_back
                a_settlement_of_any_cost_is_survived
                several_charges_are_all_or_nothing
                several_charges_that_fit_all_count
                requests_of_one_batch_are_decided_one_after_the_other
                a_batch_on_one_key_is_decided_as_if_it_had_come_one_by_one
                a_batch_on_keys_that_overlap_is_decided_as_if_it_had_come_one_by_one
                a_changed_quota_keeps_what_was_counted
                a_changed_algorithm_starts_afresh
                two_policies_never_share_a_count
                two_keys_never_share_a_count
                a_clock_set_back_blocks_for_the_longest_wait_and_a_second_at_most
                a_refund_leaves_no_more_than_if_the_charge_had_not_been
                $($own)*
            }
        }
    };
}

promises! { sliding_log SLIDING_LOG
    every_admission_leaves_one_window_later
    a_wait_is_exact_while_expired_entries_are_left
    a_wait_for_more_entries_than_a_call_reads_is_a_lower_bound
    a_refund_finds_a_charge_beyond_the_limit_that_was_merged
    charges_beyond_the_limit_are_merged_until_the_last_microsecond_of_a_step
    a_key_expires_after_the_last_charge_beyond_the_limit_that_was_merged
    a_refund_finds_an_entry_in_its_last_microsecond
    expired_entries_and_entries_of_another_clock_that_are_left_do_not_count
    of_a_long_log_the_oldest_entries_are_removed
    a_reset_is_exact_while_entries_of_another_clock_are_left
    a_check_that_removes_entries_of_another_clock_and_expired_ones_is_counted
    a_debt_grows_no_further_than_its_bound
    windows_are_half_open
    another_window_has_a_count_of_its_own
    a_refund_after_a_reset_takes_nothing_from_what_came_since
    entries_far_ahead_of_the_clock_block_no_request
    a_clock_set_back_admits_one_limit_more_at_most
    a_clock_set_back_a_little_resets_nothing
}

promises! { coarse_log COARSE_LOG
    admissions_of_one_grain_leave_with_the_last_of_them
    admissions_are_merged_until_the_last_microsecond_of_a_grain
    a_refund_finds_no_entry_of_the_next_grain
    a_refund_finds_its_entry_behind_more_expired_ones_than_a_call_removes
    admissions_of_two_microseconds_are_two_grains_of_a_microsecond
    windows_are_half_open
    another_window_has_a_count_of_its_own
    a_refund_after_a_reset_takes_nothing_from_what_came_since
    entries_far_ahead_of_the_clock_block_no_request
    a_clock_set_back_admits_one_limit_more_at_most
    a_clock_set_back_a_little_resets_nothing
}

promises! { sliding_counter SLIDING_COUNTER
    the_previous_window_counts_in_proportion
    a_previous_window_of_a_large_quota_counts_in_whole_ticks
    another_window_has_a_count_of_its_own
    a_refund_after_a_reset_takes_from_what_came_since_at_most
    a_refund_reaches_the_previous_window
    entries_far_ahead_of_the_clock_block_no_request
    a_clock_set_back_admits_what_two_windows_do_at_most
    a_clock_set_back_a_little_resets_nothing
}

promises! { fixed_window FIXED_WINDOW
    a_window_opens_with_the_first_request
    windows_are_half_open
    another_window_has_a_count_of_its_own
    a_refund_after_a_reset_takes_nothing_from_what_came_since
    entries_far_ahead_of_the_clock_block_no_request
    a_clock_set_back_admits_one_limit_more_at_most
    a_clock_set_back_a_little_resets_nothing
}

promises! { aligned_window ALIGNED_WINDOW
    a_window_opens_with_the_clock
    windows_are_half_open
    another_window_has_a_count_of_its_own
    a_refund_after_a_reset_takes_from_what_came_since_at_most
    entries_far_ahead_of_the_clock_block_no_request
    a_clock_set_back_over_a_boundary_admits_one_limit_for_each_window_it_meets
    a_clock_set_back_a_little_resets_nothing
}

promises! { calendar_month CALENDAR_MONTH
    a_window_opens_with_the_month
    another_window_has_a_count_of_its_own
    a_refund_after_a_reset_takes_from_what_came_since_at_most
    a_clock_set_back_within_the_month_resets_nothing
    a_clock_set_back_over_the_end_of_a_month_counts_until_that_of_the_next_one
    a_clock_set_back_admits_one_limit_more_at_most
    a_clock_set_back_a_little_resets_nothing
}

promises! { token_bucket TOKEN_BUCKET
    tokens_of_a_large_rate_come_neither_early_nor_late
    tokens_come_one_by_one
    a_debt_of_tokens_is_exact_at_its_bound
    the_refund_of_an_early_charge_prevents_no_other
    another_window_has_a_count_of_its_own
    a_refund_after_a_reset_takes_nothing_from_what_came_since
    entries_far_ahead_of_the_clock_block_no_request
    a_clock_set_back_admits_what_a_full_bucket_does_at_most
    a_clock_set_back_a_little_resets_nothing
}

promises! { token_bucket_with_burst TOKEN_BUCKET_WITH_BURST
    tokens_come_at_the_rate_and_not_at_the_burst
    another_window_has_a_count_of_its_own
    a_refund_after_a_reset_takes_nothing_from_what_came_since
    entries_far_ahead_of_the_clock_block_no_request
    a_clock_set_back_admits_what_a_full_bucket_does_at_most
    a_clock_set_back_a_little_resets_nothing
}

fn holds<P>(bench: impl Future<Output = Bench>, algorithm: Algorithm, promise: P)
where
    P: AsyncFn(&Bench, Algorithm),
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime
        .expect("a runtime")
        .block_on(async move { promise(&bench.await, algorithm).await });
}

const WINDOW: Duration = Algorithm::WINDOW;
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);
const MICROSECOND: Duration = Duration::from_micros(1);

fn remaining(outcome: &Outcome) -> u64 {
    outcome.states()[0].remaining
}

fn reset_after(outcome: &Outcome) -> Duration {
    outcome.states()[0].reset_after
}

/// The wait of a denied request.
fn wait(outcome: &Outcome) -> Duration {
    assert!(!outcome.allowed, "only a denied request waits: {outcome:?}");
    outcome.states()[0].retry_after.expect("waiting helps")
}

/// Admits one after the other, a second apart.
async fn admit(bench: &Bench, limit: &Limit, costs: &[u64]) {
    for cost in costs {
        assert!(bench.check(limit, *cost).await.allowed, "cost {cost} fits {limit}");
        bench.advance(SECOND).await;
    }
}

/// Waits for the `retry_after` of a denied request, with a check a microsecond before; returns the wait.
async fn wait_exactly(bench: &Bench, limit: &Limit, cost: u64) -> Duration {
    let retry_after = wait(&bench.check(limit, cost).await);

    bench.advance(retry_after - MICROSECOND).await;
    assert_eq!(
        wait(&bench.check(limit, cost).await),
        MICROSECOND,
        "after {retry_after:?} less 1 µs"
    );
    bench.advance(MICROSECOND).await;
    assert!(bench.check(limit, cost).await.allowed, "after {retry_after:?}");
    retry_after
}

/// Admits one by one until there is no room.
async fn use_up(bench: &Bench, limit: &Limit) {
    for _ in 0..100 {
        if !bench.check(limit, 1).await.allowed {
            return;
        }
    }
    panic!("{limit} admits more than 100");
}

async fn limit_3_admits_3_and_not_4(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    for remains in [2, 1, 0] {
        let admitted = bench.check(&limit, 1).await;
        assert!(admitted.allowed);
        assert_eq!(remaining(&admitted), remains);
    }
    assert!(!bench.check(&limit, 1).await.allowed);
}

async fn one_admission_of_the_whole_limit_fits(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(100_000);
    let admitted = bench.check(&limit, 100_000).await;
    assert!(admitted.allowed);
    assert_eq!(remaining(&admitted), 0);
    assert!(!bench.check(&limit, 1).await.allowed);
}

async fn retry_after_is_exact(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    admit(bench, &limit, &[1, 1, 1]).await;
    for _ in 0..3 {
        wait_exactly(bench, &limit, 1).await;
        use_up(bench, &limit).await;
    }
}

async fn retry_after_is_exact_for_a_cost_above_one(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(6);
    admit(bench, &limit, &[1, 2, 1, 1]).await;
    wait_exactly(bench, &limit, 4).await;
    wait_exactly(bench, &limit, 6).await;
}

async fn retry_after_is_exact_after_the_limit_was_lowered(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    admit(bench, &limit, &[1, 1, 1, 1, 1]).await;
    wait_exactly(bench, &of_quota(&limit, algorithm, 2), 1).await;
}

async fn a_cost_above_the_limit_waits_as_long_as_the_whole_limit(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    align(bench).await;
    admit(bench, &limit, &[1, 1]).await;
    for _ in 0..5 {
        let whole = bench.peek(&limit, 3).await;
        if whole.allowed {
            return;
        }
        assert_eq!(wait(&bench.peek(&limit, 4).await), wait(&whole));
        bench.advance(4 * SECOND).await;
    }
}

async fn a_denied_request_does_not_prolong_the_block(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(2);
    bench.check(&limit, 2).await;
    let first = bench.check(&limit, 1).await;
    let (retry_after, whole) = (wait(&first), reset_after(&first));

    let mut passed = Duration::ZERO;
    while passed < retry_after.min(10 * SECOND) {
        let denied = bench.check(&limit, 1).await;
        assert_eq!(wait(&denied), retry_after - passed);
        assert_eq!(reset_after(&denied), whole - passed);
        bench.advance(SECOND).await;
        passed += SECOND;
    }
    bench.advance(retry_after - passed).await;
    assert!(bench.check(&limit, 1).await.allowed);
}

async fn a_denied_request_adds_no_weight(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    bench.check(&limit, 2).await;
    for cost in [4, 5, 4] {
        let denied = bench.check(&limit, cost).await;
        assert!(!denied.allowed);
        assert_eq!(remaining(&denied), 3);
    }
    assert!(bench.check(&limit, 3).await.allowed);
}

async fn remaining_is_true(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(7);
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

async fn waiting_reset_after_restores_everything(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
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

async fn peek_counts_nothing(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(2);
    for _ in 0..3 {
        let peeked = bench.peek(&limit, 2).await;
        assert!(peeked.allowed);
        assert_eq!(remaining(&peeked), 2);
        assert_eq!(reset_after(&peeked), Duration::ZERO);
    }
    assert!(bench.check(&limit, 2).await.allowed);
}

async fn peek_returns_what_a_check_would(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(2);
    admit(bench, &limit, &[1, 1]).await;
    let peeked = bench.peek(&limit, 1).await;
    assert!(!peeked.allowed);
    assert_eq!(peeked, bench.check(&limit, 1).await);
}

async fn a_charge_may_exceed_the_limit_and_later_requests_pay(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    bench.check(&limit, 1).await;
    let charged = bench.charge(&limit, 5).await;
    assert!(charged.allowed);
    assert_eq!(charged.states()[0].retry_after, None);
    assert_eq!(remaining(&charged), 0);

    bench.advance(SECOND).await;
    assert!(!bench.check(&limit, 1).await.allowed);
    wait_exactly(bench, &limit, 1).await;
}

async fn a_charge_of_any_cost_is_survived(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    // The sum of ten is no number that Lua has exactly.
    for _ in 0..12 {
        assert!(bench.charge(&limit, u64::MAX).await.allowed);
        assert!(!bench.check(&limit, 1).await.allowed);
    }
    bench.reset(&limit).await;
    assert!(bench.check(&limit, 3).await.allowed);
}

async fn reset_forgets(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    use_up(bench, &limit).await;

    let reset = bench.reset(&limit).await;
    assert!(reset.allowed);
    assert_eq!(remaining(&reset), 3);
    assert_eq!(reset_after(&reset), Duration::ZERO);
    assert!(bench.check(&limit, 3).await.allowed);
}

/// By how much later than they matter keys expire here, in place of a second.
const LATER: Duration = Duration::from_micros(4_000_000_000_000_000);

/// Some expire by another second later.
async fn a_key_expires_when_it_is_reset_after_a_refund_too(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    let admitted_at = bench.now();
    assert!(bench.check(&limit, 2).await.allowed);
    bench.refund(&limit, 1, admitted_at).await;
    let reset_at = Duration::from_micros(bench.now()) + reset_after(&bench.peek(&limit, 1).await);
    if let Some(expires_at) = bench.expires_at().await {
        let expires_at = Duration::from_millis(expires_at as u64 + 1);
        let latest = reset_at + LATER + SECOND;
        assert!(
            (reset_at + LATER..=latest).contains(&expires_at),
            "{limit}: {expires_at:?}"
        );
    }
}

async fn a_refund_gives_back_what_was_charged(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    let before = bench.check(&limit, 1).await;
    bench.advance(MICROSECOND).await;
    let admitted_at = bench.now();
    assert_eq!(remaining(&bench.check(&limit, 3).await), 1);

    let refunded = bench.refund(&limit, 3, admitted_at).await;
    assert!(refunded.allowed);
    assert_eq!(remaining(&refunded), remaining(&before));
    assert!(bench.check(&limit, 4).await.allowed);
    assert!(!bench.check(&limit, 1).await.allowed);
}

/// A clock that starts at the Unix epoch, such as one of a test or of a machine without a battery.
async fn a_clock_younger_than_the_window_counts_and_refunds(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    bench.set_back(Duration::from_micros(bench.now())).await;
    for passed in [0, 1, 1_000_000] {
        let bench = bench.with_a_fresh_key();
        bench.advance(Duration::from_micros(passed)).await;
        let admitted_at = bench.now();
        for left in [3, 1] {
            assert_eq!(remaining(&bench.check(&limit, 2).await), left, "{passed}");
        }
        assert!(!bench.check(&limit, 2).await.allowed);
        assert_eq!(remaining(&bench.refund(&limit, 2, admitted_at).await), 3, "{passed}");
        assert_eq!(remaining(&bench.refund(&limit, 2, admitted_at).await), 5, "{passed}");
    }
}

async fn a_refund_after_expiry_does_nothing(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    let admitted_at = bench.now();
    let admitted = bench.check(&limit, 3).await;
    bench.advance(reset_after(&admitted)).await;
    let later = bench.check(&limit, 2).await;

    let refunded = bench.refund(&limit, 3, admitted_at).await;
    assert_eq!(refunded.states(), later.states());
    assert_eq!(bench.peek(&limit, 1).await.states(), later.states());
}

async fn a_refund_never_gives_more_than_counts(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    let admitted_at = bench.now();
    bench.check(&limit, 2).await;
    for _ in 0..2 {
        let refunded = bench.refund(&limit, 4, admitted_at).await;
        assert_eq!(remaining(&refunded), 5);
        assert_eq!(reset_after(&refunded), Duration::ZERO);
    }
    assert!(bench.check(&limit, 5).await.allowed);
    assert!(!bench.check(&limit, 1).await.allowed);
}

async fn a_refund_after_a_reset_does_nothing(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    let admitted_at = bench.now();
    bench.check(&limit, 2).await;
    bench.reset(&limit).await;

    let refunded = bench.refund(&limit, 2, admitted_at).await;
    assert_eq!(remaining(&refunded), 5);
    assert!(bench.check(&limit, 5).await.allowed);
    assert!(!bench.check(&limit, 1).await.allowed);
}

/// Checks a request of cost 1 against both policies.
async fn a_settlement_below_the_estimate_gives_back_the_difference(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(7);
    bench.check(&limit, 1).await;
    bench.advance(MICROSECOND).await;
    assert_eq!(remaining(&bench.settle(&limit, 4, 1).await), 5);
    assert!(bench.check(&limit, 5).await.allowed);
    assert!(!bench.check(&limit, 1).await.allowed);
}

async fn a_settlement_above_the_estimate_is_paid_by_later_requests(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    let other = bench.with_a_fresh_key();
    let settled = bench.settle(&limit, 2, 8).await;
    assert!(!settled.allowed);

    // As if the difference had been charged at that time.
    other.set_back(MICROSECOND).await;
    other.check(&limit, 2).await;
    other.advance(MICROSECOND).await;
    other.charge(&limit, 6).await;
    assert_eq!(settled.states(), other.peek(&limit, 1).await.states());
}

async fn a_settlement_of_zero_is_a_refund(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    bench.check(&limit, 2).await;
    let other = bench.with_a_fresh_key();
    other.check(&limit, 2).await;
    bench.advance(MICROSECOND).await;
    let settled = bench.settle(&limit, 3, 0).await;
    assert_eq!(remaining(&settled), remaining(&other.peek(&limit, 1).await));
}

async fn a_settlement_after_expiry_gives_nothing_back(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    let decision = bench.decision(&limit, 3).await;
    bench.advance(decision.reset_after()).await;
    let later = bench.check(&limit, 2).await;

    let receipt = decision.take_receipt();
    receipt.settle(1).await.expect("the store replies");
    assert_eq!(bench.peek(&limit, 1).await.states(), later.states());
}

async fn a_settlement_of_any_cost_is_survived(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    assert_eq!(remaining(&bench.settle(&limit, 2, u64::MAX).await), 0);
    assert!(!bench.check(&limit, 1).await.allowed);
    bench.reset(&limit).await;
    assert_eq!(remaining(&bench.settle(&limit, 5, 4).await), 1);
}

async fn check_both(bench: &Bench, policies: [(&str, &Limit); 2]) -> Outcome {
    let key = Key::from("both");
    let charges = policies.map(|(name, limit)| Charge::new(name, limit, &key, 1));
    let response = bench
        .store
        .decide(&[StoreRequest::new(Operation::Check, &charges)])
        .await;
    response.expect("the store replies").outcomes()[0].clone()
}

async fn several_charges_are_all_or_nothing(bench: &Bench, algorithm: Algorithm) {
    let (tight, wide) = (algorithm.limit(1), algorithm.limit(5));
    let (tight, wide) = (("tight", &tight), ("wide", &wide));
    let admitted = check_both(bench, [tight, wide]).await;
    assert!(admitted.allowed);

    for _ in 0..3 {
        let denied = check_both(bench, [tight, wide]).await;
        assert!(!denied.allowed);
        assert!(denied.states()[0].retry_after.is_some());
        assert_eq!(denied.states()[1], admitted.states()[1]);

        let denied = check_both(bench, [wide, tight]).await;
        assert!(!denied.allowed);
        assert_eq!(denied.states()[0], admitted.states()[1]);
        assert!(denied.states()[1].retry_after.is_some());
    }
}

async fn several_charges_that_fit_all_count(bench: &Bench, algorithm: Algorithm) {
    let (two, five) = (algorithm.limit(2), algorithm.limit(5));
    for left in [[1, 4], [0, 3]] {
        let admitted = check_both(bench, [("two", &two), ("five", &five)]).await;
        assert!(admitted.allowed);
        assert_eq!([0, 1].map(|policy| admitted.states()[policy].remaining), left);
    }
    assert!(!check_both(bench, [("two", &two), ("five", &five)]).await.allowed);
}

async fn requests_of_one_batch_are_decided_one_after_the_other(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    let (ours, theirs) = (Key::from("ours"), Key::from("theirs"));
    let (one, two) = (
        [Charge::new("test", &limit, &ours, 1)],
        [Charge::new("test", &limit, &ours, 2)],
    );
    let other = [Charge::new("test", &limit, &theirs, 1)];

    let batch = [&one, &other, &two, &one].map(|charges| StoreRequest::new(Operation::Check, charges));
    let response = bench.store.decide(&batch).await.expect("the store replies");
    let allowed: Vec<_> = response.outcomes().iter().map(|outcome| outcome.allowed).collect();
    let left: Vec<_> = response.outcomes().iter().map(remaining).collect();
    assert_eq!(allowed, [true, true, true, false]);
    assert_eq!(left, [2, 2, 0, 0]);
    assert_eq!(response.server_time.as_micros(), u128::from(bench.now()));
}

/// Decides this batch at once, and then the same requests one by one on keys of their own; both at one time.
async fn at_once_and_one_by_one(bench: &Bench, limit: &Limit, requests: &[&[(&str, u64)]]) -> [Vec<Outcome>; 2] {
    let keys = |prefix: &str| ["k1", "k2"].map(|name| Key::from(prefix).and(name));
    let charges = |keys: &[Key; 2]| -> Vec<Vec<_>> {
        let charges = requests.iter().map(|charges| {
            charges
                .iter()
                .map(|(name, cost)| (usize::from(*name == "k2"), *cost))
                .map(|(key, cost)| (keys[key].clone(), cost))
                .collect()
        });
        charges.collect()
    };

    let mut outcomes = [Vec::new(), Vec::new()];
    for (outcomes, (prefix, at_once)) in outcomes.iter_mut().zip([("together", true), ("single", false)]) {
        let keyed = charges(&keys(prefix));
        let charges: Vec<Vec<_>> = keyed
            .iter()
            .map(|charges| {
                charges
                    .iter()
                    .map(|(key, cost)| Charge::new("test", limit, key, *cost))
                    .collect()
            })
            .collect();
        let requests: Vec<_> = charges
            .iter()
            .map(|charges| StoreRequest::new(Operation::Check, charges))
            .collect();
        for batch in requests.chunks(if at_once { requests.len() } else { 1 }) {
            let response = bench.store.decide(batch).await.expect("the store replies");
            outcomes.extend_from_slice(response.outcomes());
        }
    }
    outcomes
}

fn allowed(outcomes: &[Outcome]) -> Vec<bool> {
    outcomes.iter().map(|outcome| outcome.allowed).collect()
}

async fn a_batch_on_one_key_is_decided_as_if_it_had_come_one_by_one(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    let requests: [&[_]; 3] = [&[("k1", 1)], &[("k1", 5)], &[("k1", 1)]];
    let [together, single] = at_once_and_one_by_one(bench, &limit, &requests).await;
    assert_eq!(together, single);
    assert_eq!(allowed(&together), [true, false, true]);
}

async fn a_batch_on_keys_that_overlap_is_decided_as_if_it_had_come_one_by_one(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(2);
    let requests: [&[_]; 4] = [&[("k1", 1)], &[("k1", 1), ("k2", 1)], &[("k1", 1)], &[("k2", 1)]];
    let [together, single] = at_once_and_one_by_one(bench, &limit, &requests).await;
    assert_eq!(together, single);
    assert_eq!(allowed(&together), [true, true, false, true]);
}

/// The limit with another quota, or burst.
fn of_quota(limit: &Limit, algorithm: Algorithm, quota: u64) -> Limit {
    let text = limit.to_string();
    match limit {
        Limit::TokenBucket(_) => {
            let rate = text.split(" burst ").next().expect("a rate");
            format!("{rate} burst {quota}").parse().expect("a limit")
        }
        _ => algorithm.limit(quota),
    }
}

async fn a_changed_quota_keeps_what_was_counted(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    use_up(bench, &limit).await;
    assert_eq!(remaining(&bench.peek(&of_quota(&limit, algorithm, 2), 1).await), 0);

    let raised = of_quota(&limit, algorithm, 5);
    assert!(!bench.check(&raised, 3).await.allowed);
    let admitted = bench.check(&raised, 2).await;
    assert!(admitted.allowed);
    assert_eq!(remaining(&admitted), 0);
    assert_eq!(remaining(&bench.peek(&of_quota(&limit, algorithm, 7), 1).await), 2);
}

async fn a_changed_algorithm_starts_afresh(bench: &Bench, algorithm: Algorithm) {
    let ours = algorithm.limit(3);
    for other in Algorithm::ALL.map(|other| other.limit(3)) {
        if discriminant(&ours) == discriminant(&other) {
            continue;
        }
        let bench = bench.with_a_fresh_key();
        use_up(&bench, &ours).await;
        use_up(&bench, &other).await;
        // Both counts are kept.
        for limit in [&ours, &other] {
            assert!(!bench.check(limit, 1).await.allowed, "{limit}");
        }
    }
}

async fn two_policies_never_share_a_count(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(1);
    // The same numbers and the same key, so only the names differ.
    let both = check_both(bench, [("one", &limit), ("other", &limit)]).await;
    assert!(both.allowed);
    let others = check_both(bench, [("another", &limit), ("one-more", &limit)]).await;
    assert!(others.allowed);
}

async fn two_keys_never_share_a_count(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(1);
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
        let response = bench
            .store
            .decide(&[StoreRequest::new(Operation::Check, &charges)])
            .await;
        assert!(response.expect("the store replies").outcomes()[0].allowed, "{key}");
    }
}

/// Steps back that leave entries farther ahead of the clock than a second.
const STEPS_BACK: [Duration; 3] = [
    Duration::from_micros(1_000_001),
    Duration::from_secs(10),
    Duration::from_secs(86_400),
];

async fn a_clock_set_back_blocks_for_the_longest_wait_and_a_second_at_most(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    for step in STEPS_BACK {
        for silence in [Duration::ZERO, MICROSECOND, WINDOW / 2, WINDOW, 2 * WINDOW] {
            let bench = bench.with_a_fresh_key();
            bench.advance(WINDOW / 4).await;
            bench.check(&limit, 1).await;
            bench.check(&limit, 2).await;
            bench.set_back(step).await;
            bench.advance(silence).await;

            if !bench.peek(&limit, 1).await.allowed {
                let waited = wait_exactly(&bench, &limit, 1).await;
                assert!(
                    waited <= algorithm.longest_block(),
                    "{waited:?}, {silence:?} after {step:?} back"
                );
            }
        }
    }
}

async fn a_refund_leaves_no_more_than_if_the_charge_had_not_been(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(10);
    align(bench).await;
    for pause in [Duration::ZERO, MICROSECOND, SECOND, 3 * SECOND, WINDOW / 2] {
        let (refunded, other) = (bench.with_a_fresh_key(), bench.with_a_fresh_key());
        let admitted_at = bench.now();
        refunded.check(&limit, 5).await;
        refunded.advance(pause).await;
        refunded.charge(&limit, 6).await;
        other.charge(&limit, 6).await;
        let left = remaining(&refunded.refund(&limit, 5, admitted_at).await);
        assert!(
            left <= remaining(&other.peek(&limit, 1).await),
            "{left} after {pause:?}"
        );
        assert_eq!(left, 4, "after {pause:?}");
    }
}

// Promises of some algorithms only.

/// Advances the clock to the start of an aligned window, also of the shorter ones.
async fn align(bench: &Bench) {
    let two_windows = 2 * WINDOW.as_micros() as u64;
    let left = two_windows - bench.now() % two_windows;
    bench.advance(Duration::from_micros(left)).await;
}

async fn every_admission_leaves_one_window_later(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(6);
    admit(bench, &limit, &[1, 2, 1, 2]).await;
    // The first is four seconds old, and the others expire at intervals of a second.
    assert_eq!(wait_exactly(bench, &limit, 1).await, WINDOW - 4 * SECOND);
    assert_eq!(wait_exactly(bench, &limit, 2).await, SECOND);
    assert_eq!(wait_exactly(bench, &limit, 3).await, 2 * SECOND);
}

/// A call removes less than 1,000 of them.
async fn a_wait_is_exact_while_expired_entries_are_left(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(2_000);
    for _ in 0..1_500 {
        assert!(bench.check(&limit, 1).await.allowed);
    }
    bench.advance(SECOND).await;
    for _ in 0..5 {
        assert!(bench.check(&limit, 1).await.allowed);
    }
    bench.advance(WINDOW - SECOND / 2).await;
    let denied = bench.check(&algorithm.limit(5), 1).await;
    assert_eq!((denied.allowed, remaining(&denied)), (false, 0));
    assert_eq!(denied.states()[0].retry_after, Some(SECOND / 2));
}

/// A call reads 996 of them.
async fn a_wait_for_more_entries_than_a_call_reads_is_a_lower_bound(bench: &Bench, algorithm: Algorithm) {
    const COUNT: u32 = 1_500;
    let limit = algorithm.limit(2_000);
    assert!(bench.check(&limit, 2).await.allowed);
    for _ in 1..COUNT {
        bench.advance(MICROSECOND).await;
        assert!(bench.check(&limit, 1).await.allowed);
    }
    let of_the_last_read = WINDOW - (COUNT - 996) * MICROSECOND;
    assert_eq!(wait(&bench.check(&algorithm.limit(10), 1).await), of_the_last_read);
}

async fn a_refund_finds_a_charge_beyond_the_limit_that_was_merged(bench: &Bench, algorithm: Algorithm) {
    let (limit, higher) = (algorithm.limit(1), algorithm.limit(10));
    align(bench).await;
    let checked_at = bench.now();
    bench.check(&limit, 1).await;
    bench.advance(SECOND).await;
    let charged_at = bench.now();
    bench.charge(&limit, 1).await;
    for _ in 0..2 {
        bench.advance(MICROSECOND).await;
        bench.charge(&limit, 1).await;
    }
    bench.refund(&limit, 1, charged_at + 3).await;
    assert_eq!(remaining(&bench.peek(&higher, 1).await), 6, "nothing was admitted then");
    bench.refund(&limit, 1, checked_at).await;
    bench.refund(&limit, 1, charged_at).await;
    assert_eq!(remaining(&bench.peek(&higher, 1).await), 8);
}

async fn charges_beyond_the_limit_are_merged_until_the_last_microsecond_of_a_step(bench: &Bench, algorithm: Algorithm) {
    let (limit, step) = (algorithm.limit(1), WINDOW / 1_000);
    for (at, waits) in [(step - MICROSECOND, WINDOW), (step, WINDOW - MICROSECOND)] {
        let bench = bench.with_a_fresh_key();
        align(&bench).await;
        bench.check(&limit, 1).await;
        bench.advance(at - MICROSECOND).await;
        bench.charge(&limit, 1).await;
        bench.advance(MICROSECOND).await;
        bench.charge(&limit, 1).await;
        assert_eq!(wait(&bench.check(&algorithm.limit(3), 2).await), waits);
    }
}

async fn a_key_expires_after_the_last_charge_beyond_the_limit_that_was_merged(bench: &Bench, _: Algorithm) {
    let limit = SlidingLog::new(1, 1_000 * WINDOW).into();
    align(bench).await;
    bench.check(&limit, 1).await;
    for _ in 0..4 {
        bench.advance(WINDOW / 5).await;
        let charged = bench.charge(&limit, 1).await;
        assert_eq!(charged.states()[0].reset_after, 1_000 * WINDOW);
        if let Some(expires_at) = bench.expires_at().await {
            let latest = Duration::from_micros(bench.now()) + 1_000 * WINDOW + LATER;
            let expires_at = Duration::from_millis(expires_at as u64 + 1);
            assert!(
                (latest - SECOND..=latest + SECOND).contains(&expires_at),
                "{expires_at:?} is not {latest:?}"
            );
        }
    }
}

async fn a_refund_finds_an_entry_in_its_last_microsecond(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    let admitted_at = bench.now();
    bench.check(&limit, 1).await;
    bench.advance(WINDOW - MICROSECOND).await;
    assert_eq!(remaining(&bench.refund(&limit, 1, admitted_at).await), 3);
}

/// A call removes less than 1,000 of them, and the heavy one among those.
async fn of_a_long_log_the_oldest_entries_are_removed(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(2_000);
    for times in [100, 1_400] {
        for _ in 0..times {
            assert!(bench.check(&limit, 1).await.allowed);
        }
        bench.advance(WINDOW / 2).await;
    }
    for left in [599, 598, 597] {
        assert_eq!(remaining(&bench.check(&limit, 1).await), left);
    }
}

/// A call removes less than 1,000 of both together.
async fn expired_entries_and_entries_of_another_clock_that_are_left_do_not_count(bench: &Bench, algorithm: Algorithm) {
    let (limit, higher) = (algorithm.limit(3), algorithm.limit(3_000));
    bench.advance(HOUR).await;
    for _ in 0..1_100 {
        assert!(bench.check(&higher, 1).await.allowed);
    }
    bench.set_back(HOUR).await;
    for _ in 0..1_100 {
        assert!(bench.check(&higher, 1).await.allowed);
    }
    bench.advance(WINDOW).await;

    for members in [1_205, 210] {
        assert!(!bench.check(&limit, 1).await.allowed);
        assert_eq!(bench.members().await.unwrap_or(members), members);
    }
    assert_eq!(remaining(&bench.check(&limit, 1).await), 2);
}

/// As after a step of the clock: a call removes less than 1,000 of them.
async fn a_reset_is_exact_while_entries_of_another_clock_are_left(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(2_000);
    for _ in 0..1_500 {
        assert!(bench.check(&limit, 1).await.allowed);
    }
    bench.set_back(HOUR).await;
    for _ in 0..3 {
        assert!(bench.check(&limit, 1).await.allowed);
    }
    bench.advance(SECOND).await;
    assert!(!bench.check(&algorithm.limit(3), 1).await.allowed);
    let denied = bench.check(&algorithm.limit(3), 1).await;
    assert_eq!((denied.allowed, remaining(&denied)), (false, 0));
    assert_eq!(reset_after(&denied), WINDOW - SECOND);
}

async fn a_check_that_removes_entries_of_another_clock_and_expired_ones_is_counted(
    bench: &Bench,
    algorithm: Algorithm,
) {
    let (higher, limit) = (algorithm.limit(3), algorithm.limit(2));
    bench.check(&higher, 1).await;
    bench.check(&higher, 1).await;
    bench.set_back(HOUR).await;
    bench.check(&higher, 1).await;
    bench.advance(WINDOW).await;
    assert!(bench.check(&limit, 1).await.allowed);
    assert_eq!(remaining(&bench.peek(&limit, 1).await), 1);
}

/// The largest cost is 10^15 - 1, and the largest debt 2^51. What exceeds that is not owed.
async fn a_debt_grows_no_further_than_its_bound(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    for _ in 0..4 {
        assert!(bench.charge(&limit, u64::MAX).await.allowed);
        bench.advance(SECOND).await;
    }
    // The third charge, at 2 s, has reached the bound.
    bench.advance(WINDOW - 2 * SECOND - MICROSECOND).await;
    assert!(!bench.check(&limit, 1).await.allowed);
    bench.advance(MICROSECOND).await;
    assert!(bench.check(&limit, 2).await.allowed);
}

async fn admissions_of_one_grain_leave_with_the_last_of_them(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(6);
    align(bench).await;
    // A grain is 2.5 s: three admissions in the first one, at 0 s, 1 s and 2 s, and two in the second, at 3 s and 4 s.
    admit(bench, &limit, &[1, 2, 1, 1, 1]).await;
    assert_eq!(wait_exactly(bench, &limit, 1).await, 2 * SECOND + WINDOW - 5 * SECOND);
    assert_eq!(remaining(&bench.peek(&limit, 1).await), 3);
    assert_eq!(wait_exactly(bench, &limit, 4).await, 2 * SECOND);
}

async fn admissions_are_merged_until_the_last_microsecond_of_a_grain(bench: &Bench, algorithm: Algorithm) {
    let (limit, grain) = (algorithm.limit(2), WINDOW / 4);
    for (at, waits) in [(grain - MICROSECOND, WINDOW), (grain, WINDOW - MICROSECOND)] {
        let bench = bench.with_a_fresh_key();
        align(&bench).await;
        bench.advance(at - MICROSECOND).await;
        bench.check(&limit, 1).await;
        bench.advance(MICROSECOND).await;
        bench.check(&limit, 1).await;
        assert_eq!(wait(&bench.check(&limit, 1).await), waits);
    }
}

async fn a_refund_finds_no_entry_of_the_next_grain(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    align(bench).await;
    let start = bench.now();
    bench.advance(WINDOW / 4).await;
    bench.check(&limit, 1).await;
    assert_eq!(remaining(&bench.refund(&limit, 1, start).await), 2);
    assert_eq!(remaining(&bench.refund(&limit, 1, bench.now()).await), 3);
}

/// The first admission of the entry is older than the window, and the second one is not.
async fn a_refund_finds_its_entry_behind_more_expired_ones_than_a_call_removes(bench: &Bench, _: Algorithm) {
    let (limit, grain) = (
        Limit::from(SlidingLog::new(9_000, WINDOW).precision(10_000)),
        WINDOW / 10_000,
    );
    align(bench).await;
    for _ in 0..1_100 {
        bench.check(&limit, 1).await;
        bench.advance(grain).await;
    }
    let admitted_at = bench.now();
    bench.check(&limit, 1).await;
    bench.advance(grain / 2).await;
    bench.check(&limit, 1).await;
    bench.advance(WINDOW - MICROSECOND).await;
    bench.refund(&limit, 1, admitted_at).await;
    assert_eq!(remaining(&bench.peek(&limit, 1).await), 8_999);
}

async fn admissions_of_two_microseconds_are_two_grains_of_a_microsecond(bench: &Bench, _: Algorithm) {
    let window = Duration::from_millis(10);
    let limit = Limit::from(SlidingLog::new(2, window).precision(10_000));
    align(bench).await;
    bench.check(&limit, 1).await;
    bench.advance(MICROSECOND).await;
    bench.check(&limit, 1).await;
    assert_eq!(wait(&bench.check(&limit, 1).await), window - MICROSECOND);
    bench.refund(&limit, 1, bench.now()).await;
    assert_eq!(wait(&bench.check(&limit, 2).await), window - MICROSECOND);

    let bench = bench.with_a_fresh_key();
    bench.check(&limit, 1).await;
    bench.set_back(MICROSECOND).await;
    // The last entry goes on, by its own time.
    bench.check(&limit, 1).await;
    assert_eq!(wait(&bench.check(&limit, 1).await), window + MICROSECOND);
}

async fn the_previous_window_counts_in_proportion(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(10);
    align(bench).await;
    bench.check(&limit, 7).await;
    // After a quarter of the next window three quarters of the seven count, 5.25, rounded up.
    bench.advance(WINDOW + WINDOW / 4).await;
    assert_eq!(remaining(&bench.check(&limit, 3).await), 1);
    // Two fit when five sevenths of the previous window count.
    let waited = wait_exactly(bench, &limit, 2).await;
    assert_eq!(
        waited,
        Duration::from_micros((WINDOW.as_micros() as u64 * 2).div_ceil(7)) - WINDOW / 4
    );
}

async fn a_window_opens_with_the_first_request(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    align(bench).await;
    bench.advance(4 * SECOND).await;
    admit(bench, &limit, &[1, 1, 1]).await;
    assert_eq!(wait_exactly(bench, &limit, 1).await, WINDOW - 3 * SECOND);
    // The request after the end of the window has opened the next one.
    use_up(bench, &limit).await;
    assert_eq!(wait_exactly(bench, &limit, 1).await, WINDOW);
}

async fn a_window_opens_with_the_clock(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    align(bench).await;
    bench.advance(7 * SECOND).await;
    use_up(bench, &limit).await;
    assert_eq!(wait_exactly(bench, &limit, 1).await, 3 * SECOND);
    use_up(bench, &limit).await;
    assert_eq!(wait_exactly(bench, &limit, 1).await, WINDOW);
}

async fn a_window_opens_with_the_month(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    bench.set("2027-02-28T23:59:58+01:00[Europe/Berlin]").await;
    use_up(bench, &limit).await;
    assert_eq!(wait_exactly(bench, &limit, 1).await, 2 * SECOND);
    use_up(bench, &limit).await;
    // 31 days, one of which has 23 hours.
    assert_eq!(wait_exactly(bench, &limit, 1).await, 31 * 24 * HOUR - HOUR);
}

/// Whole periods are settled before the numbers grow too large for Lua: here from this many tokens on.
async fn a_debt_of_tokens_is_exact_at_its_bound(bench: &Bench, _: Algorithm) {
    const BOUND: u64 = (1 << 52) / (7_000_000 / 3 + 1);
    let limit = Limit::from(TokenBucket::new(3, 7 * SECOND).burst(10));
    let time_of = |tokens: u64| Duration::from_micros((tokens * 7_000_000).div_ceil(3));
    let charged = bench.charge(&limit, BOUND - 5).await;
    assert_eq!(reset_after(&charged), time_of(BOUND - 5));

    // In two periods six tokens come.
    bench.advance(14 * SECOND).await;
    let charged = bench.charge(&limit, 8).await;
    assert_eq!(reset_after(&charged), time_of(BOUND - 5 + 8 - 6));
}

async fn tokens_come_one_by_one(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    bench.check(&limit, 5).await;
    for _ in 0..3 {
        assert_eq!(wait_exactly(bench, &limit, 1).await, WINDOW / 5);
    }
    assert_eq!(wait_exactly(bench, &limit, 5).await, WINDOW);
    bench.advance(3 * SECOND).await;
    assert_eq!(wait_exactly(bench, &limit, 3).await, 3 * SECOND);
}

async fn tokens_come_at_the_rate_and_not_at_the_burst(bench: &Bench, algorithm: Algorithm) {
    // Ten at once, and five in each window.
    let limit = algorithm.limit(10);
    bench.check(&limit, 10).await;
    assert_eq!(wait_exactly(bench, &limit, 1).await, WINDOW / 5);
    assert_eq!(wait_exactly(bench, &limit, 10).await, 2 * WINDOW);
}

async fn windows_are_half_open(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(1);
    align(bench).await;
    assert!(bench.check(&limit, 1).await.allowed);
    bench.advance(WINDOW - MICROSECOND).await;
    assert!(!bench.check(&limit, 1).await.allowed);
    bench.advance(MICROSECOND).await;
    assert!(bench.check(&limit, 1).await.allowed);
}

async fn another_window_has_a_count_of_its_own(bench: &Bench, algorithm: Algorithm) {
    let (limit, shorter) = (algorithm.limit(3), algorithm.shorter(3));
    use_up(bench, &limit).await;
    assert!(bench.check(&shorter, 3).await.allowed);
    assert!(!bench.check(&limit, 1).await.allowed);
}

/// Refunds a charge of 3 after a reset and another charge of 2; returns what remains of 5.
async fn refund_after_a_reset(bench: &Bench, algorithm: Algorithm) -> u64 {
    let limit = algorithm.limit(5);
    align(bench).await;
    let admitted_at = bench.now();
    bench.check(&limit, 3).await;
    bench.reset(&limit).await;
    bench.advance(SECOND).await;
    bench.check(&limit, 2).await;
    remaining(&bench.refund(&limit, 3, admitted_at).await)
}

async fn a_refund_after_a_reset_takes_nothing_from_what_came_since(bench: &Bench, algorithm: Algorithm) {
    assert_eq!(refund_after_a_reset(bench, algorithm).await, 3);
}

async fn a_refund_after_a_reset_takes_from_what_came_since_at_most(bench: &Bench, algorithm: Algorithm) {
    // A window has one number for all requests in it, before and after the reset.
    assert_eq!(refund_after_a_reset(bench, algorithm).await, 5);
    use_up(bench, &algorithm.limit(5)).await;
}

async fn the_refund_of_an_early_charge_prevents_no_other(bench: &Bench, algorithm: Algorithm) {
    // A token in two seconds.
    let limit = algorithm.limit(5);
    let first_at = bench.now();
    bench.check(&limit, 1).await;
    bench.advance(SECOND / 2).await;
    let second_at = bench.now();
    bench.check(&limit, 4).await;
    bench.advance(SECOND).await;
    assert_eq!(remaining(&bench.refund(&limit, 1, first_at).await), 1);
    assert_eq!(remaining(&bench.refund(&limit, 4, second_at).await), 5);
}

async fn a_refund_reaches_the_previous_window(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(5);
    align(bench).await;
    let admitted_at = bench.now();
    bench.check(&limit, 4).await;
    bench.advance(WINDOW).await;
    assert_eq!(remaining(&bench.peek(&limit, 1).await), 1);
    assert_eq!(remaining(&bench.refund(&limit, 3, admitted_at).await), 4);
}

async fn entries_far_ahead_of_the_clock_block_no_request(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    for step in STEPS_BACK {
        let bench = bench.with_a_fresh_key();
        bench.check(&limit, 1).await;
        bench.check(&limit, 2).await;
        bench.set_back(step).await;
        assert!(bench.check(&limit, 3).await.allowed, "{step:?} back");
    }
}

/// The most that is admitted within one window after a step back from a full limit of three.
async fn admitted_after_a_step_back(bench: &Bench, algorithm: Algorithm) -> u64 {
    let limit = algorithm.limit(3);
    let mut most = 0;
    for step in STEPS_BACK {
        let bench = bench.with_a_fresh_key();
        bench.check(&limit, 3).await;
        bench.set_back(step).await;

        let mut more = 0;
        for _ in 0..10 {
            while bench.check(&limit, 1).await.allowed {
                more += 1;
            }
            bench.advance((WINDOW - MICROSECOND) / 10).await;
        }
        most = most.max(more);
    }
    most
}

async fn a_clock_set_back_admits_one_limit_more_at_most(bench: &Bench, algorithm: Algorithm) {
    assert!(admitted_after_a_step_back(bench, algorithm).await <= 3);
}

async fn a_clock_set_back_admits_what_two_windows_do_at_most(bench: &Bench, algorithm: Algorithm) {
    assert!(admitted_after_a_step_back(bench, algorithm).await < 2 * 3);
}

/// Products with such a quota are exact in ticks of more than a microsecond only.
async fn a_previous_window_of_a_large_quota_counts_in_whole_ticks(bench: &Bench, _: Algorithm) {
    const HOUR: Duration = Duration::from_secs(3_600);
    let limit = Limit::from(SlidingCounter::new(1_000_000_000_000, HOUR));
    let into = Duration::from_micros(bench.now() % HOUR.as_micros() as u64);
    bench.advance(HOUR - into).await;
    bench.check(&limit, 500_000_000_000).await;
    bench.advance(HOUR + Duration::from_micros(1_234_567_891)).await;
    // Without ticks 671,467,762,638.
    assert_eq!(bench.peek(&limit, 1).await.states()[0].remaining, 671_403_197_158);
}

/// A product of doubles is rounded up to the next token a microsecond early.
async fn tokens_of_a_large_rate_come_neither_early_nor_late(bench: &Bench, _: Algorithm) {
    const RATE: u64 = 17_451_497;
    let limit = Limit::from(TokenBucket::per_day(RATE));
    assert!(bench.check(&limit, RATE).await.allowed);
    bench.advance(Duration::from_micros(83_358_426_386)).await;
    assert_eq!(bench.peek(&limit, 1).await.states()[0].remaining, 16_837_144);
    bench.advance(Duration::from_micros(1)).await;
    assert_eq!(bench.peek(&limit, 1).await.states()[0].remaining, 16_837_145);
}

async fn a_clock_set_back_admits_what_a_full_bucket_does_at_most(bench: &Bench, algorithm: Algorithm) {
    // A burst, and the tokens of nearly one window.
    assert!(admitted_after_a_step_back(bench, algorithm).await < 2 * 3);
}

async fn a_clock_set_back_a_little_resets_nothing(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    for step in [MICROSECOND, SECOND / 2, SECOND] {
        let bench = bench.with_a_fresh_key();
        bench.advance(WINDOW / 4).await;
        bench.check(&limit, 1).await;
        bench.check(&limit, 2).await;
        let retry_after = wait(&bench.peek(&limit, 1).await);
        bench.set_back(step).await;
        assert_eq!(wait_exactly(&bench, &limit, 1).await, retry_after + step);
    }
}

async fn a_clock_set_back_over_a_boundary_admits_one_limit_for_each_window_it_meets(
    bench: &Bench,
    algorithm: Algorithm,
) {
    let limit = algorithm.limit(3);
    for step in STEPS_BACK {
        let bench = bench.with_a_fresh_key();
        align(&bench).await;
        bench.check(&limit, 3).await;
        bench.set_back(step).await;
        // The rest of an earlier window, and then the next window.
        use_up(&bench, &limit).await;
        let waited = wait_exactly(&bench, &limit, 3).await;
        assert!(waited <= WINDOW, "{waited:?} after {step:?} back");
        assert_eq!(wait(&bench.check(&limit, 1).await), WINDOW);
    }
}

/// February and March are not of the same length.
async fn a_clock_set_back_over_the_end_of_a_month_counts_until_that_of_the_next_one(
    bench: &Bench,
    algorithm: Algorithm,
) {
    let (limit, step) = (algorithm.limit(3), Duration::from_millis(300));
    bench.set("2027-03-01T00:00:00.2+01:00[Europe/Berlin]").await;
    bench.check(&limit, 1).await;
    bench.set_back(step).await;
    use_up(bench, &limit).await;
    let waited = wait_exactly(bench, &limit, 3).await;
    // The clocks are set forward in March.
    assert_eq!(waited, (31 * 24 - 1) * HOUR + Duration::from_millis(100));
}

async fn a_clock_set_back_within_the_month_resets_nothing(bench: &Bench, algorithm: Algorithm) {
    let limit = algorithm.limit(3);
    for step in STEPS_BACK {
        let bench = bench.with_a_fresh_key();
        use_up(&bench, &limit).await;
        bench.set_back(step).await;
        assert!(!bench.check(&limit, 1).await.allowed, "{step:?} back");
    }
    let bench = bench.with_a_fresh_key();
    use_up(&bench, &limit).await;
    bench.set_back(20 * 24 * HOUR).await;
    assert!(bench.check(&limit, 3).await.allowed, "in another month");
}
