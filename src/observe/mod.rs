//! What applications and operators observe: callbacks, and metrics through the facade `metrics`.
//!
//! Without the feature of that name nothing is recorded. `docs/metrics.md` has the names. The only values of labels are names of
//! policies, addresses of servers of Redis, files of limits and words of this crate: no key, address of a caller or path of a
//! request is one, so callers cannot add series.

#[cfg_attr(
    not(all(feature = "serde", feature = "_redis")),
    expect(dead_code, reason = "some metrics are of Redis or of files")
)]
mod metrics;

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

#[cfg(feature = "metrics")]
use ::metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

pub(crate) use self::metrics::*;
use self::metrics::{
    DECISIONS, Handles, LEFT_WHILE_WAITING, LIMITS_HASH, NEAR_LIMIT, REQUESTS_WAITING, SLOTS_HELD, WAIT_DURATION, exact,
};
#[cfg(not(feature = "metrics"))]
use self::unrecorded::{Counter, Gauge, Histogram, counter, gauge, histogram};
use crate::sync::lock;

/// A callback of the application, if it has set one.
pub(crate) type Observer<T> = Option<Arc<dyn Fn(&T) + Send + Sync>>;

#[inline]
pub(crate) fn notify<T>(observer: &Observer<T>, event: &T) {
    if let Some(observe) = observer {
        observe(event);
    }
}

/// How many requests have lacked something that a setting expects, until one has it.
#[derive(Default)]
pub(crate) struct NeverFound(AtomicU32);

impl NeverFound {
    /// The number of requests after which a warning is logged.
    pub(crate) const LOGGED_AT: u32 = 1_000;

    /// Takes note of a request that has it or lacks it, and returns whether a warning is to be logged now.
    #[inline]
    pub(crate) fn note(&self, is_found: bool) -> bool {
        if self.0.load(Ordering::Relaxed) >= Self::LOGGED_AT {
            return false;
        }
        if is_found {
            self.0.store(Self::LOGGED_AT, Ordering::Relaxed);
            return false;
        }
        self.0.fetch_add(1, Ordering::Relaxed) + 1 == Self::LOGGED_AT
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
    const NAMES: [&str; 12] = [
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

/// The hash of the limits of each policy that were registered last.
static IN_FORCE: LazyLock<Mutex<HashMap<Arc<str>, u64>>> = LazyLock::new(Mutex::default);

#[derive(Clone)]
pub(crate) struct PolicyMetrics {
    policy: Arc<str>,
    limits_hash: u64,
    handles: Handles<Arc<PolicyHandles>>,
}

struct PolicyHandles {
    outcomes: [Counter; PolicyOutcome::NAMES.len()],
    near_limit: Counter,
    slots_held: Gauge,
    requests_waiting: Gauge,
    wait_duration: Histogram,
    left_while_waiting: Counter,
}

impl PolicyMetrics {
    pub(crate) fn new(policy: Arc<str>, limits_hash: u64) -> Self {
        Self {
            policy,
            limits_hash,
            handles: Handles::default(),
        }
    }

    /// Registers the series, and records the limits as those in force.
    pub(crate) fn register(&self) {
        lock(&IN_FORCE).insert(self.policy.clone(), self.limits_hash);
        let _ = PolicyHandles::of(self, self.limits_hash);
    }

    #[inline]
    pub(crate) fn count(&self, outcome: PolicyOutcome) {
        self.record(|handles| handles.outcomes[outcome as usize].increment(1));
    }

    #[inline]
    pub(crate) fn near_limit(&self) {
        self.record(|handles| handles.near_limit.increment(1));
    }

    /// Counts slots as held until the guard is dropped.
    pub(crate) fn hold(&self, slots: u64) -> GaugeGuard {
        let hold = |handles: &Arc<PolicyHandles>| GaugeGuard::new(&handles.slots_held, slots as f64);
        self.record(hold).unwrap_or_default()
    }

    /// Those of a request that is to wait.
    pub(crate) fn of_wait(&self) -> WaitMetrics {
        WaitMetrics(self.record(Arc::clone))
    }

    #[inline]
    fn record<R>(&self, record: impl FnOnce(&Arc<PolicyHandles>) -> R) -> Option<R> {
        let handles = || {
            // Those of a request may be of limits before a reload.
            let in_force = lock(&IN_FORCE).get(&self.policy).copied();
            Arc::new(PolicyHandles::of(self, in_force.unwrap_or(self.limits_hash)))
        };
        self.handles.record(handles, record)
    }
}

impl PolicyHandles {
    #[cold]
    fn of(metrics: &PolicyMetrics, limits_hash: u64) -> Self {
        let policy = || metrics.policy.to_string();
        gauge!(LIMITS_HASH, "policy" => policy()).set(exact(limits_hash));
        Self {
            outcomes: PolicyOutcome::NAMES
                .map(|outcome| counter!(DECISIONS, "policy" => policy(), "outcome" => outcome)),
            near_limit: counter!(NEAR_LIMIT, "policy" => policy()),
            slots_held: gauge!(SLOTS_HELD, "policy" => policy()),
            requests_waiting: gauge!(REQUESTS_WAITING, "policy" => policy()),
            wait_duration: histogram!(WAIT_DURATION, "policy" => policy()),
            left_while_waiting: counter!(LEFT_WHILE_WAITING, "policy" => policy()),
        }
    }
}

/// What a gauge has more until this is dropped, such as a request that waits, or the slots of one.
#[derive(Default)]
pub(crate) struct GaugeGuard(Option<(Gauge, f64)>);

impl GaugeGuard {
    fn new(gauge: &Gauge, number: f64) -> Self {
        gauge.increment(number);
        Self(Some((gauge.clone(), number)))
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        if let Some((gauge, number)) = &self.0 {
            gauge.decrement(*number);
        }
    }
}

#[derive(Default)]
pub(crate) struct WaitMetrics(Option<Arc<PolicyHandles>>);

impl WaitMetrics {
    /// Counts the request as waiting until the guard is dropped.
    pub(crate) fn begin(&self) -> GaugeGuard {
        let begin = |handles: &Arc<PolicyHandles>| GaugeGuard::new(&handles.requests_waiting, 1.0);
        self.0.as_ref().map(begin).unwrap_or_default()
    }

    /// Records for how long the request has waited until it was admitted.
    pub(crate) fn admitted(&self, waited: Duration) {
        if let Some(handles) = &self.0 {
            handles.wait_duration.record(waited);
        }
    }

    /// Counts the request as one whose caller has left while it waited.
    pub(crate) fn left(&self) {
        if let Some(handles) = &self.0 {
            handles.left_while_waiting.increment(1);
        }
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

#[cfg(test)]
#[path = "../../tests/it/support/log.rs"]
#[expect(dead_code, reason = "the integration tests use all of it")]
pub(crate) mod log;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_found_once_is_never_reported_as_not_found() {
        let [lacking, found] = [NeverFound::default(), NeverFound::default()];
        assert!(!found.note(true));
        let logged = |of: &NeverFound| (0..2 * NeverFound::LOGGED_AT).filter(|_| of.note(false)).count();
        assert_eq!((logged(&lacking), logged(&found)), (1, 0));
    }
}
