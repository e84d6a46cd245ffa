//! Bans that begin without a denial: by hand, or since a server has asked for a pause. Requests that wait see them at their turn.

use std::time::Duration;

use smallvec::SmallVec;

use crate::{
    Decision, PolicyDecision,
    decision::Undecided,
    store::{Charge, Operation, StoreFuture, StoreRequest, StoreResponse},
};

/// Bans the keys of these policies of a decision for a time, in the store and in what this process counts while the store fails;
/// `None` if none of them has bans.
pub(crate) fn send(
    decision: &Decision,
    length: Duration,
    selects: impl Fn(&PolicyDecision) -> bool,
) -> Option<StoreFuture> {
    let length = length.as_micros().try_into().unwrap_or(u64::MAX);
    let policies = decision.as_slice().iter().filter(|policy| selects(policy));
    let charges = policies.filter_map(|policy| policy.ban_charge(length));
    decide(decision, Operation::Charge, charges)
}

/// Reads the bans of a request that has waited; `None` without a policy that has bans.
pub(crate) fn read(decision: &Decision) -> Option<StoreFuture> {
    let charges = decision.enforced().filter_map(|policy| policy.ban_charge(1));
    decide(decision, Operation::Peek, charges)
}

/// The denial of a request by the bans that were [read](read); `None` if none is in force.
pub(crate) fn deny(decision: &Decision, response: &StoreResponse) -> Option<Decision> {
    let with_bans = decision.enforced().filter(|policy| policy.ban_charge(1).is_some());
    let rests = response
        .outcomes()
        .iter()
        .map(|outcome| outcome.states().first()?.retry_after);
    let banned: SmallVec<[PolicyDecision; 1]> = with_bans
        .zip(rests)
        .filter_map(|(policy, rest)| Some(policy.banned(rest?, response.server_time)))
        .collect();
    (!banned.is_empty()).then(|| {
        let mut denied = Undecided::new(banned);
        denied.record_each(false, response.server_time, |_| true);
        denied.decided()
    })
}

/// Passes each charge of a ban to the store as a request of its own; `None` without any.
fn decide<'a>(
    decision: &Decision,
    operation: Operation,
    charges: impl Iterator<Item = Charge<'a>>,
) -> Option<StoreFuture> {
    let charges: SmallVec<[[Charge<'_>; 1]; 1]> = charges.map(|charge| [charge]).collect();
    let requests = charges.iter().map(|charge| StoreRequest::new(operation, charge));
    let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
    let context = &decision.as_slice().first().filter(|_| !requests.is_empty())?.context;
    if operation.counts() {
        context.failover.copy(&requests);
    }
    Some(context.store.decide(&requests))
}
