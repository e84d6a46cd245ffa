//! Sends the charges of a request to a store and makes a decision of the outcome. Layers and limiters share it.
//!
//! The path of a check is inlined in each: calls of its steps cost a request a hundred instructions (`benches/instructions.rs`).

use std::{
    pin::Pin,
    slice,
    sync::atomic::{AtomicU64, Ordering},
    task::{Context, Poll, ready},
    time::Duration,
};

use smallvec::SmallVec;
use tokio::{runtime::Handle, time::Instant};

use super::{Settlement, Undecided, composite, failing, failing::fail, leaving, release_unknown, waiting};
use crate::{
    Decision, PolicyDecision,
    store::{ErrorKind, Operation, Owed, OwedKind, StoreError, StoreFuture, StoreRequest, StoreResponse},
};

/// A check that is decided already, or waits for the store.
pub(crate) enum Check {
    Decided(Result<Decision, StoreError>),
    Pending(PendingCheck),
}

impl Check {
    /// Waits for the decision.
    pub(crate) async fn decided(self) -> Result<Decision, StoreError> {
        match self {
            Self::Decided(decided) => decided,
            Self::Pending(check) => check.await,
        }
    }
}

/// A check that waits for the store, or whose request waits in a line.
pub(crate) enum PendingCheck {
    Store(StoreCheck),
    Held(Held),
}

/// A check that waits for the store. It holds the policies of the request, so no key or cost is computed again.
pub(crate) struct StoreCheck {
    operation: Operation,
    /// When it began to wait for the reply of the store.
    began: Instant,
    /// For a request that may wait.
    sent: Option<Sent>,
    /// What it waits for, until the store has replied.
    undecided: Option<(StoreFuture, Undecided)>,
    /// If it is to be completed without its caller.
    owed: Option<Owed>,
}

/// Sends the charges of all policies to the store, those of the enforced ones as one request.
#[inline(always)]
pub(crate) fn begin(mut operation: Operation, undecided: Undecided) -> Check {
    let policies = undecided.as_slice();
    if operation == Operation::Wait {
        if is_never_admitted(policies) {
            operation = Operation::Check;
        } else if waiting::is_full(policies) {
            return waiting::begin_at_a_full_line(undecided);
        }
    }
    if operation.requires_room() && policies.iter().any(PolicyDecision::denies_at_once) {
        return begin_at_store(operation, deny_at_once(&undecided));
    }
    begin_at_store(operation, undecided)
}

/// Sends the charges to the store.
#[inline(always)]
fn begin_at_store(operation: Operation, mut undecided: Undecided) -> Check {
    match send(operation, &mut undecided) {
        Some(response) => wait(response, operation, undecided, Sent::now(operation)),
        None => {
            undecided.admit_unless_denied();
            let decided = undecided.decided();
            count(operation, &decided);
            Check::Decided(Ok(decided))
        }
    }
}

/// When a request that may wait was sent, and its number, by which those that arrive at once are in order.
#[derive(Clone, Copy)]
pub(crate) struct Sent {
    pub(super) at: Instant,
    pub(super) number: u64,
}

impl Sent {
    #[inline(always)]
    fn now(operation: Operation) -> Option<Self> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);

        (operation == Operation::Wait).then(|| Self {
            at: Instant::now(),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
        })
    }
}

/// Sends the charges to where they are counted; `None` if there are none.
#[inline(always)]
pub(super) fn send(operation: Operation, undecided: &mut Undecided) -> Option<StoreFuture> {
    if operation == Operation::Wait {
        undecided.enter_lines();
    }
    let undenied = |policy: &&PolicyDecision| policy.denial.is_none();
    let store = undecided.as_slice().iter().find(undenied)?.store();
    if undecided.is_composite() {
        let requests = composite::requests(operation, undecided);
        return (!requests.is_empty()).then(|| store.decide(&requests));
    }
    Some(store.decide(slice::from_ref(&undecided.request(operation))))
}

#[inline(always)]
pub(super) fn wait(response: StoreFuture, operation: Operation, undecided: Undecided, sent: Option<Sent>) -> Check {
    match response.as_ready() {
        Some(response) => decide(response, operation, undecided, None, sent),
        None => Check::Pending(PendingCheck::Store(StoreCheck {
            operation,
            began: Instant::now(),
            sent,
            owed: owed(operation, &undecided),
            undecided: Some((response, undecided)),
        })),
    }
}

/// Decides by the response of the store.
#[inline(always)]
pub(super) fn decide(
    response: &Result<StoreResponse, StoreError>,
    operation: Operation,
    undecided: Undecided,
    began: Option<Instant>,
    sent: Option<Sent>,
) -> Check {
    // A decision without the store lacks the policies that are not counted meanwhile.
    let again = (sent.is_some() && response.is_err()).then(|| undecided.again());
    let decision = match settle(response, operation, undecided, began) {
        Ok(decision) => decision,
        Err(error) => return Check::Decided(Err(error)),
    };
    if let Some(sent) = sent
        && !decision.is_allowed()
    {
        return match waiting::wait(decision, again, sent) {
            Ok(held) => Check::Pending(PendingCheck::Held(held)),
            Err(denied) => {
                denied.count_outcomes();
                Check::Decided(Ok(denied))
            }
        };
    }
    count(operation, &decision);
    Check::Decided(Ok(decision))
}

/// A request that waits.
pub(crate) type Held = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

/// Whether an enforced policy never admits the request.
#[cold]
pub(super) fn is_never_admitted(policies: &[PolicyDecision]) -> bool {
    let denies = |policy: &PolicyDecision| !policy.is_observed() && policy.permanent_denial().is_some();
    policies.iter().any(denies)
}

/// Decides what needs no store. If an enforced policy denies at once, so do the enforced ones that never admit the request, and the
/// states of the others stay unknown.
#[cold]
fn deny_at_once(undecided: &Undecided) -> Undecided {
    let policies = undecided.as_slice();
    let is_denied = policies
        .iter()
        .any(|policy| !policy.is_observed() && policy.denies_at_once());
    let decided = policies.iter().filter_map(|policy| {
        let is_sent = !policy.denies_at_once() && (policy.is_observed() || !is_denied);
        let denial = if is_sent {
            None
        } else {
            Some(policy.permanent_denial()?)
        };
        Some(PolicyDecision {
            denial,
            ..policy.clone()
        })
    });
    Undecided::new(decided.collect()).in_place_of(undecided)
}

impl PendingCheck {
    /// Whether the request waits in a line.
    pub(crate) fn is_held(&self) -> bool {
        matches!(self, Self::Held(_))
    }
}

impl Future for PendingCheck {
    type Output = Result<Decision, StoreError>;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let check = match &mut *self {
                Self::Store(check) => ready!(check.poll(cx)),
                Self::Held(held) => return held.as_mut().poll(cx),
            };
            match check {
                Check::Decided(decided) => return Poll::Ready(decided),
                Check::Pending(held) => *self = held,
            }
        }
    }
}

impl StoreCheck {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Check> {
        let (response, _) = self.undecided.as_mut().expect("polled after it was ready");
        let response = ready!(Pin::new(response).poll(cx));
        let (_, undecided) = self.undecided.take().expect("it has just been polled");
        Poll::Ready(decide(
            &response,
            self.operation,
            undecided,
            Some(self.began),
            self.sent,
        ))
    }
}

/// What a request may have to send at its end, even if it is cancelled before it is decided.
fn owed(operation: Operation, undecided: &Undecided) -> Option<Owed> {
    if undecided.has_leases() {
        return undecided.owe(OwedKind::Release);
    }
    let first = undecided.as_slice().first()?;
    let settles = operation == Operation::Reset
        || gives_back(operation, undecided)
        || first.context.lost.is_some()
        || first.context.on_settled.is_some();
    settles.then(|| undecided.owe(OwedKind::Settlement))?
}

/// Whether what is counted for the request is given back if its caller leaves before.
fn gives_back(operation: Operation, undecided: &Undecided) -> bool {
    operation == Operation::Wait || undecided.is_line_full
}

impl Drop for StoreCheck {
    /// Where a policy depends on how the request ends, or its usage is observed, a check continues without its caller, to end
    /// as a cancelled request. So does one for a request that may wait, to be refunded, one that takes slots, to release them, and a
    /// reset, to remove the counts of this process too.
    fn drop(&mut self) {
        let (Some((response, undecided)), Some(owed)) = (self.undecided.take(), self.owed.take()) else {
            return;
        };
        let (operation, began, sent, is_of_http) = (self.operation, self.began, self.sent, undecided.is_of_http);
        let (owed, gives_back) = (owed.due(), gives_back(operation, &undecided));
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                if let Ok(decision) = settle(&response.await, operation, undecided, Some(began)) {
                    let is_allowed = decision.is_allowed();
                    let would_wait = !is_allowed && sent.is_some_and(|sent| leaving::leave_at_once(&decision, sent));
                    if !would_wait {
                        count(operation, &decision);
                    }
                    if is_allowed && gives_back {
                        give_back(&decision);
                    } else if is_allowed && is_of_http {
                        decision.cancel();
                    }
                }
                owed.confirm();
            });
        }
    }
}

/// Gives back what was counted for an admitted request whose caller has left, in a task.
pub(super) fn give_back(decision: &Decision) {
    let accounts = decision.as_slice().iter().filter_map(|policy| policy.account.as_ref());
    accounts.for_each(|account| account.void());
    drop(Settlement::refunding(decision.as_slice()).send());
}

/// Makes the decision, and counts no outcome.
#[inline(always)]
pub(super) fn settle(
    response: &Result<StoreResponse, StoreError>,
    operation: Operation,
    mut undecided: Undecided,
    began: Option<Instant>,
) -> Result<Decision, StoreError> {
    let first = undecided.as_slice().first();
    first.inspect(|first| first.context.metrics.end(began));
    let recorded = match response {
        Ok(response) => record_outcome(response, operation, &mut undecided).map(|()| response.is_reply()),
        Err(error) => Err(error.clone()),
    };
    match recorded {
        Ok(is_reply) => {
            if is_reply && let Some(first) = undecided.as_slice().first() {
                first.context.failover.replied();
            }
            if operation == Operation::Reset {
                failing::reset(undecided.as_slice());
            }
            if undecided.has_leases() {
                undecided.hold_slots();
            }
            if undecided.is_line_full && is_reply {
                waiting::keep_denial(&undecided, response);
            }
            Ok(undecided.decided())
        }
        Err(error) => {
            // The store may have counted the slots before it failed. That of Redis fails at once only while its breaker is open.
            let was_sent = began.is_some() || !error.is_recorded();
            if undecided.has_leases() && operation.counts() && was_sent {
                release_unknown(undecided.as_slice(), error.kind() == ErrorKind::Timeout);
            }
            fail(error, operation, &undecided)
        }
    }
}

/// Counts the outcomes of a decision, if the operation is one that decides about a request.
#[inline(always)]
fn count(operation: Operation, decision: &Decision) {
    if operation.decides() {
        decision.count_outcomes();
    }
}

/// Records the outcome in the decision.
#[inline(always)]
pub(super) fn record_outcome(
    response: &StoreResponse,
    operation: Operation,
    undecided: &mut Undecided,
) -> Result<(), StoreError> {
    if undecided.is_composite() {
        return composite::record(response, operation, undecided);
    }
    match response.outcomes() {
        [outcome, ..] if outcome.states().len() == undecided.as_slice().len() => {
            undecided.record(operation, response, outcome);
            Ok(())
        }
        _ => Err(composite::mismatch()),
    }
}

/// Bans the keys of these policies of a decision for a time, in the store and in what this process counts while the store fails;
/// `None` if none of them has bans.
pub(crate) fn send_bans(
    decision: &Decision,
    length: Duration,
    selects: impl Fn(&PolicyDecision) -> bool,
) -> Option<StoreFuture> {
    let length = length.max(Duration::from_micros(1));
    let policies = decision.as_slice().iter();
    let with_bans = policies.filter(|policy| selects(policy) && policy.charge.ban.is_some());
    let requests = with_bans.map(|policy| StoreRequest::new(Operation::Ban { length }, [&policy.charge]));
    let requests: SmallVec<[StoreRequest<'_>; 1]> = requests.collect();
    let context = &decision.as_slice().first().filter(|_| !requests.is_empty())?.context;
    // A memory store replies at once and does not fail.
    drop(context.failover.counts().decide(&requests));
    Some(context.store.decide(&requests))
}
