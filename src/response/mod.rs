//! What a caller is told who may not pass.
//!
//! A [`ResponseFormat`] writes the answer. The default, [`Negotiated`], answers gRPC calls as [`Grpc`] does and everything
//! else as [`Problem`]; [`Plain`] and [`Empty`] say less, and [`from_fn`] says what you like.

mod grpc;
mod negotiated;
mod problem;

use std::fmt;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header::CONTENT_TYPE, request::Parts};

pub(crate) use self::problem::violates;
pub use self::{grpc::Grpc, negotiated::Negotiated, problem::Problem};

use crate::{Decision, key::KeyError, store::StoreError};

/// Why a request may not pass.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Rejection<'a> {
    /// A limit denied it.
    Limited(&'a Decision),
    /// It has no key.
    Refused(&'a KeyError),
    /// The store did not answer, for this [reason](StoreError::kind), and the failure mode is
    /// [`Closed`](crate::FailureMode::Closed).
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
/// To an answer that is no success the layer adds `Retry-After`, and `Cache-Control: no-store` to what was limited or
/// failed, unless the format has set them. It adds the rate limit fields to what was limited.
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
///
/// An answer need not be a refusal. This one serves something less to who asks too often, and while the store is away:
///
/// ```
/// use bytes::Bytes;
/// use http::{Request, Response};
/// use http_body_util::{BodyExt, Empty};
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, response::{self, Rejection, ResponseFormat}, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let search = Policy::new("search", SlidingLog::per_minute(1)).key(key::constant("all"));
/// let layer = RateLimitLayer::new(MemoryStore::new(), search).format(response::from_fn(|rejection, parts| {
///     match rejection {
///         Rejection::Limited(_) | Rejection::Failed(_) => Response::new("popular results".into()),
///         refused => response::Problem.respond(refused, parts),
///     }
/// }));
/// let service = layer.layer(service_fn(async |_: Request<Empty<Bytes>>| {
///     Ok::<_, std::convert::Infallible>(Response::new(http_body_util::Full::from("your results")))
/// }));
///
/// for body in ["your results", "popular results"] {
///     let response = service.clone().oneshot(Request::new(Empty::new())).await?;
///     assert!(response.status().is_success());
///     assert_eq!(response.into_body().collect().await?.to_bytes(), body);
/// }
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not write answers",
    note = "implement `ResponseFormat`, use `response::from_fn(|rejection, parts| ..)`, or leave `.format(..)` out for problem+json"
)]
pub trait ResponseFormat: Send + Sync + 'static {
    /// The answer to a request with these parts. The body of one to `HEAD` is not sent.
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes>;
}

/// Answers with one line of text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl ResponseFormat for Plain {
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        let text = match rejection {
            Rejection::Limited(_) => "Too many requests.\n",
            Rejection::Refused(error) if error.is_misconfigured() => "Internal server error.\n",
            Rejection::Refused(_) => "Bad request.\n",
            Rejection::Failed(_) => "Temporarily unavailable.\n",
        };
        let mut response = Empty
            .respond(rejection, parts)
            .map(|_| Bytes::from_static(text.as_bytes()));
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        response
    }
}

/// Answers with the status alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Empty;

impl ResponseFormat for Empty {
    fn respond(&self, rejection: Rejection<'_>, _: &Parts) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = rejection.status();
        response
    }
}

/// Answers as a function does.
///
/// ```
/// use bytes::Bytes;
/// use http::Response;
/// use tower_quota::{key, response::{self, Rejection}, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// let policy = Policy::new("everybody", SlidingLog::per_second(100)).key(key::constant("all"));
/// let layer = RateLimitLayer::new(MemoryStore::new(), policy).format(response::from_fn(|rejection, _| {
///     let text = match rejection {
///         Rejection::Limited(_) => "the shop is crowded",
///         _ => "the shop is closed",
///     };
///     let response = Response::builder().status(rejection.status()).body(text.into());
///     response.unwrap_or_default()
/// }));
/// # let _ = layer;
/// ```
pub fn from_fn<F>(f: F) -> FromFn<F>
where
    F: Fn(Rejection<'_>, &Parts) -> Response<Bytes> + Send + Sync + 'static,
{
    FromFn(f)
}

/// A [`ResponseFormat`] made by [`from_fn`].
#[derive(Clone, Copy)]
#[must_use]
pub struct FromFn<F>(F);

impl<F> ResponseFormat for FromFn<F>
where
    F: Fn(Rejection<'_>, &Parts) -> Response<Bytes> + Send + Sync + 'static,
{
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        (self.0)(rejection, parts)
    }
}

impl<F> fmt::Debug for FromFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FromFn(<fn>)")
    }
}
