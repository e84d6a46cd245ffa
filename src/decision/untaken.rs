//! Whether a receipt can be taken.

use crate::sync::atomic::{AtomicBool, Ordering};

/// Whether a policy was charged, and its receipt is not taken. A clone has no receipt.
#[derive(Default)]
pub(crate) struct Untaken(AtomicBool);

impl Untaken {
    pub(super) fn new(charged: bool) -> Self {
        Self(AtomicBool::new(charged))
    }

    /// Returns whether this is the first call for a charged policy.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Clone for Untaken {
    fn clone(&self) -> Self {
        Self::default()
    }
}

#[cfg(all(test, feature = "loom"))]
mod threads {
    use loom::{model, sync::Arc, thread::spawn};

    use super::*;

    #[test]
    fn one_of_several_threads_takes_a_receipt() {
        model(|| {
            let untaken = Arc::new(Untaken::new(true));
            let thread = spawn({
                let untaken = untaken.clone();
                move || untaken.take()
            });
            let own = untaken.take();
            assert!(own ^ thread.join().expect("no panic"));
        });
    }
}
