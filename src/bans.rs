//! Bans that begin without a denial: by hand, or since a server has asked for a pause. Requests that wait see them at their turn.

use std::time::Duration;

use smallvec::SmallVec;

use crate::{
    Decision, PolicyDecision,
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
    let charges: SmallVec<[[Charge<'_>; 1]; 1]> = policies
        .filter_map(|policy| Some([policy.ban_charge(length)?]))
        .collect();
    let requests = charges
        .iter()
        .map(|charge| StoreRequest::new(Operation::Charge, charge));
    let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
    let [first, ..] = decision.as_slice() else { return None };
    if requests.is_empty() {
        return None;
    }
    first.context.failover.copy(&requests);
    Some(first.context.store.decide(&requests))
}

/// Reads the bans of a request that has waited; `None` without a policy that has bans.
pub(crate) fn read(decision: &Decision) -> Option<StoreFuture> {
    let charges: SmallVec<[[Charge<'_>; 1]; 1]> = banning(decision)
        .filter_map(|policy| Some([policy.ban_charge(1)?]))
        .collect();
    let requests = charges.iter().map(|charge| StoreRequest::new(Operation::Peek, charge));
    let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
    let first = decision.as_slice().first()?;
    (!requests.is_empty()).then(|| first.context.store.decide(&requests))
}

/// The denial of a request by the bans that were [read](read); `None` if none is in force.
pub(crate) fn deny(decision: &Decision, response: &StoreResponse) -> Option<Decision> {
    let rests = response
        .outcomes()
        .iter()
        .map(|outcome| outcome.states().first()?.retry_after);
    let banned: SmallVec<[PolicyDecision; 1]> = banning(decision)
        .zip(rests)
        .filter_map(|(policy, rest)| Some(policy.banned(rest?, response.server_time)))
        .collect();
    (!banned.is_empty()).then(|| {
        let mut denied = Decision::new(false, banned);
        denied.record_each(false, response.server_time, |_| true);
        denied
    })
}

/// The policies that would deny a request for its ban.
fn banning(decision: &Decision) -> impl Iterator<Item = &PolicyDecision> {
    decision.enforced().filter(|policy| policy.ban_charge(1).is_some())
}
