use bytes::Bytes;
use http::{HeaderValue, Response, header::CONTENT_TYPE, request::Parts};
use serde_json::json;
use smallvec::SmallVec;

use super::format::{Rejection, ResponseFormat};
use crate::{Decision, Denial, PolicyDecision};

/// Responds with `application/problem+json` (RFC 9457).
///
/// The types and `violated-policies` are those of the IETF draft *RateLimit header fields for HTTP*:
///
/// | type | status | the request |
/// | --- | --- | --- |
/// | `quota-exceeded` | 429 | is denied by a limit |
/// | `abnormal-usage-detected` | 429 | is denied by [bans](crate::Policy::ban) alone |
/// | `temporary-reduced-capacity` | 503 | fails with the store, if a policy is [closed](crate::FailureMode::Closed) |
///
/// A cost [above a limit](Denial::CostAboveLimit) is told in the `detail`: `"rows: costs 1001, the limit is 1000"`.
///
/// A refused request gets `about:blank` with a `detail`; a blocked one, and one that is refused since the server is at fault, without.
///
/// ```json
/// {
///   "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
///   "title": "Request cannot be satisfied as assigned quota has been exceeded",
///   "status": 429,
///   "violated-policies": ["say-hi"]
/// }
/// ```
///
/// ```
/// use http::{Request, StatusCode};
/// use serde_json::{Value, json};
/// use tower_quota::{Limit, Limiter, MemoryStore, Policy, response::{Problem, Rejection, ResponseFormat}};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let closed = Limiter::new(MemoryStore::new(), Policy::new("say-hi", Limit::DenyAll));
/// let denied = closed.check("42").await?;
///
/// let (parts, ()) = Request::new(()).into_parts();
/// let response = Problem.respond(Rejection::Limited(&denied), &parts);
/// assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(response.headers()["content-type"], "application/problem+json");
/// let problem: Value = serde_json::from_slice(response.body())?;
/// assert_eq!(problem["violated-policies"], json!(["say-hi"]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Problem;

const LIMITED: &str = concat!(
    r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","#,
    r#""title":"Request cannot be satisfied as assigned quota has been exceeded","#,
    r#""status":429,"violated-policies":"#,
);
const BANNED: &str = concat!(
    r#"{"type":"https://iana.org/assignments/http-problem-types#abnormal-usage-detected","#,
    r#""title":"Request not satisfied due to detection of abnormal request pattern","#,
    r#""status":429,"violated-policies":"#,
);
const FAILED: &str = concat!(
    r#"{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","#,
    r#""title":"Request cannot be satisfied due to temporary server capacity constraints","status":503}"#,
);
const MISCONFIGURED: &str = r#"{"type":"about:blank","title":"Internal Server Error","status":500}"#;
const BLOCKED: &str = r#"{"type":"about:blank","title":"Forbidden","status":403}"#;
const REFUSED: &str = r#"{"type":"about:blank","title":"Bad Request","status":400,"detail":"#;

impl ResponseFormat for Problem {
    fn respond(&self, rejection: Rejection<'_>, _: &Parts) -> Response<Bytes> {
        let problem = match rejection {
            Rejection::Limited(decision) => limited(decision),
            // The cause is for the log of the server, not for the caller.
            Rejection::Refused(error) if error.is_misconfigured() => Bytes::from_static(MISCONFIGURED.as_bytes()),
            Rejection::Refused(error) => format!("{REFUSED}{}}}", json!(error.to_string())).into(),
            Rejection::Blocked => Bytes::from_static(BLOCKED.as_bytes()),
            Rejection::Failed { .. } => Bytes::from_static(FAILED.as_bytes()),
        };

        let mut response = Response::new(problem);
        *response.status_mut() = rejection.status();
        response.headers_mut().insert(
            CONTENT_TYPE,
            const { HeaderValue::from_static("application/problem+json") },
        );
        response
    }
}

fn limited(decision: &Decision) -> Bytes {
    let is_banned = |policy: &PolicyDecision| policy.denial() == Some(Denial::Banned);
    if let [only] = decision.as_slice()
        && only.denies()
        && !matches!(only.denial(), Some(Denial::Banned | Denial::CostAboveLimit))
    {
        let named = only.named();
        return named
            .problem
            .get_or_init(|| with_names(LIMITED, &[&named.name], ""))
            .clone();
    }

    let names: SmallVec<[&str; 4]> = decision.deniers().map(|policy| policy.name()).collect();
    let begin = if decision.deniers().all(is_banned) {
        BANNED
    } else {
        LIMITED
    };
    with_names(begin, &names, &detail(decision))
}

/// The cost and the limit of each policy that never admits the cost.
pub(crate) fn detail(denied: &Decision) -> String {
    let above = denied
        .deniers()
        .filter(|policy| policy.denial() == Some(Denial::CostAboveLimit));
    let above = above.map(|policy| {
        let (name, cost, limit) = (policy.name(), policy.charge.cost, policy.limit());
        format!("{name}: costs {cost}, the limit is {limit}")
    });
    above.collect::<Vec<_>>().join("; ")
}

fn with_names(begin: &str, policies: &[&str], detail: &str) -> Bytes {
    let names = serde_json::to_string(policies).expect("texts are valid JSON");
    match detail {
        "" => format!("{begin}{names}}}").into(),
        detail => format!("{begin}{names},\"detail\":{}}}", json!(detail)).into(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Key, MemoryStore, Policy, SlidingLog, policy};

    /// The type of the problem of a request that policies deny for these reasons.
    fn type_of<const N: usize>(denials: [Denial; N]) -> String {
        let policies = [(); N].map(|()| Policy::new("default", SlidingLog::per_minute(100)));
        let context = Arc::new(policy::context(MemoryStore::new(), &policies));
        let denied = denials.iter().enumerate().map(|(position, denial)| PolicyDecision {
            denial: Some(*denial),
            ..PolicyDecision::plain(&context, position, Key::from("k"))
        });
        let problem = limited(&Decision::new(false, denied.collect()));
        let problem: serde_json::Value = serde_json::from_slice(&problem).unwrap();
        assert_eq!(problem["violated-policies"], json!(vec!["default"; N]));
        let (_, name) = problem["type"].as_str().unwrap().split_once('#').unwrap();
        name.to_owned()
    }

    #[test]
    fn a_denial_by_bans_alone_has_a_type_of_its_own() {
        assert_eq!(type_of([Denial::Banned]), "abnormal-usage-detected");
        assert_eq!(type_of([Denial::Banned; 2]), "abnormal-usage-detected");
        assert_eq!(type_of([Denial::Banned, Denial::QuotaExceeded]), "quota-exceeded");
        assert_eq!(type_of([Denial::QuotaExceeded, Denial::Banned]), "quota-exceeded");
        assert_eq!(type_of([Denial::QuotaExceeded]), "quota-exceeded");
        assert_eq!(type_of([Denial::CostAboveLimit]), "quota-exceeded");
    }
}
