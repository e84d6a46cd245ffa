use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use redis::{Cmd, ConnectionInfo, Value};
use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{Instant, sleep, timeout},
};

use super::{
    connection::{CONNECT_TIMEOUT, ServerConnections, at},
    topology::{Address, SlotRange, redirection, slot_ranges},
};
use crate::{
    store::{
        health,
        health::Health,
        redis::{
            acl::Refusal,
            client::{ClusterNodes, HashTags},
            credentials::ConnectionSettings,
            failure::Failure,
            key_format::slot_of,
            task::{AbortOnDrop, OnDrop, run_together},
        },
    },
    sync::lock,
};

/// The nodes of a cluster, each with connections of its own, so that a node that hangs delays no other.
///
/// The cluster connection of redis-rs is not used because all requests wait while it looks up the slots, and because it sends
/// requests again after a connection was lost.
pub(in crate::store::redis) struct Cluster {
    shared: Arc<ClusterState>,
    _slots_task: AbortOnDrop<()>,
}

struct ClusterState {
    seeds: Vec<Address>,
    /// The settings of connections to a node.
    template: ConnectionInfo,
    settings: ConnectionSettings,
    /// The runtime of all connections. A check that is redirected to a new node may be made in another one, which may end.
    runtime: Handle,
    slots: Mutex<SlotMap>,
    health: Arc<Health>,
    /// The slot map may be out of date.
    outdated: Notify,
    /// A node has replied that it is.
    moved: Notify,
    /// Why the last reply to `CLUSTER SLOTS` was not used.
    slots_failure: Mutex<Option<Failure>>,
}

/// The primary of each slot.
#[derive(Default)]
struct SlotMap {
    nodes: HashMap<Address, Arc<ClusterNode>>,
    /// How many of the nodes were found by redirections.
    redirected: usize,
    /// By the first slot of each range: the last slot and the primary.
    ranges: BTreeMap<u16, (u16, Arc<ClusterNode>)>,
    /// Nodes for `CLUSTER SLOTS` when no other one replies.
    replicas: HashSet<Address>,
}

struct ClusterNode {
    host: String,
    connections: ServerConnections,
    health: Arc<health::Node>,
}

/// The pauses between two lookups of the slots grow while the slots stay as they are, such as while a primary is dead.
const SHORTEST_LOOKUP_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_LOOKUP_PAUSE: Duration = Duration::from_secs(1);
/// The time for a reply to `CLUSTER SLOTS`.
const LOOKUP_TIMEOUT: Duration = Duration::from_millis(500);
/// The most redirections of a command: the slot may have moved twice.
const MAX_REDIRECTIONS: usize = 5;
/// The most nodes that redirections add to a slot map: those to which slots are being moved and which have none yet.
const MAX_REDIRECTED: usize = 100;

impl Cluster {
    pub(super) fn new(
        seeds: Vec<Address>,
        template: ConnectionInfo,
        settings: &ConnectionSettings,
        health: Arc<Health>,
    ) -> Self {
        let shared = Arc::new(ClusterState {
            seeds,
            template,
            settings: settings.clone(),
            runtime: Handle::current(),
            slots: Mutex::default(),
            health,
            outdated: Notify::new(),
            moved: Notify::new(),
            slots_failure: Mutex::default(),
        });
        for seed in &shared.seeds {
            shared.node_at(seed.clone());
        }
        Self {
            shared: shared.clone(),
            _slots_task: AbortOnDrop(tokio::spawn(keep_slots(shared))),
        }
    }

    /// One of the nodes, each of which receives the messages that are published to any.
    pub(super) fn any_node(&self) -> Option<ConnectionInfo> {
        let nodes: Vec<_> = lock(&self.shared.slots).nodes.keys().cloned().collect();
        let (host, port) = fastrand::choice(nodes)?;
        Some(at(&self.shared.template, host, port))
    }

    /// Whether it is a primary: a node that has left the cluster goes on with the connections that it has.
    pub(super) fn has_node(&self, server: &ConnectionInfo) -> bool {
        let nodes = lock(&self.shared.slots);
        nodes
            .nodes
            .keys()
            .any(|(host, port)| at(&self.shared.template, host.clone(), *port).addr() == server.addr())
    }

    /// Sends a command to the primary of this key, perhaps with `ASKING` before it. It follows redirections, which prove that nothing
    /// was executed, or returns them.
    pub(super) async fn send(
        &self,
        key: &[u8],
        command: &Cmd,
        follows: bool,
        mut asking: bool,
    ) -> Result<Value, Failure> {
        let Some(mut node) = lock(&self.shared.slots).primary_of(slot_of(key)) else {
            self.shared.outdated.notify_one();
            return Err(self.shared.no_primary());
        };
        for _ in 0..MAX_REDIRECTIONS {
            // If the command fails, or is dropped because its deadline has passed, the slots are looked up.
            let unanswered = OnDrop::new(|| self.shared.outdated.notify_one());
            let reply = node.connections.send(command, asking).await?;
            unanswered.disarm();
            let Some((moved, address)) = redirection(&reply, &node.host) else {
                // A node that has left the cluster replies so to each call, or the new node of the slot has no host.
                match &reply {
                    Value::ServerError(error) if error.code() == "MOVED" => self.shared.is_outdated(),
                    Value::ServerError(error) if error.code() == "CLUSTERDOWN" => self.shared.outdated.notify_one(),
                    _ => {}
                }
                return Ok(reply);
            };
            if moved {
                self.shared.is_outdated();
            }
            if !follows {
                return Ok(reply);
            }
            asking = !moved;
            node = self.shared.redirected_to(address)?;
            // A new node is being connected.
            node.connections.connected_or_refused().await;
        }
        Err(Failure::Refused("too many redirections".into()))
    }
}

impl ClusterNodes for Cluster {
    /// The health of the primary of a slot, if it has one.
    fn node(&self, slot: u16) -> Option<Arc<health::Node>> {
        let primary = lock(&self.shared.slots).primary_of(slot)?;
        Some(primary.health.clone())
    }

    /// For each primary hash tags in up to two of its slots; an error if no slot has a known one.
    fn hash_tags(&self) -> Result<Vec<HashTags>, Failure> {
        // One in 16,384 tags lies in the slot of a primary that has a single one.
        const TAGS: u32 = 500_000;

        let slots = lock(&self.shared.slots);
        // Of each primary the number of its slots, and the tags by their slots.
        let mut found = HashMap::<_, (usize, BTreeMap<u16, u32>)>::new();
        for (first, (last, primary)) in &slots.ranges {
            let (slots, _) = found.entry(Arc::as_ptr(primary)).or_default();
            *slots += usize::from(last.saturating_sub(*first)) + 1;
        }
        if found.is_empty() {
            drop(slots);
            return Err(self.shared.no_primary());
        }

        // Others each time: the slot of one may be moving.
        let offset = fastrand::u32(..TAGS);
        for tag in offset..offset + TAGS {
            if found.values().all(|(slots, tags)| tags.len() >= (*slots).min(2)) {
                break;
            }
            let slot = slot_of(tag.to_string().as_bytes());
            let owner = slots.primary_of(slot).map(|owner| Arc::as_ptr(&owner));
            if let Some((_, tags)) = owner.and_then(|owner| found.get_mut(&owner))
                && tags.len() < 2
            {
                tags.entry(slot).or_insert(tag);
            }
        }
        let tags = found.into_values().map(|(_, tags)| tags.into_values());
        Ok(tags.filter_map(|mut tags| Some((tags.next()?, tags.next()))).collect())
    }

    fn lookup_refusal(&self) -> Option<Refusal> {
        match &*lock(&self.shared.slots_failure) {
            Some(Failure::Forbidden(refusal)) => Some(refusal.clone()),
            _ => None,
        }
    }
}

impl ClusterState {
    fn node_at(&self, address: Address) -> Arc<ClusterNode> {
        let mut slots = lock(&self.slots);
        slots
            .nodes
            .entry(address)
            .or_insert_with_key(|address| self.connect(address))
            .clone()
    }

    /// Has the slots looked up, of which a node has replied that they are others.
    fn is_outdated(&self) {
        self.outdated.notify_one();
        self.moved.notify_one();
    }

    /// The node of a redirection. The slots are looked up, and the others are disconnected, if there are too many.
    fn redirected_to(&self, address: Address) -> Result<Arc<ClusterNode>, Failure> {
        let mut slots = lock(&self.slots);
        if !slots.nodes.contains_key(&address) {
            if slots.redirected >= MAX_REDIRECTED {
                self.outdated.notify_one();
                return Err(Failure::Protocol(
                    "the cluster redirects to more than 100 nodes that have no slots",
                ));
            }
            slots.redirected += 1;
        }
        drop(slots);
        Ok(self.node_at(address))
    }

    fn connect(&self, (host, port): &Address) -> Arc<ClusterNode> {
        #[cfg(not(feature = "shuttle"))] // which has one runtime
        let _entered = self.runtime.enter();
        let server = at(&self.template, host.clone(), *port);
        Arc::new(ClusterNode {
            host: host.clone(),
            health: health::Node::new(server.addr().to_string()),
            connections: ServerConnections::new(server, None, &self.settings),
        })
    }

    /// Looks up the slots by `CLUSTER SLOTS`: from the nodes of the slot map that are connected, one after the other, until one
    /// replies; then from those of the URL at once, and then from the others, which may all have been replaced. Returns whether the slot
    /// map is another one.
    async fn look_up_slots(&self) -> bool {
        let mut known: Vec<_> = lock(&self.slots).nodes.keys().cloned().collect();
        fastrand::shuffle(&mut known);
        for address in &known {
            if let Some(ranges) = self.ranges_from(address, Duration::ZERO).await {
                return self.replace_slots(ranges);
            }
        }
        let mut others = lock(&self.slots).replicas.clone();
        others.extend(known);
        let others: Vec<_> = others.into_iter().filter(|other| !self.seeds.contains(other)).collect();
        for addresses in [&self.seeds, &others] {
            let asked = addresses.iter().map(|other| self.ranges_from(other, CONNECT_TIMEOUT));
            let replied = run_together(asked, Option::is_some).await;
            if let Some(ranges) = replied.into_iter().flatten().next() {
                return self.replace_slots(ranges);
            }
        }
        false
    }

    async fn ranges_from(&self, address: &Address, connect_timeout: Duration) -> Option<Vec<SlotRange>> {
        let connections = &self.node_at(address.clone()).connections;
        let _ = timeout(connect_timeout, connections.connected_or_refused()).await;
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let reply = timeout(LOOKUP_TIMEOUT, connections.send(&command, false))
            .await
            .ok()?
            .ok()?;
        let ranges = slot_ranges(&reply, &address.0);
        ranges
            .map_err(|failure| *lock(&self.slots_failure) = Some(failure))
            .ok()
    }

    /// The failure for a slot without a known primary.
    fn no_primary(&self) -> Failure {
        let mut failures = Vec::from_iter(lock(&self.slots_failure).clone());
        let slots = lock(&self.slots);
        if slots.ranges.is_empty() {
            let nodes = slots.nodes.values();
            failures.extend(nodes.filter_map(|node| node.connections.connection().err()));
        }
        // A refusal first.
        let failure = failures.into_iter().min_by_key(|failure| !failure.is_refusal());
        failure.unwrap_or_else(|| Failure::Unreachable("no node of the cluster has this slot".into()))
    }

    /// Replaces the slot map, and disconnects the nodes without slots in the new one. Returns whether it is another one.
    fn replace_slots(&self, ranges: Vec<SlotRange>) -> bool {
        let mut slots = lock(&self.slots);
        let mut new = SlotMap::default();
        for range in ranges {
            let known = slots.nodes.get(&range.primary).or(new.nodes.get(&range.primary));
            let primary = known.cloned().unwrap_or_else(|| self.connect(&range.primary));
            new.nodes.insert(range.primary, primary.clone());
            new.ranges.insert(range.first, (range.last, primary));
            new.replicas.extend(range.replicas);
        }
        let nodes = new.nodes.values().map(|node| node.health.clone()).collect();
        let is_changed = slots.owners().ne(new.owners());
        *slots = new;
        drop(slots);
        self.health.set_nodes(nodes);
        *lock(&self.slots_failure) = None;
        is_changed
    }
}

impl SlotMap {
    fn owners(&self) -> impl Iterator<Item = (u16, u16, *const ClusterNode)> {
        let owners = self.ranges.iter();
        owners.map(|(first, (last, primary))| (*first, *last, Arc::as_ptr(primary)))
    }

    fn primary_of(&self, slot: u16) -> Option<Arc<ClusterNode>> {
        let (_, (last, primary)) = self.ranges.range(..=slot).next_back()?;
        (slot <= *last).then(|| primary.clone())
    }
}

/// Looks up the slots at first, and whenever the slot map may be out of date.
async fn keep_slots(shared: Arc<ClusterState>) {
    let mut unchanged_since = Instant::now();
    loop {
        let is_changed = shared.look_up_slots().await;
        sleep(SHORTEST_LOOKUP_PAUSE).await;
        let is_known = !lock(&shared.slots).ranges.is_empty();
        if is_changed || !is_known {
            unchanged_since = Instant::now();
        }
        let rest = lookup_pause(unchanged_since.elapsed()).saturating_sub(SHORTEST_LOOKUP_PAUSE);
        if timeout(rest, shared.moved.notified()).await.is_ok() {
            unchanged_since = Instant::now();
        }
        if is_known {
            let waiting = Instant::now();
            shared.outdated.notified().await;
            // All nodes replied until now.
            if waiting.elapsed() > LONGEST_LOOKUP_PAUSE {
                unchanged_since = Instant::now();
            }
        }
    }
}

/// The pause after a lookup: after a failover, requests fail for a twentieth longer at most.
fn lookup_pause(unchanged: Duration) -> Duration {
    (unchanged / 20).clamp(SHORTEST_LOOKUP_PAUSE, LONGEST_LOOKUP_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_are_rare_while_the_slots_stay_as_they_are() {
        for (unchanged, pause) in [(0, 100), (2_000, 100), (6_000, 300), (20_000, 1_000), (600_000, 1_000)] {
            let [unchanged, pause] = [unchanged, pause].map(Duration::from_millis);
            assert_eq!(lookup_pause(unchanged), pause);
        }
    }
}
