use std::time::Duration;

use smallvec::SmallVec;

use super::{Charge, ChargeRole, ChargeState, Operation, Outcome, StoreFuture, StoreRequest, StoreResponse};
use crate::Limit;

/// Decides requests without charges and charges of [`Limit::Unlimited`] and [`Limit::DenyAll`], for which nothing is counted,
/// and passes all others to a store.
pub(super) fn apart(
    requests: &[StoreRequest<'_>],
    decide: impl FnOnce(&[StoreRequest<'_>]) -> StoreFuture,
) -> StoreFuture {
    let counted = |request: &StoreRequest<'_>| {
        let charges = request.charges();
        !charges.is_empty() && charges.iter().all(|charge| charge.limit().is_counted())
    };
    if requests.iter().all(counted) {
        return decide(requests);
    }
    decide_apart(requests, decide)
}

/// The part of a request that is decided without the store.
struct Part {
    denied: bool,
    units: u32,
    /// One for each charge; `None` for those that the store decides.
    states: SmallVec<[Option<ChargeState>; 1]>,
}

#[cold]
fn decide_apart(requests: &[StoreRequest<'_>], decide: impl FnOnce(&[StoreRequest<'_>]) -> StoreFuture) -> StoreFuture {
    let parts: Vec<Part> = requests.iter().map(part_of).collect();
    let charges: Vec<Vec<Charge<'_>>> = requests
        .iter()
        .map(|request| {
            let charges = request.charges();
            let counted = (0..charges.len()).filter(|position| is_counted(charges, *position));
            counted.map(|position| charges[position]).collect()
        })
        .collect();
    let counted = requests.iter().zip(&parts).zip(&charges);
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "an operation that is no check stays the same"
    )]
    let counted: Vec<StoreRequest<'_>> = counted
        .filter(|(_, charges)| !charges.is_empty())
        .map(|((request, part), charges)| match request.operation() {
            // Nothing is charged, and the charge states have what remains.
            Operation::Check | Operation::Reserve if part.denied => request.with(Operation::Peek, charges),
            operation => request.with(operation, charges),
        })
        .collect();

    if counted.is_empty() {
        let outcomes = parts.into_iter().map(|part| part.join(None));
        return StoreFuture::ready(Ok(StoreResponse::without_reply(Duration::ZERO, outcomes)));
    }
    match decide(&counted).try_ready() {
        Ok(response) => StoreFuture::ready(response.map(|response| join(parts, response))),
        Err(pending) => StoreFuture::pending(async { pending.await.map(|response| join(parts, response)) }),
    }
}

fn part_of(request: &StoreRequest<'_>) -> Part {
    let charges = request.charges();
    let state = |position: usize| {
        let quota = charges[position].limit().quota();
        (!is_counted(charges, position)).then(|| ChargeState::new(quota, None, Duration::ZERO))
    };
    let denies = |charge: &Charge<'_>| *charge.limit() == Limit::DenyAll && charge.role() != ChargeRole::Once;
    Part {
        denied: request.operation().requires_room() && charges.iter().any(denies),
        units: request.unit_count(),
        states: (0..charges.len()).map(state).collect(),
    }
}

/// Joins the parts with the outcomes of the store.
fn join(parts: Vec<Part>, mut response: StoreResponse) -> StoreResponse {
    let mut outcomes = std::mem::take(&mut response.outcomes).into_iter();
    let joined = parts.into_iter().map(|part| {
        let counted = part.states.iter().any(Option::is_none);
        let outcome = if counted { outcomes.next() } else { None };
        part.join(outcome)
    });
    response.outcomes = joined.collect();
    response
}

impl Part {
    fn join(self, counted: Option<Outcome>) -> Outcome {
        let is_waiting = counted.as_ref().is_some_and(|outcome| outcome.is_waiting);
        let allowed = !self.denied && counted.as_ref().is_none_or(|outcome| outcome.allowed);
        let counted_units = counted.as_ref().map_or(self.units, |outcome| outcome.units);
        let units = if self.denied { 0 } else { counted_units };
        let mut counted = counted.into_iter().flat_map(|outcome| outcome.states);
        let states = self
            .states
            .into_iter()
            .filter_map(|state| state.or_else(|| counted.next()));
        Outcome {
            is_waiting,
            ..Outcome::new(allowed, states).of_units(units)
        }
    }
}

/// Whether a store is needed for the charge at this position. A marker and a ban need none if the charge that they are for
/// does not.
fn is_counted(charges: &[Charge<'_>], position: usize) -> bool {
    let subject = ChargeRole::subject(charges, position, Charge::role);
    let mut needed = [Some(position), subject].into_iter().flatten();
    needed.all(|position| charges[position].limit().is_counted())
}
