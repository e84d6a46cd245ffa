//! Five failed logins in 15 minutes for each account and address. Successful logins are free.
//!
//! ```console
//! $ cargo run --example logins --features axum
//!
//! $ curl -i -X POST -H 'x-password: wrong' http://127.0.0.1:3000/login/ada
//! HTTP/1.1 401 Unauthorized
//! ratelimit: "logins";r=4;t=900
//!
//! $ curl -i -X POST -H 'x-password: lovelace' http://127.0.0.1:3000/login/ada
//! HTTP/1.1 200 OK
//! ratelimit: "logins";r=3;t=900
//!
//! $ curl -i -X POST -H 'x-password: wrong' http://127.0.0.1:3000/login/ada
//! HTTP/1.1 401 Unauthorized
//! ratelimit: "logins";r=3;t=900
//!
//! $ curl -i -X POST -H 'x-password: wrong' http://127.0.0.1:3000/login/ada
//! $ curl -i -X POST -H 'x-password: wrong' http://127.0.0.1:3000/login/ada
//! $ curl -i -X POST -H 'x-password: wrong' http://127.0.0.1:3000/login/ada
//! HTTP/1.1 401 Unauthorized
//! ratelimit: "logins";r=0;t=900
//!
//! $ curl -i -X POST -H 'x-password: lovelace' http://127.0.0.1:3000/login/ada
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 900
//! ```
//!
//! A login is charged when it is checked and refunded after it has succeeded, so that requests at the same time have five
//! attempts too. The fields are those of the check, before the refund.

use std::{env, error::Error, net::SocketAddr, time::Duration};

use axum::{
    Router,
    extract::Path,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use tokio::net::TcpListener;
use tower_quota::{MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

/// A placeholder for the comparison with a hash of the password.
async fn login(Path(account): Path<String>, headers: HeaderMap) -> Result<&'static str, StatusCode> {
    let has_password = headers.get("x-password").is_some_and(|password| password == "lovelace");
    match account == "ada" && has_password {
        true => Ok("welcome\n"),
        false => Err(StatusCode::UNAUTHORIZED),
    }
}

pub(crate) fn app() -> Router {
    let logins = Policy::new("logins", SlidingLog::new(5, Duration::from_secs(15 * 60)))
        .key((key::ip(), key::path()))
        .refund_if(|completion| completion.is_success());

    Router::new().route(
        "/login/{account}",
        post(login).layer(RateLimitLayer::new(MemoryStore::new(), logins)),
    )
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
