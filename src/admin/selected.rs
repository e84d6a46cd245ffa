//! The key of a policy that an operator has selected, and the keys of all policies that a search finds.

use std::sync::Arc;

use axum::http::StatusCode;
use serde::Serialize;

use super::{
    listed,
    listed::DeniedSubject,
    report,
    report::OverrideReport,
    request::{SearchText, Selection, missing},
    response::AdminError,
    router::AdminState,
    subject,
    subject::LimitCounts,
    watched::{WatchedPolicy, all_policies},
};
use crate::{
    Key,
    key::{FoundKey, Search},
};

/// The response to `/subject` and to all changes of a subject.
#[derive(Serialize)]
pub(super) struct SubjectReport {
    instance: String,
    policy: String,
    store: usize,
    key: String,
    /// The name in the lists of the report.
    subject: String,
    /// None if it is not listed.
    denied: Option<DeniedSubject>,
    /// None if it has no limit of its own.
    #[serde(rename = "override")]
    own_limit: Option<OverrideReport>,
    pub(super) counts: Vec<LimitCounts>,
}

/// A key of a policy in a store.
pub(super) struct Selected {
    pub(super) policy: WatchedPolicy,
    /// It is [bound](Key::bound).
    pub(super) key: Key,
    pub(super) policies: Arc<[WatchedPolicy]>,
}

impl Selected {
    pub(super) fn find(shared: &AdminState, selection: Selection) -> Result<Self, AdminError> {
        let name = selection.policy.ok_or_else(|| missing("policy", "api"))?;
        let text = selection.key.ok_or_else(|| missing("key", "ip=203.0.113.7"))?;
        let text = text.trim();
        let mut key = Key::parse(text)?;

        let policies = all_policies(&shared.watched);
        let mut of_name: Vec<_> = policies.iter().filter(|policy| policy.name == name).collect();
        of_name.sort_by_key(|policy| policy.store);
        of_name.dedup_by_key(|policy| policy.store);
        let found = match (&of_name[..], selection.store) {
            ([], _) => {
                let mut names: Vec<_> = policies.iter().map(|policy| policy.name.as_str()).collect();
                names.sort_unstable();
                names.dedup();
                return Err(AdminError::new(
                    StatusCode::NOT_FOUND,
                    format!("there is no policy of this name; those are `{}`", names.join("`, `")),
                ));
            }
            ([only], None) => Some(only),
            (several, Some(number)) => several.iter().find(|policy| policy.store == number),
            (_, None) => None,
        };
        let Some(policy) = found else {
            let numbers: Vec<_> = of_name.iter().map(|policy| policy.store.to_string()).collect();
            return Err(AdminError::bad_request(format!(
                "select the store of this policy by its number in the report, as in `store={}`",
                numbers.join("` or `store=")
            )));
        };
        let policy = (*policy).clone();
        validate_form(&policies, &policy, &key, text)?;
        key.bound();
        Ok(Self { policy, key, policies })
    }

    /// The policy in each layer and limiter that shares its counts.
    pub(super) fn sharing(&self) -> impl Iterator<Item = &WatchedPolicy> + Clone {
        self.policies.iter().filter(|other| other.shares_counts(&self.policy))
    }

    pub(super) async fn peek(&self, shared: &AdminState) -> Result<SubjectReport, AdminError> {
        let counts = subject::peek(self).await?;
        let denials = listed::of_process(&self.policies, &self.policy);
        Ok(SubjectReport {
            instance: shared.instance.clone(),
            policy: self.policy.name.clone(),
            store: self.policy.store,
            key: self.key.readable(),
            subject: shared.names.name(&self.key),
            own_limit: report::override_of(&shared.names, &self.policy, &self.key),
            denied: denials.and_then(|(_, summary)| listed::denied_subject(&shared.names, &summary, &self.key)),
            counts,
        })
    }
}

/// Refuses a key that no request of the policy has: its counts would be empty without a reason.
fn validate_form(policies: &[WatchedPolicy], policy: &WatchedPolicy, key: &Key, text: &str) -> Result<(), AdminError> {
    let mut same = policies.iter().filter(|other| other.shares_counts(policy));
    if same.clone().any(|policy| policy.key_form.has(key)) {
        return Ok(());
    }
    let search = Search::parse(text)?;
    let meant = same.find_map(|policy| policy.key_form.keys_with(&search).into_iter().next());
    let fix = match meant {
        Some(key @ FoundKey::Key(_)) => format!("; use `{key}`"),
        Some(key @ FoundKey::Incomplete(_)) => format!("; use one such as `{key}`"),
        None => String::new(),
    };
    Err(AdminError::bad_request(format!(
        "no request has the key `{}` in the policy `{}`: its keys are made of `{}`{fix}",
        key.readable(),
        policy.name,
        report::key_forms(policies, policy),
    )))
}

/// The response to `POST /search`.
#[derive(Serialize)]
pub(super) struct SearchResult {
    instance: String,
    found: Vec<SubjectReport>,
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

pub(super) async fn search(shared: &AdminState, text: &SearchText) -> Result<SearchResult, AdminError> {
    let search = Search::parse(text.text()?)?;
    let policies = all_policies(&shared.watched);
    let mut result = SearchResult {
        instance: shared.instance.clone(),
        found: Vec::new(),
        incomplete: Vec::new(),
        failed: Vec::new(),
    };
    let mut known = Vec::new();
    for policy in &*policies {
        let other = |key, error| OtherKey {
            policy: policy.name.clone(),
            store: policy.store,
            key,
            error,
        };
        for found in policy.key_form.keys_with(&search) {
            let identity = (policy.name.clone(), policy.store, found.to_string());
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
