//! Waits for the completion of an admitted request, and settles the policies that depend on it.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    task::Poll,
    thread,
    time::Duration,
};

use http::Response;
use http_body::Frame;

use super::{denied, requested_pause, response::OwnRejection};
use crate::{
    Decision, PolicyDecision,
    decide::{Completion, End, Responses, awaits_trailers, caught, grpc_status_in, send_bans},
    store::{Owed, OwedKind},
};

/// The completion of an admitted request that a policy depends on. Dropped before, the request is cancelled.
pub(crate) struct AwaitedCompletion {
    /// Taken at the completion.
    decision: Option<Decision>,
    /// The head of a response whose trailers are awaited.
    head: Option<Response<()>>,
    /// Whether the inner service or its body is being polled. If that panics, this is dropped meanwhile or, where a layer
    /// outside of this one catches panics, later.
    polled: bool,
    /// Whether the body is known to have ended. A server polls such a body no further.
    ended: AtomicBool,
    _owed: Option<Owed>,
}

impl AwaitedCompletion {
    /// What is awaited for a decision that admits a request, if a policy depends on it.
    pub(crate) fn of(decision: &Decision) -> Option<Box<Self>> {
        decision.lost_settlements()?;
        Some(Box::new(Self {
            decision: Some(decision.clone()),
            head: None,
            polled: false,
            ended: AtomicBool::new(false),
            _owed: decision.owe(OwedKind::Settlement),
        }))
    }

    /// Completes the request with the head of its response, or waits for the trailers.
    pub(crate) fn respond<B>(mut self: Box<Self>, response: &Response<B>) -> Option<Box<Self>> {
        self.learn(response, |decision| {
            requested_pause::requested_by(response.status(), response.headers(), decision.has_inner_fields())
        });
        if !awaits_trailers(response) {
            self.complete(Some(response), End::Head);
            return None;
        }
        let mut head = Response::new(());
        *head.status_mut() = response.status();
        *head.headers_mut() = response.headers().clone();
        *head.extensions_mut() = response.extensions().clone();
        self.head = Some(head);
        Some(self)
    }

    /// The body has ended without trailers. The request is completed when this is dropped.
    pub(crate) fn end_of_body(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Completes the request, with the head of its response if there was one.
    pub(crate) fn end(&mut self, end: End) {
        let head = self.head.take();
        self.complete(head.as_ref(), end);
    }

    fn complete<B>(&mut self, response: Option<&Response<B>>, end: End) {
        if let Some(decision) = self.decision.take() {
            decision.settle(&Completion::new(response, end));
        }
    }

    /// Bans the key for the pause that the head or the trailers of a response ask for, if one of another server does.
    #[inline]
    fn learn<B>(&self, response: &Response<B>, requested: impl FnOnce(&Decision) -> Option<Duration>) {
        if let Some(decision) = self.decision.as_ref().filter(|decision| decision.learns())
            && response.extensions().get::<OwnRejection>().is_none()
            && !is_denial(response)
            && let Some(pause) = requested(decision).filter(|pause| !pause.is_zero())
        {
            ban(decision, pause);
        }
    }
}

/// Bans the key of a decision for the pause that its response asks for.
#[cold]
fn ban(decision: &Decision, pause: Duration) {
    decision.record_requested_pause(pause);
    if let Some(response) = send_bans(decision, pause, PolicyDecision::learns)
        && let Some(mut owed) = decision.owe(OwedKind::Settlement)
    {
        owed.count_if_lost(decision.lost_settlements().cloned());
        let mut responses = Responses::default();
        responses.push(response, owed);
    }
}

impl Drop for AwaitedCompletion {
    fn drop(&mut self) {
        let panicked = self.polled || thread::panicking();
        let end = match *self.ended.get_mut() {
            _ if panicked => End::Failed,
            true => End::Body(None),
            false => End::Cancelled,
        };
        caught(|| self.end(end));
    }
}

/// Polls the inner service or its body.
pub(crate) fn poll<T>(awaited: Option<&mut AwaitedCompletion>, poll: impl FnOnce() -> Poll<T>) -> Poll<T> {
    let Some(awaited) = awaited else { return poll() };
    awaited.polled = true;
    let polled = poll();
    awaited.polled = false;
    polled
}

/// Completes a gRPC call with a frame of the body, if that is the last one.
pub(crate) fn observe_frame<D, E>(
    awaited: &mut Option<Box<AwaitedCompletion>>,
    frame: &Poll<Option<Result<Frame<D>, E>>>,
    is_end: impl FnOnce() -> bool,
) {
    let end = match frame {
        Poll::Pending => return,
        Poll::Ready(Some(Err(_))) => End::Failed,
        Poll::Ready(None) => End::Body(None),
        Poll::Ready(Some(Ok(frame))) => match frame.trailers_ref() {
            Some(trailers) => {
                if let Some(awaited) = awaited
                    && let Some(head) = &awaited.head
                {
                    awaited.learn(head, |_| requested_pause::requested_by_grpc(trailers));
                }
                End::Body(grpc_status_in(trailers))
            }
            None if is_end() => End::Body(None),
            None => return,
        },
    };
    if let Some(mut awaited) = awaited.take() {
        awaited.end(end);
    }
}

/// Whether a nested layer or the handler has denied the request.
fn is_denial<B>(response: &Response<B>) -> bool {
    let decision = response.extensions().get::<Decision>();
    denied::made(response) || decision.is_some_and(|decision| !decision.is_allowed())
}
