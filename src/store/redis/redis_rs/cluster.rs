use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use redis::{Cmd, ConnectionInfo, RedisError, Value};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};

use super::{
    super::{AbortOnDrop, Failure, slot::slot_of},
    at,
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
    mapped: Notify,
}

type Address = (String, u16);

/// Which node has which slots.
#[derive(Default)]
struct Map {
    nodes: HashMap<Address, Arc<Node>>,
    /// By the first slot of each range: the last one, and the primary.
    ranges: BTreeMap<u16, (u16, Arc<Node>)>,
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
            mapped: Notify::new(),
        });
        for seed in &shared.seeds {
            shared.node_at(seed.clone());
        }
        Self {
            shared: shared.clone(),
            _mapper: AbortOnDrop(tokio::spawn(keep_mapped(shared))),
        }
    }

    /// Waits until the slots are known and their nodes connected.
    pub(super) async fn settled(&self) -> Result<(), RedisError> {
        loop {
            let mapped = self.shared.mapped.notified();
            let nodes: Vec<_> = self.shared.map().nodes.values().cloned().collect();
            let complete = !self.shared.map().ranges.is_empty();
            for node in nodes {
                node.settled().await?;
            }
            if complete {
                return Ok(());
            }
            mapped.await;
        }
    }

    /// Sends a command to the node that has the slot of this key. It follows redirections, which prove that nothing ran.
    pub(super) async fn send(&self, key: &[u8], command: &Cmd, deadline: Instant) -> Result<Value, Failure> {
        let Some(mut node) = self.shared.map().node_of(slot_of(key)) else {
            self.shared.outdated.notify_one();
            return Err(Failure::Unreachable("no node of the cluster has this slot".into()));
        };
        let mut asking = false;
        for _ in 0..REDIRECTIONS {
            let answer = node.send(command, asking, deadline).await;
            if answer.is_err() {
                self.shared.outdated.notify_one();
            }
            let answer = answer?;
            let Some(redirection) = Redirection::of(&answer) else {
                return Ok(answer);
            };
            if redirection.moved {
                self.shared.outdated.notify_one();
            }
            let (host, port) = redirection.address;
            node = self.shared.node_at((host.to_owned(), port));
            asking = !redirection.moved;
            // A node that nobody has named before is connected now.
            let _ = tokio::time::timeout_at(deadline, node.settled()).await;
        }
        Err(Failure::Refused("redirected without end".into()))
    }
}

struct Redirection<'a> {
    moved: bool,
    address: (&'a str, u16),
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
        let address = (host, port.parse().ok()?);
        Some(Self { moved, address })
    }
}

impl Shared {
    fn map(&self) -> std::sync::MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn node_at(&self, address: Address) -> Arc<Node> {
        self.map()
            .nodes
            .entry(address)
            .or_insert_with_key(|(host, port)| self.node(host, *port))
            .clone()
    }

    fn node(&self, host: &str, port: u16) -> Arc<Node> {
        let server = at(&self.template, host.to_owned(), port);
        Arc::new(Node::new(Dial::Server(server), self.connections))
    }

    /// Asks one node after the other where the slots are, until one knows: first those that are connected.
    async fn map_anew(&self) {
        let mut known: Vec<_> = self.map().nodes.keys().cloned().collect();
        fastrand::shuffle(&mut known);
        let strangers = self.seeds.iter().filter(|seed| !known.contains(seed));
        let all: Vec<_> = known.iter().chain(strangers).cloned().collect();

        for (addresses, patience) in [(&known, Duration::ZERO), (&all, CONNECT)] {
            for address in addresses {
                if let Some(ranges) = self.ranges_by(address, patience).await {
                    return self.adopt(&ranges);
                }
            }
        }
    }

    async fn ranges_by(&self, address: &Address, patience: Duration) -> Option<Vec<Range>> {
        let node = self.node_at(address.clone());
        let _ = timeout(patience, node.settled()).await;
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let answer = node.send(&command, false, Instant::now() + PATIENCE).await.ok()?;
        ranges(&answer, &address.0).filter(|ranges| !ranges.is_empty())
    }

    /// Goes by this map from now on, and lets go of the nodes that it does not have.
    fn adopt(&self, ranges: &[Range]) {
        let mut map = self.map();
        let mut adopted = Map::default();
        for range in ranges {
            let (host, port) = &range.primary;
            let node = match map.nodes.get(&range.primary).or(adopted.nodes.get(&range.primary)) {
                Some(node) => node.clone(),
                None => self.node(host, *port),
            };
            adopted.nodes.insert(range.primary.clone(), node.clone());
            adopted.ranges.insert(range.first, (range.last, node));
        }
        *map = adopted;
        self.mapped.notify_waiters();
    }
}

impl Map {
    fn node_of(&self, slot: u16) -> Option<Arc<Node>> {
        let (_, (last, node)) = self.ranges.range(..=slot).next_back()?;
        (slot <= *last).then(|| node.clone())
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
}

/// Reads the answer to `CLUSTER SLOTS`: for each range its ends, the primary, then the replicas.
///
/// A node that does not know its own address leaves it out, and is where it was asked.
fn ranges(answer: &Value, asked: &str) -> Option<Vec<Range>> {
    let Value::Array(ranges) = answer else { return None };
    let range = |range: &Value| {
        let Value::Array(range) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = &range[..] else {
            return None;
        };
        let [host, Value::Int(port), ..] = &primary[..] else {
            return None;
        };
        let host = match host {
            Value::Nil => asked.to_owned(),
            Value::BulkString(host) if host.is_empty() => asked.to_owned(),
            // https://redis.io/docs/latest/commands/cluster-slots/: "?" is an endpoint that is not known.
            Value::BulkString(host) if host == b"?" => return None,
            Value::BulkString(host) => String::from_utf8(host.clone()).ok()?,
            _ => return None,
        };
        Some(Range {
            first: u16::try_from(*first).ok()?,
            last: u16::try_from(*last).ok()?,
            primary: (host, u16::try_from(*port).ok()?),
        })
    };
    Some(ranges.iter().filter_map(range).collect())
}
