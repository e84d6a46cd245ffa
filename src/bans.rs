//! Bans that begin without a denial: by hand, or since a server has asked for a pause.

use std::time::Duration;

use smallvec::SmallVec;

use crate::{
    Decision, PolicyDecision,
    store::{Charge, Operation, StoreFuture, StoreRequest},
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
