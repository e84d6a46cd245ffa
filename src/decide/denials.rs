//! The denials of each key, which are counted while an [`Admin`](crate::Admin) has a router.

use std::{
    collections::{BTreeSet, HashMap},
    hash::Hash,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::SystemTime,
};

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
            sketch.count(key, SystemTime::now());
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

/// The sketch Space-Saving: Metwally, Agrawal, El Abbadi, "Efficient Computation of Frequent and Top-k Elements in Data
/// Streams", 2005.
///
/// A full sketch replaces the item with the smallest count by a new one, which takes over the count. So a count is too high by
/// at most its error, and never too low.
pub(crate) struct SpaceSaving<T> {
    capacity: usize,
    total: u64,
    counts: HashMap<T, Count<T>>,
    /// The items by their counts.
    order: BTreeSet<(u64, T)>,
}

impl<T: Clone + Ord + Hash> SpaceSaving<T> {
    /// A sketch with room for so many items. Without room it has the total only.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            total: 0,
            counts: HashMap::new(),
            order: BTreeSet::new(),
        }
    }

    /// Counts an item once, in a time that grows with the logarithm of the capacity.
    pub(crate) fn count(&mut self, item: &T, last: SystemTime) {
        self.total += 1;
        if self.capacity == 0 {
            return;
        }
        let (mut count, mut error) = (0, 0);
        if let Some(counted) = self.counts.get(item) {
            (count, error) = (counted.count, counted.error);
            self.order.remove(&(count, item.clone()));
        } else if self.counts.len() == self.capacity
            && let Some((least, replaced)) = self.order.pop_first()
        {
            (count, error) = (least, least);
            self.counts.remove(&replaced);
        }
        let counted = Count {
            item: item.clone(),
            count: count + 1,
            error,
            last,
        };
        self.order.insert((counted.count, item.clone()));
        self.counts.insert(item.clone(), counted);
    }

    pub(crate) fn summary(&self) -> Summary<T> {
        let counts = self.order.iter().rev();
        let counts = counts.filter_map(|(_, item)| self.counts.get(item).cloned());
        let least = self.order.first().map_or(0, |(count, _)| *count);
        Summary {
            total: self.total,
            counts: counts.collect(),
            most_of_others: match self.capacity {
                0 => self.total,
                capacity if self.counts.len() < capacity => 0,
                _ => least,
            },
        }
    }
}

/// The counts of a sketch, or of several together.
#[derive(Clone, Debug)]
pub(crate) struct Summary<T> {
    /// The number of items that were counted, which is exact.
    pub(crate) total: u64,
    /// The highest first.
    pub(crate) counts: Vec<Count<T>>,
    /// An item that is not listed was counted at most so often.
    pub(crate) most_of_others: u64,
}

/// How often an item was counted: at least `count - error` times, and at most `count` times.
#[derive(Clone, Debug)]
pub(crate) struct Count<T> {
    pub(crate) item: T,
    pub(crate) count: u64,
    pub(crate) error: u64,
    /// When it was counted last.
    pub(crate) last: SystemTime,
}

impl<T: Clone + Eq + Hash> Summary<T> {
    /// The counts of both streams together: Agarwal and others, "Mergeable Summaries", 2012.
    pub(crate) fn join(self, other: Self) -> Self {
        let most = self.most_of_others + other.most_of_others;
        let mut joined = HashMap::<T, Count<T>>::new();
        for (counts, unlisted) in [(self.counts, self.most_of_others), (other.counts, other.most_of_others)] {
            for of in counts {
                // An item that only one of them lists may have been counted by the other one.
                let of_none = Count {
                    count: most,
                    error: most,
                    ..of.clone()
                };
                let joined = joined.entry(of.item).or_insert(of_none);
                joined.count = joined.count - unlisted + of.count;
                joined.error = joined.error - unlisted + of.error;
                joined.last = joined.last.max(of.last);
            }
        }

        let mut counts: Vec<_> = joined.into_values().collect();
        counts.sort_by_key(|count| std::cmp::Reverse(count.count));
        Self {
            total: self.total + other.total,
            counts,
            most_of_others: most,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::{
        collection::vec,
        prelude::{ProptestConfig, Strategy, prop_assert, prop_assert_eq, proptest},
        prop_oneof,
    };

    use super::*;

    fn sketch(capacity: usize, stream: &[u16]) -> Summary<u16> {
        let mut sketch = SpaceSaving::new(capacity);
        for (item, counted) in stream.iter().zip(1..) {
            sketch.count(item, SystemTime::UNIX_EPOCH + Duration::from_secs(counted));
            assert_eq!(sketch.order.len(), sketch.counts.len());
            assert_eq!(sketch.total, counted);
        }
        sketch.summary()
    }

    fn exact(stream: &[u16]) -> HashMap<u16, u64> {
        let mut exact = HashMap::new();
        for item in stream {
            *exact.entry(*item).or_default() += 1;
        }
        exact
    }

    /// Verifies what the docs of `Admin` promise.
    fn verify(summary: &Summary<u16>, stream: &[u16]) {
        let mut exact = exact(stream);
        assert_eq!(summary.total, stream.len() as u64);
        assert!(summary.counts.is_sorted_by(|a, b| a.count >= b.count));
        for Count { item, count, error, .. } in &summary.counts {
            let exact = exact.remove(item).unwrap_or_default();
            assert!(
                count - error <= exact && exact <= *count,
                "{item}: {exact} is not {count} - {error}"
            );
        }
        for (item, exact) in exact {
            assert!(exact <= summary.most_of_others, "{item}: {exact} is not listed");
        }
    }

    /// Random items; few among many; each one new; those that a full sketch has just replaced.
    fn streams() -> impl Strategy<Value = Vec<u16>> {
        let skewed = vec((0_u16..40, 0_u16..40).prop_map(|(a, b)| a * b), 0..400);
        let flood = (0_u16..400, 0_usize..6).prop_map(|(length, often)| {
            let frequent = |item: u16| std::iter::repeat_n(1_000, if item.is_multiple_of(9) { often } else { 0 });
            (0..length).flat_map(|item| frequent(item).chain([item])).collect()
        });
        let in_turn = (2_u16..20, 0_u16..400).prop_map(|(items, length)| (0..length).map(|n| n % items).collect());
        let uniform = vec(0_u16..30, 0..400);
        prop_oneof![skewed, flood, in_turn, uniform]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn a_count_is_never_too_low_and_too_high_by_at_most_its_error(stream in streams(), capacity in 1_usize..24) {
            let summary = sketch(capacity, &stream);
            verify(&summary, &stream);
            prop_assert!(summary.counts.len() <= capacity);
            // The bound of the paper: no error is above the total divided by the capacity.
            let most = summary.total / capacity as u64;
            prop_assert!(summary.most_of_others <= most);
            prop_assert!(summary.counts.iter().all(|count| count.error <= most));
        }

        #[test]
        fn within_the_capacity_all_counts_are_exact(stream in streams()) {
            let summary = sketch(2_000, &stream);
            let counts: HashMap<_, _> = summary.counts.iter().map(|count| (count.item, count.count)).collect();
            prop_assert_eq!(counts, exact(&stream));
            prop_assert!(summary.counts.iter().all(|count| count.error == 0));
        }

        #[test]
        fn the_bounds_hold_for_streams_that_are_joined(a in streams(), b in streams(), capacity in 1_usize..24) {
            let joined = sketch(capacity, &a).join(sketch(capacity / 2 + 1, &b));
            verify(&joined, &[a, b].concat());
        }
    }

    #[test]
    fn a_count_has_the_time_of_the_last_one() {
        let last = |summary: &Summary<u16>| -> HashMap<_, _> {
            let since_epoch = |count: &Count<u16>| count.last.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
            summary
                .counts
                .iter()
                .map(|count| (count.item, since_epoch(count)))
                .collect()
        };
        let (one, other) = (sketch(9, &[1, 2, 1, 3]), sketch(9, &[2, 2, 4, 4, 1]));
        assert_eq!(last(&one), HashMap::from([(1, 3), (2, 2), (3, 4)]));
        assert_eq!(
            last(&one.clone().join(other.clone())),
            HashMap::from([(1, 5), (2, 2), (3, 4), (4, 4)])
        );
        assert_eq!(last(&other.join(one))[&2], 2);
        // The item that takes over the count of another one does not take over its time.
        assert_eq!(last(&sketch(1, &[1, 1, 2])), HashMap::from([(2, 3)]));
    }

    #[test]
    fn without_room_only_the_total_is_counted() {
        let summary = sketch(0, &[1, 2, 2]);
        assert_eq!((summary.total, summary.counts.len()), (3, 0));
    }
}
