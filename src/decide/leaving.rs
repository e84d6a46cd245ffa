//! A request that waits until its caller leaves.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::{Arc, atomic::Ordering},
    task::Poll,
    time::Duration,
};

use tokio::{
    sync::oneshot,
    time::{Instant, sleep_until},
};

use super::{
    Undecided, caught,
    check::{Sent, give_back},
    failing::fail,
    line::{ORPHANED, ended},
    waiting::{Lacking, Outcome, Waiter},
};
use crate::{Decision, store::Operation};

/// How long after its time a request waits for the end of a check, before the store is taken to have failed. A check takes a few
/// deadlines.
const LAST_CHECK: Duration = Duration::from_secs(30);

/// The request leaves the lines when its caller leaves. One that is being checked does so if the check does not decide it.
pub(super) struct Leaving {
    pub(super) waiter: Arc<Waiter>,
    pub(super) decided: oneshot::Receiver<Outcome>,
}

impl Leaving {
    /// Waits until the request is decided, or is over. It is decided here where it is being checked in a runtime that is not driven.
    pub(super) async fn outcome(mut self, again: &Undecided) -> Outcome {
        let waiter = self.waiter.clone();
        let mut timer = pin!(sleep_until(waiter.until));
        let mut orphaned = pin!(ORPHANED.notified());
        // It may have been called outside of this runtime.
        waiter.ensure_tasks();
        poll_fn(|cx| {
            if orphaned.as_mut().poll(cx).is_ready() {
                orphaned.set(ORPHANED.notified());
                waiter.ensure_tasks();
                // To be notified again, where this runtime has ended too.
                cx.waker().wake_by_ref();
            }
            if let Poll::Ready(outcome) = Pin::new(&mut self.decided).poll(cx) {
                return Poll::Ready(outcome.unwrap_or_else(|_| Outcome::Decided(Err(ended()))));
            }
            while timer.as_mut().poll(cx).is_ready() {
                if waiter.is_last.swap(true, Ordering::Relaxed) {
                    return Poll::Ready(Outcome::Decided(fail(ended(), Operation::Check, again)));
                }
                if let Some(undecided) = waiter.leave() {
                    return Poll::Ready(Outcome::Expired(undecided));
                }
                timer.as_mut().reset(Instant::now() + LAST_CHECK);
            }
            Poll::Pending
        })
        .await
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if self.waiter.leave().is_some() {
            self.waiter.metrics.left();
        }
        // It may be admitted already. What is sent from now on is given back by the sender.
        self.decided.close();
        if let Ok(Outcome::Decided(Ok(decision))) = self.decided.try_recv() {
            end_without_caller(&decision);
        }
    }
}

/// Counts a decision that no caller receives, and gives back what was counted for the request.
pub(super) fn end_without_caller(decision: &Decision) {
    decision.count_outcomes();
    if decision.is_allowed() {
        caught(|| give_back(decision));
    }
}

/// A request leaves the places to which a check has added it, since its caller has left or the line is full.
#[cold]
pub(super) fn leave_at_once(denied: &Decision, sent: Sent) {
    let Some(lacking) = Lacking::of(denied, |policy| policy.may_wait()) else {
        return;
    };
    let (sender, _) = oneshot::channel();
    let waiter = Arc::new(Waiter::new(
        denied,
        sent.number,
        Instant::now(),
        sender,
        denied.wait_metrics(),
    ));
    waiter.stand(&lacking, denied.again(), true, sent.at);
    drop(waiter.leave());
}
