use std::{sync::Arc, time::Duration};

use super::{
    client::ClientLibrary,
    credentials::CredentialSource,
    script::{SCRIPTS, Scripts},
    source::{ApplicationClient, Source},
};
use crate::{ConfigError, key::Secret};

/// Settings of a [`RedisStore`](crate::RedisStore).
///
/// A [`url`](Self::url) or a [`client`](Self::client) is required; if several are set, the last one is used. All other settings have
/// defaults.
///
/// ```no_run
/// use std::time::Duration;
/// use tower_quota::RedisStore;
///
/// # async fn f() -> Result<(), tower_quota::store::StoreError> {
/// let store = RedisStore::builder()
///     .url("redis://127.0.0.1:6379")
///     .prefix("shop:quota")
///     .deadline(Duration::from_millis(20))
///     .connect()
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct RedisStoreBuilder {
    pub(super) source: Option<Source>,
    pub(super) client_library: Option<ClientLibrary>,
    pub(super) connections: Option<usize>,
    pub(super) credentials: Option<Arc<CredentialSource>>,
    pub(super) connect_timeout: Duration,
    pub(super) deadline: Duration,
    pub(super) prefix: Box<str>,
    pub(super) secret: Option<Secret>,
    pub(super) group_commit: bool,
    pub(super) deny_cache: bool,
    pub(super) overrides: bool,
    pub(super) scripts: &'static Scripts,
}

impl RedisStoreBuilder {
    pub(super) fn new() -> Self {
        Self {
            source: None,
            client_library: None,
            connections: None,
            credentials: None,
            connect_timeout: Duration::from_secs(5),
            deadline: Duration::from_millis(100),
            prefix: "quota".into(),
            secret: None,
            group_commit: true,
            deny_cache: true,
            overrides: false,
            scripts: &SCRIPTS,
        }
    }
}

/// Sources, of which one is required.
impl RedisStoreBuilder {
    /// Sets the [URL](crate::RedisStore#connecting) of Redis.
    ///
    /// ```
    /// use tower_quota::RedisStore;
    ///
    /// let builder = RedisStore::builder().url("redis://:password@127.0.0.1:6379/0");
    /// assert!(!format!("{builder:?}").contains("password"));
    /// ```
    pub fn url(mut self, url: &str) -> Self {
        self.source = Some(Source::Url(url.into()));
        self
    }

    /// Sets a client of the application, in place of a [`url`](Self::url).
    ///
    /// [`ApplicationClient`] lists the types. Connecting fails with a fred client that is clustered, has a bounded queue, would not
    /// reconnect, or sends a command twice, and with nodes of a cluster of which there is none, or one is a Unix socket.
    pub fn client(mut self, client: impl Into<ApplicationClient>) -> Self {
        self.source = Some(client.into().0);
        self
    }
}

/// Settings of connections.
impl RedisStoreBuilder {
    /// Sets the client library that connects to the [`url`](Self::url).
    ///
    /// Then no other library connects: [`connect`](Self::connect) fails if this one does not support the URL. By default the
    /// first one that supports the URL with the features that are on connects: fred, else redis-rs.
    ///
    /// Beside a client of the application, which has its library, connecting with the other one is an error.
    ///
    /// ```
    /// use tower_quota::{ClientLibrary, RedisStore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # #[cfg(feature = "fred")]
    /// # {
    /// let cluster = RedisStore::builder().url("redis-cluster://127.0.0.1:6379").client_library(ClientLibrary::Fred);
    /// assert!(cluster.connect_lazy().is_err());
    /// # }
    /// # }
    /// ```
    pub fn client_library(mut self, library: ClientLibrary) -> Self {
        self.client_library = Some(library);
        self
    }

    /// Sets the number of connections to Redis, in a cluster to each node. They are used in turn. Where a call had no reply, a
    /// connection is left out until it replies to `PING`, if there are others.
    ///
    /// Connecting with a number beside clients of fred is an error: they have a connection each, and a pool has several.
    ///
    /// One connection carries many checks at a time. More help if a single one is the bottleneck, such as with TLS.
    ///
    /// The default is 1.
    ///
    /// ```
    /// use tower_quota::RedisStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let builder = RedisStore::builder().url("redis://127.0.0.1:6379");
    /// assert!(builder.connections(2).connect_lazy().is_ok());
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the number is not 1 to 64.
    #[track_caller]
    pub fn connections(mut self, connections: usize) -> Self {
        assert!(
            (1..=MAX_CONNECTIONS).contains(&connections),
            "a store has 1 to {MAX_CONNECTIONS} connections, as in `.connections(2)`"
        );
        self.connections = Some(connections);
        self
    }

    /// Sets the time within which [`connect`](Self::connect) must be able to use Redis.
    ///
    /// [`connect_lazy`](Self::connect_lazy) returns at once, and a warning is logged after this time.
    ///
    /// The default is 5 s.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::RedisStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let builder = RedisStore::builder().url("redis://127.0.0.1:6379");
    /// assert!(builder.connect_timeout(Duration::from_secs(30)).connect_lazy().is_ok());
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the time is zero or longer than an hour.
    #[track_caller]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        assert!(
            is_timeout(timeout),
            "the connect timeout is longer than zero and at most an hour, such as 5 s"
        );
        self.connect_timeout = timeout;
        self
    }
}

/// Settings of checks.
impl RedisStoreBuilder {
    /// Sets the time for a reply of Redis to a call; see [deadlines](crate::RedisStore#deadlines).
    ///
    /// Timers have a resolution of 1 ms,
    /// so with a deadline of less than a few milliseconds, calls fail although Redis replies.
    ///
    /// The default is 100 ms.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_quota::RedisStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let builder = RedisStore::builder().url("redis://127.0.0.1:6379");
    /// assert!(builder.deadline(Duration::from_millis(20)).connect_lazy().is_ok());
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the time is zero or longer than an hour.
    #[track_caller]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        assert!(
            is_timeout(deadline),
            "the deadline of a check is longer than zero and at most an hour, such as 100 ms"
        );
        self.deadline = deadline;
        self
    }

    /// Sets the prefix of the keys in Redis: one or more of ASCII letters, digits, `.`, `_`, `:` and `-`.
    ///
    /// The default is `quota`.
    ///
    /// ```
    /// use tower_quota::RedisStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::ConfigError> {
    /// let store = RedisStore::builder().url("redis://127.0.0.1:6379").prefix("shop").connect_lazy()?;
    /// assert!(format!("{store:?}").contains("shop:1:<algorithm>/<shape>:<policy>:{<key>}"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the prefix is empty, has other characters, or has `:1:line` as one of its parts.
    #[track_caller]
    pub fn prefix(mut self, prefix: impl Into<Box<str>>) -> Self {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        self.prefix = prefix.into();
        assert!(
            !self.prefix.is_empty() && self.prefix.bytes().all(allowed),
            "{:?} is not a prefix; one is made of letters, digits, `.`, `_`, `:` and `-`, such as `shop:quota`",
            self.prefix,
        );
        assert!(
            !format!("{}:", self.prefix).contains(":1:line:"),
            "{:?} is not a prefix, since `:1:line` follows it in the keys of lines; leave that out",
            self.prefix,
        );
        self
    }

    /// Hashes the keys of callers in Redis, for deployments that must not store addresses or users.
    ///
    /// It is a keyed hash of 128 bits: without the secret, the caller of a key cannot be found by trying addresses. The secret
    /// has at least 16 bytes from a random source. The default is to store readable
    /// keys. With another secret each key is another one: its count, bans and override are lost.
    ///
    /// ```
    /// use tower_quota::RedisStore;
    ///
    /// let error = RedisStore::builder().hash_keys("too short").unwrap_err();
    /// assert!(error.to_string().contains("at least 16 bytes"));
    /// ```
    ///
    /// # Errors
    ///
    /// If the secret is shorter.
    pub fn hash_keys(mut self, secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        self.secret = Some(Secret::derive(Secret::STORED_KEYS, secret)?);
        Ok(self)
    }

    /// Sets whether checks that are made while calls are in flight are sent together, in one call; see
    /// [group commit](crate::RedisStore#group-commit).
    ///
    /// The default is `true`.
    pub fn group_commit(mut self, on: bool) -> Self {
        self.group_commit = on;
        self
    }

    /// Sets whether denials are cached in the process, for at most 1 s; see [the deny cache](crate::RedisStore#deny-cache).
    ///
    /// The default is `true`.
    pub fn deny_cache(mut self, on: bool) -> Self {
        self.deny_cache = on;
        self
    }

    /// Sets whether the [overrides](crate::Limiter::override_limit) of single keys apply, and can be set.
    ///
    /// The store then calls Redis once a second, in addition to the checks. A change applies in the process that made it at
    /// once, and in others with this setting within a second. While Redis cannot be used, the overrides that were read last
    /// apply until they expire. They are stored under one key, such as `quota:1:overrides`.
    ///
    /// The default is `false`: no call is made, and no override applies.
    pub fn overrides(mut self, on: bool) -> Self {
        self.overrides = on;
        self
    }

    /// Changes the texts of the scripts, which are never freed. For the tests of this crate, which set the time of the scripts.
    #[doc(hidden)]
    pub fn scripts(mut self, change: impl Fn(&str) -> String) -> Self {
        self.scripts = Box::leak(Box::new(Scripts::new(change)));
        self
    }
}

const MAX_CONNECTIONS: usize = 64;

/// Times from which deadlines are calculated without an overflow.
const MAX_TIMEOUT: Duration = Duration::from_secs(3_600);

fn is_timeout(time: Duration) -> bool {
    !time.is_zero() && time <= MAX_TIMEOUT
}

impl_debug!(RedisStoreBuilder, builder =>
    connections: builder.connections,
    connect_timeout: builder.connect_timeout,
    deadline: builder.deadline,
    prefix: builder.prefix,
    group_commit: builder.group_commit,
    deny_cache: builder.deny_cache
);
