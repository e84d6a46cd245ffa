//! Units that this process has taken ahead, by which requests of hot keys are decided without a call.
//!
//! A grant is a charge of units that no request has made yet. Requests use them until the time of the grant ends by the clock of this
//! process, which is counted from before the call; what is left then is refunded.

#[cfg(test)]
#[path = "simulation/prefetch.rs"]
mod simulation;

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until};

use super::{
    queues::CommitQueues,
    request::OwnedRequest,
    store::send,
    task::{DetachOnDrop, OnDrop},
};
use crate::{
    Limit,
    store::{
        Charge, ChargeState, ErrorKind, Operation, Outcome, Outstanding, OwedKind, StoreError, StoreFuture, StoreId,
        StoreRequest, StoreResponse,
    },
    sync::{Mutex, MutexGuard, unpoisoned},
};

/// The keys of limits with `prefetch`, by the hash of the charge.
#[derive(Default)]
pub(super) struct Prefetch {
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Default)]
struct Shard {
    keys: HashMap<u64, HotKey>,
    /// The keys for which a reset is under way. What Redis grants meanwhile may be counted after it.
    resetting: Vec<u64>,
    /// When idle keys were last removed.
    swept_at: Option<Instant>,
}

/// A key, how much its requests use, and the units that were taken for them.
struct HotKey {
    /// A check of its one charge.
    request: OwnedRequest,
    /// For how long units are taken ahead.
    time: Duration,
    /// What requests that were admitted have used in the time that began then, and in the time before.
    began: Instant,
    used: u64,
    used_before: u64,
    /// The oldest first.
    grants: Vec<Grant>,
    /// What was left in Redis by its last reply, which has counted the grants; 0 if that is not known.
    left: u64,
    /// When the grant was asked for that is to come, if there is one.
    requested_at: Option<Instant>,
    reset_at: Option<Instant>,
}

/// A request that Redis decides, and whose reply is to be [noted](Prefetch::note).
#[derive(Clone, Copy)]
pub(super) struct Sent {
    hash: u64,
    cost: u64,
    at: Instant,
}

/// Units that were charged in Redis, as far as no request has used them.
#[derive(Clone, Copy)]
struct Grant {
    units: u64,
    charged_at: Duration,
    requested_at: Instant,
    ends_at: Instant,
    /// When nothing of the key counts, as of the grant.
    resets_at: Instant,
}

const SHARDS: usize = 16;

/// The most keys of a shard.
const MOST_KEYS: usize = 1_024;

/// The least units of a grant: fewer are not worth a call. A key with fewer in the time of a grant is not hot.
const LEAST: u64 = 8;

/// The part of what is left that a grant may have, so that other processes have room, and near the limit Redis decides.
const SHARE: u64 = 4;

/// The time after which a task that holds a grant, or asks for one, is taken to have ended with its runtime.
const LOST_AFTER: Duration = Duration::from_secs(10);

/// The part of its time that a grant is not used for, since the clocks of this process and of Redis may run at different rates.
const MARGIN: u32 = 64;

impl Prefetch {
    /// The charge of a request that may be decided by a grant. Units that were taken ahead would overtake the requests in a line.
    #[inline]
    pub(super) fn charge_of<'a>(request: &'a StoreRequest<'_>) -> Option<(&'a Charge, Duration)> {
        let charge = request.plain_check()?;
        Some((charge, charge.limit().prefetch_time()?))
    }

    /// Uses units for a request, if there are enough. It returns also the request for more of them, if it is time for that.
    ///
    /// # Errors
    ///
    /// The request, if Redis has to decide it and its reply is to be noted.
    pub(super) fn use_for(
        &self,
        (charge, time): (&Charge, Duration),
        now: Instant,
    ) -> Result<(StoreResponse, Option<OwnedRequest>), Option<Sent>> {
        let (hash, cost) = (charge.hash, charge.cost());
        let mut shard = self.lock(hash);
        let sent = Some(Sent { hash, cost, at: now });
        let is_reset = shard.resetting.contains(&hash);
        match shard.keys.get_mut(&hash) {
            Some(key) if key.is_of(charge) => {
                let response = key.take(cost, now).ok_or(sent)?;
                key.count(cost, now);
                Ok((response, key.next_grant(now, is_reset)))
            }
            Some(key) => {
                // Its limit was changed, or another key has this hash. The units that were taken are refunded at their end.
                if key.is_idle(now) {
                    shard.keys.remove(&hash);
                }
                Err(None)
            }
            None => {
                let has_room = shard.has_room(time, now);
                if has_room {
                    shard.keys.insert(hash, HotKey::new(charge, time, now));
                }
                Err(sent.filter(|_| has_room))
            }
        }
    }

    /// Notes the reply of Redis to a request. It returns the request for units, if it is time for that.
    pub(super) fn note(&self, sent: Sent, response: &StoreResponse, now: Instant) -> Option<OwnedRequest> {
        // A denied request takes nothing from other processes, so it must not let this one take units either.
        let is_admitted = response.outcomes().first().is_some_and(|outcome| outcome.allowed);
        let mut shard = self.lock(sent.hash);
        let is_reset = shard.resetting.contains(&sent.hash);
        let key = shard.keys.get_mut(&sent.hash).filter(|_| is_admitted)?;
        // An earlier request may have been counted before the last grant.
        if key.grants.last().is_none_or(|grant| sent.at >= grant.requested_at) {
            key.left = left_by(response);
        }
        key.count(sent.cost, now);
        key.next_grant(now, is_reset)
    }

    /// Forgets the units of keys that are reset, now and when the result is dropped, once the reset has taken effect. None are asked for
    /// meanwhile.
    pub(super) fn begin_reset(
        self: &Arc<Self>,
        requests: &[OwnedRequest],
    ) -> Option<OnDrop<impl FnOnce() + Send + use<>>> {
        let resets = requests.iter().filter(|request| request.operation == Operation::Reset);
        // Also those without units ahead: an override of the same counts may take some.
        let hashes: Vec<_> = resets
            .flat_map(|request| request.charges())
            .map(|charge| charge.hash)
            .collect();
        hashes.iter().for_each(|hash| self.forget(*hash).resetting.push(*hash));
        (!hashes.is_empty()).then(|| {
            let prefetch = self.clone();
            OnDrop::new(move || {
                for hash in hashes {
                    let mut shard = prefetch.forget(hash);
                    let begun = shard.resetting.iter().position(|other| *other == hash);
                    begun.map(|place| shard.resetting.swap_remove(place));
                }
            })
        })
    }

    fn forget(&self, hash: u64) -> MutexGuard<'_, Shard> {
        let mut shard = self.lock(hash);
        if let Some(key) = shard.keys.get_mut(&hash) {
            key.grants.clear();
            key.reset_at = Some(Instant::now());
        }
        shard
    }

    /// Asks for units, and keeps what Redis grants until its end.
    pub(super) fn take_ahead(self: &Arc<Self>, queues: &Arc<CommitQueues>, request: OwnedRequest) {
        let (prefetch, backend) = (self.clone(), queues.backend.clone());
        let queues = Arc::downgrade(queues);
        backend.spawn(async move {
            let Some(store) = queues.upgrade() else { return };
            let hash = request.charge(0).hash;
            let mut owed = Outstanding::of(Some(StoreId::of(&store)))
                .owe(OwedKind::Settlement)
                .due();
            let requested_at = Instant::now();
            let response = send(store, request.clone()).await;
            let Some(grant) = prefetch.keep(hash, &request, response.as_ref().ok(), requested_at) else {
                return match &response {
                    // Redis may have charged the units, and nothing returns them.
                    Err(error) if !matches!(error.kind(), ErrorKind::Refused | ErrorKind::Invalid) => {
                        owed.count_if_lost(None);
                        owed.end(&response);
                    }
                    Ok(_) | Err(_) => owed.confirm(),
                };
            };
            sleep_until(grant.ends_at).await;
            let unused = prefetch.end(hash, &grant);
            if unused == 0 {
                return owed.confirm();
            }
            let refund = Operation::Refund {
                admitted_at: grant.charged_at,
            };
            // What stays of the grant is not known: units that were used may have been refunded.
            let refund = request.at_cost(refund, unused);
            owed.count_if_lost(None);
            if let Some(store) = queues.upgrade() {
                owed.end(&send(store, refund).await);
            }
        });
    }

    /// Keeps what Redis has granted.
    fn keep(
        &self,
        hash: u64,
        request: &OwnedRequest,
        response: Option<&StoreResponse>,
        requested_at: Instant,
    ) -> Option<Grant> {
        let mut shard = self.lock(hash);
        let key = shard.keys.get_mut(&hash)?;
        key.requested_at = None;
        // It may have been counted before the counts were removed.
        let response = response.filter(|_| key.reset_at.is_none_or(|reset_at| requested_at > reset_at))?;
        key.left = left_by(response);
        let outcome = response.outcomes().first().filter(|outcome| outcome.allowed)?;
        let (state, charge) = (outcome.states().first()?, request.charge(0));
        let grant = Grant {
            units: charge.cost(),
            charged_at: state.decided_at.unwrap_or(response.server_time),
            requested_at,
            ends_at: requested_at + lifetime(charge.limit(), key.time, state.reset_after),
            resets_at: requested_at + state.reset_after,
        };
        key.grants.push(grant);
        Some(grant)
    }

    /// Ends a grant, and returns what was not used of it.
    fn end(&self, hash: u64, grant: &Grant) -> u64 {
        let mut shard = self.lock(hash);
        let Some(key) = shard.keys.get_mut(&hash) else { return 0 };
        let is_it = |other: &Grant| other.charged_at == grant.charged_at && other.requested_at == grant.requested_at;
        let ended = key.grants.extract_if(.., |other| is_it(other));
        let unused = ended.map(|ended| ended.units).sum();
        key.left += unused;
        unused
    }

    fn lock(&self, hash: u64) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[(hash >> 32) as usize % SHARDS]; // the table takes other bits
        unpoisoned(shard.lock())
    }
}

/// For how long the units of a grant are used, from before the call, by the clock of this process.
fn lifetime(limit: &Limit, time: Duration, reset_after: Duration) -> Duration {
    // The units of a window end with it.
    let ends = if matches!(limit, Limit::FixedWindow(_)) {
        reset_after
    } else {
        Duration::MAX
    };
    let time = time.min(ends);
    time - time / MARGIN
}

/// What a reply says is left of the limit of its one charge.
fn left_by(response: &StoreResponse) -> u64 {
    let states = response.outcomes().iter().flat_map(Outcome::states);
    states.map(|state| state.remaining).min().unwrap_or_default()
}

impl Shard {
    /// Whether there is room for another key. Callers choose keys, so idle ones are looked for only once in the time of a grant.
    fn has_room(&mut self, time: Duration, now: Instant) -> bool {
        if self.keys.len() >= MOST_KEYS && self.swept_at.is_none_or(|swept_at| now >= swept_at + time) {
            self.keys.retain(|_, key| !key.is_idle(now));
            self.swept_at = Some(now);
        }
        self.keys.len() < MOST_KEYS
    }
}

impl HotKey {
    fn new(charge: &Charge, time: Duration, now: Instant) -> Self {
        Self {
            request: StoreRequest::new(Operation::Check, [charge]).to_owned(|_| {}),
            time,
            began: now,
            used: 0,
            used_before: 0,
            grants: Vec::new(),
            left: 0,
            requested_at: None,
            reset_at: None,
        }
    }

    fn is_of(&self, charge: &Charge) -> bool {
        let own = self.request.charge(0);
        own.counts_with(charge) && own.limit() == charge.limit()
    }

    fn is_idle(&self, now: Instant) -> bool {
        let has_ended = |grant: &Grant| now >= grant.ends_at + LOST_AFTER;
        now >= self.began + 2 * self.time && !self.is_requesting(now) && self.grants.iter().all(has_ended)
    }

    fn is_requesting(&self, now: Instant) -> bool {
        self.requested_at
            .is_some_and(|requested_at| now < requested_at + LOST_AFTER)
    }

    /// Counts what a request that was admitted has used.
    fn count(&mut self, cost: u64, now: Instant) {
        if now >= self.began + self.time {
            let is_next = now < self.began + 2 * self.time;
            self.used_before = if is_next { self.used } else { 0 };
            (self.used, self.began) = (0, now);
            self.grants.retain(|grant| now < grant.ends_at + LOST_AFTER);
        }
        self.used = self.used.saturating_add(cost);
    }

    /// Uses units of the oldest grant that has enough.
    fn take(&mut self, cost: u64, now: Instant) -> Option<StoreResponse> {
        let usable = |grant: &&mut Grant| now < grant.ends_at && grant.units >= cost;
        let grant = self.grants.iter_mut().find(usable)?;
        grant.units -= cost;
        let grant = *grant;
        let quota = self.request.charge(0).limit().quota();
        let remaining = (self.left + self.available(now)).min(quota);
        let reset_after = grant.resets_at.saturating_duration_since(now);
        let state = ChargeState::new(remaining, None, reset_after);
        let outcome = Outcome::new(true, [state.at(grant.charged_at)]);
        let server_time = grant.charged_at + now.saturating_duration_since(grant.requested_at);
        Some(StoreResponse::without_reply(server_time, [outcome]))
    }

    fn available(&self, now: Instant) -> u64 {
        let usable = self.grants.iter().filter(|grant| now < grant.ends_at);
        usable.map(|grant| grant.units).sum()
    }

    /// The request for as many units as were used in the last time of a grant, if less than half of that is there.
    fn next_grant(&mut self, now: Instant, is_reset: bool) -> Option<OwnedRequest> {
        let (wanted, available) = (self.used.max(self.used_before), self.available(now));
        let units = wanted.saturating_sub(available).min(self.left / SHARE);
        if is_reset || self.is_requesting(now) || 2 * available > wanted || units < LEAST {
            return None;
        }
        self.requested_at = Some(now);
        Some(self.request.at_cost(Operation::Check, units))
    }
}

/// The response to requests of which some may be resets. These end without their caller, so that units which Redis grants before them
/// are forgotten.
pub(super) fn pending(
    queues: &Arc<CommitQueues>,
    resetting: Option<OnDrop<impl FnOnce() + Send + 'static>>,
    response: impl Future<Output = Result<StoreResponse, StoreError>> + Send + 'static,
) -> StoreFuture {
    match resetting {
        None => StoreFuture::pending(response),
        Some(resetting) => {
            let store = (StoreId::of(queues), queues.backend.runtime.clone());
            let reset = async move {
                let response = response.await;
                drop(resetting);
                response
            };
            // What is never polled is not sent.
            StoreFuture::pending(async move { DetachOnDrop::refunding(store, reset).await })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, pin::Pin, task::Poll};

    use fastrand::Rng;
    use tokio::{runtime::Builder, task::JoinSet, time::sleep};

    use super::*;
    use crate::Key;
    use crate::{
        FixedWindow, SlidingLog, TokenBucket,
        store::{
            Store,
            redis::{
                simulation::{
                    faults::Faults,
                    network::{EPOCH, Network, simulated_backend},
                    seeds,
                },
                store::RedisStore,
            },
        },
    };

    const QUOTA: u64 = 500;
    const WINDOW: Duration = Duration::from_millis(500);
    const TIME: Duration = Duration::from_millis(40);

    /// When a unit was admitted, in microseconds by the clock of the server, and by which request.
    type Admitted = Vec<u64>;

    fn store(network: &Network) -> RedisStore {
        let backend = simulated_backend(network.clone());
        RedisStore::new(CommitQueues::new(backend))
    }

    fn limits() -> [Limit; 5] {
        [
            SlidingLog::new(QUOTA, WINDOW).prefetch(TIME).into(),
            SlidingLog::new(QUOTA, WINDOW).precision(20).prefetch(TIME).into(),
            FixedWindow::new(QUOTA, WINDOW).prefetch(TIME).into(),
            FixedWindow::new(QUOTA, WINDOW).aligned().prefetch(TIME).into(),
            TokenBucket::new(QUOTA, WINDOW).prefetch(TIME).into(),
        ]
    }

    /// Sends one request, and returns when it was admitted, if it was.
    async fn send_one(store: &RedisStore, limit: &Limit, cost: u64, started: Instant) -> Option<u64> {
        let key = Key::from("hot");
        send_charges(store, &[Charge::new("p", limit, &key, cost)], started).await
    }

    /// The same with a charge of another policy, which often denies.
    async fn send_pair(store: &RedisStore, limit: &Limit, cost: u64, started: Instant) -> Option<u64> {
        let (key, other) = (Key::from("hot"), Limit::from(TokenBucket::new(QUOTA / 20, WINDOW)));
        let charges = [
            Charge::new("p", limit, &key, cost),
            Charge::new("q", &other, &key, cost),
        ];
        send_charges(store, &charges, started).await
    }

    async fn send_charges(store: &RedisStore, charges: &[Charge], started: Instant) -> Option<u64> {
        let called_at = started.elapsed().as_micros() as u64;
        let request = StoreRequest::new(Operation::Check, charges);
        let response = store.decide(&[request]).await.ok()?;
        let decided_at = match response.is_reply() {
            true => response.server_time.as_micros() as u64 - EPOCH,
            false => called_at,
        };
        response.outcomes()[0].allowed.then_some(decided_at)
    }

    /// Sends requests for a while, and returns when each unit was admitted.
    async fn send_many(store: RedisStore, limit: Limit, started: Instant, seed: u64, mut rng: Rng) -> Admitted {
        let mut admitted = Admitted::new();
        while started.elapsed() < 4 * WINDOW {
            let cost = rng.u64(2..=8);
            let decided_at = match rng.u32(..8) {
                0 => send_pair(&store, &limit, cost, started).await,
                _ => send_one(&store, &limit, cost, started).await,
            };
            if let Some(decided_at) = decided_at {
                admitted.extend((0..cost).map(|_| decided_at));
            }
            // Busy and quiet times are those of all callers.
            let phase = Rng::with_seed(seed ^ (started.elapsed().as_millis() / 30) as u64).u32(..4);
            let longest = [300, 3_000, 10_000, 40_000][phase as usize];
            sleep(Duration::from_micros(rng.u64(..longest))).await;
        }
        admitted
    }

    /// What three processes with two callers each have admitted together, in the order of time.
    fn admitted(limit: &Limit, seed: u64) -> Admitted {
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let (network, started, mut rng) = (Network::new(seed, false), Instant::now(), Rng::with_seed(seed));
            network.set_faults(Faults::at_random(&mut rng));
            let mut callers = JoinSet::new();
            for _ in 0..3 {
                let store = store(&network);
                for _ in 0..2 {
                    let caller = send_many(store.clone(), limit.clone(), started, seed, rng.fork());
                    callers.spawn(caller);
                }
            }
            let mut all = Admitted::new();
            while let Some(admitted) = callers.join_next().await {
                all.extend(admitted.expect("no panic"));
            }
            all.sort_unstable();
            all
        })
    }

    /// Panics if more than the quota was admitted.
    fn assert_holds(limit: &Limit, all: &[u64], seed: u64) {
        let window = WINDOW.as_micros() as u64;
        for (position, first) in all.iter().enumerate() {
            let after = |units: u64| all.get(position + units as usize).copied().unwrap_or(u64::MAX);
            let is_kept = match limit {
                Limit::SlidingLog(_) => after(QUOTA) >= first + window,
                Limit::FixedWindow(fixed) if fixed.is_aligned() => after(QUOTA) / window > first / window,
                Limit::FixedWindow(_) => after(2 * QUOTA - 1) >= first + window,
                Limit::SlidingCounter(_) | Limit::Concurrency(_) | Limit::Unlimited | Limit::DenyAll => false,
                Limit::TokenBucket(_) => all[position..].iter().zip(0..).all(|(at, more)| {
                    let come = ((at - first) * QUOTA).div_ceil(window);
                    more < QUOTA + come.max(1)
                }),
            };
            assert!(is_kept, "{limit}: too many from {first} us on, seed {seed}");
        }
    }

    /// One process uses a few units all the time, and stops when it has some. It uses what it has later, and another one all that is
    /// left.
    async fn taken_in_turn(limit: &Limit, used_for: u64, stops_after: Duration, pause: Duration) -> Admitted {
        let (network, started) = (Network::new(1, false), Instant::now());
        let [first, other] = [store(&network), store(&network)];
        let mut all = Admitted::new();
        sleep(stops_after - Duration::from_millis(used_for)).await;
        while started.elapsed() < stops_after {
            all.extend(send_one(&first, limit, 2, started).await.iter().flat_map(|at| [*at; 2]));
            sleep(Duration::from_micros(2_700)).await;
        }
        sleep(pause).await;
        let all_that_is_left = [200, 100, 100, 50, 50, 20, 20, 10, 10, 5, 5, 2, 2, 1, 1];
        for (store, costs) in [(&first, &[2; 20][..]), (&other, &all_that_is_left)] {
            let mut sent = JoinSet::new();
            for cost in costs.iter().copied() {
                let (store, limit) = (store.clone(), limit.clone());
                sent.spawn(async move { (cost, send_one(&store, &limit, cost, started).await) });
            }
            while let Some(result) = sent.join_next().await {
                let (cost, decided_at) = result.expect("no panic");
                all.extend(decided_at.iter().flat_map(|at| std::iter::repeat_n(at, cost as usize)));
            }
        }
        all.sort_unstable();
        all
    }

    #[tokio::test(start_paused = true)]
    async fn units_that_are_used_late_are_within_the_quota() {
        for limit in limits() {
            for (used_for, stops_after) in [100, 300]
                .into_iter()
                .flat_map(|used| (460..520).step_by(6).map(move |at| (used, at)))
            {
                for pause in (0..38).step_by(4) {
                    let [stops_after, pause] = [stops_after, pause].map(Duration::from_millis);
                    let all = taken_in_turn(&limit, used_for, stops_after, pause).await;
                    assert_holds(&limit, &all, stops_after.as_millis() as u64);
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_hot_key_needs_few_calls_and_what_is_not_used_is_returned() {
        for limit in limits() {
            let (network, started) = (Network::new(1, false), Instant::now());
            let store = store(&network);
            let mut admitted = 0;
            for _ in 0..100 {
                admitted += u64::from(send_one(&store, &limit, 1, started).await.is_some());
                sleep(Duration::from_micros(500)).await;
            }
            assert_eq!(admitted, 100, "{limit}");
            assert!(network.calls() < 60, "{limit}: {} calls", network.calls());

            store
                .drained(Duration::from_secs(5))
                .await
                .expect("the network is good");
            let key = Key::from("hot");
            let charges = [Charge::new("p", &limit, &key, 1)];
            let left = store
                .decide(&[StoreRequest::new(Operation::Peek, &charges)])
                .await
                .expect("the network is good");
            let left = left.outcomes()[0].states()[0].remaining;
            let least = limit.quota() - 100;
            assert!(left >= least, "{limit}: {left} of {least}");
            if matches!(limit, Limit::SlidingLog(_) | Limit::FixedWindow(_)) {
                assert_eq!(left, least, "{limit}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_is_not_hot_is_decided_by_redis() {
        for limit in limits() {
            let (network, started) = (Network::new(1, false), Instant::now());
            let store = store(&network);
            for calls in 1..20 {
                assert!(send_one(&store, &limit, 1, started).await.is_some());
                assert_eq!(network.calls(), calls + 1, "{limit}, and one call to learn the script");
                sleep(TIME / 4).await;
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_keys_take_bounded_memory_and_make_room_when_they_are_idle() {
        let (prefetch, limit) = (Prefetch::default(), &limits()[0]);
        let use_key = |number: u64| {
            let key = Key::from(number);
            let charge = Charge::new("p", limit, &key, 1);
            let _ = prefetch.use_for((&charge, TIME), Instant::now());
        };
        let length = || {
            prefetch
                .shards
                .iter()
                .map(|shard| shard.lock().unwrap().keys.len())
                .sum::<usize>()
        };
        (0..40_000).for_each(use_key);
        assert_eq!(length(), SHARDS * MOST_KEYS);
        tokio::time::advance(3 * TIME).await;
        (40_000..40_100).for_each(use_key);
        assert!(length() < SHARDS * MOST_KEYS / 2, "{} keys", length());
    }

    /// Uses one unit of the key `hot` of a limit so often, and notes that much is left. The last request for units, if there is one.
    fn heat(prefetch: &Prefetch, limit: &Limit, times: u64) -> Option<OwnedRequest> {
        let charge = Charge {
            hash: HASH,
            ..Charge::new("p", limit, &Key::from("hot"), 1)
        };
        let outcome = Outcome::new(true, [ChargeState::new(QUOTA / 2, None, WINDOW)]);
        let response = StoreResponse::new(Duration::ZERO, [outcome]);
        (0..times).fold(None, |asked, _| {
            let more = match prefetch.use_for((&charge, TIME), Instant::now()) {
                Ok((_, more)) => more,
                Err(sent) => prefetch.note(sent.expect("it is noted"), &response, Instant::now()),
            };
            asked.or(more)
        })
    }

    /// That of the key `hot`.
    const HASH: u64 = 7;

    fn granted(units: u64) -> StoreResponse {
        let outcome = Outcome::new(true, [ChargeState::new(QUOTA / 2 - units, None, WINDOW)]);
        StoreResponse::new(Duration::from_secs(1), [outcome])
    }

    #[tokio::test(start_paused = true)]
    async fn units_of_a_runtime_that_has_ended_are_asked_for_again_and_forgotten() {
        let (prefetch, limit) = (Prefetch::default(), &limits()[0]);
        let asked = heat(&prefetch, limit, 20).expect("it is hot");
        assert!(heat(&prefetch, limit, 20).is_none(), "one grant at a time");
        tokio::time::advance(2 * LOST_AFTER).await;
        assert!(
            heat(&prefetch, limit, 20).is_some(),
            "the task with the first one is gone"
        );

        let grant = prefetch.keep(HASH, &asked, Some(&granted(8)), Instant::now());
        assert!(grant.is_some(), "it is kept");
        tokio::time::advance(2 * LOST_AFTER).await;
        let shard = prefetch.lock(HASH);
        assert!(shard.keys[&HASH].is_idle(Instant::now()), "no task ends the grant");
        drop(shard);
        heat(&prefetch, limit, 1);
        assert!(prefetch.lock(HASH).keys[&HASH].grants.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_left_is_known_by_the_last_grant_and_its_end() {
        let (prefetch, limit) = (Prefetch::default(), &limits()[0]);
        let left = || prefetch.lock(HASH).keys[&HASH].left;
        let sent = Sent {
            hash: HASH,
            cost: 1,
            at: Instant::now(),
        };
        tokio::time::advance(Duration::from_millis(1)).await;
        let asked = heat(&prefetch, limit, 20).expect("it is hot");
        let grant = prefetch.keep(HASH, &asked, Some(&granted(8)), Instant::now());
        let grant = grant.expect("it is kept");
        assert_eq!(left(), QUOTA / 2 - 8);
        prefetch.note(sent, &granted(0), Instant::now());
        assert_eq!(left(), QUOTA / 2 - 8, "it may have been counted before the grant");
        assert_eq!(prefetch.end(HASH, &grant), 8);
        assert_eq!(left(), QUOTA / 2, "what was not used is returned");
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_than_the_quota_remains() {
        let (prefetch, limit) = (Prefetch::default(), &limits()[0]);
        let asked = heat(&prefetch, limit, 20).expect("it is hot");
        let outcome = Outcome::new(true, [ChargeState::new(QUOTA, None, WINDOW)]);
        let response = StoreResponse::new(Duration::from_secs(1), [outcome]);
        let _ = prefetch.keep(HASH, &asked, Some(&response), Instant::now());
        let charge = Charge {
            hash: HASH,
            ..Charge::new("p", limit, &Key::from("hot"), 1)
        };
        let used = prefetch.use_for((&charge, TIME), Instant::now());
        let (response, _) = used.ok().expect("units are there");
        assert_eq!(response.outcomes()[0].states()[0].remaining, QUOTA);
    }

    #[tokio::test(start_paused = true)]
    async fn units_of_another_quota_are_not_used() {
        let (prefetch, limit) = (Prefetch::default(), &limits()[0]);
        let asked = heat(&prefetch, limit, 20).expect("it is hot");
        let grant = prefetch.keep(HASH, &asked, Some(&granted(8)), Instant::now());
        assert!(grant.is_some());
        let lower = Limit::from(SlidingLog::new(QUOTA / 2, WINDOW).prefetch(TIME));
        for (limit, is_used) in [(&lower, false), (limit, true)] {
            let charge = Charge {
                hash: HASH,
                ..Charge::new("p", limit, &Key::from("hot"), 1)
            };
            assert_eq!(
                prefetch.use_for((&charge, TIME), Instant::now()).is_ok(),
                is_used,
                "{limit}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_was_hot_long_ago_asks_for_nothing() {
        let (prefetch, limit) = (Prefetch::default(), &limits()[0]);
        for (pause, is_hot) in [(TIME, true), (3 * TIME, false)] {
            let asked = heat(&prefetch, limit, 20).expect("it is hot");
            let _ = prefetch.keep(HASH, &asked, None, Instant::now());
            tokio::time::advance(pause).await;
            let asked = heat(&prefetch, limit, 1);
            assert_eq!(asked.is_some(), is_hot, "{pause:?}");
            if let Some(asked) = asked {
                let _ = prefetch.keep(HASH, &asked, None, Instant::now());
            }
            tokio::time::advance(3 * TIME).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_has_asked_for_units_is_not_idle() {
        let (prefetch, [limit, other, ..]) = (Prefetch::default(), &limits());
        let (requested_at, asked) = (Instant::now(), heat(&prefetch, limit, 20).expect("it is hot"));
        tokio::time::advance(3 * TIME).await;
        let charge = Charge {
            hash: HASH,
            ..Charge::new("p", other, &Key::from("hot"), 1)
        };
        let _ = prefetch.use_for((&charge, TIME), Instant::now());
        let grant = prefetch.keep(HASH, &asked, Some(&granted(8)), requested_at);
        assert!(grant.is_some(), "units that are not kept are not returned");
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_whose_limit_was_changed_takes_units_again_when_those_of_before_have_ended() {
        let (prefetch, [limit, other, ..]) = (Prefetch::default(), &limits());
        assert!(heat(&prefetch, limit, 20).is_some());
        let charge = Charge {
            hash: HASH,
            ..Charge::new("p", other, &Key::from("hot"), 1)
        };
        let is_noted = || {
            let used = prefetch.use_for((&charge, TIME), Instant::now());
            used.is_err_and(|sent| sent.is_some())
        };
        assert!(!is_noted() && !is_noted());
        tokio::time::advance(2 * LOST_AFTER).await;
        let _ = is_noted(); // it finds them ended
        assert!(is_noted());
    }

    #[tokio::test(start_paused = true)]
    async fn units_that_were_asked_for_before_a_reset_are_not_used() {
        let (prefetch, limit) = (Arc::new(Prefetch::default()), &limits()[0]);
        let (requested_at, asked) = (Instant::now(), heat(&prefetch, limit, 20).expect("it is hot"));
        let reset = asked.at_cost(Operation::Reset, 1);
        let resetting = prefetch.begin_reset(&[reset]);
        assert!(prefetch.keep(HASH, &asked, Some(&granted(8)), requested_at).is_none());
        assert!(
            heat(&prefetch, limit, 20).is_none(),
            "they would be forgotten, and not be returned"
        );

        // On another connection, on which Redis may have granted them before.
        let keeps = async || {
            tokio::time::advance(Duration::from_millis(1)).await;
            let requested_at = Instant::now();
            prefetch.keep(HASH, &asked, Some(&granted(8)), requested_at).is_some()
        };
        assert!(keeps().await);
        drop(resetting);
        assert!(prefetch.lock(HASH).keys[&HASH].grants.is_empty());
        assert!(prefetch.lock(HASH).resetting.is_empty());
        assert!(heat(&prefetch, limit, 20).is_some());
        assert!(keeps().await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reset_forgets_what_was_taken() {
        let limit = &limits()[0];
        assert_reset_forgets(limit, limit).await;
        // The policy has no units ahead, and an override of the key has.
        assert_reset_forgets(limit, &SlidingLog::new(QUOTA, WINDOW).into()).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_reset_whose_caller_leaves_forgets_units_until_redis_has_replied() {
        let limit = &limits()[0];
        let (network, started, key) = (Network::new(1, false), Instant::now(), Key::from("hot"));
        let store = store(&network);
        assert!(send_one(&store, limit, 1, started).await.is_some());
        let prefetch = &store.prefetch;
        let mut hashes = prefetch
            .shards
            .iter()
            .flat_map(|shard| shard.lock().unwrap().keys.keys().copied().collect::<Vec<_>>());
        let hash = hashes.next().expect("a key");

        let charges = [Charge::new("p", limit, &key, 1)];
        let calls = network.calls();
        drop(store.decide(&[StoreRequest::new(Operation::Reset, &charges)]));
        sleep(Duration::from_secs(1)).await;
        assert_eq!(network.calls(), calls, "it was not polled");

        let mut reset = store.decide(&[StoreRequest::new(Operation::Reset, &charges)]);
        assert!(
            poll_fn(|cx| Poll::Ready(Pin::new(&mut reset).poll(cx)))
                .await
                .is_pending()
        );
        drop(reset);
        // On another connection, on which Redis may have granted them before.
        tokio::time::advance(Duration::from_micros(1)).await;
        let asked = heat(&Arc::default(), limit, 20).expect("it is hot");
        assert!(prefetch.keep(hash, &asked, Some(&granted(8)), Instant::now()).is_some());
        sleep(Duration::from_secs(1)).await;
        assert!(prefetch.lock(hash).keys[&hash].grants.is_empty());
    }

    async fn assert_reset_forgets(limit: &Limit, of_reset: &Limit) {
        let (network, started) = (Network::new(1, false), Instant::now());
        let (store, key) = (store(&network), Key::from("hot"));
        for _ in 0..60 {
            assert!(send_one(&store, limit, 1, started).await.is_some());
            sleep(Duration::from_micros(500)).await;
        }
        let charges = [Charge::new("p", of_reset, &key, 1)];
        let reset = store.decide(&[StoreRequest::new(Operation::Reset, &charges)]).await;
        assert!(reset.is_ok());
        let peeked = store
            .decide(&[StoreRequest::new(Operation::Peek, &charges)])
            .await
            .expect("the network is good");
        assert_eq!(peeked.outcomes()[0].states()[0].remaining, QUOTA);
        let calls = network.calls();
        assert!(send_one(&store, limit, 1, started).await.is_some());
        assert!(network.calls() > calls, "Redis has decided");
    }

    #[cfg(feature = "metrics")]
    #[tokio::test(start_paused = true)]
    async fn units_that_cannot_be_given_back_are_counted_as_lost() {
        let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
        let scraped = recorder.handle();
        let _guard = metrics::set_default_local_recorder(&recorder);
        let (network, started) = (Network::new(1, false), Instant::now());
        let store = store(&network);
        for _ in 0..60 {
            assert!(send_one(&store, &limits()[0], 1, started).await.is_some());
            sleep(Duration::from_micros(500)).await;
        }
        network.cut_off();
        let undrained = store.drained(Duration::from_secs(60)).await.unwrap_err().to_string();
        let mut numbers = undrained.split(' ').filter_map(|word| word.parse::<u64>().ok());
        let (lost, scraped) = (numbers.next().expect("a number"), scraped.render());
        let counted = format!("tower_quota_lost_settlements_total {lost}\n");
        assert!(lost > 0 && scraped.contains(&counted), "{undrained}: {scraped}");
    }

    #[cfg(feature = "metrics")]
    #[tokio::test(start_paused = true)]
    async fn units_whose_reply_is_lost_stay_charged_and_are_counted_as_lost() {
        for (refused, lost) in [(false, 1), (true, 0)] {
            let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
            let _guard = metrics::set_default_local_recorder(&recorder);
            let (network, started, limit, key) =
                (Network::new(1, false), Instant::now(), &limits()[0], Key::from("hot"));
            let store = store(&network);
            assert!(send_one(&store, limit, 1, started).await.is_some());
            let asked = heat(&Prefetch::default(), limit, 20).expect("it is hot");
            match refused {
                true => network.refuse(),
                false => network.lose_replies(),
            }
            store.prefetch.take_ahead(&store.queues, asked);
            tokio::task::yield_now().await; // the units are asked for
            let drained = store.drained(Duration::from_secs(60)).await;
            assert_eq!(drained.is_err(), lost > 0, "{drained:?}");
            let scraped = recorder.handle().render();
            let counted = scraped.contains(&format!("tower_quota_lost_settlements_total {lost}\n"));
            assert_eq!(counted, lost > 0, "{scraped}");

            network.heal();
            let charges = [Charge::new("p", limit, &key, 1)];
            let peeked = store.decide(&[StoreRequest::new(Operation::Peek, &charges)]).await;
            let remaining = peeked.expect("the network is good").outcomes()[0].states()[0].remaining;
            assert_eq!(remaining < QUOTA - 1, lost > 0, "{remaining}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reset_that_is_not_sent_forgets_nothing() {
        let (network, started) = (Network::new(1, false), Instant::now());
        let (store, limit, key) = (store(&network), &limits()[0], Key::from("hot"));
        for _ in 0..60 {
            assert!(send_one(&store, limit, 1, started).await.is_some());
            sleep(Duration::from_micros(500)).await;
        }
        network.cut_off();
        let charge = |key| [Charge::new("p", limit, key, 1)];
        let decide = async |operation, charges: &[Charge]| store.decide(&[StoreRequest::new(operation, charges)]).await;
        for _ in 0..3 {
            assert!(decide(Operation::Peek, &charge(&key)).await.is_err());
        }
        let calls = network.calls();
        assert!(decide(Operation::Reset, &charge(&key)).await.is_err());
        assert_eq!(network.calls(), calls, "the breaker is open");
        assert!(send_one(&store, limit, 1, started).await.is_some());
    }

    /// Limits with a window that does not end, without units ahead and with them.
    fn long_limits() -> impl Iterator<Item = Limit> {
        let texts = [
            "sliding-log 500/h",
            "sliding-log 500/h precision 20",
            "fixed-window 500/h",
            "fixed-window 500/h aligned",
            "token-bucket 500/h",
        ];
        let parse = |text: String| text.parse().expect("a limit");
        ["", " prefetch 40ms"]
            .into_iter()
            .flat_map(move |ahead| texts.map(|text| parse(format!("{text}{ahead}"))))
    }

    /// Which requests of random costs three processes admit, in which others are denied if there are free riders.
    async fn admitted_beside(free_riders: bool, limit: &Limit, seed: u64) -> Vec<bool> {
        let (network, started, mut rng) = (Network::new(seed, false), Instant::now(), Rng::with_seed(seed));
        let stores = [(); 3].map(|()| store(&network));
        let (mut all, mut used) = (Vec::new(), 0);
        for number in 1..=30 {
            let (at, cost) = (started + number * 5 * TIME, rng.u64(1..=60));
            sleep_until(at - TIME / 2).await;
            let mut riders = JoinSet::new();
            for _ in 0..if free_riders && used > 0 { 12 } else { 0 } {
                let (store, limit) = (fastrand::choice(&stores).expect("three").clone(), limit.clone());
                let too_much = fastrand::u64(limit.quota() - used / 2..=limit.quota());
                riders.spawn(async move { send_one(&store, &limit, too_much, started).await });
            }
            while let Some(rider) = riders.join_next().await {
                assert_eq!(rider.expect("no panic"), None, "{limit}: denied");
            }
            sleep_until(at).await;
            let store = rng.choice(&stores).expect("three");
            let is_admitted = send_one(store, limit, cost, started).await.is_some();
            used += if is_admitted { cost } else { 0 };
            all.push(is_admitted);
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_is_only_denied_changes_nothing_that_another_process_admits() {
        for limit in long_limits() {
            for seed in 0..4 {
                let [alone, beside] = [
                    admitted_beside(false, &limit, seed).await,
                    admitted_beside(true, &limit, seed).await,
                ];
                assert_eq!(beside, alone, "{limit}, seed {seed}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn remaining_of_a_request_without_a_call_is_about_what_all_processes_have_left() {
        for limit in long_limits() {
            for processes in [1, 3] {
                let network = Network::new(1, false);
                let stores: Vec<_> = (0..processes).map(|_| store(&network)).collect();
                let (key, mut without_call, quota) = (Key::from("hot"), 0, limit.quota());
                for number in 1..=120 {
                    let charges = [Charge::new("p", &limit, &key, 3)];
                    let request = [StoreRequest::new(Operation::Check, &charges)];
                    let response = stores[number as usize % processes].decide(&request).await;
                    let response = response.expect("the network is good");
                    if !response.is_reply() {
                        without_call += 1;
                        let (remaining, left) = (response.outcomes()[0].states()[0].remaining, quota - 3 * number);
                        let error = remaining.abs_diff(left);
                        // Units that other processes have in hand count as used.
                        let unknown = if processes == 1 { quota / 50 } else { quota / 4 };
                        assert!(error <= unknown, "{limit}: {remaining} of {left}");
                    }
                    sleep(Duration::from_micros(300)).await;
                }
                let is_ahead = limit.prefetch_time().is_some();
                assert_eq!(without_call > 20, is_ahead, "{limit}: {without_call} without a call");
            }
        }
    }

    #[test]
    fn no_window_holds_more_than_the_quota() {
        seeds(11, |seed| {
            let limit = &limits()[seed as usize % 5];
            let all = admitted(limit, seed);
            assert!(all.len() as u64 > QUOTA, "{limit}: {} units, seed {seed}", all.len());
            assert_holds(limit, &all, seed);
        });
    }
}
