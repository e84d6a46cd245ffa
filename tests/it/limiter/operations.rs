//! The operations of a limiter, and what it shares with layers, in every store.

use std::{convert::Infallible, sync::Arc, time::Duration};

use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    AcquireError, Ban, Decision, Denial, FixedWindow, Key, Limit, Limiter, MemoryStore, Policy, RateLimitLayer,
    SlidingLog, TokenBucket, key,
    store::{ErrorKind, Store},
};

use crate::support::{Counted, Received, each_store};

type Body = Empty<bytes::Bytes>;

each_store! { with crate::support::Unclocked:
    a_request_counts_its_cost_instead_of_that_of_the_policy
    a_check_has_the_cost_of_the_policy
    a_charge_may_exceed_the_limit_and_later_checks_pay
    peek_counts_nothing
    an_operation_that_does_not_wait_refuses_a_wait
    a_check_of_a_cost_of_zero_is_a_peek
    an_operation_of_a_cost_of_zero_is_a_peek_of_a_cost_of_1
    a_peek_of_a_cost_returns_what_its_check_would
    a_check_without_a_future_needs_a_store_that_replies_at_once
    a_request_has_keys_and_costs_for_single_policies
    units_are_taken_as_far_as_they_fit
    units_of_several_policies_are_those_of_the_strictest
    the_largest_units_are_taken_as_far_as_they_fit
    reset_forgets
    operations_on_a_long_key_are_those_on_the_key_as_it_is_counted
    a_refund_removes_the_charge_of_a_check
    a_refund_is_for_all_policies
    a_receipt_is_for_one_refund_and_clones_share_it
    what_was_denied_or_not_counted_has_no_receipt
    a_receipt_of_a_layer_refunds_for_a_limiter
    a_key_built_by_hand_is_the_key_that_a_layer_builds
    a_cost_above_the_limit_is_denied_with_the_state_of_each_policy
    no_wait_helps_where_one_of_several_denials_is_permanent
    a_cost_that_no_store_can_count_is_denied_without_a_call
    deny_all_denies_without_a_call_of_the_store
    deny_all_has_nothing_to_charge_or_to_remove
    unlimited_admits_without_a_call_of_the_store
    a_cost_of_zero_means_that_the_policy_does_not_apply
    a_layer_denies_a_cost_above_the_limit_without_retry_after
    a_layer_denies_deny_all_without_retry_after
    a_layer_adds_no_fields_for_unlimited
}

const LOG_OF_5: SlidingLog = SlidingLog::per_hour(5);

fn limiter(store: &Arc<impl Store>, limit: impl Into<Limit>) -> Limiter {
    Limiter::new(store.clone(), Policy::new("test", limit))
}

async fn check(limiter: &Limiter) -> Decision {
    limiter.check("k").await.expect("the store replies")
}

async fn check_cost(limiter: &Limiter, cost: u64) -> Decision {
    limiter
        .request("k")
        .cost(cost)
        .check()
        .await
        .expect("the store replies")
}

async fn units_are_taken_as_far_as_they_fit(store: Arc<impl Store>) {
    for (position, limit) in [
        "sliding-log 40/h",
        "sliding-log 40/h precision 10",
        "sliding-counter 40/h",
        "fixed-window 40/h",
        "token-bucket 40/h",
    ]
    .into_iter()
    .enumerate()
    {
        let policy = Policy::new(format!("units-{position}"), limit.parse::<Limit>().expect("a limit"));
        let limiter = Limiter::new(store.clone(), policy.cost(3));
        let take = async |units| {
            let decision = limiter.request("k").take_up_to(units).await.expect("the store replies");
            (
                decision.taken(),
                decision.is_allowed(),
                decision.retry_after().is_some(),
                decision.remaining(),
            )
        };
        assert_eq!(take(0).await, (0, true, false, 40), "{limit}: a peek");
        assert_eq!(take(4).await, (4, true, false, 28), "{limit}");
        assert_eq!(take(u32::MAX).await, (9, true, false, 1), "{limit}");
        assert_eq!(take(2).await, (0, false, true, 1), "{limit}");
    }
}

async fn the_largest_units_are_taken_as_far_as_they_fit(store: Arc<impl Store>) {
    const MOST: u64 = 999_999_999_999_999;
    let log = Policy::new("log", SlidingLog::per_hour(MOST).precision(6));
    let window = Policy::new("window", FixedWindow::per_hour(MOST));
    for policy in [log, window] {
        let limiter = Limiter::new(store.clone(), policy.cost(300_000_000_000_000));
        assert!(limiter.check("k").await.expect("the store replies").is_allowed());
        let decision = limiter
            .request("k")
            .take_up_to(u32::MAX)
            .await
            .expect("the store replies");
        assert_eq!((decision.taken(), decision.remaining()), (2, 99_999_999_999_999));
    }
}

async fn units_of_several_policies_are_those_of_the_strictest(store: Arc<impl Store>) {
    let log = |name: &'static str, quota| Policy::new(name, SlidingLog::per_hour(quota));
    let observed = log("observed", 3).observe_only();
    let limiter = Limiter::new(store.clone(), [log("wide", 9), log("strict", 4).cost(2), observed]);
    let decision = limiter.request("k").take_up_to(7).await.expect("the store replies");
    let remaining = |decision: &Decision| decision.policies().map(|policy| policy.remaining()).collect::<Vec<_>>();
    assert_eq!((decision.taken(), remaining(&decision)), (2, vec![7, 0, 0]));

    // Half of the units were not needed.
    decision
        .take_receipt_of("strict")
        .settle(2)
        .await
        .expect("the store replies");
    decision.take_receipt().refund().await.expect("the store replies");
    let left = limiter.peek("k").await.expect("the store replies");
    assert_eq!(remaining(&left), [9, 2, 3]);

    let slots = Limiter::new(store, Policy::new("slots", tower_quota::Concurrency::new(3)));
    let error = slots
        .request("k")
        .take_up_to(2)
        .await
        .expect_err("each slot has a lease of its own");
    assert!(error.to_string().contains("use `check`"), "{error}");
}

async fn a_request_has_keys_and_costs_for_single_policies(store: Arc<impl Store>) {
    let policies = ["user", "team"].map(|name| Policy::new(name, LOG_OF_5));
    let limiter = Limiter::new(store, policies);
    let request = |user: &'static str| limiter.request(user).key_of("team", "red").cost_of("team", 2);
    let remaining = |decision: &Decision| decision.policies().map(|policy| policy.remaining()).collect::<Vec<_>>();

    let first = request("a").check().await.expect("a decision");
    assert_eq!(remaining(&first), [4, 3]);
    let second = request("b").check().await.expect("a decision");
    assert_eq!(remaining(&second), [4, 1]);
    let third = request("c").check().await.expect("a decision");
    assert!(!third.is_allowed());
    assert_eq!(remaining(&third), [5, 1], "all or nothing");
    assert_eq!(remaining(&request("a").peek().await.expect("a decision")), [4, 1]);

    first.take_receipt().refund().await.expect("the store replies");
    assert_eq!(remaining(&request("a").peek().await.expect("a decision")), [5, 3]);
    let never = request("a")
        .cost(9)
        .cost_of("team", 1)
        .check()
        .await
        .expect("a decision");
    let denials: Vec<_> = never
        .policies()
        .map(|policy| (policy.name(), policy.denial()))
        .collect();
    assert!(denials.contains(&("user", Some(Denial::CostAboveLimit))), "{denials:?}");
    let charged = request("a").cost_of("user", 7).charge().await.expect("a decision");
    assert_eq!(remaining(&charged), [0, 1]);

    let error = request("a")
        .cost_of("teams", 1)
        .check()
        .await
        .expect_err("there is no such policy");
    assert!(error.to_string().contains("`teams`; it has `user`, `team`"), "{error}");
}

/// What is left for the key `k`.
async fn remaining(limiter: &Limiter) -> u64 {
    limiter.peek("k").await.expect("the store replies").remaining()
}

async fn a_request_counts_its_cost_instead_of_that_of_the_policy(store: Arc<impl Store>) {
    let limiter = Limiter::new(store, Policy::new("test", LOG_OF_5).cost(2));
    assert_eq!(check_cost(&limiter, 4).await.remaining(), 1);
    assert!(!check_cost(&limiter, 2).await.is_allowed());
    assert!(check_cost(&limiter, 1).await.is_allowed());
}

async fn a_check_has_the_cost_of_the_policy(store: Arc<impl Store>) {
    let limiter = Limiter::new(store, Policy::new("test", LOG_OF_5).cost(2));
    assert_eq!(check(&limiter).await.remaining(), 3);
    assert_eq!(check(&limiter).await.remaining(), 1);
    let denied = check(&limiter).await;
    assert!(!denied.is_allowed());
    assert_eq!(denied.remaining(), 1);
}

async fn a_charge_may_exceed_the_limit_and_later_checks_pay(store: Arc<impl Store>) {
    let limiter = limiter(&store, TokenBucket::per_hour(5));
    let charged = limiter.request("k").cost(15).charge().await.expect("the store replies");
    assert!(charged.is_allowed());
    assert_eq!((charged.remaining(), charged.retry_after()), (0, None));

    // Ten in debt, so the eleventh token is the first to use.
    let wait = check(&limiter).await.retry_after().expect("it is denied");
    let eleven = Duration::from_secs(3_600) * 11 / 5;
    assert!(wait <= eleven && wait > eleven - Duration::from_secs(60), "{wait:?}");
}

async fn peek_counts_nothing(store: Arc<impl Store>) {
    let limiter = limiter(&store, LOG_OF_5);
    for _ in 0..3 {
        assert_eq!(remaining(&limiter).await, 5);
    }
    assert!(check_cost(&limiter, 5).await.is_allowed());
    let peeked = limiter.peek("k").await.expect("the store replies");
    assert!(!peeked.is_allowed());
    assert!(peeked.retry_after().is_some());
}

async fn an_operation_that_does_not_wait_refuses_a_wait(store: Arc<impl Store>) {
    let limiter = limiter(&store, LOG_OF_5);
    let request = || limiter.request("k");
    for waits in [
        request().wait_up_to(Duration::ZERO),
        request().fair_by("tenant"),
        request().priority(-1),
    ] {
        for refused in [
            waits.clone().check().await,
            waits.clone().peek().await,
            waits.clone().charge().await,
            waits.clone().take_up_to(2).await,
        ] {
            let error = refused.expect_err("it does not wait");
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains("are for `acquire`"), "{error}");
        }
        assert!(waits.acquire().await.is_ok());
    }
    assert_eq!(remaining(&limiter).await, 2);
}

async fn a_check_of_a_cost_of_zero_is_a_peek(store: Arc<impl Store>) {
    let limiter = limiter(&store, LOG_OF_5);
    let _ = check_cost(&limiter, 2).await;
    let zero = check_cost(&limiter, 0).await;
    assert_eq!((zero.is_allowed(), zero.limit(), zero.remaining()), (true, 5, 3));
    let _ = check_cost(&limiter, 3).await;
    assert_eq!(check_cost(&limiter, 0).await.remaining(), 0);
}

async fn an_operation_of_a_cost_of_zero_is_a_peek_of_a_cost_of_1(store: Arc<impl Store>) {
    let policy = |name| Policy::new(name, SlidingLog::per_hour(5)).cost(2);
    let limiter = Limiter::new(store.clone(), [policy("a"), policy("b")]);
    let zero = || limiter.request("k").cost(0);
    for left in (0..=5).rev() {
        let mut decisions = vec![
            zero().check().await,
            zero().key_of("b", "other").check().await,
            zero().peek().await,
            zero().take_up_to(3).await,
            zero().acquire().await.or_else(|error| match error {
                AcquireError::Denied(denied) => Ok(denied.decision().clone()),
                _ => panic!("{error}"),
            }),
        ];
        if store.replies_at_once() {
            decisions.push(zero().check_now());
        }
        for decision in decisions {
            let decision = decision.expect("the store replies");
            assert_eq!((decision.is_allowed(), decision.remaining()), (left > 0, left));
            assert_eq!(decision.policies().count(), 2);
            assert!(decision.take_receipt().is_empty());
        }
        let taken = zero().take_up_to(3).await.expect("the store replies").taken();
        assert_eq!(taken, 0);
        if left > 0 {
            assert!(
                limiter
                    .request("k")
                    .cost(1)
                    .check()
                    .await
                    .expect("the store replies")
                    .is_allowed()
            );
        }
    }
    // Beside the cost of a policy, the others do not apply.
    let of_one = zero().cost_of("a", 1).check().await.expect("the store replies");
    assert!(!of_one.is_allowed() && of_one.policies().count() == 1);
}

async fn a_peek_of_a_cost_returns_what_its_check_would(store: Arc<impl Store>) {
    let limiter = limiter(&store, LOG_OF_5);
    let _ = check_cost(&limiter, 2).await;
    for (cost, fits) in [(0, true), (3, true), (4, false), (6, false)] {
        let peeked = limiter
            .request("k")
            .cost(cost.max(1))
            .peek()
            .await
            .expect("the store replies");
        assert_eq!(
            (peeked.is_allowed(), peeked.take_receipt().is_empty()),
            (fits, true),
            "{cost}"
        );
    }
    assert!(check_cost(&limiter, 3).await.is_allowed());
}

async fn a_check_without_a_future_needs_a_store_that_replies_at_once(store: Arc<impl Store>) {
    let limiter = limiter(&store, LOG_OF_5);
    let checked = limiter.request("k").check_now();
    assert_eq!(checked.is_ok(), store.replies_at_once(), "{checked:?}");
    let counted = u64::from(checked.is_ok_and(|decision| decision.is_allowed()));
    assert_eq!(check_cost(&limiter, 0).await.remaining(), 5 - counted);
}

async fn reset_forgets(store: Arc<impl Store>) {
    let limiter = limiter(&store, LOG_OF_5);
    assert!(check_cost(&limiter, 5).await.is_allowed());
    assert_eq!(
        limiter.check("another").await.expect("the store replies").remaining(),
        4
    );

    limiter.reset("k").await.expect("the store replies");
    assert_eq!(remaining(&limiter).await, 5);
    let another = limiter.peek("another").await.expect("the store replies");
    assert_eq!(another.remaining(), 4);
}

/// A long key is counted by its hash.
async fn operations_on_a_long_key_are_those_on_the_key_as_it_is_counted(store: Arc<impl Store>) {
    const HOUR: Duration = Duration::from_secs(3_600);
    let policy = Policy::new("test", SlidingLog::per_hour(1)).ban(Ban::by_hand());
    let limiter = Limiter::new(store.clone(), [policy, Policy::new("other", LOG_OF_5)]);
    let long = || Key::from("x".repeat(400));
    let peek = async || limiter.peek(long()).await.expect("the store replies");
    let of_other = |decision: &Decision| decision.policies().nth(1).map(|policy| policy.remaining());
    let counted = limiter.request("short").key_of("other", long()).check().await;
    assert_eq!(counted.expect("the store replies").policies().count(), 2);
    assert_eq!(of_other(&peek().await), Some(4));
    for _ in 0..2 {
        assert!(limiter.check(long()).await.expect("the store replies").is_allowed());
        limiter.reset(long()).await.expect("the store replies");
        assert_eq!(of_other(&peek().await), Some(5));
    }
    limiter.ban(long(), HOUR).await.expect("the store replies");
    let denials: Vec<_> = peek().await.policies().filter_map(|policy| policy.denial()).collect();
    assert_eq!(denials, [Denial::Banned]);
}

async fn a_refund_removes_the_charge_of_a_check(store: Arc<impl Store>) {
    let limiter = limiter(&store, LOG_OF_5);
    assert!(check(&limiter).await.is_allowed());
    let receipt = check_cost(&limiter, 3).await.take_receipt();
    assert_eq!(remaining(&limiter).await, 1);
    receipt.refund().await.expect("the store replies");
    assert_eq!(remaining(&limiter).await, 4);
}

async fn a_refund_is_for_all_policies(store: Arc<impl Store>) {
    let both = [
        Policy::new("log", LOG_OF_5),
        Policy::new("bucket", TokenBucket::per_hour(3)),
    ];
    let limiter = Limiter::new(store, both);
    let left = async || -> Vec<_> {
        let peeked = limiter.peek("k").await.expect("the store replies");
        peeked.policies().map(|policy| policy.remaining()).collect()
    };

    let receipt = check_cost(&limiter, 2).await.take_receipt();
    assert_eq!(left().await, [3, 1]);
    receipt.refund().await.expect("the store replies");
    assert_eq!(left().await, [5, 3]);
}

async fn a_receipt_is_for_one_refund_and_clones_share_it(store: Arc<impl Store>) {
    let decision = check(&limiter(&store, LOG_OF_5)).await;
    let clone = decision.clone();
    assert!(!clone.take_receipt().is_empty());
    assert!(decision.take_receipt().is_empty());
    assert!(clone.take_receipt().is_empty());
}

async fn what_was_denied_or_not_counted_has_no_receipt(store: Arc<impl Store>) {
    let limited = limiter(&store, LOG_OF_5);
    assert!(check_cost(&limited, 5).await.is_allowed());
    assert!(check(&limited).await.take_receipt().is_empty());
    assert!(
        check(&limiter(&store, Limit::Unlimited))
            .await
            .take_receipt()
            .is_empty()
    );
}

/// Sends a request for `/`, and returns the response; the inner service responds with the decision of the request.
async fn send(layer: &RateLimitLayer, request: http::request::Builder) -> Received {
    let service = layer.layer(service_fn(async |request: Request<Body>| {
        let mut response = Response::new(Body::new());
        if let Some(decision) = request.extensions().get::<Decision>() {
            response.extensions_mut().insert(decision.clone());
        }
        Ok::<_, Infallible>(response)
    }));
    let Ok(response) = service.oneshot(request.body(Body::new()).expect("a request")).await;
    Received::read(response).await
}

fn by_user_and_path(limit: impl Into<Limit>) -> Policy {
    Policy::new("test", limit).key((key::header("x-user-id"), key::path()))
}

fn from_user_42() -> http::request::Builder {
    Request::get("/login").header("x-user-id", "42")
}

fn user_42() -> Key {
    Key::header("x-user-id", "42").and(Key::path("/login"))
}

async fn a_receipt_of_a_layer_refunds_for_a_limiter(store: Arc<impl Store>) {
    let layer = RateLimitLayer::new(store.clone(), by_user_and_path(LOG_OF_5).cost(3));
    let limiter = limiter(&store, LOG_OF_5);

    let response = send(&layer, from_user_42()).await;
    let decision = response.extensions.get::<Decision>().expect("it was counted");
    assert_eq!(limiter.peek(user_42()).await.expect("the store replies").remaining(), 2);

    let receipt = decision.take_receipt();
    receipt.refund().await.expect("the store replies");
    assert_eq!(limiter.peek(user_42()).await.expect("the store replies").remaining(), 5);
}

async fn a_key_built_by_hand_is_the_key_that_a_layer_builds(store: Arc<impl Store>) {
    let layer = RateLimitLayer::new(store.clone(), by_user_and_path(LOG_OF_5));
    let limiter = limiter(&store, LOG_OF_5);
    for _ in 0..2 {
        assert_eq!(send(&layer, from_user_42()).await.status, StatusCode::OK);
    }
    assert_eq!(
        limiter
            .request(user_42())
            .cost(3)
            .check()
            .await
            .expect("the store replies")
            .remaining(),
        0
    );
    assert_eq!(send(&layer, from_user_42()).await.status, StatusCode::TOO_MANY_REQUESTS);

    let other = Request::get("/login").header("x-user-id", "43");
    assert_eq!(send(&layer, other).await.status, StatusCode::OK);
}

/// Checks that a decision was denied for this reason, and that no wait helps.
fn assert_permanent_denial(decision: &Decision, denial: Denial) {
    assert!(!decision.is_allowed());
    assert_eq!(decision.retry_after(), None);
    let reasons: Vec<_> = decision.policies().map(|policy| policy.denial()).collect();
    assert_eq!(reasons, [Some(denial)]);
    assert!(decision.take_receipt().is_empty());
}

async fn a_cost_above_the_limit_is_denied_with_the_state_of_each_policy(store: Arc<impl Store>) {
    let every = [
        "sliding-log 5/h",
        "sliding-log 5/h precision 10",
        "sliding-counter 5/h",
        "fixed-window 5/h",
        "token-bucket 5/h",
        "concurrency 5",
    ];
    let mut held = Vec::new();
    for (position, limit) in every.into_iter().enumerate() {
        let limit: Limit = limit.parse().expect("a limit");
        let policies = [
            Policy::new(format!("small{position}"), limit.clone()),
            Policy::new("large", LOG_OF_5),
        ];
        let limiter = Limiter::new(store.clone(), policies);
        let key = format!("k{position}");
        for left in [5, 4] {
            // The last ones are above what a store counts.
            for cost in [6, 1_000_000_000_000_000, u64::MAX] {
                let decision = limiter
                    .request(&*key)
                    .cost_of(&format!("small{position}"), cost)
                    .check()
                    .await;
                let never = decision.expect("the store replies");
                assert!(!never.is_allowed(), "{limit:?}");
                assert_eq!(never.retry_after(), None, "{limit:?}");
                let states: Vec<_> = never
                    .policies()
                    .map(|policy| (policy.denial(), policy.remaining()))
                    .collect();
                assert_eq!(
                    states,
                    [(Some(Denial::CostAboveLimit), left), (None, left)],
                    "{limit:?}"
                );
                assert!(never.take_receipt().is_empty());
            }
            if left == 5 {
                let decision = limiter.check(&*key).await.expect("the store replies");
                assert!(decision.is_allowed(), "{limit:?}");
                held.push(decision);
            }
        }
    }
}

async fn no_wait_helps_where_one_of_several_denials_is_permanent(store: Arc<impl Store>) {
    let small = || Policy::new("small", LOG_OF_5);
    let full = || Policy::new("full", FixedWindow::per_hour(10));
    for (number, policies) in [[small(), full()], [full(), small()]].into_iter().enumerate() {
        let limiter = Limiter::new(store.clone(), policies);
        let key = format!("k{number}");
        let check = async |cost| limiter.request(&*key).cost_of("full", 8).cost(cost).check().await;
        assert!(check(1).await.expect("the store replies").is_allowed());

        let full = check(1).await.expect("the store replies");
        assert!(full.retry_after().is_some() && full.headers().contains_key("retry-after"));
        let never = check(6).await.expect("the store replies");
        let denials: Vec<_> = never.policies().map(|policy| policy.denies()).collect();
        assert_eq!(denials, [true, true]);
        assert_eq!((never.retry_after(), never.limit()), (None, 5));
        assert!(!never.headers().contains_key("retry-after"));
        let waits = never.policies().filter_map(|policy| policy.retry_after());
        assert_eq!(waits.count(), 1, "each policy has its own wait");
    }
}

async fn a_cost_that_no_store_can_count_is_denied_without_a_call(store: Arc<impl Store>) {
    let store = Counted::new(store);
    let most = 999_999_999_999_999;
    let window = FixedWindow::new(most, Duration::from_secs(60));
    let limiter = Limiter::new(store.clone(), Policy::new("test", window));
    for cost in [most + 1, u64::MAX] {
        assert_permanent_denial(&check_cost(&limiter, cost).await, Denial::CostAboveLimit);
    }
    assert_eq!(store.calls(), 0);
    assert!(check_cost(&limiter, most).await.is_allowed());

    let limiter = Limiter::new(store.clone(), Policy::new("test", LOG_OF_5));
    assert!(check_cost(&limiter, 5).await.is_allowed());
    let full = check_cost(&limiter, 5).await;
    assert_eq!(
        full.policies().next().and_then(|policy| policy.denial()),
        Some(Denial::QuotaExceeded)
    );
}

async fn deny_all_denies_without_a_call_of_the_store(store: Arc<impl Store>) {
    let store = Counted::new(store);
    let limiter = Limiter::new(store.clone(), Policy::new("test", Limit::DenyAll));
    assert_permanent_denial(&check(&limiter).await, Denial::DenyAll);
    assert_permanent_denial(
        &limiter.peek("k").await.expect("the store is not needed"),
        Denial::DenyAll,
    );
    assert_eq!(store.calls(), 0);
}

async fn deny_all_has_nothing_to_charge_or_to_remove(store: Arc<impl Store>) {
    let both = [Policy::new("none", Limit::DenyAll), Policy::new("test", LOG_OF_5)];
    let both = Limiter::new(store.clone(), both);
    let counted = limiter(&store, LOG_OF_5);

    assert!(
        both.request("k")
            .cost(3)
            .charge()
            .await
            .expect("the store replies")
            .is_allowed()
    );
    assert_eq!(remaining(&counted).await, 2);
    both.reset("k").await.expect("the store replies");
    assert_eq!(remaining(&counted).await, 5);
}

async fn unlimited_admits_without_a_call_of_the_store(store: Arc<impl Store>) {
    let store = Counted::new(store);
    let limiter = Limiter::new(store.clone(), Policy::new("test", Limit::Unlimited));
    for cost in [1, u64::MAX] {
        let decision = check_cost(&limiter, cost).await;
        assert!(decision.is_allowed());
        assert_eq!(decision.policies().count(), 0);
    }
    assert!(
        limiter
            .request("k")
            .cost(9)
            .charge()
            .await
            .expect("the store is not needed")
            .is_allowed()
    );
    limiter.reset("k").await.expect("the store is not needed");
    assert_eq!(store.calls(), 0);
}

async fn a_cost_of_zero_means_that_the_policy_does_not_apply(store: Arc<impl Store>) {
    let store = Counted::new(store);
    let writes =
        by_user_and_path(SlidingLog::per_hour(1)).cost_fn(|parts| u64::from(parts.method != http::Method::GET));
    let layer = RateLimitLayer::new(store.clone(), writes);

    for _ in 0..3 {
        let read = send(&layer, from_user_42()).await;
        assert_eq!(read.status, StatusCode::OK);
        read.assert_silent();
    }
    assert_eq!(store.calls(), 0);

    let write = || Request::post("/login").header("x-user-id", "42");
    assert_eq!(send(&layer, write()).await.status, StatusCode::OK);
    assert_eq!(send(&layer, write()).await.status, StatusCode::TOO_MANY_REQUESTS);
}

/// Checks that a layer denies without saying when to come back.
async fn assert_denied_for_good(store: impl Store, policy: Policy) -> Received {
    let denied = send(&RateLimitLayer::new(store, policy), from_user_42()).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.field("retry-after"), None);
    assert_eq!(denied.json()["violated-policies"], serde_json::json!(["test"]));
    denied
}

async fn a_layer_denies_a_cost_above_the_limit_without_retry_after(store: Arc<impl Store>) {
    let waiting = by_user_and_path(LOG_OF_5).wait_up_to(Duration::from_secs(60));
    for policy in [by_user_and_path(LOG_OF_5), waiting] {
        let denied = assert_denied_for_good(store.clone(), policy.cost_fn(|_| 6)).await;
        assert_eq!(denied.field("ratelimit-policy"), Some("\"test\";q=5;w=3600"));
        assert_eq!(denied.field("ratelimit"), Some("\"test\";r=0"));
        assert_eq!(denied.json()["detail"], "test: costs 6, the limit is 5");
    }
    // It does not stand in the line, where others would wait for it.
    let admitted = send(&RateLimitLayer::new(store, by_user_and_path(LOG_OF_5)), from_user_42()).await;
    assert_eq!(admitted.status, StatusCode::OK);
}

async fn a_layer_denies_deny_all_without_retry_after(store: Arc<impl Store>) {
    let store = Counted::new(store);
    let denied = assert_denied_for_good(store.clone(), by_user_and_path(Limit::DenyAll)).await;
    assert_eq!(denied.field("ratelimit"), Some("\"test\";r=0"));
    assert_eq!(denied.json().get("detail"), None);
    assert_eq!(store.calls(), 0);
}

async fn a_layer_adds_no_fields_for_unlimited(store: Arc<impl Store>) {
    let store = Counted::new(store);
    let layer = RateLimitLayer::new(store.clone(), by_user_and_path(Limit::Unlimited));
    let passed = send(&layer, from_user_42()).await;
    assert_eq!(passed.status, StatusCode::OK);
    passed.assert_silent();
    assert_eq!(store.calls(), 0);
}

#[test]
fn a_limiter_of_a_policy_that_needs_a_request_is_an_error_with_the_fix() {
    let uploads = || Policy::new("uploads", LOG_OF_5);
    for (policy, parts) in [
        (
            uploads().cost_fn(|_| 1),
            ["`.cost_fn(..)`", "`.cost(..)`, and `.request(key).cost(..)`"],
        ),
        (
            uploads().wait_up_to_fn(|_| Duration::ZERO),
            [
                "`.wait_up_to_fn(..)`",
                "and `.request(key).wait_up_to(..)` for other waits",
            ],
        ),
        (
            uploads().fair_by(key::constant("all")),
            ["`.fair_by(..)`", "use `fair_by` of each request"],
        ),
        (
            uploads().priority_fn(|_| 1),
            ["`.priority_fn(..)`", "use `priority` of each request"],
        ),
        (uploads().apply_if(|_| true), ["`.apply_if(..)`", "leave it out"]),
        (
            uploads().refund_if(|_| true),
            ["`.refund_if(..)`", "`decision.take_receipt().refund()`"],
        ),
    ] {
        let error = Limiter::try_new(MemoryStore::new(), policy).unwrap_err().to_string();
        for part in parts.into_iter().chain(["`uploads`"]) {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_line_is_that_of_any_policy() {
    let hours = |n: u64| Duration::from_secs(n * 3_600);
    let roomy = Policy::new("roomy", SlidingLog::per_hour(99)).wait_up_to(hours(9));
    let full = Policy::new("full", SlidingLog::per_hour(1)).wait_up_to(hours(9));
    let limiter = Limiter::new(MemoryStore::new(), [roomy, full.max_waiting(1)]);
    let _ = limiter.acquire("k").await.expect("it fits");

    let mut waiting = std::pin::pin!(limiter.acquire("k"));
    tokio::select! {
        biased;
        _ = &mut waiting => panic!("there is no room"),
        () = tokio::task::yield_now() => {}
    }
    let error = limiter.acquire("k").await.expect_err("one waits");
    assert!(matches!(error, AcquireError::LineFull(_)), "{error}");
}
