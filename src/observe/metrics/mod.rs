//! Metrics through the facade `metrics`. Without the feature of that name the types are empty and the functions do nothing.
//!
//! `docs/metrics.md` has the names. The only values of labels are names of policies, addresses of servers of Redis and words
//! of this crate: no key, address of a caller or path is one, so callers cannot add series.

#[cfg_attr(
    not(any(feature = "fred", feature = "cluster")),
    expect(dead_code, reason = "some metrics are of Redis")
)]
#[cfg(feature = "metrics")]
mod recorded;
#[cfg_attr(
    not(any(feature = "fred", feature = "cluster")),
    expect(dead_code, reason = "some metrics are of Redis")
)]
#[cfg(not(feature = "metrics"))]
mod unrecorded;

#[cfg(feature = "metrics")]
pub(crate) use self::recorded::*;
#[cfg(not(feature = "metrics"))]
pub(crate) use self::unrecorded::*;

/// What a policy has done with a request: a value of the label `outcome`, and the field of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PolicyOutcome {
    Admitted,
    Limited,
    Banned,
    Observed,
    Skipped,
    Blocked,
    Refused,
    Failed,
    Uncounted,
    AdmittedLocally,
    LimitedLocally,
}

#[cfg(any(feature = "metrics", feature = "tracing"))]
impl PolicyOutcome {
    /// The names of all outcomes, in their order.
    pub(crate) const NAMES: [&str; 11] = [
        "admitted",
        "limited",
        "banned",
        "observed",
        "skipped",
        "blocked",
        "refused",
        "failed",
        "uncounted",
        "admitted_locally",
        "limited_locally",
    ];

    #[cfg(feature = "tracing")]
    pub(crate) fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}
