use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::{
    metrics::lost_settlement,
    store::{StoreError, StoreResponse},
};

/// The number of settlements of a layer that were lost.
#[derive(Default)]
pub(crate) struct LostSettlements(AtomicU64);

impl LostSettlements {
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts one more, and logs the first.
    fn add(&self, error: Option<&StoreError>) {
        if self.0.fetch_add(1, Ordering::Relaxed) == 0 {
            #[cfg(feature = "tracing")]
            tracing::warn!(
                error = error.map(tracing::field::display),
                "a refund or a charge after the response was lost; `RateLimitLayer::lost_settlements` counts them"
            );
        }
        let _ = error;
    }
}

/// A settlement that is lost unless its store confirms it.
pub(crate) struct Unconfirmed {
    /// The layer that counts its settlements.
    layer: Option<Arc<LostSettlements>>,
    has_response: bool,
}

impl Unconfirmed {
    pub(crate) fn new(layer: Option<Arc<LostSettlements>>) -> Self {
        Self {
            layer,
            has_response: false,
        }
    }

    /// Ends with the response of the store.
    pub(crate) fn end(mut self, response: &Result<StoreResponse, StoreError>) {
        self.has_response = true;
        if let Err(error) = response {
            self.lose(Some(error));
        }
    }

    fn lose(&self, error: Option<&StoreError>) {
        lost_settlement();
        if let Some(layer) = &self.layer {
            layer.add(error);
        }
    }
}

impl Drop for Unconfirmed {
    fn drop(&mut self) {
        if !self.has_response {
            self.lose(None);
        }
    }
}
