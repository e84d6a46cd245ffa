use std::{collections::BTreeMap, fmt, num::ParseIntError, str::FromStr, time::Duration};

use tower_quota::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket};

/// A check and its reply.
#[derive(Clone, Debug)]
pub(super) struct Check {
    /// The position of its quota.
    pub(super) key: usize,
    pub(super) cost: u64,
    /// In microseconds since the Unix epoch, by the clock of the callers.
    pub(super) sent: u64,
    /// Since the caller was started, whatever its clock is set to.
    pub(super) after: Duration,
    pub(super) took: Duration,
    pub(super) reply: Reply,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// At this time of Redis, in microseconds since the Unix epoch.
    Admitted(u64),
    Denied,
    /// By the deny cache.
    DeniedFromCache,
    /// An error of Redis, which has counted nothing.
    Refused,
    /// The breaker is open.
    NotSent,
    /// No reply came, so the check may be counted.
    Missing,
}

/// The limits of a key: each request is counted by all of them.
pub(super) struct Quota {
    pub(super) limit: Limit,
    /// Another log, with another window, and whether it is the first of the request.
    pub(super) beside: Option<(Limit, bool)>,
    /// How much is admitted in any window at most.
    pub(super) most: u64,
    /// Whether Redis keeps each admission for longer than the run.
    pub(super) keeps_all: bool,
}

/// The names of the policies in Redis.
pub(super) const POLICY: &str = "chaos";
pub(super) const BESIDE: &str = "beside";

const N: u64 = 20;
const WINDOW: Duration = Duration::from_secs(1);

/// How much of an hour's quota may be used in a second: less than what is sent in some of them.
const BURST: u64 = 80;

/// How many [`quotas`] there are.
pub(super) const KEYS: usize = 13;

/// One of each algorithm with a short window, which is full most of the time, and logs of an hour: of each three, one is
/// full before the fault, one during or after it, and one never, if so much is sent for each key in all. A log of a second has one
/// of an hour beside it, and the other way around.
pub(super) fn quotas(sent: u64) -> Vec<Quota> {
    let plenty: Limit = SlidingLog::per_hour(SlidingLog::MAX_QUOTA).into();
    let quota = |limit, most, beside| Quota {
        limit,
        most,
        beside,
        keeps_all: false,
    };
    let short = [
        quota(SlidingLog::new(N, WINDOW).into(), N, Some((plenty, false))),
        quota(SlidingCounter::new(N, WINDOW).into(), 2 * N - 1, None),
        quota(FixedWindow::new(N, WINDOW).into(), 2 * N - 1, None),
        quota(TokenBucket::new(N, WINDOW).into(), 2 * N - 1, None),
    ];
    let long = [sent / 5, sent * 2 / 5, sent * 2].into_iter().cycle().enumerate();
    let long = long.map(|(number, quota)| Quota {
        limit: SlidingLog::per_hour(quota).into(),
        most: quota,
        beside: Some((SlidingLog::new(BURST, WINDOW).into(), number % 2 == 0)),
        keeps_all: true,
    });
    short.into_iter().chain(long).take(KEYS).collect()
}

/// Most requests cost 1.
pub(super) fn random_cost() -> u64 {
    match fastrand::u32(..8) {
        0 => fastrand::u64(2..=5),
        _ => 1,
    }
}

/// What so many requests cost on average.
pub(super) fn cost_of(requests: u64) -> u64 {
    requests * (7 * 2 + 7) / 16
}

impl Quota {
    /// The key of the quota at this position.
    pub(super) fn name(position: usize) -> String {
        format!("caller-{position}")
    }

    /// Where a log of this position is in Redis.
    pub(super) fn log(position: usize) -> String {
        format!("quota:1:log/1h:{POLICY}:{{key={}}}", Self::name(position))
    }

    /// The window of each limit in microseconds, and the most that is admitted in any of them.
    fn windows(&self) -> impl Iterator<Item = (u64, u64)> {
        let beside = self.beside.iter().map(|(limit, _)| (limit, limit.quota()));
        let limits = [(&self.limit, self.most)].into_iter().chain(beside);
        limits.map(|(limit, most)| {
            let window = limit.window().expect("no window of a calendar");
            (window.as_micros() as u64, most)
        })
    }
}

impl Reply {
    pub(super) fn is_by_redis(self) -> bool {
        matches!(self, Self::Admitted(_) | Self::Denied)
    }

    /// Whether it is no decision.
    pub(super) fn is_error(self) -> bool {
        matches!(self, Self::Refused | Self::NotSent | Self::Missing)
    }
}

impl Check {
    pub(super) fn ended(&self) -> u64 {
        self.sent + self.took.as_micros() as u64
    }
}

/// A line of a report, which [`FromStr`] reads.
impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (reply, at) = match self.reply {
            Reply::Admitted(at) => (0, at),
            Reply::Denied => (1, 0),
            Reply::DeniedFromCache => (2, 0),
            Reply::Refused => (3, 0),
            Reply::NotSent => (4, 0),
            Reply::Missing => (5, 0),
        };
        let (after, took) = (self.after.as_micros(), self.took.as_micros());
        write!(
            f,
            "{} {} {} {after} {took} {reply} {at}",
            self.key, self.cost, self.sent
        )
    }
}

impl FromStr for Check {
    type Err = ParseIntError;

    fn from_str(line: &str) -> Result<Self, ParseIntError> {
        let numbers = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        let [key, cost, sent, after, took, reply, at] = numbers[..] else {
            panic!("{line:?} is no check");
        };
        Ok(Self {
            key: key as usize,
            cost,
            sent,
            after: Duration::from_micros(after),
            took: Duration::from_micros(took),
            reply: match reply {
                0 => Reply::Admitted(at),
                1 => Reply::Denied,
                2 => Reply::DeniedFromCache,
                3 => Reply::Refused,
                4 => Reply::NotSent,
                _ => Reply::Missing,
            },
        })
    }
}

/// The weight that a log holds, by its time.
pub(super) type Held = BTreeMap<u64, u64>;

/// The members of a log, which are named `<time>`, `<time>-<number>`, `<time>:<weight>` or `<time>~<span>:<weight>`.
pub(super) fn held(members: &str) -> Held {
    let mut held = Held::new();
    for member in members.lines().filter(|member| member.starts_with(char::is_numeric)) {
        let (name, weight) = member.split_once(':').unwrap_or((member, "1"));
        let time = name.split(['-', '~']).next().unwrap_or(name);
        let time: u64 = time.parse().expect("a member begins with a time");
        *held.entry(time).or_default() += weight.parse::<u64>().expect("a weight");
    }
    held
}

/// The differences between the replies about one key, its limit, and what Redis holds.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// How many more than the limit were admitted in some window.
    pub(super) over: u64,
    /// How many admissions Redis does not hold.
    pub(super) lost: u64,
    /// How much more Redis holds than was sent.
    pub(super) twice: u64,
}

impl Verdict {
    /// Looks at all checks of a key; what Redis holds is given if it keeps all.
    pub(super) fn of<'a>(checks: impl Iterator<Item = &'a Check>, quota: &Quota, held: Option<&Held>) -> Self {
        let (mut by_redis, mut by_callers, mut unanswered) = (Vec::new(), Vec::new(), 0);
        for check in checks {
            match check.reply {
                Reply::Admitted(at) => {
                    by_redis.push((at, at, check.cost));
                    by_callers.push((check.sent, check.ended(), check.cost));
                }
                Reply::Missing => unanswered += check.cost,
                _ => {}
            }
        }

        let over = quota.windows().map(|(window, most)| {
            let admitted = most_within(&mut by_redis, window).max(most_within(&mut by_callers, window));
            admitted.saturating_sub(most)
        });
        let over = over.max().unwrap_or_default();
        let Some(held) = held else {
            return Self {
                over,
                ..Self::default()
            };
        };

        let mut replied = Held::new();
        for (at, _, cost) in by_redis {
            *replied.entry(at).or_default() += cost;
        }
        let missing = |from: &Held, in_: &Held| -> u64 {
            let missing = from
                .iter()
                .map(|(at, weight)| weight.saturating_sub(in_.get(at).copied().unwrap_or(0)));
            missing.sum()
        };
        Self {
            over,
            lost: missing(&replied, held),
            // A charge without a reply belongs to a request without a reply.
            twice: missing(held, &replied).saturating_sub(unanswered),
        }
    }
}

/// The largest sum of these costs that began and ended within some half-open window.
pub(super) fn most_within(spans: &mut [(u64, u64, u64)], window: u64) -> u64 {
    spans.sort_unstable();
    let sums = spans.iter().enumerate().map(|(first, (start, ..))| {
        let begun = spans[first..].iter().take_while(|(from, ..)| from - start < window);
        let within = begun.filter(|(_, upto, _)| upto - start < window);
        within.map(|(_, _, cost)| cost).sum()
    });
    sums.max().unwrap_or_default()
}

mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn check(sent: u64, reply: Reply) -> Check {
        Check {
            key: 0,
            cost: 1,
            sent,
            after: Duration::ZERO,
            took: Duration::from_millis(1),
            reply,
        }
    }

    /// Two in any hour, and beside it three in any two hours.
    fn quota() -> Quota {
        Quota {
            limit: SlidingLog::per_hour(2).into(),
            most: 2,
            beside: Some((SlidingLog::new(3, Duration::from_secs(7_200)).into(), true)),
            keeps_all: true,
        }
    }

    fn verdict(checks: &[Check], members: &str) -> Verdict {
        Verdict::of(checks.iter(), &quota(), Some(&held(members)))
    }

    fn admitted(at: u64) -> Check {
        check(at, Reply::Admitted(at))
    }

    #[test]
    fn a_history_that_agrees_with_redis_has_no_difference() {
        let checks = [
            admitted(7),
            admitted(7),
            admitted(7 + 3_600 * SECOND),
            check(8, Reply::Denied),
        ];
        for members in ["7\n7-2\n3600000007", "#\n7:2\n3600000007", "#\n7\n7-3\n3600000007"] {
            assert_eq!(verdict(&checks, members), Verdict::default());
        }
    }

    #[test]
    fn one_more_than_the_limit_within_a_window_by_the_clock_of_redis_is_found() {
        let checks = [admitted(7), admitted(8), admitted(6 + 3_600 * SECOND)];
        assert_eq!(verdict(&checks, "7\n8\n3600000006").over, 1);
    }

    #[test]
    fn one_more_than_the_limit_within_a_window_by_the_clock_of_the_callers_is_found() {
        let hours = |number| check(number, Reply::Admitted(number * 3_600 * SECOND));
        let checks = [hours(1), hours(2), hours(3)];
        assert_eq!(verdict(&checks, "3600000000\n7200000000\n10800000000").over, 1);
    }

    #[test]
    fn costs_are_added_up_in_each_of_the_windows() {
        let costs = |costs: [u64; 2], later: u64| {
            let checks = [7, 7 + later * SECOND].map(admitted).into_iter().zip(costs);
            let checks: Vec<_> = checks.map(|(check, cost)| Check { cost, ..check }).collect();
            let verdict = verdict(&checks, &format!("7:{}\n{}:{}", costs[0], 7 + later * SECOND, costs[1]));
            assert_eq!((verdict.lost, verdict.twice), (0, 0));
            verdict.over
        };
        assert_eq!(costs([1, 1], 1), 0);
        assert_eq!(costs([2, 1], 3_599), 1);
        assert_eq!(costs([2, 1], 3_600), 0);
        assert_eq!(costs([2, 2], 7_199), 1);
        assert_eq!(costs([2, 2], 7_200), 0);
    }

    #[test]
    fn a_charge_applied_twice_is_found() {
        assert_eq!(verdict(&[admitted(7)], "7\n9").twice, 1);
        assert_eq!(verdict(&[admitted(7)], "7:2").twice, 1);
        assert_eq!(verdict(&[admitted(7), check(8, Reply::Refused)], "7\n9").twice, 1);
        assert_eq!(verdict(&[admitted(7), check(8, Reply::NotSent)], "7\n9").twice, 1);
    }

    #[test]
    fn a_request_without_a_reply_is_charged_at_most_once() {
        let checks = [admitted(7), check(8, Reply::Missing)];
        assert_eq!(verdict(&checks, "7"), Verdict::default());
        assert_eq!(verdict(&checks, "7\n9"), Verdict::default());
        assert_eq!(verdict(&checks, "7\n9:2").twice, 1);
    }

    #[test]
    fn an_admission_that_redis_does_not_hold_is_found() {
        assert_eq!(verdict(&[admitted(7), admitted(8)], "8").lost, 1);
        // A charge of another request does not make up for it.
        let checks = [admitted(7), admitted(8), check(8, Reply::Missing)];
        assert_eq!(verdict(&checks, "8\n9").lost, 1);
    }

    #[test]
    fn a_check_is_read_as_it_was_written() {
        for reply in [
            Reply::Admitted(9),
            Reply::Denied,
            Reply::DeniedFromCache,
            Reply::Refused,
            Reply::NotSent,
            Reply::Missing,
        ] {
            let line = check(7, reply).to_string();
            let read: Check = line.parse().expect("a check");
            assert_eq!((read.to_string(), read.reply), (line, reply));
        }
    }
}
