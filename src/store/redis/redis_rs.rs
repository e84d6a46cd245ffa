mod cluster;
mod node;
mod sentinel;

use redis::{Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, Value};

use self::{
    cluster::Cluster,
    node::{Dial, Node},
    sentinel::Sentinels,
};
use super::{
    link::Failure,
    script::{Call, Program, RawReply, Script},
    url::{Topology, Url},
};
use crate::ConfigError;

/// Talks to Redis through redis-rs.
pub(super) struct RedisRs {
    server: Server,
}

enum Server {
    One(Node),
    Cluster(Cluster),
}

impl RedisRs {
    pub(super) fn connect(url: &Url<'_>, connections: usize) -> Result<Self, ConfigError> {
        let dial = match url.topology() {
            Topology::Server => Dial::Server(prepared(&parsed(url.plain())?)),
            Topology::Sentinel { service, .. } => {
                let sentinels: Vec<_> = url.nodes().map(parsed).collect::<Result<_, _>>()?;
                let template = prepared(&parsed(url.plain())?);
                Dial::Primary(Sentinels::new(
                    sentinels.iter().map(without_name).collect(),
                    service,
                    template,
                ))
            }
            Topology::Cluster => {
                let nodes = url.nodes().map(parsed).collect::<Result<Vec<_>, _>>()?;
                return Self::cluster(&nodes, connections);
            }
        };
        Ok(Self {
            server: Server::One(Node::new(dial, connections)),
        })
    }

    pub(super) fn from_client(client: &redis::Client, connections: usize) -> Self {
        let server = prepared(client.get_connection_info());
        Self {
            server: Server::One(Node::new(Dial::Server(server), connections)),
        }
    }

    /// A cluster, of which these nodes are known.
    pub(super) fn cluster(nodes: &[ConnectionInfo], connections: usize) -> Result<Self, ConfigError> {
        let seeds = nodes.iter().map(|node| match node.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Ok((host.clone(), *port)),
            _ => Err(ConfigError::new("a cluster cannot be reached through a Unix socket")),
        });
        let seeds = seeds.collect::<Result<Vec<_>, _>>()?;
        let Some(template) = nodes.first() else {
            return Err(ConfigError::new("a cluster needs at least one node to begin with"));
        };
        Ok(Self {
            server: Server::Cluster(Cluster::new(seeds, prepared(template), connections)),
        })
    }

    pub(super) fn hash_tags(&self) -> Result<Vec<String>, Failure> {
        match &self.server {
            Server::One(_) => Ok(vec!["0".to_owned()]),
            Server::Cluster(cluster) => cluster.hash_tags(),
        }
    }

    pub(super) async fn run(
        &self,
        script: &'static Script,
        program: Program,
        call: &Call,
    ) -> Result<RawReply, Failure> {
        let command = command(script, program, call);
        let answer = match &self.server {
            Server::One(node) => node.send(&command, false).await?,
            Server::Cluster(cluster) => {
                let key = call.keys.first().map_or(&b""[..], |key| key);
                cluster.send(key, &command).await?
            }
        };
        read(answer)
    }

    pub(super) fn is_clustered(&self) -> bool {
        matches!(self.server, Server::Cluster(_))
    }
}

fn command(script: &'static Script, program: Program, call: &Call) -> Cmd {
    let (name, text) = match program {
        Program::Known => ("EVALSHA", script.sha1.as_str()),
        Program::Taught => ("EVAL", script.source),
    };
    let texts = || call.keys.iter().chain(&call.arguments);
    let bytes = texts().map(bytes::Bytes::len).sum::<usize>();
    let mut command = Cmd::with_capacity(3 + texts().count(), text.len() + bytes + 8);
    command.arg(name).arg(text).arg(call.keys.len());
    for text in texts() {
        command.arg(&text[..]);
    }
    command
}

fn read(answer: Value) -> Result<RawReply, Failure> {
    let text = |answer| match answer {
        Value::BulkString(text) => Ok(text.into()),
        Value::ServerError(error) => Err(Failure::refused(in_full(error.code(), error.details()))),
        _ => Err(Failure::Protocol("the reply of Redis holds something that is no text")),
    };
    match answer {
        Value::Array(answers) => RawReply::from_texts(answers.into_iter().map(text)),
        answer => RawReply::from_texts([text(answer)]),
    }
}

/// An error of Redis as it replied.
fn in_full(code: &str, details: Option<&str>) -> String {
    match details {
        Some(details) => format!("{code} {details}"),
        None => code.to_owned(),
    }
}

fn parsed(url: String) -> Result<ConnectionInfo, ConfigError> {
    url.into_connection_info()
        .map_err(|error| ConfigError::because("this Redis URL cannot be used", error))
}

/// The same server, with small writes at once, and in the protocol that tells of a lost connection.
fn prepared(server: &ConnectionInfo) -> ConnectionInfo {
    let server = without_name(server);
    let settings = server.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let tcp = server.tcp_settings().clone().set_nodelay(true);
    server.set_redis_settings(settings).set_tcp_settings(tcp)
}

/// The same server, which is not told what it is talking to: the user may not be allowed to say it.
fn without_name(server: &ConnectionInfo) -> ConnectionInfo {
    let settings = server.redis_settings().clone().set_skip_set_lib_name();
    server.clone().set_redis_settings(settings)
}

/// The server at this address, in all else like the template.
fn at(template: &ConnectionInfo, host: String, port: u16) -> ConnectionInfo {
    let address = match template.addr() {
        ConnectionAddr::TcpTls {
            insecure, tls_params, ..
        } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => ConnectionAddr::Tcp(host, port),
    };
    template.clone().set_addr(address)
}
