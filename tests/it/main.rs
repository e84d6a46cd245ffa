//! The tests that need more than one module: against real Redis servers, routers and connections.

mod auto_traits;
mod axum;
mod bad_input;
mod differential;
mod hyper;
mod policies;
mod support;
mod tidy;
mod tonic;
mod tower_contract;
