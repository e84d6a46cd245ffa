//! Responses to rejected requests.
//!
//! A [`ResponseFormat`] builds the response. The default, [`Negotiated`], uses [`Grpc`] for gRPC calls and [`Problem`] for
//! all other requests; [`Plain`] and [`Empty`] send less, and [`from_fn`] makes a format of a function.
//!
//! # gRPC-Web in browsers
//!
//! A denied gRPC-Web call gets its status in the header section, and no body, as tonic sends its own errors. A browser shows
//! these fields to scripts of another origin only if CORS exposes them, so a server for such scripts has a `CorsLayer`
//! outside of the [`RateLimitLayer`](crate::RateLimitLayer):
//!
//! ```
//! use tower_http::cors::{Any, CorsLayer};
//!
//! let cors = CorsLayer::new()
//!     .allow_origin(Any)
//!     .allow_headers(Any)
//!     .expose_headers(tower_quota::Headers::names());
//! # let _ = cors;
//! ```
//!
//! A denied call in Chromium 156, with the layer outside and inside of tonic-web's `GrpcWebLayer`, which makes no difference:
//!
//! | client | call | `Headers::names()` exposed | not exposed |
//! | --- | --- | --- | --- |
//! | `@connectrpc/connect-web` 2.2 | unary, server streaming | `ResourceExhausted`, message, details, pushback | `Unknown`, "missing trailer" |
//! | `grpc-web` 2.1, binary and text | unary | 8, message, details, pushback | 2, "Incomplete response" |
//! | `grpc-web` 2.1, binary and text | server streaming | 8, message, details, pushback | the stream ends without an error |
//!
//! `tests/clients/run browser` makes the table.

mod grpc;
mod negotiated;
mod problem;

use std::{fmt, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header::CONTENT_TYPE, request::Parts};

pub(crate) use self::grpc::{GRPC_MESSAGE, GRPC_RETRY_PUSHBACK, GRPC_STATUS, GRPC_STATUS_DETAILS};
pub(crate) use self::problem::violates;
pub use self::{grpc::Grpc, negotiated::Negotiated, problem::Problem};

use crate::{Decision, key::KeyError, store::StoreError};

/// The reason why a request is not admitted.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Rejection<'a> {
    /// A limit denied it.
    Limited(&'a Decision),
    /// Its key cannot be extracted.
    Refused(&'a KeyError),
    /// The store did not answer, and the failure mode is [`Closed`](crate::FailureMode::Closed).
    Failed {
        /// The failure, with its [kind](StoreError::kind).
        error: &'a StoreError,
        /// The wait before the next attempt: 1 s, and the [jitter](crate::RateLimitLayer::retry_jitter) of the layer.
        retry_after: Duration,
    },
}

impl Rejection<'_> {
    /// The status for HTTP: 429, 400 (500 if the server is at fault), or 503.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limited(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Refused(error) if error.is_misconfigured() => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Refused(_) => StatusCode::BAD_REQUEST,
            Self::Failed { .. } => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// The wait before the next attempt, the same in every field of the response; `None` if waiting does not help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Limited(decision) => decision.retry_after(),
            Self::Refused(_) => None,
            Self::Failed { retry_after, .. } => Some(*retry_after),
        }
    }
}

/// Builds the response to a request that is not admitted.
///
/// Whatever the format and the status of the response, the layer adds
///
/// * `Cache-Control: no-store`, unless the format has set that field;
/// * `Retry-After` with [`Rejection::retry_after`], unless the format has set that field or the status is 2xx;
/// * the rate limit fields, if the request was limited;
/// * the length in place of the content, if the request is a `HEAD`;
/// * `Connection: close` on HTTP/1.x, if the content of the request is [not read](crate::RateLimitLayer#large-request-bodies).
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
/// A response may be a success. This format serves a cheaper result when a limit denies the search or the store fails:
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
///         Rejection::Limited(_) | Rejection::Failed { .. } => Response::new("popular results".into()),
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
    message = "`{Self}` is not a response format",
    note = "implement `ResponseFormat`, use `response::from_fn(|rejection, parts| ..)`, or leave `.format(..)` out for problem+json"
)]
pub trait ResponseFormat: Send + Sync + 'static {
    /// The response to a request with these parts.
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes>;
}

/// Responds with one line of text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl ResponseFormat for Plain {
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        let text = match rejection {
            Rejection::Limited(_) => "Too many requests.\n",
            Rejection::Refused(error) if error.is_misconfigured() => "Internal server error.\n",
            Rejection::Refused(_) => "Bad request.\n",
            Rejection::Failed { .. } => "Temporarily unavailable.\n",
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

/// Responds with the status and no content.
#[derive(Clone, Copy, Debug, Default)]
pub struct Empty;

impl ResponseFormat for Empty {
    fn respond(&self, rejection: Rejection<'_>, _: &Parts) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = rejection.status();
        response
    }
}

/// Responds with what a function returns.
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
