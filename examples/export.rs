//! An export that takes seconds: one at a time and three an hour for each user, while clients and proxies retry.
//!
//! ```console
//! $ cargo run --example export --features axum
//!
//! $ curl -i -X POST http://127.0.0.1:3000/export
//! HTTP/1.1 200 OK
//! ratelimit: "running";r=0;t=10, "exports";r=2;t=3600
//!
//! $ curl -i -X POST http://127.0.0.1:3000/export
//! $ curl -i -X POST http://127.0.0.1:3000/export
//! $ curl -i -X POST http://127.0.0.1:3000/export
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 3594
//! ratelimit: "running";r=1;t=0, "exports";r=0;t=3594
//! ```
//!
//! A second request during an export is denied by `running`, and `exports` does not count it. If the process ends during an
//! export, its slot is free after 10 s.

use std::{env, error::Error, time::Duration};

use axum::{Extension, Router, http::StatusCode, routing::post};
use tokio::{
    net::TcpListener,
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    sync::oneshot,
    task::JoinError,
    time::sleep,
};
use tower_quota::{Concurrency, Decision, MemoryStore, Policy, RateLimitLayer, SlidingLog, key, store::Store};

/// The user that authentication found.
#[derive(Clone)]
pub(crate) struct UserId(pub(crate) u64);

/// The two limits, which are decided together. The store is a `RedisStore` where there are several replicas.
pub(crate) fn limit(store: impl Store) -> RateLimitLayer {
    let user = || key::extension("user", |user: &UserId| user.0);
    let running = Policy::new("running", Concurrency::new(1)).key(user());
    let exports = Policy::new("exports", SlidingLog::per_hour(3)).key(user());
    RateLimitLayer::new(store, [running, exports])
}

/// Runs an export to its end, even if the caller leaves, and then admits the next one.
pub(crate) async fn run<T: Send + 'static>(
    decision: Decision,
    export: impl Future<Output = T> + Send + 'static,
) -> Result<T, JoinError> {
    let running = decision.take_slots();
    let task = tokio::spawn(async {
        let exported = export.await;
        drop(running);
        exported
    });
    task.await
}

async fn export(decision: Decision) -> Result<&'static str, StatusCode> {
    let rows = async {
        sleep(Duration::from_secs(2)).await;
        "id,name\n"
    };
    run(decision, rows).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

pub(crate) fn app(store: impl Store) -> Router {
    // The extension stands for authentication.
    let layers = (Extension(UserId(42)), limit(store));
    Router::new().route("/export", post(export).layer(layers))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let store = MemoryStore::new();
    let mut terminated = signal(SignalKind::terminate())?;
    let (ending, ended) = oneshot::channel::<()>();
    let server = axum::serve(listener, app(store.clone())).with_graceful_shutdown(async move {
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
    // An export whose caller has left has 5 s to end.
    store.drained(Duration::from_secs(5)).await?;
    Ok(())
}
