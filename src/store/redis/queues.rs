use std::{
    collections::HashMap,
    sync::{Arc, PoisonError},
};

use tokio::{sync::oneshot, time::Instant};

use super::{
    backend::Backend,
    call::BatchPosition,
    commit_queue::CommitQueue,
    deny_cache::{DenyCache, Generation},
    key_format::slot_of,
    reply::ScriptReply,
    request::OwnedRequest,
};
use crate::{
    store::{StoreError, StoreResponse},
    sync::Mutex,
};

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

/// How many requests are sent in a call, and how many calls are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchLimits {
    /// The most requests in a call.
    pub(super) max_requests: usize,
    /// The most calls in flight below `low_load` requests in flight.
    pub(super) max_calls: usize,
    /// From this many requests in flight on, at most two calls are: Redis executes one while the callers of the other
    /// continue. More calls would only contain fewer requests each.
    pub(super) low_load: usize,
}

impl BatchLimits {
    pub(super) const GROUP_COMMIT: Self = Self {
        max_requests: 256,
        max_calls: 8,
        low_load: 16,
    };
    /// Each request is sent at once, in a call of its own.
    pub(super) const NO_BATCHES: Self = Self {
        max_requests: 1,
        max_calls: usize::MAX,
        low_load: usize::MAX,
    };
}

/// The requests of one caller, which wait in a commit queue and are sent in one call.
pub(super) struct QueuedRequest {
    pub(super) requests: Vec<OwnedRequest>,
    /// When the caller made the request.
    made_at: Instant,
    pub(super) queued_at: Instant,
    /// For a lone check, if the deny cache is on.
    generation: Option<Generation>,
    response: oneshot::Sender<Response>,
}

type Response = Result<StoreResponse, StoreError>;

impl QueuedRequest {
    /// A request, and the receiver of its response.
    pub(super) fn new(
        requests: Vec<OwnedRequest>,
        made_at: Instant,
        generation: Option<Generation>,
    ) -> (Self, oneshot::Receiver<Response>) {
        let (sender, receiver) = oneshot::channel();
        let request = Self {
            requests,
            made_at,
            queued_at: Instant::now(),
            generation,
            response: sender,
        };
        (request, receiver)
    }

    /// Whether the caller has dropped its future.
    pub(super) fn is_canceled(&self) -> bool {
        self.response.is_closed()
    }

    pub(super) fn respond(self, response: Response) {
        let _ = self.response.send(response); // the caller may have dropped its future
    }

    /// Responds from the reply to a call, in which the requests have these positions.
    pub(super) fn respond_with(self, positions: &[BatchPosition], reply: &Result<ScriptReply, StoreError>) {
        let reply = reply.as_ref().map_err(Clone::clone);
        let response = reply.and_then(|reply| self.response_in(positions, reply));
        self.respond(response);
    }

    fn response_in(&self, positions: &[BatchPosition], reply: &ScriptReply) -> Response {
        let mut response = StoreResponse::new(reply.server_time, []);
        for (request, position) in self.requests.iter().zip(positions) {
            let merged = reply.replies[position.merged]
                .as_ref()
                .map_err(|failure| failure.error.clone());
            let outcome = merged.map(|merged| merged.outcome(request, position.nth));
            response.outcomes.push(request.outcome(outcome)?);
        }
        Ok(response)
    }

    /// Updates the deny cache from the reply to a call, in which the requests have these positions.
    pub(super) fn update_cache(
        &self,
        cache: &DenyCache,
        positions: &[BatchPosition],
        reply: &Result<ScriptReply, StoreError>,
    ) {
        // Also after an error: the script may have been executed.
        cache.invalidate(&self.requests);

        // The states in the reply are those of the first denied request.
        if let (Some(generation), [check], [position], Ok(reply)) =
            (self.generation, &self.requests[..], positions, reply)
            && let Ok(merged) = &reply.replies[position.merged]
            && position.nth == merged.admitted
        {
            cache.insert(check, self.made_at, generation, reply.server_time, &merged.states);
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
