//! Commit queues, and what applications drop, in random schedules of their tasks.
//!
//! No timeout fires: a request that is not sent, or a response that is not received, is a deadlock.

use std::{future::poll_fn, pin::Pin, sync::Arc, task::Poll, time::Duration};

use shuttle::{
    Config, MaxSteps, Runner,
    future::{block_on, spawn, yield_now},
    scheduler::RandomScheduler,
};
use tokio::time::{clear_triggers, trigger_timeouts};

use super::{
    deny_cache::DenyCache,
    key_format::KeyFormat,
    queues::{BatchLimits, CommitQueues},
    simulation::network::{Network, simulated_backend},
    store::RedisStore,
};
use crate::{
    Concurrency, FailureMode, Key, Limit, Limiter, Policy, SlidingLog,
    decide::Keeper,
    store::{Charge, Operation, Store, StoreFuture, StoreRequest},
};

/// At most two calls in flight, so that requests wait in the queue.
const LIMITS: BatchLimits = BatchLimits {
    max_calls: 2,
    low_load: 1,
    ..BatchLimits::GROUP_COMMIT
};

/// Runs a test in random schedules, each with a store that has just loaded its script.
fn explore<F: Future<Output = ()> + 'static>(test: fn(RedisStore, Network) -> F) {
    let mut config = Config::new();
    config.stack_size = 0x4_0000;
    config.silence_warnings = true; // of weak orderings, which loom explores
    config.max_steps = MaxSteps::FailAfter(100_000);
    Runner::new(RandomScheduler::new_from_seed(7, 300), config).run(move || {
        clear_triggers();
        block_on(async move {
            let network = Network::new(7, false);
            let mut backend = simulated_backend(network.clone());
            (backend.deny_cache, backend.limits) = (Some(DenyCache::new()), LIMITS);
            let store = RedisStore::new(CommitQueues::new(backend));
            check(&store, "first").await.expect("the network is good");
            test(store.clone(), network).await;
            while !store.queues.are_idle() {
                yield_now().await;
            }
        });
    });
}

fn log() -> SlidingLog {
    SlidingLog::per_hour(1_000)
}

/// With a lease that does not expire meanwhile.
fn slots() -> Concurrency {
    Concurrency::new(2).lease(Duration::from_secs(3_600))
}

/// The key in Redis of the only policy of these tests.
fn redis_key(limit: impl Into<Limit>, key: &str) -> String {
    let (limit, key) = (limit.into(), Key::from(key));
    let charge = Charge::new("p", &limit, &key, 1);
    let key = KeyFormat::new("quota", None).of_count(&charge).concat();
    String::from_utf8(key).expect("text")
}

fn check(store: &RedisStore, key: &str) -> StoreFuture {
    let (limit, key) = (Limit::from(log()), Key::from(key));
    let charges = [Charge::new("p", &limit, &key, 1)];
    store.decide(&[StoreRequest::new(Operation::Check, &charges)])
}

/// Polls a future at most this number of times, and drops it. Returns whether it was ready.
async fn leave<F: Future>(future: F, polls: usize) -> bool {
    let mut future = Box::pin(future);
    for _ in 0..polls {
        let polled = poll_fn(|cx| Poll::Ready(Pin::new(&mut future).poll(cx))).await;
        if polled.is_ready() {
            return true;
        }
        yield_now().await;
    }
    false
}

#[test]
fn each_request_is_sent_once_and_has_a_response_whichever_callers_leave() {
    explore(|store, network| async move {
        let waiting = [0, 1, 2].map(|number| {
            let store = store.clone();
            spawn(async move { check(&store, &format!("waits-{number}")).await })
        });
        let leaving = [1, 2].map(|polls| {
            let store = store.clone();
            spawn(async move { leave(check(&store, &format!("leaves-{polls}")), polls).await })
        });
        for caller in waiting {
            let response = caller.await.expect("no panic").expect("the network is good");
            assert!(response.outcomes()[0].allowed);
        }
        for caller in leaving {
            caller.await.expect("no panic");
        }
        while !store.queues.are_idle() {
            yield_now().await;
        }
        for number in 0..3 {
            assert_eq!(network.charged(&redis_key(log(), &format!("waits-{number}"))).len(), 1);
        }
        for polls in 1..3 {
            assert!(network.charged(&redis_key(log(), &format!("leaves-{polls}"))).len() <= 1);
        }
    });
}

fn limiter(store: &RedisStore, limit: impl Into<Limit>) -> Limiter {
    let policy = Policy::new("p", limit.into()).failure_mode(FailureMode::Closed);
    Limiter::new(store.clone(), policy)
}

#[test]
fn a_settlement_continues_without_its_caller() {
    explore(|store, network| async move {
        let callers = [0, 1].map(|polls| {
            let limiter = limiter(&store, log());
            spawn(async move {
                let decision = limiter.request(format!("{polls}")).cost(10).check().await;
                let receipt = decision.expect("the network is good").take_receipt();
                assert!(!receipt.is_empty(), "it is admitted");
                leave(receipt.settle(4), 1 + polls).await;
            })
        });
        for caller in callers {
            caller.await.expect("no panic");
        }
        for key in ["0", "1"] {
            while network.refunded(&redis_key(log(), key)) < 6 {
                yield_now().await;
            }
        }
    });
}

#[test]
fn a_request_that_waits_is_refunded_if_its_caller_leaves() {
    explore(|store, network| async move {
        let callers = [1, 2, 9].map(|polls| {
            let limiter = limiter(&store, SlidingLog::per_hour(2));
            spawn(async move {
                let acquire = limiter.request("42").wait_up_to(Duration::from_secs(7_200)).acquire();
                leave(acquire.into_future(), polls).await
            })
        });
        let mut granted = 0;
        for caller in callers {
            granted += u64::from(caller.await.expect("no panic"));
        }
        let key = &redis_key(log(), "42");
        while !store.queues.are_idle() || network.charged(key).len() as u64 - network.refunded(key) != granted {
            yield_now().await;
        }
    });
}

#[test]
fn slots_are_free_after_all_callers_left() {
    explore(|store, network| async move {
        let callers = [1, 2, 3, 9].map(|polls| {
            let limiter = limiter(&store, slots());
            spawn(async move {
                let hold = async {
                    let decision = limiter.check("42").await.expect("the network is good");
                    yield_now().await;
                    drop(decision);
                };
                leave(hold, polls).await;
            })
        });
        for caller in callers {
            caller.await.expect("no panic");
        }
        while network.room(&redis_key(slots(), "42"), &slots().into()) < 2 {
            yield_now().await;
        }
        // The task of the keeper ends once it looks.
        let keeper = Keeper::of(&store);
        trigger_timeouts(|_| true);
        while Arc::strong_count(&keeper) > 1 {
            yield_now().await;
        }
    });
}
