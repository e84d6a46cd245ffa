//! Limits by name in a configuration file.
//!
//! ```text
//! cargo run --example limits_file --features axum,calendar,file
//!
//! curl -i http://127.0.0.1:3000/hello/sayHi
//! curl -i http://127.0.0.1:3000/search
//! curl -i -X POST -H 'authorization: Bearer token-of-42' http://127.0.0.1:3000/leave
//! ```
//!
//! Change `examples/limits.toml`, or set `LIMITS` to the path of another file. A wrong line is shown when the program
//! starts, and so is a policy that is missing.

use std::{env, net::SocketAddr, process::ExitCode};

use axum::{
    Router,
    extract::Request,
    http::{HeaderValue, StatusCode, header::AUTHORIZATION},
    middleware::{Next, from_fn},
    response::Response,
    routing::{get, post},
};
use tokio::net::TcpListener;
use tower_quota::{ConfigError, MemoryStore, Policies, RateLimitLayer, key};

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

fn app() -> Result<Router, ConfigError> {
    let file =
        env::var("LIMITS").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/examples/limits.toml").into());
    let policies = Policies::from_file(file)?;
    let store = MemoryStore::new();
    let limit = |name| Ok::<_, ConfigError>(RateLimitLayer::new(store.clone(), policies.get(name)?));

    // Only code finds the user, so this policy has its key from here. Users are counted inside of authentication, addresses
    // outside of it.
    let user = key::extension::<UserId>(|user| user.0.to_string());
    let leave_requests = RateLimitLayer::new(store.clone(), policies.unkeyed("leave-requests")?.key(user));
    let leave = post(async || "requested\n").layer((
        limit("authentication")?, // the outermost one
        from_fn(authenticate),
        leave_requests,
    ));

    Ok(Router::new()
        .route("/hello/sayHi", get(async || "hi\n").layer(limit("say-hi")?))
        .route("/search", get(async || "found\n").layer(limit("search")?))
        .route("/leave", leave))
}
