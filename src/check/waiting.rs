//! Requests that wait: admitted ones for their turn, others for slots.
//!
//! A request that waits for slots holds none, and nothing of it is counted: it has a place in the queue of each limit up to the
//! first one without free slots. It is checked again when the store wakes it, since slots are free for it, and each second, which
//! refreshes its places. That check admits it at one instant of all policies, keeps it waiting, or denies it.

use std::{future::poll_fn, pin::Pin, time::Duration};

use smallvec::SmallVec;
use tokio::{
    runtime::Handle,
    time::{Instant, sleep, timeout_at},
};

use super::{Check, abandon, bans, begin, decide, failing::Local};
use crate::{
    Decision, PolicyDecision,
    decision::{Settlement, Undecided, leave_queue},
    observe::WaitingRequest,
    store::{
        Charge, ErrorKind, LocalCharge, Operation, Outcome, Owed, OwedKind, StoreError, StoreFuture, StoreRequest,
        StoreResponse, wakes::Waiter,
    },
};

/// A request that is held until its turn, or until slots are free for it.
pub(crate) type Held = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

/// An admitted request until its turn. Dropped before, it is refunded.
struct Admitted {
    decision: Option<Decision>,
    _owed: Option<Owed>,
}

/// Holds a request that has just been decided until its turn.
pub(crate) fn until_turn(decision: Decision) -> Result<Held, StoreError> {
    let admitted = Admitted {
        _owed: decision.owe(OwedKind::Settlement),
        decision: Some(decision),
    };
    require_runtime()?;
    Ok(Box::pin(admitted.wait()))
}

/// Holds a request until the end of a pause, and checks it then.
pub(super) fn after_pause(pause: Duration, again: Undecided, waited: Duration) -> Result<Held, StoreError> {
    require_runtime()?;
    Ok(Box::pin(async move {
        let since = Instant::now();
        {
            let _waiting = again.as_slice().first().map(PolicyDecision::wait);
            sleep(pause).await;
        }
        let waited = waited + since.elapsed();
        let decision = match begin(Operation::Reserve, again) {
            Check::Decided(decision) => decision?,
            Check::Pending(check) => check.await?,
        };
        Ok(decision.after_waiting(waited))
    }))
}

/// An error outside of a runtime, which has no timer.
fn require_runtime() -> Result<(), StoreError> {
    let error = |_| {
        StoreError::new(
            ErrorKind::Refused,
            "a request can wait only in a tokio runtime; check it there, or without `wait_up_to`",
        )
    };
    Handle::try_current().map(drop).map_err(error)
}

impl Admitted {
    /// Waits for the turn, and takes the slots then. If a ban has begun meanwhile, or no slots are free, the request is denied,
    /// and refunded.
    async fn wait(mut self) -> Result<Decision, StoreError> {
        let since = Instant::now();
        {
            let _waiting = self.decision().wait();
            sleep(self.decision().delay()).await;
        }

        // Without a reply it is admitted, as it was.
        if let Some(bans) = bans::read(self.decision())
            && let Ok(response) = bans.await
            && let Some(denied) = bans::deny(self.decision(), &response)
        {
            drop(self);
            let waited = since.elapsed();
            if let Some((pause, again)) = denied.after_pause(waited) {
                return after_pause(pause, again, waited)?.await;
            }
            denied.count_outcomes();
            return Ok(denied);
        }
        let Some(slots) = self.decision().untaken_slots() else {
            return Ok(self.admit());
        };
        let taken = take_slots(slots, since)?.await?;
        match taken.is_allowed() {
            true => Ok(self.admit().with_slots(taken)),
            false => Ok(taken),
        }
    }

    fn decision(&self) -> &Decision {
        self.decision.as_ref().expect("it is held")
    }

    fn admit(&mut self) -> Decision {
        self.decision.take().expect("it is held")
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        if let Some(decision) = self.decision.take() {
            give_back(&decision);
        }
    }
}

/// Refunds an admitted request that its caller has left, in a task. If that fails, its turn expires.
pub(crate) fn give_back(decision: &Decision) {
    let locally = decision.store_error().is_some();
    let mut settlement = Settlement::default();
    for policy in decision.as_slice() {
        settlement.refund(policy, locally);
    }
    settlement.send().receive(None);
}

/// The time after which a request that waits is checked again, which is a third of the time for which its place is held.
const REFRESH: Duration = Duration::from_secs(1);

/// A request in the queue. Dropped before it is decided, it leaves the queue.
pub(super) struct Queued {
    /// Taken when it is decided.
    undecided: Option<Undecided>,
    /// If this process decides, since the store failed.
    local: Option<(Vec<Option<LocalCharge>>, StoreError)>,
    /// The outcomes of policies that only observe, which do not wait.
    observed: SmallVec<[Outcome; 1]>,
    since: Instant,
    check: Option<StoreFuture>,
    _owed: Option<Owed>,
}

/// Whether the response is that the request waits for slots.
pub(super) fn is_queued(response: &StoreResponse) -> bool {
    response.outcomes().first().is_some_and(Outcome::is_waiting)
}

/// Takes the slots of these policies, which may have to be waited for. The waits count since then.
fn take_slots(undecided: Undecided, since: Instant) -> Result<Held, StoreError> {
    Queued::new(undecided, None, since).hold(true)
}

impl Queued {
    fn new(undecided: Undecided, local: Option<(Vec<Option<LocalCharge>>, StoreError)>, since: Instant) -> Self {
        Self {
            _owed: undecided.owe(OwedKind::Release),
            undecided: Some(undecided),
            local,
            observed: SmallVec::new(),
            since,
            check: None,
        }
    }

    /// A request that has entered the queue of the store.
    pub(super) fn in_store(undecided: Undecided, response: &StoreResponse) -> Self {
        let mut queued = Self::new(undecided, None, Instant::now());
        queued.keep_observed(response);
        queued
    }

    /// A request that has entered the queue of this process.
    pub(super) fn in_process(local: Local, response: &StoreResponse) -> Self {
        let Local {
            undecided,
            charges,
            error,
        } = local;
        let mut queued = Self::new(undecided, Some((charges, error)), Instant::now());
        queued.keep_observed(response);
        queued
    }

    fn keep_observed(&mut self, response: &StoreResponse) {
        let observed = response.outcomes().iter().skip(1).cloned();
        self.observed = observed.map(|outcome| outcome.at(response.server_time)).collect();
    }

    /// The future of the decision.
    pub(super) fn hold(self, checks_at_once: bool) -> Result<Held, StoreError> {
        require_runtime()?;
        Ok(Box::pin(self.wait(checks_at_once)))
    }

    fn policies(&self) -> impl Iterator<Item = (usize, &PolicyDecision)> {
        let policies = self
            .undecided
            .iter()
            .flat_map(|undecided| undecided.as_slice())
            .enumerate();
        policies.filter(|(_, policy)| !policy.is_observed() && policy.denial.is_none())
    }

    /// Begins to wait: until when it may, what wakes it, and its count among those that wait.
    fn begin(&self) -> (Instant, Waiter, Option<WaitingRequest>) {
        let slots = || self.policies().filter(|(_, policy)| policy.lease.is_some());
        let first = slots().next().map(|(_, policy)| policy);
        if let Some(first) = first
            && self.local.is_none()
        {
            first.context.store.receive_wakes();
        }
        let leases = slots().filter_map(|(_, policy)| Some(policy.lease.as_ref()?.id));
        let longest = slots().map(|(_, policy)| policy.waiting.longest_us);
        let longest = longest.filter(|longest_us| *longest_us > 0).min().unwrap_or_default();
        (
            self.since + Duration::from_micros(longest),
            Waiter::new(leases.collect()),
            first.map(PolicyDecision::wait),
        )
    }

    async fn wait(mut self, checks_at_once: bool) -> Result<Decision, StoreError> {
        let (deadline, waiter, waiting) = self.begin();
        let queued_at = Instant::now();
        let mut is_due = checks_at_once;
        let response = loop {
            if !is_due {
                let refresh = deadline.min(Instant::now() + REFRESH);
                let woken = waiter.woken();
                let _ = timeout_at(refresh, woken.notified()).await; // it is checked again in both cases
            }
            is_due = false;
            let is_last = Instant::now() >= deadline;
            self.check = Some(self.check_again(is_last));
            let response = self.checked().await;
            if !response.as_ref().is_ok_and(is_queued) {
                break response;
            }
        };
        drop((waiting, waiter));
        let waited = queued_at.elapsed();
        let decision = match self.conclude(response) {
            Check::Decided(decision) => decision?,
            Check::Pending(check) => check.await?,
        };
        Ok(decision.after_waiting(waited))
    }

    /// Sends the request once more. The last time it does not wait: it is admitted or denied.
    fn check_again(&mut self, is_last: bool) -> StoreFuture {
        if let Some(undecided) = &mut self.undecided {
            undecided.renew_tickets();
        }
        let charges = self.policies().map(|(position, policy)| {
            let charge = policy.charge();
            let charge = match self.local.as_ref().and_then(|(charges, _)| charges[position].as_ref()) {
                Some(local) => local.charge(&charge),
                None => charge,
            };
            match is_last && policy.lease.is_some() {
                true => charge.wait_up_to(Duration::ZERO),
                false => charge,
            }
        });
        let charges: SmallVec<[Charge<'_>; 4]> = charges.collect();
        let request = [StoreRequest::new(Operation::Reserve, &charges)];
        let mut policies = self.policies();
        let (_, first) = policies.next().expect("a request that waits has a policy");
        match &self.local {
            Some(_) => first.context.failover.decide(&request),
            None => first.context.store.decide(&request),
        }
    }

    /// Waits for the response. The check stays here until then, for the case that this is dropped.
    async fn checked(&mut self) -> Result<StoreResponse, StoreError> {
        let response = poll_fn(|cx| {
            let check = self.check.as_mut().expect("it has just been sent");
            Pin::new(check).poll(cx)
        });
        let response = response.await;
        self.check = None;
        response
    }

    fn conclude(&mut self, response: Result<StoreResponse, StoreError>) -> Check {
        let undecided = self.undecided.take().expect("it is decided once");
        let observed = std::mem::take(&mut self.observed);
        let response = response.map(|mut response| {
            response.outcomes.extend(observed);
            response
        });
        match self.local.take() {
            Some((charges, error)) => Local {
                undecided,
                charges,
                error,
            }
            .conclude(Operation::Reserve, Some(response)),
            None => decide(&response, Operation::Reserve, undecided, None),
        }
    }
}

impl Drop for Queued {
    /// A check that is in flight continues, to be refunded if it has admitted the request.
    fn drop(&mut self) {
        let Some(undecided) = self.undecided.take() else { return };
        let local = self.local.take().map(|(charges, _)| charges);
        match (self.check.take(), Handle::try_current(), self._owed.take()) {
            (Some(check), Ok(runtime), Some(owed)) if local.is_none() => {
                let owed = owed.due();
                runtime.spawn(async move {
                    abandon(&check.await, Operation::Reserve, undecided, None);
                    owed.confirm();
                });
            }
            _ => leave_queue(&undecided, local.as_deref()),
        }
    }
}
