//! The overrides of a store in Redis: one sorted set, of which each process reads the changes once a second.

use std::{
    borrow::Cow,
    collections::HashSet,
    mem,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout},
};

use super::{
    backend::Backend, call::ScriptCall, failure::Failure, reply::take_integer, script::ScriptName, trial::explain,
};
use crate::{
    Key, Limit,
    store::{
        StoreError,
        overrides::{MAX_OVERRIDES, Override, OverrideTable, Overrides},
    },
};

/// Reads and changes the overrides in Redis.
pub(in crate::store) struct RedisOverrides {
    backend: Arc<Backend>,
    /// The version that was read last. Calls are made one after the other, so that none applies an older one.
    version: Mutex<u64>,
    started: Instant,
    /// The time of Redis at the start, in microseconds.
    started_at_us: AtomicU64,
}

/// The pause between two reads.
const PAUSE: Duration = Duration::from_secs(1);
/// The first pause after one that has failed.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
/// How long the reads are refused until that is logged: not while a cluster fails over.
const LASTS: Duration = Duration::from_secs(3);
/// The most changes under the key. With more, those that have been replaced or have expired are forgotten.
const MAX_CHANGES: usize = MAX_OVERRIDES + 1_000;

impl RedisOverrides {
    pub(super) fn new(backend: Arc<Backend>) -> Self {
        Self {
            backend,
            version: Mutex::default(),
            started: Instant::now(),
            started_at_us: AtomicU64::new(0),
        }
    }

    /// The key as it is stored.
    pub(in crate::store) fn stored_key<'a>(&self, key: &'a Key) -> Cow<'a, Key> {
        self.backend.key_format.stored_key(key)
    }

    /// The time of Redis, since the Unix epoch.
    pub(in crate::store) fn now(&self) -> Duration {
        Duration::from_micros(self.started_at_us.load(Ordering::Relaxed)) + self.started.elapsed()
    }

    /// Sets the limit of a key as it is stored for so long, in the name of an operator, or ends its override without a limit.
    pub(in crate::store) async fn set(
        &self,
        overrides: &Overrides,
        policy: &str,
        key: &Key,
        limit: Option<(Limit, Duration)>,
        set_by: Option<&str>,
    ) -> Result<(), StoreError> {
        let set_by = set_by.unwrap_or_default();
        // One that is ended is one that has expired.
        let (limit, lasts) = limit.unwrap_or((Limit::Unlimited, Duration::ZERO));
        let change = [
            lasts.as_micros().to_string(),
            format!("{policy}\n{key}\n{limit}\n{set_by}\n"),
        ];
        let changed = self.call_in_task(overrides, change.map(Bytes::from).into()).await;
        changed.map_err(|failure| explain(failure, &self.backend))
    }

    /// Makes a call in a task of the store, since others wait for the version: the runtime of a caller may be blocked.
    async fn call_in_task(&self, overrides: &Overrides, change: Vec<Bytes>) -> Result<(), Failure> {
        let overrides = overrides.clone();
        let call = self.backend.runtime.spawn(async move {
            match overrides.redis() {
                Some(redis) => redis.call(&overrides, change).await,
                None => Ok(()),
            }
        });
        // It waits for others first. That runtime may be blocked too.
        match timeout(3 * self.backend.longest_call(), call).await {
            Ok(called) => called.unwrap_or_else(|_| Err(Failure::ended_runtime())),
            Err(_) => Err(Failure::Timeout),
        }
    }

    async fn call(&self, overrides: &Overrides, change: impl IntoIterator<Item = Bytes>) -> Result<(), Failure> {
        let version = timeout(self.backend.longest_call(), self.version.lock()).await;
        let mut version = version.map_err(|_| Failure::Timeout)?;
        let mut call = ScriptCall::of(ScriptName::Overrides, [self.backend.key_format.overrides_key()]);
        call.arguments
            .extend([version.to_string(), MAX_CHANGES.to_string()].map(Bytes::from));
        call.arguments.extend(change);
        let reply = self.backend.run_long_call(&call).await?.numbers;
        let mut changes = &*reply;
        let (now, newest) = (take_integer(&mut changes)?, take_integer(&mut changes)?);
        let are_all = take_integer(&mut changes)? > 0;
        let started_at_us = now.saturating_sub(self.started.elapsed().as_micros() as u64);
        self.started_at_us.store(started_at_us, Ordering::Relaxed);
        if *version != newest {
            // Those that another version of the crate has written, and this one cannot read, are left out.
            let changes: Vec<_> = changes.split(|byte| *byte == 0).filter_map(read).collect();
            if are_all {
                // What was ended is a change too, for a while.
                let kept: HashSet<_> = changes.iter().map(|one| (&*one.policy, one.key.as_str())).collect();
                let known = overrides.list();
                let is_lost = |one: &&Override| !kept.contains(&(&*one.policy, one.key.as_str()));
                let lost = known.iter().filter(is_lost).count();
                if lost > 0 {
                    tracing::warn!(lost, "overrides are lost with the data of Redis; set them again");
                }
            }
            overrides.apply(are_all, changes.into_iter());
            *version = newest;
        }
        Ok(())
    }
}

fn read(change: &[u8]) -> Option<Override> {
    let mut lines = std::str::from_utf8(change).ok()?.split('\n');
    let [policy, key, limit, set_by] = [lines.next()?, lines.next()?, lines.next()?, lines.next()?];
    let expires_at = Duration::from_micros(lines.next()?.parse().ok()?);
    let set_by = Some(set_by).filter(|name| !name.is_empty());
    Some(Override::new(
        policy,
        Key::from_stored(key)?,
        (limit.parse().ok()?, expires_at),
        set_by,
    ))
}

/// Reads the overrides until the store is dropped. It logs refusals that last; that Redis is away is logged by its health.
pub(super) async fn follow(overrides: Weak<OverrideTable>) {
    let (mut refused_since, mut is_logged, mut retry) = (None, false, SHORTEST_PAUSE);
    while let Some(overrides) = overrides.upgrade().map(Overrides) {
        let Some(redis) = overrides.redis() else { return };
        let pause = match redis.call(&overrides, []).await {
            Ok(()) => {
                if is_logged {
                    tracing::info!("the overrides are read again");
                }
                (refused_since, is_logged, retry) = (None, false, SHORTEST_PAUSE);
                PAUSE
            }
            Err(failure) => {
                let since = *refused_since.get_or_insert_with(Instant::now);
                if failure.is_no_reply() {
                    refused_since = None;
                } else if !is_logged && since.elapsed() >= LASTS {
                    is_logged = true;
                    let error = explain(failure, &redis.backend).to_string();
                    tracing::warn!(error, "the overrides cannot be read; those that were read last apply");
                }
                let longer = PAUSE.min(2 * retry);
                mem::replace(&mut retry, longer)
            }
        };
        drop(overrides);
        sleep(pause).await;
    }
}

/// Reads the overrides until that succeeds, or fails by a permission or by what is stored under their key.
pub(super) async fn read_first(overrides: &Overrides) -> Result<(), StoreError> {
    let Some(redis) = overrides.redis() else { return Ok(()) };
    let mut pause = SHORTEST_PAUSE;
    loop {
        match redis.call_in_task(overrides, Vec::new()).await {
            Err(failure) if !failure.is_of_key() && !failure.is_refusal() => sleep(pause).await,
            read => return read.map_err(|failure| explain(failure, &redis.backend)),
        }
        pause = PAUSE.min(2 * pause);
    }
}
