use std::{error::Error, fmt, mem, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_LENGTH, Entry, RETRY_AFTER},
    request::Parts,
};

use crate::{
    Decision,
    http::{
        Presentation,
        headers::{CDN_CACHE_CONTROL, is_for_shared_caches, retry_after},
    },
    key::KeyError,
    store::StoreError,
};

/// Builds the response to a request that is not admitted.
///
/// To the response of any format, the layer adds
///
/// * `Retry-After` in whole seconds, rounded up and at least 1, if waiting helps and the status is neither a success nor a
///   redirect (in gRPC the wait is part of the status);
/// * the [rate limit fields](crate::Headers), if a limit denied the request, unless the status is 3xx or it is for shared caches;
/// * `Cache-Control: no-store`, since a denial is for one caller at one time;
/// * `Content-Length` in place of the content, if the request is a `HEAD`;
/// * `Connection: close` on HTTP/1.x, if the content of the request is [not read](crate::RateLimitLayer#large-request-bodies).
///
/// `Retry-After`, `Cache-Control` and `Content-Length` that the format has set stay as they are.
///
/// The [default](super) denies a gRPC call with `200 OK` and a gRPC status, and the client selects that by
/// its content type. [A service without gRPC](super#a-service-without-grpc) uses [`Problem`](super::Problem).
///
/// # Closures
///
/// A closure or function `Fn(Rejection<'_>, &Parts) -> Response<Bytes>` is a format. The types of the parameters must be
/// written, since the compiler does not infer them:
///
/// ```
/// use bytes::Bytes;
/// use http::{Request, Response, StatusCode, request::Parts};
/// use http_body_util::{BodyExt, Empty};
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, response::Rejection, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let shop = Policy::new("shop", SlidingLog::per_minute(1)).key(key::constant("all"));
/// let layer = RateLimitLayer::new(MemoryStore::new(), shop).format(|rejection: Rejection<'_>, parts: &Parts| {
///     let text = match rejection {
///         Rejection::Limited(_) => format!("{} is crowded", parts.uri),
///         _ => "the shop is closed".to_owned(),
///     };
///     let mut response = Response::new(Bytes::from(text));
///     *response.status_mut() = rejection.status();
///     response
/// });
/// let service = layer.layer(service_fn(async |_: Request<Empty<Bytes>>| {
///     Ok::<_, std::convert::Infallible>(Response::new(Empty::<Bytes>::new()))
/// }));
/// let get = || service.clone().oneshot(Request::get("/shop").body(Empty::new()).unwrap());
///
/// assert_eq!(get().await?.status(), StatusCode::OK);
///
/// let denied = get().await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(denied.headers()["retry-after"], "60");
/// assert_eq!(denied.headers()["ratelimit"], r#""shop";r=0;t=60"#);
/// assert_eq!(denied.into_body().collect().await?.to_bytes(), "/shop is crowded");
/// # Ok(())
/// # }
/// ```
///
/// # A status of your own
///
/// This format responds with `401 Unauthorized` to a request without a key. gRPC has [`Grpc::without_key`] for it.
///
/// ```
/// use bytes::Bytes;
/// use http::{HeaderValue, Request, Response, StatusCode, header::WWW_AUTHENTICATE, request::Parts};
/// use tower_quota::{key::KeyError, response::{Problem, Rejection, ResponseFormat}};
///
/// fn unauthorized(rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
///     let mut response = Problem.respond(rejection, parts);
///     if matches!(rejection, Rejection::Refused(error) if error.is_absent()) {
///         let problem = r#"{"type":"about:blank","title":"Unauthorized","status":401}"#;
///         *response.status_mut() = StatusCode::UNAUTHORIZED;
///         *response.body_mut() = problem.into();
///         response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
///     }
///     response
/// }
///
/// let (parts, ()) = Request::get("/").body(())?.into_parts();
/// let absent = KeyError::absent("the request has no token");
/// let refused = unauthorized.respond(Rejection::Refused(&absent), &parts);
/// assert_eq!(refused.status(), StatusCode::UNAUTHORIZED);
/// assert_eq!(refused.headers()["www-authenticate"], "Bearer");
///
/// let malformed = KeyError::malformed("the request has two tokens");
/// let refused = unauthorized.respond(Rejection::Refused(&malformed), &parts);
/// assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
/// # Ok::<(), http::Error>(())
/// ```
///
/// [`Grpc::without_key`]: super::Grpc::without_key
///
/// # A choice at run time
///
/// A box of a format is one:
///
/// ```
/// use http::Request;
/// use tower_quota::response::{self, Rejection, ResponseFormat};
///
/// let of_site = |is_for_browsers: bool| -> Box<dyn ResponseFormat> {
///     match is_for_browsers {
///         true => Box::new(response::html(|_, _| "<h1>Too many requests</h1>")),
///         false => Box::new(response::Problem),
///     }
/// };
///
/// let (parts, ()) = Request::new(()).into_parts();
/// let blocked = of_site(true).respond(Rejection::Blocked, &parts);
/// assert_eq!(blocked.headers()["content-type"], "text/html; charset=utf-8");
/// ```
///
/// # A success in place of an error
///
/// The response may be a success. This format serves a cheaper result when a limit denies the search or the store fails:
///
/// ```
/// use bytes::Bytes;
/// use http::{Request, Response, request::Parts};
/// use http_body_util::{BodyExt, Empty};
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, response::{Problem, Rejection, ResponseFormat}, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// struct PopularResults;
///
/// impl ResponseFormat for PopularResults {
///     fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
///         match rejection {
///             Rejection::Limited(_) | Rejection::Failed { .. } => Response::new("popular results".into()),
///             refused => Problem.respond(refused, parts),
///         }
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let search = Policy::new("search", SlidingLog::per_minute(1)).key(key::constant("all"));
/// let layer = RateLimitLayer::new(MemoryStore::new(), search).format(PopularResults);
/// let service = layer.layer(service_fn(async |_: Request<Empty<Bytes>>| {
///     Ok::<_, std::convert::Infallible>(Response::new(http_body_util::Full::from("your results")))
/// }));
///
/// for (body, state) in [("your results", r#""search";r=0;t=60"#), ("popular results", r#""search";r=0;t=60"#)] {
///     let response = service.clone().oneshot(Request::new(Empty::new())).await?;
///     assert!(response.status().is_success());
///     assert_eq!(response.headers()["ratelimit"], state);
///     assert!(!response.headers().contains_key("retry-after"));
///     assert_eq!(response.into_body().collect().await?.to_bytes(), body);
/// }
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a response format",
    note = "implement `ResponseFormat`, pass a closure `|rejection: Rejection<'_>, parts: &Parts| -> Response<Bytes> {{ .. }}`, \
            or leave `.format(..)` out for problem+json"
)]
pub trait ResponseFormat: Send + Sync + 'static {
    /// The response to a request with these parts.
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes>;
}

impl<F> ResponseFormat for F
where
    F: Fn(Rejection<'_>, &Parts) -> Response<Bytes> + Send + Sync + 'static,
{
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        self(rejection, parts)
    }
}

/// A format that is chosen at run time.
impl ResponseFormat for Box<dyn ResponseFormat> {
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        (**self).respond(rejection, parts)
    }
}

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
    /// Its key cannot be extracted, or the limit that was [chosen](crate::Policy::with_limit_fn) for it is invalid.
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

    /// The wait before the next attempt, in `Retry-After` as whole seconds, rounded up, and in `RetryInfo` and the pushback of
    /// gRPC. It includes the [jitter](crate::RateLimitLayer::retry_jitter) of the layer.
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

#[cfg(any(feature = "axum", feature = "tonic"))]
impl Rejection<'_> {
    /// Responds to a request with this error of its handler. What is not possible does not become possible by waiting.
    pub(crate) fn of_error<R>(error: &StoreError, respond: impl FnOnce(Rejection<'_>) -> R) -> R {
        let is_invalid = error.kind() == crate::store::ErrorKind::Invalid;
        let source = error.source().filter(|_| is_invalid);
        let impossible;
        let rejection = if let Some(refused) = source.and_then(|source| source.downcast_ref()) {
            Rejection::Refused(refused)
        } else if source.is_some_and(<dyn Error>::is::<Blocked>) {
            Rejection::Blocked
        } else if is_invalid {
            impossible = KeyError::misconfigured(error.to_string());
            Rejection::Refused(&impossible)
        } else {
            let retry_after = RETRY_AFTER_FAILURE;
            Rejection::Failed { error, retry_after }
        };
        respond(rejection)
    }
}

/// Why what remains for a request is not read.
pub(crate) struct Blocked;

impl_error!(Blocked, _blocked => "the request is blocked");

impl StoreError {
    /// Why a layer asks the store for nothing: there is no key, or the request is blocked.
    pub(crate) fn of_refusal(refused: Option<KeyError>) -> Self {
        match refused {
            Some(error) => Self::invalid(error.to_string()).with_source(error),
            None => Self::invalid(Blocked.to_string()).with_source(Blocked),
        }
    }
}

/// A mark in the extensions of a response that a layer or a handler of this process has made in place of a service: its
/// `Retry-After` does not come from another service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnRejection;

/// The wait in a response to a request for which the store failed.
pub(crate) const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// Builds the response to a request that is not admitted.
///
/// Every such response is built here, so its rules hold for every format and status. A layer adds `Connection` when it sends
/// the response, since that depends on the content of the request.
pub(crate) fn respond(format: &dyn ResponseFormat, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
    let mut response = format.respond(rejection, parts);
    let status = response.status();
    // RFC 9110 §9.3.2: no content in the response to HEAD; §8.6: a Content-Length is that of the response to GET, which has none
    // with 204, and with 304 that of a 200.
    if parts.method == Method::HEAD {
        let length = mem::take(response.body_mut()).len();
        if !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
            response.headers_mut().entry(CONTENT_LENGTH).or_insert(length.into());
        }
    }

    let headers = response.headers_mut();
    // RFC 6585 §4: a 429 must not be stored. RFC 9111 §4.2.2: a 200 without this field may be, and gRPC sends its errors as
    // 200.
    let is_private = match headers.entry(CACHE_CONTROL) {
        Entry::Vacant(vacant) => {
            vacant.insert(const { HeaderValue::from_static("no-store") });
            // A CDN regards its own field alone (RFC 9213 §2.2).
            !headers.contains_key(CDN_CACHE_CONTROL) || !is_for_shared_caches(headers)
        }
        Entry::Occupied(_) => !is_for_shared_caches(headers),
    };
    // In gRPC the wait is part of the status. With a redirect it would be the time until the other location is asked for (RFC 9110
    // §10.2.3).
    if let Some(wait) = rejection
        .retry_after()
        .filter(|_| !status.is_success() && !status.is_redirection())
        && let Entry::Vacant(vacant) = headers.entry(RETRY_AFTER)
    {
        vacant.insert(retry_after(wait));
    }
    if let Rejection::Limited(decision) = rejection
        && is_private
        && !status.is_redirection()
    {
        write_fields(decision, headers);
    }
    if !matches!(rejection, Rejection::Limited(_)) {
        response.extensions_mut().insert(OwnRejection);
    }
    response
}

/// Adds the rate limit fields of a decision; those of nested layers as these add them, the inner one first.
pub(crate) fn write_fields(decision: &Decision, headers: &mut HeaderMap) {
    if let Some([outer, inner]) = decision.joined() {
        write_fields(inner, headers);
        write_fields(outer, headers);
    } else if let Some(policy) = decision.as_slice().first() {
        Presentation::of(&policy.context).fields.write(decision, headers);
    }
}
