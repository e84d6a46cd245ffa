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
        ClusterHash, CustomCommand, Resp3Frame, Value,
        config::{Server, ServerConfig},
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

#[cfg(feature = "tls")]
use super::settings::read_authorities;
use super::{
    super::{
        PING_TIMEOUT,
        connections::{ConnectionState, ManagedConnection, successor},
    },
    CONNECT_TIMEOUT, call_failure, connect_failure,
    settings::{like, rotate_sentinels, send_once},
};
use crate::{
    store::redis::{
        backend::Deadline,
        credentials::{Authenticator, Credentials},
        failure::{Failure, shortened},
        task::{AbortOnDrop, OnDrop, spawn_on},
    },
    sync::lock,
};

/// The time for a reply to `AUTH` on a connection that is authenticated again.
const AUTH_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause before the authorities of the system, which are hundreds of certificates, are read again.
#[cfg(feature = "tls")]
const AUTHORITIES_PAUSE: Duration = Duration::from_secs(2);
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

/// A client and the task that has its connection, unless the client is one of the application. fred reports a lost connection as
/// connected.
type ConnectedClient = (Client, Option<AbortHandle>);

/// The task of fred that has a connection, and ends with it.
pub(super) type RoutingTask = AbortOnDrop<Result<(), Error>>;

/// The primary on which the sentinels agreed last.
pub(super) type AgreedPrimary = watch::Receiver<Option<Server>>;

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
    /// A client that the store keeps connected, with Sentinel to the primary on which the sentinels agree.
    pub(super) fn open(
        client: Client,
        agreed: Option<AgreedPrimary>,
        authenticator: Option<Arc<Authenticator>>,
        pause: fn() -> Duration,
    ) -> Self {
        let keep = move |state, authenticator| keep_connected(client, agreed, state, authenticator, pause);
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
            Keeper::Store(managed) => match managed.connected()? {
                // Its keeper is about to notice that. fred would keep what is sent, and never reply.
                (_, Some(routing)) if routing.is_finished() => Err(None),
                connected => Ok(connected),
            },
            Keeper::Application(client, _) if client.is_connected() => Ok((client.clone(), None)),
            Keeper::Application(_, errors) => Err(lock(errors).latest().map(connect_failure)),
        }
    }

    /// Sends `PING` after a call without a reply, and reconnects if that has no reply either.
    pub(super) fn check(&self) {
        self.spawn_once(|client, routing| async move {
            let (deadline, pong) = (Deadline::new(PING_TIMEOUT), ping(&client));
            // An error will do, such as that this user has no permission, and so does that of a connection that is lost. Another reply is
            // that of an earlier command, and each command has that of another. Without a reply, the commands that wait for the
            // connection are dropped: they must not be sent later.
            let is_pong = |reply: &Resp3Frame| {
                use Resp3Frame::{BlobError, SimpleError, SimpleString};
                matches!(reply, SimpleString { .. } | SimpleError { .. } | BlobError { .. })
            };
            let replied = deadline.wait(pong).await;
            if !replied.is_some_and(|reply| reply.as_ref().map_or(true, is_pong)) {
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
        task: impl FnOnce(Client, Option<AbortHandle>) -> F + Send + 'static,
    ) {
        let Ok((client, routing)) = self.connected() else {
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
async fn reconnect(client: &Client, routing: Option<AbortHandle>) {
    match routing {
        Some(routing) => routing.abort(),
        None => {
            let _ = timeout(PING_TIMEOUT, client.force_reconnection()).await;
        }
    }
}

/// A client that is connected.
pub(super) struct Connected {
    pub(super) client: Client,
    server: Option<Server>,
    pub(super) routing: RoutingTask,
}

/// Connects a client. Without the task of its connection, fred would keep what it connects.
pub(super) async fn connect(client: Client) -> Result<Connected, Error> {
    let mut connected = client.reconnect_rx();
    let mut routing = AbortOnDrop(client.connect());
    let server = while_running(&mut routing, connected.recv()).await?.ok();
    Ok(Connected {
        client,
        server,
        routing,
    })
}

/// Waits for a future, or for the end of the connection.
pub(super) async fn while_running<T>(routing: &mut RoutingTask, future: impl Future<Output = T>) -> Result<T, Error> {
    let mut future = pin!(future);
    let ended = poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Ok(output)),
        Poll::Pending => Pin::new(&mut routing.0).poll(cx).map(Err),
    });
    ended.await.map_err(|ended| match ended {
        Ok(Err(error)) => error,
        Ok(Ok(())) | Err(_) => Error::new(ErrorKind::Canceled, "the connection was lost"),
    })
}

/// Keeps a client connected, until the connection is dropped: the first attempt is made at once.
async fn keep_connected(
    mut client: Client,
    agreed: Option<AgreedPrimary>,
    state: watch::Sender<ConnectionState<ConnectedClient>>,
    authenticator: Option<Arc<Authenticator>>,
    pause: fn() -> Duration,
) {
    let tried = |failure: Option<&Failure>| {
        if let Some(authenticator) = &authenticator {
            authenticator.tried(failure);
        }
    };
    let publish = |Connected { client, routing, .. }: &Connected| {
        let connected = (client.clone(), Some(routing.0.abort_handle()));
        state.send_replace(ConnectionState::Connected(connected));
    };
    #[cfg(feature = "tls")]
    let mut read_at = None::<Instant>;
    loop {
        let started = Instant::now();
        let mut config = client.client_config();
        match connect(client.clone()).await {
            Ok(mut connected) => {
                tried(None);
                publish(&connected);
                loop {
                    let Connected { server, routing, .. } = &mut connected;
                    let lost = async { drop((&mut routing.0).await) };
                    let connect = |primary| connect_to_primary(&client, primary);
                    let Some(next) = successor(server.as_ref(), lost, agreed.clone(), connect).await else {
                        break;
                    };
                    publish(&next);
                    connected = next;
                }
                state.send_replace(ConnectionState::Connecting);
            }
            Err(error) => {
                let failure = connect_failure(&error);
                tried(Some(&failure));
                state.send_replace(ConnectionState::Failed(failure.clone()));
                #[cfg(feature = "tls")]
                if (failure.is_of_certificate() || *error.kind() == ErrorKind::Sentinel)
                    && read_at.is_none_or(|at| at.elapsed() >= AUTHORITIES_PAUSE)
                {
                    read_authorities(&mut config).await;
                    read_at = Some(Instant::now());
                }
                if matches!(error.kind(), ErrorKind::Config | ErrorKind::Url) {
                    return;
                }
            }
        }
        // A client that was connected would ask the sentinels that the last one reported instead of those of the URL.
        rotate_sentinels(&mut config, 1);
        client = like(&client, config);
        sleep_until(started + pause()).await;
    }
}

/// Connects to the primary that the sentinels report, if it is one.
async fn connect_to_primary(client: &Client, primary: Server) -> Result<Connected, Failure> {
    let mut config = client.client_config();
    config.server = ServerConfig::Centralized { server: primary };
    let connecting = async |config| match timeout(CONNECT_TIMEOUT, connect(like(client, config))).await {
        Ok(connected) => connected.map_err(|error| connect_failure(&error)),
        Err(_) => Err(Failure::Timeout),
    };
    let connected = match connecting(config.clone()).await {
        #[cfg(feature = "tls")]
        Err(failure) if failure.is_of_certificate() => {
            read_authorities(&mut config).await;
            connecting(config).await?
        }
        connected => connected?,
    };
    let deadline = Deadline::new(PING_TIMEOUT);
    let command = CustomCommand::new_static("ROLE", ClusterHash::Random, false);
    let role = connected.client.with_options(&send_once(deadline));
    let role = deadline.wait(role.custom(command, Vec::<Value>::new())).await;
    let role: Vec<Value> = role.ok_or(Failure::Timeout)?.map_err(call_failure)?;
    match role.first().and_then(Value::as_bytes) {
        Some(b"master") => Ok(connected),
        Some(_) | None => Err(Failure::Unreachable("the server is not a primary".into())),
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
