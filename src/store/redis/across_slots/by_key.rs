//! Requests with several keys in a slot that is moving, of which no node has all.

use std::time::Duration;

use super::Progress;
use crate::store::{
    Charge, ChargeState, ErrorKind, Operation, StoreError, StoreResponse,
    redis::{failure::Failure, request::OwnedRequest},
};

impl Progress<'_> {
    /// Runs an operation on the charges in a slot that is moving, one key after the other: no node has all of them.
    pub(super) async fn run_by_key(
        &mut self,
        slot: u16,
        positions: &[usize],
        operation: Operation,
    ) -> Result<(), StoreError> {
        let request = self.request;
        let is_counted = operation.decides() && request.units > 0;
        if request.is_check() && request.units > 1 && positions.len() > 1 {
            return Err(StoreError::new(
                ErrorKind::Refused,
                "units of several policies cannot be taken at once while the slot of their key moves to another node",
            ));
        }
        if operation.decides() && request.units == 0 {
            return Ok(()); // a place in lines, which are not regarded here
        }
        self.is_by_key |= positions.len() > 1;
        let with_bans = positions
            .iter()
            .filter(|position| request.charge(**position).ban.is_some());
        let (mut bans, mut is_banned) = (Vec::new(), false);
        for position in with_bans.filter(|_| is_counted || matches!(operation, Operation::Peek | Operation::Reset)) {
            let on_bans = if operation == Operation::Reset {
                operation
            } else {
                Operation::Ban { length: Duration::ZERO }
            };
            let rest = match self.run_on_bans(slot, *position, on_bans).await {
                // The request is denied by another one.
                Err(_) if is_counted && is_banned => None,
                rest => rest?,
            };
            is_banned |= rest.is_some();
            bans.push((*position, rest));
        }
        self.allowed &= !is_banned;

        let mut failure = None;
        for position in positions {
            let operation = self.next(operation);
            let part = if matches!(operation, Operation::Ban { .. }) {
                request.part_of_bans(operation, *position)
            } else {
                let part = request.part(operation, &[*position]);
                part.to_owned(|charge| (charge.line, charge.ban) = (None, None))
            };
            let decided = self.decide_key(slot, part).await;
            match decided.and_then(|response| self.record(slot, &[*position], operation, &response)) {
                Ok(()) => {}
                Err(_) if is_counted && !self.allowed => {}
                Err(error) if operation.decides() || operation == Operation::Peek => return Err(error),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        for (position, rest) in bans {
            let counts_denial = is_counted && !is_banned && self.is_denied_for_good(operation, positions, position);
            let rest = match counts_denial {
                // If it is lost, the request is denied nonetheless.
                true => self
                    .run_on_bans(slot, position, Operation::Check)
                    .await
                    .unwrap_or_default(),
                false => rest,
            };
            self.states[position] = self.states[position].banned(rest.unwrap_or_default());
        }
        failure.map_or(Ok(()), Err)
    }

    /// Whether a check is denied for this charge, and is not followed by another one: as `lua/driver.lua` finds it.
    fn is_denied_for_good(&self, operation: Operation, positions: &[usize], position: usize) -> bool {
        let charge_of = |position: &usize| (self.request.charge(*position), self.states[*position].retry_after);
        let may_wait = |(charge, wait): (&Charge, Option<Duration>)| {
            let longest = charge.line.as_ref().map(|line| Duration::from_micros(line.longest_us));
            wait.is_none_or(|wait| longest.is_some_and(|longest| charge.limit().is_held() || wait <= longest))
        };
        let waits = match &self.request.waiting {
            Some(_) => self
                .request
                .charges()
                .any(|charge| charge.line.as_ref().is_some_and(|line| line.leads.is_some())),
            None => positions.iter().map(charge_of).all(may_wait),
        };
        let (charge, wait) = charge_of(&position);
        let is_denied = !self.allowed && wait.is_some() && charge.cost() <= charge.limit().quota();
        is_denied && !(operation == Operation::Wait && waits)
    }

    /// Runs an operation on the bans of a charge alone, and returns the rest of the ban that is in force.
    async fn run_on_bans(
        &self,
        slot: u16,
        position: usize,
        operation: Operation,
    ) -> Result<Option<Duration>, StoreError> {
        let response = self
            .decide_key(slot, self.request.part_of_bans(operation, position))
            .await?;
        let state = response.outcomes.first().and_then(|outcome| outcome.states.first());
        Ok(state.and_then(ChargeState::banned_for))
    }

    /// Decides a request with one key, which one of the nodes executes.
    async fn decide_key(&self, slot: u16, part: OwnedRequest) -> Result<StoreResponse, StoreError> {
        let mut decided = self.queues.decide_at(slot, true, part).await?;
        decided
            .response()
            .unwrap_or_else(|| Err(Failure::malformed_reply().into()))
    }
}
