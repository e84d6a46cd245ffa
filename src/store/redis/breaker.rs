use super::failure::Failure;
use crate::{
    error::{ErrorKind, StoreError},
    observe::{breaker_closed, breaker_opened},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
        unpoisoned,
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
    /// Whether a task probes.
    is_probed: AtomicBool,
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
        let error = || unpoisoned(self.error.lock()).clone();
        self.is_open().then(error)?
    }

    /// Records a call without a reply.
    pub(super) fn record_failure(&self, failure: &Failure) {
        let error = StoreError::new(
            ErrorKind::Unreachable,
            "Redis did not reply to the last calls; checks fail until it replies to a probe",
        );
        let error = error.with_source(StoreError::from(failure.clone()));
        *unpoisoned(self.error.lock()) = Some(error);
        // It stops there and so never wraps.
        let count = |failures| (failures < FAILURES).then_some(failures + 1);
        let before = self.failures.fetch_update(Ordering::AcqRel, Ordering::Acquire, count);
        if before == Ok(FAILURES - 1) {
            breaker_opened();
        }
    }

    /// Whether a task has to begin to probe, which is to end with [`end_probe`](Self::end_probe).
    #[must_use]
    pub(super) fn start_probe(&self) -> bool {
        self.is_open() && !self.is_probed.swap(true, Ordering::AcqRel)
    }

    /// A breaker that has opened meanwhile is probed from the next request on.
    pub(super) fn end_probe(&self) {
        self.is_probed.store(false, Ordering::Release);
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
    use std::error::Error;

    use super::*;

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
        assert!(!breaker.start_probe());

        for _ in 0..10 {
            breaker.record_failure(&Failure::Timeout);
        }
        assert!(breaker.is_open());
        breaker.record_reply();
        assert!(!breaker.is_open());
    }

    #[test]
    fn its_error_has_the_last_failure() {
        let breaker = open();
        breaker.record_reply();
        assert!(breaker.error().is_none());
        for _ in 0..FAILURES {
            breaker.record_failure(&Failure::ended_runtime());
        }
        let error = breaker.error().expect("it is open");
        let cause = error.source().map(ToString::to_string);
        assert_eq!(cause, Some(StoreError::from(Failure::ended_runtime()).to_string()));
    }

    #[test]
    fn one_probe_runs_at_a_time() {
        let breaker = open();
        assert!(breaker.start_probe());
        assert!(!breaker.start_probe());

        breaker.end_probe();
        assert!(breaker.start_probe());
    }
}

#[cfg(all(test, feature = "loom"))]
mod threads {
    use loom::{model, sync::Arc, thread::spawn};

    use super::{tests::open, *};

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
            let breaker = Arc::new(open());
            let thread = spawn({
                let breaker = breaker.clone();
                move || breaker.start_probe()
            });
            let own = breaker.start_probe();
            let other = thread.join().expect("no panic");
            assert_ne!(own, other);
        });
    }
}
