use std::sync::Arc;

use smallvec::SmallVec;

use super::{context::Plan, policy::PolicyDecision};
use crate::{
    responses::Responses,
    store::{Charge, LocalCharge, Operation, OwedKind, StoreFuture, StoreId, StoreRequest},
};

/// What is refunded or charged after a decision, where the policies were counted.
#[derive(Default)]
pub(crate) struct Settlement(SmallVec<[Adjustment; 1]>);

/// A policy that was charged, and where.
pub(super) struct ChargedPolicy {
    pub(super) policy: PolicyDecision,
    /// Whether this process counted it, since the store failed.
    pub(super) locally: bool,
}

impl ChargedPolicy {
    /// The cost that was charged.
    pub(super) fn cost(&self) -> u64 {
        match self.policy.is_charged_later() {
            true => 0,
            false => self.policy.charge().cost(),
        }
    }

    /// Whether nested layers have charged both to one key of one policy.
    pub(super) fn same_count(&self, other: &Self) -> bool {
        let (one, other) = (&self.policy, &other.policy);
        let is_one_count = one.counts_as(other.named(), other.file());
        is_one_count && one.key == other.key && one.context.store.id() == other.context.store.id()
    }

    /// The operation that refunds it.
    pub(super) fn refund(&self) -> Operation {
        Operation::Refund {
            admitted_at: self.policy.decided_at,
        }
    }
}

/// A refund or a charge of a cost.
struct Adjustment {
    policy: PolicyDecision,
    plan: Arc<Plan>,
    operation: Operation,
    cost: u64,
    /// Whether the marker of the request is removed.
    removes_marker: bool,
    /// The same as this process counts it, if it has counted the request.
    local: Option<LocalCharge>,
}

impl Settlement {
    /// Replaces what was charged to each count by its actual cost.
    pub(super) fn new(charges: Vec<ChargedPolicy>, actual: u64) -> Self {
        // Nested layers may have charged parts of one cost, of which the first ones are kept.
        let differences = charges.iter().enumerate().map(|(position, charge)| {
            let (earlier, later) = (&charges[..position], &charges[position + 1..]);
            let same = earlier.iter().filter(|other| other.same_count(charge));
            let before = same.fold(0, |sum: u64, other| sum.saturating_add(other.cost()));
            let left = actual.saturating_sub(before);
            let last = !later.iter().any(|other| other.same_count(charge));
            match charge.cost().checked_sub(left) {
                Some(refund) => (charge.refund(), refund),
                None if last => (Operation::Charge, left - charge.cost()),
                None => (Operation::Charge, 0),
            }
        });

        let differences: Vec<(Operation, u64)> = differences.collect();
        let mut settlement = Self::default();
        for (charge, (operation, cost)) in charges.into_iter().zip(differences) {
            settlement.push(charge, operation, cost);
        }
        settlement
    }

    /// Refunds what was charged to a policy, unless its receipt was taken.
    pub(crate) fn refund(&mut self, policy: &PolicyDecision, locally: bool) {
        if policy.receipt.take() {
            let policy = policy.clone();
            let charge = ChargedPolicy { policy, locally };
            let (operation, cost) = (charge.refund(), charge.cost());
            self.push(charge, operation, cost);
        }
    }

    /// Charges the cost of a policy that was only checked, unless its receipt was taken.
    pub(crate) fn charge(&mut self, policy: &PolicyDecision, locally: bool) {
        if policy.receipt.take() {
            let (policy, cost) = (policy.clone(), policy.cost);
            self.push(ChargedPolicy { policy, locally }, Operation::Charge, cost);
        }
    }

    fn push(&mut self, charge: ChargedPolicy, operation: Operation, cost: u64) {
        if cost == 0 {
            return;
        }
        // A refund of a part leaves a request that was counted.
        let is_refund = matches!(operation, Operation::Refund { .. });
        let removes_marker = is_refund && cost == charge.cost();
        let ChargedPolicy { policy, locally } = charge;
        let plan = newest_plan(&policy);
        let whole = Charge::on(&plan.named, &policy.key, cost);
        let local = locally.then(|| LocalCharge::new(policy.failure_mode(), operation, &whole));
        self.0.push(Adjustment {
            local: local.flatten(),
            policy,
            plan,
            operation,
            cost,
            removes_marker,
        });
    }

    /// Sends all that goes to one store in one call, and returns the responses of the stores.
    pub(crate) fn send(&self) -> Responses {
        let mut unsent: Adjustments<'_> = self.0.iter().collect();
        let mut responses = Responses::default();
        while let Some(first) = unsent.first() {
            let target = first.target();
            let owed = first.policy.context.outstanding.owe(OwedKind::Settlement);
            let (together, others): (Adjustments<'_>, _) =
                unsent.into_iter().partition(|other| other.target() == target);
            responses.push(send_together(&together), owed);
            unsent = others;
        }
        responses
    }
}

/// The plan that a settlement applies: that of the last load of a file, if the counts are the same.
///
/// An older window would remove counts of the newest one.
fn newest_plan(policy: &PolicyDecision) -> Arc<Plan> {
    let context = policy.policy();
    let charged = policy.chosen.as_ref().unwrap_or(&context.plan);
    let file = context.file.as_ref().filter(|_| policy.chosen.is_none());
    let newest = file.and_then(|file| file.newest_plan(policy.name()));
    newest
        .filter(|newest| newest.named.limit.algorithm() == charged.named.limit.algorithm())
        .unwrap_or_else(|| charged.clone())
}

type Adjustments<'a> = SmallVec<[&'a Adjustment; 4]>;

/// Sends adjustments of one target.
fn send_together(adjustments: &[&Adjustment]) -> StoreFuture {
    let charges: SmallVec<[SmallVec<[Charge<'_>; 1]>; 1]> =
        adjustments.iter().map(|adjustment| adjustment.charges()).collect();
    let requests = adjustments.iter().zip(&charges);
    let requests: SmallVec<[StoreRequest<'_>; 1]> = requests
        .map(|(adjustment, charge)| StoreRequest::new(adjustment.operation, charge))
        .collect();
    let context = &adjustments[0].policy.context;
    match adjustments[0].local {
        Some(_) => context.failover.decide(&requests),
        None => context.store.decide(&requests),
    }
}

impl Adjustment {
    /// The store, and whether this process counts in place of it.
    fn target(&self) -> (Option<StoreId>, bool) {
        (self.policy.context.store.id(), self.local.is_some())
    }

    fn charges(&self) -> SmallVec<[Charge<'_>; 1]> {
        let charge = Charge::on(&self.plan.named, &self.policy.key, self.cost);
        let charge = match &self.local {
            Some(local) => local.charge(&charge),
            None => charge,
        };
        let marker = self.policy.marker.as_ref();
        // A repetition of a request that is charged when it is completed is not charged.
        let marker = match self.operation == Operation::Charge && self.policy.is_charged_later() {
            true => marker.map(|marker| marker.charge(&charge)),
            false => marker
                .filter(|_| self.removes_marker)
                .map(|marker| marker.removal(&charge)),
        };
        marker.into_iter().chain([charge]).collect()
    }
}
