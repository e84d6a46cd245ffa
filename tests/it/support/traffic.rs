use std::{fmt, time::Duration};

use tower_quota::{
    Key, Limit,
    store::{Charge, Operation, Store, StoreRequest},
};

use super::clock::Clock;

/// Traffic against a limit of [`Traffic::LIMIT`] in each [`Traffic::WINDOW`], the same in each run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Traffic {
    /// Twice the limit, one after the other at even distances.
    Even,
    /// Twice the limit, at random: a Poisson process.
    Random,
    /// Twice the limit, in bursts of 20 to 100 requests at random times.
    Bursty,
    /// What the algorithms are weakest against, again and again: as much as passes at the end of a window, and what passes
    /// as soon as it passes after that; the same with one request at the start of the window; and as much as passes at the
    /// start of a window, then twice the limit in the next.
    Adversarial,
}

/// What an adversary does.
#[derive(Clone, Copy)]
enum Plan {
    AtTheEnd,
    OneThenAtTheEnd,
    AtTheStart,
}

/// The result of some traffic: the first is a count, the others are percentages of the requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// The most that was admitted in any half-open window.
    pub(crate) most: u64,
    /// Admitted although the last window was full.
    pub(crate) over: f64,
    /// Denied although the last window had room.
    pub(crate) with_room: f64,
    /// Denied although the last window had room for a tenth of the limit.
    pub(crate) with_much_room: f64,
}

impl Tally {
    fn worse(self, other: Self) -> Self {
        Self {
            most: self.most.max(other.most),
            over: self.over.max(other.over),
            with_room: self.with_room.max(other.with_room),
            with_much_room: self.with_much_room.max(other.with_much_room),
        }
    }
}

/// The cells of a table.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = 100 * self.most / Traffic::LIMIT;
        let (over, with_room, with_much_room) = (self.over, self.with_room, self.with_much_room);
        write!(f, "{most} % | {over:.0} % | {with_room:.0} % | {with_much_room:.0} %")
    }
}

impl Traffic {
    pub(crate) const ALL: [Self; 4] = [Self::Even, Self::Random, Self::Bursty, Self::Adversarial];
    pub(crate) const LIMIT: u64 = 100;
    pub(crate) const WINDOW: Duration = Duration::from_secs(60);
    const WINDOW_US: u64 = Self::WINDOW.as_micros() as u64;
    /// For how many windows it lasts.
    const WINDOWS: u64 = 500;

    /// Sends the traffic against a limit that was not used before.
    pub(crate) async fn meet(self, limit: &Limit) -> Tally {
        let length = Self::WINDOWS * Self::WINDOW_US;
        let distance = Self::WINDOW_US / (2 * Self::LIMIT);
        let mut road = Road::new(limit);
        let start = road.clock.now();
        let mut random = Random(1);

        match self {
            Self::Even => {
                for after in (0..length).step_by(distance as usize) {
                    road.request_at(start + after).await;
                }
            }
            Self::Random => {
                let mut at = start;
                while at < start + length {
                    at += random.wait(distance);
                    road.request_at(at).await;
                }
            }
            Self::Bursty => {
                let mut at = start;
                while at < start + length {
                    at += random.wait(60 * distance);
                    for _ in 0..20 + random.next() % 81 {
                        at += 1_000;
                        road.request_at(at).await;
                    }
                }
            }
            Self::Adversarial => {
                let mut worst = Tally::default();
                for plan in [Plan::AtTheEnd, Plan::OneThenAtTheEnd, Plan::AtTheStart] {
                    worst = worst.worse(attack(plan, limit).await);
                }
                return worst;
            }
        }
        road.tally()
    }
}

async fn attack(plan: Plan, limit: &Limit) -> Tally {
    let mut road = Road::new(limit);
    for round in 0..10 {
        // A log and a counter have forgotten all after two windows.
        let opens =
            road.clock.now().next_multiple_of(Traffic::WINDOW_US) + 3 * Traffic::WINDOW_US * u64::from(round > 0);
        let closes = opens + Traffic::WINDOW_US;
        match plan {
            Plan::AtTheEnd => road.request_greedily(closes - 1, closes + Traffic::WINDOW_US).await,
            Plan::OneThenAtTheEnd => {
                road.request_at(opens).await;
                road.request_greedily(closes - 1, closes + Traffic::WINDOW_US).await;
            }
            Plan::AtTheStart => {
                for _ in 0..Traffic::LIMIT {
                    road.request_at(opens).await;
                }
                for request in 0..2 * Traffic::LIMIT {
                    road.request_at(closes + request * Traffic::WINDOW_US / (2 * Traffic::LIMIT))
                        .await;
                }
            }
        }
    }
    road.tally()
}

/// A limit, and the results of the requests to it.
struct Road<'a> {
    limit: &'a Limit,
    store: tower_quota::MemoryStore,
    clock: Clock,
    sent: u64,
    admitted: Vec<u64>,
    most: u64,
    over: u64,
    with_room: u64,
    with_much_room: u64,
}

impl<'a> Road<'a> {
    fn new(limit: &'a Limit) -> Self {
        let clock = Clock::new();
        Self {
            limit,
            store: clock.memory_store(),
            clock,
            sent: 0,
            admitted: Vec::new(),
            most: 0,
            over: 0,
            with_room: 0,
            with_much_room: 0,
        }
    }

    /// Sends one request, and returns how long it must wait if it is denied.
    async fn request_at(&mut self, at: u64) -> Option<Duration> {
        self.clock.set(at);
        let key = Key::from("k");
        let charges = [Charge::new("test", self.limit, &key, 1)];
        let answer = self
            .store
            .decide(&[StoreRequest::new(Operation::Check, &charges)])
            .await;
        let wait = answer.expect("an answer").outcomes()[0].states()[0].retry_after;

        let expired = self.admitted.partition_point(|past| past + Traffic::WINDOW_US <= at);
        let held = (self.admitted.len() - expired) as u64;
        let room = Traffic::LIMIT.saturating_sub(held);
        self.sent += 1;
        if wait.is_none() {
            self.admitted.push(at);
            self.most = self.most.max(held + 1);
            self.over += u64::from(room == 0);
        } else {
            self.with_room += u64::from(room > 0);
            self.with_much_room += u64::from(room >= Traffic::LIMIT / 10);
        }
        wait
    }

    /// Sends whatever passes as soon as it passes.
    async fn request_greedily(&mut self, from: u64, until: u64) {
        let mut at = from;
        while at < until {
            if let Some(wait) = self.request_at(at).await {
                at += wait.as_micros() as u64;
            }
        }
    }

    fn tally(&self) -> Tally {
        let share = |count| 100.0 * count as f64 / self.sent as f64;
        Tally {
            most: self.most,
            over: share(self.over),
            with_room: share(self.with_room),
            with_much_room: share(self.with_much_room),
        }
    }
}

/// SplitMix64: the same numbers everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// An exponentially distributed time with this mean.
    fn wait(&mut self, mean: u64) -> u64 {
        let uniform = ((self.next() >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
        (-uniform.ln() * mean as f64) as u64
    }
}
