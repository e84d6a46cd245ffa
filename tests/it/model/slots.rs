//! Slots in both stores against a model that is written from the docs of [`Concurrency`]: a list of the leases.
//!
//! A world has one or two limits of slots, each perhaps in two versions, and a log that some requests are charged in addition.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use fastrand::Rng;
use tower_quota::{
    Concurrency, Key, Limit,
    store::{Charge, LeaseId, Operation, Outcome, Store, StoreRequest},
};

use super::{number, oracle::Oracle as Count, world::Terms};
use crate::support::{Clock, Redis};

const SECOND: u64 = 1_000_000;
const NAMES: [&str; 2] = ["a", "b"];
const STEPS: usize = 150;
const REQUESTS: usize = 10_000;

/// What holds slots.
#[derive(Clone, Copy, Debug)]
struct Held {
    id: LeaseId,
    cost: u64,
    until: u64,
}

/// The slots of one limit.
#[derive(Default)]
struct Slots {
    leases: Vec<Held>,
}

impl Slots {
    fn advance(&mut self, now: u64) {
        self.leases.retain(|held| held.until > now);
    }

    fn has(&self, id: LeaseId) -> bool {
        self.leases.iter().any(|held| held.id == id)
    }

    fn room(&self, quota: u64) -> u64 {
        let used: u64 = self.leases.iter().map(|held| held.cost).sum();
        quota.saturating_sub(used)
    }

    fn end(&mut self, id: LeaseId) {
        self.leases.retain(|held| held.id != id);
    }

    fn hold(&mut self, id: LeaseId, part: &Part, now: u64) {
        self.end(id);
        let (cost, until) = (part.cost, now + part.version.lease);
        self.leases.push(Held { id, cost, until });
    }

    /// The time until nothing is held.
    fn reset(&self, now: u64) -> u64 {
        let ends = self.leases.iter().map(|held| held.until - now);
        ends.max().unwrap_or(0)
    }
}

/// The numbers of a limit of slots.
#[derive(Clone, Copy, Debug)]
struct Version {
    quota: u64,
    lease: u64,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    limit: usize,
    version: Version,
    cost: u64,
}

/// A request of one or two limits of slots.
#[derive(Clone, Debug)]
struct Planned {
    operation: Operation,
    id: LeaseId,
    /// Whether the charges have the id. Without it a lease cannot be renewed or ended.
    has_id: bool,
    parts: Vec<Part>,
    /// What it costs of the log.
    log: Option<u64>,
}

/// How a request is decided.
#[derive(Debug, PartialEq, Eq)]
struct Decided {
    allowed: bool,
    /// Of each limit of slots what is left, when to try again, and when nothing is held.
    states: Vec<(u64, Option<u64>, u64)>,
    /// What is left of the log.
    log: Option<u64>,
}

struct Model {
    slots: [Slots; 2],
    log: Count,
    terms: Terms,
}

impl Model {
    fn new(terms: Terms) -> Self {
        Self {
            slots: Default::default(),
            log: Count::new(&terms),
            terms,
        }
    }

    /// What is left of the log, which is never charged beyond its limit.
    fn log_room(&mut self, now: u64) -> u64 {
        self.log.advance(&self.terms, now);
        let room = self.log.room(&self.terms, now);
        assert_eq!(room.least, room.most);
        room.least
    }

    fn decide(&mut self, planned: &Planned, now: u64) -> Decided {
        let Planned { operation, id, .. } = *planned;
        if operation == Operation::Reset {
            planned
                .parts
                .iter()
                .for_each(|part| self.slots[part.limit] = Slots::default());
        }
        self.slots.iter_mut().for_each(|slots| slots.advance(now));
        let fits = |part: &Part| {
            let slots = &self.slots[part.limit];
            let renews = operation == Operation::RenewLease && slots.has(id);
            renews || slots.room(part.version.quota) >= part.cost
        };
        let fit: Vec<bool> = planned.parts.iter().map(fits).collect();
        let log_room = self.log_room(now);
        let log_fits = planned.log.is_none_or(|cost| log_room >= cost);

        let requires_room = !matches!(operation, Operation::Charge | Operation::EndLease | Operation::Reset);
        let all_fit = log_fits && fit.iter().all(|fits| *fits);
        let allowed = all_fit || !requires_room;
        let takes = allowed && matches!(operation, Operation::Check | Operation::Charge);

        for (number, part) in planned.parts.iter().enumerate() {
            let slots = &mut self.slots[part.limit];
            match operation {
                Operation::RenewLease if fit[number] => slots.hold(id, part, now),
                Operation::EndLease => slots.end(id),
                _ if takes => slots.hold(id, part, now),
                _ => {}
            }
        }
        let log = planned.log.map(|cost| match takes {
            true => {
                self.log.add(&self.terms, now, cost);
                log_room.saturating_sub(cost)
            }
            false => log_room,
        });
        let states = planned.parts.iter().enumerate().map(|(number, part)| {
            let slots = &self.slots[part.limit];
            let lacks = !allowed && !fit[number];
            let left = slots.room(part.version.quota);
            (left, lacks.then_some(SECOND), slots.reset(now))
        });
        Decided {
            allowed,
            states: states.collect(),
            log,
        }
    }
}

fn decided(planned: &Planned, outcome: &Outcome) -> Decided {
    let micros = |time: Duration| time.as_micros() as u64;
    let (slots, log) = outcome.states().split_at(planned.parts.len());
    let states = slots.iter().map(|state| {
        (
            state.remaining,
            state.retry_after.map(micros),
            micros(state.reset_after),
        )
    });
    Decided {
        allowed: outcome.allowed,
        states: states.collect(),
        log: log.first().map(|state| state.remaining),
    }
}

/// A random timeline.
struct Timeline {
    rng: Rng,
    versions: Vec<Vec<Version>>,
    /// Requests that were admitted and not ended.
    held: Vec<Planned>,
}

impl Timeline {
    fn new(mut rng: Rng) -> Self {
        let version = |rng: &mut Rng| Version {
            quota: rng.u64(1..=5),
            lease: rng.u64(1..=10) * SECOND,
        };
        let mut versions = Vec::new();
        for _ in 0..rng.usize(1..=2) {
            versions.push((0..rng.usize(1..=2)).map(|_| version(&mut rng)).collect());
        }
        Self {
            rng,
            versions,
            held: Vec::new(),
        }
    }

    /// The next time, often one at which something expires.
    fn next(&mut self, model: &Model, now: u64) -> u64 {
        let held = model.slots.iter().flat_map(|slots| &slots.leases);
        let ends: Vec<u64> = held.map(|held| held.until).collect();
        match self.rng.u32(..8) {
            0..=2 => now,
            3 | 4 => now + self.rng.u64(..SECOND),
            5 if !ends.is_empty() => (ends[self.rng.usize(..ends.len())] + 1 - self.rng.u64(..3)).max(now),
            6 => now + self.rng.u64(..12 * SECOND),
            _ => now + self.rng.u64(..3),
        }
    }

    fn take(rng: &mut Rng, from: &mut Vec<Planned>) -> Option<Planned> {
        (!from.is_empty()).then(|| from.swap_remove(rng.usize(..from.len())))
    }

    fn planned(&mut self) -> Planned {
        let rng = &mut self.rng;
        let operation = match rng.u32(..24) {
            0..=10 => Operation::Check,
            11 => Operation::Charge,
            12 => Operation::Peek,
            13 if rng.u32(..8) == 0 => Operation::Reset,
            13..=16 => Operation::RenewLease,
            17..=20 => Operation::EndLease,
            _ => Operation::Check,
        };
        if matches!(operation, Operation::RenewLease | Operation::EndLease)
            && let Some(planned) = Self::take(rng, &mut self.held)
        {
            return Planned { operation, ..planned };
        }
        let mut parts: Vec<Part> = Vec::new();
        for (limit, versions) in self.versions.iter().enumerate() {
            let version = versions[rng.usize(..versions.len())];
            let cost = if rng.u32(..3) > 0 {
                1
            } else {
                rng.u64(1..=version.quota + 1)
            };
            parts.push(Part { limit, version, cost });
        }
        rng.shuffle(&mut parts);
        parts.truncate(rng.usize(1..=parts.len()));
        let counts = matches!(operation, Operation::Check | Operation::Peek);
        Planned {
            operation,
            id: LeaseId::random(),
            has_id: operation != Operation::Check || rng.bool(),
            parts,
            log: (counts && rng.u32(..4) == 0).then(|| rng.u64(1..=3)),
        }
    }

    fn follow(&mut self, planned: Planned, decided: &Decided) {
        let holds = !matches!(
            planned.operation,
            Operation::Peek | Operation::EndLease | Operation::Reset
        );
        if holds && planned.has_id && (decided.allowed || planned.operation == Operation::RenewLease) {
            self.held.push(Planned { log: None, ..planned });
        }
    }
}

async fn send(store: &impl Store, log: &Limit, call: &[Planned]) -> Vec<Decided> {
    let key = Key::from("k");
    let limits = call.iter().map(|planned| {
        let limit = |part: &Part| {
            let lease = Duration::from_micros(part.version.lease);
            Limit::from(Concurrency::new(part.version.quota).lease(lease))
        };
        planned.parts.iter().map(limit).collect()
    });
    let limits: Vec<Vec<Limit>> = limits.collect();
    let charges = call.iter().zip(&limits).map(|(planned, limits)| {
        let of_slots = planned.parts.iter().zip(limits).map(|(part, limit)| {
            let charge = Charge::new(NAMES[part.limit], limit, &key, part.cost);
            if planned.has_id {
                charge.lease(planned.id)
            } else {
                charge
            }
        });
        let of_log = planned.log.map(|cost| Charge::new("log", log, &key, cost));
        of_slots.chain(of_log).collect()
    });
    let charges: Vec<Vec<Charge>> = charges.collect();
    let requests = call.iter().zip(&charges);
    let requests = requests.map(|(planned, charges)| StoreRequest::new(planned.operation, charges));
    let response = store.decide(&requests.collect::<Vec<_>>()).await;
    let response = response.expect("the store replies");
    let outcomes = call.iter().zip(response.outcomes());
    outcomes.map(|(planned, outcome)| decided(planned, outcome)).collect()
}

#[tokio::test]
async fn both_stores_give_slots_as_the_model() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let shared = clock.redis_store(&redis).await;
    let requests = number("TOWER_QUOTA_DECISIONS").map_or(REQUESTS, |decisions| decisions as usize / 10);
    let mut seed = number("TOWER_QUOTA_SEED").unwrap_or_else(|| RandomState::new().hash_one(0));
    let mut sent = 0;
    while sent < requests {
        redis.command::<()>("FLUSHALL", [""; 0]).await;
        let memory = clock.memory_store();
        let mut timeline = Timeline::new(Rng::with_seed(seed));
        let terms = Terms::of_log(4, 2 * SECOND, 0);
        let (limit, mut model) = (terms.limit(), Model::new(terms));
        let mut history = Vec::new();
        for _ in 0..STEPS {
            let now = timeline.next(&model, clock.now());
            clock.set(now);
            clock.write_to(&redis).await;
            let (mut call, mut expected) = (Vec::new(), Vec::new());
            for _ in 0..timeline.rng.usize(1..=4) {
                let planned = timeline.planned();
                let decided = model.decide(&planned, now);
                history.push(format!("at {now}: {planned:?}\n  -> {decided:?}"));
                timeline.follow(planned.clone(), &decided);
                call.push(planned);
                expected.push(decided);
            }
            for (name, found) in [
                ("memory", send(&memory, &limit, &call).await),
                ("Redis", send(&shared, &limit, &call).await),
            ] {
                let last = history[history.len().saturating_sub(12)..].join("\n");
                assert_eq!(
                    found, expected,
                    "{name}, then the model, TOWER_QUOTA_SEED={seed}\n{last}"
                );
            }
            sent += call.len();
        }
        seed = seed.wrapping_add(1);
    }
}
