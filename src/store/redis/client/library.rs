/// A client library for Redis.
///
/// ```
/// use tower_quota::{ClientLibrary, RedisStore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// # #[cfg(feature = "redis")]
/// # {
/// let builder = RedisStore::builder().url("redis://127.0.0.1:6379").client_library(ClientLibrary::RedisRs);
/// assert!(builder.connect_lazy().is_ok());
/// # }
/// # }
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

/// A client library that is built in, and what the features of the crate add to it.
#[derive(Clone, Copy)]
pub(in crate::store::redis) struct BuiltIn {
    pub(in crate::store::redis) library: ClientLibrary,
    pub(in crate::store::redis) tls: bool,
    pub(in crate::store::redis) unix_sockets: bool,
}

/// The libraries that are built in, the preferred one first.
pub(in crate::store::redis) const BUILT_IN: &[BuiltIn] = &[
    #[cfg(feature = "fred")]
    BuiltIn {
        library: ClientLibrary::Fred,
        tls: cfg!(feature = "enable-rustls-ring"),
        unix_sockets: cfg!(feature = "unix-sockets"),
    },
    #[cfg(feature = "redis")]
    BuiltIn {
        library: ClientLibrary::RedisRs,
        tls: cfg!(feature = "tokio-rustls-comp"),
        unix_sockets: true,
    },
];
