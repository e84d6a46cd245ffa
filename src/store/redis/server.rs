use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    task,
    time::{Instant, sleep},
};

use super::{
    ask::{Ask, Names},
    commit::{Alone, Group, Lane, Ticket},
    deny_cache::DenyCache,
    lanes::Lanes,
    link::{Failure, Link},
    script::{Call, Said, Script},
};
use crate::store::{Answer, ErrorKind, Operation, StoreError};

/// What the clones of a store share: Redis, and how to ask it.
pub(super) struct Server {
    pub(super) link: Link,
    pub(super) script: &'static Script,
    pub(super) names: Names,
    pub(super) deadline: Duration,
    pub(super) group: Group,
    pub(super) deny_cache: Option<DenyCache>,
    pub(super) lanes: Lanes,
}

/// How often a Redis that does not answer is probed.
const PAUSE: Duration = Duration::from_millis(100);

impl Server {
    /// Asks all of these in one call, once it is polled.
    pub(super) fn ask(
        self: &Arc<Self>,
        lane: Arc<Lane>,
        mut asks: Vec<Ask>,
        asked_at: Instant,
        stamp: Option<u64>,
    ) -> impl Future<Output = Result<Answer, StoreError>> + Send + use<> {
        let server = self.clone();
        async move {
            if matches!(&*asks, [ask] if ask.operation == Operation::Check)
                && let Some(departure) = lane.departs_alone()
                && let Some(ask) = asks.pop()
            {
                return Alone::new(server, departure, ask, asked_at, stamp).await;
            }
            let (ticket, answer) = Ticket::new(asks, asked_at, stamp);
            lane.submit(&server, ticket);
            drop(server); // who waits keeps no connection open
            answer.await.unwrap_or_else(|_| Err(abandoned()))
        }
    }

    /// When a request must have its answer.
    pub(super) fn due(&self, asked_at: Instant) -> Instant {
        asked_at + self.deadline
    }

    /// Whether there is any use in asking now.
    pub(super) fn admits(&self, lane: &Lane, asked_at: Instant, now: Instant) -> Result<(), StoreError> {
        if lane.breaker.is_open() {
            return Err(resting());
        }
        if self.due(asked_at) <= now {
            return Err(Failure::Timeout.into());
        }
        Ok(())
    }

    /// Runs the script, once or, if it did nothing for want of the right calendar windows, twice.
    pub(super) async fn run(
        self: &Arc<Self>,
        lane: &Arc<Lane>,
        call: &mut Call,
        deadline: Instant,
    ) -> Result<Said, Failure> {
        let mut reply = self.link.run(self.script, call, deadline).await;
        if let Some(now) = reply.as_ref().ok().and_then(|reply| call.missed(reply)) {
            call.guess(now);
            reply = self.link.run(self.script, call, deadline).await;
        }

        match &reply {
            Err(failure) if failure.is_silence() => {
                if lane.breaker.failed() {
                    let key = call.keys.first().cloned();
                    task::spawn(probe(Arc::downgrade(self), lane.clone(), key));
                }
            }
            _ => lane.breaker.answered(),
        }
        call.decode(&reply?)
    }

    /// Asks nothing, to hear whether Redis answers.
    pub(super) async fn hail(&self, key: Option<Bytes>) -> Result<(), Failure> {
        let deadline = Instant::now() + self.deadline;
        self.link.run(self.script, &Call::probe(key), deadline).await.map(drop)
    }
}

/// What is told to those who come while the breaker is open.
pub(super) fn resting() -> StoreError {
    StoreError::new(
        ErrorKind::Unreachable,
        "Redis did not answer lately, and is not asked until it does",
    )
}

/// What is told to those whose call went away with its runtime.
fn abandoned() -> StoreError {
    StoreError::new(
        ErrorKind::Unreachable,
        "the runtime in which Redis was asked has shut down",
    )
}

/// Waits until Redis answers again, or the store is gone.
async fn probe(server: Weak<Server>, lane: Arc<Lane>, key: Option<Bytes>) {
    while lane.breaker.is_open() {
        sleep(PAUSE).await;
        let Some(server) = server.upgrade() else { break };
        match server.hail(key.clone()).await {
            Err(failure) if failure.is_silence() => {}
            _ => lane.breaker.answered(),
        }
    }
    lane.breaker.probing_ends();
}
