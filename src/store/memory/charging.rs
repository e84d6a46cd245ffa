use std::time::Duration;

use crate::{
    Ban,
    limit::{Banned, Change, Effect, Saved, State, Turn},
    store::{Charge, ChargeState, LeaseId, Operation, Waiting},
};

/// A charge whose state was advanced to now, so that it is known whether it fits; the counterpart of a charge in `lua/driver.lua`.
pub(super) struct Advanced<'a> {
    charge: &'a Charge<'a>,
    state: &'a mut State,
    saved: Option<Saved>,
    bans: Option<AdvancedBans<'a>>,
    /// The weight that fits before the change.
    room: u64,
    fits: bool,
    /// When it fits, if it does not fit now and may wait for that.
    own_turn: Option<u64>,
    /// Whether it may wait in the queue for slots.
    may_queue: bool,
    /// Whether it waits in the queue.
    queues: bool,
    /// Whether a denial of it is counted for a ban.
    denies: bool,
    now: u64,
}

/// The bans of a charge, advanced to now.
pub(super) struct AdvancedBans<'a> {
    ban: &'a Ban,
    state: &'a mut State,
    banned: Banned,
    now: u64,
}

/// The decision about a charge.
pub(super) struct Decided {
    pub(super) charge_state: ChargeState,
    pub(super) kept: Kept,
    pub(super) kept_bans: Option<Kept>,
    /// The requests that wait for slots and may take them now.
    pub(super) woken: Vec<LeaseId>,
}

/// For how long a state is kept.
#[derive(Clone, Copy)]
pub(super) struct Kept {
    /// The time at which the count expires, if anything was added or subtracted.
    pub(super) expires_at: Option<u64>,
    /// The time until which a check of the same cost is denied, or slots are held; in the past if neither is.
    pub(super) denies_until: u64,
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

impl<'a> AdvancedBans<'a> {
    pub(super) fn new(ban: &'a Ban, state: &'a mut State, now: u64) -> Self {
        let mut banned = match state {
            State::Banned(banned) => *banned,
            State::Log(_) | State::Counter(_) | State::Window(_) | State::Bucket(_) | State::Leases(_) => {
                Banned::default()
            }
        };
        ban.advance(&mut banned, now);
        Self {
            ban,
            state,
            banned,
            now,
        }
    }

    fn is_in_force(&self) -> bool {
        self.banned.rest(self.now) > 0
    }

    /// Begins a ban of this length, if it is above 0.
    pub(super) fn begin(mut self, length: u64) -> (ChargeState, Kept) {
        if length > 0 {
            self.ban.begin(&mut self.banned, self.now, length);
        }
        let room = self.ban.room(&self.banned, self.now);
        let reset = Duration::from_micros(self.ban.reset(&self.banned, self.now));
        let (rest, kept) = self.keep(length > 0);
        (ChargeState::new(room, None, reset).banned(rest), kept)
    }

    /// Counts a denial of the charge, if there was one.
    fn decide(mut self, denies: bool) -> (Duration, Kept) {
        let changed = denies && self.ban.deny(&mut self.banned, self.now);
        self.keep(changed)
    }

    /// Stores what has changed, and returns the rest of the ban.
    fn keep(self, changed: bool) -> (Duration, Kept) {
        let rest = self.banned.rest(self.now);
        let kept = Kept {
            expires_at: changed.then(|| self.now + self.ban.reset(&self.banned, self.now)),
            denies_until: self.now + rest,
        };
        if changed {
            *self.state = State::Banned(self.banned);
        }
        (Duration::from_micros(rest), kept)
    }
}

impl<'a> Advanced<'a> {
    #[inline]
    pub(super) fn new(
        operation: Operation,
        charge: &'a Charge<'a>,
        bans: Option<AdvancedBans<'a>>,
        state: &'a mut State,
        now: u64,
    ) -> Self {
        let saved = state.saved();
        let cost = charge.cost();
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
        let fits = room >= cost;
        let waits = !fits && operation == Operation::Reserve;
        let own_turn = if waits { own_turn(charge, state, now) } else { None };
        let may_queue = operation == Operation::Reserve && charge.limit().is_held() && may_queue(charge, state);
        Self {
            charge,
            state,
            saved,
            bans,
            room,
            fits,
            own_turn,
            may_queue,
            queues: false,
            denies: false,
            now,
        }
    }

    /// Whether its limit admits the request.
    #[inline]
    fn admits(&self) -> bool {
        self.fits || self.own_turn.is_some() || self.may_queue
    }

    #[inline]
    fn is_banned(&self) -> bool {
        self.bans.as_ref().is_some_and(AdvancedBans::is_in_force)
    }

    /// When it is admitted, if it may be.
    #[inline]
    fn turn(&self) -> u64 {
        self.own_turn.unwrap_or(self.now)
    }

    /// The decision about a request of these charges. One that waits for slots is in the queues up to the first limit without room.
    #[inline]
    pub(super) fn judge(operation: Operation, charges: &mut [Self], now: u64) -> Verdict {
        let denies = |charge: &Self| charge.is_banned() || !charge.admits();
        if operation.requires_room() && charges.iter().any(denies) {
            if operation.decides() && !charges.iter().any(Self::is_banned) {
                for charge in charges {
                    charge.denies = !charge.admits() && charge.charge.cost() <= charge.charge.limit().quota();
                }
            }
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
            bans,
            room,
            fits,
            own_turn,
            may_queue,
            queues,
            denies,
            now,
        } = self;
        let (limit, cost) = (charge.limit(), charge.cost());
        // Slots are taken at the turn.
        let takes_later = limit.is_held() && allowed && turn > now;

        let change = match operation {
            Operation::Reserve if queues => Change::Queue,
            Operation::Reserve if limit.is_held() && !(allowed && turn <= now) => Change::Leave,
            Operation::Reserve if allowed && turn > now => Change::Reserve(Turn {
                own: own_turn,
                joint: turn,
            }),
            Operation::Check | Operation::Reserve | Operation::Charge if allowed => Change::Add,
            Operation::Refund { admitted_at } => Change::Refund {
                at: admitted_at.as_micros() as u64,
            },
            Operation::RenewLease if fits => Change::Renew,
            Operation::EndLease => Change::End,
            Operation::Check
            | Operation::Reserve
            | Operation::Charge
            | Operation::Peek
            | Operation::Reset
            | Operation::RenewLease
            | Operation::Ban { .. } => Change::Nothing,
        };
        let effect = limit.change(state, now, change, cost, charge.lease_id());
        let Effect {
            changed, reset, lasts, ..
        } = effect;
        let room = match change {
            Change::Add | Change::Reserve(_) if changed && !limit.is_held() => room.saturating_sub(cost),
            Change::Add
            | Change::Reserve(_)
            | Change::Nothing
            | Change::Refund { .. }
            | Change::Renew
            | Change::End
            | Change::Queue
            | Change::Leave => effect.room,
        };
        let lacks_room = if operation == Operation::RenewLease {
            !fits
        } else if limit.is_held() {
            !fits && (!may_queue || verdict == Verdict::Waits)
        } else {
            // One that would wait does not deny.
            room < cost && own_turn.is_none()
        };
        let wait = if room < cost || limit.is_held() {
            limit.wait(state, now, cost)
        } else {
            0
        };
        let retry_after = (!allowed && lacks_room).then(|| Duration::from_micros(wait));
        let kept_for = if limit.is_held() { reset } else { wait };
        if let (false, Some(saved)) = (changed, saved) {
            state.restore(saved);
        }
        let mut charge_state = ChargeState::new(room, retry_after, Duration::from_micros(reset));
        let counts_at = if takes_later { turn } else { effect.turn };
        if counts_at > now {
            charge_state = charge_state.at(Duration::from_micros(counts_at));
        }
        let mut kept_bans = None;
        if let Some(bans) = bans {
            let (rest, kept) = bans.decide(denies);
            charge_state = charge_state.banned(rest);
            kept_bans = Some(kept);
        }
        Decided {
            charge_state,
            kept: Kept {
                expires_at: changed.then_some(now + lasts),
                denies_until: now.saturating_add(kept_for),
            },
            kept_bans,
            woken: if limit.is_held() {
                state.take_woken()
            } else {
                Vec::new()
            },
        }
    }
}

/// When a charge fits that does not fit now, if it may wait so long.
#[cold]
fn own_turn(charge: &Charge<'_>, state: &State, now: u64) -> Option<u64> {
    let Waiting { longest_us, most } = charge.waits();
    let turn = charge.limit().turn(state, now, charge.cost(), most)?;
    (turn - now <= longest_us).then_some(turn)
}

/// Whether a charge may wait in the queue for slots.
#[cold]
fn may_queue(charge: &Charge<'_>, state: &State) -> bool {
    let Waiting { longest_us, most } = charge.waits();
    longest_us > 0 && charge.limit().may_queue(state, charge.cost(), charge.lease_id(), most)
}
