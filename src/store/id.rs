use std::sync::Arc;

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
