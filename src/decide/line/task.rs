//! The task of a line, which has the first requests checked.

use std::{mem, ptr, sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    time::{Instant, timeout_at},
};

use super::{LINES, LONGEST_CHECK, Line, REFRESH, Rank, find};
use crate::{
    decide::{Undecided, check::send, failing::leave_place, group::Group, waiting::Waiter},
    limit::{PLACE_SIZE, PLACE_US},
    store::Operation,
    sync::lock,
};

/// How long after it should have acted the task of a line is replaced: the runtime that it is in may not be driven, since it is blocked
/// or its `block_on` has returned.
const OVERDUE: Duration = Duration::from_millis(500);

/// The pause between checks which only replace the place of the process.
const COALESCED: Duration = Duration::from_millis(20);

enum Next {
    Check(Group),
    /// Remove the place from the store, without what arrives in it from now on.
    Clear(Undecided, u64),
    WaitUntil(Instant),
    End,
    /// Another task has taken over.
    Replaced,
}

/// A task of a line.
struct Task {
    line: Arc<Line>,
    number: u64,
}

impl Drop for Task {
    /// If the runtime has ended, the requests begin another task within a second.
    fn drop(&mut self) {
        let mut state = self.line.state();
        if state.task != self.number {
            return;
        }
        state.acts_by = None;
        drop(state);
        self.line.end();
    }
}

async fn check_first(task: Task) {
    let line = &task.line;
    line.forget_checked();
    loop {
        match line.next(task.number) {
            Next::Check(group) => {
                let due = group.check(line.id, Instant::now()).await;
                let mut state = line.state();
                if state.task == task.number {
                    state.due = due.or(Some(Instant::now()));
                }
            }
            Next::Clear(mut left, newest) => {
                left.lead(line.id, &[], newest, 0);
                leave_place(&left);
                if let Some(response) = send(Operation::Wait, &mut left) {
                    drop(response.await);
                }
            }
            Next::WaitUntil(due) => {
                let _ = timeout_at(due, line.signal.changed()).await; // it looks what is due in both cases
            }
            Next::End => {
                if line.end() {
                    return;
                }
            }
            Next::Replaced => return,
        }
    }
}

impl Line {
    /// Begins the task of the line, unless it has one that is not overdue. A runtime that has ended drops the task here, which locks
    /// the line.
    pub(in crate::decide) fn ensure_task(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let (mut state, now) = (self.state(), Instant::now());
        if state.acts_by.is_some_and(|by| now < by + OVERDUE) {
            return;
        }
        state.acts_by = Some(now);
        state.task += 1;
        let task = Task {
            line: self.clone(),
            number: state.task,
        };
        drop(state);
        runtime.spawn(check_first(task));
    }

    /// Lets the requests leave that the task before this one checks still: it may never end, or has panicked. They stand here again when
    /// it has denied them, and their own timers end them if it does not.
    fn forget_checked(&self) {
        let mut state = self.state();
        let checked = mem::take(&mut state.checked);
        let waiters = state.waiting.values().map(|entry| &entry.waiter);
        let forgotten: Vec<_> = waiters
            .filter(|waiter| checked.contains(&waiter.number) && lock(&waiter.undecided).is_none())
            .cloned()
            .collect();
        drop(state);
        forgotten.iter().for_each(|waiter| waiter.step_out(None));
    }

    /// What this task of the line does next.
    fn next(&self, task: u64) -> Next {
        let mut state = self.state();
        if state.task != task {
            return Next::Replaced;
        }
        state.checked.clear();
        let now = Instant::now();
        state.acts_by = Some(now + LONGEST_CHECK);
        if state.waiting.is_empty() {
            let is_stored = state.stored_until.take().is_some_and(|until| now < until);
            return match state.left.take() {
                Some(left) if is_stored => {
                    state.sent_at = Some(now);
                    Next::Clear(left, state.newest)
                }
                _ => Next::End,
            };
        }
        let unrefreshed = Duration::from_micros(PLACE_US) - REFRESH;
        let refresh = state.stored_until.map_or(now, |until| until - unrefreshed);
        let mut due = state.due.map_or(refresh, |due| due.min(refresh));
        if state.is_stale {
            due = due.min(state.sent_at.map_or(now, |sent_at| sent_at + COALESCED));
        }
        let is_woken = self.signal.take_woken();
        if now < due && !is_woken {
            state.acts_by = Some(due);
            return Next::WaitUntil(due);
        }
        let first = state.waiting.first_key_value();
        let first = first.map(|(rank, entry)| (*rank, entry.waiter.clone()));
        drop(state); // no task locks two lines
        if let Some((_, first)) = &first {
            first.leave_if_overdue(now);
        }
        let earlier = first.and_then(|(rank, first)| self.earlier(&rank, &first));
        let mut state = self.state();
        let earlier = earlier.filter(|earlier| state.tried != Some(earlier.number));
        state.tried = earlier.as_ref().map(|earlier| earlier.number);
        match Group::take(&state.waiting, state.newest, earlier, now) {
            Some(group) => {
                state.newest = group.known;
                state.is_stale = false;
                state.left = None;
                state.sent_at = Some(now);
                state.due = None;
                state.stored_until = Some(now + Duration::from_micros(PLACE_US));
                state.checked = group.requests.iter().map(|(waiter, ..)| waiter.number).collect();
                Next::Check(group)
            }
            // The task of another line checks the first request, and changes this line when it has.
            None => {
                state.due = is_woken.then_some(now).or(state.due);
                // Or the caller of the first request does, for the last time, unless its runtime is not driven.
                let first = state.waiting.first_key_value();
                let overdue = first.map(|(_, entry)| entry.waiter.until() + REFRESH);
                let until = overdue.filter(|overdue| *overdue > now).unwrap_or(now + REFRESH);
                let until = until.min(now + REFRESH);
                state.acts_by = Some(until);
                Next::WaitUntil(until)
            }
        }
    }

    /// A request equal to the first one that has arrived before, and waits for other keys than that of this line. When all have room
    /// at once, it is to be checked before.
    fn earlier(&self, rank: &Rank, first: &Waiter) -> Option<Arc<Waiter>> {
        let others = first.needs.iter().filter(|(line, _)| *line != self.id);
        let earlier = others.filter_map(|(line, _)| {
            let line = find(*line)?;
            let state = line.state();
            let mut before = state.waiting.range(..rank).take(PLACE_SIZE);
            let (rank, entry) = before.find(|(_, entry)| entry.waiter.needs == first.needs)?;
            Some((*rank, entry.waiter.clone()))
        });
        Some(earlier.min_by_key(|(rank, _)| *rank)?.1)
    }

    /// Removes the line unless a request has entered it meanwhile; returns whether it was removed.
    pub(super) fn end(&self) -> bool {
        let mut lines = lock(&LINES);
        let mut state = self.state();
        if !state.waiting.is_empty() {
            return false;
        }
        state.acts_by = None;
        drop(state);
        let is_own = lines.get(&self.id).is_some_and(|line| ptr::eq(&raw const **line, self));
        if is_own {
            lines.remove(&self.id);
        }
        true
    }
}
