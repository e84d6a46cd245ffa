//! The store requests of a decision in which policies only observe: one for those that are enforced together, and one for each
//! that observes, so that none depends on another. All are sent in one call.

use std::slice;

use smallvec::SmallVec;

use crate::{
    Decision, PolicyDecision,
    store::{Charge, ErrorKind, Operation, StoreError, StoreFuture, StoreRequest, StoreResponse},
};

/// Decides what needs no store: the denials by policies that never admit the request.
///
/// If an enforced policy is one of them, the states of the other enforced ones stay unknown, as without policies that observe.
pub(crate) fn deny_permanently(operation: Operation, undecided: &Decision) -> Decision {
    let policies = undecided.as_slice().iter().cloned().map(|policy| PolicyDecision {
        denial: policy.permanent_denial().filter(|_| operation.requires_room()),
        ..policy
    });
    let mut policies: SmallVec<[_; 1]> = policies.collect();
    let denied = policies.iter().any(PolicyDecision::denies);
    policies.retain(|policy| policy.is_observed() || policy.denies() || !denied);
    Decision::new(!denied, policies)
}

/// Passes the requests for these charges, one of each policy, to a store; `None` if all is decided.
pub(crate) fn send(
    operation: Operation,
    policies: &[PolicyDecision],
    charges: &[Charge<'_>],
    decide: impl FnOnce(&[StoreRequest<'_>]) -> StoreFuture,
) -> Option<StoreFuture> {
    let undecided = policies.iter().zip(charges).filter(|(policy, _)| is_undecided(policy));
    let (observed, enforced): (Vec<_>, Vec<_>) = undecided.partition(|(policy, _)| policy.is_observed());
    let enforced: Vec<Charge<'_>> = enforced.into_iter().map(|(_, charge)| *charge).collect();

    let together = (!enforced.is_empty()).then(|| StoreRequest::new(operation, &enforced));
    let alone = observed
        .into_iter()
        .map(|(_, charge)| StoreRequest::new(operation, slice::from_ref(charge)));
    let requests: Vec<StoreRequest<'_>> = together.into_iter().chain(alone).collect();
    (!requests.is_empty()).then(|| decide(&requests))
}

/// Records the outcomes of the requests in the decision.
pub(crate) fn settle(
    response: &StoreResponse,
    operation: Operation,
    undecided: &mut Decision,
) -> Result<(), StoreError> {
    let policies = undecided.as_slice().iter().filter(|policy| is_undecided(policy));
    let enforced = policies.clone().filter(|policy| !policy.is_observed()).count();
    let observed = policies.count() - enforced;
    let (together, alone) = response
        .outcomes()
        .split_at_checked(usize::from(enforced > 0))
        .ok_or_else(mismatch)?;
    let states = together.iter().flat_map(|outcome| outcome.states());
    let states_alone = alone
        .iter()
        .filter_map(|outcome| outcome.states().first().map(|state| (outcome.allowed, state)));
    if states.clone().count() != enforced || states_alone.clone().count() != observed {
        return Err(mismatch());
    }

    let allowed = undecided.is_allowed() && together.iter().all(|outcome| outcome.allowed);
    let counts = allowed && matches!(operation, Operation::Check | Operation::Charge);
    let (mut states, mut states_alone) = (states, states_alone);
    undecided.settle_each(allowed, response.server_time, |policy| {
        if !is_undecided(policy) {
            return;
        }
        let settled = match policy.is_observed() {
            true => states_alone.next(),
            false => states.next().map(|state| (allowed, state)),
        };
        if let Some((admitted, state)) = settled {
            policy.settle(state, response.server_time, counts && admitted);
        }
    });
    Ok(())
}

/// Whether the store decides about a policy.
fn is_undecided(policy: &PolicyDecision) -> bool {
    policy.denial.is_none()
}

#[cold]
pub(crate) fn mismatch() -> StoreError {
    StoreError::new(
        ErrorKind::Protocol,
        "the response of the store does not have one state for each charge",
    )
}
