use std::{
    pin::Pin,
    task::{Context, Poll},
};

use smallvec::SmallVec;
use tokio::runtime::Handle;

use crate::store::{StoreError, StoreFuture};

/// Responses of stores to refunds, charges and releases. As a future it waits for all of them, at the same time, and returns the
/// first error. Those that are missing when it is dropped continue in tasks of their own.
#[derive(Default)]
#[must_use]
pub(crate) struct Responses {
    responses: SmallVec<[StoreFuture; 1]>,
    error: Option<StoreError>,
}

impl Responses {
    pub(crate) fn push(&mut self, response: StoreFuture) {
        self.responses.push(response);
    }
}

impl From<SmallVec<[StoreFuture; 1]>> for Responses {
    fn from(responses: SmallVec<[StoreFuture; 1]>) -> Self {
        Self { responses, error: None }
    }
}

impl Future for Responses {
    type Output = Result<(), StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { responses, error } = &mut *self;
        responses.retain(|response| match Pin::new(response).poll(cx) {
            Poll::Pending => true,
            Poll::Ready(Ok(_)) => false,
            Poll::Ready(Err(failed)) => {
                error.get_or_insert(failed);
                false
            }
        });
        if !responses.is_empty() {
            return Poll::Pending;
        }
        Poll::Ready(error.take().map_or(Ok(()), Err))
    }
}

impl Drop for Responses {
    fn drop(&mut self) {
        for response in self.responses.drain(..) {
            if let (Err(pending), Ok(runtime)) = (response.try_ready(), Handle::try_current()) {
                runtime.spawn(pending);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::sync::oneshot;

    use super::*;
    use crate::store::{ErrorKind, StoreResponse};

    #[test]
    fn all_are_polled_at_the_same_time_and_an_error_is_returned_after_the_last_one() {
        let mut responses = Responses::default();
        let [first, second, third] = [(); 3].map(|()| {
            let (sender, receiver) = oneshot::channel::<Result<StoreResponse, StoreError>>();
            responses.push(StoreFuture::pending(async { receiver.await.expect("a response") }));
            sender
        });
        let mut context = Context::from_waker(Waker::noop());
        let mut poll = || Pin::new(&mut responses).poll(&mut context);

        let failed = StoreError::new(ErrorKind::Unreachable, "the store is away");
        assert!(poll().is_pending());
        second.send(Err(failed)).expect("it is awaited");
        third
            .send(Ok(StoreResponse::new(Default::default(), [])))
            .expect("it is awaited");
        assert!(poll().is_pending());
        first
            .send(Ok(StoreResponse::new(Default::default(), [])))
            .expect("it is awaited");
        let Poll::Ready(Err(error)) = poll() else {
            panic!("all have a response");
        };
        assert_eq!(error.kind(), ErrorKind::Unreachable);
    }
}
