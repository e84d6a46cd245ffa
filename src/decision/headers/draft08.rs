//! Drafts -08 to -11: lists in the syntax of RFC 9651, with a member for each policy.

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderValue};

use super::{
    dialect::{RATELIMIT, RATELIMIT_OBSERVED, RATELIMIT_POLICY},
    values::{Text, append, ceil_secs, standing},
};
use crate::{Decision, Limit, PolicyDecision, key::Secret};

pub(super) fn write(decision: &Decision, partition_key: Option<&Secret>, headers: &mut HeaderMap) {
    append(headers, || RATELIMIT_POLICY, policies(decision, partition_key));
    append(headers, || RATELIMIT, states(decision, partition_key));
}

/// `"burst";q=2;w=1, "daily";q=100;w=86400`
fn policies(decision: &Decision, partition_key: Option<&Secret>) -> HeaderValue {
    let mut policies = decision.enforced();
    if let (Some(only), None, None) = (policies.next(), policies.next(), partition_key) {
        return only.plan().policy_item.clone();
    }

    let mut list = Text::new();
    for policy in decision.enforced() {
        list.delimit().bytes(policy.plan().policy_item.as_bytes());
        write_partition_key(policy, partition_key, &mut list);
    }
    list.into()
}

/// `"burst";r=1;t=1, "daily";r=99;t=86400`
fn states(decision: &Decision, partition_key: Option<&Secret>) -> HeaderValue {
    let mut list = Text::new();
    for policy in decision.enforced() {
        write_state(policy, &mut list);
        write_partition_key(policy, partition_key, &mut list);
    }
    list.into()
}

/// The policies that only observe, as members of `RateLimit`, with `denied` if one would have denied the request.
pub(super) fn write_observed(decision: &Decision, headers: &mut HeaderMap) {
    let mut list = Text::new();
    for policy in decision.policies().filter(|policy| policy.is_observed()) {
        write_state(policy, &mut list);
        if policy.denial().is_some() {
            list.text(";denied");
        }
    }
    if !list.is_empty() {
        append(headers, || RATELIMIT_OBSERVED, list.into());
    }
}

/// `"burst";r=1;t=1`
fn write_state(policy: &PolicyDecision, list: &mut Text) {
    let (remaining, reset) = standing(policy);
    let quoted = &policy.plan().policy_item.as_bytes()[..policy.name().len() + 2];
    list.delimit().bytes(quoted).text(";r=").number(remaining);
    if let Some(reset) = reset {
        list.text(";t=").number(ceil_secs(reset));
    }
}

/// A byte sequence of RFC 9651 §3.3.5: 128 bits of a keyed digest of the key, which does not reveal the key.
fn write_partition_key(policy: &PolicyDecision, secret: Option<&Secret>, list: &mut Text) {
    if let Some(secret) = secret {
        let digest = secret.digest(policy.key.as_bytes());
        list.text(";pk=:").text(&STANDARD.encode(digest)).text(":");
    }
}

/// `"say-hi";q=2;w=30`. Policy names need no escaping as strings of RFC 9651 §3.3.3.
pub(crate) fn policy_item(name: &str, limit: &Limit) -> HeaderValue {
    let mut policy = Text::new();
    policy.text("\"").text(name).text("\";q=").number(limit.quota());
    if limit.is_held() {
        policy.text(";qu=\"concurrent-requests\"");
    }
    // The months and days of a calendar differ in length.
    if let Some(window) = limit.window() {
        policy.text(";w=").number(ceil_secs(window).max(1));
    }
    policy.into()
}
