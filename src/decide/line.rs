//! Requests that wait, and the lines of this process in which they stand.
//!
//! A request that is denied and may wait stands in the line of each key that denies it, with the time of its arrival. It holds
//! nothing, and nothing of it is counted. For each line a task checks the first request again, with those behind it that are equal:
//! an ordinary check of all of their policies, which admits what fits after all that have arrived before in other processes. It is
//! sent when the wait of the last reply is over, when the store wakes the line, and each second, which refreshes the place of the
//! process.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    mem, ptr,
    sync::{Arc, LazyLock, Mutex, MutexGuard},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{Instant, timeout_at},
};

#[cfg(feature = "admin")]
use super::line_report::LineSubject;
use super::{
    Undecided,
    check::send,
    failing::leave_place,
    group::Group,
    waiting::{Lacking, Waiter},
};
use crate::{
    limit::{PLACE_SIZE, PLACE_US},
    store::{ErrorKind, Operation, StoreError, StoreResponse, wakes::LineSignal},
    sync::lock,
};

/// The longest time after which the first request of a line is checked again.
const REFRESH: Duration = Duration::from_secs(1);

/// The pause between checks which only replace the place of the process.
const COALESCED: Duration = Duration::from_millis(20);

/// The number of no line.
pub(super) const NO_LINE: u64 = u64::MAX;

pub(super) static LINES: LazyLock<Mutex<HashMap<u64, Arc<Line>>>> = LazyLock::new(Mutex::default);

/// Notified when the task of a line has ended with its runtime.
pub(super) static ORPHANED: LazyLock<Notify> = LazyLock::new(Notify::new);

/// The requests of this process that wait for one key of a store.
pub(super) struct Line {
    pub(super) id: u64,
    state: Mutex<State>,
    pub(super) signal: Arc<LineSignal>,
    #[cfg(feature = "admin")]
    pub(super) subject: LineSubject,
}

#[derive(Default)]
pub(super) struct State {
    /// The requests, in the order in which they are checked.
    pub(super) waiting: BTreeMap<Rank, Entry>,
    /// The sum of these costs.
    pub(super) weight: u64,
    has_task: bool,
    /// When the first request is to be checked.
    due: Option<Instant>,
    /// When the last check was sent.
    sent_at: Option<Instant>,
    /// Whether the place in the store may not have the first requests of the line.
    pub(super) is_stale: bool,
    /// Until when the place is in the store.
    stored_until: Option<Instant>,
    /// The number of the request that was last checked in place of the first one.
    tried: Option<u64>,
    /// The last denial since the line is full, of this request, until when others are denied by it.
    pub(super) denied: Option<(Undecided, StoreResponse, Instant)>,
    /// The last request that has left since the last check was sent. Its charges name the place to remove when no other waits.
    left: Option<Undecided>,
    /// The last turn of each key of [`Policy::fair_by`](crate::Policy::fair_by), and that of the last admission.
    turns: HashMap<u32, u64>,
    turn: u64,
}

/// A request in a line.
pub(super) struct Entry {
    pub(super) waiter: Arc<Waiter>,
    pub(super) cost: u64,
    /// With which requests it takes turns.
    fair: u32,
}

/// The order of requests in a line: by priority, then turn by turn, then by arrival, then by the number of the request.
pub(super) type Rank = (Reverse<i32>, u64, u64, u64);

pub(super) fn find(id: u64) -> Option<Arc<Line>> {
    lock(&LINES).get(&id).cloned()
}

impl Line {
    /// Adds a request to the line of a key, behind those that have arrived before.
    pub(super) fn enter(
        lacking: &Lacking,
        waiter: &Arc<Waiter>,
        is_stored: bool,
        sent_at: Instant,
    ) -> (Arc<Self>, Rank) {
        // The line is not removed while the table is locked.
        let mut lines = lock(&LINES);
        let line = lines.entry(lacking.line).or_insert_with(|| {
            Arc::new(Self {
                id: lacking.line,
                state: Mutex::default(),
                signal: LineSignal::of(lacking.line),
                #[cfg(feature = "admin")]
                subject: lacking.subject.clone(),
            })
        });
        let line = line.clone();
        let mut state = line.state();
        drop(lines);

        let rank = (
            Reverse(lacking.waiting.priority),
            state.turn_of(lacking.waiting.fair),
            waiter.arrived,
            waiter.number,
        );
        let is_first = state.waiting.first_key_value().is_none_or(|(first, _)| rank < *first);
        // Those behind it that have arrived before count as arrived with it, also for other processes.
        let behind = state.waiting.range(rank..).next();
        state.is_stale |= behind.is_some_and(|(behind, _)| behind.2 < rank.2);
        let (waiter, fair) = (waiter.clone(), lacking.waiting.fair);
        let cost = lacking.cost;
        state.waiting.insert(rank, Entry { waiter, cost, fair });
        state.weight += lacking.cost;
        if is_first {
            let due = sent_at + lacking.retry_after;
            state.due = Some(state.due.map_or(due, |earlier| earlier.min(due)));
        }
        // A check that was sent since then has replaced the place.
        let is_replaced = state.sent_at.is_some_and(|sent| sent >= sent_at);
        let is_missing = !is_stored || state.waiting.len() > PLACE_SIZE;
        state.is_stale |= is_replaced || is_missing && state.is_in_place(&rank);
        if state.waiting.len() <= PLACE_SIZE {
            let stored_until = sent_at + Duration::from_micros(PLACE_US);
            state.stored_until = state.stored_until.max(Some(stored_until));
        }
        line.signal.change();
        drop(state);
        line.ensure_task();
        (line, rank)
    }

    /// Removes a request that has entered with this rank. If it has `left`, the place in the store has it still.
    pub(super) fn remove(&self, entered: &Rank, left: Option<&Undecided>) {
        let mut state = self.state();
        let Some(rank) = state.rank_now(entered) else { return };
        let was_in_place = state.is_in_place(&rank);
        let Some(Entry { cost, fair, .. }) = state.waiting.remove(&rank) else {
            return;
        };
        state.weight -= cost;
        match left {
            None => {
                state.turn = state.turn.max(rank.1);
                // A check in another line does not know that this place has it as arrived with one ahead of it.
                state.is_stale |= state.waiting.range(..rank).any(|(ahead, _)| ahead.2 > rank.2);
            }
            Some(left) => {
                state.left = Some(left.again());
                state.is_stale |= was_in_place;
                state.pass_on(rank.1, fair);
            }
        }
        let is_over = state.waiting.is_empty() && !state.has_task;
        drop(state);
        if is_over {
            self.end();
        }
        self.signal.change();
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Begins the task of the line, unless it has one. A runtime that has ended drops the task here, which locks the line.
    pub(super) fn ensure_task(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let had_task = mem::replace(&mut self.state().has_task, true);
        if !had_task {
            runtime.spawn(check_first(Task(self.clone())));
        }
    }

    /// What the task of the line does next.
    fn next(&self) -> Next {
        let mut state = self.state();
        let now = Instant::now();
        if state.waiting.is_empty() {
            let is_stored = state.stored_until.take().is_some_and(|until| now < until);
            return match state.left.take() {
                Some(left) if is_stored => {
                    state.sent_at = Some(now);
                    Next::Clear(left)
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
            return Next::WaitUntil(due);
        }
        let first = state.waiting.first_key_value();
        let first = first.map(|(rank, entry)| (*rank, entry.waiter.clone()));
        drop(state); // no task locks two lines
        let earlier = first.and_then(|(rank, first)| self.earlier(&rank, &first));
        let mut state = self.state();
        let earlier = earlier.filter(|earlier| state.tried != Some(earlier.number));
        state.tried = earlier.as_ref().map(|earlier| earlier.number);
        match Group::take(&state.waiting, earlier) {
            Some(group) => {
                state.is_stale = false;
                state.left = None;
                state.sent_at = Some(now);
                state.due = None;
                state.stored_until = Some(now + Duration::from_micros(PLACE_US));
                Next::Check(group)
            }
            // The task of another line checks the first request, and changes this line when it has.
            None => {
                state.due = is_woken.then_some(now).or(state.due);
                Next::WaitUntil(now + REFRESH)
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
    fn end(&self) -> bool {
        let mut lines = lock(&LINES);
        let mut state = self.state();
        if !state.waiting.is_empty() {
            return false;
        }
        state.has_task = false;
        drop(state);
        let is_own = lines.get(&self.id).is_some_and(|line| ptr::eq(&raw const **line, self));
        if is_own {
            lines.remove(&self.id);
        }
        true
    }
}

impl State {
    /// The number of requests that wait.
    #[cfg(feature = "admin")]
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// The turn of a request that enters: keys take one after the other.
    fn turn_of(&mut self, key: u32) -> u64 {
        // As long as no request has a key, all have one turn.
        if key == 0 && self.turns.is_empty() {
            return 0;
        }
        let now = self.turn;
        if self.turns.len() > 2 * self.waiting.len() + PLACE_SIZE {
            self.turns.retain(|_, last| *last >= now);
            // Where nothing is admitted, none of them is over. A key that is forgotten may have another turn.
            if self.turns.len() > 2 * self.waiting.len() + PLACE_SIZE {
                self.turns.clear();
            }
        }
        let turn = self.turns.get(&key).map_or(now, |last| now.max(last + 1));
        self.turns.insert(key, turn);
        turn
    }

    /// Gives the turn of a request that has left to the next one of its key, and the turn of that one to the next but one.
    fn pass_on(&mut self, mut turn: u64, key: u32) {
        if self.turns.is_empty() {
            return;
        }
        let later = self
            .waiting
            .iter()
            .filter(|(rank, entry)| entry.fair == key && rank.1 > turn);
        let mut later: Vec<Rank> = later.map(|(rank, _)| *rank).collect();
        later.sort_unstable_by_key(|rank| rank.1);
        for rank in later {
            if let Some(entry) = self.waiting.remove(&rank) {
                self.waiting.insert((rank.0, turn, rank.2, rank.3), entry);
            }
            turn = rank.1;
            self.is_stale = true;
        }
        match turn.checked_sub(1) {
            Some(last) => self.turns.insert(key, last),
            None => self.turns.remove(&key),
        };
    }

    /// The rank of a request that has entered with this one. It has another one if turns were passed on to it.
    fn rank_now(&self, entered: &Rank) -> Option<Rank> {
        if self.waiting.contains_key(entered) {
            return Some(*entered);
        }
        self.waiting.keys().find(|rank| rank.3 == entered.3).copied()
    }

    /// Whether the place in the store contains the request with this rank.
    fn is_in_place(&self, rank: &Rank) -> bool {
        self.waiting.keys().nth(PLACE_SIZE).is_none_or(|behind| rank < behind)
    }
}

enum Next {
    Check(Group),
    /// Remove the place from the store.
    Clear(Undecided),
    WaitUntil(Instant),
    End,
}

/// The task of a line.
struct Task(Arc<Line>);

impl Drop for Task {
    /// If the runtime has ended, the requests begin another task.
    fn drop(&mut self) {
        self.0.state().has_task = false;
        self.0.end();
        ORPHANED.notify_waiters();
    }
}

async fn check_first(task: Task) {
    let line = &task.0;
    loop {
        match line.next() {
            Next::Check(group) => {
                let due = group.check(line.id, Instant::now()).await;
                line.state().due = due.or(Some(Instant::now()));
            }
            Next::Clear(mut left) => {
                left.lead(line.id, &[], 0);
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
        }
    }
}

#[cold]
pub(super) fn ended() -> StoreError {
    StoreError::new(
        ErrorKind::Unreachable,
        "the runtime that checked the requests which wait has shut down",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_turns_of_any_number_of_keys_take_bounded_memory() {
        let mut state = State::default();
        for key in 1..10_000 {
            state.turn_of(key);
            state.turn_of(key);
            assert!(state.turns.len() <= PLACE_SIZE + 2, "{key}");
        }
    }
}
