use std::{
    array,
    ops::Deref,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

/// A value of which each thread uses a copy.
///
/// Each request counts a reference to it. If all counted in one place, the cores of a server would wait for each other there
/// (`benches/threads.rs`).
pub(crate) struct PerThread<T> {
    first: Arc<T>,
    copies: [OnceLock<Arc<T>>; COPIES],
}

/// A value that is copied for a thread.
pub(crate) trait Apart {
    /// A copy that shares nothing with this one that a request counts.
    fn apart(&self) -> Self;
}

/// With more threads some share a copy.
const COPIES: usize = 16;

thread_local! {
    /// The place of the copies of this thread.
    static PLACE: usize = {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        THREADS.fetch_add(1, Ordering::Relaxed) % COPIES
    };
}

impl<T> PerThread<T> {
    pub(crate) fn new(value: T) -> Self {
        Self::of(Arc::new(value))
    }

    fn of(first: Arc<T>) -> Self {
        Self {
            first,
            copies: array::from_fn(|_| OnceLock::new()),
        }
    }
}

impl<T: Apart> PerThread<T> {
    /// The copy of this thread.
    #[inline]
    pub(crate) fn here(&self) -> &Arc<T> {
        self.copies[PLACE.with(|place| *place)].get_or_init(|| Arc::new(self.first.apart()))
    }
}

impl<T: Clone> PerThread<T> {
    /// Changes the value, apart from clones.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut T)) {
        change(Arc::make_mut(&mut self.first));
        *self = self.clone();
    }
}

/// The clone has copies of its own.
impl<T> Clone for PerThread<T> {
    fn clone(&self) -> Self {
        Self::of(self.first.clone())
    }
}

impl<T> Deref for PerThread<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.first
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::{Limiter, MemoryStore, Policy, SlidingLog};

    #[derive(Clone)]
    struct Value(u32);

    impl Apart for Value {
        fn apart(&self) -> Self {
            self.clone()
        }
    }

    #[test]
    fn a_thread_has_a_copy_of_its_own_which_follows_a_change() {
        let mut value = PerThread::new(Value(1));
        let clone = value.clone();
        let here = value.here().clone();
        assert!(Arc::ptr_eq(&here, value.here()));
        let elsewhere = thread::scope(|scope| scope.spawn(|| value.here().clone()).join().expect("no panic"));
        assert!(!Arc::ptr_eq(&here, &elsewhere));

        value.change(|value| value.0 = 2);
        assert_eq!((value.0, value.here().0), (2, 2));
        assert_eq!((here.0, elsewhere.0, clone.0, clone.here().0), (1, 1, 1, 1));
    }

    #[test]
    fn decisions_of_two_threads_count_references_to_nothing_in_common() {
        let limiter = Limiter::new(MemoryStore::new(), Policy::new("p", SlidingLog::per_hour(5)));
        let check = || limiter.request("42").check_now().expect("it replies at once");
        let one = check();
        let other = thread::scope(|scope| scope.spawn(check).join().expect("no panic"));
        let [one, other] = [&one, &other].map(|decision| decision.policies().next().expect("a policy"));
        assert!(!Arc::ptr_eq(&one.context, &other.context));
        let [one, other] = [one, other].map(|policy| policy.named());
        // Each renders what responses have of it.
        assert!(!Arc::ptr_eq(one, other));
        assert_ne!(one.name.as_ptr(), other.name.as_ptr());
    }

    #[test]
    fn more_threads_than_copies_share_them() {
        let value = PerThread::new(Value(1));
        let copies = thread::scope(|scope| {
            let threads: Vec<_> = (0..2 * COPIES)
                .map(|_| scope.spawn(|| Arc::as_ptr(value.here()) as usize))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("no panic"))
                .collect::<std::collections::HashSet<_>>()
        });
        assert!(copies.len() <= COPIES, "{} copies", copies.len());
    }
}
