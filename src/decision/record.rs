use std::{sync::Arc, time::Duration};

use super::{Decision, PolicyDecision};
use crate::store::{Outcome, StoreError, StoreResponse};

/// The reply of a store.
impl Decision {
    /// Records the failure of the store, before there are clones.
    pub(crate) fn note_failure(&mut self, error: StoreError) {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.store_error = Some(Box::new(error));
        }
    }

    /// The policies, before there are clones.
    pub(super) fn undecided_mut(&mut self) -> &mut [PolicyDecision] {
        match Arc::get_mut(&mut self.0) {
            Some(inner) => &mut inner.policies,
            None => &mut [],
        }
    }

    /// Records the outcome in place, before there are clones.
    #[inline(always)]
    pub(crate) fn record(&mut self, response: &StoreResponse, outcome: &Outcome, charged: bool) {
        let Some(inner) = Arc::get_mut(&mut self.0) else {
            return;
        };
        inner.allowed = outcome.allowed;
        inner.server_time = response.server_time;
        let mut states = outcome.states().iter();
        for policy in &mut inner.policies {
            policy.record(&mut states, response.server_time, charged);
        }
    }

    /// Records the outcomes of several requests in place, before there are clones, and keeps the policies for which this
    /// returns `true`.
    pub(crate) fn record_each(
        &mut self,
        allowed: bool,
        server_time: Duration,
        record: impl FnMut(&mut PolicyDecision) -> bool,
    ) {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.allowed = allowed;
            inner.server_time = server_time;
            inner.policies.retain(record);
        }
    }
}
