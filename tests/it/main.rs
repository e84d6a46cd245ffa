//! The tests that need more than one module: against real Redis servers, routers and connections.

mod admission;
mod allocations;
mod auto_traits;
mod axum;
mod bad_input;
mod client_ip;
mod conformance;
mod differential;
mod figures;
mod fuzz;
mod http_fields;
mod hyper;
mod keys;
mod limiter;
mod memory;
mod memory_store;
mod nested;
mod policies;
mod properties;
mod redis_store;
mod reference;
mod support;
mod tidy;
mod tonic;
mod tower_contract;
