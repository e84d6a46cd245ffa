use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::{Arc, LazyLock},
};

use super::request::Operation;
use crate::{
    Ban, Key, Limit,
    limit::{ChargeLine, LeaseId, MAX_QUOTA, NamedLimit},
};

/// A cost on one key of one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge {
    pub(crate) limit: Arc<NamedLimit>,
    pub(crate) key: Key,
    /// Of the policy and the key.
    pub(crate) hash: u64,
    pub(crate) cost: u64,
    /// What stays of the charge that a refund of the cost is a part of.
    pub(crate) kept: u64,
    pub(crate) ban: Option<Arc<Ban>>,
    pub(crate) line: Option<Box<ChargeLine>>,
    pub(crate) lease: Option<LeaseId>,
}

/// Constructors.
impl Charge {
    /// A charge of `cost` units on the `key` of the policy of this name.
    ///
    /// A check of a cost above the limit is never admitted; with [`Operation::Charge`] such a cost counts in full.
    #[must_use]
    pub fn new(policy: &str, limit: &Limit, key: &Key, cost: u64) -> Self {
        Self::on(
            Arc::new(NamedLimit::new(policy.into(), limit.clone())),
            key.clone(),
            cost,
        )
    }

    /// The same for a limit that has a name.
    #[inline(always)]
    pub(crate) fn on(limit: Arc<NamedLimit>, key: Key, cost: u64) -> Self {
        Self {
            hash: hash(&limit, &key),
            limit,
            key,
            cost,
            kept: 0,
            ban: None,
            line: None,
            lease: None,
        }
    }

    /// The same charge with the bans of its policy:
    ///
    /// * A check or peek is denied while a ban is in force, and nothing is counted then.
    /// * If a check is denied, no ban is in force for any of its charges, and this charge itself has no room for its cost, which is
    ///   within its limit, one denial is counted. With the last one that the [`Ban`] permits a ban begins.
    /// * [`Operation::Ban`] begins a ban without a denial.
    /// * A reset ends the ban and forgets the ones before. Other operations do not regard bans.
    #[must_use]
    pub fn ban<'b>(self, ban: impl Into<Option<&'b Ban>>) -> Self {
        let ban = ban.into().map(|ban| Arc::new(*ban));
        Self { ban, ..self }
    }

    /// With the line of its key, for a policy for which requests may wait.
    #[doc(hidden)]
    #[must_use]
    pub fn in_line(self, line: Option<ChargeLine>) -> Self {
        let line = line.map(Box::new);
        Self { line, ..self }
    }

    /// The same charge with the id of a lease, which holds the slots of a charge of [`Limit::Concurrency`].
    ///
    /// The id is that of a new lease for [`Operation::Check`] and [`Operation::Charge`]: the default is a random one, which
    /// cannot be renewed or ended. A lease is renewed and ended with the limit and the cost with which it was taken. Charges of
    /// other limits do not use it.
    #[must_use]
    pub fn lease(self, lease: impl Into<Option<LeaseId>>) -> Self {
        let lease = lease.into();
        Self { lease, ..self }
    }

    /// The same charge, for a refund of a part of what was charged: so much of it stays.
    #[doc(hidden)]
    #[must_use]
    pub fn keeping(self, kept: u64) -> Self {
        Self { kept, ..self }
    }

    /// The same charge at another cost, for an operation that follows its check.
    pub(crate) fn after_check(&self, cost: u64) -> Self {
        let mut charge = Self { cost, ..self.clone() };
        if let Some(line) = &mut charge.line {
            (line.ahead, line.leads, line.leads_elsewhere) = (0, None, false);
        }
        charge
    }
}

/// Accessors.
impl Charge {
    /// The name under which the policy is counted: its own, or a [former](crate::Policy::formerly) one.
    #[must_use]
    pub fn policy(&self) -> &str {
        self.limit.counted_as()
    }

    /// The limit of the policy.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        &self.limit.limit
    }

    /// The key that the cost is counted under.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The shape of the limit, as in the keys of Redis.
    #[cfg(feature = "_redis")]
    #[must_use]
    pub fn shape_text(&self) -> &str {
        &self.limit.shape_text
    }

    /// The cost in units, from 1 to 999,999,999,999,999.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost.clamp(1, MAX_QUOTA)
    }

    /// The bans of the policy, if this operation regards them.
    #[inline]
    pub(super) fn ban_for(&self, operation: Operation) -> Option<&Ban> {
        self.ban.as_deref().filter(|_| operation.regards_bans())
    }

    /// Its line, if this operation reads or wakes it.
    #[inline]
    pub(super) fn line_for(&self, operation: Operation) -> Option<ChargeLine> {
        self.line.as_deref().copied().filter(|_| operation.reads_lines())
    }

    /// Whether both are charges of one count.
    #[cfg(feature = "_redis")]
    #[inline]
    pub(crate) fn counts_with(&self, other: &Self) -> bool {
        self.hash == other.hash && self.key == other.key && self.limit.has_counts_of(&other.limit)
    }
}

/// The hash of a key and a policy in tables.
///
/// Callers choose keys, so these are hashed with a secret. They do not choose names of policies; and shapes are few, so that
/// they need no part in it.
#[inline(always)]
fn hash(limit: &NamedLimit, key: &Key) -> u64 {
    static SECRET: LazyLock<RandomState> = LazyLock::new(RandomState::new);

    let mut hasher = SECRET.build_hasher();
    hasher.write(key.as_bytes());
    hasher.finish() ^ limit.name_hash
}
