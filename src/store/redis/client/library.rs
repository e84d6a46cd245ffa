/// A client library for Redis.
///
/// ```
/// use tower_quota::{ClientLibrary, RedisStore};
///
/// # #[cfg(feature = "redis")]
/// let builder = RedisStore::builder()
///     .url("redis://127.0.0.1:6379")
///     .client_library(ClientLibrary::RedisRs);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClientLibrary {
    /// [fred](https://crates.io/crates/fred), for one server or Sentinel.
    #[cfg(feature = "fred")]
    Fred,
    /// [redis-rs](https://crates.io/crates/redis), for one server, Sentinel or a cluster.
    #[cfg(feature = "redis")]
    RedisRs,
}

impl ClientLibrary {
    #[cfg(feature = "fred")]
    pub(in crate::store::redis) const DEFAULT: Self = Self::Fred;
    #[cfg(not(feature = "fred"))]
    pub(in crate::store::redis) const DEFAULT: Self = Self::RedisRs;
}
