use bytes::Bytes;
use http::{Response, request::Parts};

use super::{format::ResponseFormat, rejection::Rejection};

/// Responds with the status and no content.
///
/// ```
/// use http::Request;
/// use tower_quota::{key, response::{Rejection, ResponseFormat, StatusOnly}, KeyExtractor};
///
/// // No peer address on the request.
/// let (parts, ()) = Request::new(()).into_parts();
/// let error = key::ip().extract(&parts).unwrap_err();
///
/// let refused = StatusOnly.respond(Rejection::Refused(&error), &parts);
/// assert_eq!(refused.status(), 500);
/// assert!(refused.body().is_empty());
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct StatusOnly;

impl ResponseFormat for StatusOnly {
    fn respond(&self, rejection: Rejection<'_>, _: &Parts) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = rejection.status();
        response
    }
}
