use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

use crate::store::StoreError;

/// Whether a store answered last time, to warn once per change.
#[derive(Debug, Default)]
pub(crate) struct Health {
    failing: AtomicBool,
    /// How many answers in a row there were since it failed.
    answers: AtomicU32,
}

/// How many answers in a row make a store that has failed a good one.
const STEADY: u32 = 20;

impl Health {
    /// Notes a failure, and says whether the store was a good one until now.
    pub(crate) fn fails(&self) -> bool {
        self.answers.store(0, Ordering::Relaxed);
        !self.failing.swap(true, Ordering::Relaxed)
    }

    /// Notes an answer, and says whether the store is a good one from now on.
    pub(crate) fn answers(&self) -> bool {
        // Reading first keeps the line shared between cores while all is well. A store that fails now and then is failing.
        self.failing.load(Ordering::Relaxed)
            && self.answers.fetch_add(1, Ordering::Relaxed) >= STEADY
            && self.failing.swap(false, Ordering::Relaxed)
    }
}

/// Who is told of failures.
#[derive(Clone, Default)]
pub(crate) struct OnFailure(Option<Arc<Observer>>);

type Observer = dyn Fn(&StoreError) + Send + Sync;

impl OnFailure {
    pub(crate) fn new(observe: impl Fn(&StoreError) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(observe)))
    }

    pub(crate) fn tell(&self, error: &StoreError) {
        if let Some(observe) = &self.0 {
            observe(error);
        }
    }
}
