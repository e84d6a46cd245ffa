//! Limits by name in a configuration file, `examples/limits.toml` or the file that `LIMITS` names.
//!
//! ```console
//! $ cargo run --example limits_file --features axum,calendar,file
//!
//! $ curl -i http://127.0.0.1:3000/hello/sayHi
//! HTTP/1.1 200 OK
//! ratelimit-policy: "say-hi";q=2;w=30
//! ratelimit: "say-hi";r=1;t=30
//!
//! $ curl -i http://127.0.0.1:3000/hello/sayHi
//! $ curl -i http://127.0.0.1:3000/hello/sayHi
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 30
//! ratelimit: "say-hi";r=0;t=30
//!
//! $ curl -i http://127.0.0.1:3000/search
//! ratelimit-policy: "search";q=30;w=3
//! ratelimit: "search";r=29;t=1
//!
//! $ curl -i -X POST http://127.0.0.1:3000/login
//! ratelimit: "login";r=4;t=60
//!
//! $ curl -i http://127.0.0.1:3000/exports/sales
//! ratelimit-policy: "exports";q=3
//! ```
//!
//! The program ends with an error if the file has a wrong line or lacks a policy.

use std::{env, net::SocketAddr, process::ExitCode};

use axum::{
    Router,
    routing::{get, post},
};
use http::request::Parts;
use tokio::net::TcpListener;
use tower_quota::{ConfigError, MemoryStore, Policies, RateLimitLayer, key, key::KeyError};

/// The report that is exported. An unknown name is an error, so a caller cannot make up keys.
fn report(parts: &Parts) -> Result<String, KeyError> {
    match parts.uri.path() {
        "/exports/sales" => Ok("sales".into()),
        "/exports/stock" => Ok("stock".into()),
        _ => Err(KeyError::malformed("no such report")),
    }
}

pub(crate) fn app(file: &str) -> Result<Router, ConfigError> {
    let policies = Policies::from_file(file)?;
    let store = MemoryStore::new();
    let limit = |name| Ok::<_, ConfigError>(RateLimitLayer::new(store.clone(), policies.get(name)?));

    // The key of this policy is a function, so the file has none.
    let exports = policies.unkeyed("exports")?.key(key::from_fn(report));
    let exports = RateLimitLayer::new(store.clone(), exports);

    Ok(Router::new()
        .route("/hello/sayHi", get(async || "hi\n").layer(limit("say-hi")?))
        .route("/search", get(async || "found\n").layer(limit("search")?))
        .route("/login", post(async || "welcome\n").layer(limit("login")?))
        .route("/exports/{report}", get(async || "a file\n").layer(exports)))
}

#[tokio::main]
async fn main() -> ExitCode {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/limits.toml");
    let app = match app(&env::var("LIMITS").unwrap_or_else(|_| default.into())) {
        Ok(app) => app,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };

    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await.expect("the address is free");
    println!("listening on http://{addr}");
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await.expect("the server runs");
    ExitCode::SUCCESS
}
