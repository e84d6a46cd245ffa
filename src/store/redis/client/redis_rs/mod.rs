mod cluster;
mod connection;
mod topology;

use std::{collections::HashMap, sync::Arc};

use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, PushInfo, PushKind, RedisError, Value,
    aio::MultiplexedConnection,
};
use tokio::{sync::mpsc, time::timeout};

use self::{
    cluster::Cluster,
    connection::{CONNECT_TIMEOUT, ServerConnections, authenticated, for_limiter, parse, without_library_name},
    topology::Sentinels,
};
use super::{ClusterNodes, while_answered};
use crate::{
    ConfigError,
    store::{
        health::Health,
        redis::{
            acl::Refusal,
            backend::Deadline,
            call::ScriptCall,
            credentials::{Authenticator, ConnectionSettings},
            failure::{Failure, shortened},
            reply::RawReply,
            script::EvalCommand,
            url::Url,
            wakes::Event,
        },
    },
};

/// Runs scripts through redis-rs.
pub(in crate::store::redis) struct RedisRsClient {
    servers: Servers,
    settings: ConnectionSettings,
    pub(in crate::store::redis) health: Arc<Health>,
}

enum Servers {
    /// A server, or the primary of a service of Sentinel.
    One(ServerConnections),
    Cluster(Cluster),
}

impl RedisRsClient {
    pub(in crate::store::redis) fn connect(url: &Url<'_>, settings: &ConnectionSettings) -> Result<Self, ConfigError> {
        if url.is_cluster() {
            let nodes = url.node_urls().map(parse).collect::<Result<Vec<_>, _>>()?;
            return Self::cluster(&nodes, settings);
        }
        let server = parse(url.server_url())?;
        let Some(service) = url.sentinel_service() else {
            return Ok(Self::of_server(&server, settings));
        };
        let sentinels: Vec<_> = url.node_urls().map(parse).collect::<Result<_, _>>()?;
        let sentinels = Sentinels::new(sentinels.iter().map(without_library_name), service.clone());
        Ok(Self::new(service, &server, Some(sentinels), settings))
    }

    pub(in crate::store::redis) fn of_server(server: &ConnectionInfo, settings: &ConnectionSettings) -> Self {
        Self::new(server.addr().to_string(), server, None, settings)
    }

    fn new(
        address: String,
        server: &ConnectionInfo,
        sentinels: Option<Sentinels>,
        settings: &ConnectionSettings,
    ) -> Self {
        Self {
            servers: Servers::One(ServerConnections::new(for_limiter(server), sentinels, settings)),
            settings: settings.clone(),
            health: Health::of_server(address),
        }
    }

    /// A cluster that these nodes belong to.
    pub(in crate::store::redis) fn cluster(
        nodes: &[ConnectionInfo],
        settings: &ConnectionSettings,
    ) -> Result<Self, ConfigError> {
        let seeds = nodes.iter().map(|node| match node.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Ok((host.clone(), *port)),
            _ => Err(ConfigError::new("a cluster cannot be reached through a Unix socket")),
        });
        let seeds = seeds.collect::<Result<Vec<_>, _>>()?;
        let Some(template) = nodes.first() else {
            return Err(ConfigError::new("a cluster needs at least one node to begin with"));
        };
        let health = Arc::<Health>::default();
        let cluster = Cluster::new(seeds, for_limiter(template), settings, health.clone());
        Ok(Self {
            servers: Servers::Cluster(cluster),
            settings: settings.clone(),
            health,
        })
    }

    pub(super) fn cluster_nodes(&self) -> Option<&dyn ClusterNodes> {
        match &self.servers {
            Servers::One(_) => None,
            Servers::Cluster(cluster) => Some(cluster),
        }
    }

    pub(in crate::store::redis) fn permissions(&self) -> Vec<&'static str> {
        match &self.servers {
            Servers::Cluster(_) => vec!["cluster|slots", "asking"],
            Servers::One(one) if one.endpoint.server.redis_settings().db() != 0 => vec!["select"],
            Servers::One(_) => Vec::new(),
        }
    }

    pub(in crate::store::redis) async fn eval(
        &self,
        command: EvalCommand,
        call: &ScriptCall,
    ) -> Result<RawReply, Failure> {
        let key = call.keys.first().map_or(&b""[..], |key| key);
        let command = packed(command, call);
        let reply = self.send(key, &command, call.follows_redirections(), call.is_asking());
        raw_reply(reply.await?)
    }

    pub(in crate::store::redis) async fn setting(&self, name: &'static str) -> Option<String> {
        let command = redis::cmd("CONFIG").arg("GET").arg(name).to_owned();
        let mut setting: HashMap<String, String> =
            redis::from_redis_value(self.send(b"", &command, true, false).await.ok()?).ok()?;
        setting.remove(name)
    }

    /// Sends a command once, in a cluster to the primary of the key.
    async fn send(&self, key: &[u8], command: &Cmd, follows: bool, asking: bool) -> Result<Value, Failure> {
        match &self.servers {
            Servers::One(connections) => connections.send(command, false).await,
            Servers::Cluster(cluster) => cluster.send(key, command, follows, asking).await,
        }
    }

    /// Receives the messages of a channel, until the credentials of the connection are due.
    pub(in crate::store::redis) async fn receive_messages(
        &self,
        channel: &str,
        receive: &mut (dyn FnMut(Event<'_>) + Send),
    ) -> Failure {
        let authenticator = self.settings.authenticator();
        let subscribing = self.subscribed(channel, authenticator.as_deref());
        let (mut connection, mut pushes, server) = match timeout(CONNECT_TIMEOUT, subscribing).await {
            Ok(Ok(subscribed)) => subscribed,
            Ok(Err(failure)) => return failure,
            Err(_) => return Failure::Timeout,
        };
        let due = authenticator.and_then(|authenticator| authenticator.due());
        // The script publishes with the permissions of this user.
        let publish = redis::cmd("PUBLISH").arg(channel).arg("").to_owned();
        let published = Deadline::new(CONNECT_TIMEOUT).wait(connection.send_packed_command(&publish));
        match published.await {
            Some(Ok(Value::ServerError(error))) => return Failure::of_call(error_text(error.code(), error.details())),
            Some(Ok(_)) => {}
            Some(Err(error)) => return Failure::Unreachable(shortened(error).into()),
            None => return Failure::Timeout,
        }
        receive(Event::Subscribed);
        let ping = || {
            let mut connection = connection.clone();
            let has_left = matches!(&self.servers, Servers::Cluster(cluster) if !cluster.has_node(&server));
            async move {
                match has_left {
                    true => Err(RedisError::from((ErrorKind::Io, "the node has left the cluster"))),
                    false => connection.send_packed_command(&redis::cmd("PING")).await,
                }
            }
        };
        while_answered(due, pass_on(&mut pushes, receive), ping).await
    }

    async fn subscribed(
        &self,
        channel: &str,
        authenticator: Option<&Authenticator>,
    ) -> Result<(MultiplexedConnection, mpsc::UnboundedReceiver<PushInfo>, ConnectionInfo), Failure> {
        let server = match &self.servers {
            Servers::One(connections) => connections.endpoint.latest_server().await,
            Servers::Cluster(cluster) => cluster
                .any_node()
                .ok_or_else(|| Failure::Unreachable("no node of the cluster is known".into())),
        }?;
        let (sender, pushes) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_push_sender(move |push: PushInfo| sender.send(push).map_err(drop));
        let subscribe = async |server| {
            let client = redis::Client::open(server)?;
            let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            connection.subscribe(channel).await?;
            Ok(connection)
        };
        let connection = authenticated(server.clone(), authenticator, subscribe).await?;
        Ok((connection, pushes, server))
    }
}

/// Passes on messages until the connection is lost.
async fn pass_on(
    pushes: &mut mpsc::UnboundedReceiver<PushInfo>,
    receive: &mut (dyn FnMut(Event<'_>) + Send),
) -> Failure {
    while let Some(push) = pushes.recv().await {
        match (push.kind, &*push.data) {
            (PushKind::Message, [_, Value::BulkString(message)]) => receive(Event::Message(message)),
            (PushKind::Disconnection, _) => break,
            _ => {}
        }
    }
    Failure::Unreachable("the connection was lost".into())
}

fn packed((name, text): EvalCommand, call: &ScriptCall) -> Cmd {
    let arguments = || call.keys.iter().chain(&call.arguments);
    let bytes = arguments().map(bytes::Bytes::len).sum::<usize>();
    let mut command = Cmd::with_capacity(3 + arguments().count(), text.len() + bytes + 8);
    command.arg(name).arg(text).arg(call.keys.len());
    for argument in arguments() {
        command.arg(&argument[..]);
    }
    command
}

fn raw_reply(reply: Value) -> Result<RawReply, Failure> {
    let text = |value| match value {
        Value::BulkString(text) => Ok(text.into()),
        Value::ServerError(error) => Err(Failure::of_call(error_text(error.code(), error.details()))),
        _ => Err(Failure::malformed_reply()),
    };
    match reply {
        Value::Array(values) => RawReply::from_texts(values.into_iter().map(text)),
        value => RawReply::from_texts([text(value)]),
    }
}

/// The beginning of the text of an error reply as Redis sent it.
fn error_text(code: &str, details: Option<&str>) -> String {
    match details {
        Some(details) => shortened(format_args!("{code} {details}")),
        None => shortened(code),
    }
}

/// The failure for an error of a new connection.
fn connect_failure(error: &RedisError) -> Failure {
    use redis::ErrorKind::{AuthenticationFailed, InvalidClientConfig, RESP3NotSupported};

    match (error.kind(), error.code()) {
        (_, Some(code)) => Failure::of_connection(error_text(code, error.detail())),
        (AuthenticationFailed | InvalidClientConfig | RESP3NotSupported, None) => {
            Failure::Forbidden(Refusal::new(shortened(error)))
        }
        _ => Failure::Unreachable(shortened(error).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_connecting_again_does_not_mend_is_a_refusal() {
        for kind in [
            ErrorKind::AuthenticationFailed,
            ErrorKind::InvalidClientConfig,
            ErrorKind::RESP3NotSupported,
        ] {
            let failure = connect_failure(&RedisError::from((kind, "no")));
            assert!(matches!(failure, Failure::Forbidden(_)), "{failure:?}");
        }
        let failure = connect_failure(&RedisError::from((ErrorKind::Io, "no")));
        assert!(matches!(failure, Failure::Unreachable(_)), "{failure:?}");
    }
}
