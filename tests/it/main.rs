//! The tests that need more than one module: against real Redis servers, routers and connections.

mod admission;
mod auto_traits;
mod axum;
mod bad_input;
mod client_ip;
mod conformance;
mod differential;
mod http_fields;
mod hyper;
mod policies;
mod properties;
mod redis_store;
mod support;
mod tidy;
mod tonic;
mod tower_contract;
