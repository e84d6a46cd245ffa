//! The store requests of a decision in which policies only observe: one for those that are enforced together, and
//! one for each that observes, so that none depends on another. All are sent in one call.

use std::slice;

use smallvec::SmallVec;

use crate::{
    PolicyDecision,
    decision::{Undecided, release_unknown},
    store::{Charge, ErrorKind, Operation, Outcome, StoreError, StoreFuture, StoreRequest, StoreResponse},
};

/// Decides what needs no store: the denials by policies that never admit the request.
///
/// If an enforced policy is one of them, the states of the other enforced ones stay unknown, as without policies that observe.
pub(crate) fn deny_permanently(operation: Operation, undecided: &Undecided) -> Undecided {
    let policies = undecided.as_slice().iter().cloned().map(|policy| PolicyDecision {
        denial: policy.permanent_denial().filter(|_| operation.requires_room()),
        ..policy
    });
    let mut policies: SmallVec<[_; 1]> = policies.collect();
    let denied = policies.iter().any(PolicyDecision::denies);
    policies.retain(|policy| policy.is_observed() || policy.denies() || !denied);
    let mut undecided = Undecided::new(policies).of_units(undecided.units());
    undecided.admit_unless_denied();
    undecided
}

/// Passes the requests for these charges, one of each policy, to a store; `None` if all is decided.
pub(crate) fn send(
    operation: Operation,
    of: &Undecided,
    charges: &[Charge<'_>],
    decide: impl FnOnce(&[StoreRequest<'_>]) -> StoreFuture,
) -> Option<StoreFuture> {
    let undecided = of
        .as_slice()
        .iter()
        .zip(charges)
        .filter(|(policy, _)| is_undecided(policy));
    let (observed, enforced): (Vec<_>, Vec<_>) = undecided.partition(|(policy, _)| policy.is_observed());
    let enforced: Vec<Charge<'_>> = enforced.into_iter().map(|(_, charge)| *charge).collect();
    let observed: Vec<[Charge<'_>; 1]> = observed.into_iter().map(|(_, charge)| [*charge]).collect();

    let together = (!enforced.is_empty()).then(|| of.request(operation, &enforced));
    // The node of a cluster that has the key of a policy which observes may fail while the others reply.
    let is_optional = together.is_some();
    // Those that observe do not wait.
    let operation = if operation == Operation::Wait {
        Operation::Check
    } else {
        operation
    };
    let alone = observed.iter().map(|charges| {
        let request = StoreRequest::new(operation, charges).units(of.units());
        if is_optional { request.optional() } else { request }
    });
    let requests: Vec<StoreRequest<'_>> = together.into_iter().chain(alone).collect();
    (!requests.is_empty()).then(|| decide(&requests))
}

/// Records the outcomes of the requests in the decision, without the policies that observe whose outcome is unknown. Slots that
/// the store may have taken of these are released.
pub(crate) fn record(
    response: &StoreResponse,
    operation: Operation,
    undecided: &mut Undecided,
) -> Result<(), StoreError> {
    let policies = undecided.as_slice().iter().filter(|policy| is_undecided(policy));
    let (observed, enforced): (Vec<_>, Vec<_>) = policies.partition(|policy| policy.is_observed());
    let (together, alone) = response
        .outcomes()
        .split_at_checked(usize::from(!enforced.is_empty()))
        .ok_or_else(mismatch)?;
    let states = together.iter().flat_map(|outcome| outcome.states());
    let is_complete = |outcome: &Outcome| outcome.is_unknown() || outcome.states().len() == 1;
    let are_alone = alone.len() == observed.len() && alone.iter().all(is_complete);
    if states.clone().count() != enforced.len() || !are_alone {
        return Err(mismatch());
    }

    let is_denied = undecided.as_slice().iter().any(PolicyDecision::denies);
    let allowed = !is_denied && together.iter().all(|outcome| outcome.allowed);
    let counts = allowed && operation.counts();
    let (mut states, mut alone) = (states, alone.iter());
    undecided.record_each(allowed, response.server_time, |policy| {
        if !is_undecided(policy) {
            return true;
        }
        if !policy.is_observed() {
            policy.record(&mut states, response.server_time, counts);
            return true;
        }
        let Some(outcome) = alone.next().filter(|outcome| !outcome.is_unknown()) else {
            if operation.counts() {
                release_unknown(slice::from_ref(policy));
            }
            return false;
        };
        // The store has taken its slots even if the other policies deny the request.
        let taken = operation.counts() && outcome.allowed;
        let lease = policy.lease.clone().filter(|_| taken);
        policy.record(&mut outcome.states().iter(), response.server_time, counts && taken);
        policy.lease = lease;
        if outcome.units > 1 {
            policy.cost = policy.cost.saturating_mul(outcome.units.into());
        }
        true
    });
    undecided.record_units(together.first().map(|outcome| outcome.units));
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
