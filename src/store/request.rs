use std::{
    borrow::Cow,
    hash::{BuildHasher, Hasher, RandomState},
    sync::{Arc, LazyLock},
    time::Duration,
};

use smallvec::SmallVec;

use crate::{
    Ban, Key, Limit,
    limit::{Arrival, ChargeLine, LeaseId, MAX_QUOTA, NamedLimit},
};

/// One operation on the charges of one request.
#[derive(Clone, Debug)]
pub struct StoreRequest<'a> {
    pub(super) operation: Operation,
    charges: Charges<'a>,
    /// How many equal requests this one stands for.
    pub(super) units: u32,
    #[cfg_attr(
        not(feature = "_redis"),
        expect(dead_code, reason = "only Redis fails for some requests of a list")
    )]
    pub(super) is_optional: bool,
    /// The place of the process in a line, in which the requests are the first.
    pub(super) waiting: Option<Cow<'a, [Arrival]>>,
    /// Whether it regards the bans of its charges and nothing else: a check counts a denial of each, and a reset forgets them.
    #[cfg(feature = "_redis")]
    pub(super) is_of_bans: bool,
}

/// Charges of one request. Those that wait in a queue are owned.
#[derive(Clone, Debug, PartialEq)]
enum Charges<'a> {
    Borrowed(SmallVec<[&'a Charge; 2]>),
    #[cfg(feature = "_redis")]
    Owned(Box<[Charge]>),
}

impl<'a> StoreRequest<'a> {
    /// An operation on these charges, no two of which are on one key of one policy, and all of which are of limits that count.
    #[doc(hidden)]
    #[must_use]
    #[inline]
    pub fn new(operation: Operation, charges: impl IntoIterator<Item = &'a Charge>) -> Self {
        Self::of(operation, charges.into_iter().collect())
    }

    /// The same on one charge.
    #[inline(always)]
    pub(crate) fn of_one(operation: Operation, charge: &'a Charge) -> Self {
        Self::of(operation, SmallVec::from_buf_and_len([charge; 2], 1))
    }

    #[inline(always)]
    fn of(operation: Operation, charges: SmallVec<[&'a Charge; 2]>) -> Self {
        debug_assert!(
            matches!(operation, Operation::Ban { .. }) || charges.iter().all(|charge| charge.limit().is_counted()),
            "no store is called for limits that count nothing"
        );
        Self {
            operation,
            charges: Charges::Borrowed(charges),
            units: 1,
            is_optional: false,
            waiting: None,
            #[cfg(feature = "_redis")]
            is_of_bans: false,
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
        Self {
            waiting: waiting.map(Cow::Borrowed),
            units,
            ..self
        }
    }

    /// The same request, beside another one in a list: if the store fails for this one alone, it responds to the others, with
    /// [`Outcome::unknown`](super::Outcome::unknown) for this one. A store may fail for all of them instead.
    pub(crate) fn optional(self, is_optional: bool) -> Self {
        Self { is_optional, ..self }
    }

    /// The operation.
    #[doc(hidden)]
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// The charges, in the order of the states in the [`Outcome`](super::Outcome).
    #[doc(hidden)]
    #[inline]
    pub fn charges(&self) -> impl Iterator<Item = &Charge> {
        (0..self.charge_count()).map(|position| self.charge(position))
    }

    #[inline]
    pub(super) fn charge_count(&self) -> usize {
        match &self.charges {
            Charges::Borrowed(charges) => charges.len(),
            #[cfg(feature = "_redis")]
            Charges::Owned(charges) => charges.len(),
        }
    }

    #[inline]
    pub(super) fn charge(&self, position: usize) -> &Charge {
        match &self.charges {
            Charges::Borrowed(charges) => charges[position],
            #[cfg(feature = "_redis")]
            Charges::Owned(charges) => &charges[position],
        }
    }

    /// The only charge.
    #[inline]
    pub(super) fn only_charge(&self) -> Option<&Charge> {
        (self.charge_count() == 1).then(|| self.charge(0))
    }

    /// The same request with charges that it owns.
    #[cfg(feature = "_redis")]
    pub(super) fn to_owned(&self, change: impl Fn(&mut Charge)) -> StoreRequest<'static> {
        self.with(
            self.operation,
            self.charges().cloned().map(|mut charge| {
                change(&mut charge);
                charge
            }),
        )
    }

    /// Another operation of the same request, on these charges.
    #[cfg(feature = "_redis")]
    pub(super) fn with(&self, operation: Operation, charges: impl Iterator<Item = Charge>) -> StoreRequest<'static> {
        StoreRequest {
            operation,
            charges: Charges::Owned(charges.collect()),
            units: self.units,
            is_optional: self.is_optional,
            waiting: self.waiting.as_deref().map(|waiting| Cow::Owned(waiting.to_vec())),
            is_of_bans: self.is_of_bans,
        }
    }
}

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

/// The operation of a [`StoreRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Counts all charges if all of them fit, else none.
    Check,
    /// As a check, of requests that may wait: nothing is counted, and no denial for a ban, if they are denied. Those that have just
    /// arrived stand in the lines of the charges that lack room for them then, if they may wait for each.
    /// Those that stand in a line replace the place of the process in it.
    Wait,
    /// Counts all charges, also above the limits; later requests wait for it.
    Charge,
    /// Returns what [`Check`](Self::Check) would return, and counts nothing.
    Peek,
    /// Removes all counts of the keys.
    Reset,
    /// Removes the costs that were counted at this time of the store's clock, as far as they still count. A charge of
    /// [`Limit::Concurrency`](crate::Limit::Concurrency) ends its [lease](super::Charge::lease).
    Refund {
        /// The time at which the charges were counted, since the Unix epoch: the server time of the response that admitted
        /// the request.
        admitted_at: Duration,
    },
    /// Renews the [leases](super::Charge::lease) of charges of [`Limit::Concurrency`](crate::Limit::Concurrency). A lease that
    /// has expired is added again if there is room for its cost; else its slots are lost, and the outcome is not
    /// [allowed](super::Outcome::allowed). Charges of other limits are compared with the room, and not counted.
    RenewLease,
    /// Ends the [leases](super::Charge::lease) of charges of [`Limit::Concurrency`](crate::Limit::Concurrency), which releases
    /// their slots. It has no effect on charges of other limits.
    EndLease,
    /// Begins the [bans](super::Charge::ban) of all charges, of this length and at most that of [`Ban::longest`](crate::Ban::longest),
    /// unless a longer one is in force. With a length of zero it only reads them. Their limits are not regarded.
    ///
    /// The states are those of the bans: the denials that remain, 0 while a ban is in force; the rest of the ban; and the time until
    /// the ban, the denials and the number of bans are forgotten.
    Ban {
        /// The length of the ban, in whole microseconds.
        length: Duration,
    },
}

impl Operation {
    /// Whether it compares the room with the costs.
    pub(crate) fn compares_room(self) -> bool {
        self.requires_room() || self == Self::Charge
    }

    /// Whether it is denied if a charge does not fit.
    pub(crate) fn requires_room(self) -> bool {
        matches!(self, Self::Check | Self::Wait | Self::Peek | Self::RenewLease)
    }

    /// Whether it regards the bans of charges.
    #[inline]
    pub(super) fn regards_bans(self) -> bool {
        self.regards_lines() || matches!(self, Self::Reset | Self::Ban { .. })
    }

    /// Whether it reads the lines of its charges: it is denied for them, or wakes them.
    pub(super) fn reads_lines(self) -> bool {
        self.regards_lines() || matches!(self, Self::Reset | Self::Refund { .. } | Self::EndLease)
    }

    /// Whether it is denied for the requests that stand in the lines of its charges.
    #[inline]
    pub(crate) fn regards_lines(self) -> bool {
        matches!(self, Self::Check | Self::Wait | Self::Peek)
    }

    /// The same, or a check where nothing is waited for.
    #[inline]
    pub(crate) fn of_waiting(self, waits: bool) -> Self {
        if self == Self::Wait && !waits {
            Self::Check
        } else {
            self
        }
    }

    /// Whether it admits or denies a request, and counts it.
    pub(crate) fn decides(self) -> bool {
        matches!(self, Self::Check | Self::Wait)
    }

    /// Whether it counts the charges of an admitted request.
    pub(crate) fn counts(self) -> bool {
        matches!(self, Self::Check | Self::Wait | Self::Charge)
    }
}
