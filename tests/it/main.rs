//! The tests that need more than one module: against real Redis servers, routers and connections.

mod admin;
mod chaos;
mod check;
mod decision;
mod examples;
mod key;
mod limit;
mod limiter;
mod middleware;
mod model;
mod observe;
mod policy;
mod store;
mod support;
mod tidy;
