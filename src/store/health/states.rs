use std::{
    collections::VecDeque,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use crate::store::NodeState;

/// The checks of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CheckCounts {
    pub(super) decided: u64,
    pub(super) failed: u64,
    /// Those that failed because of their keys.
    pub(super) failed_by_key: u64,
}

impl CheckCounts {
    fn since(self, earlier: Self) -> Self {
        Self {
            decided: self.decided - earlier.decided,
            failed: self.failed - earlier.failed,
            failed_by_key: self.failed_by_key - earlier.failed_by_key,
        }
    }
}

/// What a log line is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogSubject {
    State(NodeState),
    /// Checks that fail because of their keys.
    Keys,
}

/// A log line, and the checks since the line before.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LogLine {
    pub(super) subject: LogSubject,
    pub(super) counts: CheckCounts,
}

/// The state of a node over time, and what is logged about it.
///
/// It is advanced by [`tick`](Self::tick) about once a second while a node is watched.
#[derive(Debug, Default)]
pub(super) struct NodeStates {
    pub(super) state: NodeState,
    /// Since when, if it was ever another one.
    pub(super) since: Option<SystemTime>,
    /// Since when another state would fit.
    other_since: Option<Instant>,
    last_reply: Option<Instant>,
    last_failure: Option<Instant>,
    /// The totals of the last ticks, the oldest first; empty while the node is not watched.
    samples: VecDeque<(Instant, CheckCounts)>,
    /// The totals of the last line about a state.
    logged: CheckCounts,
    /// When the last line about each state was logged.
    logged_at: [Option<Instant>; 3],
    /// The totals and the time of the last line about keys.
    keys_logged: CheckCounts,
    keys_logged_at: Option<Instant>,
    /// Whether the state was entered and not logged.
    is_unlogged: bool,
}

/// How long the checks of a node that was `ok` are observed before it enters another state.
const SETTLE: Duration = Duration::from_secs(1);
/// The time for which no check succeeds before a node is `down`, and for which none fails before it is `ok`.
const RECENT: Duration = Duration::from_secs(5);
/// How long another state has to fit before it replaces one that is not `ok`. It is longer than [`RECENT`], so that a node that
/// replies again goes from `down` to `ok`.
const HOLD: Duration = Duration::from_secs(6);
/// The least time between two lines about one state.
const LINE_PAUSE: Duration = Duration::from_secs(60);
/// The time of the reported counts.
pub(super) const WINDOW: Duration = Duration::from_secs(60);

impl NodeStates {
    /// Begins to watch the node, unless it is watched.
    pub(super) fn begin(&mut self, now: Instant, totals: CheckCounts) {
        if self.samples.is_empty() {
            self.samples.push_back((now, totals));
            self.logged = totals;
            self.keys_logged = totals;
        }
    }

    pub(super) fn end(&mut self) {
        self.samples.clear();
    }

    /// Records the totals, and returns what is to be logged.
    pub(super) fn tick(&mut self, now: Instant, totals: CheckCounts) -> Option<LogLine> {
        let before = self.samples.back().map_or(totals, |(_, totals)| *totals);
        let recent = totals.since(before);
        if recent.failed > 0 {
            self.last_failure = Some(now);
        }
        if recent.decided + recent.failed_by_key > 0 {
            self.last_reply = Some(now);
        }
        self.samples.push_back((now, totals));
        while self.samples.get(1).is_some_and(|(at, _)| *at + WINDOW <= now) {
            self.samples.pop_front();
        }

        let fitting = self.fitting_state(now);
        if fitting == self.state {
            self.other_since = None;
        } else {
            let since = *self.other_since.get_or_insert(now);
            let hold = if self.state == NodeState::Ok { SETTLE } else { HOLD };
            if since + hold <= now {
                self.enter(fitting);
            }
        }
        self.line(now, totals)
    }

    /// The state that fits the last checks.
    fn fitting_state(&self, now: Instant) -> NodeState {
        let fails_last = self.last_failure > self.last_reply;
        if self.state == NodeState::Ok {
            return match self.last_failure {
                None => NodeState::Ok,
                Some(_) if fails_last => NodeState::Down,
                Some(_) => NodeState::Degraded,
            };
        }
        let is_recent = |at: Option<Instant>| at.is_some_and(|at| now < at + RECENT);
        match (is_recent(self.last_failure), is_recent(self.last_reply)) {
            (true, true) => NodeState::Degraded,
            (true, false) => NodeState::Down,
            (false, _) if !fails_last => NodeState::Ok,
            (false, _) => self.state, // no check was made since
        }
    }

    fn enter(&mut self, state: NodeState) {
        self.state = state;
        self.since = Some(SystemTime::now());
        self.other_since = None;
        self.is_unlogged = true;
        if state == NodeState::Ok {
            self.last_failure = None;
        }
    }

    fn line(&mut self, now: Instant, totals: CheckCounts) -> Option<LogLine> {
        let counts = totals.since(self.logged);
        let is_due = |at: Option<Instant>| at.is_none_or(|at| at + LINE_PAUSE <= now);
        let state = self.state as usize;
        let continues = self.state != NodeState::Ok && counts.failed > 0;
        if (self.is_unlogged || continues) && is_due(self.logged_at[state]) {
            self.logged_at[state] = Some(now);
            self.logged = totals;
            self.is_unlogged = false;
            return Some(LogLine {
                subject: LogSubject::State(self.state),
                counts,
            });
        }
        let counts = totals.since(self.keys_logged);
        if counts.failed_by_key > 0 && is_due(self.keys_logged_at) {
            self.keys_logged_at = Some(now);
            self.keys_logged = totals;
            return Some(LogLine {
                subject: LogSubject::Keys,
                counts,
            });
        }
        None
    }

    /// Whether no check has failed in the last minute, and nothing remains to be logged.
    pub(super) fn is_settled(&self, totals: CheckCounts) -> bool {
        let is_ok = self.state == NodeState::Ok && self.last_failure.is_none();
        let recent = self.window(totals);
        let fails = recent.failed + recent.failed_by_key > 0;
        is_ok && !fails && !self.is_unlogged && self.keys_logged.failed_by_key == totals.failed_by_key
    }

    /// The checks since the last line about a state.
    #[cfg(any(test, feature = "cluster"))]
    pub(super) fn unlogged(&self, totals: CheckCounts) -> CheckCounts {
        totals.since(self.logged)
    }

    /// The checks of the last minute while the node is watched.
    pub(super) fn window(&self, totals: CheckCounts) -> CheckCounts {
        self.samples
            .front()
            .map_or_else(CheckCounts::default, |(_, begin)| totals.since(*begin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NodeStates on a clock that the test advances by a second for each tick.
    struct Watched {
        states: NodeStates,
        now: Instant,
        totals: CheckCounts,
    }

    const fn checks(decided: u64, failed: u64, failed_by_key: u64) -> CheckCounts {
        CheckCounts {
            decided,
            failed,
            failed_by_key,
        }
    }

    impl Watched {
        fn new() -> Self {
            let mut watched = Self {
                states: NodeStates::default(),
                now: Instant::now(),
                totals: checks(1_000, 10, 1),
            };
            watched.states.begin(watched.now, watched.totals);
            watched
        }

        /// Makes these checks in each of so many seconds, and returns the lines with the second of each.
        fn run(&mut self, seconds: u64, each: CheckCounts) -> Vec<(u64, LogSubject, CheckCounts)> {
            let mut lines = Vec::new();
            for second in 1..=seconds {
                self.now += Duration::from_secs(1);
                self.totals.decided += each.decided;
                self.totals.failed += each.failed;
                self.totals.failed_by_key += each.failed_by_key;
                let line = self.states.tick(self.now, self.totals);
                lines.extend(line.map(|line| (second, line.subject, line.counts)));
            }
            lines
        }
    }

    const OK: LogSubject = LogSubject::State(NodeState::Ok);
    const DEGRADED: LogSubject = LogSubject::State(NodeState::Degraded);
    const DOWN: LogSubject = LogSubject::State(NodeState::Down);
    const GOOD: CheckCounts = checks(100, 0, 0);
    const BAD: CheckCounts = checks(0, 10, 0);
    const MIXED: CheckCounts = checks(80, 20, 0);

    #[test]
    fn a_node_that_fails_all_checks_is_down_with_one_line_a_minute() {
        let mut node = Watched::new();
        let lines = node.run(150, BAD);
        assert_eq!(
            lines,
            [
                (2, DOWN, checks(0, 20, 0)),
                (62, DOWN, checks(0, 600, 0)),
                (122, DOWN, checks(0, 600, 0))
            ]
        );
        assert!(!node.states.is_settled(node.totals));
        assert_eq!(node.states.window(node.totals), checks(0, 600, 0));
    }

    #[test]
    fn replies_that_were_under_way_do_not_hide_that_a_node_is_down() {
        let mut node = Watched::new();
        assert_eq!(node.run(1, MIXED), []);
        assert_eq!(node.run(1, BAD), [(1, DOWN, checks(80, 30, 0))]);
        // Neither do two seconds of replies.
        assert_eq!(node.run(2, MIXED), []);
        assert_eq!(node.run(20, BAD), []);
        assert_eq!(node.states.state, NodeState::Down);
    }

    #[test]
    fn a_node_that_replies_again_for_six_seconds_is_ok() {
        let mut node = Watched::new();
        node.run(10, BAD);
        assert_eq!(node.run(6, GOOD), []);
        assert_eq!(node.states.state, NodeState::Down);
        assert_eq!(node.run(1, GOOD), [(1, OK, checks(700, 80, 0))]);
        assert!(node.states.since.is_some());
        assert_eq!(node.run(52, GOOD), []);
        assert!(!node.states.is_settled(node.totals), "it has failed in the last minute");
        assert_eq!(node.run(1, GOOD), []);
        assert!(node.states.is_settled(node.totals));
    }

    #[test]
    fn a_node_that_fails_a_share_is_degraded_and_does_not_flap() {
        let mut node = Watched::new();
        // 20 % of the checks, in seconds of each kind and mixed.
        let mut lines = node.run(2, MIXED);
        for _ in 0..19 {
            lines.extend(node.run(1, MIXED));
            lines.extend(node.run(1, GOOD));
            lines.extend(node.run(1, BAD));
        }
        assert_eq!(lines, [(2, DEGRADED, checks(160, 40, 0))]);
        assert_eq!(node.run(3, MIXED).len(), 1, "a minute later");
        assert_eq!(node.run(11, BAD), [(11, DOWN, checks(0, 110, 0))]);
    }

    #[test]
    fn one_failure_among_replies_is_two_lines() {
        let mut node = Watched::new();
        let mut lines = node.run(1, checks(99, 1, 0));
        lines.extend(node.run(30, GOOD));
        assert_eq!(lines, [(1, DEGRADED, checks(199, 1, 0)), (11, OK, checks(1_000, 0, 0))]);
    }

    #[test]
    fn without_checks_a_state_stays() {
        let mut node = Watched::new();
        let mut lines = node.run(1, checks(0, 1, 0));
        lines.extend(node.run(1_000, CheckCounts::default()));
        assert_eq!(lines, [(1, DOWN, checks(0, 1, 0))]);
        assert!(!node.states.is_settled(node.totals));

        node.run(1, checks(1, 0, 0));
        assert_eq!(node.run(100, CheckCounts::default()), [(6, OK, checks(1, 0, 0))]);
    }

    #[test]
    fn changes_within_a_minute_are_one_line_for_each_state() {
        let mut node = Watched::new();
        let mut lines = Vec::new();
        for _ in 0..2 {
            lines.extend(node.run(8, BAD));
            lines.extend(node.run(12, GOOD));
        }
        let subjects: Vec<_> = lines.iter().map(|(_, subject, _)| *subject).collect();
        assert_eq!(subjects, [DOWN, OK]);
        // What was not logged is in the next line.
        let lines = node.run(60, GOOD);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert_eq!((lines[0].1, lines[0].2.failed), (OK, 80));
    }

    #[test]
    fn keys_whose_checks_fail_are_a_line_a_minute_and_no_state() {
        let mut node = Watched::new();
        let lines = node.run(100, checks(10, 0, 5));
        assert_eq!(
            lines,
            [
                (1, LogSubject::Keys, checks(10, 0, 5)),
                (61, LogSubject::Keys, checks(600, 0, 300))
            ]
        );
        assert_eq!(node.states.state, NodeState::Ok);
        assert!(!node.states.is_settled(node.totals));
        assert_eq!(node.run(60, GOOD).len(), 1, "the rest");
        assert!(node.states.is_settled(node.totals));
    }

    #[test]
    fn a_check_that_fails_by_its_key_is_a_reply() {
        let mut node = Watched::new();
        node.run(10, checks(0, 20, 80));
        assert_eq!(node.states.state, NodeState::Degraded);
    }
}
