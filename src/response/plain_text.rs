use bytes::Bytes;
use http::{HeaderValue, Response, header::CONTENT_TYPE, request::Parts};

use super::{format::ResponseFormat, rejection::Rejection, status_only::StatusOnly};

/// Responds with one line of text, as `text/plain; charset=utf-8`.
///
/// | rejection | text |
/// | --- | --- |
/// | limited | `Too many requests.` |
/// | refused | `Bad request.`, or `Internal server error.` if the server is at fault |
/// | blocked | `Forbidden.` |
/// | failed | `Temporarily unavailable.` |
///
/// ```
/// use http::Request;
/// use tower_quota::{key, response::{PlainText, Rejection, ResponseFormat}, KeyExtractor};
///
/// // No peer address on the request.
/// let (parts, ()) = Request::new(()).into_parts();
/// let error = key::ip().extract(&parts).unwrap_err();
///
/// let refused = PlainText.respond(Rejection::Refused(&error), &parts);
/// assert_eq!(refused.status(), 500);
/// assert_eq!(refused.body(), "Internal server error.\n");
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainText;

impl ResponseFormat for PlainText {
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        let text = match rejection {
            Rejection::Limited(_) => "Too many requests.\n",
            Rejection::Refused(error) if error.is_misconfigured() => "Internal server error.\n",
            Rejection::Refused(_) => "Bad request.\n",
            Rejection::Blocked => "Forbidden.\n",
            Rejection::Failed { .. } => "Temporarily unavailable.\n",
        };
        let mut response = StatusOnly
            .respond(rejection, parts)
            .map(|_| Bytes::from_static(text.as_bytes()));
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::KeyError;

    #[test]
    fn a_refusal_says_whose_fault_it_is() {
        let (parts, ()) = http::Request::new(()).into_parts();
        for (error, text) in [
            (KeyError::malformed("two users"), "Bad request.\n"),
            (KeyError::misconfigured("no peer"), "Internal server error.\n"),
        ] {
            assert_eq!(PlainText.respond(Rejection::Refused(&error), &parts).body(), text);
        }
    }
}
