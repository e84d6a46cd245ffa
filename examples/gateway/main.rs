//! A gateway to language models: see the README of this folder.

mod app;

use std::{env, error::Error, sync::Arc, time::Duration};

use tokio::{net::TcpListener, signal};
use tower_quota::{MemoryStore, RedisStore, store::Store};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store: Arc<dyn Store> = match env::var("REDIS_URL") {
        Ok(url) => Arc::new(RedisStore::connect(&url).await?),
        Err(_) => {
            println!("this process counts alone; set REDIS_URL for replicas");
            Arc::new(MemoryStore::new())
        }
    };
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app::app(store.clone()))
        .with_graceful_shutdown(async { drop(signal::ctrl_c().await) })
        .await?;
    // The last settlements, and the slots of streams that were cut.
    store.drained(Duration::from_secs(5)).await?;
    Ok(())
}
