mod across;
mod ask;
mod breaker;
mod builder;
mod commit;
mod deny_cache;
#[cfg(feature = "fred")]
mod fred;
mod lanes;
mod link;
#[cfg(feature = "redis-rs")]
mod redis_rs;
mod script;
mod server;
mod slot;
mod url;

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};

pub use self::{builder::RedisStoreBuilder, link::ClientLibrary};

use self::{ask::Ask, script::SCRIPT, server::Server};
use super::{Reply, Request, Store, StoreError};
use crate::ConfigError;

/// Keeps counts in Redis, 6.2 or later, shared by all replicas of a service.
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
/// # When Redis does not answer
///
/// After three calls in a row without an answer, a breaker keeps checks from Redis: they fail at once, and what becomes of
/// the requests is up to their [`FailureMode`](crate::FailureMode), or to a [`Fallback`](crate::Fallback). Ten times a
/// second somebody probes, and with the first answer checks go on. In a cluster each slot has a breaker of its own.
///
/// # Group commit
///
/// While calls of the script are on their way, checks gather, and the next call carries them, up to 256. At most eight calls
/// are on their way at once, and two when they carry many, each with half of those who ask: Redis works on one while the
/// others are told. In a cluster that holds for each slot. A check that finds none on its way leaves at once and alone:
/// nothing waits for a timer. Decisions are those that the checks would get one by one, first come, first served. Checks
/// that are equal are one question in the call, however many they are, so that a hot key costs Redis hardly more than a
/// cold one.
///
/// A check whose caller has gone, or whose deadline has passed, before the call leaves is not counted; after that, it is.
/// An error that one request meets, such as a key of another type, is no error of its neighbors.
///
/// # The deny cache
///
/// Who was denied is denied again without asking Redis, until the wait is over and for a second at most: by the same
/// policies with the same numbers, for the same key, at the same cost or a higher one (for which the wait is a lower
/// bound). The wait runs down meanwhile. A [reset](crate::Limiter::reset) or [refund](crate::Limiter::refund) by this
/// process is seen at once; one by another process, a key that was deleted in Redis, or a clock that was set, after a
/// second at most. 10,000 denials are remembered; when more come, the oldest are forgotten.
///
/// # In a cluster
///
/// The policies of one caller lie in one slot and are decided together. Those about different callers, such as an address
/// and a user, lie in several, and no call reaches two: they are asked one after the other, and when one denies, what the
/// earlier ones were charged is refunded. Meanwhile, or if the refund is lost, others may be denied for it: by that cost at
/// most, and until it expires. If a later slot does not answer, the earlier ones stay charged.
///
/// # What lies in Redis
///
/// One key for each policy and caller, `<prefix>:1:<algorithm>:<policy>:{<key>}`, such as
/// `quota:1:log:login:{ip=203.0.113.7|path=/login}`. Each expires by itself, at most a second after it stops to matter.
/// Set Redis's `maxmemory-policy` to `noeviction`, or choose an instance of its own: a key that is evicted is a limit that
/// is reset. A failover loses what the replica had not received yet, and as much may be admitted again.
///
#[doc = include_str!("faults.md")]
///
#[doc = include_str!("speed.md")]
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
        RedisStoreBuilder::new()
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

impl Store for RedisStore {
    fn decide(&self, requests: &[Request<'_>]) -> Reply {
        let server = &self.server;
        let now = Instant::now();
        if let (Some(cache), [request]) = (&server.deny_cache, requests)
            && let Some(answer) = cache.answer(&server.names, request, now)
        {
            return Reply::Ready(Ok(answer));
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
        match server.lanes.of(&asks) {
            Some(lane) if lane.breaker.is_open() => Reply::Ready(Err(server::resting())),
            Some(lane) => Reply::Pending(Box::pin(server.ask(lane, asks, now, stamp))),
            None => Reply::Pending(Box::pin(across::ask(server.clone(), asks, now))),
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
