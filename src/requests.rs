//! The store requests of a decision in which policies only observe: one for those that are enforced together, and one for each
//! that observes, so that none depends on another. All are sent in one call.

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

/// Passes the requests for these charges, one of each policy, with their markers to a store; `None` if all is decided.
pub(crate) fn send<'a>(
    operation: Operation,
    policies: &'a [PolicyDecision],
    charges: &[Charge<'a>],
    decide: impl FnOnce(&[StoreRequest<'_>]) -> StoreFuture,
) -> Option<StoreFuture> {
    let undecided = policies.iter().zip(charges).filter(|(policy, _)| is_undecided(policy));
    let (observed, enforced): (Vec<_>, Vec<_>) = undecided.partition(|(policy, _)| policy.is_observed());
    let marked = |(policy, charge): (&'a PolicyDecision, &Charge<'a>)| policy.marked(*charge);
    let enforced: Vec<Charge<'_>> = enforced.into_iter().flat_map(marked).collect();
    let observed: Vec<Vec<Charge<'_>>> = observed.into_iter().map(|policy| marked(policy).collect()).collect();

    let together = (!enforced.is_empty()).then(|| StoreRequest::new(operation, &enforced));
    let alone = observed.iter().map(|charges| StoreRequest::new(operation, charges));
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
    let (observed, enforced): (Vec<_>, Vec<_>) = policies.partition(|policy| policy.is_observed());
    let (together, alone) = response
        .outcomes()
        .split_at_checked(usize::from(!enforced.is_empty()))
        .ok_or_else(mismatch)?;
    let states = together.iter().flat_map(|outcome| outcome.states());
    let sent: usize = enforced.into_iter().map(PolicyDecision::charges_sent).sum();
    let sent_alone = observed.into_iter().map(PolicyDecision::charges_sent);
    let states_alone = alone.iter().map(|outcome| outcome.states().len());
    if states.clone().count() != sent || !states_alone.eq(sent_alone) {
        return Err(mismatch());
    }

    let allowed = undecided.is_allowed() && together.iter().all(|outcome| outcome.allowed);
    let counts = allowed && operation.counts();
    let (mut states, mut alone) = (states, alone.iter());
    undecided.settle_each(allowed, response.server_time, |policy| {
        if !is_undecided(policy) {
            return;
        }
        if !policy.is_observed() {
            return policy.settle(&mut states, response.server_time, counts);
        }
        if let Some(outcome) = alone.next() {
            let counts = counts && outcome.allowed;
            policy.settle(&mut outcome.states().iter(), response.server_time, counts);
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
