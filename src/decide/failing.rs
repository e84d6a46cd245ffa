//! Decides while the store fails, by the failure modes of the policies.

use super::{
    Undecided,
    check::{is_never_admitted, record_outcome, send},
};
use crate::{
    Decision, FailureMode, PolicyDecision,
    observe::PolicyOutcome,
    store::{ErrorKind, Operation, StoreError, StoreRequest},
};

/// Decides by the failure modes of the policies.
#[cold]
pub(super) fn fail(error: StoreError, operation: Operation, undecided: &Undecided) -> Result<Decision, StoreError> {
    let policies = undecided.as_slice();
    let Some(first) = policies.first() else {
        return Err(error);
    };
    if error.kind() == ErrorKind::Invalid {
        return Err(error);
    }
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

    let is_denied = |policy: &PolicyDecision| is_never_admitted && !policy.is_observed() || policy.denial.is_some();
    let counted = policies.iter().filter_map(|policy| match is_denied(policy) {
        true => Some(PolicyDecision {
            denial: Some(policy.denial.or_else(|| policy.permanent_denial())?),
            ..policy.clone()
        }),
        false => counted_locally(policy, operation),
    });
    let mut local = Undecided::new(counted.collect()).in_place_of(undecided);
    if local.as_slice().is_empty() {
        record(first, PolicyOutcome::Uncounted);
    }
    local.admit_unless_denied();
    if matches!(operation, Operation::Check | Operation::Peek) {
        local.enter_lines();
    }
    // A memory store replies at once.
    if let Some(response) = send(operation, &mut local).and_then(|response| response.try_ready().ok()) {
        record_outcome(&response?, operation, &mut local)?;
    }
    if local.has_leases() {
        local.hold_slots();
    }
    local.inner().store_error = Some(Box::new(error));
    let decided = local.decided();
    if decided.is_allowed() {
        let uncounted = |policy: &&PolicyDecision| !is_denied(policy) && policy.failure_mode().share().is_none();
        let uncounted = policies.iter().filter(uncounted);
        uncounted.for_each(|policy| count(policy, PolicyOutcome::Uncounted));
    }
    Ok(decided)
}

/// Records in the span of a request that has waited how it was decided while the store failed, if no policy was counted.
#[cold]
pub(super) fn record_after_waiting(decided: &Result<Decision, StoreError>, undecided: &Undecided) {
    let mut policies = undecided.as_slice().iter();
    let (policy, outcome) = match decided {
        Err(_) => (policies.find(|policy| closes(policy)), PolicyOutcome::Failed),
        Ok(decision) if decision.as_slice().is_empty() => (policies.next(), PolicyOutcome::Uncounted),
        Ok(_) => return,
    };
    if let Some(policy) = policy {
        policy.context.record(outcome, Some(policy.position));
    }
}

/// The policy as this process counts it in place of the store, if it does.
fn counted_locally(policy: &PolicyDecision, operation: Operation) -> Option<PolicyDecision> {
    let local = policy.local_charge(operation)?;
    Some(PolicyDecision {
        local: Some(Box::new(local)),
        ..policy.clone()
    })
}

/// Removes the place that the request led from what this process has counted in place of the store.
pub(super) fn leave_place(left: &Undecided) {
    let policies = left.as_slice().iter();
    let counted = policies.filter(|policy| policy.context.failover.has_counts());
    let counted = counted.filter_map(|policy| counted_locally(policy, Operation::Wait));
    let mut local = Undecided::new(counted.collect()).in_place_of(left);
    // A memory store replies at once.
    drop(send(Operation::Wait, &mut local));
}

/// Whether the request fails with the store.
fn closes(policy: &PolicyDecision) -> bool {
    let undecided = policy.denial.is_none() && !policy.is_observed();
    undecided && policy.failure_mode() == FailureMode::Closed
}

/// Removes what this process has counted in place of the store, also by policies with other failure modes, but for buckets with other
/// shares.
pub(super) fn reset(policies: &[PolicyDecision]) {
    let counts = |policy: &&PolicyDecision| policy.context.failover.has_counts();
    for policy in policies.iter().filter(counts) {
        let of_share = policy.local_charge(Operation::Reset);
        for charge in [&policy.charge].into_iter().chain(&of_share) {
            // A memory store replies at once and does not fail.
            let counts = policy.context.failover.counts();
            drop(counts.decide(&[StoreRequest::new(Operation::Reset, [charge])]));
        }
    }
}

#[cold]
pub(super) fn ended() -> StoreError {
    StoreError::new(
        ErrorKind::Unreachable,
        "the runtime that checked the requests which wait has shut down",
    )
}
