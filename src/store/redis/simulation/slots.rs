//! Verifies the promises about slots in what happened in a schedule.

use tokio::time::Instant;

use super::{
    faults::Faults,
    history::{LONGEST, ROUND_TRIP, Record},
    network::Network,
    plan::{Kind, Plan},
};
use crate::{Concurrency, store::Operation};

pub(super) fn check(plan: &Plan, records: &[Record], network: &Network) {
    verify_slots(plan, records, network);
    verify_waits(plan, records);
    verify_leases(plan, records, network);
}

/// No more requests hold slots at once than there are, unless the clock was set, and in the end all slots are free.
fn verify_slots(plan: &Plan, records: &[Record], network: &Network) {
    let limit = Concurrency::new(Plan::SLOTS).lease(Plan::LEASE).into();
    let of_slots = || records.iter().filter(|record| matches!(record.kind, Kind::Held { .. }));
    for record in of_slots() {
        let key = &record.keys[0];
        if plan.faults.clock_step == 0 {
            assert_eq!(
                network.room(key, &limit),
                Plan::SLOTS,
                "nothing holds {key}: {record:?}"
            );
        }
        let Some((since, _)) = record.held else { continue };
        let at_once = of_slots().filter(|other| {
            // A runtime that is stalled holds on to slots that it has lost.
            let held = other.held.filter(|_| other.keys == record.keys && !other.disturbed);
            held.is_some_and(|(from, until)| from <= since && since < until)
        });
        let at_once = at_once.count() as u64;
        let is_set = plan.faults.clock_step > 0;
        assert!(at_once <= Plan::SLOTS || is_set, "{at_once} hold {key}: {record:?}");
    }
}

/// A request waits for a slot no longer than it may, and on a good network not in vain while a slot is free.
fn verify_waits(plan: &Plan, records: &[Record]) {
    let is_good = plan.faults == Faults::default() && plan.endings == 0 && plan.stalls == 0;
    for record in records.iter().filter(|record| !record.disturbed) {
        let (Kind::Held { waits: true, .. }, Some((asked_at, responded_at))) = (record.kind, record.asked) else {
            continue;
        };
        let waited = responded_at - asked_at;
        // The last check begins when the one before it, which may last as long, has a reply.
        assert!(
            waited <= Plan::SLOT_WAIT + 2 * LONGEST,
            "a response after {waited:?}: {record:?}"
        );
        let others = || records.iter().filter(|other| other.keys == record.keys);
        if is_good
            && let Some((since, _)) = record.held
            // A place that was left frees no slot, and lets the next one through.
            && others().all(|other| other.asked.is_some())
        {
            // The release, the message and the check of the next request take two round trips at most.
            let is_woken = |at: Instant| at <= since && since <= at + 2 * ROUND_TRIP;
            let mut released = others().filter_map(|other| other.held).map(|(_, until)| until);
            assert!(
                is_woken(asked_at) || released.any(is_woken),
                "it had a slot later than it was free: {record:?}"
            );
        }
        if is_good && record.held.is_none() {
            let taken = others().filter(|other| {
                other.held.is_some_and(|(since, until)| {
                    since <= responded_at + 2 * ROUND_TRIP && responded_at <= until + 2 * ROUND_TRIP
                })
            });
            assert!(
                taken.count() as u64 >= Plan::SLOTS,
                "a slot is free, and it is denied: {record:?}"
            );
            assert!(waited >= Plan::SLOT_WAIT, "it is denied after {waited:?}: {record:?}");
        }
    }
}

/// A lease is renewed in time while its slot is held, and not after its end.
fn verify_leases(plan: &Plan, records: &[Record], network: &Network) {
    let is_undisturbed = plan.faults == Faults::default() && plan.endings == 0 && plan.stalls == 0;
    for sent in network.leases() {
        let mut operations = sent.iter().map(|(_, operation)| *operation);
        let ends = operations.any(|operation| operation == Operation::EndLease);
        let renewed = operations.any(|operation| operation == Operation::RenewLease);
        assert!(!ends || !renewed, "a lease is renewed after its end: {sent:?}");

        if is_undisturbed {
            // One that waits for its slot is refreshed less often.
            let held = sent.iter().rposition(|(_, operation)| *operation == Operation::Wait);
            for pair in sent[held.unwrap_or(0)..].windows(2) {
                let pause = pair[1].0 - pair[0].0;
                assert!(
                    pause <= Plan::LEASE / 3 + ROUND_TRIP,
                    "a lease is renewed after {pause:?}: {sent:?}"
                );
            }
        }
    }
    if is_undisturbed {
        for record in records {
            assert!(!record.lost, "a slot is lost on a good network: {record:?}");
        }
    }
}
