//! A decision until it is made.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use smallvec::SmallVec;

use super::{Decision, Inner, LostSettlements, PolicyDecision, PolicyDecisions, Ticket, slots::Slots};
use crate::{
    Denial, Key,
    store::{LocalCharge, Operation, Outcome, Owed, OwedKind, StoreError, StoreResponse, Waiting},
    sync::atomic::{AtomicBool, Ordering},
};

/// The policies that apply to a request, with its keys and costs, and what a store replies about them.
///
/// It has the memory of the [`Decision`] that it becomes once.
pub(crate) struct Undecided(Decision);

impl Undecided {
    #[inline]
    pub(crate) fn new(policies: PolicyDecisions) -> Self {
        Self(Decision::new(false, policies))
    }

    /// The decision, which was recorded.
    #[inline]
    pub(crate) fn decided(self) -> Decision {
        self.0
    }

    /// The decision to admit a request that no policy applies to.
    pub(crate) fn admitted(mut self) -> Decision {
        self.inner().allowed = true;
        self.0
    }

    /// The same for so many units, of which some may be admitted.
    pub(crate) fn of_units(mut self, units: u32) -> Self {
        self.inner().units = units;
        self
    }

    #[inline]
    pub(crate) fn units(&self) -> u32 {
        self.0.0.units
    }

    #[inline]
    fn inner(&mut self) -> &mut Inner {
        Arc::get_mut(&mut self.0.0).expect("it is not shared before it is decided")
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[PolicyDecision] {
        self.0.as_slice()
    }

    /// Whether a policy only observes, so that the charges are not sent as one request.
    #[inline]
    pub(crate) fn is_composite(&self) -> bool {
        self.as_slice()
            .first()
            .is_some_and(|policy| policy.context.is_composite)
    }

    /// Whether a policy takes slots.
    #[inline]
    pub(crate) fn has_leases(&self) -> bool {
        self.as_slice().iter().any(|policy| policy.lease.is_some())
    }

    /// Dates its leases from now on, when it is about to be checked again.
    pub(crate) fn renew_tickets(&mut self) {
        for ticket in self
            .inner()
            .policies
            .iter_mut()
            .filter_map(|policy| policy.lease.as_mut())
        {
            *ticket = ticket.again();
        }
    }

    pub(crate) fn owe(&self, kind: OwedKind) -> Option<Owed> {
        self.0.owe(kind)
    }

    pub(crate) fn lost_settlements(&self) -> Option<&Arc<LostSettlements>> {
        self.0.lost_settlements()
    }

    /// Whether a request may wait for one of the policies.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.as_slice().first().is_some_and(|policy| policy.context.waits)
    }

    /// Lets the request wait for a policy only as long as each one with another key allows. Returns whether it may wait for any.
    ///
    /// A request that waits for slots holds nothing of other policies, and one that waits for other policies holds no slots.
    #[cold]
    pub(crate) fn agree_on_waits(&mut self) -> bool {
        let policies = self.as_slice().iter();
        let holds = |policy: &&PolicyDecision| !policy.is_observed() && policy.lease.is_none();
        let holding = policies.filter(holds);
        let holding: SmallVec<[(Key, u64); 4]> = holding
            .map(|policy| (policy.key.clone(), policy.waiting.longest_us))
            .collect();
        let agreed = |policy: &PolicyDecision| {
            let others = holding.iter().filter(|(key, _)| *key != policy.key);
            let others = others.map(|(_, longest_us)| *longest_us).min();
            policy.waiting.longest_us.min(others.unwrap_or(u64::MAX))
        };
        let mut waits = false;
        for policy in &mut self.inner().policies {
            if policy.lease.is_none() {
                policy.waiting.longest_us = agreed(policy);
            }
            waits |= policy.waiting.longest_us > 0;
        }
        waits
    }
}

/// The reply of a store.
impl Undecided {
    /// Records the outcome of one request for all policies.
    #[inline(always)]
    pub(crate) fn record(&mut self, operation: Operation, response: &StoreResponse, outcome: &Outcome) {
        let inner = self.inner();
        inner.allowed = outcome.allowed;
        inner.server_time = response.server_time;
        let charged = outcome.allowed && operation.counts();
        let mut states = outcome.states().iter();
        for policy in &mut inner.policies {
            policy.record(&mut states, response.server_time, charged);
        }
        if inner.units > 1 {
            self.take(outcome.units);
        }
    }

    /// Records how many units the enforced policies have admitted, which is their cost.
    #[cold]
    fn take(&mut self, units: u32) {
        let inner = self.inner();
        inner.units = units;
        for policy in inner.policies.iter_mut().filter(|policy| !policy.is_observed()) {
            policy.cost = policy.cost.saturating_mul(units.max(1).into());
        }
    }

    /// Records the outcomes of several requests, and keeps the policies for which this returns `true`.
    pub(crate) fn record_each(
        &mut self,
        allowed: bool,
        server_time: Duration,
        record: impl FnMut(&mut PolicyDecision) -> bool,
    ) {
        let inner = self.inner();
        inner.allowed = allowed;
        inner.server_time = server_time;
        inner.policies.retain(record);
    }

    /// Records the units of a decision some policies of which only observe.
    pub(crate) fn record_units(&mut self, units: Option<u32>) {
        if self.units() > 1 {
            self.take(units.unwrap_or(self.units()));
        }
    }

    /// Admits the request if no policy denies it, unless the outcome of a store is recorded after this.
    pub(crate) fn admit_unless_denied(&mut self) {
        let inner = self.inner();
        inner.allowed = !inner.policies.iter().any(PolicyDecision::denies);
    }

    /// Records that the store failed.
    pub(crate) fn record_failure(&mut self, error: StoreError) {
        self.inner().store_error = Some(Box::new(error));
    }

    /// Holds the slots that were taken. Those of policies that observe a denied request are released at once. The local charges
    /// are those of the policies that this process has counted, since the store failed.
    #[cold]
    pub(crate) fn hold_slots(&mut self, local: Option<&[Option<LocalCharge>]>) {
        let mut slots = Slots::default();
        let server_time = self.0.server_time();
        for (position, policy) in self.as_slice().iter().enumerate() {
            if policy.takes_slots_after(server_time) {
                continue;
            }
            let local = local.and_then(|local| local.get(position)?.as_ref());
            policy.hold_slots_in(&mut slots, local);
        }
        if self.0.is_allowed() && !slots.is_empty() {
            self.inner().slots = Some(Box::new(Mutex::new(slots)));
        }
    }
}

/// Whether a policy was charged, and its receipt is not taken. A clone has no receipt.
#[derive(Default)]
pub(crate) struct Untaken(AtomicBool);

impl Untaken {
    pub(super) fn new(charged: bool) -> Self {
        Self(AtomicBool::new(charged))
    }

    /// Returns whether this is the first call for a charged policy.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Clone for Untaken {
    fn clone(&self) -> Self {
        Self::default()
    }
}

#[cfg(all(test, feature = "loom"))]
mod threads {
    use loom::{model, sync::Arc, thread::spawn};

    use super::*;

    #[test]
    fn one_of_several_threads_takes_a_receipt() {
        model(|| {
            let untaken = Arc::new(Untaken::new(true));
            let thread = spawn({
                let untaken = untaken.clone();
                move || untaken.take()
            });
            let own = untaken.take();
            assert!(own ^ thread.join().expect("no panic"));
        });
    }
}

impl Decision {
    /// The same decision about a request that has waited for slots.
    pub(crate) fn after_waiting(mut self, waited: Duration) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.waited += waited;
        }
        self
    }

    /// The policies whose slots are to be taken at the turn of the request, if there are any.
    pub(crate) fn untaken_slots(&self) -> Option<Undecided> {
        let untaken = self
            .policies()
            .filter(|policy| policy.takes_slots_after(self.server_time()));
        let untaken: PolicyDecisions = untaken.map(PolicyDecision::again).collect();
        (!untaken.is_empty()).then(|| Undecided::new(untaken))
    }

    /// For a request that has waited this long, is denied for nothing but pauses which responses have asked for, and may wait until
    /// they end: the time until then, and the request, which is to be checked again.
    #[cold]
    pub(crate) fn after_pause(&self, waited: Duration) -> Option<(Duration, Undecided)> {
        let mut pause = Duration::ZERO;
        for denial in self.policies().filter(|policy| policy.denies()) {
            pause = pause.max(denial.pause_to_wait_out(waited)?);
        }
        let again = self.policies().map(|policy| policy.again().after(waited + pause));
        (!pause.is_zero()).then(|| (pause, Undecided::new(again.collect())))
    }

    /// The same decision with the slots that were taken at the turn.
    pub(crate) fn with_slots(mut self, mut taken: Self) -> Self {
        if let (Some(inner), Some(taken)) = (Arc::get_mut(&mut self.0), Arc::get_mut(&mut taken.0)) {
            inner.waited += taken.waited;
            for policy in taken.policies.drain(..) {
                let same = inner
                    .policies
                    .iter_mut()
                    .find(|other| other.position == policy.position);
                if let Some(same) = same {
                    // From its turn on, the request has waited by the clock of this process.
                    *same = PolicyDecision {
                        decided_at: same.decided_at,
                        ..policy
                    };
                }
            }
            inner.slots = inner.slots.take().or(taken.slots.take());
        }
        self
    }
}

impl PolicyDecision {
    /// Whether its slots are taken after the decision, at the turn of the request.
    #[inline]
    pub(crate) fn takes_slots_after(&self, server_time: Duration) -> bool {
        self.lease.is_some() && self.decided_at > server_time && !self.is_observed()
    }

    /// How long the request is denied, if it is for a pause that a response has asked for, and it may wait that long.
    fn pause_to_wait_out(&self, waited: Duration) -> Option<Duration> {
        let is_for_pause = self.denial == Some(Denial::Banned) && self.learns() && self.policy().settings.ban.is_none();
        let longest = Duration::from_micros(self.waiting.longest_us);
        self.retry_after
            .filter(|rest| is_for_pause && waited + *rest <= longest)
    }

    /// The same policy for a check of the request after this time.
    fn after(mut self, waited: Duration) -> Self {
        let waited_us = Waiting::up_to(waited, 0).longest_us;
        self.waiting.longest_us = self.waiting.longest_us.saturating_sub(waited_us);
        self.lease = Ticket::of(&self.named().limit);
        self
    }

    /// The same policy for another check of the request.
    pub(crate) fn again(&self) -> Self {
        Self {
            chosen: self.chosen.clone(),
            cost: self.cost,
            waiting: self.waiting,
            lease: self.lease.clone(),
            ..Self::undecided(self.context.clone(), self.position, self.key.clone(), self.cost)
        }
    }
}
