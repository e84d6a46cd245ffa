//! Simulated runtimes that end or stall, within one real runtime with virtual time.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
};

use pin_project_lite::pin_project;
use tokio::{runtime::Handle, task::AbortHandle};

tokio::task_local! {
    /// The simulated runtime that the current task belongs to.
    static RUNTIME: Runtime;
}

/// A simulated runtime: some of the tasks of the real one.
#[derive(Clone, Default)]
pub(super) struct Runtime(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    ended: bool,
    frozen: bool,
    tasks: Vec<AbortHandle>,
    wakers: Vec<Waker>,
}

impl Runtime {
    /// Runs a future in this runtime. Where the runtime has ended, the future is dropped, as tokio does it.
    pub(super) fn spawn(&self, future: impl Future<Output: Send + 'static> + Send + 'static) {
        self.spawn_on(&Handle::current(), future);
    }

    fn spawn_on(&self, handle: &Handle, future: impl Future<Output: Send + 'static> + Send + 'static) {
        if self.state().ended {
            return;
        }
        let future = Thawed {
            future,
            runtime: self.clone(),
        };
        let task = handle.spawn(RUNTIME.scope(self.clone(), future));
        self.state().tasks.push(task.abort_handle());
    }

    /// Drops all of its tasks.
    pub(super) fn end(&self) {
        let tasks = {
            let mut state = self.state();
            state.ended = true;
            std::mem::take(&mut state.tasks)
        };
        for task in tasks {
            task.abort();
        }
    }

    /// Polls none of its tasks until it is thawed, as if a handler blocked its only thread.
    pub(super) fn freeze(&self) {
        self.state().frozen = true;
    }

    pub(super) fn thaw(&self) {
        let wakers = {
            let mut state = self.state();
            state.frozen = false;
            std::mem::take(&mut state.wakers)
        };
        for waker in wakers {
            waker.wake();
        }
    }

    pub(super) fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state().ended
    }

    pub(super) fn is_running(&self) -> bool {
        let state = self.state();
        !state.ended && !state.frozen
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no code panics while it is locked")
    }
}

/// Spawns a task of the store in the simulated runtime of the current task, if there is one.
pub(in crate::store::redis) fn spawn_on(handle: &Handle, future: impl Future<Output: Send + 'static> + Send + 'static) {
    match RUNTIME.try_with(Runtime::clone) {
        Ok(runtime) => runtime.spawn_on(handle, future),
        Err(_) => drop(handle.spawn(future)),
    }
}

pin_project! {
    struct Thawed<F> {
        #[pin]
        future: F,
        runtime: Runtime,
    }
}

impl<F: Future> Future for Thawed<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        {
            let mut state = this.runtime.state();
            if state.frozen {
                state.wakers.push(cx.waker().clone());
                return Poll::Pending;
            }
        }
        this.future.poll(cx)
    }
}
