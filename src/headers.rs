mod text;

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::RETRY_AFTER};

use self::text::Text;
use crate::{
    Decision, Limit,
    decision::PolicyDecision,
    key::Secret,
    response::{GRPC_MESSAGE, GRPC_RETRY_PUSHBACK, GRPC_STATUS, GRPC_STATUS_DETAILS},
};

/// Which header fields tell callers how they stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Headers {
    /// `RateLimit` and `RateLimit-Policy` as in the IETF drafts -08 to -11 of *RateLimit header fields for HTTP*.
    ///
    /// ```text
    /// ratelimit-policy: "say-hi";q=2;w=30
    /// ratelimit: "say-hi";r=1;t=30
    /// ```
    ///
    /// `q` is the quota and `w` its window in seconds; `r` is what remains, 0 in a denial, and `t` says in how many seconds
    /// all of it is restored, or, in a denial, when to come back. Several policies are members of one list.
    #[default]
    Draft08,
    /// `RateLimit: limit=2, remaining=1, reset=30` and `RateLimit-Policy: 2;w=30`, as in draft -07.
    Draft07,
    /// `RateLimit-Limit`, `RateLimit-Remaining`, `RateLimit-Reset` and `RateLimit-Policy`, as in draft -06.
    Draft06,
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`, which many clients read and no standard
    /// defines.
    Legacy {
        /// What the reset is counted in.
        reset: Reset,
    },
    /// None. A denial still says `Retry-After`.
    None,
}

/// The unit of `X-RateLimit-Reset`.
///
/// No standard defines it, so take the one that the clients expect. A client that expects an epoch takes a
/// [`Delta`](Self::Delta) for a time in 1970 and retries at once; one that expects a delta takes an [`Epoch`](Self::Epoch)
/// for a wait of more than 50 years.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reset {
    /// Seconds since the Unix epoch, as GitHub has it.
    Epoch,
    /// Seconds from now, as Envoy and Kong have it.
    Delta,
}

impl Headers {
    /// The names of all fields that a layer may add, those of gRPC included, for `CorsLayer::expose_headers`.
    ///
    /// A browser hides response fields from scripts of another origin unless CORS exposes them. A gRPC-Web client whose
    /// status is hidden reports another error, or a stream without messages that ended well. The `CorsLayer` goes outside
    /// of the `RateLimitLayer`, so that its fields are on denials too.
    ///
    /// Not in the list: `Cache-Control`, `Content-Type` and `Content-Length`, which a browser always shows, and
    /// `Connection`, which it never does.
    ///
    /// ```
    /// let cors = tower_http::cors::CorsLayer::new().expose_headers(tower_quota::Headers::names());
    /// # let _ = cors;
    /// ```
    #[must_use]
    pub fn names() -> [HeaderName; 13] {
        [
            RETRY_AFTER,
            RATELIMIT,
            RATELIMIT_POLICY,
            RATELIMIT_LIMIT,
            RATELIMIT_REMAINING,
            RATELIMIT_RESET,
            X_RATELIMIT_LIMIT,
            X_RATELIMIT_REMAINING,
            X_RATELIMIT_RESET,
            GRPC_STATUS,
            GRPC_MESSAGE,
            GRPC_STATUS_DETAILS,
            GRPC_RETRY_PUSHBACK,
        ]
    }
}

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
const RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
const RATELIMIT_RESET: HeaderName = HeaderName::from_static("ratelimit-reset");
const X_RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RATELIMIT_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The fields that a layer adds: those of one draft at most, and the legacy ones beside it if wanted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields {
    pub(crate) style: Headers,
    pub(crate) legacy: Option<Reset>,
    pub(crate) partition_key: Option<Secret>,
}

impl Fields {
    /// Adds the fields to a response that was counted, beside those of an inner layer.
    pub(crate) fn write(&self, decision: &Decision, status: StatusCode, headers: &mut HeaderMap) {
        // A redirect is not what the caller came for; the fields belong to where it leads.
        let Some(foremost) = decision.foremost().filter(|_| !status.is_redirection()) else {
            return;
        };

        match self.style {
            Headers::Draft08 => {
                append(headers, &RATELIMIT_POLICY, self.policies(decision));
                append(headers, &RATELIMIT, self.states(decision));
            }
            Headers::Draft07 => {
                append(headers, &RATELIMIT_POLICY, single_policy(foremost));
                write_dictionary(foremost, headers);
            }
            Headers::Draft06 => {
                append(headers, &RATELIMIT_POLICY, single_policy(foremost));
                let names = [RATELIMIT_LIMIT, RATELIMIT_REMAINING, RATELIMIT_RESET];
                write_three(foremost, names, Reset::Delta, headers);
            }
            Headers::Legacy { reset } => write_three(foremost, X_RATELIMIT, reset, headers),
            Headers::None => {}
        }
        if let Some(reset) = self.legacy {
            write_three(foremost, X_RATELIMIT, reset, headers);
        }
    }

    /// `"burst";q=2;w=1, "daily";q=100;w=86400`
    fn policies(&self, decision: &Decision) -> HeaderValue {
        let mut policies = decision.policies();
        if let (Some(only), None, None) = (policies.next(), policies.next(), &self.partition_key) {
            return only.rendered().policy_item.clone();
        }

        let mut list = Text::new();
        for policy in decision.policies() {
            list.delimit().bytes(policy.rendered().policy_item.as_bytes());
            self.write_partition_key(policy, &mut list);
        }
        list.into()
    }

    /// `"burst";r=1;t=1, "daily";r=99;t=86400`
    fn states(&self, decision: &Decision) -> HeaderValue {
        let mut list = Text::new();
        for policy in decision.policies() {
            let (remaining, reset) = standing(policy);
            let quoted = &policy.rendered().policy_item.as_bytes()[..policy.name().len() + 2];
            list.delimit().bytes(quoted).text(";r=").number(remaining);
            if let Some(reset) = reset {
                list.text(";t=").number(ceil_secs(reset));
            }
            self.write_partition_key(policy, &mut list);
        }
        list.into()
    }

    /// A byte sequence of RFC 9651 §3.3.5: 128 bits of a keyed digest, from which nobody learns an address.
    fn write_partition_key(&self, policy: &PolicyDecision, list: &mut Text) {
        if let Some(secret) = &self.partition_key {
            let digest = secret.digest(policy.key.as_bytes());
            list.text(";pk=:").text(&STANDARD.encode(digest)).text(":");
        }
    }
}

/// `"say-hi";q=2;w=30`. Policy names need no escaping as strings of RFC 9651 §3.3.3.
pub(crate) fn announced(name: &str, limit: &Limit) -> HeaderValue {
    let mut policy = Text::new();
    policy.text("\"").text(name).text("\";q=").number(limit.quota());
    // Months and days have no one length.
    if let Some(window) = limit.window() {
        policy.text(";w=").number(ceil_secs(window).max(1));
    }
    policy.into()
}

const X_RATELIMIT: [HeaderName; 3] = [X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET];

/// What remains, and when all is restored; of a policy that denies, nothing, and when to come back, if that helps.
fn standing(policy: &PolicyDecision) -> (u64, Option<Duration>) {
    match policy.denies() {
        true => (0, policy.retry_after().map(|wait| wait.max(Duration::from_secs(1)))),
        false => (policy.remaining().min(MAX_INTEGER), Some(policy.reset_after())),
    }
}

/// `2;w=30`
fn single_policy(policy: &PolicyDecision) -> HeaderValue {
    let mut value = Text::from(policy.limit());
    if let Some(window) = policy.window() {
        value.text(";w=").number(ceil_secs(window).max(1));
    }
    value.into()
}

/// `limit=2, remaining=1, reset=30`, unless the one that is there has less left.
fn write_dictionary(policy: &PolicyDecision, headers: &mut HeaderMap) {
    keep_one_line(headers, &RATELIMIT);
    let theirs = headers
        .get(RATELIMIT)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| {
            let members = value.split(',').map(str::trim);
            members
                .filter_map(|member| member.strip_prefix("remaining="))
                .find_map(|left| left.parse::<u64>().ok())
        });
    let (remaining, reset) = standing(policy);
    if theirs.is_some_and(|theirs| theirs <= remaining) {
        return;
    }

    let mut value = Text::new();
    value.text("limit=").number(policy.limit());
    value.text(", remaining=").number(remaining);
    if let Some(reset) = reset {
        value.text(", reset=").number(ceil_secs(reset));
    }
    headers.insert(RATELIMIT, value.into());
}

/// Three single values, unless those that are there have less left.
fn write_three(
    policy: &PolicyDecision,
    [limit_name, remaining_name, reset_name]: [HeaderName; 3],
    counted_in: Reset,
    headers: &mut HeaderMap,
) {
    for name in [&limit_name, &remaining_name, &reset_name] {
        keep_one_line(headers, name);
    }
    let theirs = headers
        .get(&remaining_name)
        .and_then(|value| value.to_str().ok()?.trim().parse::<u64>().ok());
    let (remaining, reset) = standing(policy);
    if theirs.is_some_and(|theirs| theirs <= remaining) {
        return;
    }

    headers.insert(limit_name, Text::from(policy.limit()).into());
    headers.insert(remaining_name, Text::from(remaining).into());
    headers.remove(&reset_name);
    if let Some(reset) = reset {
        let seconds = match counted_in {
            Reset::Delta => ceil_secs(reset),
            Reset::Epoch => ceil_secs(policy.decided_at.saturating_add(reset)),
        };
        headers.insert(reset_name, Text::from(seconds).into());
    }
}

/// A field with a single value has one line (RFC 9110 §5.3).
fn keep_one_line(headers: &mut HeaderMap, name: &HeaderName) {
    if headers.get_all(name).iter().nth(1).is_some()
        && let Some(first) = headers.get(name).cloned()
    {
        headers.insert(name, first);
    }
}

/// Adds to a list. One line of it, since many clients read only the first.
fn append(headers: &mut HeaderMap, name: &HeaderName, ours: HeaderValue) {
    if headers.append(name, ours) {
        join(headers, name);
    }
}

/// Makes one line of those that are there, of which the last is ours.
#[cold]
fn join(headers: &mut HeaderMap, name: &HeaderName) {
    let mut lines: Vec<HeaderValue> = headers.get_all(name).iter().cloned().collect();
    if lines.iter().all(|line| line.to_str().is_ok()) {
        let mut all = Text::new();
        for line in &lines {
            all.delimit().bytes(line.as_bytes());
        }
        headers.insert(name, all.into());
        return;
    }

    // Whoever wrote that speaks another language.
    lines.pop();
    headers.remove(name);
    for line in lines {
        headers.append(name, line);
    }
}

/// RFC 9110 §10.2.3: delay-seconds is a non-negative integer, so round up; and at least 1, since 0 invites a loop.
pub(crate) fn retry_after(wait: Duration) -> HeaderValue {
    Text::from(ceil_secs(wait).clamp(1, MAX_DELAY)).into()
}

/// What a 32-bit recipient can hold (RFC 9111 §1.2.2).
const MAX_DELAY: u64 = i32::MAX as u64;

/// RFC 9651 §3.3.1: an integer has at most 15 digits. A store may say anything.
const MAX_INTEGER: u64 = 999_999_999_999_999;

fn ceil_secs(duration: Duration) -> u64 {
    let seconds = duration
        .as_secs()
        .saturating_add(u64::from(duration.subsec_nanos() > 0));
    seconds.min(MAX_INTEGER)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Denial, Key, MemoryStore, Policy, SlidingLog, policy};

    /// 100 a minute, 60 left, 58.2 s until all is restored; or denied for 41.2 s. It is 1,800,000,000.
    fn state(name: &'static str, wait: Option<Duration>) -> PolicyDecision {
        let policy = Policy::new(name, SlidingLog::per_minute(100));
        let context = Arc::new(policy::context(MemoryStore::new(), &[policy]));
        PolicyDecision {
            decided_at: Duration::from_secs(1_800_000_000),
            denial: wait.map(|_| Denial::QuotaExceeded),
            remaining: if wait.is_some() { 0 } else { 60 },
            retry_after: wait,
            reset_after: Duration::from_millis(58_200),
            ..PolicyDecision::undecided(context, 0, Key::from("k"), 1)
        }
    }

    fn written(fields: &Fields, policies: Vec<PolicyDecision>, mut headers: HeaderMap) -> Vec<String> {
        let allowed = !policies.iter().any(PolicyDecision::denies);
        let decision = Decision::new(allowed, policies.into());
        fields.write(&decision, StatusCode::OK, &mut headers);
        let mut lines: Vec<_> = headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        lines.sort();
        lines
    }

    fn style(style: Headers) -> Fields {
        Fields {
            style,
            ..Fields::default()
        }
    }

    // The rows HD-01 to HD-07 of `tests/vectors/http.md`.
    #[test]
    fn each_style_has_its_fields() {
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
                Headers::Legacy { reset: Reset::Epoch },
                vec![
                    "x-ratelimit-limit: 100",
                    "x-ratelimit-remaining: 60",
                    "x-ratelimit-reset: 1800000059",
                ],
            ),
            (
                Headers::Legacy { reset: Reset::Delta },
                vec![
                    "x-ratelimit-limit: 100",
                    "x-ratelimit-remaining: 60",
                    "x-ratelimit-reset: 59",
                ],
            ),
        ] {
            assert_eq!(
                written(&style(headers), vec![state("default", None)], HeaderMap::new()),
                lines,
                "{headers:?}"
            );
        }
    }

    #[test]
    fn a_denier_has_nothing_left_and_says_when_to_come_back() {
        let denied = || vec![state("default", Some(Duration::from_millis(41_200)))];
        let [_, state] = written(&style(Headers::Draft08), denied(), HeaderMap::new())
            .try_into()
            .unwrap();
        assert_eq!(state, "ratelimit: \"default\";r=0;t=42");
        let [_, state] = written(&style(Headers::Draft07), denied(), HeaderMap::new())
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
        let [policy, state] = written(&style(Headers::Draft08), policies(), HeaderMap::new())
            .try_into()
            .unwrap();
        assert_eq!(policy, "ratelimit-policy: \"burst\";q=100;w=60, \"daily\";q=100;w=60");
        assert_eq!(state, "ratelimit: \"burst\";r=0;t=1, \"daily\";r=0;t=9");
        let [policy, state] = written(&style(Headers::Draft07), policies(), HeaderMap::new())
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
        let legacy = style(Headers::Legacy { reset: Reset::Delta });
        let theirs = |remaining: u64| {
            let mut headers = HeaderMap::new();
            headers.insert(X_RATELIMIT_LIMIT, 70.into());
            headers.insert(X_RATELIMIT_REMAINING, remaining.into());
            headers
        };
        assert_eq!(
            written(&legacy, vec![state("a", None)], theirs(5)),
            ["x-ratelimit-limit: 70", "x-ratelimit-remaining: 5"],
        );
        assert_eq!(
            written(&legacy, vec![state("a", None)], theirs(61)),
            [
                "x-ratelimit-limit: 100",
                "x-ratelimit-remaining: 60",
                "x-ratelimit-reset: 59"
            ],
        );

        let mut doubled = theirs(5);
        doubled.append(X_RATELIMIT_REMAINING, 99.into());
        assert_eq!(
            written(&legacy, vec![state("a", None)], doubled),
            ["x-ratelimit-limit: 70", "x-ratelimit-remaining: 5"],
        );

        let mut inner = HeaderMap::new();
        inner.insert(RATELIMIT, HeaderValue::from_static("limit=10, remaining=5, reset=1"));
        let lines = written(&style(Headers::Draft07), vec![state("a", None)], inner);
        assert!(
            lines.contains(&"ratelimit: limit=10, remaining=5, reset=1".to_owned()),
            "{lines:?}"
        );
    }

    #[test]
    fn the_legacy_fields_go_beside_a_draft() {
        let both = Fields {
            legacy: Some(Reset::Delta),
            ..Fields::default()
        };
        assert_eq!(written(&both, vec![state("a", None)], HeaderMap::new()).len(), 5);
    }

    #[test]
    fn a_partition_key_is_the_same_for_one_caller_and_tells_nothing() {
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

    // The rows HD-10, HD-12 and HD-13 of `tests/vectors/http.md`.
    #[test]
    fn retry_after_is_whole_seconds_and_never_none() {
        for (wait, value) in [
            (0, "1"),
            (1_000, "1"),
            (1_001, "2"),
            (41_200, "42"),
            (1_000_000_000_000_000, "2147483647"),
        ] {
            assert_eq!(retry_after(Duration::from_millis(wait)), value);
        }
    }
}
