//! Two versions of a policy on one Redis, as while a new version is deployed: each process has its own numbers, and all have the
//! same counts.
//!
//! Two stores with a connection each send random requests, and a memory store decides the same timelines. No request may fail, no
//! version may admit more than its own numbers allow beside all that counts, and nothing that counts may be forgotten.
//! `TOWER_QUOTA_SEED` repeats a timeline.

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use fastrand::Rng;
use tower_quota::{
    Ban, Concurrency, FixedWindow, Key, Limit,
    store::{Charge, ChargeState, LeaseId, Operation, Outcome, Store, StoreRequest},
};

use crate::{
    model::number,
    support::{Clock, Redis},
};

const MILLISECOND: u64 = 1_000;

/// How many requests a timeline has.
const STEPS: usize = 120;

/// How many timelines of each kind each store has; `TOWER_QUOTA_TIMELINES` replaces it.
fn timelines() -> u64 {
    number("TOWER_QUOTA_TIMELINES").unwrap_or(40)
}

/// What a request has done, as it is printed if the timeline fails.
#[derive(Default)]
struct History(Vec<String>);

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

/// The stores of the processes, with one clock, and their random requests.
struct Processes<'a> {
    stores: Vec<&'a dyn Store>,
    clock: &'a Clock,
    redis: Option<&'a Redis>,
    rng: Rng,
    seed: u64,
    versions: String,
    history: History,
}

impl Processes<'_> {
    /// Moves the clock, often to the end of one of these lengths after something that was counted.
    async fn wait(&mut self, ends: &[u64], lengths: &[u64]) {
        let length = lengths[self.rng.usize(..lengths.len())];
        let now = self.clock.now();
        let next = match self.rng.u32(..12) {
            0..=3 => now,
            4 | 5 => now + self.rng.u64(..4),
            6..=8 => now + self.rng.u64(..=length / 4),
            9 | 10 if !ends.is_empty() => ends[self.rng.usize(..ends.len())] + length + 1 - self.rng.u64(..3),
            11 if self.rng.bool() => now + 2 * length,
            _ => now + self.rng.u64(..=length),
        };
        self.clock.set(next.max(now));
        if let Some(redis) = self.redis {
            self.clock.write_to(redis).await;
        }
    }

    /// A request of one of the processes. None may fail.
    async fn send(&mut self, operation: Operation, charges: &[Charge]) -> Outcome {
        let store = self.stores[self.rng.usize(..self.stores.len())];
        let response = store.decide(&[StoreRequest::new(operation, charges)]).await;
        let parts = charges
            .iter()
            .map(|charge| format!("{} of {}", charge.cost(), charge.limit()));
        let parts: Vec<_> = parts.collect();
        let at = self.clock.now() - Clock::new().now();
        self.history
            .0
            .push(format!("{at}: {operation:?}, {}: {response:?}", parts.join(", ")));
        let response = response.unwrap_or_else(|error| panic!("{error}: {}", self.describe()));
        response.outcomes()[0].clone()
    }

    fn describe(&self) -> String {
        let Self {
            seed,
            versions,
            history,
            ..
        } = self;
        format!("{versions}, after\n{history}TOWER_QUOTA_SEED={seed}")
    }

    fn assert(&self, holds: bool, what: impl fmt::Display) {
        assert!(holds, "{what}: {}", self.describe());
    }
}

fn micros(time: u64) -> Duration {
    Duration::from_micros(time)
}

/// Runs timelines in a memory store, and in a Redis with two stores.
async fn hold(timeline: impl AsyncFn(&mut Processes<'_>)) {
    let first = number("TOWER_QUOTA_SEED").unwrap_or_else(|| RandomState::new().hash_one(0));
    println!("TOWER_QUOTA_SEED={first}");
    let (redis, clock) = (Redis::start(), Clock::new());
    let (on_fred, on_redis_rs) = (
        clock.redis_store(&redis).await,
        clock.redis_store_on_redis_rs(&redis).await,
    );
    for seed in (0..timelines()).map(|number| first.wrapping_add(number)) {
        for is_in_redis in [false, true] {
            clock.set(Clock::new().now());
            redis.command::<()>("FLUSHALL", [""; 0]).await;
            let memory = clock.memory_store();
            let mut processes = Processes {
                stores: match is_in_redis {
                    true => vec![&on_fred, &on_redis_rs],
                    false => vec![&memory],
                },
                clock: &clock,
                redis: is_in_redis.then_some(&redis),
                rng: Rng::with_seed(seed),
                seed,
                versions: String::new(),
                history: History::default(),
            };
            timeline(&mut processes).await;
        }
    }
}

/// A lease that was taken, by which version, and until when it is held unless it is renewed.
struct Lease {
    version: usize,
    cost: u64,
    until: u64,
}

#[tokio::test]
async fn slots_of_both_versions_are_held_until_they_end() {
    hold(async |processes: &mut Processes<'_>| {
        let rng = &mut processes.rng;
        let version = |rng: &mut Rng| (rng.u64(1..=6), rng.u64(1..=4) * 1_000 * MILLISECOND);
        let versions = [version(rng), version(rng)];
        let limits = versions.map(|(slots, lease)| Limit::from(Concurrency::new(slots).lease(micros(lease))));
        processes.versions = limits.each_ref().map(ToString::to_string).join(", then ");
        let lengths = versions.map(|(_, lease)| lease);
        let (key, mut held) = (Key::from("k"), HashMap::<LeaseId, Lease>::new());
        for _ in 0..STEPS {
            let ends: Vec<u64> = held
                .values()
                .map(|lease| lease.until - lengths[lease.version])
                .collect();
            processes.wait(&ends, &lengths).await;
            let now = processes.clock.now();
            held.retain(|_, lease| lease.until > now);
            let used: u64 = held.values().map(|lease| lease.cost).sum();
            // In an order of their own, so that a seed has one timeline.
            let mut ids: Vec<LeaseId> = held.keys().copied().collect();
            ids.sort_unstable_by_key(|id| (held[id].until, held[id].version, held[id].cost));
            let kind = processes.rng.u32(..8);
            if kind < 4 || ids.is_empty() {
                let (version, cost, id) = (processes.rng.usize(..2), processes.rng.u64(1..=2), LeaseId::random());
                let charge = Charge::new("p", &limits[version], &key, cost).lease(id);
                let outcome = processes.send(Operation::Check, &[charge]).await;
                let fits = used + cost <= versions[version].0;
                processes.assert(
                    outcome.allowed == fits,
                    format_args!("{used} slots are held, and {cost} more"),
                );
                if fits {
                    let until = now + lengths[version];
                    held.insert(id, Lease { version, cost, until });
                }
                continue;
            }
            let id = ids[processes.rng.usize(..ids.len())];
            let Lease { version, cost, .. } = held[&id];
            let charge = Charge::new("p", &limits[version], &key, cost).lease(id);
            if kind < 7 {
                let outcome = processes.send(Operation::RenewLease, &[charge]).await;
                processes.assert(outcome.allowed, "a lease that was renewed in time is lost");
                held.get_mut(&id).expect("it is held").until = now + lengths[version];
            } else {
                processes.send(Operation::EndLease, &[charge]).await;
                held.remove(&id);
            }
        }
    })
    .await;
}

/// When a ban in its state ends; `None` if none is in force.
fn banned_until(now: u64, state: ChargeState) -> Option<u64> {
    Some(now + state.banned_for()?.as_micros() as u64)
}

#[tokio::test]
async fn a_ban_of_one_version_is_in_force_for_both() {
    hold(async |processes: &mut Processes<'_>| {
        let rng = &mut processes.rng;
        let version = |rng: &mut Rng| {
            let window = MILLISECOND * [2, 10, 60][rng.usize(..3)];
            let first = MILLISECOND * [1, 4, 20][rng.usize(..3)];
            let longest = first * [1, 3, 20][rng.usize(..3)];
            let denials = (rng.u32(..4) > 0).then(|| rng.u64(1..=4));
            let ban = match denials {
                None => Ban::by_hand().first(micros(MILLISECOND)),
                Some(denials) => Ban::after(denials, micros(window)).first(micros(first)),
            };
            let limit = Limit::from(FixedWindow::new(rng.u64(1..=3), micros(MILLISECOND * 3)));
            ((ban.longest(micros(longest)), limit), (longest, denials))
        };
        let (versions, numbers): (Vec<_>, Vec<_>) = [version(rng), version(rng)].into_iter().unzip();
        let texts = versions.iter().map(|(ban, limit)| format!("{limit}, {ban}"));
        processes.versions = texts.collect::<Vec<_>>().join("; then ");
        let (lengths, denials): (Vec<_>, Vec<_>) = numbers.into_iter().unzip();
        let fewest = denials.into_iter().flatten().min();
        let key = Key::from("k");
        // Until when a ban is in force, the end of the last one, and denials since then.
        let (mut until, mut denials) = (0_u64, 0_u64);
        for _ in 0..STEPS {
            let end = until.saturating_sub(lengths[0]);
            processes.wait(&[end], &lengths).await;
            let (now, version) = (processes.clock.now(), processes.rng.usize(..2));
            let (ban, limit) = &versions[version];
            let charges = [Charge::new("p", limit, &key, 1).ban(ban)];
            match processes.rng.u32(..16) {
                0 => {
                    let length = processes.rng.u64(1..=2 * lengths[version]);
                    let length_of_ban = Duration::from_micros(length);
                    processes.send(Operation::Ban { length: length_of_ban }, &charges).await;
                    until = until.max(now + length.min(lengths[version]));
                }
                1 => {
                    processes.send(Operation::Reset, &charges).await;
                    (until, denials) = (0, 0);
                }
                _ => {
                    let is_peek = processes.rng.u32(..4) == 0;
                    let operation = if is_peek { Operation::Peek } else { Operation::Check };
                    let outcome = processes.send(operation, &charges).await;
                    let reported = banned_until(now, outcome.states()[0]);
                    if until > now {
                        let rest = until - now;
                        processes.assert(
                            !outcome.allowed,
                            format_args!("it is admitted {rest} us before a ban ends"),
                        );
                        let same = reported == Some(until);
                        processes.assert(
                            same,
                            format_args!("a ban ends in {rest} us, and this is reported: {reported:?}"),
                        );
                        continue;
                    }
                    denials += u64::from(!outcome.allowed && !is_peek);
                    if let Some(reported) = reported {
                        let enough = fewest.is_some_and(|fewest| denials >= fewest);
                        processes.assert(enough && !is_peek, format_args!("it is banned after {denials} denials"));
                        (until, denials) = (reported, 0);
                    }
                }
            }
        }
    })
    .await;
}
