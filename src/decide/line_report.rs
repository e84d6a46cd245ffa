//! The lines of this process, as an `Admin` shows them.

use std::{collections::HashMap, sync::Arc};

use super::line::LINES;
use crate::{Key, PolicyDecision, store::StoreId, sync::lock};

/// The key that a line is for, and the store and the policy that count it.
pub(super) struct LineSubject {
    store: Option<StoreId>,
    policy: Arc<str>,
    key: Key,
}

impl LineSubject {
    pub(super) fn of(policy: &PolicyDecision) -> Self {
        Self {
            store: policy.context.store_id(),
            policy: policy.named().name.clone(),
            key: policy.charge.key.clone(),
        }
    }
}

/// How many requests of this process wait for a policy of a store, by key.
pub(crate) fn waiting_by_key(store: Option<StoreId>, policy: &str) -> HashMap<Key, usize> {
    let lines = lock(&LINES);
    let of_policy = lines.values().filter(|line| {
        let subject = &line.subject;
        subject.store == store && *subject.policy == *policy
    });
    let mut waiting = HashMap::new();
    for line in of_policy {
        *waiting.entry(line.subject.key.clone()).or_default() += line.state().len();
    }
    waiting.retain(|_, requests| *requests > 0);
    waiting
}
