use std::sync::Arc;

use tower_quota::{
    MemoryStore, RedisStore,
    store::{Store, StoreFuture, StoreRequest},
};

use super::{Redis, connected, patient};

/// A test of each store: with a [`Bench`](super::Bench), or with what another type makes of each; `by` a function that is called
/// with a bench, a case, and a function of the parent module of that name.
macro_rules! each_store {
    (by $holds:path, $case:expr; $($test:ident)*) => {
        mod memory_store {$(
            #[test]
            fn $test() {
                $holds($crate::support::Bench::memory_store(), $case, super::super::$test);
            }
        )*}

        mod redis_store {$(
            #[test]
            fn $test() {
                $holds($crate::support::Bench::redis_store(), $case, super::super::$test);
            }
        )*}
    };
    (with $made:ty: $($test:ident)*) => {
        mod memory_store {$(
            #[tokio::test]
            async fn $test() {
                super::$test(<$made>::memory_store().await).await;
            }
        )*}

        mod redis_store {$(
            #[tokio::test]
            async fn $test() {
                super::$test(<$made>::redis_store().await).await;
            }
        )*}
    };
    ($($test:ident)*) => {
        $crate::support::each_store! { with $crate::support::Bench: $($test)* }
    };
}
pub(crate) use each_store;

/// Stores as an application has them, with their own clocks and with a deny cache.
pub(crate) struct Unclocked;

impl Unclocked {
    #[expect(clippy::unused_async, reason = "the other store is connected meanwhile")]
    pub(crate) async fn memory_store() -> Arc<MemoryStore> {
        Arc::new(MemoryStore::new())
    }

    pub(crate) async fn redis_store() -> Arc<impl Store> {
        let redis = Redis::start();
        let store = connected(patient(), &redis.url()).await;
        Arc::new(Kept { store, _redis: redis })
    }
}

/// A store that keeps its Redis.
struct Kept {
    store: RedisStore,
    _redis: Redis,
}

impl Store for Kept {
    fn decide(&self, requests: &[StoreRequest<'_>]) -> StoreFuture {
        self.store.decide(requests)
    }

    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }
}
