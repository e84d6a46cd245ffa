//! Requests that wait, and the lines of this process in which they stand.
//!
//! A request that is denied and may wait stands in the line of each key that denies it, with the time of its arrival. It holds
//! nothing, and nothing of it is counted. For each line a task checks the first request again, with those behind it that are equal:
//! an ordinary check of all of their policies, which admits what fits after all that have arrived before in other processes. It is
//! sent when the wait of the last reply is over, when the store wakes the line, and each second, which refreshes the place of the
//! process.

#[cfg(feature = "admin")]
pub(super) mod report;
mod task;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    mem,
    sync::{Arc, LazyLock, Mutex, MutexGuard, atomic::Ordering},
    time::Duration,
};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    Undecided, Waiting,
    group::Comes,
    leaving::Turn,
    waiting::{Lacking, Waiter},
};
use crate::{
    limit::{PLACE_SIZE, PLACE_US},
    store::{StoreResponse, wakes::LineSignal},
    sync::lock,
};

/// The longest time after which the first request of a line is checked again.
pub(super) const REFRESH: Duration = Duration::from_secs(1);

/// The shortest time after a check that denies the first request: a store may reply at once, and its clock may stand still.
pub(super) const SHORTEST_PAUSE: Duration = Duration::from_millis(1);

/// After this time a check is taken never to end. It takes a few deadlines, which are far shorter unless they are set.
pub(super) const LONGEST_CHECK: Duration = Duration::from_secs(30);

/// The number of no line.
pub(super) const NO_LINE: u64 = u64::MAX;

static LINES: LazyLock<Mutex<HashMap<u64, Arc<Line>>>> = LazyLock::new(Mutex::default);

/// The requests of this process that wait for one key of a store.
pub(super) struct Line {
    pub(super) id: u64,
    state: Mutex<State>,
    pub(super) signal: Arc<LineSignal>,
    /// The store and the policy that count these requests, and their key.
    #[cfg(feature = "admin")]
    subject: (Option<crate::store::StoreId>, Arc<str>, crate::Key),
}

#[derive(Default)]
pub(super) struct State {
    /// The requests, in the order in which they are checked.
    pub(super) waiting: BTreeMap<Rank, Entry>,
    /// The sum of these costs.
    pub(super) weight: u64,
    /// When the task acts at the latest, if there is one.
    acts_by: Option<Instant>,
    /// The number of the newest task, and of the requests that it checks.
    task: u64,
    checked: SmallVec<[u64; 1]>,
    /// When the first request is to be checked.
    due: Option<Instant>,
    /// When the last check was sent.
    sent_at: Option<Instant>,
    /// The newest arrival that its place may have of requests which have stood here.
    pub(super) newest: u64,
    /// Whether the place in the store may not have the first requests of the line.
    pub(super) is_stale: bool,
    /// Until when the place is in the store.
    stored_until: Option<Instant>,
    /// Whether it is in the counts of this process instead, since the store has failed.
    pub(super) is_local: bool,
    /// The number of the request that was last checked in place of the first one.
    tried: Option<u64>,
    /// The last denial since the line is full, of this request, until when others are denied by it.
    pub(super) denied: Option<(Undecided, StoreResponse, Instant)>,
    /// The last request that has left since the last check was sent. Its charges name the place to remove when no other waits.
    left: Option<Undecided>,
    /// The last turn of each priority and key of `fair_by`, and that of the last admission of each priority.
    turns: HashMap<(i32, u32), u64>,
    admitted: HashMap<i32, u64>,
}

/// A request in a line.
pub(super) struct Entry {
    pub(super) waiter: Arc<Waiter>,
    pub(super) cost: u64,
    /// With which requests it takes turns.
    fair: u32,
}

/// The order of requests in a line: by priority, then turn by turn, then by arrival, then by the number of the request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    priority: Reverse<i32>,
    turn: u64,
    arrived: u64,
    number: u64,
}

/// A request in a line, or one that has left it and may return.
pub(super) struct InLine {
    pub(super) line: Arc<Line>,
    pub(super) stands: bool,
    rank: Rank,
    fair: u32,
}

/// A request that leaves its lines, if their places in the store may have it still, and the line of the check that has removed it from
/// them, or [`NO_LINE`].
pub(super) type Unremoved<'a> = Option<(&'a Undecided, u64)>;

pub(super) fn find(id: u64) -> Option<Arc<Line>> {
    lock(&LINES).get(&id).cloned()
}

impl Line {
    /// Adds a request to the line of a key, behind those that have arrived before, or where it has stood before.
    pub(super) fn enter(
        lacking: &Lacking<'_>,
        waiter: &Arc<Waiter>,
        is_stored: bool,
        sent_at: Instant,
        before: Option<&InLine>,
    ) -> InLine {
        // The line is not removed while the table is locked.
        let mut lines = lock(&LINES);
        let line = lines.entry(lacking.line).or_insert_with(|| {
            Arc::new(Self {
                id: lacking.line,
                state: Mutex::default(),
                signal: LineSignal::of(lacking.line),
                #[cfg(feature = "admin")]
                subject: (
                    lacking.policy.context.store_id(),
                    lacking.policy.named().name.clone(),
                    lacking.policy.charge.key.clone(),
                ),
            })
        });
        let line = line.clone();
        let mut state = line.state();
        drop(lines);

        let Waiting { priority, fair, .. } = lacking.policy.waiting;
        // A line that has ended meanwhile has taken its turns with it.
        let turn = match before.filter(|before| Arc::ptr_eq(&before.line, &line)) {
            Some(before) => before.rank.turn,
            None => state.turn_of(lacking.policy.waiting),
        };
        let rank = Rank {
            priority: Reverse(priority),
            turn,
            arrived: waiter.arrived,
            number: waiter.number,
        };
        let is_first = state.waiting.first_key_value().is_none_or(|(first, _)| rank < *first);
        // Those behind it that have arrived before count as arrived with it, also for other processes.
        let behind = state.waiting.range(rank..).next();
        state.is_stale |= behind.is_some_and(|(behind, _)| behind.arrived < rank.arrived);
        state.newest = waiter.arrived.max(state.newest);
        let (waiter, cost) = (waiter.clone(), lacking.policy.charge.cost);
        state.waiting.insert(rank, Entry { waiter, cost, fair });
        state.weight += cost;
        if is_first {
            let due = lacking.due(sent_at);
            state.due = Some(state.due.map_or(due, |earlier| earlier.min(due)));
        }
        // A check that was sent since then has replaced the place.
        let is_replaced = state.sent_at.is_some_and(|sent| sent >= sent_at);
        let is_missing = !is_stored || state.waiting.len() > PLACE_SIZE;
        state.is_stale |= is_replaced || is_missing && state.is_in_place(&rank);
        let is_local = lacking.policy.local.is_some();
        if state.waiting.len() == 1 {
            state.is_local = is_local;
        }
        if state.is_local != is_local {
            // The others are elsewhere, until they are checked.
            (state.is_stale, state.stored_until) = (true, None);
        } else if state.waiting.len() <= PLACE_SIZE {
            let stored_until = sent_at + Duration::from_micros(PLACE_US);
            state.stored_until = state.stored_until.max(Some(stored_until));
        }
        line.signal.change();
        drop(state);
        line.ensure_task();
        InLine {
            line,
            stands: true,
            rank,
            fair,
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl InLine {
    /// Leaves the line. If it has left the line before, only its turn is regarded.
    pub(super) fn leave(&mut self, turn: Turn, unremoved: Unremoved<'_>) {
        let mut state = self.line.state();
        if mem::replace(&mut self.stands, false) {
            self.rank = state.rank_now(&self.rank);
        }
        let rank = self.rank;
        let was_in_place = state.is_in_place(&rank);
        let entry = state.waiting.remove(&rank);
        match turn {
            Turn::Stays => {}
            Turn::IsOver => state.admit(&rank),
            Turn::PassesOn => state.pass_on(rank, self.fair),
        }
        let Some(Entry { waiter, cost, .. }) = entry else {
            drop(state);
            self.line.signal.change();
            return;
        };
        state.weight -= cost;
        let counted_from = waiter.counted_from.load(Ordering::Relaxed);
        state.newest = counted_from.max(state.newest);
        // A check in another line does not know that this place has it as arrived with one ahead of it, nor that a check in this line has
        // sent it again.
        let may_be_there = counted_from > waiter.arrived || !state.checked.is_empty();
        let is_there = |led| led == NO_LINE || led != self.line.id && may_be_there;
        match unremoved.filter(|(_, led)| is_there(*led)) {
            // Others follow into the place of one that is admitted.
            None => state.is_stale |= matches!(turn, Turn::IsOver) && state.waiting.len() >= PLACE_SIZE,
            Some((left, _)) => {
                state.left = Some(left.again());
                state.is_stale |= was_in_place;
            }
        }
        let is_over = state.waiting.is_empty() && state.acts_by.is_none();
        drop(state);
        if is_over {
            self.line.end();
        }
        self.line.signal.change();
    }
}

impl State {
    /// The cost of the requests that come before one, less that of those which come before it by the place in the store.
    pub(super) fn ahead_of(&mut self, waiting: Waiting, comes: Comes, is_local: bool) -> i64 {
        self.begin_turns(waiting.fair);
        let entering = Rank {
            priority: Reverse(waiting.priority),
            turn: self.next_turn(waiting),
            arrived: comes.at,
            number: comes.number,
        };
        let rank = match comes.number {
            Comes::NEW => entering,
            _ => self.rank_now(&entering),
        };
        let ahead = match self.waiting.last_key_value() {
            Some((last, _)) if *last >= rank => self.waiting.range(..rank).map(|(_, entry)| entry.cost).sum(),
            _ => self.weight,
        };
        // The place may have expired, such as while nothing ran here, or be elsewhere.
        let is_stored = is_local == self.is_local && self.stored_until.is_some_and(|until| Instant::now() < until);
        let in_place = self.waiting.values().take(if is_stored { PLACE_SIZE } else { 0 });
        let before = in_place.filter(|entry| entry.waiter.counts_from() < comes.at);
        let before: u64 = before.map(|entry| entry.cost).sum();
        ahead as i64 - before as i64
    }

    /// Takes the turn of a request that enters.
    fn turn_of(&mut self, waiting: Waiting) -> u64 {
        self.begin_turns(waiting.fair);
        let turn = self.next_turn(waiting);
        if waiting.fair == 0 && self.turns.is_empty() {
            return turn;
        }
        let most = 2 * self.waiting.len() + PLACE_SIZE;
        if self.turns.len() > most {
            let admitted = &self.admitted;
            self.turns
                .retain(|(priority, _), last| admitted.get(priority).is_none_or(|turn| *last >= *turn));
            // Where nothing is admitted, none of them is over. A key that is forgotten may have another turn.
            if self.turns.len() > most {
                self.turns.clear();
            }
        }
        self.turns.insert((waiting.priority, waiting.fair), turn);
        turn
    }

    /// The turn of a request that enters: of each priority, keys take one after the other.
    fn next_turn(&self, waiting: Waiting) -> u64 {
        // As long as no request has a key, all have one turn.
        if waiting.fair == 0 && self.turns.is_empty() {
            return 0;
        }
        let now = self.turn_now(waiting.priority);
        let last = self.turns.get(&(waiting.priority, waiting.fair));
        last.map_or(now, |last| now.max(last + 1))
    }

    fn turn_now(&self, priority: i32) -> u64 {
        self.admitted.get(&priority).copied().unwrap_or_default()
    }

    /// Counts the turn of a request that is admitted.
    fn admit(&mut self, rank: &Rank) {
        if self.turns.is_empty() {
            return;
        }
        if self.admitted.len() > self.turns.len() {
            let turns = &self.turns;
            self.admitted
                .retain(|priority, _| turns.keys().any(|(other, _)| other == priority));
        }
        let turn = self.admitted.entry(rank.priority.0).or_default();
        *turn = rank.turn.max(*turn);
    }

    /// Gives those that wait turns, in their order, when the first one with a key comes.
    fn begin_turns(&mut self, key: u32) {
        if key == 0 || !self.turns.is_empty() {
            return;
        }
        for (rank, entry) in mem::take(&mut self.waiting) {
            let key = (rank.priority.0, entry.fair);
            let turn = self
                .turns
                .get(&key)
                .map_or_else(|| self.turn_now(key.0), |last| last + 1);
            self.turns.insert(key, turn);
            self.waiting.insert(Rank { turn, ..rank }, entry);
        }
    }

    /// Gives the turn of a request that has left to the next one of its key, and the turn of that one to the next but one.
    fn pass_on(&mut self, left: Rank, key: u32) {
        if self.turns.is_empty() {
            return;
        }
        let Rank { priority, mut turn, .. } = left;
        let later = self
            .waiting
            .iter()
            .filter(|(rank, entry)| entry.fair == key && rank.priority == priority && rank.turn > turn);
        let later: Vec<Rank> = later.map(|(rank, _)| *rank).collect();
        for rank in later {
            if let Some(entry) = self.waiting.remove(&rank) {
                self.waiting.insert(Rank { turn, ..rank }, entry);
            }
            turn = rank.turn;
            self.is_stale = true;
        }
        // The key has one turn less. Those that have stepped out keep theirs.
        let key = (priority.0, key);
        match self.turns.get(&key).map(|last| last.checked_sub(1)) {
            Some(Some(last)) => drop(self.turns.insert(key, last)),
            Some(None) => drop(self.turns.remove(&key)),
            None => {}
        }
    }

    /// The rank of a request that has entered with this one. It has another one if turns were passed on to it.
    fn rank_now(&self, entered: &Rank) -> Rank {
        if self.waiting.contains_key(entered) {
            return *entered;
        }
        let mut ranks = self.waiting.keys();
        *ranks.find(|rank| rank.number == entered.number).unwrap_or(entered)
    }

    /// Whether the place in the store contains the request with this rank.
    fn is_in_place(&self, rank: &Rank) -> bool {
        self.waiting.keys().nth(PLACE_SIZE).is_none_or(|behind| rank < behind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_turns_of_any_number_of_keys_take_bounded_memory() {
        let mut state = State::default();
        for fair in 1..10_000 {
            let waiting = Waiting {
                fair,
                ..Waiting::default()
            };
            state.turn_of(waiting);
            state.turn_of(waiting);
            assert!(state.turns.len() <= PLACE_SIZE + 2, "{fair}");
        }
    }

    #[test]
    fn the_turns_of_any_number_of_priorities_take_bounded_memory() {
        let mut state = State::default();
        for priority in 1..10_000 {
            let waiting = Waiting {
                priority,
                fair: 1,
                ..Waiting::default()
            };
            let turn = state.turn_of(waiting);
            state.admit(&Rank {
                priority: Reverse(priority),
                turn,
                arrived: 0,
                number: 0,
            });
            assert!(state.admitted.len() <= PLACE_SIZE + 3, "{priority}");
        }
    }
}
