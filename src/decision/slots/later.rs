//! Slots that are taken after the check of a request: when it has waited for them, or at its turn.

use std::{sync::Arc, time::Duration};

use super::Ticket;
use crate::{
    Decision, Denial, PolicyDecision,
    decision::{PolicyDecisions, Undecided},
    store::Waiting,
};

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
            marker: self.marker.clone(),
            cost: self.cost,
            waiting: self.waiting,
            lease: self.lease.clone(),
            ..Self::undecided(self.context.clone(), self.position, self.key.clone(), self.cost)
        }
    }
}
