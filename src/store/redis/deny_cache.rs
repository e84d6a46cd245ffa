use std::{collections::VecDeque, time::Duration};

use hashbrown::HashTable;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::request::OwnedRequest;
use crate::{
    store::{Charge, ChargeState, Operation, Outcome, StoreRequest, StoreResponse},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
        unpoisoned,
    },
};

/// Caches denials, so that repeated denied checks are not sent to Redis.
///
/// Until its `retry_after`, for at most 1 s, a denial applies to checks of the same policies with the same limits and keys, at
/// the same cost or a higher one. A denial of slots, or of a policy with waits, is not cached: there can be room at any time. Nor is
/// that of a cost above the limit, which is never admitted. Of a request with bans, only a denial by a ban in force is cached, until
/// the ban ends: others are counted in Redis. Only a reset or a refund can make room earlier. Those of this process invalidate the
/// denial at once; those of other processes, and a clock that is set forward, are seen after 1 s at most.
pub(super) struct DenyCache {
    shards: Box<[Mutex<Shard>]>,
    /// One is incremented for each reset or refund; each is that of many keys.
    generations: Box<[AtomicU64]>,
}

/// The sum of the generations of the keys of a request: it changes with each reset or refund of one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Generation(u64);

#[derive(Default)]
struct Shard {
    denials: HashTable<Denial>,
    /// The hashes and serials of the denials, oldest first, and of some that were replaced.
    order: VecDeque<(u64, u64)>,
    serial: u64,
}

struct Denial {
    hash: u64,
    serial: u64,
    request: OwnedRequest,
    generation: Generation,
    states: SmallVec<[ChargeState; 1]>,
    server_time: Duration,
    received_at: Instant,
    expires_at: Instant,
}

const CAPACITY: usize = 10_000;
const MAX_AGE: Duration = Duration::from_secs(1);
const SHARDS: usize = 16;
const GENERATIONS: usize = 1_024;

impl DenyCache {
    pub(super) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            generations: (0..GENERATIONS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The response to a check if its denial is cached.
    pub(super) fn get(&self, request: &StoreRequest<'_>, now: Instant) -> Option<StoreResponse> {
        if !request.is_check() || request.may_change_early() {
            return None;
        }
        let hash = combined_hash(request);
        let shard = self.shard(hash);
        let denial = shard
            .denials
            .find(hash, |denial| same_counts(&denial.request, request))?;
        let mut costs = denial.request.charges().zip(request.charges());
        let is_valid = denial.expires_at > now
            && denial.generation == self.generation(request)
            && costs.all(|(denied, charge)| denied.cost() <= charge.cost());
        if !is_valid {
            return None;
        }

        let elapsed = now.saturating_duration_since(denial.received_at);
        let states = denial.states.iter().map(|state| state_after(state, elapsed));
        Some(StoreResponse::without_reply(
            denial.server_time + elapsed,
            [Outcome::new(false, states)],
        ))
    }

    /// The generation of a request, to be read before it is sent.
    pub(super) fn generation(&self, request: &StoreRequest<'_>) -> Generation {
        // Each only increases, so the sum is equal only if they are.
        let counters = request.charges().map(|charge| self.counter(charge.hash));
        Generation(counters.map(|counter| counter.load(Ordering::Acquire)).sum())
    }

    /// The generation of a request after refunds of its own charges.
    pub(super) fn generation_after_refunds(
        &self,
        generation: Generation,
        request: &OwnedRequest,
        refunds: &[OwnedRequest],
    ) -> Generation {
        let refunded = refunds.iter().flat_map(|refund| refund.charges());
        let increments = refunded.map(|refund| {
            let shares_counter = |charge: &&Charge| std::ptr::eq(self.counter(charge.hash), self.counter(refund.hash));
            request.charges().filter(shares_counter).count() as u64
        });
        Generation(generation.0 + increments.sum::<u64>())
    }

    /// Invalidates the denials of the keys that these requests reset or refund.
    pub(super) fn invalidate(&self, requests: &[OwnedRequest]) {
        for request in requests {
            let makes_room = matches!(request.operation, Operation::Reset | Operation::Refund { .. });
            if makes_room {
                for charge in request.charges() {
                    self.counter(charge.hash).fetch_add(1, Ordering::Release);
                }
            }
        }
    }

    /// Caches the denial of a check that was made at this time and had this generation before it was sent.
    pub(super) fn insert(
        &self,
        request: &OwnedRequest,
        made_at: Instant,
        generation: Generation,
        server_time: Duration,
        states: &[ChargeState],
    ) {
        if !request.is_check() || request.may_change_early() {
            return;
        }
        let has_bans = request.charges().any(|charge| charge.ban.is_some());
        let denies_for = states.iter().filter_map(|state| {
            if has_bans {
                return state.banned_for();
            }
            state.retry_after
        });
        let Some(denies_for) = denies_for.max() else {
            return;
        };
        let received_at = Instant::now();
        // Redis decides after the request was made, so its wait does not end earlier than this.
        let expires_at = made_at + denies_for.min(MAX_AGE);
        if expires_at <= received_at {
            return;
        }

        let hash = combined_hash(request);
        self.shard(hash).insert(Denial {
            hash,
            serial: 0,
            request: request.clone(),
            generation,
            states: states.into(),
            server_time,
            received_at,
            expires_at,
        });
    }

    fn counter(&self, hash: u64) -> &AtomicU64 {
        &self.generations[hash as usize % GENERATIONS]
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // Other bits than those that the table of the shard uses.
        unpoisoned(self.shards[(hash >> 32) as usize % SHARDS].lock())
    }
}

fn combined_hash(request: &StoreRequest<'_>) -> u64 {
    let hashes = request.charges().map(|charge| charge.hash);
    hashes.fold(0, |combined, hash| u64::rotate_left(combined, 1) ^ hash)
}

impl Shard {
    /// Adds a denial, and removes the oldest one if the shard is full.
    fn insert(&mut self, mut denial: Denial) {
        self.serial += 1;
        denial.serial = self.serial;
        self.order.push_back((denial.hash, denial.serial));

        let same = |other: &Denial| same_counts(&other.request, &denial.request);
        let entry = self.denials.entry(denial.hash, same, |denial| denial.hash);
        entry.insert(denial);

        if self.order.len() > CAPACITY / SHARDS
            && let Some((hash, serial)) = self.order.pop_front()
            && let Ok(oldest) = self.denials.find_entry(hash, |denial| denial.serial == serial)
        {
            oldest.remove();
        }
    }
}

/// Whether both are checks of the same counts by the same limits, at any costs.
fn same_counts(denied: &OwnedRequest, request: &StoreRequest<'_>) -> bool {
    let same = |(denied, charge): (&Charge, &Charge)| {
        let bans = denied.ban_for(Operation::Check) == charge.ban_for(Operation::Check);
        denied.counts_with(charge) && denied.limit() == charge.limit() && bans
    };
    denied.charge_count() == request.charge_count() && denied.charges().zip(request.charges()).all(same)
}

/// The state of a denied charge after this time. One that would wait by then does not deny.
fn state_after(state: &ChargeState, elapsed: Duration) -> ChargeState {
    let left = |span: Duration| span.saturating_sub(elapsed);
    ChargeState::new(
        state.remaining,
        state.retry_after.map(left).filter(|wait| !wait.is_zero()),
        left(state.reset_after),
    )
    .banned(state.banned_for().map_or(Duration::ZERO, left))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Ban, Concurrency, Key, Limit, SlidingLog,
        store::{
            Store, StoreRequest,
            redis::{
                queues::CommitQueues,
                simulation::network::{Network, simulated_backend},
                store::RedisStore,
            },
        },
    };

    struct TestCharge {
        limit: Limit,
        key: Key,
        cost: u64,
    }

    impl TestCharge {
        fn new(key: &str, limit: u64, cost: u64) -> Self {
            Self {
                limit: SlidingLog::per_minute(limit).into(),
                key: key.into(),
                cost,
            }
        }

        fn charge(&self) -> Charge {
            Charge::new("p", &self.limit, &self.key, self.cost)
        }

        fn request(&self, operation: Operation) -> OwnedRequest {
            StoreRequest::new(operation, &[self.charge()]).to_owned(|_| {})
        }
    }

    fn cached(cache: &DenyCache, charge: &TestCharge, now: Instant) -> Option<StoreResponse> {
        let charges = [charge.charge()];
        cache.get(&StoreRequest::new(Operation::Check, &charges), now)
    }

    const WAIT: Duration = Duration::from_millis(400);
    const MICRO: Duration = Duration::from_micros(1);

    fn deny(cache: &DenyCache, charge: &TestCharge, made_at: Instant) {
        let state = ChargeState::new(1, Some(WAIT), Duration::from_secs(5));
        let check = charge.request(Operation::Check);
        cache.insert(
            &check,
            made_at,
            cache.generation(&check),
            Duration::from_secs(9),
            &[state],
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_denial_is_valid_until_its_retry_after_which_decreases() {
        let (cache, charge, start) = (DenyCache::new(), TestCharge::new("a", 5, 1), Instant::now());
        deny(&cache, &charge, start);

        tokio::time::advance(Duration::from_millis(300)).await;
        let response = cached(&cache, &charge, Instant::now()).expect("the denial is valid");
        assert_eq!(response.server_time, Duration::from_millis(9_300));
        let state = response.outcomes[0].states[0];
        assert_eq!(state.remaining, 1);
        assert_eq!(state.retry_after, Some(Duration::from_millis(100)));
        assert_eq!(state.reset_after, Duration::from_millis(4_700));

        assert!(cached(&cache, &charge, start + WAIT - Duration::from_micros(1)).is_some());
        assert_eq!(cached(&cache, &charge, start + WAIT), None);
    }

    #[tokio::test(start_paused = true)]
    async fn only_denials_of_checks_of_counts_are_cached() {
        let (plain, start) = (TestCharge::new("a", 5, 1), Instant::now());
        let slots = TestCharge {
            limit: Concurrency::new(5).into(),
            ..TestCharge::new("a", 5, 1)
        };
        let ban = Ban::by_hand();
        let charges = [plain.charge().ban(&ban)];
        let with_bans = StoreRequest::new(Operation::Check, &charges).to_owned(|_| {});
        tokio::time::advance(WAIT).await;
        for (request, made_at, is_cached) in [
            (plain.request(Operation::Check), start + MICRO, true),
            (plain.request(Operation::Check), start, false),
            (plain.request(Operation::Wait), start + MICRO, false),
            (plain.request(Operation::Peek), start + MICRO, false),
            (slots.request(Operation::Check), start + MICRO, false),
            (with_bans, start + MICRO, false),
        ] {
            let cache = DenyCache::new();
            let states = vec![ChargeState::new(1, Some(WAIT), Duration::from_secs(5)); request.charge_count()];
            let generation = cache.generation(&request);
            cache.insert(&request, made_at, generation, Duration::from_secs(9), &states);
            let shards = cache.shards.iter();
            let denials: usize = shards.map(|shard| shard.lock().expect("no panic").denials.len()).sum();
            assert_eq!(denials, usize::from(is_cached), "{request:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_a_denial_starts_when_the_request_is_made() {
        let (cache, charge, start) = (DenyCache::new(), TestCharge::new("a", 5, 1), Instant::now());
        tokio::time::advance(Duration::from_millis(150)).await;
        deny(&cache, &charge, start);

        assert_eq!(cached(&cache, &charge, start + WAIT), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_denial_with_a_long_wait_is_valid_for_a_second() {
        let (cache, charge, start) = (DenyCache::new(), TestCharge::new("a", 5, 1), Instant::now());
        let (check, hour) = (charge.request(Operation::Check), Duration::from_secs(3_600));
        cache.insert(
            &check,
            start,
            cache.generation(&check),
            hour,
            &[ChargeState::new(0, Some(hour), hour)],
        );

        assert!(cached(&cache, &charge, start + MAX_AGE - Duration::from_micros(1)).is_some());
        assert_eq!(cached(&cache, &charge, start + MAX_AGE), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_denial_applies_to_the_same_limit_and_key_at_no_lower_cost() {
        let (cache, now) = (DenyCache::new(), Instant::now());
        deny(&cache, &TestCharge::new("a", 5, 2), now);

        assert!(cached(&cache, &TestCharge::new("a", 5, 2), now).is_some());
        assert!(cached(&cache, &TestCharge::new("a", 5, 3), now).is_some());
        assert_eq!(cached(&cache, &TestCharge::new("a", 5, 1), now), None);
        assert_eq!(cached(&cache, &TestCharge::new("a", 6, 2), now), None);
        assert_eq!(cached(&cache, &TestCharge::new("b", 5, 2), now), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_ban_denies_the_charges_of_the_same_bans_until_it_ends() {
        let (cache, plain, start) = (DenyCache::new(), TestCharge::new("a", 5, 1), Instant::now());
        let (ban, other) = (Ban::by_hand(), Ban::after(3, Duration::from_secs(60)));
        let of = |charge: Charge| {
            let check = StoreRequest::new(Operation::Check, std::slice::from_ref(&charge));
            let cached = cache.get(&check, Instant::now());
            cached.map(|response| response.outcomes[0].states[0].banned_for())
        };
        let charges = [plain.charge().ban(&ban)];
        let check = StoreRequest::new(Operation::Check, &charges).to_owned(|_| {});
        let state = ChargeState::new(1, None, Duration::ZERO).banned(WAIT);
        cache.insert(
            &check,
            start,
            cache.generation(&check),
            Duration::from_secs(9),
            &[state],
        );

        tokio::time::advance(WAIT / 4).await;
        assert_eq!(of(charges[0].clone()), Some(Some(WAIT * 3 / 4)));
        assert_eq!(of(plain.charge()), None);
        assert_eq!(of(plain.charge().ban(&other)), None);
        tokio::time::advance(WAIT * 3 / 4).await;
        assert_eq!(of(charges[0].clone()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn each_policy_of_a_cached_denial_denies_until_its_own_wait_ends() {
        let (cache, start) = (DenyCache::new(), Instant::now());
        let charges = ["a", "b"].map(|key| TestCharge::new(key, 5, 1).charge());
        let check = StoreRequest::new(Operation::Check, &charges);
        let states = [WAIT, 2 * WAIT].map(|wait| ChargeState::new(0, Some(wait), 2 * WAIT));
        let request = check.to_owned(|_| {});
        let generation = cache.generation(&request);
        cache.insert(&request, start, generation, Duration::from_secs(9), &states);

        tokio::time::advance(WAIT).await;
        let denied = cache.get(&check, Instant::now()).expect("`b` denies");
        let waits = denied.outcomes[0].states.iter().map(|state| state.retry_after);
        assert_eq!(waits.collect::<Vec<_>>(), [None, Some(WAIT)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reset_invalidates_a_denial() {
        let (cache, charge, now) = (DenyCache::new(), TestCharge::new("a", 5, 1), Instant::now());
        deny(&cache, &charge, now);
        cache.invalidate(&[charge.request(Operation::Reset)]);
        assert_eq!(cached(&cache, &charge, now), None);

        // Redis denies before the reset, and the reply arrives after it.
        let check = charge.request(Operation::Check);
        let generation = cache.generation(&check);
        cache.invalidate(&[charge.request(Operation::Reset)]);
        cache.insert(&check, now, generation, WAIT, &[ChargeState::new(0, Some(WAIT), WAIT)]);
        assert_eq!(cached(&cache, &charge, now), None);

        deny(&cache, &charge, now);
        assert!(cached(&cache, &charge, now).is_some());
    }

    /// A reply to a check that Redis has received before may come at any time until its own reply.
    #[tokio::test(start_paused = true)]
    async fn a_reset_or_a_refund_invalidates_denials_when_it_is_sent_and_when_it_has_its_reply() {
        let mut backend = simulated_backend(Network::new(0, false));
        backend.deny_cache = Some(DenyCache::new());
        let store = RedisStore::new(CommitQueues::new(backend));
        let cache = store.queues.backend.deny_cache.as_ref().expect("it is on");
        let (charge, now) = (TestCharge::new("a", 5, 1), Instant::now());
        let admitted_at = Duration::ZERO;
        for operation in [Operation::Reset, Operation::Refund { admitted_at }] {
            deny(cache, &charge, now);
            let sent = store.decide(&[charge.request(operation)]);
            assert_eq!(cached(cache, &charge, now), None);
            deny(cache, &charge, now);
            assert!(cached(cache, &charge, now).is_some());
            sent.await.expect("the network is good");
            assert_eq!(cached(cache, &charge, now), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_cache_is_bounded_and_evicts_the_oldest_denials() {
        let (cache, now) = (DenyCache::new(), Instant::now());
        for number in 0..50_000 {
            deny(&cache, &TestCharge::new(&number.to_string(), 5, 1), now);
        }

        let held = |cache: &DenyCache| -> (usize, usize) {
            let shards = cache.shards.iter().map(|shard| shard.lock().unwrap());
            shards.fold((0, 0), |(denials, order), shard| {
                (denials + shard.denials.len(), order + shard.order.len())
            })
        };
        assert!(
            held(&cache).0 <= CAPACITY && held(&cache).1 <= CAPACITY,
            "{:?}",
            held(&cache)
        );
        assert!(held(&cache).0 > CAPACITY / 2);
        assert!(cached(&cache, &TestCharge::new("49999", 5, 1), now).is_some());
        assert_eq!(cached(&cache, &TestCharge::new("0", 5, 1), now), None);

        for _ in 0..50_000 {
            deny(&cache, &TestCharge::new("0", 5, 1), now);
        }
        assert!(held(&cache).1 <= CAPACITY, "{:?}", held(&cache));
    }

    #[cfg(feature = "loom")]
    mod threads {
        use loom::{model, sync::Arc, thread::spawn};

        use super::*;

        /// What the server replies is behind a lock, since it executes one call at a time.
        #[test]
        fn a_denial_that_a_reset_overtakes_is_not_cached() {
            model(|| {
                let (cache, full) = (Arc::new(DenyCache::new()), Arc::new(Mutex::new(true)));
                let checked = spawn({
                    let (cache, full) = (cache.clone(), full.clone());
                    move || {
                        let (charge, made_at) = (TestCharge::new("a", 5, 1), Instant::now());
                        let check = charge.request(Operation::Check);
                        let generation = cache.generation(&check);
                        if *full.lock().expect("no panic") {
                            let state = ChargeState::new(1, Some(WAIT), WAIT);
                            cache.insert(&check, made_at, generation, WAIT, &[state]);
                        }
                    }
                });
                let charge = TestCharge::new("a", 5, 1);
                let reset = [charge.request(Operation::Reset)];
                *full.lock().expect("no panic") = false;
                cache.invalidate(&reset);
                assert!(cached(&cache, &charge, Instant::now()).is_none());
                checked.join().expect("no panic");
                assert!(cached(&cache, &charge, Instant::now()).is_none());
            });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_denial_of_several_charges_is_valid_until_the_last_of_them_fits() {
        let (cache, start) = (DenyCache::new(), Instant::now());
        let charges = ["a", "b"].map(|key| TestCharge::new(key, 5, 1).charge());
        let request = StoreRequest::new(Operation::Check, &charges);
        let states = [WAIT / 2, WAIT].map(|wait| ChargeState::new(1, Some(wait), Duration::from_secs(5)));
        let generation = cache.generation(&request);
        let check = request.to_owned(|_| {});
        cache.insert(&check, start, generation, Duration::from_secs(9), &states);
        assert!(cache.get(&request, start + WAIT - MICRO).is_some());
        assert!(cache.get(&request, start + WAIT).is_none());
    }
}
