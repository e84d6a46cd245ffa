use std::{fmt::Write, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header::RETRY_AFTER};

use crate::{Decision, decision::PolicyDecision};

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
    /// all of it is restored, or, in a denial, when to come back.
    #[default]
    Draft08,
    /// None. A denial still says `Retry-After`.
    None,
}

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

impl Headers {
    /// Adds the fields to a response that was counted; after those of an inner layer, since they are lists.
    pub(crate) fn write(self, decision: &Decision, status: StatusCode, headers: &mut HeaderMap) {
        // A redirect is not what the caller came for; the fields belong to where it leads.
        if self == Self::None || status.is_redirection() || decision.policies().next().is_none() {
            return;
        }

        append(headers, RATELIMIT_POLICY, list(decision, write_policy));
        append(headers, RATELIMIT, list(decision, write_state));
    }
}

/// Adds `Retry-After` to a denial, if waiting helps.
pub(crate) fn write_retry_after(decision: &Decision, headers: &mut HeaderMap) {
    if let Some(wait) = decision.retry_after() {
        headers.insert(RETRY_AFTER, retry_after(wait));
    }
}

/// RFC 9110 §10.2.3: delay-seconds is a non-negative integer, so round up; and at least 1, since 0 invites a loop.
pub(crate) fn retry_after(wait: Duration) -> HeaderValue {
    HeaderValue::from(ceil_secs(wait).clamp(1, MAX_DELAY))
}

/// What a 32-bit recipient can hold (RFC 9111 §1.2.2).
const MAX_DELAY: u64 = i32::MAX as u64;

fn ceil_secs(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

fn list(decision: &Decision, write: fn(&PolicyDecision, &mut String)) -> String {
    let mut value = String::with_capacity(48);
    for policy in decision.policies() {
        if !value.is_empty() {
            value.push_str(", ");
        }
        write(policy, &mut value);
    }
    value
}

/// Policy names need no escaping as strings of RFC 9651 §3.3.3.
fn write_policy(policy: &PolicyDecision, value: &mut String) {
    let _ = write!(value, "\"{}\";q={}", policy.name(), policy.limit());
    // Months and days have no one length.
    if let Some(window) = policy.window() {
        let _ = write!(value, ";w={}", ceil_secs(window).max(1));
    }
}

fn write_state(policy: &PolicyDecision, value: &mut String) {
    let (remaining, reset) = match (policy.denies(), policy.retry_after()) {
        (true, None) => {
            let _ = write!(value, "\"{}\";r=0", policy.name());
            return;
        }
        (true, Some(wait)) => (0, ceil_secs(wait).max(1)),
        (false, _) => (policy.remaining(), ceil_secs(policy.reset_after())),
    };
    let _ = write!(value, "\"{}\";r={remaining};t={reset}", policy.name());
}

/// Adds to a list. One line of it, since many clients read only the first.
fn append(headers: &mut HeaderMap, name: HeaderName, ours: String) {
    let theirs = headers.get_all(&name).iter().map(|line| line.to_str());
    let joined = match theirs.collect::<Result<Vec<_>, _>>() {
        Ok(lines) if lines.is_empty() => ours,
        Ok(lines) => lines.join(", ") + ", " + &ours,
        Err(_) => return, // whoever wrote that speaks another language
    };
    if let Ok(value) = HeaderValue::try_from(joined) {
        headers.insert(name, value);
    }
}
