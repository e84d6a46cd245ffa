//! The callers of a schedule and their requests.

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
use tokio::time::{Instant, sleep, timeout};

use super::{
    history::{Record, SettlementRecord},
    network::Network,
    plan::{Kind, Plan},
    runtime::Runtime,
};
use crate::{
    Ban, Concurrency, FailureMode, FixedWindow, Key, Limit, Limiter, Policy, SlidingLog,
    store::{
        Charge, Operation, Store, StoreFuture, StoreRequest,
        redis::{key_format::KeyFormat, store::RedisStore},
    },
};

/// A limit of each hour of a calendar; of the clock without the feature `calendar`.
pub(super) fn hourly(quota: u64) -> Limit {
    #[cfg(feature = "calendar")]
    let hourly = FixedWindow::calendar(quota, crate::limit::Calendar::Hour, "UTC").expect("a time zone");
    #[cfg(not(feature = "calendar"))]
    let hourly = FixedWindow::per_hour(quota).aligned();
    hourly.into()
}

/// A request with its charges.
pub(super) struct SimulatedRequest {
    pub(super) kind: Kind,
    pub(super) charges: Vec<(&'static str, Limit, Key)>,
    pub(super) ban: Option<Ban>,
}

impl SimulatedRequest {
    pub(super) fn new(kind: Kind, number: usize, rng: &mut Rng) -> Self {
        let roomy = || Limit::from(SlidingLog::per_hour(1_000));
        let own = || Key::from(format!("own-{number}"));
        let shared = |rng: &mut Rng| Key::from(format!("shared-{}", rng.u32(..3)));
        let charges = match kind {
            Kind::Shared | Kind::Peek | Kind::Reset => {
                let limit = SlidingLog::new(Plan::QUOTA, Plan::WINDOW);
                vec![("shared", limit.into(), shared(rng))]
            }
            Kind::Own | Kind::OwnCharge => vec![("own", roomy(), own())],
            Kind::Settled { .. } => vec![("settled", roomy(), own())],
            Kind::Held { .. } => {
                let slots = Concurrency::new(Plan::SLOTS).lease(Plan::LEASE);
                vec![("held", slots.into(), Key::from(format!("slots-{}", rng.u32(..2))))]
            }
            Kind::OwnPair => vec![("own", roomy(), own()), ("pair", roomy(), own())],
            Kind::Banned => {
                let key = Key::from(format!("banned-{}", rng.u32(..2)));
                vec![("banned", SlidingLog::new(1, Plan::WINDOW).into(), key)]
            }
            Kind::Calendar => {
                vec![("calendar", hourly(1_000), shared(rng))]
            }
            Kind::Across => {
                let other = Key::from(format!("other-{number}"));
                vec![
                    ("own", roomy(), own()),
                    ("other", roomy(), other),
                    ("full", SlidingLog::per_day(1).into(), Key::from("full")),
                ]
            }
        };
        let ban = Ban::after(Plan::DENIALS, Plan::WINDOW)
            .first(Plan::BAN)
            .longest(Plan::WINDOW);
        Self {
            kind,
            charges,
            ban: (kind == Kind::Banned).then_some(ban),
        }
    }

    /// A check of this shared key.
    pub(super) fn of_shared(key: &str) -> Self {
        let limit = SlidingLog::new(Plan::QUOTA, Plan::WINDOW).into();
        Self {
            kind: Kind::Shared,
            charges: vec![("shared", limit, Key::from(key))],
            ban: None,
        }
    }

    /// Whether the server would deny it now.
    pub(super) fn is_denied_by(&self, network: &Network) -> bool {
        let keys = self.redis_keys(&KeyFormat::new("quota", None));
        // Other denials of a key with bans are counted.
        if let (Some(ban), [.., key]) = (&self.ban, &keys[..]) {
            return network.is_banned(key, ban);
        }
        let mut charges = self.charges.iter().zip(&keys);
        charges.any(|((_, limit, _), key)| network.room(key, limit) == 0)
    }

    fn charges(&self) -> Vec<Charge> {
        let charge = |(policy, limit, key)| Charge::new(policy, limit, key, 1).ban(self.ban.as_ref());
        self.charges
            .iter()
            .map(|(policy, limit, key)| charge((*policy, limit, key)))
            .collect()
    }

    /// Calls a store; the future does not borrow the request.
    pub(super) fn call(&self, store: &RedisStore) -> StoreFuture {
        store.decide(&[StoreRequest::new(self.kind.operation(), &self.charges())])
    }

    pub(super) fn redis_keys(&self, key_format: &KeyFormat) -> Vec<String> {
        let charges = self.charges();
        let request = StoreRequest::new(Operation::Check, &charges);
        let keys = request.entries().map(|entry| key_format.of_entry(entry).concat());
        keys.map(|key| String::from_utf8(key).expect("text")).collect()
    }
}

pub(super) type Records = Arc<Mutex<Vec<Record>>>;

/// What all callers share.
#[derive(Clone)]
pub(super) struct Stage {
    pub(super) store: RedisStore,
    /// The stores of the processes that take slots, of which it is the first.
    pub(super) processes: Vec<RedisStore>,
    pub(super) network: Network,
    pub(super) records: Records,
    pub(super) polled: Arc<AtomicUsize>,
    /// Whether counts change without a request of the caller: the clock is set, or there are resets.
    pub(super) counts_jump: bool,
}

impl Stage {
    pub(super) fn end(&self, runtime: &Runtime) {
        self.disturb(runtime);
        runtime.end();
    }

    pub(super) fn stall(&self, runtime: &Runtime, lasts: Duration) {
        self.disturb(runtime);
        runtime.freeze();
        let runtime = runtime.clone();
        tokio::spawn(async move {
            sleep(lasts).await;
            runtime.thaw();
        });
    }

    /// Records that a runtime does not continue: its callers may have their responses late or never.
    fn disturb(&self, runtime: &Runtime) {
        for record in self.records.lock().expect("no panic").iter_mut() {
            if record.runtime == runtime.id() && record.responded_at.is_none() {
                record.disturbed = true;
            }
        }
    }

    pub(super) fn start(&self, caller: Caller, runtime: &Runtime) {
        let number = {
            let mut records = self.records.lock().expect("no panic");
            records.push(Record {
                kind: caller.request.kind,
                keys: caller.request.redis_keys(&self.store.queues.backend.key_format),
                runtime: runtime.id(),
                disturbed: !runtime.is_running(),
                order: None,
                polled_at: None,
                responded_at: None,
                left: false,
                cached: None,
                settlement: SettlementRecord::default(),
                held: None,
                lost: false,
                asked: None,
                response: None,
            });
            records.len() - 1
        };
        let (stage, its_runtime) = (self.clone(), runtime.clone());
        runtime.spawn(async move { caller.run(stage, number, its_runtime).await });
    }

    /// Waits until each caller is done or was dropped with its runtime.
    pub(super) async fn wait_for_callers(&self) {
        let gone = async {
            // A caller keeps a clone of the stage.
            while Arc::strong_count(&self.records) > 1 {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(60), gone)
            .await
            .expect("each caller is done some time after the last stall");
    }

    fn edit(&self, number: usize, edit: impl FnOnce(&mut Record)) {
        edit(&mut self.records.lock().expect("no panic")[number]);
    }
}

pub(super) struct Caller {
    pub(super) request: SimulatedRequest,
    /// The time from when the request is made until it is first polled.
    pub(super) delay: Duration,
    pub(super) leaves_after: Option<Duration>,
    pub(super) then: Then,
}

/// What happens to the runtime of a caller right after the caller was first polled.
pub(super) enum Then {
    Wait,
    End,
    Stall(Duration),
}

impl Caller {
    async fn run(self, stage: Stage, number: usize, runtime: Runtime) {
        if let Kind::Settled { actual } = self.request.kind {
            return self.settle(actual, stage, number).await;
        }
        if let Kind::Held { lasts, waits } = self.request.kind {
            return self.hold(lasts, waits, stage, number).await;
        }
        let mut future = match self.request.call(&stage.store).try_ready() {
            Ok(response) => {
                let mut cached = None;
                if let Ok(response) = &response {
                    let denies = !response.outcomes()[0].allowed;
                    cached = Some(denies && (stage.counts_jump || self.request.is_denied_by(&stage.network)));
                }
                let now = Some(Instant::now());
                return stage.edit(number, |record| {
                    (record.polled_at, record.responded_at) = (now, now);
                    record.cached = cached;
                    record.response = Some(response);
                });
            }
            Err(future) => future,
        };
        sleep(self.delay).await;

        let now = Instant::now();
        let first = stage.polled.fetch_add(1, Ordering::Relaxed);
        stage.edit(number, |record| {
            (record.polled_at, record.order) = (Some(now), Some(first))
        });
        let polled = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut future).poll(cx))).await;
        match self.then {
            Then::Wait => {}
            Then::End => stage.end(&runtime),
            Then::Stall(lasts) => stage.stall(&runtime, lasts),
        }
        let response = match (polled, self.leaves_after) {
            (Poll::Ready(response), _) => Some(response),
            (Poll::Pending, Some(after)) => timeout(after, future).await.ok(),
            (Poll::Pending, None) => Some(future.await),
        };
        let now = Instant::now();
        stage.edit(number, |record| {
            record.left = response.is_none();
            record.responded_at = Some(now);
            record.response = response;
        });
    }

    /// Takes a slot, which it may wait for, and holds it for some time.
    async fn hold(self, lasts: Duration, waits: bool, stage: Stage, number: usize) {
        let (policy, limit, key) = self.request.charges[0].clone();
        let policy = Policy::new(policy, limit)
            .failure_mode(FailureMode::Closed)
            .wait_up_to(Plan::SLOT_WAIT);
        let store = &stage.processes[number % stage.processes.len()];
        let limiter = Limiter::new(store.clone(), policy);
        sleep(self.delay).await;
        let hold = async {
            let asked_at = Instant::now();
            let decision = match waits {
                true => limiter.acquire(key).await.ok(),
                false => limiter.check(key).await.ok(),
            };
            let slots = decision.and_then(|decision| decision.take_slots());
            stage.edit(number, |record| record.asked = Some((asked_at, Instant::now())));
            let Some(slots) = slots else { return };
            let mut holding = Holding {
                stage: &stage,
                number,
                since: Instant::now(),
                until: None,
            };
            let ends = Instant::now() + lasts;
            while Instant::now() < ends {
                sleep(Duration::from_millis(10)).await;
                if slots.is_lost() {
                    holding.until = Some(Instant::now() - Duration::from_millis(10));
                    break;
                }
            }
            drop(holding);
            drop(slots);
        };
        match self.leaves_after {
            Some(after) => drop(timeout(after, hold).await),
            None => hold.await,
        }
    }

    /// Checks an estimate and settles its receipt, as an application does.
    async fn settle(self, actual: u64, stage: Stage, number: usize) {
        let (policy, limit, key) = self.request.charges[0].clone();
        let policy = Policy::new(policy, limit).failure_mode(FailureMode::Closed);
        let limiter = Limiter::new(stage.store.clone(), policy);
        sleep(self.delay).await;
        let settle = async {
            let Ok(decision) = limiter.request(key).cost(Plan::ESTIMATE).check().await else {
                return;
            };
            stage.edit(number, |record| record.settlement.admitted = decision.is_allowed());
            let receipt = decision.take_receipt();
            if !receipt.is_empty() {
                let confirmed = receipt.settle(actual).await.is_ok();
                stage.edit(number, |record| record.settlement.confirmed = confirmed);
            }
        };
        match self.leaves_after {
            Some(after) => drop(timeout(after, settle).await),
            None => settle.await,
        }
    }
}

/// Records for how long a slot is held, even if its caller is dropped.
struct Holding<'a> {
    stage: &'a Stage,
    number: usize,
    since: Instant,
    /// When it was lost, if it was.
    until: Option<Instant>,
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        let held = (self.since, self.until.unwrap_or_else(Instant::now));
        self.stage.edit(self.number, |record| {
            record.held = Some(held);
            record.lost = self.until.is_some();
        });
    }
}
