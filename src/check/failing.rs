//! Decides while the store fails, by the failure modes of the policies.

use super::{charge, composite, record_outcome};
use crate::{
    Decision, FailureMode, PolicyDecision,
    decision::{PolicyDecisions, Undecided},
    observe::PolicyOutcome,
    store::{Charge, LocalCharge, Operation, StoreError, StoreResponse},
};

/// Decides by the failure modes of the policies.
#[cold]
pub(super) fn fail(error: StoreError, operation: Operation, undecided: &Undecided) -> Result<Decision, StoreError> {
    let mut local = Local::new(error, operation, undecided)?;
    let response = local.send(operation);
    local.record(operation, response)?;
    Ok(local.decided())
}

/// The policies that this process decides about, since the store failed.
struct Local {
    undecided: Undecided,
    /// One for each policy; `None` for one that is denied without the store.
    charges: Vec<Option<LocalCharge>>,
    error: StoreError,
}

impl Local {
    fn new(error: StoreError, operation: Operation, undecided: &Undecided) -> Result<Self, StoreError> {
        let policies = undecided.as_slice();
        let Some(first) = policies.first() else {
            return Err(error);
        };
        let failover = &first.context.failover;
        failover.failed(&error);
        first.context.metrics.failed(error.kind());
        if operation == Operation::Reset {
            reset_locally(policies);
            return Err(error);
        }
        let count_one = |policy: &PolicyDecision, outcome| {
            if operation.decides() {
                policy.count(outcome);
            }
        };
        let record = |policy: &PolicyDecision, outcome| {
            if operation.decides() {
                policy.context.record(outcome, Some(policy.position));
            }
        };
        if let Some(closed) = policies.iter().find(|policy| closes(policy)) {
            policies
                .iter()
                .for_each(|policy| count_one(policy, PolicyOutcome::Failed));
            record(closed, PolicyOutcome::Failed);
            return Err(error);
        }

        let local = policies.iter().filter_map(|policy| {
            // Denied without the store.
            if policy.denial.is_some() {
                return Some((policy.clone(), None));
            }
            let Some(charge) = LocalCharge::new(policy.failure_mode(), operation, &policy.charge()) else {
                count_one(policy, PolicyOutcome::Uncounted);
                return None;
            };
            let policy = PolicyDecision {
                cost: charge.cost,
                is_local: true,
                ..policy.clone()
            };
            Some((policy, Some(charge)))
        });
        let (counted, charges): (PolicyDecisions, Vec<Option<LocalCharge>>) = local.unzip();
        if counted.is_empty() {
            record(first, PolicyOutcome::Uncounted);
        }
        let mut undecided = Undecided::new(counted).in_place_of(undecided);
        undecided.admit_unless_denied();
        Ok(Self {
            undecided,
            charges,
            error,
        })
    }

    /// Sends the charges; `None` if all is decided.
    fn send(&self, operation: Operation) -> Option<Result<StoreResponse, StoreError>> {
        let policies = self.undecided.as_slice();
        let failover = &policies.first()?.context.failover;
        let scaled = policies.iter().zip(&self.charges).map(|(policy, local)| match local {
            Some(local) => local.charge(&charge(&self.undecided, policy, operation)),
            None => charge(&self.undecided, policy, operation),
        });
        let scaled: Vec<Charge<'_>> = scaled.collect();
        let response = composite::send(operation, &self.undecided, &scaled, |requests| {
            failover.decide(requests)
        });
        // A memory store replies at once.
        response.and_then(|response| response.try_ready().ok())
    }

    fn record(
        &mut self,
        operation: Operation,
        response: Option<Result<StoreResponse, StoreError>>,
    ) -> Result<(), StoreError> {
        if let Some(response) = response {
            record_outcome(&response?, operation, &mut self.undecided)?;
        }
        if self.undecided.has_leases() {
            self.undecided.hold_slots(Some(&self.charges));
        }
        Ok(())
    }

    fn decided(mut self) -> Decision {
        self.undecided.record_failure(self.error);
        self.undecided.decided()
    }
}

/// Whether the request is rejected since the store has not decided about this policy.
fn closes(policy: &PolicyDecision) -> bool {
    let undecided = policy.denial.is_none() && !policy.is_observed();
    undecided && policy.failure_mode() == FailureMode::Closed
}

/// Removes the counts of this process.
pub(super) fn reset_locally(policies: &[PolicyDecision]) {
    for policy in policies {
        policy.context.failover.reset(&[policy.charge()]);
    }
}
