use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Whether a store is failing, to log each change once.
#[derive(Debug, Default)]
pub(super) struct Health {
    failing: AtomicBool,
    /// The number of replies since the last failure.
    replies: AtomicU32,
}

/// The number of replies in a row after which a store that failed is no longer failing.
const STEADY: u32 = 20;

impl Health {
    /// Records a failure; returns whether the store was not failing before.
    pub(super) fn fails(&self) -> bool {
        self.replies.store(0, Ordering::Relaxed);
        !self.failing.swap(true, Ordering::Relaxed)
    }

    /// Records a reply; returns whether the store is no longer failing from now on.
    pub(super) fn replies(&self) -> bool {
        // Reading first keeps the cache line shared between cores while the store does not fail.
        self.failing.load(Ordering::Relaxed)
            && self.replies.fetch_add(1, Ordering::Relaxed) >= STEADY
            && self.failing.swap(false, Ordering::Relaxed)
    }
}

#[cfg(all(test, feature = "loom"))]
mod threads {
    use loom::{model, sync::Arc, thread::spawn};

    use super::*;

    #[test]
    fn one_of_several_threads_sees_a_change() {
        model(|| {
            let health = Arc::new(Health::default());
            let both = |record: fn(&Health) -> bool| {
                let thread = spawn({
                    let health = health.clone();
                    move || record(&health)
                });
                let own = record(&health);
                u32::from(own) + u32::from(thread.join().expect("no panic"))
            };
            assert_eq!(both(Health::fails), 1);

            for _ in 0..STEADY {
                assert!(!health.replies());
            }
            assert_eq!(both(Health::replies), 1);
        });
    }
}
