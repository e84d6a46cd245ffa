use std::{
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    admitted::Admitted,
    completed,
    drain::{Bounds, Content, Drain, Rejected},
    enforce::{Action, Enforcer, Progress},
};
use crate::{RateLimitLayer, ResponseBody, decide::PendingCheck};

/// Middleware that limits how often a caller may use the inner service.
///
/// Made by a [`RateLimitLayer`]. The inner service is called after the decision, on the instance
/// that was ready. See the [crate documentation](crate) for an example.
///
/// # The inner service
///
/// | requirement | for a service that does not meet it |
/// | --- | --- |
/// | `Clone`, since a request that waits for the store keeps the clone that was ready | put a `tower::buffer::BufferLayer` inside of the layer |
/// | takes an `http::Request` of an `http_body::Body` and returns an `http::Response` | use a [`Limiter`](crate::Limiter) |
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
/// in a cluster two for each slot of the keys of the request, and more for refunds and slots that move; while the breaker is open it fails at once. A request that
/// [waits](crate::Policy::wait_up_to) gives it back, and waits for the service when it is admitted.
#[derive(Clone)]
pub struct RateLimit<S> {
    inner: S,
    enforcer: Arc<Enforcer>,
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit {
            inner,
            enforcer: self.enforcer.clone(),
        }
    }
}

impl<S, B, C> Service<Request<B>> for RateLimit<S>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    B: Body,
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
        let state = match self.enforcer.check(&mut parts) {
            Progress::Done(Action::Admit(admitted)) => {
                let request = Request::from_parts(parts, body);
                let future = self.inner.call(request);
                State::Admitted { future, admitted }
            }
            Progress::Done(Action::Reject(rejected)) => {
                // Ready and not called, it would keep its permit from the other clones.
                self.inner = self.inner.clone();
                State::rejected(rejected, body, self.enforcer.drain)
            }
            Progress::Pending(check) => {
                // The clone that was polled ready is the one to call; a fresh one takes its place.
                let fresh = self.inner.clone();
                let ready = mem::replace(&mut self.inner, fresh);
                let pending = Pending {
                    check,
                    service: ready,
                    is_ready: true,
                    parts,
                    body,
                    enforcer: self.enforcer.clone(),
                };
                State::Pending {
                    pending: Some(Box::new(pending)),
                }
            }
        };
        ResponseFuture { state }
    }
}

#[cfg(feature = "tonic")]
impl<S: tonic::server::NamedService> tonic::server::NamedService for RateLimit<S> {
    const NAME: &'static str = S::NAME;
}

impl_debug!(RateLimit[S], service => policies: service.enforcer.policies.newest().policies);

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
            // In a box, since it is larger than all other states.
            pending: Option<Box<Pending<S, B>>>,
        },
        /// The request has waited and is admitted. The service may not be ready.
        AfterWait {
            called: Option<(S, Request<B>)>,
            admitted: Option<Admitted>,
        },
        /// The inner service was called.
        Admitted {
            #[pin]
            future: F,
            // None if no policy applied.
            admitted: Option<Admitted>,
        },
        /// The layer responds, when it has read of the content of the request what is to be read.
        Rejected {
            rejected: Option<Rejected>,
            #[pin]
            drain: Option<Drain<B>>,
        },
    }
}

/// A decision, and what waits for it.
struct Pending<S, B> {
    check: PendingCheck,
    service: S,
    /// Whether the service was polled ready, and not cloned since.
    is_ready: bool,
    // In parts, as the keys were extracted from them.
    parts: Parts,
    body: B,
    enforcer: Arc<Enforcer>,
}

impl<S, B: Body, F> State<S, B, F> {
    fn rejected(mut rejected: Rejected, body: B, drain: Option<Bounds>) -> Self {
        Self::Rejected {
            drain: match drain {
                Some(bounds) => Drain::new(body, bounds, &mut rejected),
                None => Drain::of_arrived(body, &rejected),
            },
            rejected: Some(rejected),
        }
    }
}

impl<S, B, C> Future for ResponseFuture<S, B, S::Future>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    B: Body,
{
    type Output = Result<Response<ResponseBody<C>>, S::Error>;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProj::Pending { pending } => {
                    let waiting = pending.as_deref_mut().expect("polled after it was ready");
                    let decision = Pin::new(&mut waiting.check).poll(cx);
                    if waiting.check.is_held() && mem::take(&mut waiting.is_ready) {
                        // It may wait for seconds, and other requests need the permit of the ready service meanwhile.
                        waiting.service = waiting.service.clone();
                    }
                    let decision = ready!(decision);
                    let Pending {
                        check,
                        mut service,
                        is_ready,
                        mut parts,
                        body,
                        enforcer,
                    } = *pending.take().expect("it has just been polled");
                    let action = enforcer.act_on(decision, &mut parts);
                    // What the request owes is counted by the decision now.
                    drop(check);
                    match action {
                        Action::Admit(admitted) => {
                            let request = Request::from_parts(parts, body);
                            match is_ready {
                                true => State::Admitted {
                                    future: service.call(request),
                                    admitted,
                                },
                                false => State::AfterWait {
                                    called: Some((service, request)),
                                    admitted,
                                },
                            }
                        }
                        Action::Reject(rejected) => State::rejected(rejected, body, enforcer.drain),
                    }
                }
                StateProj::AfterWait { called, admitted } => {
                    let (service, _) = called.as_mut().expect("polled after it was ready");
                    let readiness =
                        ready!(completed::poll(Admitted::completion_of(admitted), || service.poll_ready(cx)));
                    let (mut service, request) = called.take().expect("it has just been polled");
                    let admitted = admitted.take();
                    if let Err(error) = readiness {
                        Admitted::fail(admitted);
                        return Poll::Ready(Err(error));
                    }
                    State::Admitted {
                        future: service.call(request),
                        admitted,
                    }
                }
                StateProj::Admitted { future, admitted } => {
                    let result = ready!(completed::poll(Admitted::completion_of(admitted), || future.poll(cx)));
                    let admitted = admitted.take();
                    return Poll::Ready(match result {
                        Ok(response) => Ok(Admitted::annotate(admitted, response)),
                        Err(error) => {
                            Admitted::fail(admitted);
                            Err(error)
                        }
                    });
                }
                StateProj::Rejected { rejected, drain } => {
                    let content = match drain.as_pin_mut() {
                        Some(drain) => ready!(drain.poll(cx)),
                        None => Content::Unread,
                    };
                    let rejected = rejected.take().expect("polled after it was ready");
                    return Poll::Ready(Ok(rejected.into_response(content).map(ResponseBody::own)));
                }
            };
            this.state.set(next);
        }
    }
}

impl_debug!(ResponseFuture[S, B, F], _future =>);
