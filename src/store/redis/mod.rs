mod ask;
mod breaker;
mod commit;
mod deny_cache;
#[cfg(feature = "fred")]
mod fred;
mod script;
mod server;
mod url;

use std::{fmt, sync::Arc, time::Duration};

use smallvec::SmallVec;
use tokio::time::{Instant, sleep};

use self::{
    ask::{Ask, Names},
    commit::{Group, Lane, Ticket},
    deny_cache::DenyCache,
    script::{Call, Item, Program, SCRIPT, Script},
    server::Server,
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
#[derive(Clone)]
#[must_use]
pub struct RedisStore {
    server: Arc<Server>,
    lane: Arc<Lane>,
}

/// Constructors.
impl RedisStore {
    /// A store in the Redis of this URL, with the default settings.
    ///
    /// `redis://:password@127.0.0.1:6379/0`, or `redis-sentinel://host:26379?sentinelServiceName=name`; with `rediss` for
    /// TLS (feature `fred-rustls`).
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
    #[cfg(feature = "fred")]
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
}

const MAX_DEADLINE: Duration = Duration::from_secs(3_600);

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
        if self.lane.breaker.is_open() {
            return Reply::Ready(Err(server::resting()));
        }

        let (server, lane) = (server.clone(), self.lane.clone());
        Reply::Pending(Box::pin(async move {
            let (ticket, answer) = Ticket::new(asks, now, stamp);
            lane.submit(&server, ticket);
            drop(server);
            answer.await.unwrap_or_else(|_| Err(server::abandoned()))
        }))
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
    #[cfg(feature = "fred")]
    pub async fn connect(self, url: &str) -> Result<RedisStore, ConfigError> {
        self.validate()?;
        let link = fred::Fred::connect(url).await?;
        Ok(self.build(Link::Fred(link)))
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
        Ok(self.build(Link::Fred(fred::Fred::from_client(client)?)))
    }

    /// A store on a pool of clients that the application already has; checks take turns.
    ///
    /// # Errors
    ///
    /// Those of [`client`](Self::client).
    #[cfg(feature = "fred")]
    pub fn pool(self, pool: ::fred::clients::Pool) -> Result<RedisStore, ConfigError> {
        self.validate()?;
        Ok(self.build(Link::Fred(fred::Fred::from_pool(pool)?)))
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
        Ok(())
    }

    fn build(self, link: Link) -> RedisStore {
        let server = Server {
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
            lane: Arc::default(),
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

/// The seam to a client of Redis: it runs a script on the node that owns the keys. Nothing else knows a client.
enum Link {
    #[cfg(feature = "fred")]
    Fred(fred::Fred),
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
