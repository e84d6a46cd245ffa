use super::client::ClientLibrary;

/// A client of the application, of a client library that is built in.
///
/// It is made of
///
/// | type | feature | the client |
/// | --- | --- | --- |
/// | [`fred::clients::Client`](crate::fred) | `fred` | is connected and in the end quit by the application; its reconnect policy pauses before the first attempt. After a planned failover of Sentinel it stays at the old primary until that is a replica, for about 10 s, and these counts are lost |
/// | [`fred::clients::Pool`](crate::fred) | `fred` | the same; its clients are used in turn |
/// | [`redis_rs::Client`](crate::redis_rs) | `cluster` | has settings that a URL does not have, such as certificates; the store makes [connections](crate::RedisStoreBuilder::connections) of its own |
/// | an array or a `Vec` of `redis_rs::Client` | `cluster` | are nodes of a cluster, a few of them, by which the others are found; these are connected to with the settings of the first one. The cluster client of redis-rs itself sends a command again after a connection was lost, which would count a request twice |
///
/// ```no_run
/// # #[cfg(feature = "fred")]
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_quota::{RedisStore, fred::{prelude::*, types::config::ReconnectPolicy}};
///
/// let client = Builder::from_config(Config::from_url("redis://127.0.0.1:6379")?)
///     .set_policy(ReconnectPolicy::new_constant(0, 150))
///     .with_connection_config(|config| {
///         config.max_command_attempts = 1;
///         config.max_command_buffer_len = 0;
///         config.tcp.nodelay = Some(true);
///     })
///     .build()?;
/// client.init().await?;
/// let store = RedisStore::builder().client(client).connect().await?;
/// # Ok(())
/// # }
/// ```
///
/// ```no_run
/// # #[cfg(feature = "cluster")]
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_quota::{RedisStore, redis_rs::Client};
///
/// let nodes = [Client::open("redis://10.0.0.1:6379")?, Client::open("redis://10.0.0.2:6379")?];
/// let store = RedisStore::builder().client(nodes).connect().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ApplicationClient(pub(super) Source);

macro_rules! from_clients {
    ($($feature:literal, $client:ty $(, const $n:ident)?, |$value:ident| $source:expr;)+) => {
        $(
            #[cfg(feature = $feature)]
            impl$(<const $n: usize>)? From<$client> for ApplicationClient {
                fn from($value: $client) -> Self {
                    Self($source)
                }
            }
        )+
    };
}

from_clients! {
    "fred", fred::clients::Client, |client| Source::Fred([client].into());
    "fred", fred::clients::Pool, |pool| Source::Fred(pool.clients().into());
    "cluster", redis::Client, |client| Source::RedisRs(Box::new(client));
    "cluster", [redis::Client; N], const N, |nodes| Source::RedisRsCluster(nodes.into());
    "cluster", Vec<redis::Client>, |nodes| Source::RedisRsCluster(nodes.into());
}

// Without the settings, which may contain a password.
impl_debug!(ApplicationClient, client => library: client.0.client_library());

/// The Redis of a store.
#[derive(Clone)]
pub(super) enum Source {
    Url(Box<str>),
    #[cfg(feature = "fred")]
    Fred(Box<[fred::clients::Client]>),
    #[cfg(feature = "cluster")]
    RedisRs(Box<redis::Client>),
    #[cfg(feature = "cluster")]
    RedisRsCluster(Box<[redis::Client]>),
}

impl Source {
    /// The client library of a client of the application.
    pub(super) fn client_library(&self) -> Option<ClientLibrary> {
        match self {
            Self::Url(_) => None,
            #[cfg(feature = "fred")]
            Self::Fred(_) => Some(ClientLibrary::Fred),
            #[cfg(feature = "cluster")]
            Self::RedisRs(_) | Self::RedisRsCluster(_) => Some(ClientLibrary::RedisRs),
        }
    }
}
