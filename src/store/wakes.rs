//! The requests of this process that wait for slots, and what wakes them.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

use tokio::sync::Notify;

use super::LeaseId;

#[derive(Default)]
struct Waiters {
    waiting: HashMap<LeaseId, Arc<Notify>>,
    /// The last ids that were woken while no request with them waited: one that has just entered the queue may not wait yet.
    missed: VecDeque<LeaseId>,
}

/// The most ids that are kept as missed.
const MISSED: usize = 256;

static WAITERS: LazyLock<Mutex<Waiters>> = LazyLock::new(Mutex::default);

/// A request that waits for slots, until it is dropped.
pub(crate) struct Waiter {
    ids: Vec<LeaseId>,
    woken: Arc<Notify>,
}

impl Waiter {
    /// The request that would take these leases.
    pub(crate) fn new(ids: Vec<LeaseId>) -> Self {
        let woken = Arc::<Notify>::default();
        with_waiters(|waiters| {
            waiters.waiting.extend(ids.iter().map(|id| (*id, woken.clone())));
            if waiters.missed.iter().any(|missed| ids.contains(missed)) {
                woken.notify_one();
            }
        });
        Self { ids, woken }
    }

    /// Is notified when slots may be free for the request.
    pub(crate) fn woken(&self) -> Arc<Notify> {
        self.woken.clone()
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        with_waiters(|waiters| {
            for id in &self.ids {
                waiters.waiting.remove(id);
            }
        });
    }
}

/// Wakes the requests with these leases, if they wait in this process.
#[inline]
pub(crate) fn wake_all(ids: &[LeaseId]) {
    for id in ids {
        wake(*id);
    }
}

/// Wakes all requests that wait in this process.
#[cfg(feature = "_redis")]
pub(crate) fn wake_everyone() {
    let waiters: Vec<_> = with_waiters(|waiters| waiters.waiting.values().cloned().collect());
    for waiter in waiters {
        waiter.notify_one();
    }
}

#[cold]
fn wake(id: LeaseId) {
    let waiter = with_waiters(|waiters| {
        let waiter = waiters.waiting.get(&id).cloned();
        if waiter.is_none() {
            waiters.missed.truncate(MISSED - 1);
            waiters.missed.push_front(id);
        }
        waiter
    });
    if let Some(waiter) = waiter {
        waiter.notify_one();
    }
}

fn with_waiters<T>(use_them: impl FnOnce(&mut Waiters) -> T) -> T {
    use_them(&mut WAITERS.lock().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, task::Context};

    use super::*;

    fn is_woken(waiter: &Waiter) -> bool {
        let (woken, mut context) = (waiter.woken(), Context::from_waker(std::task::Waker::noop()));
        pin!(woken.notified()).poll(&mut context).is_ready()
    }

    #[test]
    fn a_request_that_is_woken_before_it_waits_is_not_missed() {
        let ids = [(); 3].map(|()| LeaseId::random());
        wake_all(&ids[..1]);
        let waiters = ids.map(|id| Waiter::new(vec![id]));
        wake_all(&ids[1..2]);
        assert_eq!(waiters.each_ref().map(is_woken), [true, true, false]);
        assert_eq!(waiters.each_ref().map(is_woken), [false; 3]);
    }
}
