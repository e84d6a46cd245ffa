//! Formats of closures that return text.

use std::fmt::Display;

use bytes::Bytes;
use http::{HeaderValue, Response, header::CONTENT_TYPE, request::Parts};

use super::format::{Rejection, ResponseFormat};

/// Responds with the JSON that a closure returns, as `application/json` with the status of the rejection.
///
/// The closure returns a value, whose strings are escaped. A format in place of this one can respond with JSON text.
///
/// ```
/// use bytes::Bytes;
/// use http::{Request, Response, StatusCode};
/// use http_body_util::{BodyExt, Empty};
/// use serde_json::json;
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, response, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let policy = Policy::new("hello", SlidingLog::per_minute(1)).key(key::constant("all"));
/// let layer = RateLimitLayer::new(MemoryStore::new(), policy).format(response::json(|rejection, _| {
///     json!({ "code": rejection.status().as_u16(), "wait": rejection.retry_after().map(|wait| wait.as_secs_f64().ceil() as u64) })
/// }));
/// let service = layer.layer(service_fn(async |_: Request<Empty<Bytes>>| {
///     Ok::<_, std::convert::Infallible>(Response::new(Empty::<Bytes>::new()))
/// }));
///
/// let admitted = service.clone().oneshot(Request::new(Empty::new())).await?;
/// assert_eq!(admitted.status(), StatusCode::OK);
///
/// let denied = service.oneshot(Request::new(Empty::new())).await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(denied.headers()["retry-after"], "60");
/// assert_eq!(denied.headers()["ratelimit"], r#""hello";r=0;t=60"#);
/// assert_eq!(denied.headers()["content-type"], "application/json");
/// assert_eq!(denied.into_body().collect().await?.to_bytes(), r#"{"code":429,"wait":60}"#);
/// # Ok(())
/// # }
/// ```
pub fn json(
    content: impl Fn(Rejection<'_>, &Parts) -> serde_json::Value + Send + Sync + 'static,
) -> impl ResponseFormat {
    content_of(const { HeaderValue::from_static("application/json") }, content)
}

/// Responds with the page that a closure returns, as `text/html; charset=utf-8` with the status of the rejection.
///
/// The closure returns HTML text, or a value that prints as HTML, such as a template. Values from the request, such as its
/// path, must be escaped.
///
/// ```
/// use bytes::Bytes;
/// use http::{Request, Response, StatusCode};
/// use http_body_util::{BodyExt, Empty};
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, response, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let policy = Policy::new("hello", SlidingLog::per_minute(1)).key(key::constant("all"));
/// let layer = RateLimitLayer::new(MemoryStore::new(), policy)
///     .format(response::html(|rejection, _| format!("<h1>{}</h1>", rejection.status())));
/// let service = layer.layer(service_fn(async |_: Request<Empty<Bytes>>| {
///     Ok::<_, std::convert::Infallible>(Response::new(Empty::<Bytes>::new()))
/// }));
///
/// let admitted = service.clone().oneshot(Request::new(Empty::new())).await?;
/// assert_eq!(admitted.status(), StatusCode::OK);
///
/// let denied = service.oneshot(Request::new(Empty::new())).await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(denied.headers()["retry-after"], "60");
/// assert_eq!(denied.headers()["ratelimit"], r#""hello";r=0;t=60"#);
/// assert_eq!(denied.headers()["content-type"], "text/html; charset=utf-8");
/// assert_eq!(denied.into_body().collect().await?.to_bytes(), "<h1>429 Too Many Requests</h1>");
/// # Ok(())
/// # }
/// ```
pub fn html<T: Display>(content: impl Fn(Rejection<'_>, &Parts) -> T + Send + Sync + 'static) -> impl ResponseFormat {
    content_of(const { HeaderValue::from_static("text/html; charset=utf-8") }, content)
}

/// Responds with the text that a closure returns, as `text/plain; charset=utf-8` with the status of the rejection.
///
/// ```
/// use http::Request;
/// use tower_quota::{key, response::{self, Rejection, ResponseFormat}, KeyExtractor};
///
/// // No peer address on the request.
/// let (parts, ()) = Request::new(()).into_parts();
/// let error = key::ip().extract(&parts).unwrap_err();
///
/// let format = response::text(|rejection, _| rejection.status());
/// let refused = format.respond(Rejection::Refused(&error), &parts);
/// assert_eq!(refused.status(), 500);
/// assert_eq!(refused.headers()["content-type"], "text/plain; charset=utf-8");
/// assert_eq!(refused.body(), "500 Internal Server Error");
/// ```
pub fn text<T: Display>(content: impl Fn(Rejection<'_>, &Parts) -> T + Send + Sync + 'static) -> impl ResponseFormat {
    content_of(const { HeaderValue::from_static("text/plain; charset=utf-8") }, content)
}

fn content_of<T: Display>(
    content_type: HeaderValue,
    content: impl Fn(Rejection<'_>, &Parts) -> T + Send + Sync + 'static,
) -> impl ResponseFormat {
    move |rejection: Rejection<'_>, parts: &Parts| {
        let mut response = status_only(rejection).map(|_| content(rejection, parts).to_string().into());
        response.headers_mut().insert(CONTENT_TYPE, content_type.clone());
        response
    }
}

/// A response with the status and no content.
pub(super) fn status_only(rejection: Rejection<'_>) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    *response.status_mut() = rejection.status();
    response
}
