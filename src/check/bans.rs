//! Bans that begin without a denial: by hand, or since a server has asked for a pause.

use std::time::Duration;

use smallvec::SmallVec;

use crate::{
    Decision, PolicyDecision,
    store::{Operation, StoreFuture, StoreRequest},
};

/// Bans the keys of these policies of a decision for a time, in the store and in what this process counts while the store fails;
/// `None` if none of them has bans.
pub(crate) fn send(
    decision: &Decision,
    length: Duration,
    selects: impl Fn(&PolicyDecision) -> bool,
) -> Option<StoreFuture> {
    let length = length.max(Duration::from_micros(1));
    let with_bans = decision
        .as_slice()
        .iter()
        .filter(|policy| selects(policy) && policy.charge.ban.is_some());
    let requests = with_bans.map(|policy| StoreRequest::new(Operation::Ban { length }, [&policy.charge]));
    let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
    let context = &decision.as_slice().first().filter(|_| !requests.is_empty())?.context;
    // A memory store replies at once and does not fail.
    drop(context.failover.counts().decide(&requests));
    Some(context.store.decide(&requests))
}
