use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::{
    ask::{Ask, Names},
    commit_queue::{CommitQueue, Group},
    deny_cache::DenyCache,
    link::{Failure, Link},
    patience::Patience,
    queues::CommitQueues,
    script::{Call, RawReply, Said, Script},
    task::try_spawn,
};
use crate::store::{ErrorKind, StoreError, health::Health};

/// What the clones of a store share.
pub(super) struct Server {
    pub(super) link: Link,
    pub(super) script: &'static Script,
    pub(super) names: Names,
    pub(super) deadline: Duration,
    /// The deadline, as Redis is given it.
    pub(super) patience: Patience,
    pub(super) group: Group,
    pub(super) deny_cache: Option<DenyCache>,
    pub(super) queues: CommitQueues,
    /// Whether Redis refused the last calls for good.
    pub(super) refused: Health,
}

/// How often Redis is probed while the breaker is open.
const PROBE_PAUSE: Duration = Duration::from_millis(100);
/// How much longer than the deadline a client may keep a command, so that a stall of this process is no failure.
pub(super) const LONGEST_STALL: Duration = Duration::from_secs(10);

impl Server {
    /// Fails while the breaker is open.
    pub(super) fn admits(self: &Arc<Self>, queue: &Arc<CommitQueue>, asks: &[Ask]) -> Result<(), StoreError> {
        if !queue.breaker.is_open() {
            return Ok(());
        }
        // The task that probes may have ended with its runtime.
        self.ensure_probe(queue, || {
            let key = asks.iter().flat_map(|ask| &ask.debits).next()?;
            Some(Bytes::copy_from_slice(&key.key))
        });
        Err(StoreError::new(
            ErrorKind::Unreachable,
            "Redis did not reply to the last calls; checks fail until it replies to a probe",
        ))
    }

    /// Runs the script, once or, if it did nothing for want of the right calendar windows, twice.
    pub(super) async fn run(self: &Arc<Self>, queue: &Arc<CommitQueue>, call: &mut Call) -> Result<Said, Failure> {
        let mut reply = self.send(call).await;
        if let Some(now) = reply.as_ref().ok().and_then(|reply| call.missed(reply)) {
            call.guess(now);
            reply = self.send(call).await;
        }

        match &reply {
            Err(failure) if failure.is_silence() => {
                queue.breaker.failed();
                self.ensure_probe(queue, || call.keys.first().cloned());
            }
            _ => queue.breaker.answered(),
        }
        self.note(&reply);
        call.decode(&reply?)
    }

    /// Sends a call. The deadline runs from now on, whenever the requests in it were made.
    async fn send(&self, call: &Call) -> Result<RawReply, Failure> {
        let reply = self.link.run(self.script, call, self.deadline + LONGEST_STALL);
        let reply = self.patience.wait(reply, || {}).await;
        reply.unwrap_or(Err(Failure::Timeout))
    }

    /// Sends a call without requests, which any reply answers.
    async fn hail(&self, key: Option<Bytes>) -> Result<(), Failure> {
        self.send(&Call::probe(key)).await.map(drop)
    }

    /// Starts a task that probes, if the breaker is open and none runs.
    fn ensure_probe(self: &Arc<Self>, queue: &Arc<CommitQueue>, key: impl FnOnce() -> Option<Bytes>) {
        if let Some(id) = queue.breaker.needs_probe(Instant::now(), self.probe_lease()) {
            try_spawn(probe(Arc::downgrade(self), queue.clone(), key(), id));
        }
    }

    /// A probe that has not been seen for so long has ended.
    fn probe_lease(&self) -> Duration {
        2 * (PROBE_PAUSE + self.deadline)
    }
}

/// Sends calls without requests until Redis replies, or the store is dropped.
async fn probe(server: Weak<Server>, queue: Arc<CommitQueue>, key: Option<Bytes>, id: u32) {
    loop {
        sleep(PROBE_PAUSE).await;
        let Some(server) = server.upgrade() else { return };
        if !queue.breaker.goes_on(id, Instant::now(), server.probe_lease()) {
            return;
        }
        match server.hail(key.clone()).await {
            Err(failure) if failure.is_silence() => {}
            _ => queue.breaker.answered(),
        }
    }
}
