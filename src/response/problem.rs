use bytes::Bytes;
use http::{HeaderValue, Response, header::CONTENT_TYPE, request::Parts};
use serde_json::json;

use super::{Rejection, ResponseFormat};

/// Answers with `application/problem+json` (RFC 9457), as the IETF draft on rate limit fields has it.
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

const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

impl ResponseFormat for Problem {
    fn respond(&self, rejection: Rejection<'_>, _: &Parts) -> Response<Bytes> {
        let status = rejection.status();
        let problem = match rejection {
            Rejection::Limited(decision) => {
                let violated = decision
                    .policies()
                    .filter(|policy| policy.denies())
                    .map(|policy| policy.name());
                json!({
                    "type": QUOTA_EXCEEDED,
                    "title": "Request cannot be satisfied as assigned quota has been exceeded",
                    "status": status.as_u16(),
                    "violated-policies": violated.collect::<Vec<_>>(),
                })
            }
            // What is wrong with the server is for its log.
            Rejection::Refused(error) if error.is_misconfigured() => json!({
                "type": "about:blank",
                "title": "Internal Server Error",
                "status": status.as_u16(),
            }),
            Rejection::Refused(error) => json!({
                "type": "about:blank",
                "title": "Bad Request",
                "status": status.as_u16(),
                "detail": error.to_string(),
            }),
            Rejection::Failed(_) => json!({
                "type": REDUCED_CAPACITY,
                "title": "Request cannot be satisfied due to temporary server capacity constraints",
                "status": status.as_u16(),
            }),
        };

        let mut response = Response::new(Bytes::from(problem.to_string()));
        *response.status_mut() = status;
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        response
    }
}
