use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{Request, Response, request::Parts};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{
    drain::{Content, Rejected},
    enforce::{Action, Admitted, Enforcer},
};
use crate::{
    ResponseBody,
    check::{PendingCheck, completed},
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
            waiting: Option<Waiting<S, B>>,
        },
        /// The request was held, and its turn has come. The service may not be ready.
        Turn {
            called: Option<(S, Request<B>)>,
            admitted: Option<(Admitted, Arc<Enforcer>)>,
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

/// What waits for a decision.
struct Waiting<S, B> {
    service: S,
    /// Whether the service was polled ready, and not cloned since.
    is_ready: bool,
    // In parts, as the keys were extracted from them.
    parts: Parts,
    body: B,
    enforcer: Arc<Enforcer>,
}

impl<S: Clone, B> Waiting<S, B> {
    /// Gives the readiness of the service, such as a permit, to other requests.
    fn release_readiness(&mut self) {
        if self.is_ready {
            self.service = self.service.clone();
            self.is_ready = false;
        }
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
                waiting: Some(Waiting {
                    service: ready,
                    is_ready: true,
                    parts,
                    body,
                    enforcer,
                }),
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
    S: Service<Request<B>, Response = Response<C>> + Clone,
{
    pub(crate) fn poll_completed(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Completed<B, C>, S::Error>> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProj::Pending { check, waiting } => {
                    let decision = Pin::new(&mut *check).poll(cx);
                    if check.is_held() {
                        // A turn is seconds away, and other requests need the permit meanwhile.
                        waiting.iter_mut().for_each(Waiting::release_readiness);
                    }
                    let decision = ready!(decision);
                    let Waiting {
                        mut service,
                        is_ready,
                        mut parts,
                        body,
                        enforcer,
                    } = waiting.take().expect("polled after it was ready");
                    match enforcer.act_on(decision, &mut parts) {
                        Action::Admit(admitted) => {
                            let request = Request::from_parts(parts, body);
                            let admitted = admitted.map(|admitted| (admitted, enforcer));
                            match is_ready {
                                true => State::Admitted {
                                    future: service.call(request),
                                    admitted,
                                },
                                false => State::Turn {
                                    called: Some((service, request)),
                                    admitted,
                                },
                            }
                        }
                        Action::Reject(rejected) => State::Rejected {
                            rejected: Some((rejected, body)),
                        },
                    }
                }
                StateProj::Turn { called, admitted } => {
                    let (service, _) = called.as_mut().expect("polled after it was ready");
                    let readiness = match admitted {
                        Some((admitted, _)) => completed::poll(&mut admitted.completion, || service.poll_ready(cx)),
                        None => service.poll_ready(cx),
                    };
                    let readiness = ready!(readiness);
                    let (mut service, request) = called.take().expect("it has just been polled");
                    let admitted = admitted.take();
                    if let Err(error) = readiness {
                        if let Some((admitted, _)) = admitted {
                            admitted.fail();
                        }
                        return Poll::Ready(Err(error));
                    }
                    State::Admitted {
                        future: service.call(request),
                        admitted,
                    }
                }
                StateProj::Admitted { future, admitted } => {
                    let result = match admitted {
                        Some((admitted, _)) => completed::poll(&mut admitted.completion, || future.poll(cx)),
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
    S: Service<Request<B>, Response = Response<C>> + Clone,
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
            State::Turn { .. } => "Turn",
            State::Admitted { .. } => "Admitted",
            State::Rejected { .. } => "Rejected",
        };
        write!(f, "ResponseFuture({state})")
    }
}
