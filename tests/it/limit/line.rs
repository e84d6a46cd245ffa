//! The lines in memory and in Redis decide alike on the same random timelines of three processes.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use fastrand::Rng;
use tower_quota::{
    Ban, Concurrency, FixedWindow, Key, Limit, MemoryStore, RedisStore, SlidingCounter, SlidingLog, TokenBucket,
    store::{Arrival, Charge, ChargeLine, LeaseId, Operation, Outcome, Store, StoreRequest},
};

use crate::{
    model::number,
    support::{Clock, Redis},
};

const SECOND: u64 = 1_000_000;
const TEN_YEARS: Duration = Duration::from_secs(3_653 * 86_400);
const STEPS: usize = 150;
const WORLDS: u64 = 40;
const PROCESSES: usize = 3;
const NAMES: [&str; 2] = ["a", "b"];
const MOST: u64 = 999_999_999_999_999;

/// The limits of a world, all of which a request is charged by.
struct World {
    limits: Vec<Limit>,
    /// Whether requests may wait for each.
    waits: Vec<bool>,
    ban: Option<Ban>,
}

/// A request of a process.
#[derive(Clone, Debug)]
struct Sent {
    operation: Operation,
    process: usize,
    cost: u64,
    longest_us: u64,
    ahead: i64,
    /// The charge whose line the requests lead.
    leads: Option<usize>,
    /// The newest arrival that the process knows.
    known: u64,
    /// Whether they lead that of a charge in another slot.
    leads_elsewhere: bool,
    /// The requests that stand in it, of which so many are decided.
    standing: Option<(Vec<Arrival>, u32)>,
    /// How many have just arrived.
    units: u32,
    lease: LeaseId,
}

impl World {
    fn new(rng: &mut Rng) -> Self {
        let limits = 1 + usize::from(rng.u32(..3) == 0);
        let limits: Vec<Limit> = (0..limits).map(|_| limit(rng)).collect();
        let mut waits: Vec<_> = limits.iter().map(|_| rng.u32(..4) > 0).collect();
        waits[0] |= waits.iter().all(|waits| !waits);
        let ban = Ban::after(3, Duration::from_secs(5)).first(Duration::from_millis(300));
        Self {
            limits,
            waits,
            ban: (rng.u32(..8) == 0).then_some(ban),
        }
    }

    fn has_slots(&self) -> bool {
        self.limits.iter().any(|limit| matches!(limit, Limit::Concurrency(_)))
    }

    fn charges(&self, sent: &Sent, key: &Key) -> Vec<Charge> {
        let charges = self.limits.iter().enumerate().map(|(number, limit)| {
            let line = ChargeLine {
                number: (1 + 10 * sent.process + number) as u64,
                longest_us: sent.longest_us,
                ahead: sent.ahead,
                leads: (sent.leads == Some(number)).then_some(sent.known),
                leads_elsewhere: sent.leads_elsewhere,
            };
            let charge = Charge::new(NAMES[number], limit, key, sent.cost);
            charge
                .in_line(self.waits[number].then_some(line))
                .ban(self.ban.as_ref().filter(|_| number == 0))
                .lease(sent.lease)
        });
        charges.collect()
    }
}

fn limit(rng: &mut Rng) -> Limit {
    let window = Duration::from_micros([10_000, SECOND / 3, SECOND, 7 * SECOND][rng.usize(..4)]);
    let quota = rng.u64(1..=5);
    match rng.u32(..8) {
        0 | 1 => SlidingLog::new(quota, window).into(),
        2 => SlidingLog::new(quota, window).precision(4).into(),
        // Of a window of ten years the unit of time is two microseconds.
        3 => SlidingCounter::new(quota, if rng.u32(..4) == 0 { TEN_YEARS } else { window }).into(),
        4 => FixedWindow::new(quota, window).into(),
        5 => TokenBucket::new(quota, window).burst(rng.u64(1..=4)).into(),
        6 => TokenBucket::new(1, window).burst(quota).into(),
        _ => Concurrency::new(quota)
            .lease(Duration::from_secs(rng.u64(1..=4)))
            .into(),
    }
}

/// A random timeline.
struct Timeline {
    rng: Rng,
    now: u64,
    /// What each process has in its line, in the order of arrival.
    lines: [Vec<Arrival>; PROCESSES],
    admitted: Vec<(u64, Sent)>,
}

impl Timeline {
    fn next(&mut self, now: u64) -> u64 {
        let rng = &mut self.rng;
        match rng.u32(..24) {
            0..=7 => now,
            8..=13 => now + rng.u64(..3),
            14..=18 => now + rng.u64(..SECOND / 4),
            19 => now + SECOND,
            20 => now + 3 * SECOND / 2 + rng.u64(..3) - 1,
            21 => now + rng.u64(..10 * SECOND),
            // A log forgets what a clock that was set back has left at other times in memory, see `limit::differential`.
            _ => now + rng.u64(..SECOND / 10),
        }
    }

    fn sent(&mut self, world: &World) -> Sent {
        let rng = &mut self.rng;
        let process = rng.usize(..PROCESSES);
        let line = &mut self.lines[process];
        let mut sent = Sent {
            operation: Operation::Wait,
            process,
            cost: if rng.u32(..3) > 0 { 1 } else { rng.u64(1..=3) },
            longest_us: [0, 1_000, SECOND, MOST, MOST, MOST][rng.usize(..6)],
            ahead: if rng.u32(..4) == 0 { rng.i64(-9..9) } else { 0 },
            leads: None,
            known: self
                .now
                .saturating_sub([0, 0, 1, SECOND / 10, 2 * SECOND][rng.usize(..5)]),
            leads_elsewhere: false,
            standing: None,
            units: 1,
            lease: LeaseId::random(),
        };
        let plain = |operation, sent: Sent| Sent {
            operation,
            ahead: 0,
            ..sent
        };
        match rng.u32(..32) {
            // One that has keys in several slots stands in none when it arrives.
            0..=8 => Sent {
                leads_elsewhere: rng.u32(..4) == 0,
                ..sent
            },
            9..=21 if !line.is_empty() => {
                if rng.u32(..6) == 0 {
                    line.remove(rng.usize(..line.len()));
                }
                let equal = line.first().map_or(0, |first| {
                    sent.cost = first.weight;
                    line.iter().take_while(|one| one.weight == first.weight).count()
                });
                let most = if world.has_slots() { 1 } else { 5 };
                let units = equal.min(rng.usize(1..=most)).min(equal);
                sent.leads = Some(rng.usize(..world.limits.len())).filter(|leads| world.waits[*leads]);
                sent.leads_elsewhere = sent.leads.is_none() && rng.bool();
                // The last check of a request, which leads no line, is of this one alone, and so is a part of one.
                let units = if sent.leads.is_some() { units } else { units.min(1) };
                let place = line[..line.len().min(32)].to_vec();
                sent.standing = Some((place, units as u32));
                if sent.leads.is_some() || sent.leads_elsewhere {
                    sent.ahead = 0;
                }
                sent
            }
            22 => {
                line.clear();
                sent.leads = world.waits.iter().position(|waits| *waits);
                sent.standing = Some((Vec::new(), 0));
                sent
            }
            23..=25 => {
                // Several are not taken from slots, nor where there are bans.
                let takes_one = world.has_slots() || world.ban.is_some() || rng.bool();
                Sent {
                    operation: Operation::Check,
                    units: if takes_one { 1 } else { rng.u32(2..=6) },
                    ..sent
                }
            }
            26 => Sent {
                operation: Operation::Peek,
                ..sent
            },
            27 => plain(Operation::Charge, sent),
            28 if rng.u32(..3) == 0 => plain(Operation::Reset, sent),
            _ => match self.admitted.pop() {
                Some((_, back)) if world.has_slots() => Sent {
                    operation: Operation::EndLease,
                    ..back
                },
                Some((at, back)) => Sent {
                    operation: Operation::Refund {
                        admitted_at: Duration::from_micros(at),
                    },
                    ..back
                },
                None => sent,
            },
        }
    }

    fn follow(&mut self, now: u64, world: &World, sent: &Sent, outcome: &Outcome) {
        let line = &mut self.lines[sent.process];
        if let Some((place, _)) = &sent.standing {
            line.drain(..(outcome.units as usize).min(place.len()).min(line.len()));
        } else if sent.operation == Operation::Wait && !outcome.allowed && sent.cost <= 2 {
            line.push(Arrival {
                at: now,
                weight: sent.cost,
            });
        }
        let counts = matches!(sent.operation, Operation::Check | Operation::Wait | Operation::Charge);
        if counts && outcome.allowed && (outcome.units == 1 || !world.has_slots()) {
            let plain = Sent {
                leads: None,
                leads_elsewhere: false,
                standing: None,
                ahead: 0,
                ..sent.clone()
            };
            self.admitted.push((now, plain));
        }
    }
}

#[tokio::test]
async fn lines_decide_alike_in_rust_and_in_lua() {
    let (redis, clock) = (Redis::start(), Clock::new());
    let shared = clock.redis_store(&redis).await;
    let first = number("TOWER_QUOTA_SEED");
    let worlds = if first.is_some() { 1 } else { WORLDS };
    let first = first.unwrap_or_else(|| RandomState::new().hash_one(0));
    let (mut stood, mut admitted) = (0, 0);
    for seed in (0..worlds).map(|nth| first.wrapping_add(nth)) {
        redis.command::<()>("FLUSHALL", [""; 0]).await;
        clock.set(Clock::new().now());
        let (memory, key) = (clock.memory_store(), Key::from("k"));
        let mut rng = Rng::with_seed(seed);
        let world = World::new(&mut rng);
        let mut timeline = Timeline {
            rng,
            now: 0,
            lines: Default::default(),
            admitted: Vec::new(),
        };
        let mut history = Vec::new();
        for _ in 0..STEPS {
            let now = timeline.next(clock.now());
            timeline.now = now;
            clock.set(now);
            clock.write_to(&redis).await;
            let sent: Vec<Sent> = (0..timeline.rng.usize(1..=3)).map(|_| timeline.sent(&world)).collect();
            // The requests that stand in a line are those of the call before.
            let sent = match sent.iter().any(|sent| sent.standing.is_some()) {
                true => sent
                    .into_iter()
                    .filter(|sent| sent.standing.is_some())
                    .take(1)
                    .collect(),
                false => sent,
            };
            let charges: Vec<_> = sent.iter().map(|sent| world.charges(sent, &key)).collect();
            let requests = sent.iter().zip(&charges).map(|(sent, charges)| {
                let request = StoreRequest::new(sent.operation, charges);
                match &sent.standing {
                    Some((place, units)) => request.standing(Some(place), *units),
                    None => request.standing(None, sent.units),
                }
            });
            let requests: Vec<_> = requests.collect();
            let in_memory = memory.decide(&requests).await.expect("memory replies");
            let in_redis = shared.decide(&requests).await;
            let in_redis = in_redis.unwrap_or_else(|error| panic!("{error}: {requests:#?}, {:?}", history.last()));
            // The reply to one that only clears a place is not read.
            let clears = sent.iter().any(|sent| matches!(&sent.standing, Some((_, 0))));
            history.push(format!("at {now}: {sent:#?}\n  -> {:#?}", in_memory.outcomes()));
            assert!(
                clears || in_memory.outcomes() == in_redis.outcomes(),
                "{:?} (waits: {:?}, {:?}), TOWER_QUOTA_SEED={seed}:\n{}\nin Redis: {:#?}",
                world.limits,
                world.waits,
                world.ban,
                history[history.len().saturating_sub(8)..].join("\n"),
                in_redis.outcomes()
            );
            for (sent, outcome) in sent.iter().zip(in_redis.outcomes()) {
                let waits = sent.standing.as_ref().is_some_and(|(_, units)| *units > 0);
                stood += usize::from(waits);
                admitted += usize::from(waits && outcome.allowed);
                timeline.follow(now, &world, sent, outcome);
            }
        }
    }
    assert!(
        worlds == 1 || stood > 500 && admitted > 100,
        "{stood} stood in a line, {admitted} of these checks admitted one"
    );
}

/// A memory store and one in Redis, with one clock.
struct Both {
    redis: Redis,
    clock: Clock,
    memory: MemoryStore,
    shared: RedisStore,
}

impl Both {
    async fn start() -> Self {
        let (redis, clock) = (Redis::start(), Clock::new());
        let shared = clock.redis_store(&redis).await;
        Self {
            memory: clock.memory_store(),
            redis,
            clock,
            shared,
        }
    }

    /// The outcome of a request, which is the same in both.
    async fn decide(&self, request: StoreRequest<'_>) -> Outcome {
        self.clock.write_to(&self.redis).await;
        let requests = [request];
        let in_memory = self.memory.decide(&requests).await.expect("memory replies");
        let in_redis = self.shared.decide(&requests).await.expect("Redis replies");
        assert_eq!(in_memory, in_redis, "memory, then Redis: {requests:?}");
        in_redis.outcomes()[0].clone()
    }
}

fn in_line(number: u64, leads: Option<u64>) -> Option<ChargeLine> {
    Some(ChargeLine {
        number,
        longest_us: MOST,
        ahead: 0,
        leads,
        leads_elsewhere: false,
    })
}

/// Of the entries that have expired, a call removes 1,000.
#[tokio::test]
async fn the_wait_in_a_line_is_that_of_the_room_which_was_read() {
    let both = Both::start().await;
    let (limit, key) = (
        Limit::from(SlidingLog::new(2_000, Duration::from_secs(1))),
        Key::from("k"),
    );
    let of_cost = |cost| [Charge::new("a", &limit, &key, cost)];
    for _ in 0..1_500 {
        both.decide(StoreRequest::new(Operation::Charge, &of_cost(1))).await;
    }
    // From here on the weight of all is stored beside the entries.
    both.clock.advance(Duration::from_micros(1));
    both.decide(StoreRequest::new(Operation::Charge, &of_cost(2))).await;
    both.clock.advance(Duration::from_secs(2));
    let waits = of_cost(1_600).map(|charge| charge.in_line(in_line(1, None)));
    let outcome = both.decide(StoreRequest::new(Operation::Wait, &waits)).await;
    assert!(!outcome.allowed, "{outcome:?}");
}

#[tokio::test]
async fn an_arrival_that_its_process_does_not_know_yet_stands_in_the_place_for_a_while() {
    let both = Both::start().await;
    let hour = Duration::from_secs(3_600);
    let (limit, key) = (Limit::from(SlidingLog::new(2, hour)), Key::from("k"));
    let charge = |cost, line| [Charge::new("a", &limit, &key, cost).in_line(line)];
    both.decide(StoreRequest::new(Operation::Charge, &charge(2, None)))
        .await;
    let arrive = async || {
        both.clock.advance(Duration::from_millis(1));
        both.decide(StoreRequest::new(Operation::Wait, &charge(1, in_line(1, None))))
            .await;
        Arrival {
            at: both.clock.now(),
            weight: 1,
        }
    };
    let first = [arrive().await];
    arrive().await;
    // Behind two requests another process waits for an hour more than behind one.
    let second_stands = async |known: &Arrival| {
        let leads = charge(1, in_line(1, Some(known.at)));
        let first = StoreRequest::new(Operation::Wait, &leads).standing(Some(&first), 1);
        assert!(!both.decide(first).await.allowed);
        let other = charge(1, in_line(2, None));
        let outcome = both.decide(StoreRequest::new(Operation::Peek, &other)).await;
        outcome.states()[0].retry_after.expect("it is denied") > hour
    };
    assert!(second_stands(&first[0]).await);
    both.clock.advance(Duration::from_secs(1));
    assert!(second_stands(&first[0]).await);
    both.clock.advance(Duration::from_millis(500));
    assert!(!second_stands(&first[0]).await, "its reply is lost");
    let known = arrive().await;
    assert!(!second_stands(&known).await, "the process knows that it has left");
}

#[tokio::test]
async fn an_arrival_that_its_process_never_learns_of_is_held_no_longer_alone() {
    let both = Both::start().await;
    let hour = Duration::from_secs(3_600);
    let (limit, key) = (Limit::from(SlidingLog::new(1, hour)), Key::from("k"));
    let charge = |line| [Charge::new("a", &limit, &key, 1).in_line(line)];
    both.decide(StoreRequest::new(Operation::Charge, &charge(None))).await;
    both.decide(StoreRequest::new(Operation::Wait, &charge(in_line(1, None))))
        .await;
    both.clock.advance(Duration::from_millis(1_400));
    // The last request that the process knows of leaves.
    both.clock.write_to(&both.redis).await;
    let clears = charge(in_line(1, Some(0)));
    let clears = [StoreRequest::new(Operation::Wait, &clears).standing(Some(&[]), 0)];
    let (in_memory, in_redis) = tokio::join!(both.memory.decide(&clears), both.shared.decide(&clears));
    assert!(in_memory.is_ok() && in_redis.is_ok());
    let is_behind = async || {
        let other = charge(in_line(2, None));
        let outcome = both.decide(StoreRequest::new(Operation::Peek, &other)).await;
        outcome.states()[0].retry_after.expect("it is denied") > hour
    };
    assert!(is_behind().await);
    both.clock.advance(Duration::from_millis(100));
    assert!(!is_behind().await, "its reply is lost");
}

#[tokio::test]
async fn a_full_place_that_a_request_does_not_fit_into_is_not_refreshed() {
    let both = Both::start().await;
    let hour = Duration::from_secs(3_600);
    let limit = Limit::from(SlidingLog::new(1, hour));
    // The request stands in another line, or has just arrived.
    for stands in [true, false] {
        let key = Key::from(stands.to_string());
        let charge = |policy, line| Charge::new(policy, &limit, &key, 1).in_line(line);
        let full = NAMES.map(|policy| charge(policy, None));
        both.decide(StoreRequest::new(Operation::Charge, &full)).await;
        for _ in 0..32 {
            both.clock.advance(Duration::from_micros(1));
            let waits = [charge("b", in_line(2, None))];
            both.decide(StoreRequest::new(Operation::Wait, &waits)).await;
        }
        both.clock.advance(Duration::from_secs(1));
        let waiting = [Arrival {
            at: both.clock.now(),
            weight: 1,
        }];
        let leads = [charge("a", in_line(1, Some(MOST))), charge("b", in_line(2, None))];
        let request = match stands {
            true => StoreRequest::new(Operation::Wait, &leads).standing(Some(&waiting), 1),
            false => StoreRequest::new(Operation::Wait, &leads[1..]),
        };
        assert!(!both.decide(request).await.allowed);

        both.clock.advance(Duration::from_secs(1));
        let other = [charge("b", in_line(3, None))];
        let outcome = both.decide(StoreRequest::new(Operation::Wait, &other)).await;
        let wait = outcome.states()[0].retry_after.expect("it is denied");
        assert!(wait < hour, "the place has expired: {wait:?}");
    }
}

/// It is not live for as long as the clock is behind.
#[tokio::test]
async fn a_place_of_a_clock_that_is_gone_is_forgotten() {
    let both = Both::start().await;
    let (limit, key) = (Limit::from(SlidingLog::per_hour(1)), Key::from("k"));
    let admits = async |operation, line| {
        let charge = [Charge::new("a", &limit, &key, 1).in_line(line)];
        both.decide(StoreRequest::new(operation, &charge)).await.allowed
    };
    assert!(admits(Operation::Check, None).await);
    assert!(!admits(Operation::Wait, in_line(1, None)).await);
    both.clock.set(both.clock.now() - 24 * 3_600 * SECOND);
    assert!(admits(Operation::Wait, in_line(2, None)).await);
}

#[tokio::test]
async fn a_request_behind_a_costly_one_waits_for_the_tokens_that_both_lack() {
    let both = Both::start().await;
    let limit = Limit::from(TokenBucket::new(1_000, Duration::from_secs(3_600)));
    let key = Key::from("k");
    both.decide(StoreRequest::new(
        Operation::Charge,
        &[Charge::new("a", &limit, &key, 1)],
    ))
    .await;
    // A token comes in 3.6 s.
    for (cost, seconds) in [(1_000, 3.6), (1, 7.2), (999, 3_603.6), (1, 3_607.2)] {
        let charge = [Charge::new("a", &limit, &key, cost).in_line(in_line(1, None))];
        let outcome = both.decide(StoreRequest::new(Operation::Wait, &charge)).await;
        let wait = outcome.states()[0].retry_after.expect("it waits").as_secs_f64();
        assert!((seconds - 0.001..=seconds).contains(&wait), "{cost}: {wait}");
        both.clock.advance(Duration::from_micros(1));
    }
}

#[tokio::test]
async fn each_fill_of_a_bucket_behind_others_takes_no_longer_than_its_tokens() {
    let both = Both::start().await;
    // A token comes in a third of a second.
    let (limit, key) = (Limit::from(TokenBucket::per_second(3).burst(1)), Key::from("k"));
    let charge = |line: Option<ChargeLine>| [Charge::new("a", &limit, &key, 1).in_line(line)];
    both.decide(StoreRequest::new(Operation::Charge, &charge(None))).await;
    let mut last = Duration::ZERO;
    for _ in 0..3 {
        let charge = charge(in_line(1, None));
        let outcome = both.decide(StoreRequest::new(Operation::Wait, &charge)).await;
        last = outcome.states()[0].retry_after.expect("it waits");
    }
    assert_eq!(last, Duration::from_secs(1));
}

/// After a refund, before those that wait are checked.
#[tokio::test]
async fn a_request_behind_a_line_that_has_room_waits_until_the_window_ends() {
    let both = Both::start().await;
    let (limit, key) = (Limit::from(FixedWindow::per_minute(10)), Key::from("k"));
    let charge = |cost, line| [Charge::new("a", &limit, &key, cost).in_line(line)];
    let admitted_at = Duration::from_micros(both.clock.now());
    both.decide(StoreRequest::new(Operation::Charge, &charge(10, None)))
        .await;
    both.clock.advance(Duration::from_secs(50));
    for _ in 0..11 {
        let waits = charge(1, in_line(1, None));
        both.decide(StoreRequest::new(Operation::Wait, &waits)).await;
        both.clock.advance(Duration::from_micros(1));
    }
    let refund = charge(5, None);
    both.decide(StoreRequest::new(Operation::Refund { admitted_at }, &refund))
        .await;
    let waits = charge(1, in_line(1, None));
    let outcome = both.decide(StoreRequest::new(Operation::Wait, &waits)).await;
    let wait = outcome.states()[0].retry_after.expect("it waits").as_secs_f64();
    assert!((9.9..=10.0).contains(&wait), "{wait}");
}

/// They are admitted one by one while the share of the window before shrinks.
#[tokio::test]
async fn in_a_line_of_a_sliding_counter_each_window_admits_a_quota() {
    let both = Both::start().await;
    let (limit, key) = (Limit::from(SlidingCounter::per_minute(10)), Key::from("k"));
    let charge = |line: Option<ChargeLine>| [Charge::new("a", &limit, &key, 1).in_line(line)];
    let into_minute = both.clock.now() % (60 * SECOND);
    both.clock.advance(Duration::from_micros(119 * SECOND - into_minute));
    for _ in 0..9 {
        both.decide(StoreRequest::new(Operation::Charge, &charge(None))).await;
    }
    both.clock.advance(Duration::from_secs(5));
    both.decide(StoreRequest::new(Operation::Charge, &charge(None))).await;
    let mut waits = Vec::new();
    for _ in 0..20 {
        let charge = charge(in_line(1, None));
        let outcome = both.decide(StoreRequest::new(Operation::Wait, &charge)).await;
        waits.push(outcome.states()[0].retry_after.expect("it waits").as_secs_f64());
        both.clock.advance(Duration::from_micros(1));
    }
    // The tenth is the eleventh of this window and the next one, of which 4 s are over.
    for (nth, expected) in [(8, 56.0), (9, 62.0), (19, 122.0)] {
        assert!((expected - 0.1..=expected).contains(&waits[nth]), "{nth}: {waits:?}");
    }
}

/// As another program may have written it.
#[tokio::test]
async fn a_line_that_is_cut_off_counts_as_far_as_it_goes_and_a_long_one_as_far_as_a_call_reads() {
    const QUOTA: u64 = 100_000;
    const MOST_READ: u64 = 8 * 997;
    let (redis, clock) = (Redis::start(), Clock::new());
    let store = clock.redis_store(&redis).await;
    let (limit, key) = (Limit::from(FixedWindow::per_hour(QUOTA)), Key::from("k"));
    let charge = |cost| [Charge::new("a", &limit, &key, cost).in_line(in_line(1, None))];
    clock.write_to(&redis).await;
    for (operation, cost) in [(Operation::Charge, QUOTA), (Operation::Wait, 1)] {
        let response = store.decide(&[StoreRequest::new(operation, &charge(cost))]).await;
        response.expect("Redis replies");
    }
    let line = redis.command::<Vec<String>>("KEYS", ["quota:1:line:*"]).await.remove(0);
    redis.command::<()>("FLUSHALL", ["SYNC"]).await;
    clock.write_to(&redis).await;

    let remaining = async |text: &[u8]| {
        let words = [line.clone().into_bytes(), text.to_vec()];
        redis.command_of_bytes::<()>("SET", words).await;
        let response = store.decide(&[StoreRequest::new(Operation::Peek, &charge(1))]).await;
        response.expect("Redis replies").outcomes()[0].states()[0].remaining
    };
    let place = |process: usize, size: u64| -> Vec<u8> {
        let (process, until) = (process as f64, (clock.now() + SECOND) as f64);
        let entries = (0..size).flat_map(|_| [1.0, 1.0]);
        let numbers = [process, process, until, size as f64].into_iter().chain(entries);
        numbers.flat_map(f64::to_le_bytes).collect()
    };
    let three = place(7, 3);
    for bytes in 0..=three.len() {
        let whole = bytes.saturating_sub(32) / 16;
        assert_eq!(remaining(&three[..bytes]).await, QUOTA - whole as u64, "{bytes} bytes");
    }
    for sizes in [
        &[MOST_READ - 1][..],
        &[MOST_READ + 1],
        &[MOST_READ - 1, 5],
        &[4_000, 3_000],
        &[4_000, 3_000, 3_000],
    ] {
        let places = sizes.iter().enumerate().map(|(number, size)| place(7 + number, *size));
        let counted = sizes.iter().sum::<u64>().min(MOST_READ);
        let text = places.collect::<Vec<_>>().concat();
        assert_eq!(remaining(&text).await, QUOTA - counted, "{sizes:?}");
    }
}
