mod across;
mod ask;
mod breaker;
mod builder;
mod commit_queue;
mod deny_cache;
#[cfg(feature = "fred")]
mod fred;
mod link;
mod patience;
mod queues;
#[cfg(feature = "redis")]
mod redis_rs;
mod refusal;
mod script;
mod server;
#[cfg(test)]
mod simulation;
mod slot;
mod task;
mod trial;
mod url;

use std::{fmt, sync::Arc};

use tokio::time::Instant;

pub use self::{builder::RedisStoreBuilder, link::ClientLibrary};

use self::{ask::Ask, script::SCRIPT, server::Server};
use super::{Store, StoreError, StoreFuture, StoreId, StoreRequest, uncounted};
use crate::ConfigError;

/// Keeps counts in Redis, 6.2 or later, or Valkey, shared by all replicas of a service.
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
/// # Deadlines
///
/// Redis is given the [deadline](RedisStoreBuilder::deadline), 100 ms, from the time a call is sent. A check that waits for
/// other calls first waits for at most one deadline more. So a check takes at most two deadlines; in a cluster, for each slot
/// that its keys lie in. A check that fails may have been counted if it was sent.
///
/// The deadline measures Redis, not this process. While handlers block the threads of the runtime, or the process is stopped,
/// a reply that has arrived cannot be read. Such a stall does not count: the deadline is counted in four steps, and a step
/// that takes longer counts as one. A check then takes longer by at most four of the longest stalls (eight if it had to wait
/// for other calls), and at most by ten seconds for each call.
///
/// The connections belong to the runtime in which the store was built. Checks can be made in other runtimes, and a runtime that
/// ends holds up no check of another; but if the first one ends, its connections end.
///
/// # When Redis does not reply
///
/// After three calls in a row without a reply, a breaker opens: checks fail at once, and what happens to the requests is
/// defined by their [`FailureMode`](crate::FailureMode). A task probes Redis every 100 ms, and the first reply closes the
/// breaker. In a cluster each slot has a breaker of its own.
///
/// # Group commit
///
/// While calls of the script are on their way, checks wait in a queue, and the next call carries up to 256 of them. At most
/// eight calls are on their way at once, and two when they carry many checks, each with half of them: Redis works on one while
/// the callers of the other are answered. In a cluster that holds for each slot. A check that finds no call on its way is sent
/// at once and alone: no check waits for a timer. Decisions are those that the checks would get one by one, first come, first
/// served. Equal checks are sent once with their number, so that a hot key costs Redis hardly more than a cold one.
///
/// A check whose caller has left before the call is sent is not counted; after that, it is. An error that one request meets,
/// such as a key of another type, is no error of its neighbors.
///
/// # The deny cache
///
/// Who was denied is denied again without asking Redis, until the wait is over and for a second at most: by the same
/// policies with the same numbers, for the same key, at the same cost or a higher one (for which the wait is a lower
/// bound). The wait runs down meanwhile. A [reset](crate::Limiter::reset) or [refund](crate::Receipt::refund) by this
/// process is seen at once; one by another process, a key that was deleted in Redis, or a clock that was set, after a
/// second at most. 10,000 denials are remembered; when more come, the oldest are forgotten.
///
/// # In a cluster
///
/// The policies of one caller lie in one slot and are decided together. Those about different callers, such as an address
/// and a user, lie in several, and no call reaches two: they are asked one after the other, and when one denies, what the
/// earlier ones were charged is refunded, also if the caller has left. Meanwhile, or if the refund is lost, other requests may
/// be denied for it: by that cost at most, and until it expires. If a later slot does not reply, the earlier ones stay
/// charged.
///
/// # What lies in Redis
///
/// One key for each policy and caller, `<prefix>:1:<algorithm>:<policy>:{<key>}`, such as
/// `quota:1:log:login:{ip=203.0.113.7|path=/login}`. Each expires by itself, at most a second after it stops to matter.
/// Set Redis's `maxmemory-policy` to `noeviction`, or choose an instance of its own: a key that is evicted is a limit that
/// is reset. A failover loses what the replica had not received yet, and as much may be admitted again.
///
/// # Measurements
///
/// * [Behavior under faults](crate::guide::faults): what is admitted and how long checks fail while Redis is killed, hangs,
///   fails over or runs out of memory.
/// * [Speed](crate::guide::speed), compared with other crates.
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
    /// | a cluster | `redis-cluster://user:password@host:6379?node=host:6379`, any of its nodes (feature `redis`) |
    ///
    /// With `rediss` in place of `redis` it is TLS (feature `enable-rustls-ring` or `tokio-rustls-comp`), and the certificate of
    /// Redis must be signed by an authority that the system knows, or one in the file that the environment variable
    /// `SSL_CERT_FILE` names.
    ///
    /// It returns when checks can be made: it has run each command that a check needs, on a key with the
    /// [prefix](RedisStoreBuilder::prefix) of the store, in a cluster on every primary. A service that must start while
    /// Redis is away takes [`connect_lazy`](Self::connect_lazy). The connection is closed when the last clone of the store
    /// is dropped.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    ///
    /// # Errors
    ///
    /// * If the URL is not one of Redis, or needs a feature that is off.
    /// * If Redis refuses the credentials, a command, the keys or the script. The error names what is refused, and the
    ///   `ACL SETUSER` line of a user that has all permissions that the store needs.
    /// * If Redis cannot be used within the [connect timeout](RedisStoreBuilder::connect_timeout), 5 s. The
    ///   [source](std::error::Error::source) of the error is the last cause.
    pub async fn connect(url: &str) -> Result<Self, ConfigError> {
        Self::builder().connect(url).await
    }

    /// A store in the Redis of this URL, with the default settings, which is connected in the background.
    ///
    /// It is for services that must start while Redis is away; others take [`connect`](Self::connect), which finds a wrong
    /// password or a missing permission when the service starts. Until Redis is connected, checks fail at once, and what
    /// happens to the requests is defined by their [`FailureMode`](crate::FailureMode). What Redis refuses is logged as an
    /// error (feature `tracing`), once, with the text of the error that `connect` would return, and each check that meets
    /// it fails.
    ///
    /// ```no_run
    /// use tower_quota::RedisStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::ConfigError> {
    /// let store = RedisStore::connect_lazy("redis://127.0.0.1:6379")?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    ///
    /// # Errors
    ///
    /// If the URL is not one of Redis, or needs a feature that is off.
    pub fn connect_lazy(url: &str) -> Result<Self, ConfigError> {
        Self::builder().connect_lazy(url)
    }

    /// A store with other settings.
    pub fn builder() -> RedisStoreBuilder {
        RedisStoreBuilder::new()
    }
}

/// Operations.
impl RedisStore {
    /// Waits until checks can be made, as [`connect`](Self::connect) does, and without a timeout.
    ///
    /// It is for a store that is connected lazily, or on a client of the application.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tokio::time::timeout;
    /// use tower_quota::RedisStore;
    ///
    /// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::connect_lazy("redis://127.0.0.1:6379")?;
    /// timeout(Duration::from_secs(30), store.ready()).await??;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If Redis refuses the credentials, a command, the keys or the script, as for [`connect`](Self::connect).
    pub async fn ready(&self) -> Result<(), StoreError> {
        self.server.ready().await
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

impl Store for RedisStore {
    fn id(&self) -> Option<StoreId> {
        Some(StoreId::of(&self.server))
    }

    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        uncounted::apart(requests, |requests| self.decide_counted(requests))
    }
}

impl RedisStore {
    fn decide_counted(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let server = &self.server;
        let now = Instant::now();
        if let (Some(cache), [request]) = (&server.deny_cache, requests)
            && let Some(answer) = cache.answer(&server.names, request, now)
        {
            return StoreFuture::ready(Ok(answer));
        }

        let asks: Vec<Ask> = requests
            .iter()
            .map(|request| Ask::new(&server.names, request))
            .collect();
        let mut stamp = None;
        if let Some(cache) = &server.deny_cache {
            if let [ask] = &*asks {
                stamp = Some(cache.stamp(ask));
            }
            cache.forget(&asks);
        }
        match server.queues.of(&asks) {
            Some(queue) => match server.admits(&queue, &asks) {
                Ok(()) => StoreFuture::pending(queue.ask(server.clone(), asks, now, stamp)),
                Err(error) => StoreFuture::ready(Err(error)),
            },
            None => StoreFuture::pending(across::ask(server.clone(), asks, now)),
        }
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("keys", &self.server.names)
            .field("deadline", &self.server.deadline)
            .finish_non_exhaustive()
    }
}
