use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, PoisonError, Weak},
};

use super::id::StoreId;

/// What the layers and limiters on one store share, for as long as it is in use.
pub(crate) struct PerStore<T>(LazyLock<Mutex<HashMap<StoreId, Weak<T>>>>);

impl<T: Default> PerStore<T> {
    pub(crate) const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }

    /// That of the store with this identity. A store without one shares its counts with no other, so it has a new one.
    pub(crate) fn of(&self, store: Option<StoreId>) -> Arc<T> {
        let Some(id) = store else { return Arc::default() };
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|_, shared| shared.strong_count() > 0);
        if let Some(shared) = shared.get(&id).and_then(Weak::upgrade) {
            return shared;
        }
        let new = Arc::default();
        shared.insert(id, Arc::downgrade(&new));
        new
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
}
