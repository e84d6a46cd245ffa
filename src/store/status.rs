use std::borrow::Cow;

/// What a store reports about itself to operators.
///
/// ```
/// use tower_quota::{MemoryStore, store::{Store, StoreStatus}};
///
/// let status = MemoryStore::new().status().expect("a memory store reports its numbers");
/// assert_eq!(status, StoreStatus::new("memory").number("keys", 0).number("capacity", 100_000).number("evictions", 0));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStatus {
    /// The kind of the store, such as `redis`.
    pub kind: Cow<'static, str>,
    /// Numbers by their names, such as `open breakers`.
    pub numbers: Vec<(Cow<'static, str>, u64)>,
}

impl StoreStatus {
    /// The status of a store of this kind, without numbers.
    pub fn new(kind: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind: kind.into(),
            numbers: Vec::new(),
        }
    }

    /// The same status with one more number, in a unit that its name contains.
    #[must_use]
    pub fn number(mut self, name: impl Into<Cow<'static, str>>, number: u64) -> Self {
        self.numbers.push((name.into(), number));
        self
    }
}
