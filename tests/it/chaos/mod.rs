//! Several processes check without pause during a fault, and the replies must agree with what Redis holds in the end.
//!
//! The tests give each fault a few seconds. To give it longer, and print the tables:
//!
//! ```sh
//! CHAOS_SECONDS=8 cargo test --all-features --test it -- --ignored --nocapture --test-threads 1 chaos::the_table
//! ```

mod ahead;
mod attack;
mod callers;
mod fault;
mod held;
mod history;
mod modes;
mod process;
mod run;

use std::{env, time::Duration};

use tower_quota::ClientLibrary;

use self::{
    fault::Fault,
    run::{Row, Setup, run},
};

const ALONE: Setup = Setup {
    library: ClientLibrary::Fred,
    together: false,
};
const ON_FRED: Setup = Setup {
    library: ClientLibrary::Fred,
    together: true,
};
const ON_REDIS_RS: Setup = Setup {
    library: ClientLibrary::RedisRs,
    together: true,
};

/// Runs one fault briefly and verifies the result.
async fn holds(fault: Fault, setup: Setup) {
    let row = run(fault, setup, Duration::from_secs(4)).await;
    println!("{row}");
    row.verify();
}

macro_rules! each_fault {
    ($run:ident; $($(#[$attribute:meta])* $test:ident: $fault:ident, $setup:ident;)*) => {$(
        $(#[$attribute])*
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            $run(Fault::$fault, $setup).await;
        }
    )*};
}

each_fault! {
    holds;
    killed_with_all_in_its_file: Kill, ON_FRED;
    killed_with_nothing_in_a_file: KillUnsaved, ON_REDIS_RS;
    stopped: Stop, ON_FRED;
    restarted: Restart, ON_REDIS_RS;
    failed_over_by_sentinel: SentinelFailover, ON_FRED;
    failed_over_in_a_cluster: ClusterFailover, ON_REDIS_RS;
    resharded: Reshard, ON_REDIS_RS;
    scripts_flushed: ScriptFlush, ON_FRED;
    partitioned: Partition, ON_FRED;
    slow: Latency, ON_FRED;
    answers_lost: Cuts, ON_REDIS_RS;
    answers_lost_without_group_commit: Cuts, ALONE;
    connections_killed: ClientKill, ON_FRED;
    #[ignore = "needs faketime: `.ci/test`"]
    an_hour_forward: HourForward, ON_FRED;
    #[ignore = "needs faketime: `.ci/test`"]
    an_hour_back: HourBack, ON_FRED;
    out_of_memory: OutOfMemory, ON_FRED;
    busy_with_a_script: Busy, ON_FRED;
}

/// Runs one fault briefly with each failure mode, and asserts what the modes promise.
async fn admits_what_the_modes_promise(fault: Fault, setup: Setup) {
    let row = modes::run(fault, setup, Duration::from_secs(1)).await;
    println!("{row}");
    row.verify();
}

each_fault! {
    admits_what_the_modes_promise;
    modes_while_killed: Kill, ON_REDIS_RS;
    modes_while_stopped: Stop, ON_FRED;
    modes_while_failed_over_by_sentinel: SentinelFailover, ON_FRED;
    modes_while_failed_over_in_a_cluster: ClusterFailover, ON_REDIS_RS;
    modes_while_resharded: Reshard, ON_REDIS_RS;
    modes_while_scripts_are_flushed: ScriptFlush, ON_FRED;
    modes_while_partitioned: Partition, ON_FRED;
    modes_while_slow: Latency, ON_FRED;
    modes_while_answers_are_lost: Cuts, ALONE;
    modes_while_connections_are_killed: ClientKill, ON_FRED;
    #[ignore = "needs faketime: `.ci/test`"]
    modes_while_an_hour_forward: HourForward, ON_FRED;
    modes_while_out_of_memory: OutOfMemory, ON_FRED;
    modes_while_busy: Busy, ON_FRED;
}

/// Runs one fault briefly while requests hold slots and wait.
async fn keeps_slots_and_turns(fault: Fault, setup: Setup) {
    let row = held::run(fault, setup, Duration::from_secs(2)).await;
    println!("{row}");
    row.verify();
}

each_fault! {
    keeps_slots_and_turns;
    slots_and_turns_while_killed: Kill, ON_FRED;
    slots_and_turns_while_killed_with_nothing_in_a_file: KillUnsaved, ON_REDIS_RS;
    slots_and_turns_while_stopped: Stop, ON_REDIS_RS;
    slots_and_turns_while_failed_over_by_sentinel: SentinelFailover, ON_FRED;
    slots_and_turns_while_failed_over_in_a_cluster: ClusterFailover, ON_REDIS_RS;
    slots_and_turns_while_resharded: Reshard, ON_REDIS_RS;
    slots_and_turns_while_partitioned: Partition, ON_FRED;
    slots_and_turns_while_slow: Latency, ON_FRED;
    slots_and_turns_while_answers_are_lost: Cuts, ALONE;
    slots_and_turns_while_connections_are_killed: ClientKill, ON_REDIS_RS;
    #[ignore = "needs faketime: `.ci/test`"]
    slots_and_turns_while_an_hour_forward: HourForward, ON_FRED;
    #[ignore = "needs faketime: `.ci/test`"]
    slots_and_turns_while_an_hour_back: HourBack, ON_FRED;
}

/// Runs one fault briefly while requests use units that were taken ahead.
async fn keeps_the_limit(fault: Fault, setup: Setup) {
    let row = ahead::run(fault, setup, Duration::from_secs(1)).await;
    println!("{row}");
    row.verify();
}

each_fault! {
    keeps_the_limit;
    units_ahead_while_killed: Kill, ON_FRED;
    units_ahead_while_stopped: Stop, ON_REDIS_RS;
    units_ahead_while_failed_over_in_a_cluster: ClusterFailover, ON_REDIS_RS;
    units_ahead_while_resharded: Reshard, ON_REDIS_RS;
    units_ahead_while_partitioned: Partition, ON_FRED;
    units_ahead_while_slow: Latency, ON_REDIS_RS;
    units_ahead_while_answers_are_lost: Cuts, ON_FRED;
    units_ahead_while_connections_are_killed: ClientKill, ON_FRED;
    #[ignore = "needs faketime: `.ci/test`"]
    units_ahead_while_an_hour_back: HourBack, ON_FRED;
}

/// How long each fault is given in the tables.
fn time() -> Duration {
    let seconds = env::var("CHAOS_SECONDS").map_or(8, |seconds| seconds.parse().expect("a number of seconds"));
    Duration::from_secs(seconds)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes; `CHAOS_SECONDS` is how long each fault is given"]
async fn the_tables_of_all_failure_modes() {
    for (title, setup) in [("Through fred", ON_FRED), ("Through redis-rs", ON_REDIS_RS)] {
        println!("\n{title}:\n\n{}", modes::Row::HEAD);
        for fault in Fault::ALL.into_iter().filter(|fault| fault.runs_on(setup.library)) {
            let row = modes::run(fault, setup, time() / 2).await;
            println!("{row}");
            row.verify();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes; `CHAOS_SECONDS` is how long each fault is given"]
async fn the_table_of_slots_and_turns() {
    println!("\n{}", held::Row::HEAD);
    for fault in Fault::ALL {
        let setup = if fault.runs_on(ClientLibrary::Fred) {
            ON_FRED
        } else {
            ON_REDIS_RS
        };
        let row = held::run(fault, setup, time() / 2).await;
        println!("{row}");
        row.verify();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes; `CHAOS_SECONDS` is how long each fault is given"]
async fn the_table_of_units_ahead() {
    println!("\n{}", ahead::Row::HEAD);
    for fault in Fault::ALL {
        let setup = if fault.runs_on(ClientLibrary::Fred) {
            ON_FRED
        } else {
            ON_REDIS_RS
        };
        let row = ahead::run(fault, setup, time() / 2).await;
        println!("{row}");
        row.verify();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes; `CHAOS_SECONDS` is how long each fault is given"]
async fn the_tables_of_all_faults() {
    for (title, setup) in [
        ("With group commit and deny cache, through fred", ON_FRED),
        ("With both, through redis-rs", ON_REDIS_RS),
        ("Without either, through fred", ALONE),
    ] {
        println!("\n{title}:\n\n{}", Row::HEAD);
        for fault in Fault::ALL.into_iter().filter(|fault| fault.runs_on(setup.library)) {
            let row = run(fault, setup, time()).await;
            println!("{row}");
            row.verify();
        }
    }
}

#[test]
fn the_docs_have_every_fault() {
    let docs = include_str!("../../../docs/faults.md");
    for head in [Row::HEAD, modes::Row::HEAD, held::Row::HEAD, ahead::Row::HEAD] {
        let rows: String = docs
            .split(head)
            .skip(1)
            .filter_map(|table| table.split("\n\n").next())
            .collect();
        for fault in Fault::ALL {
            assert!(
                rows.contains(&format!("| {fault} |")),
                "{fault} is not in a table under {head}"
            );
        }
    }
}

#[tokio::test]
async fn a_caller_checks_until_its_input_is_closed() {
    callers::call().await;
}

#[tokio::test]
async fn a_process_checks_with_each_failure_mode() {
    modes::call().await;
}
