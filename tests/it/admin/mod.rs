//! Tests of `src/admin/`: the page and JSON for operators.

mod router;
