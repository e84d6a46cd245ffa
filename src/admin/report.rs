//! What runs: stores, policies, and the subjects that they deny most often.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use serde_json::{Value, json};

use super::{
    listed,
    message::{Input, unix_seconds},
    router::AdminState,
    selected::{WatchedPolicy, all_policies},
    subject::SubjectNames,
};
use crate::{
    Key,
    store::{Charge, NodeStatus, Operation, Override, Store, StoreRequest, StoreStatus, summary},
};

/// The most limits of a policy that a report lists.
const MOST: usize = 20;

/// The response to `GET /report`.
pub(super) async fn report(shared: &AdminState, input: &Input) -> Value {
    let (watched, names) = (&shared.watched, &shared.names);
    let policies = all_policies(watched);
    let stores = policies.iter().map(|policy| policy.store).max().unwrap_or_default();
    let (mut store_reports, mut overrides) = (Vec::new(), Vec::new());
    for number in 1..=stores {
        let of_store: Vec<_> = policies.iter().filter(|policy| policy.store == number).collect();
        store_reports.push(report_store(number, &of_store).await);
        overrides.extend(report_overrides(number, &of_store, names));
    }

    let mut policy_reports: Vec<Value> = Vec::new();
    for policy in &*policies {
        let report = report_policy(&policies, policy, names, input).await;
        if !policy_reports.iter().any(|other| is_same(other, &report)) {
            policy_reports.push(report);
        }
    }
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "now": unix_seconds(SystemTime::now()),
        "instance": shared.instance,
        "shows_keys": names.show_keys,
        // Whether the secret of the hashes was given, and is not of this process alone.
        "shares_hashes": names.is_shared,
        "stores": store_reports,
        "policies": policy_reports,
        // Those of these policies, by policy and key.
        "overrides": overrides,
        // The names of policies of files that no layer or limiter has.
        "unused_policies": shared.files.iter().flat_map(|unused| unused()).collect::<Vec<_>>(),
    })
}

/// The override of a key that is [bound](Key::bound), if the key has one.
pub(super) fn override_of(names: &SubjectNames, policy: &WatchedPolicy, key: &Key) -> Option<Value> {
    let overrides = policy.context.overrides.as_ref()?;
    let found = overrides.of(&policy.name, key)?;
    Some(report_override(names, &found, policy.store, overrides.now()))
}

fn report_overrides(store: usize, policies: &[&WatchedPolicy], names: &SubjectNames) -> Vec<Value> {
    let Some(overrides) = policies.iter().find_map(|policy| policy.context.overrides.as_ref()) else {
        return Vec::new();
    };
    let (now, mut list) = (overrides.now(), overrides.list());
    list.retain(|one| policies.iter().any(|policy| *policy.name == *one.policy));
    list.iter().map(|one| report_override(names, one, store, now)).collect()
}

/// A limit of one subject in place of the limit of a policy, for a time.
fn report_override(names: &SubjectNames, one: &Override, store: usize, now: Duration) -> Value {
    json!({
        "policy": one.policy,
        "store": store,
        "subject": names.name(&one.key),
        "limit": one.limit.to_string(),
        "ends_after_seconds": one.expires_at.saturating_sub(now).as_secs_f64(),
    })
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
        "state": node.state.name(),
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
    let context = policy.policy();
    let limits = policy.limits.iter().take(MOST).map(|limit| {
        json!({
            "limit": limit.limit.to_string(),
            // None without a limit.
            "quota": Some(limit.limit.quota()).filter(|quota| *quota < u64::MAX),
            // None for a calendar, slots, and without a limit.
            "window_seconds": limit.limit.window().map(|window| window.as_secs_f64()),
        })
    });
    let refused_reload = policy.unkeyed.refused_reload();
    let refused_reload = refused_reload.map(|(at, error)| json!({ "since": unix_seconds(at), "error": error }));
    let denials = listed::of_process(policies, policy);
    let (waiting, lines) = listed::lines(policy, names);
    json!({
        "policy": policy.name,
        // None if it applies to requests of all plans.
        "plan": policy.unkeyed.plan_name().map(ToString::to_string),
        "store": policy.store,
        // What its keys are made of.
        "key": key_forms(policies, policy),
        // None if it is chosen for each request.
        "limit": policy.unkeyed.limit().map(ToString::to_string),
        // The limits that are known, with the numbers of each.
        "limits": limits.collect::<Vec<_>>(),
        // None unless another layer or limiter has the policy with this limit.
        "other_limit": policy.context.other_limit(context).map(|limit| limit.to_string()),
        // None if it is computed for each request.
        "cost": context.settings.fixed_cost(),
        "failure_mode": context.settings.failure_mode.unwrap_or_default().to_string(),
        "observed": policy.is_observed(),
        // The share of the keys that it is enforced for: 0 if it observes only.
        "enforced_share": context.settings.enforced.fraction(),
        "ban": policy.ban(),
        "since": unix_seconds(policy.context.built_at),
        "reloaded_at": policy.unkeyed.reloaded_at().map(unix_seconds),
        // Since when a change of its file is not applied, and why.
        "refused_reload": refused_reload,
        // None if no limit of it has slots.
        "slots": listed::slots(policy, names),
        // The requests that wait in this process.
        "waiting": waiting,
        "lines": lines,
        // None if it has no bans.
        "bans": listed::bans(policy, denials.as_ref(), names).await,
        // The decisions in this process while there is a router.
        "decisions": listed::decisions(policies, policy),
        "denials": listed::denials(denials.as_ref(), names, input.subjects.unwrap_or(usize::MAX)),
    })
}

/// What the keys of a policy are made of, in all layers and limiters that share its counts.
pub(super) fn key_forms(policies: &[WatchedPolicy], policy: &WatchedPolicy) -> String {
    let same = policies.iter().filter(|other| other.shares_counts(policy));
    let mut forms: Vec<_> = same.map(|policy| policy.key_form.to_string()).collect();
    forms.sort_unstable();
    forms.dedup();
    forms.join(" or ")
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
