//! What runs: stores, policies, and the subjects that a policy denies most often, that hold slots, that wait and that are banned.

use std::{
    cmp::Reverse,
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use serde_json::{Value, json};

use super::{
    Admin,
    message::{Input, unix_seconds},
    selected::{WatchedPolicy, all_policies},
    subject,
    subject::SubjectNames,
};
use crate::{
    Key, Policies,
    decide::{Count, Summary, waiting_by_key},
    store::{Charge, NodeStatus, Operation, Override, Store, StoreRequest, StoreStatus, summary},
};

/// The most of a list in a report.
const MOST: usize = 20;

/// The response to `GET /report`.
pub(super) async fn report(shared: &Admin, input: &Input) -> Value {
    let names = &shared.names;
    let policies = all_policies(shared);
    let stores = policies.iter().map(|policy| policy.store).max().unwrap_or_default();
    let (mut store_reports, mut overrides) = (Vec::new(), Vec::new());
    for number in 1..=stores {
        let of_store: Vec<_> = policies.iter().filter(|policy| policy.store == number).collect();
        store_reports.push(report_store(number, &of_store).await);
        overrides.extend(report_overrides(&of_store, names));
    }

    let mut policy_reports: Vec<Value> = Vec::new();
    let mut of_counts = HashMap::<_, Vec<usize>>::new();
    for policy in &*policies {
        let report = report_policy(&policies, policy, names, input).await;
        let same = of_counts.entry(policy.first_sharing()).or_default();
        if !same.iter().any(|place| is_same(&policy_reports[*place], &report)) {
            same.push(policy_reports.len());
            policy_reports.push(report);
        }
    }
    let (shares_hashes, hashes_error) = names.are_shared();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "now": unix_seconds(SystemTime::now()),
        "instance": shared.instance,
        "shows_keys": names.show_keys,
        // Whether the hashes are those of other processes too.
        "shares_hashes": shares_hashes,
        // Why the store has not returned the secret of all processes the last time.
        "hashes_error": hashes_error,
        "stores": store_reports,
        "policies": policy_reports,
        // Those of these policies, by policy and key.
        "overrides": overrides,
        // The names of policies of files that no layer or limiter has.
        "unused_policies": shared.files.iter().flat_map(Policies::unused).collect::<Vec<_>>(),
    })
}

/// The override of a key that is [bound](Key::bound), if the key has one. These policies have the same counts.
pub(super) fn override_of(names: &SubjectNames, same: &[&WatchedPolicy], key: &Key) -> Option<Value> {
    let policy = same.first()?;
    let overrides = policy.context.overrides.as_ref()?;
    let found = overrides.of(policy.policy.counted_as(), key)?;
    Some(report_override(names, &found, same, overrides.now()))
}

fn report_overrides(policies: &[&WatchedPolicy], names: &SubjectNames) -> Vec<Value> {
    let Some(overrides) = policies.iter().find_map(|policy| policy.context.overrides.as_ref()) else {
        return Vec::new();
    };
    let (now, list) = (overrides.now(), overrides.list());
    let mut of_name = HashMap::<_, Vec<_>>::new();
    for policy in policies {
        of_name.entry(policy.policy.counted_as()).or_default().push(*policy);
    }
    let reports = list
        .iter()
        .filter_map(|one| Some(report_override(names, one, of_name.get(&*one.policy)?, now)));
    reports.collect()
}

/// A limit of one subject in place of the limit of a policy, for a time.
fn report_override(names: &SubjectNames, one: &Override, same: &[&WatchedPolicy], now: Duration) -> Value {
    let rest = one.expires_at.saturating_sub(now);
    // The hash that a store keeps is a name already.
    let subject = match one.key.is_hashed() {
        true => one.key.as_str().to_owned(),
        false => names.name(&one.key),
    };
    json!({
        "policy": same[0].name(),
        "store": same[0].store,
        "subject": subject,
        "limit": one.limit.to_string(),
        // False if it fits no limit of the policy anymore, so that these apply.
        "applies": same.iter().any(|policy| policy.is_overridden_by(&one.limit)),
        "ends_at": ends_at(rest),
        "ends_after_seconds": rest.as_secs_f64(),
        // The operator that has set it; none of one that the application has set.
        "set_by": one.set_by,
    })
}

/// The time in so long, by the clock of this process.
fn ends_at(rest: Duration) -> u64 {
    const HALF: Duration = Duration::from_millis(500);
    unix_seconds(SystemTime::now() + rest + HALF)
}

async fn report_store(number: usize, policies: &[&WatchedPolicy]) -> Value {
    let status = policies[0].context.store.status();
    let mut status = status.unwrap_or_else(|| StoreStatus::new("custom"));
    let mut failovers: Vec<_> = policies.iter().map(|policy| &policy.context.failover).collect();
    failovers.dedup_by(|one, other| Arc::ptr_eq(one, other));
    status
        .nodes
        .extend(failovers.iter().flat_map(|failover| failover.status()));
    let reply = probe(policies).await;
    json!({
        "store": number,
        "kind": status.kind,
        "numbers": status.numbers,
        // The time of one peek, made for this report.
        "replied_after_seconds": reply.as_ref().ok(),
        // Why the store does not reply.
        "error": reply.as_ref().err(),
        // In one line, such as `1 of 3 nodes down: 33 % of checks fail`; none if no check fails.
        "health": summary(&status.nodes),
        "nodes": status.nodes.iter().map(report_node).collect::<Vec<_>>(),
    })
}

/// The health of a server, by the checks of this process in the last minute.
fn report_node(node: &NodeStatus) -> Value {
    json!({
        // None for checks that no server was called for.
        "node": node.address,
        "state": node.state.to_string(),
        "since": node.since.map(unix_seconds),
        "decided": node.decided,
        "failed": node.failed,
        "failed_by_key": node.failed_by_key,
        "error": node.error,
    })
}

/// Peeks at a key that no caller has: the seconds until the store replies, or why it does not; `None` if its policies count
/// nothing.
async fn probe(policies: &[&WatchedPolicy]) -> Result<Option<f64>, String> {
    let mut limits = policies.iter().flat_map(|policy| &policy.limits);
    let Some(limit) = limits.find(|limit| limit.limit.is_counted()) else {
        return Ok(None);
    };
    let charge = Charge::on(limit.clone(), Key::constant("tower-quota-admin"), 1);
    let (store, began) = (&policies[0].context.store, Instant::now());
    let reply = store.decide(&[StoreRequest::new(Operation::Peek, [&charge])]).await;
    reply.map_err(|error| error.to_string())?;
    Ok(Some(began.elapsed().as_secs_f64()))
}

async fn report_policy(
    policies: &[WatchedPolicy],
    policy: &WatchedPolicy,
    names: &SubjectNames,
    input: &Input,
) -> Value {
    let context = policy.in_context();
    let limits = policy.limits.iter().take(MOST).map(|limit| {
        json!({
            "limit": limit.limit.to_string(),
            // None without a limit.
            "quota": Some(limit.limit.quota()).filter(|quota| *quota < u64::MAX),
            // None for a calendar, slots, and without a limit.
            "window_seconds": limit.limit.window().map(|window| window.as_micros() as f64 / 1e6),
        })
    });
    let refused_reload = policy.policy.refused_reload();
    let refused_reload = refused_reload.map(|(at, error)| json!({ "since": unix_seconds(at), "error": error }));
    let counted = policy.counted_in_plan(policies);
    let denials = joined_denials(&counted);
    let (waiting, lines) = report_lines(policy, names);
    json!({
        "policy": policy.name(),
        // None if it applies to requests of all plans.
        "plan": policy.policy.plan_name().map(ToString::to_string),
        "store": policy.store,
        // What its keys are made of.
        "key": key_forms(policies, policy),
        // None if it is chosen for each request.
        "limit": policy.policy.limit().map(ToString::to_string),
        // The limits that are known, with the numbers of each.
        "limits": limits.collect::<Vec<_>>(),
        // None unless another layer or limiter has the policy with this limit.
        "other_limit": policy.context.other_limit(context).map(|limit| limit.to_string()),
        // None if it is computed for each request.
        "cost": context.settings.fixed_cost(),
        "failure_mode": context.settings.failure_mode.unwrap_or_default().to_string(),
        "observed": context.settings.enforced.is_none(),
        // Whether its file has switched it off: `enabled = false`.
        "off": policy.policy.is_off(),
        // The share of the keys that it is enforced for: 0 if it observes only.
        "enforced_share": context.settings.enforced.fraction(),
        "ban": policy.ban(),
        "since": unix_seconds(policy.context.built_at),
        "reloaded_at": policy.policy.reloaded_at().map(unix_seconds),
        // Whether the file has no such policy anymore, so that its last numbers apply.
        "missing": policy.policy.is_missing(),
        // Since when a change of its file is not applied, and why.
        "refused_reload": refused_reload,
        // None if no limit of it has slots.
        "slots": report_slots(policy, names),
        // The requests that wait in this process.
        "waiting": waiting,
        "lines": lines,
        // None if it has no bans.
        "bans": report_bans(policy, denials.as_ref(), names).await,
        // The decisions in this process while there is a router.
        "decisions": decisions_of(&counted),
        "denials": report_denials(denials.as_ref(), names, input.subjects.unwrap_or(usize::MAX)),
    })
}

/// What the keys of a policy are made of, in all layers and limiters that share its counts.
pub(super) fn key_forms(policies: &[WatchedPolicy], policy: &WatchedPolicy) -> String {
    let mut forms: Vec<_> = policy
        .sharing(policies)
        .map(|policy| policy.key_form().to_string())
        .collect();
    forms.sort_unstable();
    forms.dedup();
    forms.join(" or ")
}

/// The subjects of a policy that this process knows: it has denied them, they hold slots or wait, or have overrides.
pub(super) fn subjects(policies: &[WatchedPolicy], policy: &WatchedPolicy) -> impl Iterator<Item = Key> {
    let counted_as = policy.policy.counted_as();
    let denied = denials_of(policies, policy).into_iter();
    let denied = denied.flat_map(|(_, summary)| summary.counts).map(|count| count.item);
    let held = policy.context.keeper.held_of(counted_as);
    let waiting = waiting_by_key(policy.context.store_id(), policy.name());
    let overridden = policy.context.overrides.iter().flat_map(|of| of.keys_of(counted_as));
    let overridden = overridden.filter(|key| !key.is_hashed());
    denied
        .chain(held.into_keys())
        .chain(waiting.into_keys())
        .chain(overridden)
}

/// Whether two layers or limiters have a policy with the same settings.
fn is_same(one: &Value, other: &Value) -> bool {
    const SETTINGS: [&str; 9] = [
        "policy",
        "plan",
        "store",
        "limit",
        "limits",
        "cost",
        "failure_mode",
        "ban",
        "enforced_share",
    ];
    SETTINGS.iter().all(|setting| one[setting] == other[setting])
}

/// The denials of a policy, and since when they are counted.
type DenialSummary = (SystemTime, Summary<Key>);

/// The subjects that a policy denies most often.
fn report_denials(denied: Option<&DenialSummary>, names: &SubjectNames, most: usize) -> Value {
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

/// How often a subject was denied: at least `denials - error` times, and at most `denials` times; and when it was last.
pub(super) fn denied_subject(count: &Count<Key>, names: &SubjectNames) -> Value {
    json!({
        "subject": names.name(&count.item),
        "denials": count.count,
        "error": count.error,
        "last_at": unix_seconds(count.last),
    })
}

/// The denials of a policy in all plans, layers and limiters that share its counts, and since when they are counted.
pub(super) fn denials_of(policies: &[WatchedPolicy], policy: &WatchedPolicy) -> Option<DenialSummary> {
    joined_denials(&policy.counted(policies))
}

/// The denials of these policies, which share their counts.
fn joined_denials(counted: &[&WatchedPolicy]) -> Option<DenialSummary> {
    let summaries = counted
        .iter()
        .filter_map(|policy| policy.context.denials.summary(policy.position));
    summaries.reduce(|(since, joined), (other_since, other)| (since.min(other_since), joined.join(other)))
}

/// The decisions of the same.
fn decisions_of(counted: &[&WatchedPolicy]) -> u64 {
    let decisions = counted
        .iter()
        .map(|policy| policy.context.denials.decisions(policy.position));
    decisions.sum()
}

/// The most subjects of a policy that are looked up in the store for a report.
const MOST_BANS: usize = 10;

/// Those with most slots; none if no limit of the policy has slots.
fn report_slots(policy: &WatchedPolicy, names: &SubjectNames) -> Option<Vec<Value>> {
    if !policy.limits.iter().any(|limit| limit.limit.is_held()) {
        return None;
    }
    let held = policy.context.keeper.held_of(policy.policy.counted_as());
    let reports = most(&held, names).into_iter();
    let reports = reports.map(|(Reverse((slots, longest)), subject)| {
        json!({
            "subject": subject,
            "slots": slots,
            // The time since the first of them was taken.
            "longest_seconds": longest.as_secs_f64(),
        })
    });
    Some(reports.collect())
}

/// The number of requests that wait for a policy, and the subjects with most of them.
fn report_lines(policy: &WatchedPolicy, names: &SubjectNames) -> (usize, Vec<Value>) {
    let waiting = waiting_by_key(policy.context.store_id(), policy.name());
    let lines = most(&waiting, names).into_iter();
    let lines = lines.map(|(Reverse(requests), subject)| json!({ "subject": subject, "requests": requests }));
    (waiting.values().sum(), lines.collect())
}

/// The subjects with most of something, with the most first.
fn most<T: Copy + Ord>(of_keys: &HashMap<Key, T>, names: &SubjectNames) -> Vec<(Reverse<T>, String)> {
    let mut keys: Vec<_> = of_keys.iter().collect();
    // A name may be a hash, which only those that are listed need.
    keys.sort_by(|(a, more), (b, less)| less.cmp(more).then_with(|| a.as_str().cmp(b.as_str())));
    let subjects = keys.into_iter().take(MOST);
    let mut subjects: Vec<_> = subjects
        .map(|(key, number)| (Reverse(*number), names.name(key)))
        .collect();
    subjects.sort();
    subjects
}

/// Of the subjects that are denied most often those that are banned; none if the policy has no bans.
///
/// A ban follows denials, so a subject that is banned is among them.
async fn report_bans(
    policy: &WatchedPolicy,
    denied: Option<&DenialSummary>,
    names: &SubjectNames,
) -> Option<Vec<Value>> {
    policy.ban()?;
    let Some(limit) = policy.limits.iter().find(|limit| limit.limit.is_counted()) else {
        return Some(Vec::new());
    };
    let counts = denied.into_iter().flat_map(|(_, summary)| &summary.counts);
    let peeks = counts.take(MOST_BANS).map(|count| {
        let (policy, limit, key) = (policy.clone(), limit.clone(), count.item.clone());
        tokio::spawn(async move { (subject::banned_for(&policy, &limit, &key).await, key) })
    });
    let mut banned = Vec::new();
    for peek in peeks.collect::<Vec<_>>() {
        if let Ok((Some(rest), key)) = peek.await {
            banned.push(json!({
                "subject": names.name(&key),
                "ends_at": ends_at(rest),
                "ends_after_seconds": rest.as_secs_f64(),
            }));
        }
    }
    Some(banned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limiter, MemoryStore, Policy, SlidingLog};

    #[test]
    fn denials_that_are_joined_are_counted_since_the_first_router() {
        let store = MemoryStore::new();
        let limiters = [(); 3].map(|()| {
            let policy = Policy::new("api", SlidingLog::per_minute(1));
            Limiter::new(store.clone(), policy)
        });
        let router = |nth: usize| Admin::new().limiter(&limiters[nth]).router_behind_authentication();
        let _first = router(1);
        let since = SystemTime::now();
        while SystemTime::now() <= since {}
        let _later = [router(0), router(2)];

        let admin = limiters.iter().fold(Admin::new(), Admin::limiter);
        let policies = all_policies(&admin);
        let (joined, _) = denials_of(&policies, &policies[0]).expect("they are counted");
        assert!(joined <= since, "{joined:?} is after {since:?}");
    }
}
