//! Denied subjects: how often all processes of a store deny single keys.

#[cfg(feature = "admin")]
use std::{borrow::Cow, time::Duration};
#[cfg(any(feature = "fred", feature = "cluster"))]
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError, Weak},
};
use std::{fmt, sync::Arc};

#[cfg(feature = "admin")]
use super::{StoreError, Summary};
#[cfg(any(feature = "fred", feature = "cluster"))]
use super::{redis::denied_subjects::RedisDenied, space_saving::SpaceSaving};
use crate::Key;

/// The denied subjects of a store. Clones share them.
///
/// A store that wraps another one passes them on, as [`Store::denied_subjects`](super::Store::denied_subjects) says.
#[derive(Clone)]
pub struct DeniedSubjects(Arc<Shared>);

/// The same, without keeping the store.
#[cfg(any(feature = "fred", feature = "cluster"))]
pub(super) struct WeakDeniedSubjects(Weak<Shared>);

#[cfg(any(feature = "fred", feature = "cluster"))]
struct Shared {
    unsent: Mutex<Unsent>,
    redis: RedisDenied,
}

/// No other store has them.
#[cfg(not(any(feature = "fred", feature = "cluster")))]
enum Shared {}

/// What was denied since the last call, by policy.
#[cfg(any(feature = "fred", feature = "cluster"))]
pub(super) type Unsent = HashMap<Box<str>, SpaceSaving<Key>>;

/// The most subjects of a policy that one call counts.
#[cfg(any(feature = "fred", feature = "cluster"))]
const MOST_SENT: usize = 100;

#[cfg(any(feature = "fred", feature = "cluster"))]
impl DeniedSubjects {
    pub(super) fn new(redis: RedisDenied) -> Self {
        let unsent = Mutex::default();
        Self(Arc::new(Shared { unsent, redis }))
    }

    /// Counts a denial of this key, which a task sends within a second.
    #[cold]
    pub(crate) fn count(&self, policy: &str, key: &Key) {
        let mut unsent = self.0.unsent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sketch) = unsent.get_mut(policy) {
            return sketch.count(key);
        }
        let mut sketch = SpaceSaving::new(MOST_SENT);
        sketch.count(key);
        unsent.insert(policy.into(), sketch);
    }

    /// What was denied since the last call.
    pub(super) fn take_unsent(&self) -> Unsent {
        std::mem::take(&mut *self.0.unsent.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn redis(&self) -> &RedisDenied {
        &self.0.redis
    }

    /// The denials of a policy by all processes, of so many subjects, and since when they are counted, if there are any.
    #[cfg(feature = "admin")]
    pub(crate) async fn read(&self, policy: &str, most: usize) -> Result<Option<(Duration, Summary<Key>)>, StoreError> {
        self.0.redis.read(policy, most).await
    }

    /// The key that stands for this one.
    #[cfg(feature = "admin")]
    pub(crate) fn stored_key<'a>(&self, key: &'a Key) -> Cow<'a, Key> {
        self.0.redis.stored_key(key)
    }

    pub(super) fn downgrade(&self) -> WeakDeniedSubjects {
        WeakDeniedSubjects(Arc::downgrade(&self.0))
    }
}

#[cfg(any(feature = "fred", feature = "cluster"))]
impl WeakDeniedSubjects {
    pub(super) fn upgrade(&self) -> Option<DeniedSubjects> {
        self.0.upgrade().map(DeniedSubjects)
    }
}

#[cfg(not(any(feature = "fred", feature = "cluster")))]
impl DeniedSubjects {
    pub(crate) fn count(&self, _: &str, _: &Key) {
        match *self.0 {}
    }

    #[cfg(feature = "admin")]
    #[expect(clippy::unused_async, reason = "stores in Redis wait")]
    pub(crate) async fn read(&self, _: &str, _: usize) -> Result<Option<(Duration, Summary<Key>)>, StoreError> {
        match *self.0 {}
    }

    #[cfg(feature = "admin")]
    pub(crate) fn stored_key<'a>(&self, _: &'a Key) -> Cow<'a, Key> {
        match *self.0 {}
    }
}

/// Without the keys, which may contain an address or a user.
impl fmt::Debug for DeniedSubjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeniedSubjects").finish_non_exhaustive()
    }
}
