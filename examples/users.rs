//! A limit for each user inside of authentication, and one for each address outside of it.
//!
//! The outer limit also counts requests whose authentication fails, so it limits attempts to guess a token.
//!
//! ```console
//! $ cargo run --example users --features axum
//!
//! $ curl -i -H 'authorization: Bearer token-of-42' http://127.0.0.1:3000/inbox
//! HTTP/1.1 200 OK
//! ratelimit: "users";r=1;t=60, "attempts";r=4;t=60
//!
//! $ curl -i -H 'authorization: Bearer token-of-42' http://127.0.0.1:3000/inbox
//! $ curl -i -H 'authorization: Bearer token-of-42' http://127.0.0.1:3000/inbox
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//! ratelimit: "users";r=0;t=60, "attempts";r=2;t=60
//!
//! $ curl -i -H 'authorization: Bearer a-guess' http://127.0.0.1:3000/inbox
//! HTTP/1.1 401 Unauthorized
//! ratelimit: "attempts";r=1;t=60
//!
//! $ curl -i -H 'authorization: Bearer a-guess' http://127.0.0.1:3000/inbox
//! $ curl -i -H 'authorization: Bearer a-guess' http://127.0.0.1:3000/inbox
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//! ratelimit: "attempts";r=0;t=60
//! ```

use std::{env, error::Error, net::SocketAddr};

use axum::{
    Router,
    extract::Request,
    http::{StatusCode, header::AUTHORIZATION},
    middleware::{Next, from_fn},
    response::Response,
    routing::get,
};
use tokio::net::TcpListener;
use tower_quota::{MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

/// The user that authentication found.
#[derive(Clone)]
struct UserId(u64);

/// A placeholder for real authentication. It accepts one token.
async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let token = request.headers().get(AUTHORIZATION).ok_or(StatusCode::UNAUTHORIZED)?;
    if token != "Bearer token-of-42" {
        return Err(StatusCode::UNAUTHORIZED);
    }
    request.extensions_mut().insert(UserId(42));
    Ok(next.run(request).await)
}

pub(crate) fn app() -> Router {
    let store = MemoryStore::new();
    let attempts = Policy::new("attempts", SlidingLog::per_minute(5)).key(key::ip());
    let user = key::extension("user", |user: &UserId| user.0);
    let users = Policy::new("users", SlidingLog::per_minute(2)).key(user);

    Router::new().route(
        "/inbox",
        get(async || "no mail\n").layer((
            RateLimitLayer::new(store.clone(), attempts), // the outermost layer
            from_fn(authenticate),
            RateLimitLayer::new(store, users),
        )),
    )
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
