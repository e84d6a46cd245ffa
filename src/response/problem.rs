use bytes::Bytes;
use http::{HeaderValue, Response, header::CONTENT_TYPE, request::Parts};
use serde_json::json;
use smallvec::SmallVec;

use super::{Rejection, ResponseFormat};
use crate::Decision;

/// Responds with `application/problem+json` (RFC 9457), as the IETF draft on rate limit fields has it.
///
/// ```json
/// {
///   "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
///   "title": "Request cannot be satisfied as assigned quota has been exceeded",
///   "status": 429,
///   "violated-policies": ["say-hi"]
/// }
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
const REFUSED: &str = r#"{"type":"about:blank","title":"Bad Request","status":400,"detail":"#;

impl ResponseFormat for Problem {
    fn respond(&self, rejection: Rejection<'_>, _: &Parts) -> Response<Bytes> {
        let problem = match rejection {
            Rejection::Limited(decision) => limited(decision),
            // What is wrong with the server is for its log.
            Rejection::Refused(error) if error.is_misconfigured() => Bytes::from_static(MISCONFIGURED.as_bytes()),
            Rejection::Refused(error) => format!("{REFUSED}{}}}", json!(error.to_string())).into(),
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
        return only.rendered().problem.clone();
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
