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
    let length = length.max(Duration::from_micros(1));
    let policies = decision.as_slice().iter();
    let with_bans = policies.filter(|policy| selects(policy) && policy.has_bans());
    let charges: SmallVec<[[Charge<'_>; 1]; 1]> = with_bans.map(|policy| [policy.charge()]).collect();
    let requests = charges
        .iter()
        .map(|charge| StoreRequest::new(Operation::Ban { length }, charge));
    let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
    let context = &decision.as_slice().first().filter(|_| !requests.is_empty())?.context;
    context.failover.copy(&requests);
    Some(context.store.decide(&requests))
}
