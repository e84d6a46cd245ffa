use std::{
    fmt,
    str::FromStr,
    sync::{Arc, OnceLock},
};

#[cfg(feature = "admin")]
use super::NodeStatus;
use super::{MemoryStore, Store, health::Health, outstanding::PerStore};
use crate::{ConfigError, error::StoreError, limit::Share};

/// What happens to requests while the store fails.
///
/// A store fails when it does not reply in time, cannot be reached, or replies with an error. A failure is never reported as
/// a denial by a limit.
///
/// By default each process counts by itself, with the same limits, until the store replies again:
///
/// ```
/// use tower_quota::{FailureMode, Limiter, Policy, SlidingLog};
/// use tower_quota::store::{ErrorKind, StoreFuture, StoreRequest, Store, StoreError};
///
/// /// A Redis that is down.
/// struct Down;
///
/// impl Store for Down {
///     fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
///         StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "connection refused")))
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mail = Policy::new("mail", SlidingLog::per_hour(2));
/// let limiter = Limiter::new(Down, mail.clone());
/// assert!(limiter.check("42").await?.is_allowed());
/// assert!(limiter.check("42").await?.is_allowed());
/// assert!(!limiter.check("42").await?.is_allowed());
///
/// // One of two replicas.
/// let limiter = Limiter::new(Down, mail.clone().failure_mode(FailureMode::local_share(1, 2)));
/// assert!(limiter.check("42").await?.is_allowed());
/// assert!(!limiter.check("42").await?.is_allowed());
///
/// let limiter = Limiter::new(Down, mail.clone().failure_mode(FailureMode::Open));
/// assert!(limiter.check("42").await?.is_allowed()); // and each other one
///
/// let limiter = Limiter::new(Down, mail.failure_mode(FailureMode::Closed));
/// assert!(limiter.check("42").await.is_err());
/// # Ok(())
/// # }
/// ```
///
/// | mode | most that N processes admit during a failure, from empty counts |
/// | --- | --- |
/// | `Local`, the default | N times the limit |
/// | `local_share(1, N)` | the limit, if it is at least N; else N |
/// | `Open` | everything |
/// | `Closed` | nothing; with a [prefetch](crate::limit#units-that-are-taken-ahead) what was taken ahead before, for at most its time |
///
/// [Behavior under faults](crate::guide::faults) lists what three processes admit in each mode when Redis is killed, stopped,
/// cut off or failed over.
///
/// # Counting locally
///
/// The counts of the process, in a [`MemoryStore`] of 100,000 keys that all layers and limiters on one store share as long as
/// one of them exists, start at the first failure with the bans alone that this process has made by hand or learnt; a later failure
/// continues with them. When the store replies again, its
/// own counts apply and the local ones do not. So in one window a caller may be admitted up to the limit by the store, and up
/// to the limit by each process. A check that timed out may have been counted in both. An attacker that makes the store fail
/// meets the same limits in each process.
///
/// `limit` and `RateLimit-Policy` show the whole limit; `remaining` and the waits are those of the share. A share is rounded
/// down, and never below 1. Of a [`TokenBucket`](crate::TokenBucket) the burst and the rate are shared, and the rate exactly: a
/// quarter of 3 a day is 3 in 4 days, with counts of its own. (Where such a rate is not exact in integers below 2^53, only the burst
/// is shared.) A request whose cost is within the limit but above the share counts as the whole share, so that it is admitted if nothing
/// else was.
///
/// A refund goes to where the request was counted. A [reset](crate::Limiter::reset) resets the store and the counts of this
/// process, of a bucket those of its own share, and fails if the store does.
///
/// Of several policies that a request counts against, one that is `Closed` closes the request. Else those that count locally
/// are decided together, and those that are `Open` are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureMode {
    /// Each process counts by itself, with the same limits.
    #[default]
    Local,
    /// Each process counts by itself, with a [share](Self::local_share) of the limits.
    #[non_exhaustive]
    LocalShare {
        /// The parts that this process has.
        parts: u32,
        /// The number of all parts.
        of: u32,
    },
    /// The request passes uncounted, and its response has no rate-limit fields.
    Open,
    /// The request is rejected with `503 Service Unavailable`, or as the layer's
    /// [`format`](crate::RateLimitLayer::format) has it; a limiter returns the error of the store.
    Closed,
}

impl FailureMode {
    /// Each process counts by itself, with `parts` of `of` parts of the limits: `local_share(1, 4)` for four replicas.
    ///
    /// ```
    /// use tower_quota::FailureMode;
    ///
    /// const REPLICA: FailureMode = FailureMode::local_share(1, 4);
    /// assert_eq!("local 1/4".parse::<FailureMode>()?, REPLICA);
    /// # Ok::<(), tower_quota::ConfigError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If `parts` is 0 or above `of`; at compile time in a `const`.
    #[must_use]
    #[track_caller]
    pub const fn local_share(parts: u32, of: u32) -> Self {
        match Share::new(parts, of) {
            Some(_) => Self::LocalShare { parts, of },
            None => panic!("a share is above 0 and at most 1, as in `FailureMode::local_share(1, 4)`"),
        }
    }

    pub(crate) fn share(self) -> Option<Share> {
        match self {
            Self::Local => Some(Share::WHOLE),
            Self::LocalShare { parts, of } => Share::new(parts, of),
            Self::Open | Self::Closed => None,
        }
    }
}

/// The text that parses to the same mode.
impl fmt::Display for FailureMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("local"),
            Self::LocalShare { parts, of } => write!(f, "local {parts}/{of}"),
            Self::Open => f.write_str("open"),
            Self::Closed => f.write_str("closed"),
        }
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for FailureMode {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Reads it from its text.
#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for FailureMode {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        crate::limit::deserialize_text(deserializer, "a failure mode such as \"local 1/4\"", str::parse)
    }
}

/// `local`, `local 1/4`, `open` or `closed`.
impl FromStr for FailureMode {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "local" => return Ok(Self::Local),
            "open" => return Ok(Self::Open),
            "closed" => return Ok(Self::Closed),
            _ => {}
        }
        let share = text.strip_prefix("local ").and_then(|share| {
            let (parts, of) = share.trim().split_once('/')?;
            let (parts, of) = (parts.parse().ok()?, of.parse().ok()?);
            Share::new(parts, of).map(|_| Self::LocalShare { parts, of })
        });
        share.ok_or_else(|| {
            ConfigError::new(format!(
                "{text:?} is not a failure mode; write `local`, `local 1/4`, `open` or `closed`"
            ))
        })
    }
}

/// The counts of this process while a store fails, and the health of a store that records none itself. All layers and limiters
/// on one store share them.
#[derive(Default)]
pub(crate) struct Failover {
    counts: OnceLock<Arc<dyn Store>>,
    health: Arc<Health>,
}

static FAILOVERS: PerStore<Failover> = PerStore::new();

impl Failover {
    pub(crate) fn of(store: &impl Store) -> Arc<Self> {
        FAILOVERS.of(store.id())
    }

    /// Records a failure.
    pub(crate) fn failed(&self, error: &StoreError) {
        if !error.is_recorded() {
            self.health.failed(&self.health.rest, 1, error);
        }
    }

    /// Records a reply of the store.
    #[inline]
    pub(crate) fn replied(&self) {
        // Nothing is written while no check fails.
        if self.health.is_watching() {
            self.health.decided(&self.health.rest, 1);
        }
    }

    /// The failures that the store has not recorded itself.
    #[cfg(feature = "admin")]
    pub(crate) fn status(&self) -> Vec<NodeStatus> {
        self.health.status()
    }

    pub(crate) fn has_counts(&self) -> bool {
        self.counts.get().is_some()
    }

    /// The counts of this process.
    pub(crate) fn counts(&self) -> &Arc<dyn Store> {
        self.counts.get_or_init(|| Arc::new(MemoryStore::new()))
    }
}

impl_debug!(Failover, _failover =>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_a_line_of_text() {
        for mode in [
            FailureMode::Local,
            FailureMode::local_share(1, 4),
            FailureMode::Open,
            FailureMode::Closed,
        ] {
            assert_eq!(mode.to_string().parse::<FailureMode>().ok(), Some(mode));
        }
        for wrong in [
            "",
            "Open",
            "local 0/4",
            "local 5/4",
            "local 1/0",
            "local x/y",
            "share 1/4",
        ] {
            let error = wrong.parse::<FailureMode>().unwrap_err();
            assert!(error.to_string().contains("`local 1/4`"), "{error}");
        }
    }
}
