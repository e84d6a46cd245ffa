//! Requests wait for slots in a queue, in every store: they hold none meanwhile, and take them in the order of their arrival.

use std::{convert::Infallible, time::Duration};

use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use tokio::{
    task::{JoinHandle, yield_now},
    time::{Instant, advance, sleep},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    AcquireError, Ban, Concurrency, Denial, Key, Limit, Limiter, MemoryStore, Policies, Policy, RateLimitLayer,
    SlidingLog, TokenBucket, key,
    store::{Charge, LeaseId, Operation, Outcome, Store, StoreRequest},
};

use crate::support::{Bench, Broken, Counted, each_store};

each_store! {
    places_are_admitted_in_their_order_and_nothing_overtakes_them
    a_heavy_request_at_the_head_is_not_overtaken_by_light_ones
    a_place_is_held_for_three_seconds_after_it_was_refreshed
    a_request_that_waits_counts_nothing_and_is_charged_everywhere_at_once
    a_request_that_waits_is_denied_when_another_policy_has_no_room
    a_request_leaves_the_queue_with_the_end_of_its_lease_and_with_its_last_check
    no_more_units_wait_than_may
    slots_are_not_taken_before_the_turn_of_another_limit
    a_request_is_in_the_queues_up_to_the_first_limit_without_room
    a_reset_leaves_no_place
    a_lost_lease_is_not_added_again_before_those_that_wait
    a_request_that_waits_counts_no_denial_for_a_ban
    a_queue_leaves_nothing_behind
}

const SECOND: Duration = Duration::from_secs(1);
const MOST: u64 = 500;

fn slots(slots: u64) -> Limit {
    Concurrency::new(slots).into()
}

/// A request for slots of the policies `p0`, `p1` and so on, with its leases.
struct Slots<'a> {
    limits: &'a [&'a Limit],
    cost: u64,
    ids: Vec<LeaseId>,
}

fn of<'a>(limits: &'a [&'a Limit]) -> Slots<'a> {
    Slots {
        limits,
        cost: 1,
        ids: limits.iter().map(|_| LeaseId::random()).collect(),
    }
}

impl Slots<'_> {
    fn costing(self, cost: u64) -> Self {
        Self { cost, ..self }
    }

    async fn send(&self, bench: &Bench, operation: Operation, longest: Duration, most: u64) -> Outcome {
        let key = Key::from("k");
        let names = ["p0", "p1", "p2"];
        let charges = self.limits.iter().zip(&self.ids).zip(names).map(|((limit, id), name)| {
            let charge = Charge::new(name, limit, &key, self.cost).lease(*id);
            charge.wait_up_to(longest).max_waiting(most)
        });
        let charges: Vec<_> = charges.collect();
        let response = bench.store.decide(&[StoreRequest::new(operation, &charges)]).await;
        response.expect("the store replies").outcomes()[0].clone()
    }

    async fn reserve(&self, bench: &Bench) -> Outcome {
        self.send(bench, Operation::Reserve, SECOND, MOST).await
    }

    async fn end(&self, bench: &Bench) -> Outcome {
        self.send(bench, Operation::EndLease, Duration::ZERO, MOST).await
    }

    async fn check(&self, bench: &Bench) -> bool {
        self.send(bench, Operation::Check, Duration::ZERO, MOST).await.allowed
    }

    async fn remaining(&self, bench: &Bench) -> u64 {
        self.send(bench, Operation::Peek, Duration::ZERO, MOST).await.states()[0].remaining
    }
}

async fn places_are_admitted_in_their_order_and_nothing_overtakes_them(bench: Bench) {
    let limit = slots(2);
    let limits = [&limit];
    let held = [of(&limits), of(&limits)];
    for lease in &held {
        assert!(lease.reserve(&bench).await.allowed);
    }
    let waiting = [of(&limits), of(&limits), of(&limits)];
    for place in &waiting {
        let outcome = place.reserve(&bench).await;
        assert!(outcome.is_waiting() && !outcome.allowed);
        assert_eq!(outcome.states()[0].retry_after, Some(SECOND));
    }

    held[0].end(&bench).await;
    assert!(
        !of(&limits).check(&bench).await,
        "the free slot is that of the first place"
    );
    assert_eq!(of(&limits).remaining(&bench).await, 0);
    assert!(waiting[1].reserve(&bench).await.is_waiting());
    let newcomer = of(&limits);
    assert!(newcomer.reserve(&bench).await.is_waiting());
    assert!(waiting[0].reserve(&bench).await.allowed);
    held[1].end(&bench).await;
    for place in [&waiting[2], &newcomer] {
        assert!(place.reserve(&bench).await.is_waiting());
    }
    assert!(waiting[1].reserve(&bench).await.allowed);
}

async fn a_heavy_request_at_the_head_is_not_overtaken_by_light_ones(bench: Bench) {
    let limit = slots(3);
    let limits = [&limit];
    let held = of(&limits).costing(2);
    assert!(held.reserve(&bench).await.allowed);
    let heavy = of(&limits).costing(3);
    assert!(heavy.reserve(&bench).await.is_waiting());
    let light = of(&limits);
    assert!(light.reserve(&bench).await.is_waiting(), "one slot is free");

    held.end(&bench).await;
    assert!(light.reserve(&bench).await.is_waiting());
    assert!(heavy.reserve(&bench).await.allowed);
    heavy.end(&bench).await;
    assert!(light.reserve(&bench).await.allowed);
    assert_eq!(light.remaining(&bench).await, 2);
}

async fn a_place_is_held_for_three_seconds_after_it_was_refreshed(bench: Bench) {
    let limit = slots(1);
    let limits = [&limit];
    let held = of(&limits);
    assert!(held.reserve(&bench).await.allowed);
    let (first, second) = (of(&limits), of(&limits));
    assert!(first.reserve(&bench).await.is_waiting());
    bench.advance(2 * SECOND).await;
    assert!(first.reserve(&bench).await.is_waiting());
    assert!(second.reserve(&bench).await.is_waiting());

    held.end(&bench).await;
    bench.advance(2 * SECOND).await;
    assert!(second.reserve(&bench).await.is_waiting());
    bench.advance(SECOND - Duration::from_micros(1)).await;
    assert!(second.reserve(&bench).await.is_waiting(), "the first place is held");
    bench.advance(Duration::from_micros(1)).await;
    assert!(second.reserve(&bench).await.allowed, "its process has died");
    assert!(
        first.reserve(&bench).await.is_waiting(),
        "it is at the end of the queue"
    );
}

/// Requests for a slot and of a log.
async fn with_log(bench: &Bench, operation: Operation, log: &Charge<'_>, limit: &Limit, id: LeaseId) -> Outcome {
    let key = Key::from("k");
    let slot = Charge::new("slots", limit, &key, 1).lease(id).wait_up_to(SECOND);
    let charges = [*log, slot];
    let response = bench.store.decide(&[StoreRequest::new(operation, &charges)]).await;
    response.expect("the store replies").outcomes()[0].clone()
}

async fn a_request_that_waits_counts_nothing_and_is_charged_everywhere_at_once(bench: Bench) {
    let (limit, log) = (slots(1), SlidingLog::per_minute(5).into());
    let key = Key::from("k");
    let log = Charge::new("log", &log, &key, 1);
    let ids = [LeaseId::random(), LeaseId::random()];
    let first = with_log(&bench, Operation::Reserve, &log, &limit, ids[0]).await;
    assert_eq!((first.allowed, first.states()[0].remaining), (true, 4));

    bench.advance(SECOND).await;
    let waits = with_log(&bench, Operation::Reserve, &log, &limit, ids[1]).await;
    assert!(waits.is_waiting());
    assert_eq!((waits.states()[0].remaining, waits.states()[0].retry_after), (4, None));

    with_log(&bench, Operation::EndLease, &log, &limit, ids[0]).await;
    bench.advance(SECOND).await;
    let admitted = with_log(&bench, Operation::Reserve, &log, &limit, ids[1]).await;
    assert_eq!((admitted.allowed, admitted.states()[0].remaining), (true, 3));
    assert_eq!(admitted.states()[0].reset_after, 60 * SECOND, "it counts from now on");
}

async fn a_request_that_waits_is_denied_when_another_policy_has_no_room(bench: Bench) {
    let (limit, log) = (slots(1), SlidingLog::per_minute(2).into());
    let key = Key::from("k");
    let log = Charge::new("log", &log, &key, 1);
    let [held, waiting] = [LeaseId::random(), LeaseId::random()];
    assert!(with_log(&bench, Operation::Reserve, &log, &limit, held).await.allowed);
    assert!(
        with_log(&bench, Operation::Reserve, &log, &limit, waiting)
            .await
            .is_waiting()
    );
    let other = bench.store.decide(&[StoreRequest::new(Operation::Check, &[log])]).await;
    assert!(other.expect("the store replies").outcomes()[0].allowed);

    let denied = with_log(&bench, Operation::Reserve, &log, &limit, waiting).await;
    assert!(!denied.allowed && !denied.is_waiting());
    assert_eq!(denied.states()[0].retry_after, Some(60 * SECOND));
    assert_eq!(denied.states()[1].retry_after, None, "it would wait for this one");
    with_log(&bench, Operation::EndLease, &log, &limit, held).await;
    let free = [Charge::new("slots", &limit, &key, 1)];
    let free = bench.store.decide(&[StoreRequest::new(Operation::Check, &free)]).await;
    assert!(
        free.expect("the store replies").outcomes()[0].allowed,
        "its place is left"
    );
}

async fn a_request_leaves_the_queue_with_the_end_of_its_lease_and_with_its_last_check(bench: Bench) {
    let limit = slots(1);
    let limits = [&limit];
    let held = of(&limits);
    assert!(held.reserve(&bench).await.allowed);
    let waiting = [of(&limits), of(&limits), of(&limits)];
    for place in &waiting {
        assert!(place.reserve(&bench).await.is_waiting());
    }
    waiting[0].end(&bench).await;
    let last = waiting[1].send(&bench, Operation::Reserve, Duration::ZERO, MOST).await;
    assert!(!last.allowed && !last.is_waiting(), "it may wait no longer");
    assert_eq!(last.states()[0].retry_after, Some(SECOND));
    held.end(&bench).await;
    assert!(waiting[2].reserve(&bench).await.allowed);
}

async fn no_more_units_wait_than_may(bench: Bench) {
    let limit = slots(5);
    let limits = [&limit];
    let held = of(&limits).costing(5);
    assert!(held.reserve(&bench).await.allowed);
    let waiting = [of(&limits).costing(2), of(&limits).costing(2), of(&limits)];
    let mut outcomes = Vec::new();
    for place in &waiting {
        outcomes.push(place.send(&bench, Operation::Reserve, SECOND, 3).await.is_waiting());
    }
    assert_eq!(outcomes, [true, false, true]);
    let refreshed = waiting[0].send(&bench, Operation::Reserve, SECOND, 1).await;
    assert!(refreshed.is_waiting(), "it has its place");
}

async fn slots_are_not_taken_before_the_turn_of_another_limit(bench: Bench) {
    let (limit, log) = (slots(1), SlidingLog::per_second(1).into());
    let key = Key::from("k");
    let log = Charge::new("log", &log, &key, 1).wait_up_to(10 * SECOND);
    let ids = [(); 3].map(|()| LeaseId::random());
    assert!(with_log(&bench, Operation::Reserve, &log, &limit, ids[0]).await.allowed);
    for (turn, id) in [(1, ids[1]), (2, ids[2])] {
        // Neither has a slot, and none is free.
        let later = with_log(&bench, Operation::Reserve, &log, &limit, id).await;
        assert!(later.allowed && !later.is_waiting());
        let turn = Duration::from_micros(bench.now()) + turn * SECOND;
        assert_eq!(later.states()[1].decided_at, Some(turn));
        assert_eq!(later.states()[1].remaining, 0);
    }
    with_log(&bench, Operation::EndLease, &log, &limit, ids[0]).await;
    let free = [Charge::new("slots", &limit, &key, 1)];
    let free = bench.store.decide(&[StoreRequest::new(Operation::Check, &free)]).await;
    assert!(free.expect("the store replies").outcomes()[0].allowed);
}

async fn a_request_is_in_the_queues_up_to_the_first_limit_without_room(bench: Bench) {
    let (user, shared) = (slots(1), slots(2));
    let (of_user, both) = ([&user], [&user, &shared]);
    let [first, second] = [of(&both), of(&both)];
    assert!(first.reserve(&bench).await.allowed);
    assert!(second.reserve(&bench).await.is_waiting());
    // The shared slot that is free is that of others meanwhile.
    let key = Key::from("k");
    let take = async |operation, id| {
        let charges = [Charge::new("p1", &shared, &key, 1).lease(id).wait_up_to(SECOND)];
        let response = bench.store.decide(&[StoreRequest::new(operation, &charges)]).await;
        response.expect("the store replies").outcomes()[0].clone()
    };
    let others = [LeaseId::random(), LeaseId::random()];
    assert!(take(Operation::Check, others[0]).await.allowed);
    assert!(take(Operation::Reserve, others[1]).await.is_waiting());

    // The slot of the user is its own, and it is behind the other one in the queue for the shared ones.
    first.end(&bench).await;
    let outcome = second.reserve(&bench).await;
    assert!(outcome.is_waiting());
    assert_eq!(
        outcome
            .states()
            .iter()
            .map(|state| state.retry_after)
            .collect::<Vec<_>>(),
        [None, Some(SECOND)]
    );
    assert!(!of(&of_user).check(&bench).await);
    assert!(take(Operation::Reserve, others[1]).await.allowed);
    assert!(second.reserve(&bench).await.is_waiting());
    take(Operation::EndLease, others[0]).await;
    assert!(second.reserve(&bench).await.allowed);
}

async fn a_reset_leaves_no_place(bench: Bench) {
    let limit = slots(1);
    let limits = [&limit];
    let (held, waiting) = (of(&limits), of(&limits));
    assert!(held.reserve(&bench).await.allowed);
    assert!(waiting.reserve(&bench).await.is_waiting());
    held.send(&bench, Operation::Reset, SECOND, MOST).await;
    assert!(of(&limits).check(&bench).await);
    assert!(waiting.reserve(&bench).await.is_waiting());
}

async fn a_lost_lease_is_not_added_again_before_those_that_wait(bench: Bench) {
    let limit = slots(1);
    let limits = [&limit];
    let (lost, waiting) = (of(&limits), of(&limits));
    assert!(lost.reserve(&bench).await.allowed);
    bench.advance(8 * SECOND).await;
    assert!(waiting.reserve(&bench).await.is_waiting());
    bench.advance(2 * SECOND).await;
    let renewed = lost.send(&bench, Operation::RenewLease, SECOND, MOST).await;
    assert!(!renewed.allowed);
    assert!(waiting.reserve(&bench).await.allowed);
}

async fn a_request_that_waits_counts_no_denial_for_a_ban(bench: Bench) {
    let streams = Policy::new("streams", Concurrency::new(1));
    let streams = streams.ban(Ban::after(2, 60 * SECOND)).wait_up_to(SECOND);
    let limiter = Limiter::new(bench.store.clone(), streams);
    let held = limiter.check("42").await.expect("the store replies");
    assert!(held.is_allowed());
    let (limit, ban, key) = (slots(1), Ban::after(2, 60 * SECOND), Key::from("42"));
    for _ in 0..3 {
        let charge = Charge::new("streams", &limit, &key, 1)
            .lease(LeaseId::random())
            .wait_up_to(SECOND)
            .ban(&ban);
        let reads = Operation::Ban { length: Duration::ZERO };
        let charges = [charge];
        let requests = [Operation::Reserve, reads].map(|operation| StoreRequest::new(operation, &charges));
        let response = bench.store.decide(&requests).await.expect("the store replies");
        let [reserved, bans] = response.outcomes() else {
            panic!("{response:?}")
        };
        assert!(reserved.is_waiting());
        assert_eq!(bans.states()[0].remaining, 2);
    }
}

async fn a_queue_leaves_nothing_behind(bench: Bench) {
    let limit = slots(2);
    let limits = [&limit];
    let held = of(&limits).costing(2);
    assert!(held.reserve(&bench).await.allowed);
    let places: Vec<_> = (1..=5).map(|n| of(&limits).costing(1 + n % 2)).collect();
    for place in &places {
        assert!(place.reserve(&bench).await.is_waiting());
    }
    held.end(&bench).await;
    for place in &places {
        assert!(place.reserve(&bench).await.allowed);
        place.end(&bench).await;
    }
    assert_eq!(held.remaining(&bench).await, 2);
    let state = held.send(&bench, Operation::Peek, SECOND, MOST).await.states()[0];
    assert_eq!(state.reset_after, Duration::ZERO);
}

// Limiters and layers.

fn streams(slots: u64, longest: Duration) -> Policy<()> {
    Policy::new("streams", Concurrency::new(slots)).wait_up_to(longest)
}

/// Spawns a call that holds its slots for a time after it is admitted. Returns when that was, since the start.
fn hold(limiter: &Limiter, start: Instant, length: Duration) -> JoinHandle<Option<Duration>> {
    let limiter = limiter.clone();
    tokio::spawn(async move {
        let permit = limiter.acquire("42").await.ok()?;
        let admitted = start.elapsed();
        sleep(length).await;
        drop(permit);
        Some(admitted)
    })
}

async fn settle() {
    for _ in 0..20 {
        yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_slot_is_taken_in_the_instant_in_which_it_is_free_in_the_order_of_the_calls() {
    let limiter = Limiter::new(MemoryStore::new(), streams(2, 10 * SECOND));
    let start = Instant::now();
    let mut calls = Vec::new();
    for _ in 0..6 {
        calls.push(hold(&limiter, start, Duration::from_millis(1_500)));
        settle().await;
    }
    let mut admitted = Vec::new();
    for call in calls {
        admitted.push(call.await.expect("no panic").expect("it may wait").as_millis());
    }
    assert_eq!(admitted, [0, 0, 1_500, 1_500, 3_000, 3_000]);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_in_vain_is_denied_after_its_wait_with_the_state_then() {
    let limiter = Limiter::new(MemoryStore::new(), streams(1, 10 * SECOND));
    let held = limiter.acquire("42").await.expect("a slot is free");
    assert_eq!(held.delay(), Duration::ZERO);
    let start = Instant::now();
    let denied = limiter
        .request("42")
        .max_wait(Duration::from_millis(2_500))
        .acquire()
        .await;
    let Err(AcquireError::Denied(denied)) = denied else {
        panic!("no slot is free");
    };
    assert_eq!(start.elapsed(), Duration::from_millis(2_500));
    assert_eq!(denied.decision().retry_after(), Some(SECOND));
    assert_eq!(
        denied.decision().policies().next().and_then(|policy| policy.denial()),
        Some(Denial::QuotaExceeded)
    );
    drop(held);
    assert!(
        limiter.check("42").await.expect("the store replies").is_allowed(),
        "its place is left"
    );
}

#[tokio::test(start_paused = true)]
async fn the_delay_is_the_time_that_was_waited() {
    let limiter = Limiter::new(MemoryStore::new(), streams(1, 10 * SECOND));
    let start = Instant::now();
    let first = hold(&limiter, start, Duration::from_millis(2_300));
    settle().await;
    let permit = limiter.acquire("42").await.expect("it may wait");
    assert_eq!(permit.delay(), Duration::from_millis(2_300));
    assert_eq!(permit.remaining(), 0);
    first.await.expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn slots_that_were_waited_for_longer_than_a_lease_are_held() {
    let lease = 2 * SECOND;
    let slots = Policy::new("streams", Concurrency::new(1).lease(lease)).wait_up_to(10 * SECOND);
    let limiter = Limiter::new(MemoryStore::new(), slots);
    let first = hold(&limiter, Instant::now(), 2 * lease);
    settle().await;
    let permit = limiter.acquire("42").await.expect("it may wait");
    assert_eq!(permit.delay(), 2 * lease);
    assert!(!permit.take_slots().expect("it has a slot").is_lost());
    first.await.expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_gives_its_place_to_the_next() {
    let limiter = Limiter::new(MemoryStore::new(), streams(1, 10 * SECOND));
    let held = limiter.acquire("42").await.expect("a slot is free");
    let start = Instant::now();
    let leaving = hold(&limiter, start, SECOND);
    settle().await;
    let next = hold(&limiter, start, SECOND);
    settle().await;
    leaving.abort();
    settle().await;
    advance(Duration::from_millis(200)).await;
    drop(held);
    assert_eq!(next.await.expect("no panic"), Some(Duration::from_millis(200)));
}

#[tokio::test(start_paused = true)]
async fn a_store_without_messages_admits_within_a_second() {
    let store = Counted::new(MemoryStore::new());
    let limit = Concurrency::new(1).lease(60 * SECOND); // it is not renewed meanwhile
    let limiter = Limiter::new(store.clone(), Policy::new("streams", limit).wait_up_to(10 * SECOND));
    let held = limiter.acquire("42").await.expect("a slot is free");
    let start = Instant::now();
    let calls = store.calls();
    let next = hold(&limiter, start, SECOND);
    settle().await;
    sleep(Duration::from_millis(3_500)).await;
    assert_eq!(store.calls() - calls, 4, "one at the arrival, and one each second");
    drop(held);
    assert!(next.await.expect("no panic").expect("it may wait") <= 4 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_a_log_holds_no_slot() {
    let log = Policy::new("calls", SlidingLog::new(3, 2 * SECOND)).wait_up_to(10 * SECOND);
    let limiter = Limiter::new(MemoryStore::new(), vec![log, streams(1, 10 * SECOND)]);
    let start = Instant::now();
    let mut calls = Vec::new();
    for _ in 0..5 {
        calls.push(hold(&limiter, start, Duration::from_millis(100)));
        settle().await;
    }
    let mut admitted = Vec::new();
    for call in calls {
        admitted.push(call.await.expect("no panic").expect("it may wait").as_millis());
    }
    // The third one takes the slot at 200 ms and counts from then on.
    assert_eq!(admitted, [0, 100, 200, 2_000, 2_100]);
}

#[tokio::test(start_paused = true)]
async fn a_reservation_without_a_slot_at_its_turn_is_refunded_and_denied() {
    let log = || Policy::new("calls", SlidingLog::new(1, 2 * SECOND)).wait_up_to(10 * SECOND);
    let store = MemoryStore::new();
    let limiter = Limiter::new(store.clone(), vec![log(), streams(1, 3 * SECOND)]);
    let held: tower_quota::Decision = limiter.acquire("42").await.expect("a slot is free");
    let start = Instant::now();
    assert!(matches!(limiter.acquire("42").await, Err(AcquireError::Denied(_))));
    assert_eq!(
        start.elapsed(),
        3 * SECOND,
        "two seconds for its turn, and one for a slot"
    );
    let calls = Limiter::new(store, log());
    assert_eq!(calls.peek("42").await.expect("the store replies").remaining(), 1);
    drop(held);

    // The slot is free at the turn.
    let first = limiter.acquire("42").await.expect("all is free");
    drop(first);
    let permit = limiter.acquire("42").await.expect("it may wait");
    assert_eq!(permit.delay(), 2 * SECOND);
    assert!(!limiter.check("42").await.expect("the store replies").is_allowed());
    let names: Vec<_> = permit
        .policies()
        .map(|policy| (policy.name(), policy.remaining()))
        .collect();
    assert_eq!(names, [("calls", 0), ("streams", 0)]);
}

#[tokio::test(start_paused = true)]
async fn a_file_sets_how_long_and_how_many_wait_for_slots() {
    let file = "[policies.streams]\nlimit = \"concurrency 1\"\nwait = \"3s\"\nmax-waiting = 1\n";
    let policies = Policies::from_toml(file).expect("a good file");
    let policy = policies.unkeyed("streams").expect("a policy");
    let limiter = Limiter::new(MemoryStore::new(), policy);
    let held = limiter.acquire("42").await.expect("a slot is free");
    let start = Instant::now();
    let waiting = hold(&limiter, start, SECOND);
    settle().await;
    assert!(limiter.acquire("42").await.is_err(), "one waits");
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(waiting.await.expect("no panic"), None);
    assert_eq!(start.elapsed(), 3 * SECOND);
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn calls_wait_in_the_process_while_the_store_fails() {
    let limiter = Limiter::new(Broken::default(), streams(1, 10 * SECOND));
    let start = Instant::now();
    let first = hold(&limiter, start, 2 * SECOND);
    settle().await;
    let second = hold(&limiter, start, 2 * SECOND);
    settle().await;
    let third = hold(&limiter, start, 2 * SECOND);
    let mut admitted = Vec::new();
    for call in [first, second, third] {
        admitted.push(call.await.expect("no panic").expect("it may wait").as_secs());
    }
    assert_eq!(admitted, [0, 2, 4]);
}

#[tokio::test(start_paused = true)]
async fn a_layer_queues_requests_for_slots_and_needs_no_wait_of_policies_with_other_keys() {
    let calls = Policy::new("calls", TokenBucket::per_second(100)).key(key::constant("user"));
    let streams = streams(1, 3 * SECOND).key(key::constant("model"));
    let service = RateLimitLayer::new(MemoryStore::new(), [calls, streams]).layer(service_fn(
        async |_: Request<Empty<bytes::Bytes>>| {
            sleep(2 * SECOND).await;
            Ok::<_, Infallible>(Response::new(Empty::<bytes::Bytes>::new()))
        },
    ));
    let start = Instant::now();
    let call = async || {
        let response = service
            .clone()
            .oneshot(Request::new(Empty::new()))
            .await
            .expect("infallible");
        (response.status(), start.elapsed().as_secs())
    };
    let (first, second, third) = tokio::join!(call(), call(), call());
    assert_eq!(first, (StatusCode::OK, 2));
    assert_eq!(second, (StatusCode::OK, 4));
    assert_eq!(third, (StatusCode::TOO_MANY_REQUESTS, 3));
}
