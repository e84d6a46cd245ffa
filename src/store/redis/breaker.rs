use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// Keeps requests from a Redis that does not reply.
///
/// It opens after three calls in a row without a reply and closes with the first reply. While it is open, one task probes
/// Redis, so that no request has to wait for the deadline.
#[derive(Debug, Default)]
pub(super) struct Breaker {
    /// How many calls failed since the last reply.
    failures: AtomicU32,
    probe: Mutex<Option<Probe>>,
    probes: AtomicU32,
}

/// The task that probes. It may end without notice, with its runtime, so it holds its office for a limited time only.
#[derive(Debug)]
struct Probe {
    id: u32,
    until: Instant,
}

/// How many calls in a row fail before the breaker opens. One slow moment does not open it.
const FAILURES: u32 = 3;

impl Breaker {
    pub(super) fn is_open(&self) -> bool {
        self.failures.load(Ordering::Acquire) >= FAILURES
    }

    /// Records a reply of Redis, an error included.
    pub(super) fn answered(&self) {
        // Reading first keeps the cache line shared between cores while all is well.
        if self.failures.load(Ordering::Acquire) > 0 {
            self.failures.store(0, Ordering::Release);
        }
    }

    /// Records a call without a reply.
    pub(super) fn failed(&self) {
        // It stops counting there, and so never wraps.
        let count = |failures| (failures < FAILURES).then_some(failures + 1);
        let _ = self.failures.fetch_update(Ordering::AcqRel, Ordering::Acquire, count);
    }

    /// The id of a probe that is to start now, if the breaker is open and no probe runs.
    ///
    /// A probe runs while it calls [`goes_on`](Self::goes_on) within each `lease`.
    #[must_use]
    pub(super) fn needs_probe(&self, now: Instant, lease: Duration) -> Option<u32> {
        if !self.is_open() {
            return None;
        }
        let mut probe = self.probe.lock().unwrap_or_else(PoisonError::into_inner);
        if probe.as_ref().is_some_and(|probe| probe.until > now) {
            return None;
        }
        let id = self.probes.fetch_add(1, Ordering::Relaxed);
        *probe = Some(Probe { id, until: now + lease });
        Some(id)
    }

    /// Whether the probe of this id goes on: the breaker is open, and no other probe has replaced it.
    ///
    /// The test and the end of the probe are one step, so that no failure after the test is left without a probe.
    pub(super) fn goes_on(&self, id: u32, now: Instant, lease: Duration) -> bool {
        let mut probe = self.probe.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(own) = probe.as_mut().filter(|probe| probe.id == id) else {
            return false;
        };
        own.until = now + lease;
        let open = self.is_open();
        if !open {
            *probe = None;
        }
        open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_millis(400);

    fn open() -> Breaker {
        let breaker = Breaker::default();
        for _ in 0..FAILURES {
            breaker.failed();
        }
        breaker
    }

    #[test]
    fn it_opens_after_failures_in_a_row_and_closes_with_a_reply() {
        let breaker = Breaker::default();
        for _ in 0..5 {
            breaker.failed();
            breaker.failed();
            assert!(!breaker.is_open());
            breaker.answered();
        }
        assert_eq!(breaker.needs_probe(Instant::now(), LEASE), None);

        for _ in 0..10 {
            breaker.failed();
        }
        assert!(breaker.is_open());
        breaker.answered();
        assert!(!breaker.is_open());
    }

    #[test]
    fn one_probe_runs_at_a_time() {
        let (breaker, now) = (open(), Instant::now());
        let probe = breaker.needs_probe(now, LEASE).expect("no probe runs");
        assert_eq!(breaker.needs_probe(now, LEASE), None);
        assert!(breaker.goes_on(probe, now + LEASE / 2, LEASE));
        assert_eq!(breaker.needs_probe(now + LEASE, LEASE), None);
    }

    #[test]
    fn a_probe_that_is_gone_is_replaced() {
        let (breaker, now) = (open(), Instant::now());
        let gone = breaker.needs_probe(now, LEASE).expect("no probe runs");
        let next = breaker.needs_probe(now + LEASE, LEASE).expect("the first one is gone");

        // It was only slow: one of them ends.
        assert!(!breaker.goes_on(gone, now + LEASE, LEASE));
        assert!(breaker.goes_on(next, now + LEASE, LEASE));
    }

    #[test]
    fn a_breaker_that_opens_again_has_a_probe() {
        let (breaker, now) = (open(), Instant::now());
        let probe = breaker.needs_probe(now, LEASE).expect("no probe runs");
        breaker.answered();
        // It opens before the probe has seen that it was closed: the probe goes on.
        for _ in 0..FAILURES {
            breaker.failed();
        }
        assert_eq!(breaker.needs_probe(now, LEASE), None);
        assert!(breaker.goes_on(probe, now, LEASE));

        // It opens after the probe has seen it: another one starts.
        breaker.answered();
        assert!(!breaker.goes_on(probe, now, LEASE));
        for _ in 0..FAILURES {
            breaker.failed();
        }
        assert!(breaker.needs_probe(now, LEASE).is_some());
    }
}
