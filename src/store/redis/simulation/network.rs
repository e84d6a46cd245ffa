//! A Redis that decides by the rules of this crate, behind a network with faults.

use std::{
    collections::{BTreeMap, HashMap},
    future::pending,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use fastrand::Rng;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep},
};

use super::super::{
    link::Failure,
    script::{Call, Program, RawReply},
};
use crate::{
    FixedWindow, Key, Limit, MemoryStore, SlidingCounter, SlidingLog, TokenBucket,
    limit::Calendar,
    store::{Charge, ChargeState, Operation, Outcome, Store, StoreRequest},
};

/// How often something happens to a call, in a thousand.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Faults {
    /// The call does not arrive, and the connection stays open.
    pub(super) request_lost: u32,
    /// The call is executed, and the reply does not arrive.
    pub(super) reply_lost: u32,
    /// The connection breaks before the call arrives.
    pub(super) cut_before: u32,
    /// The connection breaks after the call was executed.
    pub(super) cut_after: u32,
    /// The server replies with an error and does nothing.
    pub(super) error: u32,
    /// The server replies that it has only some of the keys.
    pub(super) try_again: u32,
    /// One request of the call meets an error.
    pub(super) request_error: u32,
    /// The server forgets its scripts.
    pub(super) flush: u32,
    /// The clock of the server is set.
    pub(super) clock_step: u32,
    /// The call or its reply takes longer than the deadline.
    pub(super) slow: u32,
}

/// The way to a simulated Redis.
#[derive(Clone)]
pub(in crate::store::redis) struct Network(Arc<Shared>);

struct Shared {
    clustered: bool,
    server: Mutex<Server>,
    clock: Arc<Clock>,
    counts: MemoryStore,
}

struct Server {
    rng: Rng,
    faults: Faults,
    script_known: bool,
    calls: usize,
    /// By key: the calls in which it was sent, with its position in the call.
    sent: HashMap<String, Vec<(usize, usize)>>,
    /// By key: what was charged and when, by the clock of the server.
    charged: HashMap<String, Vec<(u64, u64)>>,
    refunded: HashMap<String, u64>,
    /// What else happened, for the report of a failure.
    events: BTreeMap<usize, String>,
}

struct Clock {
    started: Instant,
    /// What the clock was set by, as a two's complement.
    step: AtomicU64,
}

/// 2027-01-15 08:00:00 UTC, in microseconds.
const EPOCH: u64 = 1_800_000_000_000_000;

impl Clock {
    fn now(&self) -> u64 {
        let elapsed = self.started.elapsed().as_micros() as u64;
        (EPOCH + elapsed).wrapping_add(self.step.load(Ordering::Relaxed))
    }
}

impl Network {
    pub(super) fn new(seed: u64, clustered: bool) -> Self {
        let clock = Arc::new(Clock {
            started: Instant::now(),
            step: AtomicU64::new(0),
        });
        let read = clock.clone();
        let server = Server {
            rng: Rng::with_seed(seed),
            faults: Faults::default(),
            script_known: false,
            calls: 0,
            sent: HashMap::new(),
            charged: HashMap::new(),
            refunded: HashMap::new(),
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
        }))
    }

    pub(in crate::store::redis) fn is_clustered(&self) -> bool {
        self.0.clustered
    }

    pub(super) fn set_faults(&self, faults: Faults) {
        self.server().faults = faults;
    }

    pub(super) fn calls(&self) -> usize {
        self.server().calls
    }

    pub(super) fn sent(&self, key: &str) -> Vec<(usize, usize)> {
        self.server().sent.get(key).cloned().unwrap_or_default()
    }

    pub(super) fn charged(&self, key: &str) -> Vec<(u64, u64)> {
        self.server().charged.get(key).cloned().unwrap_or_default()
    }

    pub(super) fn refunded(&self, key: &str) -> u64 {
        self.server().refunded.get(key).copied().unwrap_or_default()
    }

    pub(super) fn events(&self) -> Vec<String> {
        let server = self.server();
        server
            .events
            .iter()
            .map(|(call, event)| format!("call {call}: {event}"))
            .collect()
    }

    /// Whether the server would admit this cost now.
    pub(super) async fn has_room(&self, key: &str, limit: &Limit, cost: u64) -> bool {
        let key = Key::from(key);
        let charges = [Charge::new("simulated", limit, &key, cost)];
        let answer = self
            .0
            .counts
            .decide(&[StoreRequest::new(Operation::Peek, &charges)])
            .await;
        answer.expect("memory replies").outcomes[0].allowed
    }

    fn server(&self) -> MutexGuard<'_, Server> {
        self.0.server.lock().expect("no code panics while it is locked")
    }

    /// Sends a call. The server works on it also if the future is dropped.
    pub(in crate::store::redis) async fn run(&self, program: Program, call: &Call) -> Result<RawReply, Failure> {
        let (number, fate) = self.send(call);
        let (sender, reply) = oneshot::channel();
        let (network, keys, arguments) = (self.clone(), call.keys.to_vec(), call.arguments.to_vec());
        tokio::spawn(async move {
            let reply = network.deliver(number, fate, program, &keys, &arguments).await;
            let _ = sender.send(reply);
        });
        reply.await.expect("the server does not panic")
    }

    /// Decides what will happen to a call, when it is sent.
    fn send(&self, call: &Call) -> (usize, Fate) {
        let mut server = self.server();
        let number = server.calls;
        server.calls += 1;
        for (position, key) in call.keys.iter().enumerate() {
            let key = String::from_utf8_lossy(key).into_owned();
            server.sent.entry(key).or_default().push((number, position));
        }
        let fate = server.fate(call.keys.len());
        if fate.happens != Happens::Nothing || fate.flush || fate.clock_step != 0 {
            server.events.insert(number, format!("{fate:?}"));
        }
        (number, fate)
    }

    async fn deliver(
        &self,
        number: usize,
        fate: Fate,
        program: Program,
        keys: &[Bytes],
        arguments: &[Bytes],
    ) -> Result<RawReply, Failure> {
        let lost = || Failure::Unreachable("the connection was lost".into());
        sleep(fate.there).await;
        match fate.happens {
            Happens::RequestLost => pending().await,
            Happens::CutBefore => return Err(lost()),
            _ => {}
        }

        self.0.clock.step.fetch_add(fate.clock_step as u64, Ordering::Relaxed);
        let reply = self.execute(number, &fate, program, keys, arguments);
        sleep(fate.back).await;
        match fate.happens {
            Happens::ReplyLost => pending().await,
            Happens::CutAfter => Err(lost()),
            _ => reply,
        }
    }

    fn execute(
        &self,
        number: usize,
        fate: &Fate,
        program: Program,
        keys: &[Bytes],
        arguments: &[Bytes],
    ) -> Result<RawReply, Failure> {
        let refused = |error: &str| Err(Failure::Refused(error.into()));
        let mut server = self.server();
        server.script_known &= !fate.flush;
        match program {
            Program::Known if !server.script_known => return refused("NOSCRIPT No matching script."),
            Program::Known => {}
            Program::Taught => server.script_known = true,
        }
        match fate.happens {
            Happens::Error => return refused("OOM command not allowed when used memory > 'maxmemory'."),
            Happens::TryAgain if keys.len() > 1 => return refused("TRYAGAIN Multiple keys request during rehashing"),
            _ => {}
        }

        let now = self.0.clock.now();
        let mut numbers = vec![now as f64];
        let Some(requests) = requests(arguments, now) else {
            return Ok(reply(&numbers, Vec::new()));
        };
        let mut errors = Vec::new();
        let mut keys = keys.iter().map(|key| String::from_utf8_lossy(key).into_owned());
        let count = requests.len();
        for (position, request) in requests.into_iter().enumerate() {
            let keys: Vec<_> = keys.by_ref().take(request.charges.len()).collect();
            if fate.happens == Happens::RequestError && position == number % count {
                errors.push("WRONGTYPE Operation against a key holding the wrong kind of value".into());
                numbers.extend(keys.iter().flat_map(|_| [-(errors.len() as f64), 0.0, 0.0, 0.0]));
                continue;
            }
            self.decide(&mut server, now, &request, &keys, &mut numbers);
        }
        Ok(reply(&numbers, errors))
    }

    /// Decides a request for each of its callers, one after the other.
    fn decide(&self, server: &mut Server, now: u64, request: &Parsed, keys: &[String], numbers: &mut Vec<f64>) {
        let subjects: Vec<_> = keys.iter().map(|key| Key::from(&**key)).collect();
        let charges = request.charges.iter().zip(&subjects);
        let charges: Vec<_> = charges
            .map(|((limit, cost), key)| Charge::new("simulated", limit, key, *cost))
            .collect();
        let mut admitted = 0;
        let mut last: Option<Outcome> = None;
        for _ in 0..request.times {
            let reply = self.0.counts.decide(&[StoreRequest::new(request.operation, &charges)]);
            let answer = reply.try_ready().expect("memory replies at once");
            let outcome = answer.expect("memory replies").outcomes.swap_remove(0);
            for ((_, cost), key) in request.charges.iter().zip(keys) {
                match request.operation {
                    Operation::Check | Operation::Charge if outcome.allowed => {
                        server.charged.entry(key.clone()).or_default().push((now, *cost));
                    }
                    Operation::Refund { .. } => *server.refunded.entry(key.clone()).or_default() += cost,
                    _ => {}
                }
            }
            admitted += u64::from(outcome.allowed);
            last = Some(outcome);
        }

        let micros = |time: Duration| time.as_micros() as f64;
        let states = last.map(|outcome| outcome.states).unwrap_or_default();
        for ChargeState {
            remaining,
            retry_after,
            reset_after,
            ..
        } in states
        {
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

/// What will happen to a call.
#[derive(Clone, Debug)]
struct Fate {
    there: Duration,
    back: Duration,
    happens: Happens,
    flush: bool,
    clock_step: i64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Happens {
    Nothing,
    RequestLost,
    ReplyLost,
    CutBefore,
    CutAfter,
    Error,
    TryAgain,
    RequestError,
}

impl Server {
    fn fate(&mut self, keys: usize) -> Fate {
        let Faults {
            request_lost,
            reply_lost,
            cut_before,
            cut_after,
            error,
            try_again,
            request_error,
            flush,
            clock_step,
            slow,
        } = self.faults;
        let mut happens = Happens::Nothing;
        for (chance, possible) in [
            (request_lost, Happens::RequestLost),
            (reply_lost, Happens::ReplyLost),
            (cut_before, Happens::CutBefore),
            (cut_after, Happens::CutAfter),
            (error, Happens::Error),
            (try_again, Happens::TryAgain),
            (if keys > 0 { request_error } else { 0 }, Happens::RequestError),
        ] {
            if self.rng.u32(..1_000) < chance {
                happens = possible;
                break;
            }
        }
        let mut delay = |slow| {
            Duration::from_micros(if slow {
                self.rng.u64(..150_000)
            } else {
                self.rng.u64(..2_000)
            })
        };
        let (there, back) = (delay(false), delay(false));
        let (there, back) = match self.rng.u32(..1_000) < slow {
            true => (there + Duration::from_micros(self.rng.u64(..150_000)), back),
            false => (there, back),
        };
        Fate {
            there,
            back,
            happens,
            flush: self.rng.u32(..1_000) < flush,
            clock_step: match self.rng.u32(..1_000) < clock_step {
                true => self.rng.i64(-20_000_000..20_000_000),
                false => 0,
            },
        }
    }
}

/// A request as the script reads it.
struct Parsed {
    operation: Operation,
    times: u64,
    charges: Vec<(Limit, u64)>,
}

/// The requests in the arguments of a call; none if a calendar window does not enclose the time.
fn requests(arguments: &[Bytes], now: u64) -> Option<Vec<Parsed>> {
    let mut words = arguments.iter().map(|argument| {
        std::str::from_utf8(argument)
            .expect("text")
            .split(' ')
            .collect::<Vec<_>>()
    });
    let mut requests = Vec::new();
    while let Some(run) = words.next() {
        let [operation, count, times, size, rest @ ..] = &run[..] else {
            panic!("{run:?} does not begin a run")
        };
        let operation = match (*operation, rest) {
            ("check", []) => Operation::Check,
            ("charge", []) => Operation::Charge,
            ("peek", []) => Operation::Peek,
            ("reset", []) => Operation::Reset,
            ("refund", [at]) => Operation::Refund {
                admitted_at: Duration::from_micros(number(at)),
            },
            _ => panic!("{run:?} is no operation"),
        };
        let size = number(size) as usize;
        let charges: Option<Vec<_>> = words.by_ref().take(size).map(|charge| limit(&charge, now)).collect();
        let charges = charges?;
        let times: Vec<_> = times.split(',').map(number).collect();
        for position in 0..number(count) as usize {
            requests.push(Parsed {
                operation,
                times: times[position.min(times.len() - 1)],
                charges: charges.clone(),
            });
        }
    }
    Some(requests)
}

/// A limit and a cost, as `log 1 5 60000000 0`.
fn limit(words: &[&str], now: u64) -> Option<(Limit, u64)> {
    let numbers: Vec<u64> = words[1..].iter().map(|word| number(word)).collect();
    let window = Duration::from_micros;
    let limit = match (words[0], &numbers[1..]) {
        ("log", [quota, span, 0]) => SlidingLog::new(*quota, window(*span)).into(),
        ("log", [quota, span, grain]) => SlidingLog::new(*quota, window(*span))
            .precision(span.div_ceil(*grain) as u32)
            .into(),
        ("counter", [quota, span, _, _]) => SlidingCounter::new(*quota, window(*span)).into(),
        ("bucket", [quota, rate, period, _]) => TokenBucket::new(*rate, window(*period)).burst(*quota).into(),
        ("fixed", [quota, span, 1]) => FixedWindow::new(*quota, window(*span)).into(),
        ("fixed", [quota, span, 0]) => FixedWindow::new(*quota, window(*span)).aligned().into(),
        ("fixed", [quota, 0, 0, boundaries @ ..]) => {
            if !(boundaries[0] <= now && now < boundaries[boundaries.len() - 1]) {
                return None;
            }
            FixedWindow::calendar(*quota, Calendar::Hour, "UTC").into()
        }
        _ => panic!("{words:?} is no limit"),
    };
    Some((limit, numbers[0]))
}

fn number(word: &str) -> u64 {
    word.parse().expect("a number")
}
