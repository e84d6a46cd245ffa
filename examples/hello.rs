//! Two limits on an axum router: two calls in any 30 seconds for each address and path, and five a minute for each user.
//!
//! ```text
//! cargo run --example hello --features axum
//! REDIS_URL=redis://127.0.0.1:6379 cargo run --example hello --features axum
//!
//! curl -i http://127.0.0.1:3000/hello/sayHi
//! curl -i -H 'authorization: Bearer token-of-42' http://127.0.0.1:3000/hello/user
//! ```

use std::{env, error::Error, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::Request,
    http::{HeaderValue, StatusCode, header::AUTHORIZATION},
    middleware::{Next, from_fn},
    response::Response,
    routing::get,
};
use tokio::net::TcpListener;
use tower_quota::{MemoryStore, Policy, RateLimitLayer, RedisStore, SlidingLog, key, store::Store};

/// The user that authentication found.
#[derive(Clone)]
struct UserId(u64);

/// Takes the place of real authentication, which a header alone is not. It accepts one token.
async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let user = match request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes) {
        Some(b"Bearer token-of-42") => UserId(42),
        _ => return Err(StatusCode::UNAUTHORIZED),
    };
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store: Arc<dyn Store> = match env::var("REDIS_URL") {
        Ok(url) => Arc::new(RedisStore::connect(&url).await?),
        Err(_) => {
            println!("counting in memory; set REDIS_URL to count in Redis");
            Arc::new(MemoryStore::new())
        }
    };

    let say_hi = Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30))).key((key::ip(), key::path()));
    let user = key::extension::<UserId>(|user| user.0.to_string());
    let per_user = Policy::new("per-user", SlidingLog::per_minute(5)).key(user);
    // Outside of authentication, so that guesses of tokens count.
    let attempts = Policy::new("attempts", SlidingLog::per_minute(20)).key(key::ip());

    let app = Router::new()
        .route(
            "/hello/sayHi",
            get(async || "hi\n").layer(RateLimitLayer::new(store.clone(), say_hi)),
        )
        .route(
            "/hello/user",
            get(async || "hi, you\n").layer((
                RateLimitLayer::new(store.clone(), attempts), // the outermost one
                from_fn(authenticate),
                RateLimitLayer::new(store, per_user),
            )),
        );

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
