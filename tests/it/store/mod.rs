//! Tests of `src/store/`: the stores.

mod acl;
mod at_most_once;
mod breaker;
mod cluster;
mod conformance;
mod connect;
mod credentials;
mod deny_cache;
mod failover;
mod group_commit;
mod hostile;
mod layout;
mod memory;
mod memory_store;
mod moving_slots;
mod node_batches;
mod prefetch;
mod reconnect;
mod redis_store;
mod rolling_deploy;
mod script;
mod slot_map;
mod topologies;
