use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, PushInfo,
    PushKind, RedisError, Value, aio::MultiplexedConnection,
};
use tokio::{
    net::{TcpStream, lookup_host},
    sync::{Notify, watch},
    time::{Instant, sleep_until, timeout},
};

use super::{
    super::{
        PING_TIMEOUT, attempt_interval,
        connections::{ConnectionState, InTurn, ManagedConnection, successor},
    },
    connect_failure, error_text,
    topology::Sentinels,
};
use crate::{
    ConfigError,
    store::redis::{
        acl::ReplyingServer,
        backend::Deadline,
        credentials::{Authenticator, ConnectionSettings, Credentials},
        failure::{Failure, is_of_replica, shortened},
        task::{AbortOnDrop, OnDrop, run_together},
    },
};

/// The time for a new connection with its first commands, such as `HELLO`.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// A server to connect to.
pub(super) struct Endpoint {
    /// With sentinels, the settings of connections to the primary that they report.
    pub(super) server: ConnectionInfo,
    sentinels: Option<Sentinels>,
}

/// Connections to one server, which are used in turn.
pub(in crate::store::redis) struct ServerConnections {
    pub(super) endpoint: Arc<Endpoint>,
    connections: InTurn<ManagedConnection<Connection>>,
    /// Watches the sentinels, if there are any.
    _watching: Option<AbortOnDrop<()>>,
}

impl ServerConnections {
    pub(super) fn new(server: ConnectionInfo, sentinels: Option<Sentinels>, settings: &ConnectionSettings) -> Self {
        let endpoint = Arc::new(Endpoint { server, sentinels });
        let connections = (0..settings.number).map(|_| {
            let keep = |state, authenticator| keep_connected(endpoint.clone(), authenticator, state);
            ManagedConnection::open(settings.authenticator(), keep, authenticate_again)
        });
        let connections = InTurn::new(connections);
        let watched = endpoint.clone();
        let watching = async move {
            if let Some(sentinels) = &watched.sentinels {
                sentinels.watch(&watched.server).await;
            }
        };
        Self {
            connections,
            _watching: endpoint
                .sentinels
                .is_some()
                .then(|| AbortOnDrop(tokio::spawn(watching))),
            endpoint,
        }
    }

    /// Sends a command once, with `ASKING` before it if the slot is being moved to this server.
    pub(super) async fn send(&self, command: &Cmd, asking: bool) -> Result<Value, Failure> {
        self.connection()?.send(command, asking).await
    }

    pub(super) fn connection(&self) -> Result<Connection, Failure> {
        self.connections.connection(ManagedConnection::connected, |connection| {
            connection.health.is_suspect()
        })
    }

    /// Waits until there is a connection, or a refusal.
    pub(super) async fn connected_or_refused(&self) {
        let settled = self.connections.all.iter().map(ManagedConnection::settled);
        run_together(settled, |()| true).await;
    }
}

async fn authenticate_again(connection: Connection, credentials: Credentials) -> Result<(), String> {
    let mut command = redis::cmd("AUTH");
    command.arg(&*credentials.user).arg(&*credentials.password);
    match timeout(CONNECT_TIMEOUT, connection.send(&command, false)).await {
        Ok(Ok(Value::ServerError(error))) => Err(error_text(error.code(), error.details())),
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) | Err(_) => Err("Redis does not reply".to_owned()),
    }
}

/// Replaces the connection whenever it is lost, until the managed one is dropped.
async fn keep_connected(
    endpoint: Arc<Endpoint>,
    authenticator: Option<Arc<Authenticator>>,
    state: watch::Sender<ConnectionState<Connection>>,
) {
    let attempts = Attempts::default();
    loop {
        let started = Instant::now();
        let connecting = endpoint.connect(authenticator.as_deref(), &attempts);
        let connected = timeout(CONNECT_TIMEOUT, connecting).await;
        match connected.unwrap_or_else(|_| Err(connect_failure(&io::Error::from(io::ErrorKind::TimedOut).into()))) {
            Ok(connection) => {
                let mut connected = Some(connection);
                while let Some(connection) = connected {
                    state.send_replace(ConnectionState::Connected(connection.clone()));
                    connected = endpoint.successor(connection, authenticator.as_deref()).await;
                }
                state.send_replace(ConnectionState::Connecting);
            }
            Err(failure) => {
                state.send_replace(ConnectionState::Failed(failure));
            }
        }
        sleep_until(started + attempt_interval()).await;
    }
}

/// Whether the last attempt to connect to a server has failed.
#[derive(Default)]
pub(super) struct Attempts {
    has_failed: AtomicBool,
}

impl Attempts {
    /// Connects. With TLS, redis-rs reads all certificates of the system on this thread before it connects, so after a failure it first
    /// has to be shown that the server listens.
    pub(super) async fn connect<T, F>(
        &self,
        server: ConnectionInfo,
        connect: impl FnOnce(ConnectionInfo) -> F,
    ) -> Result<T, RedisError>
    where
        F: Future<Output = Result<T, RedisError>>,
    {
        // The attempt may be dropped.
        let has_failed = self.has_failed.swap(true, Ordering::Relaxed);
        if has_failed && let ConnectionAddr::TcpTls { host, port, .. } = server.addr() {
            find_listening(lookup_host((&**host, *port)).await?).await?;
        }
        let connected = connect(server).await?;
        self.has_failed.store(false, Ordering::Relaxed);
        Ok(connected)
    }
}

/// Waits until one of these addresses accepts a connection, all of which redis-rs tries at once: the first may not answer.
async fn find_listening(addresses: impl Iterator<Item = SocketAddr>) -> io::Result<()> {
    let tried = run_together(addresses.map(TcpStream::connect), Result::is_ok).await;
    let accepted = tried.into_iter().reduce(Result::or);
    accepted
        .unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
        .map(drop)
}

#[derive(Clone)]
pub(super) struct Connection {
    server: Arc<ConnectionAddr>,
    redis: MultiplexedConnection,
    health: Arc<ConnectionHealth>,
}

#[derive(Default)]
struct ConnectionHealth {
    /// Whether a command had no reply, until `PING` has one.
    suspect: AtomicBool,
    closed: AtomicBool,
    /// It is suspect or closed.
    troubled: Notify,
}

impl ConnectionHealth {
    fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Acquire)
    }

    fn suspect(&self) {
        self.suspect.store(true, Ordering::Release);
        self.troubled.notify_one();
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.troubled.notify_one();
    }
}

impl Connection {
    async fn send(mut self, command: &Cmd, asking: bool) -> Result<Value, Failure> {
        // It is dropped without a reply when its deadline has passed.
        let unanswered = OnDrop::new(|| self.health.suspect());
        let reply = match asking {
            false => self.redis.send_packed_command(command).await,
            true => {
                // In one write, so that no other command comes between the two.
                let mut both = redis::pipe();
                both.cmd("ASKING").add_command(command.clone());
                let replies = self.redis.send_packed_commands(&both, 0, 2).await;
                replies.map(|mut replies| {
                    let reply = replies.pop().unwrap_or_default();
                    match replies.pop() {
                        Some(Value::ServerError(refused)) if refused.code() == "NOPERM" => Value::ServerError(refused),
                        _ => reply,
                    }
                })
            }
        };
        let value = reply.map_err(|error| Failure::Unreachable(shortened(error).into()))?;
        unanswered.disarm();
        // The server has become a replica and has kept the connection.
        if reports_replica(&value) {
            self.health.close();
        }
        Ok(value)
    }

    /// Returns when the connection is lost, or `PING` has no reply after a command without a reply.
    async fn lost(mut self) {
        let ping = redis::cmd("PING");
        loop {
            self.health.troubled.notified().await;
            if self.health.closed.load(Ordering::Acquire) {
                return;
            }
            // An error will do, such as that this user has no permission. Another reply is that of an earlier command, and each command
            // has that of another.
            let pong = self.redis.send_packed_command(&ping);
            let pong = Deadline::new(PING_TIMEOUT).wait(pong).await;
            if !matches!(pong, Some(Ok(Value::SimpleString(_) | Value::ServerError(_)))) {
                return;
            }
            self.health.suspect.store(false, Ordering::Release);
        }
    }
}

/// Whether the reply is the error of a replica, or one of the script with such an error: a script may run on a replica until it
/// writes.
fn reports_replica(reply: &Value) -> bool {
    match reply {
        Value::ServerError(error) => is_of_replica(error_text(error.code(), error.details()).as_bytes()),
        Value::Array(texts) => {
            let mut errors = texts.iter().skip(1);
            errors.any(|text| matches!(text, Value::BulkString(error) if is_of_replica(error)))
        }
        _ => false,
    }
}

impl Endpoint {
    pub(super) async fn latest_server(&self) -> Result<ConnectionInfo, Failure> {
        let Some(sentinels) = &self.sentinels else {
            return Ok(self.server.clone());
        };
        let primary = sentinels.primary(&self.server).await;
        primary.map_err(|error| connect_failure(&error).of(ReplyingServer::Sentinel))
    }

    async fn connect(&self, authenticator: Option<&Authenticator>, attempts: &Attempts) -> Result<Connection, Failure> {
        let connect = |server| attempts.connect(server, Self::connect_to);
        authenticated(self.latest_server().await?, authenticator, connect).await
    }

    /// Waits until the connection is lost, or one to another primary is made.
    async fn successor(&self, connection: Connection, authenticator: Option<&Authenticator>) -> Option<Connection> {
        let agreed = self.sentinels.as_ref().map(Sentinels::agreed);
        let attempts = &Attempts::default();
        let connect = |primary| async move {
            let primary = self.server.clone().set_addr(primary);
            let connect = |server| attempts.connect(server, Self::connect_to);
            let connecting = authenticated(primary, authenticator, connect);
            timeout(CONNECT_TIMEOUT, connecting)
                .await
                .unwrap_or(Err(Failure::Timeout))
        };
        let server = connection.server.clone();
        successor(Some(&*server), connection.lost(), agreed, connect).await
    }

    async fn connect_to(server: ConnectionInfo) -> Result<Connection, RedisError> {
        let address = Arc::new(server.addr().clone());
        let health = Arc::<ConnectionHealth>::default();
        let of_push = health.clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(move |push: PushInfo| {
                if push.kind == PushKind::Disconnection {
                    of_push.close();
                }
                Ok::<(), Infallible>(())
            });
        let redis = Client::open(server)?
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        Ok(Connection {
            server: address,
            redis,
            health,
        })
    }
}

/// Connects, with credentials of the provider if there is one.
pub(super) async fn authenticated<T, Fut>(
    server: ConnectionInfo,
    authenticator: Option<&Authenticator>,
    connect: impl FnOnce(ConnectionInfo) -> Fut,
) -> Result<T, Failure>
where
    Fut: Future<Output = Result<T, RedisError>>,
{
    let of_connection = |error| connect_failure(&error);
    let Some(authenticator) = authenticator else {
        return connect(server).await.map_err(of_connection);
    };
    let credentials = authenticator
        .credentials()
        .await
        .map_err(|error| Failure::Unreachable(error.into()))?;
    let settings = server.redis_settings().clone();
    let settings = settings
        .set_username(credentials.user)
        .set_password(credentials.password);
    let connected = connect(server.set_redis_settings(settings))
        .await
        .map_err(of_connection);
    authenticator.tried(connected.as_ref().err());
    connected
}

pub(super) fn parse(url: String) -> Result<ConnectionInfo, ConfigError> {
    url.into_connection_info()
        .map_err(|error| ConfigError::because("this Redis URL cannot be used", error))
}

/// The same server, with `TCP_NODELAY` and RESP3, in which redis-rs reports a lost connection at once.
pub(super) fn for_limiter(server: &ConnectionInfo) -> ConnectionInfo {
    let server = without_library_name(server);
    let settings = server.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let tcp = server.tcp_settings().clone().set_nodelay(true);
    server.set_redis_settings(settings).set_tcp_settings(tcp)
}

/// The same server, without `CLIENT SETINFO`, for which the user may have no permission.
pub(super) fn without_library_name(server: &ConnectionInfo) -> ConnectionInfo {
    let settings = server.redis_settings().clone().set_skip_set_lib_name();
    server.clone().set_redis_settings(settings)
}

/// The server at an address, with the settings of the template.
pub(super) fn at(template: &ConnectionInfo, host: String, port: u16) -> ConnectionInfo {
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

#[cfg(test)]
#[cfg(feature = "tls")]
mod tests {
    use std::future::ready;

    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    #[tokio::test]
    async fn after_a_failure_a_server_with_tls_is_connected_to_only_if_it_listens() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound port");
        let is_tried = async |attempts: &Attempts, scheme: &str| {
            let (server, mut is_tried) = (parse(format!("{scheme}://{address}")), false);
            let connect = |_| {
                is_tried = true;
                ready(Err::<(), _>(RedisError::from(io::Error::from(
                    io::ErrorKind::InvalidData,
                ))))
            };
            let connected = attempts.connect(server.expect("a good URL"), connect).await;
            assert!(connected.is_err());
            is_tried
        };
        let (with_tls, without) = (Attempts::default(), Attempts::default());
        for _ in 0..2 {
            assert!(is_tried(&with_tls, "rediss").await && is_tried(&without, "redis").await);
        }
        drop(listener);
        assert!(!is_tried(&with_tls, "rediss").await && is_tried(&without, "redis").await);
        assert!(is_tried(&Attempts::default(), "rediss").await, "the first attempt");
    }

    #[tokio::test]
    async fn a_server_listens_where_the_first_of_its_addresses_does_not_answer() {
        let silent = TcpSocket::new_v4().expect("a socket");
        silent
            .bind("127.0.0.1:0".parse().expect("an address"))
            .expect("a free port");
        let unanswered = silent.local_addr().expect("a bound port");
        let _silent = silent.listen(1).expect("it listens");
        // Connections that the server does not accept, until it does not answer another one.
        let mut waiting = Vec::new();
        while let Ok(connected) = timeout(CONNECT_TIMEOUT / 4, TcpStream::connect(unanswered)).await {
            waiting.push(connected);
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let answered = listener.local_addr().expect("a bound port");
        let found = timeout(CONNECT_TIMEOUT, find_listening([unanswered, answered].into_iter())).await;
        assert!(found.expect("it does not wait for the first").is_ok());
        let dropped = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let refused = dropped.local_addr().expect("a bound port");
        drop(dropped);
        for both in [[answered, refused], [refused, answered]] {
            assert!(find_listening(both.into_iter()).await.is_ok());
        }
        drop(listener);
        assert!(find_listening([answered, refused].into_iter()).await.is_err());
        assert!(find_listening([].into_iter()).await.is_err());
    }

    #[test]
    fn a_node_is_connected_to_with_the_encryption_of_the_template() {
        for (url, is_encrypted) in [("redis://a:1", false), ("rediss://a:1", true)] {
            let template = parse(url.to_owned()).expect("a good URL");
            let node = at(&template, "b".to_owned(), 2);
            assert_eq!(node.addr().to_string(), "b:2");
            assert_eq!(matches!(node.addr(), ConnectionAddr::TcpTls { .. }), is_encrypted);
        }
    }
}
