use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::enforce::{Action, Enforcer, Progress};
use crate::{RateLimitLayer, ResponseBody, ResponseFuture};

/// Middleware that limits how often a caller may use the inner service.
///
/// Made by a [`RateLimitLayer`] or by [`RateLimit::new`]. The inner service is called after the decision, on the instance
/// that was ready. See the [crate documentation](crate) for an example.
///
/// # The inner service
///
/// | requirement | for a service that does not meet it |
/// | --- | --- |
/// | `Clone`, since a request that waits for the store keeps the clone that was ready | put a `tower::buffer::BufferLayer` inside of the layer |
/// | takes an `http::Request` and returns an `http::Response` | use a [`Limiter`](crate::Limiter) |
/// | the body of its response is an `http_body::Body<Data = Bytes>` | map the body, with `tower_http::map_response_body` or `response.map(..)` |
///
/// # Readiness
///
/// `RateLimit` is ready when the inner service is, so a request is denied only after the inner service was ready for it. The
/// services of an axum `Router` are always ready. Around a service that is not, put a layer such as `tower::load_shed` inside of
/// this one, so that requests are denied while the service is busy.
///
/// A check holds the readiness of the inner service, such as the permit of a `tower::limit::ConcurrencyLimit`, until the store
/// replies; a denial gives it back. A [`MemoryStore`](crate::MemoryStore) replies at once. With a
/// [`RedisStore`](crate::RedisStore) the check takes at most two [deadlines](crate::RedisStore#deadlines), 200 ms by default, and
/// in a cluster two for each slot of the keys of the request; while the breaker is open it fails at once. A request that
/// [waits for its turn](crate::Policy::wait_up_to) gives it back, and waits for the service at its turn.
#[derive(Clone)]
pub struct RateLimit<S> {
    inner: S,
    enforcer: Arc<Enforcer>,
}

impl<S> RateLimit<S> {
    /// Limits a service as the layer does: `RateLimit::new(service, layer)` is `layer.layer(service)`.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Request, Response, StatusCode};
    /// use http_body_util::Empty;
    /// use tower::{ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimit, RateLimitLayer, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let hello = service_fn(async |_: Request<Empty<Bytes>>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Empty::<Bytes>::new()))
    /// });
    /// let policy = Policy::new("hello", SlidingLog::per_minute(1)).key(key::constant("all"));
    /// let service = RateLimit::new(hello, RateLimitLayer::new(MemoryStore::new(), policy));
    ///
    /// let admitted = service.clone().oneshot(Request::new(Empty::new())).await?;
    /// assert_eq!(admitted.status(), StatusCode::OK);
    /// assert_eq!(admitted.headers()["ratelimit"], r#""hello";r=0;t=60"#);
    ///
    /// let denied = service.oneshot(Request::new(Empty::new())).await?;
    /// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    /// assert_eq!(denied.headers()["retry-after"], "60");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn new(inner: S, layer: RateLimitLayer) -> Self {
        Self {
            inner,
            enforcer: layer.into_enforcer(),
        }
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::new(inner, self.clone())
    }
}

impl<S, B, C> Service<Request<B>> for RateLimit<S>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    C: Body<Data = Bytes>,
{
    type Response = Response<ResponseBody<C>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B, S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        match self.enforcer.check(&mut parts) {
            Progress::Done(Action::Admit(admitted)) => {
                let request = Request::from_parts(parts, body);
                ResponseFuture::admitted(self.inner.call(request), admitted, &self.enforcer)
            }
            Progress::Done(Action::Reject(rejected)) => {
                // Ready and not called, it would keep its permit from the other clones.
                self.inner = self.inner.clone();
                ResponseFuture::rejected(rejected, body)
            }
            Progress::Pending(check) => {
                // The clone that was polled ready is the one to call; a fresh one takes its place.
                let fresh = self.inner.clone();
                let ready = mem::replace(&mut self.inner, fresh);
                ResponseFuture::pending(check, ready, (parts, body), self.enforcer.clone())
            }
        }
    }
}

#[cfg(feature = "tonic")]
impl<S: tonic::server::NamedService> tonic::server::NamedService for RateLimit<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: fmt::Debug> fmt::Debug for RateLimit<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("inner", &self.inner)
            .field("policies", &self.enforcer.policies.newest().policies)
            .finish_non_exhaustive()
    }
}
