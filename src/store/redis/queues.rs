use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{ask::Ask, commit_queue::CommitQueue, slot::slot_of};

/// The queues of a store: one for a single server, or one for each slot of a cluster that was ever used.
pub(super) enum CommitQueues {
    Server(Arc<CommitQueue>),
    Slots(Mutex<HashMap<u16, Arc<CommitQueue>>>),
}

impl CommitQueues {
    pub(super) fn new(clustered: bool) -> Self {
        match clustered {
            true => Self::Slots(Mutex::default()),
            false => Self::Server(Arc::default()),
        }
    }

    /// The queue for all of these, unless their keys lie in several slots.
    pub(super) fn of(&self, asks: &[Ask]) -> Option<Arc<CommitQueue>> {
        if let Self::Server(queue) = self {
            return Some(queue.clone());
        }
        let mut slots = asks.iter().flat_map(|ask| &ask.debits).map(|debit| slot_of(&debit.key));
        let slot = slots.next().unwrap_or_default();
        slots.all(|other| other == slot).then(|| self.at(slot))
    }

    /// The queue for a slot.
    pub(super) fn at(&self, slot: u16) -> Arc<CommitQueue> {
        match self {
            Self::Server(queue) => queue.clone(),
            Self::Slots(queues) => {
                // No code panics while they are locked.
                let mut queues = queues.lock().unwrap_or_else(PoisonError::into_inner);
                queues.entry(slot).or_default().clone()
            }
        }
    }

    /// Whether no call is on its way and no request waits.
    #[cfg(test)]
    pub(super) fn are_idle(&self) -> bool {
        match self {
            Self::Server(queue) => queue.is_idle(),
            Self::Slots(queues) => queues
                .lock()
                .is_ok_and(|queues| queues.values().all(|queue| queue.is_idle())),
        }
    }
}
