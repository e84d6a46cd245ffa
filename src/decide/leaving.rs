//! A request that waits until its caller leaves.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
};

use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

use super::{
    Undecided, caught,
    check::{self, Check, Sent, give_back},
    failing::{ended, fail},
    line::{LONGEST_CHECK, NO_LINE, REFRESH},
    waiting::{Lacking, Outcome, Waiter},
};
use crate::{
    Decision,
    observe::WaitMetrics,
    store::{Operation, StoreError},
};

/// What becomes of the turn of a request that leaves a line.
#[derive(Clone, Copy)]
pub(super) enum Turn {
    /// The key has room, or a check does not end or is the last one: it may return, or be admitted.
    Stays,
    /// It is admitted, and has had its turn.
    IsOver,
    /// It is not admitted, and the next one of its key has its turn.
    PassesOn,
}

impl Turn {
    pub(super) fn after(decided: &Result<Decision, StoreError>) -> Self {
        let is_admitted = decided.as_ref().is_ok_and(Decision::is_allowed);
        if is_admitted { Self::IsOver } else { Self::PassesOn }
    }
}

/// The request leaves the lines when its caller leaves. One that is being checked does so if the check does not decide it.
pub(super) struct Leaving {
    pub(super) waiter: Arc<Waiter>,
    pub(super) decided: oneshot::Receiver<Outcome>,
}

impl Leaving {
    /// Waits until the request is decided, or is over. It is decided here where it is being checked in a runtime that is not driven.
    pub(super) async fn outcome(mut self, again: &Undecided) -> Outcome {
        let waiter = self.waiter.clone();
        let mut never_ends_at = None;
        loop {
            let (now, mut due) = (Instant::now(), waiter.until());
            if now < due {
                never_ends_at = None;
            } else if let Some(undecided) = waiter.take_undecided() {
                return Outcome::Expired(undecided);
            } else {
                due = *never_ends_at.get_or_insert(now + LONGEST_CHECK);
                if now >= due {
                    return Outcome::Decided(fail(ended(), Operation::Check, again));
                }
            }
            waiter.ensure_tasks();

            let mut changed = pin!(waiter.is_changed.notified());
            let decided = poll_fn(|cx| match Pin::new(&mut self.decided).poll(cx) {
                Poll::Ready(decided) => Poll::Ready(Some(decided)),
                Poll::Pending => changed.as_mut().poll(cx).map(|()| None),
            });
            if let Ok(Some(decided)) = timeout_at(due.min(now + REFRESH), decided).await {
                return decided.unwrap_or_else(|_| Outcome::Decided(Err(ended())));
            }
        }
    }
}

impl Waiter {
    /// Counts an outcome that no caller receives, and gives back what was counted for the request.
    pub(super) fn end_without_caller(&self, outcome: &Outcome) {
        match outcome {
            Outcome::Decided(Ok(decision)) => {
                caught(|| decision.count_outcomes());
                if decision.is_allowed() {
                    caught(|| give_back(decision));
                }
            }
            Outcome::Decided(Err(_)) => {}
            Outcome::Expired(_) => self.metrics.left(),
        }
    }

    /// Checks it for the last time: it is admitted if it fits after those before it. It leaves the lines when the check has been sent:
    /// while it stands there, none that arrives comes before it. What becomes of its turns is known when it is decided.
    pub(super) async fn check_last(&self, mut undecided: Undecided, again: &Undecided) -> Result<Decision, StoreError> {
        let mut standing = Standing {
            waiter: self,
            again,
            turn: Turn::PassesOn,
        };
        undecided.follow_limits();
        undecided.lead_none(self.comes());
        undecided.renew_tickets();
        let response = check::send(Operation::Wait, &mut undecided).ok_or_else(ended)?;
        let decided = match check::wait(response, Operation::Wait, undecided, None) {
            Check::Decided(decided) => decided,
            Check::Pending(mut check) => match poll_fn(|cx| Poll::Ready(Pin::new(&mut check).poll(cx))).await {
                Poll::Ready(decided) => decided,
                Poll::Pending => {
                    self.step_out(Some((again, NO_LINE)));
                    check.await
                }
            },
        };
        standing.turn = Turn::after(&decided);
        decided
    }
}

/// Leaves the lines when it is dropped.
struct Standing<'a> {
    waiter: &'a Waiter,
    again: &'a Undecided,
    turn: Turn,
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        self.waiter.leave_lines(self.turn, Some((self.again, NO_LINE)));
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // What is sent from now on is given back by the sender. A check that ends meanwhile sees that it is closed, or has ended.
        self.decided.close();
        self.waiter.leave();
        // It may be admitted already.
        if let Ok(outcome) = self.decided.try_recv() {
            self.waiter.end_without_caller(&outcome);
        }
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
    let waiter = Waiter::new(denied, sent.number, sender, WaitMetrics::default());
    Arc::new(waiter).stand(&lacking, denied.again(), (NO_LINE, true), sent.at);
    true
}
