//! Tests of `src/limiter/`: limiters without HTTP.

mod one_definition;
mod operations;
mod overrides;
