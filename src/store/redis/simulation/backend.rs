use super::{network::Network, plan::DEADLINE};
use crate::store::redis::{backend::Backend, client::RedisClient, key_format::KeyFormat, script::SCRIPTS};

/// A backend on a simulated network.
pub(in crate::store::redis) fn simulated_backend(network: Network) -> Backend {
    let key_format = KeyFormat::new("quota", None);
    Backend::new(RedisClient::Simulated(network), &SCRIPTS, key_format, DEADLINE)
}
