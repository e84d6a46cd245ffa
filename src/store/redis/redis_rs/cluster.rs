use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use redis::{Cmd, ConnectionInfo, ServerError, Value};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};

use super::{
    super::{link::Failure, slot::slot_of, task::AbortOnDrop},
    at, in_full,
    node::{CONNECT, Dial, Node},
};

/// The nodes of a cluster, each with connections of its own, so that one which hangs holds up no other.
///
/// That, and that nothing is sent twice, is why this is not the cluster connection of redis-rs: it looks for the slots
/// while all requests wait, and sends them again after a connection was lost.
pub(super) struct Cluster {
    shared: Arc<Shared>,
    _mapper: AbortOnDrop<()>,
}

struct Shared {
    seeds: Vec<Address>,
    /// How to connect to a node, wherever it is.
    template: ConnectionInfo,
    connections: usize,
    map: Mutex<Map>,
    /// Somebody has reason to think that the map is out of date.
    outdated: Notify,
    /// The error that a node replied with when it was asked for the map.
    unmapped: Mutex<Option<ServerError>>,
}

type Address = (String, u16);

/// Which node has which slots.
#[derive(Default)]
struct Map {
    nodes: HashMap<Address, Arc<Member>>,
    /// By the first slot of each range: the last one, and the primary.
    ranges: BTreeMap<u16, (u16, Arc<Member>)>,
    /// Who can be asked for the map when nobody else is left.
    replicas: Vec<Address>,
}

struct Member {
    host: String,
    node: Node,
}

/// The map is looked up this far apart at least.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a node may take to say where the slots are.
const PATIENCE: Duration = Duration::from_millis(500);
/// A request is sent on this often: the slot may have moved twice.
const REDIRECTIONS: usize = 5;

impl Cluster {
    pub(super) fn new(seeds: Vec<Address>, template: ConnectionInfo, connections: usize) -> Self {
        let shared = Arc::new(Shared {
            seeds,
            template,
            connections,
            map: Mutex::default(),
            outdated: Notify::new(),
            unmapped: Mutex::default(),
        });
        for seed in &shared.seeds {
            shared.member_at(seed.clone());
        }
        Self {
            shared: shared.clone(),
            _mapper: AbortOnDrop(tokio::spawn(keep_mapped(shared))),
        }
    }

    /// A hash tag in a slot of each primary.
    pub(super) fn hash_tags(&self) -> Result<Vec<String>, Failure> {
        // A primary with a single slot has one in 16,384 of them.
        const TAGS: u32 = 500_000;

        let map = self.shared.map();
        let mut primaries: Vec<_> = map.ranges.values().map(|(_, primary)| Arc::as_ptr(primary)).collect();
        primaries.sort_unstable();
        primaries.dedup();
        if primaries.is_empty() {
            drop(map);
            return Err(self.shared.why_unmapped());
        }

        let mut tags = Vec::with_capacity(primaries.len());
        for tag in 0..TAGS {
            let tag = tag.to_string();
            let owner = map.member_of(slot_of(tag.as_bytes()));
            let owner = owner.and_then(|owner| primaries.iter().position(|primary| *primary == Arc::as_ptr(&owner)));
            if let Some(position) = owner {
                primaries.swap_remove(position);
                tags.push(tag);
            }
            if primaries.is_empty() {
                break;
            }
        }
        Ok(tags)
    }

    /// Sends a command to the node that has the slot of this key. It follows redirections, which prove that nothing ran.
    pub(super) async fn send(&self, key: &[u8], command: &Cmd) -> Result<Value, Failure> {
        let Some(mut member) = self.shared.map().member_of(slot_of(key)) else {
            self.shared.outdated.notify_one();
            return Err(self.shared.why_unmapped());
        };
        let mut asking = false;
        for _ in 0..REDIRECTIONS {
            let mut doubt = Doubt(Some(&self.shared.outdated));
            let answer = member.node.send(command, asking).await?;
            doubt.0 = None;
            let Some(redirection) = Redirection::of(&answer) else {
                return Ok(answer);
            };
            if redirection.moved {
                self.shared.outdated.notify_one();
            }
            asking = !redirection.moved;
            member = self.shared.member_at(redirection.address(&member.host));
            // A node that nobody has named before is connected now.
            member.node.settled().await;
        }
        Err(Failure::Refused("redirected without end".into()))
    }
}

/// A request that fails, or has no reply at its deadline, is a reason to look up the slots.
struct Doubt<'a>(Option<&'a Notify>);

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        if let Some(outdated) = self.0 {
            outdated.notify_one();
        }
    }
}

struct Redirection<'a> {
    moved: bool,
    host: &'a str,
    port: u16,
}

impl<'a> Redirection<'a> {
    /// `MOVED 3999 127.0.0.1:6381` or `ASK 3999 127.0.0.1:6381`
    fn of(answer: &'a Value) -> Option<Self> {
        let Value::ServerError(error) = answer else { return None };
        let moved = match error.code() {
            "MOVED" => true,
            "ASK" => false,
            _ => return None,
        };
        let (_, address) = error.details()?.split_once(' ')?;
        let (host, port) = address.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = port.parse().ok()?;
        Some(Self { moved, host, port })
    }

    /// Where to; without a host it is that of the node that says so.
    fn address(&self, by: &str) -> Address {
        let host = if self.host.is_empty() { by } else { self.host };
        (host.to_owned(), self.port)
    }
}

impl Shared {
    fn map(&self) -> std::sync::MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn member_at(&self, address: Address) -> Arc<Member> {
        let mut map = self.map();
        map.nodes
            .entry(address)
            .or_insert_with_key(|address| self.member(address))
            .clone()
    }

    fn member(&self, (host, port): &Address) -> Arc<Member> {
        let server = at(&self.template, host.clone(), *port);
        Arc::new(Member {
            host: host.clone(),
            node: Node::new(Dial::Server(server), self.connections),
        })
    }

    /// Asks one node after the other where the slots are, until one knows: first those that are connected.
    async fn map_anew(&self) {
        let mut known: Vec<_> = self.map().nodes.keys().cloned().collect();
        fastrand::shuffle(&mut known);
        let mut all = known.clone();
        for stranger in self.seeds.iter().chain(&self.map().replicas) {
            if !all.contains(stranger) {
                all.push(stranger.clone());
            }
        }

        for (addresses, patience) in [(&known, Duration::ZERO), (&all, CONNECT)] {
            for address in addresses {
                if let Some(ranges) = self.ranges_by(address, patience).await {
                    return self.adopt(ranges);
                }
            }
        }
    }

    async fn ranges_by(&self, address: &Address, patience: Duration) -> Option<Vec<Range>> {
        let node = &self.member_at(address.clone()).node;
        let _ = timeout(patience, node.settled()).await;
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let answer = timeout(PATIENCE, node.send(&command, false)).await.ok()?.ok()?;
        if let Value::ServerError(error) = &answer {
            *self.unmapped() = Some(error.clone());
        }
        ranges(&answer, &address.0).filter(|ranges| !ranges.is_empty())
    }

    /// Why no node is known that has a slot.
    fn why_unmapped(&self) -> Failure {
        let map = self.map();
        let faults: Vec<_> = match map.ranges.is_empty() {
            true => map.nodes.values().filter_map(|member| member.node.fault()).collect(),
            false => Vec::new(),
        };
        drop(map);
        let (mut refused, others): (Vec<_>, Vec<_>) = faults
            .into_iter()
            .partition(|fault| matches!(fault, Failure::Forbidden(_)));
        if let Some(refused) = refused.pop() {
            return refused;
        }
        match &*self.unmapped() {
            Some(error) => Failure::not_connected(in_full(error.code(), error.details())),
            None => others
                .into_iter()
                .next()
                .unwrap_or_else(|| Failure::Unreachable("no node of the cluster has this slot".into())),
        }
    }

    fn unmapped(&self) -> std::sync::MutexGuard<'_, Option<ServerError>> {
        self.unmapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes by this map from now on, and lets go of the nodes that have no slots in it.
    fn adopt(&self, ranges: Vec<Range>) {
        let mut map = self.map();
        let mut adopted = Map::default();
        for range in ranges {
            let known = map.nodes.get(&range.primary).or(adopted.nodes.get(&range.primary));
            let member = known.cloned().unwrap_or_else(|| self.member(&range.primary));
            adopted.nodes.insert(range.primary, member.clone());
            adopted.ranges.insert(range.first, (range.last, member));
            adopted.replicas.extend(range.replicas);
        }
        *map = adopted;
        *self.unmapped() = None;
    }
}

impl Map {
    fn member_of(&self, slot: u16) -> Option<Arc<Member>> {
        let (_, (last, member)) = self.ranges.range(..=slot).next_back()?;
        (slot <= *last).then(|| member.clone())
    }
}

async fn keep_mapped(shared: Arc<Shared>) {
    loop {
        shared.map_anew().await;
        sleep(PAUSE).await;
        if !shared.map().ranges.is_empty() {
            shared.outdated.notified().await;
        }
    }
}

#[derive(Debug, PartialEq)]
struct Range {
    first: u16,
    last: u16,
    primary: Address,
    replicas: Vec<Address>,
}

/// Reads the answer to `CLUSTER SLOTS`: for each range its ends, the primary, then the replicas.
fn ranges(answer: &Value, asked: &str) -> Option<Vec<Range>> {
    let Value::Array(ranges) = answer else { return None };
    let range = |range: &Value| {
        let Value::Array(range) = range else { return None };
        let [Value::Int(first), Value::Int(last), primary, replicas @ ..] = &range[..] else {
            return None;
        };
        Some(Range {
            first: u16::try_from(*first).ok()?,
            last: u16::try_from(*last).ok()?,
            primary: address(primary, asked)?,
            replicas: replicas.iter().filter_map(|replica| address(replica, asked)).collect(),
        })
    };
    Some(ranges.iter().filter_map(range).collect())
}

/// Reads where a node is. One that does not know its own host leaves it out, and has that of the node that was asked.
///
/// <https://redis.io/docs/latest/commands/cluster-slots/>
fn address(node: &Value, asked: &str) -> Option<Address> {
    let Value::Array(node) = node else { return None };
    let [host, Value::Int(port), ..] = &node[..] else {
        return None;
    };
    let host = match host {
        Value::Nil => asked.to_owned(),
        Value::BulkString(host) if host.is_empty() => asked.to_owned(),
        Value::BulkString(host) if host == b"?" => return None,
        Value::BulkString(host) => String::from_utf8(host.clone()).ok()?,
        _ => return None,
    };
    Some((host, u16::try_from(*port).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: Value, port: i64) -> Value {
        Value::Array(vec![host, Value::Int(port), Value::BulkString(b"id".to_vec())])
    }

    fn named(host: &str) -> Value {
        Value::BulkString(host.as_bytes().to_vec())
    }

    #[test]
    fn a_node_without_a_host_is_where_it_was_asked() {
        for nameless in [Value::Nil, named("")] {
            assert_eq!(address(&node(nameless, 1), "asked"), Some(("asked".into(), 1)));
        }
    }

    #[test]
    fn what_cannot_be_read_is_left_out() {
        let good = Value::Array(vec![
            Value::Int(0),
            Value::Int(9),
            node(named("a"), 1),
            node(named("?"), 2),
            node(named("b"), 3),
        ]);
        let negative = Value::Array(vec![Value::Int(-1), Value::Int(9), node(named("a"), 1)]);
        let unknown = Value::Array(vec![Value::Int(10), Value::Int(19), node(named("?"), 1)]);
        let high = Value::Array(vec![Value::Int(20), Value::Int(29), node(named("a"), 70_000)]);
        let answer = Value::Array(vec![negative, Value::Nil, good, unknown, high, Value::Array(vec![])]);
        assert_eq!(
            ranges(&answer, "asked"),
            Some(vec![Range {
                first: 0,
                last: 9,
                primary: ("a".into(), 1),
                replicas: vec![("b".into(), 3)],
            }])
        );
        assert_eq!(ranges(&Value::Okay, "asked"), None);
    }

    fn redirected(words: &str) -> Option<(bool, Address)> {
        let answer = redis::parse_redis_value(format!("-{words}\r\n").as_bytes()).expect("an answer");
        Redirection::of(&answer).map(|redirection| (redirection.moved, redirection.address("same")))
    }

    #[test]
    fn redirections_name_a_host_of_any_kind() {
        for (words, moved, host, port) in [
            ("MOVED 3999 127.0.0.1:6381", true, "127.0.0.1", 6_381),
            ("ASK 3999 redis.internal:6381", false, "redis.internal", 6_381),
            ("MOVED 3999 ::1:6381", true, "::1", 6_381),
            ("MOVED 3999 [::1]:6381", true, "::1", 6_381),
            ("MOVED 3999 :6381", true, "same", 6_381),
        ] {
            assert_eq!(redirected(words), Some((moved, (host.into(), port))), "{words}");
        }
        for words in ["MOVED", "MOVED 1", "MOVED 1 a", "MOVED 1 a:70000", "TRYAGAIN", "ERR no"] {
            assert_eq!(redirected(words), None, "{words}");
        }
    }
}
