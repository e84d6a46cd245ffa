//! Sends the charges of a request to a store and makes a decision of the outcome. Layers and limiters share it.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use smallvec::SmallVec;

use crate::{
    Decision, FailureMode, PolicyDecision,
    decision::PolicyDecisions,
    store::{Charge, ErrorKind, LocalCharge, Operation, StoreError, StoreFuture, StoreRequest, StoreResponse},
};

/// A check that is decided already, or waits for the store.
pub(crate) enum Check {
    Decided(Result<Decision, StoreError>),
    Pending(PendingCheck),
}

/// A check that waits for the store. It holds the undecided decision, so no key or cost is computed again.
pub(crate) struct PendingCheck {
    response: StoreFuture,
    operation: Operation,
    undecided: Option<Decision>,
}

/// Sends the charges of all policies to the store as one request.
#[inline]
pub(crate) fn begin(operation: Operation, undecided: Decision) -> Check {
    let policies = undecided.as_slice();
    if operation.requires_room() && policies.iter().any(|policy| policy.permanent_denial().is_some()) {
        return Check::Decided(Ok(deny_permanently(policies)));
    }

    let response = match policies {
        [] => return Check::Decided(Ok(undecided)),
        [policy] => {
            let charge = policy.charge();
            policy.context.store.decide(&[StoreRequest::new(operation, &[charge])])
        }
        [first, ..] => {
            let charges: SmallVec<[Charge<'_>; 4]> = policies.iter().map(PolicyDecision::charge).collect();
            first.context.store.decide(&[StoreRequest::new(operation, &charges)])
        }
    };
    match response.try_ready() {
        Ok(response) => Check::Decided(conclude(response, operation, undecided)),
        Err(response) => Check::Pending(PendingCheck {
            response,
            operation,
            undecided: Some(undecided),
        }),
    }
}

/// The denial by the policies that never admit the request.
#[cold]
fn deny_permanently(policies: &[PolicyDecision]) -> Decision {
    // Without a call of the store, the states of the other policies are unknown.
    let denials = policies.iter().filter_map(|policy| {
        let denial = Some(policy.permanent_denial()?);
        Some(PolicyDecision {
            denial,
            ..policy.clone()
        })
    });
    Decision::new(false, denials.collect())
}

impl Future for PendingCheck {
    type Output = Result<Decision, StoreError>;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let response = ready!(Pin::new(&mut self.response).poll(cx));
        let undecided = self.undecided.take().expect("polled after it was ready");
        Poll::Ready(conclude(response, self.operation, undecided))
    }
}

#[inline]
fn conclude(
    response: Result<StoreResponse, StoreError>,
    operation: Operation,
    mut undecided: Decision,
) -> Result<Decision, StoreError> {
    match response.and_then(|response| settle(&response, operation, &mut undecided)) {
        Ok(()) => {
            if let Some(first) = undecided.as_slice().first() {
                first.context.failover.replied();
            }
            if operation == Operation::Reset {
                reset_locally(&undecided);
            }
            Ok(undecided)
        }
        Err(error) => fail(error, operation, &undecided),
    }
}

/// Records the outcome of the only request in the decision.
#[inline]
fn settle(response: &StoreResponse, operation: Operation, undecided: &mut Decision) -> Result<(), StoreError> {
    match response.outcomes() {
        [outcome, ..] if outcome.states().len() == undecided.as_slice().len() => {
            let charged = outcome.allowed && matches!(operation, Operation::Check | Operation::Charge);
            undecided.settle(response, outcome, charged);
            Ok(())
        }
        _ => Err(StoreError::new(
            ErrorKind::Protocol,
            "the response of the store does not have one state for each charge",
        )),
    }
}

/// Decides by the failure modes of the policies.
#[cold]
fn fail(error: StoreError, operation: Operation, undecided: &Decision) -> Result<Decision, StoreError> {
    let policies = undecided.as_slice();
    let Some(first) = policies.first() else {
        return Err(error);
    };
    let failover = &first.context.failover;
    failover.failed(&error);
    if operation == Operation::Reset {
        reset_locally(undecided);
        return Err(error);
    }
    if policies
        .iter()
        .any(|policy| policy.failure_mode() == FailureMode::Closed)
    {
        return Err(error);
    }

    let local = policies.iter().filter_map(|policy| {
        let charge = LocalCharge::new(policy.failure_mode(), operation, &policy.charge())?;
        let policy = PolicyDecision {
            cost: charge.cost,
            ..policy.clone()
        };
        Some((policy, charge))
    });
    let (counted, charges): (PolicyDecisions, Vec<LocalCharge>) = local.unzip();
    let mut decision = Decision::new(counted.is_empty(), counted);
    let scaled = decision.as_slice().iter().zip(&charges);
    let scaled: Vec<Charge<'_>> = scaled.map(|(policy, charge)| charge.charge(&policy.charge())).collect();
    if !scaled.is_empty()
        && let Ok(response) = failover.decide(&[StoreRequest::new(operation, &scaled)]).try_ready()
    {
        drop(scaled);
        settle(&response?, operation, &mut decision)?;
    }
    decision.note_failure(error);
    Ok(decision)
}

/// Removes the counts of this process.
fn reset_locally(decision: &Decision) {
    for policy in decision.as_slice() {
        policy.context.failover.reset(&[policy.charge()]);
    }
}
