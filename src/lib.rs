//! Limits how often a caller may use a service, with the count shared by all replicas through Redis.
//!
//! `tower-quota` is a [`Layer`](tower_layer::Layer) for axum, tonic and any other Tower service over HTTP.
//!
//! # Example
//!
//! Two calls in any 30 seconds for each address and path, here counted in memory:
//!
//! ```
//! use std::{net::SocketAddr, time::Duration};
//! use axum::{Router, body::Body, routing::get};
//! use http::{Request, StatusCode};
//! use tower::ServiceExt;
//! use tower_quota::{key::{self, PeerAddr}, MemoryStore, Policy, RateLimitLayer, SlidingLog};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = MemoryStore::new(); // or RedisStore::connect("redis://127.0.0.1:6379").await?
//!
//! let say_hi = Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30)))
//!     .key((key::ip(), key::path()));
//!
//! let app = Router::new()
//!     .route("/hello/sayHi", get(async || "hi").layer(RateLimitLayer::new(store, say_hi)));
//!
//! let call = || {
//!     let peer = PeerAddr("203.0.113.7:4711".parse::<SocketAddr>().unwrap());
//!     let request = Request::get("/hello/sayHi").extension(peer).body(Body::empty()).unwrap();
//!     app.clone().oneshot(request)
//! };
//! assert_eq!(call().await?.status(), StatusCode::OK);
//! assert_eq!(call().await?.headers()["ratelimit"], "\"say-hi\";r=0;t=30");
//!
//! let denied = call().await?;
//! assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
//! assert_eq!(denied.headers()["retry-after"], "30");
//! # Ok(())
//! # }
//! ```
//!
//! On a server, serve axum's router with `into_make_service_with_connect_info::<SocketAddr>()`, which provides the
//! address.
//!
//! # The words
//!
//! * A [`Policy`] says who may do how much: a name, a [`Limit`] and a [key].
//! * A [`Limit`] is an algorithm with its numbers; [`SlidingLog`] is the one to reach for first, and the module [`limit`]
//!   helps to choose.
//! * A [`Key`] is whom a request counts against, found by a [`KeyExtractor`].
//! * A [`Store`](store::Store) is where counts live: [`RedisStore`] or [`MemoryStore`]. A [`FailureMode`] is what happens while
//!   it fails.
//! * A [`Decision`] is what came of it. Handlers find it in the extensions of the request.
//! * A [`Rejection`](response::Rejection) is written out by a [`ResponseFormat`](response::ResponseFormat).
//! * A [`RateLimitLayer`] takes one policy or [several](RateLimitLayer#several-policies-one-decision), which may
//!   [cost](RateLimitLayer#costs) more than one and be [refunded](RateLimitLayer#refunds).
//! * A [`Limiter`] does the same without HTTP.
//!
//! # Features
//!
//! | feature | default | what it turns on |
//! | --- | --- | --- |
//! | `fred` | yes | [`RedisStore`] through the client fred: one server, or Sentinel |
//! | `enable-rustls-ring` | | TLS for it: `rediss://` |
//! | `unix-sockets` | | Redis on a Unix socket: `redis+unix:///run/redis.sock` |
//! | `redis` | | [`RedisStore`] through the client redis-rs: a cluster, and by choice all that fred does |
//! | `tokio-rustls-comp` | | TLS for it: `rediss://` |
//! | `axum` | | [`key::route`](fn@key::route), the peer that axum saw for [`key::ip`](fn@key::ip), and [`Decision`] as an extractor |
//! | `tonic` | | the peer that tonic saw, and [`RateLimit`] around a single tonic service |
//! | `tonic-tls` | | the peer behind the TLS of tonic's own server |
//! | `calendar` | | windows of a calendar for [`FixedWindow`]: three a month in Europe/Berlin |
//! | `serde` | | [`Policies`] from a file, and limits as text in configuration |
//! | `tonic-tls` | | the peer behind the TLS of tonic's own server |
//! | `tracing` | yes | warnings and errors as events of `tracing` |

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "axum")]
mod axum;
mod body;
mod check;
mod decision;
mod drain;
mod enforce;
mod error;
mod future;
mod headers;
pub mod key;
mod layer;
pub mod limit;
mod limiter;
mod observer;
mod policy;
pub mod response;
mod service;
pub mod store;

#[cfg(feature = "axum")]
pub use self::axum::MissingDecision;
#[cfg(feature = "serde")]
pub use self::policy::Policies;
#[cfg(any(feature = "fred", feature = "redis"))]
pub use self::store::redis::{ClientLibrary, RedisStore, RedisStoreBuilder};
pub use self::{
    body::ResponseBody,
    decision::{Decision, Denial, PolicyDecision, Receipt},
    drain::{DrainBody, DrainBodyFuture, DrainBodyLayer},
    error::ConfigError,
    future::ResponseFuture,
    headers::{Headers, Reset},
    key::{Key, KeyExtractor},
    layer::RateLimitLayer,
    limit::{FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket},
    limiter::Limiter,
    policy::{IntoPolicies, Keyed, Policy, Unkeyed},
    service::RateLimit,
    store::{FailureMode, MemoryStore, MemoryStoreBuilder},
};

/// The example of the README.
#[cfg(all(doctest, feature = "axum", feature = "fred"))]
#[doc = include_str!("../README.md")]
struct Readme;
