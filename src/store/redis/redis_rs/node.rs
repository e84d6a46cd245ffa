use std::{
    convert::Infallible,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, PushInfo, PushKind, RedisError, Value,
    aio::MultiplexedConnection,
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep_until, timeout, timeout_at},
};

use super::{
    super::link::{AbortOnDrop, Failure},
    sentinel::Sentinels,
};

/// How long a connection may take to be made, with all that is said at its beginning.
pub(super) const CONNECT: Duration = Duration::from_secs(1);
/// How long a connection on which a request timed out may stay silent.
const SILENCE: Duration = Duration::from_millis(500);
/// Connections are tried this far apart, and a little more.
const PAUSE_MS: u64 = 150;
const JITTER_MS: u64 = 100;

/// Where to connect to.
pub(super) enum Dial {
    Server(ConnectionInfo),
    /// The primary, whichever that is by then.
    Primary(Sentinels),
}

/// Some connections to one server, which take turns.
pub(super) struct Node {
    lines: Vec<Line>,
    next: AtomicUsize,
}

impl Node {
    pub(super) fn new(dial: Dial, connections: usize) -> Self {
        let dial = Arc::new(dial);
        Self {
            lines: (0..connections).map(|_| Line::open(dial.clone())).collect(),
            next: AtomicUsize::new(0),
        }
    }

    /// Sends a command once, with `ASKING` before it if the slot is on its way to this server.
    pub(super) async fn send(&self, command: &Cmd, asking: bool, deadline: Instant) -> Result<Value, Failure> {
        self.connection()?.send(command, asking, deadline).await
    }

    /// The next connection that stands.
    fn connection(&self) -> Result<Connection, Failure> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut last_error = None;
        for offset in 0..self.lines.len() {
            let line = &self.lines[first.wrapping_add(offset) % self.lines.len()];
            match &*line.state.borrow() {
                State::Connected(connection) => return Ok(connection.clone()),
                State::Failed(error) => last_error = Some(error.clone()),
                State::Connecting => {}
            }
        }
        Err(Failure::Unreachable(match last_error {
            Some(error) => error.into(),
            None => "still connecting".into(),
        }))
    }

    /// Waits until it can be sent to, or cannot be for good.
    pub(super) async fn settled(&self) -> Result<(), RedisError> {
        let Some(line) = self.lines.first() else { return Ok(()) };
        let mut state = line.state.clone();
        let settled = state.wait_for(|state| match state {
            State::Connected(_) => true,
            State::Failed(error) => is_final(error),
            State::Connecting => false,
        });
        match settled.await.as_deref() {
            Ok(State::Failed(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

/// Whether Redis would say the same again, to a client that waits.
fn is_final(error: &RedisError) -> bool {
    use redis::ErrorKind::{AuthenticationFailed, InvalidClientConfig, RESP3NotSupported};

    matches!(
        error.kind(),
        AuthenticationFailed | InvalidClientConfig | RESP3NotSupported
    ) || matches!(error.code(), Some("ERR" | "NOAUTH" | "NOPERM" | "WRONGPASS"))
}

/// A connection that is made anew whenever it is lost.
struct Line {
    state: watch::Receiver<State>,
    _keeper: AbortOnDrop<()>,
}

enum State {
    Connecting,
    Connected(Connection),
    Failed(RedisError),
}

impl Line {
    fn open(dial: Arc<Dial>) -> Self {
        let (sender, state) = watch::channel(State::Connecting);
        Self {
            state,
            _keeper: AbortOnDrop(tokio::spawn(keep(dial, sender))),
        }
    }
}

/// Keeps a line connected until it is dropped.
async fn keep(dial: Arc<Dial>, state: watch::Sender<State>) {
    loop {
        let started = Instant::now();
        match timeout(CONNECT, dial.connect()).await {
            Ok(Ok(connection)) => {
                state.send_replace(State::Connected(connection.clone()));
                connection.lasts().await;
                state.send_replace(State::Connecting);
            }
            Ok(Err(error)) => {
                state.send_replace(State::Failed(error));
            }
            Err(_) => {
                let error = io::Error::from(io::ErrorKind::TimedOut);
                state.send_replace(State::Failed(error.into()));
            }
        }
        let pause = Duration::from_millis(PAUSE_MS + fastrand::u64(..JITTER_MS));
        sleep_until(started + pause).await;
    }
}

#[derive(Clone)]
struct Connection {
    redis: MultiplexedConnection,
    fate: Arc<Fate>,
}

#[derive(Default)]
struct Fate {
    /// There is reason to look whether it still stands.
    doubt: Notify,
    over: AtomicBool,
}

impl Fate {
    fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.doubt.notify_one();
    }
}

impl Connection {
    async fn send(mut self, command: &Cmd, asking: bool, deadline: Instant) -> Result<Value, Failure> {
        let answer = async {
            if !asking {
                return self.redis.send_packed_command(command).await;
            }
            // In one piece, so that no other request comes between the two.
            let mut both = redis::pipe();
            both.cmd("ASKING").add_command(command.clone());
            let answers = self.redis.send_packed_commands(&both, 1, 1).await?;
            Ok(answers.into_iter().next().unwrap_or_default())
        };
        match timeout_at(deadline, answer).await {
            Ok(Ok(value)) => {
                // The server became a replica and kept the connection.
                if matches!(&value, Value::ServerError(error) if error.code() == "READONLY") {
                    self.fate.end();
                }
                Ok(value)
            }
            Ok(Err(error)) => {
                self.fate.doubt.notify_one();
                Err(Failure::Unreachable(error.into()))
            }
            Err(_) => {
                self.fate.doubt.notify_one();
                Err(Failure::Timeout)
            }
        }
    }

    /// Returns when it breaks, or stays silent after a request had no answer.
    async fn lasts(mut self) {
        let ping = redis::cmd("PING");
        loop {
            self.fate.doubt.notified().await;
            if self.fate.over.load(Ordering::Acquire) {
                return;
            }
            // Any answer is a sign of life, even that this user may not ask.
            let pong = timeout(SILENCE, self.redis.send_packed_command(&ping)).await;
            if !matches!(pong, Ok(Ok(_))) {
                return;
            }
        }
    }
}

impl Dial {
    async fn connect(&self) -> Result<Connection, RedisError> {
        let server = match self {
            Self::Server(server) => server.clone(),
            Self::Primary(sentinels) => sentinels.primary().await?,
        };
        let fate = Arc::<Fate>::default();
        let told = fate.clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(move |push: PushInfo| {
                if push.kind == PushKind::Disconnection {
                    told.end();
                }
                Ok::<(), Infallible>(())
            });
        let redis = Client::open(server)?
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        Ok(Connection { redis, fate })
    }
}
