#[cfg(feature = "fred")]
mod fred;
mod script;
mod url;

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use self::script::{Call, Item, Names, Program, SCRIPT, Script};
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
    shared: Arc<Shared>,
}

struct Shared {
    link: Link,
    script: &'static Script,
    names: Names,
    deadline: Duration,
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

impl Store for RedisStore {
    fn decide(&self, requests: &[Request<'_>]) -> Reply {
        let mut call = Call::new(&self.shared.names, requests, guess());
        let shared = self.shared.clone();

        Reply::Pending(Box::pin(async move {
            let deadline = Instant::now() + shared.deadline;
            let mut items = shared.link.run(shared.script, &call, deadline).await?;
            if let Some(now) = call.missed(&items) {
                // Nothing was decided, so this is not a second attempt.
                call.guess(now);
                items = shared.link.run(shared.script, &call, deadline).await?;
            }
            call.decode(&items)
        }))
    }
}

/// About the time that Redis has, in microseconds, to find the calendar windows around it.
fn guess() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_micros() as u64
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.shared.names.prefix)
            .field("deadline", &self.shared.deadline)
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

    /// For this crate's own tests: the time is what this key of Redis holds, in microseconds.
    #[doc(hidden)]
    pub fn clock_in(mut self, key: &str) -> Self {
        self.script = Script::with_clock_in(key);
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
        RedisStore {
            shared: Arc::new(Shared {
                link,
                script: self.script,
                names: self.names,
                deadline: self.deadline,
            }),
        }
    }
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStoreBuilder")
            .field("prefix", &self.names.prefix)
            .field("deadline", &self.deadline)
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
    async fn run(&self, script: &'static Script, call: &Call, deadline: Instant) -> Result<Vec<Item>, StoreError> {
        match self.run_as(script, Program::Known, call, deadline).await {
            // Proves that nothing ran, so this is not a second attempt.
            Err(Failure::Refused(error)) if error.starts_with("NOSCRIPT") => self
                .run_as(script, Program::Taught, call, deadline)
                .await
                .map_err(StoreError::from),
            answered => answered.map_err(StoreError::from),
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
            Failure::Refused(error) => Self::new(ErrorKind::Refused, format!("Redis answered: {error}")),
            Failure::Protocol(fault) => Self::new(ErrorKind::Protocol, fault),
        }
    }
}
