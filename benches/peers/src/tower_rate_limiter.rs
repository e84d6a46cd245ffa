use std::time::Duration;

use bench_harness::Server;
use tower_rate_limiter::{IpKeyExtractor, RateLimitLayer, RedisStore};

use crate::{
    HOUR,
    peer::{Peer, version},
};

/// As in its example, with the faster of its stores, which uses Lua.
pub(crate) async fn peers(server: &Server) -> Vec<Peer> {
    let client = redis::Client::open(server.url()).expect("the URL is good");
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(10)));
    let connection = client.get_multiplexed_async_connection_with_config(&config).await;
    let store = RedisStore::new(connection.expect("the server answers"));

    let limit = |name, limit, window| {
        RateLimitLayer::builder(IpKeyExtractor::new())
            .policy_name(name)
            .limit(limit)
            .window(window)
            .with_store(store.clone())
            .build()
            .expect("a good policy")
    };
    let (admitting, denying) = (
        limit("admitting", 100_000, Duration::from_secs(1)),
        limit("denying", 1, HOUR),
    );
    let client = format!("redis-rs {}", version("redis"));
    vec![Peer::new(
        "tower-rate-limiter",
        "fixed window",
        client,
        &admitting,
        &denying,
    )]
}
