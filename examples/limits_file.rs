//! Limits by name in a configuration file.
//!
//! ```text
//! cargo run --example limits_file --features axum,calendar,serde
//!
//! curl -i http://127.0.0.1:3000/hello/sayHi
//! curl -i http://127.0.0.1:3000/search
//! curl -i -X POST -H 'x-user-id: 42' http://127.0.0.1:3000/leave
//! ```
//!
//! Change `examples/limits.toml`, or set `LIMITS` to the path of another file. A wrong line is shown when the program
//! starts, and so is a policy that is missing.

use std::{env, net::SocketAddr, process::ExitCode};

use axum::{
    Router,
    routing::{get, post},
};
use tokio::net::TcpListener;
use tower_quota::{ConfigError, MemoryStore, Policies, RateLimitLayer};

#[tokio::main]
async fn main() -> ExitCode {
    let app = match app() {
        Ok(app) => app,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await.expect("the address is free");
    println!("listening on http://{addr}");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>())
        .await
        .expect("serving goes on");
    ExitCode::SUCCESS
}

fn app() -> Result<Router, ConfigError> {
    let file =
        env::var("LIMITS").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/examples/limits.toml").into());
    let policies = Policies::from_file(file)?;
    let store = MemoryStore::new();
    let limit = |name| Ok::<_, ConfigError>(RateLimitLayer::new(store.clone(), policies.get(name)?));

    Ok(Router::new()
        .route("/hello/sayHi", get(async || "hi\n").layer(limit("say-hi")?))
        .route("/search", get(async || "found\n").layer(limit("search")?))
        .route("/leave", post(async || "asked for\n").layer(limit("leave-requests")?)))
}
