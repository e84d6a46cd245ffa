//! Overrides: other limits of single keys of a policy, for a time.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{
        Arc, RwLock, RwLockReadGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::StoreError;
#[cfg(feature = "_redis")]
use super::redis::overrides::RedisOverrides;
use crate::{Key, Limit, error::ErrorKind, sync::unpoisoned};

/// A limit that applies to one key of a policy for a time, in place of the limit of the policy.
///
/// [`Limiter::override_limit`](crate::Limiter::override_limit) sets one, and [`Limiter::overrides`](crate::Limiter::overrides)
/// lists them.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Override {
    /// The name of the policy.
    pub policy: Box<str>,
    /// The key. A store that [hashes keys](crate::RedisStoreBuilder::hash_keys) has the hash, which stands for the key in calls of limiters
    /// on it.
    pub key: Key,
    /// The limit of the key.
    pub limit: Limit,
    /// When it ends, since the Unix epoch by the clock of the store.
    pub expires_at: Duration,
    /// The operator that has set it by an `Admin`; `None` if the application has.
    pub set_by: Option<Box<str>>,
}

impl Override {
    pub(super) fn new(policy: &str, key: Key, (limit, expires_at): (Limit, Duration), set_by: Option<&str>) -> Self {
        Self {
            policy: policy.into(),
            key,
            limit,
            expires_at,
            set_by: set_by.map(Box::from),
        }
    }
}

// Without the key, which may contain an address or a user.
impl_debug!(Override, own => policy: own.policy, limit: own.limit, expires_at: own.expires_at, set_by: own.set_by);

/// The overrides of a store. Clones share them.
#[derive(Clone)]
pub struct Overrides(pub(super) Arc<OverrideTable>);

pub(super) struct OverrideTable {
    /// When the first of them ends, in microseconds; [`NEVER`] if there are none, as nearly always.
    first_end_us: AtomicU64,
    table: RwLock<Table>,
    source: OverrideSource,
}

const NEVER: u64 = u64::MAX;

/// What stores the overrides, and their clock.
pub(super) enum OverrideSource {
    Memory(Box<dyn Fn() -> Duration + Send + Sync>),
    #[cfg(feature = "_redis")]
    Redis(RedisOverrides),
}

/// Why an override is not set or ended.
pub(crate) enum OverrideError {
    /// Nothing has changed.
    Refused(StoreError),
    /// The store has not confirmed the change, which may have been made.
    #[cfg_attr(not(feature = "_redis"), expect(dead_code, reason = "only a call of Redis can fail"))]
    Unconfirmed(StoreError),
}

impl From<OverrideError> for StoreError {
    fn from(error: OverrideError) -> Self {
        let (OverrideError::Refused(error) | OverrideError::Unconfirmed(error)) = error;
        error
    }
}

/// The overrides of each policy, by key. A policy without any is not in it.
#[derive(Default)]
struct Table(HashMap<Box<str>, HashMap<Key, Override>>);

/// The most overrides of a store: a process that connects reads all of them at once.
pub(super) const MAX_OVERRIDES: usize = 10_000;

/// The longest override: numbers of microseconds are exact up to here for longer than a century.
pub(crate) const LONGEST_OVERRIDE: Duration = Duration::from_micros(crate::limit::MAX_QUOTA);

impl Overrides {
    pub(super) fn new(source: OverrideSource) -> Self {
        Self(Arc::new(OverrideTable {
            first_end_us: AtomicU64::new(NEVER),
            table: RwLock::default(),
            source,
        }))
    }

    /// The limit of a key that overrides the one of its policy.
    #[inline]
    pub(crate) fn limit_of(&self, policy: &str, key: &Key) -> Option<Limit> {
        match self.0.first_end_us.load(Ordering::Relaxed) {
            NEVER => None,
            _ => self.find(policy, key, |found| found.limit.clone()),
        }
    }

    /// The override of a key that has not ended.
    #[cfg(feature = "admin")]
    pub(crate) fn of(&self, policy: &str, key: &Key) -> Option<Override> {
        self.find(policy, key, Override::clone)
    }

    #[cold]
    fn find<R>(&self, policy: &str, key: &Key, read: impl FnOnce(&Override) -> R) -> Option<R> {
        let now = self.now();
        let is_memory = matches!(self.0.source, OverrideSource::Memory(_));
        if is_memory && now.as_micros() >= self.0.first_end_us.load(Ordering::Relaxed).into() {
            self.0.write(|table| table.forget_expired(now));
        }
        let table = self.0.read();
        let found = table.0.get(policy)?.get(&*self.stored_key(key));
        found.filter(|found| now < found.expires_at).map(read)
    }

    /// The keys of a policy that have overrides, as they are stored.
    #[cfg(feature = "admin")]
    pub(crate) fn keys_of(&self, policy: &str) -> Vec<Key> {
        let (now, table) = (self.now(), self.0.read());
        let of_policy = table.0.get(policy).into_iter().flat_map(HashMap::values);
        of_policy
            .filter(|one| now < one.expires_at)
            .map(|one| one.key.clone())
            .collect()
    }

    /// The overrides that have not ended, by policy and key.
    pub(crate) fn list(&self) -> Vec<Override> {
        let (now, table) = (self.now(), self.0.read());
        let mut list: Vec<_> = table.iter().filter(|found| now < found.expires_at).cloned().collect();
        list.sort_by(|a, b| (&a.policy, a.key.as_str()).cmp(&(&b.policy, b.key.as_str())));
        list
    }

    /// Sets the limit of a key for so long, in the name of an operator, or ends its override without a limit.
    pub(crate) async fn set(
        &self,
        policy: &str,
        key: &Key,
        limit: Option<(Limit, Duration)>,
        set_by: Option<&str>,
    ) -> Result<(), OverrideError> {
        let limit = limit.map(|(limit, lasts)| (limit, lasts.min(LONGEST_OVERRIDE)));
        let set_by = set_by.map(line_of);
        let set_by = set_by.as_deref().filter(|name| !name.is_empty());
        let key = &*self.stored_key(key);
        if limit.is_some() {
            self.require_room(policy, key).map_err(OverrideError::Refused)?;
        }
        match &self.0.source {
            OverrideSource::Memory(now) => {
                let limit = limit.map(|(limit, lasts)| (limit, now().saturating_add(lasts)));
                self.0.write(|table| match limit {
                    Some(limit) => table.insert(Override::new(policy, key.clone(), limit, set_by)),
                    None => table.remove(policy, key),
                });
            }
            #[cfg(feature = "_redis")]
            OverrideSource::Redis(redis) => {
                let changed = redis.set(self, policy, key, limit, set_by).await;
                changed.map_err(OverrideError::Unconfirmed)?;
            }
        }
        Ok(())
    }

    /// The key as it is stored.
    fn stored_key<'a>(&self, key: &'a Key) -> Cow<'a, Key> {
        match &self.0.source {
            OverrideSource::Memory(_) => Cow::Borrowed(key),
            #[cfg(feature = "_redis")]
            OverrideSource::Redis(redis) => redis.stored_key(key),
        }
    }

    /// Fails if another override is one too many.
    fn require_room(&self, policy: &str, key: &Key) -> Result<(), StoreError> {
        let now = self.now();
        self.0.write(|table| {
            self.forget_ended(table, now);
            let in_force = || table.iter().filter(|one| now < one.expires_at);
            let replaces = |one: &Override| &*one.policy == policy && one.key == *key;
            match in_force().count() < MAX_OVERRIDES || in_force().any(replaces) {
                true => Ok(()),
                false => Err(too_many()),
            }
        })
    }

    /// Forgets the overrides that have ended. Those in Redis are known for an hour more, as long as it stores them, unless they are
    /// many: its clock may be ahead for a while, after which they apply again.
    fn forget_ended(&self, table: &mut Table, now: Duration) {
        #[cfg(feature = "_redis")]
        if let OverrideSource::Redis(_) = self.0.source {
            table.forget_expired(now.saturating_sub(Duration::from_secs(3_600)));
            if table.iter().count() <= MAX_OVERRIDES {
                return;
            }
        }
        table.forget_expired(now);
    }

    /// Applies changes, the latest of a key last, after all others are forgotten if these are `all`.
    #[cfg(any(feature = "_redis", test))]
    pub(super) fn apply(&self, all: bool, changes: impl Iterator<Item = Override>) {
        let now = self.now();
        self.0.write(|table| {
            if all {
                table.0.clear();
            }
            changes.for_each(|one| table.insert(one));
            self.forget_ended(table, now);
        });
    }

    #[cfg(feature = "_redis")]
    pub(super) fn redis(&self) -> Option<&RedisOverrides> {
        match &self.0.source {
            OverrideSource::Memory(_) => None,
            OverrideSource::Redis(redis) => Some(redis),
        }
    }

    /// The time by the clock of the store.
    pub(crate) fn now(&self) -> Duration {
        match &self.0.source {
            OverrideSource::Memory(now) => now(),
            #[cfg(feature = "_redis")]
            OverrideSource::Redis(redis) => redis.now(),
        }
    }
}

impl OverrideTable {
    fn write<R>(&self, change: impl FnOnce(&mut Table) -> R) -> R {
        let mut table = unpoisoned(self.table.write());
        let result = change(&mut table);
        let first_end = table.iter().map(|one| one.expires_at.as_micros() as u64).min();
        self.first_end_us.store(first_end.unwrap_or(NEVER), Ordering::Relaxed);
        result
    }

    fn read(&self) -> RwLockReadGuard<'_, Table> {
        unpoisoned(self.table.read())
    }
}

impl Table {
    fn iter(&self) -> impl Iterator<Item = &Override> {
        self.0.values().flat_map(HashMap::values)
    }

    fn insert(&mut self, one: Override) {
        let of_policy = self.0.entry(one.policy.clone()).or_default();
        of_policy.insert(one.key.clone(), one);
    }

    fn remove(&mut self, policy: &str, key: &Key) {
        if let Some(of_policy) = self.0.get_mut(policy) {
            of_policy.remove(key);
            self.0.retain(|_, of_policy| !of_policy.is_empty());
        }
    }

    fn forget_expired(&mut self, now: Duration) {
        self.0.retain(|_, of_policy| {
            of_policy.retain(|_, one| now < one.expires_at);
            !of_policy.is_empty()
        });
    }
}

impl_debug!(Overrides, own => list: own.list());

/// A name as a part of a line: at most 100 characters, none of which ends a line or a text in Redis.
fn line_of(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(100).collect()
}

fn too_many() -> StoreError {
    StoreError::new(
        ErrorKind::Refused,
        format!("a store has at most {MAX_OVERRIDES} overrides; end some, or give the callers plans"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SlidingLog;

    #[tokio::test]
    async fn after_the_last_override_requests_read_no_table() {
        let now = Arc::new(AtomicU64::new(0));
        let clock = now.clone();
        let seconds = move || Duration::from_secs(clock.load(Ordering::Relaxed));
        let overrides = Overrides::new(OverrideSource::Memory(Box::new(seconds)));
        let set = async |key: u64, lasts| {
            let limit = Some((Limit::from(SlidingLog::per_hour(9)), Duration::from_secs(lasts)));
            assert!(overrides.set("p", &key.into(), limit, None).await.is_ok());
        };
        let is_empty = || overrides.0.first_end_us.load(Ordering::Relaxed) == NEVER;
        assert!(is_empty());

        set(1, 9).await;
        assert!(overrides.set("p", &1_u64.into(), None, None).await.is_ok());
        assert!(is_empty(), "it was ended");

        // Those that end by themselves, at a request of another key.
        set(1, 9).await;
        set(2, 5).await;
        for (time, limited, left) in [(4, true, 2), (5, false, 1), (9, false, 0)] {
            now.store(time, Ordering::Relaxed);
            assert_eq!(overrides.limit_of("p", &2_u64.into()).is_some(), limited);
            assert_eq!((overrides.list().len(), is_empty()), (left, left == 0), "{time} s");
        }
    }

    #[tokio::test]
    async fn what_has_ended_is_in_no_list() {
        let now = Arc::new(AtomicU64::new(0));
        let clock = now.clone();
        let seconds = move || Duration::from_secs(clock.load(Ordering::Relaxed));
        let overrides = Overrides::new(OverrideSource::Memory(Box::new(seconds)));
        let limit = Some((Limit::from(SlidingLog::per_hour(9)), Duration::from_secs(5)));
        assert!(overrides.set("p", &1_u64.into(), limit, None).await.is_ok());
        for (time, listed) in [(4, 1), (5, 0)] {
            now.store(time, Ordering::Relaxed);
            assert_eq!(overrides.list().len(), listed, "{time} s");
            #[cfg(feature = "admin")]
            assert_eq!(overrides.keys_of("p").len(), listed, "{time} s");
        }
    }

    #[test]
    fn the_name_of_an_operator_is_a_line_of_at_most_100_characters() {
        assert_eq!(line_of(&"é\n".repeat(200)), "é".repeat(100));
    }
}
