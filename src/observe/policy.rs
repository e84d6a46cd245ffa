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
    pub(crate) fn hold(&self, slots: u64) -> HeldSlots {
        let mut held = HeldSlots(None);
        self.record(|handles| {
            let (gauge, slots) = (handles.slots_held.clone(), slots as f64);
            gauge.increment(slots);
            held.0 = Some((gauge, slots));
        });
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

/// Slots of one policy that a request holds.
pub(crate) struct HeldSlots(Option<(Gauge, f64)>);

impl Drop for HeldSlots {
    fn drop(&mut self) {
        if let Some((gauge, slots)) = &self.0 {
            gauge.decrement(*slots);
        }
    }
}

/// The metrics of a request that waits.
#[derive(Default)]
pub(crate) struct WaitMetrics(Option<Arc<PolicyHandles>>);

impl WaitMetrics {
    /// Counts the request as waiting until the guard is dropped.
    pub(crate) fn begin(&self) -> WaitingRequest {
        let gauge = self.0.as_ref().map(|handles| handles.requests_waiting.clone());
        if let Some(gauge) = &gauge {
            gauge.increment(1);
        }
        WaitingRequest(gauge)
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

/// A request that is counted as waiting.
pub(crate) struct WaitingRequest(Option<Gauge>);

impl Drop for WaitingRequest {
    fn drop(&mut self) {
        if let Some(gauge) = &self.0 {
            gauge.decrement(1);
        }
    }
}
