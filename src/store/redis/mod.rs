mod acl;
mod across_slots;
mod algorithm;
mod backend;
mod batch_limits;
mod bounds;
mod breaker;
mod builder;
mod call;
mod client;
mod commit_queue;
mod connect;
mod connect_error;
mod deadline;
mod deny_cache;
mod failure;
mod key_format;
mod merge;
mod queued_request;
mod queues;
mod ready;
mod reply;
mod request;
mod script;
#[cfg(test)]
mod simulation;
mod slot;
mod store;
mod task;
#[cfg(all(test, feature = "shuttle"))]
mod threads;
mod trial;
mod url;
mod words;

pub use self::{
    builder::RedisStoreBuilder, client::library::ClientLibrary, connect_error::ConnectError, store::RedisStore,
};
