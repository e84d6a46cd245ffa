use std::{collections::VecDeque, future::poll_fn, pin::pin, sync::Arc, task::Poll};

use tokio::{sync::oneshot, time::Instant};

use super::{
    backend::Backend,
    breaker::Breaker,
    failure::Failure,
    key_format::slot_of_first,
    queues::{BatchLimits, CallerRequests, Decided, QueuedRequests, Response},
    request::{BatchPosition, MergedRequest, OwnedRequest, merge},
    task::DetachOnDrop,
};
use crate::{
    store::{ErrorKind, StoreError},
    sync::{Mutex, MutexGuard, unpoisoned},
};

/// Requests to a server, or to a node or a slot of a cluster, which are sent in batches (group commit).
///
/// While script calls are in flight, requests wait in the queue, and the next call contains all of them. A request is sent at
/// once if no call is in flight.
pub(super) struct CommitQueue {
    backend: Arc<Backend>,
    /// That of the server or node.
    pub(super) breaker: Arc<Breaker>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<QueuedRequests>,
    /// The number of the last of them.
    last: u64,
    /// The calls in flight or about to be sent.
    calls: usize,
    /// The requests in calls in flight.
    requests_in_flight: usize,
    /// Since when a call has had a permit and not taken its requests.
    unsent_since: Option<Instant>,
}

impl CommitQueue {
    pub(super) fn new(backend: Arc<Backend>, breaker: Arc<Breaker>) -> Arc<Self> {
        Arc::new(Self {
            backend,
            breaker,
            state: Mutex::default(),
        })
    }

    /// Fails while the breaker is open, for so many checks, of which these are some.
    pub(super) fn check_breaker(&self, checks: usize, requests: &[OwnedRequest]) -> Result<(), StoreError> {
        let Some(error) = self.breaker.error() else {
            return Ok(());
        };
        let Backend { client, key_format, .. } = &*self.backend;
        let node = client.node(|| slot_of_first(requests));
        client.health().failed_without_call(&node, checks as u64, &error);
        // In a cluster the probes are sent to the node of this key.
        let charge = requests.iter().flat_map(|request| request.charges()).next();
        let key = || Some(key_format.of_count(charge?).concat().into());
        self.backend.ensure_probe(&self.breaker, key);
        Err(error.recorded())
    }

    /// Sends requests in one call once the future is polled, and waits for the reply.
    pub(super) async fn decide(self: Arc<Self>, own: CallerRequests) -> Result<Decided, StoreError> {
        self.check_breaker(own.requests.len(), &own.requests)?;
        if matches!(&*own.requests, [request] if request.is_check())
            && let Some(permit) = self.try_lone_permit()
        {
            // It continues if its caller leaves: whether Redis replies matters to the next requests.
            return DetachOnDrop::new(permit.send_alone(own)).await;
        }

        let deadline = self.backend.deadline.doubled();
        // The node that has it when the time is over.
        let slot = match self.backend.client.is_clustered() {
            true => slot_of_first(&own.requests),
            false => 0,
        };
        let (checks, (sender, response)) = (own.requests.len(), oneshot::channel());
        let number = self.push(own, sender);
        let queue = Arc::downgrade(&self);
        drop(self); // a waiting caller keeps no connection open
        let after_step = || {
            if let Some(queue) = queue.upgrade() {
                queue.send_overdue();
            }
        };
        match deadline.wait_in_steps(response, after_step).await {
            Some(response) => response.unwrap_or_else(|_| {
                let message = "the runtime that sent the check to Redis has shut down";
                Err(StoreError::new(ErrorKind::Unreachable, message))
            }),
            None => match queue.upgrade() {
                Some(queue) if queue.state().take_back(number) => Err(queue.backend.not_sent(slot, checks)),
                // Those of a call are in the health of the node with its reply or its failure.
                _ => Err(Failure::Timeout.into()),
            },
        }
    }

    /// Queues requests, and sends a call unless one is about to be sent. Returns their number.
    fn push(self: &Arc<Self>, own: CallerRequests, response: oneshot::Sender<Response>) -> u64 {
        let queued_at = Instant::now();
        let mut state = self.state();
        state.last += 1;
        let number = state.last;
        state.waiting.push_back(QueuedRequests {
            number,
            own,
            queued_at,
            response,
        });
        let permit = self.try_permit(&mut state, self.backend.limits, queued_at);
        drop(state);
        send_next(permit);
        number
    }

    /// A permit for a call with one request, if no call is in flight and no request waits.
    fn try_lone_permit(self: &Arc<Self>) -> Option<CallPermit> {
        let mut state = self.state();
        if state.calls > 0 || !state.waiting.is_empty() {
            return None;
        }
        state.calls = 1;
        state.requests_in_flight += 1;
        drop(state);
        Some(CallPermit {
            queue: self.clone(),
            unsent_since: None,
            requests: 1,
            released: false,
        })
    }

    /// Sends a call that is due and was not sent.
    ///
    /// Waiting callers do this because the task that was to send it may have ended with its runtime, or a handler may block
    /// the thread that is to run it.
    fn send_overdue(self: &Arc<Self>) {
        let now = Instant::now();
        let mut state = self.state();
        let step = self.backend.deadline.step;
        if state.unsent_since.is_some_and(|since| since + step <= now) {
            // Its permit is revoked: a runtime that is not polled would hold it indefinitely.
            state.unsent_since = None;
            state.calls -= 1;
        }
        // A call counts as in flight while its runtime is stalled, so an overdue request is sent regardless of the calls in
        // flight.
        let deadline = self.backend.deadline.duration;
        let first = state.waiting.front();
        let overdue = first.is_some_and(|queued| queued.queued_at + deadline <= now);
        let limits = if overdue {
            BatchLimits::NO_BATCHES
        } else {
            self.backend.limits
        };
        let permit = self.try_permit(&mut state, limits, now);
        drop(state);
        send_next(permit);
    }

    /// A permit for a call with the waiting requests, if it is to be sent now. From now on it counts as in flight.
    fn try_permit(self: &Arc<Self>, state: &mut State, limits: BatchLimits, now: Instant) -> Option<CallPermit> {
        if state.unsent_since.is_some() || state.waiting.is_empty() || !state.has_room(limits) {
            return None;
        }
        state.unsent_since = Some(now);
        state.calls += 1;
        Some(CallPermit {
            queue: self.clone(),
            unsent_since: Some(now),
            requests: 0,
            released: false,
        })
    }

    /// Sends requests in one call, and responds to each.
    async fn send_batch(&self, mut batch: Vec<QueuedRequests>) {
        batch.retain(|queued| {
            let has_left = queued.response.is_closed();
            // Its caller has dropped its future, or has waited for the last step.
            let (deadline, own) = (self.backend.deadline, &queued.own.requests);
            if has_left && queued.queued_at.elapsed() + deadline.step >= deadline.doubled().duration {
                self.backend.not_sent(slot_of_first(own), own.len());
            }
            !has_left
        });
        let Some(first) = batch.first() else { return };
        let checks = batch.iter().map(|queued| queued.own.requests.len()).sum();
        if let Err(error) = self.check_breaker(checks, &first.own.requests) {
            for queued in batch {
                let _ = queued.response.send(Err(error.clone()));
            }
            return;
        }

        let (merged, positions) = merge(batch.iter().map(|queued| &*queued.own.requests));
        let reply = self.backend.run(&self.breaker, &merged, batch.len() > 1).await;
        if batch.len() > 1
            && let Err(failure) = &reply
            && failure.is_try_again()
        {
            // Requests that have all keys on one node can be decided alone.
            for queued in batch {
                Box::pin(self.send_batch(vec![queued])).await;
            }
            return;
        }
        let mut positions = &*positions;
        for QueuedRequests { own, response, .. } in batch {
            let (of_caller, rest) = positions.split_at(own.requests.len().min(positions.len()));
            positions = rest;
            let decided = own.decided(self.backend.deny_cache.as_ref(), of_caller, &reply);
            let _ = response.send(decided); // the caller may have dropped its future
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        unpoisoned(self.state.lock())
    }
}

impl State {
    /// Removes the requests with this number, if they wait still.
    fn take_back(&mut self, number: u64) -> bool {
        let place = self.waiting.binary_search_by_key(&number, |queued| queued.number);
        place.is_ok_and(|place| self.waiting.remove(place).is_some())
    }

    fn has_room(&self, limits: BatchLimits) -> bool {
        self.calls < 2 || self.calls < limits.max_calls && self.requests_in_flight < limits.low_load
    }

    /// Removes the requests of the next call in the order in which they came.
    ///
    /// Under load it contains at most half of the requests that wait or are in flight: while Redis executes the other half, the
    /// callers of this one receive their responses and send the next requests.
    fn take_batch(&mut self, limits: BatchLimits) -> Vec<QueuedRequests> {
        let half = (self.requests_in_flight + self.waiting.len()).div_ceil(2);
        let max_requests = half.max(limits.low_load).min(limits.max_requests);
        let mut requests = 0;
        let fits = self.waiting.iter().take_while(|queued| {
            requests += queued.own.requests.len();
            requests <= max_requests
        });
        // Too many requests of one caller are sent in a call of their own.
        let count = fits.count().max(1).min(self.waiting.len());
        self.waiting.drain(..count).collect()
    }
}

/// The permit of a call, which counts as in flight until the permit is released or dropped.
struct CallPermit {
    queue: Arc<CommitQueue>,
    /// Since when it has had the permit, until it takes its requests.
    unsent_since: Option<Instant>,
    requests: usize,
    released: bool,
}

impl CallPermit {
    /// Sends the only check of a caller in a call of its own, without the queue and without a task.
    async fn send_alone(self, own: CallerRequests) -> Result<Decided, StoreError> {
        let queue = self.queue.clone();
        let request = &own.requests[0];
        let merged = MergedRequest {
            request,
            times: request.units.into(),
        };
        let reply = queue.backend.run(&queue.breaker, &[merged], false).await;
        self.release();
        own.decided(queue.backend.deny_cache.as_ref(), &[BatchPosition::FIRST], &reply)
    }

    /// Sends the waiting requests.
    async fn send_waiting(mut self) {
        let queue = self.queue.clone();
        let (batch, next) = self.take_batch();
        let mut sending = pin!(queue.send_batch(batch));
        // The client receives this call before the next one is sent; else it would write both at once, and Redis would reply
        // to both at once.
        let sent = poll_fn(|cx| Poll::Ready(sending.as_mut().poll(cx))).await;
        send_next(next);
        if sent.is_pending() {
            sending.await;
        }
        // Callers that have their responses may send requests before the next call is sent.
        self.release();
    }

    /// Takes the requests of this call, and returns a permit for the next one.
    fn take_batch(&mut self) -> (Vec<QueuedRequests>, Option<Self>) {
        let queue = &self.queue;
        let mut state = queue.state();
        if self.is_revoked(&state) {
            return (Vec::new(), None);
        }
        let batch = state.take_batch(queue.backend.limits);
        self.requests = batch.iter().map(|queued| queued.own.requests.len()).sum();
        state.requests_in_flight += self.requests;
        self.unsent_since = None;
        state.unsent_since = None;
        let next = queue.try_permit(&mut state, queue.backend.limits, Instant::now());
        drop(state);
        (batch, next)
    }

    /// Ends the call, and sends the next one for the requests that wait. Both are one step, so that no request finds the queue
    /// without a call and overtakes those that wait.
    fn release(mut self) {
        self.released = true;
        let queue = &self.queue;
        let mut state = queue.state();
        self.remove_from(&mut state);
        let next = queue.try_permit(&mut state, queue.backend.limits, Instant::now());
        drop(state);
        send_next(next);
    }

    fn remove_from(&self, state: &mut State) {
        if self.is_revoked(state) {
            return;
        }
        state.calls -= 1;
        state.requests_in_flight -= self.requests;
        if self.unsent_since.is_some() {
            state.unsent_since = None;
        }
    }

    /// Whether the call was not sent in time, and another one takes its requests.
    fn is_revoked(&self, state: &State) -> bool {
        self.unsent_since.is_some() && state.unsent_since != self.unsent_since
    }
}

impl Drop for CallPermit {
    /// Its runtime has ended. The waiting callers send the next call from theirs, see [`CommitQueue::send_overdue`].
    fn drop(&mut self) {
        if !self.released {
            self.remove_from(&mut self.queue.state());
        }
    }
}

fn send_next(permit: Option<CallPermit>) {
    if let Some(permit) = permit {
        let backend = permit.queue.backend.clone();
        backend.spawn(permit.send_waiting());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{advance, sleep};

    use super::*;
    use crate::{
        Key, Limit, SlidingLog,
        store::{
            Charge, Operation, StoreRequest,
            redis::simulation::network::{Network, simulated_backend},
        },
    };

    fn queued(requests: Vec<OwnedRequest>) -> (QueuedRequests, oneshot::Receiver<Response>) {
        let (response, receiver) = oneshot::channel();
        let queued = QueuedRequests {
            number: 0,
            own: CallerRequests::new(requests),
            queued_at: Instant::now(),
            response,
        };
        (queued, receiver)
    }

    impl CommitQueue {
        pub(in crate::store::redis) fn is_idle(&self) -> bool {
            let state = self.state();
            // The next call drops canceled requests.
            let canceled = state.waiting.iter().all(|queued| queued.response.is_closed());
            state.calls == 0 && state.requests_in_flight == 0 && state.unsent_since.is_none() && canceled
        }
    }

    #[test]
    fn a_call_contains_half_of_the_requests_that_wait_or_are_in_flight() {
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let charges = [Charge::new("p", &limit, &key, 1)];
        let check = StoreRequest::new(Operation::Check, &charges).to_owned(|_| {});
        for (in_flight, waiting, taken) in [(0, 10, 10), (0, 100, 50), (40, 100, 70), (1_000, 900, 256)] {
            let queued = || queued(vec![check.clone()]).0;
            let mut state = State {
                requests_in_flight: in_flight,
                waiting: (0..waiting).map(|_| queued()).collect(),
                ..State::default()
            };
            let batch = state.take_batch(BatchLimits::GROUP_COMMIT);
            assert_eq!((batch.len(), state.waiting.len()), (taken, waiting - taken));
        }
    }

    #[test]
    fn of_more_than_two_calls_each_needs_a_low_load() {
        const LIMITS: BatchLimits = BatchLimits::GROUP_COMMIT;
        let (most, low) = (LIMITS.max_calls, LIMITS.low_load);
        for (calls, requests_in_flight, has_room) in [
            (0, 0, true),
            (1, 100 * low, true),
            (2, low - 1, true),
            (2, low, false),
            (most - 1, low - 1, true),
            (most, 0, false),
        ] {
            let state = State {
                calls,
                requests_in_flight,
                ..State::default()
            };
            assert_eq!(
                state.has_room(LIMITS),
                has_room,
                "{calls} calls, {requests_in_flight} requests"
            );
        }
    }

    /// A queue with these calls in flight, and one request that waits.
    fn waiting_behind(calls: usize) -> Arc<CommitQueue> {
        let backend = simulated_backend(Network::new(0, false));
        let queue = CommitQueue::new(Arc::new(backend), Arc::default());
        let (waiting, _) = queued(Vec::new());
        queue.state().calls = calls;
        queue.state().waiting.push_back(waiting);
        queue
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_waits_for_a_deadline_is_sent_regardless_of_the_calls_in_flight() {
        const MOST: usize = BatchLimits::GROUP_COMMIT.max_calls;
        let queue = waiting_behind(MOST);
        let deadline = queue.backend.deadline.duration;
        advance(deadline - Duration::from_millis(1)).await;
        queue.send_overdue();
        assert_eq!(queue.state().calls, MOST);

        advance(Duration::from_millis(1)).await;
        queue.send_overdue();
        assert_eq!(queue.state().calls, MOST + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_was_not_sent_for_a_step_is_replaced() {
        let queue = waiting_behind(0);
        let permit = queue.try_permit(&mut queue.state(), BatchLimits::GROUP_COMMIT, Instant::now());
        let mut unsent = permit.expect("no call is in flight");
        let (first, step) = (Instant::now(), queue.backend.deadline.step);
        advance(step - Duration::from_millis(1)).await;
        queue.send_overdue();
        assert_eq!(queue.state().unsent_since, Some(first));

        advance(Duration::from_millis(1)).await;
        queue.send_overdue();
        assert_eq!(queue.state().unsent_since, Some(first + step));
        assert_eq!(queue.state().calls, 1, "the first permit is revoked");

        // Its runtime runs again, and ends.
        let (batch, next) = unsent.take_batch();
        assert!(batch.is_empty() && next.is_none());
        drop(unsent);
        assert_eq!(queue.state().calls, 1);
        assert_eq!(queue.state().unsent_since, Some(first + step));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_does_not_overtake_those_that_wait() {
        let backend = simulated_backend(Network::new(0, false));
        let queue = CommitQueue::new(Arc::new(backend), Arc::default());
        let lone = queue.try_lone_permit().expect("nothing waits");
        assert!(queue.try_lone_permit().is_none(), "one call is in flight");
        let (waiting, _response) = queued(Vec::new());
        queue.state().waiting.push_back(waiting);

        // Its runtime ends.
        drop(lone);
        assert!(queue.try_lone_permit().is_none(), "one request waits");
        let permit = queue.try_permit(&mut queue.state(), BatchLimits::GROUP_COMMIT, Instant::now());
        assert!(permit.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_wait_when_the_breaker_opens_are_not_sent_and_all_count_as_failed() {
        let network = Network::new(0, false);
        let queue = CommitQueue::new(Arc::new(simulated_backend(network.clone())), Arc::default());
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let charges = [Charge::new("p", &limit, &key, 1)];
        let check = StoreRequest::new(Operation::Check, &charges).to_owned(|_| {});
        let (one, response) = queued(vec![check.clone()]);
        let (two, other_response) = queued(vec![check; 2]);
        for _ in 0..3 {
            queue.breaker.record_failure(&Failure::Timeout);
        }
        queue.send_batch(vec![one, two]).await;
        for response in [response, other_response] {
            assert!(response.await.expect("a response").is_err());
        }
        assert_eq!(network.calls(), 0);
        assert_eq!(failed(&queue), 3);
    }

    fn failed(queue: &CommitQueue) -> u64 {
        let nodes = queue.backend.client.health().status();
        nodes.iter().map(|node| node.failed).sum()
    }

    /// As where the requests of a call are sent once more, one after the other.
    #[tokio::test(start_paused = true)]
    async fn of_requests_whose_callers_have_left_those_that_have_timed_out_count_as_failed() {
        let network = Network::new(0, false);
        let queue = CommitQueue::new(Arc::new(simulated_backend(network.clone())), Arc::default());
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let charges = [Charge::new("p", &limit, &key, 1)];
        let check = StoreRequest::new(Operation::Check, &charges).to_owned(|_| {});
        for (waited, counted) in [(Duration::ZERO, 0), (queue.backend.deadline.doubled().duration, 2)] {
            let (left, response) = queued(vec![check.clone(); 2]);
            sleep(waited).await;
            drop(response);
            queue.send_batch(vec![left]).await;
            assert_eq!((failed(&queue), network.calls()), (counted, 0));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_that_times_out_counts_as_failed_once() {
        let (limit, key) = (Limit::from(SlidingLog::per_minute(5)), Key::from("a"));
        let charges = [Charge::new("p", &limit, &key, 1)];
        let check = StoreRequest::new(Operation::Check, &charges).to_owned(|_| {});
        // For so many steps from the last one before the deadline on a call is about to be sent, and is not.
        for (steps, calls) in [(1, 1), (9, 0)] {
            let network = Network::new(0, false);
            network.fall_silent();
            let queue = CommitQueue::new(Arc::new(simulated_backend(network.clone())), Arc::default());
            let step = queue.backend.deadline.step;
            queue.state().calls = BatchLimits::GROUP_COMMIT.max_calls;
            let caller = tokio::spawn(queue.clone().decide(CallerRequests::new(vec![check.clone()])));
            sleep(queue.backend.deadline.duration - step / 2).await;
            let late = Instant::now() + steps * step - step;
            queue.state().unsent_since = Some(late);
            let decided = caller.await.expect("no panic");
            assert_eq!(decided.err().expect("no reply").kind(), ErrorKind::Timeout);
            // A call that was sent late ends after its caller.
            sleep(2 * queue.backend.deadline.duration).await;
            assert_eq!((failed(&queue), network.calls()), (1, calls));
        }
    }
}
