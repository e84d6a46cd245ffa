//! The tests that need more than one module: against real Redis servers, routers and connections.

mod admission;
mod conformance;
mod differential;
mod properties;
mod redis_store;
mod support;
