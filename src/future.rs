use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
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
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, F> {
        /// The store is asked; the service and the request wait.
        Asking {
            pending: Pending,
            enforcer: Arc<Enforcer>,
            // In parts, as the keys were found in them.
            waiting: Option<(S, Parts, B)>,
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
    pub(crate) fn asking(pending: Pending, ready: S, (parts, body): (Parts, B), enforcer: Arc<Enforcer>) -> Self {
        Self {
            state: State::Asking {
                pending,
                enforcer,
                waiting: Some((ready, parts, body)),
            },
        }
    }

    pub(crate) fn passed(future: F, counted: Option<Counted>) -> Self {
        Self {
            state: State::Passed { future, counted },
        }
    }

    pub(crate) fn rejected(response: Response<Bytes>) -> Self {
        Self {
            state: State::Rejected {
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
                StateProj::Asking {
                    pending,
                    enforcer,
                    waiting,
                } => {
                    let decision = ready!(Pin::new(pending).poll(cx));
                    let (mut ready, mut parts, body) = waiting.take().expect("polled after it was ready");
                    match enforcer.conclude(decision, &mut parts) {
                        Verdict::Pass(counted) => State::Passed {
                            future: ready.call(Request::from_parts(parts, body)),
                            counted,
                        },
                        Verdict::Reject(response) => State::Rejected {
                            response: Some(response),
                        },
                    }
                }
                StateProj::Passed { future, counted } => {
                    let mut response = ready!(future.poll(cx))?;
                    if let Some(counted) = counted.take() {
                        counted.report(&mut response);
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
