//! How the store spawns and ends tasks.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{runtime::Handle, task::JoinHandle};

// The simulation ends runtimes: each task belongs to the simulated runtime of the task that spawned it.
#[cfg(test)]
pub(super) use super::simulation::runtime::spawn_on;
use crate::store::{Outstanding, OwedKind, StoreId};

/// Aborts a task when it is dropped.
pub(super) struct AbortOnDrop<T>(pub(super) JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs a closure when it is dropped, unless it is disarmed before.
pub(super) struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> OnDrop<F> {
    pub(super) fn new(run: F) -> Self {
        Self(Some(run))
    }

    pub(super) fn disarm(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(run) = self.0.take() {
            run();
        }
    }
}

/// A future that continues in a task of its own when it is dropped before it is ready.
pub(super) struct DetachOnDrop<T: Send + 'static> {
    future: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    /// The store that waits for the task before the process ends, and where it continues, in place of the runtime of the thread that
    /// drops it.
    refunding: Option<(StoreId, Handle)>,
}

impl<T: Send + 'static> DetachOnDrop<T> {
    pub(super) fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self {
            future: Some(Box::pin(future)),
            refunding: None,
        }
    }

    /// The same for a future with a refund to send, which [`Store::drained`](crate::store::Store::drained) waits for.
    pub(super) fn refunding(
        (store, runtime): (StoreId, Handle),
        future: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        let mut detached = Self::new(future);
        detached.refunding = Some((store, runtime));
        detached
    }
}

impl<T: Send + 'static> Future for DetachOnDrop<T> {
    type Output = T;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        // One that panics is not continued.
        let mut future = self.future.take().expect("polled after it was ready");
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            self.future = Some(future);
        }
        polled
    }
}

impl<T: Send + 'static> Drop for DetachOnDrop<T> {
    fn drop(&mut self) {
        let Some(future) = self.future.take() else { return };
        let Some((store, runtime)) = self.refunding.take() else {
            return try_spawn(future);
        };
        let owed = Outstanding::of(Some(store)).owe(OwedKind::Settlement).due();
        spawn_on(&runtime, async {
            future.await;
            owed.confirm();
        });
    }
}

/// Runs futures at the same time until all are ready, or one with such an output is, and returns the outputs that there are then.
pub(super) async fn run_together<F: Future>(
    futures: impl IntoIterator<Item = F>,
    is_last: impl Fn(&F::Output) -> bool,
) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.into_iter().map(Box::pin).collect();
    let mut outputs = Vec::with_capacity(running.len());
    poll_fn(|cx| {
        running.retain_mut(|one| match one.as_mut().poll(cx) {
            Poll::Ready(output) => {
                outputs.push(output);
                false
            }
            Poll::Pending => true,
        });
        match running.is_empty() || outputs.iter().any(&is_last) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    outputs
}

/// Runs a future in a task if the current thread has a runtime.
pub(super) fn try_spawn(future: impl Future<Output: Send + 'static> + Send + 'static) {
    if let Ok(runtime) = Handle::try_current() {
        spawn_on(&runtime, future);
    }
}

/// Runs a future in a task of this runtime.
#[cfg(not(test))]
pub(super) fn spawn_on(runtime: &Handle, future: impl Future<Output: Send + 'static> + Send + 'static) {
    runtime.spawn(future);
}
