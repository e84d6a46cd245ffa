mod acl;
mod across_slots;
mod backend;
mod breaker;
mod builder;
mod call;
mod client;
mod commit_queue;
mod connect;
mod credentials;
mod deny_cache;
mod failure;
mod key_format;
pub(super) mod overrides;
mod prefetch;
mod queues;
mod reply;
mod request;
mod script;
#[cfg(test)]
mod simulation;
mod source;
mod store;
mod task;
#[cfg(all(test, feature = "shuttle"))]
#[path = "simulation/threads.rs"]
mod threads;
mod trial;
mod url;
mod wakes;

pub use self::{
    builder::RedisStoreBuilder, client::ClientLibrary, credentials::Credentials, source::ApplicationClient,
    store::RedisStore,
};
