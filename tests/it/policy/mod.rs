//! Tests of `src/policy/`: policies, their files and their reload.

mod bad_input;
mod enforced_share;
mod file_access;
mod file_settings;
mod files;
mod names;
mod observing;
mod plan_sets;
mod plans;
mod reload;
mod renamed;
mod unused;
