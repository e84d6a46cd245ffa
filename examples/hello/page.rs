//! The page at `/`. It calls the routes and draws what the fields of their responses report.

use std::time::Duration;

use axum::{
    Router,
    http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE},
    response::IntoResponse,
    routing::{MethodRouter, get},
};
use tower_quota::{
    FixedWindow, Limit, Policy, RateLimitLayer, SlidingCounter, SlidingLog, TokenBucket, key, store::Store,
};

const QUOTA: u64 = 4;
const WINDOW: Duration = Duration::from_secs(10);

/// A browser loads nothing from another server.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                              base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The files of the page, and a route with the same quota for each algorithm.
pub(crate) fn routes(store: &(impl Store + Clone)) -> Router {
    let limited = |name, limit| limited(store.clone(), name, limit);
    Router::new()
        .route("/", file("text/html; charset=utf-8", include_str!("page.html")))
        .route("/hello.css", file("text/css; charset=utf-8", include_str!("page.css")))
        .route(
            "/hello.js",
            file("text/javascript; charset=utf-8", include_str!("page.js")),
        )
        .route(
            "/hello/sliding-log",
            limited("sliding-log", SlidingLog::new(QUOTA, WINDOW).into()),
        )
        .route(
            "/hello/sliding-counter",
            limited("sliding-counter", SlidingCounter::new(QUOTA, WINDOW).into()),
        )
        .route(
            "/hello/fixed-window",
            limited("fixed-window", FixedWindow::new(QUOTA, WINDOW).into()),
        )
        .route(
            "/hello/token-bucket",
            limited("token-bucket", TokenBucket::new(QUOTA, WINDOW).into()),
        )
}

fn limited(store: impl Store, name: &'static str, limit: Limit) -> MethodRouter {
    get(async || "hi\n").layer(RateLimitLayer::new(store, Policy::new(name, limit).key(key::ip())))
}

fn file(content_type: &'static str, text: &'static str) -> MethodRouter {
    let fields = [(CONTENT_TYPE, content_type), (CONTENT_SECURITY_POLICY, CONTENT_POLICY)];
    get(async move || (fields, text).into_response())
}
