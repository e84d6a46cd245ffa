use std::{
    future::ready as ready_with,
    slice,
    sync::{Arc, LazyLock, Weak},
};

use bytes::Bytes;
use tokio::time::Instant;

use super::{
    across_slots,
    call::ScriptCall,
    failure::Failure,
    key_format::slot_of_first,
    overrides::{RedisOverrides, follow, read_first},
    prefetch::{Prefetch, Sent, pending},
    queues::{CallerRequests, CommitQueues, Decided},
    request::OwnedRequest,
    script::{SCRIPTS, ScriptName},
    task::spawn_on,
    trial::{explain, ready},
    wakes::Subscription,
};
use crate::store::{
    Overrides, SecretFuture, Store, StoreError, StoreFuture, StoreId, StoreRequest, StoreResponse, StoreStatus,
    overrides,
};

/// Storage backend in Redis 6.2 or later, or Valkey, shared by all replicas of a service.
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
/// # Connecting
///
/// | | |
/// | --- | --- |
/// | [`RedisStore::connect(url).await?`](Self::connect) | connects, and checks all permissions |
/// | [`RedisStore::builder().url(url).connect_lazy()?`](crate::RedisStoreBuilder::connect_lazy) | connects in the background, for a service that must start without Redis |
/// | [`RedisStore::builder()`](Self::builder) | other settings, or a client of the application |
///
/// URLs:
///
/// | | |
/// | --- | --- |
/// | one server | `redis://user:password@127.0.0.1:6379/0` |
/// | a Unix socket | `redis+unix:///run/redis.sock` (with fred: feature `unix-sockets`) |
/// | Sentinel | `redis-sentinel://user:password@host:26379/0?sentinelServiceName=name&node=host:26379`; with credentials of the sentinels, `&sentinelUsername=user&sentinelPassword=password` |
/// | a cluster | `redis-cluster://user:password@host:6379?node=host:6379`, any of its nodes (feature `cluster`) |
///
/// `rediss` in place of `redis` means TLS (feature `tls`). The
/// certificate of Redis must be signed by an authority of the system, or by one in the file that the environment variable
/// `SSL_CERT_FILE` names. redis-rs reads the authorities for each connection, fred again when it has refused a certificate.
///
/// Credentials that are rotated or expire are set with
/// [`password_file`](crate::RedisStoreBuilder::password_file) and [`credentials`](crate::RedisStoreBuilder::credentials).
///
/// With both libraries built in, fred connects if it supports the URL with the features that are on, else redis-rs;
/// [`client_library`](crate::RedisStoreBuilder::client_library) sets one.
///
/// The first request that [waits](crate::Policy::wait_up_to) adds a connection, to one server, which receives the messages that wake
/// such requests.
///
/// The connections belong to the runtime in which the store was built, and so do the tasks that several callers depend on; they end
/// with it, and while it is blocked no check is decided. Checks can be made in other runtimes, and one of these that ends, or is blocked,
/// fails no check of another. One that is blocked while it checks requests that [wait](crate::Policy::wait_up_to) holds up those of other
/// runtimes for the same key, for up to 30 s.
///
/// # Checks
///
/// A check is one call of a Lua script, which decides and counts at one instant of the clock of Redis, so replicas do not
/// race and their clocks do not matter. The script is called by its digest, and sent once more with its text if Redis does not
/// have it. Nothing else is sent twice: a request is counted once or not at all.
///
/// # Deadlines
///
/// A call has the [deadline](crate::RedisStoreBuilder::deadline), by default 100 ms, from when it is sent. A check that has to
/// wait for other calls first waits for at most one deadline more. So a check takes at most two deadlines; in a cluster, two
/// for each slot of its keys and for each of its refunds, and while one of these slots moves, two more, two for each key in it,
/// and two for each ban that a denial counts for. A check that fails may have been counted if it was sent.
///
/// The deadline measures Redis and not this process. While handlers block the threads of the runtime, or the process is stopped,
/// a reply that has arrived cannot be read. Such a stall does not count: the deadline is counted in four steps of at least 5 ms, and a step that
/// takes longer counts as one. A check then takes longer by at most four of the longest stalls (eight if it had to wait for
/// other calls); with fred by at most 10 s for each call.
///
/// # When Redis does not reply
///
/// After three calls in a row without a reply, a breaker opens: checks fail at once, and the
/// [`FailureMode`](crate::FailureMode) defines what happens to the requests. While it is open, a task probes Redis after 6 ms,
/// and with pauses that grow to 100 ms; the first reply closes it. In a cluster each primary has a breaker of its own.
///
/// A connection that is lost is replaced at once, then again after 150 to 250 ms. With either client this costs the checks in
/// flight and those of a few milliseconds.
///
/// [`status`](Store::status) has the health of each server by the shares of its checks that have failed in the last minute, and
/// changes of it are logged: [operating](crate::guide::operating#log-lines) has the lines.
///
/// # Group commit
///
/// While script calls are in flight, checks wait in a queue, and the next call contains up to 256 of them. At most eight calls
/// are in flight, and two when they contain many checks, each with half of them: Redis executes one while the callers of the
/// other continue. In a cluster this holds for each primary. If no call is in flight, a check is sent at once and alone: no check
/// waits for a timer. The decisions are those of the checks one by one, in the order in which they were made. Equal checks are
/// sent once with their number, so a hot key costs Redis hardly more than a cold one; but not those with slots, bans or waits, or of a
/// bucket whose tokens do not take a whole number of microseconds each, such as 30 a second.
///
/// A check is not counted if its caller leaves before the call is sent; later it is. One with keys in several slots of a cluster ends
/// without its caller, and is counted. An error of one check, such as a key of
/// another type, is not an error of the others in the call.
///
/// # Deny cache
///
/// Denials are cached in the process until their `retry_after`, for at most 1 s. A cached denial applies to checks of the same
/// policies with the same limits and the same key, at the same cost or a higher one, for which the wait is a lower bound. A
/// denial by a policy with [bans](crate::Policy::ban) is cached only while a ban is in force.
///
/// Denials by policies with [waits](crate::Policy::wait_up_to) are not cached, since a request that leaves the line makes room at any
/// time. While the line of this process is [full](crate::Policy::max_waiting), equal requests share a denial for 10 ms.
///
/// A [reset](crate::Limiter::reset) or [refund](crate::Receipt::refund) by this process removes the cached denial at once.
/// After a reset by another process, a key deleted in Redis, or a clock that was set, it remains for at most 1 s. The cache has
/// 10,000 entries; the oldest ones are evicted.
///
/// # In a cluster
///
/// The policies of one caller lie in one slot and are decided together. Those of different keys, such as an address and a user,
/// lie in several slots, which may be on several primaries. Then they are decided one after the other, and when one denies or
/// fails, the charges in the earlier ones are refunded, even if the caller has left. Until then, or if the refund is lost, other
/// requests may be denied for it: by that cost at most, and until it expires. So may they for a charge in a slot that has counted it
/// and whose reply is lost. Policies whose slots are on one primary and do not move are decided in one call.
///
/// A call contains checks of all slots of a primary. It declares one key, and the script uses the others as arguments. A check
/// whose slot has moved, or is moving, is not executed there, and is sent once more with all of its keys declared, as the
/// redirections of a cluster require. Redis since 6.2 and Valkey permit this. The store tries it when it connects; if a server
/// refuses it, each call contains checks of one slot, and one line in the log says so (level `INFO`).
///
/// While a slot moves, none of the nodes may have all keys of a check with several of them: those of two policies, of a policy and
/// its bans, or of one for which requests wait. Then its policies are decided one after the other, with refunds as above: the ban
/// is read before the count, and a denial is counted for it afterwards. Lines are not regarded, so a request may be admitted before
/// one of another process that has waited for longer, and one that waits notices a refund, or slots that are free, within a second.
/// Several units of several policies at once follow the failure modes until the slot has moved.
///
/// # Keys in Redis
///
/// One key for each policy and caller, `<prefix>:1:<algorithm>/<shape>:<policy>:{<key>}`, such as
/// `quota:1:log/1min:login:{ip=203.0.113.7|path=/login}`. A policy with [bans](crate::Policy::ban) has
/// one more for each caller that it has denied, such as `quota:1:ban:login:{ip=203.0.113.7|path=/login}`, and one with
/// [waits](crate::Policy::wait_up_to) while requests wait for a key, such as `quota:1:line:log/1min:login:{ip=203.0.113.7|path=/login}`. Each expires at most
/// 1 s after it stops to matter, or would without refunds. Set the `maxmemory-policy` of Redis to `noeviction`, or use an instance of its own: an evicted
/// key is a limit that is reset. A failover loses what the replica had not received yet, and as much may be admitted again.
/// With Sentinel a planned one also loses what the old primary counts until the store has left it, about 2 s after `+switch-master`:
/// the sentinels of the URL are queried once a second. It is left once more than half of these report the new primary and a connection
/// to that is made, so the URL has to name all sentinels, at least three, and not an address behind which there are several.
///
/// # Measurements
///
/// * [Behavior under faults](crate::guide::faults): what is admitted and how long checks fail while Redis is killed, hangs,
///   fails over or runs out of memory.
/// * [Speed](crate::guide::speed), compared with other crates.
#[derive(Clone)]
#[must_use]
pub struct RedisStore {
    pub(super) queues: Arc<CommitQueues>,
    subscription: Arc<Subscription>,
    followed: Option<Overrides>,
    pub(super) prefetch: Arc<Prefetch>,
}

/// Operations.
impl RedisStore {
    pub(super) fn new(queues: CommitQueues) -> Self {
        Self {
            queues: Arc::new(queues),
            subscription: Arc::default(),
            followed: None,
            prefetch: Arc::default(),
        }
    }

    /// The same with overrides, which a task reads.
    pub(super) fn with_overrides(mut self) -> Self {
        let backend = &self.queues.backend;
        let redis = RedisOverrides::new(backend.clone());
        let overrides = Overrides::new(overrides::OverrideSource::Redis(redis));
        spawn_on(&backend.runtime, follow(Arc::downgrade(&overrides.0)));
        self.followed = Some(overrides);
        self
    }

    /// The response to a request that is decided without a call; else what is to be noted of the reply.
    fn known(&self, request: &StoreRequest<'_>, now: Instant) -> Result<StoreResponse, Option<Sent>> {
        let mut sent = None;
        if let Some(limited) = Prefetch::charge_of(request) {
            match self.prefetch.use_for(limited, now) {
                Ok((response, more)) => {
                    if let Some(more) = more {
                        self.prefetch.take_ahead(&self.queues, more);
                    }
                    self.queues.backend.metrics.prefetch_hit();
                    return Ok(response);
                }
                Err(noted) => sent = noted,
            }
        }
        let cache = self.queues.backend.deny_cache.as_ref();
        let response = cache.and_then(|cache| cache.get(request, now)).ok_or(sent)?;
        self.queues.backend.metrics.deny_cache_hit();
        Ok(response)
    }

    /// Waits until checks can be made and the [overrides](crate::RedisStoreBuilder::overrides) have been read, as
    /// [`connect`](Self::connect) does, and without a timeout.
    ///
    /// It is for a store that connects in the background; use it before accepting traffic.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tokio::time::timeout;
    /// use tower_quota::RedisStore;
    ///
    /// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::builder().url("redis://127.0.0.1:6379").connect_lazy()?;
    /// timeout(Duration::from_secs(30), store.ready()).await??;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If Redis refuses the credentials, a command, the keys or the script, as for [`connect`](Self::connect), and if the runtime in
    /// which the store was built has ended.
    pub async fn ready(&self) -> Result<(), StoreError> {
        ready(&self.queues.backend).await?;
        self.overrides_read().await
    }

    /// Waits until the overrides have been read, if the store has any.
    pub(super) async fn overrides_read(&self) -> Result<(), StoreError> {
        match &self.followed {
            Some(overrides) => read_first(overrides).await,
            None => Ok(()),
        }
    }

    /// The texts of the scripts that the store runs.
    ///
    /// A store sends them to Redis with `EVAL` when Redis does not have them. If its user has no permission for that, load them
    /// into every node, replicas included, each time that one starts: `SCRIPT LOAD` returns the digest by which the store calls
    /// them.
    ///
    /// ```
    /// use tower_quota::RedisStore;
    ///
    /// for script in RedisStore::scripts() {
    ///     // redis-cli SCRIPT LOAD "$script"
    ///     assert!(script.starts_with("-- ") && script == &script.trim());
    /// }
    /// ```
    #[must_use]
    pub fn scripts() -> &'static [&'static str] {
        static TEXTS: LazyLock<Vec<&str>> = LazyLock::new(|| SCRIPTS.all().map(|script| script.source).collect());
        &TEXTS
    }
}

impl Store for RedisStore {
    fn id(&self) -> Option<StoreId> {
        Some(StoreId::of(&self.queues))
    }

    fn receive_wakes(&self) {
        self.subscription.begin(&self.queues.backend);
    }

    fn overrides(&self) -> Option<&Overrides> {
        self.followed.as_ref()
    }

    fn shared_secret(&self, known: [u8; 32]) -> Option<SecretFuture> {
        let backend = self.queues.backend.clone();
        if let Some(secret) = backend.key_format.secret_of_subjects() {
            return Some(Box::pin(ready_with(Ok(secret))));
        }
        Some(Box::pin(async move {
            let mut call = ScriptCall::of(ScriptName::Secret, [backend.key_format.secret_key()]);
            call.arguments.push(Bytes::copy_from_slice(&known));
            let reply = backend.run_long_call(&call).await.and_then(|reply| {
                let stored = <[u8; 32]>::try_from(&*reply.numbers);
                stored.map_err(|_| Failure::malformed_reply())
            });
            reply.map_err(|failure| explain(failure, &backend))
        }))
    }

    fn status(&self) -> Option<StoreStatus> {
        let (breakers, open) = self.queues.breakers();
        let status = StoreStatus::new("redis").number("breakers", breakers);
        let mut status = status.number("open breakers", open);
        status.nodes = self.queues.backend.client.health().status();
        Some(status)
    }

    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        let queues = &self.queues;
        let made_at = Instant::now();
        let key_format = &queues.backend.key_format;
        // Before what is known of a key, which has it as it is stored.
        let hashed: Option<Vec<OwnedRequest>> = requests.iter().map(|request| key_format.hashed(request)).collect();
        let known = match (hashed.as_deref(), requests) {
            (Some([request]), _) => self.known(request, made_at),
            (None, [request]) => self.known(request, made_at),
            _ => Err(None),
        };
        let noted = match known {
            Ok(response) => return StoreFuture::ready(Ok(response)),
            Err(sent) => sent.map(|sent| (self.prefetch.clone(), sent)),
        };
        let owned = || requests.iter().map(|request| request.to_owned(|_| {})).collect();
        let owned = hashed.unwrap_or_else(owned);

        let mut generation = None;
        if let Some(cache) = &queues.backend.deny_cache {
            if let [request] = &*owned {
                generation = Some(cache.generation(request));
            }
            cache.invalidate(&owned);
        }
        let queue = queues.queue_of(&owned);
        if let Some(queue) = &queue
            && let Err(error) = queue.check_breaker(owned.len(), &owned)
        {
            return StoreFuture::ready(Err(error));
        }
        // A reset that is not sent gives up no units.
        let resetting = self.prefetch.begin_reset(&owned);
        let Some(queue) = queue else {
            let decided = across_slots::decide(queues.clone(), Decided::nothing(owned), made_at, false);
            return pending(queues, resetting, decided);
        };
        let (all, queues) = (queues, Arc::downgrade(queues)); // a waiting caller keeps no connection open
        let own = CallerRequests {
            requests: owned,
            made_at,
            generation,
        };
        pending(all, resetting, async move {
            let response = finish(queue.decide(own).await?, &queues, made_at).await?;
            if let Some((prefetch, sent)) = noted
                && let Some(more) = prefetch.note(sent, &response, Instant::now())
                && let Some(queues) = queues.upgrade()
            {
                prefetch.take_ahead(&queues, more);
            }
            Ok(response)
        })
    }
}

/// Decides what a call to a node of a cluster has left.
async fn finish(
    mut decided: Decided,
    queues: &Weak<CommitQueues>,
    made_at: Instant,
) -> Result<StoreResponse, StoreError> {
    if let Some(response) = decided.response() {
        return response;
    }
    match queues.upgrade() {
        Some(queues) => Box::pin(across_slots::decide(queues, decided, made_at, true)).await,
        None => Err(Failure::Unreachable("the store was dropped".into()).into()),
    }
}

/// Sends a request of one charge.
pub(super) async fn send(queues: Arc<CommitQueues>, request: OwnedRequest) -> Result<StoreResponse, StoreError> {
    let (slot, made_at) = (slot_of_first(slice::from_ref(&request)), Instant::now());
    let decided = queues.decide_at(slot, false, request).await?;
    finish(decided, &Arc::downgrade(&queues), made_at).await
}

impl_debug!(RedisStore, store =>
    keys: store.queues.backend.key_format,
    deadline: store.queues.backend.deadline.duration
);
