//! The overrides of a store in Redis: one sorted set, which each process reads once a second if it has changed.

use std::{
    borrow::Cow,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::Mutex,
    time::{Instant, sleep},
};

use super::{
    backend::Backend,
    call::ScriptCall,
    failure::Failure,
    reply::{member, number},
    script::ScriptName,
    trial::run_beside,
};
use crate::{
    Key, Limit,
    store::{
        ErrorKind, StoreError,
        overrides::{MAX_OVERRIDES, Override, OverrideTable, Overrides, too_many},
    },
};

/// Reads and changes the overrides in Redis.
pub(in crate::store) struct RedisOverrides {
    backend: Arc<Backend>,
    /// The version that was read last, as text. Calls are made one after the other, so that none applies an older one.
    version: Mutex<String>,
    started: Instant,
    /// The time of Redis at the start, in microseconds.
    started_at_us: AtomicU64,
}

/// The pause between two reads.
const PAUSE: Duration = Duration::from_secs(1);

impl RedisOverrides {
    pub(super) fn new(backend: Arc<Backend>) -> Self {
        Self {
            backend,
            version: Mutex::new("0".to_owned()),
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

    /// Sets the limit of a key for so long, or ends its override without a limit.
    pub(in crate::store) async fn set(
        &self,
        overrides: &Overrides,
        policy: &str,
        key: &Key,
        limit: Option<(Limit, Duration)>,
    ) -> Result<(), StoreError> {
        let subject = format!("{policy}\n{}\n", self.stored_key(key));
        let (limit, lasts) = limit.map_or_else(Default::default, |(limit, lasts)| (limit.to_string(), lasts));
        let change = [subject, limit, lasts.as_micros().to_string(), MAX_OVERRIDES.to_string()];
        self.call(overrides, change.map(Bytes::from)).await
    }

    async fn call(&self, overrides: &Overrides, change: impl IntoIterator<Item = Bytes>) -> Result<(), StoreError> {
        let mut version = self.version.lock().await;
        let mut call = ScriptCall::of(ScriptName::Overrides, [self.backend.key_format.overrides_key()]);
        call.arguments.push(Bytes::from(version.clone()));
        call.arguments.extend(change);
        let reply = run_beside(&self.backend, &call).await?;
        let malformed = || StoreError::from(Failure::malformed_reply());
        let mut rest = &*reply;
        let [Some(now), Some(newest), Some(count)] = [(); 3].map(|()| number(&mut rest)) else {
            return Err(malformed());
        };
        let elapsed = self.started.elapsed().as_micros() as f64;
        self.started_at_us.store((now - elapsed) as u64, Ordering::Relaxed);
        let newest = format!("{newest:.0}");
        if count < 0.0 {
            return Err(too_many());
        } else if *version != newest {
            overrides.replace(list(rest, count as usize).ok_or_else(malformed)?);
            *version = newest;
        }
        Ok(())
    }
}

/// The overrides of a reply. Those that another version of the crate has written, and this one cannot read, are left out.
fn list(mut bytes: &[u8], count: usize) -> Option<Vec<Override>> {
    let mut list = Vec::new();
    for _ in 0..count {
        let expires_at = number(&mut bytes)?;
        list.extend(read(member(&mut bytes)?, expires_at));
    }
    Some(list)
}

fn read(member: &[u8], expires_at: f64) -> Option<Override> {
    let mut lines = std::str::from_utf8(member).ok()?.split('\n');
    let [policy, key, limit] = [lines.next()?, lines.next()?, lines.next()?];
    let expires_at = Duration::from_micros(expires_at as u64);
    Some(Override::new(
        policy,
        Key::from_stored(key)?,
        limit.parse().ok()?,
        expires_at,
    ))
}

/// Reads the overrides until the store is dropped. It logs the first of several refusals; that Redis is away is logged by its health.
pub(super) async fn follow(overrides: Weak<OverrideTable>) {
    let mut is_refused = false;
    loop {
        let Some(overrides) = overrides.upgrade().map(Overrides) else {
            return;
        };
        match read_newest(&overrides).await {
            Ok(()) => is_refused = false,
            Err(error) if error.kind() == ErrorKind::Refused && !is_refused => {
                tracing::warn!(
                    error = error.to_string(),
                    "the overrides cannot be read; those that were read last apply"
                );
                is_refused = true;
            }
            Err(_) => {}
        }
        drop(overrides);
        sleep(PAUSE).await;
    }
}

/// Reads the overrides. After a failure those that were read last apply.
pub(super) async fn read_newest(overrides: &Overrides) -> Result<(), StoreError> {
    match overrides.redis() {
        Some(redis) => redis.call(overrides, []).await,
        None => Ok(()),
    }
}
