//! Routes of an application that no layer decides about.

use axum::{
    Extension, Router,
    routing::{get, post},
};
use tower_quota::{Limit, MemoryStore, Policy, RateLimitLayer, SlidingLog, key, undecided_routes};

#[derive(Clone)]
struct User(u64);

fn limit(policy: Policy) -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new(), policy)
}

#[tokio::test]
async fn routes_without_a_decision_are_named_in_their_order() {
    let by_address = Policy::new("address", SlidingLog::per_hour(1)).key(key::ip());
    let closed = Policy::new("closed", Limit::DenyAll).key(key::ip());
    let by_user = Policy::new("user", SlidingLog::per_hour(1)).key(key::extension("user", |user: &User| user.0));
    let posts = by_address.clone().apply_if(|parts| parts.method == "POST");
    let app: Router = Router::new()
        .route("/admitted", get(async || "").layer(limit(by_address.clone())))
        .route("/denied", get(async || "").layer(limit(closed)))
        .route(
            "/hidden",
            get(async || "").layer(limit(by_address.clone()).extensions(false)),
        )
        .route("/user", get(async || "").layer(limit(by_user)))
        .route("/posts", get(async || "").post(async || "").layer(limit(posts)))
        .route("/skipped", post(async || "").layer(limit(by_address).skip(|_| true)))
        .route("/open/{id}", get(async || ""));

    let routes = [
        "/open/1?a=b",
        "/admitted",
        "/admitted",
        "/denied",
        "/hidden",
        "/user",
        "/posts",
        "POST /posts",
        "POST /skipped",
        "/missing",
    ];
    let named = undecided_routes(&app, routes).await.expect("good routes");
    assert_eq!(named, ["/open/1?a=b", "/user", "/posts", "POST /skipped", "/missing"]);
    let named = undecided_routes(&app.layer(Extension(User(1))), ["/user"]).await;
    assert_eq!(named.expect("good routes"), [""; 0]);
}

#[tokio::test]
async fn what_is_no_route_is_an_error() {
    for route in ["", "GET", "GET  ", "GE T /a b", "{} /a"] {
        let error = undecided_routes(&Router::new(), [route]).await;
        let error = error.expect_err("no route").to_string();
        assert!(
            error.contains("is not a route; one looks like `/users/1` or `POST /login`"),
            "{error}"
        );
    }
}
