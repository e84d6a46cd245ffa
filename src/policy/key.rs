#[cfg(feature = "serde")]
use std::sync::Arc;

use super::{Keyed, Policy, Unkeyed};
use crate::ConfigError;
#[cfg(feature = "serde")]
use crate::KeyExtractor;

/// A type parameter of [`Policy`], by which the policies of a layer and of a limiter differ.
pub(crate) trait PolicyKey: Clone + Send + Sync + 'static {
    /// Refuses a policy that does not fit the layer or the limiter.
    fn validate(policy: &Policy<Self>) -> Result<(), ConfigError>;

    /// Replaces it by the key of a file.
    #[cfg(feature = "serde")]
    fn replace(&mut self, key: &Arc<dyn KeyExtractor>);
}

impl PolicyKey for Keyed {
    fn validate(_: &Policy<Self>) -> Result<(), ConfigError> {
        Ok(())
    }

    #[cfg(feature = "serde")]
    fn replace(&mut self, key: &Arc<dyn KeyExtractor>) {
        self.0 = key.clone();
    }
}

impl PolicyKey for Unkeyed {
    fn validate(policy: &Policy<Self>) -> Result<(), ConfigError> {
        policy.validate_without_requests()
    }

    #[cfg(feature = "serde")]
    fn replace(&mut self, _: &Arc<dyn KeyExtractor>) {}
}
