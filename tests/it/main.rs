//! The tests that need more than one module: against real Redis servers, routers and connections.

mod differential;
mod policies;
mod support;
