use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use smallvec::SmallVec;

use crate::error::{ErrorKind, StoreError};

/// The future of a [`StoreResponse`], which may be ready at once.
///
/// A ready response is not boxed.
///
/// ```
/// use tower_quota::store::{ErrorKind, StoreError, StoreFuture};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let failure = StoreError::new(ErrorKind::Unreachable, "connection refused");
/// assert_eq!(StoreFuture::ready(Err(failure.clone())).await.unwrap_err().kind(), ErrorKind::Unreachable);
/// assert_eq!(StoreFuture::pending(async { Err(failure) }).await.unwrap_err().kind(), ErrorKind::Unreachable);
/// # }
/// ```
#[must_use]
pub struct StoreFuture(State);

type Boxed = Pin<Box<dyn Future<Output = Result<StoreResponse, StoreError>> + Send>>;

enum State {
    Ready(Result<StoreResponse, StoreError>),
    Pending(Boxed),
}

impl StoreFuture {
    /// A response that is there already.
    #[inline]
    pub fn ready(response: Result<StoreResponse, StoreError>) -> Self {
        Self(State::Ready(response))
    }

    /// A response that a future returns. The future is boxed.
    pub fn pending(response: impl Future<Output = Result<StoreResponse, StoreError>> + Send + 'static) -> Self {
        Self(State::Pending(Box::pin(response)))
    }

    /// The response if it is there already, else the future. A store that wraps another one can change a ready response
    /// without boxing it.
    ///
    /// # Errors
    ///
    /// The future itself, if the response is not there yet.
    #[inline]
    pub fn try_ready(self) -> Result<Result<StoreResponse, StoreError>, Self> {
        match self.0 {
            State::Ready(response) => Ok(response),
            State::Pending(_) => Err(self),
        }
    }

    /// The same in place. A response is large.
    #[inline]
    pub(crate) fn as_ready(&self) -> Option<&Result<StoreResponse, StoreError>> {
        match &self.0 {
            State::Ready(response) => Some(response),
            State::Pending(_) => None,
        }
    }
}

impl Future for StoreFuture {
    type Output = Result<StoreResponse, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.get_mut().0 {
            State::Ready(response) => {
                let polled_again = StoreError::new(ErrorKind::Protocol, "the future was polled after it was ready");
                Poll::Ready(std::mem::replace(response, Err(polled_again)))
            }
            State::Pending(response) => response.as_mut().poll(cx),
        }
    }
}

impl_debug!(StoreFuture, future => ready: future.as_ready());

/// The response of a store to a list of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreResponse {
    /// The time of the decisions by the clock of the store, since the Unix epoch.
    pub server_time: Duration,
    pub(crate) outcomes: SmallVec<[Outcome; 1]>,
}

impl StoreResponse {
    /// A response with one outcome for each request, in their order.
    #[doc(hidden)]
    pub fn new(server_time: Duration, outcomes: impl IntoIterator<Item = Outcome>) -> Self {
        Self {
            server_time,
            outcomes: outcomes.into_iter().collect(),
        }
    }

    /// The same for requests that this process has decided without the store.
    pub(crate) fn without_reply(server_time: Duration, outcomes: impl IntoIterator<Item = Outcome>) -> Self {
        let cached = |outcome| Outcome {
            is_cached: true,
            ..outcome
        };
        Self::new(server_time, outcomes.into_iter().map(cached))
    }

    /// Whether the store has replied.
    #[inline]
    pub(crate) fn is_reply(&self) -> bool {
        self.outcomes.first().is_none_or(|outcome| !outcome.is_cached)
    }

    /// The outcome of one of several requests that wait and were decided together, with these costs; `None` if it was not decided.
    pub(crate) fn nth_unit(&self, nth: usize, costs: &[u64]) -> Option<Self> {
        if nth > 0 && self.outcomes.iter().any(|outcome| outcome.is_of_first) {
            return None;
        }
        let outcomes = self.outcomes.iter().map(|outcome| {
            if nth >= outcome.units as usize {
                return Outcome::new(false, outcome.states.iter().copied());
            }
            let later = u64::from(outcome.units) - 1 - nth as u64;
            let states = outcome.states.iter().zip(costs);
            let states = states.map(|(state, cost)| ChargeState {
                remaining: state.remaining.saturating_add(cost.saturating_mul(later)),
                retry_after: None,
                ..*state
            });
            Outcome::new(true, states)
        });
        Some(Self::new(self.server_time, outcomes))
    }

    /// One outcome for each request, in their order.
    #[must_use]
    #[doc(hidden)]
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }
}

/// The outcome of one [`StoreRequest`](super::StoreRequest).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// Whether the request is admitted. It is `true` for operations that do not require room.
    pub allowed: bool,
    /// How many of the units of the request are admitted.
    #[doc(hidden)]
    pub units: u32,
    /// Whether this process has decided without the store, such as by a cached denial. Here since it takes no memory.
    pub(crate) is_cached: bool,
    /// Whether only the first of the units was decided.
    pub(crate) is_of_first: bool,
    pub(crate) states: SmallVec<[ChargeState; 1]>,
}

impl PartialEq for Outcome {
    /// Whether both decide alike, from the store or not.
    fn eq(&self, other: &Self) -> bool {
        (self.allowed, self.units, &self.states) == (other.allowed, other.units, &other.states)
    }
}

impl Eq for Outcome {}

impl Outcome {
    /// An outcome with one state for each charge, in their order.
    pub fn new(allowed: bool, states: impl IntoIterator<Item = ChargeState>) -> Self {
        Self {
            allowed,
            units: allowed.into(),
            is_cached: false,
            is_of_first: false,
            states: states.into_iter().collect(),
        }
    }

    /// The same where so many of the units of the request are admitted.
    pub(super) fn of_units(self, units: u32) -> Self {
        Self { units, ..self }
    }

    /// The same where each charge has a time: this one, unless its node was another one.
    #[cfg(feature = "_redis")]
    pub(super) fn at(mut self, server_time: Duration) -> Self {
        for state in &mut self.states {
            state.decided_at.get_or_insert(server_time);
        }
        self
    }

    /// The outcome of an [optional](super::StoreRequest::optional) request for which the store has failed.
    #[cfg(feature = "_redis")]
    pub(crate) fn unknown() -> Self {
        Self::new(false, [])
    }

    /// Whether the store has failed for this request alone.
    pub(crate) fn is_unknown(&self) -> bool {
        self.states.is_empty()
    }

    /// One state for each charge, in their order.
    #[must_use]
    pub fn states(&self) -> &[ChargeState] {
        &self.states
    }
}

/// The state of one charge after the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChargeState {
    /// The units that still fit.
    pub remaining: u64,
    /// The time until the charge fits; `None` if it fits now, if the request is admitted, and for
    /// [`Limit::DenyAll`](crate::Limit::DenyAll). For a cost above the quota, which never fits, it is the time until a cost of
    /// the quota fits, at least 1 µs: one window for a key without counts of a [`SlidingLog`](crate::SlidingLog) or
    /// [`FixedWindow`](crate::FixedWindow).
    pub retry_after: Option<Duration>,
    /// The time until nothing counts anymore, if nothing more is counted.
    pub reset_after: Duration,
    /// The time of the decision by the clock of the store, since the Unix epoch; `None` if it is the
    /// [`server_time`](StoreResponse::server_time) of the response. Nodes of a cluster have clocks of their own.
    pub decided_at: Option<Duration>,
    /// The rest of the ban that is in force, in microseconds; 0 without one.
    banned_us: u64,
}

impl ChargeState {
    /// A state that was decided at the [`server_time`](StoreResponse::server_time) of the response.
    #[must_use]
    pub fn new(remaining: u64, retry_after: Option<Duration>, reset_after: Duration) -> Self {
        Self {
            remaining,
            retry_after,
            reset_after,
            decided_at: None,
            banned_us: 0,
        }
    }

    /// The same state, decided at this time of the clock of the store, since the Unix epoch.
    #[must_use]
    pub fn at(mut self, decided_at: Duration) -> Self {
        self.decided_at = Some(decided_at);
        self
    }

    /// The same state, with a ban in force for this time.
    #[must_use]
    pub fn banned(mut self, rest: Duration) -> Self {
        self.banned_us = rest.as_micros() as u64;
        self
    }

    /// The rest of the [ban](super::Charge::ban) that is in force.
    #[must_use]
    #[inline]
    pub fn banned_for(&self) -> Option<Duration> {
        (self.banned_us > 0).then(|| Duration::from_micros(self.banned_us))
    }
}
