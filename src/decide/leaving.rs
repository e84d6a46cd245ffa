//! A request that waits until its caller leaves.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::{Arc, atomic::Ordering},
    task::Poll,
};

use tokio::{
    sync::oneshot,
    time::{Instant, sleep_until},
};

use super::{
    Undecided, caught,
    check::{Check, Sent, give_back, wait},
    failing::fail,
    line::{LONGEST_CHECK, REFRESH, ended},
    waiting::{Lacking, Outcome, Waiter},
};
use crate::{
    Decision,
    observe::WaitMetrics,
    store::{Operation, StoreFuture},
};

/// The request leaves the lines when its caller leaves. One that is being checked does so if the check does not decide it.
pub(super) struct Leaving {
    pub(super) waiter: Arc<Waiter>,
    pub(super) decided: oneshot::Receiver<Outcome>,
}

impl Leaving {
    /// Waits until the request is decided, or is over. It is decided here where it is being checked in a runtime that is not driven.
    pub(super) async fn outcome(mut self, again: &Undecided) -> Outcome {
        let waiter = self.waiter.clone();
        let mut over = waiter.until;
        let mut timer = pin!(sleep_until(over.min(Instant::now() + REFRESH)));
        // It may have been called outside of this runtime.
        waiter.ensure_tasks();
        poll_fn(|cx| {
            if let Poll::Ready(outcome) = Pin::new(&mut self.decided).poll(cx) {
                return Poll::Ready(outcome.unwrap_or_else(|_| Outcome::Decided(Err(ended()))));
            }
            while timer.as_mut().poll(cx).is_ready() {
                let now = Instant::now();
                if now >= over {
                    if waiter.is_last.swap(true, Ordering::Relaxed) {
                        return Poll::Ready(Outcome::Decided(fail(ended(), Operation::Check, again)));
                    }
                    if let Some(undecided) = waiter.take_undecided() {
                        return Poll::Ready(waiter.check_last(undecided));
                    }
                    over = now + LONGEST_CHECK;
                }
                waiter.ensure_tasks();
                timer.as_mut().reset(over.min(now + REFRESH));
            }
            Poll::Pending
        })
        .await
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // What is sent from now on is given back by the sender. A check that ends meanwhile sees that it is closed, or has ended.
        self.decided.close();
        if let Some(undecided) = self.waiter.take_undecided() {
            self.waiter.leave(&undecided);
        }
        // It may be admitted already.
        match self.decided.try_recv() {
            Ok(Outcome::Decided(Ok(decision))) => end_without_caller(&decision),
            Ok(Outcome::Last(response, undecided)) => end_last_without_caller(response, undecided),
            Ok(Outcome::Decided(Err(_))) | Err(_) => {}
        }
    }
}

/// Counts a decision that no caller receives, and gives back what was counted for the request.
pub(super) fn end_without_caller(decision: &Decision) {
    caught(|| decision.count_outcomes());
    if decision.is_allowed() {
        caught(|| give_back(decision));
    }
}

/// Ends a last check that no caller receives, and gives back what it has counted.
pub(super) fn end_last_without_caller(response: StoreFuture, undecided: Undecided) {
    // One that the store has still to decide does so when it is dropped.
    if let Some(Check::Decided(Ok(decision))) = caught(|| wait(response, Operation::Wait, undecided, None))
        && decision.is_allowed()
    {
        caught(|| give_back(&decision));
    }
}

/// A request leaves the places to which a check has added it, since its caller has left or the line is full. Returns whether it would
/// have waited.
#[cold]
pub(super) fn leave_at_once(denied: &Decision, sent: Sent) -> bool {
    let Some(lacking) = Lacking::of(denied, |policy| policy.may_wait()) else {
        return false;
    };
    let (sender, _) = oneshot::channel();
    let waiter = Waiter::new(denied, sent.number, Instant::now(), sender, WaitMetrics::default());
    Arc::new(waiter).stand(&lacking, denied.again(), true, sent.at);
    true
}
