//! The subjects that policies deny most often, of this process and of all replicas.

use std::time::SystemTime;

use serde::Serialize;

use super::{response::unix_seconds, subject::SubjectNames, watched::WatchedPolicy};
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
pub(super) fn has_own_keys(policy: &WatchedPolicy) -> bool {
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
