//! A request that waits: it stands in the lines of the keys that deny it, until a check of one of them decides it, or its time is
//! over.

use std::{
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use smallvec::SmallVec;
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use super::{
    Undecided, Waiting,
    check::{Check, Held, Sent, begin, decide},
    failing::record_after_waiting,
    group::{Checked, Comes},
    leaving::{Leaving, Turn, leave_at_once},
    line::{self, InLine, Line, NO_LINE, REFRESH, SHORTEST_PAUSE, Unremoved},
};
use crate::{
    Decision, Denial, PolicyDecision,
    limit::SOON_US,
    observe::WaitMetrics,
    store::{Operation, OwedKind, StoreError, StoreResponse},
    sync::lock,
};

/// A request that waits.
pub(super) struct Waiter {
    pub(super) number: u64,
    /// By the clock of the store, in microseconds.
    pub(super) arrived: u64,
    /// When it has arrived for the store: not before those ahead of it in the line in which it was last checked.
    pub(super) counts_from: AtomicU64,
    /// The latest of these times.
    pub(super) counted_from: AtomicU64,
    /// The lines of its keys, and its costs there.
    pub(super) needs: SmallVec<[(u64, u64); 1]>,
    /// Since when it waits, and until when it may.
    since: Instant,
    until: Mutex<Instant>,
    /// While it stands in lines, and is not being checked.
    pub(super) undecided: Mutex<Option<Undecided>>,
    /// The lines in which it stands, or has stood.
    lines: Mutex<SmallVec<[InLine; 1]>>,
    /// Notified when it is over earlier, or a check has ended when it was over.
    pub(super) is_changed: Notify,
    outcome: Mutex<Option<oneshot::Sender<Outcome>>>,
    pub(super) metrics: WaitMetrics,
}

pub(super) enum Outcome {
    Decided(Result<Decision, StoreError>),
    /// It is still denied, and may not wait any longer.
    Expired(Undecided),
}

/// A policy with a key that denies a request which may wait for it, and the line of the key.
pub(super) struct Lacking<'a> {
    pub(super) line: u64,
    pub(super) policy: &'a PolicyDecision,
}

/// Lets a request wait that a check has denied, and which is checked again as it was asked. Returns the decision if it may not wait.
#[cold]
pub(super) fn wait(denied: Decision, again: Option<Undecided>, sent: Sent) -> Result<Held, Decision> {
    let Some(lacking) = Lacking::of(&denied, |policy| policy.may_wait()) else {
        return Err(denied);
    };
    if is_full(denied.as_slice()) {
        // Others have entered since the check was sent, which has added this request to the places.
        leave_at_once(&denied, sent);
        drop(lacking);
        return Err(denied.for_a_full_line());
    }
    let again = again.unwrap_or_else(|| denied.again());
    Ok(stand(&denied, again, &lacking, sent))
}

/// Whether too much waits in this process for one of the policies that a request may wait for.
#[cold]
pub(super) fn is_full(policies: &[PolicyDecision]) -> bool {
    policies.iter().any(|policy| {
        let waiting = policy.line().and_then(line::find).map_or(0, |line| line.state().weight);
        let has_room = policy.policy().settings.may_wait_behind(waiting, policy.charge.cost);
        policy.waits() && !has_room
    })
}

/// Checks a request that may not wait, since too much waits already.
#[cold]
pub(super) fn begin_at_a_full_line(mut undecided: Undecided) -> Check {
    undecided.is_line_full = true;
    if let Some(line) = first_line(&undecided) {
        line.ensure_task(); // those that fill it may be over
    }
    if let Some(known) = known_denial(&undecided) {
        return decide(&Ok(known), Operation::Check, undecided, None, None);
    }
    undecided.enter_lines();
    begin(Operation::Check, undecided)
}

/// The denial of an equal request since a line is full. What gets free is for those that wait, so it is valid for a while.
#[cold]
fn known_denial(undecided: &Undecided) -> Option<StoreResponse> {
    let line = first_line(undecided)?;
    let state = line.state();
    let (denied, response, until) = state.denied.as_ref()?;
    let is_valid = Instant::now() < *until && denied.is_equal(undecided);
    is_valid.then(|| StoreResponse::without_reply(response.server_time, response.outcomes().iter().cloned()))
}

/// Keeps the reply to a request that is denied since a line is full, unless a ban counts each denial.
#[cold]
pub(super) fn keep_denial(undecided: &Undecided, reply: &Result<StoreResponse, StoreError>) {
    let mut policies = undecided.as_slice().iter();
    let is_cheap = |policy: &PolicyDecision| policy.context.store.replies_at_once();
    let is_counted = |policy: &PolicyDecision| policy.policy().settings.ban.is_some();
    if let Ok(reply) = reply
        && !reply.outcomes().iter().any(|outcome| outcome.allowed)
        && !policies.any(|policy| is_cheap(policy) || is_counted(policy))
        && let Some(line) = first_line(undecided)
    {
        let until = Instant::now() + Duration::from_micros(SOON_US);
        line.state().denied = Some((undecided.again(), reply.clone(), until));
    }
}

/// The first line of a key of a request.
fn first_line(undecided: &Undecided) -> Option<Arc<Line>> {
    let mut policies = undecided.as_slice().iter();
    policies.find_map(|policy| line::find(policy.line()?))
}

/// Waits until a request is admitted, or until it may not wait any longer. It stands in the lines from now on.
fn stand(denied: &Decision, again: Undecided, lacking: &[Lacking<'_>], sent: Sent) -> Held {
    if let Some(policy) = denied.as_slice().first() {
        policy.context.store.receive_wakes();
    }
    let metrics = denied.wait_metrics();
    let waiting = metrics.begin();
    let (sender, decided) = oneshot::channel();
    let waiter = Arc::new(Waiter::new(denied, sent.number, sender, metrics));
    let leaving = Leaving {
        waiter: waiter.clone(),
        decided,
    };
    let observed = denied.observed();
    // A store that decides key by key does not add a request that has just arrived, and may not wait for all of them, and none adds one
    // for the sake of a ban.
    let is_stored = denied.as_slice().len() == 1 && lacking.iter().all(|lacking| !lacking.is_banned());
    waiter.stand(lacking, again.again(), (NO_LINE, is_stored), sent.at);
    Box::pin(async move {
        // It is counted until it is decided.
        let _waiting = waiting;
        let (decision, is_counted) = match leaving.outcome(&again).await {
            Outcome::Decided(decided) => {
                record_after_waiting(&decided, &again);
                (decided?, false)
            }
            Outcome::Expired(undecided) => (waiter.check_last(undecided, &again).await?, true),
        };
        let waited = waiter.since.elapsed();
        if decision.is_allowed() {
            waiter.metrics.admitted(waited);
        }
        let decision = decision.after_waiting(waited, observed);
        match is_counted {
            true => decision.count_observed(),
            false => decision.count_outcomes(),
        }
        Ok(decision)
    })
}

impl<'a> Lacking<'a> {
    /// The keys that deny a request; `None` if it may not wait for one of them.
    pub(super) fn of(denied: &'a Decision, may_wait: impl Fn(&PolicyDecision) -> bool) -> Option<SmallVec<[Self; 1]>> {
        let deniers = denied.deniers();
        let lacking = deniers.map(|policy| policy.line().map(|line| Self { line, policy }));
        lacking
            .map(|lacking| lacking.filter(|lacking| may_wait(lacking.policy)))
            .collect()
    }

    fn is_banned(&self) -> bool {
        self.policy.denial == Some(Denial::Banned)
    }

    /// When the request is to be checked again, by a reply to what was sent then.
    pub(super) fn due(&self, sent_at: Instant) -> Instant {
        let wait = self.policy.retry_after().unwrap_or_default();
        sent_at + wait.clamp(SHORTEST_PAUSE, REFRESH)
    }
}

impl Waiter {
    pub(super) fn new(denied: &Decision, number: u64, outcome: oneshot::Sender<Outcome>, metrics: WaitMetrics) -> Self {
        let policies = denied.as_slice().iter();
        let needs = policies.filter_map(|policy| Some((policy.line()?, policy.charge.cost)));
        let arrived = denied.server_time().as_micros() as u64;
        let since = Instant::now();
        Self {
            number,
            arrived,
            counts_from: AtomicU64::new(arrived),
            counted_from: AtomicU64::new(arrived),
            needs: needs.collect(),
            since,
            until: Mutex::new(since),
            undecided: Mutex::default(),
            lines: Mutex::default(),
            is_changed: Notify::new(),
            outcome: Mutex::new(Some(outcome)),
            metrics,
        }
    }

    pub(super) fn counts_from(&self) -> u64 {
        self.counts_from.load(Ordering::Relaxed)
    }

    /// Until when it may wait. From then on only its caller has it checked, for the last time.
    pub(super) fn until(&self) -> Instant {
        *lock(&self.until)
    }

    /// Until when it may wait for a policy.
    pub(super) fn until_of(&self, waiting: Waiting) -> Instant {
        self.since + Duration::from_micros(waiting.longest_us)
    }

    /// Where it comes in its lines.
    pub(super) fn comes(&self) -> Comes {
        Comes {
            at: self.counts_from(),
            number: self.number,
        }
    }

    /// Takes the request to be checked, if it stands in lines, is not over, and can be decided with the first one.
    pub(super) fn take(self: &Arc<Self>, first: Option<&Checked>, now: Instant) -> Option<Checked> {
        if now >= self.until() {
            return None;
        }
        let mut undecided = lock(&self.undecided);
        undecided.as_mut()?.follow_limits();
        let undecided = undecided.take_if(|one| first.is_none_or(|(_, first, _)| first.merges_with(one)))?;
        let owed = undecided.owe(OwedKind::Settlement);
        Some((self.clone(), undecided, owed))
    }

    /// Stands in the lines of the keys that deny the request, and in no others, as in the store, after a check in this line.
    pub(super) fn stand(
        self: &Arc<Self>,
        lacking: &[Lacking<'_>],
        undecided: Undecided,
        (led, is_stored): (u64, bool),
        sent_at: Instant,
    ) {
        // A caller that leaves from now on waits for this lock, so that no line keeps the request.
        let mut lines = lock(&self.lines);
        let until = lacking
            .iter()
            .map(|lacking| self.until_of(lacking.policy.waiting))
            .min();
        self.wait_until(until.unwrap_or(self.since));
        let has_room = |own: &&mut InLine| !lacking.iter().any(|lacking| lacking.line == own.line.id);
        for own in lines.iter_mut().filter(|own| own.stands).filter(has_room) {
            own.leave(Turn::Stays, Some((&undecided, led)));
        }
        *lock(&self.undecided) = Some(undecided);
        for lacking in lacking {
            match lines.iter_mut().find(|own| own.line.id == lacking.line) {
                Some(own) if own.stands => own.line.signal.change(),
                Some(own) => *own = Line::enter(lacking, self, is_stored, sent_at, Some(own)),
                None => lines.push(Line::enter(lacking, self, is_stored, sent_at, None)),
            }
        }
        drop(lines);
        self.after_check();
    }

    /// Stands where it stood, after a check that has not decided it.
    pub(super) fn stay(&self, undecided: Undecided) {
        *lock(&self.undecided) = Some(undecided);
        self.after_check();
    }

    /// The same for one that is denied, and does not wait for what denies it.
    pub(super) fn stay_no_longer(&self, undecided: Undecided) {
        self.wait_until(self.since);
        self.stay(undecided);
    }

    /// It is over from now on at the earliest, so that its caller has the time to have it checked for the last time.
    fn wait_until(&self, until: Instant) {
        let until = until.max(Instant::now());
        if mem::replace(&mut *lock(&self.until), until) > until {
            self.is_changed.notify_one();
        }
    }

    /// Leaves if its caller has left while it was being checked. One that is over stands in its places until its last check is sent.
    fn after_check(&self) {
        if self.has_left() {
            self.leave();
        } else if Instant::now() >= self.until() {
            self.is_changed.notify_one();
        }
    }

    /// Takes the request, so that no line has it checked; `None` while it is being checked.
    pub(super) fn take_undecided(&self) -> Option<Undecided> {
        lock(&self.undecided).take()
    }

    /// Leaves the lines without its caller, unless it is being checked.
    pub(super) fn leave(&self) {
        if let Some(undecided) = self.take_undecided() {
            self.leave_lines(Turn::PassesOn, Some((&undecided, NO_LINE)));
            self.metrics.left();
        }
    }

    /// Leaves the lines when its time has been over for a while: the runtime of its caller may not be driven.
    pub(super) fn leave_if_overdue(&self, now: Instant) {
        if now >= self.until() + REFRESH
            && let Some(undecided) = self.take_undecided()
        {
            self.leave_lines(Turn::PassesOn, Some((&undecided, NO_LINE)));
            self.send(Outcome::Expired(undecided));
        }
    }

    pub(super) fn leave_lines(&self, turn: Turn, unremoved: Unremoved<'_>) {
        for mut own in mem::take(&mut *lock(&self.lines)) {
            own.leave(turn, unremoved);
        }
    }

    /// Stands in no line, and keeps its turns.
    pub(super) fn step_out(&self, unremoved: Unremoved<'_>) {
        for own in lock(&self.lines).iter_mut() {
            own.leave(Turn::Stays, unremoved);
        }
    }

    /// Ends the wait. If the caller has left, what was counted is given back.
    pub(super) fn finish(&self, decided: Result<Decision, StoreError>, unremoved: Unremoved<'_>) {
        self.leave_lines(Turn::after(&decided), unremoved);
        self.send(Outcome::Decided(decided));
    }

    pub(super) fn send(&self, outcome: Outcome) {
        let sender = lock(&self.outcome).take();
        if let Some(Err(outcome)) = sender.map(|sender| sender.send(outcome)) {
            self.end_without_caller(&outcome);
        }
    }

    fn has_left(&self) -> bool {
        lock(&self.outcome).as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    /// Begins the tasks of its lines, if they have ended with their runtime.
    pub(super) fn ensure_tasks(&self) {
        for own in lock(&self.lines).iter().filter(|own| own.stands) {
            own.line.ensure_task();
        }
    }
}
