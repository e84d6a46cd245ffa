//! The servers of a service, as sentinels or the nodes of a cluster report them.

use std::{collections::HashSet, io};

use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, Value,
    aio::MultiplexedConnection,
};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use super::{
    super::{SENTINEL_PAUSE, SENTINEL_TIMEOUT, agreed, connections::InTurn},
    connection::{Attempts, at},
    error_text,
};
use crate::store::redis::{failure::Failure, key_format::SLOTS, task::run_together};

/// The sentinels, which report the address of the primary.
pub(super) struct Sentinels {
    sentinels: InTurn<Sentinel>,
    service: String,
    /// The primary that most of them reported last.
    agreed: watch::Sender<Option<ConnectionAddr>>,
}

struct Sentinel {
    server: ConnectionInfo,
    attempts: Attempts,
}

impl Sentinels {
    pub(super) fn new(sentinels: impl Iterator<Item = ConnectionInfo>, service: String) -> Self {
        let sentinels = sentinels.map(|server| Sentinel {
            server,
            attempts: Attempts::default(),
        });
        Self {
            sentinels: InTurn::new(sentinels),
            service,
            agreed: watch::channel(None).0,
        }
    }

    /// The primary that the first sentinel with a reply reports, with the settings of the template.
    ///
    /// <https://redis.io/docs/latest/develop/reference/sentinel-clients/>. The role of the server is not verified: if it has
    /// become a replica, it replies `READONLY`, and the sentinels are queried again. The next query begins with another one,
    /// since the address may be out of date, and this attempt may be canceled.
    pub(super) async fn primary(&self, template: &ConnectionInfo) -> Result<ConnectionInfo, RedisError> {
        let mut last_error = RedisError::from((ErrorKind::EmptySentinelList, "the URL has no sentinel"));
        for sentinel in self.sentinels.iter_from_next() {
            let reported = match sentinel.connect().await {
                Ok(mut connection) => self.query(&mut connection).await,
                Err(error) => Err(error),
            };
            match reported {
                Ok((host, port)) => return Ok(at(template, host, port)),
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }

    /// Queries all sentinels once a second, on connections that stay open. For about ten seconds after a planned failover, the old
    /// primary accepts writes, which are lost.
    pub(super) async fn watch(&self, template: &ConnectionInfo) {
        let mut connections: Vec<_> = self.sentinels.all.iter().map(|_| None).collect();
        loop {
            sleep(SENTINEL_PAUSE).await;
            let sentinels = self.sentinels.all.iter().zip(&mut connections);
            let queries = sentinels.map(|(sentinel, connection)| async move {
                let mut open = match connection.take() {
                    Some(open) => open,
                    None => sentinel.connect().await.ok()?,
                };
                let reported = self.query(&mut open).await.ok()?;
                // Without a reply it is closed.
                *connection = Some(open);
                Some(reported)
            });
            let reported = run_together(queries, |_| false).await;
            if let Some((host, port)) = agreed(reported) {
                let primary = at(template, host, port);
                self.agreed.send_replace(Some(primary.addr().clone()));
            }
        }
    }

    /// The primary on which the sentinels agree.
    pub(super) fn agreed(&self) -> watch::Receiver<Option<ConnectionAddr>> {
        self.agreed.subscribe()
    }

    async fn query(&self, sentinel: &mut MultiplexedConnection) -> Result<Address, RedisError> {
        let primary: Option<Address> = redis::cmd("SENTINEL")
            .arg("get-master-addr-by-name")
            .arg(&self.service)
            .query_async(sentinel)
            .await?;
        primary.ok_or_else(|| {
            let error = "the sentinel has no primary of this name";
            RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, error))
        })
    }
}

impl Sentinel {
    async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        let connecting = self.attempts.connect(self.server.clone(), |server| async {
            let config = AsyncConnectionConfig::new()
                .set_connection_timeout(None)
                .set_response_timeout(Some(SENTINEL_TIMEOUT));
            let client = Client::open(server)?;
            client.get_multiplexed_async_connection_with_config(&config).await
        });
        let timed_out = |_| Err(io::Error::from(io::ErrorKind::TimedOut).into());
        timeout(SENTINEL_TIMEOUT, connecting).await.unwrap_or_else(timed_out)
    }
}

pub(super) type Address = (String, u16);

/// The most nodes of a slot map: the size up to which a cluster of Redis is specified.
const MAX_NODES: usize = 1_000;
/// The most bytes of the name of a host.
const MAX_HOST: usize = 253; // RFC 1035 §2.3.4, as text

#[derive(Debug, PartialEq)]
pub(super) struct SlotRange {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) primary: Address,
    pub(super) replicas: Vec<Address>,
}

/// Reads the reply to `CLUSTER SLOTS` of the node at this host: for each range its ends, the primary, then the replicas.
pub(super) fn slot_ranges(reply: &Value, sender: &str) -> Result<Vec<SlotRange>, Failure> {
    let ranges = match reply {
        Value::Array(ranges) => ranges,
        Value::ServerError(error) => return Err(Failure::of_connection(error_text(error.code(), error.details()))),
        _ => return Err(Failure::Protocol("the reply to `CLUSTER SLOTS` is not a list")),
    };
    let mut nodes = HashSet::new();
    let mut usable = Vec::new();
    for range in ranges.iter().filter_map(|range| slot_range(range, sender)) {
        let SlotRange { primary, replicas, .. } = &range;
        nodes.extend([primary].into_iter().chain(replicas).cloned());
        if nodes.len() > MAX_NODES {
            return Err(Failure::Protocol("`CLUSTER SLOTS` lists more than 1000 nodes"));
        }
        usable.push(range);
    }
    match usable.is_empty() {
        // The slots may not be assigned yet.
        true => Err(Failure::Unreachable("no node of the cluster has slots".into())),
        false => Ok(usable),
    }
}

fn slot_range(range: &Value, sender: &str) -> Option<SlotRange> {
    let Value::Array(range) = range else { return None };
    let [Value::Int(first), Value::Int(last), primary, replicas @ ..] = &range[..] else {
        return None;
    };
    let slot = |number: i64| u16::try_from(number).ok().filter(|slot| *slot < SLOTS);
    Some(SlotRange {
        first: slot(*first)?,
        last: slot(*last)?,
        primary: address(primary, sender)?,
        replicas: replicas.iter().filter_map(|replica| address(replica, sender)).collect(),
    })
}

/// Reads the address of a node. Without a configured host, it is the host of the node that sent the reply.
///
/// <https://redis.io/docs/latest/commands/cluster-slots/>
fn address(node: &Value, sender: &str) -> Option<Address> {
    let Value::Array(node) = node else { return None };
    let [host, Value::Int(port), ..] = &node[..] else {
        return None;
    };
    let host = match host {
        Value::Nil => sender.to_owned(),
        Value::BulkString(host) if host.is_empty() => sender.to_owned(),
        Value::BulkString(host) if host == b"?" => return None,
        Value::BulkString(host) if host.len() <= MAX_HOST => String::from_utf8(host.clone()).ok()?,
        _ => return None,
    };
    // A node that has no port for these connections has the port 0.
    let port = u16::try_from(*port).ok().filter(|port| *port > 0)?;
    Some((host, port))
}

/// Whether a slot has moved, and the address of its node: `MOVED 3999 127.0.0.1:6381` or `ASK 3999 127.0.0.1:6381`. A redirection
/// without a host means the host of the node that sent it.
pub(super) fn redirection(reply: &Value, sender: &str) -> Option<(bool, Address)> {
    let Value::ServerError(error) = reply else { return None };
    let moved = match error.code() {
        "MOVED" => true,
        "ASK" => false,
        _ => return None,
    };
    let (_, address) = error.details()?.split_once(' ')?;
    let (host, port) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let host = if host.is_empty() { sender } else { host };
    let port = port.parse().ok()?;
    (host.len() <= MAX_HOST && host != "?").then(|| (moved, (host.to_owned(), port)))
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
    fn a_node_without_a_host_has_the_host_of_the_sender() {
        for nameless in [Value::Nil, named("")] {
            assert_eq!(address(&node(nameless, 1), "sender"), Some(("sender".into(), 1)));
        }
    }

    #[test]
    fn ranges_without_a_usable_address_are_left_out() {
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
        let closed = Value::Array(vec![Value::Int(30), Value::Int(39), node(named("a"), 0)]);
        let beyond = Value::Array(vec![Value::Int(40), Value::Int(16_384), node(named("a"), 1)]);
        let long = Value::Array(vec![Value::Int(50), Value::Int(59), node(named(&"a".repeat(254)), 1)]);
        let bad = [
            negative,
            Value::Nil,
            unknown,
            high,
            closed,
            beyond,
            long,
            Value::Array(vec![]),
        ];
        assert!(has_no_slots(&Value::Array(bad.to_vec())));
        let reply = Value::Array(bad.into_iter().chain([good]).collect());
        assert_eq!(
            slot_ranges(&reply, "sender").expect("one good range"),
            vec![SlotRange {
                first: 0,
                last: 9,
                primary: ("a".into(), 1),
                replicas: vec![("b".into(), 3)],
            }]
        );
    }

    fn has_no_slots(reply: &Value) -> bool {
        matches!(slot_ranges(reply, "sender"), Err(Failure::Unreachable(_)))
    }

    fn fault_of(reply: &Value) -> String {
        match slot_ranges(reply, "sender") {
            Err(Failure::Protocol(fault)) => fault.to_owned(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_reply_that_is_no_slot_map_is_a_failure() {
        for reply in [Value::Okay, Value::Nil, Value::Int(1)] {
            assert!(fault_of(&reply).contains("not a list"));
        }
        assert!(has_no_slots(&Value::Array(Vec::new())));
    }

    #[test]
    fn a_slot_map_has_at_most_1000_nodes() {
        let of = |nodes: i64| {
            let range = |n| {
                Value::Array(vec![
                    Value::Int(n),
                    Value::Int(n),
                    node(named("a"), 1 + n),
                    node(named("r"), 1 + n),
                ])
            };
            Value::Array((0..nodes / 2).map(range).collect())
        };
        assert_eq!(
            slot_ranges(&of(1_000), "sender").map(|ranges| ranges.len()).ok(),
            Some(500)
        );
        assert!(fault_of(&of(1_002)).contains("more than 1000 nodes"));
    }

    fn redirected(words: &str) -> Option<(bool, Address)> {
        let reply = redis::parse_redis_value(format!("-{words}\r\n").as_bytes()).expect("a reply");
        redirection(&reply, "same")
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
        for words in [
            "MOVED",
            "MOVED 1",
            "MOVED 1 a",
            "MOVED 1 a:70000",
            "MOVED 1 ?:6381",
            "ASK 1 ?:6381",
            "TRYAGAIN",
            "ERR no",
        ] {
            assert_eq!(redirected(words), None, "{words}");
        }
        assert_eq!(redirected(&format!("ASK 1 {}:1", "a".repeat(254))), None);
    }
}
