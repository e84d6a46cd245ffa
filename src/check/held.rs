//! Admitted requests that wait for their turn.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    runtime::Handle,
    time::{Sleep, sleep},
};

use super::bans;
use crate::{
    Decision,
    decision::Settlement,
    observe::metrics::WaitingRequest,
    store::{ErrorKind, Owed, OwedKind, StoreError, StoreFuture},
};

/// An admitted request until its turn. Dropped before, it is refunded.
pub(crate) struct Held {
    decision: Option<Decision>,
    sleep: Pin<Box<Sleep>>,
    /// At its turn: the bans that may have begun meanwhile.
    bans: Option<StoreFuture>,
    waiting: Option<WaitingRequest>,
    _owed: Option<Owed>,
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
            bans: None,
            waiting: decision.wait(),
            _owed: decision.owe(OwedKind::Settlement),
            decision: Some(decision),
        })
    }

    /// Waits for the turn. If a ban has begun meanwhile, the request is denied for it, and refunded.
    ///
    /// # Panics
    ///
    /// If it is polled again after it was ready.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Decision> {
        let decision = self.decision.as_ref().expect("polled after it was ready");
        if self.bans.is_none() {
            ready!(self.sleep.as_mut().poll(cx));
            self.waiting = None;
            self.bans = bans::read(decision);
        }
        let denied = match &mut self.bans {
            // Without a reply it is admitted, as it was.
            Some(bans) => match ready!(Pin::new(bans).poll(cx)) {
                Ok(response) => bans::deny(decision, &response),
                Err(_) => None,
            },
            None => None,
        };
        let admitted = self.decision.take().expect("it has just been read");
        Poll::Ready(match denied {
            Some(denied) => {
                give_back(&admitted);
                denied.count_outcomes();
                denied
            }
            None => admitted,
        })
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
    settlement.send().receive(None);
}
