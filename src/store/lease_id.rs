use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    num::NonZeroU64,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// The id of a lease: what holds slots of a [`Concurrency`](crate::Concurrency) limit, until it ends or expires.
///
/// It consists of two integers below 2^53, which a double holds exactly, and is unique across processes: 106 bits of a keyed
/// hash with a random key.
///
/// ```
/// use tower_quota::store::LeaseId;
///
/// let id = LeaseId::random();
/// assert_ne!(id, LeaseId::random());
/// assert!(id.parts().iter().all(|part| *part < 1 << 53));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(NonZeroU64, u64);

impl LeaseId {
    /// An id that was not used yet.
    #[must_use]
    #[inline(never)]
    pub fn random() -> Self {
        static SECRETS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
        static NEXT: AtomicU64 = AtomicU64::new(0);

        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let [high, low] = [&SECRETS[0], &SECRETS[1]].map(|secret| secret.hash_one(number) >> 11);
        Self(NonZeroU64::new(high).unwrap_or(NonZeroU64::MIN), low)
    }

    /// The two integers below 2^53 that a store keeps.
    #[must_use]
    pub fn parts(self) -> [u64; 2] {
        [self.0.get(), self.1]
    }

    /// The id with these parts, of which the first is not 0.
    #[cfg(all(test, any(feature = "fred", feature = "redis")))]
    pub(crate) fn of_parts([high, low]: [u64; 2]) -> Option<Self> {
        Some(Self(NonZeroU64::new(high)?, low))
    }
}

/// In hexadecimal digits.
impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaseId({:x}-{:x})", self.0, self.1)
    }
}
