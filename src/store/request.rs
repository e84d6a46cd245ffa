use std::{borrow::Cow, time::Duration};

use smallvec::SmallVec;

use super::charge::Charge;
use crate::limit::Arrival;

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

    /// The charge of a check of one unit that has no other charge, no bans and no line.
    #[inline]
    pub(super) fn plain_check(&self) -> Option<&Charge> {
        let is_one = self.operation == Operation::Check && self.units == 1 && self.charge_count() == 1;
        let charge = is_one.then(|| self.charge(0))?;
        (charge.ban.is_none() && charge.line.is_none()).then_some(charge)
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
