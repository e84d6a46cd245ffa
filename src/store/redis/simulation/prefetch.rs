//! A checked model of units that are taken ahead: every interleaving of two processes, up to a number of calls for units.
//!
//! Redis is the code of the limits, and the time of a grant is [`lifetime`]. No step is forced, so a process may stall or die after each
//! one. Time goes from one instant at which something changes to the next one, and to the microsecond before the ends of grants and
//! windows. Replies arrive at once: a later one, or a call that was executed later, leaves less of the time.

#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "three algorithms have units that are taken ahead"
)]

use std::{
    collections::{
        HashMap,
        hash_map::{Entry, RandomState},
    },
    hash::BuildHasher,
    iter,
    time::Duration,
};

use super::lifetime;
use crate::{
    Limit,
    limit::{Change, State},
};

const WINDOW: u64 = 10_000;
const AHEAD: Duration = Duration::from_millis(1);

/// Shortly before the end of an aligned window.
const BEGIN: u64 = 20 * WINDOW - 1_500;

/// The rules that are checked.
#[derive(Clone)]
struct Rules {
    quota: u64,
    /// What Redis applies.
    limit: Limit,
    lifetime: fn(&Limit, Duration, Duration) -> Duration,
    /// What is refunded of so many units, of which so many are unused.
    refunded: fn(u64, u64) -> u64,
    /// How long after the call the time of a grant begins.
    begins_after: u64,
    /// How many hundredths of a second the clock of each process counts in a second.
    rates: [u64; 2],
    calls: usize,
    /// How often a reply is lost, a request stalls, a process starts again, or one resets the key.
    faults: usize,
    resets: bool,
    /// How many units more than the quota a window of a log may hold.
    excess: u64,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    now: u64,
    /// What Redis has counted since the last reset.
    counted: Vec<(u64, Counted)>,
    resets: usize,
    calls: usize,
    faults: usize,
    processes: [Process; 2],
    /// When each unit was used, in the order of time, and of which grant it was.
    used: Vec<(u64, Charged)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Counted {
    Charge(u64),
    Refund { at: u64, units: u64 },
}

#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct Process {
    grants: Vec<Grant>,
    /// When the next request has read the clock, if it has stalled since then.
    read_at: Option<u64>,
    refund: Option<(u64, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Grant {
    units: u64,
    unused: u64,
    begins_at: u64,
    lifetime: Duration,
    charged: Charged,
}

/// When units were charged, after how many resets, and when nothing of them counts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Charged {
    at: u64,
    resets: usize,
    finish: u64,
}

/// What happens, in which process, and with how many units.
#[derive(Clone, Copy, Debug)]
#[expect(dead_code, reason = "they are read in the report")]
enum Step {
    Wait,
    Ask(usize, u64),
    Use(usize),
    End(usize),
    Refund(usize),
    LoseReply(u64),
    Stall(usize),
    Restart(usize),
    Reset(usize),
}

impl Rules {
    fn of(quota: u64, limit: impl Into<Limit>, faults: usize) -> Self {
        Self {
            quota,
            limit: limit.into(),
            lifetime,
            refunded: |_, unused| unused,
            begins_after: 0,
            rates: [99, 101],
            calls: 3,
            faults,
            resets: true,
            excess: 0,
        }
    }

    /// How many states there are, or the steps to one in which a window holds too much.
    fn explore(&self) -> Result<usize, Vec<(u64, Step)>> {
        let first = World {
            now: BEGIN,
            counted: Vec::new(),
            resets: 0,
            calls: 0,
            faults: 0,
            processes: Default::default(),
            used: Vec::new(),
        };
        let hasher = RandomState::new();
        let mut reached_by: HashMap<u64, Option<(u64, u64, Step)>> = HashMap::from([(hasher.hash_one(&first), None)]);
        let mut reached = vec![first];
        while let Some(world) = reached.pop() {
            let own = hasher.hash_one(&world);
            if !self.holds(&world) {
                let steps = iter::successors(reached_by[&own], |(before, ..)| reached_by[before]);
                let mut steps: Vec<_> = steps.map(|(_, now, step)| (now, step)).collect();
                steps.reverse();
                return Err(steps);
            }
            for (step, next) in self.steps(&world) {
                if next.now < BEGIN + 2 * WINDOW
                    && let Entry::Vacant(entry) = reached_by.entry(hasher.hash_one(&next))
                {
                    entry.insert(Some((own, next.now, step)));
                    reached.push(next);
                }
            }
        }
        Ok(reached_by.len())
    }

    /// Whether no window holds more than the quota, of the units that were charged after the same reset.
    fn holds(&self, world: &World) -> bool {
        (0..=world.resets).all(|resets| {
            let all: Vec<_> = world
                .used
                .iter()
                .filter(|(_, charged)| charged.resets == resets)
                .collect();
            let after = |position: usize, count| all.get(position + count as usize).map_or(u64::MAX, |unit| unit.0);
            all.iter()
                .enumerate()
                .all(|(position, (at, charged))| match self.limit {
                    Limit::FixedWindow(_) => {
                        let of_window = all.iter().filter(|(_, other)| other.finish == charged.finish);
                        *at < charged.finish && of_window.count() as u64 <= self.quota
                    }
                    // The burst is one more than the quota.
                    Limit::TokenBucket(_) => (1..=self.quota)
                        .all(|come| after(position, self.quota + come) >= at + (come * WINDOW).div_ceil(self.quota)),
                    _ => after(position, self.quota + self.excess) >= at + WINDOW,
                })
        })
    }

    fn steps(&self, world: &World) -> Vec<(Step, World)> {
        let is_charged_again = world.calls < self.calls;
        if !is_charged_again && world.processes.iter().all(|process| process.grants.is_empty()) {
            return Vec::new();
        }
        let (mut steps, may_fail) = (Vec::new(), world.faults < self.faults);
        let mut push = |step, change: &dyn Fn(&mut World)| {
            let mut next = world.clone();
            next.faults += usize::from(matches!(
                step,
                Step::LoseReply(_) | Step::Stall(_) | Step::Restart(_) | Step::Reset(_)
            ));
            change(&mut next);
            steps.push((step, next));
        };
        if let Some(instant) = self.next_instant(world) {
            push(Step::Wait, &|next| next.now = instant);
        }
        let granted = |units| self.charge(world, units).filter(|_| is_charged_again);
        let grants: Vec<_> = (1..=self.quota).filter_map(granted).collect();
        for grant in grants.iter().filter(|_| may_fail) {
            push(Step::LoseReply(grant.units), &|next| next.count(grant));
        }
        for (number, process) in world.processes.iter().enumerate() {
            for grant in &grants {
                push(Step::Ask(number, grant.units), &|next| {
                    next.count(grant);
                    next.processes[number].grants.push(*grant);
                    // Used later, those of the last call are further from those before.
                    for _ in 0..if next.calls == self.calls { grant.units } else { 0 } {
                        self.use_at(next, number, grant.charged.at);
                    }
                });
            }
            let ends_now = |grant: &&Grant| world.now >= self.ends_at(number, grant);
            if let Some(grant) = process.grants.iter().find(ends_now) {
                push(Step::End(number), &|next| {
                    let refund = (grant.charged.at, (self.refunded)(grant.units, grant.unused));
                    next.processes[number].refund = is_charged_again.then_some(refund);
                    next.processes[number].grants.retain(|other| other != grant);
                });
            }
            if let Some((at, units)) = process.refund {
                push(Step::Refund(number), &|next| {
                    next.processes[number].refund = None;
                    next.counted.push((next.now, Counted::Refund { at, units }));
                    next.now += 1;
                });
            }
            if !process.grants.is_empty() {
                let read_at = process.read_at.unwrap_or(world.now);
                push(Step::Use(number), &|next| self.use_at(next, number, read_at));
            }
            if may_fail
                && process
                    .grants
                    .iter()
                    .any(|grant| world.now + 1 == self.ends_at(number, grant))
            {
                push(Step::Stall(number), &|next| {
                    next.processes[number].read_at = Some(world.now)
                });
            }
            if may_fail && is_charged_again && *process != Process::default() {
                push(Step::Restart(number), &|next| {
                    next.processes[number] = Process::default()
                });
            }
            if may_fail && is_charged_again && self.resets && !world.counted.is_empty() {
                push(Step::Reset(number), &|next| {
                    next.processes[number].grants.clear();
                    next.counted.clear();
                    next.resets += 1;
                    next.now += 1;
                });
            }
        }
        steps
    }

    /// What Redis has stored.
    fn state(&self, world: &World) -> State {
        let mut state = State::new(&self.limit);
        for (at, counted) in &world.counted {
            let (change, weight) = match *counted {
                Counted::Charge(units) => (Change::Add { count: 1 }, units),
                Counted::Refund { at, units } => (Change::GiveBack { at, kept: 0 }, units),
            };
            self.limit.read(&mut state, *at, weight);
            self.limit.change(&mut state, *at, change, weight, None);
        }
        state
    }

    /// What Redis grants, if that many units fit.
    fn charge(&self, world: &World, units: u64) -> Option<Grant> {
        let (mut state, now) = (self.state(world), world.now);
        if self.limit.read(&mut state, now, units) < units {
            return None;
        }
        let reset = self
            .limit
            .change(&mut state, now, Change::Add { count: 1 }, units, None)
            .reset;
        Some(Grant {
            units,
            unused: units,
            begins_at: now + self.begins_after,
            lifetime: (self.lifetime)(&self.limit, AHEAD, Duration::from_micros(reset)),
            charged: Charged {
                at: now,
                resets: world.resets,
                finish: now + reset,
            },
        })
    }

    /// A request that has read the clock at that time uses a unit of the oldest grant that has one.
    fn use_at(&self, world: &mut World, number: usize, read_at: u64) {
        let process = &mut world.processes[number];
        process.read_at = None;
        let usable = |grant: &&mut Grant| read_at < self.ends_at(number, grant) && grant.unused > 0;
        if let Some(grant) = process.grants.iter_mut().find(usable) {
            grant.unused -= 1;
            // As the response has it: not before the units were charged.
            world.used.push((read_at.max(grant.charged.at), grant.charged));
            world.used.sort_unstable();
            process
                .grants
                .retain(|grant| (self.refunded)(grant.units, grant.unused) > 0);
        }
    }

    fn ends_at(&self, number: usize, grant: &Grant) -> u64 {
        grant.begins_at + (grant.lifetime.as_nanos() as u64).div_ceil(10 * self.rates[number])
    }

    /// The next instant at which something is different, or the one before it.
    fn next_instant(&self, world: &World) -> Option<u64> {
        let processes = world.processes.iter().enumerate();
        let ends =
            processes.flat_map(|(number, process)| process.grants.iter().map(move |grant| self.ends_at(number, grant)));
        let mut instants: Vec<_> = ends.flat_map(|end| [end - 1, end]).collect();
        let (mut state, now) = (self.state(world), world.now);
        let room = self.limit.read(&mut state, now, 1);
        let reset = now + self.limit.change(&mut state, now, Change::Nothing, 0, None).reset;
        match self.limit {
            Limit::FixedWindow(_) => instants.extend([reset - 1, reset]),
            _ if room < self.quota => instants.push(now + self.limit.wait(&state, now, room + 1)),
            _ => {}
        }
        instants.into_iter().filter(|instant| *instant > now).min()
    }
}

impl World {
    /// Redis counts a charge, which takes a microsecond.
    fn count(&mut self, grant: &Grant) {
        self.calls += 1;
        self.counted.push((self.now, Counted::Charge(grant.units)));
        self.now += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FixedWindow, SlidingLog, TokenBucket};

    fn log(quota: u64) -> SlidingLog {
        SlidingLog::new(quota, Duration::from_micros(WINDOW))
    }

    fn fixed(quota: u64) -> FixedWindow {
        FixedWindow::new(quota, Duration::from_micros(WINDOW))
    }

    fn bucket(quota: u64) -> TokenBucket {
        TokenBucket::new(quota, Duration::from_micros(WINDOW)).burst(quota + 1)
    }

    /// Panics if a window may hold more than the quota.
    fn assert_holds<L: Into<Limit>>(limit: fn(u64) -> L, resets: bool) {
        let given = std::env::var("TOWER_QUOTA_UNITS").ok();
        let quota = given.map_or(2, |units| units.parse().expect("a number of units"));
        let rules = Rules {
            resets,
            ..Rules::of(quota, limit(quota), 1)
        };
        match rules.explore() {
            Ok(states) => {
                eprintln!("{}: {states} states", rules.limit);
                assert!(states > 100_000, "{}: {states} states", rules.limit);
            }
            Err(steps) => panic!("{}: {steps:?}", rules.limit),
        }
    }

    #[test]
    fn no_window_of_a_log_holds_more_than_the_quota() {
        assert_holds(|quota| log(quota).prefetch(AHEAD), true);
    }

    #[test]
    fn no_window_of_a_log_with_a_precision_holds_more_than_the_quota() {
        assert_holds(|quota| log(quota).precision(10).prefetch(AHEAD), true);
    }

    #[test]
    fn no_fixed_window_holds_more_than_the_quota() {
        assert_holds(|quota| fixed(quota).prefetch(AHEAD), true);
    }

    #[test]
    fn no_aligned_window_holds_more_than_the_quota_unless_it_is_reset() {
        assert_holds(|quota| fixed(quota).aligned().prefetch(AHEAD), false);
        let rules = Rules::of(2, fixed(2).aligned().prefetch(AHEAD), 1);
        assert!(
            rules.explore().is_err(),
            "units from before a reset are refunded after it"
        );
    }

    #[test]
    fn no_bucket_admits_more_than_its_burst_and_what_comes() {
        assert_holds(|quota| bucket(quota).prefetch(AHEAD), true);
    }

    #[test]
    fn a_process_that_is_suspended_with_its_clock_uses_what_it_had() {
        // Its clock counts a hundredth of the time, so that what it had does not end.
        let suspended = |excess| Rules {
            rates: [1, 101],
            excess,
            ..Rules::of(2, log(2).prefetch(AHEAD), 0)
        };
        assert!(suspended(1).explore().is_err(), "its grant was of two units");
        assert!(suspended(2).explore().is_ok(), "no more than a grant");
    }

    #[test]
    fn the_model_finds_each_rule_that_is_broken() {
        let [of_log, of_fixed, of_bucket] = [
            Rules::of(2, log(2).prefetch(AHEAD), 0),
            Rules::of(2, fixed(2).prefetch(AHEAD), 0),
            Rules::of(2, bucket(2).prefetch(AHEAD), 0),
        ];
        let broken = |name: &'static str, rules: &Rules, change: fn(&mut Rules)| {
            let mut rules = rules.clone();
            change(&mut rules);
            (name, rules)
        };
        for (name, rules) in [
            broken("a log counts for the window only", &of_log, |rules| {
                rules.limit = log(2).into()
            }),
            broken("a bucket holds no tokens back", &of_bucket, |rules| {
                rules.limit = bucket(2).into()
            }),
            broken("units are used after their window", &of_fixed, |rules| {
                rules.lifetime = |_, time, _| time
            }),
            broken("units are used after their end", &of_log, |rules| {
                rules.lifetime = |_, time, _| 2 * time
            }),
            broken("units are used after their end", &of_bucket, |rules| {
                rules.lifetime = |_, time, _| 9 * time
            }),
            broken("units are used until their end by a slow clock", &of_log, |rules| {
                rules.lifetime = |_, time, _| time
            }),
            broken("a clock is slower than the margin", &of_log, |rules| {
                rules.rates[0] = 97
            }),
            broken("the time begins with the reply", &of_log, |rules| {
                rules.begins_after = 500
            }),
            broken("used units are refunded", &of_log, |rules| {
                rules.refunded = |units, _| units
            }),
            broken("used units are refunded", &of_fixed, |rules| {
                rules.refunded = |units, _| units
            }),
            broken("used units are refunded", &of_bucket, |rules| {
                rules.refunded = |units, _| units
            }),
        ] {
            assert!(rules.explore().is_err(), "{}: {name}", rules.limit);
        }
    }
}
