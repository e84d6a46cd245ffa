use tokio::{task::JoinHandle, time::Instant};

#[cfg(feature = "fred")]
use super::fred;
#[cfg(feature = "redis-rs")]
use super::redis_rs;
use super::script::{self, Call, Program, Reply, Script};
use crate::store::{ErrorKind, StoreError};

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
    pub(super) const DEFAULT: Self = Self::Fred;
    #[cfg(not(feature = "fred"))]
    pub(super) const DEFAULT: Self = Self::RedisRs;
}

/// A task that ends with its owner.
pub(super) struct AbortOnDrop<T>(pub(super) JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The seam to a client of Redis: it runs a script on the node that owns the keys. Nothing else knows a client.
pub(super) enum Link {
    #[cfg(feature = "fred")]
    Fred(fred::Fred),
    #[cfg(feature = "redis-rs")]
    RedisRs(redis_rs::RedisRs),
}

/// Why a script did not run, or not to its end.
#[derive(Debug)]
pub(super) enum Failure {
    Timeout,
    Unreachable(Box<dyn std::error::Error + Send + Sync>),
    /// The server's own words.
    Refused(String),
    Protocol(&'static str),
}

impl Link {
    /// Runs the script, which is taught first where it is not known.
    pub(super) async fn run(&self, script: &'static Script, call: &Call, deadline: Instant) -> Result<Reply, Failure> {
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
    ) -> Result<Reply, Failure> {
        match self {
            #[cfg(feature = "fred")]
            Self::Fred(link) => link.run(script, program, call, deadline).await,
            #[cfg(feature = "redis-rs")]
            Self::RedisRs(link) => link.run(script, program, call, deadline).await,
        }
    }

    /// Whether all keys of a call must lie in one slot.
    pub(super) fn is_clustered(&self) -> bool {
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
    pub(super) fn is_silence(&self) -> bool {
        matches!(self, Self::Timeout | Self::Unreachable(_))
    }

    /// Whether a node of a cluster has but some of the keys, which are on their way to another; nothing ran.
    pub(super) fn tears_apart(&self) -> bool {
        matches!(self, Self::Refused(error) if error.starts_with("TRYAGAIN"))
    }

    /// Whether Redis would say the same until somebody changes its settings or ours.
    pub(super) fn is_final(&self) -> bool {
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
