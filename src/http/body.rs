use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::completed::{self, AwaitedCompletion};
use crate::decide::Release;

pin_project! {
    /// Response body of [`RateLimit`](crate::RateLimit): that of the inner service, or the layer's own.
    ///
    /// Where the compiler expects this type and finds the body of the inner service, as with `tower::util::option_layer`
    /// around a router of axum, the two services that are to be alternatives have different bodies. Use a layer
    /// [without policies](crate::RateLimitLayer#turning-limits-off) as the alternative.
    ///
    /// A layer of axum that names the type of the response, such as `map_response` of a function that takes an
    /// `axum::response::Response`, is not implemented around it within one tuple or `ServiceBuilder` (E0277). In two calls of
    /// `Router::layer` it is; in a tuple, a layer between them maps the body:
    ///
    /// ```
    /// use axum::{Router, body::Body, middleware::map_response, response::Response, routing::get};
    /// use http::Request;
    /// use tower::ServiceExt;
    /// use tower_http::map_response_body::MapResponseBodyLayer;
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, ResponseBody, SlidingLog};
    ///
    /// async fn stamp(mut response: Response) -> Response {
    ///     response.headers_mut().insert("x-stamp", 1.into());
    ///     response
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let hello = Policy::new("hello", SlidingLog::per_minute(1)).key(key::constant("all"));
    /// let limit = RateLimitLayer::new(MemoryStore::new(), hello);
    /// let to_axum = MapResponseBodyLayer::new(Body::new::<ResponseBody<Body>>);
    /// let app: Router = Router::new().route("/", get(async || "hi")).layer((map_response(stamp), to_axum, limit));
    ///
    /// for status in [200, 429] {
    ///     let Ok(response) = app.clone().oneshot(Request::new(Body::empty())).await;
    ///     assert_eq!(response.status(), status);
    ///     assert_eq!(response.headers()["x-stamp"], "1");
    /// }
    /// # }
    /// ```
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProj]
    enum Kind<B> {
        Inner {
            #[pin]
            body: B,
            // Of a gRPC call whose trailers are awaited.
            completion: Option<Box<AwaitedCompletion>>,
            // Of a request with slots, which are released at the end.
            release: Option<Release>,
        },
        Own {
            // Never empty, so that an empty body ends with the header section.
            content: Option<Bytes>,
        },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn inner(body: B, completion: Option<Box<AwaitedCompletion>>, release: Option<Release>) -> Self {
        Self {
            kind: Kind::Inner {
                body,
                completion,
                release,
            },
        }
    }

    pub(crate) fn own(content: Bytes) -> Self {
        Self {
            kind: Kind::Own {
                content: Some(content).filter(|content| !content.is_empty()),
            },
        }
    }
}

/// An empty body. Layers outside of this one use it for responses of their own, such as that of a `CorsLayer` to a preflight
/// request.
///
/// ```
/// use bytes::Bytes;
/// use http_body::Body;
/// use tower_quota::ResponseBody;
///
/// assert!(ResponseBody::<http_body_util::Full<Bytes>>::default().is_end_stream());
/// ```
impl<B> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::own(Bytes::new())
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes>,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            KindProj::Inner {
                mut body,
                completion,
                release,
            } => {
                let frame = completed::poll(completion.as_deref_mut(), || body.as_mut().poll_frame(cx));
                if completion.is_some() {
                    completed::observe_frame(completion, &frame, || body.is_end_stream());
                }
                if release.is_some() && (matches!(frame, Poll::Ready(None | Some(Err(_)))) || body.is_end_stream()) {
                    *release = None;
                }
                frame
            }
            KindProj::Own { content } => Poll::Ready(content.take().map(|content| Ok(Frame::data(content)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner {
                body,
                completion,
                release,
            } => {
                let ended = body.is_end_stream();
                // A server polls an empty body no further.
                if ended && let Some(release) = release {
                    release.now();
                }
                if ended && let Some(completion) = completion {
                    completion.end_of_body();
                }
                ended
            }
            Kind::Own { content } => content.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body, .. } => body.size_hint(),
            Kind::Own { content } => SizeHint::with_exact(content.as_ref().map_or(0, Bytes::len) as u64),
        }
    }
}

impl_debug!(ResponseBody[B], body => is_inner: matches!(body.kind, Kind::Inner { .. }));
