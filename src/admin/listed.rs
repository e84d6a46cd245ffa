//! The subjects that a report lists: those that policies deny most often, in this process and in all replicas, those that hold
//! slots, and those that are banned.

use std::{cmp::Reverse, time::SystemTime};

use serde::Serialize;
use tokio::task::JoinSet;

use super::{response::unix_seconds, subject, subject::SubjectNames, watched::WatchedPolicy};
use crate::{
    Key,
    store::{StoreId, Summary},
};

/// The denials of a policy, and since when they are counted.
pub(super) type Denied = (SystemTime, Summary<Key>);

#[derive(Serialize)]
pub(super) struct DenialsReport {
    total: u64,
    since: Option<u64>,
    /// A subject that is not listed was denied at most so often.
    most_of_others: u64,
    subjects: Vec<DeniedSubject>,
}

/// How often a subject was denied: at least `denials - error` times, and at most `denials` times.
#[derive(Serialize)]
pub(super) struct DeniedSubject {
    subject: String,
    pub(super) denials: u64,
    error: u64,
}

impl DenialsReport {
    pub(super) fn new(denied: Option<&Denied>, names: &SubjectNames, most: usize) -> Self {
        let summary = denied.map(|(_, summary)| summary);
        let counts = summary.into_iter().flat_map(|summary| &summary.counts);
        let subjects = counts.take(most).map(|count| DeniedSubject {
            subject: names.name(&count.item),
            denials: count.count,
            error: count.error,
        });
        Self {
            subjects: subjects.collect(),
            total: summary.map_or(0, |summary| summary.total),
            since: denied.map(|(since, _)| unix_seconds(*since)),
            most_of_others: summary.map_or(0, |summary| summary.most_of_others),
        }
    }
}

/// Reads the denials by all replicas, of the stores that count them.
#[derive(Default)]
pub(super) struct OfAllReplicas {
    /// The stores that have failed, which are not called again.
    failed: Vec<(Option<StoreId>, String)>,
}

impl OfAllReplicas {
    /// Those of a policy, of so many subjects; none if its store does not count them.
    pub(super) async fn read(&mut self, policy: &WatchedPolicy, most: usize) -> Option<Result<Option<Denied>, String>> {
        let subjects = policy.context.denied_subjects.as_ref()?;
        let store = policy.store();
        if let Some((_, error)) = self.failed.iter().find(|(failed, _)| *failed == store) {
            return Some(Err(error.clone()));
        }
        let read = subjects
            .read(&policy.name, most)
            .await
            .map_err(|error| error.to_string());
        if let Err(error) = &read {
            self.failed.push((store, error.clone()));
        }
        Some(read.map(|read| read.map(|(since, summary)| (SystemTime::UNIX_EPOCH + since, summary))))
    }
}

/// Whether a store lists the keys themselves: the hash of a key, which it has in place of one by choice, is counted under no policy.
fn has_own_keys(policy: &WatchedPolicy) -> bool {
    let (subjects, key) = (policy.context.denied_subjects.as_ref(), Key::constant(""));
    subjects.is_some_and(|subjects| *subjects.stored_key(&key) == key)
}

/// The denials of a key of a policy by all replicas; none if it is not listed, or the store does not count them or fails.
pub(super) async fn of_all_replicas(names: &SubjectNames, policy: &WatchedPolicy, key: &Key) -> Option<DeniedSubject> {
    let subjects = policy.context.denied_subjects.as_ref()?;
    let (_, summary) = subjects.read(&policy.name, usize::MAX).await.ok()??;
    denied_subject(names, &summary, &subjects.stored_key(key))
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
pub(super) fn of_process(policies: &[WatchedPolicy], policy: &WatchedPolicy) -> Option<Denied> {
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

pub(super) fn denied_subject(names: &SubjectNames, summary: &Summary<Key>, key: &Key) -> Option<DeniedSubject> {
    let count = summary.counts.iter().find(|count| count.item == *key)?;
    Some(DeniedSubject {
        subject: names.name(key),
        denials: count.count,
        error: count.error,
    })
}

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
    let of_all = of_all.filter(|_| has_own_keys(policy));
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
