//! The fields of a decision.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::CACHE_CONTROL};

use super::{
    Fields, Headers, RATELIMIT, RATELIMIT_LIMIT, RATELIMIT_OBSERVED, RATELIMIT_POLICY, RATELIMIT_REMAINING,
    RATELIMIT_RESET, X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET,
    values::{Text, append, ceil_secs, count, join, join_dictionary, keep_one_line, remaining, standing, take_list},
};
use crate::{Decision, PolicyDecision, key::Secret, limit::NamedLimit};

impl Fields {
    /// Adds the fields to a response of the inner service, and returns whether there are any about enforced policies.
    pub(crate) fn annotate(&self, decision: &Decision, status: StatusCode, headers: &mut HeaderMap) -> bool {
        let has_fields = self.observed || !matches!(self.dialect, Headers::None);
        // They belong to the response that a redirect leads to, and a cache would store those of a 304 (RFC 9111 §4.3.4).
        has_fields && !status.is_redirection() && !is_for_shared_caches(headers) && self.write(decision, headers)
    }

    /// Adds the fields to a response of this crate, and returns whether there are any about enforced policies.
    pub(crate) fn write(&self, decision: &Decision, headers: &mut HeaderMap) -> bool {
        if self.observed {
            write_observed(decision, headers);
        }
        if !matches!(self.dialect, Headers::None)
            && let Some(foremost) = decision.foremost()
        {
            return self.write_dialect(&self.dialect, (decision, foremost), headers);
        }
        false
    }

    /// Adds fields, and returns whether some have what remains by this decision, and not what was there.
    fn write_dialect(
        &self,
        dialect: &Headers,
        (decision, foremost): (&Decision, &PolicyDecision),
        headers: &mut HeaderMap,
    ) -> bool {
        match dialect {
            Headers::Draft08 => {
                let partition_key = self.partition_key.as_ref();
                let write = |headers: &mut _| append(headers, || RATELIMIT, states(decision, partition_key), true);
                write_beside(policies(decision, partition_key), headers, write)
            }
            Headers::Draft07 => write_beside(single_policy(foremost), headers, |headers| {
                write_dictionary(foremost, headers)
            }),
            Headers::Draft06 => write_beside(single_policy(foremost), headers, |headers| {
                write_triple(foremost, RATELIMIT_TRIPLE, Duration::ZERO, headers)
            }),
            Headers::LegacyDelta => write_triple(foremost, X_RATELIMIT_TRIPLE, Duration::ZERO, headers),
            Headers::LegacyEpoch => {
                // The units of a request may have been taken ahead.
                let now = foremost.decided_at.max(decision.server_time());
                write_triple(foremost, X_RATELIMIT_TRIPLE, now, headers)
            }
            Headers::Custom(custom) => {
                custom.0(decision, headers);
                true
            }
            Headers::Both(both) => {
                let write = |any, dialect| self.write_dialect(dialect, (decision, foremost), headers) || any;
                both.0.iter().fold(false, write)
            }
            Headers::None => false,
        }
    }
}

pub(crate) const CDN_CACHE_CONTROL: HeaderName = HeaderName::from_static("cdn-cache-control");

/// Whether shared caches are to store the response, and would send the fields of one caller to others (RFC 9111 §5.2.2, RFC 9213
/// §3.1).
pub(crate) fn is_for_shared_caches(headers: &HeaderMap) -> bool {
    if headers.is_empty() {
        return false;
    }
    let has = |field: HeaderName, directives: &[&str]| {
        let lines = headers.get_all(field).iter().filter_map(|line| line.to_str().ok());
        let mut names = lines
            .flat_map(|line| line.split(','))
            .map(|directive| directive.split('=').next());
        names
            .any(|name| name.is_some_and(|name| directives.iter().any(|other| name.trim().eq_ignore_ascii_case(other))))
    };
    has(CACHE_CONTROL, &["public", "s-maxage"]) || has(CDN_CACHE_CONTROL, &["public", "s-maxage", "max-age"])
}

/// Adds `RateLimit-Policy` and what `write` does, of which one that is no list follows: it is that of the fields which are shown.
fn write_beside(policies: HeaderValue, headers: &mut HeaderMap, write: impl FnOnce(&mut HeaderMap) -> bool) -> bool {
    let are_others = headers.append(RATELIMIT_POLICY, policies);
    let is_ours = write(headers);
    if are_others {
        join(headers, &RATELIMIT_POLICY, is_ours);
    }
    is_ours
}

/// `"burst";q=2;w=1, "daily";q=100;w=86400`
fn policies(decision: &Decision, partition_key: Option<&Secret>) -> HeaderValue {
    let mut policies = decision.enforced();
    if let (Some(only), None, None) = (policies.next(), policies.next(), partition_key) {
        return policy_item(only.named()).clone();
    }

    let mut list = Text::new();
    for policy in decision.enforced() {
        list.delimit().bytes(policy_item(policy.named()).as_bytes());
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
fn write_observed(decision: &Decision, headers: &mut HeaderMap) {
    let mut list = Text::new();
    for policy in decision.policies().filter(|policy| policy.is_observed()) {
        write_state(policy, &mut list);
        if policy.denial().is_some() {
            list.text(";denied");
        }
    }
    if !list.is_empty() {
        append(headers, || RATELIMIT_OBSERVED, list.into(), true);
    }
}

/// `"burst";r=1;t=1`
fn write_state(policy: &PolicyDecision, list: &mut Text) {
    let (remaining, reset) = standing(policy);
    let quoted = &policy_item(policy.named()).as_bytes()[..policy.name().len() + 2];
    list.delimit().bytes(quoted).text(";r=").number(remaining);
    if let Some(reset) = reset {
        list.text(";t=").number(ceil_secs(reset));
    }
}

/// A byte sequence of RFC 9651 §3.3.5: 128 bits of a keyed digest of the key, which does not reveal the key.
fn write_partition_key(policy: &PolicyDecision, secret: Option<&Secret>, list: &mut Text) {
    if let Some(secret) = secret {
        let digest = secret.digest(policy.charge.key.as_bytes());
        list.text(";pk=:").text(&STANDARD.encode(digest)).text(":");
    }
}

/// `"say-hi";q=2;w=30`. Policy names need no escaping as strings of RFC 9651 §3.3.3.
fn policy_item(named: &NamedLimit) -> &HeaderValue {
    named.policy_item.get_or_init(|| {
        let NamedLimit { name, limit, .. } = named;
        let mut policy = Text::new();
        policy.text("\"").text(name).text("\";q=").number(limit.quota());
        if limit.is_held() {
            policy.text(";qu=\"concurrent-requests\"");
        }
        // The months and days of a calendar differ in length.
        if let Some(window) = limit.window() {
            policy.text(";w=").number(ceil_secs(window));
        }
        policy.into()
    })
}

/// `limit=2, remaining=1, reset=30`, unless what is there, a dictionary or the list of a later draft, has less left.
fn write_dictionary(policy: &PolicyDecision, headers: &mut HeaderMap) -> bool {
    if headers.contains_key(RATELIMIT) {
        let list = take_list(headers, &RATELIMIT);
        join_dictionary(headers, &RATELIMIT);
        list.map(|list| headers.append(RATELIMIT, list));
    }
    let theirs = keep_one_line(headers, [&RATELIMIT], &RATELIMIT, remaining);
    let (remaining, reset) = standing(policy);
    if theirs.is_some_and(|theirs| theirs <= remaining) {
        return false;
    }

    let mut value = Text::new();
    value.text("limit=").number(policy.limit());
    value.text(", remaining=").number(remaining);
    if let Some(reset) = reset {
        value.text(", reset=").number(ceil_secs(reset));
    }
    headers.insert(RATELIMIT, value.into());
    true
}

/// `2;w=30`, as in the drafts -06 and -07.
fn single_policy(policy: &PolicyDecision) -> HeaderValue {
    let mut value = Text::from(policy.limit());
    if let Some(window) = policy.window() {
        value.text(";w=").number(ceil_secs(window));
    }
    value.into()
}

const RATELIMIT_TRIPLE: [HeaderName; 3] = [RATELIMIT_LIMIT, RATELIMIT_REMAINING, RATELIMIT_RESET];
const X_RATELIMIT_TRIPLE: [HeaderName; 3] = [X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET];

/// Writes three single values, the last of which is counted from this time, unless those that are there have less left.
fn write_triple(
    policy: &PolicyDecision,
    [limit_name, remaining_name, reset_name]: [HeaderName; 3],
    since: Duration,
    headers: &mut HeaderMap,
) -> bool {
    let names = [&limit_name, &remaining_name, &reset_name];
    let theirs = keep_one_line(headers, names, &remaining_name, |line| {
        // Of lines that were joined, the least.
        let numbers = line.split(',').map(|number| number.split(';').next().unwrap_or(number));
        numbers.filter_map(|number| count(number.trim())).min()
    });
    let (remaining, reset) = standing(policy);
    if theirs.is_some_and(|theirs| theirs <= remaining) {
        return false;
    }

    headers.insert(limit_name, Text::from(policy.limit()).into());
    headers.insert(remaining_name, Text::from(remaining).into());
    headers.remove(&reset_name);
    if let Some(reset) = reset {
        let seconds = ceil_secs(since.saturating_add(reset));
        headers.insert(reset_name, Text::from(seconds).into());
    }
    true
}

#[cfg(test)]
mod tests {
    use std::{panic::AssertUnwindSafe, sync::Arc};

    use super::*;
    use crate::{
        Key, MemoryStore, Policy, SlidingLog,
        decide::Undecided,
        policy,
        store::{ChargeState, Operation, Outcome, StoreResponse},
    };

    /// Units that were taken ahead were admitted when they were taken, and nodes of a cluster have clocks of their own.
    #[test]
    fn an_epoch_is_counted_from_the_later_one_of_the_times_of_the_state_and_of_the_response() {
        let policy = Policy::new("p", SlidingLog::per_minute(100));
        let context = Arc::new(policy::context(MemoryStore::new(), &[policy]));
        let [early, late] = [0, 900].map(|ms| Duration::from_secs(1_800_000_000) + Duration::from_millis(ms));
        for (decided_at, server_time) in [(early, late), (late, early)] {
            let state = ChargeState::new(60, None, Duration::from_millis(58_200)).at(decided_at);
            let outcome = Outcome::new(true, [state]);
            let response = StoreResponse::new(server_time, [outcome.clone()]);
            let policy = PolicyDecision::plain(&context, 0, Key::from("k"));
            let mut undecided = Undecided::new([policy].into_iter().collect());
            undecided.record(Operation::Check, &response, &outcome);
            let fields = Fields {
                dialect: Headers::LegacyEpoch,
                ..Fields::default()
            };
            let mut headers = HeaderMap::new();
            fields.write(&undecided.decided(), &mut headers);
            assert_eq!(headers[X_RATELIMIT_RESET], "1800000060", "58.2 s after {late:?}");
        }
    }

    #[test]
    fn fields_of_one_name_have_one_format() {
        let draft = || Headers::Draft08.and(Headers::LegacyDelta);
        for (one, another, names) in [
            (Headers::Draft08, Headers::Draft07, "`RateLimit`"),
            (Headers::Draft06, Headers::Draft06, "`RateLimit`"),
            (Headers::LegacyDelta, Headers::LegacyEpoch, "`X-RateLimit`"),
            (draft(), Headers::Draft07, "`RateLimit`"),
            (Headers::None.and(Headers::LegacyEpoch), draft(), "`X-RateLimit`"),
        ] {
            let panic = std::panic::catch_unwind(AssertUnwindSafe(|| one.and(another))).unwrap_err();
            let text = panic.downcast_ref::<String>().unwrap();
            assert!(text.contains(names) && text.contains("choose one"), "{text}");
        }
        let _ = Headers::None.and(Headers::custom(|_, _| ())).and(draft());
    }
}
