//! A gRPC server with a limit on one method, and one on all others.

use std::{env, error::Error};

use tonic::{service::Routes, transport::Server};
// limits
use http::request::Parts;
use tower_quota::{Policy, RateLimitLayer, RedisStore, SlidingLog, key, store::Store};

fn is_sign_up(parts: &Parts) -> bool {
    parts.uri.path() == "/app.Users/SignUp"
}
// rest

pub(crate) fn limits(store: impl Store) -> RateLimitLayer {
    // limits
    let sign_ups = Policy::new("sign-ups", SlidingLog::per_hour(5)).key(key::ip());
    let others = Policy::new("others", SlidingLog::per_second(100)).key(key::ip());
    let others = others.apply_if(|parts| !is_sign_up(parts));
    RateLimitLayer::new(store, [sign_ups.apply_if(is_sign_up), others])
    // rest
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = RedisStore::connect(&env::var("REDIS_URL")?).await?; // limits
    Server::builder()
        .layer(limits(store)) // limits
        .add_routes(Routes::default())
        .serve(([127, 0, 0, 1], 50_051).into())
        .await?;
    Ok(())
}
