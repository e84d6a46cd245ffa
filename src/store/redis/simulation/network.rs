//! A Redis with the algorithms of this crate, behind a network with faults.

use std::{
    collections::{BTreeMap, HashMap},
    future::pending,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use fastrand::Rng;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep},
};

use super::{
    arguments::{NODES, ParsedCharge, ParsedRequest, ReceivedCall, has_moved},
    faults::{Event, Fate, Faults},
    plan::DEADLINE,
};
use crate::{
    Ban, Key, Limit, MemoryStore, SlidingLog,
    store::{
        Charge, ChargeState, LeaseId, Operation, Outcome, Store, StoreRequest,
        health::{Health, Node},
        redis::{
            acl::Refusal,
            backend::Backend,
            builder::RedisStoreBuilder,
            call::ScriptCall,
            client::{ClusterNodes, HashTags, RedisClient},
            failure::Failure,
            reply::RawReply,
            script::EvalCommand,
        },
    },
};

/// The network to a simulated Redis.
#[derive(Clone)]
pub(in crate::store::redis) struct Network(Arc<Shared>);

struct Shared {
    clustered: bool,
    server: Mutex<ServerState>,
    clock: Arc<Clock>,
    counts: MemoryStore,
    health: Arc<Health>,
    nodes: Vec<Arc<Node>>,
}

struct ServerState {
    rng: Rng,
    faults: Faults,
    has_script: bool,
    calls: usize,
    /// By key: the numbers of the calls in which it was sent, with its position in the call.
    sent: HashMap<String, Vec<(usize, usize)>>,
    /// By key: the times by the clock of the server, and the costs that were charged.
    charged: HashMap<String, Vec<(u64, u64)>>,
    refunded: HashMap<String, u64>,
    /// By lease: when its operations were sent.
    leases: HashMap<LeaseId, Vec<(Instant, Operation)>>,
    /// Other events, for the report of a failure.
    events: BTreeMap<usize, String>,
}

struct Clock {
    started: Instant,
    /// How much the clock was set by, in microseconds as a two's complement.
    step: AtomicU64,
}

/// 2027-01-15 08:00:00 UTC, in microseconds.
pub(in crate::store::redis) const EPOCH: u64 = 1_800_000_000_000_000;

impl Clock {
    fn now(&self) -> u64 {
        let elapsed = self.started.elapsed().as_micros() as u64;
        (EPOCH + elapsed).wrapping_add(self.step.load(Ordering::Relaxed))
    }
}

impl ClusterNodes for Network {
    /// The node of a slot, of which a cluster has [`NODES`].
    fn node(&self, slot: u16) -> Option<Arc<Node>> {
        self.0.nodes.get(usize::from(slot) % NODES).cloned()
    }

    fn hash_tags(&self) -> Result<Vec<HashTags>, Failure> {
        Ok(vec![(0, None)])
    }

    fn lookup_refusal(&self) -> Option<Refusal> {
        None
    }
}

/// A backend on a simulated network, without a deny cache.
pub(in crate::store::redis) fn simulated_backend(network: Network) -> Backend {
    let settings = RedisStoreBuilder::new().deadline(DEADLINE).deny_cache(false);
    Backend::new(RedisClient::Simulated(network), &settings)
}

impl Network {
    pub(in crate::store::redis) fn new(seed: u64, clustered: bool) -> Self {
        let clock = Arc::new(Clock {
            started: Instant::now(),
            step: AtomicU64::new(0),
        });
        let read = clock.clone();
        let server = ServerState {
            rng: Rng::with_seed(seed),
            faults: Faults::default(),
            has_script: false,
            calls: 0,
            sent: HashMap::new(),
            charged: HashMap::new(),
            refunded: HashMap::new(),
            leases: HashMap::new(),
            events: BTreeMap::new(),
        };
        Self(Arc::new(Shared {
            clustered,
            server: Mutex::new(server),
            counts: MemoryStore::builder()
                .capacity(4_096)
                .clock(move || Duration::from_micros(read.now()))
                .build(),
            clock,
            health: Arc::default(),
            nodes: (0..NODES).map(|node| Node::new(node.to_string())).collect(),
        }))
    }

    pub(in crate::store::redis) fn health(&self) -> &Arc<Health> {
        &self.0.health
    }

    pub(in crate::store::redis) fn cluster(&self) -> Option<&dyn ClusterNodes> {
        if self.0.clustered { Some(self) } else { None }
    }

    pub(in crate::store::redis) fn set_faults(&self, faults: Faults) {
        self.server().faults = faults;
    }

    /// From now on, the connection breaks before each call arrives.
    pub(in crate::store::redis) fn cut_off(&self) {
        self.set_faults(Faults {
            cut_before: 1_000,
            ..Faults::default()
        });
    }

    /// From now on, the connection breaks after each call was executed.
    #[cfg(feature = "metrics")]
    pub(in crate::store::redis) fn lose_replies(&self) {
        self.set_faults(Faults {
            cut_after: 1_000,
            ..Faults::default()
        });
    }

    /// From now on, there is no reply to a call that was executed.
    pub(in crate::store::redis) fn fall_silent(&self) {
        self.set_faults(Faults {
            reply_lost: 1_000,
            ..Faults::default()
        });
    }

    /// From now on, the server replies to each call with an error.
    #[cfg(feature = "metrics")]
    pub(in crate::store::redis) fn refuse(&self) {
        self.set_faults(Faults {
            error: 1_000,
            ..Faults::default()
        });
    }

    pub(in crate::store::redis) fn heal(&self) {
        self.set_faults(Faults::default());
    }

    pub(in crate::store::redis) fn calls(&self) -> usize {
        self.server().calls
    }

    pub(super) fn sent(&self, key: &str) -> Vec<(usize, usize)> {
        self.server().sent.get(key).cloned().unwrap_or_default()
    }

    pub(in crate::store::redis) fn charged(&self, key: &str) -> Vec<(u64, u64)> {
        self.server().charged.get(key).cloned().unwrap_or_default()
    }

    pub(in crate::store::redis) fn refunded(&self, key: &str) -> u64 {
        self.server().refunded.get(key).copied().unwrap_or_default()
    }

    /// The operations of each lease in the order in which they were sent.
    pub(super) fn leases(&self) -> Vec<Vec<(Instant, Operation)>> {
        self.server().leases.values().cloned().collect()
    }

    pub(super) fn events(&self) -> Vec<String> {
        let server = self.server();
        server
            .events
            .iter()
            .map(|(call, event)| format!("call {call}: {event}"))
            .collect()
    }

    /// The weight that the server would admit now.
    pub(in crate::store::redis) fn room(&self, key: &str, limit: &Limit) -> u64 {
        let key = Key::from(key);
        let charges = [Charge::new("simulated", limit, &key, 1)];
        self.outcome(Operation::Peek, &charges).states[0].remaining
    }

    /// Whether a ban is in force on the server.
    pub(in crate::store::redis) fn is_banned(&self, key: &str, ban: &Ban) -> bool {
        let (limit, key) = (SlidingLog::per_hour(1).into(), Key::from(key));
        let charges = [Charge::new("simulated", &limit, &key, 1).ban(ban)];
        let length = Duration::ZERO;
        let read = self.outcome(Operation::Ban { length }, &charges);
        read.states[0].banned_for().is_some()
    }

    fn outcome(&self, operation: Operation, charges: &[Charge]) -> Outcome {
        self.outcome_of(StoreRequest::new(operation, charges))
    }

    fn outcome_of(&self, request: StoreRequest<'_>) -> Outcome {
        let response = self.0.counts.decide(&[request]);
        let response = response.try_ready().expect("the memory store responds at once");
        response.expect("the memory store does not fail").outcomes()[0].clone()
    }

    fn server(&self) -> MutexGuard<'_, ServerState> {
        self.0.server.lock().expect("no code panics while it is locked")
    }

    /// Sends a call. The server executes it even if the future is dropped.
    pub(in crate::store::redis) async fn eval(
        &self,
        command: EvalCommand,
        call: &ScriptCall,
    ) -> Result<RawReply, Failure> {
        let received = ReceivedCall::new(call);
        let (number, fate) = self.send(&received);
        let (sender, reply) = oneshot::channel();
        let network = self.clone();
        if let Some(later) = fate.duplicate {
            let (network, fate, received) = (self.clone(), fate.clone(), received.clone());
            tokio::spawn(async move {
                sleep(later).await;
                network.execute(number, &fate, command, &received)
            });
        }
        tokio::spawn(async move {
            let reply = network.deliver(number, fate, command, &received).await;
            let _ = sender.send(reply);
        });
        reply.await.expect("the server does not panic")
    }

    /// Records a call, and chooses its fate.
    fn send(&self, call: &ReceivedCall) -> (usize, Fate) {
        let mut server = self.server();
        let number = server.calls;
        server.calls += 1;
        for (position, key) in call.keys.iter().enumerate() {
            server.sent.entry(key.clone()).or_default().push((number, position));
        }
        for request in call.requests(self.0.clock.now()).unwrap_or_default() {
            for lease in request.charges.iter().filter_map(|charge| charge.lease) {
                let sent = server.leases.entry(lease).or_default();
                sent.push((Instant::now(), request.operation));
            }
        }
        let ServerState { faults, rng, .. } = &mut *server;
        let fate = Fate::new(faults, call.keys.len(), rng);
        if fate.event != Event::Nothing || fate.flush || fate.clock_step != 0 || fate.duplicate.is_some() {
            server.events.insert(number, format!("{fate:?}"));
        }
        (number, fate)
    }

    async fn deliver(
        &self,
        number: usize,
        fate: Fate,
        command: EvalCommand,
        call: &ReceivedCall,
    ) -> Result<RawReply, Failure> {
        let lost = || Failure::Unreachable("the connection was lost".into());
        sleep(fate.there).await;
        match fate.event {
            Event::RequestLost => pending().await,
            Event::CutBefore => return Err(lost()),
            _ => {}
        }

        self.0.clock.step.fetch_add(fate.clock_step as u64, Ordering::Relaxed);
        let reply = self.execute(number, &fate, command, call);
        sleep(fate.back).await;
        match fate.event {
            Event::ReplyLost => pending().await,
            Event::CutAfter => Err(lost()),
            _ => reply,
        }
    }

    fn execute(
        &self,
        number: usize,
        fate: &Fate,
        command: EvalCommand,
        call: &ReceivedCall,
    ) -> Result<RawReply, Failure> {
        let refused = |error: &str| Err(Failure::Refused(error.into()));
        let mut server = self.server();
        server.has_script &= !fate.flush;
        server.has_script |= command.0 == "EVAL";
        if !server.has_script {
            return refused("NOSCRIPT No matching script.");
        }
        match fate.event {
            Event::Error => return refused("OOM command not allowed when used memory > 'maxmemory'."),
            // This server has bans by the keys of their counts.
            Event::TryAgain if call.has_several_keys() && !call.keys.iter().any(|key| key.contains(":ban:")) => {
                return refused("TRYAGAIN Multiple keys request during rehashing");
            }
            Event::Moved if call.is_across && has_moved(number, &call.keys[0]) => return refused("ASK 1 127.0.0.1:1"),
            _ => {}
        }

        let now = self.0.clock.now();
        let mut numbers = vec![now as f64];
        let Some(requests) = call.requests(now) else {
            return Ok(reply(&numbers, Vec::new()));
        };
        let mut errors = Vec::new();
        let mut keys = call.keys.iter().cloned();
        let count = requests.len();
        for (position, request) in requests.into_iter().enumerate() {
            let lines = request.charges.iter().filter(|parsed| parsed.line.is_some()).count();
            let keys = keys.by_ref().take(request.keys + lines);
            let keys: Vec<_> = keys.filter(|key| !key.contains(":line:")).collect();
            if self.0.clustered {
                call.verify_slots(&keys, &request);
            }
            let error = match fate.event {
                Event::RequestError if position == number % count => {
                    Some("WRONGTYPE Operation against a key holding the wrong kind of value")
                }
                Event::Moved if call.is_across && keys.iter().any(|key| has_moved(number, key)) => {
                    Some("ERR Script attempted to access a non local key in a cluster node")
                }
                _ => None,
            };
            if let Some(error) = error {
                errors.push(error.into());
                numbers.extend(keys.iter().flat_map(|_| [-(errors.len() as f64), 0.0, 0.0, 0.0]));
                continue;
            }
            self.decide(&mut server, now, &request, &keys, &mut numbers);
        }
        Ok(reply(&numbers, errors))
    }

    /// Decides merged requests one after the other.
    fn decide(
        &self,
        server: &mut ServerState,
        now: u64,
        request: &ParsedRequest,
        keys: &[String],
        numbers: &mut Vec<f64>,
    ) {
        // The key of each charge, and before it that of its bans.
        let mut keys = keys.iter();
        let keys: Vec<(Option<&String>, &String)> = request
            .charges
            .iter()
            .map(|parsed| {
                let bans = parsed.ban.and_then(|_| keys.next());
                (bans, keys.next().expect("a key for each charge"))
            })
            .collect();
        let limiter_keys: Vec<_> = keys.iter().map(|(_, key)| Key::from(&***key)).collect();
        let charges = request.charges.iter().zip(&limiter_keys);
        let charges: Vec<_> = charges
            .map(|(parsed, key)| {
                let ParsedCharge {
                    limit,
                    cost,
                    ban,
                    line,
                    lease,
                } = parsed;
                let charge = Charge::new("simulated", limit, key, *cost);
                charge.ban(ban.as_ref()).in_line(*line).lease(*lease)
            })
            .collect();
        let mut admitted = 0;
        let mut last: Option<Outcome> = None;
        let (rounds, units) = match request.operation {
            Operation::Wait => (1, request.times),
            _ => (request.times, 1),
        };
        for _ in 0..rounds {
            let room = |(charge, (_, key)): (&Charge, &(_, &String))| self.room(key, charge.limit());
            let rooms: Vec<u64> = charges.iter().zip(&keys).map(room).collect();
            let mut with_bans = request.charges.iter().zip(&keys);
            let is_banned = with_bans.any(|(parsed, (_, key))| parsed.ban.is_some_and(|ban| self.is_banned(key, &ban)));
            let stored = StoreRequest::new(request.operation, &charges);
            let outcome = self.outcome_of(stored.standing(request.waiting.as_deref(), units as u32));
            for (position, (charge, (bans, key))) in charges.iter().zip(&keys).enumerate() {
                let remaining = outcome.states[position].remaining;
                let key = String::clone(key);
                match request.operation {
                    // A charge of these schedules leaves room.
                    Operation::Check | Operation::Charge if remaining < rooms[position] => {
                        server.charged.entry(key).or_default().push((now, charge.cost()));
                    }
                    Operation::Wait => {
                        let admitted = (0..outcome.units).map(|_| (now, charge.cost()));
                        server.charged.entry(key).or_default().extend(admitted);
                    }
                    Operation::Check if !outcome.allowed && !is_banned => {
                        if let Some(bans) = bans {
                            server.charged.entry(bans.to_string()).or_default().push((now, 1));
                        }
                    }
                    Operation::Refund { .. } => *server.refunded.entry(key).or_default() += charge.cost(),
                    _ => {}
                }
            }
            admitted += u64::from(outcome.units);
            last = Some(outcome);
        }

        let micros = |time: Duration| time.as_micros() as f64;
        let states = last.map(|outcome| outcome.states).unwrap_or_default();
        for (state, (bans, _)) in states.into_iter().zip(&keys) {
            if bans.is_some() {
                let rest = state.banned_for().map_or(0.0, micros);
                numbers.extend([admitted as f64, 0.0, rest, 0.0]);
            }
            let ChargeState {
                remaining,
                retry_after,
                reset_after,
                ..
            } = state;
            let wait = retry_after.map_or(0.0, micros);
            numbers.extend([admitted as f64, remaining as f64, wait, micros(reset_after)]);
        }
    }
}

fn reply(numbers: &[f64], errors: Vec<String>) -> RawReply {
    RawReply {
        numbers: numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        errors,
    }
}
