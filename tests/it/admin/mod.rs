//! Tests of `src/admin/`: the page and JSON for operators.

mod audit;
mod holders;
mod keys;
mod router;
