//! What runs: stores, policies, and the subjects that they deny most often.

use std::{
    borrow::Cow,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use serde::Serialize;

use super::{
    listed,
    listed::{BanReport, DenialsReport, LineReport, SlotsReport},
    message::{ReportSize, unix_seconds},
    router::AdminState,
    selected::{WatchedPolicy, all_policies},
    subject::SubjectNames,
};
use crate::{
    Key,
    store::{Charge, NodeStatus, Operation, Override, Store, StoreRequest, StoreStatus, summary},
};

/// The response to `GET /report`.
#[derive(Serialize)]
pub(super) struct Report {
    version: &'static str,
    now: u64,
    instance: String,
    shows_keys: bool,
    /// Whether the secret of the hashes was given, and is not of this process alone.
    shares_hashes: bool,
    stores: Vec<StoreReport>,
    policies: Vec<PolicyReport>,
    /// Those of these policies, by policy and key.
    overrides: Vec<OverrideReport>,
    /// The names of policies of files that no layer or limiter has.
    unused_policies: Vec<String>,
}

#[derive(Serialize)]
struct StoreReport {
    store: usize,
    kind: Cow<'static, str>,
    numbers: Vec<(Cow<'static, str>, u64)>,
    /// The time of one peek, made for this report.
    replied_after_seconds: Option<f64>,
    /// Why the store does not reply.
    error: Option<String>,
    /// The health of all nodes in one line, such as `1 of 3 nodes down: 33 % of checks fail`; none if no check fails.
    health: Option<String>,
    nodes: Vec<NodeReport>,
}

/// The health of a server, by the checks of this process in the last minute.
#[derive(Serialize)]
struct NodeReport {
    /// None for checks that no server was called for.
    node: Option<String>,
    state: &'static str,
    since: Option<u64>,
    decided: u64,
    failed: u64,
    failed_by_key: u64,
    error: Option<String>,
}

#[derive(Serialize)]
struct PolicyReport {
    policy: String,
    /// None if it applies to requests of all plans.
    plan: Option<String>,
    store: usize,
    /// What its keys are made of.
    key: String,
    /// None if it is chosen for each request.
    limit: Option<String>,
    /// The limits that are known, at most [`MOST`], with the numbers of each.
    limits: Vec<LimitReport>,
    /// None unless another layer or limiter has the policy with this limit.
    other_limit: Option<String>,
    /// None if it is computed for each request.
    cost: Option<u64>,
    failure_mode: String,
    observed: bool,
    /// The share of the keys that it is enforced for: 0 if it observes only.
    enforced_share: f64,
    ban: Option<String>,
    since: u64,
    reloaded_at: Option<u64>,
    /// Since when a change of its file is not applied, and why.
    refused_reload: Option<RefusedReload>,
    /// None if no limit of it has slots.
    slots: Option<Vec<SlotsReport>>,
    /// The requests that wait in this process.
    waiting: usize,
    lines: Vec<LineReport>,
    /// None if it has no bans.
    bans: Option<Vec<BanReport>>,
    /// The decisions in this process while there is a router.
    decisions: u64,
    denials: DenialsReport,
}

/// The last load of a file, which was refused.
#[derive(Serialize)]
struct RefusedReload {
    since: u64,
    error: String,
}

#[derive(PartialEq, Serialize)]
struct LimitReport {
    limit: String,
    /// None without a limit.
    quota: Option<u64>,
    /// None for a calendar, slots, and without a limit.
    window_seconds: Option<f64>,
}

/// A limit of one subject in place of the limit of a policy, for a time.
#[derive(Serialize)]
pub(super) struct OverrideReport {
    policy: String,
    store: usize,
    subject: String,
    limit: String,
    ends_after_seconds: f64,
}

/// The most limits of a policy that a report lists.
const MOST: usize = 20;

pub(super) async fn report(shared: &AdminState, size: &ReportSize) -> Report {
    let (watched, names) = (&shared.watched, &shared.names);
    let policies = all_policies(watched);
    let stores = policies.iter().map(|policy| policy.store).max().unwrap_or_default();
    let (mut store_reports, mut overrides) = (Vec::new(), Vec::new());
    for number in 1..=stores {
        let of_store: Vec<_> = policies.iter().filter(|policy| policy.store == number).collect();
        store_reports.push(report_store(number, &of_store).await);
        overrides.extend(report_overrides(number, &of_store, names));
    }

    let mut policy_reports: Vec<PolicyReport> = Vec::new();
    for policy in &*policies {
        let report = report_policy(&policies, policy, names, size).await;
        if !policy_reports.iter().any(|other| other.is_same(&report)) {
            policy_reports.push(report);
        }
    }
    Report {
        version: env!("CARGO_PKG_VERSION"),
        now: unix_seconds(SystemTime::now()),
        instance: shared.instance.clone(),
        shows_keys: names.show_keys,
        shares_hashes: names.is_shared,
        stores: store_reports,
        policies: policy_reports,
        overrides,
        unused_policies: shared.files.iter().flat_map(|unused| unused()).collect(),
    }
}

/// The override of a key that is [bound](Key::bound), if the key has one.
pub(super) fn override_of(names: &SubjectNames, policy: &WatchedPolicy, key: &Key) -> Option<OverrideReport> {
    let overrides = policy.context.overrides.as_ref()?;
    let found = overrides.of(&policy.name, key)?;
    Some(report_override(names, &found, policy.store, overrides.now()))
}

fn report_overrides(store: usize, policies: &[&WatchedPolicy], names: &SubjectNames) -> Vec<OverrideReport> {
    let Some(overrides) = policies.iter().find_map(|policy| policy.context.overrides.as_ref()) else {
        return Vec::new();
    };
    let (now, mut list) = (overrides.now(), overrides.list());
    list.retain(|one| policies.iter().any(|policy| *policy.name == *one.policy));
    list.iter().map(|one| report_override(names, one, store, now)).collect()
}

fn report_override(names: &SubjectNames, one: &Override, store: usize, now: Duration) -> OverrideReport {
    OverrideReport {
        policy: one.policy.to_string(),
        store,
        subject: names.name(&one.key),
        limit: one.limit.to_string(),
        ends_after_seconds: one.expires_at.saturating_sub(now).as_secs_f64(),
    }
}

async fn report_store(number: usize, policies: &[&WatchedPolicy]) -> StoreReport {
    let status = policies[0].context.store.status();
    let mut status = status.unwrap_or_else(|| StoreStatus::new("custom"));
    let mut failovers: Vec<_> = policies.iter().map(|policy| &policy.context.failover).collect();
    failovers.dedup_by(|one, other| Arc::ptr_eq(one, other));
    status
        .nodes
        .extend(failovers.iter().flat_map(|failover| failover.status()));
    let reply = probe(policies).await;
    StoreReport {
        store: number,
        kind: status.kind,
        numbers: status.numbers,
        replied_after_seconds: reply.as_ref().ok().copied().flatten(),
        error: reply.err(),
        health: summary(&status.nodes),
        nodes: status.nodes.into_iter().map(NodeReport::from).collect(),
    }
}

impl From<NodeStatus> for NodeReport {
    fn from(node: NodeStatus) -> Self {
        Self {
            node: node.address,
            state: node.state.name(),
            since: node.since.map(unix_seconds),
            decided: node.decided,
            failed: node.failed,
            failed_by_key: node.failed_by_key,
            error: node.error,
        }
    }
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
    size: &ReportSize,
) -> PolicyReport {
    let (context, refused_reload) = (policy.policy(), policy.unkeyed.refused_reload());
    let limits = policy.limits.iter().take(MOST).map(|limit| LimitReport {
        limit: limit.limit.to_string(),
        quota: Some(limit.limit.quota()).filter(|quota| *quota < u64::MAX),
        window_seconds: limit.limit.window().map(|window| window.as_secs_f64()),
    });
    let limits = limits.collect();
    let denials = listed::of_process(policies, policy);
    let (waiting, lines) = listed::lines(policy, names);
    let most = size.subjects.unwrap_or(usize::MAX);
    PolicyReport {
        policy: policy.name.clone(),
        plan: policy.unkeyed.plan_name().map(ToString::to_string),
        store: policy.store,
        key: key_forms(policies, policy),
        limit: policy.unkeyed.limit().map(ToString::to_string),
        limits,
        other_limit: policy.context.other_limit(context).map(|limit| limit.to_string()),
        cost: context.settings.fixed_cost(),
        failure_mode: context.settings.failure_mode.unwrap_or_default().to_string(),
        observed: policy.is_observed(),
        enforced_share: context.settings.enforced.fraction(),
        ban: policy.ban(),
        since: unix_seconds(policy.context.built_at),
        reloaded_at: policy.unkeyed.reloaded_at().map(unix_seconds),
        refused_reload: refused_reload.map(|(at, error)| RefusedReload {
            since: unix_seconds(at),
            error,
        }),
        slots: listed::slots(policy, names),
        waiting,
        lines,
        bans: listed::bans(policy, denials.as_ref(), names).await,
        decisions: listed::decisions(policies, policy),
        denials: DenialsReport::new(denials.as_ref(), names, most),
    }
}

/// What the keys of a policy are made of, in all layers and limiters that share its counts.
pub(super) fn key_forms(policies: &[WatchedPolicy], policy: &WatchedPolicy) -> String {
    let same = policies.iter().filter(|other| other.shares_counts(policy));
    let mut forms: Vec<_> = same.map(|policy| policy.key_form.to_string()).collect();
    forms.sort_unstable();
    forms.dedup();
    forms.join(" or ")
}

impl PolicyReport {
    /// Whether another layer or limiter has the policy with the same settings.
    fn is_same(&self, other: &Self) -> bool {
        let limits = self.limit == other.limit && self.limits == other.limits;
        let settings = self.cost == other.cost && self.failure_mode == other.failure_mode && self.ban == other.ban;
        let is_one = (&self.policy, &self.plan, self.store) == (&other.policy, &other.plan, other.store);
        is_one && limits && settings && self.enforced_share == other.enforced_share
    }
}
