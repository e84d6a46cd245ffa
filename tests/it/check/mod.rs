//! Tests of `src/check/`: checks.

mod admission;
mod bans;
mod completion;
mod decisions;
mod settlement;
mod slot_queue;
mod slot_queue_redis;
mod wait;
mod wait_processes;
