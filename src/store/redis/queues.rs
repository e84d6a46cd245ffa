use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, Weak},
    time::Duration,
};

use tokio::{sync::oneshot, time::Instant};

use super::{
    backend::Backend,
    breaker::Breaker,
    call::ScriptCall,
    commit_queue::CommitQueue,
    deny_cache::{DenyCache, Generation},
    failure::Failure,
    key_format::{are_in_several_slots, slot_of_charge},
    reply::ScriptReply,
    request::{BatchPosition, OwnedRequest},
};
use crate::{
    store::{Outcome, StoreError, StoreResponse, health},
    sync::{Mutex, MutexGuard},
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
    /// Those of each node that was ever used. A slot without a known primary has the node `None`.
    Cluster(Mutex<HashMap<Option<NodeAddress>, NodeQueues>>),
}

/// Where the health of a node is in memory.
type NodeAddress = usize;

/// The commit queues of a node of a cluster.
struct NodeQueues {
    /// While it is here, no other node has its address. It is gone when the client has disconnected the node.
    node: Weak<health::Node>,
    /// For requests of all slots of the node.
    all: Arc<CommitQueue>,
    /// For requests of one slot, each of which is sent with all of its keys declared.
    slots: HashMap<u16, Arc<CommitQueue>>,
}

impl CommitQueues {
    pub(super) fn new(backend: Backend, deny_cache: Option<DenyCache>, limits: BatchLimits) -> Self {
        let (backend, deny_cache) = (Arc::new(backend), deny_cache.map(Arc::new));
        let queues = match backend.client.is_clustered() {
            true => Queues::Cluster(Mutex::default()),
            false => {
                let queue = CommitQueue::new(backend.clone(), 0, Arc::default(), deny_cache.clone(), limits);
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

    /// The queue for requests, unless no call can contain all of them.
    pub(super) fn queue_of(&self, requests: &[OwnedRequest]) -> Option<Arc<CommitQueue>> {
        let queues = match &self.queues {
            Queues::SingleServer(queue) => return Some(queue.clone()),
            Queues::Cluster(queues) => queues,
        };
        let mut slots = requests
            .iter()
            .flat_map(|request| request.charges())
            .map(slot_of_charge);
        let slot = slots.next().unwrap_or_default();
        if !self.backend.reaches_several_slots() {
            return slots.all(|other| other == slot).then(|| self.queue_at(slot, false));
        }

        let node = self.backend.client.node_of(slot);
        let is_of_node = |other| {
            let same = |node: &Arc<_>| {
                self.backend
                    .client
                    .node_of(other)
                    .is_some_and(|other| Arc::ptr_eq(node, &other))
            };
            other == slot || node.as_ref().is_some_and(same)
        };
        // Whether these are an error must not depend on which node has their keys.
        let has_one_slot = |request: &OwnedRequest| request.units > 1;
        let mut refused = requests.iter().filter(|request| has_one_slot(request));
        if !slots.all(is_of_node) || refused.any(|request| are_in_several_slots(request.charges())) {
            return None;
        }
        let mut queues = lock(queues);
        Some(self.queues_of_node(&mut queues, node.as_ref()).all.clone())
    }

    /// The queue for requests of one slot, which may require that each call declares all of its keys.
    pub(super) fn queue_at(&self, slot: u16, declares_keys: bool) -> Arc<CommitQueue> {
        let queues = match &self.queues {
            Queues::SingleServer(queue) => return queue.clone(),
            Queues::Cluster(queues) => queues,
        };
        let node = self.backend.client.node_of(slot);
        let mut queues = lock(queues);
        let NodeQueues { all, slots, .. } = self.queues_of_node(&mut queues, node.as_ref());
        if !declares_keys && self.backend.reaches_several_slots() {
            return all.clone();
        }
        let queue = slots
            .entry(slot)
            .or_insert_with(|| self.queue(slot, all.breaker.clone()));
        queue.clone()
    }

    /// Decides a request with all keys in one slot.
    pub(super) async fn decide_at(
        &self,
        slot: u16,
        declares_keys: bool,
        request: OwnedRequest,
    ) -> Result<StoreResponse, StoreError> {
        let mut requests = vec![request];
        for declares_keys in [declares_keys, true] {
            let queue = self.queue_at(slot, declares_keys);
            match queue.decide(requests, Instant::now(), None).await? {
                Decided::All(response) => return Ok(response),
                Decided::Partly(partly) => requests = partly.requests,
            }
        }
        Err(Failure::malformed_reply().into())
    }

    fn queues_of_node<'a>(
        &self,
        queues: &'a mut HashMap<Option<NodeAddress>, NodeQueues>,
        node: Option<&Arc<health::Node>>,
    ) -> &'a mut NodeQueues {
        let address = node.map(|node| Arc::as_ptr(node) as NodeAddress);
        if !queues.contains_key(&address) {
            queues.retain(|address, queues| address.is_none() || queues.node.strong_count() > 0);
        }
        queues.entry(address).or_insert_with(|| NodeQueues {
            node: node.map(Arc::downgrade).unwrap_or_default(),
            all: self.queue(0, Arc::default()),
            slots: HashMap::new(),
        })
    }

    fn queue(&self, slot: u16, breaker: Arc<Breaker>) -> Arc<CommitQueue> {
        let queue = CommitQueue::new(
            self.backend.clone(),
            slot,
            breaker,
            self.deny_cache.clone(),
            self.limits,
        );
        Arc::new(queue)
    }

    /// The number of breakers, and of those that are open.
    pub(super) fn breakers(&self) -> (u64, u64) {
        match &self.queues {
            Queues::SingleServer(queue) => (1, u64::from(queue.is_failing())),
            Queues::Cluster(queues) => {
                let queues = lock(queues);
                let is_known =
                    |(address, queues): &(&Option<_>, &NodeQueues)| address.is_none() || queues.node.strong_count() > 0;
                let known = || queues.iter().filter(is_known);
                let open = known().filter(|(_, queues)| queues.all.is_failing());
                (known().count() as u64, open.count() as u64)
            }
        }
    }

    /// Whether no call is in flight and no request waits.
    #[cfg(test)]
    pub(super) fn are_idle(&self) -> bool {
        match &self.queues {
            Queues::SingleServer(queue) => queue.is_idle(),
            Queues::Cluster(queues) => lock(queues)
                .values()
                .all(|node| node.all.is_idle() && node.slots.values().all(|queue| queue.is_idle())),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while they are locked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

/// What a call has decided.
pub(super) enum Decided {
    All(StoreResponse),
    Partly(Box<DecidedPartly>),
}

impl Decided {
    /// Nothing of these requests.
    pub(super) fn nothing(requests: Vec<OwnedRequest>) -> Self {
        Self::Partly(Box::new(DecidedPartly::none(requests)))
    }
}

/// The requests of a caller, of which a call to a node of a cluster has not executed some.
pub(super) struct DecidedPartly {
    pub(super) requests: Vec<OwnedRequest>,
    /// For each request its outcome, or none if nothing of it was executed.
    pub(super) outcomes: Vec<Option<Result<Outcome, StoreError>>>,
    /// The time of the node, if it has executed any.
    pub(super) server_time: Duration,
}

impl DecidedPartly {
    /// Requests of which none was executed.
    pub(super) fn none(requests: Vec<OwnedRequest>) -> Self {
        Self {
            outcomes: requests.iter().map(|_| None).collect(),
            requests,
            server_time: Duration::ZERO,
        }
    }
}

type Response = Result<Decided, StoreError>;

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
    pub(super) fn respond_with(self, positions: &[BatchPosition], call: &ScriptCall, reply: &CallReply) {
        let is_elsewhere = |failure: &_| call.is_elsewhere(failure);
        let response = match reply {
            Err(failure) if is_elsewhere(failure) => {
                return self.respond_partly(DecidedPartly::none);
            }
            Err(failure) => Err(failure.clone().into()),
            Ok(reply) => {
                let failures = || {
                    positions
                        .iter()
                        .map(|position| reply.replies[position.merged].as_ref().err())
                };
                if failures().flatten().any(is_elsewhere) {
                    let outcomes = self.requests.iter().zip(positions).zip(failures());
                    let outcomes = outcomes.map(|((request, position), failure)| {
                        let was_executed = !failure.is_some_and(is_elsewhere);
                        was_executed.then(|| outcome_in(request, *position, reply))
                    });
                    let outcomes = outcomes.collect();
                    return self.respond_partly(|requests| DecidedPartly {
                        requests,
                        outcomes,
                        server_time: reply.server_time,
                    });
                }
                self.response_in(positions, reply)
            }
        };
        self.respond(response.map(Decided::All));
    }

    fn respond_partly(mut self, decided: impl FnOnce(Vec<OwnedRequest>) -> DecidedPartly) {
        let decided = decided(std::mem::take(&mut self.requests));
        self.respond(Ok(Decided::Partly(Box::new(decided))));
    }

    fn response_in(&self, positions: &[BatchPosition], reply: &ScriptReply) -> Result<StoreResponse, StoreError> {
        let mut response = StoreResponse::new(reply.server_time, []);
        for (request, position) in self.requests.iter().zip(positions) {
            response
                .outcomes
                .push(request.outcome(outcome_in(request, *position, reply))?);
        }
        Ok(response)
    }

    /// Updates the deny cache from the reply to a call, in which the requests have these positions.
    pub(super) fn update_cache(&self, cache: &DenyCache, positions: &[BatchPosition], reply: &CallReply) {
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

/// The reply to a call, or its failure.
pub(super) type CallReply = Result<ScriptReply, Failure>;

/// The outcome of a request, which has this position in a call.
fn outcome_in(request: &OwnedRequest, position: BatchPosition, reply: &ScriptReply) -> Result<Outcome, StoreError> {
    match &reply.replies[position.merged] {
        Ok(merged) => Ok(merged.outcome(request, position.nth)),
        Err(failure) => Err(failure.clone().into()),
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
        let taken = allocation_counter::measure(|| (0..SLOTS).for_each(|slot| drop(queues.queue_at(slot, true))));
        let bytes = taken.bytes_current / i64::from(SLOTS);
        assert!((160..=200).contains(&bytes), "{bytes} bytes");
    }
}
