use std::{
    hash::{BuildHasher, Hasher, RandomState},
    time::Duration,
};

use super::quota::{Quota, hash_name};
use crate::{Key, Limit, limit::MAX_QUOTA};

/// One operation on the charges of one request.
///
/// ```
/// use tower_quota::{Key, SlidingLog, store::{Charge, Operation, StoreRequest}};
///
/// let (limit, key) = (SlidingLog::per_minute(5).into(), Key::from("42"));
/// let charges = [Charge::new("login", &limit, &key, 2)];
/// let request = StoreRequest::new(Operation::Check, &charges);
///
/// assert_eq!(request.operation(), Operation::Check);
/// assert_eq!(request.charges()[0].policy(), "login");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct StoreRequest<'a> {
    operation: Operation,
    charges: &'a [Charge<'a>],
}

impl<'a> StoreRequest<'a> {
    /// An operation on these charges. The costs of several charges on one key of one policy are added up.
    #[must_use]
    pub fn new(operation: Operation, charges: &'a [Charge<'a>]) -> Self {
        Self { operation, charges }
    }

    /// The operation.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// The charges, in the order of the states in the [`Outcome`](super::Outcome).
    #[must_use]
    pub fn charges(&self) -> &'a [Charge<'a>] {
        self.charges
    }
}

/// The operation of a [`StoreRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Counts all charges if all of them fit, else none.
    Check,
    /// Counts all charges, also above the limits; later requests wait for it.
    Charge,
    /// Returns what [`Check`](Self::Check) would return, and counts nothing.
    Peek,
    /// Removes all counts of the keys.
    Reset,
    /// Removes the costs that were counted at this time of the store's clock, as far as they still count.
    Refund {
        /// The server time of the response that admitted the request, since the Unix epoch.
        admitted_at: Duration,
    },
}

impl Operation {
    /// Whether it is denied if a charge does not fit.
    pub(crate) fn requires_room(self) -> bool {
        matches!(self, Self::Check | Self::Peek)
    }
}

/// A cost on one key of one policy.
///
/// ```
/// use tower_quota::{Key, SlidingLog, store::Charge};
///
/// let (limit, key) = (SlidingLog::per_minute(5).into(), Key::from("42"));
/// let charge = Charge::new("login", &limit, &key, 2);
///
/// assert_eq!((charge.policy(), charge.limit(), charge.key(), charge.cost()), ("login", &limit, &key, 2));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    policy: &'a str,
    /// The hash of the policy's name by [`hash_name`].
    pub(super) policy_hash: u64,
    limit: &'a Limit,
    key: &'a Key,
    cost: u64,
}

/// Constructors.
impl<'a> Charge<'a> {
    /// A charge of `cost` units on the `key` of the policy of this name.
    ///
    /// The cost is from 1 to 999,999,999,999,999; other values are clamped. A check of a cost above the limit is never
    /// admitted; with [`Operation::Charge`] such a cost counts in full.
    #[must_use]
    pub fn new(policy: &'a str, limit: &'a Limit, key: &'a Key, cost: u64) -> Self {
        Self {
            policy,
            policy_hash: hash_name(policy),
            limit,
            key,
            cost: cost.clamp(1, MAX_QUOTA),
        }
    }

    /// The same for a quota, whose name is hashed already.
    #[inline]
    pub(crate) fn on(quota: &'a Quota, key: &'a Key, cost: u64) -> Self {
        Self {
            policy: &quota.name,
            policy_hash: quota.name_hash,
            limit: &quota.limit,
            key,
            cost: cost.clamp(1, MAX_QUOTA),
        }
    }

    /// The same charge with a higher cost.
    pub(super) fn plus(self, cost: u64) -> Self {
        self.with(self.limit, self.cost + cost)
    }

    /// The same charge with another limit and cost.
    pub(super) fn with(self, limit: &'a Limit, cost: u64) -> Self {
        Self {
            limit,
            cost: cost.clamp(1, MAX_QUOTA),
            ..self
        }
    }
}

/// Questions.
impl<'a> Charge<'a> {
    /// The name of the policy.
    #[must_use]
    pub fn policy(&self) -> &'a str {
        self.policy
    }

    /// The limit of the policy.
    #[must_use]
    pub fn limit(&self) -> &'a Limit {
        self.limit
    }

    /// The key that the cost is counted under.
    pub fn key(&self) -> &'a Key {
        self.key
    }

    /// The cost in units, from 1 to 999,999,999,999,999.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// The hash of the key and the policy in a table.
    ///
    /// Callers choose keys, so these are hashed with a secret. They do not choose names of policies; and algorithms are few,
    /// so that they need no part in it.
    #[inline]
    pub(super) fn hash(&self, hasher: &RandomState) -> u64 {
        let mut hasher = hasher.build_hasher();
        hasher.write(self.key.as_bytes());
        hasher.finish() ^ self.policy_hash
    }

    /// Whether both charges have the same count.
    pub(super) fn same_key(&self, other: &Charge<'_>) -> bool {
        self.key == other.key && self.policy == other.policy && self.limit.algorithm() == other.limit.algorithm()
    }
}
