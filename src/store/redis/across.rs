use std::{sync::Arc, time::Duration};

use smallvec::{SmallVec, smallvec};
use tokio::{
    task,
    time::{Instant, timeout_at},
};

use super::{ask::Ask, server::Server, slot::slot_of};
use crate::store::{Answer, ErrorKind, Operation, Outcome, StoreError, Verdict};

/// Asks a cluster for what lies in several slots, which no one call can decide: slot after slot. When one denies, what
/// was charged before is refunded.
pub(super) async fn ask(server: Arc<Server>, asks: Vec<Ask>, asked_at: Instant) -> Result<Answer, StoreError> {
    let mut answer = Answer::new(Duration::ZERO, []);
    for ask in &asks {
        let stamp = server.deny_cache.as_ref().map(|cache| cache.stamp(ask));
        let (allowed, verdicts) = ask_one(&server, ask, asked_at).await?;

        let latest = verdicts.iter().filter_map(|verdict| verdict.decided_at).max();
        answer.server_time = answer.server_time.max(latest.unwrap_or_default());
        if let (Some(cache), Some(stamp), false) = (&server.deny_cache, stamp, allowed) {
            cache.remember(ask, asked_at, stamp, answer.server_time, &verdicts);
        }
        answer.outcomes.push(Outcome::new(allowed, ask.folds.unfold(&verdicts)));
    }
    Ok(answer)
}

async fn ask_one(
    server: &Arc<Server>,
    ask: &Ask,
    asked_at: Instant,
) -> Result<(bool, SmallVec<[Verdict; 1]>), StoreError> {
    let mut allowed = true;
    let mut verdicts: SmallVec<[Verdict; 1]> = smallvec![Verdict::new(0, None, Duration::ZERO); ask.debits.len()];
    let mut charged = Vec::new();

    for (slot, positions) in by_slot(ask) {
        // Once one has denied, the others only say how they stand.
        let operation = match ask.operation {
            Operation::Check if !allowed => Operation::Peek,
            operation => operation,
        };
        let part = ask.part(operation, &positions);
        let answer = server.ask(server.lanes.at(slot), vec![part], asked_at, None);
        let answer = answer.await?;
        allowed &= note(&mut verdicts, &positions, &answer)?;
        if operation == Operation::Check && allowed {
            charged.push((slot, positions, answer.server_time));
        }
    }

    if !allowed && ask.operation == Operation::Check {
        for (slot, positions, admitted_at) in charged {
            let refund = ask.part(Operation::Refund { admitted_at }, &positions);
            // It goes on when the caller does not wait any longer.
            let lane = server.lanes.at(slot);
            let refunded = task::spawn(server.ask(lane, vec![refund], Instant::now(), None));
            if let Ok(Ok(Ok(answer))) = timeout_at(asked_at + server.deadline, refunded).await {
                note(&mut verdicts, &positions, &answer)?;
            }
        }
    }
    Ok((allowed, verdicts))
}

/// Each slot, and the positions of the debits that lie in it.
fn by_slot(ask: &Ask) -> Vec<(u16, SmallVec<[usize; 4]>)> {
    let mut slots: Vec<(u16, SmallVec<[usize; 4]>)> = Vec::new();
    for (position, debit) in ask.debits.iter().enumerate() {
        let slot = slot_of(&debit.key);
        match slots.iter_mut().find(|(other, _)| *other == slot) {
            Some((_, positions)) => positions.push(position),
            None => slots.push((slot, smallvec![position])),
        }
    }
    slots
}

/// Puts what one slot says in its places, and says whether it allows.
fn note(verdicts: &mut [Verdict], positions: &[usize], answer: &Answer) -> Result<bool, StoreError> {
    let [outcome] = &*answer.outcomes else {
        return Err(StoreError::new(
            ErrorKind::Protocol,
            "one request was asked, and not one answered",
        ));
    };
    for (position, verdict) in positions.iter().zip(&outcome.verdicts) {
        verdicts[*position] = verdict.at(answer.server_time);
    }
    Ok(outcome.allowed)
}
