//! The store requests of a decision in which policies only observe: one for those that are enforced together, and
//! one for each that observes, so that none depends on another. All are sent in one call.

use std::slice;

use smallvec::SmallVec;

use super::{Undecided, release_unknown};
use crate::{
    PolicyDecision,
    store::{ErrorKind, Operation, Outcome, StoreError, StoreRequest, StoreResponse},
};

/// The requests for the policies that are not denied already: one for the enforced ones, then one for each that observes.
pub(crate) fn requests(operation: Operation, undecided: &Undecided) -> SmallVec<[StoreRequest<'_>; 1]> {
    let policies = undecided.as_slice().iter().filter(|policy| is_undecided(policy));
    let (observed, enforced): (Vec<_>, Vec<_>) = policies.partition(|policy| policy.is_observed());
    // The node of a cluster that has the key of a policy which observes may fail while the others reply.
    let is_optional = !enforced.is_empty() && operation != Operation::Reset;
    let together = (!enforced.is_empty()).then(|| undecided.request_for(operation, enforced));
    // Those that observe do not wait.
    let operation = operation.of_waiting(false);
    let alone = observed.into_iter().map(|policy| {
        let request = StoreRequest::new(operation, [policy.counted()]).units(undecided.units());
        request.optional(is_optional)
    });
    together.into_iter().chain(alone).collect()
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
    let inner = undecided.inner();
    (inner.allowed, inner.server_time) = (allowed, response.server_time);
    inner.policies.retain(|policy| {
        if !is_undecided(policy) {
            return true;
        }
        if !policy.is_observed() {
            policy.record(&mut states, response.server_time, counts);
            return true;
        }
        let Some(outcome) = alone.next().filter(|outcome| !outcome.is_unknown()) else {
            if operation.counts() {
                release_unknown(slice::from_ref(policy), false);
            }
            return false;
        };
        // The store has taken its slots even if the other policies deny the request.
        let taken = operation.counts() && outcome.allowed;
        let lease = policy.lease.filter(|_| taken);
        policy.record(&mut outcome.states().iter(), response.server_time, counts && taken);
        policy.lease = lease;
        if outcome.units > 1 {
            policy.multiply(outcome.units);
        }
        true
    });
    if undecided.units() > 1 {
        undecided.take(together.first().map_or(undecided.units(), |outcome| outcome.units));
    }
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
