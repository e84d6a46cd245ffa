//! Verifies the promises of the store in what happened in a schedule.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::{
    faults::Faults,
    network::Network,
    plan::{DEADLINE, Kind, Plan},
    slots,
};
use crate::{
    SlidingLog,
    store::{ErrorKind, StoreError, StoreResponse},
};

/// A request of a caller.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) kind: Kind,
    /// The Redis keys that it charges. The first one is its own unless it is of a shared key.
    pub(super) keys: Vec<String>,
    /// The runtime of the caller.
    pub(super) runtime: usize,
    /// Whether that ended or was stalled before the response.
    pub(super) disturbed: bool,
    /// Its position in the order in which requests were first polled.
    pub(super) order: Option<usize>,
    pub(super) polled_at: Option<Instant>,
    pub(super) responded_at: Option<Instant>,
    /// Whether the caller left before the response.
    pub(super) left: bool,
    /// If the response is cached: whether the server would deny the request too.
    pub(super) cached: Option<bool>,
    pub(super) settlement: SettlementRecord,
    /// From when until when it held a slot.
    pub(super) held: Option<(Instant, Instant)>,
    /// Whether it ended because the slot was lost.
    pub(super) lost: bool,
    /// When it asked for a slot, and when it had the response.
    pub(super) asked: Option<(Instant, Instant)>,
    pub(super) response: Option<Result<StoreResponse, StoreError>>,
}

/// The progress of a request with a receipt.
#[derive(Clone, Debug, Default)]
pub(super) struct SettlementRecord {
    /// Whether the estimate was admitted.
    pub(super) admitted: bool,
    /// Whether the store confirmed the settlement.
    pub(super) confirmed: bool,
}

impl Record {
    fn allowed(&self) -> Option<bool> {
        match &self.response {
            Some(Ok(response)) => Some(response.outcomes[0].allowed),
            _ => None,
        }
    }
}

/// The longest round trip on a good network.
pub(in crate::store::redis) const ROUND_TRIP: Duration = Duration::from_millis(6);

/// The longest wait for a response from one queue: one deadline in the queue and one for Redis, both counted in steps, each
/// rounded up to the resolution of the timer.
pub(super) const LONGEST: Duration = DEADLINE.saturating_mul(2).saturating_add(Duration::from_millis(20));

pub(super) fn check(plan: &Plan, records: &[Record], network: &Network) {
    for record in records {
        assert_ne!(
            record.cached,
            Some(false),
            "the server would admit what the deny cache denies: {record:?}"
        );
        verify_charged_at_most_once(record, network);
        verify_settled_once(plan, record, network);
        verify_response_in_time(plan, record, network);
    }
    verify_limits(plan, records, network);
    verify_bans(records, network);
    slots::check(plan, records, network);
    verify_order(plan, records, network);
}

fn verify_charged_at_most_once(record: &Record, network: &Network) {
    let times = |key: &String| network.charged(key).len();
    let own = match record.kind {
        Kind::Own | Kind::OwnCharge | Kind::OwnPair => &record.keys[..],
        // The last key always denies.
        Kind::Across => &record.keys[..2],
        Kind::Shared
        | Kind::Settled { .. }
        | Kind::Held { .. }
        | Kind::Banned
        | Kind::Calendar
        | Kind::Peek
        | Kind::Reset => return,
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

/// An estimate is charged and settled once or not at all, and no more is refunded than was charged.
fn verify_settled_once(plan: &Plan, record: &Record, network: &Network) {
    let Kind::Settled { actual } = record.kind else { return };
    let (key, SettlementRecord { admitted, confirmed }) = (&record.keys[0], &record.settlement);
    let charged: Vec<u64> = network.charged(key).into_iter().map(|(_, cost)| cost).collect();
    let refunded = network.refunded(key);
    let settled = match actual.checked_sub(Plan::ESTIMATE) {
        None => refunded == Plan::ESTIMATE - actual && charged == [Plan::ESTIMATE],
        Some(0) => refunded == 0 && charged == [Plan::ESTIMATE],
        Some(more) => refunded == 0 && charged == [Plan::ESTIMATE, more],
    };
    let unsettled = refunded == 0 && charged.iter().all(|cost| *cost == Plan::ESTIMATE) && charged.len() <= 1;
    assert!(
        settled || unsettled,
        "{charged:?} charged, {refunded} refunded: {record:?}"
    );
    assert!(
        settled || !confirmed,
        "{charged:?} charged, {refunded} refunded: {record:?}"
    );
    assert!(!admitted || !charged.is_empty(), "nothing is charged: {record:?}");

    if plan.faults.clock_step == 0 {
        let limit = SlidingLog::per_hour(1_000).into();
        let counted = 1_000 - network.room(key, &limit);
        assert_eq!(counted, charged.iter().sum::<u64>() - refunded, "{record:?}");
    }
}

fn verify_response_in_time(plan: &Plan, record: &Record, network: &Network) {
    let Some(polled_at) = record.polled_at else { return };
    if record.left || record.disturbed {
        return;
    }
    let responded_at = record.responded_at.unwrap_or_else(|| panic!("no response: {record:?}"));
    let longest = match record.kind {
        // Three slots, then two refunds.
        Kind::Across => 5 * LONGEST,
        _ => LONGEST,
    };
    // First for the call that reaches several slots.
    let longest = if plan.faults.moved > 0 {
        longest + LONGEST
    } else {
        longest
    };
    let waited = responded_at - polled_at;
    assert!(waited <= longest, "a response after {waited:?}: {record:?}");

    if plan.faults != Faults::default() {
        return;
    }
    // With a good server, only the end or a stall of the runtime of the call is a reason for an error.
    if let Some(Err(error)) = &record.response {
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
            "a response of a good server after {waited:?}: {record:?}"
        );
    }
}

/// No window of the server's clock contains more than the limit, unless the clock was set.
fn verify_limits(plan: &Plan, records: &[Record], network: &Network) {
    if plan.faults.clock_step > 0 || plan.resets {
        return;
    }
    let mut shared: HashMap<&String, (u64, u64)> = HashMap::new();
    for record in records.iter().filter(|record| record.kind == Kind::Shared) {
        let (requests, admitted) = shared.entry(&record.keys[0]).or_default();
        *requests += 1;
        *admitted += u64::from(record.allowed() == Some(true));
    }
    for (key, (requests, admitted)) in shared {
        let charged = network.charged(key);
        // One more is charged at the end of the schedule.
        assert!(
            charged.len() as u64 <= requests + 1,
            "{key}: {requests} requests, {} charged",
            charged.len()
        );
        assert!(
            charged.len() as u64 >= admitted,
            "{key}: {admitted} admitted, {} charged",
            charged.len()
        );
        verify_windows(key, charged);
    }
}

/// No half-open window contains more than the limit.
fn verify_windows(key: &str, mut charged: Vec<(u64, u64)>) {
    charged.sort_unstable();
    for (position, (at, _)) in charged.iter().enumerate() {
        let in_window = charged[..=position]
            .iter()
            .filter(|(earlier, _)| earlier + Plan::WINDOW_US > *at);
        let weight: u64 = in_window.map(|(_, cost)| cost).sum();
        assert!(weight <= Plan::QUOTA, "{key}: {weight} in a window");
    }
}

/// Each denial is counted once, unless a ban is in force.
fn verify_bans(records: &[Record], network: &Network) {
    for record in records.iter().filter(|record| record.kind == Kind::Banned) {
        let alike = || records.iter().filter(|other| other.keys == record.keys);
        let is_counted = |other: &&Record| match &other.response {
            Some(Ok(response)) => {
                let outcome = &response.outcomes[0];
                !outcome.allowed && outcome.states[0].banned_for().is_none()
            }
            _ => false,
        };
        let counted = network.charged(&record.keys[0]).len();
        let denied = alike().filter(is_counted).count();
        let at_most = alike().filter(|other| other.allowed() != Some(true)).count();
        assert!(
            (denied..=at_most).contains(&counted),
            "{counted} denials are counted of {denied} to {at_most}: {record:?}"
        );
    }
}

/// Requests to one queue are sent in the order in which they were made.
fn verify_order(plan: &Plan, records: &[Record], network: &Network) {
    // Requests that cannot be decided together are sent again one by one.
    if plan.clustered || plan.faults.try_again > 0 {
        return;
    }
    let mut sent: Vec<_> = records
        .iter()
        .filter(|record| matches!(record.kind, Kind::Own | Kind::OwnCharge))
        .filter_map(|record| {
            // A call is sent again if the script is unknown or no window of a calendar encloses the time.
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
