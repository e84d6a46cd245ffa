//! Tests of `src/decision/`: what a decision does until its request has ended.

mod concurrency;
mod denied;
mod drained;
mod learning;
mod terminated;
