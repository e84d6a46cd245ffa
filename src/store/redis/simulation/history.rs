//! What happened in a schedule, held against what is promised.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::{
    DEADLINE,
    network::{Faults, Network},
    schedule::{Kind, Plan},
};
use crate::store::{ErrorKind, StoreError, StoreResponse};

/// A request of a caller.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) kind: Kind,
    /// The Redis keys it charges, of which the first is its own, unless it is about a shared one.
    pub(super) keys: Vec<String>,
    /// The runtime of the caller.
    pub(super) runtime: usize,
    /// Whether that ended or stood still before the answer.
    pub(super) disturbed: bool,
    /// In which order it was first polled.
    pub(super) order: Option<usize>,
    pub(super) polled_at: Option<Instant>,
    pub(super) answered_at: Option<Instant>,
    pub(super) left: bool,
    /// If the deny cache answered: whether the server would deny it too.
    pub(super) cached: Option<bool>,
    pub(super) answer: Option<Result<StoreResponse, StoreError>>,
}

impl Record {
    fn allowed(&self) -> Option<bool> {
        match &self.answer {
            Some(Ok(answer)) => Some(answer.outcomes[0].allowed),
            _ => None,
        }
    }
}

/// The longest round trip on a good network.
const ROUND_TRIP: Duration = Duration::from_millis(6);

/// The longest that a caller may wait for what it sends to one queue: one deadline in the queue and one for Redis, both
/// counted in steps, of which each is rounded up to the resolution of the timer.
const LONGEST: Duration = DEADLINE.saturating_mul(2).saturating_add(Duration::from_millis(20));

pub(super) fn check(plan: &Plan, records: &[Record], network: &Network) {
    for record in records {
        assert_ne!(
            record.cached,
            Some(false),
            "the server would admit what the deny cache denies: {record:?}"
        );
        each_is_charged_at_most_once(record, network);
        each_is_answered_in_time(plan, record, network);
    }
    the_limit_is_kept(plan, records, network);
    they_are_sent_in_order(plan, records, network);
}

fn each_is_charged_at_most_once(record: &Record, network: &Network) {
    let times = |key: &String| network.charged(key).len();
    let own = match record.kind {
        Kind::Own | Kind::OwnCharge | Kind::OwnPair => &record.keys[..],
        // The last key is one that always denies.
        Kind::Across => &record.keys[..2],
        Kind::Shared | Kind::Calendar | Kind::Peek | Kind::Reset => return,
    };
    for key in own {
        assert!(times(key) <= 1, "{key} was charged {} times: {record:?}", times(key));
        let expected = match (record.kind, record.allowed()) {
            (Kind::Across, _) => {
                assert_ne!(record.allowed(), Some(true), "one of its policies denies: {record:?}");
                continue;
            }
            (_, Some(true)) => 1,
            (_, Some(false)) => panic!("{record:?} has room"),
            _ => continue,
        };
        assert_eq!(times(key), expected, "{key}: {record:?}");
    }
}

fn each_is_answered_in_time(plan: &Plan, record: &Record, network: &Network) {
    let Some(polled_at) = record.polled_at else { return };
    if record.left || record.disturbed {
        return;
    }
    let answered_at = record
        .answered_at
        .unwrap_or_else(|| panic!("never answered: {record:?}"));
    let longest = match record.kind {
        // Three slots, then two refunds.
        Kind::Across => 5 * LONGEST,
        _ => LONGEST,
    };
    let waited = answered_at - polled_at;
    assert!(waited <= longest, "answered after {waited:?}: {record:?}");

    if plan.faults != Faults::default() {
        return;
    }
    // Nothing but a call that went away, or stands still, with its runtime keeps a good server from answering.
    if let Some(Err(error)) = &record.answer {
        let disturbed = plan.endings > 0 && error.kind() == ErrorKind::Unreachable
            || plan.stalls > 0 && error.kind() == ErrorKind::Timeout;
        assert!(disturbed, "{error}: {record:?}");
        let queued = record.kind == Kind::Own && network.sent(&record.keys[0]).is_empty();
        assert!(!queued, "{error}, although it was never sent: {record:?}");
    }
    if plan.endings + plan.stalls == 0 && record.kind != Kind::Across {
        let longest = 4 * ROUND_TRIP;
        assert!(
            waited <= longest,
            "answered after {waited:?} by a good server: {record:?}"
        );
    }
}

/// No window holds more than the limit, by the clock of the server, unless that was set.
fn the_limit_is_kept(plan: &Plan, records: &[Record], network: &Network) {
    if plan.faults.clock_step > 0 || plan.resets {
        return;
    }
    let mut shared: HashMap<&String, u64> = HashMap::new();
    for record in records.iter().filter(|record| record.kind == Kind::Shared) {
        *shared.entry(&record.keys[0]).or_default() += u64::from(record.allowed() == Some(true));
    }
    for (key, admitted) in shared {
        let charged = network.charged(key);
        assert!(
            charged.len() as u64 >= admitted,
            "{key}: {admitted} admitted, {} charged",
            charged.len()
        );
        for (position, (at, _)) in charged.iter().enumerate() {
            let held = charged[..=position]
                .iter()
                .filter(|(earlier, _)| earlier + Plan::WINDOW_US > *at);
            let weight: u64 = held.map(|(_, cost)| cost).sum();
            assert!(weight <= Plan::QUOTA, "{key}: {weight} in a window");
        }
    }
}

/// Requests to one queue are sent in the order in which they were made.
fn they_are_sent_in_order(plan: &Plan, records: &[Record], network: &Network) {
    // What cannot be served together is sent again one by one.
    if plan.clustered || plan.faults.try_again > 0 {
        return;
    }
    let mut sent: Vec<_> = records
        .iter()
        .filter(|record| matches!(record.kind, Kind::Own | Kind::OwnCharge))
        .filter_map(|record| {
            // A script that is not known, and a second guess of a calendar window, send a call again.
            let first = network.sent(&record.keys[0]).into_iter().min()?;
            Some((record.order?, first, record))
        })
        .collect();
    sent.sort_by_key(|(order, ..)| *order);
    for pair in sent.windows(2) {
        let [(_, earlier, first), (_, later, second)] = pair else {
            continue;
        };
        assert!(
            earlier < later,
            "{second:?} overtakes {first:?}: {later:?} and {earlier:?}"
        );
    }
}
