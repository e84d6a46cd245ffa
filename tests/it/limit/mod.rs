//! Tests of `src/limit/`: the algorithms.

mod clock_steps;
mod differential;
mod extremes;
mod figures;
mod line;
pub(crate) mod oracles;
mod properties;
mod reference;
mod timelines;
