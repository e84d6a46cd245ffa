use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use fred::{
    clients::Client,
    error::{Error, ErrorKind},
    interfaces::{ClientLike, EventInterface},
    types::{
        Builder, ClusterHash, CustomCommand, Resp3Frame, Value,
        config::{Config, Options, Server, ServerConfig, TcpConfig, UnresponsiveConfig},
    },
};
use tokio::{
    runtime::Handle,
    sync::{
        broadcast::{self, error::TryRecvError},
        watch,
    },
    task::AbortHandle,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    super::{
        PING_TIMEOUT,
        connections::{ConnectionState, ManagedConnection},
    },
    connect_failure,
};
use crate::{
    ConfigError,
    store::redis::{
        backend::Deadline,
        credentials::{Authenticator, Credentials},
        failure::{Failure, shortened},
        task::{AbortOnDrop, OnDrop, spawn_on},
        url::FRED_IN_A_CLUSTER,
    },
    sync::lock,
};

/// The time for a reply to `AUTH` on a connection that is authenticated again.
const AUTH_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause before a connection is checked again.
const CHECK_PAUSE: Duration = Duration::from_millis(200);

/// A client with one connection, which is set up again when it no longer replies.
///
/// The check of fred goes by the time of the last write, so it does not fire while calls are sent. A reconnect policy of fred
/// pauses before its first attempt, and does not pause where connections are accepted and closed.
pub(super) struct Connection {
    keeper: Keeper,
    suspect: Arc<AtomicBool>,
    /// That of the store: the one of a caller may be blocked, or end.
    runtime: Handle,
}

/// What keeps a client connected.
enum Keeper {
    Store(ManagedConnection<ConnectedClient>),
    Application(Client, Mutex<ConnectErrors>),
}

/// A client and its connection, unless the client is one of the application. fred reports a lost connection as connected.
type ConnectedClient = (Client, Option<Route>);

#[derive(Clone)]
pub(super) struct Route {
    /// The task of fred that has the connection, and ends with it.
    task: AbortHandle,
    server: Option<Server>,
}

/// The errors of a client while it connects.
struct ConnectErrors {
    receiver: broadcast::Receiver<(Error, Option<Server>)>,
    latest: Option<Error>,
}

impl ConnectErrors {
    fn latest(&mut self) -> Option<&Error> {
        loop {
            match self.receiver.try_recv() {
                Ok((error, _)) => self.latest = Some(error),
                Err(TryRecvError::Lagged(_)) => {}
                Err(TryRecvError::Empty | TryRecvError::Closed) => return self.latest.as_ref(),
            }
        }
    }

    /// Once it is connected, they are no reason for a later failure.
    fn forget(&mut self) {
        self.latest();
        self.latest = None;
    }
}

impl Connection {
    /// A client that the store keeps connected.
    pub(super) fn open(client: Client, authenticator: Option<Arc<Authenticator>>, pause: fn() -> Duration) -> Self {
        let keep = move |state, authenticator| keep_connected(client, state, authenticator, pause);
        Self::new(Keeper::Store(ManagedConnection::open(
            authenticator,
            keep,
            authenticate_again,
        )))
    }

    /// A client that the application keeps connected.
    pub(super) fn of_application(client: Client) -> Self {
        let errors = ConnectErrors {
            receiver: client.error_rx(),
            latest: None,
        };
        Self::new(Keeper::Application(client, Mutex::new(errors)))
    }

    fn new(keeper: Keeper) -> Self {
        Self {
            keeper,
            suspect: Arc::default(),
            runtime: Handle::current(),
        }
    }

    /// Whether it is being checked or set up again.
    pub(super) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Acquire)
    }

    /// The client if it is connected, or why it is not, from the latest attempt, if one has ended.
    pub(super) fn connected(&self) -> Result<ConnectedClient, Option<Failure>> {
        match &self.keeper {
            Keeper::Store(managed) => managed.connected(),
            Keeper::Application(client, _) if client.is_connected() => Ok((client.clone(), None)),
            Keeper::Application(_, errors) => Err(lock(errors).latest().map(connect_failure)),
        }
    }

    /// Sends `PING` after a call without a reply, and reconnects if that has no reply either.
    pub(super) fn check(&self) {
        self.spawn_once(|client, route| async move {
            let (deadline, pong) = (Deadline::new(PING_TIMEOUT), ping(&client));
            // Any reply will do, also that this user has no permission, and so does the error of a connection that is lost.
            // Without one, the commands that wait for the connection are dropped: they must not be sent later.
            if deadline.wait(pong).await.is_none() {
                reconnect(&client, route).await;
            }
        });
    }

    pub(super) fn reconnect(&self) {
        self.spawn_once(|client, route| async move { reconnect(&client, route).await });
    }

    /// Connects again if the server is not this primary.
    pub(super) fn follow(&self, primary: &Server) {
        if let Ok((
            _,
            Some(Route {
                server: Some(server), ..
            }),
        )) = self.connected()
            && server != *primary
        {
            self.reconnect();
        }
    }

    /// Spawns a task unless one runs.
    fn spawn_once<F: Future<Output = ()> + Send>(
        &self,
        task: impl FnOnce(Client, Option<Route>) -> F + Send + 'static,
    ) {
        let Ok((client, route)) = self.connected() else {
            return;
        };
        if self.suspect.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Keeper::Application(_, errors) = &self.keeper {
            lock(errors).forget();
        }
        let suspect = self.suspect.clone();
        // It ends with the task, which may end early: with its runtime.
        let suspected = OnDrop::new(move || suspect.store(false, Ordering::Release));
        spawn_on(&self.runtime, async move {
            task(client, route).await;
            sleep(CHECK_PAUSE).await;
            drop(suspected);
        });
    }
}

/// Sends `PING` once.
pub(super) async fn ping(client: &Client) -> Result<Resp3Frame, Error> {
    let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
    let client = client.with_options(&send_once(Deadline::new(PING_TIMEOUT)));
    client.custom_raw(ping, Vec::<Value>::new()).await
}

/// Sets up a connection again. While the routing task of fred waits to write, it executes no command, such as one to reconnect, so
/// it is aborted, unless it is one of the application. fred logs a warning for each.
async fn reconnect(client: &Client, route: Option<Route>) {
    match route {
        Some(route) => route.task.abort(),
        None => {
            let _ = timeout(PING_TIMEOUT, client.force_reconnection()).await;
        }
    }
}

/// Keeps a client connected, until the connection is dropped: the first attempt is made at once.
async fn keep_connected(
    mut client: Client,
    state: watch::Sender<ConnectionState<ConnectedClient>>,
    authenticator: Option<Arc<Authenticator>>,
    pause: fn() -> Duration,
) {
    let tried = |failure: Option<&Failure>| {
        if let Some(authenticator) = &authenticator {
            authenticator.tried(failure);
        }
    };
    loop {
        let started = Instant::now();
        let mut connected = client.reconnect_rx();
        let mut routing = AbortOnDrop(client.connect());

        let mut connected = pin!(connected.recv());
        let mut was_connected = false;
        let ended = poll_fn(|cx| {
            if !was_connected && let Poll::Ready(server) = connected.as_mut().poll(cx) {
                was_connected = true;
                tried(None);
                let route = Route {
                    task: routing.0.abort_handle(),
                    server: server.ok(),
                };
                state.send_replace(ConnectionState::Connected((client.clone(), Some(route))));
            }
            Pin::new(&mut routing.0).poll(cx)
        })
        .await;
        state.send_replace(match &ended {
            Ok(Err(error)) if !was_connected => {
                let failure = connect_failure(error);
                tried(Some(&failure));
                ConnectionState::Failed(failure)
            }
            Ok(_) | Err(_) => ConnectionState::Connecting,
        });
        match ended {
            Ok(Ok(())) => return,
            Ok(Err(error)) if matches!(error.kind(), ErrorKind::Config | ErrorKind::Url) => return,
            Ok(Err(_)) | Err(_) => {}
        }

        // A client that was connected would ask the sentinels that the last one reported instead of those of the URL.
        let mut config = client.client_config();
        rotate_sentinels(&mut config, 1);
        client = Client::new(
            config,
            Some(client.perf_config()),
            Some(client.connection_config().clone()),
            None,
        );
        sleep_until(started + pause()).await;
    }
}

/// Changes which sentinel is asked first. fred asks no other one if that accepts the connection and does not reply, or reports a
/// server that is no longer the primary.
pub(super) fn rotate_sentinels(config: &mut Config, by: usize) {
    if let ServerConfig::Sentinel { hosts, .. } = &mut config.server {
        let by = by % hosts.len().max(1);
        hosts.rotate_left(by);
    }
}

async fn authenticate_again((client, _): ConnectedClient, credentials: Credentials) -> Result<(), String> {
    let deadline = Deadline::new(AUTH_TIMEOUT);
    let command = CustomCommand::new_static("AUTH", ClusterHash::Random, false);
    let client = client.with_options(&send_once(deadline));
    let arguments = vec![String::from(credentials.user), credentials.password.into()];
    match deadline.wait(client.custom_raw(command, arguments)).await {
        Some(Ok(Resp3Frame::SimpleError { data, .. })) => Err(shortened(data)),
        Some(Ok(_)) => Ok(()),
        Some(Err(_)) | None => Err("Redis does not reply".to_owned()),
    }
}

/// How much longer than the deadline fred may keep a command. A stall of this process for less than that is not a failure.
const MAX_STALL: Duration = Duration::from_secs(10);

/// Builds a client for a limiter. By default, a client of fred waits long, and sends a command three times.
pub(super) fn build(config: Config) -> Result<Client, Error> {
    const UNBOUNDED: usize = 0; // a bounded queue ends the routing task of fred when it is full

    Builder::from_config(config)
        .with_connection_config(|connection| {
            connection.connection_timeout = Duration::from_secs(1);
            connection.internal_command_timeout = Duration::from_secs(1);
            connection.max_command_attempts = 1;
            connection.max_redirections = 0;
            connection.max_command_buffer_len = UNBOUNDED;
            // To the check of fred, a stall of this process is a Redis that does not reply.
            connection.unresponsive = UnresponsiveConfig::default();
            connection.tcp = TcpConfig {
                nodelay: Some(true),
                ..TcpConfig::default()
            };
        })
        .build()
}

/// Refuses a client that cannot serve a limiter, and names the setting to change.
pub(super) fn check_settings(client: &Client) -> Result<(), ConfigError> {
    let connection = client.connection_config();

    if client.is_clustered() {
        return Err(ConfigError::new(format!(
            "this fred client is clustered, and {FRED_IN_A_CLUSTER}; use the URL `redis-cluster://..` with the feature \
             `cluster`"
        )));
    }
    if client.client_reconnect_policy().is_none() {
        return Err(ConfigError::new(
            "this fred client has no reconnect policy, so it ends with its first disconnect; build it with \
             `.set_policy(ReconnectPolicy::new_constant(0, 150))`",
        ));
    }
    if connection.max_command_attempts != 1 {
        return Err(ConfigError::new(
            "this fred client sends a command again after a reconnect, which would count a request twice; build it with \
             `.with_connection_config(|config| config.max_command_attempts = 1)`",
        ));
    }
    if connection.max_command_buffer_len != 0 {
        return Err(ConfigError::new(
            "this fred client has a bounded queue, which ends it for good when it is full during a disconnect; build it \
             with `.with_connection_config(|config| config.max_command_buffer_len = 0)`",
        ));
    }

    if connection.tcp.nodelay != Some(true) {
        tracing::warn!("this fred client delays small writes; set `config.tcp.nodelay = Some(true)`");
    }
    Ok(())
}

/// Options for a command that is written once, and only if there is a connection.
pub(super) fn send_once(deadline: Deadline) -> Options {
    Options {
        max_attempts: Some(1),
        fail_fast: true,
        timeout: Some(deadline.duration() + MAX_STALL),
        ..Options::default()
    }
}
