//! The check of the first requests in a line.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    Undecided, caught,
    check::{send, settle},
    failing::ended,
    line::{Entry, NO_LINE, Rank, find},
    waiting::{Lacking, Waiter},
};
use crate::{
    Denial, PolicyDecision,
    limit::{Arrival, PLACE_SIZE},
    store::{Operation, Owed, StoreError, StoreResponse},
};

/// The line in which a request is checked, and the place of the process in it, in which the request is the first.
#[derive(Clone)]
pub(super) struct Led {
    line: u64,
    pub(super) waiting: SmallVec<[Arrival; 4]>,
    /// See [`ChargeLine::leads`](crate::store::ChargeLine::leads).
    known: u64,
    /// Where it comes in the lines if it is checked for the last time.
    last: Option<Comes>,
}

/// When a request has arrived for the store, and its number.
#[derive(Clone, Copy)]
pub(super) struct Comes {
    pub(super) at: u64,
    pub(super) number: u64,
}

impl Comes {
    /// The number of a request that has just arrived, and comes after all that are equal.
    pub(super) const NEW: u64 = u64::MAX;
}

impl Undecided {
    /// Tells the store where the requests that are about to be checked stand in the lines of their keys, or would stand.
    #[cold]
    pub(crate) fn enter_lines(&mut self) {
        let comes = self.comes();
        let led = self.led.as_ref().map(|led| (led.line, led.known));
        for policy in &mut self.inner().policies {
            let is_local = policy.local.is_some();
            let counted = policy.local.as_deref_mut().unwrap_or(&mut policy.charge);
            let Some(line) = counted.line.as_deref_mut() else {
                continue;
            };
            line.leads = led.filter(|(led, _)| *led == line.number).map(|(_, known)| known);
            let ahead = |comes| Some(find(line.number)?.state().ahead_of(policy.waiting, comes, is_local));
            line.ahead = comes.and_then(ahead).unwrap_or(0);
        }
    }

    /// Lets the request replace the place of the process in a line, of whose requests it is the first, with this number of equal ones.
    pub(super) fn lead(&mut self, line: u64, waiting: &[Arrival], known: u64, units: u32) {
        self.led = Some(Box::new(Led {
            line,
            waiting: waiting.into(),
            known,
            last: None,
        }));
        self.inner().units = units;
    }

    /// The same for a request that is checked for the last time, and leads no line.
    pub(super) fn lead_none(&mut self, last: Comes) {
        self.lead(NO_LINE, &[Arrival { at: last.at, weight: 0 }], 0, 1);
        if let Some(led) = &mut self.led {
            led.last = Some(last);
        }
    }

    /// Where it comes in the lines, unless it leads one: it has just arrived, after all of them, or is checked for the last time.
    pub(super) fn comes(&self) -> Option<Comes> {
        let new = Comes {
            at: u64::MAX,
            number: Comes::NEW,
        };
        self.led.as_ref().map_or(Some(new), |led| led.last)
    }
}

/// A request that a check decides, and that it is to be given back if its caller leaves meanwhile.
pub(super) type Checked = (Arc<Waiter>, Undecided, Option<Owed>);

/// The requests that a check decides, and the place of the process, of which they are the first.
pub(super) struct Group {
    pub(super) requests: SmallVec<[Checked; 1]>,
    arrivals: SmallVec<[Arrival; 4]>,
    /// See [`ChargeLine::leads`](crate::store::ChargeLine::leads).
    pub(super) known: u64,
}

impl Group {
    /// Takes the first request of a line, and those behind it that are equal; before them, one that stands in the lines of other keys.
    ///
    /// None has arrived before those ahead of it, for the store: two processes would each wait for the first one of the other, where
    /// others that wait behind it have arrived earlier.
    pub(super) fn take(
        waiting: &BTreeMap<Rank, Entry>,
        known: u64,
        earlier: Option<Arc<Waiter>>,
        now: Instant,
    ) -> Option<Self> {
        let mut group = Self {
            requests: SmallVec::new(),
            arrivals: SmallVec::new(),
            known,
        };
        let (mut at, known) = (0, &mut group.known);
        let mut arrival = |waiter: &Waiter, cost| {
            at = waiter.arrived.max(at);
            waiter.counts_from.store(at, Ordering::Relaxed);
            *known = at.max(waiter.counted_from.fetch_max(at, Ordering::Relaxed)).max(*known);
            Arrival {
                at: waiter.counts_from(),
                weight: cost,
            }
        };
        let (_, first) = waiting.first_key_value()?;
        let is_other = |earlier: &Arc<Waiter>| {
            let mut entries = waiting.values();
            !entries.any(|entry| Arc::ptr_eq(&entry.waiter, earlier))
        };
        if let Some(earlier) = earlier.filter(is_other)
            && let Some(taken) = earlier.take(None, now)
        {
            group.arrivals.push(arrival(&earlier, first.cost));
            group.requests.push(taken);
        }
        let mut is_equal = true;
        for Entry { waiter, cost, .. } in waiting.values().take(PLACE_SIZE - group.arrivals.len()) {
            group.arrivals.push(arrival(waiter, *cost));
            let taken = is_equal.then(|| waiter.take(group.requests.first(), now)).flatten();
            is_equal = taken.is_some();
            group.requests.extend(taken);
        }
        (!group.requests.is_empty()).then_some(group)
    }

    /// Checks the requests, and returns when the first one that still waits for this line is to be checked again.
    pub(super) async fn check(mut self, line: u64, sent_at: Instant) -> Option<Instant> {
        let units = self.requests.len() as u32;
        let (_, first, _) = self.requests.first_mut()?;
        first.lead(line, &self.arrivals, self.known, units);
        first.renew_tickets();
        let response = send(Operation::Wait, first);
        let is_pending = response.as_ref().is_some_and(|response| response.as_ready().is_none());
        let response = match response {
            Some(response) => response.await,
            None => Err(ended()),
        };
        self.conclude(line, &response, sent_at, is_pending.then_some(sent_at))
    }

    fn conclude(
        &mut self,
        line: u64,
        response: &Result<StoreResponse, StoreError>,
        sent_at: Instant,
        began: Option<Instant>,
    ) -> Option<Instant> {
        let mut due = None;
        if let Some(line) = find(line) {
            line.state().is_local = response.is_err();
        }
        for nth in 0..self.requests.len() {
            // One by one, so that what panics for one of them leaves the others to `drop`.
            let (waiter, mut undecided, _owed) = self.requests.remove(0);
            undecided.lead(line, self.arrivals.get(nth..).unwrap_or_default(), self.known, 1);
            let response = match response {
                Ok(response) => {
                    let costs = undecided.as_slice().iter().map(|policy| policy.charge.cost);
                    response.nth_unit(nth, &costs.collect::<SmallVec<[u64; 4]>>()).map(Ok)
                }
                Err(error) => Some(Err(error.clone())),
            };
            let Some(response) = response else {
                waiter.stay(undecided.again());
                continue;
            };
            // A decision without the store lacks the policies that are not counted meanwhile.
            let asked = response.is_err().then(|| undecided.again());
            let led = if asked.is_some() { NO_LINE } else { line };
            let others = (asked.is_none() && waiter.needs.len() > 1).then(|| undecided.again());
            let denied = match settle(&response, Operation::Wait, undecided, began) {
                Ok(denied) if !denied.is_allowed() => denied,
                decided => {
                    waiter.finish(decided, asked.as_ref().or(others.as_ref()).map(|left| (left, led)));
                    continue;
                }
            };
            let exceeds = |policy: &PolicyDecision| policy.denial == Some(Denial::QuotaExceeded);
            let may_count = asked.is_none() && denied.deniers().any(exceeds);
            let again = asked.unwrap_or_else(|| denied.again());
            let may_wait = |policy: &PolicyDecision| {
                policy.may_stay_in_line(waiter.until_of(policy.waiting).saturating_duration_since(sent_at))
            };
            let Some(lacking) = Lacking::of(&denied, may_wait) else {
                match may_count {
                    // For the store it waits on: its last check counts as a denial, and leaves all places.
                    true => waiter.stay_no_longer(again),
                    false => waiter.finish(Ok(denied), Some((&again, NO_LINE))),
                }
                continue;
            };
            if lacking.is_empty() {
                // Another one of the group has just been admitted.
                waiter.stay(again);
            } else {
                let own = lacking.iter().find(|lacking| lacking.line == line);
                due = due.or(own.map(|own| own.due(sent_at)));
                waiter.stand(&lacking, again, (led, true), sent_at);
            }
        }
        due
    }
}

impl Drop for Group {
    /// The runtime has ended while the requests were checked.
    fn drop(&mut self) {
        while !self.requests.is_empty() {
            caught(|| self.conclude(0, &Err(ended()), Instant::now(), None));
        }
    }
}
