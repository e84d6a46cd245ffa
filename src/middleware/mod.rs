//! The Tower side: layers around services, and the way of a request through them.
//!
//! 1. `RateLimit::call` takes the head of the request and gives it to the `Enforcer`.
//! 2. The enforcer skips or blocks the request, or extracts its keys, and sends their charges with a
//!    `Check`.
//! 3. The store decides: in memory, or in Redis, where the request joins a batch of its
//!    commit queue.
//! 4. [`ResponseFuture`] receives the decision. It calls the inner service, at once or after the wait, or responds with
//!    `429`.
//! 5. It writes the fields of the decision, and [`ResponseBody`] settles at the end of the body what depends on it.

#[cfg(feature = "axum")]
mod axum;
mod body;
mod drain;
mod enforce;
mod layer;
mod service;

#[cfg(feature = "axum")]
pub use self::axum::undecided_routes;
pub use self::{
    body::ResponseBody,
    layer::RateLimitLayer,
    service::{RateLimit, ResponseFuture},
};
