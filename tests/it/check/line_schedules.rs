//! Random callers of limiters and layers that share policies in several orders: what the documentation promises of requests that wait
//! holds for the instants at which callers continue, in virtual time, and for the time of Redis.

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
    Concurrency, Decision, Key, Limit, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, TokenBucket, key,
    store::Store,
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
    /// Their names, limits, costs, and of buckets the tokens that come in a second.
    policies: Vec<(String, Limit, u64, u64)>,
    /// For each group of callers its policies, in its order; whether it calls through a layer, and how long it waits.
    groups: Vec<(Vec<usize>, bool, Duration)>,
    /// How long callers wait on average until they leave.
    patience: Duration,
    resets: bool,
}

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
    resets: Vec<Duration>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let policies = (0..rng.usize(1..=3)).map(|nth| {
            let (quota, cost) = (rng.u64(2..=4), rng.u64(1..=2));
            let limit = match rng.u32(..4) {
                0 => SlidingLog::per_second(quota).into(),
                1 => TokenBucket::per_second(quota).burst(rng.u64(2..=3)).into(),
                _ => Concurrency::new(quota).into(),
            };
            (format!("policy-{nth}"), limit, cost, quota)
        });
        let policies: Vec<_> = policies.collect();
        let groups = (0..rng.usize(2..=4)).map(|_| {
            let mut chosen: Vec<usize> = (0..policies.len()).collect();
            rng.shuffle(&mut chosen);
            chosen.truncate(rng.usize(1..=policies.len()));
            (chosen, rng.bool(), rng.u32(1..=6) * SECOND / 2)
        });
        Self {
            seed,
            groups: groups.collect(),
            patience: [SECOND / 2, SECOND, 60 * SECOND][rng.usize(..3)],
            resets: rng.u32(..3) == 0,
            policies,
        }
    }

    fn policies_of(&self, group: usize, wait: bool) -> Vec<Policy<()>> {
        let (chosen, _, longest) = &self.groups[group];
        let policies = chosen.iter().map(|nth| {
            let (name, limit, cost, _) = self.policies[*nth].clone();
            let policy = Policy::new(name, limit).cost(cost);
            if wait { policy.wait_up_to(*longest) } else { policy }
        });
        policies.collect()
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
        if world.resets {
            let (world, store, records) = (world.clone(), store.clone(), records.clone());
            tasks.spawn(async move {
                while start.elapsed() < length {
                    sleep(700 * MILLISECOND).await;
                    let limiter = Limiter::new(store.clone(), world.policies_of(0, true));
                    let reset = limiter
                        .peek(Key::constant("k"))
                        .await
                        .expect("it replies")
                        .server_time();
                    limiter.reset(Key::constant("k")).await.expect("it replies");
                    records.lock().unwrap().resets.push(reset);
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
        let entered = if self.groups[group].1 {
            let policies = self.policies_of(group, true).into_iter();
            let policies: Vec<_> = policies.map(|policy| policy.key(key::constant("k"))).collect();
            let (enter, leave) = (&enter, &leave);
            // The handler is not interrupted: a request that is dropped has left before.
            let (sender, mut admitted) = tokio::sync::oneshot::channel();
            let sender = Mutex::new(Some(sender));
            let sender = &sender;
            let service = RateLimitLayer::new(store.clone(), policies).layer(service_fn(
                move |request: Request<Body>| async move {
                    let decision = request.extensions().get::<Decision>().expect("it was decided");
                    let nth = enter(decision);
                    if let Some(sender) = sender.lock().unwrap().take() {
                        let _ = sender.send(()); // the caller waits for it
                    }
                    sleep(hold).await;
                    leave(nth);
                    Ok::<_, Infallible>(Response::new(Body::new()))
                },
            ));
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
            let limiter = Limiter::new(store.clone(), self.policies_of(group, true));
            match timeout(patience, limiter.acquire(Key::constant("k"))).await {
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

    /// No request waits while all of its limits have room for it for more than a tenth of a second; in Redis, two seconds.
    async fn verify_no_wait_in_vain(
        self: Arc<Self>,
        store: impl Store + Clone,
        records: Arc<Mutex<Records>>,
        until: Instant,
        is_virtual: bool,
    ) {
        let most = if is_virtual { SECOND / 10 } else { 2 * SECOND };
        let plain = (0..self.groups.len()).map(|group| Limiter::new(store.clone(), self.policies_of(group, false)));
        let plain: Vec<_> = plain.collect();
        let mut since = vec![None; plain.len()];
        while Instant::now() < until {
            sleep(10 * MILLISECOND).await;
            for (group, limiter) in plain.iter().enumerate() {
                let fits = limiter.peek(Key::constant("k")).await.expect("it replies").is_allowed();
                let waits = records.lock().unwrap().waiting[group] > 0;
                if !fits || !waits {
                    since[group] = None;
                    continue;
                }
                let waits_since = *since[group].get_or_insert_with(Instant::now);
                assert!(waits_since.elapsed() <= most, "group {group} waits in vain: {self:?}");
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
        self.verify_order(records, is_virtual);
    }

    fn verify_limit(&self, nth: usize, records: &Records) {
        let (name, limit, cost, rate) = &self.policies[nth];
        let counts = |one: &&Admitted| self.groups[one.group].0.contains(&nth);
        let mut admitted: Vec<&Admitted> = records.admitted.iter().filter(counts).collect();
        admitted.sort_by_key(|one| one.server_time);
        // A reset lets a quota more pass within a window of it.
        let is_reset = self.groups[0].0.contains(&nth);
        let resets = |from: Duration, until: Duration| {
            let near = |reset: &&Duration| **reset + SECOND >= from && **reset <= until + SECOND;
            is_reset && records.resets.iter().any(|reset| near(&reset))
        };
        for (position, one) in admitted.iter().enumerate() {
            let at = one.server_time;
            let within = |window: Duration| {
                admitted[..=position]
                    .iter()
                    .filter(move |other| other.server_time + window > at)
            };
            match limit {
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
    /// policies may be so in another one if all of their keys get room within a round trip, which takes no virtual time.
    fn verify_order(&self, records: &Records, is_virtual: bool) {
        for one in &records.admitted {
            let overtaken = records.admitted.iter().find(|other| {
                let is_equal = other.group == one.group && (is_virtual || self.groups[one.group].0.len() == 1);
                let is_before = one.arrived + 30 * MILLISECOND < other.arrived;
                is_equal && is_before && other.continued + 30 * MILLISECOND < one.continued
            });
            assert!(overtaken.is_none(), "{overtaken:?} overtook {one:?}: {self:?}");
        }
    }
}

fn seeds(worlds: u64) -> impl Iterator<Item = u64> {
    let given = number("TOWER_QUOTA_SEED");
    let first = given.unwrap_or_else(|| RandomState::new().hash_one(0));
    (0..given.map_or(worlds, |_| 1)).map(move |nth| first.wrapping_add(nth))
}

#[tokio::test(start_paused = true)]
async fn waits_keep_what_is_promised_in_virtual_time() {
    for seed in seeds(20) {
        World::new(seed).run(MemoryStore::new(), 15 * SECOND, true).await;
    }
}

#[tokio::test]
async fn waits_keep_what_is_promised_in_redis() {
    let redis = Redis::start();
    for seed in seeds(3) {
        redis.command::<()>("FLUSHALL", [""; 0]).await;
        let store = connected(patient(), &redis.url()).await;
        World::new(seed).run(store, 4 * SECOND, false).await;
    }
}
