//! Shared code of the benchmarks: traffic, load generators, a Redis server, an allocator that counts, tables.

pub mod allocations;
mod figures;
mod http;
mod options;
#[path = "../../../tests/it/support/redis.rs"]
#[allow(dead_code, unreachable_pub)]
mod redis;
mod row;
mod server;
mod subject;
mod table;
mod traffic;

pub use self::{
    figures::{Latencies, median, ratio},
    http::{HTTP, HTTP_P50, HTTP_P99, over_http},
    options::Options,
    row::Row,
    server::{Cluster, Commands, Server, pin},
    subject::{Bare, Load, Subject},
    table::{Table, count, decimal, targets, times},
    traffic::Traffic,
};

/// Runs a benchmark on one core, and a Redis server on another.
///
/// # Panics
///
/// If there is no `redis-server`.
pub fn run(benchmark: impl AsyncFnOnce(&Server)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let server = Server::start().await;
        benchmark(&server).await;
    });
}
