use std::time::Duration;

/// The operation of a [`StoreRequest`](super::StoreRequest).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Counts all charges if all of them fit, else none. The [role](super::ChargeRole) of a charge can exempt it from either.
    Check,
    /// Counts all charges at the earliest time at which all of them fit, if each fits within its
    /// [longest wait](super::Charge::wait_up_to); else none, as a check.
    ///
    /// The [`decided_at`](super::ChargeState::decided_at) of the states is the time at which a charge counts. The request is
    /// admitted at the latest of them: the caller waits until then, from the
    /// [`server_time`](super::StoreResponse::server_time) of the response on, and [refunds](Self::Refund) its charges if it
    /// leaves before.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::{Key, ManualClock, MemoryStore, SlidingLog, store::{Charge, Operation, Store, StoreRequest}};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let store = MemoryStore::builder().manual_clock(&ManualClock::new()).build();
    /// let (limit, key) = (SlidingLog::per_second(1).into(), Key::from("42"));
    /// let charges = [Charge::new("mails", &limit, &key, 1).wait_up_to(Duration::from_secs(2))];
    ///
    /// let mut waits = Vec::new();
    /// for _ in 0..4 {
    ///     let response = store.decide(&[StoreRequest::new(Operation::Reserve, &charges)]).await?;
    ///     let (outcome, now) = (&response.outcomes()[0], response.server_time);
    ///     let turn = outcome.states()[0].decided_at.unwrap_or(now);
    ///     waits.push(outcome.allowed.then_some((turn - now).as_secs()));
    /// }
    /// assert_eq!(waits, [Some(0), Some(1), Some(2), None]);
    /// # Ok(())
    /// # }
    /// ```
    Reserve,
    /// Counts all charges, also above the limits; later requests wait for it. The [role](super::ChargeRole) of a charge can
    /// exempt it.
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
}

impl Operation {
    /// Whether it compares the room with the costs.
    pub(crate) fn compares_room(self) -> bool {
        match self {
            Self::Check | Self::Reserve | Self::Charge | Self::Peek | Self::RenewLease => true,
            Self::Reset | Self::Refund { .. } | Self::EndLease => false,
        }
    }

    /// Whether it is denied if a charge does not fit.
    pub(crate) fn requires_room(self) -> bool {
        matches!(self, Self::Check | Self::Reserve | Self::Peek | Self::RenewLease)
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
