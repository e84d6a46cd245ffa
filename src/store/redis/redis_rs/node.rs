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
    time::{Instant, sleep_until, timeout},
};

use super::{
    super::{link::Failure, patience::Patience, refusal::Refusal, task::AbortOnDrop},
    in_full,
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
    pub(super) async fn send(&self, command: &Cmd, asking: bool) -> Result<Value, Failure> {
        self.connection()?.send(command, asking).await
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
        Err(match last_error {
            Some(error) => not_connected(&error),
            None => Failure::Unreachable("still connecting".into()),
        })
    }

    /// Why there is no connection, if there is none.
    pub(super) fn fault(&self) -> Option<Failure> {
        self.connection().err()
    }

    /// Waits until it can be sent to, or Redis refuses the connection for good.
    pub(super) async fn settled(&self) {
        let Some(line) = self.lines.first() else { return };
        let mut state = line.state.clone();
        let settled = state.wait_for(|state| match state {
            State::Connected(_) => true,
            State::Failed(error) => matches!(not_connected(error), Failure::Forbidden(_)),
            State::Connecting => false,
        });
        let _ = settled.await; // an error means that the store is dropped
    }
}

/// The failure that this error of a new connection is.
fn not_connected(error: &RedisError) -> Failure {
    use redis::ErrorKind::{AuthenticationFailed, InvalidClientConfig, RESP3NotSupported};

    match (error.kind(), error.code()) {
        (_, Some(code)) => Failure::not_connected(in_full(code, error.detail())),
        (AuthenticationFailed | InvalidClientConfig | RESP3NotSupported, None) => {
            Failure::Forbidden(Refusal::new(error.to_string()))
        }
        _ => Failure::Unreachable(error.to_string().into()),
    }
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

/// A request without a reply yet.
struct Silence(Option<Arc<Fate>>);

impl Drop for Silence {
    fn drop(&mut self) {
        if let Some(fate) = &self.0 {
            fate.doubt.notify_one();
        }
    }
}

impl Connection {
    /// Dropped before there is a reply, the request is one on which the deadline has passed.
    async fn send(mut self, command: &Cmd, asking: bool) -> Result<Value, Failure> {
        let mut silence = Silence(Some(self.fate.clone()));
        let answer = match asking {
            false => self.redis.send_packed_command(command).await,
            true => {
                // In one piece, so that no other request comes between the two.
                let mut both = redis::pipe();
                both.cmd("ASKING").add_command(command.clone());
                let answers = self.redis.send_packed_commands(&both, 1, 1).await;
                answers.map(|answers| answers.into_iter().next().unwrap_or_default())
            }
        };
        let value = answer.map_err(|error| Failure::Unreachable(error.to_string().into()))?;
        silence.0 = None;
        // The server became a replica and kept the connection.
        if matches!(&value, Value::ServerError(error) if error.code() == "READONLY") {
            self.fate.end();
        }
        Ok(value)
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
            let pong = self.redis.send_packed_command(&ping);
            let pong = Patience::new(SILENCE).wait(pong, || {}).await;
            if !matches!(pong, Some(Ok(_))) {
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
