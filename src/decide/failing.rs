//! Decides while the store fails, by the failure modes of the policies.

use super::{
    Undecided,
    check::{is_never_admitted, record_outcome, send},
};
use crate::{
    Decision, FailureMode, PolicyDecision,
    observe::PolicyOutcome,
    store::{Operation, StoreError, StoreRequest},
};

/// Decides by the failure modes of the policies.
#[cold]
pub(super) fn fail(error: StoreError, operation: Operation, undecided: &Undecided) -> Result<Decision, StoreError> {
    let policies = undecided.as_slice();
    let Some(first) = policies.first() else {
        return Err(error);
    };
    first.context.failover.failed(&error);
    first.context.metrics.failed(error.kind());
    if operation == Operation::Reset {
        reset(policies);
        return Err(error);
    }
    let count = |policy: &PolicyDecision, outcome| {
        if operation.decides() {
            policy.count(outcome);
        }
    };
    let record = |policy: &PolicyDecision, outcome| {
        if operation.decides() {
            policy.context.record(outcome, Some(policy.position));
        }
    };
    let is_never_admitted = operation.requires_room() && is_never_admitted(policies);
    if let Some(closed) = policies.iter().find(|policy| closes(policy) && !is_never_admitted) {
        policies.iter().for_each(|policy| count(policy, PolicyOutcome::Failed));
        record(closed, PolicyOutcome::Failed);
        return Err(error);
    }

    let counted = policies.iter().filter_map(|policy| {
        if is_never_admitted && !policy.is_observed() || policy.denial.is_some() {
            let denial = Some(policy.denial.or_else(|| policy.permanent_denial())?);
            return Some(PolicyDecision {
                denial,
                ..policy.clone()
            });
        }
        let Some(local) = policy.local_charge(operation) else {
            count(policy, PolicyOutcome::Uncounted);
            return None;
        };
        Some(PolicyDecision {
            local: Some(Box::new(local)),
            ..policy.clone()
        })
    });
    let mut local = Undecided::new(counted.collect()).in_place_of(undecided);
    if local.as_slice().is_empty() {
        record(first, PolicyOutcome::Uncounted);
    }
    local.admit_unless_denied();
    // A memory store replies at once.
    if let Some(response) = send(operation, &mut local).and_then(|response| response.try_ready().ok()) {
        record_outcome(&response?, operation, &mut local)?;
    }
    if local.has_leases() {
        local.hold_slots();
    }
    local.record_failure(error);
    Ok(local.decided())
}

/// Whether the request fails with the store.
fn closes(policy: &PolicyDecision) -> bool {
    let undecided = policy.denial.is_none() && !policy.is_observed();
    undecided && policy.failure_mode() == FailureMode::Closed
}

/// Removes what this process has counted in place of the store.
pub(super) fn reset(policies: &[PolicyDecision]) {
    let counts = |policy: &&PolicyDecision| policy.context.failover.has_counts();
    for policy in policies.iter().filter(counts) {
        if let Some(local) = policy.local_charge(Operation::Reset) {
            // A memory store replies at once and does not fail.
            let counts = policy.context.failover.counts();
            drop(counts.decide(&[StoreRequest::new(Operation::Reset, [&local])]));
        }
    }
}
