use std::{net::SocketAddr, time::Duration};

use axum::{body::Body, extract::ConnectInfo};
use bench_harness::Server;
use fred::{
    clients::Client,
    interfaces::ClientLike,
    prelude::LuaInterface,
    types::{Builder, config::Config},
};
use http::{Request, Response};
use tower_rate_limit_fred::{Key, KeyResolver, RateLimitLayer};

use crate::{
    HOUR,
    peer::{Peer, version},
};

/// As in its example, with a pool of 12 and the default settings of fred; with one connection; and with one connection without
/// Nagle's algorithm, as in the other limiters.
pub(crate) async fn peers(server: &Server) -> Vec<Peer> {
    let mut builder = Builder::from_config(Config::from_url(&server.url()).expect("the URL is good"));
    builder.with_performance_config(|config| config.default_command_timeout = Duration::from_secs(10));
    let pool = builder.build_pool(12).expect("a pool");
    pool.init().await.expect("the server answers");

    let nagle = connect(&builder).await;
    builder.with_connection_config(|config| config.tcp.nodelay = Some(true));
    let nodelay = connect(&builder).await;

    let fred = format!("fred {}", version("fred"));
    vec![
        peer(format!("{fred}, a pool of 12"), &pool),
        peer(fred.clone(), &nagle),
        peer(format!("{fred}, nodelay"), &nodelay),
    ]
}

async fn connect(builder: &Builder) -> Client {
    let client = builder.build().expect("a client");
    client.init().await.expect("the server answers");
    client
}

fn peer<C>(client: String, connection: &C) -> Peer
where
    C: LuaInterface + Clone + Send + Sync + 'static,
{
    // 1,000 per second with the largest burst, and 1 an hour.
    let limit = |prefix, capacity, interval| {
        RateLimitLayer::builder()
            .conn(connection.clone())
            .key_resolver(PeerAddress(prefix))
            .capacity(capacity)
            .emission_interval(interval)
            .build()
    };
    let (admitting, denying) = (
        limit("admitting", u16::MAX, Duration::from_millis(1)),
        limit("denying", 1, HOUR),
    );
    Peer::new("tower-rate-limit-fred", "GCRA", client, &admitting, &denying)
}

#[derive(Clone)]
struct PeerAddress(&'static str);

impl KeyResolver for PeerAddress {
    type ErrorBody = Body;

    fn key<T>(&self, request: &Request<T>) -> Result<Option<Key>, Response<Body>> {
        let address = request.extensions().get::<ConnectInfo<SocketAddr>>();
        Ok(address.map(|ConnectInfo(address)| format!("{}:{}", self.0, address.ip()).into()))
    }
}
