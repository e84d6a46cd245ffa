//! Deterministic simulation of commit queues, deadlines, breaker, deny cache, settlements, refunds across slots, and leases.
//!
//! A schedule is made from a seed: callers that send, wait late and leave, a network with faults, a server with a clock that is
//! set, and runtimes that end or stall. It runs in virtual time with the code of the store down to the client, and the promises
//! of the store are verified in what happened. A schedule that fails prints its seed; `TOWER_QUOTA_SEED` replays it.

#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "the server and the callers here have a few of the operations"
)]

mod arguments;
mod caller;
pub(super) mod faults;
pub(super) mod history;
pub(super) mod network;
mod plan;
pub(super) mod runtime;
mod schedule;
mod slots;

use std::{iter, panic};

use self::{faults::Faults, plan::Plan, schedule::run};

/// The number of schedules of each test; `TOWER_QUOTA_SCHEDULES` replaces it.
fn schedules() -> u64 {
    let given = std::env::var("TOWER_QUOTA_SCHEDULES").ok();
    given.map_or(200, |number| number.parse().expect("a number of schedules"))
}

/// Runs schedules of one plan, each from a seed of its own.
fn simulate(plan: impl Fn(u64) -> Plan) {
    simulate_each(1, plan);
}

/// The same of every so many seeds.
fn simulate_each(step: usize, plan: impl Fn(u64) -> Plan) {
    seeds(step, |seed| {
        let plan = plan(seed);
        let outcome = panic::catch_unwind(panic::AssertUnwindSafe(|| run(seed, &plan)));
        if let Err(panic) = outcome {
            eprintln!("TOWER_QUOTA_SEED={seed} replays this schedule: {plan:#?}");
            panic::resume_unwind(panic);
        }
    });
}

/// Every so many seeds of the schedules of a test, or the one of `TOWER_QUOTA_SEED`.
pub(super) fn seeds(step: usize, run: impl FnMut(u64)) {
    if let Ok(seed) = std::env::var("TOWER_QUOTA_SEED") {
        return iter::once(seed.parse().expect("a seed")).for_each(run);
    }
    let first = u64::from(fastrand::u32(..));
    (first..first + schedules()).step_by(step).for_each(run);
}

#[test]
fn a_good_network_decides_each_request_once_and_in_order() {
    simulate(|_| Plan::default());
}

#[test]
fn a_network_with_faults_charges_nothing_twice_and_each_caller_has_a_response() {
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
                moved: 0,
                request_error: some(6, 100),
                flush: some(7, 100),
                clock_step: 0,
                slow: some(8, 80),
                duplicate: 0,
            },
            ..Plan::default()
        }
    });
}

#[test]
fn checks_succeed_again_after_a_server_did_not_reply() {
    simulate(|_| Plan {
        faults: Faults {
            request_lost: 1_000,
            ..Faults::default()
        },
        ..Plan::default()
    });
}

#[test]
fn runtimes_that_end_or_stall_delay_no_caller_of_another() {
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
fn a_clock_that_is_set_loses_no_response() {
    simulate(|_| Plan {
        faults: Faults {
            clock_step: 100,
            ..Faults::default()
        },
        ..Plan::default()
    });
}

#[test]
fn a_reset_invalidates_the_deny_cache() {
    simulate(|_| Plan {
        resets: true,
        ..Plan::default()
    });
}

#[test]
fn a_cluster_refunds_the_charges_before_a_denial() {
    simulate(|seed| Plan {
        clustered: true,
        reaches_several_slots: seed % 3 == 0,
        runtimes: 2,
        faults: Faults {
            try_again: if seed % 2 == 0 { 0 } else { 100 },
            slow: if seed % 5 == 0 { 60 } else { 0 },
            ..Faults::default()
        },
        ..Plan::default()
    });
}

#[test]
fn a_cluster_whose_slots_move_decides_each_request_once() {
    simulate(|seed| Plan {
        clustered: true,
        reaches_several_slots: true,
        runtimes: 2,
        faults: Faults {
            moved: 300,
            try_again: if seed % 2 == 0 { 0 } else { 100 },
            reply_lost: if seed % 3 == 0 { 20 } else { 0 },
            cut_before: if seed % 3 == 0 { 20 } else { 0 },
            ..Faults::default()
        },
        ..Plan::default()
    });
}

#[test]
fn processes_on_a_good_network_keep_their_slots() {
    simulate_each(5, |_| Plan {
        processes: 3,
        ..Plan::default()
    });
}

#[test]
fn processes_on_a_network_with_faults_hold_no_more_slots_than_there_are() {
    simulate_each(5, |seed| {
        let some = |bit: u32, chance: u32| if seed >> bit & 1 == 1 { chance } else { 0 };
        Plan {
            processes: 3,
            runtimes: 3,
            endings: if seed % 3 == 0 { 2 } else { 0 },
            stalls: if seed % 3 == 1 { 2 } else { 0 },
            faults: Faults {
                request_lost: some(0, 100),
                reply_lost: some(1, 100),
                cut_before: some(2, 200),
                cut_after: some(3, 100),
                error: some(4, 100),
                flush: some(5, 100),
                slow: some(6, 200),
                duplicate: some(7, 300),
                ..Faults::default()
            },
            ..Plan::default()
        }
    });
}
