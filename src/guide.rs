//! Long pages: the first ten minutes, recipes, what is promised, choosing an algorithm, a service behind proxies, Redis for
//! limits, deploying, operating, metrics, what clients do with denials, testing an application, a comparison with other libraries and the
//! migration from them, and measurements of speed and of behavior under faults.
//!
//! These pages are in the folder `docs` of the repository. The module exists only in this documentation.

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
