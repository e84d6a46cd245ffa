//! A page for operators, behind a password: what the limits are, what they deny, and the counts of one caller.
//!
//! ```console
//! $ cargo run --example admin --features admin
//!
//! $ curl -i http://127.0.0.1:3000/hello
//! $ curl -i http://127.0.0.1:3000/hello
//! HTTP/1.1 200 OK
//! ratelimit: "hello";r=0;t=60
//!
//! $ curl -i http://127.0.0.1:3000/hello
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//!
//! $ curl -i http://127.0.0.1:3000/admin
//! HTTP/1.1 401 Unauthorized
//!
//! $ curl -s -u operator:change-me 'http://127.0.0.1:3000/admin/subject?policy=hello&key=ip%3D127.0.0.1'
//! {"counts":[{"allowed":false,"banned_for_seconds":null,"counted_locally":false,"denial":"quota exceeded","in_place_of":null,"limit":"sliding-log 2/min","observed":false,"quota":2,"remaining":0,"reset_after_seconds":60.0,"retry_after_seconds":60.0,"store_error":null}],"denied":{"denials":1,"error":0,"last_at":1795816800,"subject":"ip=127.0.0.1"},"instance":"hello-1","key":"ip=127.0.0.1","override":null,"policy":"hello","store":1,"subject":"ip=127.0.0.1"}
//!
//! $ curl -i -u operator:change-me -H 'content-type: application/json' -d '{"policy":"hello","key":"ip=127.0.0.1"}' http://127.0.0.1:3000/admin/reset
//! HTTP/1.1 200 OK
//!
//! $ curl -i http://127.0.0.1:3000/hello
//! HTTP/1.1 200 OK
//! ratelimit: "hello";r=1;t=60
//! ```
//!
//! The page is <http://127.0.0.1:3000/admin>. What is shown here is asserted by `tests/it/examples/mod.rs`.

use std::{env, error::Error, net::SocketAddr};

use axum::{
    Router,
    extract::Request,
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::net::TcpListener;
use tower_quota::{Admin, MemoryStore, Policy, RateLimitLayer, SlidingLog, key};

/// `operator:change-me`, a placeholder for the authentication of the application.
const CREDENTIALS: &str = "Basic b3BlcmF0b3I6Y2hhbmdlLW1l";

async fn authenticate(request: Request, next: Next) -> Response {
    let credentials = request.headers().get(header::AUTHORIZATION);
    if credentials.is_some_and(|credentials| credentials == CREDENTIALS) {
        return next.run(request).await;
    }
    let challenge = [(header::WWW_AUTHENTICATE, r#"Basic realm="operators""#)];
    (StatusCode::UNAUTHORIZED, challenge).into_response()
}

pub(crate) fn app() -> Router {
    let hello = Policy::new("hello", SlidingLog::per_minute(2)).key(key::ip());
    let limit = RateLimitLayer::new(MemoryStore::new(), hello);

    let admin = Admin::new()
        .layer(&limit)
        .show_keys(true)
        .instance("hello-1")
        .router_behind_authentication();
    Router::new()
        .route("/hello", get(async || "hi\n").layer(limit))
        .nest("/admin", admin.layer(middleware::from_fn(authenticate)))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
