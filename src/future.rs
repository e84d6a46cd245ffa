use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::{
    ResponseBody,
    enforce::{Counted, Enforcer, Verdict},
    limiter::Pending,
};

pin_project! {
    /// The future of a [`RateLimit`](crate::RateLimit) service.
    pub struct ResponseFuture<S, B, F> {
        #[pin]
        state: State<S, B, F>,
        enforcer: Arc<Enforcer>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, F> {
        /// The store is asked; the service and the request wait.
        Asking {
            pending: Pending,
            waiting: Option<(S, Request<B>)>,
        },
        /// The service behind was called.
        Passed {
            #[pin]
            future: F,
            counted: Option<Counted>,
        },
        Rejected {
            response: Option<Response<Bytes>>,
        },
    }
}

impl<S, B, F> ResponseFuture<S, B, F> {
    pub(crate) fn asking(pending: Pending, ready: S, request: Request<B>, enforcer: Arc<Enforcer>) -> Self {
        Self {
            state: State::Asking {
                pending,
                waiting: Some((ready, request)),
            },
            enforcer,
        }
    }
}

impl<S, B> ResponseFuture<S, B, S::Future>
where
    S: Service<Request<B>>,
{
    pub(crate) fn decided(verdict: Verdict, ready: &mut S, request: Request<B>, enforcer: Arc<Enforcer>) -> Self {
        Self {
            state: State::follow(verdict, ready, request),
            enforcer,
        }
    }
}

impl<S, B> State<S, B, S::Future>
where
    S: Service<Request<B>>,
{
    fn follow(verdict: Verdict, ready: &mut S, request: Request<B>) -> Self {
        match verdict {
            Verdict::Pass(counted) => Self::Passed {
                future: ready.call(request),
                counted,
            },
            Verdict::Reject(response) => Self::Rejected {
                response: Some(response),
            },
        }
    }
}

impl<S, B, C> Future for ResponseFuture<S, B, S::Future>
where
    S: Service<Request<B>, Response = Response<C>>,
{
    type Output = Result<Response<ResponseBody<C>>, S::Error>;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProj::Asking { pending, waiting } => {
                    let decision = ready!(Pin::new(pending).poll(cx));
                    let (mut ready, request) = waiting.take().expect("polled after it was ready");
                    let (mut parts, body) = request.into_parts();
                    let verdict = this.enforcer.conclude(decision, &mut parts);
                    State::follow(verdict, &mut ready, Request::from_parts(parts, body))
                }
                StateProj::Passed { future, counted } => {
                    let mut response = ready!(future.poll(cx))?;
                    if let Some(counted) = counted.take() {
                        this.enforcer.report(counted, &mut response);
                    }
                    return Poll::Ready(Ok(response.map(ResponseBody::passed)));
                }
                StateProj::Rejected { response } => {
                    let response = response.take().expect("polled after it was ready");
                    return Poll::Ready(Ok(response.map(ResponseBody::own)));
                }
            };
            this.state.set(next);
        }
    }
}

impl<S, B, F> fmt::Debug for ResponseFuture<S, B, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Asking { .. } => "Asking",
            State::Passed { .. } => "Passed",
            State::Rejected { .. } => "Rejected",
        };
        write!(f, "ResponseFuture({state})")
    }
}
