use std::time::Duration;

use tower_quota::{RedisStore, RedisStoreBuilder};

/// A store that waits for Redis as long as a busy machine may need.
pub(crate) fn patient() -> RedisStoreBuilder {
    RedisStore::builder().deadline(PATIENCE).connect_timeout(PATIENCE)
}

/// A store for a test that kills Redis or makes it hang: a request that had been sent may wait for its deadline.
pub(crate) fn less_patient() -> RedisStoreBuilder {
    RedisStore::builder()
        .deadline(Duration::from_secs(2))
        .connect_timeout(PATIENCE)
}

/// A store made by this builder, connected.
pub(crate) async fn connected(builder: RedisStoreBuilder, url: &str) -> RedisStore {
    let store = builder.url(url).connect().await.expect("the URL is good");
    store.ready().await.expect("Redis answers");
    store
}

/// How long a test waits for what happens within a moment on a machine that is not busy: a bound on how long a test hangs,
/// and not a claim. Sentinels whose process was held up for two seconds do nothing for half a minute.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
