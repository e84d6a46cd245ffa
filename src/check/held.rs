//! Admitted requests that wait for their turn.

use std::{pin::Pin, time::Duration};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep},
};

use super::{Check, bans, begin, queued};
use crate::{
    Decision, PolicyDecision,
    decision::{Settlement, Undecided},
    store::{ErrorKind, Operation, Owed, OwedKind, StoreError},
};

/// A request that is held until its turn, or until slots are free for it.
pub(crate) type Held = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

/// An admitted request until its turn. Dropped before, it is refunded.
struct Admitted {
    decision: Option<Decision>,
    _owed: Option<Owed>,
}

/// Holds a request that has just been decided until its turn.
pub(crate) fn until_turn(decision: Decision) -> Result<Held, StoreError> {
    let admitted = Admitted {
        _owed: decision.owe(OwedKind::Settlement),
        decision: Some(decision),
    };
    require_runtime()?;
    Ok(Box::pin(admitted.wait()))
}

/// Holds a request until the end of a pause, and checks it then.
pub(super) fn after_pause(pause: Duration, again: Undecided, waited: Duration) -> Result<Held, StoreError> {
    require_runtime()?;
    Ok(Box::pin(async move {
        let since = Instant::now();
        {
            let _waiting = again.as_slice().first().map(PolicyDecision::wait);
            sleep(pause).await;
        }
        let waited = waited + since.elapsed();
        let decision = match begin(Operation::Reserve, again) {
            Check::Decided(decision) => decision?,
            Check::Pending(check) => check.await?,
        };
        Ok(decision.after_waiting(waited))
    }))
}

/// An error outside of a runtime, which has no timer.
pub(super) fn require_runtime() -> Result<(), StoreError> {
    let error = |_| {
        StoreError::new(
            ErrorKind::Refused,
            "a request can wait only in a tokio runtime; check it there, or without `wait_up_to`",
        )
    };
    Handle::try_current().map(drop).map_err(error)
}

impl Admitted {
    /// Waits for the turn, and takes the slots then. If a ban has begun meanwhile, or no slots are free, the request is denied,
    /// and refunded.
    async fn wait(mut self) -> Result<Decision, StoreError> {
        let since = Instant::now();
        {
            let _waiting = self.decision().wait();
            sleep(self.decision().delay()).await;
        }

        // Without a reply it is admitted, as it was.
        if let Some(bans) = bans::read(self.decision())
            && let Ok(response) = bans.await
            && let Some(denied) = bans::deny(self.decision(), &response)
        {
            drop(self);
            let waited = since.elapsed();
            if let Some((pause, again)) = denied.after_pause(waited) {
                return after_pause(pause, again, waited)?.await;
            }
            denied.count_outcomes();
            return Ok(denied);
        }
        let Some(slots) = self.decision().untaken_slots() else {
            return Ok(self.admit());
        };
        let taken = queued::take(slots, since)?.await?;
        match taken.is_allowed() {
            true => Ok(self.admit().with_slots(taken)),
            false => Ok(taken),
        }
    }

    fn decision(&self) -> &Decision {
        self.decision.as_ref().expect("it is held")
    }

    fn admit(&mut self) -> Decision {
        self.decision.take().expect("it is held")
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        if let Some(decision) = self.decision.take() {
            give_back(&decision);
        }
    }
}

/// Refunds an admitted request that its caller has left, in a task. If that fails, its turn expires.
pub(crate) fn give_back(decision: &Decision) {
    let locally = decision.store_error().is_some();
    let mut settlement = Settlement::default();
    for policy in decision.as_slice() {
        settlement.refund(policy, locally);
    }
    settlement.send().receive(None);
}
