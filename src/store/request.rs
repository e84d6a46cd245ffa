use std::{
    borrow::Cow,
    hash::{BuildHasher, Hasher, RandomState},
    time::Duration,
};

use super::{
    ChargeState,
    operation::{ChargeRole, Operation, Waiting},
};
use crate::{
    Key, Limit,
    limit::{LeaseId, MAX_QUOTA, NamedLimit, hash_text},
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
}

impl<'a> StoreRequest<'a> {
    /// An operation on these charges. The costs of several charges on one key of one policy are added up; if their roles
    /// differ, the sum is [counted](ChargeRole::Counted).
    #[doc(hidden)]
    #[must_use]
    pub fn new(operation: Operation, charges: &'a [Charge<'a>]) -> Self {
        Self {
            operation,
            charges,
            units: 1,
            is_optional: false,
        }
    }

    /// So many equal checks, each of them with these charges, of which as many are admitted as fit. None of the charges may have a
    /// role or be of slots.
    pub(crate) fn units(self, units: u32) -> Self {
        Self {
            units: units.max(1),
            ..self
        }
    }

    pub(super) fn unit_count(&self) -> u32 {
        self.units
    }

    /// Another operation on other charges in the place of this request.
    #[cfg(feature = "_redis")]
    pub(super) fn with<'b>(&self, operation: Operation, charges: &'b [Charge<'b>]) -> StoreRequest<'b> {
        StoreRequest {
            operation,
            charges,
            units: self.units,
            is_optional: self.is_optional,
        }
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
    role: ChargeRole,
    waiting: Waiting,
    lease: Option<LeaseId>,
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
            role: match limit.is_ban() {
                true => ChargeRole::Ban,
                false => ChargeRole::Counted,
            },
            waiting: Waiting::NONE,
            lease: None,
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
            role: ChargeRole::Counted,
            waiting: Waiting::NONE,
            lease: None,
        }
    }

    /// The same charge in the role [`ChargeRole::CheckedOnly`].
    #[must_use]
    pub fn checked_only(self) -> Self {
        self.in_role(ChargeRole::CheckedOnly)
    }

    /// The same charge in the role [`ChargeRole::Once`].
    #[must_use]
    pub fn once(self) -> Self {
        self.in_role(ChargeRole::Once)
    }

    fn in_role(self, role: ChargeRole) -> Self {
        match self.role {
            ChargeRole::Ban => self,
            ChargeRole::Counted | ChargeRole::CheckedOnly | ChargeRole::Once => Self { role, ..self },
        }
    }

    /// The ban before this charge, on the same key.
    pub(crate) fn ban(self, ban: &'a Limit, cost: u64) -> Self {
        Self {
            role: ChargeRole::Ban,
            ..self.with(ban, cost)
        }
    }

    /// The same charge, which an [`Operation::Reserve`] may count at most this much later.
    ///
    /// The default is zero: it has to fit at once. So does a charge of a limit that cannot wait, whatever is set here, and one
    /// that is not [counted](ChargeRole::Counted). [`Policy::wait_up_to`](crate::Policy::wait_up_to) lists the limits that can.
    #[must_use]
    pub fn wait_up_to(self, longest: Duration) -> Self {
        self.waiting(Waiting::up_to(longest, self.waiting.most))
    }

    /// The same charge, which an [`Operation::Reserve`] denies if then more than this number of units would wait for the limit.
    ///
    /// The default is 500, and the largest number is 999,999,999,999,999.
    #[must_use]
    pub fn max_waiting(self, units: u64) -> Self {
        let most = units.min(MAX_QUOTA);
        self.waiting(Waiting { most, ..self.waiting })
    }

    #[inline]
    pub(crate) fn waiting(self, waiting: Waiting) -> Self {
        Self { waiting, ..self }
    }

    /// The same charge with the id of a lease, which holds the slots of a charge of [`Limit::Concurrency`].
    ///
    /// The id is that of a new lease for [`Operation::Check`] and [`Operation::Charge`]: the default is a random one, which
    /// cannot be renewed or ended. A lease is renewed and ended with the limit and the cost with which it was taken. Charges of
    /// other limits do not use it.
    #[must_use]
    pub fn lease(self, lease: LeaseId) -> Self {
        self.leased(Some(lease))
    }

    #[inline]
    pub(crate) fn leased(self, lease: Option<LeaseId>) -> Self {
        Self { lease, ..self }
    }

    /// A marker before this charge.
    pub(crate) fn marker(self, limit: &'a Limit, key: &'a Key, cost: u64) -> Self {
        Self {
            key,
            waiting: Waiting::NONE,
            lease: None,
            ..self.with(limit, cost).once()
        }
    }

    /// The sum of two charges on one key, which is counted unless both have the same other role.
    pub(super) fn plus(self, other: &Self) -> Self {
        let role = if self.role == other.role {
            self.role
        } else {
            ChargeRole::Counted
        };
        Self {
            role,
            ..self.with(self.limit, self.cost + other.cost)
        }
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

    /// What the charge is in its request.
    #[must_use]
    pub fn role(&self) -> ChargeRole {
        self.role
    }

    /// The longest wait in an [`Operation::Reserve`].
    #[must_use]
    pub fn longest_wait(&self) -> Duration {
        Duration::from_micros(self.waiting.longest_us)
    }

    /// How long it may wait, and how many units may.
    pub(super) fn waits(&self) -> Waiting {
        self.waiting
    }

    /// The id of the lease that holds the slots of the charge; `None` if it has no id of its own.
    #[must_use]
    pub fn lease_id(&self) -> Option<LeaseId> {
        self.lease
    }

    /// The hash of the key and the policy in a table.
    ///
    /// Callers choose keys, so these are hashed with a secret. They do not choose names of policies; and algorithms are few,
    /// so that they need no part in it.
    #[inline(always)]
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

/// A request in which no two charges are on the same key.
pub(super) struct Folded<'a> {
    pub(super) operation: Operation,
    pub(super) charges: Cow<'a, [Charge<'a>]>,
    pub(super) folds: Folds,
    pub(super) units: u32,
}

/// The position of each charge among the folded ones; `None` if no charges were folded.
#[derive(Clone, Debug, Default)]
pub(super) struct Folds(Option<Box<[usize]>>);

/// Adds up the charges of a request that are on one key of one policy.
pub(super) fn fold<'a>(request: &StoreRequest<'a>) -> Folded<'a> {
    let charges = request.charges();
    let repeats =
        |(position, charge): (usize, &Charge<'_>)| charges[..position].iter().any(|earlier| earlier.same_key(charge));
    let (charges, folds) = match charges.iter().enumerate().any(repeats) {
        true => add_up(charges),
        false => (Cow::Borrowed(charges), Folds::default()),
    };
    Folded {
        operation: request.operation(),
        charges,
        folds,
        units: request.unit_count(),
    }
}

#[cold]
fn add_up<'a>(charges: &[Charge<'a>]) -> (Cow<'a, [Charge<'a>]>, Folds) {
    let mut folded = Vec::<Charge<'_>>::new();
    let mut places = Vec::new();
    for charge in charges {
        let place = folded.iter().position(|earlier| earlier.same_key(charge));
        match place {
            Some(place) => folded[place] = folded[place].plus(charge),
            None => folded.push(*charge),
        }
        places.push(place.unwrap_or(folded.len() - 1));
    }
    (Cow::Owned(folded), Folds(Some(places.into())))
}

impl Folds {
    /// The charge states of a request, from those of its folded charges.
    pub(super) fn unfold(&self, states: &[ChargeState]) -> impl Iterator<Item = ChargeState> {
        let places = self.0.as_deref();
        let charges = places.map_or(states.len(), <[usize]>::len);
        (0..charges).filter_map(move |charge| {
            let place = places.map_or(charge, |places| places[charge]);
            states.get(place).copied()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SlidingLog, store::LeaseId};

    #[test]
    fn a_marker_does_not_wait_and_has_no_lease() {
        let (limit, key) = (Limit::from(SlidingLog::per_hour(5)), Key::from("k"));
        let charge = Charge::new("p", &limit, &key, 1);
        let charge = charge.wait_up_to(Duration::from_secs(3)).lease(LeaseId::random());
        assert_eq!(charge.longest_wait(), Duration::from_secs(3));

        let marker = charge.marker(&limit, &key, 2);
        assert_eq!((marker.longest_wait(), marker.lease_id()), (Duration::ZERO, None));
        assert_eq!((marker.role(), marker.cost()), (ChargeRole::Once, 2));
    }
}
