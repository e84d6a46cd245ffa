use std::sync::Arc;

use fred::{
    interfaces::ClientLike,
    types::{
        ClusterHash, CustomCommand,
        config::{Config, Server, ServerConfig},
    },
};
use tokio::{sync::watch, time::sleep};

use super::{
    super::{SENTINEL_PAUSE, SENTINEL_TIMEOUT, agreed, connections::InTurn},
    connection::{AgreedPrimary, Connection},
    settings::{build, send_once},
};
use crate::store::redis::{
    acl::ReplyingServer,
    backend::Deadline,
    failure::Failure,
    task::{AbortOnDrop, run_together},
};

/// The sentinels of the URL, each with a connection, which are queried once a second.
pub(super) struct Sentinels {
    connections: Arc<InTurn<Connection>>,
    agreed: AgreedPrimary,
    _watching: AbortOnDrop<()>,
}

impl Sentinels {
    /// Queries all of them: fred does so only when it connects. For about ten seconds after a planned failover, the old primary accepts
    /// writes, which are lost.
    pub(super) fn watch(config: &Config) -> Option<Self> {
        let ServerConfig::Sentinel {
            hosts,
            service_name,
            username,
            password,
        } = &config.server
        else {
            return None;
        };
        let connections = hosts.iter().filter_map(|sentinel| {
            let of_sentinel = Config {
                server: ServerConfig::Centralized {
                    server: sentinel.clone(),
                },
                username: username.clone(),
                password: password.clone(),
                database: None,
                ..config.clone()
            };
            Some(Connection::open(build(of_sentinel).ok()?, None, None, || {
                SENTINEL_PAUSE
            }))
        });
        let connections = Arc::new(InTurn::new(connections));
        let (sentinels, service) = (connections.clone(), service_name.clone());
        let (sender, agreed_primary) = watch::channel(None);
        let watching = tokio::spawn(async move {
            loop {
                sleep(SENTINEL_PAUSE).await;
                let queries = sentinels.all.iter().map(|sentinel| query(sentinel, &service));
                let reported = run_together(queries, |_| false).await;
                if let Some(primary) = agreed(reported) {
                    sender.send_replace(Some(primary));
                }
            }
        });
        Some(Self {
            connections,
            agreed: agreed_primary,
            _watching: AbortOnDrop(watching),
        })
    }

    /// The primary that more than half of them report.
    pub(super) fn agreed(&self) -> AgreedPrimary {
        self.agreed.clone()
    }

    /// Why none of them is connected.
    pub(super) fn failure(&self) -> Option<Failure> {
        let connected = self
            .connections
            .connection(|sentinel| sentinel.connected().map(drop), |()| false);
        connected.err().map(|failure| failure.of(ReplyingServer::Sentinel))
    }
}

async fn query(sentinel: &Connection, service: &str) -> Option<Server> {
    let (client, _) = sentinel.connected().ok()?;
    let deadline = Deadline::new(SENTINEL_TIMEOUT);
    let command = CustomCommand::new_static("SENTINEL", ClusterHash::Random, false);
    let client = client.with_options(&send_once(deadline));
    let reply = deadline.wait(client.custom(command, vec!["get-master-addr-by-name", service]));
    let Some(reply) = reply.await else {
        sentinel.check();
        return None;
    };
    let (host, port): (String, u16) = reply.ok()?;
    Some(Server::new(host, port))
}
