//! Tests of `src/limit/`: the algorithms.

mod clock_steps;
mod differential;
mod extremes;
mod figures;
mod line;
mod properties;
mod reference;
mod timelines;
