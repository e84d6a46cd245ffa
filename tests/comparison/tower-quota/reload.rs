//! Limits in a file, which is read again when it has changed.

use std::{env, error::Error, net::SocketAddr, time::Duration};

use axum::{
    Router,
    routing::{get, post},
};
use tokio::net::TcpListener;
use tower_quota::{ConfigError, Policies, RateLimitLayer, RedisStore, store::Store}; // limits

pub(crate) fn app(store: &(impl Store + Clone), policies: &Policies) -> Result<Router, ConfigError> {
    let limit = |name| Ok::<_, ConfigError>(RateLimitLayer::new(store.clone(), policies.get(name)?)); // limits
    Ok(Router::new()
        .route("/search", get(async || "results\n").layer(limit("search")?)) // limits
        .route("/login", post(async || "welcome\n").layer(limit("login")?))) // limits
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // limits
    let store = RedisStore::connect(&env::var("REDIS_URL")?).await?;
    let policies = Policies::from_file("limits.toml")?;
    policies.reload_on_change(Duration::from_secs(5))?;
    // rest
    let service = app(&store, &policies)?.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(TcpListener::bind("127.0.0.1:3000").await?, service).await?;
    Ok(())
}
