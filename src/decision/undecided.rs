//! A decision until it is made.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use smallvec::SmallVec;

use super::{Decision, Inner, LostSettlements, PolicyDecision, PolicyDecisions, slots::Slots};
use crate::{
    Key,
    store::{LocalCharge, Operation, Outcome, Owed, OwedKind, StoreError, StoreResponse},
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

    /// Whether a policy only observes or has bans, so that its charges are not all that is sent.
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
        let holds =
            |policy: &&PolicyDecision| !policy.is_observed() && !policy.is_charged_later() && policy.lease.is_none();
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
            policy.record(operation, &mut states, response.server_time, charged);
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
