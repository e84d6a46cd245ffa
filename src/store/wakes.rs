//! The messages of stores that the first request in a line of this process may fit.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, LazyLock, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::sync::Notify;

use crate::sync::lock;

/// What wakes the task of a line.
#[derive(Debug)]
pub(crate) struct LineSignal {
    number: u64,
    is_woken: AtomicBool,
    changed: Notify,
}

#[derive(Default)]
struct Signals {
    of_lines: HashMap<u64, Weak<LineSignal>>,
    /// The last lines that were woken while they were not there: a request that was just denied may not stand in its line yet.
    missed: VecDeque<u64>,
}

/// The most lines that are kept as missed.
const MISSED: usize = 256;

static SIGNALS: LazyLock<Mutex<Signals>> = LazyLock::new(Mutex::default);

impl LineSignal {
    pub(crate) fn of(number: u64) -> Arc<Self> {
        let mut signals = lock(&SIGNALS);
        let before = signals.missed.len();
        signals.missed.retain(|missed| *missed != number);
        let signal = Arc::new(Self {
            number,
            is_woken: AtomicBool::new(signals.missed.len() < before),
            changed: Notify::new(),
        });
        signals.of_lines.insert(number, Arc::downgrade(&signal));
        signal
    }

    /// Whether a store has woken the line since the last call.
    pub(crate) fn take_woken(&self) -> bool {
        self.is_woken.swap(false, Ordering::AcqRel)
    }

    /// Lets the task of the line look what is due.
    pub(crate) fn change(&self) {
        self.changed.notify_one();
    }

    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    fn wake(&self) {
        self.is_woken.store(true, Ordering::Release);
        self.change();
    }
}

impl Drop for LineSignal {
    fn drop(&mut self) {
        let mut signals = lock(&SIGNALS);
        let of_line = signals.of_lines.get(&self.number);
        // Another one may be there by now.
        if of_line.is_some_and(|signal| signal.strong_count() == 0) {
            signals.of_lines.remove(&self.number);
        }
    }
}

/// Wakes a line of this process.
#[cold]
pub(crate) fn wake_line(number: u64) {
    let mut signals = lock(&SIGNALS);
    if let Some(signal) = signals.of_lines.get(&number).and_then(Weak::upgrade) {
        drop(signals); // the signal locks them if it is dropped here
        signal.wake();
    } else {
        signals.missed.truncate(MISSED - 1);
        signals.missed.push_front(number);
    }
}

/// Wakes all lines of this process.
#[cfg(feature = "_redis")]
pub(crate) fn wake_all() {
    let signals: Vec<_> = lock(&SIGNALS).of_lines.values().filter_map(Weak::upgrade).collect();
    signals.iter().for_each(|signal| signal.wake());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_woken_before_it_is_there_is_not_missed() {
        wake_line(u64::MAX);
        let [woken, other] = [u64::MAX, u64::MAX - 1].map(LineSignal::of);
        assert!(woken.take_woken() && !woken.take_woken() && !other.take_woken());
        assert!(!LineSignal::of(u64::MAX).take_woken(), "it was found before");
        wake_line(u64::MAX - 1);
        assert!(other.take_woken());

        (0..2 * MISSED as u64).for_each(wake_line);
        assert_eq!(lock(&SIGNALS).missed.len(), MISSED, "the last ones");
    }
}
