//! How the store spawns and ends tasks.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{runtime::Handle, sync::oneshot, task::JoinHandle};

use super::failure::Failure;
// The simulation ends runtimes: each task belongs to the simulated runtime of the task that spawned it.
#[cfg(test)]
pub(super) use super::simulation::runtime::spawn_on;
use crate::store::{Outstanding, OwedKind, StoreError, StoreId, StoreResponse};

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
pub(super) struct DetachOnDrop<T: Send + 'static>(Option<Pin<Box<dyn Future<Output = T> + Send>>>);

impl<T: Send + 'static> DetachOnDrop<T> {
    pub(super) fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Some(Box::pin(future)))
    }
}

impl<T: Send + 'static> Future for DetachOnDrop<T> {
    type Output = T;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        // One that panics is not continued.
        let mut future = self.0.take().expect("polled after it was ready");
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            self.0 = Some(future);
        }
        polled
    }
}

impl<T: Send + 'static> Drop for DetachOnDrop<T> {
    fn drop(&mut self) {
        if let Some(future) = self.0.take() {
            try_spawn(future);
        }
    }
}

/// Runs a future with something to settle in a task of the store, which continues when the caller leaves, and when the runtime of the
/// caller ends, with the timers that were made there. [`Store::drained`](crate::store::Store::drained) waits for it.
pub(super) async fn run_to_end(
    (store, runtime): (StoreId, Handle),
    future: impl Future<Output = Result<StoreResponse, StoreError>> + Send + 'static,
) -> Result<StoreResponse, StoreError> {
    let owed = Outstanding::of(Some(store)).owe(OwedKind::Settlement).due();
    let (sender, response) = oneshot::channel();
    spawn_on(&runtime, async move {
        // An error means that the caller has left.
        let _ = sender.send(future.await);
        owed.confirm();
    });
    response.await.unwrap_or_else(|_| Err(Failure::ended_runtime().into()))
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
