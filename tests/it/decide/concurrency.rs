//! Slots are held by as many requests at once as the limit has, in every store, and are free when these have ended.

use std::{
    convert::Infallible,
    env,
    future::{pending, ready},
    io::{BufRead, BufReader},
    panic::AssertUnwindSafe,
    pin::pin,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::{Router, body::Body, routing::get};
use bytes::Bytes;
use http::{Request, Response, StatusCode, request::Parts};
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tower::{BoxError, Layer, ServiceExt, service_fn};
use tower_quota::{
    Concurrency, Decision, Denial, FailureMode, Headers, Key, Limit, Limiter, ManualClock, MemoryStore, Policy,
    RateLimitLayer, RedisStore, SlidingLog, Slots, key,
    response::Rejection,
    store::{Charge, ErrorKind, LeaseId, Operation, Outcome, Store, StoreError, StoreFuture, StoreRequest},
};

use crate::support::{
    Bench, Broken, Clock, Cluster, Counted, Flaky, Gated, Later, Process, Redis, connected, decide, each_store,
    eventually, patient, this_binary,
};

each_store! {
    no_more_leases_are_held_at_once_than_there_are_slots
    a_lease_that_is_not_renewed_expires
    a_lease_that_has_expired_is_added_again_only_if_there_is_room
    a_cost_takes_as_many_slots
    a_lease_that_is_held_is_not_lost_with_another_one_of_its_request
    a_refund_or_a_reset_ends_leases
    a_charge_takes_slots_that_are_not_there
    leases_of_different_lengths_do_not_shorten_each_other
    a_clock_that_is_set_back_by_less_than_a_lease_admits_no_more
    a_clock_that_is_set_back_far_blocks_nothing
    the_end_of_a_lease_drops_no_other_one_that_a_clock_set_back_has_left
    after_heavy_leases_a_key_has_a_member_for_each_lease
    the_largest_leases_leave_all_slots
    the_largest_limit_has_each_of_its_slots
    a_lease_that_lasts_longer_than_twice_its_length_is_of_a_clock_that_is_gone
    a_renewal_by_a_clock_that_was_set_back_regards_no_lease_that_is_gone
    a_lease_of_a_clock_that_was_far_ahead_keeps_its_key_for_two_hours
    a_request_that_another_policy_denies_takes_no_slot
    a_limiter_holds_slots_as_long_as_the_decision
    two_thousand_leases_that_expire_at_once_are_gone_after_three_calls
    of_two_thousand_leases_of_another_clock_a_check_drops_a_thousand
}

const LEASE: Duration = Duration::from_secs(10);
const MICRO: Duration = Duration::from_micros(1);

/// One operation on a lease of the policy `test` and the key `k`.
async fn lease(bench: &Bench, operation: Operation, limit: &Limit, cost: u64, id: LeaseId) -> Outcome {
    let key = Key::from("k");
    let charges = [Charge::new("test", limit, &key, cost).lease(id)];
    let response = bench.store.decide(&[StoreRequest::new(operation, &charges)]).await;
    response.expect("the store replies").outcomes()[0].clone()
}

async fn take(bench: &Bench, limit: &Limit, cost: u64) -> Option<LeaseId> {
    let id = LeaseId::random();
    let outcome = lease(bench, Operation::Check, limit, cost, id).await;
    outcome.allowed.then_some(id)
}

async fn renew(bench: &Bench, limit: &Limit, id: LeaseId) -> bool {
    lease(bench, Operation::RenewLease, limit, 1, id).await.allowed
}

async fn end(bench: &Bench, limit: &Limit, cost: u64, id: LeaseId) -> u64 {
    lease(bench, Operation::EndLease, limit, cost, id).await.states()[0].remaining
}

async fn remaining(bench: &Bench, limit: &Limit) -> u64 {
    bench.peek(limit, 1).await.states()[0].remaining
}

fn slots(slots: u64) -> Limit {
    Concurrency::new(slots).into()
}

async fn no_more_leases_are_held_at_once_than_there_are_slots(bench: Bench) {
    let limit = slots(2);
    let first = take(&bench, &limit, 1).await.expect("there is room");
    let admitted = lease(&bench, Operation::Check, &limit, 1, LeaseId::random()).await;
    assert_eq!((admitted.allowed, admitted.states()[0].remaining), (true, 0));
    assert_eq!(admitted.states()[0].reset_after, LEASE);

    bench.advance(Duration::from_secs(4)).await;
    for operation in [Operation::Check, Operation::Peek] {
        let denied = lease(&bench, operation, &limit, 1, LeaseId::random()).await;
        assert!(!denied.allowed);
        assert_eq!(denied.states()[0].retry_after, Some(Duration::from_secs(1)));
        assert_eq!(denied.states()[0].reset_after, Duration::from_secs(6));
    }

    assert_eq!(end(&bench, &limit, 1, first).await, 1);
    assert_eq!(end(&bench, &limit, 1, first).await, 1, "it has ended already");
    assert!(take(&bench, &limit, 1).await.is_some());
    assert_eq!(take(&bench, &limit, 1).await, None);
}

async fn a_lease_that_is_not_renewed_expires(bench: Bench) {
    let limit = slots(2);
    let renewed = take(&bench, &limit, 1).await.expect("there is room");
    take(&bench, &limit, 1).await.expect("there is room");
    bench.advance(Duration::from_secs(3)).await;
    assert!(renew(&bench, &limit, renewed).await);

    bench.advance(Duration::from_secs(7) - MICRO).await;
    assert_eq!(take(&bench, &limit, 1).await, None);
    bench.advance(MICRO).await;
    assert_eq!(remaining(&bench, &limit).await, 1);
    assert!(take(&bench, &limit, 1).await.is_some());
    assert_eq!(take(&bench, &limit, 1).await, None, "one was renewed");
}

async fn a_lease_that_has_expired_is_added_again_only_if_there_is_room(bench: Bench) {
    let limit = slots(1);
    let late = take(&bench, &limit, 1).await.expect("there is room");
    bench.advance(LEASE).await;
    assert!(renew(&bench, &limit, late).await, "no other request has taken it");
    assert_eq!(take(&bench, &limit, 1).await, None);

    bench.advance(2 * LEASE).await;
    let next = take(&bench, &limit, 1).await.expect("there is room");
    let lost = lease(&bench, Operation::RenewLease, &limit, 1, late).await;
    assert!(!lost.allowed);
    assert_eq!(lost.states()[0].retry_after, Some(Duration::from_secs(1)));
    assert_eq!(end(&bench, &limit, 1, late).await, 0, "the slot is that of the other");

    assert!(!renew(&bench, &limit, late).await);
    assert_eq!(end(&bench, &limit, 1, next).await, 1);
    assert!(renew(&bench, &limit, late).await);
    assert_eq!(remaining(&bench, &limit).await, 0);
}

async fn a_lease_that_is_held_is_not_lost_with_another_one_of_its_request(bench: Bench) {
    let (limit, id) = (slots(1), LeaseId::random());
    let (key, other) = (Key::from("k"), Key::from("other"));
    assert!(lease(&bench, Operation::Check, &limit, 1, id).await.allowed);
    let taken = [Charge::new("test", &limit, &other, 1).lease(LeaseId::random())];
    let taken = [StoreRequest::new(Operation::Check, &taken)];
    assert!(bench.store.decide(&taken).await.unwrap().outcomes()[0].allowed);

    let both = [&key, &other].map(|key| Charge::new("test", &limit, key, 1).lease(id));
    let renewed = [StoreRequest::new(Operation::RenewLease, &both)];
    let renewed = bench.store.decide(&renewed).await.unwrap();
    let [held, lost] = renewed.outcomes()[0].states() else {
        panic!("a charge has a state");
    };
    assert!(!renewed.outcomes()[0].allowed);
    assert_eq!(
        (held.retry_after, lost.retry_after),
        (None, Some(Duration::from_secs(1)))
    );
}

async fn a_cost_takes_as_many_slots(bench: Bench) {
    let limit = slots(5);
    let three = take(&bench, &limit, 3).await.expect("there is room");
    assert_eq!(take(&bench, &limit, 3).await, None);
    assert_eq!(remaining(&bench, &limit).await, 2);
    let one = take(&bench, &limit, 1).await.expect("there is room");
    assert_eq!(remaining(&bench, &limit).await, 1);

    bench.advance(LEASE / 2).await;
    assert!(lease(&bench, Operation::RenewLease, &limit, 3, three).await.allowed);
    bench.advance(LEASE / 2).await;
    assert_eq!(remaining(&bench, &limit).await, 2, "the one of 3 was renewed");
    assert_eq!(end(&bench, &limit, 1, one).await, 2, "it has expired");
    assert_eq!(end(&bench, &limit, 3, three).await, 5);
    if let Some(members) = bench.members().await {
        assert_eq!(members, 0);
    }
    assert!(take(&bench, &limit, 5).await.is_some());
    bench.advance(LEASE).await;
    assert_eq!(remaining(&bench, &limit).await, 5);
}

async fn a_refund_or_a_reset_ends_leases(bench: Bench) {
    let limit = slots(1);
    let admitted_at = Duration::from_micros(bench.now());
    let id = take(&bench, &limit, 1).await.expect("there is room");
    lease(&bench, Operation::Refund { admitted_at }, &limit, 1, LeaseId::random()).await;
    assert_eq!(remaining(&bench, &limit).await, 0, "another lease");
    lease(&bench, Operation::Refund { admitted_at }, &limit, 1, id).await;
    assert_eq!(remaining(&bench, &limit).await, 1);

    let id = take(&bench, &limit, 1).await.expect("there is room");
    bench.reset(&limit).await;
    assert_eq!(remaining(&bench, &limit).await, 1);
    assert!(renew(&bench, &limit, id).await);
    assert_eq!(remaining(&bench, &limit).await, 0);
}

async fn a_charge_takes_slots_that_are_not_there(bench: Bench) {
    let limit = slots(1);
    take(&bench, &limit, 1).await.expect("there is room");
    let beyond = LeaseId::random();
    assert!(lease(&bench, Operation::Charge, &limit, 3, beyond).await.allowed);
    bench.advance(LEASE / 2).await;
    assert!(lease(&bench, Operation::RenewLease, &limit, 3, beyond).await.allowed);
    bench.advance(LEASE / 2).await;
    assert_eq!(take(&bench, &limit, 1).await, None);
    assert_eq!(end(&bench, &limit, 3, beyond).await, 1);
}

async fn leases_of_different_lengths_do_not_shorten_each_other(bench: Bench) {
    let [long, short] = [60, 2].map(|seconds| Limit::from(Concurrency::new(2).lease(Duration::from_secs(seconds))));
    take(&bench, &long, 1).await.expect("there is room");
    take(&bench, &short, 1).await.expect("there is room");
    bench.advance(Duration::from_secs(2)).await;
    let admitted = lease(&bench, Operation::Check, &short, 1, LeaseId::random()).await;
    assert!(admitted.allowed);
    assert_eq!(admitted.states()[0].reset_after, Duration::from_secs(58));
    bench.advance(Duration::from_secs(57)).await;
    assert_eq!(remaining(&bench, &short).await, 1);
    bench.advance(Duration::from_secs(1)).await;
    assert_eq!(remaining(&bench, &short).await, 2);
}

async fn a_clock_that_is_set_back_by_less_than_a_lease_admits_no_more(bench: Bench) {
    let limit = slots(1);
    let id = take(&bench, &limit, 1).await.expect("there is room");
    bench.set_back(LEASE - MICRO).await;
    assert_eq!(take(&bench, &limit, 1).await, None);
    assert!(renew(&bench, &limit, id).await);
    bench.advance(LEASE).await;
    assert!(
        take(&bench, &limit, 1).await.is_some(),
        "the renewal was by the new clock"
    );
}

async fn a_clock_that_is_set_back_far_blocks_nothing(bench: Bench) {
    let limit = slots(3);
    for cost in [1, 2] {
        take(&bench, &limit, cost).await.expect("there is room");
    }
    bench.set_back(100 * LEASE).await;
    assert!(take(&bench, &limit, 1).await.is_some());
    assert_eq!(remaining(&bench, &limit).await, 2);
}

async fn the_end_of_a_lease_drops_no_other_one_that_a_clock_set_back_has_left(bench: Bench) {
    let limit = slots(2);
    let first = take(&bench, &limit, 1).await.expect("there is room");
    take(&bench, &limit, 1).await.expect("there is room");
    bench.set_back(100 * LEASE).await;
    assert_eq!(end(&bench, &limit, 1, first).await, 1);
}

async fn after_heavy_leases_a_key_has_a_member_for_each_lease(bench: Bench) {
    let limit = slots(4);
    let id = take(&bench, &limit, 3).await.expect("there is room");
    end(&bench, &limit, 3, id).await;
    assert_eq!(bench.dump().await, []);
    take(&bench, &limit, 3).await.expect("there is room");
    bench.advance(LEASE).await;
    take(&bench, &limit, 1).await.expect("there is room");
    if let Some(members) = bench.members().await {
        assert_eq!(members, 1);
    }
}

/// Of such weights, more than nine would not be added exactly in doubles.
async fn the_largest_leases_leave_all_slots(bench: Bench) {
    const LARGEST: u64 = 999_999_999_999_999;
    let limit = slots(5);
    let mut taken = Vec::new();
    for less in 0..40 {
        let (id, cost) = (LeaseId::random(), LARGEST - less);
        assert!(lease(&bench, Operation::Charge, &limit, cost, id).await.allowed);
        taken.push((id, cost));
    }
    for (id, cost) in taken.into_iter().rev() {
        end(&bench, &limit, cost, id).await;
    }
    assert_eq!(remaining(&bench, &limit).await, 5);
}

async fn the_largest_limit_has_each_of_its_slots(bench: Bench) {
    const SLOTS: u64 = 999_999_999;
    let limit = slots(SLOTS);
    let all = take(&bench, &limit, SLOTS).await.expect("all are free");
    assert_eq!(take(&bench, &limit, 1).await, None);
    assert_eq!(end(&bench, &limit, SLOTS, all).await, SLOTS);
}

async fn a_lease_that_lasts_longer_than_twice_its_length_is_of_a_clock_that_is_gone(bench: Bench) {
    let limit = slots(2);
    take(&bench, &limit, 1).await.expect("there is room");
    bench.advance(MICRO).await;
    take(&bench, &limit, 1).await.expect("there is room");
    bench.set_back(LEASE + MICRO).await;
    assert!(take(&bench, &limit, 1).await.is_some());
    assert_eq!(take(&bench, &limit, 1).await, None, "the other one stays");
}

async fn a_renewal_by_a_clock_that_was_set_back_regards_no_lease_that_is_gone(bench: Bench) {
    let (limit, id) = (slots(2), LeaseId::random());
    take(&bench, &limit, 1).await.expect("there is room");
    bench.set_back(100 * LEASE).await;
    assert!(lease(&bench, Operation::Check, &limit, 1, id).await.allowed);
    bench.set_back(LEASE / 2).await;
    let renewed = lease(&bench, Operation::RenewLease, &limit, 1, id).await;
    assert_eq!((renewed.allowed, renewed.states()[0].remaining), (true, 1));
    assert_eq!(renewed.states()[0].reset_after, LEASE);
}

async fn a_lease_of_a_clock_that_was_far_ahead_keeps_its_key_for_two_hours(bench: Bench) {
    const FAR: Duration = Duration::from_secs(100 * 86_400);
    let (limit, two_hours) = (slots(3), Duration::from_secs(7_200));
    take(&bench, &limit, 1).await.expect("there is room");
    let of_a_lease = bench.expires_at().await;
    bench.advance(FAR).await;
    let ahead = take(&bench, &limit, 1).await.expect("there is room");
    bench.set_back(FAR).await;
    let id = LeaseId::random();
    for operation in [Operation::Check, Operation::RenewLease, Operation::Peek] {
        let outcome = lease(&bench, operation, &limit, 1, id).await;
        assert_eq!(outcome.states()[0].reset_after, two_hours, "{operation:?}");
        let later = (two_hours - LEASE).as_millis() as i64;
        assert_eq!(
            bench.expires_at().await,
            of_a_lease.map(|at| at + later),
            "{operation:?}"
        );
    }
    let ended = lease(&bench, Operation::EndLease, &limit, 1, id).await;
    assert_eq!(ended.states()[0].reset_after, two_hours);
    // Its renewal is by the new clock.
    let renewed = lease(&bench, Operation::RenewLease, &limit, 1, ahead).await;
    assert_eq!(renewed.states()[0].reset_after, LEASE);
}

async fn a_request_that_another_policy_denies_takes_no_slot(bench: Bench) {
    let once = Policy::new("hourly", SlidingLog::per_hour(1));
    let limiter = Limiter::new(bench.store.clone(), [Policy::new("test", Concurrency::new(2)), once]);
    let admitted = limiter.check("k").await.expect("the store replies");
    assert!(admitted.is_allowed());
    let denied = limiter.check("k").await.expect("the store replies");
    assert!(!denied.is_allowed());
    assert!(denied.take_slots().is_none());
    assert!(denied.retry_after() > Some(Duration::from_secs(3_500)));
    assert_eq!(remaining(&bench, &slots(2)).await, 1);

    // The receipt has the policies that count, and no slots.
    let receipt = admitted.take_receipt();
    assert_eq!(format!("{receipt:?}"), r#"["hourly"]"#);
    receipt.refund().await.expect("the store replies");
    assert_eq!(remaining(&bench, &slots(2)).await, 1);
}

async fn a_limiter_holds_slots_as_long_as_the_decision(bench: Bench) {
    let limiter = Limiter::new(bench.store.clone(), Policy::new("test", Concurrency::new(3)));
    let decision = limiter.request("k").cost(2).check().await.expect("the store replies");
    assert_eq!(decision.remaining(), 1);
    let clone = decision.clone();
    drop(decision);
    let denied = limiter.request("k").cost(2).check().await.expect("the store replies");
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(1)));
    let never = limiter.request("k").cost(4).check().await.expect("the store replies");
    let denials: Vec<_> = never.policies().map(|policy| policy.denial()).collect();
    assert_eq!(denials, [Some(Denial::CostAboveLimit)]);

    drop(clone);
    eventually("the slots are free", async || remaining(&bench, &slots(3)).await == 3).await;
    let charged = limiter.request("k").cost(5).charge().await.expect("the store replies");
    assert_eq!(remaining(&bench, &slots(3)).await, 0);
    let taken = charged.take_slots().expect("it was charged");
    assert_eq!(format!("{taken:?}"), r#"Slots ["test"]"#);
    taken.release().await.expect("the store replies");
    assert_eq!(remaining(&bench, &slots(3)).await, 3);
}

/// Takes 2,500 slots by 2,499 leases.
async fn fill(bench: &Bench, limit: &Limit) {
    let key = Key::from("k");
    let charges: Vec<_> = (0..2_500)
        .map(|number| [Charge::new("test", limit, &key, 1 + u64::from(number == 7)).lease(LeaseId::random())])
        .collect();
    let requests: Vec<_> = charges
        .iter()
        .map(|charges| StoreRequest::new(Operation::Check, charges))
        .collect();
    let response = bench.store.decide(&requests).await.expect("the store replies");
    let admitted = response.outcomes().iter().filter(|outcome| outcome.allowed).count();
    assert_eq!(admitted, 2_499);
}

async fn two_thousand_leases_that_expire_at_once_are_gone_after_three_calls(bench: Bench) {
    let limit = slots(2_500);
    fill(&bench, &limit).await;
    bench.advance(LEASE).await;
    for left in [1_000, 2_498, 2_497] {
        let least = remaining(&bench, &limit).await;
        assert!((left..=left + 1).contains(&least), "{least} remain");
        take(&bench, &limit, 1).await.expect("there is room");
    }
}

async fn of_two_thousand_leases_of_another_clock_a_check_drops_a_thousand(bench: Bench) {
    let limit = slots(2_500);
    fill(&bench, &limit).await;
    bench.set_back(100 * LEASE).await;
    take(&bench, &limit, 1).await.expect("there is room");
    let left = remaining(&bench, &limit).await;
    assert!((999..=1_000).contains(&left), "{left} remain");
}

// In a process: renewals, and what ends them.

#[tokio::test(start_paused = true)]
async fn slots_are_held_for_longer_than_a_lease() {
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(2)));
    let decision = limiter.check("42").await.unwrap();
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(limiter.peek("42").await.unwrap().remaining(), 1);
    }
    drop(decision);
    assert_eq!(limiter.peek("42").await.unwrap().remaining(), 2);
}

#[tokio::test(start_paused = true)]
async fn short_and_long_leases_are_renewed_by_one_task_which_ends_with_them() {
    let store = Counted::new(MemoryStore::new());
    let of = |seconds| {
        let limit = Concurrency::new(1).lease(Duration::from_secs(seconds));
        Limiter::new(Arc::new(store.clone()), Policy::new(format!("lease-{seconds}"), limit))
    };
    let (long, short) = (of(3_600), of(1));
    let held = long.check("42").await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let brief = short.check("42").await.unwrap();
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert!(!short.peek("42").await.unwrap().is_allowed());
    }
    drop(brief);
    tokio::time::sleep(Duration::from_secs(10_000)).await;
    assert!(!long.peek("42").await.unwrap().is_allowed());
    drop(held);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let calls = store.calls();
    tokio::time::sleep(Duration::from_secs(10_000)).await;
    assert_eq!(store.calls(), calls);
}

#[tokio::test(start_paused = true)]
async fn short_leases_that_come_and_go_do_not_delay_the_renewal_of_long_ones() {
    let store = MemoryStore::new();
    let of = |seconds| {
        let limit = Concurrency::new(1).lease(Duration::from_secs(seconds));
        Limiter::new(store.clone(), Policy::new(format!("lease-{seconds}"), limit))
    };
    let (long, short) = (of(60), of(10));
    let held = long.check("42").await.unwrap();
    let slots = held.take_slots().unwrap();
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(9)).await;
        drop(short.check("42").await.unwrap());
    }
    assert!(!slots.is_lost());
    assert!(!long.peek("42").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn slots_that_expired_are_lost_until_there_is_room_again() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let limiter = Limiter::new(store, Policy::new("exports", Concurrency::new(1)));
    let late = limiter.check("42").await.unwrap().take_slots().unwrap();

    // As when the process is stopped: no renewal is sent in time.
    clock.advance(LEASE);
    let other = limiter.check("42").await.unwrap();
    assert!(other.is_allowed());
    assert!(!late.is_lost(), "the store was not reached yet");
    tokio::time::sleep(LEASE / 3).await;
    assert!(late.is_lost());

    drop(other);
    tokio::time::sleep(LEASE / 3).await;
    assert!(!late.is_lost());
    assert!(!limiter.check("42").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn slots_whose_renewal_is_not_confirmed_for_a_lease_are_lost() {
    let store = Gated::new(MemoryStore::new());
    let limiter = Limiter::new(store.clone(), Policy::new("exports", Concurrency::new(1)));
    store.open(1);
    let slots = limiter.check("42").await.unwrap().take_slots().unwrap();
    tokio::time::sleep(LEASE - MICRO).await;
    assert!(!slots.is_lost());
    tokio::time::sleep(Duration::from_millis(2)).await;
    assert!(slots.is_lost());
    store.open(1);
    tokio::time::sleep(LEASE).await;
}

#[tokio::test(start_paused = true)]
async fn slots_whose_renewals_fail_for_less_than_a_lease_are_not_lost() {
    let store = Flaky::default();
    let limiter = Limiter::new(store.clone(), Policy::new("exports", Concurrency::new(1)));
    let slots = limiter.check("42").await.unwrap().take_slots().unwrap();
    for fails in [true, false] {
        store.fail(fails);
        tokio::time::sleep(LEASE / 2).await;
        assert!(!slots.is_lost());
    }
}

/// The store has renewed them at any time before its reply.
#[tokio::test(start_paused = true)]
async fn slots_are_lost_a_lease_after_their_last_renewal_was_sent() {
    let late = Duration::from_secs(3);
    let store = Gated::new(MemoryStore::new());
    let limiter = Limiter::new(store.clone(), Policy::new("exports", Concurrency::new(1)));
    store.open(1);
    let slots = limiter.check("42").await.unwrap().take_slots().unwrap();
    tokio::time::sleep(LEASE / 6 + late).await;
    store.open(1);
    tokio::time::sleep(LEASE - late - Duration::from_millis(5)).await;
    assert!(!slots.is_lost());
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert!(slots.is_lost());
}

#[tokio::test(start_paused = true)]
async fn slots_that_are_dropped_during_a_renewal_are_free_after_it() {
    let memory = MemoryStore::new();
    let store = Gated::new(memory.clone());
    let exports = || Policy::new("exports", Concurrency::new(1));
    let (limiter, direct) = (Limiter::new(store.clone(), exports()), Limiter::new(memory, exports()));
    store.open(1);
    let slots = limiter.check("42").await.unwrap().take_slots();
    // The first renewal is sent, and its reply is held back.
    tokio::time::sleep(LEASE / 5).await;
    drop(slots);
    assert_eq!(direct.peek("42").await.unwrap().remaining(), 0);

    store.open(2);
    tokio::time::sleep(MICRO).await;
    assert_eq!(direct.peek("42").await.unwrap().remaining(), 1);
}

/// A store that fails while it is cut off.
#[derive(Clone)]
struct CutOff {
    memory: MemoryStore,
    is_cut_off: Arc<AtomicBool>,
}

impl Store for CutOff {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        match self.is_cut_off.load(Ordering::Relaxed) {
            true => StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "it is cut off"))),
            false => self.memory.decide(requests),
        }
    }
}

/// Whether a slot stays held while its process is cut off from the store for these times, with so much time between them. The
/// first time begins right before a renewal is due.
async fn stays_held_while_cut_off(times: &[Duration], between: Duration) -> bool {
    let (memory, is_cut_off) = (MemoryStore::new(), Arc::new(AtomicBool::new(false)));
    let store = CutOff {
        memory: memory.clone(),
        is_cut_off: is_cut_off.clone(),
    };
    let exports = || Policy::new("exports", Concurrency::new(1));
    let (limiter, direct) = (Limiter::new(store, exports()), Limiter::new(memory, exports()));
    let slots = limiter.check("42").await.unwrap().take_slots().unwrap();
    tokio::time::sleep(LEASE / 6 - Duration::from_millis(5)).await;
    for time in times {
        for (cut_off, time) in [(true, *time), (false, between)] {
            is_cut_off.store(cut_off, Ordering::Relaxed);
            let end = tokio::time::Instant::now() + time;
            while tokio::time::Instant::now() < end {
                if direct.peek("42").await.unwrap().is_allowed() {
                    return false;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
    !slots.is_lost()
}

#[tokio::test(start_paused = true)]
async fn slots_stay_held_while_their_process_is_cut_off_for_less_than_half_a_lease() {
    let (half, sixth, moment) = (LEASE * 49 / 100, LEASE / 6, Duration::from_millis(3));
    assert!(stays_held_while_cut_off(&[half], 2 * sixth).await);
    // A renewal is tried again after a sixth of a lease.
    assert!(stays_held_while_cut_off(&[half; 3], sixth + moment).await);
    assert!(!stays_held_while_cut_off(&[half; 2], moment).await);
}

#[tokio::test(start_paused = true)]
async fn slots_stay_held_while_their_process_is_stopped_again_after_a_renewal() {
    let limiter = Limiter::new(MemoryStore::new(), Policy::new("exports", Concurrency::new(1)));
    let slots = limiter.check("42").await.unwrap().take_slots().unwrap();
    tokio::time::sleep(LEASE / 6 - Duration::from_millis(5)).await;
    for _ in 0..5 {
        tokio::time::advance(LEASE * 65 / 100).await;
        assert!(!limiter.peek("42").await.unwrap().is_allowed());
        // A renewal is due and sent as soon as the process continues.
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    assert!(!slots.is_lost());
}

/// A runtime that runs only while `block_on` does, with a clock of its own.
fn paused_runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().start_paused(true).build().expect("a runtime")
}

#[test]
fn when_a_runtime_ends_the_next_request_of_another_one_renews_its_leases() {
    // It ends before the first renewal, or while that is in flight.
    for length in [Duration::ZERO, LEASE / 5] {
        let clock = ManualClock::new();
        let store = Gated::new(MemoryStore::builder().manual_clock(&clock).build());
        let limiter = Limiter::new(store.clone(), Policy::new("exports", Concurrency::new(2)));
        store.open(1);
        let first = paused_runtime().block_on(async {
            let first = limiter.check("42").await.unwrap();
            tokio::time::sleep(length).await;
            first
        });
        store.open(1_000);

        paused_runtime().block_on(async {
            let second = limiter.check("42").await.unwrap();
            for _ in 0..5 {
                clock.advance(LEASE / 2);
                tokio::time::sleep(LEASE / 2).await;
                assert!(!limiter.check("42").await.unwrap().is_allowed());
            }
            drop((first, second));
            assert_eq!(limiter.peek("42").await.unwrap().remaining(), 2);
        });
    }
}

/// The length of a long lease, whose renewal task sleeps for longer than [`LEASE`].
const LONG: Duration = Duration::from_secs(3_600);

/// A limiter of a policy with one slot and leases of this length.
fn one_slot(store: &MemoryStore, lease: Duration) -> Limiter {
    let policy = Policy::new(format!("lease-{lease:?}"), Concurrency::new(1).lease(lease));
    Limiter::new(store.clone(), policy)
}

/// Whether a slot is held for several leases, while this runtime has nothing else to do.
async fn stays_held(clock: &ManualClock, limiter: &Limiter) -> bool {
    for _ in 0..9 {
        clock.advance(LEASE / 3);
        tokio::time::sleep(LEASE / 3).await;
    }
    let peeked = limiter.peek("42").await.expect("a memory store does not fail");
    peeked.remaining() == 0
}

#[test]
fn when_a_runtime_ends_one_that_sleeps_for_longer_renews_its_leases() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let (short, long) = (one_slot(&store, LEASE), one_slot(&store, LONG));
    let ending = paused_runtime();
    let slots = ending.block_on(short.check("42")).unwrap().take_slots().unwrap();

    paused_runtime().block_on(async {
        let held = long.check("42").await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        ending.shutdown_background();
        assert!(stays_held(&clock, &short).await);
        assert!(!slots.is_lost());
        drop((held, slots));
        assert_eq!(short.peek("42").await.unwrap().remaining(), 1);
    });
}

#[test]
fn slots_that_are_taken_outside_of_a_runtime_are_renewed_by_one_that_sleeps_for_longer() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let (short, long) = (one_slot(&store, LEASE), one_slot(&store, LONG));

    paused_runtime().block_on(async {
        let held = long.check("42").await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let outside = std::thread::scope(|scope| scope.spawn(|| at_once(short.check("42"))).join());
        let slots = outside.unwrap().unwrap().take_slots().unwrap();
        assert!(stays_held(&clock, &short).await);
        assert!(!slots.is_lost());
        drop((held, slots));
        assert_eq!(short.peek("42").await.unwrap().remaining(), 1);
    });
}

/// The output of a future that is ready when it is polled first.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut context) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it is not ready"),
    }
}

#[test]
fn a_runtime_that_is_not_driven_loses_only_its_own_slots() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().manual_clock(&clock).build();
    let limiter = Limiter::new(store, Policy::new("exports", Concurrency::new(2)));
    let (idle, driven) = (paused_runtime(), paused_runtime());
    let first = idle.block_on(limiter.check("42")).unwrap();

    driven.block_on(async {
        let second = limiter.check("42").await.unwrap();
        for _ in 0..6 {
            clock.advance(LEASE / 3);
            tokio::time::sleep(LEASE / 3).await;
        }
        assert_eq!(limiter.peek("42").await.unwrap().remaining(), 1);
        assert!(!second.take_slots().expect("it has one").is_lost());
    });
    drop(first);
    drop(idle);
}

// The layer.

fn exports(slots: u64) -> Policy {
    Policy::new("exports", Concurrency::new(slots)).key(key::constant("all"))
}

/// A limiter on the slots of [`exports`].
fn slots_of(store: &MemoryStore, slots: u64) -> Limiter {
    Limiter::new(store.clone(), exports(slots))
}

async fn free(limiter: &Limiter) -> u64 {
    let peeked = limiter.peek(Key::constant("all")).await;
    peeked.expect("a memory store does not fail").remaining()
}

type Chunks = StreamBody<ReceiverStream<Result<http_body::Frame<Bytes>, Infallible>>>;

/// A response whose body is what is sent to the channel.
fn streamed() -> (
    mpsc::Sender<Result<http_body::Frame<Bytes>, Infallible>>,
    Response<Chunks>,
) {
    let (sender, receiver) = mpsc::channel(8);
    (sender, Response::new(StreamBody::new(ReceiverStream::new(receiver))))
}

#[tokio::test]
async fn a_slot_is_held_until_the_response_body_ends() {
    let store = MemoryStore::new();
    let limiter = slots_of(&store, 1);
    let (chunks, response) = streamed();
    let response = Arc::new(Mutex::new(Some(response)));
    let service = RateLimitLayer::new(store, exports(1)).layer(service_fn(move |_: Request<String>| {
        let response = response.lock().expect("no panic").take();
        ready(Ok::<_, Infallible>(response.expect("one request")))
    }));

    let response = service.oneshot(Request::new(String::new())).await.unwrap();
    assert_eq!(
        response.headers()["ratelimit-policy"],
        r#""exports";q=1;qu="concurrent-requests""#
    );
    assert_eq!(response.headers()["ratelimit"], r#""exports";r=0;t=10"#);
    let kept = response.extensions().get::<Decision>().cloned();
    let mut body = response.into_body();
    for _ in 0..3 {
        chunks.send(Ok(http_body::Frame::data("a".into()))).await.unwrap();
        assert!(body.frame().await.is_some());
        assert_eq!(free(&limiter).await, 0);
    }
    drop(chunks);
    assert!(body.frame().await.is_none());
    assert_eq!(free(&limiter).await, 1, "although the body and the decision are there");
    drop((body, kept));
    assert_eq!(free(&limiter).await, 1);
}

#[tokio::test]
async fn a_denied_request_is_to_be_tried_again_after_a_second() {
    let store = MemoryStore::new();
    let limiter = slots_of(&store, 1);
    let held = limiter.check(Key::constant("all")).await.unwrap();
    for (headers, fields) in [
        (
            Headers::Draft08,
            [
                ("ratelimit-policy", r#""exports";q=1;qu="concurrent-requests""#),
                ("ratelimit", r#""exports";r=0;t=1"#),
            ],
        ),
        (
            Headers::Draft07,
            [
                ("ratelimit-policy", "1"),
                ("ratelimit", "limit=1, remaining=0, reset=1"),
            ],
        ),
        (Headers::Draft06, [("ratelimit-policy", "1"), ("ratelimit-reset", "1")]),
    ] {
        let layer = RateLimitLayer::new(store.clone(), exports(1)).headers(headers);
        let service = layer.layer(service_fn(|_: Request<String>| {
            ready(Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())))
        }));
        let denied = service.oneshot(Request::new(String::new())).await.unwrap();
        assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(denied.headers()["retry-after"], "1");
        for (name, value) in fields {
            assert_eq!(denied.headers()[name], value);
        }
    }
    drop(held);
}

#[tokio::test]
async fn a_slot_is_free_when_a_body_is_dropped_or_empty() {
    let store = MemoryStore::new();
    let limiter = slots_of(&store, 1);
    let app = Router::new()
        .route("/empty", get(async || StatusCode::NO_CONTENT))
        .route("/full", get(async || "full"))
        .layer(RateLimitLayer::new(store, exports(1)));
    let send = async |path: &str| {
        let request = Request::get(path).body(Body::empty()).unwrap();
        app.clone().oneshot(request).await.unwrap()
    };

    let response = send("/full").await;
    assert_eq!(free(&limiter).await, 0);
    drop(response);
    assert_eq!(free(&limiter).await, 1);

    let response = send("/full").await;
    let (_head, mut body) = response.into_parts();
    let last = body.frame().await.expect("content").unwrap();
    assert_eq!(last.into_data().unwrap(), "full");
    assert_eq!(free(&limiter).await, 1, "although the body is there");

    let response = send("/empty").await;
    assert!(http_body::Body::is_end_stream(response.body()));
    assert_eq!(free(&limiter).await, 1, "although the body is there");
}

#[tokio::test]
async fn a_slot_is_free_when_a_body_has_failed() {
    let store = MemoryStore::new();
    let limiter = slots_of(&store, 1);
    let service = RateLimitLayer::new(store, exports(1)).layer(service_fn(|_: Request<String>| {
        let frames = tokio_stream::iter([Err::<http_body::Frame<Bytes>, _>("it fails")]);
        ready(Ok::<_, Infallible>(Response::new(StreamBody::new(frames))))
    }));
    let mut body = service.oneshot(Request::new(String::new())).await.unwrap().into_body();
    assert_eq!(free(&limiter).await, 0);
    assert!(body.frame().await.expect("an error").is_err());
    assert_eq!(free(&limiter).await, 1, "although the body is there");
    drop(body);
}

#[tokio::test]
async fn a_slot_is_free_when_a_request_fails_panics_or_is_cancelled() {
    let store = MemoryStore::new();
    let limiter = slots_of(&store, 1);
    let service = RateLimitLayer::new(store, exports(1)).layer(service_fn(async |request: Request<String>| {
        match &**request.body() {
            "fails" => Err(BoxError::from("it fails")),
            "panics" => panic!("it panics"),
            _ => pending::<Result<Response<Full<Bytes>>, BoxError>>().await,
        }
    }));
    let send = |body: &str| service.clone().oneshot(Request::new(body.to_owned()));

    assert!(send("fails").await.is_err());
    assert_eq!(free(&limiter).await, 1);

    let panicked = futures_catch(send("panics")).await;
    assert!(panicked);
    assert_eq!(free(&limiter).await, 1);

    let mut waiting = Box::pin(send("waits"));
    assert!(tokio::time::timeout(MICRO, &mut waiting).await.is_err());
    assert_eq!(free(&limiter).await, 0);
    drop(waiting);
    assert_eq!(free(&limiter).await, 1);
}

/// Whether a future panics, which is dropped then.
async fn futures_catch<T>(future: impl Future<Output = T>) -> bool {
    let mut future = Box::pin(future);
    std::future::poll_fn(
        |cx| match std::panic::catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(polled) => polled.map(|_| false),
            Err(_) => std::task::Poll::Ready(true),
        },
    )
    .await
}

#[tokio::test]
async fn a_slot_is_free_when_a_caller_leaves_before_the_store_replies() {
    let store = MemoryStore::new();
    let limiter = slots_of(&store, 1);
    let later = Limiter::new(Later(store), Policy::new("exports", Concurrency::new(1)));
    {
        let mut check = Box::pin(later.check(Key::constant("all")));
        let mut context = Context::from_waker(Waker::noop());
        assert!(check.as_mut().poll(&mut context).is_pending());
    }
    eventually("the slot is free", async || free(&limiter).await == 1).await;
}

/// A store whose replies to requests are lost.
struct Unanswered(MemoryStore);

impl Store for Unanswered {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let response = self.0.decide(requests);
        match requests[0].operation() {
            Operation::EndLease => response,
            _ => StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "the reply is lost"))),
        }
    }
}

#[tokio::test]
async fn a_slot_is_free_when_the_reply_to_its_request_is_lost() {
    let store = MemoryStore::new();
    let policies = [
        Policy::new("mails", SlidingLog::per_second(9)).wait_up_to(LEASE),
        Policy::new("exports", Concurrency::new(3)),
    ]
    .map(|policy| policy.failure_mode(FailureMode::Closed));
    let limiter = Limiter::new(Unanswered(store.clone()), policies);
    assert!(limiter.check("all").await.is_err());
    assert!(limiter.acquire("all").await.is_err());

    let slots = Limiter::new(store, Policy::new("exports", Concurrency::new(3)));
    assert_eq!(slots.peek("all").await.unwrap().remaining(), 3);
}

#[tokio::test]
async fn nested_layers_with_one_policy_take_one_slot_and_a_handler_takes_those_of_all() {
    let store = MemoryStore::new();
    let limiter = slots_of(&store, 2);
    let other = Policy::new("other", Concurrency::new(5)).key(key::constant("all"));
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let service = RateLimitLayer::new(store.clone(), exports(2)).layer(
        RateLimitLayer::new(store.clone(), [exports(2), other]).layer(service_fn(move |request: Request<String>| {
            if request.body() == "takes" {
                let slots = request.extensions().get::<Decision>().and_then(Decision::take_slots);
                sender.send(slots).expect("the receiver is there");
            }
            ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done"))))
        })),
    );

    let response = service.clone().oneshot(Request::new(String::new())).await.unwrap();
    assert_eq!(free(&limiter).await, 1);
    drop(response);
    assert_eq!(free(&limiter).await, 2);

    drop(service.oneshot(Request::new("takes".to_owned())).await.unwrap());
    let slots = receiver.recv().await.flatten().expect("slots");
    assert_eq!(format!("{slots:?}"), r#"Slots ["exports", "other"]"#);
    assert_eq!(free(&limiter).await, 1);
    drop(slots);
    assert_eq!(free(&limiter).await, 2);
}

/// A service that sends the slots of each request to the test, within a layer on each of these stores.
fn hands_over_slots(outer: RedisStore, inner: RedisStore) -> impl AsyncFn() -> Slots {
    let (sender, receiver) = mpsc::unbounded_channel();
    let handler = service_fn(move |request: Request<Empty<Bytes>>| {
        let slots = request.extensions().get::<Decision>().and_then(Decision::take_slots);
        sender.send(slots).expect("the receiver is there");
        ready(Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())))
    });
    let exports = |name| Policy::new(name, Concurrency::new(1).lease(LONG)).key(key::constant("all"));
    let service =
        RateLimitLayer::new(outer, exports("outer")).layer(RateLimitLayer::new(inner, exports("inner")).layer(handler));
    let receiver = tokio::sync::Mutex::new(receiver);
    async move || {
        service.clone().oneshot(Request::new(Empty::new())).await.unwrap();
        receiver.lock().await.recv().await.flatten().expect("it is admitted")
    }
}

#[tokio::test]
async fn slots_of_every_store_are_free_when_a_release_is_cancelled() {
    let redis = Redis::start();
    let stores = [
        connected(patient(), &redis.url()).await,
        connected(patient(), &redis.url()).await,
    ];
    let [outer, inner] = stores.clone();
    let admit = hands_over_slots(outer, inner);
    let slots_of = |name: &'static str, store: &RedisStore| {
        Limiter::new(store.clone(), Policy::new(name, Concurrency::new(1).lease(LONG)))
    };
    let limiters = [slots_of("outer", &stores[0]), slots_of("inner", &stores[1])];
    let all_are_free = async || {
        for limiter in &limiters {
            if free(limiter).await == 0 {
                return false;
            }
        }
        true
    };

    for polls in 0..3 {
        let slots = admit().await;
        assert!(!all_are_free().await);
        {
            let mut release = pin!(slots.release());
            let mut context = Context::from_waker(Waker::noop());
            for _ in 0..polls {
                assert!(release.as_mut().poll(&mut context).is_pending());
            }
        }
        eventually("all slots are free", &all_are_free).await;
    }

    admit().await.release().await.expect("Redis replies");
    assert!(all_are_free().await);
}

#[tokio::test]
async fn an_observing_policy_counts_slots_and_denies_nothing() {
    let store = MemoryStore::new();
    let limiter = Limiter::new(store, Policy::new("exports", Concurrency::new(1)).observe_only());
    let first = limiter.check("42").await.unwrap();
    let second = limiter.check("42").await.unwrap();
    let would_deny = |decision: &Decision| decision.policies().any(|policy| policy.denial().is_some());
    assert!(second.is_allowed() && would_deny(&second) && !would_deny(&first));
    assert!(second.take_slots().is_none());
    drop(first);
    assert!(!would_deny(&limiter.check("42").await.unwrap()));
}

#[tokio::test]
async fn settings_that_count_a_request_when_it_has_ended_are_refused() {
    let refused = |policy: Policy| {
        let error = RateLimitLayer::try_new(MemoryStore::new(), policy).unwrap_err();
        assert!(error.to_string().contains("holds its slots until it ends"), "{error}");
    };
    refused(exports(1).refund_if(|_| true));
}

#[tokio::test]
async fn a_limit_of_slots_that_is_chosen_is_refused_beside_the_same_settings() {
    let chosen = || {
        let policy = Policy::with_limit_fn("exports", |parts| match parts.uri.path() {
            "/slots" => Limit::from(Concurrency::new(1)),
            _ => SlidingLog::per_minute(9).into(),
        });
        policy.key(key::constant("all"))
    };
    for (policy, setting) in [(chosen().refund_if(|_| true), "`.refund_if(..)`")] {
        let reason = Arc::new(Mutex::new(String::new()));
        let seen = reason.clone();
        let service = RateLimitLayer::new(MemoryStore::new(), policy)
            .format(move |rejection: Rejection<'_>, _: &Parts| {
                *seen.lock().unwrap() = format!("{rejection:?}");
                let response = Response::builder().status(rejection.status());
                response.body(Bytes::new()).unwrap()
            })
            .layer(service_fn(|_: Request<String>| {
                ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("a"))))
            }));
        let send = async |path: &str| {
            let request = Request::get(path).body(String::new()).unwrap();
            service.clone().oneshot(request).await.unwrap().status()
        };
        assert_eq!(send("/").await, StatusCode::OK);
        assert_eq!(send("/slots").await, StatusCode::INTERNAL_SERVER_ERROR, "{setting}");
        let reason = reason.lock().unwrap();
        for part in [
            setting,
            "policy `exports`",
            "holds its slots until it ends",
            "leave it out",
        ] {
            assert!(reason.contains(part), "{reason}");
        }
    }
}

#[tokio::test]
async fn a_limit_of_slots_is_chosen_for_each_request() {
    let policy = Policy::with_limit_fn("exports", |parts| {
        Concurrency::new(if parts.uri.path() == "/big" { 2 } else { 1 })
    });
    let service = RateLimitLayer::new(MemoryStore::new(), policy.key(key::constant("all"))).layer(service_fn(
        |_: Request<String>| ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("a")))),
    ));
    let send = async |path: &str| {
        service
            .clone()
            .oneshot(Request::get(path).body(String::new()).unwrap())
            .await
            .unwrap()
    };
    let first = send("/small").await;
    assert_eq!(first.status(), StatusCode::OK);
    assert_eq!(send("/small").await.status(), StatusCode::TOO_MANY_REQUESTS);
    let second = send("/big").await;
    assert_eq!(second.status(), StatusCode::OK);
    assert_eq!(send("/big").await.status(), StatusCode::TOO_MANY_REQUESTS);
    drop((first, second));
    assert_eq!(send("/small").await.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn while_the_store_fails_slots_are_counted_and_renewed_in_the_process() {
    let policy = || Policy::new("exports", Concurrency::new(4));
    let limiter = Limiter::new(Broken::default(), policy().failure_mode(FailureMode::local_share(1, 2)));
    let first = limiter.check("42").await.unwrap();
    let second = limiter.check("42").await.unwrap();
    assert!(second.is_allowed() && second.store_error().is_some());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!limiter.check("42").await.unwrap().is_allowed());
    drop(first);
    assert!(limiter.check("42").await.unwrap().is_allowed());

    let open = Limiter::new(Broken::default(), policy().failure_mode(FailureMode::Open));
    assert!(open.check("42").await.unwrap().take_slots().is_none());
}

// Redis.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_replicas_never_hold_more_than_the_limit_at_once() {
    let redis = Redis::start();
    let (running, most) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
    let mut replicas = JoinSet::new();
    for _ in 0..3 {
        let store = connected(patient(), &redis.url()).await;
        let policy = Policy::new("exports", Concurrency::new(3)).failure_mode(FailureMode::Closed);
        let limiter = Limiter::new(store, policy);
        for _ in 0..8 {
            let (limiter, running, most) = (limiter.clone(), running.clone(), most.clone());
            replicas.spawn(async move {
                let mut admitted = 0;
                while admitted < 20 {
                    let decision = limiter.check("42").await.expect("Redis replies");
                    if decision.is_allowed() {
                        admitted += 1;
                        most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        tokio::task::yield_now().await;
                        running.fetch_sub(1, Ordering::SeqCst);
                    }
                    drop(decision);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            });
        }
    }
    replicas.join_all().await;
    assert!((1..=3).contains(&most.load(Ordering::SeqCst)), "{most:?} at once");
    let keys: Vec<String> = redis.command("KEYS", ["*exports*"]).await;
    assert!(keys.len() <= 1, "{keys:?}");
}

/// The environment variable with the URL of the Redis of a holder.
const HOLDER: &str = "TOWER_QUOTA_HOLDER";

/// So long that each is renewed in time on a busy machine.
const HOLDER_LEASE: Duration = Duration::from_secs(5);

/// In another process: holds three slots until it is killed.
#[tokio::test]
async fn a_holder_that_is_to_be_killed() {
    let Ok(url) = env::var(HOLDER) else { return };
    let limiter = Limiter::new(connected(patient(), &url).await, of_holder());
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(limiter.check("42").await.expect("Redis replies"));
    }
    println!("\nheld {}", held.iter().all(Decision::is_allowed));
    pending::<()>().await;
}

fn of_holder() -> Policy<()> {
    Policy::new("exports", Concurrency::new(3).lease(HOLDER_LEASE))
}

#[tokio::test]
async fn the_slots_of_a_process_that_is_killed_are_free_within_a_lease() {
    let redis = Redis::start();
    let limiter = Limiter::new(connected(patient(), &redis.url()).await, of_holder());
    let holder = this_binary("decide::concurrency::a_holder_that_is_to_be_killed")
        .env(HOLDER, redis.url())
        .stdout(Stdio::piped())
        .spawn();
    let mut holder = Process(holder.expect("this binary starts"));
    let output = BufReader::new(holder.0.stdout.take().expect("a pipe"));
    let held = tokio::task::spawn_blocking(move || {
        let mut lines = output.lines().map(|line| line.expect("text"));
        (lines.any(|line| line.contains("held true")), lines)
    });
    let (held, _pipe) = held.await.expect("it reads");
    assert!(held, "the holder has taken three slots");

    // For longer than a lease, they are renewed.
    let started = limiter.peek("42").await.expect("Redis replies").server_time();
    let mut now = started;
    while now < started + HOLDER_LEASE * 3 / 2 {
        let peeked = limiter.peek("42").await.expect("Redis replies");
        assert_eq!(peeked.remaining(), 0, "after {:?}", now - started);
        now = peeked.server_time();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    drop(holder);
    let killed = limiter.peek("42").await.expect("Redis replies").server_time();
    let (mut last_denied, mut free) = (killed, killed);
    eventually("the slots are free", async || {
        let peeked = limiter.peek("42").await.expect("Redis replies");
        match peeked.remaining() {
            3 => free = peeked.server_time(),
            _ => last_denied = peeked.server_time(),
        }
        peeked.remaining() == 3
    })
    .await;
    println!("free after {:?}", free - killed);
    assert!(last_denied < killed + HOLDER_LEASE, "{:?}", last_denied - killed);
}

#[tokio::test]
async fn a_denial_in_another_slot_of_a_cluster_ends_the_lease() {
    let cluster = Cluster::start_patient().await;
    let store = connected(patient(), &cluster.url()).await;
    cluster.serves(&store).await;
    let (slots, full) = (slots(1), Limit::from(SlidingLog::per_hour(1)));
    let (key, other) = (Key::from("k"), Key::from("other"));
    let decide = async |operation, charges: &[Charge]| {
        let response = store.decide(&[StoreRequest::new(operation, charges)]).await;
        response.expect("the cluster replies").outcomes()[0].clone()
    };
    let hourly = Charge::new("hourly", &full, &other, 1);
    assert!(decide(Operation::Check, std::slice::from_ref(&hourly)).await.allowed);
    let both = [Charge::new("exports", &slots, &key, 1).lease(LeaseId::random()), hourly];
    assert!(!decide(Operation::Check, &both).await.allowed);
    let peeked = decide(Operation::Peek, &both[..1]).await;
    assert!(peeked.allowed, "{peeked:?}");

    let limiter = Limiter::new(store.clone(), Policy::new("sockets", Concurrency::new(1)));
    let held = limiter.check("42").await.expect("the cluster replies").take_slots();
    assert!(!limiter.check("42").await.expect("the cluster replies").is_allowed());
    held.expect("slots").release().await.expect("the cluster replies");
    assert!(limiter.check("42").await.expect("the cluster replies").is_allowed());
}

#[tokio::test]
async fn a_key_of_slots_expires_when_its_last_lease_does() {
    let redis = Redis::start();
    let store = connected(patient(), &redis.url()).await;
    // It is renewed after a sixth of its time.
    let lease = Duration::from_secs(3_600);
    let limiter = Limiter::new(store, Policy::new("exports", Concurrency::new(1).lease(lease)));
    let decision = limiter.check("42").await.unwrap();
    let keys: Vec<String> = redis.command("KEYS", ["*"]).await;
    assert_eq!(keys, ["quota:1:concurrency:exports:{key=42}"]);
    let expires_at = Duration::from_millis(redis.expires_at(&keys[0]).await as u64);
    let lasts = expires_at - decision.server_time();
    assert!(lasts <= lease + Duration::from_secs(1) && lasts > lease, "{lasts:?}");
}

#[tokio::test]
async fn a_request_that_fails_drops_the_weight_of_leases_that_have_expired() {
    let (redis, clock) = (Redis::start(), Clock::new());
    clock.write_to(&redis).await;
    let store: Arc<dyn Store> = Arc::new(clock.redis_store(&redis).await);
    let (limit, log, key) = (slots(5), Limit::from(SlidingLog::per_minute(5)), Key::from("k"));
    assert!(decide(&store, Operation::Check, &limit, "k", 3).await.allowed);
    redis
        .command::<()>("HSET", ["quota:1:log/1min:bad:{key=k}", "field", "value"])
        .await;

    clock.advance(LEASE);
    clock.write_to(&redis).await;
    let charges = [("test", &limit), ("bad", &log)];
    let charges = charges.map(|(policy, limit)| Charge::new(policy, limit, &key, 1).lease(LeaseId::random()));
    let failed = store.decide(&[StoreRequest::new(Operation::EndLease, &charges)]).await;
    assert!(failed.is_err(), "{failed:?}");
    let peeked = decide(&store, Operation::Peek, &limit, "k", 1).await;
    assert_eq!(peeked.states()[0].remaining, 5);
}

/// A store whose replies are lost for a while: it admits checks meanwhile, and gets nothing else.
#[derive(Clone, Default)]
struct SilentForAWhile {
    store: MemoryStore,
    is_silent: Arc<AtomicBool>,
}

impl Store for SilentForAWhile {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        if !self.is_silent.load(Ordering::Relaxed) {
            return self.store.decide(requests);
        }
        if requests[0].operation() == Operation::Check {
            drop(self.store.decide(requests));
        }
        StoreFuture::ready(Err(StoreError::new(ErrorKind::Timeout, "there is no reply")))
    }
}

/// A slot for an hour, and requests that are admitted while the store fails.
fn with_a_long_lease(store: impl Store) -> Limiter {
    let slots = Concurrency::new(1).lease(Duration::from_secs(3_600));
    Limiter::new(store, Policy::new("jobs", slots).failure_mode(FailureMode::Open))
}

#[tokio::test(start_paused = true)]
async fn slots_of_checks_without_a_reply_are_free_when_the_store_replies_again() {
    let store = SilentForAWhile::default();
    let limiter = with_a_long_lease(store.clone());
    store.is_silent.store(true, Ordering::Relaxed);
    drop(limiter.check("a").await.expect("it is open"));
    tokio::time::sleep(Duration::from_secs(60)).await;
    store.is_silent.store(false, Ordering::Relaxed);
    assert!(!limiter.check("a").await.expect("it replies").is_allowed());

    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(limiter.check("a").await.expect("it replies").is_allowed());
}

#[tokio::test(start_paused = true)]
async fn a_check_that_is_not_sent_is_released_once() {
    let store = Broken::default();
    let limiter = with_a_long_lease(store.clone());
    drop(limiter.check("a").await.expect("it is open"));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(store.calls(), 2);
}
