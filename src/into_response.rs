//! Denials and failures as responses of axum.

use ::axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{Request, request::Parts};

use crate::{
    AcquireError, Denied,
    response::{Problem, RETRY_AFTER_FAILURE, Rejection, respond},
    store::StoreError,
};

/// The response as for a `GET` of `/`: a handler is left without the request. For a format that reads the request, or a gRPC
/// call, use [`Denied::response_to`].
impl IntoResponse for Denied {
    fn into_response(self) -> Response {
        self.response_to(&no_request()).map(Body::from)
    }
}

/// `503 Service Unavailable` with `Retry-After`, in the format [`Problem`].
///
/// ```
/// use axum::response::IntoResponse;
/// use tower_quota::store::{ErrorKind, StoreError};
///
/// let response = StoreError::new(ErrorKind::Unreachable, "connection refused").into_response();
/// assert_eq!(response.status(), 503);
/// assert_eq!(response.headers()["retry-after"], "1");
/// ```
impl IntoResponse for StoreError {
    fn into_response(self) -> Response {
        let failed = Rejection::Failed {
            error: &self,
            retry_after: RETRY_AFTER_FAILURE,
        };
        respond(&Problem, failed, &no_request()).map(Body::from)
    }
}

/// The response of the denial or of the failure.
impl IntoResponse for AcquireError {
    fn into_response(self) -> Response {
        match self {
            Self::Denied(denied) => denied.into_response(),
            Self::Store(error) => error.into_response(),
        }
    }
}

fn no_request() -> Parts {
    Request::new(()).into_parts().0
}
