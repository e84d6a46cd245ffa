//! Formats of closures that return text.

use std::fmt::Display;

use bytes::Bytes;
use http::{HeaderValue, Response, header::CONTENT_TYPE, request::Parts};

use super::format::{Rejection, ResponseFormat};

/// Responds with the JSON that a closure returns, as `application/json` with the status of the rejection.
///
/// The closure returns JSON text, or a value that prints as JSON, such as `serde_json::Value`.
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
///     json!({ "code": rejection.status().as_u16(), "wait": rejection.retry_after().map(|wait| wait.as_secs()) })
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
pub fn json<F, T>(content: F) -> impl ResponseFormat
where
    F: Fn(Rejection<'_>, &Parts) -> T + Send + Sync + 'static,
    T: Display,
{
    text(const { HeaderValue::from_static("application/json") }, content)
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
pub fn html<F, T>(content: F) -> impl ResponseFormat
where
    F: Fn(Rejection<'_>, &Parts) -> T + Send + Sync + 'static,
    T: Display,
{
    text(const { HeaderValue::from_static("text/html; charset=utf-8") }, content)
}

fn text<F, T>(content_type: HeaderValue, content: F) -> impl ResponseFormat
where
    F: Fn(Rejection<'_>, &Parts) -> T + Send + Sync + 'static,
    T: Display,
{
    move |rejection: Rejection<'_>, parts: &Parts| {
        let mut response = Response::new(Bytes::from(content(rejection, parts).to_string()));
        *response.status_mut() = rejection.status();
        response.headers_mut().insert(CONTENT_TYPE, content_type.clone());
        response
    }
}

/// Responds with one line of text, as `text/plain; charset=utf-8`.
///
/// | rejection | text |
/// | --- | --- |
/// | limited | `Too many requests.` |
/// | refused | `Bad request.`, or `Internal server error.` if the server is at fault |
/// | blocked | `Forbidden.` |
/// | unread body | the [error](super::BodyError), such as `the body is longer than 65536 bytes.` |
/// | failed | `Temporarily unavailable.` |
///
/// ```
/// use http::Request;
/// use tower_quota::{key, response::{PlainText, Rejection, ResponseFormat}, KeyExtractor};
///
/// // No peer address on the request.
/// let (parts, ()) = Request::new(()).into_parts();
/// let error = key::ip().extract(&parts).unwrap_err();
///
/// let refused = PlainText.respond(Rejection::Refused(&error), &parts);
/// assert_eq!(refused.status(), 500);
/// assert_eq!(refused.body(), "Internal server error.\n");
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainText;

impl ResponseFormat for PlainText {
    fn respond(&self, rejection: Rejection<'_>, parts: &Parts) -> Response<Bytes> {
        let text: Bytes = match rejection {
            Rejection::Limited(_) => "Too many requests.\n".into(),
            Rejection::Refused(error) if error.is_misconfigured() => "Internal server error.\n".into(),
            Rejection::Refused(_) => "Bad request.\n".into(),
            Rejection::Blocked => "Forbidden.\n".into(),
            Rejection::Unread(error) => format!("{error}.\n").into(),
            Rejection::Failed { .. } => "Temporarily unavailable.\n".into(),
        };
        let mut response = StatusOnly.respond(rejection, parts).map(|_| text);
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        response
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::KeyError;

    #[test]
    fn a_refusal_says_whose_fault_it_is() {
        let (parts, ()) = http::Request::new(()).into_parts();
        for (error, text) in [
            (KeyError::malformed("two users"), "Bad request.\n"),
            (KeyError::misconfigured("no peer"), "Internal server error.\n"),
        ] {
            assert_eq!(PlainText.respond(Rejection::Refused(&error), &parts).body(), text);
        }
    }
}
