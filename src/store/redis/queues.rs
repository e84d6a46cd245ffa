use std::{
    collections::HashMap,
    mem,
    sync::{Arc, Weak},
    time::Duration,
};

use smallvec::SmallVec;
use tokio::{sync::oneshot, time::Instant};

use super::{
    backend::Backend,
    commit_queue::CommitQueue,
    deny_cache::{DenyCache, Generation},
    failure::Failure,
    key_format::{are_in_several_slots, slot_of_charge},
    reply::ScriptReply,
    request::{BatchPosition, OwnedRequest},
};
use crate::{
    store::{Outcome, StoreError, StoreResponse, health},
    sync::{Mutex, unpoisoned},
};

/// The commit queues of a store, and what they share. The clones of a store have it in common.
pub(super) struct CommitQueues {
    pub(super) backend: Arc<Backend>,
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
    pub(super) fn new(backend: Backend) -> Self {
        let backend = Arc::new(backend);
        let queues = match backend.client.is_clustered() {
            true => Queues::Cluster(Mutex::default()),
            false => Queues::SingleServer(CommitQueue::new(backend.clone(), Arc::default())),
        };
        Self { backend, queues }
    }

    /// The queue for requests, unless no call can contain all of them.
    pub(super) fn queue_of(&self, requests: &[OwnedRequest]) -> Option<Arc<CommitQueue>> {
        let queues = match &self.queues {
            Queues::SingleServer(queue) => return Some(queue.clone()),
            Queues::Cluster(queues) => queues,
        };
        let charges = requests.iter().flat_map(|request| request.charges());
        let mut slots = charges.map(slot_of_charge);
        let slot = slots.next().unwrap_or_default();
        if !self.backend.reaches_several_slots() {
            return slots.all(|other| other == slot).then(|| self.queue_at(slot, false));
        }

        let client = &self.backend.client;
        let node = client.node_of(slot);
        let is_node = |other: Arc<_>| node.as_ref().is_some_and(|node| Arc::ptr_eq(node, &other));
        let is_of_node = |other| other == slot || client.node_of(other).is_some_and(is_node);
        // Whether these are an error must not depend on which node has their keys.
        let mut of_units = requests.iter().filter(|request| request.units > 1);
        if !slots.all(is_of_node) || of_units.any(|request| are_in_several_slots(request.charges())) {
            return None;
        }
        let mut queues = unpoisoned(queues.lock());
        Some(self.queues_of_node(&mut queues, node.as_ref()).all.clone())
    }

    /// The queue for requests of one slot, which may require that each call declares all of its keys.
    pub(super) fn queue_at(&self, slot: u16, declares_keys: bool) -> Arc<CommitQueue> {
        let queues = match &self.queues {
            Queues::SingleServer(queue) => return queue.clone(),
            Queues::Cluster(queues) => queues,
        };
        let node = self.backend.client.node_of(slot);
        let mut queues = unpoisoned(queues.lock());
        let NodeQueues { all, slots, .. } = self.queues_of_node(&mut queues, node.as_ref());
        if !declares_keys && self.backend.reaches_several_slots() {
            return all.clone();
        }
        let new = || CommitQueue::new(self.backend.clone(), all.breaker.clone());
        slots.entry(slot).or_insert_with(new).clone()
    }

    /// Decides a request with all keys in one slot, unless that is moving and no node has all of its keys.
    pub(super) async fn decide_at(
        &self,
        slot: u16,
        declares_keys: bool,
        request: OwnedRequest,
    ) -> Result<Decided, StoreError> {
        let queue = self.queue_at(slot, declares_keys);
        let decided = queue.decide(CallerRequests::new(vec![request])).await?;
        if declares_keys || decided.outcomes.iter().all(Option::is_some) {
            return Ok(decided);
        }
        let queue = self.queue_at(slot, true);
        queue.decide(CallerRequests::new(decided.requests)).await
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
            all: CommitQueue::new(self.backend.clone(), Arc::default()),
            slots: HashMap::new(),
        })
    }

    /// The number of breakers, and of those that are open.
    pub(super) fn breakers(&self) -> (u64, u64) {
        match &self.queues {
            Queues::SingleServer(queue) => (1, u64::from(queue.breaker.is_open())),
            Queues::Cluster(queues) => {
                let queues = unpoisoned(queues.lock());
                let is_known =
                    |(address, queues): &(&Option<_>, &NodeQueues)| address.is_none() || queues.node.strong_count() > 0;
                let known = || queues.iter().filter(is_known);
                let open = known().filter(|(_, queues)| queues.all.breaker.is_open());
                (known().count() as u64, open.count() as u64)
            }
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

/// The requests of one caller, which are sent in one call.
pub(super) struct CallerRequests {
    pub(super) requests: Vec<OwnedRequest>,
    /// When the caller made them.
    pub(super) made_at: Instant,
    /// For a lone check, if the deny cache is on.
    pub(super) generation: Option<Generation>,
}

/// Such requests while they wait in a commit queue.
pub(super) struct QueuedRequests {
    /// Increases in the order in which they wait.
    pub(super) number: u64,
    pub(super) own: CallerRequests,
    pub(super) queued_at: Instant,
    pub(super) response: oneshot::Sender<Response>,
}

pub(super) type Response = Result<Decided, StoreError>;

/// What a call has decided of the requests of a caller.
pub(super) struct Decided {
    pub(super) requests: Vec<OwnedRequest>,
    /// For each request its outcome, or none if nothing of it was executed, since its slot is elsewhere in the cluster, or moves.
    pub(super) outcomes: SmallVec<[Option<Result<Outcome, StoreError>>; 1]>,
    /// The time of the node, if it has executed any.
    pub(super) server_time: Duration,
}

impl Decided {
    /// Nothing of these requests.
    pub(super) fn nothing(requests: Vec<OwnedRequest>) -> Self {
        Self {
            outcomes: requests.iter().map(|_| None).collect(),
            requests,
            server_time: Duration::ZERO,
        }
    }

    /// The response, unless a request was not executed.
    pub(super) fn response(&mut self) -> Option<Result<StoreResponse, StoreError>> {
        if self.outcomes.iter().any(Option::is_none) {
            return None;
        }
        let outcomes = mem::take(&mut self.outcomes).into_iter().flatten();
        let outcomes = outcomes.collect::<Result<_, _>>();
        Some(outcomes.map(|outcomes| StoreResponse {
            server_time: self.server_time,
            outcomes,
        }))
    }
}

impl CallerRequests {
    pub(super) fn new(requests: Vec<OwnedRequest>) -> Self {
        Self {
            requests,
            made_at: Instant::now(),
            generation: None,
        }
    }

    /// What the reply to a call has decided, in which the requests have these positions. It updates the deny cache.
    pub(super) fn decided(self, cache: Option<&DenyCache>, positions: &[BatchPosition], reply: &CallReply) -> Response {
        if let Some(cache) = cache {
            self.update_cache(cache, positions, reply);
        }
        let reply = reply.as_ref().map_err(Failure::clone)?;
        let outcomes = self.requests.iter().zip(positions).map(|(request, position)| {
            let outcome = match reply.replies[position.merged].as_ref()? {
                Ok(merged) => Ok(merged.outcome(request, position.nth)),
                Err(failure) => Err(failure.clone().into()),
            };
            Some(request.outcome(outcome))
        });
        Ok(Decided {
            outcomes: outcomes.collect(),
            server_time: reply.server_time,
            requests: self.requests,
        })
    }

    fn update_cache(&self, cache: &DenyCache, positions: &[BatchPosition], reply: &CallReply) {
        // Also after an error: the script may have been executed.
        cache.invalidate(&self.requests);

        // The states in the reply are those of the first denied request.
        if let (Some(generation), [check], [position], Ok(reply)) =
            (self.generation, &self.requests[..], positions, reply)
            && let Some(Ok(merged)) = &reply.replies[position.merged]
            && position.nth == merged.admitted
        {
            cache.insert(check, self.made_at, generation, reply.server_time, &merged.states);
        }
    }
}

pub(super) type CallReply = Result<ScriptReply, Failure>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::redis::simulation::network::{Network, simulated_backend};

    impl CommitQueues {
        pub(in crate::store::redis) fn are_idle(&self) -> bool {
            match &self.queues {
                Queues::SingleServer(queue) => queue.is_idle(),
                Queues::Cluster(queues) => unpoisoned(queues.lock())
                    .values()
                    .all(|node| node.all.is_idle() && node.slots.values().all(|queue| queue.is_idle())),
            }
        }
    }

    /// `docs/redis.md` has the number.
    #[tokio::test]
    async fn the_queue_of_a_slot_takes_few_bytes() {
        const SLOTS: u16 = 16_384;
        let backend = simulated_backend(Network::new(0, true));
        let queues = CommitQueues::new(backend);
        let taken = allocation_counter::measure(|| (0..SLOTS).for_each(|slot| drop(queues.queue_at(slot, true))));
        let bytes = taken.bytes_current / i64::from(SLOTS);
        assert!((130..=165).contains(&bytes), "{bytes} bytes");
    }

    #[tokio::test]
    async fn a_node_that_is_gone_has_no_breaker_and_its_queues_end_with_the_next_new_one() {
        let queues = CommitQueues::new(simulated_backend(Network::new(0, true)));
        let Queues::Cluster(of_nodes) = &queues.queues else {
            unreachable!("it is a cluster")
        };
        let add = |name| {
            let node = health::Node::new(name);
            let mut of_nodes = unpoisoned(of_nodes.lock());
            queues.queues_of_node(&mut of_nodes, Some(&node));
            node
        };
        let (gone, _stays) = (add("a"), add("b"));
        assert_eq!(queues.breakers(), (2, 0));
        drop(gone);
        assert_eq!(queues.breakers(), (1, 0));
        let _new = add("c");
        assert_eq!(unpoisoned(of_nodes.lock()).len(), 2);
    }
}
