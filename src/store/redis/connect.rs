use std::sync::Arc;

use tokio::{
    runtime::Handle,
    time::{Instant, timeout},
};

#[cfg(feature = "fred")]
use super::client::fred::FredClient;
#[cfg(feature = "cluster")]
use super::client::redis_rs::RedisRsClient;
use super::{
    backend::Backend,
    builder::RedisStoreBuilder,
    client::{BUILT_IN, ClientLibrary, RedisClient},
    credentials::ConnectionSettings,
    queues::CommitQueues,
    source::Source,
    store::RedisStore,
    task::spawn_on,
    trial::{connect_in_background, connected},
    url::{Url, shown},
};
use crate::{
    ConfigError,
    store::{ErrorKind, StoreError},
};

/// Constructors.
impl RedisStore {
    /// Connects to the Redis of a [URL](#connecting), with the default settings.
    ///
    /// It returns when checks can be made: it has run each command that a check requires, on a key with the
    /// [prefix](RedisStoreBuilder::prefix) of the store, in a cluster on every primary. A service that must start without
    /// Redis uses [`connect_lazy`](RedisStoreBuilder::connect_lazy). A Redis that starts meanwhile is waited for; a warning is logged at
    /// once if nothing listens at its address. The connection is closed when the last clone of the store is dropped.
    ///
    /// ```
    /// use tower_quota::RedisStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let error = RedisStore::connect("http://127.0.0.1").await.unwrap_err();
    /// assert!(error.to_string().contains("`redis://"));
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// * [`Invalid`](ErrorKind::Invalid) if the URL is not one of Redis, or requires a feature that is off; and outside of a
    ///   tokio runtime.
    /// * [`Refused`](ErrorKind::Refused) if Redis refuses the credentials, a command, the keys or the script. The error names what is
    ///   refused, and if credentials or a permission are missing, the `ACL SETUSER` command for a user with all permissions.
    /// * [`Timeout`](ErrorKind::Timeout) or [`Unreachable`](ErrorKind::Unreachable) if Redis cannot be used within the
    ///   [connect timeout](RedisStoreBuilder::connect_timeout), 5 s, or `Refused` if its last reply was an error that may pass, such as
    ///   `READONLY`. The text has the last cause; a program can connect again.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder().url(url).connect().await
    }

    /// A builder for a store with other settings, or on a client of the application; see [`RedisStoreBuilder`] for an example.
    pub fn builder() -> RedisStoreBuilder {
        RedisStoreBuilder::new()
    }
}

/// Connecting.
impl RedisStoreBuilder {
    /// Connects the store, and returns when checks can be made; see [`RedisStore::connect`].
    ///
    /// ```
    /// use tower_quota::RedisStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let error = RedisStore::builder().connect().await.unwrap_err();
    /// assert!(error.to_string().contains("`.url(\"redis://127.0.0.1:6379\")`"));
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`RedisStore::connect`], and if settings contradict each other, there is no source, or a client of the
    /// application cannot serve a limiter.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        let (connect_timeout, server) = (self.connect_timeout, self.server());
        let (store, begun) = (self.build()?, Instant::now());
        connected(&store.queues.backend, &server, connect_timeout).await?;
        let read = timeout(connect_timeout.saturating_sub(begun.elapsed()), store.overrides_read()).await;
        read.unwrap_or_else(|_| {
            let message = "the overrides could not be read within the connect timeout";
            Err(StoreError::new(ErrorKind::Timeout, message))
        })?;
        Ok(store)
    }

    /// Returns the store at once, and connects it in the background.
    ///
    /// It is for services that must start without Redis; others use [`connect`](Self::connect), which finds a wrong password
    /// or a missing permission when the service starts. Until Redis is connected, checks fail at once, and the
    /// [`FailureMode`](crate::FailureMode) defines what happens to the requests. A refusal of Redis is logged as an error,
    /// at most once a minute, with the text of the error of `connect`, and each check that meets it fails.
    ///
    /// ```
    /// use tower_quota::RedisStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::ConfigError> {
    /// let store = RedisStore::builder().url("redis://127.0.0.1:6379").connect_lazy()?;
    /// assert!(RedisStore::builder().connect_lazy().is_err(), "it has no Redis to connect to");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the URL is not one of Redis, or requires a feature that is off; if settings contradict each other, there is no source,
    /// or a client of the application cannot serve a limiter; and outside of a tokio runtime.
    pub fn connect_lazy(self) -> Result<RedisStore, ConfigError> {
        let (connect_timeout, server) = (self.connect_timeout, self.server());
        let store = self.build()?;
        let backend = &store.queues.backend;
        let connecting = connect_in_background(Arc::downgrade(backend), server, connect_timeout);
        spawn_on(&backend.runtime, connecting);
        Ok(store)
    }

    fn build(self) -> Result<RedisStore, ConfigError> {
        self.validate()?;
        if Handle::try_current().is_err() {
            return Err(ConfigError::new(
                "a store connects in a tokio runtime, and there is none; build it in a function that the runtime runs, such as an \
         `async fn main` with `#[tokio::main]`, or enter the runtime before, as in `let _guard = runtime.enter();`",
            ));
        }
        let client = self.redis_client()?;
        let store = RedisStore::new(CommitQueues::new(Backend::new(client, &self)));
        Ok(if self.overrides { store.with_overrides() } else { store })
    }

    fn redis_client(&self) -> Result<RedisClient, ConfigError> {
        let settings = &ConnectionSettings {
            number: self.connections.unwrap_or(1),
            credentials: self.credentials.clone(),
        };
        let url = match &self.source {
            None => {
                return Err(ConfigError::new(
                    "the store has no Redis to connect to; set one, such as `.url(\"redis://127.0.0.1:6379\")`, before `.connect()`",
                ));
            }
            Some(Source::Url(url)) => url,
            #[cfg(feature = "fred")]
            Some(Source::Fred(clients)) => return FredClient::from_clients(clients, settings).map(RedisClient::Fred),
            #[cfg(feature = "cluster")]
            Some(Source::RedisRs(client)) => {
                let client = RedisRsClient::of_server(client.get_connection_info(), settings);
                return Ok(RedisClient::RedisRs(client));
            }
            #[cfg(feature = "cluster")]
            Some(Source::RedisRsCluster(nodes)) => {
                let nodes: Vec<_> = nodes.iter().map(|node| node.get_connection_info().clone()).collect();
                return RedisRsClient::cluster(&nodes, settings).map(RedisClient::RedisRs);
            }
        };
        let parsed = Url::parse(url, self.client_library, self.credentials.is_some());
        let client = parsed.and_then(|parsed| {
            let connect = |library| match library {
                #[cfg(feature = "fred")]
                ClientLibrary::Fred => FredClient::connect(url, settings).map(RedisClient::Fred),
                #[cfg(feature = "cluster")]
                ClientLibrary::RedisRs => RedisRsClient::connect(&parsed, settings).map(RedisClient::RedisRs),
            };
            // fred does not read some URLs, such as of a sentinel without a port.
            let later = BUILT_IN.iter().rev().take_while(|library| **library != parsed.library);
            let mut later = later.filter(|_| self.client_library.is_none());
            connect(parsed.library).or_else(|error| later.find_map(|library| connect(*library).ok()).ok_or(error))
        });
        client.map_err(|error| error.within(format_args!("`{}`", shown(url))))
    }

    /// Where Redis is, for errors and logs.
    fn server(&self) -> String {
        match &self.source {
            Some(Source::Url(url)) => shown(url),
            _ => "Redis".to_owned(),
        }
    }

    /// That no setting is one which the client of the application has already.
    fn validate(&self) -> Result<(), ConfigError> {
        #[cfg(feature = "fred")]
        if let (Some(Source::Fred(_)), Some(number)) = (&self.source, self.connections) {
            return Err(ConfigError::new(format!(
                "clients of fred have a connection each; instead of `.connections({number})`, set a pool of clients with \
                 `.client(pool)`",
            )));
        }
        if self.credentials.is_some() {
            self.source.as_ref().map_or(Ok(()), validate_credentials)?;
        }
        let source = self.source.as_ref().and_then(Source::client_library);
        match (source, self.client_library) {
            (Some(actual), Some(other)) if actual != other => Err(ConfigError::new(format!(
                "the client of the application is one of {actual:?}, and `.client_library(ClientLibrary::{other:?})` sets \
                 another library; remove one of the two",
            ))),
            _ => Ok(()),
        }
    }
}

/// That the client of the application has no credentials of its own beside a provider.
fn validate_credentials(source: &Source) -> Result<(), ConfigError> {
    #[cfg(feature = "cluster")]
    let has_password = |client: &redis::Client| client.get_connection_info().redis_settings().password().is_some();
    match source {
        Source::Url(_) => Ok(()),
        #[cfg(feature = "fred")]
        Source::Fred(_) => Err(ConfigError::new(
            "a client of fred authenticates by itself; set the `credential_provider` of its `Config` in place of \
             `.credentials(..)` or `.password_file(..)`",
        )),
        #[cfg(feature = "cluster")]
        Source::RedisRs(client) if has_password(client) => Err(super::url::two_credentials("client")),
        #[cfg(feature = "cluster")]
        Source::RedisRsCluster(nodes) if nodes.iter().any(has_password) => Err(super::url::two_credentials("client")),
        #[cfg(feature = "cluster")]
        Source::RedisRs(_) | Source::RedisRsCluster(_) => Ok(()),
    }
}
