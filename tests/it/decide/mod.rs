//! Tests of `src/decide/`: decisions, and what they do until their requests have ended.

mod admission;
mod bans;
mod completion;
mod concurrency;
mod decisions;
mod drained;
mod learning;
mod line;
mod line_faults;
mod line_order;
mod line_schedules;
mod settlement;
mod terminated;
mod unwinding;
mod usage;
