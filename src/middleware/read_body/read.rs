use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Buf, Bytes, BytesMut};
use http::{Method, header::CONTENT_LENGTH, request::Parts};
use http_body::Body;
use tokio::time::{Instant, Sleep, sleep_until};

use super::Bounds;
use crate::response::BodyError;

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
