//! The HTTP side: layers around services, and the way of a request through them.
//!
//! 1. `RateLimit::call` takes the head of the request and gives it to the `Enforcer`.
//! 2. The enforcer skips or blocks the request, or extracts its keys, and sends their charges with a
//!    `Check`.
//! 3. The store decides: in memory, or in Redis, where the request joins a batch of its
//!    commit queue.
//! 4. [`ResponseFuture`] receives the decision. It calls the inner service, at once or after the wait, or responds with
//!    `429`.
//! 5. It writes the fields of the decision, and [`ResponseBody`] settles at the end of the body what depends on it.

mod admitted;
#[cfg(feature = "axum")]
mod axum;
mod body;
mod completed;
mod denied;
mod drain;
mod enforce;
mod headers;
mod layer;
mod requested_pause;
pub mod response;
mod service;

use std::sync::{Arc, LazyLock};

#[cfg(feature = "axum")]
pub use self::axum::undecided_routes;
pub use self::{
    body::ResponseBody,
    denied::Denied,
    headers::{BothHeaders, CustomHeaders, Headers},
    layer::RateLimitLayer,
    service::{RateLimit, ResponseFuture},
};
use self::{
    headers::Fields,
    response::{Grpc, Problem, ResponseFormat},
};
use crate::decide::CheckContext;

/// How the callers of a layer or a limiter are told about its decisions: the rate limit fields of responses, and the format of
/// those to requests that are not admitted.
#[derive(Clone)]
pub(crate) struct Presentation {
    pub(crate) fields: Fields,
    pub(crate) format: Arc<dyn ResponseFormat>,
}

static DEFAULT: LazyLock<Presentation> = LazyLock::new(|| Presentation {
    fields: Fields::default(),
    format: Arc::new(Grpc::new().or(Problem)),
});

impl Presentation {
    #[inline]
    pub(crate) fn of(context: &CheckContext) -> &Self {
        context.presentation.downcast_ref().unwrap_or(&DEFAULT)
    }

    pub(crate) fn change(context: &mut CheckContext, change: impl FnOnce(&mut Self)) {
        let mut changed = Self::of(context).clone();
        change(&mut changed);
        context.presentation = Arc::new(changed);
    }
}
