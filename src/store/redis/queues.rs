use std::{
    collections::HashMap,
    sync::{Arc, PoisonError},
};

use super::{
    backend::Backend, batch_limits::BatchLimits, commit_queue::CommitQueue, deny_cache::DenyCache,
    request::OwnedRequest, slot::slot_of,
};
use crate::sync::Mutex;

/// The commit queues of a store, and what they share. The clones of a store have it in common.
pub(super) struct CommitQueues {
    pub(super) backend: Arc<Backend>,
    pub(super) deny_cache: Option<Arc<DenyCache>>,
    limits: BatchLimits,
    queues: Queues,
}

enum Queues {
    SingleServer(Arc<CommitQueue>),
    /// One for each slot of a cluster that was ever used.
    Slots(Mutex<HashMap<u16, Arc<CommitQueue>>>),
}

impl CommitQueues {
    pub(super) fn new(backend: Backend, deny_cache: Option<DenyCache>, limits: BatchLimits) -> Self {
        let (backend, deny_cache) = (Arc::new(backend), deny_cache.map(Arc::new));
        let queues = match backend.client.is_clustered() {
            true => Queues::Slots(Mutex::default()),
            false => {
                let queue = CommitQueue::new(backend.clone(), 0, deny_cache.clone(), limits);
                Queues::SingleServer(Arc::new(queue))
            }
        };
        Self {
            backend,
            deny_cache,
            limits,
            queues,
        }
    }

    /// The queue for requests, unless their keys lie in several slots.
    pub(super) fn queue_of(&self, requests: &[OwnedRequest]) -> Option<Arc<CommitQueue>> {
        if let Queues::SingleServer(queue) = &self.queues {
            return Some(queue.clone());
        }
        let charges = requests.iter().flat_map(|request| &request.charges);
        let mut slots = charges.map(|charge| slot_of(&charge.key));
        let slot = slots.next().unwrap_or_default();
        slots.all(|other| other == slot).then(|| self.queue_at(slot))
    }

    /// The queue for a slot.
    pub(super) fn queue_at(&self, slot: u16) -> Arc<CommitQueue> {
        match &self.queues {
            Queues::SingleServer(queue) => queue.clone(),
            Queues::Slots(queues) => {
                // No code panics while they are locked.
                let mut queues = queues.lock().unwrap_or_else(PoisonError::into_inner);
                let queue = queues.entry(slot).or_insert_with(|| {
                    let queue = CommitQueue::new(self.backend.clone(), slot, self.deny_cache.clone(), self.limits);
                    Arc::new(queue)
                });
                queue.clone()
            }
        }
    }

    /// The number of breakers, and of those that are open.
    pub(super) fn breakers(&self) -> (u64, u64) {
        let is_open = |queue: &&Arc<CommitQueue>| queue.is_failing();
        match &self.queues {
            Queues::SingleServer(queue) => (1, u64::from(queue.is_failing())),
            Queues::Slots(queues) => {
                let queues = queues.lock().unwrap_or_else(PoisonError::into_inner);
                (queues.len() as u64, queues.values().filter(is_open).count() as u64)
            }
        }
    }

    /// Whether no call is in flight and no request waits.
    #[cfg(test)]
    pub(super) fn are_idle(&self) -> bool {
        match &self.queues {
            Queues::SingleServer(queue) => queue.is_idle(),
            Queues::Slots(queues) => queues
                .lock()
                .is_ok_and(|queues| queues.values().all(|queue| queue.is_idle())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::redis::simulation::{backend::simulated_backend, network::Network};

    /// `docs/redis.md` has the number.
    #[tokio::test]
    async fn the_queue_of_a_slot_takes_few_bytes() {
        const SLOTS: u16 = 16_384;
        let backend = simulated_backend(Network::new(0, true));
        let queues = CommitQueues::new(backend, None, BatchLimits::GROUP_COMMIT);
        let taken = allocation_counter::measure(|| (0..SLOTS).for_each(|slot| drop(queues.queue_at(slot))));
        let bytes = taken.bytes_current / i64::from(SLOTS);
        assert!((200..=250).contains(&bytes), "{bytes} bytes");
    }
}
