use std::time::Duration;

use fred::{
    bytes_utils::Str,
    clients::{Client, Pool},
    error::{Error, ErrorKind},
    interfaces::ClientLike,
    types::{
        Builder, ClusterHash, CustomCommand, Resp3Frame, Value,
        config::{Config, Options, ReconnectPolicy, TcpConfig, UnresponsiveConfig},
    },
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use super::{
    Failure,
    script::{Argument, Call, Item, Program, Script},
    url,
};
use crate::ConfigError;

/// Talks to Redis through fred.
pub(super) struct Fred {
    source: Source,
    /// Keeps our own client connected.
    _connection: Option<Connection>,
}

enum Source {
    One(Client),
    Many(Pool),
}

/// How long to wait for Redis when a store is made.
const PATIENCE: Duration = Duration::from_secs(1);

impl Fred {
    pub(super) async fn connect(url: &str) -> Result<Self, ConfigError> {
        url::validate(url)?;
        let config =
            Config::from_url(url).map_err(|error| ConfigError::because("this Redis URL does not parse", error))?;
        let client = build(config).map_err(|error| ConfigError::because("this Redis URL cannot be used", error))?;

        let connection = Connection::open(client.clone());
        match timeout(PATIENCE, client.wait_for_connect()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) if is_final(&error) => {
                return Err(ConfigError::because(
                    format!("Redis turned the credentials or the database down: {}", error.details()),
                    error,
                ));
            }
            absent => {
                #[cfg(feature = "tracing")]
                tracing::warn!(?absent, "Redis is not there yet; the store keeps on connecting");
                let _ = absent;
            }
        }
        Ok(Self {
            source: Source::One(client),
            _connection: Some(connection),
        })
    }

    pub(super) fn from_client(client: Client) -> Result<Self, ConfigError> {
        audit(&client)?;
        Ok(Self {
            source: Source::One(client),
            _connection: None,
        })
    }

    pub(super) fn from_pool(pool: Pool) -> Result<Self, ConfigError> {
        audit(pool.next())?;
        Ok(Self {
            source: Source::Many(pool),
            _connection: None,
        })
    }

    pub(super) async fn run(
        &self,
        script: &'static Script,
        program: Program,
        call: &Call,
        deadline: Instant,
    ) -> Result<Vec<Item>, Failure> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::Timeout);
        }
        let options = Options {
            // At most once: nothing is written again after a reconnect.
            max_attempts: Some(1),
            fail_fast: true,
            timeout: Some(left),
            ..Options::default()
        };
        let client = match &self.source {
            Source::One(client) => client,
            // Not a method of the pool itself, which would skip clients.
            Source::Many(pool) => pool.next_connected(),
        };

        let (name, text) = match program {
            Program::Known => ("EVALSHA", script.sha1.as_str()),
            Program::Taught => ("EVAL", script.source),
        };
        let mut arguments = Vec::with_capacity(2 + call.keys.len() + call.arguments.len());
        arguments.push(Value::String(Str::from_static(text)));
        arguments.push(Value::Integer(call.keys.len() as i64));
        arguments.extend(call.keys.iter().cloned().map(Value::Bytes));
        arguments.extend(call.arguments.iter().map(|argument| match argument {
            Argument::Word(word) => Value::from_static_str(word),
            Argument::Number(number @ 0..EXACT_DIGITS) => Value::Integer(*number as i64),
            Argument::Number(number) => Value::from(number.to_string()),
        }));

        let command = CustomCommand::new_static(name, ClusterHash::Random, false);
        match client.with_options(&options).custom_raw(command, arguments).await {
            Ok(frame) => read(frame),
            Err(error) => Err(failure(error)),
        }
    }
}

/// Below this fred counts the digits of a number right: it takes a logarithm, which is rounded, and a length that is one
/// too long makes Redis hang up.
const EXACT_DIGITS: u64 = 100_000_000_000_000;

/// Whether Redis would say the same again, to a client that waits.
fn is_final(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Auth | ErrorKind::Config | ErrorKind::Url) || error.details().starts_with("ERR ")
}

fn read(frame: Resp3Frame) -> Result<Vec<Item>, Failure> {
    match frame {
        Resp3Frame::Array { data, .. } => data
            .into_iter()
            .map(|element| match element {
                Resp3Frame::Number { data, .. } => Ok(Item::Number(data)),
                Resp3Frame::BlobString { data, .. } | Resp3Frame::SimpleString { data, .. } => {
                    Ok(Item::Text(String::from_utf8_lossy(&data).into_owned()))
                }
                Resp3Frame::SimpleError { data, .. } => Ok(Item::Text(data.to_string())),
                _ => Err(Failure::Protocol(
                    "the reply of Redis holds something that is neither a number nor a text",
                )),
            })
            .collect(),
        Resp3Frame::SimpleError { data, .. } => Err(Failure::Refused(data.to_string())),
        Resp3Frame::BlobError { data, .. } => Err(Failure::Refused(String::from_utf8_lossy(&data).into_owned())),
        _ => Err(Failure::Protocol("the reply of Redis is no list")),
    }
}

fn failure(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::Timeout => Failure::Timeout,
        ErrorKind::IO | ErrorKind::Canceled | ErrorKind::Routing | ErrorKind::Unknown => {
            Failure::Unreachable(Box::new(error))
        }
        _ => Failure::Refused(error.details().to_owned()),
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
            connection.unresponsive = UnresponsiveConfig {
                max_timeout: Some(Duration::from_millis(1_500)),
                interval: Duration::from_millis(250),
            };
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
        return Err(ConfigError::new(
            "this fred client is clustered, and while slots move fred 10 may hand one caller's reply to another; a \
             cluster needs the feature `redis-rs`, which is to come",
        ));
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

/// Keeps a client connected until it is dropped.
struct Connection(JoinHandle<()>);

impl Connection {
    fn open(client: Client) -> Self {
        Self(tokio::spawn(async move {
            loop {
                // fred's own task ends on some errors although its policy is to go on, and does not tell.
                let mut router = AbortOnDrop(client.connect());
                match (&mut router.0).await {
                    Ok(Ok(())) => return,
                    Ok(Err(error)) if matches!(error.kind(), ErrorKind::Config | ErrorKind::Url) => return,
                    _ => sleep(Duration::from_millis(200)).await,
                }
            }
        }))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
