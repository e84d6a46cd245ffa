//! What an operation of a limiter sends to the store.

use super::LimiterRequest;
use crate::{
    Key, Limit, PolicyDecision,
    decide::{LongestWait, PolicyDecisions, Undecided, Waiting},
    observe::PolicyOutcome,
    policy::Basis,
    store::{Operation, StoreError},
};

/// The policies that apply to a request, with their keys and costs.
pub(super) fn undecided_by(
    basis: &Basis,
    operation: Operation,
    request: &LimiterRequest<'_>,
) -> Result<Undecided, StoreError> {
    let plan = request.plan_of(basis)?;
    let Basis { policies, context, .. } = basis;
    let context = context.here();
    let policies = policies
        .iter()
        .enumerate()
        .filter(|(_, policy)| policy.is_of_plan(plan));
    let undecided = policies.map(|(position, policy)| {
        let settings = &context.policies[position].settings;
        let (key, cost) = request.for_policy(policy.name());
        let cost = cost.or(settings.fixed_cost()).unwrap_or(1);
        let own = &context.policies[position].limit;
        let limit = policy.overriding(context, &own.limit, key);
        let limit = limit.unwrap_or_else(|| own.clone());
        let waiting = match (context.policies[position].observes(key), &settings.longest_wait) {
            (true, _) => Waiting::default(),
            (false, Some(LongestWait::Computed(_))) => request.waiting(Waiting::default()),
            (false, _) => request.waiting(context.policies[position].waiting),
        };
        PolicyDecision::undecided(context.clone(), position, limit, (key.clone(), cost), waiting)
    });
    let applying = undecided.filter(|policy| {
        let limit = &policy.named().limit;
        let is_denied = *limit == Limit::DenyAll && operation.requires_room();
        let applies = policy.charge.cost > 0 && (is_denied || limit.is_counted());
        if !applies && operation.decides() {
            policy.count(PolicyOutcome::Skipped);
        }
        applies
    });
    let undecided = Undecided::new(applying.collect());
    // Slots of an override.
    match request.units > 1 && undecided.has_leases() {
        true => Err(one_by_one()),
        false => Ok(undecided.of_units(request.units)),
    }
}

#[cold]
pub(super) fn one_by_one() -> StoreError {
    StoreError::invalid("units are taken one by one from policies with slots or bans; use `check`")
}

/// All counts of a key that are known, each once: of the policies of each plan, by their own limits and by those that override these.
pub(super) fn all_counts(Basis { policies, context, .. }: &Basis, key: &Key) -> Undecided {
    let context = context.here();
    let mut counts = PolicyDecisions::new();
    for (position, policy) in policies.iter().enumerate() {
        for limit in policy.counted_limits((context, position), key) {
            let count =
                PolicyDecision::undecided(context.clone(), position, limit, (key.clone(), 1), Waiting::default());
            // Limits of one shape share the counts of a key.
            let is_same = |other: &PolicyDecision| {
                other.named().has_counts_of(count.named()) && other.charge.ban == count.charge.ban
            };
            if !counts.iter().any(is_same) {
                counts.push(count);
            }
        }
    }
    Undecided::new(counts)
}
