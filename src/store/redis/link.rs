use std::time::Duration;

#[cfg(feature = "fred")]
use super::fred;
#[cfg(feature = "redis")]
use super::redis_rs;
use super::{
    refusal::Refusal,
    script::{self, Call, Program, RawReply, Script},
};
use crate::store::{ErrorKind, StoreError};

/// A client of Redis that the store can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClientLibrary {
    /// [fred](https://crates.io/crates/fred), for one server or Sentinel.
    #[cfg(feature = "fred")]
    Fred,
    /// [redis-rs](https://crates.io/crates/redis), for one server, Sentinel or a cluster.
    #[cfg(feature = "redis")]
    RedisRs,
}

impl ClientLibrary {
    #[cfg(feature = "fred")]
    pub(super) const DEFAULT: Self = Self::Fred;
    #[cfg(not(feature = "fred"))]
    pub(super) const DEFAULT: Self = Self::RedisRs;
}

/// The seam to a client of Redis: it runs a script on the node that owns the keys. Nothing else knows a client.
pub(super) enum Link {
    #[cfg(feature = "fred")]
    Fred(fred::Fred),
    #[cfg(feature = "redis")]
    RedisRs(redis_rs::RedisRs),
    #[cfg(test)]
    Simulated(super::simulation::Network),
}

/// Why a script did not run, or not to its end.
#[derive(Debug)]
pub(super) enum Failure {
    Timeout,
    Unreachable(Box<dyn std::error::Error + Send + Sync>),
    /// The error that the server replied with.
    Refused(String),
    /// The server will reply with this error until its settings or those of the store are changed.
    Forbidden(Refusal),
    Protocol(&'static str),
}

impl Link {
    /// Runs the script, and sends its text where it is not known.
    ///
    /// The caller has the deadline, and drops the future when it has passed. `longest` is how long a client may keep the
    /// command then.
    pub(super) async fn run(
        &self,
        script: &'static Script,
        call: &Call,
        longest: Duration,
    ) -> Result<RawReply, Failure> {
        match self.run_as(script, Program::Known, call, longest).await {
            // Proves that nothing ran, so this is not a second attempt.
            Err(Failure::Refused(error)) if error.starts_with("NOSCRIPT") => {
                match self.run_as(script, Program::Taught, call, longest).await {
                    Err(Failure::Refused(error)) if error.starts_with("NOSCRIPT") => {
                        Err(Failure::Forbidden(Refusal::new(error)))
                    }
                    answered => answered,
                }
            }
            answered => answered,
        }
    }

    #[cfg_attr(
        not(feature = "fred"),
        expect(unused_variables, reason = "redis-rs keeps no command longer than its future")
    )]
    async fn run_as(
        &self,
        script: &'static Script,
        program: Program,
        call: &Call,
        longest: Duration,
    ) -> Result<RawReply, Failure> {
        match self {
            #[cfg(feature = "fred")]
            Self::Fred(link) => link.run(script, program, call, longest).await,
            #[cfg(feature = "redis")]
            Self::RedisRs(link) => link.run(script, program, call).await,
            #[cfg(test)]
            Self::Simulated(network) => network.run(program, call).await,
        }
    }

    /// A hash tag in a slot of each primary that is known; an error if none is.
    pub(super) fn hash_tags(&self) -> Result<Vec<String>, Failure> {
        match self {
            #[cfg(feature = "redis")]
            Self::RedisRs(link) => link.hash_tags(),
            #[cfg(feature = "fred")]
            Self::Fred(_) => Ok(vec!["0".to_owned()]),
            #[cfg(test)]
            Self::Simulated(_) => Ok(vec!["0".to_owned()]),
        }
    }

    /// Whether all keys of a call must lie in one slot.
    pub(super) fn is_clustered(&self) -> bool {
        match self {
            #[cfg(feature = "fred")]
            Self::Fred(_) => false,
            #[cfg(feature = "redis")]
            Self::RedisRs(link) => link.is_clustered(),
            #[cfg(test)]
            Self::Simulated(network) => network.is_clustered(),
        }
    }
}

impl Failure {
    /// The failure that this error of a script call is.
    pub(super) fn refused(error: String) -> Self {
        Refusal::of_call(&error).map_or(Self::Refused(error), Self::Forbidden)
    }

    /// The failure that this error of a new connection is.
    pub(super) fn not_connected(error: String) -> Self {
        match Refusal::of_connection(&error) {
            Some(refusal) => Self::Forbidden(refusal),
            None => Self::Unreachable(error.into()),
        }
    }

    /// Whether Redis did not answer, as opposed to an answer that is an error.
    pub(super) fn is_silence(&self) -> bool {
        matches!(self, Self::Timeout | Self::Unreachable(_))
    }

    /// Whether a node of a cluster has but some of the keys, which are on their way to another; nothing ran.
    pub(super) fn tears_apart(&self) -> bool {
        matches!(self, Self::Refused(error) if error.starts_with("TRYAGAIN"))
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
            Failure::Forbidden(refusal) => script::refused(&refusal.error),
            Failure::Protocol(fault) => Self::new(ErrorKind::Protocol, fault),
        }
    }
}
