use std::{ops::RangeInclusive, time::Duration};

use crate::limit::MAX_QUOTA;

/// The operation of a [`StoreRequest`](super::StoreRequest).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Counts all charges if all of them fit, else none.
    Check,
    /// Counts all charges at the earliest time at which all of them fit, if each fits within its
    /// [longest wait](super::Charge::wait_up_to); else none, as a check.
    ///
    /// The [`decided_at`](super::ChargeState::decided_at) of the states is the time at which a charge counts. The request is
    /// admitted at the latest of them: the caller waits until then, from the
    /// [`server_time`](super::StoreResponse::server_time) of the response on, and [refunds](Self::Refund) its charges if it
    /// leaves before. Slots of [`Limit::Concurrency`](crate::Limit::Concurrency) are not taken then, but by another request at that
    /// time.
    ///
    /// Where only slots lack that charges may wait for, nothing is counted, and the outcome
    /// [waits](super::Outcome::is_waiting).
    Reserve,
    /// Counts all charges, also above the limits; later requests wait for it.
    Charge,
    /// Returns what [`Check`](Self::Check) would return, and counts nothing.
    Peek,
    /// Removes all counts of the keys.
    Reset,
    /// Removes the costs that were counted at this time of the store's clock, as far as they still count. A charge of
    /// [`Limit::Concurrency`](crate::Limit::Concurrency) ends its [lease](super::Charge::lease).
    ///
    /// While requests wait for a [`TokenBucket`](crate::TokenBucket), only the cost of the last of them is removed: the
    /// others have their times already.
    Refund {
        /// The time at which the charges were counted, since the Unix epoch: the server time of the response that admitted
        /// the request or, after a [`Reserve`](Self::Reserve), the `decided_at` of the state.
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
        match self {
            Self::Check | Self::Reserve | Self::Charge | Self::Peek | Self::RenewLease => true,
            Self::Reset | Self::Refund { .. } | Self::EndLease | Self::Ban { .. } => false,
        }
    }

    /// Whether it is denied if a charge does not fit.
    pub(crate) fn requires_room(self) -> bool {
        matches!(self, Self::Check | Self::Reserve | Self::Peek | Self::RenewLease)
    }

    /// Whether it regards the bans of charges.
    #[inline]
    pub(super) fn regards_bans(self) -> bool {
        matches!(
            self,
            Self::Check | Self::Reserve | Self::Peek | Self::Reset | Self::Ban { .. }
        )
    }

    /// Whether it admits or denies a request, and counts it.
    pub(crate) fn decides(self) -> bool {
        matches!(self, Self::Check | Self::Reserve)
    }

    /// Whether it counts the charges of an admitted request.
    pub(crate) fn counts(self) -> bool {
        matches!(self, Self::Check | Self::Reserve | Self::Charge)
    }
}

/// How long a charge may wait for its limit, and how many units may wait for it at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// In microseconds; 0 if the charge has to fit at once.
    pub(crate) longest_us: u64,
    pub(crate) most: u64,
}

impl Waiting {
    /// The most units that wait by default. A log finds the turn of each of them within the entries that one call reads.
    pub(crate) const MOST: u64 = 500;

    /// The numbers of units that may be the most.
    pub(crate) const POSSIBLE: RangeInclusive<u64> = 1..=MAX_QUOTA;

    pub(crate) const NONE: Self = Self {
        longest_us: 0,
        most: Self::MOST,
    };

    pub(crate) fn up_to(longest: Duration, most: u64) -> Self {
        let longest_us = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        Self {
            longest_us: longest_us.min(MAX_QUOTA),
            most,
        }
    }
}
