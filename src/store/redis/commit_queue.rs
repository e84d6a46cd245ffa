use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
    time::SystemTime,
};

use hashbrown::HashTable;
use tokio::{sync::oneshot, time::Instant};

use super::{
    ask::{Ask, Debit},
    breaker::Breaker,
    link::Failure,
    script::{Call, Question, Said},
    server::Server,
    task::{DetachOnDrop, spawn},
};
use crate::store::{ErrorKind, StoreError, StoreResponse};

/// Requests to one place of Redis: a server, or a slot of a cluster.
///
/// They are sent in groups (group commit): while calls of the script are on their way, requests wait in the queue, and the
/// next call carries all of them. A request that finds no call on its way is sent at once.
#[derive(Default)]
pub(super) struct CommitQueue {
    state: Mutex<State>,
    pub(super) breaker: Breaker,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<QueuedRequest>,
    /// How many calls are on their way or about to leave.
    calls: usize,
    /// How many requests they carry.
    carried: usize,
    /// Since when one of them is about to leave.
    gathering: Option<Instant>,
}

/// How requests are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// The most requests in one call.
    pub(super) requests: usize,
    /// The most calls on their way while they carry few requests.
    pub(super) calls: usize,
    /// Below this many requests on their way they are few. Above it, at most two calls are on their way: Redis works on one
    /// while the callers of the other continue. More calls would only carry fewer requests each.
    pub(super) few: usize,
}

impl Group {
    pub(super) const COMMIT: Self = Self {
        requests: 256,
        calls: 8,
        few: 16,
    };
    pub(super) const NONE: Self = Self {
        requests: 1,
        calls: usize::MAX,
        few: usize::MAX,
    };
}

/// The requests of one caller, which waits for the answer. They are never split.
pub(super) struct QueuedRequest {
    pub(super) asks: Vec<Ask>,
    /// When the caller made the request.
    pub(super) asked_at: Instant,
    queued_at: Instant,
    /// The stamp of the deny cache for a lone check, from before it was sent.
    pub(super) stamp: Option<u64>,
    answer: Option<AnswerSender>,
}

type AnswerSender = oneshot::Sender<Result<StoreResponse, StoreError>>;
type AnswerReceiver = oneshot::Receiver<Result<StoreResponse, StoreError>>;

impl QueuedRequest {
    fn new(asks: Vec<Ask>, asked_at: Instant, stamp: Option<u64>) -> (Self, AnswerReceiver) {
        let (sender, receiver) = oneshot::channel();
        let request = Self {
            asks,
            asked_at,
            queued_at: Instant::now(),
            stamp,
            answer: Some(sender),
        };
        (request, receiver)
    }

    /// Whether the caller no longer waits.
    fn is_given_up(&self) -> bool {
        self.answer.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    fn answer(&mut self, answer: Result<StoreResponse, StoreError>) {
        if let Some(caller) = self.answer.take() {
            let _ = caller.send(answer); // a caller that left needs none
        }
    }
}

impl CommitQueue {
    /// Sends these requests in one call, once the future is polled, and waits for the answer.
    pub(super) async fn ask(
        self: Arc<Self>,
        server: Arc<Server>,
        mut asks: Vec<Ask>,
        asked_at: Instant,
        stamp: Option<u64>,
    ) -> Result<StoreResponse, StoreError> {
        server.admits(&self, &asks)?;
        if matches!(&*asks, [ask] if ask.is_check())
            && let Some(departure) = self.departs_alone()
            && let Some(ask) = asks.pop()
        {
            // If its caller leaves, it goes on: whether Redis replies matters to the requests that come next.
            return DetachOnDrop::new(carry_alone(server, departure, ask, asked_at, stamp)).await;
        }

        let (request, answer) = QueuedRequest::new(asks, asked_at, stamp);
        self.submit(&server, request);
        let patience = server.patience.doubled();
        let server = {
            let weak = Arc::downgrade(&server);
            drop(server); // a caller that waits keeps no connection open
            weak
        };
        let nudge = || {
            if let Some(server) = server.upgrade() {
                self.nudge(&server);
            }
        };
        match patience.wait(answer, nudge).await {
            Some(answer) => answer.unwrap_or_else(|_| Err(abandoned())),
            None => Err(Failure::Timeout.into()),
        }
    }

    /// Queues a request, and sends a call for it if none is about to leave.
    fn submit(self: &Arc<Self>, server: &Arc<Server>, request: QueuedRequest) {
        let mut state = self.state();
        let now = request.queued_at;
        state.waiting.push_back(request);
        let departure = self.departs(&mut state, server.group, now);
        drop(state);
        send(server, departure);
    }

    /// A call for one request, if none is on its way and no other request waits.
    fn departs_alone(self: &Arc<Self>) -> Option<Departure> {
        let mut state = self.state();
        if state.calls > 0 || !state.waiting.is_empty() {
            return None;
        }
        state.calls = 1;
        state.carried += 1;
        drop(state);
        Some(Departure {
            queue: self.clone(),
            gathering: None,
            carried: 1,
            over: false,
        })
    }

    /// Sends a call if one is due that has not left: a caller that waits makes sure that it does not wait in vain.
    ///
    /// The task that was to send it may have ended with its runtime, or a handler blocks the thread that was to run it.
    fn nudge(self: &Arc<Self>, server: &Arc<Server>) {
        let now = Instant::now();
        let mut state = self.state();
        if state
            .gathering
            .is_some_and(|since| since + server.patience.step() <= now)
        {
            state.gathering = None;
        }
        // A call whose runtime stands still occupies its place without end, so an overdue request needs no room.
        let overdue = state.waiting.front().map(|request| request.queued_at + server.deadline);
        let departure = match overdue.is_some_and(|due| due <= now) {
            true => self.departs(&mut state, Group::NONE, now),
            false => self.departs(&mut state, server.group, now),
        };
        drop(state);
        send(server, departure);
    }

    /// The call that is to leave for the requests that wait, if any; it counts from then on.
    fn departs(self: &Arc<Self>, state: &mut State, group: Group, now: Instant) -> Option<Departure> {
        if state.gathering.is_some() || state.waiting.is_empty() || !state.has_room(group) {
            return None;
        }
        state.gathering = Some(now);
        state.calls += 1;
        Some(Departure {
            queue: self.clone(),
            gathering: Some(now),
            carried: 0,
            over: false,
        })
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state();
        // The next call drops requests that are given up.
        let given_up = state.waiting.iter().all(QueuedRequest::is_given_up);
        state.calls == 0 && state.carried == 0 && state.gathering.is_none() && given_up
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it is locked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn has_room(&self, group: Group) -> bool {
        self.calls < 2 || self.calls < group.calls && self.carried < group.few
    }

    /// The requests that leave now, first come, first served. If there are many, at most half of all that are on their way or
    /// wait: while Redis works on the others, the callers of these are answered and send again.
    fn take(&mut self, group: Group) -> Vec<QueuedRequest> {
        let half = (self.carried + self.waiting.len()).div_ceil(2);
        let most = half.max(group.few).min(group.requests);
        let mut requests = 0;
        let fits = self.waiting.iter().take_while(|request| {
            requests += request.asks.len();
            requests <= most
        });
        // A request that is too large leaves alone.
        let count = fits.count().max(1).min(self.waiting.len());
        self.waiting.drain(..count).collect()
    }
}

/// A call, which counts in its queue until it is over, also if its task is aborted.
struct Departure {
    queue: Arc<CommitQueue>,
    /// While it gathers: since when.
    gathering: Option<Instant>,
    carried: usize,
    over: bool,
}

impl Departure {
    /// Takes the requests that leave with it, and returns the call that is to leave for the rest.
    fn take(&mut self, group: Group) -> (Vec<QueuedRequest>, Option<Self>) {
        let mut state = self.queue.state();
        let requests = state.take(group);
        self.carried = requests.iter().map(|request| request.asks.len()).sum();
        state.carried += self.carried;
        if state.gathering == self.gathering.take() {
            state.gathering = None;
        }
        let next = self.queue.departs(&mut state, group, Instant::now());
        drop(state);
        (requests, next)
    }

    /// Ends the call and sends another one for the requests that gathered meanwhile. Both are one step, so that no request
    /// finds the queue without a call and overtakes those that wait.
    fn finish(mut self, server: &Arc<Server>) {
        self.over = true;
        let mut state = self.queue.state();
        self.leave(&mut state);
        let next = self.queue.departs(&mut state, server.group, Instant::now());
        drop(state);
        send(server, next);
    }

    fn leave(&self, state: &mut State) {
        state.calls -= 1;
        state.carried -= self.carried;
        if self.gathering.is_some() && state.gathering == self.gathering {
            state.gathering = None;
        }
    }
}

impl Drop for Departure {
    /// Its runtime ends: the callers that wait send the next call from theirs, see [`CommitQueue::nudge`].
    fn drop(&mut self) {
        if !self.over {
            self.leave(&mut self.queue.state());
        }
    }
}

/// Sends one check in a call of its own, without the queue and without a task.
async fn carry_alone(
    server: Arc<Server>,
    departure: Departure,
    ask: Ask,
    asked_at: Instant,
    stamp: Option<u64>,
) -> Result<StoreResponse, StoreError> {
    let mut call = Call::new(&[Question { ask: &ask, times: 1 }], guess());
    let said = server.run(&departure.queue, &mut call).await;
    departure.finish(&server);

    let said = said?;
    let tally = match said.tallies.into_iter().next() {
        Some(tally) => tally?,
        None => return Err(Failure::Protocol("the reply of Redis contains no answer").into()),
    };
    if let (Some(cache), Some(stamp), 0) = (&server.deny_cache, stamp, tally.admitted) {
        cache.remember(&ask, asked_at, stamp, said.server_time, &tally.states);
    }
    Ok(StoreResponse::new(said.server_time, [tally.outcome(&ask, 0)]))
}

fn send(server: &Arc<Server>, departure: Option<Departure>) {
    if let Some(departure) = departure {
        spawn(depart(server.clone(), departure));
    }
}

/// Sends the requests that wait.
async fn depart(server: Arc<Server>, mut departure: Departure) {
    let queue = departure.queue.clone();
    let (requests, next) = departure.take(server.group);
    let mut carrying = pin!(carry(&server, &queue, requests));
    // The client has this call before the next one leaves; else both would be written, and answered, together.
    let carried = poll_fn(|cx| Poll::Ready(carrying.as_mut().poll(cx))).await;
    send(&server, next);
    if carried.is_pending() {
        carrying.await;
    }
    // Callers that were answered may send again before the next call leaves.
    departure.finish(&server);
}

/// Sends these requests in one call, and answers each.
async fn carry(server: &Arc<Server>, queue: &Arc<CommitQueue>, mut requests: Vec<QueuedRequest>) {
    requests.retain_mut(|request| match server.admits(queue, &request.asks) {
        Ok(()) => !request.is_given_up(),
        Err(error) => {
            request.answer(Err(error));
            false
        }
    });
    if requests.is_empty() {
        return;
    }
    let (mut call, places) = {
        let (questions, places) = arrange(&requests);
        (Call::new(&questions, guess()), places)
    };

    match server.run(queue, &mut call).await {
        // Requests whose keys are on one node can be served, if not together.
        Err(failure) if failure.tears_apart() && requests.len() > 1 => {
            for request in requests {
                Box::pin(carry(server, queue, vec![request])).await;
            }
        }
        said => answer_all(server, requests, &places, &said.map_err(StoreError::from)),
    }
}

/// Answers each request.
fn answer_all(server: &Server, requests: Vec<QueuedRequest>, mut places: &[Place], said: &Result<Said, StoreError>) {
    for mut request in requests {
        let (its_places, rest) = places.split_at(request.asks.len().min(places.len()));
        places = rest;
        if let Some(cache) = &server.deny_cache {
            cache.learn(&request, its_places, said);
        }
        let answer = said
            .as_ref()
            .map_err(Clone::clone)
            .and_then(|said| answer(&request, its_places, said));
        request.answer(answer);
    }
}

/// Which question a request became part of, and how many ask it before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) question: usize,
    pub(super) nth: u64,
}

/// Puts equal requests together where that changes nothing: where no other between them touches their keys.
fn arrange(requests: &[QueuedRequest]) -> (Vec<Question<'_>>, Vec<Place>) {
    let mut questions = Vec::<Question<'_>>::with_capacity(requests.len());
    let mut places = Vec::with_capacity(requests.len());
    // The last question about each key.
    let mut latest = HashTable::<(&Debit, usize)>::with_capacity(requests.len());

    for ask in requests.iter().flat_map(|request| &*request.asks) {
        let mut before = ask.debits.iter().map(|debit| {
            let same = latest.find(debit.hash, |(other, _)| other.key == debit.key);
            same.map(|(_, question)| *question)
        });
        let same = before.next().flatten().filter(|question| {
            before.all(|before| before == Some(*question)) && ask.merges_with(questions[*question].ask)
        });
        let question = same.unwrap_or_else(|| {
            for debit in &ask.debits {
                let same = |(other, _): &(&Debit, usize)| other.key == debit.key;
                let entry = latest.entry(debit.hash, same, |(other, _)| other.hash);
                entry.insert((debit, questions.len()));
            }
            questions.push(Question { ask, times: 0 });
            questions.len() - 1
        });

        let nth = questions[question].times;
        places.push(Place { question, nth });
        questions[question].times += 1;
    }
    (questions, places)
}

/// The answer to a request, from the reply.
fn answer(request: &QueuedRequest, places: &[Place], said: &Said) -> Result<StoreResponse, StoreError> {
    let mut answer = StoreResponse::new(said.server_time, []);
    for (ask, place) in request.asks.iter().zip(places) {
        let tally = said.tallies[place.question].as_ref().map_err(Clone::clone)?;
        answer.outcomes.push(tally.outcome(ask, place.nth));
    }
    Ok(answer)
}

/// The answer to a request whose call ended with its runtime.
fn abandoned() -> StoreError {
    StoreError::new(
        ErrorKind::Unreachable,
        "the runtime that sent the check to Redis has shut down",
    )
}

/// About the time that Redis has, in microseconds, to find the calendar windows around it.
fn guess() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_micros() as u64
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use crate::{
        Key, Limit, SlidingLog, TokenBucket,
        store::{Charge, Operation, StoreRequest, redis::ask::Names},
    };

    static NAMES: LazyLock<Names> = LazyLock::new(|| Names::new("quota", None));

    /// A request for these keys of one policy.
    fn queued(operation: Operation, limit: &Limit, keys: &[&str]) -> QueuedRequest {
        let keys: Vec<_> = keys.iter().map(|key| Key::from(*key)).collect();
        let charges: Vec<_> = keys.iter().map(|key| Charge::new("p", limit, key, 1)).collect();
        let ask = Ask::new(&NAMES, &StoreRequest::new(operation, &charges));
        QueuedRequest::new(vec![ask], Instant::now(), None).0
    }

    #[test]
    fn a_request_does_not_overtake_those_that_wait() {
        let limit = SlidingLog::per_minute(5).into();
        let queue = Arc::<CommitQueue>::default();
        let alone = queue.departs_alone().expect("nothing waits");
        assert!(queue.departs_alone().is_none(), "one is on its way");
        queue
            .state()
            .waiting
            .push_back(queued(Operation::Check, &limit, &["a"]));

        // Its runtime ends.
        drop(alone);
        assert!(queue.departs_alone().is_none(), "one waits");
        let departs = queue.departs(&mut queue.state(), Group::COMMIT, Instant::now());
        assert!(departs.is_some());
    }

    /// For each request its question, and how often each question is asked.
    fn arranged(requests: &[QueuedRequest]) -> (Vec<usize>, Vec<u64>) {
        let (questions, places) = arrange(requests);
        (
            places.iter().map(|place| place.question).collect(),
            questions.iter().map(|question| question.times).collect(),
        )
    }

    #[test]
    fn equal_checks_are_one_question() {
        let limit = SlidingLog::per_minute(5).into();
        let [a, b] = ["a", "b"].map(|key| move |limit: &Limit| queued(Operation::Check, limit, &[key]));
        let requests = [a(&limit), b(&limit), a(&limit), a(&limit), b(&limit)];
        assert_eq!(arranged(&requests), (vec![0, 1, 0, 0, 1], vec![3, 2]));
        assert_eq!(arrange(&requests).1[3], Place { question: 0, nth: 2 },);
    }

    #[test]
    fn checks_with_another_request_on_their_key_between_them_are_not() {
        let limit = SlidingLog::per_minute(5).into();
        let check = |keys| queued(Operation::Check, &limit, keys);
        for between in [
            queued(Operation::Reset, &limit, &["a"]),
            check(&["a", "b"]),
            check(&["b", "a"]),
            queued(Operation::Check, &SlidingLog::per_minute(6).into(), &["a"]),
        ] {
            let requests = [check(&["a"]), between, check(&["a"])];
            assert_eq!(arranged(&requests), (vec![0, 1, 2], vec![1, 1, 1]));
        }

        let pairs = [check(&["a", "b"]), check(&["b"]), check(&["a", "b"])];
        assert_eq!(arranged(&pairs), (vec![0, 1, 2], vec![1, 1, 1]));
        let pairs = [check(&["a", "b"]), check(&["c"]), check(&["a", "b"])];
        assert_eq!(arranged(&pairs), (vec![0, 1, 0], vec![2, 1]));
    }

    #[test]
    fn only_checks_merge() {
        let limit = SlidingLog::per_minute(5).into();
        let refund = Operation::Refund {
            admitted_at: std::time::Duration::ZERO,
        };
        for operation in [Operation::Charge, Operation::Peek, Operation::Reset, refund] {
            let requests = [0; 2].map(|_| queued(operation, &limit, &["a"]));
            assert_eq!(arranged(&requests), (vec![0, 1], vec![1, 1]), "{operation:?}");
        }
    }

    #[test]
    fn a_bucket_whose_tokens_take_fractions_of_microseconds_does_not_merge() {
        for (limit, questions) in [(TokenBucket::per_second(7), 2), (TokenBucket::per_second(8), 1)] {
            let requests = [0; 2].map(|_| queued(Operation::Check, &limit.into(), &["a"]));
            assert_eq!(arrange(&requests).0.len(), questions, "{limit}");
        }
    }
}
