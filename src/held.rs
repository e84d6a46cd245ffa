//! Admitted requests that wait for their turn.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    runtime::Handle,
    time::{Sleep, sleep},
};

use crate::{
    Decision,
    decision::Settlement,
    metrics::{WaitingRequest, lost_settlement},
    store::{ErrorKind, StoreError},
};

/// An admitted request until its turn. Dropped before, it is refunded.
pub(crate) struct Held {
    decision: Option<Decision>,
    sleep: Pin<Box<Sleep>>,
    waiting: Option<WaitingRequest>,
}

impl Held {
    /// Holds a request that has just been decided.
    pub(crate) fn new(decision: Decision) -> Result<Self, StoreError> {
        if Handle::try_current().is_err() {
            give_back(&decision);
            return Err(StoreError::new(
                ErrorKind::Refused,
                "a request can wait only in a tokio runtime; check it there, or without `wait_up_to`",
            ));
        }
        Ok(Self {
            sleep: Box::pin(sleep(decision.delay())),
            waiting: decision.wait(),
            decision: Some(decision),
        })
    }

    /// Waits for the turn.
    ///
    /// # Panics
    ///
    /// If it is polled again after it was ready.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Decision> {
        ready!(self.sleep.as_mut().poll(cx));
        self.waiting = None;
        Poll::Ready(self.decision.take().expect("polled after it was ready"))
    }
}

impl Drop for Held {
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
    for response in settlement.send() {
        match (response.try_ready(), Handle::try_current()) {
            (Ok(Ok(_)), _) => {}
            (Err(pending), Ok(runtime)) => {
                runtime.spawn(async {
                    if pending.await.is_err() {
                        lost_settlement();
                    }
                });
            }
            (Ok(Err(_)), _) | (Err(_), Err(_)) => lost_settlement(),
        }
    }
}
