use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use fred::{
    bytes_utils::Str,
    clients::Client,
    error::{Error, ErrorKind},
    interfaces::{ClientLike, EventInterface},
    types::{
        Builder, ClusterHash, CustomCommand, Resp3Frame, Value,
        config::{Config, Options, ReconnectPolicy, Server, TcpConfig, UnresponsiveConfig},
    },
};
use tokio::{
    sync::broadcast::{self, error::TryRecvError},
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{
    link::Failure,
    patience::Patience,
    refusal::{Refusal, plain},
    script::{Call, Program, RawReply, Script},
    server::LONGEST_STALL,
    task::{AbortOnDrop, DetachOnDrop, try_spawn},
    url::FRED_IN_A_CLUSTER,
};
use crate::ConfigError;

/// Talks to Redis through fred.
pub(super) struct Fred {
    lines: Vec<Line>,
    next: AtomicUsize,
}

/// How long a client on which a request timed out may stay silent.
const SILENCE: Duration = Duration::from_millis(500);

impl Fred {
    pub(super) fn connect(url: &str, connections: usize) -> Result<Self, ConfigError> {
        let lines = (0..connections).map(|_| {
            let config =
                Config::from_url(url).map_err(|error| ConfigError::because("this Redis URL does not parse", error))?;
            let client = build(config).map_err(|error| ConfigError::because("this Redis URL cannot be used", error))?;
            Ok(Line::open(client))
        });
        lines.collect::<Result<_, _>>().map(Self::new)
    }

    pub(super) fn from_clients(clients: &[Client]) -> Result<Self, ConfigError> {
        for client in clients {
            audit(client)?;
        }
        Ok(Self::new(
            clients.iter().cloned().map(Line::of_the_application).collect(),
        ))
    }

    fn new(lines: Vec<Line>) -> Self {
        Self {
            lines,
            next: AtomicUsize::new(0),
        }
    }

    /// The next line that is connected, and answers as far as is known: fred notices late that a connection is lost.
    fn line(&self) -> Option<&Line> {
        let count = self.lines.len();
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut lines = (0..count).map(|offset| &self.lines[first.wrapping_add(offset) % count]);
        let good = |line: &&Line| line.client.is_connected() && !line.doubted.load(Ordering::Acquire);
        lines.clone().find(good).or(lines.next())
    }

    pub(super) async fn run(
        &self,
        script: &'static Script,
        program: Program,
        call: &Call,
        longest: Duration,
    ) -> Result<RawReply, Failure> {
        let Some(line) = self.line() else {
            return Err(Failure::Unreachable("the pool is empty".into()));
        };

        let (name, text) = match program {
            Program::Known => ("EVALSHA", script.sha1.as_str()),
            Program::Taught => ("EVAL", script.source),
        };
        let mut arguments = Vec::with_capacity(2 + call.keys.len() + call.arguments.len());
        arguments.push(Value::String(Str::from_static(text)));
        arguments.push(Value::Integer(call.keys.len() as i64));
        arguments.extend(call.keys.iter().chain(&call.arguments).cloned().map(Value::Bytes));

        let command = CustomCommand::new_static(name, ClusterHash::Random, false);
        let client = line.client.with_options(&once(longest));
        let was_connected = client.is_connected();
        // Only its own timeout keeps fred from writing a command later, once it is connected again.
        let frame = DetachOnDrop::new(async move { client.custom_raw(command, arguments).await });
        let mut silence = Silence(Some(line));
        let answer = match frame.await {
            Ok(frame) => read(frame),
            Err(error) => match failure(error) {
                Failure::Unreachable(_) if !was_connected => Err(line.why_not_connected()),
                failure => Err(failure),
            },
        };
        if !matches!(answer, Err(Failure::Timeout)) {
            silence.0 = None;
        }
        // It became a replica and kept the connection.
        if matches!(&answer, Err(Failure::Refused(error)) if error.starts_with("READONLY")) {
            line.renew();
        }
        answer
    }
}

/// A request without a reply yet. Dropped then, it is one on which the deadline has passed.
struct Silence<'a>(Option<&'a Line>);

impl Drop for Silence<'_> {
    fn drop(&mut self) {
        if let Some(line) = self.0 {
            line.doubt();
        }
    }
}

/// A command is written once, and only where there is a connection.
fn once(timeout: Duration) -> Options {
    Options {
        max_attempts: Some(1),
        fail_fast: true,
        timeout: Some(timeout),
        ..Options::default()
    }
}

fn read(frame: Resp3Frame) -> Result<RawReply, Failure> {
    let text = |frame| match frame {
        Resp3Frame::BlobString { data, .. } => Ok(data),
        Resp3Frame::SimpleError { data, .. } => Err(Failure::refused(data.to_string())),
        Resp3Frame::BlobError { data, .. } => Err(Failure::refused(String::from_utf8_lossy(&data).into_owned())),
        _ => Err(Failure::Protocol("the reply of Redis holds something that is no text")),
    };
    match frame {
        Resp3Frame::Array { data, .. } => RawReply::from_texts(data.into_iter().map(text)),
        frame => RawReply::from_texts([text(frame)]),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it maps an error")]
fn failure(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::Timeout => Failure::Timeout,
        ErrorKind::Canceled => Failure::Unreachable("the connection was lost".into()),
        ErrorKind::IO | ErrorKind::Routing | ErrorKind::Unknown => Failure::Unreachable(plain(error.details()).into()),
        _ => Failure::refused(error.details().to_owned()),
    }
}

/// A client as a limiter needs it: its defaults wait long, try thrice, and give up for good after a disconnect.
fn build(config: Config) -> Result<Client, Error> {
    const ATTEMPTS: u32 = 0; // without end
    const DELAY_MS: u32 = 150;
    const JITTER_MS: u32 = 100;

    let mut policy = ReconnectPolicy::new_constant(ATTEMPTS, DELAY_MS);
    policy.set_jitter(JITTER_MS);

    Builder::from_config(config)
        .set_policy(policy)
        .with_connection_config(|connection| {
            connection.connection_timeout = Duration::from_secs(1);
            connection.internal_command_timeout = Duration::from_secs(1);
            connection.max_command_attempts = 1;
            connection.max_redirections = 0;
            connection.max_command_buffer_len = 0; // a bounded queue ends fred's routing task
            // fred's own check would take a stall of this process for silence of Redis.
            connection.unresponsive = UnresponsiveConfig::default();
            connection.tcp = TcpConfig {
                nodelay: Some(true),
                ..TcpConfig::default()
            };
        })
        .build()
}

/// Refuses clients that would not serve a limiter, with the setting to change.
fn audit(client: &Client) -> Result<(), ConfigError> {
    let connection = client.connection_config();

    if client.is_clustered() {
        return Err(ConfigError::new(format!(
            "this fred client is clustered, and {FRED_IN_A_CLUSTER}; give the URL `redis-cluster://..`, with the \
             feature `redis`"
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

    #[cfg(feature = "tracing")]
    if connection.tcp.nodelay != Some(true) {
        tracing::warn!("this fred client delays small writes; set `config.tcp.nodelay = Some(true)`");
    }
    Ok(())
}

/// A client that is connected anew when it falls silent.
///
/// fred's own check looks at the time of the last write, so it sees nothing while requests keep coming, and while its
/// routing task waits to write, nothing that it is told.
struct Line {
    client: Client,
    router: Option<Router>,
    doubted: Arc<AtomicBool>,
    errors: Mutex<Errors>,
}

/// The errors of the connection of a client.
struct Errors {
    receiver: broadcast::Receiver<(Error, Option<Server>)>,
    latest: Option<Error>,
}

/// The task that keeps our own client connected; aborted, it begins again.
struct Router {
    running: Arc<Mutex<Option<AbortHandle>>>,
    _keeper: AbortOnDrop<()>,
}

impl Line {
    fn open(client: Client) -> Self {
        // Before it connects, since each error is sent once.
        let line = Self::of_the_application(client);
        let running = Arc::<Mutex<Option<AbortHandle>>>::default();
        let keeper = AbortOnDrop(tokio::spawn(keep(line.client.clone(), running.clone())));
        Self {
            router: Some(Router {
                running,
                _keeper: keeper,
            }),
            ..line
        }
    }

    /// A client that the application keeps connected.
    fn of_the_application(client: Client) -> Self {
        Self {
            router: None,
            doubted: Arc::default(),
            errors: Mutex::new(Errors {
                receiver: client.error_rx(),
                latest: None,
            }),
            client,
        }
    }

    /// Why there is no connection, by the latest attempt.
    fn why_not_connected(&self) -> Failure {
        let mut errors = lock(&self.errors);
        loop {
            match errors.receiver.try_recv() {
                Ok((error, _)) => errors.latest = Some(error),
                Err(TryRecvError::Lagged(_)) => {}
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        let Some(error) = &errors.latest else {
            return Failure::Unreachable("still connecting".into());
        };
        match error.kind() {
            ErrorKind::Auth | ErrorKind::Config | ErrorKind::Url => Failure::Forbidden(Refusal::new(error.details())),
            ErrorKind::Canceled => Failure::Unreachable("the connection was lost".into()),
            _ => Failure::not_connected(plain(error.details()).into_owned()),
        }
    }

    /// A request had no answer: asks for a sign of life, and connects anew if there is none.
    fn doubt(&self) {
        self.at_once(|client, renewal| async move {
            let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
            let patient = client.with_options(&once(SILENCE + LONGEST_STALL));
            let pong = patient.custom_raw(ping, Vec::<Value>::new());
            // Any reply is a sign of life, also that this user has no permission. Without one, the commands that wait for the
            // connection are given up: they must not be sent later.
            match Patience::new(SILENCE).wait(pong, || {}).await {
                Some(Ok(_)) => {}
                Some(Err(_)) if !renewal.is_of_the_store() => {}
                _ => renewal.run(&client).await,
            }
        });
    }

    fn renew(&self) {
        self.at_once(|client, renewal| async move { renewal.run(&client).await });
    }

    /// Runs one task at a time.
    fn at_once<F: Future<Output = ()> + Send>(&self, task: impl FnOnce(Client, Renewal) -> F + Send + 'static) {
        if self.doubted.swap(true, Ordering::AcqRel) {
            return;
        }
        let (client, doubted) = (self.client.clone(), self.doubted.clone());
        let renewal = Renewal(self.router.as_ref().map(|router| router.running.clone()));
        try_spawn(async move {
            task(client, renewal).await;
            sleep(PAUSE).await;
            doubted.store(false, Ordering::Release);
        });
    }
}

/// How a client is connected anew: its routing task ends, or is told to if the application has it.
struct Renewal(Option<Arc<Mutex<Option<AbortHandle>>>>);

impl Renewal {
    fn is_of_the_store(&self) -> bool {
        self.0.is_some()
    }

    async fn run(self, client: &Client) {
        match self.0 {
            Some(running) => {
                if let Some(running) = &*lock(&running) {
                    running.abort();
                }
            }
            None => {
                let _ = timeout(SILENCE, client.force_reconnection()).await;
            }
        }
    }
}

/// How long a client is left alone before it is connected anew.
const PAUSE: Duration = Duration::from_millis(200);

/// Keeps a client connected until it is dropped.
async fn keep(client: Client, running: Arc<Mutex<Option<AbortHandle>>>) {
    loop {
        // fred's own task ends on some errors although its policy is to go on, and does not tell.
        let mut router = AbortOnDrop(client.connect());
        *lock(&running) = Some(router.0.abort_handle());
        match (&mut router.0).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) if matches!(error.kind(), ErrorKind::Config | ErrorKind::Url) => return,
            Err(aborted) if aborted.is_cancelled() => {}
            _ => sleep(PAUSE).await,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
