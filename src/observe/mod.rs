//! What applications and operators observe: callbacks, and metrics through the facade `metrics`.
//!
//! Without the feature of that name nothing is recorded. `docs/metrics.md` has the names. The only values of labels are names of
//! policies, addresses of servers of Redis and words of this crate: no key, address of a caller or path is one, so callers
//! cannot add series.

#[cfg_attr(
    not(all(feature = "serde", feature = "_redis")),
    expect(dead_code, reason = "some metrics are of Redis or of files")
)]
mod metrics;
mod policy;

use std::sync::Arc;

pub(crate) use self::{
    metrics::*,
    policy::{GaugeGuard, PolicyMetrics, WaitMetrics},
};

/// A callback of the application, if it has set one.
pub(crate) type Observer<T> = Option<Arc<dyn Fn(&T) + Send + Sync>>;

#[inline]
pub(crate) fn notify<T>(observer: &Observer<T>, event: &T) {
    if let Some(observe) = observer {
        observe(event);
    }
}

/// What a policy has done with a request: a value of the label `outcome`, and the field of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PolicyOutcome {
    Admitted,
    Limited,
    LineFull,
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

impl PolicyOutcome {
    /// The names of all outcomes, in their order.
    pub(crate) const NAMES: [&str; 12] = [
        "admitted",
        "limited",
        "line_full",
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

    pub(crate) fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// What `metrics.rs` uses of the facade, empty.
#[cfg(not(feature = "metrics"))]
mod unrecorded {
    #[derive(Clone)]
    pub(super) struct Handle;
    pub(super) use self::Handle as Counter;
    pub(super) use self::Handle as Gauge;
    pub(super) use self::Handle as Histogram;

    impl Handle {
        pub(super) fn increment<T>(&self, _: T) {}

        pub(super) fn decrement<T>(&self, _: T) {}

        pub(super) fn set(&self, _: f64) {}

        pub(super) fn record<T>(&self, _: T) {}
    }

    macro_rules! handle {
        ($name:expr $(, $label:literal => $value:expr)*) => {{
            let _ = ($name, $(|| $value),*);
            $crate::observe::unrecorded::Handle
        }};
    }
    pub(super) use handle as counter;
    pub(super) use handle as gauge;
    pub(super) use handle as histogram;

    macro_rules! describe {
        ($name:expr, $($rest:tt)*) => {
            let _ = $name;
        };
    }
    pub(super) use describe as describe_counter;
    pub(super) use describe as describe_gauge;
    pub(super) use describe as describe_histogram;
}
