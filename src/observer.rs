//! The callbacks of an application.

use std::sync::Arc;

use crate::store::StoreError;

/// The callback for failures of a store, if one is set.
#[derive(Clone, Default)]
pub(crate) struct OnFailure(Option<Arc<Observer>>);

type Observer = dyn Fn(&StoreError) + Send + Sync;

impl OnFailure {
    pub(crate) fn new(observe: impl Fn(&StoreError) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(observe)))
    }

    pub(crate) fn observe(&self, error: &StoreError) {
        if let Some(observe) = &self.0 {
            observe(error);
        }
    }
}
