use std::time::Duration;

use crate::{
    limit::{Change, Effect, Saved, State, Turn},
    store::{Charge, ChargeRole, ChargeState, LeaseId, Operation, Waiting},
};

/// A charge whose state was advanced to now, so that it is known whether it fits; the counterpart of a charge in `lua/driver.lua`.
pub(super) struct Advanced<'a> {
    charge: &'a Charge<'a>,
    state: &'a mut State,
    saved: Option<Saved>,
    /// The weight that fits before the change.
    room: u64,
    fits: bool,
    /// When it fits, if it does not fit now and may wait for that.
    own_turn: Option<u64>,
    /// Whether it may wait in the queue for slots.
    may_queue: bool,
    /// Whether it waits in the queue.
    queues: bool,
    /// Whether a check is denied if it does not fit.
    may_deny: bool,
    /// Whether it is counted when the request is admitted.
    counts: bool,
    /// Whether this is a ban that counts a denial.
    denies: bool,
    /// Whether it is not refunded.
    stays: bool,
    now: u64,
}

/// The decision about a charge.
pub(super) struct Decided {
    pub(super) charge_state: ChargeState,
    /// The time at which the count expires, if anything was added or subtracted.
    pub(super) expires_at: Option<u64>,
    /// The time until which a check of the same cost is denied, or slots are held; in the past if neither is.
    pub(super) denies_until: u64,
    /// The requests that wait for slots and may take them now.
    pub(super) woken: Vec<LeaseId>,
}

/// The decision about a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Denied,
    /// It waits for slots.
    Waits,
    /// It is admitted at this time, or its operation requires no room.
    Allowed(u64),
}

impl<'a> Advanced<'a> {
    #[inline]
    pub(super) fn new(operation: Operation, charge: &'a Charge<'a>, state: &'a mut State, now: u64) -> Self {
        let saved = state.saved();
        let (role, cost) = (charge.role(), charge.cost());
        let needed = if operation.compares_room() { cost } else { 0 };
        let room = charge.limit().advance(state, now, needed, operation == Operation::Peek);
        let held = operation == Operation::RenewLease && charge.limit().holds(state, charge.lease_id(), cost);
        let room = if held {
            room.max(cost)
        } else if operation == Operation::Reserve && charge.limit().is_held() {
            charge.limit().own_room(state, now, cost, charge.lease_id())
        } else {
            room
        };
        let fits = room >= if role == ChargeRole::Ban { 1 } else { cost };
        // A ban is not waited for.
        let waits = !fits && operation == Operation::Reserve && role != ChargeRole::Ban;
        let own_turn = if waits { own_turn(charge, state, now) } else { None };
        let may_queue = operation == Operation::Reserve && charge.limit().is_held() && may_queue(charge, state);
        Self {
            charge,
            state,
            saved,
            room,
            fits,
            own_turn,
            may_queue,
            queues: false,
            may_deny: match role {
                ChargeRole::Once => false,
                ChargeRole::Ban => operation != Operation::RenewLease,
                ChargeRole::Counted | ChargeRole::CheckedOnly => true,
            },
            counts: role == ChargeRole::Counted || (role == ChargeRole::Ban && operation == Operation::Charge),
            denies: false,
            stays: false,
            now,
        }
    }

    /// Whether this charge does not deny a check.
    #[inline]
    pub(super) fn admits(&self) -> bool {
        self.fits || self.own_turn.is_some() || self.may_queue || !self.may_deny
    }

    /// When it is admitted, if it may be.
    #[inline]
    pub(super) fn turn(&self) -> u64 {
        self.own_turn.unwrap_or(self.now)
    }

    /// The decision about a request of these charges. One that waits for slots is in the queues up to the first limit without room.
    #[inline]
    pub(super) fn judge(operation: Operation, charges: &mut [Self], now: u64) -> Verdict {
        if !allows(operation, charges.iter().all(Self::admits)) {
            return Verdict::Denied;
        }
        let turn = charges.iter().map(Self::turn).max().unwrap_or(now);
        let lacks = |charge: &Self| charge.may_queue && !charge.fits;
        match charges.iter().position(lacks) {
            Some(first) if turn <= now => {
                for charge in &mut charges[..=first] {
                    charge.queues = charge.may_queue;
                }
                Verdict::Waits
            }
            _ => Verdict::Allowed(turn),
        }
    }

    /// Applies the markers of a request. A marker without a next charge is not counted.
    pub(super) fn apply_markers(charges: &mut [Self]) {
        for position in 0..charges.len() {
            let Some(subject) = Self::subject(charges, position) else {
                continue;
            };
            let Ok([marker, next]) = charges.get_disjoint_mut([position, subject]) else {
                continue;
            };
            if marker.charge.role() != ChargeRole::Once {
                continue;
            }
            marker.counts =
                marker.fits && next.charge.role() == ChargeRole::Counted && next.charge.limit().is_counted();
            if marker.fits && marker.room < marker.charge.limit().quota() {
                next.may_deny = false;
                next.counts = false;
                next.own_turn = None;
                next.may_queue = false;
            }
        }
    }

    /// Leaves all charges of a refund if one of its markers has counted repetitions: what was charged has admitted these too.
    pub(super) fn keep_repeated(charges: &mut [Self]) {
        let was_repeated = |position: usize| {
            let charge = &charges[position];
            let marks = charge.charge.role() == ChargeRole::Once && Self::subject(charges, position).is_some();
            marks && charge.room + 1 < charge.charge.limit().quota()
        };
        if (0..charges.len()).any(was_repeated) {
            for charge in charges {
                charge.stays = true;
            }
        }
    }

    /// Applies the bans of a request, after its markers.
    pub(super) fn apply_bans(operation: Operation, charges: &mut [Self]) {
        if charges.iter().any(Self::is_ban) {
            Self::apply_some_bans(operation, charges);
        }
    }

    #[cold]
    fn apply_some_bans(operation: Operation, charges: &mut [Self]) {
        // A ban is not regarded where the charge that it is for counts nothing.
        for position in 0..charges.len() {
            let guarded = Self::guarded(charges, position);
            if guarded.is_some_and(|guarded| !guarded.charge.limit().is_counted()) {
                charges[position].may_deny = false;
            }
        }
        let in_force = charges.iter().any(|charge| charge.is_ban() && !charge.admits());
        for position in 0..charges.len() {
            let guarded = Self::guarded(charges, position).filter(|guarded| !guarded.is_ban());
            let is_denied = guarded.is_some_and(|guarded| {
                let charge = guarded.charge;
                !guarded.admits() && charge.limit().is_counted() && charge.cost() <= charge.limit().quota()
            });
            charges[position].denies = operation.counts() && operation.requires_room() && !in_force && is_denied;
        }
    }

    /// The charge that the one at this position is for, if that is a ban.
    fn guarded(charges: &[Self], position: usize) -> Option<&Self> {
        let subject = Self::subject(charges, position).filter(|_| charges[position].is_ban());
        subject.map(|subject| &charges[subject])
    }

    fn subject(charges: &[Self], position: usize) -> Option<usize> {
        ChargeRole::subject(charges, position, |charge| charge.charge.role())
    }

    fn is_ban(&self) -> bool {
        self.charge.role() == ChargeRole::Ban
    }

    /// Decides the charge of a request.
    #[inline]
    pub(super) fn decide(self, operation: Operation, verdict: Verdict) -> Decided {
        let (allowed, turn) = match verdict {
            Verdict::Denied | Verdict::Waits => (false, self.now),
            Verdict::Allowed(turn) => (true, turn),
        };
        let Self {
            charge,
            state,
            saved,
            room,
            fits,
            own_turn,
            may_queue,
            queues,
            may_deny,
            counts,
            denies,
            stays,
            now,
        } = self;
        let (limit, cost, role) = (charge.limit(), charge.cost(), charge.role());
        // Slots are taken at the turn.
        let is_unmarked = role == ChargeRole::Once && room == limit.quota();
        let takes_later = limit.is_held() && allowed && counts && turn > now && !is_unmarked;

        let change = match operation {
            Operation::Check | Operation::Reserve if denies => Change::Deny,
            Operation::Reserve if queues => Change::Queue,
            Operation::Reserve if limit.is_held() && !(allowed && counts && turn <= now) => Change::Leave,
            // Its repetitions would be admitted before it.
            Operation::Reserve if turn > now && role == ChargeRole::Once && room == limit.quota() => Change::Nothing,
            Operation::Reserve if allowed && counts && turn > now => Change::Reserve(Turn {
                own: own_turn,
                joint: turn,
            }),
            Operation::Check | Operation::Reserve | Operation::Charge if allowed && counts => Change::Add,
            Operation::Refund { admitted_at } if role != ChargeRole::CheckedOnly && !stays => Change::Refund {
                at: admitted_at.as_micros() as u64,
            },
            Operation::RenewLease if fits => Change::Renew,
            Operation::EndLease => Change::End,
            Operation::Check
            | Operation::Reserve
            | Operation::Charge
            | Operation::Peek
            | Operation::Reset
            | Operation::Refund { .. }
            | Operation::RenewLease => Change::Nothing,
        };
        let effect = limit.change(state, now, change, cost, charge.lease_id());
        let Effect {
            changed, reset, lasts, ..
        } = effect;
        let room = match change {
            Change::Add | Change::Reserve(_) if changed && role != ChargeRole::Ban && !limit.is_held() => {
                room.saturating_sub(cost)
            }
            Change::Add
            | Change::Reserve(_)
            | Change::Deny
            | Change::Nothing
            | Change::Refund { .. }
            | Change::Renew
            | Change::End
            | Change::Queue
            | Change::Leave => effect.room,
        };
        let lacks_room = match role {
            ChargeRole::Once => !fits && operation.compares_room(),
            ChargeRole::Ban => operation.requires_room() && may_deny && room == 0,
            ChargeRole::Counted | ChargeRole::CheckedOnly if operation == Operation::RenewLease => {
                !allowed && may_deny && !fits
            }
            ChargeRole::Counted | ChargeRole::CheckedOnly if limit.is_held() => {
                !allowed && may_deny && !fits && (!may_queue || verdict == Verdict::Waits)
            }
            // One that would wait does not deny.
            ChargeRole::Counted | ChargeRole::CheckedOnly => !allowed && may_deny && room < cost && own_turn.is_none(),
        };
        // The cost of a ban is its length.
        let needed = if role == ChargeRole::Ban { 1 } else { cost };
        let wait = if room < needed || limit.is_held() {
            limit.wait(state, now, needed)
        } else {
            0
        };
        let retry_after = (lacks_room && limit.is_counted()).then(|| Duration::from_micros(wait));
        let kept_for = if limit.is_held() { reset } else { wait };
        if let (false, Some(saved)) = (changed, saved) {
            state.restore(saved);
        }
        let mut charge_state = ChargeState::new(room, retry_after, Duration::from_micros(reset));
        let counts_at = if takes_later { turn } else { effect.turn };
        if counts_at > now {
            charge_state = charge_state.at(Duration::from_micros(counts_at));
        }
        Decided {
            charge_state,
            expires_at: changed.then_some(now + lasts),
            denies_until: now.saturating_add(kept_for),
            woken: if limit.is_held() {
                state.take_woken()
            } else {
                Vec::new()
            },
        }
    }
}

/// When a charge fits that does not fit now, if it may wait so long. One that is not counted has nothing to reserve.
#[cold]
fn own_turn(charge: &Charge<'_>, state: &State, now: u64) -> Option<u64> {
    if charge.role() != ChargeRole::Counted {
        return None;
    }
    let Waiting { longest_us, most } = charge.waits();
    let turn = charge.limit().turn(state, now, charge.cost(), most)?;
    (turn - now <= longest_us).then_some(turn)
}

/// Whether a charge may wait in the queue for slots.
#[cold]
fn may_queue(charge: &Charge<'_>, state: &State) -> bool {
    let Waiting { longest_us, most } = charge.waits();
    let waits = charge.role() == ChargeRole::Counted && longest_us > 0;
    waits && charge.limit().may_queue(state, charge.cost(), charge.lease_id(), most)
}

/// Whether a request is allowed, given whether all of its charges fit.
fn allows(operation: Operation, fit: bool) -> bool {
    fit || !operation.requires_room()
}
