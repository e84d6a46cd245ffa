use std::{
    sync::{Arc, Weak},
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
    failure::Failure,
    key_format::KeyFormat,
    reply::{RawReply, ScriptReply},
    script::Script,
    task::try_spawn,
    trial::run_trial,
};
use crate::{
    metrics::RedisMetrics,
    store::health::Health,
    store::{ErrorKind, StoreError},
};

/// Runs script calls in Redis, with a deadline and a breaker.
pub(super) struct Backend {
    pub(super) client: RedisClient,
    pub(super) script: &'static Script,
    pub(super) key_format: KeyFormat,
    pub(super) deadline: Deadline,
    /// Whether the last calls met a refusal.
    pub(super) refused: Health,
    pub(super) metrics: RedisMetrics,
}

/// The pause between probes while the breaker is open.
const PROBE_PAUSE: Duration = Duration::from_millis(100);

impl Backend {
    pub(super) fn new(client: RedisClient, script: &'static Script, key_format: KeyFormat, deadline: Duration) -> Self {
        Self {
            client,
            script,
            key_format,
            deadline: Deadline::new(deadline),
            refused: Health::default(),
            metrics: RedisMetrics::default(),
        }
    }

    /// Fails while the breaker is open. The probes of a cluster node are sent to the node of the `key`.
    pub(super) fn check_breaker(
        self: &Arc<Self>,
        breaker: &Arc<Breaker>,
        key: impl FnOnce() -> Option<Bytes>,
    ) -> Result<(), StoreError> {
        if !breaker.is_open() {
            return Ok(());
        }
        // The task of the probes may have ended with its runtime.
        self.ensure_probe(breaker, key);
        Err(StoreError::new(
            ErrorKind::Unreachable,
            "Redis did not reply to the last calls; checks fail until it replies to a probe",
        ))
    }

    /// Runs the script. The deadline starts now, and once more if the script replies that no window of a calendar in the call
    /// encloses its time: nothing was decided then.
    pub(super) async fn run(
        self: &Arc<Self>,
        breaker: &Arc<Breaker>,
        call: &mut ScriptCall,
    ) -> Result<ScriptReply, Failure> {
        self.metrics.call(call.requests());
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
        ScriptReply::decode(call, &reply?)
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

    /// Logs a refusal once per change of state.
    fn record_refusal(self: &Arc<Self>, reply: &Result<RawReply, Failure>) {
        let refusal = match reply {
            Ok(reply) => reply.errors.iter().find_map(|error| Refusal::of_call(error)),
            Err(Failure::Forbidden(refusal)) => Some(refusal.clone()),
            Err(_) => return,
        };
        let Some(refusal) = refusal else {
            self.refused.replies();
            return;
        };
        if self.refused.fails() {
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
