//! Tests of `src/observe/`: metrics and log lines.

mod log_lines;
mod metrics;
