//! Random worlds: policies with several versions, and timelines of calls.

use std::{fmt, time::Duration};

use fastrand::Rng;
use tower_quota::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket, limit::Calendar};

/// The most requests of a world. A charge adds at most one entry to a log, so that each call may read all entries of a log: what a
/// call does that may not is the subject of other tests.
const MOST_REQUESTS: usize = 900;

/// The most requests of one call.
const MOST_AT_ONCE: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    Log,
    Counter,
    Anchored,
    Aligned,
    /// Windows of a calendar.
    Hours,
    Bucket,
}

/// The numbers of one version of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) algorithm: Algorithm,
    pub(crate) quota: u64,
    /// In microseconds; of a bucket the time in which `rate` tokens come.
    pub(crate) window: u64,
    /// The parts that the window of a log is divided into; 0 for none.
    pub(crate) precision: u32,
    pub(crate) rate: u64,
}

impl Terms {
    pub(crate) fn of_log(quota: u64, window: u64, precision: u32) -> Self {
        Self {
            algorithm: Algorithm::Log,
            quota,
            window,
            precision,
            rate: 0,
        }
    }

    pub(crate) fn limit(&self) -> Limit {
        let window = Duration::from_micros(self.window);
        match self.algorithm {
            Algorithm::Log if self.precision > 0 => {
                SlidingLog::new(self.quota, window).precision(self.precision).into()
            }
            Algorithm::Log => SlidingLog::new(self.quota, window).into(),
            Algorithm::Counter => SlidingCounter::new(self.quota, window).into(),
            Algorithm::Anchored => FixedWindow::new(self.quota, window).into(),
            Algorithm::Aligned => FixedWindow::new(self.quota, window).aligned().into(),
            Algorithm::Hours => FixedWindow::calendar(self.quota, Calendar::Hour, "UTC").unwrap().into(),
            Algorithm::Bucket => TokenBucket::new(self.rate, window).burst(self.quota).into(),
        }
    }

    /// The time within which admissions are merged into one entry: for a log without a precision those beyond the limit.
    pub(super) fn grain(&self) -> u64 {
        match self.precision {
            0 => self.window.div_ceil(1_000),
            parts => self.window.div_ceil(parts.into()),
        }
    }
}

/// The versions of a policy, of which each request chooses one: plans, or replicas with other numbers.
pub(super) type Versions = Vec<Terms>;

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) policies: Vec<Versions>,
    pub(super) calls: Vec<Call>,
    /// Whether other keys are added to the memory store, which removes expired keys then.
    pub(super) has_other_keys: bool,
}

/// Requests that are sent in one call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// In microseconds since the start.
    pub(super) at: u64,
    pub(super) requests: Vec<Planned>,
}

#[derive(Clone, Debug)]
pub(super) struct Planned {
    /// Identifies the request, also in a part of its world.
    pub(super) id: usize,
    pub(super) what: What,
    pub(super) key: usize,
    /// Of a refund or a settlement these are the charges of the earlier request, each perhaps in another version.
    pub(super) charges: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) policy: usize,
    pub(super) version: usize,
    pub(super) cost: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Check,
    Charge,
    Peek,
    Reset,
    /// Gives back what a request was charged, or a part of it.
    Refund {
        of: usize,
    },
    /// Charges what a request has cost in addition.
    Settle {
        of: usize,
    },
}

impl World {
    pub(super) fn random(rng: &mut Rng) -> Self {
        let unit = *choose(rng, &[1_000, 1_000, 1_000, 1_007, 100_000, 1_000_000, 60_000_000]);
        let policies: Vec<_> = (0..rng.usize(1..=4)).map(|_| versions(rng, unit)).collect();
        let calls = Timeline::new(rng, &policies).calls();
        Self {
            policies,
            calls,
            has_other_keys: rng.bool(),
        }
    }

    pub(super) fn requests(&self) -> usize {
        self.calls.iter().map(|call| call.requests.len()).sum()
    }
}

fn choose<'a, T>(rng: &mut Rng, from: &'a [T]) -> &'a T {
    &from[rng.usize(..from.len())]
}

fn versions(rng: &mut Rng, unit: u64) -> Versions {
    let algorithm = *choose(
        rng,
        &[
            Algorithm::Log,
            Algorithm::Log,
            Algorithm::Log,
            Algorithm::Counter,
            Algorithm::Anchored,
            Algorithm::Aligned,
            Algorithm::Hours,
            Algorithm::Bucket,
        ],
    );
    let window = match algorithm {
        Algorithm::Hours => 3_600_000_000,
        _ => unit * choose(rng, &[1, 2, 3, 5, 10]),
    };
    let rate = rng.u64(1..=12);
    let several = rng.bool();
    let precision = *choose(rng, &[0, 0, 1, 4, 7, 10]);
    let version = |rng: &mut Rng| Terms {
        algorithm,
        quota: quota(rng),
        window: match algorithm {
            // The docs have the numbers of the other algorithms after a new quota, and not after a new window.
            Algorithm::Log if rng.bool() => unit * choose(rng, &[1, 2, 3, 5, 10, 60, 1_000]),
            _ => window,
        },
        precision: match algorithm {
            Algorithm::Log if rng.bool() => *choose(rng, &[0, 1, 4, 7, 10]),
            Algorithm::Log => precision,
            _ => 0,
        },
        rate,
    };
    let count = if several { rng.usize(2..=3) } else { 1 };
    (0..count).map(|_| version(rng)).collect()
}

fn quota(rng: &mut Rng) -> u64 {
    match rng.u32(..8) {
        0 => 1,
        1..=5 => rng.u64(2..=10),
        6 => rng.u64(11..=40),
        _ => rng.u64(41..=400),
    }
}

/// A timeline that is written call by call.
struct Timeline<'a> {
    rng: &'a mut Rng,
    policies: &'a [Versions],
    keys: usize,
    /// How often a request repeats an earlier one of its call.
    repeats: bool,
    now: u64,
    times: Vec<u64>,
    next_id: usize,
    /// Requests that count if they are admitted, and were neither refunded nor settled.
    open: Vec<Planned>,
}

impl<'a> Timeline<'a> {
    fn new(rng: &'a mut Rng, policies: &'a [Versions]) -> Self {
        let keys = *choose(rng, &[1, 1, 2, 3]);
        let (repeats, now) = (rng.bool(), rng.u64(..4_000_000));
        Self {
            rng,
            policies,
            keys,
            repeats,
            now,
            times: Vec::new(),
            next_id: 0,
            open: Vec::new(),
        }
    }

    fn calls(mut self) -> Vec<Call> {
        let mut calls = Vec::new();
        let length = *choose(self.rng, &[20, 60, 120]);
        for _ in 0..length {
            self.advance();
            let most = MOST_AT_ONCE.min(MOST_REQUESTS - self.next_id);
            let count = match self.rng.u32(..16) {
                0..=8 => 1,
                9..=12 => self.rng.usize(2..=6),
                13 | 14 => self.rng.usize(7..=40),
                _ => self.rng.usize(41..=MOST_AT_ONCE),
            };
            let mut requests: Vec<Planned> = Vec::new();
            // What is refunded was counted by an earlier call.
            let mut counted = Vec::new();
            for _ in 0..count.min(most) {
                let planned = match requests.last() {
                    Some(last) if self.repeats && self.rng.u32(..4) > 0 => self.again(last.clone()),
                    _ => self.planned(),
                };
                if matches!(planned.what, What::Check | What::Charge) {
                    counted.push(planned.clone());
                }
                requests.push(planned);
            }
            self.open.extend(counted);
            if !requests.is_empty() {
                self.times.push(self.now);
                calls.push(Call { at: self.now, requests });
            }
        }
        calls
    }

    fn advance(&mut self) {
        let policy = self.rng.usize(..self.policies.len());
        let terms = *choose(self.rng, &self.policies[policy]);
        let window = terms.window;
        self.now = match self.rng.u32(..32) {
            0..=5 => self.now,
            6..=10 => self.now + self.rng.u64(..4),
            11..=18 => self.now + self.rng.u64(..=window / 4),
            19 | 20 => self.now + self.rng.u64(..=window / 50),
            // Around the moment at which something expires, or a window or a grain ends.
            21..=26 if !self.times.is_empty() => {
                let recent = self.times.len().saturating_sub(12);
                let end = self.times[self.rng.usize(recent..self.times.len())] + window;
                // Within a grain after it, some admissions of one entry count no more.
                let later = if self.rng.bool() {
                    self.rng.u64(..=terms.grain())
                } else {
                    0
                };
                (end + later + 1 - self.rng.u64(..3)).max(self.now)
            }
            27 => self.around(window),
            28 => self.around(terms.grain()),
            29 => self.now + window * 2 + self.rng.u64(..3),
            30 => self.now + self.rng.u64(..=3 * window),
            _ => self.now + 1,
        };
    }

    /// The beginning of the next window or grain by the clock, or a microsecond before or after it.
    fn around(&mut self, length: u64) -> u64 {
        let start = super::START + self.now;
        let next = start - start % length + length - super::START;
        (next + 1 - self.rng.u64(..3)).max(self.now)
    }

    fn id(&mut self) -> usize {
        self.next_id += 1;
        self.next_id - 1
    }

    fn again(&mut self, planned: Planned) -> Planned {
        match planned.what {
            // A request is refunded or settled once.
            What::Refund { .. } | What::Settle { .. } => self.planned(),
            _ => Planned {
                id: self.id(),
                ..planned
            },
        }
    }

    fn planned(&mut self) -> Planned {
        let id = self.id();
        let key = self.rng.usize(..self.keys);
        match self.rng.u32(..40) {
            0..=3 => self.planned_as(id, key, What::Charge),
            4..=7 => self.planned_as(id, key, What::Peek),
            8 if self.rng.bool() => self.planned_as(id, key, What::Reset),
            9..=14 if !self.open.is_empty() => self.given_back(id),
            _ => self.planned_as(id, key, What::Check),
        }
    }

    fn planned_as(&mut self, id: usize, key: usize, what: What) -> Planned {
        let mut policies: Vec<usize> = (0..self.policies.len()).collect();
        self.rng.shuffle(&mut policies);
        policies.truncate(self.rng.usize(1..=self.policies.len()));
        let charges = policies.into_iter().map(|policy| {
            let version = self.rng.usize(..self.policies[policy].len());
            let quota = self.policies[policy][version].quota;
            let cost = match self.rng.u32(..12) {
                0..=6 => 1,
                7..=9 => self.rng.u64(1..=4),
                10 => self.rng.u64(1..=quota),
                _ => self.rng.u64(1..=quota + 2),
            };
            Part { policy, version, cost }
        });
        let charges = charges.collect();
        Planned { id, what, key, charges }
    }

    /// A refund of an earlier request, of all of it or a part, or a charge in addition to it.
    fn given_back(&mut self, id: usize) -> Planned {
        let recent = self.open.len().saturating_sub(if self.rng.bool() { 3 } else { 40 });
        let open = self.open.remove(self.rng.usize(recent..self.open.len()));
        let (is_more, is_part, other_version) = (self.rng.u32(..4) == 0, self.rng.bool(), self.rng.u32(..4) == 0);
        let mut charges = open.charges;
        for part in &mut charges {
            part.cost = match (is_more, is_part) {
                (true, _) => self.rng.u64(1..=5),
                (false, true) => self.rng.u64(1..=part.cost),
                (false, false) => part.cost,
            };
            if other_version {
                part.version = self.rng.usize(..self.policies[part.policy].len());
            }
        }
        let what = match is_more {
            true => What::Settle { of: open.id },
            false => What::Refund { of: open.id },
        };
        Planned {
            id,
            what,
            key: open.key,
            charges,
        }
    }
}

/// How a failure is printed.
impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, versions) in self.policies.iter().enumerate() {
            let texts: Vec<_> = versions.iter().map(|terms| terms.limit().to_string()).collect();
            writeln!(f, "policy {number}: {}", texts.join(", or "))?;
        }
        for call in &self.calls {
            writeln!(f, "at {} us:", call.at)?;
            for Planned { id, what, key, charges } in &call.requests {
                write!(f, "  request {id}, key {key}: {what:?}")?;
                for Part { policy, version, cost } in charges {
                    write!(
                        f,
                        ", {cost} of policy {policy} ({})",
                        self.policies[*policy][*version].limit()
                    )?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}
