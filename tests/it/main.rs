//! The tests that need more than one module: against real Redis servers, routers and connections.

mod admin;
mod chaos;
mod decide;

mod examples;
mod http;
mod key;
mod limit;
mod limiter;
mod model;
mod observe;
mod policy;
mod store;
mod support;
mod tidy;
