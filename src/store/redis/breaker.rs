use std::{sync::PoisonError, time::Duration};

use tokio::time::Instant;

use super::failure::Failure;
use crate::{
    error::{ErrorKind, StoreError},
    observe::{breaker_closed, breaker_opened},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

/// A circuit breaker: requests fail at once while Redis does not reply.
///
/// It opens after three calls in a row without a reply and closes with the first reply. While it is open, one task probes
/// Redis, so that no request waits for the deadline.
#[derive(Debug, Default)]
pub(super) struct Breaker {
    /// The number of calls without a reply since the last reply, up to [`FAILURES`].
    failures: AtomicU32,
    /// That of requests while it is open, with the last failure as its source.
    error: Mutex<Option<StoreError>>,
    probe: Mutex<Option<Probe>>,
    probes: AtomicU32,
}

/// The task that probes. Since it may end with its runtime, it has a lease that it must renew.
#[derive(Debug)]
struct Probe {
    id: u32,
    until: Instant,
}

/// The number of calls in a row without a reply that opens the breaker. One slow moment does not open it.
const FAILURES: u32 = 3;

impl Breaker {
    pub(super) fn is_open(&self) -> bool {
        self.failures.load(Ordering::Acquire) >= FAILURES
    }

    /// Records a reply of Redis, which may be an error.
    pub(super) fn record_reply(&self) {
        // Reading first keeps the cache line shared between cores while Redis replies.
        if self.failures.load(Ordering::Acquire) > 0 {
            let failures = self.failures.swap(0, Ordering::AcqRel);
            if failures >= FAILURES {
                breaker_closed();
            }
        }
    }

    /// The error of a request if it is open.
    pub(super) fn error(&self) -> Option<StoreError> {
        let error = || self.error.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.is_open().then(error)?
    }

    /// Records a call without a reply.
    pub(super) fn record_failure(&self, failure: &Failure) {
        let error = StoreError::new(
            ErrorKind::Unreachable,
            "Redis did not reply to the last calls; checks fail until it replies to a probe",
        );
        let error = error.with_source(StoreError::from(failure.clone()));
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        // It stops there and so never wraps.
        let count = |failures| (failures < FAILURES).then_some(failures + 1);
        let before = self.failures.fetch_update(Ordering::AcqRel, Ordering::Acquire, count);
        if before == Ok(FAILURES - 1) {
            breaker_opened();
        }
    }

    /// Starts a probe if the breaker is open and no probe runs, and returns its id.
    ///
    /// A probe counts as running while it calls [`renew_probe`](Self::renew_probe) within each `lease`.
    #[must_use]
    pub(super) fn start_probe(&self, now: Instant, lease: Duration) -> Option<u32> {
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

    /// Renews the lease of a probe. Returns false if the probe has to end: the breaker is closed, or another probe has replaced
    /// it.
    ///
    /// The test and the end of the probe are one step, so that a breaker that opens after the test starts a new probe.
    pub(super) fn renew_probe(&self, id: u32, now: Instant, lease: Duration) -> bool {
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

impl Drop for Breaker {
    fn drop(&mut self) {
        if self.is_open() {
            breaker_closed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const LEASE: Duration = Duration::from_millis(400);

    pub(super) fn open() -> Breaker {
        let breaker = Breaker::default();
        for _ in 0..FAILURES {
            breaker.record_failure(&Failure::Timeout);
        }
        breaker
    }

    #[test]
    fn it_opens_after_failures_in_a_row_and_closes_with_a_reply() {
        let breaker = Breaker::default();
        for _ in 0..5 {
            breaker.record_failure(&Failure::Timeout);
            breaker.record_failure(&Failure::Timeout);
            assert!(!breaker.is_open());
            breaker.record_reply();
        }
        assert_eq!(breaker.start_probe(Instant::now(), LEASE), None);

        for _ in 0..10 {
            breaker.record_failure(&Failure::Timeout);
        }
        assert!(breaker.is_open());
        breaker.record_reply();
        assert!(!breaker.is_open());
    }

    #[test]
    fn one_probe_runs_at_a_time() {
        let (breaker, now) = (open(), Instant::now());
        let probe = breaker.start_probe(now, LEASE).expect("no probe runs");
        assert_eq!(breaker.start_probe(now, LEASE), None);
        assert!(breaker.renew_probe(probe, now + LEASE / 2, LEASE));
        assert_eq!(breaker.start_probe(now + LEASE, LEASE), None);
    }

    #[test]
    fn a_probe_whose_lease_is_over_is_replaced() {
        let (breaker, now) = (open(), Instant::now());
        let slow = breaker.start_probe(now, LEASE).expect("no probe runs");
        let next = breaker
            .start_probe(now + LEASE, LEASE)
            .expect("the lease of the first one is over");

        // The first one was only slow: one of both ends.
        assert!(!breaker.renew_probe(slow, now + LEASE, LEASE));
        assert!(breaker.renew_probe(next, now + LEASE, LEASE));
    }

    #[test]
    fn a_breaker_that_opens_again_has_a_probe() {
        let (breaker, now) = (open(), Instant::now());
        let probe = breaker.start_probe(now, LEASE).expect("no probe runs");
        breaker.record_reply();
        // It opens before the probe has seen that it was closed: the probe continues.
        for _ in 0..FAILURES {
            breaker.record_failure(&Failure::Timeout);
        }
        assert_eq!(breaker.start_probe(now, LEASE), None);
        assert!(breaker.renew_probe(probe, now, LEASE));

        // It opens after the probe has seen it: a new one starts.
        breaker.record_reply();
        assert!(!breaker.renew_probe(probe, now, LEASE));
        for _ in 0..FAILURES {
            breaker.record_failure(&Failure::Timeout);
        }
        assert!(breaker.start_probe(now, LEASE).is_some());
    }
}

#[cfg(all(test, feature = "loom"))]
mod threads {
    use loom::{model, sync::Arc, thread::spawn};

    use super::{
        tests::{LEASE, open},
        *,
    };

    #[test]
    fn failures_of_several_threads_are_all_counted() {
        model(|| {
            let breaker = Arc::new(Breaker::default());
            for _ in 0..FAILURES - 2 {
                breaker.record_failure(&Failure::Timeout);
            }
            let thread = spawn({
                let breaker = breaker.clone();
                move || breaker.record_failure(&Failure::Timeout)
            });
            breaker.record_failure(&Failure::Timeout);
            thread.join().expect("no panic");
            assert!(breaker.is_open());
        });
    }

    #[test]
    fn a_reply_and_a_failure_at_the_same_time_leave_at_most_that_failure() {
        model(|| {
            let breaker = Arc::new(open());
            let thread = spawn({
                let breaker = breaker.clone();
                move || breaker.record_failure(&Failure::Timeout)
            });
            breaker.record_reply();
            thread.join().expect("no panic");
            assert!(breaker.failures.load(Ordering::Relaxed) <= 1);
        });
    }

    #[test]
    fn several_threads_start_one_probe() {
        model(|| {
            let (breaker, now) = (Arc::new(open()), Instant::now());
            let thread = spawn({
                let breaker = breaker.clone();
                move || breaker.start_probe(now, LEASE)
            });
            let own = breaker.start_probe(now, LEASE);
            let other = thread.join().expect("no panic");
            assert_eq!(own.iter().chain(&other).count(), 1);
        });
    }
}
