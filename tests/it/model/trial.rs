use std::{
    collections::{BTreeMap, HashMap},
    ops::RangeInclusive,
    time::Duration,
};

use tower_quota::{
    Key, Limit, MemoryStore, RedisStore, SlidingLog,
    store::{Charge, Operation, Outcome, Store, StoreRequest},
};

use super::{
    START,
    oracle::{Oracle, Span},
    world::{Call, Part, Planned, Terms, What, World},
};
use crate::support::{Clock, Redis, redis_key};

/// A Redis, and a clock for it and for a memory store.
pub(super) struct Stores {
    redis: Redis,
    clock: Clock,
    shared: RedisStore,
}

const POLICIES: [&str; 4] = ["a", "b", "c", "d"];
const KEYS: [&str; 3] = ["j", "k", "l"];

/// Of how many calls the expiry times of one are compared.
const EXPIRY_EVERY: usize = 8;

/// Key, policy, and the first version of the policy with the same window and precision: versions with others have other counts.
type Place = (usize, usize, usize);

/// A request that was admitted, and is neither refunded nor settled.
struct Admitted {
    at: u64,
    key: usize,
    policies: Vec<usize>,
}

impl Stores {
    pub(super) async fn start() -> Self {
        let (redis, clock) = (Redis::start(), Clock::new());
        let shared = clock.redis_store(&redis).await;
        Self { redis, clock, shared }
    }

    /// Runs both stores along the timeline of a world. The error is the first decision that is another one than that of the model.
    pub(super) async fn run(&self, world: &World) -> Result<(), String> {
        self.redis.command::<()>("FLUSHALL", [""; 0]).await;
        self.clock.set(START);
        let memory = self.clock.memory_store();
        let [mut of_memory, mut of_redis] = [Trial::new(world), Trial::new(world)];
        for (number, call) in world.calls.iter().enumerate() {
            self.clock.set(START + call.at);
            self.clock.write_to(&self.redis).await;
            if world.has_other_keys {
                let first = if number == 0 { 0 } else { OTHER_KEYS + number };
                add_keys(&memory, first..=OTHER_KEYS + number).await;
            }
            let in_memory = of_memory.decide(&memory, call).await;
            let in_redis = of_redis.decide(&self.shared, call).await;
            let at = format!("at {} us", call.at);
            match (in_memory, in_redis) {
                // Of a count that the docs leave open, each store has its own when only one has removed expired keys.
                (Ok(in_memory), Ok(in_redis)) if in_memory == in_redis || world.has_other_keys => {}
                (Ok(in_memory), Ok(in_redis)) => {
                    return Err(format!("{at} the stores differ: {in_memory:?}, in Redis {in_redis:?}"));
                }
                (Err(wrong), Ok(_)) => return Err(format!("{at} in memory: {wrong}")),
                (Ok(_), Err(wrong)) => return Err(format!("{at} in Redis: {wrong}")),
                (Err(wrong), Err(alike)) if wrong == alike => return Err(format!("{at} in both stores: {wrong}")),
                (Err(wrong), Err(other)) => return Err(format!("{at} in memory: {wrong}; in Redis: {other}")),
            }
            if number % EXPIRY_EVERY == 0 || number + 1 == world.calls.len() {
                of_redis.expires_early(&self.redis, &self.clock).await?;
            }
        }
        Ok(())
    }
}

/// How many keys a memory store has before it removes expired keys.
const OTHER_KEYS: usize = 16;

/// Adds keys of another policy to a memory store, which removes a few expired keys for each.
async fn add_keys(memory: &MemoryStore, numbers: RangeInclusive<usize>) {
    let limit: Limit = SlidingLog::new(1, Duration::from_secs(366 * 86_400)).into();
    for number in numbers {
        let key = Key::from(number as u64);
        let charges = [Charge::new("others", &limit, &key, 1)];
        let response = memory.decide(&[StoreRequest::new(Operation::Check, &charges)]).await;
        assert!(response.expect("memory replies").outcomes()[0].allowed);
    }
}

/// A timeline in one store, and what the model counts.
struct Trial<'a> {
    world: &'a World,
    limits: Vec<Vec<Limit>>,
    counts: BTreeMap<Place, Oracle>,
    admitted: HashMap<usize, Admitted>,
}

/// Where the charge of a key is counted.
fn place(world: &World, key: usize, part: &Part) -> Place {
    let versions = &world.policies[part.policy];
    let own = &versions[part.version];
    let shares = |terms: &Terms| (terms.window, terms.precision) == (own.window, own.precision);
    (key, part.policy, versions.iter().position(shares).expect("its own"))
}

impl<'a> Trial<'a> {
    fn new(world: &'a World) -> Self {
        let limits = |versions: &Vec<Terms>| versions.iter().map(Terms::limit).collect();
        Self {
            world,
            limits: world.policies.iter().map(limits).collect(),
            counts: BTreeMap::new(),
            admitted: HashMap::new(),
        }
    }

    /// The outcomes of a store; the error is the first one that is wrong.
    async fn decide(&mut self, store: &impl Store, call: &Call) -> Result<Vec<Outcome>, String> {
        let mut sent = Vec::new();
        for planned in &call.requests {
            if let Some((operation, parts)) = self.operation(planned) {
                sent.push((planned, operation, parts));
            }
        }
        let keys = KEYS.map(Key::from);
        let charges = sent.iter().map(|(planned, _, parts)| {
            let charge = |part: &Part| {
                let limit = &self.limits[part.policy][part.version];
                Charge::new(POLICIES[part.policy], limit, &keys[planned.key], part.cost)
            };
            parts.iter().map(charge).collect()
        });
        let charges: Vec<Vec<_>> = charges.collect();
        let requests = sent.iter().zip(&charges);
        let requests: Vec<_> = requests
            .map(|((_, operation, _), charges)| StoreRequest::new(*operation, charges))
            .collect();
        let response = store.decide(&requests).await.expect("the store replies");
        let now = response.server_time.as_micros() as u64;
        assert_eq!((now, response.outcomes().len()), (START + call.at, sent.len()));

        for ((planned, operation, parts), outcome) in sent.iter().zip(response.outcomes()) {
            let wrong = self.follow(planned, *operation, parts, outcome, now);
            wrong.map_err(|wrong| format!("request {}: {wrong}", planned.id))?;
        }
        Ok(response.outcomes().to_vec())
    }

    /// What is sent for a request; `None` if nothing is, since the request that it was to refund counts no more.
    fn operation(&mut self, planned: &Planned) -> Option<(Operation, Vec<Part>)> {
        let mut parts = planned.charges.clone();
        let operation = match planned.what {
            What::Check => Operation::Check,
            What::Charge => Operation::Charge,
            What::Peek => Operation::Peek,
            What::Reset => {
                self.forget(planned);
                Operation::Reset
            }
            What::Refund { of } | What::Settle { of } => {
                let Admitted { at, policies, .. } = self.admitted.remove(&of)?;
                parts.retain(|part| policies.contains(&part.policy));
                let admitted_at = Duration::from_micros(at);
                match planned.what {
                    What::Settle { .. } => Operation::Charge,
                    _ => Operation::Refund { admitted_at },
                }
            }
        };
        (!parts.is_empty()).then_some((operation, parts))
    }

    /// Forgets what was admitted before a reset. A refund of it would take from what is counted later.
    fn forget(&mut self, reset: &Planned) {
        let is_reset = |policy: &usize| reset.charges.iter().any(|part| part.policy == *policy);
        let admitted = self.admitted.values_mut().filter(|admitted| admitted.key == reset.key);
        admitted.for_each(|admitted| admitted.policies.retain(|policy| !is_reset(policy)));
    }

    /// Counts a request as it was decided. The error is what is wrong with the decision.
    fn follow(
        &mut self,
        planned: &Planned,
        operation: Operation,
        parts: &[Part],
        outcome: &Outcome,
        now: u64,
    ) -> Result<(), String> {
        if operation == Operation::Reset {
            self.forget(planned);
        }

        let mut could_fit = true;
        let mut must_fit = true;
        let rooms = parts.iter().map(|part| {
            let terms = &self.world.policies[part.policy][part.version];
            let count = self.counts.entry(place(self.world, planned.key, part));
            let count = count.or_insert_with(|| Oracle::new(terms));
            if operation == Operation::Reset {
                *count = Oracle::new(terms);
            }
            count.advance(terms, now);
            let room = count.room(terms, now);
            (could_fit, must_fit) = (could_fit && room.most >= part.cost, must_fit && room.least >= part.cost);
            room
        });
        let rooms: Vec<Span> = rooms.collect();
        let requires_room = matches!(operation, Operation::Check | Operation::Peek);
        let allowed = outcome.allowed;
        if allowed && requires_room && !could_fit {
            return Err(format!("it is admitted, and {rooms:?} is left"));
        }
        if !allowed && (must_fit || !requires_room) {
            return Err(format!("it is denied, and {rooms:?} is left"));
        }

        let counts = allowed && matches!(operation, Operation::Check | Operation::Charge);
        if counts {
            let policies = parts.iter().map(|part| part.policy).collect();
            let (at, key) = (now, planned.key);
            self.admitted.insert(planned.id, Admitted { at, key, policies });
        }
        for ((part, room), state) in parts.iter().zip(&rooms).zip(outcome.states()) {
            let terms = &self.world.policies[part.policy][part.version];
            let count = self
                .counts
                .get_mut(&place(self.world, planned.key, part))
                .expect("it was advanced");
            let left = match operation {
                Operation::Refund { admitted_at } => {
                    count.refund(terms, now, admitted_at.as_micros() as u64, part.cost);
                    count.advance(terms, now);
                    count.room(terms, now)
                }
                _ if counts => {
                    count.add(terms, now, part.cost);
                    room.minus(part.cost)
                }
                _ => *room,
            };
            let reset = count.reset(terms, now);
            let (reset_after, retry_after) = (state.reset_after, state.retry_after);
            let what = format!("policy {} ({})", part.policy, terms.limit());
            if !left.contains(state.remaining) {
                return Err(format!("{what} has {} left, not {left:?}", state.remaining));
            }
            if !reset.contains(reset_after.as_micros() as u64) {
                return Err(format!("{what} is full in {reset_after:?}, not {reset:?} us"));
            }
            if retry_after.is_some() == (allowed || state.remaining >= part.cost) {
                return Err(format!(
                    "{what} denies for {retry_after:?}, with {} left",
                    state.remaining
                ));
            }
            // A cost above the quota is never admitted.
            if let Some(retry_after) = retry_after
                && part.cost <= terms.quota
            {
                let wait = count.wait(terms, now, part.cost);
                if !wait.contains(retry_after.as_micros() as u64) {
                    return Err(format!("{what} denies for {retry_after:?}, not {wait:?} us"));
                }
            }
        }
        match outcome.states().len() == parts.len() {
            true => Ok(()),
            false => Err(format!("the states are {:?}", outcome.states())),
        }
    }

    /// The error is a key that expires in Redis while a count of it matters.
    async fn expires_early(&self, redis: &Redis, clock: &Clock) -> Result<(), String> {
        const EARLY: &str = "
            local time, early = redis.call('TIME'), {}
            for n, key in ipairs(KEYS) do
                local left = redis.call('PTTL', key)
                if left == -1 or time[1] * 1000 + math.ceil(time[2] / 1000) + left < tonumber(ARGV[n]) then
                    early[#early + 1] = key
                end
            end
            return early";
        let (mut keys, mut times) = (Vec::new(), Vec::new());
        for ((key, policy, version), count) in &self.counts {
            let needed = count.needed_until(&self.world.policies[*policy][*version], clock.now());
            if needed > clock.now() {
                let (policy, limit) = (POLICIES[*policy], &self.limits[*policy][*version]);
                keys.push(redis_key(policy, limit, &Key::from(KEYS[*key])));
                times.push(clock.expiry(Duration::from_micros(needed - clock.now())).to_string());
            }
        }
        let words = [EARLY.to_owned(), keys.len().to_string()]
            .into_iter()
            .chain(keys)
            .chain(times);
        let early: Vec<String> = redis.command("EVAL", words).await;
        match early.is_empty() {
            true => Ok(()),
            false => Err(format!("{early:?} expire while they matter")),
        }
    }
}
