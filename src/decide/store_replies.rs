use std::{
    pin::Pin,
    task::{Context, Poll},
};

use smallvec::SmallVec;
use tokio::runtime::Handle;

use crate::store::{Owed, StoreError, StoreFuture, StoreResponse};

/// Responses of stores to refunds, charges and releases. As a future it waits for all of them, at the same time, and returns the
/// first error. Those that are missing when it is dropped continue in tasks of their own.
#[derive(Default)]
#[must_use]
pub(crate) struct Responses {
    responses: SmallVec<[(StoreFuture, Owed); 1]>,
    error: Option<StoreError>,
}

impl Responses {
    /// Adds the response to what is sent now.
    pub(crate) fn push(&mut self, response: StoreFuture, owed: Owed) {
        self.responses.push((response, owed.due()));
    }
}

/// Passes on a response, in a task if it is not there yet. Outside of a runtime there is none.
pub(super) fn receive(response: StoreFuture, end: impl FnOnce(&Result<StoreResponse, StoreError>) + Send + 'static) {
    match (response.try_ready(), Handle::try_current()) {
        (Ok(response), _) => end(&response),
        (Err(pending), Ok(runtime)) => drop(runtime.spawn(async { end(&pending.await) })),
        (Err(_), Err(_)) => {}
    }
}

impl Future for Responses {
    type Output = Result<(), StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { responses, error } = &mut *self;
        let mut position = 0;
        while let Some((response, _)) = responses.get_mut(position) {
            let Poll::Ready(response) = Pin::new(response).poll(cx) else {
                position += 1;
                continue;
            };
            let (_, owed) = responses.remove(position);
            owed.end(&response);
            if let Err(failed) = response {
                error.get_or_insert(failed);
            }
        }
        if !responses.is_empty() {
            return Poll::Pending;
        }
        Poll::Ready(error.take().map_or(Ok(()), Err))
    }
}

impl Drop for Responses {
    fn drop(&mut self) {
        for (response, owed) in self.responses.drain(..) {
            receive(response, |response| owed.end(response));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::sync::oneshot;

    use super::*;
    use crate::store::{ErrorKind, Outstanding, OwedKind};

    #[test]
    fn all_are_polled_at_the_same_time_and_an_error_is_returned_after_the_last_one() {
        let mut responses = Responses::default();
        let [first, second, third] = [(); 3].map(|()| {
            let (sender, receiver) = oneshot::channel::<Result<StoreResponse, StoreError>>();
            let response = StoreFuture::pending(async { receiver.await.expect("a response") });
            responses.push(response, Outstanding::of(None).owe(OwedKind::Settlement));
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
