mod connection;
mod sentinels;
mod settings;

use std::{borrow::Cow, pin::Pin, sync::Arc, time::Duration};

use fred::{
    bytes_utils::Str,
    clients::Client,
    error::{Error, ErrorKind},
    interfaces::{ClientLike, EventInterface, PubsubInterface},
    types::{
        ClusterHash, CustomCommand, Message, Resp3Frame, RespVersion, Value,
        config::{Config, CredentialProvider, Server, ServerConfig},
    },
};
#[cfg(feature = "unix-sockets")]
use percent_encoding::percent_decode_str;
use tokio::{
    sync::broadcast::{self, error::RecvError},
    time::timeout,
};

use self::{
    connection::{Connected, Connection, RoutingTask, connect, ping, while_running},
    sentinels::Sentinels,
    settings::{build, check_settings, rotate_sentinels, send_once},
};
use super::{attempt_interval, connections::InTurn, while_answered};
use crate::{
    ConfigError,
    store::{
        health::Health,
        redis::{
            acl::Refusal,
            backend::Deadline,
            call::ScriptCall,
            credentials::{Authenticator, ConnectionSettings},
            failure::{Failure, is_of_replica, shortened, shortened_bytes},
            reply::RawReply,
            script::EvalCommand,
            task::{DetachOnDrop, OnDrop},
            wakes::Event,
        },
    },
};

/// Runs scripts through fred.
pub(in crate::store::redis) struct FredClient {
    connections: InTurn<Connection>,
    sentinels: Option<Sentinels>,
    /// That of each client.
    config: Box<Config>,
    settings: ConnectionSettings,
    pub(in crate::store::redis) health: Arc<Health>,
}

impl FredClient {
    pub(in crate::store::redis) fn connect(url: &str, settings: &ConnectionSettings) -> Result<Self, ConfigError> {
        let mut config =
            Config::from_url(url).map_err(|error| ConfigError::because("this Redis URL does not parse", error))?;
        #[cfg(feature = "unix-sockets")]
        if let ServerConfig::Unix { path } = &mut config.server {
            *path = percent_decode_str(&path.to_string_lossy())
                .decode_utf8_lossy()
                .as_ref()
                .into();
        }
        // The first database needs no `SELECT`, and no permission for it.
        config.database = config.database.filter(|database| *database > 0);
        let sentinels = Sentinels::watch(&config);
        let connections = (0..settings.number).map(|_| {
            let authenticator = settings.authenticator();
            let client = build(with_provider(&config, authenticator.as_ref()));
            let client = client.map_err(|error| ConfigError::because("this Redis URL cannot be used", error))?;
            let agreed = sentinels.as_ref().map(Sentinels::agreed);
            Ok(Connection::open(client, agreed, authenticator, attempt_interval))
        });
        let connections = connections.collect::<Result<Vec<_>, ConfigError>>()?;
        let mut client = Self::new(connections, config, settings);
        client.sentinels = sentinels;
        Ok(client)
    }

    /// On clients that the application connects.
    pub(in crate::store::redis) fn from_clients(
        clients: &[Client],
        settings: &ConnectionSettings,
    ) -> Result<Self, ConfigError> {
        for client in clients {
            check_settings(client)?;
        }
        let config = clients.first().map(ClientLike::client_config).unwrap_or_default();
        let connections = clients.iter().cloned().map(Connection::of_application);
        Ok(Self::new(connections, config, settings))
    }

    fn new(connections: impl IntoIterator<Item = Connection>, config: Config, settings: &ConnectionSettings) -> Self {
        Self {
            connections: InTurn::new(connections),
            sentinels: None,
            health: Health::of_server(address(&config)),
            config: Box::new(config),
            settings: settings.clone(),
        }
    }

    fn connection(&self) -> Result<(&Connection, Client), Failure> {
        let connection = self.connections.connection(
            |connection| Ok((connection, connection.connected()?.0)),
            |(connection, _)| connection.is_suspect(),
        );
        connection.map_err(|failure| match &self.sentinels {
            // Of sentinels that are not connected, fred reports that alone.
            Some(sentinels) if matches!(&failure, Failure::Unreachable(why) if why.contains("sentinel")) => {
                sentinels.failure().unwrap_or(failure)
            }
            Some(_) | None => failure,
        })
    }

    /// The caller drops the future when the deadline has passed.
    pub(in crate::store::redis) async fn eval(
        &self,
        (name, text): EvalCommand,
        call: &ScriptCall,
        deadline: Deadline,
    ) -> Result<RawReply, Failure> {
        let (connection, client) = self.connection()?;
        let mut arguments = Vec::with_capacity(2 + call.keys.len() + call.arguments.len());
        arguments.push(Value::String(Str::from_static(text)));
        arguments.push(Value::Integer(call.keys.len() as i64));
        arguments.extend(call.keys.iter().chain(&call.arguments).cloned().map(Value::Bytes));

        let command = CustomCommand::new_static(name, ClusterHash::Random, false);
        let client = client.with_options(&send_once(deadline));
        // A command ends with its timeout in fred and not with its future: without the timeout, fred would write it after it
        // has reconnected.
        let frame = DetachOnDrop::new(async move { client.custom_raw(command, arguments).await });
        // It is dropped without a reply when its deadline has passed.
        let unanswered = OnDrop::new(|| connection.check());
        let reply = match frame.await {
            Ok(frame) => raw_reply(frame),
            Err(error) => Err(call_failure(error)),
        };
        if !matches!(reply, Err(Failure::Timeout)) {
            unanswered.disarm();
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

    pub(in crate::store::redis) fn permissions(&self) -> Vec<&'static str> {
        let is_of_sentinel = matches!(self.config.server, ServerConfig::Sentinel { .. });
        let role = is_of_sentinel.then_some("role");
        role.into_iter().chain(self.config.database.map(|_| "select")).collect()
    }

    pub(in crate::store::redis) async fn setting(&self, name: &'static str) -> Option<String> {
        let command = CustomCommand::new_static("CONFIG", ClusterHash::Random, false);
        let (_, client) = self.connection().ok()?;
        let setting: Vec<String> = client.custom(command, vec!["GET", name]).await.ok()?;
        setting.into_iter().nth(1)
    }

    /// Receives the messages of a channel, on a client with the configuration of the others, until its credentials are due.
    pub(in crate::store::redis) async fn receive_messages(
        &self,
        channel: &str,
        receive: &mut (dyn FnMut(Event<'_>) + Send),
    ) -> Failure {
        let authenticator = self.settings.authenticator();
        match self.subscribed(channel, authenticator.as_ref()).await {
            Ok((client, messages, connection)) => {
                receive(Event::Subscribed);
                let due = authenticator.and_then(|authenticator| authenticator.due());
                while_answered(due, pass_on(messages, connection, receive), || ping(&client)).await
            }
            Err(failure) => failure,
        }
    }

    /// A client that is subscribed to a channel and ends with its connection, its messages, and the task of the connection.
    async fn subscribed(
        &self,
        channel: &str,
        authenticator: Option<&Arc<Authenticator>>,
    ) -> Result<(Client, broadcast::Receiver<Message>, RoutingTask), Failure> {
        let mut config = with_provider(&self.config, authenticator);
        #[cfg(feature = "tls")]
        if let Ok((_, client)) = self.connection() {
            // The authorities that it trusts may have been read again.
            config.tls = client.client_config().tls;
        }
        rotate_sentinels(&mut config, fastrand::usize(..));
        config.fail_fast = true; // without a reconnect policy, fred would make no attempt
        config.version = RespVersion::RESP3; // by which a client that is subscribed may publish
        let client = build(config).map_err(call_failure)?;
        let mut messages = client.message_rx();
        let connecting = timeout(CONNECT_TIMEOUT, connect(client)).await;
        let connecting = connecting.map_or(Err(Failure::Timeout), |connected| {
            connected.map_err(|error| connect_failure(&error))
        });
        if let Some(authenticator) = authenticator {
            authenticator.tried(connecting.as_ref().err());
        }
        let Connected { client, routing, .. } = connecting?;
        let subscribing = timeout(SUBSCRIBE_TIMEOUT, client.subscribe(channel)).await;
        subscribing.map_err(|_| Failure::Timeout)?.map_err(call_failure)?;
        await_message(&client, channel, &mut messages).await?;
        Ok((client, messages, routing))
    }
}

/// The configuration with the provider of the credentials, if there is one.
fn with_provider(config: &Config, authenticator: Option<&Arc<Authenticator>>) -> Config {
    let mut config = config.clone();
    if let Some(authenticator) = authenticator {
        config.credential_provider = Some(Arc::new(Provider(authenticator.clone())));
    }
    config
}

struct Provider(Arc<Authenticator>);

impl_debug!(Provider, _provider =>);

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
            Ok((Some(credentials.user.into()), Some(credentials.password.into())))
        })
    }
}

/// The time for the connection of a subscription: fred waits up to a second for each of several replies.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time for the reply to `SUBSCRIBE`.
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Publishes a message and awaits it: for fred a subscription succeeds once it is written, and an error of Redis is the reply to the
/// next command.
async fn await_message(
    client: &Client,
    channel: &str,
    messages: &mut broadcast::Receiver<Message>,
) -> Result<(), Failure> {
    let publish = CustomCommand::new_static("PUBLISH", ClusterHash::Random, false);
    let publisher = client.with_options(&send_once(Deadline::new(SUBSCRIBE_TIMEOUT)));
    let published = publisher.custom_raw(publish, vec![channel, ""]).await;
    if let Resp3Frame::SimpleError { data, .. } = published.map_err(call_failure)? {
        return Err(Failure::of_call(data));
    }
    match timeout(SUBSCRIBE_TIMEOUT, messages.recv()).await {
        Ok(_) => Ok(()),
        Err(_) => Err(Failure::Protocol("Redis delivers no message")),
    }
}

/// Passes on messages until the connection is lost.
async fn pass_on(
    mut messages: broadcast::Receiver<Message>,
    mut connection: RoutingTask,
    receive: &mut (dyn FnMut(Event<'_>) + Send),
) -> Failure {
    loop {
        match while_running(&mut connection, messages.recv()).await {
            Ok(Ok(message)) => {
                if let Some(content) = message.value.as_bytes() {
                    receive(Event::Message(content));
                }
            }
            Ok(Err(RecvError::Lagged(_))) => receive(Event::Subscribed),
            Ok(Err(RecvError::Closed)) | Err(_) => return lost(),
        }
    }
}

/// The address of the server, or the name of the service of Sentinel.
fn address(config: &Config) -> String {
    match &config.server {
        ServerConfig::Centralized { server } => server.to_string(),
        ServerConfig::Sentinel { service_name, .. } => service_name.clone(),
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

#[expect(clippy::needless_pass_by_value, reason = "it maps an error")]
fn call_failure(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::Timeout => Failure::Timeout,
        ErrorKind::Canceled => lost(),
        // A reply that is none, after which the connection is closed, is `Protocol`; no error of a server is.
        ErrorKind::IO | ErrorKind::Routing | ErrorKind::Unknown | ErrorKind::Protocol => {
            Failure::Unreachable(shortened(plain_text(error.details())).into())
        }
        _ => Failure::of_call(error.details()),
    }
}

fn lost() -> Failure {
    Failure::Unreachable("the connection was lost".into())
}

/// The failure for an error while a client connects.
fn connect_failure(error: &Error) -> Failure {
    match error.kind() {
        ErrorKind::Auth | ErrorKind::Config | ErrorKind::Url => {
            Failure::Forbidden(Refusal::new(shortened(error.details())))
        }
        ErrorKind::Canceled => lost(),
        // No reply, also if a provider of credentials has an error that looks like one.
        ErrorKind::IO => Failure::Unreachable(shortened(plain_text(error.details())).into()),
        _ => Failure::of_connection(plain_text(error.details())),
    }
}

/// The text of a system error, of which fred keeps only the `Debug` text:
/// `Os { code: 111, kind: ConnectionRefused, message: "Connection refused" }`
fn plain_text(details: &str) -> Cow<'_, str> {
    let is_debug = ["Os {", "Custom {"].iter().any(|begin| details.starts_with(begin));
    let quoted = details.split_once('"').and_then(|(_, rest)| rest.rsplit_once('"'));
    match (is_debug, quoted) {
        (true, Some((message, _))) => message.replace("\\\"", "\"").into(),
        _ => details.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use fred::types::MessageKind;

    use super::*;
    use crate::store::redis::task::AbortOnDrop;

    #[tokio::test]
    async fn if_messages_were_missed_all_lines_are_woken() {
        let (sender, messages) = broadcast::channel(1);
        for content in ["1", "2"] {
            let sent = sender.send(Message {
                channel: "wake".into(),
                value: content.into(),
                kind: MessageKind::Message,
                server: Server::new("localhost", 6379),
            });
            assert!(sent.is_ok());
        }
        drop(sender);
        let mut events = Vec::new();
        let mut receive = |event: Event<'_>| {
            events.push(match event {
                Event::Subscribed => "all".to_owned(),
                Event::Message(content) => String::from_utf8_lossy(content).into_owned(),
            });
        };
        pass_on(messages, AbortOnDrop(tokio::spawn(pending())), &mut receive).await;
        assert_eq!(events, ["all", "2"]);
    }

    #[test]
    fn an_error_of_several_lines_is_an_error_reply() {
        let data = "OOM command not allowed".into();
        let reply = raw_reply(Resp3Frame::BlobError { data, attributes: None });
        assert!(
            matches!(&reply, Err(Failure::Refused(text)) if text.contains("OOM")),
            "{reply:?}"
        );
    }

    #[test]
    fn a_command_that_fred_cancels_has_lost_its_connection() {
        let canceled = || Error::new(ErrorKind::Canceled, "Canceled.");
        for failure in [call_failure(canceled()), connect_failure(&canceled())] {
            let Failure::Unreachable(cause) = failure else {
                panic!("{failure:?}");
            };
            assert_eq!(cause.to_string(), "the connection was lost");
        }
    }

    #[test]
    fn the_kind_of_an_error_of_fred_is_kept() {
        let timeout = Error::new(ErrorKind::Timeout, "Request timed out.");
        assert!(matches!(call_failure(timeout), Failure::Timeout));
        for kind in [ErrorKind::Auth, ErrorKind::Config, ErrorKind::Url] {
            let failure = connect_failure(&Error::new(kind, "no"));
            assert!(matches!(failure, Failure::Forbidden(_)), "{failure:?}");
        }
        let failure = connect_failure(&Error::new(ErrorKind::IO, "no"));
        assert!(matches!(failure, Failure::Unreachable(_)), "{failure:?}");
    }

    #[test]
    fn a_system_error_is_shown_in_plain_words() {
        for (details, text) in [
            (
                r#"Os { code: 111, kind: ConnectionRefused, message: "Connection refused" }"#,
                "Connection refused",
            ),
            (
                r#"Custom { kind: Uncategorized, error: "failed to lookup address information" }"#,
                "failed to lookup address information",
            ),
            ("Request timed out.", "Request timed out."),
        ] {
            assert_eq!(plain_text(details), text);
        }
    }
}
