//! Tests of `src/limiter/`: limiters without HTTP.

mod operations;
mod overrides;
