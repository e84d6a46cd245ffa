use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use http::{Method, Request, Response, header::CONTENT_LENGTH, request::Parts};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep_until};
use tower_layer::Layer;
use tower_service::Service;

use super::{Bounds, ReadBodyLayer, Settings};
use crate::{
    ResponseBody,
    decision::response::{BodyError, Rejection, respond},
    middleware::drain::{Content, ContentIsRead, Drain, Rejected},
};

impl<S> Layer<S> for ReadBodyLayer {
    type Service = ReadBody<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ReadBody {
            inner,
            settings: self.settings.clone(),
        }
    }
}

/// Middleware that reads the body of each request before the inner service is called.
///
/// Made by a [`ReadBodyLayer`]; see there for an example. The body of a request is made from [`Bytes`], as those of axum,
/// tonic and reqwest and `http_body_util::Full` are; around a service that takes another one, map it. The service is ready when
/// the inner service is. A request whose body is not complete at once gives the readiness back, and waits for the inner service
/// again when it has been read, so a slow client holds no permit.
#[derive(Clone)]
pub struct ReadBody<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S, B, C> Service<Request<B>> for ReadBody<S>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    B: Body + From<Bytes> + Unpin,
    C: Body<Data = Bytes>,
{
    type Response = Response<ResponseBody<C>>;
    type Error = S::Error;
    type Future = ReadBodyFuture<S, B, S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (parts, body) = request.into_parts();
        if !is_read(&parts.method, &body) {
            let future = self.inner.call(Request::from_parts(parts, body));
            return ReadBodyFuture {
                state: State::Called { future },
            };
        }

        // The clone that was polled ready is the one to call, or to drop so that it keeps no permit.
        let fresh = self.inner.clone();
        let service = std::mem::replace(&mut self.inner, fresh);
        let bounds = self.settings.bounds;
        let state = match Read::is_declared_too_large(&parts, &body, bounds) {
            true => State::reject(
                (&self.settings, &BodyError::too_large(bounds.bytes)),
                &parts,
                body,
                Content::Unread,
            ),
            false => State::Reading {
                read: Some(Read::new(body, bounds)),
                waiting: Some((service, true, parts)),
                settings: self.settings.clone(),
            },
        };
        ReadBodyFuture { state }
    }
}

#[cfg(feature = "tonic")]
impl<S: tonic::server::NamedService> tonic::server::NamedService for ReadBody<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: fmt::Debug> fmt::Debug for ReadBody<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadBody")
            .field("inner", &self.inner)
            .field("bounds", &self.settings.bounds)
            .finish_non_exhaustive()
    }
}

pin_project! {
    /// Response future of [`ReadBody`].
    pub struct ReadBodyFuture<S, B, F> {
        #[pin]
        state: State<S, B, F>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, F> {
        Reading {
            read: Option<Read<B>>,
            // The service, whether it is ready, and the head of the request.
            waiting: Option<(S, bool, Parts)>,
            settings: Arc<Settings>,
        },
        // The body was read. The service may not be ready.
        Waiting {
            called: Option<(S, bool, Request<B>)>,
        },
        Called {
            #[pin]
            future: F,
        },
        Draining {
            #[pin]
            drain: Option<Drain<B>>,
            content: Content,
            rejected: Option<Rejected>,
        },
    }
}

impl<S, B: Body, F> State<S, B, F> {
    /// Responds with this error, after the rest of the body is drained if it is to be.
    fn reject((settings, error): (&Settings, &BodyError), parts: &Parts, rest: B, content: Content) -> Self {
        let response = respond(&*settings.format, Rejection::Unread(error), parts);
        let rejected = match content {
            Content::Unread => Rejected::new(response, parts),
            // Reading has sent the `100 Continue` that the client may have awaited.
            Content::Begun | Content::Read => Rejected::new(response, parts).without_continue(),
        };
        let drained = settings.drained.filter(|_| content != Content::Read);
        let drain = drained.and_then(|bounds| Drain::new(rest, bounds, &rejected));
        Self::Draining {
            drain,
            content,
            rejected: Some(rejected),
        }
    }
}

impl<S, B, C> Future for ReadBodyFuture<S, B, S::Future>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    B: Body + From<Bytes> + Unpin,
{
    type Output = Result<Response<ResponseBody<C>>, S::Error>;

    /// # Panics
    ///
    /// If it is polled again after it was ready, like most futures.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProj::Reading {
                    read,
                    waiting,
                    settings,
                } => {
                    let reading = read.as_mut().expect("polled after it was ready");
                    let Poll::Ready(result) = reading.poll(cx) else {
                        // The rest may take seconds, and other requests need the permit meanwhile.
                        if let Some((service, is_ready @ true, _)) = waiting {
                            *service = service.clone();
                            *is_ready = false;
                        }
                        return Poll::Pending;
                    };
                    let read = read.take().expect("it has just been polled");
                    let (service, is_ready, mut parts) = waiting.take().expect("it waits with the body");
                    match result.map(|content| (inserted(settings, &mut parts, &content), content)) {
                        Ok((Ok(()), content)) => State::Waiting {
                            called: Some((service, is_ready, Request::from_parts(parts, content.into()))),
                        },
                        Ok((Err(error), _)) => {
                            State::reject((settings, &error), &parts, read.into_rest(), Content::Read)
                        }
                        Err(error) => State::reject((settings, &error), &parts, read.into_rest(), Content::Begun),
                    }
                }
                StateProj::Waiting { called } => {
                    let (service, is_ready, _) = called.as_mut().expect("polled after it was ready");
                    if !*is_ready {
                        ready!(service.poll_ready(cx))?;
                    }
                    let (mut service, _, request) = called.take().expect("it has just been polled");
                    State::Called {
                        future: service.call(request),
                    }
                }
                StateProj::Called { future } => {
                    let response = ready!(future.poll(cx))?;
                    return Poll::Ready(Ok(response.map(|body| ResponseBody::inner(body, None, None))));
                }
                StateProj::Draining {
                    drain,
                    content,
                    rejected,
                } => {
                    let content = match drain.as_pin_mut() {
                        Some(drain) => ready!(drain.poll(cx)),
                        None => *content,
                    };
                    let rejected = rejected.take().expect("polled after it was ready");
                    return Poll::Ready(Ok(rejected.into_response(content).map(ResponseBody::own)));
                }
            };
            this.state.set(next);
        }
    }
}

/// Inserts the value of a body into the extensions of its request.
fn inserted(settings: &Settings, parts: &mut Parts, content: &Bytes) -> Result<(), BodyError> {
    parts.extensions.insert(ContentIsRead);
    match content.is_empty() && needs_none(&parts.method) {
        true => Ok(()),
        false => (settings.insert)(parts, content),
    }
}

impl<S, B, F> fmt::Debug for ReadBodyFuture<S, B, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Reading { .. } => "Reading",
            State::Waiting { .. } => "Waiting",
            State::Called { .. } => "Called",
            State::Draining { .. } => "Draining",
        };
        write!(f, "ReadBodyFuture({state})")
    }
}

/// A body that is being read within bounds.
pub(super) struct Read<B> {
    body: B,
    bounds: Bounds,
    first: Bytes,
    /// The first frame and those after it, if there is more than one.
    content: BytesMut,
    empty_frames: u64,
    started: Instant,
    /// Set when the body is first not ready: without waiting there is no need of a timer.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<B: Body + Unpin> Read<B> {
    pub(super) fn new(body: B, bounds: Bounds) -> Self {
        Self {
            body,
            bounds,
            first: Bytes::new(),
            content: BytesMut::new(),
            empty_frames: 0,
            started: Instant::now(),
            deadline: None,
        }
    }

    /// Whether a body is declared as longer than the bound.
    pub(super) fn is_declared_too_large(parts: &Parts, body: &B, bounds: Bounds) -> bool {
        let declared = parts
            .headers
            .get(CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok());
        let declared = declared.and_then(|length| length.trim().parse::<u64>().ok());
        body.size_hint().lower().max(declared.unwrap_or(0)) > bounds.bytes
    }

    /// What is left of a body that was not read to its end.
    pub(super) fn into_rest(self) -> B {
        self.body
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, BodyError>> {
        loop {
            let frame = match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Err(BodyError::broken())),
                Poll::Ready(None) => return Poll::Ready(Ok(self.take())),
                Poll::Pending if self.is_late(cx) => return Poll::Ready(Err(BodyError::too_slow(self.bounds.time))),
                Poll::Pending => return Poll::Pending,
            };
            // Trailers are not content.
            if let Ok(data) = frame.into_data()
                && !self.add(data)
            {
                return Poll::Ready(Err(BodyError::too_large(self.bounds.bytes)));
            }
        }
    }

    /// Adds the data of a frame, if it is within the bound.
    fn add(&mut self, mut data: B::Data) -> bool {
        let length = data.remaining();
        if length == 0 {
            // So that a body of such frames has an end.
            self.empty_frames += 1;
            return self.empty_frames <= self.bounds.bytes;
        }
        let read = self.first.len().max(self.content.len());
        if read as u64 + length as u64 > self.bounds.bytes {
            return false;
        }
        if self.first.is_empty() {
            self.first = data.copy_to_bytes(length);
            return true;
        }
        if self.content.is_empty() {
            self.content.extend_from_slice(&self.first);
        }
        self.content.extend_from_slice(&data.copy_to_bytes(length));
        true
    }

    fn take(&mut self) -> Bytes {
        let first = std::mem::take(&mut self.first);
        match std::mem::take(&mut self.content) {
            content if content.is_empty() => first,
            content => content.freeze(),
        }
    }

    fn is_late(&mut self, cx: &mut Context<'_>) -> bool {
        // Without a runtime of tokio there is no timer.
        if self.deadline.is_none() && tokio::runtime::Handle::try_current().is_ok() {
            let far = self.started + std::time::Duration::from_secs(86_400 * 365);
            let until = self.started.checked_add(self.bounds.time).unwrap_or(far);
            self.deadline = Some(Box::pin(sleep_until(until)));
        }
        let deadline = self.deadline.as_mut();
        deadline.is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready())
    }
}

/// Whether a request with this method has a body that is to be read.
pub(super) fn is_read<B: Body>(method: &Method, body: &B) -> bool {
    // What follows a CONNECT is a tunnel (RFC 9110 §9.3.6).
    *method != Method::CONNECT && !(body.is_end_stream() && needs_none(method))
}

/// Whether the content of a request with this method has no defined meaning (RFC 9110 §9.3).
pub(super) fn needs_none(method: &Method) -> bool {
    method.is_safe() || *method == Method::DELETE
}
