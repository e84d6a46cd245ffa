use std::{
    fmt,
    future::poll_fn,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use fred::{
    clients::Client,
    error::{Error, ErrorKind},
    interfaces::{ClientLike, EventInterface},
    types::{
        Builder, ClusterHash, CustomCommand, Resp3Frame, Value,
        config::{Config, CredentialProvider, Options, Server, TcpConfig, UnresponsiveConfig},
    },
};
use tokio::{
    sync::broadcast::{self, error::TryRecvError},
    task::AbortHandle,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    super::{PING_TIMEOUT, attempt_interval},
    connect_failure,
};
use crate::{
    ConfigError,
    store::redis::{
        backend::Deadline,
        credentials::{Authenticator, Credentials},
        failure::{Failure, shortened},
        task::{AbortOnDrop, OnDrop, try_spawn},
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
    pub(super) client: Client,
    /// If the store keeps the client connected.
    routing: Option<RoutingTask>,
    /// Authenticates the connection again, if the credentials are those of a provider.
    _authenticating: Option<AbortOnDrop<()>>,
    suspect: Arc<AtomicBool>,
    errors: Mutex<ConnectErrors>,
}

/// The errors of a client while it connects.
struct ConnectErrors {
    receiver: broadcast::Receiver<(Error, Option<Server>)>,
    latest: Option<Error>,
}

/// The task of fred that has the connection of a client. It ends with the connection, and is started again.
struct RoutingTask {
    state: Arc<RoutingState>,
    keeper: AbortOnDrop<()>,
}

#[derive(Default)]
struct RoutingState {
    current: Mutex<Option<AbortHandle>>,
    /// fred reports a lost connection as connected.
    is_connected: AtomicBool,
}

impl Connection {
    /// A client that the store keeps connected.
    pub(super) fn open(client: Client, authenticator: Option<Arc<Authenticator>>) -> Self {
        // It subscribes to the errors before the client connects, since each is sent once.
        let connection = Self::new(client);
        let state = Arc::<RoutingState>::default();
        let keeper = tokio::spawn(keep_connected(connection.client.clone(), state.clone()));
        let authenticating = authenticator.map(|authenticator| {
            let (client, state) = (connection.client.clone(), state.clone());
            authenticator
                .keep_authenticated(move |credentials| authenticate_again(client.clone(), state.clone(), credentials))
        });
        Self {
            _authenticating: authenticating,
            routing: Some(RoutingTask {
                state,
                keeper: AbortOnDrop(keeper),
            }),
            ..connection
        }
    }

    /// A client that the application keeps connected.
    pub(super) fn new(client: Client) -> Self {
        Self {
            routing: None,
            _authenticating: None,
            suspect: Arc::default(),
            errors: Mutex::new(ConnectErrors {
                receiver: client.error_rx(),
                latest: None,
            }),
            client,
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        match &self.routing {
            Some(routing) => routing.state.is_connected.load(Ordering::Acquire),
            None => self.client.is_connected(),
        }
    }

    /// Whether it is being checked or set up again.
    pub(super) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Acquire)
    }

    /// Why there is no connection, from the latest attempt.
    pub(super) fn connect_failure(&self) -> Failure {
        let mut errors = lock(&self.errors);
        loop {
            match errors.receiver.try_recv() {
                Ok((error, _)) => errors.latest = Some(error),
                Err(TryRecvError::Lagged(_)) => {}
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        let has_ended = |routing: &RoutingTask| routing.keeper.0.is_finished();
        match errors.latest.as_ref().map(connect_failure) {
            Some(failure @ Failure::Forbidden(_)) => failure,
            _ if self.routing.as_ref().is_some_and(has_ended) => Failure::ended_runtime(),
            failure => failure.unwrap_or_else(|| Failure::Unreachable("still connecting".into())),
        }
    }

    /// Sends `PING` after a call without a reply, and reconnects if that has no reply either.
    pub(super) fn check(&self) {
        self.spawn_once(|client, routing| async move {
            let (deadline, pong) = (Deadline::new(PING_TIMEOUT), ping(&client));
            // Any reply will do, also that this user has no permission, and so does the error of a connection that is lost.
            // Without one, the commands that wait for the connection are dropped: they must not be sent later.
            if deadline.wait(pong).await.is_none() {
                reconnect(&client, routing).await;
            }
        });
    }

    pub(super) fn reconnect(&self) {
        self.spawn_once(|client, routing| async move { reconnect(&client, routing).await });
    }

    /// Spawns a task unless one runs.
    fn spawn_once<F: Future<Output = ()> + Send>(
        &self,
        task: impl FnOnce(Client, Option<Arc<RoutingState>>) -> F + Send + 'static,
    ) {
        if !self.is_connected() || self.suspect.swap(true, Ordering::AcqRel) {
            return;
        }
        let (client, suspect) = (self.client.clone(), self.suspect.clone());
        // It ends with the task, which may end early: with its runtime.
        let suspected = OnDrop::new(move || suspect.store(false, Ordering::Release));
        let routing = self.routing.as_ref().map(|routing| routing.state.clone());
        try_spawn(async move {
            task(client, routing).await;
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
async fn reconnect(client: &Client, routing: Option<Arc<RoutingState>>) {
    let Some(routing) = routing else {
        let _ = timeout(PING_TIMEOUT, client.force_reconnection()).await;
        return;
    };
    if let Some(current) = &*lock(&routing.current) {
        current.abort();
    }
}

/// Keeps a client connected until it is dropped: the first attempt is made at once.
async fn keep_connected(client: Client, state: Arc<RoutingState>) {
    let is_connected = |is| state.is_connected.store(is, Ordering::Release);
    let _ended = OnDrop::new(|| is_connected(false));
    loop {
        let started = Instant::now();
        let mut connected = client.reconnect_rx();
        let mut routing = AbortOnDrop(client.connect());
        *lock(&state.current) = Some(routing.0.abort_handle());

        let mut connected = pin!(connected.recv());
        let ended = poll_fn(|cx| {
            if !state.is_connected.load(Ordering::Acquire) && connected.as_mut().poll(cx).is_ready() {
                is_connected(true);
            }
            Pin::new(&mut routing.0).poll(cx)
        })
        .await;
        is_connected(false);
        match ended {
            Ok(Ok(())) => return,
            Ok(Err(error)) if matches!(error.kind(), ErrorKind::Config | ErrorKind::Url) => return,
            Ok(Err(_)) | Err(_) => sleep_until(started + attempt_interval()).await,
        }
    }
}

/// Authenticates the connection, if there is one. The next one is authenticated when it is made.
async fn authenticate_again(client: Client, state: Arc<RoutingState>, credentials: Credentials) -> Result<(), String> {
    if !state.is_connected.load(Ordering::Acquire) {
        return Ok(());
    }
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

/// The provider of the credentials of a client, if they are not part of the URL.
pub(super) fn provider(authenticator: Option<&Arc<Authenticator>>) -> Option<Arc<dyn CredentialProvider>> {
    Some(Arc::new(Provider(authenticator?.clone())))
}

struct Provider(Arc<Authenticator>);

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider").finish_non_exhaustive()
    }
}

type Fetched<'a> = Pin<Box<dyn Future<Output = Result<(Option<String>, Option<String>), Error>> + Send + 'a>>;

impl CredentialProvider for Provider {
    fn fetch<'a, 'b, 'c>(&'a self, _: Option<&'b Server>) -> Fetched<'c>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async {
            let credentials = self.0.credentials().await;
            // fred connects again after an error of this kind.
            let credentials = credentials.map_err(|error| Error::new(ErrorKind::IO, error))?;
            self.0.used(); // it is connected
            Ok((Some(credentials.user.into()), Some(credentials.password.into())))
        })
    }
}

/// Builds a client for a subscription. It ends with its connection.
pub(super) fn subscriber(config: Config) -> Result<Client, Error> {
    Builder::from_config(config)
        .with_connection_config(|connection| {
            connection.connection_timeout = Duration::from_secs(1);
            connection.internal_command_timeout = Duration::from_secs(1);
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
