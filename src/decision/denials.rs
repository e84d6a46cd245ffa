//! The denials of each key, which are counted while an [`Admin`](crate::Admin) has a router.

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::SystemTime,
};

use super::space_saving::{SpaceSaving, Summary};
use crate::{Key, sync::lock};

/// The denials of the policies of a layer or a limiter, whose clones have them in common.
#[derive(Clone, Default)]
pub(crate) struct Denials(Arc<DenialCounts>);

#[derive(Default)]
struct DenialCounts {
    watches: AtomicUsize,
    /// The decisions of each policy since there is a watch.
    decisions: OnceLock<Box<[AtomicU64]>>,
    counted: Mutex<Option<Sketches>>,
}

struct Sketches {
    since: SystemTime,
    /// One for each policy, in their order.
    sketches: Vec<SpaceSaving<Key>>,
}

impl Denials {
    /// Whether denials are counted.
    #[inline]
    pub(crate) fn are_watched(&self) -> bool {
        self.0.watches.load(Ordering::Relaxed) > 0
    }

    /// Whether these are the denials of clones of one layer or limiter.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Counts a decision of the policy at this position.
    #[inline]
    pub(crate) fn count_decision(&self, position: usize) {
        if let Some(decisions) = self.0.decisions.get().and_then(|decisions| decisions.get(position)) {
            decisions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The decisions of the policy at this position since there is a watch.
    pub(crate) fn decisions(&self, position: usize) -> u64 {
        let decisions = self.0.decisions.get().and_then(|decisions| decisions.get(position));
        decisions.map_or(0, |decisions| decisions.load(Ordering::Relaxed))
    }

    /// Counts a denial by the policy at this position.
    #[cold]
    pub(crate) fn count(&self, position: usize, key: &Key) {
        if let Some(counted) = &mut *lock(&self.0.counted)
            && let Some(sketch) = counted.sketches.get_mut(position)
        {
            sketch.count(key);
        }
    }

    /// Counts the denials of so many policies until what this returns is dropped, each for so many keys; that of the first
    /// watch applies to later ones too.
    pub(crate) fn watch(&self, policies: usize, keys: usize) -> DenialWatch {
        let mut counted = lock(&self.0.counted);
        let decisions = self
            .0
            .decisions
            .get_or_init(|| (0..policies).map(|_| AtomicU64::new(0)).collect());
        counted.get_or_insert_with(|| {
            for decisions in decisions {
                decisions.store(0, Ordering::Relaxed);
            }
            Sketches {
                since: SystemTime::now(),
                sketches: (0..policies).map(|_| SpaceSaving::new(keys)).collect(),
            }
        });
        self.0.watches.fetch_add(1, Ordering::Relaxed);
        DenialWatch(self.0.clone())
    }

    /// The denials of the policy at this position, and since when they are counted.
    pub(crate) fn summary(&self, position: usize) -> Option<(SystemTime, Summary<Key>)> {
        let counted = lock(&self.0.counted);
        let counted = counted.as_ref()?;
        Some((counted.since, counted.sketches.get(position)?.summary()))
    }
}

/// Denials are counted until this is dropped.
pub(crate) struct DenialWatch(Arc<DenialCounts>);

impl Drop for DenialWatch {
    fn drop(&mut self) {
        let mut counted = lock(&self.0.counted);
        if self.0.watches.fetch_sub(1, Ordering::Relaxed) == 1 {
            *counted = None;
        }
    }
}
