use std::time::Duration;

/// The operation of a [`StoreRequest`](super::StoreRequest).
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
        matches!(
            self,
            Self::Check | Self::Wait | Self::Peek | Self::Reset | Self::Ban { .. }
        )
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

    /// Whether it admits or denies a request, and counts it.
    pub(crate) fn decides(self) -> bool {
        matches!(self, Self::Check | Self::Wait)
    }

    /// Whether it counts the charges of an admitted request.
    pub(crate) fn counts(self) -> bool {
        matches!(self, Self::Check | Self::Wait | Self::Charge)
    }
}
