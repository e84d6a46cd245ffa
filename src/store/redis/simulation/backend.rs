use super::{network::Network, plan::DEADLINE};
use crate::store::redis::{backend::Backend, builder::RedisStoreBuilder, client::RedisClient};

/// A backend on a simulated network, without a deny cache.
pub(in crate::store::redis) fn simulated_backend(network: Network) -> Backend {
    let settings = RedisStoreBuilder::new().deadline(DEADLINE).deny_cache(false);
    Backend::new(RedisClient::Simulated(network), &settings)
}
