//! The tests that need other programs than Redis: nginx, Chromium, Prometheus with promtool.
//!
//! `cargo test` ignores them, and prints their names. `.ci/test` installs the programs and runs them.

mod admin_page;
mod admin_page_live;
mod alerts;
mod chromium;
mod failovers;
mod fleet;
mod hello_page;
mod nginx;
mod prometheus;
#[path = "../it/support/mod.rs"]
#[allow(dead_code, unused_imports, unused_macros)]
mod support;
