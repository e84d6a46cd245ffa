//! Rate limiting for axum, tonic and any Tower service over HTTP, with counts in Redis that all replicas share.
//!
//! [`RateLimitLayer`] is a [`Layer`]. It rejects requests above a limit with `429 Too Many Requests` and
//! `Retry-After`, and gRPC calls with `RESOURCE_EXHAUSTED`. One Lua script decides and counts a request, at one instant of the
//! clock of Redis.
//!
//! # Example
//!
//! Two requests in any 30 seconds for each address and path, here counted in memory:
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
//! assert_eq!(denied.headers()["ratelimit"], "\"say-hi\";r=0;t=30");
//! # Ok(())
//! # }
//! ```
//!
//! The example sets the address of the peer by hand. On a server, `into_make_service_with_connect_info::<SocketAddr>()` of
//! axum's router provides it.
//!
//! # Concepts
//!
//! | type | definition |
//! | --- | --- |
//! | [`Policy`] | a named limit and the key it applies to |
//! | [`Limit`] | an algorithm with its parameters. Start with [`SlidingLog`]; the module [`limit`] compares the algorithms |
//! | [`Key`], [`KeyExtractor`] | the identity that a request is counted under, extracted from the head of the request; see the module [`mod@key`] |
//! | [`Store`](store::Store) | storage backend for counts: [`RedisStore`] for all replicas, [`MemoryStore`] for one process |
//! | [`FailureMode`] | what happens to requests while the store fails |
//! | [`RateLimitLayer`] | applies one policy or [several](RateLimitLayer#several-policies-one-decision) to a service |
//! | [`Limiter`] | applies policies without HTTP; [`acquire`](Limiter::acquire) [waits](Policy::wait_up_to) until a request is admitted |
//! | [`Decision`] | the outcome of a check; handlers find it in the extensions of the request |
//! | [`Denied`] | the error with which a handler denies a request |
//! | [`Receipt`] | the record of a charge, to [settle](Receipt::settle) its actual cost or to [refund](RateLimitLayer#refunds) it |
//! | [`Slots`] | what an admitted request holds of a [`Concurrency`] limit, to release it later than the response ends |
//! | [`Completion`] | how a request ended, for policies that [refund](Policy::refund_if) requests by it |
//! | [`Headers`] | the header fields on responses |
//! | [`ResponseFormat`](response::ResponseFormat) | builds the response to a rejected request |
//!
//! # Features
//!
//! | feature | default | effect |
//! | --- | --- | --- |
//! | `fred` | yes | [`RedisStore`] through the client fred: single servers and Sentinel |
//! | `unix-sockets` | | Unix sockets for fred: `redis+unix:///run/redis.sock` |
//! | `cluster` | | [`RedisStore`] through the client redis-rs: clusters; also single servers and Sentinel, with [`ClientLibrary::RedisRs`], without `fred`, or where `fred` lacks a feature for the URL |
//! | `redis-rs` | | another name of `cluster` |
//! | `tls` | | TLS: `rediss://` |
//! | `axum` | | [`key::route`](fn@key::route), the peer address that axum provides, [`Decision`] as an extractor, [`Denied`] as a response |
//! | `tonic` | | the peer address that tonic provides, the layer around a single tonic service, [`Denied`] as a `Status` |
//! | `tonic-tls` | | the peer address where the application accepts the TLS of connections that it gives to tonic's server |
//! | `calendar` | | calendar windows for [`FixedWindow`], such as 3 a month in Europe/Berlin |
//! | `serde` | | [`Policies`] and limits in the configuration of an application, which can change while it runs |
//! | `file` | | [`Policies`] from files in TOML or JSON |
//! | `admin` | | [`Admin`]: a page and JSON for operators, behind the authentication of the application. It turns on `axum` and `serde` |
//! | `metrics` | | [metrics](guide::metrics) through the facade of that name: counters, gauges and histograms |
//!
//! # Guide
//!
//! [Getting started](guide::start): ten minutes from `cargo add` to a limit in production.
//!
//! [Recipes](guide::recipes): plans, logins, tokens of language models, exports, webhooks, jobs, GraphQL, and limits in a file.
//!
//! [Choosing an algorithm](guide::choosing), and the [migration](guide::migration) from other libraries.
//!
//! [Comparison](guide::comparison) with other libraries.
//!
//! [Behind proxies](guide::proxies), [Redis for limits](guide::redis), [deploying](guide::deploy), [operating](guide::operating) and
//! [metrics](guide::metrics): what to set up before production, what to watch, and what to do when something is wrong.
//!
//! [Clients and denials](guide::clients): which clients wait and retry, tried with curl, Python, Node, gRPC and a browser.
//!
//! [Testing an application](guide::testing): without Redis, and with a clock that the test advances.
//!
//! # Promises and measurements
//!
//! [What is promised](guide::promises), under which faults, and where it is tested.
//!
//! [Speed](guide::speed), compared with other crates, and [behavior under faults](guide::faults) of Redis.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::wildcard_enum_match_arm)] // the compiler names each place that a new variant is added to

#[macro_use]
mod error;

#[cfg(feature = "admin")]
mod admin;
mod decide;
#[cfg(any(feature = "_redis", feature = "file"))]
mod file;
mod http;
pub mod key;
pub mod limit;
mod limiter;
mod observe;
mod policy;
pub mod store;
mod sync;

#[cfg(feature = "admin")]
pub use self::admin::Admin;
#[cfg(feature = "axum")]
pub use self::http::undecided_routes;
#[cfg(feature = "serde")]
pub use self::policy::Policies;
#[cfg(feature = "_redis")]
pub use self::store::redis::{ApplicationClient, ClientLibrary, Credentials, RedisStore, RedisStoreBuilder};
pub use self::{
    decide::{Completion, Decision, Denial, PolicyDecision, Receipt, Slots, Usage},
    error::ConfigError,
    http::{
        BothHeaders, CustomHeaders, Denied, Headers, RateLimit, RateLimitLayer, ResponseBody, ResponseFuture, response,
    },
    key::{Key, KeyExtractor},
    limit::{Ban, Concurrency, FixedWindow, Limit, SlidingCounter, SlidingLog, TokenBucket},
    limiter::{AcquireError, Limiter, LimiterRequest},
    policy::{IntoPolicies, Plans, Policy},
    store::{FailureMode, ManualClock, MemoryStore, MemoryStoreBuilder, StoreError},
};
pub use tower_layer::Layer;

#[cfg(feature = "fred")]
pub use fred;
#[cfg(feature = "cluster")]
pub use redis as redis_rs;

/// The programs of the README.
#[cfg(all(doctest, feature = "axum", feature = "fred", feature = "tonic"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// Long pages: the first ten minutes, recipes, what is promised, choosing an algorithm, a service behind proxies, Redis for
/// limits, deploying, operating, metrics, what clients do with denials, testing an application, a comparison with other libraries and the
/// migration from them, and measurements of speed and of behavior under faults.
///
/// These pages are in the folder `docs` of the repository. The module exists only in this documentation.
#[cfg(doc)]
pub mod guide {
    #[doc = include_str!("../docs/choosing.md")]
    pub mod choosing {}

    #[doc = include_str!("../docs/clients.md")]
    pub mod clients {}

    #[cfg(feature = "axum")]
    #[doc = include_str!("../docs/comparison.md")]
    pub mod comparison {}

    #[cfg(feature = "axum")]
    #[doc = include_str!("../docs/deploy.md")]
    pub mod deploy {}

    #[doc = include_str!("../docs/faults.md")]
    pub mod faults {}

    #[cfg(feature = "metrics")]
    #[doc = include_str!("../docs/metrics.md")]
    pub mod metrics {}

    #[cfg(feature = "axum")]
    #[doc = include_str!("../docs/migration.md")]
    pub mod migration {}

    #[cfg(feature = "serde")]
    #[doc = include_str!("../docs/operating.md")]
    pub mod operating {}

    #[doc = include_str!("../docs/promises.md")]
    pub mod promises {}

    #[doc = include_str!("../docs/proxies.md")]
    pub mod proxies {}

    #[cfg(all(feature = "axum", feature = "file"))]
    #[doc = include_str!("../docs/recipes.md")]
    pub mod recipes {}

    #[doc = include_str!("../docs/redis.md")]
    pub mod redis {}

    #[doc = include_str!("../docs/speed.md")]
    pub mod speed {}

    #[cfg(all(feature = "axum", feature = "fred", feature = "metrics", feature = "tonic"))]
    #[doc = include_str!("../docs/start.md")]
    pub mod start {}

    #[cfg(feature = "axum")]
    #[doc = include_str!("../docs/testing.md")]
    pub mod testing {}
}
