//! [`Decision`] as an extractor.

use ::axum::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    http::{StatusCode, request::Parts},
    response::{IntoResponse, Response},
};

use crate::Decision;

/// What the layer decided, in a handler behind it.
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_quota::{key, Decision, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// async fn hello(decision: Option<Decision>) -> String {
///     match decision {
///         Some(decision) => format!("you may say hello {} more times", decision.remaining()),
///         None => "hello".to_owned(), // the store failed, and the failure mode of the policy is `Open`
///     }
/// }
///
/// let policy = Policy::new("hello", SlidingLog::per_minute(10)).key(key::ip());
/// let app: Router = Router::new().route("/", get(hello).layer(RateLimitLayer::new(MemoryStore::new(), policy)));
/// # let _ = app;
/// ```
///
/// `Option<Decision>` is `None` where no limit was checked: no layer, no policy that applies, or a store that failed while
/// the [`FailureMode`](crate::FailureMode) is `Open`. A plain `Decision` answers 500 then.
impl<S: Send + Sync> FromRequestParts<S> for Decision {
    type Rejection = MissingDecision;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, MissingDecision> {
        parts.extensions.get::<Self>().cloned().ok_or(MissingDecision(()))
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for Decision {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}

/// A handler takes a [`Decision`], and none was made; the response is `500 Internal Server Error`.
#[derive(Debug)]
pub struct MissingDecision(());

impl std::fmt::Display for MissingDecision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(
            "no limit was checked for this request; put a `RateLimitLayer` around the handler, or take an \
             `Option<Decision>`, since a store that fails decides nothing",
        )
    }
}

impl std::error::Error for MissingDecision {}

impl IntoResponse for MissingDecision {
    fn into_response(self) -> Response {
        #[cfg(feature = "tracing")]
        tracing::error!(error = %self, "a handler cannot run");
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}
