//! What applications and operators observe: callbacks, and metrics through the facade `metrics`.
//!
//! Without the feature of that name the types of metrics are empty and the functions do nothing. `docs/metrics.md` has the
//! names. The only values of labels are names of policies, addresses of servers of Redis and words of this crate: no key, address
//! of a caller or path is one, so callers cannot add series.

#[cfg_attr(
    not(all(feature = "serde", any(feature = "fred", feature = "cluster"))),
    expect(dead_code, reason = "some metrics are of Redis or of files")
)]
#[cfg(feature = "metrics")]
mod metrics;

use std::{fmt, sync::Arc};

#[cfg(feature = "metrics")]
pub(crate) use self::metrics::*;
#[cfg(not(feature = "metrics"))]
pub(crate) use self::unrecorded::*;

/// A callback of the application, if it has set one.
pub(crate) struct Observer<T>(Option<Arc<Callback<T>>>);

type Callback<T> = dyn Fn(&T) + Send + Sync;

impl<T> Observer<T> {
    pub(crate) fn new(observe: impl Fn(&T) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(observe)))
    }

    #[inline]
    pub(crate) fn notify(&self, event: &T) {
        if let Some(observe) = &self.0 {
            observe(event);
        }
    }
}

impl<T> Clone for Observer<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for Observer<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> fmt::Debug for Observer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "Observer(<fn>)"
        } else {
            "Observer(None)"
        })
    }
}

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

/// The types and functions of `metrics.rs`, empty.
#[cfg_attr(
    not(all(feature = "serde", any(feature = "fred", feature = "cluster"))),
    expect(dead_code, reason = "some metrics are of Redis or of files")
)]
#[cfg(not(feature = "metrics"))]
mod unrecorded {
    use std::{path::Path, sync::Arc, time::SystemTime};

    use crate::{error::ErrorKind, observe::PolicyOutcome};

    pub(crate) const METRICS_ENABLED: bool = false;

    #[derive(Clone)]
    pub(crate) struct PolicyMetrics;

    impl PolicyMetrics {
        pub(crate) fn new(_: Arc<str>, _: u64) -> Self {
            Self
        }

        pub(crate) fn register(&self) {}

        pub(crate) fn count(&self, _: PolicyOutcome) {}

        pub(crate) fn near_limit(&self) {}

        pub(crate) fn hold(&self, _: u64) -> HeldSlots {
            HeldSlots
        }

        pub(crate) fn wait(&self) -> WaitingRequest {
            WaitingRequest
        }
    }

    pub(crate) struct HeldSlots;

    pub(crate) struct WaitingRequest;

    #[derive(Clone, Default)]
    pub(crate) struct CheckMetrics(());

    impl CheckMetrics {
        pub(crate) fn register() {}

        pub(crate) fn end(&self, _: Option<Began>) {}

        pub(crate) fn failed(&self, _: ErrorKind) {}
    }

    #[derive(Clone, Copy)]
    pub(crate) struct Began;

    impl Began {
        pub(crate) fn now() -> Self {
            Self
        }
    }

    pub(crate) struct RedisMetrics(());

    impl RedisMetrics {
        pub(crate) fn new() -> Self {
            Self(())
        }

        pub(crate) fn call(&self, _: u64) {}

        pub(crate) fn deny_cache_hit(&self) {}
    }

    #[derive(Default)]
    pub(crate) struct NodeMetrics(());

    impl NodeMetrics {
        pub(crate) fn new(_: &str) -> Self {
            Self(())
        }

        pub(crate) fn decided(&self, _: u64) {}

        pub(crate) fn failed(&self, _: u64) {}

        pub(crate) fn failed_by_key(&self, _: u64) {}
    }

    #[derive(Default)]
    pub(crate) struct MemoryMetrics(());

    impl MemoryMetrics {
        pub(crate) fn evicted(&self, _: u64) {}
    }

    pub(crate) struct FileMetrics(());

    impl FileMetrics {
        pub(crate) fn new(_: Option<&Path>) -> Self {
            Self(())
        }

        pub(crate) fn loaded(&self, _: SystemTime, _: u64) {}

        pub(crate) fn set_refused(&self, _: bool) {}
    }

    pub(crate) fn lost_settlement() {}

    pub(crate) fn breaker_opened() {}

    pub(crate) fn breaker_closed() {}
}
