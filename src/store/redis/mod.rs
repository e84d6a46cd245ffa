mod across;
mod ask;
mod breaker;
mod commit;
mod deny_cache;
#[cfg(feature = "fred")]
mod fred;
mod lanes;
#[cfg(feature = "redis-rs")]
mod redis_rs;
mod script;
mod server;
mod slot;
mod url;

use std::{fmt, sync::Arc, time::Duration};

use smallvec::SmallVec;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

use self::{
    ask::{Ask, Names},
    commit::Group,
    deny_cache::DenyCache,
    lanes::Lanes,
    script::{Call, Item, Program, SCRIPT, Script},
    server::Server,
    url::Url,
};
use super::{ErrorKind, Reply, Request, Store, StoreError};
use crate::{ConfigError, key::Secret};

/// Keeps counts in Redis, shared by all replicas of a service.
///
/// ```no_run
/// use tower_quota::{key, Policy, RateLimitLayer, RedisStore, SlidingLog};
///
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
/// let policy = Policy::new("login", SlidingLog::per_minute(5)).key((key::ip(), key::path()));
/// let layer = RateLimitLayer::new(store, policy);
/// # Ok(())
/// # }
/// ```
///
/// # What a check is
///
/// One call of one Lua script, which decides and counts at one instant of Redis's own clock, so replicas never race and
/// their clocks do not matter. The script is found by its hash, and taught again to a Redis that does not know it. Nothing
/// else is ever sent twice: a request is counted once or not at all.
///
/// A check takes at most its [deadline](RedisStoreBuilder::deadline), 100 ms; after that the policy's
/// [`FailureMode`](crate::FailureMode) decides. A request that was given up, by the deadline or because the caller went
/// away, may have been counted.
///
/// # What lies in Redis
///
/// One key for each policy and caller, `<prefix>:1:<algorithm>:<policy>:{<key>}`, such as
/// `quota:1:log:login:{ip=203.0.113.7|path=/login}`. Each expires by itself, at most a second after it stops to matter.
/// Set Redis's `maxmemory-policy` to `noeviction`, or choose an instance of its own: a key that is evicted is a limit that
/// is reset. A failover loses what the replica had not received yet, and as much may be admitted again.
///
#[doc = include_str!("faults.md")]
#[derive(Clone)]
#[must_use]
pub struct RedisStore {
    server: Arc<Server>,
}

/// Constructors.
impl RedisStore {
    /// A store in the Redis of this URL, with the default settings.
    ///
    /// | | |
    /// | --- | --- |
    /// | one server | `redis://user:password@127.0.0.1:6379/0` |
    /// | a Unix socket | `redis+unix:///run/redis.sock` |
    /// | Sentinel | `redis-sentinel://user:password@host:26379/0?sentinelServiceName=name&node=host:26379`; if the sentinels want credentials too, `&sentinelUsername=user&sentinelPassword=password` |
    /// | a cluster | `redis-cluster://user:password@host:6379?node=host:6379`, any of its nodes (feature `redis-rs`) |
    ///
    /// With `rediss` in place of `redis` it is TLS (feature `fred-rustls` or `redis-rs-rustls`), and the certificate of
    /// Redis must be signed by an authority that the system knows, or one in the file that the environment variable
    /// `SSL_CERT_FILE` names.
    ///
    /// Redis need not be there yet: after a second at most the store is returned and keeps on connecting, and until then
    /// its checks fail at once. The connection is closed when the last clone of the store is dropped.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    ///
    /// # Errors
    ///
    /// If the URL is not one of Redis, needs a feature that is off, or has credentials that Redis turns down.
    pub async fn connect(url: &str) -> Result<Self, ConfigError> {
        Self::builder().connect(url).await
    }

    /// A store with other settings.
    pub fn builder() -> RedisStoreBuilder {
        RedisStoreBuilder {
            names: Names {
                prefix: "quota".into(),
                secret: None,
            },
            deadline: Duration::from_millis(100),
            library: None,
            connections: 1,
            script: &SCRIPT,
            group_commit: true,
            deny_cache: true,
        }
    }
}

/// Operations.
impl RedisStore {
    /// Waits until Redis answers, for those who do not want to serve before; it does not end by itself.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tokio::time::timeout;
    /// use tower_quota::RedisStore;
    ///
    /// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
    /// timeout(Duration::from_secs(30), store.ready()).await??;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If Redis answers, but turns the script down, for want of a permission for example.
    pub async fn ready(&self) -> Result<(), StoreError> {
        const PAUSE: Duration = Duration::from_millis(50);

        loop {
            match self.server.hail(None).await {
                Ok(()) => return Ok(()),
                Err(failure) if failure.is_final() => return Err(failure.into()),
                Err(_) => sleep(PAUSE).await,
            }
        }
    }

    /// The texts of the scripts that the store runs.
    ///
    /// A store teaches them to Redis by itself, with `EVAL`. Where its user may not, load them into every node, replicas
    /// included, each time that one starts: `SCRIPT LOAD` gives the hash by which the store calls them.
    ///
    /// ```
    /// use tower_quota::RedisStore;
    ///
    /// for script in RedisStore::scripts() {
    ///     // redis-cli SCRIPT LOAD "$script"
    ///     assert!(script.starts_with("-- Decides a batch of requests"));
    /// }
    /// ```
    #[must_use]
    pub fn scripts() -> [&'static str; 1] {
        [SCRIPT.source]
    }
}

const MAX_DEADLINE: Duration = Duration::from_secs(3_600);
const MAX_CONNECTIONS: usize = 64;

impl Store for RedisStore {
    fn decide(&self, requests: &[Request<'_>]) -> Reply {
        let server = &self.server;
        let asks: SmallVec<[Ask; 1]> = requests
            .iter()
            .map(|request| Ask::new(&server.names, request))
            .collect();
        let now = Instant::now();

        let mut stamp = None;
        if let Some(cache) = &server.deny_cache {
            if let [ask] = &*asks {
                if let Some(answer) = cache.answer(ask, now) {
                    return Reply::Ready(Ok(answer));
                }
                stamp = Some(cache.stamp(ask));
            }
            cache.forget(&asks);
        }
        match server.lanes.of(&asks) {
            Some(lane) if lane.breaker.is_open() => Reply::Ready(Err(server::resting())),
            Some(lane) => Reply::Pending(Box::pin(server.clone().ask(lane, asks, now, stamp))),
            None => Reply::Pending(Box::pin(across::ask(server.clone(), asks, now))),
        }
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.server.names.prefix)
            .field("deadline", &self.server.deadline)
            .finish_non_exhaustive()
    }
}

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
    names: Names,
    deadline: Duration,
    library: Option<ClientLibrary>,
    connections: usize,
    script: &'static Script,
    group_commit: bool,
    deny_cache: bool,
}

impl RedisStoreBuilder {
    /// What the store's keys begin with: letters, digits, `.`, `_`, `:` and `-`.
    ///
    /// The default is `quota`.
    pub fn prefix(mut self, prefix: impl Into<Box<str>>) -> Self {
        self.names.prefix = prefix.into();
        self
    }

    /// Hashes what the store's keys say of callers, for deployments that must not store addresses or users.
    ///
    /// It is a keyed hash of 128 bits: who does not have the secret cannot find out whose key it is by trying addresses.
    /// The default is to store readable keys.
    pub fn hash_keys(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.names.secret = Some(Secret::new(secret));
        self
    }

    /// How long a check may take.
    ///
    /// The default is 100 ms.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
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
        self.validate()?;
        let parsed = Url::parse(url, self.library)?;
        let link = match parsed.library {
            #[cfg(feature = "fred")]
            ClientLibrary::Fred => Link::Fred(fred::Fred::connect(url, self.connections).await?),
            #[cfg(feature = "redis-rs")]
            ClientLibrary::RedisRs => Link::RedisRs(redis_rs::RedisRs::connect(&parsed, self.connections).await?),
        };
        Ok(self.build(link))
    }

    /// A store on a client that the application already has.
    ///
    /// The application connects it and, in the end, quits it.
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
    /// If a setting cannot work, or Redis turns the credentials down.
    #[cfg(feature = "redis-rs")]
    pub async fn redis_rs_client(self, client: &::redis::Client) -> Result<RedisStore, ConfigError> {
        self.validate()?;
        let link = redis_rs::RedisRs::from_client(client, self.connections).await?;
        Ok(self.build(Link::RedisRs(link)))
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
    #[cfg(feature = "redis-rs")]
    pub async fn redis_rs_cluster(self, nodes: &[::redis::Client]) -> Result<RedisStore, ConfigError> {
        self.validate()?;
        let nodes: Vec<_> = nodes.iter().map(|node| node.get_connection_info().clone()).collect();
        let link = redis_rs::RedisRs::cluster(&nodes, self.connections).await?;
        Ok(self.build(Link::RedisRs(link)))
    }

    fn validate(&self) -> Result<(), ConfigError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        if self.names.prefix.is_empty() || !self.names.prefix.bytes().all(allowed) {
            return Err(ConfigError::new(format!(
                "{:?} is not a prefix; one is made of letters, digits, `.`, `_`, `:` and `-`, such as `shop:quota`",
                self.names.prefix,
            )));
        }
        if self.deadline.is_zero() || self.deadline > MAX_DEADLINE {
            return Err(ConfigError::new(
                "the deadline of a check is longer than zero and at most an hour, such as 100 ms",
            ));
        }
        if !(1..=MAX_CONNECTIONS).contains(&self.connections) {
            return Err(ConfigError::new(format!(
                "a store has 1 to {MAX_CONNECTIONS} connections"
            )));
        }
        Ok(())
    }

    fn build(self, link: Link) -> RedisStore {
        let server = Server {
            lanes: Lanes::new(link.is_clustered()),
            link,
            script: self.script,
            names: self.names,
            deadline: self.deadline,
            group: match self.group_commit {
                true => Group::COMMIT,
                false => Group::NONE,
            },
            deny_cache: self.deny_cache.then(DenyCache::new),
        };
        RedisStore {
            server: Arc::new(server),
        }
    }
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStoreBuilder")
            .field("prefix", &self.names.prefix)
            .field("deadline", &self.deadline)
            .field("group_commit", &self.group_commit)
            .field("deny_cache", &self.deny_cache)
            .finish_non_exhaustive()
    }
}

/// A client of Redis that the store can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClientLibrary {
    /// [fred](https://crates.io/crates/fred), for one server or Sentinel.
    #[cfg(feature = "fred")]
    Fred,
    /// [redis-rs](https://crates.io/crates/redis), for one server, Sentinel or a cluster.
    #[cfg(feature = "redis-rs")]
    RedisRs,
}

impl ClientLibrary {
    #[cfg(feature = "fred")]
    const DEFAULT: Self = Self::Fred;
    #[cfg(not(feature = "fred"))]
    const DEFAULT: Self = Self::RedisRs;
}

/// A task that ends with its owner.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The seam to a client of Redis: it runs a script on the node that owns the keys. Nothing else knows a client.
enum Link {
    #[cfg(feature = "fred")]
    Fred(fred::Fred),
    #[cfg(feature = "redis-rs")]
    RedisRs(redis_rs::RedisRs),
}

/// Why a script did not run, or not to its end.
#[derive(Debug)]
enum Failure {
    Timeout,
    Unreachable(Box<dyn std::error::Error + Send + Sync>),
    /// The server's own words.
    Refused(String),
    Protocol(&'static str),
}

impl Link {
    /// Runs the script, which is taught first where it is not known.
    async fn run(&self, script: &'static Script, call: &Call, deadline: Instant) -> Result<Vec<Item>, Failure> {
        match self.run_as(script, Program::Known, call, deadline).await {
            // Proves that nothing ran, so this is not a second attempt.
            Err(Failure::Refused(error)) if error.starts_with("NOSCRIPT") => {
                self.run_as(script, Program::Taught, call, deadline).await
            }
            answered => answered,
        }
    }

    async fn run_as(
        &self,
        script: &'static Script,
        program: Program,
        call: &Call,
        deadline: Instant,
    ) -> Result<Vec<Item>, Failure> {
        match self {
            #[cfg(feature = "fred")]
            Self::Fred(link) => link.run(script, program, call, deadline).await,
            #[cfg(feature = "redis-rs")]
            Self::RedisRs(link) => link.run(script, program, call, deadline).await,
        }
    }

    /// Whether all keys of a call must lie in one slot.
    fn is_clustered(&self) -> bool {
        match self {
            #[cfg(feature = "fred")]
            Self::Fred(_) => false,
            #[cfg(feature = "redis-rs")]
            Self::RedisRs(link) => link.is_clustered(),
        }
    }
}

impl Failure {
    /// Whether Redis did not answer, as opposed to an answer that is an error.
    fn is_silence(&self) -> bool {
        matches!(self, Self::Timeout | Self::Unreachable(_))
    }

    /// Whether Redis would say the same until somebody changes its settings or ours.
    fn is_final(&self) -> bool {
        const FINAL: [&str; 3] = ["NOAUTH", "NOPERM", "WRONGPASS"];
        matches!(self, Self::Refused(error) if FINAL.iter().any(|code| error.starts_with(code)))
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Timeout => Self::new(
                ErrorKind::Timeout,
                "Redis did not answer within the deadline of the check",
            ),
            Failure::Unreachable(source) => {
                Self::new(ErrorKind::Unreachable, "there is no connection to Redis").with_source(source)
            }
            Failure::Refused(error) => script::refused(&error),
            Failure::Protocol(fault) => Self::new(ErrorKind::Protocol, fault),
        }
    }
}
