//! Warnings, each logged once for a layer and its clones.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{key::KeyError, store::NamedLimit};

/// Which warnings were logged.
#[derive(Debug, Default)]
pub(crate) struct Warned {
    key: AtomicBool,
    repetition: AtomicBool,
}

impl Warned {
    pub(crate) fn of_key(&self, error: &KeyError) {
        if !self.key.swap(true, Ordering::Relaxed) {
            #[cfg(feature = "tracing")]
            tracing::error!(%error, "requests are refused, or not observed: their key or limit cannot be determined");
        }
        let _ = error;
    }

    pub(crate) fn of_repetition(&self, named: &NamedLimit) {
        if !self.repetition.swap(true, Ordering::Relaxed) {
            #[cfg(feature = "tracing")]
            tracing::warn!(
                policy = &*named.name,
                "a policy is met twice on one request; only the larger cost is charged"
            );
        }
        let _ = named;
    }
}
