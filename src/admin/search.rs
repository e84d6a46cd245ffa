//! The keys of all policies that are made of what an operator looks for.

use std::sync::Arc;

use serde::Serialize;

use super::{
    report,
    request::SearchText,
    response::AdminError,
    router::Shared,
    selected::{Selected, Subject},
    watched::{Watched, WatchedPolicy},
};
use crate::key::{FoundKey, Search};

/// The response to `POST /search`.
#[derive(Serialize)]
pub(super) struct SearchResult {
    instance: String,
    found: Vec<Subject>,
    /// The keys that have values beside those of the search.
    incomplete: Vec<OtherKey>,
    /// The keys for which the store has returned no counts.
    failed: Vec<OtherKey>,
}

#[derive(Serialize)]
struct OtherKey {
    policy: String,
    store: usize,
    key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

pub(super) async fn search(shared: &Shared, text: &SearchText) -> Result<SearchResult, AdminError> {
    let search = Search::parse(text.text()?)?;
    let policies: Arc<[WatchedPolicy]> = shared.watched.iter().flat_map(Watched::policies).collect();
    let stores = report::stores(&policies);
    let mut result = SearchResult {
        instance: shared.instance.clone(),
        found: Vec::new(),
        incomplete: Vec::new(),
        failed: Vec::new(),
    };
    let mut known = Vec::new();
    for policy in &*policies {
        let store = report::number_of(&stores, policy.store());
        let other = |key, error| OtherKey {
            policy: policy.name.clone(),
            store,
            key,
            error,
        };
        for found in policy.key_form.keys_with(&search) {
            let identity = (policy.name.clone(), store, found.to_string());
            if known.contains(&identity) {
                continue;
            }
            known.push(identity);
            let mut key = match found {
                FoundKey::Key(key) => key,
                FoundKey::Incomplete(key) => {
                    result.incomplete.push(other(key, None));
                    continue;
                }
            };
            key.bound();
            let selected = Selected {
                policy: policy.clone(),
                store,
                key,
                policies: policies.clone(),
            };
            match selected.peek(shared).await {
                Ok(subject) => result.found.push(subject),
                Err(error) => result
                    .failed
                    .push(other(selected.key.readable(), Some(error.to_string()))),
            }
        }
    }
    Ok(result)
}
