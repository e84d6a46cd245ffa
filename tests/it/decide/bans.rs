//! Bans of callers that are denied too often, in every store.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use tokio::task::JoinSet;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    AcquireError, Ban, Decision, Denial, Key, Limit, Limiter, ManualClock, MemoryStore, Policies, Policy,
    RateLimitLayer, SlidingLog, key,
    store::{Charge, ErrorKind, Operation, Store, StoreRequest},
};

use super::line::stand_in_line;
use crate::support::{
    Algorithm, Bench, Cluster, Counted, Flaky, Later, Received, Redis, Sentinel, connected, each_store, eventually,
    patient,
};

each_store! {
    a_ban_begins_with_the_last_denial_and_ends_to_the_microsecond
    each_ban_is_twice_as_long_as_the_one_before_and_decays
    denials_of_two_windows_are_not_added
    denials_are_forgotten_at_the_end_of_their_window
    denials_of_a_clock_that_was_ahead_by_a_second_count
    a_denial_with_a_wait_of_a_microsecond_counts
    while_banned_nothing_is_counted_to_any_policy
    a_denial_by_another_policy_or_for_its_cost_does_not_count
    a_denial_by_another_policy_of_a_request_that_could_wait_does_not_count
    each_denial_that_ends_a_wait_counts
    each_of_two_policies_has_its_own_bans
    a_reset_ends_a_ban_and_forgets_those_before
    a_peek_shows_a_ban_and_counts_no_denial
    a_charge_is_counted_during_a_ban
    a_policy_that_observes_only_reports_its_bans
    a_key_is_banned_by_hand_for_a_time
    a_ban_of_a_clock_that_is_gone_is_dropped
    a_ban_of_denials_in_a_moment_holds_where_the_clock_is_set_back_a_little
    a_ban_holds_under_a_policy_that_bans_for_less
    a_long_ban_of_a_clock_that_is_gone_is_dropped_where_bans_are_shorter
    a_ban_holds_in_any_order_of_policies_that_differ
    of_many_requests_at_once_as_many_are_denied_as_without_a_ban
    a_refund_and_a_settlement_leave_a_ban_as_it_is
    a_cost_that_does_not_fit_counts_as_one_denial
    only_bans_in_force_and_denials_of_their_charge_have_an_effect
    the_bans_of_a_limit_that_counts_nothing_begin_and_are_read
    a_ban_by_hand_makes_the_next_ban_no_longer
}

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
const US: Duration = Duration::from_micros(1);

fn ban() -> Ban {
    Ban::after(3, HOUR).first(MINUTE).longest(5 * MINUTE)
}

/// One a second, so that the limit itself denies for a second.
fn policy(name: &'static str) -> Policy<()> {
    Policy::new(name, SlidingLog::per_second(1))
}

fn limiter(bench: &Bench) -> Limiter {
    Limiter::new(bench.store.clone(), policy("test").ban(ban()))
}

async fn check(limiter: &Limiter) -> Decision {
    limiter.check("k").await.expect("the store replies")
}

/// The reason of the first policy, and the wait.
fn denial(decision: &Decision) -> Option<(Denial, Duration)> {
    let policy = decision.policies().next().expect("a policy");
    assert!(policy.is_observed() || policy.denial().is_none() == decision.is_allowed());
    Some((policy.denial()?, policy.retry_after()?))
}

fn full(wait: Duration) -> Option<(Denial, Duration)> {
    Some((Denial::QuotaExceeded, wait))
}

fn banned(wait: Duration) -> Option<(Denial, Duration)> {
    Some((Denial::Banned, wait))
}

/// Sends requests until the key is banned, and returns for how long.
async fn provoke(limiter: &Limiter) -> Duration {
    for _ in 0..10 {
        if let Some((Denial::Banned, wait)) = denial(&check(limiter).await) {
            return wait;
        }
    }
    panic!("it is not banned");
}

async fn a_ban_begins_with_the_last_denial_and_ends_to_the_microsecond(bench: Bench) {
    let second = Duration::from_secs(1);
    let limiter = limiter(&bench);
    let mut denials = Vec::new();
    for _ in 0..5 {
        denials.push(denial(&check(&limiter).await));
    }
    assert_eq!(
        denials,
        [None, full(second), full(second), banned(MINUTE), banned(MINUTE)]
    );
    let last = check(&limiter).await;
    assert_eq!((last.remaining(), last.reset_after()), (0, MINUTE));

    bench.advance(second).await;
    assert_eq!(denial(&check(&limiter).await), banned(MINUTE - second));
    bench.advance(MINUTE - second - US).await;
    assert_eq!(denial(&check(&limiter).await), banned(US));
    bench.advance(US).await;
    assert_eq!(denial(&check(&limiter).await), None);
    assert_eq!(denial(&check(&limiter).await), full(second));
}

async fn each_ban_is_twice_as_long_as_the_one_before_and_decays(bench: Bench) {
    let limiter = limiter(&bench);
    for minutes in [1, 2, 4, 5, 5] {
        assert_eq!(provoke(&limiter).await, minutes * MINUTE);
        bench.advance(minutes * MINUTE).await;
    }
    // One step for each hour: of three, none, one, two and all.
    for (hours, minutes) in [(1, 4), (1, 4), (2, 2), (5, 1)] {
        bench.advance(hours * HOUR).await;
        assert_eq!(provoke(&limiter).await, minutes * MINUTE, "after {hours} hours");
        bench.advance(minutes * MINUTE).await;
    }
}

async fn denials_of_two_windows_are_not_added(bench: Bench) {
    let limiter = limiter(&bench);
    for _ in 0..3 {
        // Admitted, and denied twice, the last time within the hour.
        for is_denied in [false, true, true] {
            assert_eq!(denial(&check(&limiter).await).is_some(), is_denied);
        }
        bench.advance(HOUR - US).await;
        assert_eq!(denial(&check(&limiter).await), None);
        bench.advance(US).await;
        bench.advance(Duration::from_secs(1)).await;
    }
    for _ in 0..3 {
        let _ = check(&limiter).await;
    }
    bench.advance(HOUR - US).await;
    let _ = check(&limiter).await;
    assert_eq!(denial(&check(&limiter).await), banned(MINUTE));
}

async fn denials_are_forgotten_at_the_end_of_their_window(bench: Bench) {
    let limiter = limiter(&bench);
    let second = Duration::from_secs(1);
    for _ in 0..2 {
        for expected in [None, full(second), full(second)] {
            assert_eq!(denial(&check(&limiter).await), expected);
        }
        bench.advance(HOUR).await;
    }
}

async fn denials_of_a_clock_that_was_ahead_by_a_second_count(bench: Bench) {
    let (limiter, second) = (limiter(&bench), Duration::from_secs(1));
    for expected in [None, full(second), full(second)] {
        assert_eq!(denial(&check(&limiter).await), expected);
    }
    bench.set_back(second).await;
    assert_eq!(denial(&check(&limiter).await), banned(MINUTE));
}

async fn a_denial_with_a_wait_of_a_microsecond_counts(bench: Bench) {
    let limiter = limiter(&bench);
    assert!(check(&limiter).await.is_allowed());
    bench.advance(Duration::from_secs(1) - US).await;
    for expected in [full(US), full(US), banned(MINUTE)] {
        assert_eq!(denial(&check(&limiter).await), expected);
    }
}

async fn while_banned_nothing_is_counted_to_any_policy(bench: Bench) {
    let total = || Policy::new("total", SlidingLog::per_hour(100));
    let both = Limiter::new(bench.store.clone(), [policy("test").ban(ban()), total()]);
    let total = Limiter::new(bench.store.clone(), total());
    assert_eq!(provoke(&both).await, MINUTE);
    for _ in 0..30 {
        bench.advance(Duration::from_secs(2)).await;
        let left = total.peek("k").await.expect("the store replies").remaining();
        assert_eq!(left, 99);
        let _ = check(&both).await;
    }
    assert_eq!(total.peek("k").await.expect("the store replies").remaining(), 98);
}

async fn a_denial_by_another_policy_or_for_its_cost_does_not_count(bench: Bench) {
    let roomy = Policy::new("test", SlidingLog::per_hour(50)).ban(ban());
    let policies = [roomy.clone(), Policy::new("other", SlidingLog::per_day(1))];
    let both = Limiter::new(bench.store.clone(), policies);
    for number in 0..10 {
        assert_eq!(check(&both).await.is_allowed(), number == 0);
    }
    let alone = Limiter::new(bench.store.clone(), roomy);
    for _ in 0..10 {
        let above = alone.request("k").cost(51).check().await.expect("the store replies");
        assert_eq!(
            above.policies().next().and_then(|policy| policy.denial()),
            Some(Denial::CostAboveLimit)
        );
    }
    assert!(check(&alone).await.is_allowed());
    let peeked = alone.peek("k").await.expect("the store replies");
    assert_eq!(denial(&peeked), None);
}

async fn a_denial_by_another_policy_of_a_request_that_could_wait_does_not_count(bench: Bench) {
    let waiting = policy("test").wait_up_to(5 * MINUTE).ban(ban());
    let policies = [waiting.clone(), Policy::new("other", SlidingLog::per_day(1))];
    let both = Limiter::new(bench.store.clone(), policies);
    for number in 0..10 {
        assert_eq!(both.acquire("k").await.is_ok(), number == 0);
    }
    bench.advance(MINUTE).await;
    let alone = Limiter::new(bench.store.clone(), waiting);
    assert!(alone.acquire("k").await.is_ok(), "the policy has denied nothing");
}

/// Those that wait are equal, so they are checked together.
async fn each_denial_that_ends_a_wait_counts(bench: Bench) {
    let store = Counted::new(bench.store.clone());
    let other = Policy::new("other", SlidingLog::per_second(2)).ban(ban());
    let waiting = policy("test").wait_up_to(5 * MINUTE);
    let both = Limiter::new(store.clone(), [waiting, other.clone()]);
    let other = Limiter::new(store.clone(), other);
    assert!(check(&both).await.is_allowed());
    let callers = [(); 3].map(|()| {
        let both = both.clone();
        tokio::spawn(async move { both.acquire("k").await })
    });
    eventually("they wait", async || store.calls() >= 4).await;
    assert!(check(&other).await.is_allowed());
    for caller in callers {
        let ended = caller.await.expect("no panic");
        assert!(matches!(ended, Err(AcquireError::Denied(_))), "{ended:?}");
    }
    let peeked = other.peek("k").await.expect("the store replies");
    assert_eq!(denial(&peeked), banned(MINUTE));
}

async fn each_of_two_policies_has_its_own_bans(bench: Bench) {
    let policies = ["one", "two"].map(|name| policy(name).ban(ban()));
    let [one, two] = policies.clone().map(|policy| Limiter::new(bench.store.clone(), policy));
    let both = Limiter::new(bench.store.clone(), policies);
    assert_eq!(provoke(&one).await, MINUTE);
    assert!(check(&two).await.is_allowed());

    // Banned by the first one, which hides no denial of the second: that one counts none.
    for _ in 0..10 {
        let decision = check(&both).await;
        let denials: Vec<_> = decision.policies().map(|policy| policy.denial()).collect();
        assert_eq!(denials, [Some(Denial::Banned), Some(Denial::QuotaExceeded)]);
        assert_eq!(decision.retry_after(), Some(MINUTE));
    }
    bench.advance(MINUTE).await;
    assert_eq!(provoke(&two).await, MINUTE);
    assert!(check(&one).await.is_allowed());

    // One denial counts for each policy that has no room, so both ban after the same one.
    for limiter in [&one, &two] {
        limiter.reset("k").await.expect("the store replies");
    }
    let mut last = Vec::new();
    for _ in 0..4 {
        last = check(&both).await.policies().map(|policy| policy.denial()).collect();
    }
    assert_eq!(last, [Some(Denial::Banned); 2]);
}

async fn a_reset_ends_a_ban_and_forgets_those_before(bench: Bench) {
    let limiter = limiter(&bench);
    for minutes in [1, 2] {
        assert_eq!(provoke(&limiter).await, minutes * MINUTE);
        bench.advance(minutes * MINUTE).await;
    }
    for _ in 0..2 {
        assert!(provoke(&limiter).await >= MINUTE);
        limiter.reset("k").await.expect("the store replies");
        assert!(check(&limiter).await.is_allowed());
        assert_eq!(provoke(&limiter).await, MINUTE);
    }
}

async fn a_peek_shows_a_ban_and_counts_no_denial(bench: Bench) {
    let limiter = limiter(&bench);
    let peek = async || limiter.peek("k").await.expect("the store replies");
    assert!(check(&limiter).await.is_allowed());
    for _ in 0..10 {
        assert_eq!(denial(&peek().await), full(Duration::from_secs(1)));
    }
    assert_eq!(provoke(&limiter).await, MINUTE);
    assert_eq!(denial(&peek().await), banned(MINUTE));
    bench.advance(MINUTE).await;
    assert_eq!(denial(&peek().await), None);
}

async fn a_charge_is_counted_during_a_ban(bench: Bench) {
    let policy = Policy::new("test", SlidingLog::per_hour(5)).ban(ban());
    let limiter = Limiter::new(bench.store.clone(), policy);
    limiter.ban("k", MINUTE).await.expect("the store replies");
    assert!(
        limiter
            .request("k")
            .cost(2)
            .charge()
            .await
            .expect("the store replies")
            .is_allowed()
    );
    assert_eq!(denial(&check(&limiter).await), banned(MINUTE));
    bench.advance(MINUTE).await;
    assert_eq!(check(&limiter).await.remaining(), 2);
}

async fn a_policy_that_observes_only_reports_its_bans(bench: Bench) {
    let candidate = policy("candidate").ban(ban()).observe_only();
    let limiter = Limiter::new(
        bench.store.clone(),
        [candidate, Policy::new("enforced", SlidingLog::per_hour(100))],
    );
    let mut seen = Vec::new();
    for number in 0..6 {
        let decision = check(&limiter).await;
        assert!(decision.is_allowed());
        assert_eq!(decision.remaining(), 99 - number);
        seen.push(denial(&decision).map(|(denial, _)| denial));
    }
    let (full, banned) = (Some(Denial::QuotaExceeded), Some(Denial::Banned));
    assert_eq!(seen, [None, full, full, banned, banned, banned]);
}

async fn a_key_is_banned_by_hand_for_a_time(bench: Bench) {
    let ban_for = async |limiter: &Limiter, length| limiter.ban("k", length).await.expect("the store replies");
    let limiter = limiter(&bench);
    ban_for(&limiter, 2 * MINUTE).await;
    assert_eq!(denial(&check(&limiter).await), banned(2 * MINUTE));
    // The longer one stays, and one that would not last is an error.
    ban_for(&limiter, MINUTE).await;
    assert_eq!(denial(&check(&limiter).await), banned(2 * MINUTE));
    for too_long in [Duration::MAX, 5 * MINUTE + US] {
        let error = limiter.ban("k", too_long).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("at most 5min"), "{error}");
    }
    assert_eq!(denial(&check(&limiter).await), banned(2 * MINUTE));
    ban_for(&limiter, 5 * MINUTE + US / 2).await;
    assert_eq!(denial(&check(&limiter).await), banned(5 * MINUTE));
    bench.advance(5 * MINUTE).await;
    // It is not a step for the next one.
    assert_eq!(provoke(&limiter).await, MINUTE);

    let by_hand = Limiter::new(bench.store.clone(), policy("other").ban(Ban::by_hand()));
    for _ in 0..10 {
        let _ = check(&by_hand).await;
    }
    assert_eq!(denial(&check(&by_hand).await), full(Duration::from_secs(1)));
    ban_for(&by_hand, HOUR).await;
    assert_eq!(denial(&check(&by_hand).await), banned(HOUR));
    assert!(by_hand.check("l").await.expect("the store replies").is_allowed());

    let unlimited = Policy::new("unlimited", Limit::Unlimited).ban(Ban::by_hand());
    let unlimited = Limiter::new(bench.store.clone(), unlimited);
    ban_for(&unlimited, HOUR).await;
    assert!(check(&unlimited).await.is_allowed());
    // Such as by a file in which limits are off: where they are on, the ban applies.
    let limited = Limiter::new(bench.store.clone(), policy("unlimited").ban(Ban::by_hand()));
    assert_eq!(denial(&check(&limited).await), banned(HOUR));
}

#[tokio::test]
async fn a_ban_by_hand_without_bans_is_no_failure_of_the_store() {
    let failures = Arc::new(AtomicU64::new(0));
    let counted = failures.clone();
    let limiter = Limiter::new(MemoryStore::new(), policy("test")).on_failure(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let error = limiter.ban("k", MINUTE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("`.ban(Ban::by_hand())`"), "{error}");
    assert_eq!(failures.load(Ordering::Relaxed), 0);
}

async fn a_ban_of_a_clock_that_is_gone_is_dropped(bench: Bench) {
    let limiter = limiter(&bench);
    assert_eq!(provoke(&limiter).await, MINUTE);
    // It lasts longer by the step, and never longer than the longest.
    bench.set_back(4 * MINUTE).await;
    assert_eq!(denial(&check(&limiter).await), banned(5 * MINUTE));
    bench.set_back(US).await;
    assert_ne!(
        denial(&check(&limiter).await).map(|(denial, _)| denial),
        Some(Denial::Banned)
    );
    bench.set_back(HOUR).await;
    assert!(check(&limiter).await.is_allowed());
    assert_eq!(provoke(&limiter).await, MINUTE);
    // Without its level, which does not decay while the clock is younger than a window.
    bench.set("1970-01-01T00:10:00+00:00[UTC]").await;
    assert_eq!(provoke(&limiter).await, MINUTE);
}

async fn a_ban_of_denials_in_a_moment_holds_where_the_clock_is_set_back_a_little(bench: Bench) {
    let ban = Ban::after(1, Duration::from_millis(100)).first(MINUTE).longest(MINUTE);
    let limiter = Limiter::new(bench.store.clone(), policy("test").ban(ban));
    while check(&limiter).await.is_allowed() {}
    assert_eq!(denial(&check(&limiter).await), banned(MINUTE));
    bench.set_back(Duration::from_millis(500)).await;
    assert_eq!(
        denial(&check(&limiter).await),
        banned(MINUTE + Duration::from_millis(500))
    );
}

async fn a_ban_holds_under_a_policy_that_bans_for_less(bench: Bench) {
    let day = 24 * HOUR;
    let of = |ban: Ban| Limiter::new(bench.store.clone(), policy("test").ban(ban));
    let (operator, service) = (of(Ban::by_hand().longest(7 * day)), of(ban()));
    operator.ban("k", 7 * day).await.expect("the store replies");
    for (days, rest) in [(0, 7), (1, 6), (5, 1)] {
        bench.advance(days * day).await;
        let rest = rest * day;
        for _ in 0..5 {
            assert_eq!(denial(&check(&service).await), banned(rest));
        }
        // A shorter one does not replace it.
        service.ban("k", MINUTE).await.expect("the store replies");
        assert_eq!(denial(&check(&service).await), banned(rest));
        let peeked = service.peek("k").await.expect("the store replies");
        assert_eq!(denial(&peeked), banned(rest));
    }
    bench.advance(day - US).await;
    assert_eq!(denial(&check(&service).await), banned(US));
    bench.advance(US).await;
    assert!(check(&service).await.is_allowed());
    assert_eq!(provoke(&service).await, MINUTE);

    // The shorter of two policies decides which times are possible, and then none bans.
    let both = Limiter::new(
        bench.store.clone(),
        [policy("a").ban(ban()), policy("b").ban(ban().longest(7 * day))],
    );
    let error = both.ban("k", day).await.unwrap_err();
    assert!(error.to_string().contains("at most 5min"), "{error}");
    assert!(check(&both).await.is_allowed());
}

async fn a_long_ban_of_a_clock_that_is_gone_is_dropped_where_bans_are_shorter(bench: Bench) {
    let second = Duration::from_secs(1);
    let long = Limiter::new(bench.store.clone(), policy("test").ban(ban().longest(2 * HOUR)));
    let short = limiter(&bench);
    long.ban("k", HOUR).await.expect("the store replies");
    // The clock of a replica that has become the primary may be behind by a second.
    bench.set_back(second).await;
    for limiter in [&short, &long] {
        assert_eq!(denial(&check(limiter).await), banned(HOUR + second));
    }
    bench.set_back(US).await;
    assert!(check(&short).await.is_allowed());
    assert_eq!(denial(&check(&long).await), banned(HOUR + second + US));
    bench.set_back(HOUR).await;
    assert!(check(&long).await.is_allowed());
}

/// As while a new version is deployed: the end of each ban is that of the policy that has begun it, also if others with other
/// lengths count denials and bans on the key meanwhile.
async fn a_ban_holds_in_any_order_of_policies_that_differ(bench: Bench) {
    let second = Duration::from_secs(1);
    let bans = [
        Ban::after(2, 10 * second).first(3 * second).longest(5 * second),
        Ban::after(3, HOUR).first(MINUTE).longest(HOUR),
        Ban::after(1, second).first(second).longest(30 * 24 * HOUR),
        Ban::by_hand().longest(20 * MINUTE),
    ];
    let limiters = bans.map(|ban| Limiter::new(bench.store.clone(), policy("test").ban(ban)));
    let mut random = fastrand::Rng::with_seed(7);
    let (mut until, mut now, mut by_denials, mut by_hand) = (Duration::ZERO, Duration::ZERO, 0, 0);
    for step in 0..600 {
        let limiter = &limiters[random.usize(..limiters.len())];
        if random.u8(..12) == 0 {
            let length = second * random.u32(1..=600);
            match limiter.ban("k", length).await {
                Ok(()) => {
                    until = until.max(now + length);
                    by_hand += 1;
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid),
            }
        }
        let found = denial(&check(limiter).await);
        match found {
            Some((Denial::Banned, wait)) if until <= now => {
                until = now + wait;
                by_denials += 1;
            }
            found if until > now => assert_eq!(found, banned(until - now), "step {step}"),
            found => assert!(found.is_none_or(|(reason, _)| reason == Denial::QuotaExceeded)),
        }
        let pause = match random.u8(..8) {
            0 => until.saturating_sub(now),
            1 => until.saturating_sub(now).saturating_sub(US),
            2 => second * random.u32(..20),
            _ => Duration::ZERO,
        };
        now += pause;
        bench.advance(pause).await;
    }
    assert!(by_denials > 20 && by_hand > 10, "{by_denials} and {by_hand} bans");
}

async fn of_many_requests_at_once_as_many_are_denied_as_without_a_ban(bench: Bench) {
    let policy = Policy::new("test", SlidingLog::per_second(5)).ban(ban());
    let limiter = Limiter::new(bench.store.clone(), policy);
    let mut checks = JoinSet::new();
    for _ in 0..100 {
        let limiter = limiter.clone();
        checks.spawn(async move { check(&limiter).await });
    }
    let decisions = checks.join_all().await;
    let of = |reason: Option<Denial>| {
        let matching = |decision: &&Decision| denial(decision).map(|(denial, _)| denial) == reason;
        decisions.iter().filter(matching).count()
    };
    assert_eq!(
        [None, Some(Denial::QuotaExceeded), Some(Denial::Banned)].map(of),
        [5, 2, 93]
    );
}

async fn a_refund_and_a_settlement_leave_a_ban_as_it_is(bench: Bench) {
    let limiter = limiter(&bench);
    let first = check(&limiter).await.take_receipt();
    bench.advance(Duration::from_secs(1)).await;
    let second = check(&limiter).await.take_receipt();
    assert_eq!(provoke(&limiter).await, MINUTE);
    first.refund().await.expect("the store replies");
    second.settle(3).await.expect("the store replies");
    assert_eq!(denial(&check(&limiter).await), banned(MINUTE));
}

async fn a_cost_that_does_not_fit_counts_as_one_denial(bench: Bench) {
    let policy = Policy::new("test", SlidingLog::per_second(10)).ban(ban());
    let limiter = Limiter::new(bench.store.clone(), policy);
    let check = async |cost| {
        denial(
            &limiter
                .request("k")
                .cost(cost)
                .check()
                .await
                .expect("the store replies"),
        )
    };
    let second = Duration::from_secs(1);
    assert_eq!(check(7).await, None);
    for expected in [full(second), full(second), banned(MINUTE)] {
        assert_eq!(check(10).await, expected);
    }
}

async fn only_bans_in_force_and_denials_of_their_charge_have_an_effect(bench: Bench) {
    let (key, ban) = (Key::from("k"), Ban::after(1, HOUR));
    let [limit, higher] = [1, 9].map(|quota| Limit::from(SlidingLog::per_hour(quota)));
    let charges = [
        Charge::new("first", &higher, &key, 1).ban(&ban),
        Charge::new("second", &limit, &key, 1).ban(&ban),
        Charge::new("third", &higher, &key, 1).ban(&ban),
    ];
    let mut states = Vec::new();
    for _ in 0..3 {
        let check = StoreRequest::new(Operation::Check, &charges);
        let response = bench.store.decide(&[check]).await.expect("the store replies");
        let outcome = &response.outcomes()[0];
        states.extend(
            outcome
                .states()
                .iter()
                .map(|state| (state.retry_after, state.banned_for())),
        );
    }
    let admitted = [(None, None); 3];
    let denied = [(None, None), (Some(HOUR), Some(MINUTE)), (None, None)];
    assert_eq!(states, [admitted, denied, denied].concat());
}

async fn the_bans_of_a_limit_that_counts_nothing_begin_and_are_read(bench: Bench) {
    let (key, ban) = (Key::from("k"), ban());
    for limit in [Limit::Unlimited, Limit::DenyAll] {
        let charges = [Charge::new(limit.algorithm(), &limit, &key, 1).ban(&ban)];
        let bans = async |length| {
            let request = [StoreRequest::new(Operation::Ban { length }, &charges)];
            let response = bench.store.decide(&request).await.expect("the store replies");
            let outcome = &response.outcomes()[0];
            assert!(outcome.allowed);
            let state = outcome.states()[0];
            (state.remaining, state.banned_for(), state.reset_after)
        };
        let seconds = Duration::from_secs(9);
        assert_eq!(bans(Duration::ZERO).await, (3, None, Duration::ZERO));
        assert_eq!(bans(seconds).await, (0, Some(seconds), seconds));
        assert_eq!(bans(Duration::ZERO).await, (0, Some(seconds), seconds));
        assert_eq!(bans(HOUR).await, (0, Some(5 * MINUTE), 5 * MINUTE));
    }
}

async fn a_ban_by_hand_makes_the_next_ban_no_longer(bench: Bench) {
    let limiter = Limiter::new(bench.store.clone(), policy("test").ban(ban()));
    let _ = check(&limiter).await;
    assert_eq!(provoke(&limiter).await, MINUTE);
    bench.advance(HOUR).await;
    limiter.ban("k", MINUTE).await.expect("the store replies");
    bench.advance(MINUTE * 2).await;
    let _ = check(&limiter).await;
    // An hour without a ban would have undone the first one.
    assert_eq!(provoke(&limiter).await, MINUTE);

    // While that one is in force.
    let longest = limiter.ban("k", 3 * MINUTE).await;
    longest.expect("the store replies");
    bench.advance(HOUR).await;
    let _ = check(&limiter).await;
    assert_eq!(provoke(&limiter).await, MINUTE);
}

#[tokio::test]
async fn each_algorithm_bans() {
    for bench in [Bench::memory_store().await, Bench::redis_store().await] {
        for algorithm in Algorithm::ALL {
            let limit = algorithm.limit(2);
            let limiter = Limiter::new(bench.store.clone(), Policy::new("test", limit.clone()).ban(ban()));
            limiter.reset("k").await.expect("the store replies");
            assert!(check(&limiter).await.is_allowed() && check(&limiter).await.is_allowed());
            let reasons = [0; 4].map(|_| ());
            let mut seen = Vec::new();
            for () in reasons {
                seen.push(
                    check(&limiter)
                        .await
                        .policies()
                        .next()
                        .and_then(|policy| policy.denial()),
                );
            }
            let (full, banned) = (Some(Denial::QuotaExceeded), Some(Denial::Banned));
            assert_eq!(seen, [full, full, banned, banned], "{limit}");
        }
    }
}

#[tokio::test]
async fn a_ban_in_redis_is_one_small_key_beside_the_count_that_expires() {
    let redis = Redis::start();
    let policy = Policy::new("test", SlidingLog::per_hour(1)).ban(ban());
    let limiter = Limiter::new(connected(patient(), &redis.url()).await, policy);
    let keys = async || redis.command::<Vec<String>>("KEYS", ["*:ban:*"]).await;
    assert!(check(&limiter).await.is_allowed());
    assert!(keys().await.is_empty(), "without a denial there is none");
    assert!(!check(&limiter).await.is_allowed());
    assert_eq!(keys().await, ["quota:1:ban:test:{key=k}"]);
    let ttl: i64 = redis.command("PTTL", ["quota:1:ban:test:{key=k}"]).await;
    assert!((3_500_000..=3_602_000).contains(&ttl), "{ttl}");
    let bytes: u64 = redis.command("MEMORY", ["USAGE", "quota:1:ban:test:{key=k}"]).await;
    assert!(bytes <= 200, "{bytes}");

    limiter.reset("k").await.expect("Redis replies");
    assert!(keys().await.is_empty());
}

/// As while a new version is deployed: what a policy with a longer window counts is not forgotten earlier.
#[tokio::test]
async fn a_policy_with_a_shorter_window_does_not_shorten_the_key_of_a_ban() {
    let second = Duration::from_secs(1);
    let bench = Bench::redis_store().await;
    let brief = Ban::after(2, second).first(second).longest(5 * MINUTE);
    let (long, short) = (
        limiter(&bench),
        Limiter::new(bench.store.clone(), policy("test").ban(brief)),
    );
    let expires_at = async || {
        let keys = bench.dump().await;
        let key = keys.into_iter().find(|(key, ..)| key.contains(":ban:"));
        key.expect("it is stored").2
    };
    assert_eq!(provoke(&long).await, MINUTE);
    let kept_until = expires_at().await;
    short.ban("k", US).await.expect("the store replies");
    assert_eq!(expires_at().await, kept_until);
    bench.advance(MINUTE).await;
    assert!(check(&short).await.is_allowed());
    assert_eq!(denial(&check(&short).await), full(second));
    assert_eq!(expires_at().await, kept_until);
    bench.advance(second).await;
    assert_eq!(provoke(&long).await, 2 * MINUTE);

    // What another policy needs for longer is kept for 366 days at most.
    let year = 366 * 24 * HOUR;
    let yearly = Ban::after(1, year).first(second);
    let longest = Limiter::new(bench.store.clone(), policy("test").ban(yearly));
    longest.reset("k").await.expect("the store replies");
    for length in [second, 2 * second] {
        assert_eq!(provoke(&longest).await, length);
        bench.advance(length).await;
    }
    let of_two_years = expires_at().await;
    short.ban("k", US).await.expect("the store replies");
    assert_eq!(expires_at().await, of_two_years - year.as_millis() as i64);

    // What a clock that is gone has counted, a ban or a denial, does not keep the key.
    for denials in [3, 1] {
        long.reset("k").await.expect("the store replies");
        assert!(check(&long).await.is_allowed());
        for _ in 0..denials {
            assert!(!check(&long).await.is_allowed());
        }
        let kept_until = expires_at().await;
        bench.set_back(24 * HOUR).await;
        assert!(check(&short).await.is_allowed());
        assert_eq!(denial(&check(&short).await), full(second));
        let day = 24 * HOUR.as_millis() as i64;
        assert!(expires_at().await < kept_until - day, "after {denials}");
    }
}

/// Numbers as an earlier version has written them: it stored no time at which a ban by hand began.
#[tokio::test]
async fn a_ban_that_an_earlier_version_has_stored_holds() {
    const STORE: &str = "
        local now = redis.call('TIME')[1] * 1000000
        local value = struct.pack('<dddd', ARGV[1] == '0' and 0 or now - ARGV[1], ARGV[2] * 64, now + 6 * 3600e6, 0)
        return redis.call('SET', KEYS[1], value, 'EX', '3600')";
    let redis = Redis::start();
    let limiter = Limiter::new(connected(patient(), &redis.url()).await, policy("test").ban(ban()));
    // By hand, by hand after a denial, and after denials.
    for (n, (since, denials)) in [("0", "0"), ("7000000", "1"), ("7000000", "0")].into_iter().enumerate() {
        let key = format!("k{n}");
        let words = [STORE, "1", &format!("quota:1:ban:test:{{key={key}}}"), since, denials];
        redis.command::<()>("EVAL", words).await;
        for _ in 0..5 {
            let decision = limiter.check(key.as_str()).await.expect("Redis replies");
            let found = denial(&decision);
            assert!(
                found.is_some_and(|(reason, wait)| reason == Denial::Banned && wait > 5 * HOUR),
                "{found:?} for {key}"
            );
        }
    }
}

#[tokio::test]
async fn replicas_share_bans_and_the_deny_cache_hides_no_denial() {
    let redis = Redis::start();
    let hourly = || Policy::new("test", SlidingLog::per_hour(1)).ban(Ban::after(50, HOUR));
    let mut replicas = Vec::new();
    for _ in 0..2 {
        replicas.push(Limiter::new(connected(patient(), &redis.url()).await, hourly()));
    }
    assert!(check(&replicas[0]).await.is_allowed());
    for number in 1..50 {
        let decision = check(&replicas[number % 2]).await;
        assert_eq!(denial(&decision).map(|(denial, _)| denial), Some(Denial::QuotaExceeded));
    }
    for replica in &replicas {
        // The wait of the limit, which is longer than the ban.
        let (denial, wait) = denial(&check(replica).await).expect("it is denied");
        assert!(denial == Denial::Banned && wait > 59 * MINUTE);
    }
}

#[tokio::test]
async fn a_ban_in_force_is_cached_and_a_reset_ends_it_at_once() {
    let redis = Redis::start();
    let limiter = Limiter::new(connected(patient(), &redis.url()).await, policy("test").ban(ban()));
    assert!(provoke(&limiter).await <= MINUTE);
    // Filled by one of these, unless the machine stalls for a second.
    let before = redis.script_calls().await;
    assert!(before > 0, "there were calls");
    for _ in 0..1_000 {
        assert_eq!(
            denial(&check(&limiter).await).map(|(denial, _)| denial),
            Some(Denial::Banned)
        );
    }
    let sent = redis.script_calls().await - before;
    assert!(sent < 500, "{sent} of 1000 were sent");
    limiter.reset("k").await.expect("Redis replies");
    assert!(check(&limiter).await.is_allowed());
}

type Body = Empty<bytes::Bytes>;

async fn respond(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::new()))
}

async fn send<S, B>(service: &S, request: http::request::Builder) -> Received
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
    B: http_body::Body<Data = bytes::Bytes, Error: std::fmt::Debug>,
{
    let request = request.body(Body::new()).expect("a good request");
    let response = service.clone().oneshot(request).await;
    Received::read(response.expect("infallible")).await
}

#[tokio::test]
async fn a_response_during_a_ban_has_the_rest_of_it() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let layer = RateLimitLayer::new(store, policy("test").ban(ban()).key(key::constant("all")));
    let service = layer.layer(service_fn(respond));
    for (status, problem) in [
        (200, None),
        (429, Some("quota-exceeded")),
        (429, Some("quota-exceeded")),
        (429, Some("abnormal-usage-detected")),
    ] {
        let received = send(&service, Request::get("/")).await;
        assert_eq!(received.status, status);
        let problem = problem.map(|name| format!("https://iana.org/assignments/http-problem-types#{name}"));
        if let Some(problem) = problem {
            assert_eq!(received.json()["type"], problem);
        }
    }
    clock.advance(Duration::from_millis(17_300));
    let received = send(&service, Request::get("/")).await;
    assert_eq!(received.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(received.field("retry-after"), Some("43"));
    assert_eq!(received.field("ratelimit"), Some(r#""test";r=0;t=43"#));
    assert_eq!(received.json()["violated-policies"], serde_json::json!(["test"]));
    let decision = received.extensions.get::<Decision>().expect("a decision");
    assert_eq!(denial(decision), banned(Duration::from_millis(42_700)));
}

#[tokio::test]
async fn requests_that_are_refused_blocked_or_skipped_do_not_count() {
    let policy = Policy::new("test", SlidingLog::per_hour(1)).ban(Ban::after(1, HOUR));
    let policy = policy.key(key::header("x-user"));
    let layer = RateLimitLayer::new(MemoryStore::new(), policy)
        .skip(|parts| parts.uri.path() == "/health")
        .block(|parts| parts.uri.path() == "/admin");
    let service = layer.layer(service_fn(respond));
    for _ in 0..3 {
        let user = |path| Request::get(path).header("x-user", "42");
        assert_eq!(send(&service, Request::get("/")).await.status, 400);
        assert_eq!(send(&service, user("/health")).await.status, 200);
        assert_eq!(send(&service, user("/admin")).await.status, 403);
    }
    for status in [200, 429] {
        let request = Request::get("/").header("x-user", "42");
        assert_eq!(send(&service, request).await.status, status);
    }
}

#[tokio::test]
async fn nested_layers_and_plans_have_bans() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let plans = || {
        let by_plan = |parts: &http::request::Parts| match parts.headers.contains_key("x-pro") {
            true => SlidingLog::per_second(3),
            false => SlidingLog::per_second(1),
        };
        Policy::with_limit_fn("test", by_plan)
            .ban(ban())
            .key(key::constant("all"))
    };
    let [outer, inner] = [1, 1].map(|cost| RateLimitLayer::new(store.clone(), plans().cost(cost)));
    let service = outer.layer(inner.layer(service_fn(respond)));
    let statuses = async |request: fn() -> http::request::Builder, count| {
        let mut statuses = Vec::new();
        for _ in 0..count {
            statuses.push(send(&service, request()).await.status.as_u16());
        }
        statuses
    };
    assert_eq!(statuses(|| Request::get("/"), 3).await, [200, 429, 429]);
    let pro = || Request::get("/").header("x-pro", "");
    assert_eq!(statuses(pro, 3).await, [200, 200, 429]);
    // The third denial has begun a ban, also of the other plan.
    clock.advance(Duration::from_secs(30));
    assert_eq!(statuses(pro, 1).await, [429]);
    assert_eq!(statuses(|| Request::get("/"), 1).await, [429]);
    clock.advance(Duration::from_secs(30));
    assert_eq!(statuses(pro, 1).await, [200]);
}

#[tokio::test]
async fn an_inner_layer_bans_for_what_it_charges() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let policy = |cost| {
        let policy = Policy::new("test", SlidingLog::per_second(10)).ban(ban()).cost(cost);
        RateLimitLayer::new(store.clone(), policy.key(key::constant("all")))
    };
    let service = policy(1).layer(policy(10).layer(service_fn(respond)));
    let mut statuses = Vec::new();
    for _ in 0..6 {
        statuses.push(send(&service, Request::get("/")).await.status.as_u16());
    }
    // Of the first, 1 and 9; then the outer one denies.
    assert_eq!(statuses, [200, 429, 429, 429, 429, 429]);
    clock.advance(MINUTE - US);
    assert_eq!(send(&service, Request::get("/")).await.status, 429);
    clock.advance(US);
    assert_eq!(send(&service, Request::get("/")).await.status, 200);
}

#[tokio::test]
async fn while_the_store_fails_this_process_has_bans_of_its_own() {
    let store = Flaky::default();
    let hourly = Policy::new("test", SlidingLog::per_hour(4)).failure_mode(tower_quota::FailureMode::local_share(1, 4));
    let limiter = Limiter::new(store.clone(), hourly.ban(ban().longest(HOUR)));
    let reason = async || {
        check(&limiter)
            .await
            .policies()
            .next()
            .and_then(|policy| policy.denial())
    };
    store.fail(true);
    let (full, banned) = (Some(Denial::QuotaExceeded), Some(Denial::Banned));
    for expected in [None, full, full, banned, banned] {
        assert_eq!(reason().await, expected);
    }
    assert!(limiter.reset("k").await.is_err());
    assert_eq!(reason().await, None);

    // Neither ban is one of the other.
    store.fail(false);
    assert_eq!(reason().await, None);
    limiter.ban("k", HOUR).await.expect("the store replies");
    assert_eq!(reason().await, banned);
    // A key that was blocked stays so.
    store.fail(true);
    assert_eq!(reason().await, banned);
    let error = limiter.ban("l", HOUR).await.unwrap_err();
    assert_ne!(error.kind(), ErrorKind::Invalid);
    let blocked = limiter.check("l").await.expect("this process counts");
    assert_eq!(denial(&blocked).map(|(denial, _)| denial), banned);
}

#[tokio::test]
async fn in_a_cluster_a_ban_lies_beside_its_count() {
    let cluster = Cluster::start_patient().await;
    let store = connected(patient(), &cluster.url()).await;
    cluster.serves(&store).await;
    let hourly = |name, quota| Policy::new(name, SlidingLog::per_hour(quota));
    for number in 0..10_u64 {
        let limiter = Limiter::new(store.clone(), hourly("users", 1).ban(ban()));
        let mut reasons = Vec::new();
        for _ in 0..5 {
            let decision = limiter
                .check(number)
                .await
                .expect("the ban is in the slot of the count");
            reasons.push(decision.policies().next().and_then(|policy| policy.denial()));
        }
        let (full, banned) = (Some(Denial::QuotaExceeded), Some(Denial::Banned));
        assert_eq!(reasons, [None, full, full, banned, banned]);
    }

    // By user in one slot and by address in another. The first one that denies counts the denial, the other is not charged.
    let layer = RateLimitLayer::new(
        store.clone(),
        [
            hourly("by-user", 1).ban(ban()).key(key::header("x-user")),
            hourly("by-address", 100).ban(ban()).key(key::header("x-address")),
        ],
    );
    let service = layer.response_extensions(true).layer(service_fn(respond));
    let addresses = Limiter::new(store, hourly("by-address", 100));
    for number in 0..10 {
        let (user, address) = (format!("user-{number}"), format!("address-{number}"));
        let mut reasons = Vec::new();
        for _ in 0..5 {
            let request = Request::get("/").header("x-user", &user).header("x-address", &address);
            let received = send(&service, request).await;
            let decision = received.extensions.get::<Decision>().expect("a decision");
            reasons.push(decision.policies().next().and_then(|policy| policy.denial()));
        }
        let (full, banned) = (Some(Denial::QuotaExceeded), Some(Denial::Banned));
        assert_eq!(reasons, [None, full, full, banned, banned]);
        let left = addresses.peek(Key::header("x-address", &address)).await;
        assert_eq!(left.expect("the cluster replies").remaining(), 99);
    }
}

#[tokio::test]
async fn a_ban_that_was_replicated_survives_a_failover() {
    let mut sentinel = Sentinel::start_that_fails_over().await;
    let url = sentinel.url();
    let replica = async || {
        let store = connected(patient(), &url).await;
        // Longer than sentinels whose process is held up need to agree.
        Limiter::new(store, policy("test").ban(ban().first(HOUR).longest(HOUR)))
    };
    let before = provoke(&replica().await).await;
    let replicas: u32 = sentinel.primary.command("WAIT", ["2", "0"]).await;
    assert_eq!(replicas, 2);

    sentinel.primary.kill();
    sentinel.promoted().await;
    // One that has not seen the ban.
    let (denial, after) = denial(&check(&replica().await).await).expect("it is denied");
    assert_eq!(denial, Denial::Banned);
    assert!(after <= before, "{after:?} of {before:?}");
}

#[tokio::test]
async fn a_policy_without_bans_sends_one_charge_and_one_with_bans_one_request() {
    let store = Counted::new(MemoryStore::new());
    let limiter = Limiter::new(store.clone(), [policy("one").ban(ban()), policy("two").ban(ban())]);
    for calls in 1..=5 {
        let _ = check(&limiter).await;
        assert_eq!(store.calls(), calls);
    }
}

#[tokio::test]
async fn files_have_bans_which_those_in_code_replace() {
    let file = |line: &str| Policies::from_toml(&format!("[policies.api]\nlimit = \"sliding-log 1/s\"\n{line}\n"));
    let length = async |policy| {
        let store = MemoryStore::builder().manual_clock(&ManualClock::new()).build();
        provoke(&Limiter::new(store, policy)).await
    };
    for (line, seconds) in [
        ("ban = { after = 2, within = \"1h\" }", 60),
        (
            "ban = { after = 2, within = \"1 hour\", first = \"1500 ms\", longest = \"1d\" }",
            1,
        ),
        (
            "ban = { after = 1, within = \"1m\", first = \"2min\", longest = \"2min\" }",
            120,
        ),
    ] {
        let policy = file(line).and_then(|file| file.unkeyed("api")).expect(line);
        assert_eq!(length(policy.clone()).await.as_secs(), seconds, "{line}");
        assert_eq!(length(policy.ban(ban())).await, MINUTE);
    }
    for (wrong, part) in [
        ("ban = 10", "{ after = 10"),
        ("ban = { after = 0, within = \"1h\" }", "1 to 1000000 denials"),
        ("ban = { after = 10 }", "within"),
        ("ban = { after = 10, within = \"soon\" }", "`10min`"),
        ("ban = { after = 10, within = \"1M\" }", "`10min`"),
        ("ban = { after = 10, within = \"1h\", last = \"1h\" }", "last"),
        (
            "ban = { after = 10, within = \"1h\", first = \"2d\" }",
            "longer than the longest one of 1d; set `longest`",
        ),
    ] {
        let error = file(wrong).expect_err(wrong).to_string();
        assert!(error.contains("line 3") && error.contains(part), "{error}");
    }
}

/// The decision of a request that waits while `meanwhile` is done.
async fn waits_while(limiter: &Limiter, meanwhile: impl AsyncFnOnce()) -> Result<Decision, AcquireError> {
    assert!(limiter.acquire("42").await.is_ok(), "it fits");
    let waiting = limiter.clone();
    let waiting = tokio::spawn(async move { waiting.acquire("42").await });
    meanwhile().await;
    waiting.await.expect("no panic")
}

/// Without bans, the reply to one denies equal ones that follow soon.
#[tokio::test(start_paused = true)]
async fn each_denial_since_a_line_is_full_counts() {
    let policy = Policy::new("p", SlidingLog::per_hour(1)).ban(ban());
    let policy = policy.wait_up_to(2 * HOUR).max_waiting(1);
    let limiter = Limiter::new(Arc::new(Later(MemoryStore::new())), policy);
    let mut denials = Vec::new();
    let waited = waits_while(&limiter, async || {
        tokio::time::sleep(US).await; // until it stands in the line
        for _ in 0..3 {
            let Err(AcquireError::Denied(denied) | AcquireError::LineFull(denied)) = limiter.acquire("42").await else {
                panic!("the line is full");
            };
            denials.extend(denied.decision().policies().filter_map(|policy| policy.denial()));
        }
    });
    assert!(waited.await.is_err(), "the ban is for it too");
    assert_eq!(denials, [Denial::LineFull, Denial::LineFull, Denial::Banned]);
}

/// One in a time that does not pass while a test looks.
fn thirty_seconds() -> Policy<()> {
    Policy::new("test", SlidingLog::new(1, MINUTE / 2))
}

#[tokio::test]
async fn a_request_that_waits_is_denied_for_a_ban_that_begins_meanwhile() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let limiter = Limiter::new(store, thirty_seconds().ban(ban()).wait_up_to(MINUTE));

    let banned = waits_while(&limiter, async || {
        stand_in_line(&redis, 1).await;
        limiter.ban("42", MINUTE).await.expect("Redis answers");
    })
    .await;
    let Err(AcquireError::Denied(denied)) = banned else {
        panic!("{banned:?}");
    };
    let wait = denied.decision().retry_after().expect("bans end");
    assert!(wait > MINUTE / 2 && wait <= MINUTE, "{wait:?}");
    assert!(denied.decision().server_time() > Duration::ZERO);
    assert_eq!(
        denied.decision().policies().next().and_then(|policy| policy.denial()),
        Some(Denial::Banned)
    );
}

#[tokio::test]
async fn a_request_that_waits_is_admitted_if_its_bans_cannot_be_read() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    let limiter = Limiter::new(store, thirty_seconds().ban(ban()).wait_up_to(MINUTE));
    let waited = waits_while(&limiter, async || {
        stand_in_line(&redis, 1).await;
        drop(redis);
    });
    assert!(waited.await.is_ok());
}
