use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hashbrown::{HashTable, hash_table::Entry};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    ask::{Ask, Debit, Names},
    commit_queue::{Place, QueuedRequest},
    script::Said,
};
use crate::store::{
    Charge, ChargeState, Operation, Outcome, StoreError, StoreRequest, StoreResponse,
    fold::{Folded, fold},
};

/// Remembers denials, so that those who are denied again and again do not ask Redis each time.
///
/// Until the wait is over, and for a second at most, a denied request is denied again: the same policies with the same
/// numbers for the same keys, at the same cost or a higher one. Nothing but a reset or a refund makes room earlier. Those
/// of this process are seen at once; others, and a clock that is set forward, when the second is over.
pub(super) struct DenyCache {
    tables: Box<[Mutex<Table>]>,
    /// One changes whenever what counts on a key is taken back; keys share them.
    stamps: Box<[AtomicU64]>,
}

#[derive(Default)]
struct Table {
    denials: HashTable<Denial>,
    /// The hashes and serials of the denials, oldest first, and of some that were replaced.
    order: VecDeque<(u64, u64)>,
    serial: u64,
}

struct Denial {
    hash: u64,
    serial: u64,
    debits: SmallVec<[Debit; 1]>,
    stamp: u64,
    states: SmallVec<[ChargeState; 1]>,
    server_time: Duration,
    answered_at: Instant,
    /// Reckoned from before Redis was asked.
    expires_at: Instant,
}

const CAPACITY: usize = 10_000;
const LONGEST: Duration = Duration::from_secs(1);
const TABLES: usize = 16;
const STAMPS: usize = 1_024;

impl DenyCache {
    pub(super) fn new() -> Self {
        Self {
            tables: (0..TABLES).map(|_| Mutex::default()).collect(),
            stamps: (0..STAMPS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Denies what was denied a moment ago, if nothing was taken back since.
    pub(super) fn answer(&self, names: &Names, request: &StoreRequest<'_>, now: Instant) -> Option<StoreResponse> {
        if request.operation() != Operation::Check {
            return None;
        }
        let Folded { charges, folds, .. } = fold(request);
        let hashes: SmallVec<[u64; 1]> = charges.iter().map(|charge| names.hash(charge)).collect();
        let hash = joint_hash(&hashes);

        let table = self.table(hash);
        let denial = table.denials.find(hash, |denial| {
            let same = |(debit, charge): (&Debit, &Charge<'_>)| {
                debit.limit == *charge.limit() && names.are_of(&debit.key, charge)
            };
            denial.debits.len() == charges.len() && denial.debits.iter().zip(&*charges).all(same)
        })?;
        let dearer = |(denied, asked): (&Debit, &Charge<'_>)| denied.cost <= asked.cost();
        let holds = denial.expires_at > now
            && denial.stamp == self.stamp_of_all(&hashes)
            && denial.debits.iter().zip(&*charges).all(dearer);
        if !holds {
            return None;
        }

        let passed = now.saturating_duration_since(denial.answered_at);
        let states = folds.unfold(&denial.states).map(|verdict| later(&verdict, passed));
        let outcome = Outcome::new(false, states);
        Some(StoreResponse::new(denial.server_time + passed, [outcome]))
    }

    /// What tells, later, whether anything was taken back since.
    pub(super) fn stamp(&self, ask: &Ask) -> u64 {
        self.stamp_of_all(&hashes(&ask.debits))
    }

    fn stamp_of_all(&self, hashes: &[u64]) -> u64 {
        // Each only grows, so the sum is the same only if they are.
        let stamps = hashes.iter().map(|hash| self.stamp_of(*hash));
        stamps.map(|stamp| stamp.load(Ordering::Acquire)).sum()
    }

    /// The stamp once these requests, which are those of the check itself, have taken back what they charged.
    pub(super) fn stamp_after(&self, stamp: u64, ask: &Ask, refunds: &[Ask]) -> u64 {
        let refunded = refunds.iter().flat_map(|refund| &refund.debits);
        let counted = refunded.map(|refund| {
            let shares = |debit: &&Debit| std::ptr::eq(self.stamp_of(debit.hash), self.stamp_of(refund.hash));
            ask.debits.iter().filter(shares).count() as u64
        });
        stamp + counted.sum::<u64>()
    }

    /// Forgets the denials of what these requests take back.
    pub(super) fn forget(&self, asks: &[Ask]) {
        let takers = asks
            .iter()
            .filter(|ask| matches!(ask.operation, Operation::Reset | Operation::Refund { .. }));
        for debit in takers.flat_map(|ask| &ask.debits) {
            self.stamp_of(debit.hash).fetch_add(1, Ordering::Release);
        }
    }

    /// Learns from an answer: from a denial, and from what was taken back.
    pub(super) fn learn(&self, request: &QueuedRequest, places: &[Place], said: &Result<Said, StoreError>) {
        // Also if it failed: it may have been done.
        self.forget(&request.asks);

        if let (Some(stamp), [ask], [place], Ok(said)) = (request.stamp, &request.asks[..], places, said)
            && let Ok(tally) = &said.tallies[place.question]
            && place.nth == tally.admitted
        {
            self.remember(ask, request.asked_at, stamp, said.server_time, &tally.states);
        }
    }

    /// Remembers a denial. The request was asked at that time, and with that stamp.
    pub(super) fn remember(
        &self,
        ask: &Ask,
        asked_at: Instant,
        stamp: u64,
        server_time: Duration,
        states: &[ChargeState],
    ) {
        let Some(wait) = states.iter().filter_map(|verdict| verdict.retry_after).max() else {
            return;
        };
        let answered_at = Instant::now();
        let expires_at = asked_at + wait.min(LONGEST);
        if ask.operation != Operation::Check || expires_at <= answered_at {
            return;
        }

        let hash = joint_hash(&hashes(&ask.debits));
        self.table(hash).insert(Denial {
            hash,
            serial: 0,
            debits: ask.debits.clone(),
            stamp,
            states: states.into(),
            server_time,
            answered_at,
            expires_at,
        });
    }

    fn stamp_of(&self, hash: u64) -> &AtomicU64 {
        &self.stamps[hash as usize % STAMPS]
    }

    fn table(&self, hash: u64) -> MutexGuard<'_, Table> {
        // Within the table, the bits at both ends are used. Nothing panics while it is locked.
        self.tables[(hash >> 32) as usize % TABLES]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn hashes(debits: &[Debit]) -> SmallVec<[u64; 1]> {
    debits.iter().map(|debit| debit.hash).collect()
}

fn joint_hash(hashes: &[u64]) -> u64 {
    hashes.iter().fold(0, |joint, hash| joint.rotate_left(1) ^ hash)
}

impl Table {
    /// Adds a denial, at the cost of the oldest one.
    fn insert(&mut self, mut denial: Denial) {
        self.serial += 1;
        denial.serial = self.serial;
        self.order.push_back((denial.hash, denial.serial));

        let same = |other: &Denial| same_keys(&other.debits, &denial.debits);
        match self.denials.entry(denial.hash, same, |denial| denial.hash) {
            Entry::Occupied(mut earlier) => *earlier.get_mut() = denial,
            Entry::Vacant(vacant) => {
                vacant.insert(denial);
            }
        }

        if self.order.len() > CAPACITY / TABLES
            && let Some((hash, serial)) = self.order.pop_front()
            && let Ok(oldest) = self.denials.find_entry(hash, |denial| denial.serial == serial)
        {
            oldest.remove();
        }
    }
}

fn same_keys(a: &[Debit], b: &[Debit]) -> bool {
    let same = |(a, b): (&Debit, &Debit)| a.key == b.key && a.limit == b.limit;
    a.len() == b.len() && a.iter().zip(b).all(same)
}

/// The same verdict, when so much time has passed.
fn later(verdict: &ChargeState, passed: Duration) -> ChargeState {
    let left = |span: Duration| span.saturating_sub(passed);
    ChargeState::new(
        verdict.remaining,
        verdict.retry_after.map(left).filter(|wait| !wait.is_zero()),
        left(verdict.reset_after),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use crate::{Key, Limit, SlidingLog};

    static NAMES: LazyLock<Names> = LazyLock::new(|| Names::new("quota", None));

    struct Question {
        limit: Limit,
        key: Key,
        cost: u64,
    }

    impl Question {
        fn new(key: &str, limit: u64, cost: u64) -> Self {
            Self {
                limit: SlidingLog::per_minute(limit).into(),
                key: key.into(),
                cost,
            }
        }

        fn charge(&self) -> Charge<'_> {
            Charge::new("p", &self.limit, &self.key, self.cost)
        }

        fn ask(&self, operation: Operation) -> Ask {
            Ask::new(&NAMES, &StoreRequest::new(operation, &[self.charge()]))
        }
    }

    fn cached(cache: &DenyCache, question: &Question, now: Instant) -> Option<StoreResponse> {
        cache.answer(&NAMES, &StoreRequest::new(Operation::Check, &[question.charge()]), now)
    }

    const WAIT: Duration = Duration::from_millis(400);

    fn deny(cache: &DenyCache, question: &Question, asked_at: Instant) {
        let verdict = ChargeState::new(1, Some(WAIT), Duration::from_secs(5));
        let ask = question.ask(Operation::Check);
        cache.remember(&ask, asked_at, cache.stamp(&ask), Duration::from_secs(9), &[verdict]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_denial_holds_until_the_wait_is_over_and_its_wait_runs_down() {
        let (cache, question, start) = (DenyCache::new(), Question::new("a", 5, 1), Instant::now());
        deny(&cache, &question, start);

        tokio::time::advance(Duration::from_millis(300)).await;
        let answer = cached(&cache, &question, Instant::now()).expect("it is denied still");
        assert_eq!(answer.server_time, Duration::from_millis(9_300));
        let verdict = answer.outcomes[0].states[0];
        assert_eq!(verdict.remaining, 1);
        assert_eq!(verdict.retry_after, Some(Duration::from_millis(100)));
        assert_eq!(verdict.reset_after, Duration::from_millis(4_700));

        assert!(cached(&cache, &question, start + WAIT - Duration::from_micros(1)).is_some());
        assert_eq!(cached(&cache, &question, start + WAIT), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_denial_holds_from_before_redis_was_asked() {
        let (cache, question, start) = (DenyCache::new(), Question::new("a", 5, 1), Instant::now());
        tokio::time::advance(Duration::from_millis(150)).await;
        deny(&cache, &question, start);

        assert_eq!(cached(&cache, &question, start + WAIT), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_wait_is_remembered_for_a_second() {
        let (cache, question, start) = (DenyCache::new(), Question::new("a", 5, 1), Instant::now());
        let (ask, hour) = (question.ask(Operation::Check), Duration::from_secs(3_600));
        cache.remember(
            &ask,
            start,
            cache.stamp(&ask),
            hour,
            &[ChargeState::new(0, Some(hour), hour)],
        );

        assert!(cached(&cache, &question, start + LONGEST - Duration::from_micros(1)).is_some());
        assert_eq!(cached(&cache, &question, start + LONGEST), None);
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_same_numbers_for_the_same_key_at_no_lower_cost_are_denied() {
        let (cache, now) = (DenyCache::new(), Instant::now());
        deny(&cache, &Question::new("a", 5, 2), now);

        assert!(cached(&cache, &Question::new("a", 5, 2), now).is_some());
        assert!(cached(&cache, &Question::new("a", 5, 3), now).is_some());
        assert_eq!(cached(&cache, &Question::new("a", 5, 1), now), None);
        assert_eq!(cached(&cache, &Question::new("a", 6, 2), now), None);
        assert_eq!(cached(&cache, &Question::new("b", 5, 2), now), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_taken_back_is_seen_at_once() {
        let (cache, question, now) = (DenyCache::new(), Question::new("a", 5, 1), Instant::now());
        deny(&cache, &question, now);
        cache.forget(&[question.ask(Operation::Reset)]);
        assert_eq!(cached(&cache, &question, now), None);

        // Denied by Redis before it was taken back, heard of afterwards.
        let ask = question.ask(Operation::Check);
        let stamp = cache.stamp(&ask);
        cache.forget(&[question.ask(Operation::Reset)]);
        cache.remember(&ask, now, stamp, WAIT, &[ChargeState::new(0, Some(WAIT), WAIT)]);
        assert_eq!(cached(&cache, &question, now), None);

        deny(&cache, &question, now);
        assert!(cached(&cache, &question, now).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_bounded_and_the_oldest_leave_first() {
        let (cache, now) = (DenyCache::new(), Instant::now());
        for number in 0..50_000 {
            deny(&cache, &Question::new(&number.to_string(), 5, 1), now);
        }

        let held = |cache: &DenyCache| -> (usize, usize) {
            let tables = cache.tables.iter().map(|table| table.lock().unwrap());
            tables.fold((0, 0), |(denials, order), table| {
                (denials + table.denials.len(), order + table.order.len())
            })
        };
        assert!(
            held(&cache).0 <= CAPACITY && held(&cache).1 <= CAPACITY,
            "{:?}",
            held(&cache)
        );
        assert!(held(&cache).0 > CAPACITY / 2);
        assert!(cached(&cache, &Question::new("49999", 5, 1), now).is_some());
        assert_eq!(cached(&cache, &Question::new("0", 5, 1), now), None);

        for _ in 0..50_000 {
            deny(&cache, &Question::new("0", 5, 1), now);
        }
        assert!(held(&cache).1 <= CAPACITY, "{:?}", held(&cache));
    }
}
