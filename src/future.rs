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
    ResponseBody, awaited,
    check::PendingCheck,
    enforce::{Action, Admitted, Enforcer},
    rejected::{Content, Rejected},
};

pin_project! {
    /// Response future of [`RateLimit`](crate::RateLimit).
    pub struct ResponseFuture<S, B, F> {
        #[pin]
        state: State<S, B, F>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, F> {
        /// The decision is pending; the service and the request wait.
        Pending {
            check: PendingCheck,
            // In parts, as the keys were extracted from them.
            waiting: Option<(S, Parts, B, Arc<Enforcer>)>,
        },
        /// The inner service was called.
        Admitted {
            #[pin]
            future: F,
            // None if no policy applied.
            admitted: Option<(Admitted, Arc<Enforcer>)>,
        },
        /// The layer responds. The content of the request is not read yet.
        Rejected {
            rejected: Option<(Rejected, B)>,
        },
    }
}

/// A completed request, before the content of a rejected one is dropped or drained.
pub(crate) enum Completed<B, C> {
    Admitted(Response<ResponseBody<C>>),
    Rejected(Rejected, B),
}

impl<S, B, F> ResponseFuture<S, B, F> {
    pub(crate) fn pending(check: PendingCheck, ready: S, (parts, body): (Parts, B), enforcer: Arc<Enforcer>) -> Self {
        Self {
            state: State::Pending {
                check,
                waiting: Some((ready, parts, body, enforcer)),
            },
        }
    }

    #[inline]
    pub(crate) fn admitted(future: F, admitted: Option<Admitted>, enforcer: &Arc<Enforcer>) -> Self {
        let admitted = admitted.map(|admitted| (admitted, enforcer.clone()));
        Self {
            state: State::Admitted { future, admitted },
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
    pub(crate) fn poll_completed(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Completed<B, C>, S::Error>> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProj::Pending { check, waiting } => {
                    let decision = ready!(Pin::new(check).poll(cx));
                    let (mut ready, mut parts, body, enforcer) = waiting.take().expect("polled after it was ready");
                    match enforcer.act_on(decision, &mut parts) {
                        Action::Admit(admitted) => State::Admitted {
                            future: ready.call(Request::from_parts(parts, body)),
                            admitted: admitted.map(|admitted| (admitted, enforcer)),
                        },
                        Action::Reject(rejected) => State::Rejected {
                            rejected: Some((rejected, body)),
                        },
                    }
                }
                StateProj::Admitted { future, admitted } => {
                    let result = match admitted {
                        Some((admitted, _)) => awaited::poll(&mut admitted.completion, || future.poll(cx)),
                        None => future.poll(cx),
                    };
                    let result = match (ready!(result), admitted.take()) {
                        (Ok(response), Some((admitted, enforcer))) => Ok(enforcer.annotate(response, admitted)),
                        (Ok(response), None) => Ok(response.map(|body| ResponseBody::inner(body, None, None))),
                        (Err(error), Some((admitted, _))) => {
                            admitted.fail();
                            Err(error)
                        }
                        (Err(error), None) => Err(error),
                    };
                    return Poll::Ready(result.map(Completed::Admitted));
                }
                StateProj::Rejected { rejected } => {
                    let (rejected, body) = rejected.take().expect("polled after it was ready");
                    return Poll::Ready(Ok(Completed::Rejected(rejected, body)));
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
        Poll::Ready(Ok(match ready!(self.poll_completed(cx))? {
            Completed::Admitted(response) => response,
            Completed::Rejected(rejected, _) => rejected.into_response(Content::Unread).map(ResponseBody::own),
        }))
    }
}

impl<S, B, F> fmt::Debug for ResponseFuture<S, B, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Pending { .. } => "Pending",
            State::Admitted { .. } => "Admitted",
            State::Rejected { .. } => "Rejected",
        };
        write!(f, "ResponseFuture({state})")
    }
}
