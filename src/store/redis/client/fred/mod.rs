mod connection;
mod error;
mod settings;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use fred::{
    bytes_utils::Str,
    clients::Client,
    interfaces::ClientLike,
    types::{
        ClusterHash, CustomCommand, Resp3Frame, Value,
        config::{Config, ServerConfig},
    },
};

use self::{
    connection::{Connection, UnansweredCall},
    error::call_failure,
    settings::{build, check_settings, send_once},
};
use crate::{
    ConfigError,
    store::{
        health::{Health, Node},
        redis::{
            backend::Deadline,
            call::ScriptCall,
            failure::{Failure, is_of_replica, shortened_bytes},
            reply::RawReply,
            script::{EvalCommand, Script},
            task::DetachOnDrop,
        },
    },
};

/// Runs scripts through fred.
pub(in crate::store::redis) struct FredClient {
    connections: Vec<Connection>,
    next: AtomicUsize,
    health: Arc<Health>,
    node: Arc<Node>,
}

impl FredClient {
    pub(in crate::store::redis) fn connect(url: &str, connections: usize) -> Result<Self, ConfigError> {
        let connections = (0..connections).map(|_| {
            let config =
                Config::from_url(url).map_err(|error| ConfigError::because("this Redis URL does not parse", error))?;
            let client = build(config).map_err(|error| ConfigError::because("this Redis URL cannot be used", error))?;
            Ok(Connection::open(client))
        });
        connections.collect::<Result<_, _>>().map(Self::new)
    }

    /// On clients that the application connects.
    pub(in crate::store::redis) fn from_clients(clients: &[Client]) -> Result<Self, ConfigError> {
        for client in clients {
            check_settings(client)?;
        }
        Ok(Self::new(clients.iter().cloned().map(Connection::new).collect()))
    }

    fn new(connections: Vec<Connection>) -> Self {
        let node = Node::new(
            connections
                .first()
                .map_or_else(String::new, |first| address(&first.client)),
        );
        let health = Arc::<Health>::default();
        health.set_nodes(vec![node.clone()]);
        Self {
            connections,
            next: AtomicUsize::new(0),
            health,
            node,
        }
    }

    pub(in crate::store::redis) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    pub(in crate::store::redis) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// The next connection that is established and not suspect: fred notices late that a connection is lost. Without one, the
    /// next connection.
    fn connection(&self) -> Option<&Connection> {
        let count = self.connections.len();
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut connections = (0..count).map(|offset| &self.connections[first.wrapping_add(offset) % count]);
        let is_usable = |connection: &&Connection| connection.client.is_connected() && !connection.is_suspect();
        connections.clone().find(is_usable).or(connections.next())
    }

    /// The caller drops the future when the deadline has passed.
    pub(in crate::store::redis) async fn eval(
        &self,
        script: &'static Script,
        command: EvalCommand,
        call: &ScriptCall,
        deadline: Deadline,
    ) -> Result<RawReply, Failure> {
        let Some(connection) = self.connection() else {
            return Err(Failure::Unreachable("the pool is empty".into()));
        };

        let (name, text) = script.command(command);
        let mut arguments = Vec::with_capacity(2 + call.keys.len() + call.arguments.len());
        arguments.push(Value::String(Str::from_static(text)));
        arguments.push(Value::Integer(call.keys.len() as i64));
        arguments.extend(call.keys.iter().chain(&call.arguments).cloned().map(Value::Bytes));

        let command = CustomCommand::new_static(name, ClusterHash::Random, false);
        let client = connection.client.with_options(&send_once(deadline));
        let was_connected = client.is_connected();
        // A command ends with its timeout in fred and not with its future: without the timeout, fred would write it after it
        // has reconnected.
        let frame = DetachOnDrop::new(async move { client.custom_raw(command, arguments).await });
        let mut unanswered = UnansweredCall(Some(connection));
        let reply = match frame.await {
            Ok(frame) => raw_reply(frame),
            Err(error) => match call_failure(error) {
                Failure::Unreachable(_) if !was_connected => Err(connection.connect_failure()),
                failure => Err(failure),
            },
        };
        if !matches!(reply, Err(Failure::Timeout)) {
            unanswered.0 = None;
        }
        // The server has become a replica and has kept the connection. A script may run on a replica until it writes.
        let is_of_replica = match &reply {
            Ok(reply) => reply.errors.iter().any(|error| is_of_replica(error.as_bytes())),
            Err(Failure::Refused(error)) => is_of_replica(error.as_bytes()),
            Err(_) => false,
        };
        if is_of_replica {
            connection.reconnect();
        }
        reply
    }
}

/// The address of the server, or the name of the service of Sentinel.
fn address(client: &Client) -> String {
    match client.client_config().server {
        ServerConfig::Centralized { server } => server.to_string(),
        ServerConfig::Sentinel { service_name, .. } => service_name,
        #[cfg(feature = "unix-sockets")]
        ServerConfig::Unix { path } => path.display().to_string(),
        ServerConfig::Clustered { .. } => "cluster".to_owned(),
    }
}

fn raw_reply(frame: Resp3Frame) -> Result<RawReply, Failure> {
    let text = |frame| match frame {
        Resp3Frame::BlobString { data, .. } => Ok(data),
        Resp3Frame::SimpleError { data, .. } => Err(Failure::of_call(data)),
        Resp3Frame::BlobError { data, .. } => Err(Failure::of_call(shortened_bytes(&data))),
        _ => Err(Failure::malformed_reply()),
    };
    match frame {
        Resp3Frame::Array { data, .. } => RawReply::from_texts(data.into_iter().map(text)),
        frame => RawReply::from_texts([text(frame)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_several_lines_is_an_error_reply() {
        let data = "OOM command not allowed".into();
        let reply = raw_reply(Resp3Frame::BlobError { data, attributes: None });
        assert!(
            matches!(&reply, Err(Failure::Refused(text)) if text.contains("OOM")),
            "{reply:?}"
        );
    }
}
