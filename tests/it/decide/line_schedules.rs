//! Random callers of limiters and layers that share policies in several orders, of two plans, with other costs, beside resets, bans and
//! overrides: what the documentation promises of requests that wait holds for the instants at which callers continue, in virtual time,
//! and for the time of Redis.

use std::{
    convert::Infallible,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex},
    time::Duration,
};

use fastrand::Rng;
use http::{Request, Response};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    Ban, Concurrency, Decision, Key, KeyExtractor, Limit, Limiter, MemoryStore, Plans, Policy, RateLimitLayer,
    SlidingLog, TokenBucket, key, store::Store,
};

use crate::{
    model::number,
    support::{Redis, connected, patient},
};

type Body = http_body_util::Empty<bytes::Bytes>;

const SECOND: Duration = Duration::from_secs(1);
const MILLISECOND: Duration = Duration::from_millis(1);

/// Policies, and who calls by which of them.
#[derive(Debug)]
struct World {
    seed: u64,
    /// Their names, the limits of both plans, costs, and of buckets the tokens that come in a second.
    policies: Vec<(String, [Limit; 2], u64, u64)>,
    groups: Vec<Group>,
    /// How long callers wait on average until they leave.
    patience: Duration,
    exception: Option<Exception>,
}

/// Callers that are alike.
#[derive(Debug)]
struct Group {
    /// The policies, in its order.
    policies: Vec<usize>,
    calls_through_a_layer: bool,
    longest_wait: Duration,
    /// The position of the plan among [`PLANS`].
    plan: usize,
}

/// What an operator does now and then, to the policies of the first group or the first of these.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Exception {
    Reset,
    Ban,
    /// A limit of the quota 2 in place of that of the plans.
    Override,
}

const PLANS: [&str; 2] = ["free", "pro"];

/// How long a ban and an override last.
const LASTS: Duration = Duration::from_millis(350);

/// A request that was admitted.
#[derive(Clone, Debug)]
struct Admitted {
    group: usize,
    arrived: Instant,
    continued: Instant,
    server_time: Duration,
    released: Option<Instant>,
}

#[derive(Default)]
struct Records {
    admitted: Vec<Admitted>,
    /// The requests of each group that wait.
    waiting: Vec<usize>,
    /// The times before and after each.
    resets: Vec<[Duration; 2]>,
    /// The times within which a ban or an override was surely in force, and those without which it surely was not.
    exceptions: Vec<[Duration; 4]>,
    /// The longest time that a few round trips took, which depends on the load of the machine.
    few_round_trips: Duration,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let policies = (0..rng.usize(1..=3)).map(|nth| {
            let (quota, burst, cost) = (rng.u64(2..=4), rng.u64(2..=3), rng.u64(1..=2));
            let algorithm = rng.u32(..4);
            let limits =
                [0, rng.u64(..2)].map(|more| limit(algorithm, quota, [quota, burst][(algorithm == 1) as usize] + more));
            (format!("policy-{nth}"), limits, cost, quota)
        });
        let policies: Vec<_> = policies.collect();
        let groups = (0..rng.usize(2..=4)).map(|_| {
            let mut chosen: Vec<usize> = (0..policies.len()).collect();
            rng.shuffle(&mut chosen);
            chosen.truncate(rng.usize(1..=policies.len()));
            Group {
                policies: chosen,
                calls_through_a_layer: rng.bool(),
                longest_wait: rng.u32(1..=6) * SECOND / 2,
                plan: rng.usize(..2),
            }
        });
        Self {
            seed,
            groups: groups.collect(),
            patience: [SECOND / 2, SECOND, 60 * SECOND][rng.usize(..3)],
            exception: [Exception::Reset, Exception::Ban, Exception::Override]
                .into_iter()
                .nth(rng.usize(..5)),
            policies,
        }
    }

    /// The policies of a group in each plan.
    fn policies_of(&self, group: usize, wait: bool) -> [Vec<Policy<()>>; 2] {
        let group = &self.groups[group];
        [0, 1].map(|plan| {
            let policies = group.policies.iter().map(|nth| {
                let (name, limits, cost, _) = &self.policies[*nth];
                let policy = Policy::new(&**name, limits[plan].clone()).cost(*cost);
                let policy = if wait {
                    policy.wait_up_to(group.longest_wait)
                } else {
                    policy
                };
                match self.exception {
                    Some(Exception::Ban) => policy.ban(Ban::by_hand().longest(LASTS).first(LASTS)),
                    _ => policy,
                }
            });
            policies.collect()
        })
    }

    fn limiter(&self, store: &(impl Store + Clone), group: usize, wait: bool) -> Limiter {
        let [free, pro] = self.policies_of(group, wait);
        Limiter::new(store.clone(), Plans::new(PLANS[0], free).plan(PLANS[1], pro))
    }

    fn layer(&self, store: &(impl Store + Clone), group: usize) -> RateLimitLayer {
        let key = |policies: Vec<Policy<()>>| -> Vec<Policy<Arc<dyn KeyExtractor>>> {
            policies
                .into_iter()
                .map(|policy| policy.key(key::constant("k")))
                .collect()
        };
        let [free, pro] = self.policies_of(group, true).map(key);
        let (plans, plan) = (
            Plans::new(PLANS[0], free).plan(PLANS[1], pro),
            PLANS[self.groups[group].plan],
        );
        RateLimitLayer::new(store.clone(), plans.by(move |_| Some(plan)))
    }

    /// Makes an exception, and notes it.
    async fn make_exception(&self, exception: Exception, store: &(impl Store + Clone), records: &Mutex<Records>) {
        let limiter = self.limiter(store, 0, true);
        let key = || Key::constant("k");
        let time = async || limiter.peek(key()).await.expect("it replies").server_time();
        let before = time().await;
        match exception {
            Exception::Reset => {
                limiter.reset(key()).await.expect("it replies");
                let after = time().await;
                return records.lock().unwrap().resets.push([before, after]);
            }
            Exception::Ban => limiter.ban(key(), LASTS).await.expect("it replies"),
            Exception::Override => {
                let nth = self.groups[0].policies[0];
                let (name, [limit, _], ..) = &self.policies[nth];
                let own = limit_of_quota_2(limit, self.policies[nth].3);
                limiter
                    .override_limit(name, key(), own, LASTS)
                    .await
                    .expect("it replies");
            }
        }
        let after = time().await;
        records
            .lock()
            .unwrap()
            .exceptions
            .push([before, after, before + LASTS, after + LASTS]);
    }

    /// Lets 30 callers call for this time, and verifies what happened.
    async fn run(self, store: impl Store + Clone, length: Duration, is_virtual: bool) {
        let (start, records) = (Instant::now(), Arc::new(Mutex::new(Records::default())));
        records.lock().unwrap().waiting = vec![0; self.groups.len()];
        let world = Arc::new(self);
        let mut tasks = JoinSet::new();
        for caller in 0..30 {
            let group = caller % world.groups.len();
            let (world, store, records) = (world.clone(), store.clone(), records.clone());
            tasks.spawn(async move {
                let mut rng = Rng::with_seed(world.seed.wrapping_add(caller as u64));
                while start.elapsed() < length {
                    sleep(rng.u32(1..300) * MILLISECOND).await;
                    let patience = rng.u32(50..150) * world.patience / 100;
                    let hold = rng.u32(1..200) * MILLISECOND;
                    world.call(group, &store, &records, (patience, hold)).await;
                }
            });
        }
        if let Some(exception) = world.exception {
            let (world, store, records) = (world.clone(), store.clone(), records.clone());
            tasks.spawn(async move {
                while start.elapsed() < length {
                    sleep(700 * MILLISECOND).await;
                    world.make_exception(exception, &store, &records).await;
                }
            });
        }
        let sampled = world
            .clone()
            .verify_no_wait_in_vain(store, records.clone(), start + length, is_virtual);
        let sampler = tokio::spawn(sampled);
        tasks.join_all().await;
        sampler.await.expect("no request waits in vain");
        world.verify(&records.lock().unwrap(), is_virtual);
    }

    async fn call(
        &self,
        group: usize,
        store: &(impl Store + Clone),
        records: &Arc<Mutex<Records>>,
        (patience, hold): (Duration, Duration),
    ) {
        let arrived = Instant::now();
        records.lock().unwrap().waiting[group] += 1;
        let enter = |decision: &Decision| {
            let mut records = records.lock().unwrap();
            records.admitted.push(Admitted {
                group,
                arrived,
                continued: Instant::now(),
                server_time: decision.server_time(),
                released: None,
            });
            records.waiting[group] -= 1;
            records.admitted.len() - 1
        };
        let leave = |nth: usize| records.lock().unwrap().admitted[nth].released = Some(Instant::now());
        let entered = if self.groups[group].calls_through_a_layer {
            let (enter, leave) = (&enter, &leave);
            // The handler is not interrupted: a request that is dropped has left before.
            let (sender, mut admitted) = tokio::sync::oneshot::channel();
            let sender = Mutex::new(Some(sender));
            let sender = &sender;
            let service = self
                .layer(store, group)
                .layer(service_fn(move |request: Request<Body>| async move {
                    let decision = request.extensions().get::<Decision>().expect("it was decided");
                    let nth = enter(decision);
                    if let Some(sender) = sender.lock().unwrap().take() {
                        let _ = sender.send(()); // the caller waits for it
                    }
                    sleep(hold).await;
                    leave(nth);
                    Ok::<_, Infallible>(Response::new(Body::new()))
                }));
            let mut response = std::pin::pin!(service.oneshot(Request::new(Body::new())));
            let is_admitted = tokio::select! {
                biased;
                _ = &mut response => return self.leave_unless_admitted(records, group, admitted.try_recv().is_ok()),
                entered = &mut admitted => entered.is_ok(),
                () = sleep(patience) => false,
            };
            if is_admitted {
                let response = response.await.expect("it never fails");
                assert!(response.status().is_success());
            }
            is_admitted
        } else {
            let limiter = self.limiter(store, group, true);
            let request = limiter.request(Key::constant("k")).plan(PLANS[self.groups[group].plan]);
            match timeout(patience, request.acquire()).await {
                Ok(Ok(decision)) => {
                    let nth = enter(&decision);
                    sleep(hold).await;
                    leave(nth);
                    true
                }
                Ok(Err(_)) | Err(_) => false,
            }
        };
        self.leave_unless_admitted(records, group, entered);
    }

    fn leave_unless_admitted(&self, records: &Mutex<Records>, group: usize, admitted: bool) {
        if !admitted {
            records.lock().unwrap().waiting[group] -= 1;
        }
    }

    /// No request waits while all of its limits have room for it for more than a tenth of a second; in Redis, two seconds. Behind one of
    /// another plan which has no room, it does.
    async fn verify_no_wait_in_vain(
        self: Arc<Self>,
        store: impl Store + Clone,
        records: Arc<Mutex<Records>>,
        until: Instant,
        is_virtual: bool,
    ) {
        // When an override ends, a request that waits learns it within a second.
        let most = match (is_virtual, self.exception) {
            (true, Some(Exception::Override)) => SECOND + SECOND / 10,
            (true, _) => SECOND / 10,
            (false, _) => 2 * SECOND,
        };
        let plain: Vec<_> = (0..self.groups.len())
            .map(|group| self.limiter(&store, group, false))
            .collect();
        let mut waited = vec![None; plain.len()];
        let waits = |records: &Mutex<Records>| records.lock().unwrap().waiting.iter().any(|waiting| *waiting > 0);
        while Instant::now() < until || waits(&records) {
            let began = Instant::now();
            sleep(10 * MILLISECOND).await;
            let mut fitting = Vec::new();
            for (group, limiter) in plain.iter().enumerate() {
                let request = limiter.request(Key::constant("k")).plan(PLANS[self.groups[group].plan]);
                fitting.push(request.peek().await.expect("it replies").is_allowed());
            }
            let took = began.elapsed().saturating_sub(10 * MILLISECOND);
            {
                let mut records = records.lock().unwrap();
                records.few_round_trips = records.few_round_trips.max(took);
            }
            if Instant::now() >= until {
                continue; // what round trips take is of interest alone
            }
            for group in 0..plain.len() {
                let waiting = records.lock().unwrap().waiting.clone();
                let is_behind = self.groups.iter().enumerate().any(|(other, before)| {
                    let shares = before
                        .policies
                        .iter()
                        .any(|nth| self.groups[group].policies.contains(nth));
                    before.plan != self.groups[group].plan && shares && waiting[other] > 0 && !fitting[other]
                });
                if !fitting[group] || waiting[group] == 0 || is_behind {
                    waited[group] = None;
                    continue;
                }
                // Not what the machine is busy with something else.
                let passed = began.elapsed().min(50 * MILLISECOND);
                let so_far = waited[group].map_or(Duration::ZERO, |before| before + passed);
                waited[group] = Some(so_far);
                assert!(so_far <= most, "group {group} waits in vain: {self:?}");
            }
        }
    }

    fn verify(&self, records: &Records, is_virtual: bool) {
        let first = records.admitted.first().expect("a request is admitted");
        if is_virtual {
            for one in &records.admitted {
                let (by_store, by_caller) = (
                    one.server_time.saturating_sub(first.server_time),
                    one.continued - first.continued,
                );
                assert!(by_store.abs_diff(by_caller) <= 2 * MILLISECOND, "{one:?} of {self:?}");
            }
        }
        for nth in 0..self.policies.len() {
            self.verify_limit(nth, records);
        }
        if self.exception == Some(Exception::Ban) {
            self.verify_bans(records);
        }
        self.verify_order(records, is_virtual);
    }

    /// While a ban is in force, its policies admit nothing.
    fn verify_bans(&self, records: &Records) {
        for one in &records.admitted {
            let shares = |nth| self.groups[one.group].policies.contains(nth);
            let is_banned = self.groups[0].policies.iter().any(shares)
                && records
                    .exceptions
                    .iter()
                    .any(|[_, from, until, _]| (*from..*until).contains(&one.server_time));
            assert!(!is_banned, "{one:?} is admitted during a ban: {self:?}");
        }
    }

    /// The limit by which a request is decided: an override if that was in force when it arrived, as requests that wait learn later.
    fn limit_of(&self, nth: usize, one: &Admitted, records: &Records) -> Limit {
        let (_, limits, _, rate) = &self.policies[nth];
        let planned = limits[self.groups[one.group].plan].clone();
        let is_overridden = self.exception == Some(Exception::Override)
            && nth == self.groups[0].policies[0]
            && records.exceptions.iter().any(|[_, from, until, _]| {
                let arrived = one.server_time.saturating_sub(one.continued - one.arrived);
                *from + 20 * MILLISECOND <= arrived && one.server_time < *until
            });
        match is_overridden {
            true => limit_of_quota_2(&planned, *rate),
            false => planned,
        }
    }

    fn verify_limit(&self, nth: usize, records: &Records) {
        let (name, _, cost, rate) = &self.policies[nth];
        let counts = |one: &&Admitted| self.groups[one.group].policies.contains(&nth);
        let mut admitted: Vec<&Admitted> = records.admitted.iter().filter(counts).collect();
        admitted.sort_by_key(|one| one.server_time);
        // A reset lets a quota more pass within a window of it.
        let is_reset = self.groups[0].policies.contains(&nth);
        let resets = |from: Duration, until: Duration| {
            let near = |[before, after]: &&[Duration; 2]| *after + SECOND >= from && *before <= until + SECOND;
            is_reset && records.resets.iter().any(|reset| near(&reset))
        };
        for (position, one) in admitted.iter().enumerate() {
            let at = one.server_time;
            // Which of those that are admitted at once was the first is not known.
            let at_once = admitted
                .iter()
                .filter(|other| other.server_time.abs_diff(at) <= 20 * MILLISECOND);
            let limits = at_once.map(|other| self.limit_of(nth, other, records));
            let limit = limits.max_by_key(Limit::quota).expect("its own");
            let within = |window: Duration| {
                admitted[..=position]
                    .iter()
                    .filter(move |other| other.server_time + window > at)
            };
            match &limit {
                Limit::SlidingLog(_) => {
                    let weight = within(SECOND).count() as u64 * cost;
                    let is_kept = weight <= limit.quota() || resets(at.saturating_sub(SECOND), at);
                    assert!(is_kept, "{weight} of {name} in a second: {self:?}");
                }
                Limit::TokenBucket(_) => {
                    for other in &admitted[..=position] {
                        let span = at - other.server_time;
                        let weight = admitted[..=position]
                            .iter()
                            .filter(|one| one.server_time >= other.server_time);
                        let weight = weight.count() as u64 * cost;
                        let most = limit.quota() as f64 + *rate as f64 * span.as_secs_f64() + 0.001;
                        let is_kept = weight as f64 <= most || resets(other.server_time, at);
                        assert!(is_kept, "{weight} of {name} in {span:?}: {self:?}");
                    }
                }
                Limit::Concurrency(_) => {
                    let holds = |other: &&&Admitted| {
                        let released = other.released.is_none_or(|released| released > one.continued);
                        other.continued <= one.continued && released
                    };
                    let held = admitted.iter().filter(holds).count() as u64 * cost;
                    let is_kept = held <= limit.quota() || resets(at.saturating_sub(SECOND), at);
                    assert!(is_kept, "{held} of {name} are held: {self:?}");
                }
                other => panic!("{other} is not in a world"),
            }
        }
    }

    /// Equal requests are admitted in the order of their arrival, if that differs by more than a few round trips. Those of several
    /// policies may be so in another one if all of their keys get room within a round trip, which takes no virtual time. Those of
    /// which an override decides some are not equal.
    fn verify_order(&self, records: &Records, is_virtual: bool) {
        let few_round_trips = records.few_round_trips.max(30 * MILLISECOND);
        for one in &records.admitted {
            let overtaken = records.admitted.iter().find(|other| {
                let is_equal = other.group == one.group && (is_virtual || self.groups[one.group].policies.len() == 1);
                let overridden = self.groups[0].policies.first();
                let is_overridden = self.exception == Some(Exception::Override)
                    && self.groups[one.group]
                        .policies
                        .iter()
                        .any(|nth| Some(nth) == overridden);
                let is_equal = is_equal && !is_overridden;
                let is_before = one.arrived + few_round_trips < other.arrived;
                is_equal && is_before && other.continued + few_round_trips < one.continued
            });
            assert!(overtaken.is_none(), "{overtaken:?} overtook {one:?}: {self:?}");
        }
    }
}

/// A limit, with the tokens of a bucket that come in a second.
fn limit(algorithm: u32, rate: u64, quota: u64) -> Limit {
    match algorithm {
        0 => SlidingLog::per_second(quota).into(),
        1 => TokenBucket::per_second(rate).burst(quota).into(),
        _ => Concurrency::new(quota).into(),
    }
}

/// The same limit with this quota.
fn limit_of_quota_2(same: &Limit, rate: u64) -> Limit {
    let algorithm = match same {
        Limit::SlidingLog(_) => 0,
        Limit::TokenBucket(_) => 1,
        _ => 2,
    };
    limit(algorithm, rate, 2)
}

/// The seeds of so many worlds; `TOWER_QUOTA_WORLDS` replaces the number, and `TOWER_QUOTA_SEED` repeats a world.
fn seeds(worlds: u64) -> impl Iterator<Item = u64> {
    let given = number("TOWER_QUOTA_SEED");
    let first = given.unwrap_or_else(|| RandomState::new().hash_one(0));
    let worlds = number("TOWER_QUOTA_WORLDS").unwrap_or(worlds);
    (0..given.map_or(worlds, |_| 1)).map(move |nth| first.wrapping_add(nth))
}

#[tokio::test(start_paused = true)]
async fn waits_keep_what_is_promised_in_virtual_time() {
    for seed in seeds(8) {
        println!("seed {seed}");
        World::new(seed).run(MemoryStore::new(), 15 * SECOND, true).await;
    }
}

#[tokio::test]
async fn waits_keep_what_is_promised_in_redis() {
    let redis = Redis::start();
    for seed in seeds(3) {
        redis.command::<()>("FLUSHALL", [""; 0]).await;
        let store = connected(patient().overrides(true), &redis.url()).await;
        World::new(seed).run(store, 4 * SECOND, false).await;
    }
}
