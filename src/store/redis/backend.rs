use std::{
    future::{pending, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    runtime::Handle,
    task::yield_now,
    time::{Instant, sleep, timeout},
};

use super::{
    acl::Refusal,
    breaker::Breaker,
    builder::RedisStoreBuilder,
    call::{ScriptCall, process_time_us},
    client::RedisClient,
    deny_cache::DenyCache,
    failure::Failure,
    key_format::{KeyFormat, slot_of},
    queues::BatchLimits,
    reply::{RawReply, ScriptReply},
    request::MergedRequest,
    script::Scripts,
    task::{AbortOnDrop, OnDrop, spawn_on, try_spawn},
    trial::run_trial,
};
use crate::{
    observe::RedisMetrics,
    store::{StoreError, health::Node},
    sync::lock,
};

/// Runs script calls in Redis, with a deadline and a breaker. The commit queues of a store share it.
pub(super) struct Backend {
    pub(super) client: RedisClient,
    /// That in which the store was built, and its connections are.
    pub(super) runtime: Handle,
    /// A task that ends with it.
    lifetime: AbortOnDrop<()>,
    pub(super) scripts: &'static Scripts,
    pub(super) key_format: KeyFormat,
    pub(super) deadline: Deadline,
    pub(super) limits: BatchLimits,
    pub(super) deny_cache: Option<DenyCache>,
    /// Whether a call can use keys of several slots of a node of a cluster, as a trial has found.
    pub(super) several_slots: OnceLock<bool>,
    /// How many microseconds the clock of Redis is ahead of that of the process, as far as that is known.
    ahead_us: AtomicI64,
    /// Whether settings of Redis with which limits are lost have been logged.
    pub(super) settings_checked: AtomicBool,
    /// When a refusal was logged.
    refusal_logged_at: Mutex<Option<Instant>>,
    pub(super) metrics: RedisMetrics,
}

/// The least deadline of a call that is not one of checks.
pub(super) const LONG_CALL: Duration = Duration::from_secs(1);
/// The longest pause between probes while the breaker is open.
const PROBE_PAUSE: Duration = Duration::from_millis(100);
/// The least time between two log lines about refusals.
const REFUSAL_PAUSE: Duration = Duration::from_secs(60);

impl Backend {
    pub(super) fn new(client: RedisClient, settings: &RedisStoreBuilder) -> Self {
        Self {
            client,
            runtime: Handle::current(),
            lifetime: AbortOnDrop(tokio::spawn(pending())),
            scripts: settings.scripts,
            key_format: KeyFormat::new(&settings.prefix, settings.secret.clone()),
            deadline: Deadline::new(settings.deadline),
            limits: match settings.group_commit {
                true => BatchLimits::GROUP_COMMIT,
                false => BatchLimits::NO_BATCHES,
            },
            deny_cache: settings.deny_cache.then(DenyCache::new),
            several_slots: OnceLock::new(),
            ahead_us: AtomicI64::new(0),
            settings_checked: AtomicBool::new(false),
            refusal_logged_at: Mutex::default(),
            metrics: RedisMetrics::new(),
        }
    }

    /// Runs a task that several callers depend on: not in the runtime of a caller, which may be blocked, or end. If that of the store has
    /// ended, each call fails at once wherever it is made.
    pub(super) fn spawn(&self, future: impl Future<Output: Send + 'static> + Send + 'static) {
        match self.has_lost_its_runtime() {
            false => spawn_on(&self.runtime, future),
            true => try_spawn(future),
        }
    }

    /// Whether the runtime of the store has ended, and its connections with it.
    pub(super) fn has_lost_its_runtime(&self) -> bool {
        self.lifetime.0.is_finished()
    }

    /// Whether a trial has found that a call can use keys of several slots of a node.
    pub(super) fn reaches_several_slots(&self) -> bool {
        self.several_slots.get().copied().unwrap_or_default()
    }

    /// The failure of so many checks in this slot that were in no call in time.
    pub(super) fn not_sent(&self, slot: u16, checks: usize) -> StoreError {
        let error = StoreError::from(Failure::Timeout);
        let node = self.client.node(|| slot);
        self.client.health().failed(&node, checks as u64, &error);
        error
    }

    /// Decides these requests in one call. The deadline starts now, and once more if the script replies that no window of a
    /// calendar in the call encloses its time: nothing was decided then.
    ///
    /// Of a slot that is moving, a node executes no call with several keys unless it has all of them. Those of several callers are
    /// sent once more, each alone; of those of one, none is executed.
    pub(super) async fn run(
        self: &Arc<Self>,
        breaker: &Arc<Breaker>,
        merged: &[MergedRequest<'_>],
        are_of_several: bool,
    ) -> Result<ScriptReply, Failure> {
        let call_at = |now_us| ScriptCall::new(merged, &self.key_format, self.client.is_clustered(), now_us);
        let process_us = process_time_us();
        let mut call = call_at(process_us.saturating_add_signed(self.ahead_us.load(Ordering::Relaxed)));
        self.metrics.call(merged.iter().map(MergedRequest::callers).sum());
        let node = self.client.node(|| slot_of(call.keys.first().map_or(&[], |key| key)));
        let mut reply = self.run_call(&call).await;
        if call.has_calendars
            && let Some(now_us) = reply.as_ref().ok().and_then(RawReply::lone_time)
        {
            let ahead_us = now_us.cast_signed().wrapping_sub(process_us.cast_signed());
            self.ahead_us.store(ahead_us, Ordering::Relaxed);
            call = call_at(now_us);
            reply = self.run_call(&call).await;
        }

        match &reply {
            Err(failure) if failure.is_no_reply() => {
                breaker.record_failure(failure);
                self.ensure_probe(breaker, || call.keys.first().cloned());
            }
            _ => breaker.record_reply(),
        }
        self.record_refusal(&reply);
        let are_of_one = call.keys.len() > 1 && !are_of_several;
        let reply = match reply {
            Err(failure) if call.is_across && failure.is_elsewhere() || are_of_one && failure.is_try_again() => {
                Ok(ScriptReply {
                    server_time: Duration::ZERO,
                    replies: merged.iter().map(|_| None).collect(),
                })
            }
            reply => reply.and_then(|reply| ScriptReply::decode(merged, call.is_across, &reply)),
        };
        let are_sent_again = are_of_several && reply.as_ref().is_err_and(Failure::is_try_again);
        if !are_sent_again {
            self.record_health(&node, merged, &reply);
        }
        reply
    }

    /// Runs a script, under the deadline alone.
    async fn run_call(&self, call: &ScriptCall) -> Result<RawReply, Failure> {
        let script = self.scripts.get(call.script);
        self.client.run(script, call, self.deadline).await
    }

    /// The same for a call that may take longer than a check: Redis may have to compile its script, or to reply with ten thousand
    /// overrides.
    pub(super) async fn run_long_call(&self, call: &ScriptCall) -> Result<RawReply, Failure> {
        let script = self.scripts.get(call.script);
        self.client.run(script, call, Deadline::new(self.longest_call())).await
    }

    pub(super) fn longest_call(&self) -> Duration {
        self.deadline.duration.max(LONG_CALL)
    }

    fn record_failed(&self, node: &Node, checks: u64, failure: &Failure) {
        let (health, error) = (self.client.health(), failure.clone().into());
        match failure.is_of_key() {
            true => health.failed_by_key(node, checks, &error),
            false => health.failed(node, checks, &error),
        }
    }

    fn record_health(&self, node: &Node, merged: &[MergedRequest<'_>], reply: &Result<ScriptReply, Failure>) {
        let all = merged.iter().map(MergedRequest::callers).sum();
        match reply {
            Err(failure) => self.record_failed(node, all, failure),
            Ok(reply) => {
                let mut decided = 0;
                for (merged, reply) in merged.iter().zip(&reply.replies) {
                    match reply {
                        Some(Ok(_)) => decided += merged.callers(),
                        Some(Err(failure)) => self.record_failed(node, merged.callers(), failure),
                        // It is sent once more, in a call for its slot or for each key.
                        None => {}
                    }
                }
                self.client.health().decided(node, decided);
            }
        }
    }

    /// Starts a task that probes Redis, if the breaker is open and no such task runs.
    pub(super) fn ensure_probe(self: &Arc<Self>, breaker: &Arc<Breaker>, key: impl FnOnce() -> Option<Bytes>) {
        if breaker.start_probe() {
            let (backend, breaker) = (Arc::downgrade(self), breaker.clone());
            let probed = breaker.clone();
            let ends = OnDrop::new(move || probed.end_probe());
            let probing = probe(backend, breaker, key());
            self.spawn(async move {
                probing.await;
                drop(ends);
            });
        }
    }

    /// Logs a refusal, at most once a minute.
    fn record_refusal(self: &Arc<Self>, reply: &Result<RawReply, Failure>) {
        let refusal = match reply {
            Ok(reply) => reply.errors.iter().find_map(|error| Refusal::of_call(error)),
            Err(Failure::Forbidden(refusal)) => Some(refusal.clone()),
            // The key may have another primary since a failover.
            Err(_) => self.client.lookup_refusal(),
        };
        let Some(refusal) = refusal else { return };
        if self.may_log_refusal() {
            // The error of a command in a script may not name the command; that of a trial does.
            let backend = self.clone();
            self.spawn(async move {
                let tried = run_trial(&backend).await;
                backend.log_refusal(match &tried {
                    Err(Failure::Forbidden(precise)) => precise,
                    _ => &refusal,
                });
            });
        }
    }

    /// Whether no refusal was logged in the last minute.
    pub(super) fn may_log_refusal(&self) -> bool {
        let now = Instant::now();
        let mut logged_at = lock(&self.refusal_logged_at);
        let may = logged_at.is_none_or(|at| at + REFUSAL_PAUSE <= now);
        if may {
            *logged_at = Some(now);
        }
        may
    }

    /// What is refused, and the fix.
    pub(super) fn explain(&self, refusal: &Refusal) -> String {
        refusal.explain(&self.key_format.prefix, &self.client.permissions())
    }

    pub(super) fn log_refusal(&self, refusal: &Refusal) {
        tracing::error!(
            error = self.explain(refusal),
            "Redis refuses a permission that the store requires; checks fail"
        );
    }
}

/// Sends calls without requests until Redis replies to one, or to a request, or the store is dropped.
async fn probe(backend: Weak<Backend>, breaker: Arc<Breaker>, key: Option<Bytes>) {
    let call = ScriptCall::probe(key);
    // A lost connection is replaced in a few milliseconds.
    let mut pause = PROBE_PAUSE / 16;
    loop {
        sleep(pause).await;
        pause = PROBE_PAUSE.min(2 * pause);
        let Some(backend) = backend.upgrade().filter(|_| breaker.is_open()) else {
            return;
        };
        let reply = backend.run_call(&call).await;
        backend.record_refusal(&reply);
        match reply {
            Err(failure) if failure.is_no_reply() => {}
            _ => breaker.record_reply(),
        }
    }
}

/// A deadline that does not run while the process is stalled.
///
/// The time is counted in steps. A step that takes longer than planned, because handlers blocked the threads of the runtime or
/// the process was stopped, counts as one step: until the runtime continues, a reply that has arrived cannot be read. So a
/// future is given up only after the runtime has polled it, and read its sockets, at the end of each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deadline {
    steps: u32,
    pub(super) step: Duration,
    /// The time that it runs without a stall.
    pub(super) duration: Duration,
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
            if let Some(output) = timeout_anywhere(self.step, future.as_mut()).await {
                return Some(output);
            }
            after_step();
        }

        // After a stall the timer may fire before the task of the client has read the reply. That task runs first and wakes the
        // future.
        for _ in 0..2 {
            yield_now().await;
            if let Poll::Ready(output) = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
                return Some(output);
            }
        }
        None
    }
}

/// Waits for a future; `None` if this time passes first. A timer ends with its runtime, so a future that continues in another
/// runtime gets a new one.
async fn timeout_anywhere<F: Future>(time: Duration, mut future: Pin<&mut F>) -> Option<F::Output> {
    loop {
        let runtime = Handle::current().id();
        let here = poll_fn(|cx| match Handle::try_current() {
            Ok(current) if current.id() != runtime => Poll::Ready(None),
            _ => future.as_mut().poll(cx).map(Some),
        });
        match timeout(time, here).await {
            Ok(None) => {}
            Ok(output) => return output,
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, thread};

    use tokio::{
        runtime::Builder,
        sync::oneshot,
        time::{Instant, sleep},
    };

    use super::*;
    use crate::store::{
        ErrorKind,
        redis::simulation::network::{Network, simulated_backend},
    };

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
        assert_eq!(doubled.duration, Duration::from_millis(200));
        assert_eq!(doubled.step, deadline.step);

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

    #[test]
    fn a_future_whose_runtime_has_ended_continues_in_another_one() {
        let runtime = || Builder::new_multi_thread().worker_threads(1).enable_time().build();
        let (first, second) = (runtime().expect("a runtime"), runtime().expect("a runtime"));
        let mut waiting = pin!(Deadline::new(Duration::from_millis(40)).wait(pending::<()>()));
        assert!(first.block_on(poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending()))));
        drop(first);
        assert_eq!(second.block_on(waiting), None);
    }

    #[tokio::test]
    async fn a_check_that_was_not_decided_in_time_counts_as_failed() {
        let backend = simulated_backend(Network::new(0, false));
        assert_eq!(backend.not_sent(0, 1).kind(), ErrorKind::Timeout);
        let nodes = backend.client.health().status();
        assert_eq!(nodes.iter().map(|node| node.failed).sum::<u64>(), 1);
    }
}
