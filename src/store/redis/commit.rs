use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::SystemTime,
};

use hashbrown::HashTable;
use tokio::{
    runtime::Handle,
    sync::oneshot,
    task,
    time::{Instant, timeout_at},
};

use super::{
    ask::{Ask, Debit},
    breaker::Breaker,
    link::Failure,
    script::{Call, Question, Said},
    server::Server,
};
use crate::store::{Answer, StoreError};

/// Requests on their way to one place of Redis: a server, or a slot of a cluster.
///
/// They leave together (group commit): while a call of the script is on its way, those who ask gather, and the next call
/// carries them all. Who is alone does not wait.
#[derive(Default)]
pub(super) struct Lane {
    queue: Mutex<Queue>,
    pub(super) breaker: Breaker,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Ticket>,
    /// How many calls are on their way or about to leave.
    calls: usize,
    /// How many requests they carry.
    carried: usize,
    /// Whether one of them is about to leave.
    gathering: bool,
}

/// How requests leave together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// How many requests one call carries at most.
    pub(super) requests: usize,
    /// How many calls are on their way at once, while they carry few requests.
    pub(super) calls: usize,
    /// How many are few. When they carry more, it is two calls: one that Redis works on, and the one that comes next.
    /// Others would only make each carry less.
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

/// Requests of one caller, who waits for their answer. They are never split.
pub(super) struct Ticket {
    pub(super) asks: Vec<Ask>,
    pub(super) asked_at: Instant,
    /// What the deny cache said of a lone check before it was asked.
    pub(super) stamp: Option<u64>,
    /// The caller, until it was told.
    answer: Option<oneshot::Sender<Result<Answer, StoreError>>>,
}

impl Ticket {
    pub(super) fn new(
        asks: Vec<Ask>,
        asked_at: Instant,
        stamp: Option<u64>,
    ) -> (Self, oneshot::Receiver<Result<Answer, StoreError>>) {
        let (sender, receiver) = oneshot::channel();
        let ticket = Self {
            asks,
            asked_at,
            stamp,
            answer: Some(sender),
        };
        (ticket, receiver)
    }

    /// Whether nobody waits for it anymore.
    fn is_given_up(&self) -> bool {
        self.answer.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    fn reply(&mut self, answer: Result<Answer, StoreError>) {
        if let Some(caller) = self.answer.take() {
            let _ = caller.send(answer); // who is gone needs none
        }
    }
}

impl Lane {
    /// Queues a ticket, and sends a call for it if none is about to leave.
    pub(super) fn submit(self: &Arc<Self>, server: &Arc<Server>, ticket: Ticket) {
        let mut queue = self.queue();
        queue.waiting.push_back(ticket);
        let departs = queue.sends_another(server.group);
        drop(queue);

        if departs {
            self.send(server);
        }
    }

    /// A call for one request, if nobody is on the way.
    pub(super) fn departs_alone(self: &Arc<Self>) -> Option<Departure> {
        let mut queue = self.queue();
        if queue.calls > 0 {
            return None;
        }
        queue.calls = 1;
        queue.carried += 1;
        drop(queue);
        Some(Departure {
            lane: self.clone(),
            gathering: false,
            carried: 1,
        })
    }

    fn send(self: &Arc<Self>, server: &Arc<Server>) {
        let departure = Departure {
            lane: self.clone(),
            gathering: true,
            carried: 0,
        };
        task::spawn(depart(server.clone(), departure));
    }

    /// Sends a call for those who gathered while another was on its way.
    fn send_another(self: &Arc<Self>, server: &Arc<Server>) {
        if self.queue().sends_another(server.group) {
            self.send(server);
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics while it is locked.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Whether another call is to leave, which then counts.
    fn sends_another(&mut self, group: Group) -> bool {
        let room = self.calls < 2 || self.calls < group.calls && self.carried < group.few;
        let sends = room && !self.gathering && !self.waiting.is_empty();
        if sends {
            self.gathering = true;
            self.calls += 1;
        }
        sends
    }

    /// Those who leave now: first come, first served. Of many, no more than half of all who are on the way or wait: while
    /// Redis works on the others, these are told and ask again.
    fn take(&mut self, group: Group) -> Vec<Ticket> {
        let half = (self.carried + self.waiting.len()).div_ceil(2);
        let most = half.max(group.few).min(group.requests);
        let mut requests = 0;
        let fits = self.waiting.iter().take_while(|ticket| {
            requests += ticket.asks.len();
            requests <= most
        });
        // A ticket that is too large leaves alone.
        let count = fits.count().max(1).min(self.waiting.len());
        self.waiting.drain(..count).collect()
    }
}

/// A call that counts in a lane until it is over, also when its task is aborted.
pub(super) struct Departure {
    lane: Arc<Lane>,
    gathering: bool,
    carried: usize,
}

impl Departure {
    /// Takes those who leave with it, and says whether another call is to leave for the rest.
    fn take(&mut self, group: Group) -> (Vec<Ticket>, bool) {
        let mut queue = self.lane.queue();
        let tickets = queue.take(group);
        self.carried = tickets.iter().map(|ticket| ticket.asks.len()).sum();
        queue.carried += self.carried;
        self.gathering = false;
        queue.gathering = false;
        (tickets, queue.sends_another(group))
    }
}

impl Drop for Departure {
    fn drop(&mut self) {
        let mut queue = self.lane.queue();
        queue.calls -= 1;
        queue.carried -= self.carried;
        queue.gathering &= !self.gathering;
    }
}

/// The call of one check, without a queue and a task of its own. Where its caller goes away it goes on: whether Redis
/// answers matters to those who come next.
pub(super) struct Alone(Option<OnItsWay>);

type OnItsWay = Pin<Box<dyn Future<Output = Result<Answer, StoreError>> + Send>>;

impl Alone {
    pub(super) fn new(
        server: Arc<Server>,
        departure: Departure,
        ask: Ask,
        asked_at: Instant,
        stamp: Option<u64>,
    ) -> Self {
        // Boxed: the future of a client takes kilobytes, which those who queue do without.
        Self(Some(Box::pin(carry_alone(server, departure, ask, asked_at, stamp))))
    }
}

impl Future for Alone {
    type Output = Result<Answer, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(call) = &mut self.0 else { return Poll::Pending };
        let answer = ready!(call.as_mut().poll(cx));
        self.0 = None;
        Poll::Ready(answer)
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        if let (Some(call), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(call);
        }
    }
}

async fn carry_alone(
    server: Arc<Server>,
    departure: Departure,
    ask: Ask,
    asked_at: Instant,
    stamp: Option<u64>,
) -> Result<Answer, StoreError> {
    let lane = departure.lane.clone();
    server.admits(&lane, asked_at, Instant::now())?;
    let mut call = Call::new(&[Question { ask: &ask, times: 1 }], guess());
    let said = server.run(&lane, &mut call, server.due(asked_at)).await;
    drop(departure);
    lane.send_another(&server);

    let said = said?;
    let tally = match said.tallies.into_iter().next() {
        Some(tally) => tally?,
        None => return Err(Failure::Protocol("the reply of Redis answers nobody").into()),
    };
    if let (Some(cache), Some(stamp), 0) = (&server.deny_cache, stamp, tally.admitted) {
        cache.remember(&ask, asked_at, stamp, said.server_time, &tally.verdicts);
    }
    Ok(Answer::new(said.server_time, [tally.outcome(&ask, 0)]))
}

/// Carries those who wait to Redis.
async fn depart(server: Arc<Server>, mut departure: Departure) {
    let lane = departure.lane.clone();
    let (tickets, another) = departure.take(server.group);
    let mut carrying = pin!(carry(&server, &lane, tickets));
    // The client has it before the next one leaves, which would be written with it and answered with it.
    let carried = poll_fn(|cx| Poll::Ready(carrying.as_mut().poll(cx))).await;
    if another {
        lane.send(&server);
    }
    if carried.is_pending() {
        carrying.await;
    }
    drop(departure);

    // Those who were told may ask again before it leaves.
    lane.send_another(&server);
}

/// Asks Redis what these ask, and tells each its answer.
async fn carry(server: &Arc<Server>, lane: &Arc<Lane>, mut tickets: Vec<Ticket>) {
    let now = Instant::now();
    tickets.retain_mut(|ticket| match server.admits(lane, ticket.asked_at, now) {
        Ok(()) => !ticket.is_given_up(),
        Err(error) => {
            ticket.reply(Err(error));
            false
        }
    });
    let Some(last) = tickets.last().map(|ticket| server.due(ticket.asked_at)) else {
        return;
    };
    let (mut call, places) = {
        let (questions, places) = arrange(&tickets);
        (Call::new(&questions, guess()), places)
    };

    let said = {
        // Boxed: the future of a client takes kilobytes, and a task is moved a few times before it runs.
        let mut said = Box::pin(server.run(lane, &mut call, last));
        let mut earlier = tickets
            .iter_mut()
            .take_while(|ticket| server.due(ticket.asked_at) < last);
        loop {
            let Some(ticket) = earlier.next() else { break said.await };
            match timeout_at(server.due(ticket.asked_at), &mut said).await {
                Ok(said) => break said,
                Err(_) => ticket.reply(Err(Failure::Timeout.into())),
            }
        }
    };

    match said {
        // Those whose keys are in one place can be served, if not together.
        Err(failure) if failure.tears_apart() && tickets.len() > 1 => {
            for ticket in tickets {
                Box::pin(carry(server, lane, vec![ticket])).await;
            }
        }
        said => tell(server, tickets, &places, &said.map_err(StoreError::from)),
    }
}

/// Tells each its answer.
fn tell(server: &Server, tickets: Vec<Ticket>, mut places: &[Place], said: &Result<Said, StoreError>) {
    for mut ticket in tickets {
        let (its_places, rest) = places.split_at(ticket.asks.len().min(places.len()));
        places = rest;
        if let Some(cache) = &server.deny_cache {
            cache.learn(&ticket, its_places, said);
        }
        let answer = said
            .as_ref()
            .map_err(Clone::clone)
            .and_then(|said| answer(&ticket, its_places, said));
        ticket.reply(answer);
    }
}

/// Which question a request became part of, and how many ask it before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) question: usize,
    pub(super) nth: u64,
}

/// Puts equal requests together where that changes nothing: where no other between them touches their keys.
fn arrange(tickets: &[Ticket]) -> (Vec<Question<'_>>, Vec<Place>) {
    let mut questions = Vec::<Question<'_>>::with_capacity(tickets.len());
    let mut places = Vec::with_capacity(tickets.len());
    // The last question about each key.
    let mut latest = HashTable::<(&Debit, usize)>::with_capacity(tickets.len());

    for ask in tickets.iter().flat_map(|ticket| &*ticket.asks) {
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

/// What the reply says to a ticket.
fn answer(ticket: &Ticket, places: &[Place], said: &Said) -> Result<Answer, StoreError> {
    let mut answer = Answer::new(said.server_time, []);
    for (ask, place) in ticket.asks.iter().zip(places) {
        let tally = said.tallies[place.question].as_ref().map_err(Clone::clone)?;
        answer.outcomes.push(tally.outcome(ask, place.nth));
    }
    Ok(answer)
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
        store::{Charge, Operation, Request, redis::ask::Names},
    };

    static NAMES: LazyLock<Names> = LazyLock::new(|| Names::new("quota", None));

    /// A ticket that asks for these keys of one policy.
    fn ticket(operation: Operation, limit: &Limit, keys: &[&str]) -> Ticket {
        let keys: Vec<_> = keys.iter().map(|key| Key::from(*key)).collect();
        let charges: Vec<_> = keys.iter().map(|key| Charge::new("p", limit, key, 1)).collect();
        let ask = Ask::new(&NAMES, &Request::new(operation, &charges));
        Ticket::new(vec![ask], Instant::now(), None).0
    }

    /// For each request its question, and how often each question is asked.
    fn arranged(tickets: &[Ticket]) -> (Vec<usize>, Vec<u64>) {
        let (questions, places) = arrange(tickets);
        (
            places.iter().map(|place| place.question).collect(),
            questions.iter().map(|question| question.times).collect(),
        )
    }

    #[test]
    fn equal_checks_are_one_question() {
        let limit = SlidingLog::per_minute(5).into();
        let [a, b] = ["a", "b"].map(|key| move |limit: &Limit| ticket(Operation::Check, limit, &[key]));
        let tickets = [a(&limit), b(&limit), a(&limit), a(&limit), b(&limit)];
        assert_eq!(arranged(&tickets), (vec![0, 1, 0, 0, 1], vec![3, 2]));
        assert_eq!(arrange(&tickets).1[3], Place { question: 0, nth: 2 },);
    }

    #[test]
    fn checks_with_another_request_on_their_key_between_them_are_not() {
        let limit = SlidingLog::per_minute(5).into();
        let check = |keys| ticket(Operation::Check, &limit, keys);
        for between in [
            ticket(Operation::Reset, &limit, &["a"]),
            check(&["a", "b"]),
            check(&["b", "a"]),
            ticket(Operation::Check, &SlidingLog::per_minute(6).into(), &["a"]),
        ] {
            let tickets = [check(&["a"]), between, check(&["a"])];
            assert_eq!(arranged(&tickets), (vec![0, 1, 2], vec![1, 1, 1]));
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
            let tickets = [0; 2].map(|_| ticket(operation, &limit, &["a"]));
            assert_eq!(arranged(&tickets), (vec![0, 1], vec![1, 1]), "{operation:?}");
        }
    }

    #[test]
    fn a_bucket_whose_tokens_take_fractions_of_microseconds_does_not_merge() {
        for (limit, questions) in [(TokenBucket::per_second(7), 2), (TokenBucket::per_second(8), 1)] {
            let tickets = [0; 2].map(|_| ticket(Operation::Check, &limit.into(), &["a"]));
            assert_eq!(arrange(&tickets).0.len(), questions, "{limit}");
        }
    }
}
