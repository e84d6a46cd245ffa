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
    let policies = decision.as_slice().iter().filter(|policy| selects(policy));
    decide(decision, length.max(Duration::from_micros(1)), policies)
}

/// Reads the bans of a request that has waited; `None` without a policy that has bans.
pub(crate) fn read(decision: &Decision) -> Option<StoreFuture> {
    decide(decision, Duration::ZERO, decision.enforced())
}

/// The denial of a request by the bans that were [read](read); `None` if none is in force.
pub(crate) fn deny(decision: &Decision, response: &StoreResponse) -> Option<Decision> {
    let with_bans = decision.enforced().filter(|policy| policy.has_bans());
    let rests = response
        .outcomes()
        .iter()
        .map(|outcome| outcome.states().first()?.banned_for());
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

/// Passes the bans of each policy to the store as a request of their own; `None` without any.
fn decide<'a>(
    decision: &Decision,
    length: Duration,
    policies: impl Iterator<Item = &'a PolicyDecision>,
) -> Option<StoreFuture> {
    let with_bans = policies.filter(|policy| policy.has_bans());
    let charges: SmallVec<[[Charge<'_>; 1]; 1]> = with_bans.map(|policy| [policy.charge()]).collect();
    let requests = charges
        .iter()
        .map(|charge| StoreRequest::new(Operation::Ban { length }, charge));
    let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
    let context = &decision.as_slice().first().filter(|_| !requests.is_empty())?.context;
    if !length.is_zero() {
        context.failover.copy(&requests);
    }
    Some(context.store.decide(&requests))
}
