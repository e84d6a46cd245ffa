use bytes::Bytes;
use http::{Response, request::Parts};

use super::rejection::Rejection;

/// Builds the response to a request that is not admitted.
///
/// To the response of any format, the layer adds
///
/// * `Retry-After` in whole seconds, rounded up and at least 1, if waiting helps and the status is not a success (in gRPC
///   the wait is part of the status);
/// * the [rate limit fields](crate::Headers), if a limit denied the request;
/// * `Cache-Control: no-store`, since a denial is for one caller at one time;
/// * `Content-Length` in place of the content, if the request is a `HEAD`;
/// * `Connection: close` on HTTP/1.x, if the content of the request is [not read](crate::RateLimitLayer#large-request-bodies).
///
/// `Retry-After`, `Cache-Control` and `Content-Length` that the format has set stay as they are.
///
/// The default, [`Negotiated`](super::Negotiated), denies a gRPC call with `200 OK` and a gRPC status, and the client selects that by
/// its content type. [A service without gRPC](crate::response#a-service-without-grpc) uses [`Problem`](super::Problem).
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
/// [`Grpc::without_key`]: crate::response::Grpc::without_key
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
