use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use crate::{
    ResponseBody, ResponseFuture,
    enforce::{Enforcer, Progress, Verdict},
};

/// A service whose callers are limited, made by a [`RateLimitLayer`](crate::RateLimitLayer).
///
/// The service behind is called only after the decision, on the instance that was ready. See the
/// [crate documentation](crate) for an example.
#[derive(Clone)]
pub struct RateLimit<S> {
    inner: S,
    enforcer: Arc<Enforcer>,
}

impl<S> RateLimit<S> {
    pub(crate) fn new(inner: S, enforcer: Arc<Enforcer>) -> Self {
        Self { inner, enforcer }
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
        match self.enforcer.begin(&mut parts) {
            Progress::Done(Verdict::Pass(counted)) => {
                let request = Request::from_parts(parts, body);
                let counted = counted.map(|counted| (counted, self.enforcer.clone()));
                ResponseFuture::passed(self.inner.call(request), counted)
            }
            Progress::Done(Verdict::Reject(rejected)) => {
                // Ready and not called, it would keep its permit from the other clones.
                self.inner = self.inner.clone();
                ResponseFuture::rejected(rejected, body)
            }
            Progress::Asking(pending) => {
                // The clone that was polled ready is the one to call; a fresh one takes its place.
                let fresh = self.inner.clone();
                let ready = mem::replace(&mut self.inner, fresh);
                ResponseFuture::asking(pending, ready, (parts, body), self.enforcer.clone())
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
            .field("policies", &self.enforcer.policies)
            .finish_non_exhaustive()
    }
}
