//! The subjects that hold slots of a policy, and those that it has banned.

use std::cmp::Reverse;

use serde::Serialize;
use tokio::task::JoinSet;

use super::{denials, denials::Denied, subject, subject::SubjectNames, watched::WatchedPolicy};
use crate::Key;

/// A subject with slots in this process.
#[derive(Serialize)]
pub(super) struct SlotsReport {
    subject: String,
    slots: u64,
    /// The time since the first of them was taken.
    longest_seconds: f64,
}

/// A subject that is banned.
#[derive(Serialize)]
pub(super) struct BanReport {
    subject: String,
    /// When it is admitted again: at the end of the ban, or later if the limit denies it then.
    admitted_after_seconds: Option<f64>,
}

/// The most subjects with slots of a policy in a report.
const MOST_SLOTS: usize = 20;

/// The most subjects of a policy that are looked up in the store for a report.
pub(super) const MOST_BANS: usize = 10;

/// Those with most slots; none if no limit of the policy has slots.
pub(super) fn slots(policy: &WatchedPolicy, names: &SubjectNames) -> Option<Vec<SlotsReport>> {
    if !policy.limits.iter().any(|limit| limit.named.limit.is_held()) {
        return None;
    }
    let mut held: Vec<_> = policy.context.keeper.held_of(&policy.name).into_iter().collect();
    held.sort_by_key(|(_, held)| Reverse((held.slots, held.longest)));
    let reports = held.iter().take(MOST_SLOTS).map(|(key, held)| SlotsReport {
        subject: names.name(key),
        slots: held.slots,
        longest_seconds: held.longest.as_secs_f64(),
    });
    Some(reports.collect())
}

/// Of the subjects that are denied most often those that are banned; none if the policy has no bans.
///
/// A ban follows denials, so a subject that is banned is among them. Those of all replicas are first, if the store has them.
pub(super) async fn bans(
    policy: &WatchedPolicy,
    (of_all, of_process): (Option<&Denied>, Option<&Denied>),
    names: &SubjectNames,
) -> Option<Vec<BanReport>> {
    policy.ban()?;
    let of_all = of_all.filter(|_| denials::has_own_keys(policy));
    let counts = [of_all, of_process]
        .into_iter()
        .flatten()
        .flat_map(|(_, summary)| &summary.counts);
    let mut keys: Vec<&Key> = Vec::new();
    for count in counts {
        if keys.len() < MOST_BANS && !keys.contains(&&count.item) {
            keys.push(&count.item);
        }
    }
    let mut peeks = JoinSet::new();
    for (place, key) in keys.into_iter().enumerate() {
        let (policy, key) = (policy.clone(), key.clone());
        peeks.spawn(async move { (place, subject::ban_of(&policy, &key).await, key) });
    }
    let mut banned = Vec::new();
    while let Some(peeked) = peeks.join_next().await {
        if let Ok((place, Some(ban), key)) = peeked {
            banned.push((place, ban, key));
        }
    }
    banned.sort_by_key(|(place, ..)| *place);
    let reports = banned.into_iter().map(|(_, ban, key)| BanReport {
        subject: names.name(&key),
        admitted_after_seconds: ban.admitted_after,
    });
    Some(reports.collect())
}
