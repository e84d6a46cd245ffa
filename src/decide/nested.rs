//! The decisions of layers around each other about one request.

use std::sync::{Arc, atomic::Ordering};

use super::{CheckContext, Decision, Inner, PolicyDecision};
use crate::{FailureMode, Key, store::NamedLimit};

/// What an inner layer finds of those around it.
impl Decision {
    /// The cost that outer layers have charged to the same key of the same policy, in the same store, and whether they have charged
    /// another key of it.
    pub(crate) fn charged(
        &self,
        (context, position): (&CheckContext, usize),
        named: &NamedLimit,
        key: &Key,
    ) -> (u64, bool) {
        let own = &context.policies[position];
        // A policy that requires the store does not rely on what this process has counted in its place, and one with bans does not
        // rely on a check without them.
        let requires_store = own.settings.failure_mode == Some(FailureMode::Closed);
        let relies_on = |policy: &PolicyDecision| {
            !(requires_store && policy.local.is_some()) && (own.ban.is_none() || policy.charge.ban.is_some())
        };
        let is_same =
            |policy: &&PolicyDecision| policy.counts_as(named, own) && policy.context.store_id() == context.store_id();
        let (mut charged, mut has_other_key) = (0, false);
        for policy in self.policies().filter(is_same) {
            if policy.charge.key != *key {
                has_other_key = true;
            } else if policy.denial.is_none() && relies_on(policy) {
                // A policy that observes counts nothing if it would have denied the request. A cost above the share that this process
                // counts has taken all of it, and is charged in full.
                charged = policy.charge.cost.saturating_add(charged);
            }
        }
        (charged, has_other_key)
    }

    /// The decisions of an outer and an inner layer, if this one joins them.
    pub(crate) fn joined(&self) -> Option<&[Self; 2]> {
        self.0.joined.as_ref()
    }

    /// Visits the decisions of which it is joined, or itself.
    pub(super) fn for_each_layer(&self, visit: &mut dyn FnMut(&Self)) {
        match self.joined() {
            Some(joined) => joined.iter().for_each(|one| one.for_each_layer(visit)),
            None => visit(self),
        }
    }

    /// Whether it is the other decision, or joins it to one of another layer.
    pub(crate) fn includes(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || self
                .joined()
                .is_some_and(|joined| joined.iter().any(|one| one.includes(other)))
    }

    /// The decisions of an outer layer, which admitted the request, and of an inner one; `None` if there was nothing to decide for
    /// the outer one.
    pub(crate) fn followed_by(&self, later: &Self) -> Option<Self> {
        self.follow();
        if self.is_empty() {
            return None;
        }
        let policies = self.policies().chain(later.policies()).cloned().collect();
        Some(Self(Arc::new(Inner {
            server_time: later.server_time(),
            waited: self.0.waited.saturating_add(later.0.waited),
            units: later.0.units,
            store_error: self.0.store_error.clone().or_else(|| later.0.store_error.clone()),
            joined: Some([self.clone(), later.clone()]),
            ..Inner::new(later.is_allowed(), policies)
        })))
    }

    /// Records that an inner layer has decided about the request too.
    pub(crate) fn follow(&self) {
        // That of a request without policies is one for all of them, which need not write to it again and again.
        if !self.is_followed() {
            self.0.followed.store(true, Ordering::Relaxed);
        }
    }

    /// Whether an inner layer has decided about the request after this one.
    pub(crate) fn is_followed(&self) -> bool {
        self.0.followed.load(Ordering::Relaxed)
    }

    /// Whether a layer that has decided learns from the response.
    pub(crate) fn learns(&self) -> bool {
        self.as_slice().iter().any(PolicyDecision::learns)
    }

    /// Records that an inner layer has added its fields to the response, for each layer that has decided.
    pub(crate) fn record_inner_fields(&self) {
        self.for_each_layer(&mut |layer| layer.0.has_inner_fields.store(true, Ordering::Relaxed));
    }

    /// Whether an inner layer has added its fields to the response.
    pub(crate) fn has_inner_fields(&self) -> bool {
        self.0.has_inner_fields.load(Ordering::Relaxed)
    }
}
