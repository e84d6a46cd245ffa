//! The fields of a decision.

use http::{HeaderMap, StatusCode};

use super::{
    Fields,
    dialect::{Headers, RATELIMIT_DEGREE},
    draft06, draft07, draft08, legacy,
};
use crate::Decision;

impl Fields {
    /// Adds the fields of a decision to a response, beside those of an inner layer.
    pub(crate) fn write(&self, decision: &Decision, status: StatusCode, headers: &mut HeaderMap) {
        // The fields belong to the response that a redirect leads to.
        if status.is_redirection() {
            return;
        }
        if self.observed {
            draft08::write_observed(decision, headers);
        }
        if self.degree {
            write_degree(decision, headers);
        }
        if matches!((&self.dialect, self.legacy), (Headers::None, None)) {
            return;
        }
        let Some(foremost) = decision.foremost() else {
            return;
        };

        match &self.dialect {
            Headers::Draft08 => draft08::write(decision, self.partition_key.as_ref(), headers),
            Headers::Draft07 => draft07::write(foremost, headers),
            Headers::Draft06 => draft06::write(foremost, headers),
            Headers::Legacy { reset } => legacy::write(foremost, *reset, headers),
            Headers::Custom(custom) => custom.write(decision, headers),
            Headers::None => {}
        }
        if let Some(reset) = self.legacy {
            legacy::write(foremost, reset, headers);
        }
    }
}

/// Writes the degree of a decision, unless an inner layer has written a larger one.
pub(super) fn write_degree(decision: &Decision, headers: &mut HeaderMap) {
    if !decision.has_thresholds() {
        return;
    }
    let inner = headers.get(RATELIMIT_DEGREE).and_then(|degree| degree.to_str().ok());
    let inner = inner.and_then(|degree| degree.parse().ok());
    let degree = decision.degree().max(inner.unwrap_or(0));
    headers.insert(RATELIMIT_DEGREE, degree.into());
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use base64::{Engine, engine::general_purpose::STANDARD};
    use http::HeaderValue;

    use super::*;
    use crate::{
        Denial, Key, MemoryStore, Policy, PolicyDecision, ResetFormat, SlidingLog,
        decision::headers::dialect::{RATELIMIT, X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING},
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
                Headers::Legacy {
                    reset: ResetFormat::EpochSeconds,
                },
                vec![
                    "x-ratelimit-limit: 100",
                    "x-ratelimit-remaining: 60",
                    "x-ratelimit-reset: 1800000059",
                ],
            ),
            (
                Headers::Legacy {
                    reset: ResetFormat::DeltaSeconds,
                },
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
        let legacy = fields(Headers::Legacy {
            reset: ResetFormat::DeltaSeconds,
        });
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
        let lines = written(&fields(Headers::Draft07), vec![state("a", None)], inner);
        assert!(
            lines.contains(&"ratelimit: limit=10, remaining=5, reset=1".to_owned()),
            "{lines:?}"
        );
    }

    #[test]
    fn the_legacy_fields_go_beside_a_draft() {
        let both = Fields {
            legacy: Some(ResetFormat::DeltaSeconds),
            ..Fields::default()
        };
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
