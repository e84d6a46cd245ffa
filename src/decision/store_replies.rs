use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use smallvec::SmallVec;
use tokio::runtime::Handle;

use crate::{
    observe::lost_settlement,
    store::{Owed, StoreError, StoreFuture, StoreResponse},
};

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

    /// Waits for them in tasks, and counts those that no store confirms as lost, also for a layer.
    pub(crate) fn receive(mut self, layer: Option<&Arc<LostSettlements>>) {
        for (response, owed) in self.responses.drain(..) {
            let unconfirmed = Unconfirmed::new(layer.cloned());
            receive(response, move |response| {
                unconfirmed.end(response);
                owed.end(response);
            });
        }
    }
}

/// Passes on a response, in a task if it is not there yet. Outside of a runtime there is none.
fn receive(response: StoreFuture, end: impl FnOnce(&Result<StoreResponse, StoreError>) + Send + 'static) {
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

/// The number of settlements of a layer that were lost.
#[derive(Default)]
pub(crate) struct LostSettlements(AtomicU64);

impl LostSettlements {
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts one more, and logs the first.
    fn add(&self, error: Option<&StoreError>) {
        if self.0.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                error = error.map(ToString::to_string),
                "a refund or a charge after the response was lost; `RateLimitLayer::lost_settlements` counts them"
            );
        }
    }
}

/// A settlement that is lost unless its store confirms it.
pub(crate) struct Unconfirmed {
    /// The layer that counts its settlements.
    layer: Option<Arc<LostSettlements>>,
    has_response: bool,
}

impl Unconfirmed {
    pub(crate) fn new(layer: Option<Arc<LostSettlements>>) -> Self {
        Self {
            layer,
            has_response: false,
        }
    }

    /// Ends with the response of the store.
    pub(crate) fn end(mut self, response: &Result<StoreResponse, StoreError>) {
        self.has_response = true;
        if let Err(error) = response {
            self.lose(Some(error));
        }
    }

    fn lose(&self, error: Option<&StoreError>) {
        lost_settlement();
        if let Some(layer) = &self.layer {
            layer.add(error);
        }
    }
}

impl Drop for Unconfirmed {
    fn drop(&mut self) {
        if !self.has_response {
            self.lose(None);
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
