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
    line::{Entry, Rank, ended, find},
    waiting::{Lacking, Waiter},
};
use crate::{
    Denial, PolicyDecision,
    limit::{Arrival, PLACE_SIZE},
    store::{Operation, Owed, StoreError, StoreResponse},
};

/// Tells the store where the requests that are about to be checked stand in the lines of their keys.
#[cold]
pub(super) fn enter_lines(undecided: &mut Undecided) {
    for (line, waiting, leads) in undecided.lines_mut() {
        line.leads = leads == Some(true);
        line.ahead = match (leads, find(line.number)) {
            (None, Some(line)) => line.state().cost_before(waiting),
            (None, None) | (Some(_), _) => 0,
        };
    }
}

/// A request that a check decides, and that it is to be given back if its caller leaves meanwhile.
pub(super) type Checked = (Arc<Waiter>, Undecided, Option<Owed>);

/// The requests that a check decides, and the place of the process, of which they are the first.
pub(super) struct Group {
    pub(super) requests: SmallVec<[Checked; 1]>,
    pub(super) arrivals: SmallVec<[Arrival; 4]>,
}

impl Group {
    /// Takes the first request of a line, and those behind it that are equal; before them, one that stands in the lines of other keys.
    ///
    /// Each has arrived after those ahead of it, for the store: two processes would each wait for the first one of the other, where
    /// others that wait behind it have arrived earlier.
    pub(super) fn take(waiting: &BTreeMap<Rank, Entry>, earlier: Option<Arc<Waiter>>, now: Instant) -> Option<Self> {
        let mut group = Self {
            requests: SmallVec::new(),
            arrivals: SmallVec::new(),
        };
        let mut at = 0;
        let mut arrival = |waiter: &Waiter, cost| {
            at = waiter.arrived.max(at + 1);
            waiter.counts_from.store(at, Ordering::Relaxed);
            waiter.arrival(cost)
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
        first.lead(line, &self.arrivals, units);
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
        for nth in 0..self.requests.len() {
            // One by one, so that what panics for one of them leaves the others to `drop`.
            let (waiter, mut undecided, _owed) = self.requests.remove(0);
            undecided.lead(line, self.arrivals.get(nth..).unwrap_or_default(), 1);
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
            let denied = match settle(&response, Operation::Wait, undecided, began) {
                Ok(denied) if !denied.is_allowed() => denied,
                decided => {
                    waiter.finish(decided, asked.as_ref());
                    continue;
                }
            };
            let exceeds = |policy: &PolicyDecision| policy.denial == Some(Denial::QuotaExceeded);
            let may_count = asked.is_none() && denied.deniers().any(exceeds);
            let again = asked.unwrap_or_else(|| denied.again());
            match Lacking::of(&denied, |policy| {
                policy.may_stay_in_line(waiter.until_of(policy.waiting).saturating_duration_since(sent_at))
            }) {
                // Another one of the group has just been admitted.
                Some(lacking) if lacking.is_empty() => waiter.stay(again),
                Some(lacking) => {
                    let own = lacking.iter().find(|lacking| lacking.line == line);
                    due = due.or(own.map(|own| own.due(sent_at)));
                    waiter.stand(&lacking, again, true, sent_at);
                }
                // For the store it waits on: its last check counts as a denial, and leaves all places.
                None if may_count => waiter.stay_no_longer(again),
                None => waiter.finish(Ok(denied), Some(&again)),
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
