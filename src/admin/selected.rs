//! The policies of the layers and limiters that an `Admin` has, the key of one that an operator has selected, and the keys of all
//! that a search finds.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::{
    Admin,
    message::{AdminError, Input, missing},
    report, subject,
    subject::SubjectNames,
};
use crate::{
    Key, Limit, Policy,
    decide::{CheckContext, PolicyContext},
    key::{FoundKey, KeyForm, Search},
    store::NamedLimit,
};

/// All policies after the last reloads, in their order, with the numbers of their stores.
pub(super) fn all_policies(admin: &Admin) -> Arc<[WatchedPolicy]> {
    let mut policies: Vec<WatchedPolicy> = Vec::new();
    let mut stores = Vec::new();
    for set in &admin.watched {
        let newest = set.newest();
        let context = newest.context.here();
        let store = context.store_id();
        if !stores.contains(&store) && !newest.policies.is_empty() {
            stores.push(store);
        }
        let number = stores.iter().take_while(|other| **other != store).count() + 1;
        policies.extend(
            newest
                .policies
                .iter()
                .enumerate()
                .map(|(position, policy)| WatchedPolicy {
                    context: context.clone(),
                    position,
                    store: number,
                    limits: policy.known_limits(),
                    policy: policy.clone(),
                    sharing: Arc::default(),
                }),
        );
    }
    let mut groups = HashMap::<_, Vec<usize>>::new();
    for (place, policy) in policies.iter().enumerate() {
        let counts = (policy.policy.counted_as().to_owned(), policy.store);
        groups.entry(counts).or_default().push(place);
    }
    for group in groups.into_values().map(Arc::<[usize]>::from) {
        for place in &*group {
            policies[*place].sharing = group.clone();
        }
    }
    policies.into()
}

/// A policy of a layer or a limiter.
#[derive(Clone)]
pub(super) struct WatchedPolicy {
    pub(super) context: Arc<CheckContext>,
    pub(super) position: usize,
    /// The number of its store in a report.
    pub(super) store: usize,
    /// The limits that are known.
    pub(super) limits: Vec<Arc<NamedLimit>>,
    pub(super) policy: Policy,
    /// The places of those that have the same counts, this one among them.
    sharing: Arc<[usize]>,
}

impl WatchedPolicy {
    /// Those of all policies that have the same counts, in their order.
    pub(super) fn sharing<'a>(&'a self, policies: &'a [Self]) -> impl Iterator<Item = &'a Self> + Clone {
        self.sharing.iter().filter_map(|place| policies.get(*place))
    }

    /// The same, and the clones of a layer are one.
    pub(super) fn counted<'a>(&'a self, policies: &'a [Self]) -> Vec<&'a Self> {
        let mut counted: Vec<&Self> = Vec::new();
        for policy in self.sharing(policies) {
            let is_counted = |other: &&Self| {
                other.position == policy.position && other.context.denials.is_same(&policy.context.denials)
            };
            if !counted.iter().any(is_counted) {
                counted.push(policy);
            }
        }
        counted
    }

    /// Those of them that are of the same plan.
    pub(super) fn counted_in_plan<'a>(&'a self, policies: &'a [Self]) -> Vec<&'a Self> {
        let mut counted = self.counted(policies);
        counted.retain(|other| other.policy.plan_name() == self.policy.plan_name());
        counted
    }

    /// Whether an override applies in place of one of its limits. Those that no request has chosen yet are not known.
    pub(super) fn is_overridden_by(&self, limit: &Limit) -> bool {
        let mut known = self.limits.iter();
        self.limits.is_empty() || known.any(|own| self.policy.fits(&own.limit, limit))
    }

    /// The place of the first of all that share the counts.
    pub(super) fn first_sharing(&self) -> usize {
        self.sharing.first().copied().unwrap_or_default()
    }

    /// The settings of its bans as text, if it has bans.
    pub(super) fn ban(&self) -> Option<String> {
        self.in_context().ban.as_ref().map(ToString::to_string)
    }

    pub(super) fn name(&self) -> &str {
        self.policy.name()
    }

    /// What its keys are made of.
    pub(super) fn key_form(&self) -> KeyForm {
        self.policy.extractor().form()
    }

    pub(super) fn in_context(&self) -> &PolicyContext {
        &self.context.policies[self.position]
    }
}

/// A key of a policy in a store.
pub(super) struct Selected {
    pub(super) policy: WatchedPolicy,
    /// It is [bound](Key::bound).
    pub(super) key: Key,
    /// The key as the operator may see it: where the hash of the key was given, it may not be known.
    label: String,
    pub(super) policies: Arc<[WatchedPolicy]>,
}

impl Selected {
    fn new(policies: &Arc<[WatchedPolicy]>, policy: &WatchedPolicy, mut key: Key) -> Self {
        key.bound();
        Self {
            label: key.readable(),
            policy: policy.clone(),
            key,
            policies: policies.clone(),
        }
    }

    /// The subject of a request, which may have a key that no request of the policy has if `accepts_any`.
    pub(super) fn find(shared: &Admin, input: &Input, accepts_any: bool) -> Result<Self, AdminError> {
        let name = input.policy.as_ref().ok_or_else(|| missing("policy", "api"))?;
        let text = input.key.as_ref().ok_or_else(|| missing("key", "ip=203.0.113.7"))?;
        let text = text.trim();

        let policies = all_policies(shared);
        let mut of_name: Vec<_> = policies.iter().filter(|policy| policy.name() == name).collect();
        of_name.sort_by_key(|policy| policy.store);
        of_name.dedup_by_key(|policy| policy.store);
        if of_name.is_empty() {
            let mut names: Vec<_> = policies.iter().map(WatchedPolicy::name).collect();
            names.sort_unstable();
            names.dedup();
            return Err(AdminError::new(
                StatusCode::NOT_FOUND,
                format!("there is no policy of this name; those are `{}`", names.join("`, `")),
            ));
        }
        let of_store = |policy: &&&WatchedPolicy| input.store.is_none_or(|store| policy.store == store);
        let found: Vec<_> = of_name.iter().filter(of_store).collect();
        let [policy] = found[..] else {
            let numbers: Vec<_> = of_name.iter().map(|policy| policy.store.to_string()).collect();
            return Err(AdminError::bad_request(format!(
                "select the store of this policy by its number in the report, as in `store={}`",
                numbers.join("` or `store=")
            )));
        };
        if SubjectNames::is_hash(text) {
            let found = find_by_hash(shared, &policies, text).into_iter();
            let mut found = found.filter(|found| found.policy.first_sharing() == policy.first_sharing());
            return found.next().ok_or_else(|| AdminError::unknown_hash(&shared.instance));
        }
        let not_a_key = |error| AdminError::from(error).logged_as("the text is not a key");
        let key = Key::parse(text).map_err(not_a_key)?;
        if !accepts_any {
            validate_form(&policies, policy, &key, text)?;
        }
        Ok(Self::new(&policies, policy, key))
    }

    /// The policy in each layer and limiter that shares its counts.
    pub(super) fn sharing(&self) -> impl Iterator<Item = &WatchedPolicy> + Clone {
        self.policy.sharing(&self.policies)
    }

    /// The response to `/subject` and to all changes of a subject.
    pub(super) async fn peek(&self, shared: &Admin) -> Result<Value, AdminError> {
        let (names, counts) = (&shared.names, subject::peek(self).await?);
        let denials = report::denials_of(&self.policies, &self.policy);
        let counted = denials.iter().flat_map(|(_, summary)| &summary.counts);
        let denied = counted.into_iter().find(|count| count.item == self.key);
        Ok(json!({
            "instance": shared.instance,
            "policy": self.policy.name(),
            "store": self.policy.store,
            "key": self.label,
            // The name in the lists of the report.
            "subject": names.name(&self.key),
            // None if it is not listed.
            "denied": denied.map(|count| report::denied_subject(count, names)),
            // None if it has no limit of its own.
            "override": report::override_of(names, &self.sharing().collect::<Vec<_>>(), &self.key),
            "counts": counts,
        }))
    }
}

/// Whether a request of a policy can have this key, or the policy lists it: a limiter on the same store has set its override, or
/// keys were made of something else before a reload.
fn has_key(policies: &[WatchedPolicy], policy: &WatchedPolicy, key: &Key) -> bool {
    policy.sharing(policies).any(|policy| policy.key_form().has(key)) || {
        let mut bound = key.clone();
        bound.bound();
        report::subjects(policies, policy).any(|subject| subject == bound)
    }
}

/// Refuses a key that no request of the policy has: its counts would be empty without a reason.
fn validate_form(policies: &[WatchedPolicy], policy: &WatchedPolicy, key: &Key, text: &str) -> Result<(), AdminError> {
    if has_key(policies, policy, key) {
        return Ok(());
    }
    let search = Search::parse(text)?;
    let mut same = policy.sharing(policies);
    let meant = same.find_map(|policy| policy.key_form().keys_with(&search).into_iter().next());
    let fix = match meant {
        Some(key @ FoundKey::Key(_)) => format!("; use `{key}`"),
        Some(key @ FoundKey::Incomplete(_)) => format!("; use one such as `{key}`"),
        None => String::new(),
    };
    let (key, name, forms) = (key.readable(), policy.name(), report::key_forms(policies, policy));
    let message = |key: &str| format!("no request has {key} in the policy `{name}`: its keys are made of `{forms}`");
    Err(AdminError::bad_request(message(&format!("the key `{key}`")) + &fix).logged_as(message("this key")))
}

/// The subject of each policy with such keys that this hash names, if this process knows it.
fn find_by_hash(shared: &Admin, policies: &Arc<[WatchedPolicy]>, hash: &str) -> Vec<Selected> {
    let first = policies
        .iter()
        .enumerate()
        .filter(|(place, policy)| policy.first_sharing() == *place);
    let mut distinct: Vec<_> = first.map(|(_, policy)| policy).collect();
    let mut subjects = distinct.iter().flat_map(|policy| report::subjects(policies, policy));
    let Some(key) = subjects.find(|key| shared.names.hash(key) == hash) else {
        return Vec::new();
    };
    distinct.retain(|policy| has_key(policies, policy, &key));
    let selected = distinct.into_iter().map(|policy| Selected {
        label: shared.names.name(&key),
        ..Selected::new(policies, policy, key.clone())
    });
    selected.collect()
}

/// The keys of policies with the values of a text, and if none is complete also with the text as one value.
fn keys_with<'a>(text: &str, policies: &'a [WatchedPolicy]) -> Result<Vec<(&'a WatchedPolicy, FoundKey)>, AdminError> {
    let forms: Vec<_> = policies.iter().map(WatchedPolicy::key_form).collect();
    let find = |search: &Search| -> Vec<_> {
        let of_each = policies.iter().zip(&forms);
        let found = of_each.flat_map(|(policy, form)| form.keys_with(search).into_iter().map(move |key| (policy, key)));
        found.collect()
    };
    let search = Search::parse(text)?;
    let mut keys = find(&search);
    let is_complete = keys.iter().any(|(_, key)| matches!(key, FoundKey::Key(_)));
    if !is_complete && let Some(whole) = search.whole(text, &forms) {
        keys.extend(find(&whole));
    }
    Ok(keys)
}

/// The response to `/search`.
pub(super) async fn search(shared: &Admin, input: &Input) -> Result<Value, AdminError> {
    let text = input.text()?.trim();
    let policies = all_policies(shared);
    let is_hash = SubjectNames::is_hash(text);
    let mut selected = if is_hash {
        find_by_hash(shared, &policies, text)
    } else {
        Vec::new()
    };
    let is_known = !selected.is_empty();
    let (mut found, mut incomplete, mut failed) = (Vec::new(), Vec::new(), Vec::new());
    let other = |policy: &WatchedPolicy, key| json!({ "policy": policy.name(), "store": policy.store, "key": key });
    let mut known = HashSet::new();
    for (policy, key) in keys_with(text, &policies)?.into_iter().filter(|_| !is_known) {
        if !known.insert((policy.name(), policy.store, key.to_string())) {
            continue;
        }
        match key {
            FoundKey::Key(key) => selected.push(Selected::new(&policies, policy, key)),
            FoundKey::Incomplete(key) => incomplete.push(other(policy, key)),
        }
    }
    for selected in selected {
        match selected.peek(shared).await {
            Ok(subject) => found.push(subject),
            Err(error) => {
                let mut key = other(&selected.policy, selected.label);
                key["error"] = error.to_string().into();
                failed.push(key);
            }
        }
    }
    Ok(json!({
        "instance": shared.instance,
        "found": found,
        // The keys that have values beside those of the search.
        "incomplete": incomplete,
        // The keys for which the store has returned no counts.
        "failed": failed,
        // Whether the text looks like a hash, by which this process knows no subject.
        "unknown_hash": is_hash && !is_known,
    }))
}
