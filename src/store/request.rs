#[cfg(feature = "_redis")]
use std::borrow::Cow;
use std::hash::{BuildHasher, Hasher, RandomState};

use super::operation::Operation;
#[cfg(feature = "_redis")]
use crate::limit::ShapeText;
use crate::{
    Ban, Key, Limit,
    limit::{Arrival, LeaseId, MAX_QUOTA, NamedLimit, hash_text},
};

/// One operation on the charges of one request.
#[derive(Clone, Copy, Debug)]
pub struct StoreRequest<'a> {
    operation: Operation,
    charges: &'a [Charge<'a>],
    /// How many equal requests this one stands for.
    units: u32,
    #[cfg_attr(
        not(feature = "_redis"),
        expect(dead_code, reason = "only Redis fails for some requests of a list")
    )]
    is_optional: bool,
    waiting: Option<&'a [Arrival]>,
}

impl<'a> StoreRequest<'a> {
    /// An operation on these charges, no two of which are on one key of one policy, and all of which are of limits that count.
    #[doc(hidden)]
    #[must_use]
    pub fn new(operation: Operation, charges: &'a [Charge<'a>]) -> Self {
        debug_assert!(
            matches!(operation, Operation::Ban { .. }) || charges.iter().all(|charge| charge.limit.is_counted()),
            "no store is called for limits that count nothing"
        );
        Self {
            operation,
            charges,
            units: 1,
            is_optional: false,
            waiting: None,
        }
    }

    /// So many equal checks, each of them with these charges, of which as many are admitted as fit. None of the charges may
    /// be of slots, or of bans.
    pub(crate) fn units(self, units: u32) -> Self {
        Self {
            units: units.max(1),
            ..self
        }
    }

    /// The first `units` of these requests, which stand in the line of a charge in this order.
    #[doc(hidden)]
    #[must_use]
    pub fn standing(self, waiting: Option<&'a [Arrival]>, units: u32) -> Self {
        Self { waiting, units, ..self }
    }

    pub(super) fn waiting(&self) -> Option<&'a [Arrival]> {
        self.waiting
    }

    pub(super) fn unit_count(&self) -> u32 {
        self.units
    }

    /// The same request, beside another one in a list: if the store fails for this one alone, it responds to the others, with
    /// [`Outcome::unknown`](super::Outcome::unknown) for this one. A store may fail for all of them instead.
    pub(crate) fn optional(self) -> Self {
        Self {
            is_optional: true,
            ..self
        }
    }

    #[cfg(feature = "_redis")]
    pub(crate) fn is_optional(&self) -> bool {
        self.is_optional
    }

    /// The operation.
    #[doc(hidden)]
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// The charges, in the order of the states in the [`Outcome`](super::Outcome).
    #[doc(hidden)]
    #[must_use]
    pub fn charges(&self) -> &'a [Charge<'a>] {
        self.charges
    }
}

/// A cost on one key of one policy.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    policy: &'a str,
    /// The hash of the policy's name by [`hash_text`].
    pub(super) policy_hash: u64,
    limit: &'a Limit,
    key: &'a Key,
    cost: u64,
    ban: Option<&'a Ban>,
    line: Option<ChargeLine>,
    lease: Option<LeaseId>,
    /// The shape of the limit as a text, if it is known.
    #[cfg(feature = "_redis")]
    shape_text: Option<&'a str>,
}

/// The line of a charge, for which requests may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChargeLine {
    /// Identifies it in this process.
    pub number: u64,
    /// How long a request that has just arrived may wait, in microseconds.
    pub longest_us: u64,
    /// The cost of the requests that wait in this process, and are not in its place.
    pub ahead: u64,
    /// Whether this is the line in which the requests that are decided are the first of their process.
    pub leads: bool,
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
            policy_hash: hash_text(policy),
            limit,
            key,
            cost: cost.clamp(1, MAX_QUOTA),
            ban: None,
            line: None,
            lease: None,
            #[cfg(feature = "_redis")]
            shape_text: None,
        }
    }

    /// The same for a quota, whose name is hashed already.
    #[inline]
    pub(crate) fn on(named: &'a NamedLimit, key: &'a Key, cost: u64) -> Self {
        Self {
            policy: &named.name,
            policy_hash: named.name_hash,
            limit: &named.limit,
            key,
            cost: cost.clamp(1, MAX_QUOTA),
            ban: None,
            line: None,
            lease: None,
            #[cfg(feature = "_redis")]
            shape_text: Some(&named.shape_text),
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
    #[inline]
    pub fn ban(self, ban: impl Into<Option<&'a Ban>>) -> Self {
        Self {
            ban: ban.into(),
            ..self
        }
    }

    /// The same with its line changed, if it has one.
    pub(crate) fn map_line(self, change: impl FnOnce(ChargeLine) -> ChargeLine) -> Self {
        Self {
            line: self.line.map(change),
            ..self
        }
    }

    /// With the line of its key, for a policy for which requests may wait.
    #[inline]
    #[doc(hidden)]
    #[must_use]
    pub fn in_line(self, line: Option<ChargeLine>) -> Self {
        Self { line, ..self }
    }

    /// The same charge with the id of a lease, which holds the slots of a charge of [`Limit::Concurrency`].
    ///
    /// The id is that of a new lease for [`Operation::Check`] and [`Operation::Charge`]: the default is a random one, which
    /// cannot be renewed or ended. A lease is renewed and ended with the limit and the cost with which it was taken. Charges of
    /// other limits do not use it.
    #[must_use]
    #[inline]
    pub fn lease(self, lease: impl Into<Option<LeaseId>>) -> Self {
        Self {
            lease: lease.into(),
            ..self
        }
    }

    /// The same charge with another limit and cost.
    pub(super) fn with(self, limit: &'a Limit, cost: u64) -> Self {
        Self {
            limit,
            cost: cost.clamp(1, MAX_QUOTA),
            #[cfg(feature = "_redis")]
            shape_text: None,
            ..self
        }
    }
}

/// Accessors.
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

    /// The bans of the policy, if this operation regards them.
    #[inline]
    pub(super) fn ban_for(&self, operation: Operation) -> Option<&'a Ban> {
        self.ban.filter(|_| operation.regards_bans())
    }

    /// The shape of its limit, as in the keys of Redis.
    #[cfg(feature = "_redis")]
    #[doc(hidden)]
    #[must_use]
    pub fn shape_text(&self) -> Cow<'a, str> {
        match self.shape_text {
            Some(text) => text.into(),
            None => ShapeText(self.limit).to_string().into(),
        }
    }

    /// Its line, if this operation reads or wakes it.
    #[inline]
    pub(super) fn line_for(&self, operation: Operation) -> Option<ChargeLine> {
        self.line.filter(|_| operation.reads_lines())
    }

    /// The id of the lease that holds the slots of the charge; `None` if it has no id of its own.
    pub(crate) fn lease_id(&self) -> Option<LeaseId> {
        self.lease
    }

    /// The hash of the key and the policy in a table.
    ///
    /// Callers choose keys, so these are hashed with a secret. They do not choose names of policies; and shapes are few, so that
    /// they need no part in it.
    #[inline(always)]
    pub(super) fn hash(&self, hasher: &RandomState) -> u64 {
        let mut hasher = hasher.build_hasher();
        hasher.write(self.key.as_bytes());
        hasher.finish() ^ self.policy_hash
    }
}
