//! Tests of `src/check/`: checks.

mod admission;
mod bans;
mod completion;
mod decisions;
mod line;
mod line_order;
mod line_schedules;
mod settlement;
mod unwinding;
