//! A SaaS with logins, plans, mails and webhooks: see the README of this folder.

mod app;
mod webhooks;

use std::{env, error::Error, net::SocketAddr, time::Duration};

use axum::http::Uri;
use tokio::{
    net::TcpListener,
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    sync::oneshot,
    time::sleep,
};
use tower_quota::{RedisStore, store::Store};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt::init();
    let redis = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".into());
    let store = RedisStore::builder().url(&redis).overrides(true).connect().await?;
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/limits.toml");
    let receivers = [(10, Uri::from_static("http://127.0.0.1:4000/orders"))].into();
    let app = app::app(store.clone(), limits, receivers)?;

    let mut terminated = signal(SignalKind::terminate())?;
    let (ending, ended) = oneshot::channel::<()>();
    let listener = TcpListener::bind(env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3001".into())).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async move {
        tokio::select! {
            _ = terminated.recv() => {}
            _ = ctrl_c() => {}
        }
        drop(ending);
    });
    tokio::select! {
        served = server => served?,
        // Else a request that is never complete would keep the process from ending.
        () = async { drop(ended.await); sleep(Duration::from_secs(20)).await } => {}
    }
    store.drained(Duration::from_secs(5)).await?; // the last refunds of logins
    Ok(())
}
