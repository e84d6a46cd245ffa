use std::time::Duration;

use crate::{
    limit::{Change, Effect, State},
    store::{Charge, ChargeState, Operation},
};

/// A charge whose state is settled, so that it is known whether it fits; the counterpart of a charge in `lua/driver.lua`.
pub(super) struct Settled<'a> {
    charge: &'a Charge<'a>,
    state: &'a mut State,
    unsettled: Option<State>,
    /// The weight that fits before the change.
    room: u64,
    pub(super) fits: bool,
    now: u64,
}

/// The decision about a charge.
pub(super) struct Decided {
    pub(super) charge_state: ChargeState,
    /// The time at which the count expires, if anything was added or subtracted.
    pub(super) expires_at: Option<u64>,
    /// The time until which a check of cost 1 is denied; 0 if it is not denied.
    pub(super) denies_until: u64,
}

impl<'a> Settled<'a> {
    #[inline]
    pub(super) fn new(operation: Operation, charge: &'a Charge<'a>, state: &'a mut State, now: u64) -> Self {
        let unsettled = state.unsettled();
        let refunds = matches!(operation, Operation::Refund { .. });
        let room = charge
            .limit()
            .settle(state, now, if refunds { 0 } else { charge.cost() });
        Self {
            charge,
            state,
            unsettled,
            room,
            fits: room >= charge.cost(),
            now,
        }
    }

    #[inline]
    pub(super) fn decide(self, operation: Operation, allowed: bool) -> Decided {
        let Self {
            charge,
            state,
            unsettled,
            room,
            now,
            ..
        } = self;
        let (limit, cost) = (charge.limit(), charge.cost());

        let change = match operation {
            Operation::Refund { admitted_at } => Change::Refund {
                at: admitted_at.as_micros() as u64,
            },
            Operation::Check | Operation::Charge if allowed => Change::Add,
            Operation::Check | Operation::Charge | Operation::Peek | Operation::Reset => Change::Nothing,
        };
        let effect = limit.change(state, now, change, cost);
        let Effect { changed, reset, .. } = effect;
        let room = match change {
            Change::Add if changed => room.saturating_sub(cost),
            Change::Add | Change::Nothing | Change::Refund { .. } => effect.room,
        };
        let denies = !allowed && room < cost && limit.is_counted();
        let wait = |cost| limit.wait(state, now, cost);
        let wait_for_one = if room == 0 { wait(1) } else { 0 };
        let retry_after = denies.then(|| match cost {
            1 => Duration::from_micros(wait_for_one),
            cost => Duration::from_micros(wait(cost)),
        });
        if let (false, Some(unsettled)) = (changed, unsettled) {
            *state = unsettled;
        }
        Decided {
            charge_state: ChargeState::new(room, retry_after, Duration::from_micros(reset)),
            expires_at: changed.then_some(now + reset),
            denies_until: if room == 0 { now.saturating_add(wait_for_one) } else { 0 },
        }
    }
}

/// Whether a request is allowed, given whether all of its charges fit.
pub(super) fn allows(operation: Operation, fit: bool) -> bool {
    fit || !matches!(operation, Operation::Check | Operation::Peek)
}
