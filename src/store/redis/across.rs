use std::{sync::Arc, time::Duration};

use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

use super::{ask::Ask, server::Server, slot::slot_of, task::DetachOnDrop};
use crate::store::{ChargeState, ErrorKind, Operation, Outcome, StoreError, StoreResponse};

/// Decides requests with keys in several slots of a cluster, which no single call can decide: one slot after the other. When
/// one denies, the charges of the earlier ones are refunded, also if the caller has left.
pub(super) async fn ask(server: Arc<Server>, asks: Vec<Ask>, asked_at: Instant) -> Result<StoreResponse, StoreError> {
    DetachOnDrop::new(ask_all(server, asks, asked_at)).await
}

async fn ask_all(server: Arc<Server>, asks: Vec<Ask>, asked_at: Instant) -> Result<StoreResponse, StoreError> {
    let mut answer = StoreResponse::new(Duration::ZERO, []);
    for ask in &asks {
        let stamp = server.deny_cache.as_ref().map(|cache| cache.stamp(ask));
        let mut asked = Asked::new(ask);
        asked.decide(&server).await?;
        let refunds = asked.refund(&server).await?;

        let Asked { allowed, states, .. } = asked;
        let latest = states.iter().filter_map(|verdict| verdict.decided_at).max();
        answer.server_time = answer.server_time.max(latest.unwrap_or_default());
        if let (Some(cache), Some(stamp), false) = (&server.deny_cache, stamp, allowed) {
            let stamp = cache.stamp_after(stamp, ask, &refunds);
            cache.remember(ask, asked_at, stamp, answer.server_time, &states);
        }
        answer.outcomes.push(Outcome::new(allowed, ask.folds.unfold(&states)));
    }
    Ok(answer)
}

/// A request on its way from slot to slot.
struct Asked<'a> {
    ask: &'a Ask,
    allowed: bool,
    states: SmallVec<[ChargeState; 1]>,
    /// The slots that were charged, the positions of their debits, and when.
    charged: Vec<(u16, Positions, Duration)>,
}

type Positions = SmallVec<[usize; 4]>;

impl<'a> Asked<'a> {
    fn new(ask: &'a Ask) -> Self {
        Self {
            ask,
            allowed: true,
            states: smallvec![ChargeState::new(0, None, Duration::ZERO); ask.debits.len()],
            charged: Vec::new(),
        }
    }

    async fn decide(&mut self, server: &Arc<Server>) -> Result<(), StoreError> {
        for (slot, positions) in by_slot(self.ask) {
            // After a denial, the other slots only report their state.
            let operation = match self.ask.operation {
                Operation::Check if !self.allowed => Operation::Peek,
                operation => operation,
            };
            match self.ask_slot(server, slot, &positions, operation).await {
                Ok(answer) => {
                    self.note(&positions, &answer)?;
                    if operation == Operation::Check && self.allowed {
                        self.charged.push((slot, positions, answer.server_time));
                    }
                }
                // The denial stands, and what was charged is refunded, whether or not this slot replies.
                Err(_) if !self.allowed => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Refunds the charges of a check that was denied, and returns the refunds that were made.
    async fn refund(&mut self, server: &Arc<Server>) -> Result<Vec<Ask>, StoreError> {
        let mut refunds = Vec::new();
        if self.allowed {
            return Ok(refunds);
        }
        for (slot, positions, admitted_at) in std::mem::take(&mut self.charged) {
            let operation = Operation::Refund { admitted_at };
            if let Ok(answer) = self.ask_slot(server, slot, &positions, operation).await {
                self.note(&positions, &answer)?;
                refunds.push(self.ask.part(operation, &positions));
            }
        }
        Ok(refunds)
    }

    async fn ask_slot(
        &self,
        server: &Arc<Server>,
        slot: u16,
        positions: &[usize],
        operation: Operation,
    ) -> Result<StoreResponse, StoreError> {
        let part = self.ask.part(operation, positions);
        let queue = server.queues.at(slot);
        queue.ask(server.clone(), vec![part], Instant::now(), None).await
    }

    /// Puts the states of one slot in their places.
    fn note(&mut self, positions: &[usize], answer: &StoreResponse) -> Result<(), StoreError> {
        let [outcome] = &*answer.outcomes else {
            return Err(StoreError::new(
                ErrorKind::Protocol,
                "the reply to one request does not contain one answer",
            ));
        };
        for (position, verdict) in positions.iter().zip(&outcome.states) {
            self.states[*position] = verdict.at(answer.server_time);
        }
        self.allowed &= outcome.allowed;
        Ok(())
    }
}

/// Each slot, and the positions of the debits that lie in it.
fn by_slot(ask: &Ask) -> Vec<(u16, Positions)> {
    let mut slots: Vec<(u16, Positions)> = Vec::new();
    for (position, debit) in ask.debits.iter().enumerate() {
        let slot = slot_of(&debit.key);
        match slots.iter_mut().find(|(other, _)| *other == slot) {
            Some((_, positions)) => positions.push(position),
            None => slots.push((slot, smallvec![position])),
        }
    }
    slots
}
