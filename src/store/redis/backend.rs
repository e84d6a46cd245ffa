use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::{
    acl::Refusal,
    breaker::Breaker,
    call::ScriptCall,
    client::RedisClient,
    deadline::Deadline,
    failure::{CallFailure, Failure},
    key_format::KeyFormat,
    reply::{RawReply, ScriptReply},
    script::Script,
    slot::slot_of,
    task::try_spawn,
    trial::run_trial,
};
use crate::{
    metrics::RedisMetrics,
    store::{ErrorKind, StoreError, health::Node},
};

/// Runs script calls in Redis, with a deadline and a breaker.
pub(super) struct Backend {
    pub(super) client: RedisClient,
    pub(super) script: &'static Script,
    pub(super) key_format: KeyFormat,
    pub(super) deadline: Deadline,
    /// When a refusal was logged.
    refusal_logged_at: Mutex<Option<Instant>>,
    pub(super) metrics: RedisMetrics,
}

/// The pause between probes while the breaker is open.
const PROBE_PAUSE: Duration = Duration::from_millis(100);
/// The least time between two log lines about refusals.
const REFUSAL_PAUSE: Duration = Duration::from_secs(60);

impl Backend {
    pub(super) fn new(client: RedisClient, script: &'static Script, key_format: KeyFormat, deadline: Duration) -> Self {
        Self {
            client,
            script,
            key_format,
            deadline: Deadline::new(deadline),
            refusal_logged_at: Mutex::default(),
            metrics: RedisMetrics::default(),
        }
    }

    /// Fails while the breaker is open, for so many checks. The probes of a cluster node are sent to the node of the `key`.
    pub(super) fn check_breaker(
        self: &Arc<Self>,
        breaker: &Arc<Breaker>,
        checks: usize,
        key: impl FnOnce() -> Option<Bytes>,
    ) -> Result<(), StoreError> {
        if !breaker.is_open() {
            return Ok(());
        }
        let key = key();
        let error = StoreError::new(
            ErrorKind::Unreachable,
            "Redis did not reply to the last calls; checks fail until it replies to a probe",
        );
        let node = self.client.node(|| slot_of(key.as_deref().unwrap_or_default()));
        self.client.health().failed_without_call(&node, checks as u64, &error);
        // The task of the probes may have ended with its runtime.
        self.ensure_probe(breaker, || key);
        Err(error.recorded())
    }

    /// The failure of a check in this slot that was not decided in time.
    pub(super) fn timed_out(&self, slot: u16) -> StoreError {
        let error = StoreError::from(Failure::Timeout);
        self.client.health().failed(&self.client.node(|| slot), 1, &error);
        error
    }

    /// Runs the script. The deadline starts now, and once more if the script replies that no window of a calendar in the call
    /// encloses its time: nothing was decided then.
    pub(super) async fn run(
        self: &Arc<Self>,
        breaker: &Arc<Breaker>,
        call: &mut ScriptCall,
    ) -> Result<ScriptReply, CallFailure> {
        self.metrics.call(call.requests());
        let node = self.client.node(|| slot_of(call.keys.first().map_or(&[], |key| key)));
        let mut reply = self.client.run(self.script, call, self.deadline).await;
        if call.has_calendar_windows()
            && let Some(now_us) = reply.as_ref().ok().and_then(RawReply::lone_time)
        {
            call.set_time(now_us);
            reply = self.client.run(self.script, call, self.deadline).await;
        }

        match &reply {
            Err(failure) if failure.is_no_reply() => {
                breaker.record_failure();
                self.ensure_probe(breaker, || call.keys.first().cloned());
            }
            _ => breaker.record_reply(),
        }
        self.record_refusal(&reply);
        let reply = reply.and_then(|reply| ScriptReply::decode(call, &reply));
        let reply = reply.map_err(CallFailure::from);
        self.record_health(&node, call, &reply);
        reply
    }

    fn record_health(&self, node: &Node, call: &ScriptCall, reply: &Result<ScriptReply, CallFailure>) {
        let (health, mut decided) = (self.client.health(), call.requests());
        match reply {
            // Its requests are sent once more, each alone.
            Err(failure) if failure.is_try_again && decided > 1 => {}
            Err(failure) if failure.is_of_key => health.failed_by_key(node, decided, &failure.error),
            Err(failure) => health.failed(node, decided, &failure.error),
            Ok(reply) => {
                for (shape, reply) in call.shape.iter().zip(&reply.replies) {
                    let Err(failure) = reply else { continue };
                    decided -= shape.times;
                    match failure.is_of_key {
                        true => health.failed_by_key(node, shape.times, &failure.error),
                        false => health.failed(node, shape.times, &failure.error),
                    }
                }
                node.decided(decided);
            }
        }
    }

    /// Starts a task that probes Redis, if the breaker is open and no such task runs.
    fn ensure_probe(self: &Arc<Self>, breaker: &Arc<Breaker>, key: impl FnOnce() -> Option<Bytes>) {
        if let Some(id) = breaker.start_probe(Instant::now(), self.probe_lease()) {
            try_spawn(probe(Arc::downgrade(self), breaker.clone(), key(), id));
        }
    }

    /// A probe that has not renewed its lease for this time has ended.
    fn probe_lease(&self) -> Duration {
        2 * (PROBE_PAUSE + self.deadline.duration())
    }

    /// Logs a refusal, at most once a minute.
    fn record_refusal(self: &Arc<Self>, reply: &Result<RawReply, Failure>) {
        let refusal = match reply {
            Ok(reply) => reply.errors.iter().find_map(|error| Refusal::of_call(error)),
            Err(Failure::Forbidden(refusal)) => Some(refusal.clone()),
            Err(_) => return,
        };
        let Some(refusal) = refusal else { return };
        if self.may_log_refusal() {
            // The error of a command in a script may not name the command; that of a trial does.
            let backend = self.clone();
            try_spawn(async move {
                let tried = run_trial(&backend.client, backend.script, &backend.key_format).await;
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
        let mut logged_at = self.refusal_logged_at.lock().unwrap_or_else(PoisonError::into_inner);
        let may = logged_at.is_none_or(|at| at + REFUSAL_PAUSE <= now);
        if may {
            *logged_at = Some(now);
        }
        may
    }

    pub(super) fn log_refusal(&self, refusal: &Refusal) {
        #[cfg(feature = "tracing")]
        tracing::error!(
            error = %refusal.explain(self.key_format.prefix()),
            "Redis refuses a permission that the store requires; checks fail"
        );
        let _ = refusal;
    }
}

/// Sends calls without requests until Redis replies or the store is dropped.
async fn probe(backend: Weak<Backend>, breaker: Arc<Breaker>, key: Option<Bytes>, id: u32) {
    let call = ScriptCall::probe(key);
    loop {
        sleep(PROBE_PAUSE).await;
        let Some(backend) = backend.upgrade() else { return };
        if !breaker.renew_probe(id, Instant::now(), backend.probe_lease()) {
            return;
        }
        match backend.client.run(backend.script, &call, backend.deadline).await {
            Err(failure) if failure.is_no_reply() => {}
            _ => breaker.record_reply(),
        }
    }
}
