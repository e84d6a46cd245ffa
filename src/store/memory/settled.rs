use std::time::Duration;

use crate::{
    limit::{Change, Effect, State},
    store::{Charge, ChargeRole, ChargeState, Operation},
};

/// A charge whose state is settled, so that it is known whether it fits; the counterpart of a charge in `lua/driver.lua`.
pub(super) struct Settled<'a> {
    charge: &'a Charge<'a>,
    state: &'a mut State,
    unsettled: Option<State>,
    /// The weight that fits before the change.
    room: u64,
    fits: bool,
    /// Whether a check is denied if it does not fit.
    may_deny: bool,
    /// Whether it is counted when the request is admitted.
    counts: bool,
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
        let needs_none = matches!(operation, Operation::Refund { .. } | Operation::EndLease);
        let room = charge
            .limit()
            .settle(state, now, if needs_none { 0 } else { charge.cost() });
        let held = operation == Operation::RenewLease && charge.limit().holds(state, charge.lease_id(), charge.cost());
        Self {
            charge,
            state,
            unsettled,
            room,
            fits: room >= charge.cost() || held,
            may_deny: charge.role() != ChargeRole::Once,
            counts: charge.role() == ChargeRole::Counted,
            now,
        }
    }

    /// Whether this charge does not deny a check.
    #[inline]
    pub(super) fn admits(&self) -> bool {
        self.fits || !self.may_deny
    }

    /// Applies the markers of a request. A marker without a next charge is not counted.
    pub(super) fn apply_markers(charges: &mut [Self]) {
        for position in 1..charges.len() {
            let [marker, next] = &mut charges[position - 1..=position] else {
                return;
            };
            if marker.charge.role() != ChargeRole::Once {
                continue;
            }
            marker.counts =
                marker.fits && next.charge.role() == ChargeRole::Counted && next.charge.limit().is_counted();
            if marker.fits && marker.room < marker.charge.limit().quota() {
                next.may_deny = false;
                next.counts = false;
            }
        }
    }

    #[inline]
    pub(super) fn decide(self, operation: Operation, allowed: bool) -> Decided {
        let Self {
            charge,
            state,
            unsettled,
            room,
            fits,
            may_deny,
            counts,
            now,
        } = self;
        let (limit, cost, role) = (charge.limit(), charge.cost(), charge.role());

        let change = match operation {
            Operation::Check | Operation::Charge if allowed && counts => Change::Add,
            Operation::Refund { admitted_at } if role != ChargeRole::CheckedOnly => Change::Refund {
                at: admitted_at.as_micros() as u64,
            },
            Operation::RenewLease if fits => Change::Renew,
            Operation::EndLease => Change::End,
            Operation::Check
            | Operation::Charge
            | Operation::Peek
            | Operation::Reset
            | Operation::Refund { .. }
            | Operation::RenewLease => Change::Nothing,
        };
        let effect = limit.change(state, now, change, cost, charge.lease_id());
        let Effect { changed, reset, .. } = effect;
        let room = match change {
            Change::Add if changed => room.saturating_sub(cost),
            Change::Add | Change::Nothing | Change::Refund { .. } | Change::Renew | Change::End => effect.room,
        };
        let lacks_room = match role {
            ChargeRole::Once => !fits && operation.compares_room(),
            ChargeRole::Counted | ChargeRole::CheckedOnly if operation == Operation::RenewLease => {
                !allowed && may_deny && !fits
            }
            ChargeRole::Counted | ChargeRole::CheckedOnly => !allowed && may_deny && room < cost,
        };
        let wait = |cost| limit.wait(state, now, cost);
        let wait_for_one = if room == 0 { wait(1) } else { 0 };
        let retry_after = (lacks_room && limit.is_counted()).then(|| match cost {
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
    fit || !operation.requires_room()
}
