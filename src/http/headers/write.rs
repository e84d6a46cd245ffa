//! The fields of a decision.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::CACHE_CONTROL};

use super::{
    Fields, Headers, RATELIMIT, RATELIMIT_LIMIT, RATELIMIT_OBSERVED, RATELIMIT_POLICY, RATELIMIT_REMAINING,
    RATELIMIT_RESET, X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET,
    values::{Text, append, ceil_secs, count, keep_one_line, least_remaining, remaining, standing},
};
use crate::{Decision, PolicyDecision, key::Secret, limit::NamedLimit};

impl Fields {
    /// Adds the fields to a response of the inner service, and returns whether there are any about enforced policies.
    pub(crate) fn annotate(&self, decision: &Decision, status: StatusCode, headers: &mut HeaderMap) -> bool {
        let has_fields = self.observed || !matches!(self.dialect, Headers::None);
        // The fields belong to the response that a redirect leads to. A client that polls receives 304 alone.
        let is_redirect = status.is_redirection() && status != StatusCode::NOT_MODIFIED;
        has_fields && !is_redirect && !is_for_shared_caches(headers) && self.write(decision, headers)
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
            Headers::Draft08 => return write_draft08(decision, self.partition_key.as_ref(), headers),
            Headers::Draft07 => return write_draft07(foremost, headers),
            Headers::Draft06 => return write_draft06(foremost, headers),
            Headers::LegacyDelta => return write_legacy(foremost, Reset::Delta, headers),
            Headers::LegacyEpoch => {
                // The units of a request may have been taken ahead.
                let now = foremost.decided_at.max(decision.server_time());
                return write_legacy(foremost, Reset::Epoch { now }, headers);
            }
            Headers::Custom(custom) => custom(decision, headers),
            Headers::Both(both) => {
                let write = |any, dialect| self.write_dialect(dialect, (decision, foremost), headers) || any;
                return both.iter().fold(false, write);
            }
            Headers::None => return false,
        }
        true
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

fn write_draft08(decision: &Decision, partition_key: Option<&Secret>, headers: &mut HeaderMap) -> bool {
    append(headers, || RATELIMIT_POLICY, policies(decision, partition_key));
    append(headers, || RATELIMIT, states(decision, partition_key))
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
        append(headers, || RATELIMIT_OBSERVED, list.into());
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
            policy.text(";w=").number(ceil_secs(window).max(1));
        }
        policy.into()
    })
}

fn write_draft07(policy: &PolicyDecision, headers: &mut HeaderMap) -> bool {
    append(headers, || RATELIMIT_POLICY, single_policy(policy));
    write_dictionary(policy, headers)
}

/// `limit=2, remaining=1, reset=30`, unless what is there, a dictionary or the list of a later draft, has less left.
fn write_dictionary(policy: &PolicyDecision, headers: &mut HeaderMap) -> bool {
    let is_list = |line: &HeaderValue| line.as_bytes().starts_with(b"\"");
    let theirs = match headers.get(RATELIMIT).is_some_and(is_list) {
        // Its lines are one value.
        true => least_remaining(headers.get_all(RATELIMIT)),
        false => keep_one_line(headers, [&RATELIMIT], &RATELIMIT, remaining),
    };
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

fn write_draft06(policy: &PolicyDecision, headers: &mut HeaderMap) -> bool {
    append(headers, || RATELIMIT_POLICY, single_policy(policy));
    let names = [RATELIMIT_LIMIT, RATELIMIT_REMAINING, RATELIMIT_RESET];
    write_triple(policy, names, Reset::Delta, headers)
}

/// `2;w=30`, as in the drafts -06 and -07.
fn single_policy(policy: &PolicyDecision) -> HeaderValue {
    let mut value = Text::from(policy.limit());
    if let Some(window) = policy.window() {
        value.text(";w=").number(ceil_secs(window).max(1));
    }
    value.into()
}

/// The format of the last of three single values.
#[derive(Clone, Copy)]
enum Reset {
    Delta,
    Epoch { now: Duration },
}

fn write_legacy(policy: &PolicyDecision, format: Reset, headers: &mut HeaderMap) -> bool {
    let names = [X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET];
    write_triple(policy, names, format, headers)
}

/// Writes three single values, unless those that are there have less left.
fn write_triple(
    policy: &PolicyDecision,
    [limit_name, remaining_name, reset_name]: [HeaderName; 3],
    format: Reset,
    headers: &mut HeaderMap,
) -> bool {
    let names = [&limit_name, &remaining_name, &reset_name];
    let theirs = keep_one_line(headers, names, &remaining_name, |line| count(line.trim()));
    let (remaining, reset) = standing(policy);
    if theirs.is_some_and(|theirs| theirs <= remaining) {
        return false;
    }

    headers.insert(limit_name, Text::from(policy.limit()).into());
    headers.insert(remaining_name, Text::from(remaining).into());
    headers.remove(&reset_name);
    if let Some(reset) = reset {
        let seconds = match format {
            Reset::Delta => ceil_secs(reset),
            Reset::Epoch { now } => ceil_secs(now.saturating_add(reset)),
        };
        headers.insert(reset_name, Text::from(seconds).into());
    }
    true
}

#[cfg(test)]
mod tests {
    use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

    use base64::{Engine, engine::general_purpose::STANDARD};
    use http::HeaderValue;

    use super::*;
    use crate::{
        Denial, Key, MemoryStore, Policy, PolicyDecision, SlidingLog,
        decide::Undecided,
        http::headers::{RATELIMIT, X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING},
        key::Secret,
        policy,
    };

    /// 100 a minute, 60 left, 58.2 s until all is restored; or denied. The time of the store is 1,800,000,000 s.
    fn state(name: &'static str, wait: Option<Duration>) -> PolicyDecision {
        let policy = Policy::new(name, SlidingLog::per_minute(100));
        let context = Arc::new(policy::context(MemoryStore::new(), &[policy]));
        PolicyDecision {
            decided_at: Duration::from_secs(1_800_000_000),
            denial: wait.map(|_| Denial::QuotaExceeded),
            remaining: if wait.is_some() { 0 } else { 60 },
            retry_after: wait,
            reset_after: Duration::from_millis(58_200),
            ..PolicyDecision::plain(&context, 0, Key::from("k"))
        }
    }

    fn written(fields: &Fields, policies: Vec<PolicyDecision>, mut headers: HeaderMap) -> Vec<String> {
        let allowed = !policies.iter().any(PolicyDecision::denies);
        let decision = Decision::new(allowed, policies.into());
        fields.write(&decision, &mut headers);
        let mut lines: Vec<_> = headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        lines.sort();
        lines
    }

    /// Units that were taken ahead were admitted when they were taken.
    #[test]
    fn an_epoch_is_counted_from_the_time_of_the_decision() {
        let ahead = state("ahead", None);
        let now = ahead.decided_at + Duration::from_millis(900);
        let mut undecided = Undecided::new([ahead].into_iter().collect());
        undecided.record_each(true, now, |_| true);
        let mut headers = HeaderMap::new();
        fields(Headers::LegacyEpoch).write(&undecided.decided(), &mut headers);
        assert_eq!(headers[X_RATELIMIT_RESET], "1800000060", "58.2 s after {now:?}");
    }

    fn fields(dialect: Headers) -> Fields {
        Fields {
            dialect,
            ..Fields::default()
        }
    }

    // The rows HD-01 to HD-07 of `tests/vectors/http.md`.
    #[test]
    fn each_dialect_has_its_fields() {
        for (headers, lines) in [
            (Headers::None, vec![]),
            (
                Headers::Draft08,
                vec![
                    "ratelimit-policy: \"default\";q=100;w=60",
                    "ratelimit: \"default\";r=60;t=59",
                ],
            ),
            (
                Headers::Draft07,
                vec![
                    "ratelimit-policy: 100;w=60",
                    "ratelimit: limit=100, remaining=60, reset=59",
                ],
            ),
            (
                Headers::Draft06,
                vec![
                    "ratelimit-limit: 100",
                    "ratelimit-policy: 100;w=60",
                    "ratelimit-remaining: 60",
                    "ratelimit-reset: 59",
                ],
            ),
            (
                Headers::LegacyEpoch,
                vec![
                    "x-ratelimit-limit: 100",
                    "x-ratelimit-remaining: 60",
                    "x-ratelimit-reset: 1800000059",
                ],
            ),
            (
                Headers::LegacyDelta,
                vec![
                    "x-ratelimit-limit: 100",
                    "x-ratelimit-remaining: 60",
                    "x-ratelimit-reset: 59",
                ],
            ),
        ] {
            assert_eq!(
                written(&fields(headers.clone()), vec![state("default", None)], HeaderMap::new()),
                lines,
                "{headers:?}"
            );
        }
    }

    #[test]
    fn a_policy_that_denies_has_nothing_left_and_its_wait() {
        let denied = || vec![state("default", Some(Duration::from_millis(41_200)))];
        let [_, state] = written(&fields(Headers::Draft08), denied(), HeaderMap::new())
            .try_into()
            .unwrap();
        assert_eq!(state, "ratelimit: \"default\";r=0;t=42");
        let [_, state] = written(&fields(Headers::Draft07), denied(), HeaderMap::new())
            .try_into()
            .unwrap();
        assert_eq!(state, "ratelimit: limit=100, remaining=0, reset=42");
    }

    #[test]
    fn several_policies_are_a_list_or_the_one_that_matters_most() {
        let policies = || {
            vec![
                state("burst", Some(Duration::from_secs(1))),
                state("daily", Some(Duration::from_secs(9))),
            ]
        };
        let [policy, state] = written(&fields(Headers::Draft08), policies(), HeaderMap::new())
            .try_into()
            .unwrap();
        assert_eq!(policy, "ratelimit-policy: \"burst\";q=100;w=60, \"daily\";q=100;w=60");
        assert_eq!(state, "ratelimit: \"burst\";r=0;t=1, \"daily\";r=0;t=9");
        let [policy, state] = written(&fields(Headers::Draft07), policies(), HeaderMap::new())
            .try_into()
            .unwrap();
        assert_eq!(
            (policy.as_str(), state.as_str()),
            (
                "ratelimit-policy: 100;w=60",
                "ratelimit: limit=100, remaining=0, reset=9"
            )
        );
    }

    #[test]
    fn of_single_values_the_lower_remaining_wins_whole() {
        let legacy = fields(Headers::LegacyDelta);
        let theirs = |remaining: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(X_RATELIMIT_LIMIT, 70.into());
            headers.insert(X_RATELIMIT_REMAINING, HeaderValue::from_static(remaining));
            headers
        };
        for less in ["5", "0", "-3", "0.0", "5.9", "-0.5"] {
            assert_eq!(
                written(&legacy, vec![state("a", None)], theirs(less)),
                [
                    "x-ratelimit-limit: 70".to_owned(),
                    format!("x-ratelimit-remaining: {less}")
                ],
            );
        }
        for more in ["61", "61.5", "1e3", "9999999999999999999999", "inf", "NaN", "many"] {
            assert_eq!(
                written(&legacy, vec![state("a", None)], theirs(more)),
                [
                    "x-ratelimit-limit: 100",
                    "x-ratelimit-remaining: 60",
                    "x-ratelimit-reset: 59"
                ],
                "{more}"
            );
        }

        let mut doubled = theirs("5");
        doubled.append(X_RATELIMIT_REMAINING, 99.into());
        assert_eq!(
            written(&legacy, vec![state("a", None)], doubled),
            ["x-ratelimit-limit: 70", "x-ratelimit-remaining: 5"],
        );

        let mut inner = HeaderMap::new();
        inner.insert(RATELIMIT, HeaderValue::from_static("limit=10, remaining=5, reset=1"));
        let lines = written(&fields(Headers::Draft07), vec![state("a", None)], inner);
        assert!(
            lines.contains(&"ratelimit: limit=10, remaining=5, reset=1".to_owned()),
            "{lines:?}"
        );
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

    #[test]
    fn the_legacy_fields_go_beside_a_draft() {
        let legacy = Headers::LegacyDelta;
        let both = fields(Headers::Draft08.and(legacy));
        assert_eq!(written(&both, vec![state("a", None)], HeaderMap::new()).len(), 5);
    }

    #[test]
    fn a_partition_key_depends_on_the_caller_and_the_secret() {
        let fields = |secret: &str| Fields {
            partition_key: Some(Secret::for_partition_keys(secret).unwrap()),
            ..Fields::default()
        };
        let line = |secret| {
            written(&fields(secret), vec![state("a", None)], HeaderMap::new())
                .pop()
                .unwrap()
        };
        let (one, two) = ("the one secret of 26 bytes", "another secret of 26 bytes");
        assert_eq!(line(one), line(one));
        assert_ne!(line(one), line(two));
        let (_, pk) = line(one)
            .split_once(";pk=:")
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
            .unwrap();
        assert_eq!(STANDARD.decode(pk.trim_end_matches(':')).unwrap().len(), 16);
    }
}
