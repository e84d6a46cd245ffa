//! The seam to the client libraries. No file outside of this folder uses one, but for the types that the builder receives.

#![allow(clippy::wildcard_enum_match_arm, reason = "the client libraries may add variants")]

mod connections;
#[cfg(feature = "fred")]
pub(super) mod fred;
#[cfg(feature = "cluster")]
pub(super) mod redis_rs;

use std::{pin::pin, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};

#[cfg(test)]
use super::simulation::network::Network;
use super::{
    acl::Refusal, backend::Deadline, call::ScriptCall, credentials::until, failure::Failure, reply::RawReply,
    script::Script, wakes::Event,
};
use crate::store::health::{Health, Node};

/// The time for a reply to `PING`.
const PING_TIMEOUT: Duration = Duration::from_millis(500);
/// The pause between two `PING` on the connection of a subscription.
const PING_PAUSE: Duration = Duration::from_secs(5);

/// Waits for what ends a subscription, or until its credentials are due, or until `PING` on its connection has no reply: a server that
/// vanishes without closing the connection is noticed by nothing else, since nothing else is sent.
async fn while_answered<F, T, E>(
    due: Option<Instant>,
    receiving: impl Future<Output = Failure>,
    ping: impl Fn() -> F,
) -> Failure
where
    F: Future<Output = Result<T, E>>,
{
    let answered = async {
        let mut receiving = pin!(receiving);
        loop {
            if let Ok(ended) = timeout(PING_PAUSE, &mut receiving).await {
                return ended;
            }
            // Any reply will do, also that this user has no permission.
            let pong = Deadline::new(PING_TIMEOUT).wait(ping()).await;
            if !matches!(pong, Some(Ok(_))) {
                return Failure::Unreachable("the connection of the subscription does not reply".into());
            }
        }
    };
    let ended = until(due, answered).await;
    ended.unwrap_or_else(|| Failure::Unreachable("the credentials are due".into()))
}

/// The pause between two queries of all sentinels.
const SENTINEL_PAUSE: Duration = Duration::from_secs(1);
/// The time for the reply of a sentinel.
const SENTINEL_TIMEOUT: Duration = Duration::from_millis(300);

/// The address that more than half of the sentinels of the URL report: one that is cut off may report an old primary.
fn agreed<A: PartialEq>(reported: Vec<Option<A>>) -> Option<A> {
    let times = |address: &Option<A>| reported.iter().filter(|other| *other == address).count();
    let is_of_most = |address: &Option<A>| address.is_some() && 2 * times(address) > reported.len();
    let most = reported.iter().position(is_of_most)?;
    reported.into_iter().nth(most)?
}

/// The least time from one attempt to connect to the next one, which differs at random.
fn attempt_interval() -> Duration {
    Duration::from_millis(fastrand::u64(150..250))
}

/// A client that runs a script on the node that owns its keys.
pub(super) enum RedisClient {
    #[cfg(feature = "fred")]
    Fred(fred::FredClient),
    #[cfg(feature = "cluster")]
    RedisRs(redis_rs::RedisRsClient),
    #[cfg(test)]
    Simulated(Network),
}

/// Calls a client library, or what stands for it in tests.
macro_rules! of_client {
    ($self:ident, |$client:ident| $call:expr, |$network:pat_param| $simulated:expr) => {
        match $self {
            #[cfg(feature = "fred")]
            Self::Fred($client) => $call,
            #[cfg(feature = "cluster")]
            Self::RedisRs($client) => $call,
            #[cfg(test)]
            Self::Simulated($network) => $simulated,
        }
    };
}

impl RedisClient {
    /// Runs a script by its digest, and by its text if Redis replies that it does not have the script, which proves that
    /// nothing was executed. The reply must arrive within the deadline.
    pub(super) async fn run(
        &self,
        script: &'static Script,
        call: &ScriptCall,
        deadline: Deadline,
    ) -> Result<RawReply, Failure> {
        let reply = async {
            let mut unknown = String::new();
            for command in script.commands() {
                let reply = match self {
                    #[cfg(feature = "fred")]
                    Self::Fred(client) => client.eval(command, call, deadline).await,
                    #[cfg(feature = "cluster")]
                    Self::RedisRs(client) => client.eval(command, call).await,
                    #[cfg(test)]
                    Self::Simulated(network) => network.eval(command, call).await,
                };
                match reply {
                    Err(Failure::Refused(error)) if error.starts_with("NOSCRIPT") => unknown = error,
                    reply => return reply,
                }
            }
            Err(Failure::Forbidden(Refusal::new(unknown)))
        };
        // Pinned here, since the future of a call has some kilobytes, and each function that takes it would copy it.
        deadline.wait(pin!(reply)).await.unwrap_or(Err(Failure::Timeout))
    }

    /// Receives the messages of a channel on a connection of its own, until that is lost or refused.
    pub(super) async fn receive_messages(&self, channel: &str, receive: &mut (dyn FnMut(Event<'_>) + Send)) -> Failure {
        of_client!(self, |client| client.receive_messages(channel, receive).await, |_| {
            std::future::pending().await
        })
    }

    /// A setting of a server, if its user may read it.
    pub(super) async fn setting(&self, name: &'static str) -> Option<String> {
        of_client!(self, |client| client.setting(name).await, |_| None)
    }

    /// The nodes of a cluster; none of one server.
    fn cluster(&self) -> Option<&dyn ClusterNodes> {
        match self {
            #[cfg(feature = "fred")]
            Self::Fred(_) => None,
            #[cfg(feature = "cluster")]
            Self::RedisRs(client) => client.cluster_nodes(),
            #[cfg(test)]
            Self::Simulated(network) => network.cluster(),
        }
    }

    /// Whether all keys of a call must lie in one slot.
    pub(super) fn is_clustered(&self) -> bool {
        self.cluster().is_some()
    }

    /// The node of a cluster that has a slot, if it is known.
    pub(super) fn node_of(&self, slot: u16) -> Option<Arc<Node>> {
        self.cluster()?.node(slot)
    }

    /// For each node of a cluster hash tags in up to two of its slots; an error if no slot has a known one.
    pub(super) fn hash_tags(&self) -> Result<Vec<HashTags>, Failure> {
        self.cluster().map_or(Ok(Vec::new()), |cluster| cluster.hash_tags())
    }

    /// The permissions that these servers require besides those of one server.
    pub(super) fn permissions(&self) -> Vec<&'static str> {
        of_client!(self, |client| client.permissions(), |_| Vec::new())
    }

    /// Why the nodes of a cluster are not looked up, if they refuse that.
    pub(super) fn lookup_refusal(&self) -> Option<Refusal> {
        self.cluster()?.lookup_refusal()
    }

    pub(super) fn health(&self) -> &Arc<Health> {
        of_client!(self, |client| &client.health, |network| network.health())
    }

    /// The health of the server of a slot.
    pub(super) fn node(&self, slot: impl FnOnce() -> u16) -> Arc<Node> {
        let node = self.cluster().and_then(|cluster| cluster.node(slot()));
        node.unwrap_or_else(|| self.health().rest.clone())
    }
}

pub(super) trait ClusterNodes {
    fn node(&self, slot: u16) -> Option<Arc<Node>>;

    fn hash_tags(&self) -> Result<Vec<HashTags>, Failure>;

    /// The refusal of the last lookup of the nodes.
    fn lookup_refusal(&self) -> Option<Refusal>;
}

/// A client library for Redis.
///
/// ```
/// use tower_quota::{ClientLibrary, RedisStore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// # #[cfg(feature = "cluster")]
/// # {
/// let builder = RedisStore::builder().url("redis://127.0.0.1:6379").client_library(ClientLibrary::RedisRs);
/// assert!(builder.connect_lazy().is_ok());
/// # }
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClientLibrary {
    /// [fred](https://crates.io/crates/fred), for one server or Sentinel.
    #[cfg(feature = "fred")]
    Fred,
    /// [redis-rs](https://crates.io/crates/redis), for one server, Sentinel or a cluster.
    #[cfg(feature = "cluster")]
    RedisRs,
}

/// The libraries that are built in, the preferred one first.
pub(in crate::store::redis) const BUILT_IN: &[ClientLibrary] = &[
    #[cfg(feature = "fred")]
    ClientLibrary::Fred,
    #[cfg(feature = "cluster")]
    ClientLibrary::RedisRs,
];

/// A hash tag in a slot of a node, and one in another slot if it has several.
pub(in crate::store::redis) type HashTags = (u32, Option<u32>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentinels_agree_if_more_than_half_report_the_same_primary() {
        for (reported, primary) in [
            (&[][..], None),
            (&[Some(1)], Some(1)),
            (&[Some(1), Some(2)], None),
            (&[Some(1), Some(2), Some(2)], Some(2)),
            (&[None, Some(2), Some(2)], Some(2)),
            (&[Some(1), Some(2), Some(3)], None),
            (&[Some(1), None, None], None),
            (&[Some(1), Some(1), Some(2), Some(2)], None),
        ] {
            assert_eq!(agreed(reported.to_vec()), primary, "{reported:?}");
        }
    }
}
