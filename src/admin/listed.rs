//! The subjects that a report lists: those that policies deny most often, those that hold slots, those for which requests wait, and
//! those that are banned.

use std::{cmp::Reverse, time::SystemTime};

use serde_json::{Value, json};

use super::{message::unix_seconds, selected::WatchedPolicy, subject, subject::SubjectNames};
use crate::{
    Key,
    check::waiting_by_key,
    decision::{Count, Summary},
};

/// The denials of a policy, and since when they are counted.
pub(super) type DenialSummary = (SystemTime, Summary<Key>);

/// The subjects that a policy denies most often.
pub(super) fn denials(denied: Option<&DenialSummary>, names: &SubjectNames, most: usize) -> Value {
    let summary = denied.map(|(_, summary)| summary);
    let counts = summary.into_iter().flat_map(|summary| &summary.counts).take(most);
    json!({
        "total": summary.map_or(0, |summary| summary.total),
        "since": denied.map(|(since, _)| unix_seconds(*since)),
        // A subject that is not listed was denied at most so often.
        "most_of_others": summary.map_or(0, |summary| summary.most_of_others),
        "subjects": counts.map(|count| denied_subject(count, names)).collect::<Vec<_>>(),
    })
}

/// How often a subject was denied: at least `denials - error` times, and at most `denials` times.
pub(super) fn denied_subject(count: &Count<Key>, names: &SubjectNames) -> Value {
    json!({ "subject": names.name(&count.item), "denials": count.count, "error": count.error })
}

/// The layers and limiters that share the counts of a policy. The clones of a layer are one.
fn counted<'a>(policies: &'a [WatchedPolicy], policy: &WatchedPolicy) -> Vec<&'a WatchedPolicy> {
    let mut counted: Vec<&WatchedPolicy> = Vec::new();
    for policy in policies.iter().filter(|other| other.shares_counts(policy)) {
        let is_counted = |other: &&WatchedPolicy| {
            other.position == policy.position && other.context.denials.is_same(&policy.context.denials)
        };
        if !counted.iter().any(is_counted) {
            counted.push(policy);
        }
    }
    counted
}

/// The denials of a policy by all layers and limiters that share its counts, and since when they are counted.
pub(super) fn of_process(policies: &[WatchedPolicy], policy: &WatchedPolicy) -> Option<DenialSummary> {
    let counted = counted(policies, policy).into_iter();
    let summaries = counted.filter_map(|policy| policy.context.denials.summary(policy.position));
    summaries.reduce(|(since, joined), (other_since, other)| (since.min(other_since), joined.join(other)))
}

/// The decisions of the same.
pub(super) fn decisions(policies: &[WatchedPolicy], policy: &WatchedPolicy) -> u64 {
    let counted = counted(policies, policy).into_iter();
    counted
        .map(|policy| policy.context.denials.decisions(policy.position))
        .sum()
}

/// The most subjects with slots of a policy in a report.
const MOST_SLOTS: usize = 20;

/// The most subjects for which requests wait for a policy in a report.
const MOST_LINES: usize = 20;

/// The most subjects of a policy that are looked up in the store for a report.
const MOST_BANS: usize = 10;

/// Those with most slots; none if no limit of the policy has slots.
pub(super) fn slots(policy: &WatchedPolicy, names: &SubjectNames) -> Option<Vec<Value>> {
    if !policy.limits.iter().any(|limit| limit.limit.is_held()) {
        return None;
    }
    let mut held: Vec<_> = policy.context.keeper.held_of(&policy.name).into_iter().collect();
    held.sort_by_key(|(_, held)| Reverse((held.slots, held.longest)));
    let reports = held.iter().take(MOST_SLOTS).map(|(key, held)| {
        json!({
            "subject": names.name(key),
            "slots": held.slots,
            // The time since the first of them was taken.
            "longest_seconds": held.longest.as_secs_f64(),
        })
    });
    Some(reports.collect())
}

/// The number of requests that wait for a policy, and the subjects with most of them.
pub(super) fn lines(policy: &WatchedPolicy, names: &SubjectNames) -> (usize, Vec<Value>) {
    let waiting = waiting_by_key(policy.context.store.id(), &policy.name);
    let lines = waiting
        .iter()
        .map(|(key, requests)| (Reverse(*requests), names.name(key)));
    let mut lines: Vec<_> = lines.collect();
    lines.sort();
    let lines = lines.into_iter().take(MOST_LINES);
    let lines = lines.map(|(Reverse(requests), subject)| json!({ "subject": subject, "requests": requests }));
    (waiting.values().sum(), lines.collect())
}

/// Of the subjects that are denied most often those that are banned; none if the policy has no bans.
///
/// A ban follows denials, so a subject that is banned is among them.
pub(super) async fn bans(
    policy: &WatchedPolicy,
    denied: Option<&DenialSummary>,
    names: &SubjectNames,
) -> Option<Vec<Value>> {
    policy.ban()?;
    let counts = denied.into_iter().flat_map(|(_, summary)| &summary.counts);
    let peeks = counts.take(MOST_BANS).map(|count| {
        let (policy, key) = (policy.clone(), count.item.clone());
        tokio::spawn(async move { (subject::banned(&policy, &key).await, key) })
    });
    let mut banned = Vec::new();
    for peek in peeks.collect::<Vec<_>>() {
        if let Ok((Some(decided), key)) = peek.await {
            banned.push(json!({
                "subject": names.name(&key),
                // At the end of the ban, or later if the limit denies it then.
                "admitted_after_seconds": decided.retry_after().map(|wait| wait.as_secs_f64()),
            }));
        }
    }
    Some(banned)
}
