//! Deadlines that measure Redis and not stalls of this process.

use std::{pin::pin, task::Poll, time::Duration};

use tokio::{task::yield_now, time::timeout};

/// A deadline that does not run while the process is stalled.
///
/// The time is counted in steps. A step that takes longer than planned, because handlers blocked the threads of the runtime or
/// the process was stopped, counts as one step: until the runtime continues, a reply that has arrived cannot be read. So a
/// future is given up only after the runtime has polled it, and read its sockets, at the end of each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deadline {
    steps: u32,
    step: Duration,
    duration: Duration,
}

impl Deadline {
    const STEPS: u32 = 4;
    /// The timers of tokio have a resolution of 1 ms, to which each step is rounded up.
    const SHORTEST_STEP: Duration = Duration::from_millis(5);

    pub(super) fn new(duration: Duration) -> Self {
        let step = (duration / Self::STEPS).max(Self::SHORTEST_STEP).min(duration);
        let steps = duration.as_nanos().div_ceil(step.as_nanos().max(1));
        Self {
            steps: steps as u32,
            step,
            duration,
        }
    }

    /// The time that it runs without a stall.
    pub(super) fn duration(self) -> Duration {
        self.duration
    }

    /// The time of one step.
    pub(super) fn step(self) -> Duration {
        self.step
    }

    /// A deadline of twice as many steps.
    pub(super) fn doubled(self) -> Self {
        Self {
            steps: 2 * self.steps,
            duration: 2 * self.duration,
            ..self
        }
    }

    /// Waits for a future; `None` if the deadline passes first.
    pub(super) async fn wait<F: Future>(self, future: F) -> Option<F::Output> {
        self.wait_in_steps(future, || {}).await
    }

    /// Waits for a future as [`wait`](Self::wait) does, and calls `after_step` after each step.
    pub(super) async fn wait_in_steps<F: Future>(self, future: F, mut after_step: impl FnMut()) -> Option<F::Output> {
        let mut future = pin!(future);
        for _ in 0..self.steps {
            if let Ok(output) = timeout(self.step, &mut future).await {
                return Some(output);
            }
            after_step();
        }

        // After a stall the timer may fire before the task of the client has read the reply. That task runs first and wakes the
        // future.
        for _ in 0..2 {
            yield_now().await;
            if let Poll::Ready(output) = std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
                return Some(output);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, future::pending, thread};

    use tokio::{
        sync::oneshot,
        time::{Instant, sleep},
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_future_is_dropped_when_the_deadline_has_passed() {
        for ms in [1, 5, 19, 20, 100, 3_600_000] {
            let deadline = Duration::from_millis(ms);
            let (started, steps) = (Instant::now(), Cell::new(0));
            let waited = Deadline::new(deadline).wait_in_steps(pending::<()>(), || steps.set(steps.get() + 1));
            assert_eq!(waited.await, None);

            let took = started.elapsed();
            assert!(took >= deadline, "{took:?} of {deadline:?}");
            assert!(took <= deadline + Duration::from_millis(8), "{took:?} of {deadline:?}");
            assert!((1..=4).contains(&steps.get()), "{} steps", steps.get());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_future_that_is_ready_before_the_deadline_is_returned() {
        let deadline = Deadline::new(Duration::from_millis(100));
        let ready = async {
            sleep(Duration::from_millis(99)).await;
            7
        };
        assert_eq!(deadline.wait(ready).await, Some(7));
    }

    #[tokio::test(start_paused = true)]
    async fn a_doubled_deadline_is_twice_as_long() {
        let (deadline, started) = (Deadline::new(Duration::from_millis(100)), Instant::now());
        let doubled = deadline.doubled();
        assert_eq!(doubled.duration(), Duration::from_millis(200));
        assert_eq!(doubled.step(), deadline.step());

        assert_eq!(doubled.wait(pending::<()>()).await, None);
        assert_eq!(started.elapsed(), Duration::from_millis(200));
    }

    #[tokio::test]
    async fn a_stall_of_the_runtime_does_not_count() {
        let deadline = Deadline::new(Duration::from_millis(40));
        let (sender, receiver) = oneshot::channel();
        // As with a client, the reply comes from a task, which cannot run while the runtime is blocked.
        tokio::spawn(async move {
            for _ in 0..3 {
                thread::sleep(Duration::from_millis(100));
                tokio::task::yield_now().await;
            }
            sender.send(7).expect("the receiver waits");
        });
        assert_eq!(deadline.wait(receiver).await, Some(Ok(7)));
    }
}
