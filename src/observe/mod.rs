//! What applications and operators observe: callbacks and metrics.

pub(crate) mod metrics;

use std::{fmt, sync::Arc};

/// A callback of the application, if it has set one.
pub(crate) struct Observer<T>(Option<Arc<Callback<T>>>);

type Callback<T> = dyn Fn(&T) + Send + Sync;

impl<T> Observer<T> {
    pub(crate) fn new(observe: impl Fn(&T) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(observe)))
    }

    #[inline]
    pub(crate) fn notify(&self, event: &T) {
        if let Some(observe) = &self.0 {
            observe(event);
        }
    }
}

impl<T> Clone for Observer<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for Observer<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> fmt::Debug for Observer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "Observer(<fn>)"
        } else {
            "Observer(None)"
        })
    }
}
