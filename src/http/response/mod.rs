//! Responses to requests that are not admitted.
//!
//! A [`ResponseFormat`] builds the response from a [`Rejection`]. [`RateLimitLayer::format`](crate::RateLimitLayer::format)
//! takes one of these, a type that implements the trait, or a closure:
//!
//! | format | response |
//! | --- | --- |
//! | [`Grpc::new().or(Problem)`](Grpc::or), the default | [`Grpc`] for gRPC calls, [`Problem`] for all other requests |
//! | [`Problem`] | `application/problem+json` (RFC 9457) |
//! | [`Grpc`] | a gRPC status |
//! | [`text`], [`json`], [`html`] | the text that a closure returns, with the status and the content type |
#![cfg_attr(
    feature = "axum",
    doc = "| [`axum`](fn@axum) | whatever a closure returns that axum turns into a response |"
)]
//!
//! A format is only for the responses of the layer; those of the inner service pass unchanged, apart from the
//! [rate limit fields](crate::Headers).
//!
//! # A service without gRPC
//!
//! A gRPC status is in a response with the status `200 OK`, and the client selects it: a `POST` with the content type
//! `application/grpc` to any route, also one of JSON, is denied so. Proxies, access logs and dashboards that count statuses see no
//! `429` then; the [metrics](crate::guide::metrics) of the crate count the request as `limited` whatever the format. A service
//! without gRPC turns it off with `.format(Problem)`:
//!
//! ```
//! use bytes::Bytes;
//! use http::{Request, Response};
//! use http_body_util::Empty;
//! use tower::{Layer, ServiceExt, service_fn};
//! use tower_quota::{key, response::Problem, MemoryStore, Policy, RateLimitLayer, SlidingLog};
//!
//! # type Body = Empty<Bytes>;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let api = || Policy::new("api", SlidingLog::per_minute(1)).key(key::constant("all"));
//! for (layer, status) in [
//!     (RateLimitLayer::new(MemoryStore::new(), api()), 200),
//!     (RateLimitLayer::new(MemoryStore::new(), api()).format(Problem), 429),
//! ] {
//!     let service = layer.layer(service_fn(async |_: Request<Body>| Ok::<_, std::convert::Infallible>(Response::new(Body::new()))));
//!     let post = || Request::post("/").header("content-type", "application/grpc").body(Body::new());
//!     assert!(!service.clone().oneshot(post()?).await?.headers().contains_key("grpc-status"));
//!     assert_eq!(service.oneshot(post()?).await?.status(), status);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # gRPC-Web in browsers
//!
//! A denied gRPC-Web call gets its status in the header section, and no body, as tonic sends its own errors. A browser shows
//! these fields to scripts of another origin only if CORS exposes them, so a server for such scripts has a `CorsLayer`
//! outside of the [`RateLimitLayer`](crate::RateLimitLayer):
//!
//! ```
//! use tower_http::cors::{Any, CorsLayer};
//!
//! let cors = CorsLayer::new()
//!     .allow_origin(Any)
//!     .allow_headers(Any)
//!     .expose_headers(tower_quota::Headers::names());
//! # let _ = cors;
//! ```
//!
//! A denied call in Chromium 156, with the layer outside and inside of tonic-web's `GrpcWebLayer`, which makes no difference:
//!
//! | client | call | `Headers::names()` exposed | not exposed |
//! | --- | --- | --- | --- |
//! | `@connectrpc/connect-web` 2.2 | unary, server streaming | `ResourceExhausted`, message, details, pushback | `Unknown`, "missing trailer" |
//! | `grpc-web` 2.1, binary and text | unary | 8, message, details, pushback | 2, "Incomplete response" |
//! | `grpc-web` 2.1, binary and text | server streaming | 8, message, details, pushback | the stream ends without an error |
//!
//! `tests/clients/run browser` makes the table.

#[cfg(feature = "axum")]
mod axum;
mod format;
mod grpc;
mod grpc_status;
pub(crate) mod openapi;
mod problem;
mod text;

#[cfg(feature = "axum")]
pub use self::axum::axum;
pub(crate) use self::format::{OwnRejection, RETRY_AFTER_FAILURE, respond, write_fields};
pub(crate) use self::grpc_status::{RESOURCE_EXHAUSTED, UNAVAILABLE};
pub(crate) use self::problem::detail;
pub use self::{
    format::{Rejection, ResponseFormat},
    grpc::Grpc,
    problem::Problem,
    text::{html, json, text},
};
