//! One schedule: the callers, the network and the runtimes, from a seed.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use fastrand::Rng;
use tokio::{
    runtime::Builder,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    super::{
        RedisStore,
        ask::{Ask, Names},
        commit_queue::Group,
        deny_cache::DenyCache,
        link::Link,
        patience::Patience,
        queues::CommitQueues,
        script::SCRIPT,
        server::Server,
    },
    DEADLINE,
    history::{self, Record},
    network::{Faults, Network},
    runtime::Runtime,
};
use crate::{
    FixedWindow, Key, Limit, SlidingLog,
    limit::Calendar,
    store::{Charge, Operation, Store, StoreFuture, StoreRequest, health::Health},
};

/// What a schedule is made of.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) clustered: bool,
    pub(super) runtimes: usize,
    /// How many runtimes end while the faults last.
    pub(super) endings: usize,
    /// How often a runtime stands still while the faults last.
    pub(super) stalls: usize,
    pub(super) faults: Faults,
    /// Whether counts of shared keys are reset now and then.
    pub(super) resets: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            clustered: false,
            runtimes: 1,
            endings: 0,
            stalls: 0,
            faults: Faults::default(),
            resets: false,
        }
    }
}

impl Plan {
    /// The limit of the shared keys.
    pub(super) const QUOTA: u64 = 5;
    const WINDOW: Duration = Duration::from_millis(400);
    pub(super) const WINDOW_US: u64 = Self::WINDOW.as_micros() as u64;
    /// How long requests are made and faults last.
    const LASTS: Duration = Duration::from_millis(1_500);
    /// After the faults the server replies again within this time: a probe that has ended is replaced by a request, waits,
    /// and sends, and its reply closes the breaker.
    const RECOVERS: Duration = Duration::from_secs(1);
}

/// What a request is about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// A check of a key that all share, which often denies.
    Shared,
    /// A check of a key of its own, which has room.
    Own,
    OwnCharge,
    /// A check of two keys of its own in one slot.
    OwnPair,
    /// A check of a shared key with windows of a calendar.
    Calendar,
    Peek,
    Reset,
    /// A check of two keys of its own and of one that denies, in three slots.
    Across,
}

impl Kind {
    fn any(rng: &mut Rng, plan: &Plan) -> Self {
        match rng.u32(..100) {
            ..35 => Self::Shared,
            35..60 => Self::Own,
            60..70 => Self::OwnCharge,
            70..80 => Self::OwnPair,
            80..85 => Self::Calendar,
            85..92 => Self::Peek,
            92.. if plan.clustered => Self::Across,
            92.. if plan.resets => Self::Reset,
            _ => Self::Own,
        }
    }

    fn operation(self) -> Operation {
        match self {
            Self::OwnCharge => Operation::Charge,
            Self::Peek => Operation::Peek,
            Self::Reset => Operation::Reset,
            Self::Shared | Self::Own | Self::OwnPair | Self::Calendar | Self::Across => Operation::Check,
        }
    }
}

/// A request that can be made: what it charges.
struct Asked {
    kind: Kind,
    charges: Vec<(&'static str, Limit, Key)>,
}

impl Asked {
    fn new(kind: Kind, number: usize, rng: &mut Rng) -> Self {
        let roomy = || Limit::from(SlidingLog::per_hour(1_000));
        let own = || Key::from(format!("own-{number}"));
        let shared = |rng: &mut Rng| Key::from(format!("shared-{}", rng.u32(..3)));
        let charges = match kind {
            Kind::Shared | Kind::Peek | Kind::Reset => {
                vec![("shared", SlidingLog::new(Plan::QUOTA, Plan::WINDOW).into(), shared(rng))]
            }
            Kind::Own | Kind::OwnCharge => vec![("own", roomy(), own())],
            Kind::OwnPair => vec![("own", roomy(), own()), ("pair", roomy(), own())],
            Kind::Calendar => {
                let hourly = FixedWindow::calendar(1_000, Calendar::Hour, "UTC");
                vec![("calendar", hourly.into(), shared(rng))]
            }
            Kind::Across => vec![
                ("own", roomy(), own()),
                ("other", roomy(), Key::from(format!("other-{number}"))),
                ("full", SlidingLog::per_day(1).into(), Key::from("full")),
            ],
        };
        Self { kind, charges }
    }

    /// Calls a store, as a caller that leaves its borrowed values behind.
    fn call(&self, store: &RedisStore) -> StoreFuture {
        let charges: Vec<_> = self
            .charges
            .iter()
            .map(|(policy, limit, key)| Charge::new(policy, limit, key, 1))
            .collect();
        store.decide(&[StoreRequest::new(self.kind.operation(), &charges)])
    }

    fn redis_keys(&self, names: &Names) -> Vec<String> {
        let charges: Vec<_> = self
            .charges
            .iter()
            .map(|(policy, limit, key)| Charge::new(policy, limit, key, 1))
            .collect();
        let ask = Ask::new(names, &StoreRequest::new(Operation::Check, &charges));
        let text = |key: &[u8]| String::from_utf8(key.to_vec()).expect("text");
        ask.debits.iter().map(|debit| text(&debit.key)).collect()
    }
}

type Records = Arc<Mutex<Vec<Record>>>;

fn store(network: &Network) -> RedisStore {
    let server = Server {
        queues: CommitQueues::new(network.is_clustered()),
        link: Link::Simulated(network.clone()),
        script: &SCRIPT,
        names: Names::new("quota", None),
        deadline: DEADLINE,
        patience: Patience::new(DEADLINE),
        group: Group::COMMIT,
        deny_cache: Some(DenyCache::new()),
        refused: Health::default(),
    };
    RedisStore {
        server: Arc::new(server),
    }
}

/// Runs a schedule, and panics if a promise is broken.
pub(super) fn run(seed: u64, plan: &Plan) {
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(play(seed, plan));
}

async fn play(seed: u64, plan: &Plan) {
    let mut rng = Rng::with_seed(seed);
    let network = Network::new(rng.u64(..), plan.clustered);
    let store = store(&network);
    let started = Instant::now();
    let stage = Stage {
        store: store.clone(),
        network: network.clone(),
        records: Records::default(),
        order: Arc::default(),
        counts_jump: plan.faults.clock_step > 0 || plan.resets,
    };
    let mut runtimes: Vec<Runtime> = (0..plan.runtimes).map(|_| Runtime::default()).collect();

    if plan.clustered {
        let full = Asked::new(Kind::Across, usize::MAX, &mut rng);
        let (policy, limit, key) = &full.charges[2];
        let charges = [Charge::new(policy, limit, key, 1)];
        let filled = store.decide(&[StoreRequest::new(Operation::Charge, &charges)]).await;
        filled.expect("the network is good");
    }
    let learned = Asked::new(Kind::Own, usize::MAX, &mut rng).call(&store).await;
    learned.expect("the network is good");
    network.set_faults(plan.faults);

    // What happens, in the order of its time.
    let mut happenings: Vec<(Duration, Happening)> = Vec::new();
    let at = |rng: &mut Rng| Duration::from_micros(rng.u64(..Plan::LASTS.as_micros() as u64));
    // Most requests come in bursts, since only then is there a queue.
    let bursts: Vec<_> = (0..rng.u32(1..6)).map(|_| at(&mut rng)).collect();
    let in_burst = |rng: &mut Rng| bursts[rng.usize(..bursts.len())] + Duration::from_micros(rng.u64(..6_000));
    for _ in 0..rng.u32(1..40) {
        happenings.push((in_burst(&mut rng), Happening::StoreRequest));
    }
    happenings.extend((0..plan.endings).map(|_| (in_burst(&mut rng), Happening::End)));
    happenings.extend((0..plan.stalls).map(|_| (in_burst(&mut rng), Happening::Stall)));
    happenings.sort_by_key(|(at, _)| *at);

    for (number, (at, happening)) in happenings.into_iter().enumerate() {
        sleep_until(started + at).await;
        let place = rng.usize(..runtimes.len());
        match happening {
            Happening::StoreRequest => {
                let asked = Asked::new(Kind::any(&mut rng, plan), number, &mut rng);
                let late = rng.u32(..10) == 0;
                let patience = (rng.u32(..8) == 0).then(|| Duration::from_micros(rng.u64(..20_000)));
                let delay = late.then(|| Duration::from_micros(rng.u64(..500_000)));
                let then = match rng.u32(..12) {
                    0 if plan.endings > 0 => Then::End,
                    1 if plan.stalls > 0 => Then::Stall(Duration::from_micros(rng.u64(..600_000))),
                    _ => Then::Wait,
                };
                let caller = Caller {
                    asked,
                    delay: delay.unwrap_or_default(),
                    leaves_after: patience,
                    then,
                };
                if !runtimes[place].has_ended() {
                    stage.start(caller, &runtimes[place]);
                }
            }
            Happening::End => {
                stage.end(&runtimes[place]);
                runtimes[place] = Runtime::default();
            }
            Happening::Stall => stage.stall(&runtimes[place], Duration::from_micros(rng.u64(..600_000))),
        }
    }

    sleep_until(started + Plan::LASTS).await;
    network.set_faults(Faults::default());
    if plan.resets {
        sleep(DEADLINE).await;
        deny_cache_agrees(&store, &network).await;
    }
    let survivor = Runtime::default();
    recovers(&store, &survivor).await;
    // Past every deadline, stall and late request.
    sleep(Duration::from_secs(3)).await;
    settled(plan, &store, &network, &stage.records).await;

    let records = stage.records.lock().expect("no panic").clone();
    if std::env::var_os("TOWER_QUOTA_SEED").is_some() {
        eprintln!("{:#?}", network.events());
    }
    history::check(plan, &records, &network);
}

enum Happening {
    StoreRequest,
    End,
    Stall,
}

/// What all callers share.
#[derive(Clone)]
struct Stage {
    store: RedisStore,
    network: Network,
    records: Records,
    order: Arc<AtomicUsize>,
    /// Whether counts change without a request: the clock is set, or resets are on their way.
    counts_jump: bool,
}

impl Stage {
    fn end(&self, runtime: &Runtime) {
        self.disturb(runtime);
        runtime.end();
    }

    fn stall(&self, runtime: &Runtime, lasts: Duration) {
        self.disturb(runtime);
        runtime.freeze();
        let runtime = runtime.clone();
        tokio::spawn(async move {
            sleep(lasts).await;
            runtime.thaw();
        });
    }

    /// Notes that a runtime does not keep running: its callers may be answered late or never.
    fn disturb(&self, runtime: &Runtime) {
        for record in self.records.lock().expect("no panic").iter_mut() {
            if record.runtime == runtime.id() && record.answered_at.is_none() {
                record.disturbed = true;
            }
        }
    }

    fn start(&self, caller: Caller, runtime: &Runtime) {
        let number = {
            let mut records = self.records.lock().expect("no panic");
            records.push(Record {
                kind: caller.asked.kind,
                keys: caller.asked.redis_keys(&self.store.server.names),
                runtime: runtime.id(),
                disturbed: !runtime.is_running(),
                order: None,
                polled_at: None,
                answered_at: None,
                left: false,
                cached: None,
                answer: None,
            });
            records.len() - 1
        };
        let (stage, its_runtime) = (self.clone(), runtime.clone());
        runtime.spawn(async move { caller.run(stage, number, its_runtime).await });
    }

    fn edit(&self, number: usize, edit: impl FnOnce(&mut Record)) {
        edit(&mut self.records.lock().expect("no panic")[number]);
    }
}

struct Caller {
    asked: Asked,
    /// How long after the request was made it is first polled.
    delay: Duration,
    leaves_after: Option<Duration>,
    then: Then,
}

/// What happens to the runtime of a caller right after the caller was first polled.
enum Then {
    Wait,
    End,
    Stall(Duration),
}

impl Caller {
    async fn run(self, stage: Stage, number: usize, runtime: Runtime) {
        let mut reply = match self.asked.call(&stage.store).try_ready() {
            Ok(answer) => {
                let mut cached = None;
                if let Ok(answer) = &answer {
                    let denies = !answer.outcomes[0].allowed;
                    cached = Some(denies && (stage.counts_jump || self.is_denied_by(&stage.network).await));
                }
                let now = Some(Instant::now());
                return stage.edit(number, |record| {
                    (record.polled_at, record.answered_at) = (now, now);
                    record.cached = cached;
                    record.answer = Some(answer);
                });
            }
            Err(reply) => reply,
        };
        sleep(self.delay).await;

        let now = Instant::now();
        let first = stage.order.fetch_add(1, Ordering::Relaxed);
        stage.edit(number, |record| {
            (record.polled_at, record.order) = (Some(now), Some(first))
        });
        let polled = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut reply).poll(cx))).await;
        match self.then {
            Then::Wait => {}
            Then::End => stage.end(&runtime),
            Then::Stall(lasts) => stage.stall(&runtime, lasts),
        }
        let answer = match (polled, self.leaves_after) {
            (Poll::Ready(answer), _) => Some(answer),
            (Poll::Pending, Some(patience)) => timeout(patience, reply).await.ok(),
            (Poll::Pending, None) => Some(reply.await),
        };
        let now = Instant::now();
        stage.edit(number, |record| {
            record.left = answer.is_none();
            record.answered_at = Some(now);
            record.answer = answer;
        });
    }

    /// Whether the server would deny it now.
    async fn is_denied_by(&self, network: &Network) -> bool {
        let names = Names::new("quota", None);
        let keys = self.asked.redis_keys(&names);
        for ((_, limit, _), key) in self.asked.charges.iter().zip(&keys) {
            if !network.has_room(key, limit, 1).await {
                return true;
            }
        }
        false
    }
}

/// What the deny cache denies, the server would deny too, once no reset is on its way.
async fn deny_cache_agrees(store: &RedisStore, network: &Network) {
    for key in ["shared-0", "shared-1", "shared-2"] {
        let asked = Asked {
            kind: Kind::Shared,
            charges: vec![(
                "shared",
                SlidingLog::new(Plan::QUOTA, Plan::WINDOW).into(),
                Key::from(key),
            )],
        };
        let caller = Caller {
            asked,
            delay: Duration::ZERO,
            leaves_after: None,
            then: Then::Wait,
        };
        let denied = caller.is_denied_by(network).await;
        if let Ok(Ok(_)) = caller.asked.call(store).try_ready() {
            assert!(denied, "the deny cache denies {key}, and the server would admit it");
        }
    }
}

/// A store finds a server again that replies, whatever happened to the tasks that probed it.
async fn recovers(store: &RedisStore, runtime: &Runtime) {
    let (store, since) = (store.clone(), Instant::now());
    let (sender, recovered) = tokio::sync::oneshot::channel();
    runtime.spawn(async move {
        let mut successes = 0;
        while successes < 3 {
            let asked = Asked {
                kind: Kind::Own,
                charges: vec![("recovery", SlidingLog::per_hour(1_000).into(), Key::from("full"))],
            };
            match asked.call(&store).await {
                Ok(_) => successes += 1,
                Err(error) => assert!(
                    since.elapsed() < Plan::RECOVERS,
                    "the server replies, and still: {error}"
                ),
            }
            sleep(Duration::from_millis(20)).await;
        }
        let _ = sender.send(());
    });
    recovered.await.expect("the store recovers");
}

/// In the end no call counts as on its way, nothing waits, and what was charged for denied requests is refunded.
async fn settled(plan: &Plan, store: &RedisStore, network: &Network, records: &Records) {
    assert!(store.server.queues.are_idle(), "calls or requests are left in a queue");
    let calls = network.calls();
    sleep(Duration::from_secs(2)).await;
    assert_eq!(network.calls(), calls, "nothing probes a server that replies");

    // Entries ahead of a clock that was set back may count now.
    let shared = match plan.faults.clock_step {
        0 => &["shared-0", "shared-1", "shared-2"][..],
        _ => &[],
    };
    for key in shared {
        let asked = Asked {
            kind: Kind::Shared,
            charges: vec![(
                "shared",
                SlidingLog::new(Plan::QUOTA, Plan::WINDOW).into(),
                Key::from(*key),
            )],
        };
        let denied = !matches!(asked.call(store).await, Ok(answer) if answer.outcomes[0].allowed);
        assert!(!denied, "{key} is denied, and nothing was charged for seconds");
    }

    if plan.clustered && plan.faults.slow == 0 {
        for record in records.lock().expect("no panic").iter() {
            if record.kind == Kind::Across {
                for own in &record.keys[..2] {
                    let charged = network.charged(own).len() as u64;
                    let refunded = network.refunded(own);
                    assert_eq!(refunded, charged, "{own} is charged for a denied request: {record:?}");
                }
            }
        }
    }
}
