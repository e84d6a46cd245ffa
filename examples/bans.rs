//! Two failed logins a minute. A caller that continues after that is banned for ten minutes, the next time for twenty.
//!
//! ```console
//! $ cargo run --example bans --features axum
//!
//! $ curl -i -X POST -H 'x-password: wrong' http://127.0.0.1:3000/login
//! $ curl -i -X POST -H 'x-password: wrong' http://127.0.0.1:3000/login
//! HTTP/1.1 401 Unauthorized
//! ratelimit: "logins";r=0;t=60
//!
//! $ curl -i -X POST -H 'x-password: wrong' http://127.0.0.1:3000/login
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//!
//! $ curl -i -X POST -H 'x-password: wrong' http://127.0.0.1:3000/login
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 600
//! ratelimit: "logins";r=0;t=600
//!
//! $ curl -i -X POST -H 'x-password: lovelace' http://127.0.0.1:3000/login
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 600
//!
//! $ curl -i -X DELETE http://127.0.0.1:3000/bans/127.0.0.1
//! HTTP/1.1 401 Unauthorized
//!
//! $ curl -i -X DELETE -u support:change-me http://127.0.0.1:3000/bans/127.0.0.1
//! HTTP/1.1 200 OK
//!
//! $ curl -i -X POST -H 'x-password: lovelace' http://127.0.0.1:3000/login
//! HTTP/1.1 200 OK
//! ratelimit: "logins";r=1;t=60
//! ```
//!
//! The key is the address, so a ban is one of all callers that share it: ten minutes, and not a day. What is shown here is
//! asserted by `tests/it/examples/mod.rs`.

use std::{
    env,
    error::Error,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use axum::{
    Router,
    extract::Path,
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    routing::{delete, post},
};
use tokio::net::TcpListener;
use tower_quota::{Ban, Key, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

const MINUTE: Duration = Duration::from_secs(60);

/// `support:change-me`, a placeholder for the authentication of the application.
const CREDENTIALS: &str = "Basic c3VwcG9ydDpjaGFuZ2UtbWU=";

/// A placeholder for the comparison with a hash of the password.
async fn login(headers: HeaderMap) -> Result<&'static str, StatusCode> {
    match headers.get("x-password").is_some_and(|password| password == "lovelace") {
        true => Ok("welcome\n"),
        false => Err(StatusCode::UNAUTHORIZED),
    }
}

pub(crate) fn app() -> Router {
    let store = MemoryStore::new();
    let logins = Policy::new("logins", SlidingLog::per_minute(2))
        .key(key::ip())
        .ban(Ban::after(2, 60 * MINUTE).first(10 * MINUTE).longest(60 * MINUTE));
    let limiter = Limiter::new(store.clone(), logins.clone());
    let layer = RateLimitLayer::new(store, logins.refund_if(|completion| completion.is_success()));
    // The page of another site may send forms with the browser of its visitor, and would ban the visitor.
    let layer = layer.block(|parts| {
        parts
            .headers
            .get("sec-fetch-site")
            .is_some_and(|site| site == "cross-site")
    });

    let lift = async move |headers: HeaderMap, Path(address): Path<IpAddr>| {
        if headers.get(AUTHORIZATION).is_none_or(|given| given != CREDENTIALS) {
            return StatusCode::UNAUTHORIZED;
        }
        match limiter.reset(Key::ip(address)).await {
            Ok(()) => StatusCode::OK,
            Err(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    };
    Router::new()
        .route("/login", post(login).layer(layer))
        .route("/bans/{address}", delete(lift))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
