use std::time::Duration;

use http::StatusCode;

use crate::{Decision, key::KeyError, store::StoreError};

/// The reason why a request is not admitted.
///
/// ```
/// use std::time::Duration;
/// use http::StatusCode;
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog, response::Rejection};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(1)));
/// assert!(mails.check("42").await?.is_allowed());
///
/// let denied = mails.check("42").await?;
/// let rejection = Rejection::Limited(&denied);
/// assert_eq!(rejection.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(rejection.retry_after(), Some(Duration::from_secs(3_600)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Rejection<'a> {
    /// A limit denied it.
    Limited(&'a Decision),
    /// Its key cannot be extracted, or the limit that was [chosen](crate::limit::by()) for it is invalid.
    Refused(&'a KeyError),
    /// It fulfills a condition of [`RateLimitLayer::block`](crate::RateLimitLayer::block).
    Blocked,
    /// The store failed, and the failure mode is [`Closed`](crate::FailureMode::Closed).
    #[non_exhaustive]
    Failed {
        /// The failure, with its [kind](StoreError::kind).
        error: &'a StoreError,
        /// The wait before the next attempt: 1 s, and the [jitter](crate::RateLimitLayer::retry_jitter) of the layer.
        retry_after: Duration,
    },
}

impl Rejection<'_> {
    /// The HTTP status.
    ///
    /// | rejection | status |
    /// | --- | --- |
    /// | [`Limited`](Self::Limited) | `429 Too Many Requests` |
    /// | [`Refused`](Self::Refused) | `400 Bad Request`; `500 Internal Server Error` if the server is [at fault](KeyError::is_misconfigured) |
    /// | [`Blocked`](Self::Blocked) | `403 Forbidden` |
    /// | [`Failed`](Self::Failed) | `503 Service Unavailable` |
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limited(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Refused(error) if error.is_misconfigured() => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Refused(_) => StatusCode::BAD_REQUEST,
            Self::Blocked => StatusCode::FORBIDDEN,
            Self::Failed { .. } => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// The wait before the next attempt, the same in every field of the response.
    ///
    /// `None` if waiting does not help: the cost of the request is above the limit, the limit admits nothing, the key cannot be
    /// extracted, or the request is blocked.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Limited(decision) => decision.retry_after(),
            Self::Refused(_) | Self::Blocked => None,
            Self::Failed { retry_after, .. } => Some(*retry_after),
        }
    }
}

/// A mark in the extensions of a response that a layer or a handler of this process has made in place of a service: its
/// `Retry-After` does not come from another service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnRejection {
    /// Whether a limit denies the request.
    pub(crate) is_denial: bool,
}
