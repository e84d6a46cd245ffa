//! The types by which threads share state. In `tests/threads` they are those of loom or shuttle, which explore schedules.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(feature = "shuttle")]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(any(feature = "loom", feature = "shuttle")))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

/// Locks a mutex of std, under which no code panics.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// What was locked, under which no code panics.
pub(crate) fn unpoisoned<G>(locked: Result<G, std::sync::PoisonError<G>>) -> G {
    locked.unwrap_or_else(std::sync::PoisonError::into_inner)
}
