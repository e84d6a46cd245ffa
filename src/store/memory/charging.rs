use std::time::Duration;

use super::bans::AdvancedBans;
use crate::{
    limit::{Change, Effect, Line, SOON_US, Saved, Standing, State},
    store::{Charge, ChargeLine, ChargeState, Operation, StoreRequest},
};

/// A charge whose state was advanced to now, so that it is known whether it fits; the counterpart of a charge in `lua/driver.lua`.
pub(super) struct Advanced<'a> {
    charge: &'a Charge,
    state: &'a mut State,
    saved: Option<Saved>,
    bans: Option<AdvancedBans<'a>>,
    line: Option<AdvancedLine<'a>>,
    /// The cost of the charge that was added last, if any was.
    last_cost: Option<u64>,
    /// The weight that fits before the change.
    room: u64,
    /// How many of the requests there are, and how many of them fit.
    units: u64,
    fitting: u64,
    /// Whether a denial of it is counted for a ban.
    denies: bool,
    /// Whether the requests that are denied wait for what they lack.
    waits: bool,
    now: u64,
}

/// The line of a charge, without the places that have expired.
pub(super) struct AdvancedLine<'a> {
    line: &'a mut Line,
    standing: Standing<'a>,
}

/// The decision about a charge.
pub(super) struct Decided {
    pub(super) charge_state: ChargeState,
    pub(super) kept: Kept,
    pub(super) kept_bans: Option<Kept>,
}

/// For how long a state is kept.
#[derive(Clone, Copy)]
pub(super) struct Kept {
    /// The time at which the count expires, if anything was added or subtracted.
    pub(super) expires_at: Option<u64>,
    /// The time until which a check of this cost is denied, or slots are held; in the past if neither is.
    pub(super) denies_until: u64,
    pub(super) cost: u64,
}

impl<'a> AdvancedLine<'a> {
    pub(super) fn new(charge: ChargeLine, line: &'a mut Line, request: &'a StoreRequest<'_>) -> Self {
        let standing = Standing {
            charge,
            waiting: request.waiting.as_deref(),
            units: request.units as usize,
        };
        Self { line, standing }
    }
}

/// Decides a check of one charge without bans and a line, as most are: whether it is admitted, its state, and what is kept.
#[inline(always)]
pub(super) fn check(charge: &Charge, state: &mut State, now: u64) -> (bool, ChargeState, Kept) {
    let (limit, cost, saved) = (charge.limit(), charge.cost(), state.saved());
    let room = limit.read(state, now, cost);
    let (change, allowed) = match room >= cost {
        true => (Change::Add { count: 1 }, true),
        false => (Change::Nothing, false),
    };
    let effect = limit.change(state, now, change, cost, charge.lease);
    let remaining = if allowed {
        room - cost
    } else {
        effect.room.unwrap_or(room)
    };
    let is_held = limit.is_held();
    let wait = if remaining < cost || is_held {
        limit.wait(state, now, cost)
    } else {
        0
    };
    if let (false, Some(saved)) = (effect.changed, saved) {
        state.restore(saved);
    }
    let retry_after = (!allowed).then(|| Duration::from_micros(wait));
    let kept_for = if is_held { effect.reset } else { wait };
    let kept = Kept {
        expires_at: effect.changed.then_some(now + effect.reset),
        denies_until: now.saturating_add(kept_for),
        cost,
    };
    let charge_state = ChargeState::new(remaining, retry_after, Duration::from_micros(effect.reset));
    (allowed, charge_state, kept)
}

impl<'a> Advanced<'a> {
    #[inline]
    pub(super) fn new(
        operation: Operation,
        (charge, units): (&'a Charge, u64),
        bans: Option<AdvancedBans<'a>>,
        line: Option<AdvancedLine<'a>>,
        (state, last_cost): (&'a mut State, Option<u64>),
        now: u64,
    ) -> Self {
        let saved = state.saved();
        let (limit, cost) = (charge.limit(), charge.cost());
        let needed = u64::from(operation.compares_room()) * cost.saturating_mul(units);
        let room = limit.read(state, now, needed);
        let held = operation == Operation::RenewLease && limit.holds(state, charge.lease, cost);
        let fitting = match &line {
            Some(AdvancedLine { line, standing, .. }) if operation.regards_lines() => {
                line.fitting(standing, room, cost) as u64
            }
            Some(_) | None if units == 1 => u64::from(room >= cost || held),
            Some(_) | None => (room / cost).min(units),
        };
        Self {
            charge,
            state,
            saved,
            bans,
            line,
            last_cost,
            room,
            units,
            fitting,
            denies: false,
            waits: false,
            now,
        }
    }

    /// Whether its limit lacks room for some of the requests.
    #[inline]
    fn lacks(&self) -> bool {
        self.fitting < self.units
    }

    #[inline]
    fn is_banned(&self) -> bool {
        self.bans.as_ref().is_some_and(AdvancedBans::is_in_force)
    }

    /// How long the first request waits that is not admitted, if so many are and leave this room.
    #[cold]
    fn wait_in_line(&self, admitted: u64, room: u64) -> u64 {
        let Some(AdvancedLine { line, standing, .. }) = &self.line else {
            return 0;
        };
        let before = line.before(standing, admitted as usize);
        let needed = (before, self.charge.cost());
        match self.charge.limit().time_until(self.state, self.now, room, needed) {
            0 => SOON_US,
            wait => wait,
        }
    }

    /// Whether a request that has just arrived may wait for this charge, if it lacks room.
    fn may_wait(&self) -> bool {
        if !self.lacks() {
            return true;
        }
        let Some(longest_us) = self.line.as_ref().map(|line| line.standing.charge.longest_us) else {
            return false;
        };
        // When slots will be free is not known.
        let known = match self.charge.limit().is_held() {
            true => 1,
            false => self.wait_in_line(0, self.room),
        };
        known <= longest_us
    }

    /// Whether requests of these charges that are denied wait: those that have just arrived if they may, others until the last check.
    #[cold]
    fn wait(operation: Operation, charges: &mut [Self]) -> bool {
        let lines = || charges.iter().filter_map(|charge| charge.line.as_ref());
        let waits = match lines().any(|line| line.standing.waiting.is_some()) {
            true => lines().any(|AdvancedLine { standing, .. }| {
                standing.charge.leads.is_some() || standing.charge.leads_elsewhere
            }),
            false => {
                let may_wait = |charge: &Self| charge.may_wait() && !charge.is_banned();
                operation == Operation::Wait && charges.iter().all(may_wait)
            }
        };
        charges.iter_mut().for_each(|charge| charge.waits = waits);
        waits
    }

    /// How many requests of these charges are admitted, all if the operation requires no room; `None` if they are denied.
    #[inline]
    pub(super) fn judge(operation: Operation, charges: &mut [Self], units: u64) -> Option<u64> {
        if !operation.requires_room() {
            return Some(units);
        }
        let is_banned = charges.iter().any(Self::is_banned);
        let fitting = charges.iter().map(|charge| charge.fitting).min();
        let admitted = if is_banned { 0 } else { fitting.unwrap_or(units) };
        let waits = charges.iter().any(|charge| charge.line.is_some()) && Self::wait(operation, charges);
        if admitted > 0 || units == 0 {
            return Some(admitted);
        }
        if operation.decides() && !waits && !is_banned {
            for charge in charges {
                charge.denies = charge.lacks() && charge.charge.cost() <= charge.charge.limit().quota();
            }
        }
        None
    }

    /// Decides the charge of requests of which so many are admitted, as [judged](Self::judge). `woken` receives the lines whose
    /// first requests fit now.
    #[inline]
    pub(super) fn decide(mut self, operation: Operation, judged: Option<u64>, woken: &mut Vec<u64>) -> Decided {
        let admitted = judged.unwrap_or(0);
        let (limit, cost, now) = (self.charge.limit(), self.charge.cost(), self.now);
        let weight = cost.saturating_mul(admitted);
        let change = if operation.counts() && admitted > 0 {
            Change::Add { count: admitted }
        } else if let Operation::Refund { admitted_at } = operation {
            let at = admitted_at.as_micros() as u64;
            let kept = self.charge.kept;
            Change::GiveBack { at, kept }
        } else if operation == Operation::RenewLease && !self.lacks() {
            Change::Renew
        } else if operation == Operation::EndLease {
            Change::End
        } else {
            Change::Nothing
        };
        let effect = limit.change(self.state, now, change, cost, self.charge.lease);
        let Effect { changed, reset, room } = effect;
        let room = match change {
            Change::Add { .. } => self.room.saturating_sub(weight),
            Change::Nothing | Change::Renew | Change::End => room.unwrap_or(self.room),
            Change::GiveBack { .. } => room.unwrap_or_else(|| limit.read(self.state, now, 0)),
        };
        let lacks_room = match operation == Operation::RenewLease {
            true => self.lacks(),
            false => room < cost,
        };
        let wait = if room < cost || limit.is_held() {
            limit.wait(self.state, now, cost)
        } else {
            0
        };
        // Of requests that wait, the first one that is denied.
        let denies = judged.is_none() || operation == Operation::Wait && admitted < self.units;
        let mut retry_after = (denies && lacks_room).then(|| Duration::from_micros(wait));
        // What a refund leaves may admit its own cost, and still deny that of the charges.
        let last_cost = match change {
            Change::Add { .. } => cost,
            Change::Nothing | Change::GiveBack { .. } | Change::Renew | Change::End => self.last_cost.unwrap_or(cost),
        };
        let kept_for = match limit.is_held() {
            true => reset,
            false if room < last_cost => limit.wait(self.state, now, last_cost),
            false => 0,
        };
        let mut remaining = room;
        if self.line.is_some() {
            (remaining, retry_after) = self.decide_line(operation, admitted, room, woken);
            retry_after = retry_after.filter(|_| denies);
        }
        if let (false, Some(saved)) = (changed, self.saved) {
            self.state.restore(saved);
        }
        let mut charge_state = ChargeState::new(remaining, retry_after, Duration::from_micros(reset));
        let mut kept_bans = None;
        if let Some(bans) = self.bans {
            let (rest, kept) = bans.decide(self.denies);
            charge_state = charge_state.banned(rest);
            kept_bans = Some(kept);
        }
        Decided {
            charge_state,
            kept: Kept {
                expires_at: changed.then_some(now + reset),
                denies_until: now.saturating_add(kept_for),
                cost: last_cost,
            },
            kept_bans,
        }
    }

    /// Ends the decision in the line of the charge, which has this room now. Returns what remains behind the line, and how long the
    /// first request waits that is not admitted.
    #[cold]
    fn decide_line(
        &mut self,
        operation: Operation,
        admitted: u64,
        room: u64,
        woken: &mut Vec<u64>,
    ) -> (u64, Option<Duration>) {
        let is_banned = self.is_banned();
        // A key that has room for the first request which is not admitted does not hold it, though it lacks room for all.
        let lacks = operation.regards_lines() && (self.lacks() && self.fitting <= admitted || is_banned);
        let arrival = (self.charge.cost(), self.waits);
        // Before the place of a request that has just arrived is added.
        let is_new = self.line.as_ref().is_some_and(|line| line.standing.waiting.is_none());
        let known = (lacks && is_new).then(|| self.wait_in_line(0, room));
        let Some(AdvancedLine { line, standing }) = &mut self.line else {
            return (room, None);
        };
        let settles = operation == Operation::Wait || standing.waiting.is_some();
        let place = standing.charge.number;
        let before = line.place_of(place);
        if settles {
            line.settle(standing, admitted as usize, lacks, arrival, self.now);
        }
        // Others may fit only if requests have left the place: those of another limit would wake each other without an end.
        let wakes = match operation == Operation::Wait {
            true => line.place_of(place) != before,
            false => matches!(operation, Operation::Refund { .. } | Operation::EndLease),
        };
        if wakes {
            let except = (operation == Operation::Wait && standing.charge.leads.is_some()).then_some(place);
            let is_refund = matches!(operation, Operation::Refund { .. });
            woken.extend(line.ready(room, except, is_refund));
        }
        let remaining = line.remaining(standing, room);
        if !lacks {
            return (remaining, None);
        }
        let wait = known.unwrap_or_else(|| self.wait_in_line(admitted, room));
        (remaining, Some(Duration::from_micros(wait)))
    }
}
