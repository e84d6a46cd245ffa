#[cfg(feature = "admin")]
use std::time::SystemTime;
use std::{any::Any, sync::Arc};

use bytes::Bytes;
use http::HeaderValue;

#[cfg(feature = "tracing")]
use super::span;
use super::thresholds::Thresholds;
#[cfg(feature = "admin")]
use crate::denials::Denials;
use crate::{
    FailureMode, Limit,
    completion::CompletionRule,
    headers::Fields,
    lost::LostSettlements,
    metrics::{CheckMetrics, ENABLED, PolicyMetrics, PolicyOutcome},
    slots::Keeper,
    store::{Failover, NamedLimit, Outstanding, Store, Waiting},
};

/// What the checks of a layer or a limiter have in common.
#[derive(Clone)]
pub(crate) struct CheckContext {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) failover: Arc<Failover>,
    /// Renews leases.
    pub(crate) keeper: Arc<Keeper>,
    /// What [`Store::drained`] waits for.
    pub(crate) outstanding: Arc<Outstanding>,
    /// The failure mode of all policies, in place of their own.
    pub(crate) failure_mode: Option<FailureMode>,
    /// The policies, in their order.
    pub(crate) policies: Arc<[PolicyContext]>,
    /// If a policy has a completion rule, or learns from responses.
    pub(crate) lost: Option<Arc<LostSettlements>>,
    /// Whether one of them only observes or has bans, so that its charges are not all that is sent.
    pub(crate) is_composite: bool,
    /// Whether requests may wait for one of them.
    pub(crate) waits: bool,
    /// The rate limit fields of responses.
    pub(crate) fields: Fields,
    pub(crate) format: SharedFormat,
    pub(crate) metrics: CheckMetrics,
    /// What an `Admin` reports.
    #[cfg(feature = "admin")]
    pub(crate) denials: Denials,
    #[cfg(feature = "admin")]
    pub(crate) built_at: SystemTime,
}

impl CheckContext {
    /// Counts a request by what the policy at this position has done with it.
    #[inline]
    pub(crate) fn count(&self, position: usize, outcome: PolicyOutcome) {
        if ENABLED {
            self.policies[position].metrics.count(outcome);
        }
        #[cfg(feature = "tracing")]
        tracing::debug!(
            policy = &*self.policies[position].plan.named.name,
            outcome = outcome.name(),
            "a policy has not decided about a request"
        );
    }

    /// Records in the current span what is done with a request without a decision, and the policy at this position if one
    /// has caused it.
    pub(crate) fn record(&self, outcome: PolicyOutcome, position: Option<usize>) {
        #[cfg(feature = "tracing")]
        span::record(
            outcome,
            position.map(|position| &*self.policies[position].plan.named.name),
            None,
        );
        #[cfg(not(feature = "tracing"))]
        let _ = (outcome, position);
    }

    /// Counts a request that is decided before any policy regards it.
    pub(crate) fn count_for_all(&self, outcome: PolicyOutcome) {
        for position in 0..self.policies.len() {
            self.count(position, outcome);
        }
    }
}

/// The [`ResponseFormat`](crate::response::ResponseFormat) of a layer or a limiter.
///
/// Its type is erased: a format takes decisions, which have this context.
#[derive(Clone)]
pub(crate) struct SharedFormat(pub(crate) Arc<dyn Any + Send + Sync>);

/// What the checks of one policy have in common.
#[derive(Clone)]
pub(crate) struct PolicyContext {
    pub(crate) plan: Arc<Plan>,
    pub(crate) failure_mode: FailureMode,
    pub(crate) completion: Option<CompletionRule>,
    /// The file that the policy follows, if it follows one.
    pub(crate) file: Option<Arc<dyn PolicyFile>>,
    /// Whether the policy only observes.
    pub(crate) observed: bool,
    pub(crate) thresholds: Thresholds,
    /// Whether responses begin bans.
    pub(crate) learns: bool,
    /// The [`Limit::Ban`] of the policy, if it has bans.
    pub(crate) ban: Option<Limit>,
    pub(crate) waiting: Waiting,
    pub(crate) metrics: PolicyMetrics,
}

impl PolicyContext {
    /// The number of the file in the process.
    pub(super) fn file_number(&self) -> Option<u64> {
        self.file.as_ref().map(|file| file.number())
    }
}

/// A file that policies follow.
pub(crate) trait PolicyFile: Send + Sync {
    /// Its number in the process.
    fn number(&self) -> u64;

    /// The plan of all requests of this policy as of the last load, if they have one.
    fn newest_plan(&self, policy: &str) -> Option<Arc<Plan>>;
}

/// A limit under the name of a policy, with the parts of responses that depend on these alone.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) named: NamedLimit,
    /// The member of `RateLimit-Policy`.
    pub(crate) policy_item: HeaderValue,
    /// The body of the response to a request that this policy alone denies.
    pub(crate) problem: Bytes,
}
