use std::{fmt, sync::Arc, time::Duration};

#[cfg(feature = "fred")]
use super::fred;
#[cfg(feature = "redis")]
use super::redis_rs;
use super::{
    ClientLibrary, RedisStore,
    ask::Names,
    commit_queue::Group,
    deny_cache::DenyCache,
    link::Link,
    patience::Patience,
    queues::CommitQueues,
    script::{SCRIPT, Script},
    server::Server,
    task::spawn,
    trial::connect_in_background,
    url::Url,
};
use crate::{
    ConfigError,
    key::{Secret, ShortSecret},
    store::health::Health,
};

/// Settings of a [`RedisStore`].
///
/// ```no_run
/// use std::time::Duration;
/// use tower_quota::RedisStore;
///
/// # async fn f() -> Result<(), tower_quota::ConfigError> {
/// let store = RedisStore::builder()
///     .prefix("shop:quota")
///     .deadline(Duration::from_millis(20))
///     .connect("redis://127.0.0.1:6379")
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct RedisStoreBuilder {
    prefix: Box<str>,
    secret: Option<Result<Secret, ShortSecret>>,
    deadline: Duration,
    connect_timeout: Duration,
    library: Option<ClientLibrary>,
    connections: usize,
    script: &'static Script,
    group_commit: bool,
    deny_cache: bool,
}

impl RedisStoreBuilder {
    pub(super) fn new() -> Self {
        Self {
            prefix: "quota".into(),
            secret: None,
            deadline: Duration::from_millis(100),
            connect_timeout: Duration::from_secs(5),
            library: None,
            connections: 1,
            script: &SCRIPT,
            group_commit: true,
            deny_cache: true,
        }
    }

    /// What the store's keys begin with: letters, digits, `.`, `_`, `:` and `-`.
    ///
    /// The default is `quota`.
    pub fn prefix(mut self, prefix: impl Into<Box<str>>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Hashes what the store's keys say of callers, for deployments that must not store addresses or users.
    ///
    /// It is a keyed hash of 128 bits: without the secret, the caller of a key cannot be found by trying addresses. The
    /// secret is at least 16 bytes, from a random source; connecting with a shorter one is an error. The default is to store
    /// readable keys.
    pub fn hash_keys(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.secret = Some(Secret::for_stored_keys(secret));
        self
    }

    /// The time that Redis is given to reply to a call, from a few milliseconds to an hour; see
    /// [deadlines](RedisStore#deadlines).
    ///
    /// The default is 100 ms.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The time within which [`connect`](Self::connect) must reach Redis, at most an hour.
    ///
    /// [`connect_lazy`](Self::connect_lazy) returns at once, and logs a warning after this time.
    ///
    /// The default is 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Whether checks that come while others are on their way to Redis gather and leave together, as one call of the
    /// script; see [group commit](RedisStore#group-commit).
    ///
    /// The default is that they do.
    pub fn group_commit(mut self, on: bool) -> Self {
        self.group_commit = on;
        self
    }

    /// Whether denials are remembered, for a second at most; see [the deny cache](RedisStore#the-deny-cache).
    ///
    /// The default is that they are.
    pub fn deny_cache(mut self, on: bool) -> Self {
        self.deny_cache = on;
        self
    }

    /// The client through which to talk to Redis.
    ///
    /// The default is fred, and redis-rs for a cluster or where the feature `fred` is off.
    pub fn client_library(mut self, library: ClientLibrary) -> Self {
        self.library = Some(library);
        self
    }

    /// How many connections to open to Redis, in a cluster to each node; checks take turns. From 1 to 64.
    ///
    /// One carries many checks at a time. More help where a single one is the bottleneck, such as with TLS.
    ///
    /// The default is 1.
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// For this crate's own tests: the time is what this key of Redis holds, in microseconds.
    ///
    /// Denials are not remembered, since the clock that they would be remembered by is another one.
    #[doc(hidden)]
    pub fn clock_in(mut self, key: &str) -> Self {
        self.script = Script::with_clock_in(key);
        self.deny_cache = false;
        self
    }

    /// A store in the Redis of this URL; see [`RedisStore::connect`].
    ///
    /// # Errors
    ///
    /// Those of [`RedisStore::connect`], and if a setting cannot work.
    pub async fn connect(self, url: &str) -> Result<RedisStore, ConfigError> {
        let link = self.open(url)?;
        self.build_connected(link).await
    }

    /// A store in the Redis of this URL, which is connected in the background; see [`RedisStore::connect_lazy`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    ///
    /// # Errors
    ///
    /// Those of [`RedisStore::connect_lazy`], and if a setting cannot work.
    pub fn connect_lazy(self, url: &str) -> Result<RedisStore, ConfigError> {
        let link = self.open(url)?;
        let connect_timeout = self.connect_timeout;
        let store = self.build(link);
        spawn(connect_in_background(Arc::downgrade(&store.server), connect_timeout));
        Ok(store)
    }

    fn open(&self, url: &str) -> Result<Link, ConfigError> {
        self.validate()?;
        let parsed = Url::parse(url, self.library)?;
        Ok(match parsed.library {
            #[cfg(feature = "fred")]
            ClientLibrary::Fred => Link::Fred(fred::Fred::connect(url, self.connections)?),
            #[cfg(feature = "redis")]
            ClientLibrary::RedisRs => Link::RedisRs(redis_rs::RedisRs::connect(&parsed, self.connections)?),
        })
    }

    /// A store on a client that the application already has.
    ///
    /// The application connects it and, in the end, quits it. What Redis refuses is found by the first check, or by
    /// [`RedisStore::ready`].
    ///
    /// # Errors
    ///
    /// If a setting cannot work, or the client is configured so that it would not come back after a disconnect, or is
    /// clustered.
    #[cfg(feature = "fred")]
    pub fn client(self, client: ::fred::clients::Client) -> Result<RedisStore, ConfigError> {
        self.validate()?;
        Ok(self.build(Link::Fred(fred::Fred::from_clients(&[client])?)))
    }

    /// A store on a pool of clients that the application already has; checks take turns.
    ///
    /// # Errors
    ///
    /// Those of [`client`](Self::client).
    #[cfg(feature = "fred")]
    #[expect(clippy::needless_pass_by_value, reason = "the store shares its clients")]
    pub fn pool(self, pool: ::fred::clients::Pool) -> Result<RedisStore, ConfigError> {
        self.validate()?;
        Ok(self.build(Link::Fred(fred::Fred::from_clients(pool.clients())?)))
    }

    /// A store on [connections](Self::connections) of its own, made as this client of redis-rs would make them.
    ///
    /// It is for what a URL cannot say, such as certificates.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    ///
    /// # Errors
    ///
    /// If a setting cannot work, or Redis cannot be reached or refuses what a check needs, as for
    /// [`RedisStore::connect`].
    #[cfg(feature = "redis")]
    pub async fn redis_rs_client(self, client: &::redis::Client) -> Result<RedisStore, ConfigError> {
        self.validate()?;
        let link = redis_rs::RedisRs::from_client(client, self.connections);
        self.build_connected(Link::RedisRs(link)).await
    }

    /// A store in the cluster that these nodes belong to, as [`redis_rs_client`](Self::redis_rs_client) is for one server.
    ///
    /// A few nodes are enough to find the others, which are connected to as the first one is. The cluster connection of
    /// redis-rs itself will not do: it sends a command again after a connection was lost, which would count a request
    /// twice.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    ///
    /// # Errors
    ///
    /// Those of [`redis_rs_client`](Self::redis_rs_client), and if there is no node.
    #[cfg(feature = "redis")]
    pub async fn redis_rs_cluster(self, nodes: &[::redis::Client]) -> Result<RedisStore, ConfigError> {
        self.validate()?;
        let nodes: Vec<_> = nodes.iter().map(|node| node.get_connection_info().clone()).collect();
        let link = redis_rs::RedisRs::cluster(&nodes, self.connections)?;
        self.build_connected(Link::RedisRs(link)).await
    }

    fn validate(&self) -> Result<(), ConfigError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        if self.prefix.is_empty() || !self.prefix.bytes().all(allowed) {
            return Err(ConfigError::new(format!(
                "{:?} is not a prefix; one is made of letters, digits, `.`, `_`, `:` and `-`, such as `shop:quota`",
                self.prefix,
            )));
        }
        if let Some(Err(short)) = self.secret {
            return Err(short.into());
        }
        if self.deadline.is_zero() || self.deadline > MAX_DEADLINE {
            return Err(ConfigError::new(
                "the deadline of a check is longer than zero and at most an hour, such as 100 ms",
            ));
        }
        if self.connect_timeout.is_zero() || self.connect_timeout > MAX_DEADLINE {
            return Err(ConfigError::new(
                "the connect timeout is longer than zero and at most an hour, such as 5 s",
            ));
        }
        if !(1..=MAX_CONNECTIONS).contains(&self.connections) {
            return Err(ConfigError::new(format!(
                "a store has 1 to {MAX_CONNECTIONS} connections"
            )));
        }
        Ok(())
    }

    async fn build_connected(self, link: Link) -> Result<RedisStore, ConfigError> {
        let connect_timeout = self.connect_timeout;
        let store = self.build(link);
        store.server.connected(connect_timeout).await?;
        Ok(store)
    }

    fn build(self, link: Link) -> RedisStore {
        let server = Server {
            queues: CommitQueues::new(link.is_clustered()),
            link,
            script: self.script,
            names: Names::new(&self.prefix, self.secret.and_then(Result::ok)),
            deadline: self.deadline,
            patience: Patience::new(self.deadline),
            group: match self.group_commit {
                true => Group::COMMIT,
                false => Group::NONE,
            },
            deny_cache: self.deny_cache.then(DenyCache::new),
            refused: Health::default(),
        };
        RedisStore {
            server: Arc::new(server),
        }
    }
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStoreBuilder")
            .field("prefix", &self.prefix)
            .field("deadline", &self.deadline)
            .field("connect_timeout", &self.connect_timeout)
            .field("group_commit", &self.group_commit)
            .field("deny_cache", &self.deny_cache)
            .finish_non_exhaustive()
    }
}

const MAX_DEADLINE: Duration = Duration::from_secs(3_600);
const MAX_CONNECTIONS: usize = 64;
