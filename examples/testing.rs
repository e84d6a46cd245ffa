//! An application and its test, which needs neither Redis nor time.
//!
//! ```console
//! $ cargo test --example testing --features axum
//!
//! $ cargo run --example testing --features axum
//!
//! $ curl -i http://127.0.0.1:3000/hello
//! HTTP/1.1 200 OK
//! ratelimit: "hello";r=1;t=60
//!
//! $ curl -i http://127.0.0.1:3000/hello
//! $ curl -i http://127.0.0.1:3000/hello
//! HTTP/1.1 429 Too Many Requests
//! retry-after: 60
//! ```

use std::{env, error::Error, net::SocketAddr};

use axum::{Router, routing::get};
use tokio::net::TcpListener;
use tower_quota::{MemoryStore, Policy, RateLimitLayer, SlidingLog, key, store::Store};

/// The store is a parameter: `main` of a real application gives it a `RedisStore`.
pub(crate) fn app(store: impl Store) -> Router {
    let hello = Policy::new("hello", SlidingLog::per_minute(2)).key(key::ip());
    Router::new().route("/hello", get(async || "hi\n").layer(RateLimitLayer::new(store, hello)))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(&addr).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let service = app(MemoryStore::new()).into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::{body::Body, extract::connect_info::MockConnectInfo, response::Response};
    use http::{Request, StatusCode};
    use tower::ServiceExt;
    use tower_quota::ManualClock;

    use super::*;

    async fn hello(app: &Router) -> Response {
        let request = Request::get("/hello").body(Body::empty()).expect("a request");
        app.clone().oneshot(request).await.expect("a response")
    }

    #[tokio::test]
    async fn two_requests_a_minute_are_admitted() {
        let clock = ManualClock::new();
        let store = MemoryStore::builder().manual_clock(&clock).build();
        let app = app(store).layer(MockConnectInfo(SocketAddr::from(([203, 0, 113, 7], 4711))));

        assert_eq!(hello(&app).await.headers()["ratelimit"], r#""hello";r=1;t=60"#);
        clock.advance(Duration::from_secs(20));
        assert_eq!(hello(&app).await.headers()["ratelimit"], r#""hello";r=0;t=60"#);

        let denied = hello(&app).await;
        assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(denied.headers()["retry-after"], "40");
        clock.advance(Duration::from_secs(40));
        assert_eq!(hello(&app).await.status(), StatusCode::OK);
    }
}
