//! Checks a list of charges: the part that layers and limiters share.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use smallvec::SmallVec;

use crate::{
    Decision, Denial, FailureMode, Limit, PolicyDecision,
    decision::PolicyDecisions,
    store::{Charge, ErrorKind, LocalCharge, Operation, StoreError, StoreFuture, StoreRequest, StoreResponse},
};

impl PolicyDecision {
    fn charge(&self) -> Charge<'_> {
        Charge::on(self.quota(), &self.key, self.cost)
    }

    /// Whether there is anything to decide.
    pub(crate) fn applies(&self) -> bool {
        self.cost > 0 && self.quota().limit != Limit::Unlimited
    }

    /// Whether a store holds anything for it.
    pub(crate) fn counts(&self) -> bool {
        self.quota().limit != Limit::DenyAll
    }

    /// Why no wait makes room for it.
    fn hopeless(&self) -> Option<Denial> {
        match &self.quota().limit {
            Limit::DenyAll => Some(Denial::DenyAll),
            limit if self.cost > limit.quota() => Some(Denial::CostAboveLimit),
            _ => None,
        }
    }
}

/// How far a check got.
pub(crate) enum Asked {
    Decided(Result<Decision, StoreError>),
    Pending(Pending),
}

/// A decision on its way.
pub(crate) struct Pending {
    answer: StoreFuture,
    operation: Operation,
    undecided: Option<Decision>,
}

/// Asks the store about all policies at once, if there are any.
#[inline]
pub(crate) fn ask(operation: Operation, undecided: Decision) -> Asked {
    let policies = undecided.as_slice();
    if asks(operation) && policies.iter().any(|policy| policy.hopeless().is_some()) {
        return Asked::Decided(Ok(deny_hopeless(policies)));
    }

    let reply = match policies {
        [] => return Asked::Decided(Ok(undecided)),
        [policy] => policy
            .context
            .store
            .decide(&[StoreRequest::new(operation, &[policy.charge()])]),
        several => {
            let charges: SmallVec<[Charge<'_>; 4]> = several.iter().map(PolicyDecision::charge).collect();
            several[0]
                .context
                .store
                .decide(&[StoreRequest::new(operation, &charges)])
        }
    };
    match reply.try_ready() {
        Ok(answer) => Asked::Decided(conclude(answer, operation, undecided)),
        Err(answer) => Asked::Pending(Pending {
            answer,
            operation,
            undecided: Some(undecided),
        }),
    }
}

/// Whether an operation requires room.
pub(crate) fn asks(operation: Operation) -> bool {
    matches!(operation, Operation::Check | Operation::Peek)
}

/// The denial by the policies that no wait makes room for.
#[cold]
fn deny_hopeless(policies: &[PolicyDecision]) -> Decision {
    // The store is not asked, so what the others would say is not known.
    let denials = policies.iter().filter_map(|policy| {
        let denial = Some(policy.hopeless()?);
        Some(PolicyDecision {
            denial,
            ..policy.clone()
        })
    });
    Decision::new(false, denials.collect())
}

impl Future for Pending {
    type Output = Result<Decision, StoreError>;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(Pin::new(&mut self.answer).poll(cx));
        let undecided = self.undecided.take().expect("polled after it was ready");
        Poll::Ready(conclude(answer, self.operation, undecided))
    }
}

#[inline]
fn conclude(
    answer: Result<StoreResponse, StoreError>,
    operation: Operation,
    mut undecided: Decision,
) -> Result<Decision, StoreError> {
    match answer.and_then(|answer| settle(&answer, operation, &mut undecided)) {
        Ok(()) => {
            let Some(policy) = undecided.as_slice().first() else {
                return Ok(undecided);
            };
            policy.context.failover.answered();
            if operation == Operation::Reset {
                reset_locally(&undecided);
            }
            Ok(undecided)
        }
        Err(error) => fail(error, operation, &undecided),
    }
}

#[inline]
fn settle(answer: &StoreResponse, operation: Operation, undecided: &mut Decision) -> Result<(), StoreError> {
    match answer.outcomes.first() {
        Some(outcome) if outcome.states.len() == undecided.as_slice().len() => {
            let charged = outcome.allowed && matches!(operation, Operation::Check | Operation::Charge);
            undecided.settle(answer, outcome, charged);
            Ok(())
        }
        _ => Err(StoreError::new(
            ErrorKind::Protocol,
            "the answer of the store does not have one verdict for each charge",
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
    let failover = first.context.failover.clone();
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
        && let Ok(answer) = failover.decide(operation, &scaled).try_ready()
    {
        drop(scaled);
        settle(&answer?, operation, &mut decision)?;
    }
    decision.note_failure(error);
    Ok(decision)
}

fn reset_locally(undecided: &Decision) {
    for policy in undecided.as_slice() {
        policy.context.failover.reset(&[policy.charge()]);
    }
}

/// Gives back what a policy was charged, where that was counted.
pub(crate) fn refund(decision: &Decision, policy: &PolicyDecision) -> StoreFuture {
    let operation = Operation::Refund {
        admitted_at: policy.decided_at,
    };
    let charge = policy.charge();
    let local = decision
        .store_error()
        .and_then(|_| LocalCharge::new(policy.failure_mode(), operation, &charge));
    match local {
        Some(local) => policy.context.failover.decide(operation, &[local.charge(&charge)]),
        None => policy.context.store.decide(&[StoreRequest::new(operation, &[charge])]),
    }
}
