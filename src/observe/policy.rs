//! The metrics of a policy.

use std::{sync::Arc, time::Duration};

#[cfg(feature = "metrics")]
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

#[cfg(not(feature = "metrics"))]
use super::unrecorded::{Counter, Gauge, Histogram, counter, gauge, histogram};
use super::{
    PolicyOutcome,
    metrics::{
        DECISIONS, Handles, LEFT_WHILE_WAITING, LIMITS_HASH, NEAR_LIMIT, REQUESTS_WAITING, SLOTS_HELD, WAIT_DURATION,
        exact,
    },
};

/// The metrics of one policy.
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
    /// The metrics of a policy with a hash of its limits.
    pub(crate) fn new(policy: Arc<str>, limits_hash: u64) -> Self {
        Self {
            policy,
            limits_hash,
            handles: Handles::new(),
        }
    }

    /// Registers the series, and records the limits as those in force.
    pub(crate) fn register(&self) {
        let _ = PolicyHandles::of(self);
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
        let mut held = GaugeGuard(None);
        self.record(|handles| held = GaugeGuard::new(&handles.slots_held, slots as f64));
        held
    }

    /// Those of a request that is to wait.
    pub(crate) fn of_wait(&self) -> WaitMetrics {
        let mut wait = WaitMetrics(None);
        self.record(|handles| wait.0 = Some(handles.clone()));
        wait
    }

    #[inline]
    fn record(&self, record: impl FnOnce(&Arc<PolicyHandles>)) {
        self.handles.record(|| Arc::new(PolicyHandles::of(self)), record);
    }
}

impl PolicyHandles {
    #[cold]
    fn of(metrics: &PolicyMetrics) -> Self {
        let policy = || metrics.policy.to_string();
        gauge!(LIMITS_HASH, "policy" => policy()).set(exact(metrics.limits_hash));
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

/// The metrics of a request that waits.
#[derive(Default)]
pub(crate) struct WaitMetrics(Option<Arc<PolicyHandles>>);

impl WaitMetrics {
    /// Counts the request as waiting until the guard is dropped.
    pub(crate) fn begin(&self) -> GaugeGuard {
        match &self.0 {
            Some(handles) => GaugeGuard::new(&handles.requests_waiting, 1.0),
            None => GaugeGuard(None),
        }
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
