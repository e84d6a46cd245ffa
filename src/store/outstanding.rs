use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc, LazyLock, Mutex, Weak,
        atomic::{
            AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};

use tokio::{sync::Notify, time::timeout};

use super::response::StoreResponse;
use crate::{
    error::{ErrorKind, StoreError},
    observe::lost_settlement,
    sync::lock,
};

/// What requests of this process owe to one store: settlements and releases that it has not confirmed.
#[derive(Default)]
pub(crate) struct Outstanding {
    owed: OwedCounts,
    lost: OwedCounts,
    changed: Notify,
}

/// By their [`OwedKind`].
type OwedCounts = [AtomicU64; 2];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwedKind {
    /// A refund or a charge after the check, or a reset.
    Settlement,
    /// The release of slots.
    Release,
}

static OUTSTANDING: PerStore<Outstanding> = PerStore::new();
/// That of all stores without identity, since none of them can be found again.
static UNIDENTIFIED: LazyLock<Arc<Outstanding>> = LazyLock::new(Arc::default);

impl Outstanding {
    /// That of the store with this identity.
    pub(crate) fn of(store: Option<StoreId>) -> Arc<Self> {
        match store {
            Some(_) => OUTSTANDING.of(store),
            None => UNIDENTIFIED.clone(),
        }
    }

    /// Counts what a request may have to send at its end.
    pub(crate) fn owe(self: &Arc<Self>, kind: OwedKind) -> Owed {
        self.owed[kind as usize].fetch_add(1, SeqCst);
        Owed {
            outstanding: self.clone(),
            kind,
            number: 1,
            is_due: false,
            is_counted: false,
            layer: None,
        }
    }

    pub(super) fn drained(
        self: Arc<Self>,
        within: Duration,
    ) -> Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>> {
        let lost_before = read(&self.lost);
        Box::pin(async move {
            // Without a runtime there is no timer.
            if read(&self.owed) != [0; 2] {
                let _ = timeout(within, self.none_owed()).await;
            }
            let (owed, lost) = (read(&self.owed), read(&self.lost));
            let [settlements, releases] = [0, 1].map(|kind| owed[kind] + lost[kind] - lost_before[kind]);
            if (settlements, releases) == (0, 0) {
                return Ok(());
            }
            let plural = |number| if number == 1 { "" } else { "s" };
            Err(StoreError::new(
                ErrorKind::Timeout,
                format!(
                    "the store has not confirmed {settlements} settlement{} and {releases} release{} of slots, sent or still to be sent",
                    plural(settlements),
                    plural(releases),
                ),
            ))
        })
    }

    async fn none_owed(&self) {
        loop {
            // Before the counts are read, so that no change after that is missed.
            let changed = self.changed.notified();
            if read(&self.owed) == [0; 2] {
                return;
            }
            changed.await;
        }
    }
}

fn read(counts: &OwedCounts) -> [u64; 2] {
    counts.each_ref().map(|count| count.load(SeqCst))
}

/// The number of settlements of a layer that were lost.
#[derive(Default)]
pub(crate) struct LostSettlements(AtomicU64);

impl LostSettlements {
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Counts one more, and logs the first.
    fn add(&self, error: Option<&StoreError>) {
        if self.0.fetch_add(1, Relaxed) == 0 {
            tracing::warn!(
                error = error.map(ToString::to_string),
                "a refund or a charge after the response was lost; `RateLimitLayer::lost_settlements` counts them"
            );
        }
    }
}

/// What a request may have to send to its store. Dropped before it is due, it is nothing; after that, it is lost unless it was
/// confirmed, such as in a task that ends with its runtime.
#[must_use]
pub(crate) struct Owed {
    pub(crate) outstanding: Arc<Outstanding>,
    kind: OwedKind,
    number: u32,
    is_due: bool,
    /// Whether a loss is counted, for a layer too if it has one.
    is_counted: bool,
    layer: Option<Arc<LostSettlements>>,
}

impl Owed {
    /// It is sent now.
    pub(crate) fn due(mut self) -> Self {
        self.is_due = true;
        self
    }

    /// Counts it as lost unless it is confirmed, also for a layer.
    pub(crate) fn count_if_lost(&mut self, layer: Option<Arc<LostSettlements>>) {
        (self.is_counted, self.layer) = (true, layer);
    }

    /// Adds another one to the same store, which is sent in the same call.
    pub(crate) fn join(&mut self, mut other: Self) {
        self.number += std::mem::take(&mut other.number);
    }

    /// Ends with the response of the store.
    pub(crate) fn end(mut self, response: &Result<StoreResponse, StoreError>) {
        match response {
            Ok(_) => self.is_due = false,
            Err(error) => self.lose(Some(error)),
        }
    }

    fn lose(&mut self, error: Option<&StoreError>) {
        if !std::mem::take(&mut self.is_due) {
            return;
        }
        self.outstanding.lost[self.kind as usize].fetch_add(self.number.into(), SeqCst);
        if self.is_counted {
            lost_settlement();
            self.layer.iter().for_each(|layer| layer.add(error));
        }
    }

    /// Ends with nothing left to send.
    pub(crate) fn confirm(mut self) {
        self.is_due = false;
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.lose(None);
        self.outstanding.owed[self.kind as usize].fetch_sub(self.number.into(), SeqCst);
        self.outstanding.changed.notify_waiters();
    }
}

/// What the layers and limiters on one store share, for as long as it is in use.
pub(crate) struct PerStore<T>(LazyLock<Mutex<HashMap<StoreId, Weak<T>>>>);

impl<T: Default> PerStore<T> {
    pub(crate) const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }

    /// That of the store with this identity. A store without one shares its counts with no other, so it has a new one.
    pub(crate) fn of(&self, store: Option<StoreId>) -> Arc<T> {
        let Some(id) = store else { return Arc::default() };
        let mut shared = lock(&self.0);
        shared.retain(|_, shared| shared.strong_count() > 0);
        if let Some(shared) = shared.get(&id).and_then(Weak::upgrade) {
            return shared;
        }
        let new = Arc::default();
        shared.insert(id, Arc::downgrade(&new));
        new
    }
}

/// Identity of the counts of a [`Store`](super::Store).
///
/// ```
/// use tower_quota::{MemoryStore, store::Store};
///
/// let store = MemoryStore::new();
/// assert_eq!(store.id(), store.clone().id());
/// assert_ne!(store.id(), MemoryStore::new().id());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoreId(usize);

impl StoreId {
    /// The identity of a store whose clones share this, for as long as one of them exists.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_quota::store::StoreId;
    ///
    /// let counts = Arc::new([0; 100]);
    /// assert_eq!(StoreId::of(&counts), StoreId::of(&counts.clone()));
    /// ```
    #[must_use]
    pub fn of<T: ?Sized>(shared: &Arc<T>) -> Self {
        Self(Arc::as_ptr(shared).addr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryStore, store::Store};

    #[test]
    fn clones_of_a_store_share_it_and_other_stores_do_not() {
        let shared = PerStore::<u8>::new();
        let (one, other) = (MemoryStore::new(), MemoryStore::new());
        let first = shared.of(one.id());
        assert!(Arc::ptr_eq(&first, &shared.of(one.clone().id())));
        assert!(Arc::ptr_eq(&first, &shared.of(Box::new(one.clone()).id())));
        assert!(Arc::ptr_eq(&first, &shared.of(Arc::new(one).id())));
        assert!(!Arc::ptr_eq(&first, &shared.of(other.id())));
        assert!(!Arc::ptr_eq(&shared.of(None), &shared.of(None)));
    }

    #[test]
    fn that_of_a_store_that_is_gone_is_forgotten() {
        let shared = PerStore::<u8>::new();
        let store = MemoryStore::new();
        let is_there = || shared.0.lock().unwrap().contains_key(&store.id().unwrap());
        let first = shared.of(store.id());
        assert!(is_there());
        drop(first);
        let _ = shared.of(MemoryStore::new().id());
        assert!(!is_there());
    }

    #[tokio::test]
    async fn each_release_that_is_sent_in_one_call_counts() {
        let outstanding = Arc::<Outstanding>::default();
        let release = || outstanding.owe(OwedKind::Release);
        let undrained = async || {
            let drained = outstanding.clone().drained(Duration::ZERO).await;
            drained.err().map(|error| error.to_string())
        };
        let mut releases = release().due();
        releases.join(release());
        let two = "the store has not confirmed 0 settlements and 2 releases of slots, sent or still to be sent";
        assert_eq!(undrained().await.as_deref(), Some(two));
        releases.confirm();
        assert_eq!(undrained().await, None);

        let mut releases = release().due();
        releases.join(release());
        let lost = outstanding.clone().drained(Duration::from_secs(9));
        drop(releases);
        assert_eq!(lost.await.err().map(|error| error.to_string()).as_deref(), Some(two));
    }
}
