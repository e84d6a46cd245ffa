//! Formats of closures that return what axum turns into a response.

use std::{
    pin::pin,
    sync::atomic::{AtomicBool, Ordering},
    task::{Context, Poll, Waker},
};

use axum::{
    body::{Body as AxumBody, to_bytes},
    response::IntoResponse,
};
use bytes::Bytes;
use http::{Response, request::Parts};
use http_body::Body;

use super::{
    format::{Rejection, ResponseFormat},
    text::status_only,
};

/// Responds with what a closure returns, if axum turns it into a response.
///
/// The status is that of the returned response: `200 OK`, unless the closure sets another one such as
/// [`Rejection::status`].
///
/// ```
/// use axum::{Json, Router, body::Body, routing::get};
/// use http::{Request, StatusCode};
/// use http_body_util::BodyExt;
/// use serde_json::json;
/// use tower::ServiceExt;
/// use tower_quota::{key, response, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let policy = Policy::new("hello", SlidingLog::per_minute(1)).key(key::constant("all"));
/// let layer = RateLimitLayer::new(MemoryStore::new(), policy)
///     .format(response::axum(|rejection, parts| (rejection.status(), Json(json!({ "path": parts.uri.path() })))));
/// let app: Router = Router::new().route("/hello", get(async || "hi").layer(layer));
/// let get = || app.clone().oneshot(Request::get("/hello").body(Body::empty()).unwrap());
///
/// assert_eq!(get().await?.status(), StatusCode::OK);
///
/// let denied = get().await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(denied.headers()["retry-after"], "60");
/// assert_eq!(denied.headers()["ratelimit"], r#""hello";r=0;t=60"#);
/// assert_eq!(denied.headers()["content-type"], "application/json");
/// assert_eq!(denied.into_body().collect().await?.to_bytes(), r#"{"path":"/hello"}"#);
/// # Ok(())
/// # }
/// ```
///
/// # Streams
///
/// The body must have a known length and be ready at once, as that of a string, `Json`, `Html`, bytes or a template.
/// A stream, such as a file or server-sent events, is not read: the response has the status of the rejection and no content, and the
/// first such response is logged as an error.
pub fn axum<F, R>(response: F) -> impl ResponseFormat
where
    F: Fn(Rejection<'_>, &Parts) -> R + Send + Sync + 'static,
    R: IntoResponse,
{
    let logged = AtomicBool::new(false);
    move |rejection: Rejection<'_>, parts: &Parts| {
        let (head, body) = response(rejection, parts).into_response().into_parts();
        match content(body) {
            Some(content) => Response::from_parts(head, content),
            None => {
                if !logged.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        status = rejection.status().as_u16(),
                        "a format returned a body that is not ready at once; the response has no content"
                    );
                }
                status_only(rejection)
            }
        }
    }
}

/// The content of a body that has a known length and is ready at once.
fn content(body: AxumBody) -> Option<Bytes> {
    let length = usize::try_from(body.size_hint().exact()?).ok()?;
    let content = pin!(to_bytes(body, length));
    match content.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(content) => content.ok().filter(|content| content.len() == length),
        Poll::Pending => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::store::{ErrorKind, StoreError};

    fn respond<R: IntoResponse + 'static>(response: impl Fn() -> R + Send + Sync + 'static) -> Response<Bytes> {
        let (parts, ()) = http::Request::new(()).into_parts();
        let rejection = Rejection::Failed {
            error: &StoreError::new(ErrorKind::Timeout, "late"),
            retry_after: Duration::from_secs(1),
        };
        axum(move |_, _| response()).respond(rejection, &parts)
    }

    #[test]
    fn what_is_ready_at_once_is_the_content() {
        assert_eq!(respond(|| "later").body(), "later");
        assert_eq!(respond(|| "later").status(), 200);
        assert!(respond(|| ()).body().is_empty());
        assert_eq!(respond(|| (rejected(), "later")).status(), 418);
    }

    fn rejected() -> http::StatusCode {
        http::StatusCode::IM_A_TEAPOT
    }

    /// A body of two frames with a known length, of which the second may not be ready.
    struct Halves {
        frames: Vec<Option<&'static str>>,
    }

    impl Body for Halves {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
            match self.frames.pop() {
                Some(Some(text)) => Poll::Ready(Some(Ok(http_body::Frame::data(Bytes::from_static(text.as_bytes()))))),
                Some(None) => Poll::Pending,
                None => Poll::Ready(None),
            }
        }

        fn size_hint(&self) -> http_body::SizeHint {
            http_body::SizeHint::with_exact(6)
        }
    }

    #[test]
    fn several_frames_are_one_content() {
        let response = respond(|| {
            AxumBody::new(Halves {
                frames: vec![Some("ter"), Some("lat")],
            })
        });
        assert_eq!(response.body(), "latter");
    }

    #[test]
    fn a_body_that_is_not_ready_leaves_the_status_of_the_rejection() {
        for frames in [vec![None, Some("lat")], vec![Some("lat")], vec![None]] {
            let response = respond(move || AxumBody::new(Halves { frames: frames.clone() }));
            assert_eq!(response.status(), 503);
            assert!(response.body().is_empty());
        }
        let stream = respond(|| {
            AxumBody::new(http_body_util::StreamBody::new(tokio_stream::empty::<
                Result<http_body::Frame<Bytes>, std::convert::Infallible>,
            >()))
        });
        assert_eq!(stream.status(), 503);
    }
}
