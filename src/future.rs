use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{Request, Response, request::Parts};
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::{
    ResponseBody,
    check::Pending,
    drain::{Content, Rejected},
    enforce::{Counted, Enforcer, Verdict},
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
            // In parts, as the keys were found in them.
            waiting: Option<(S, Parts, B, Arc<Enforcer>)>,
        },
        /// The service behind was called.
        Passed {
            #[pin]
            future: F,
            counted: Option<(Counted, Arc<Enforcer>)>,
        },
        /// The layer responds. The content of the request is not read yet.
        Rejected {
            rejected: Option<(Rejected, B)>,
        },
    }
}

/// The outcome of a request, before the content of a rejected one is dropped or drained.
pub(crate) enum Outcome<B, C> {
    Passed(Response<C>),
    Rejected(Rejected, B),
}

impl<S, B, F> ResponseFuture<S, B, F> {
    pub(crate) fn asking(pending: Pending, ready: S, (parts, body): (Parts, B), enforcer: Arc<Enforcer>) -> Self {
        Self {
            state: State::Asking {
                pending,
                waiting: Some((ready, parts, body, enforcer)),
            },
        }
    }

    pub(crate) fn passed(future: F, counted: Option<(Counted, Arc<Enforcer>)>) -> Self {
        Self {
            state: State::Passed { future, counted },
        }
    }

    pub(crate) fn rejected(rejected: Rejected, body: B) -> Self {
        Self {
            state: State::Rejected {
                rejected: Some((rejected, body)),
            },
        }
    }
}

impl<S, B, C> ResponseFuture<S, B, S::Future>
where
    S: Service<Request<B>, Response = Response<C>>,
{
    pub(crate) fn poll_outcome(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Outcome<B, C>, S::Error>> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProj::Asking { pending, waiting } => {
                    let decision = ready!(Pin::new(pending).poll(cx));
                    let (mut ready, mut parts, body, enforcer) = waiting.take().expect("polled after it was ready");
                    match enforcer.conclude(decision, &mut parts) {
                        Verdict::Pass(counted) => State::Passed {
                            future: ready.call(Request::from_parts(parts, body)),
                            counted: counted.map(|counted| (counted, enforcer)),
                        },
                        Verdict::Reject(rejected) => State::Rejected {
                            rejected: Some((rejected, body)),
                        },
                    }
                }
                StateProj::Passed { future, counted } => {
                    let mut response = ready!(future.poll(cx))?;
                    if let Some((counted, enforcer)) = counted.take() {
                        enforcer.report(counted, &mut response);
                    }
                    return Poll::Ready(Ok(Outcome::Passed(response)));
                }
                StateProj::Rejected { rejected } => {
                    let (rejected, body) = rejected.take().expect("polled after it was ready");
                    return Poll::Ready(Ok(Outcome::Rejected(rejected, body)));
                }
            };
            this.state.set(next);
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
        Poll::Ready(Ok(match ready!(self.poll_outcome(cx))? {
            Outcome::Passed(response) => response.map(ResponseBody::passed),
            Outcome::Rejected(rejected, _) => rejected.into_response(Content::Unread).map(ResponseBody::own),
        }))
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
