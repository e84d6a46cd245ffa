//! Tests of `src/key/`: keys.

mod client_ip;
mod fuzz;
mod requests;
