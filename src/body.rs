use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

pin_project! {
    /// The body of a response: that of the service behind, or the layer's own.
    pub struct ResponseBody<B> {
        #[pin]
        inner: Inner<B>,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner<B> {
        Passed {
            #[pin]
            body: B,
        },
        Own {
            // Never empty, so that an empty body ends with the header section.
            content: Option<Bytes>,
        },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn passed(body: B) -> Self {
        Self {
            inner: Inner::Passed { body },
        }
    }

    pub(crate) fn own(content: Bytes) -> Self {
        Self {
            inner: Inner::Own {
                content: Some(content).filter(|content| !content.is_empty()),
            },
        }
    }
}

/// An empty body, which layers outside need for responses of their own, such as that of a `CorsLayer` to a preflight.
impl<B> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::own(Bytes::new())
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes>,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().inner.project() {
            InnerProj::Passed { body } => body.poll_frame(cx),
            InnerProj::Own { content } => Poll::Ready(content.take().map(|content| Ok(Frame::data(content)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Passed { body } => body.is_end_stream(),
            Inner::Own { content } => content.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Passed { body } => body.size_hint(),
            Inner::Own { content } => SizeHint::with_exact(content.as_ref().map_or(0, Bytes::len) as u64),
        }
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.inner {
            Inner::Passed { .. } => f.write_str("ResponseBody::Passed(..)"),
            Inner::Own { content } => f.debug_tuple("ResponseBody::Own").field(content).finish(),
        }
    }
}
