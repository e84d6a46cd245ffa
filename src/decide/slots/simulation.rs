//! Slots and their keeper in random schedules of their tasks.
//!
//! All timeouts fire at once, and the lease is due from the start, so that the keeper renews it all the time.

use std::sync::{Arc, Mutex, PoisonError};

use shuttle::{
    Config, MaxSteps, Runner,
    future::{block_on, spawn, yield_now},
    scheduler::RandomScheduler,
};
use tokio::time::{Instant, clear_triggers, trigger_timeouts};

use super::{Held, Keeper, Lease, Slots};
use crate::{
    Concurrency, Key, Limit, MemoryStore,
    observe::PolicyMetrics,
    store::{Charge, LeaseId, Operation, Outstanding, OwedKind, Store, StoreFuture, StoreRequest},
};

/// A store that decides some time after the request was sent, in the order of the requests.
#[derive(Default)]
struct SlowStore {
    counts: MemoryStore,
    /// The operations in the order in which they were decided.
    decided: Mutex<Vec<(Operation, LeaseId)>>,
    order: Arc<tokio::sync::Mutex<()>>,
}

fn limit() -> Limit {
    Concurrency::new(2).into()
}

impl SlowStore {
    fn decide_now(&self, operation: Operation, lease: LeaseId) -> StoreFuture {
        self.decided
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((operation, lease));
        let (limit, key) = (limit(), Key::from("42"));
        let charges = [Charge::new("exports", &limit, &key, 1).lease(lease)];
        self.counts.decide(&[StoreRequest::new(operation, &charges)])
    }

    fn count(&self, operation: Operation, lease: LeaseId) -> usize {
        let decided = self.decided.lock().unwrap_or_else(PoisonError::into_inner);
        decided.iter().filter(|entry| **entry == (operation, lease)).count()
    }
}

/// The store as the leases have it.
struct Shared(Arc<SlowStore>);

impl Store for Shared {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let [request] = requests else {
            panic!("one lease is sent at a time")
        };
        let (store, operation) = (self.0.clone(), request.operation());
        let lease = request
            .charges()
            .next()
            .and_then(|charge| charge.lease)
            .expect("a lease");
        let sent = spawn(async move {
            yield_now().await;
            store.decide_now(operation, lease).await
        });
        StoreFuture::pending(async move { sent.await.expect("the store does not panic") })
    }
}

fn explore(schedule: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.stack_size = 0x4_0000;
    config.silence_warnings = true; // of weak orderings, which loom explores
    config.max_steps = MaxSteps::FailAfter(100_000);
    Runner::new(RandomScheduler::new_from_seed(7, 300), config).run(move || {
        clear_triggers();
        trigger_timeouts(|_| true);
        schedule();
    });
}

/// Takes a slot with a lease that is due for a renewal.
fn take(store: &Arc<SlowStore>, keeper: &Arc<Keeper>) -> (Slots, LeaseId) {
    let lease = LeaseId::random();
    let taken = store.decide_now(Operation::Check, lease).try_ready();
    assert!(taken.is_ok_and(|taken| taken.is_ok_and(|response| response.outcomes()[0].allowed)));

    let made_at = Instant::now() - limit().lease_length().expect("a lease") / 2;
    let charge = Charge::new("exports", &limit(), &Key::from("42"), 1).lease(lease);
    let owed = Arc::<Outstanding>::default().owe(OwedKind::Release);
    let held = Lease::new(Arc::new(Shared(store.clone())), charge, made_at, owed).expect("a lease");
    let mut slots = Slots::default();
    let counted = PolicyMetrics::new("exports".into(), 0).hold(1);
    slots.0.push(Held::new(held, keeper, counted));
    (slots, lease)
}

/// Waits until no lease and no operation is left, and verifies that all slots are free.
async fn verify_free(store: &Arc<SlowStore>) {
    while Arc::strong_count(store) > 1 {
        yield_now().await;
    }
    let (limit, key) = (limit(), Key::from("42"));
    let charges = [Charge::new("exports", &limit, &key, 1)];
    let peek = store
        .counts
        .decide(&[StoreRequest::new(Operation::Peek, &charges)])
        .await;
    assert_eq!(
        peek.expect("the store does not fail").outcomes()[0].states[0].remaining,
        2
    );
}

#[test]
fn slots_that_are_released_during_a_renewal_stay_free() {
    explore(|| {
        block_on(async {
            let (store, keeper) = (Arc::default(), Arc::default());
            let (slots, lease) = take(&store, &keeper);
            for _ in 0..5 {
                yield_now().await;
            }
            drop(slots);
            verify_free(&store).await;

            let decided = store.decided.lock().unwrap_or_else(PoisonError::into_inner);
            assert_eq!(decided.last(), Some(&(Operation::EndLease, lease)), "{decided:?}");
        });
    });
}

#[test]
fn a_lease_that_is_taken_while_the_task_of_the_keeper_ends_is_renewed() {
    explore(|| {
        block_on(async {
            let (store, keeper) = (Arc::default(), Arc::default());
            let (first, _) = take(&store, &keeper);
            let second = spawn({
                let (store, keeper) = (store.clone(), keeper.clone());
                async move {
                    let (slots, lease) = take(&store, &keeper);
                    while store.count(Operation::RenewLease, lease) == 0 {
                        yield_now().await;
                    }
                    drop(slots);
                }
            });
            drop(first);
            second.await.expect("the lease is renewed");
            verify_free(&store).await;
        });
    });
}
