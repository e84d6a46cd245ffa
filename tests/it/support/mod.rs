//! What the tests share.

mod algorithms;
mod bench;
mod clock;
mod cluster;
mod connected;
mod each_store;
mod faketime;
mod frames;
mod gaps;
mod http;
mod log;
mod lua54;
mod packed;
mod pointer;
mod proxy;
mod redis;
mod sentinel;
mod stores;
mod traffic;
mod usage;
mod worker;

use std::{
    env,
    fmt::Debug,
    pin::pin,
    process::Command,
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};
use tokio::time::{MissedTickBehavior, interval_at};

/// A test of a store, through each client of Redis.
macro_rules! each_client {
    ($($(#[$attribute:meta])* $test:ident)*) => {
        mod on_fred {$(
            #[tokio::test]
            $(#[$attribute])*
            async fn $test() {
                super::$test(tower_quota::ClientLibrary::Fred).await;
            }
        )*}

        mod on_redis_rs {$(
            #[tokio::test]
            $(#[$attribute])*
            async fn $test() {
                super::$test(tower_quota::ClientLibrary::RedisRs).await;
            }
        )*}
    };
}
pub(crate) use each_client;

pub(crate) use self::{
    algorithms::{Algorithm, BERLIN},
    bench::Bench,
    clock::Clock,
    cluster::Cluster,
    connected::{PATIENCE, connected, less_patient, patient},
    each_store::{Unclocked, each_store},
    faketime::Faketime,
    frames::frames,
    gaps::Gaps,
    http::{Browser, Received, get, get_from, send, serve, serve_by_hyper},
    log::Log,
    lua54::Lua54,
    packed::packed,
    pointer::Pointer,
    proxy::Proxy,
    redis::{Process, Redis, free_port},
    sentinel::{Sentinel, lone_sentinel},
    stores::{Broken, Counted, Fixed, Flaky, Gated, Later, Wrapped},
    traffic::{Tally, Traffic},
    usage::{Usage, limits},
    worker::{Worker, work},
};

use tower_quota::{
    Key, Limit,
    store::{Charge, Operation, Outcome, Store, StoreError, StoreRequest},
};

/// Sends one operation on one key to a store, and panics if the store fails.
pub(crate) async fn decide(store: &impl Store, operation: Operation, limit: &Limit, key: &str, cost: u64) -> Outcome {
    try_decide(store, operation, limit, key, cost)
        .await
        .expect("the store replies")
}

/// Sends one operation on one key to a store.
pub(crate) async fn try_decide(
    store: &impl Store,
    operation: Operation,
    limit: &Limit,
    key: &str,
    cost: u64,
) -> Result<Outcome, StoreError> {
    let key = Key::from(key);
    let charges = [Charge::new("test", limit, &key, cost)];
    let answer = store.decide(&[StoreRequest::new(operation, &charges)]).await?;
    Ok(answer.outcomes().first().cloned().expect("one outcome for one request"))
}

/// The output of a future, and how long it took in ticks of [`TICK`] of this runtime.
///
/// The ticks that the runtime misses, since the machine is busy with something else, do not count.
pub(crate) async fn timed<F: Future>(future: F) -> (F::Output, Duration) {
    let mut future = pin!(future);
    let mut ticks = interval_at(tokio::time::Instant::now() + TICK, TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut passed = Duration::ZERO;
    loop {
        tokio::select! {
            biased;
            output = &mut future => return (output, passed),
            _ = ticks.tick() => passed += TICK,
        }
    }
}

/// The key in Redis of a policy, a limit and a key.
pub(crate) fn redis_key(policy: &str, limit: &Limit, key: &Key) -> String {
    let charge = Charge::new(policy, limit, key, 1);
    format!("quota:1:{}:{policy}:{{{key}}}", charge.shape_text())
}

/// cargo, without the variables that it sets for the program of a test: build scripts of dependencies run again, and all that
/// depends on them is built again, if one of these changes.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env!("CARGO"));
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

/// This test binary, to be started to run this test only.
pub(crate) fn this_binary(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("this binary"));
    command.args(["--exact", test, "--nocapture"]);
    command
}

/// The time that this thread has had a processor.
pub(crate) fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The tick of [`timed`].
const TICK: Duration = Duration::from_millis(10);

/// Waits until the condition holds, or is `Ok`, and panics if that takes longer than [`PATIENCE`].
pub(crate) async fn eventually<C: Condition>(what: &str, mut condition: impl AsyncFnMut() -> C) {
    let started = Instant::now();
    while let Err(why) = condition().await.holds() {
        assert!(
            started.elapsed() < PATIENCE,
            "after {PATIENCE:?} still not: {what}{why}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What [`eventually`] waits for; an error is part of its message.
pub(crate) trait Condition {
    fn holds(self) -> Result<(), String>;
}

impl Condition for bool {
    fn holds(self) -> Result<(), String> {
        if self { Ok(()) } else { Err(String::new()) }
    }
}

impl<T, E: Debug> Condition for Result<T, E> {
    fn holds(self) -> Result<(), String> {
        self.map(drop).map_err(|error| format!(": {error:?}"))
    }
}
