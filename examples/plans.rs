//! A limit by the plan of the user, which authentication finds in the token. An upgrade keeps what was counted.
//!
//! ```console
//! $ cargo run --example plans --features axum
//!
//! $ curl -i -H 'authorization: Bearer free-42' http://127.0.0.1:3000/search
//! HTTP/1.1 200 OK
//! ratelimit-policy: "search";q=2;w=60
//! ratelimit: "search";r=1;t=60
//!
//! $ curl -i -H 'authorization: Bearer free-42' http://127.0.0.1:3000/search
//! $ curl -i -H 'authorization: Bearer free-42' http://127.0.0.1:3000/search
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//! ratelimit-policy: "search";q=2;w=60
//! ratelimit: "search";r=0;t=60
//!
//! $ curl -i -H 'authorization: Bearer pro-42' http://127.0.0.1:3000/search
//! HTTP/1.1 200 OK
//! ratelimit-policy: "search";q=10;w=60
//! ratelimit: "search";r=7;t=60
//! ```

use std::{env, error::Error};

use axum::{
    Router,
    extract::Request,
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    middleware::{Next, from_fn},
    response::Response,
    routing::get,
};
use tokio::net::TcpListener;
use tower_quota::{MemoryStore, Policy, RateLimitLayer, SlidingLog, key, limit};

/// The user that authentication found.
#[derive(Clone)]
struct User {
    id: String,
    pro: bool,
}

/// A placeholder for real authentication, such as by a signed token with the plan in it.
async fn authenticate(headers: HeaderMap, mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let token = headers.get(AUTHORIZATION).and_then(|token| token.to_str().ok());
    let (plan, id) = token
        .and_then(|token| token.strip_prefix("Bearer ")?.split_once('-'))
        .ok_or(StatusCode::UNAUTHORIZED)?;
    let (id, pro) = (id.to_owned(), plan == "pro");
    request.extensions_mut().insert(User { id, pro });
    Ok(next.run(request).await)
}

pub(crate) fn app() -> Router {
    let by_plan = limit::by(|parts| match parts.extensions.get::<User>() {
        Some(user) if user.pro => SlidingLog::per_minute(10),
        _ => SlidingLog::per_minute(2),
    });
    let search = Policy::new("search", by_plan).key(key::extension("user", |user: &User| user.id.clone()));
    let limit = RateLimitLayer::new(MemoryStore::new(), search);
    Router::new().route(
        "/search",
        get(async || "results\n").layer((from_fn(authenticate), limit)),
    )
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app()).await?;
    Ok(())
}
