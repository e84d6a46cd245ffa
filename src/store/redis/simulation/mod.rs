//! Deterministic simulation of the way to Redis: queue, deadlines, breaker, deny cache and refunds across slots.
//!
//! A schedule is made from a seed: callers that send, wait late and leave, a network with faults, a server whose clock is set,
//! and runtimes that end or stand still. It runs in virtual time, with the real code down to the client, and what happened is
//! held against what is promised. A schedule that fails prints its seed; `TOWER_QUOTA_SEED` replays it.

mod history;
mod network;
pub(super) mod runtime;
mod schedule;

pub(super) use self::network::Network;

use std::{panic, time::Duration};

use self::{
    network::Faults,
    schedule::{Plan, run},
};

/// How many schedules each test runs; `TOWER_QUOTA_SCHEDULES` is another number.
fn schedules() -> u64 {
    let given = std::env::var("TOWER_QUOTA_SCHEDULES").ok();
    given.map_or(4_000, |number| number.parse().expect("a number of schedules"))
}

/// Runs schedules of a kind, each from a seed of its own.
fn simulate(plan: impl Fn(u64) -> Plan) {
    if let Ok(seed) = std::env::var("TOWER_QUOTA_SEED") {
        let seed = seed.parse().expect("a seed");
        return run(seed, &plan(seed));
    }
    for seed in 0..schedules() {
        let plan = plan(seed);
        let outcome = panic::catch_unwind(panic::AssertUnwindSafe(|| run(seed, &plan)));
        if let Err(panic) = outcome {
            eprintln!("TOWER_QUOTA_SEED={seed} replays this schedule: {plan:#?}");
            panic::resume_unwind(panic);
        }
    }
}

#[test]
fn a_good_network_decides_each_request_once_and_in_order() {
    simulate(|_| Plan::default());
}

#[test]
fn a_network_with_faults_charges_nothing_twice_and_leaves_no_caller_without_an_answer() {
    simulate(|seed| {
        // Each schedule has some of the faults, so that one does not hide another.
        let some = |bit: u32, chance: u32| if seed >> bit & 1 == 1 { chance } else { 0 };
        Plan {
            faults: Faults {
                request_lost: some(0, 40),
                reply_lost: some(1, 40),
                cut_before: some(2, 60),
                cut_after: some(3, 60),
                error: some(4, 60),
                try_again: some(5, 150),
                request_error: some(6, 100),
                flush: some(7, 100),
                clock_step: 0,
                slow: some(8, 80),
            },
            ..Plan::default()
        }
    });
}

#[test]
fn a_server_that_is_silent_for_a_while_is_found_again() {
    simulate(|_| Plan {
        faults: Faults {
            request_lost: 1_000,
            ..Faults::default()
        },
        ..Plan::default()
    });
}

#[test]
fn runtimes_that_end_or_stand_still_hold_up_no_caller_of_another() {
    simulate(|seed| Plan {
        runtimes: 3,
        endings: 4,
        stalls: if seed % 2 == 0 { 0 } else { 4 },
        faults: Faults {
            request_lost: if seed % 5 == 0 { 60 } else { 0 },
            ..Faults::default()
        },
        ..Plan::default()
    });
}

#[test]
fn a_clock_that_is_set_loses_no_answer() {
    simulate(|_| Plan {
        faults: Faults {
            clock_step: 100,
            ..Faults::default()
        },
        ..Plan::default()
    });
}

#[test]
fn a_reset_is_seen_by_the_deny_cache() {
    simulate(|_| Plan {
        resets: true,
        ..Plan::default()
    });
}

#[test]
fn a_cluster_refunds_what_was_charged_before_a_denial() {
    simulate(|seed| Plan {
        clustered: true,
        runtimes: 2,
        faults: Faults {
            try_again: if seed % 2 == 0 { 0 } else { 100 },
            slow: if seed % 5 == 0 { 60 } else { 0 },
            ..Faults::default()
        },
        ..Plan::default()
    });
}

/// The deadline of all simulated stores.
const DEADLINE: Duration = Duration::from_millis(100);
