use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Keeps requests from a Redis that does not answer.
///
/// It opens when calls fail in a row, and closes with the first answer. While it is open somebody probes, so that no
/// request has to find out.
#[derive(Debug, Default)]
pub(super) struct Breaker {
    /// How many calls failed since one was answered.
    failures: AtomicU32,
    probed: AtomicBool,
}

/// How many calls in a row fail before Redis is not asked anymore. One slow moment is none.
const FAILURES: u32 = 3;

impl Breaker {
    pub(super) fn is_open(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= FAILURES
    }

    /// Notes that Redis answered, be it with an error.
    pub(super) fn answered(&self) {
        self.failures.store(0, Ordering::Relaxed);
    }

    /// Notes that Redis did not answer, and whether the one who says so is to probe from now on.
    #[must_use]
    pub(super) fn failed(&self) -> bool {
        // It stops counting there, and so never wraps.
        let counted = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |failures| {
                (failures < FAILURES).then_some(failures + 1)
            });
        let opens = counted.map_or(true, |failures| failures + 1 == FAILURES);
        opens && !self.probed.swap(true, Ordering::Relaxed)
    }

    /// Notes that nobody probes anymore.
    pub(super) fn probing_ends(&self) {
        self.probed.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_when_calls_fail_in_a_row_and_closes_with_an_answer() {
        let breaker = Breaker::default();
        for _ in 0..5 {
            assert!(!breaker.failed());
            assert!(!breaker.failed());
            breaker.answered();
        }
        assert!(!breaker.failed());
        assert!(!breaker.failed());
        assert!(!breaker.is_open());

        assert!(breaker.failed());
        assert!(breaker.is_open());

        breaker.answered();
        assert!(!breaker.is_open());
    }

    #[test]
    fn one_probes() {
        let breaker = Breaker::default();
        let probers = (0..10).filter(|_| breaker.failed()).count();
        assert_eq!(probers, 1);

        // It went away without an answer: the next one takes over.
        breaker.probing_ends();
        assert!(breaker.failed());
        assert!(!breaker.failed());
    }
}
