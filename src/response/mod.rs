//! What a caller is told who may not pass.

mod problem;

use bytes::Bytes;
use http::{Response, StatusCode, request::Parts};

pub use self::problem::Problem;

use crate::{Decision, key::KeyError, store::StoreError};

/// Why a request may not pass.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Rejection<'a> {
    /// A limit denied it.
    Limited(&'a Decision),
    /// It has no key.
    Refused(&'a KeyError),
    /// The store did not answer, and the failure mode is [`Closed`](crate::FailureMode::Closed).
    Failed(&'a StoreError),
}

impl Rejection<'_> {
    /// The status for HTTP: 429, 400 (500 if the server is at fault), or 503.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limited(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Refused(error) if error.is_misconfigured() => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Refused(_) => StatusCode::BAD_REQUEST,
            Self::Failed(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// Writes the answer to a request that may not pass.
///
/// The layer adds `Retry-After` and the rate limit fields, unless the format has set them, and `Cache-Control: no-store`
/// to what was limited or failed.
///
/// ```
/// use bytes::Bytes;
/// use http::{Response, request::Parts};
/// use tower_quota::response::{Rejection, ResponseFormat};
///
/// struct Plain;
///
/// impl ResponseFormat for Plain {
///     fn respond(&self, rejection: Rejection<'_>, _: &Parts) -> Response<Bytes> {
///         let text = match rejection {
///             Rejection::Limited(_) => "slow down",
///             _ => "come back later",
///         };
///         let mut response = Response::new(Bytes::from_static(text.as_bytes()));
///         *response.status_mut() = rejection.status();
///         response
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not write answers",
    note = "implement `ResponseFormat`, or leave `.format(..)` out for problem+json"
)]
pub trait ResponseFormat: Send + Sync + 'static {
    /// The answer to a request with these parts. The body of one to `HEAD` is not sent.
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes>;
}
