use bytes::Bytes;
use http::{HeaderValue, Response, header::CONTENT_TYPE, request::Parts};
use serde_json::json;
use smallvec::SmallVec;

use super::{format::ResponseFormat, rejection::Rejection};
use crate::Decision;

/// Responds with `application/problem+json` (RFC 9457).
///
/// The types and `violated-policies` are those of the IETF draft *RateLimit header fields for HTTP*; a refused request gets
/// `about:blank` with a `detail`, without one if the server is at fault, and so does a blocked one.
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
    r#""status":429,"violated-policies":["#,
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
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        response
    }
}

fn limited(decision: &Decision) -> Bytes {
    if let [only] = decision.as_slice()
        && only.denies()
    {
        return only.plan().problem.clone();
    }

    let violated = decision.policies().filter(|policy| policy.denies());
    let violated: SmallVec<[&str; 4]> = violated.map(|policy| policy.name()).collect();
    violates(&violated)
}

/// The problem of a request that the policies of these names denied.
pub(crate) fn violates(policies: &[&str]) -> Bytes {
    let names: usize = policies.iter().map(|name| name.len() + 3).sum();
    let mut problem = String::with_capacity(LIMITED.len() + names + 1);

    problem.push_str(LIMITED);
    for (position, name) in policies.iter().enumerate() {
        // A name needs no escaping in JSON (RFC 8259 §7).
        problem.push_str(if position > 0 { ",\"" } else { "\"" });
        problem.push_str(name);
        problem.push('"');
    }
    problem.push_str("]}");
    problem.into()
}
