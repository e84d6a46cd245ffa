//! The check of the first requests in a line.

use std::sync::{Arc, atomic::Ordering};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    Undecided,
    check::{send, settle},
    line::ended,
    waiting::{Lacking, Outcome, Waiter},
};
use crate::{
    Decision,
    limit::Arrival,
    store::{Operation, Owed, StoreError, StoreResponse},
    sync::lock,
};

/// A request that a check decides, and that it is to be given back if its caller leaves meanwhile.
pub(super) type Checked = (Arc<Waiter>, Undecided, Option<Owed>);

/// The requests that a check decides, and the place of the process, of which they are the first.
pub(super) struct Group {
    pub(super) requests: SmallVec<[Checked; 1]>,
    pub(super) arrivals: SmallVec<[Arrival; 4]>,
}

impl Group {
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
        for (nth, (waiter, mut undecided, _owed)) in self.requests.drain(..).enumerate() {
            undecided.lead(line, self.arrivals.get(nth..).unwrap_or_default(), 1);
            let response = match response {
                Ok(response) => {
                    let costs = undecided.as_slice().iter().map(|policy| policy.charge.cost);
                    Ok(response.nth_unit(nth, &costs.collect::<SmallVec<[u64; 4]>>()))
                }
                Err(error) => Err(error.clone()),
            };
            let denied = match settle(&response, Operation::Wait, undecided, began) {
                Ok(denied) if !denied.is_allowed() => denied,
                decided => {
                    waiter.finish(decided.inspect(Decision::count_outcomes));
                    continue;
                }
            };
            match Lacking::of(&denied, |policy| {
                policy.may_stay_in_line(waiter.until.saturating_duration_since(sent_at))
            }) {
                // Another one of the group has just been admitted.
                Some(lacking) if lacking.is_empty() && !waiter.has_left() => {
                    *lock(&waiter.undecided) = Some(denied.again());
                }
                Some(_) if waiter.has_left() => {
                    waiter.metrics.left();
                    waiter.finish(Ok(denied));
                }
                Some(_) if waiter.is_last.load(Ordering::Relaxed) => {
                    let again = denied.again();
                    waiter.leave_lines(Some(&again));
                    waiter.send(Outcome::Expired(again));
                }
                Some(lacking) => {
                    let own = lacking.iter().find(|lacking| lacking.line == line);
                    due = due.or(own.map(|own| sent_at + own.retry_after));
                    waiter.stand(&lacking, denied.again(), true, sent_at);
                    // Its time was over meanwhile, when it could not leave.
                    if waiter.is_last.load(Ordering::Relaxed)
                        && let Some(again) = waiter.leave()
                    {
                        waiter.send(Outcome::Expired(again));
                    }
                }
                None => {
                    denied.count_outcomes();
                    waiter.finish(Ok(denied));
                }
            }
        }
        due
    }
}

impl Drop for Group {
    /// The runtime has ended while the requests were checked.
    fn drop(&mut self) {
        if !self.requests.is_empty() {
            self.conclude(0, &Err(ended()), Instant::now(), None);
        }
    }
}
