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
        lost_settlement();
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
pub(crate) struct Unconfirmed(Option<Arc<LostSettlements>>);

impl Unconfirmed {
    pub(crate) fn new(lost: Arc<LostSettlements>) -> Self {
        Self(Some(lost))
    }

    /// Ends with the response of the store.
    pub(crate) fn end(mut self, response: Result<StoreResponse, StoreError>) {
        if let (Some(lost), Err(error)) = (self.0.take(), response) {
            lost.add(Some(&error));
        }
    }
}

impl Drop for Unconfirmed {
    fn drop(&mut self) {
        if let Some(lost) = self.0.take() {
            lost.add(None);
        }
    }
}
