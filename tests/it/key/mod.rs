//! Tests of `src/key/`: keys.

mod client_addr;
mod client_ip;
mod fuzz;
mod requests;
