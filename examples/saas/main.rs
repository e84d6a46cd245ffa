//! A SaaS with logins, plans, mails and webhooks: see the README of this folder.

mod app;
mod webhooks;

use std::{collections::HashMap, env, error::Error, net::SocketAddr, sync::Arc, time::Duration};

use axum::http::Uri;
use tokio::{net::TcpListener, signal};
use tower_quota::{MemoryStore, RedisStore, store::Store};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store: Arc<dyn Store> = match env::var("REDIS_URL") {
        Ok(url) => Arc::new(RedisStore::builder().url(&url).overrides(true).connect().await?),
        Err(_) => {
            println!("this process counts alone; set REDIS_URL for replicas");
            Arc::new(MemoryStore::new())
        }
    };
    let limits = env::var("LIMITS").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/limits.toml").into());
    let receivers = HashMap::from([(10, Uri::from_static("http://127.0.0.1:4000/orders"))]);
    let app = app::app(store.clone(), limits, receivers)?;

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3001".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    // Provides the address of the peer, which is nginx.
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>())
        .with_graceful_shutdown(async { drop(signal::ctrl_c().await) })
        .await?;
    // The last refunds of logins.
    store.drained(Duration::from_secs(5)).await?;
    Ok(())
}
