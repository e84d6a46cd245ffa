//! Tests of `src/http/`: the Tower middleware.

mod access;
mod allocations;
mod axum;
mod completion_grpc;
mod denied;
mod failure;
mod http_fields;
mod hyper;
mod nested;
mod observers;
mod openapi;
mod paths;
mod shutdown;
mod stack;
mod stalls;
mod tonic;
mod tower_contract;
mod typed_layers;
mod undecided_routes;
mod upgraded;
mod upload;
mod wait_readiness;
mod waiting_clients;
