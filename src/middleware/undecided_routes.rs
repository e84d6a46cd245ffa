//! Routes of an application that no layer decides about, for its tests.

use axum::{Router, body::Body};
use http::{Request, Uri};
use tower_service::Service;

use crate::{ConfigError, Decision, key::PeerAddr};

/// The routes of an application whose responses have no [`Decision`]: no policy of any layer applies to them. For tests.
///
/// A route is a path, such as `/users/1`, for `GET`, or a method and a path, such as `POST /login`. Each is called once, without
/// a body and from the peer `192.0.2.1`, so the handlers of these routes run; the result has the routes without a decision in
/// their order. A route that a layer denies has one. One that is refused or blocked has none, and neither has one of which the
/// layer has [`extensions`](crate::RateLimitLayer::extensions) turned off. A layer around the application inserts what keys need,
/// such as the user: `app.layer(Extension(user))`.
///
/// ```
/// use axum::{Router, routing::{get, post}};
/// use tower_quota::{key, undecided_routes, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_quota::ConfigError> {
/// let login = Policy::new("login", SlidingLog::per_minute(5)).key(key::ip());
/// let app: Router = Router::new()
///     .route("/login", post(async || "welcome").layer(RateLimitLayer::new(MemoryStore::new(), login)))
///     .route("/users/{id}", get(async || "ada"));
///
/// assert_eq!(undecided_routes(&app, ["POST /login", "/users/1"]).await?, ["/users/1"]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// If a route is not a path, or a method and a path.
pub async fn undecided_routes<R: AsRef<str>>(
    app: &Router,
    routes: impl IntoIterator<Item = R>,
) -> Result<Vec<String>, ConfigError> {
    let mut undecided = Vec::new();
    for route in routes {
        let route = route.as_ref();
        // The services of a router are always ready.
        let response = app.clone().call(request(route)?).await;
        let Ok(response) = response;
        if response.extensions().get::<Decision>().is_none() {
            undecided.push(route.to_owned());
        }
    }
    Ok(undecided)
}

fn request(route: &str) -> Result<Request<Body>, ConfigError> {
    let invalid = || {
        ConfigError::new(format!(
            "`{route}` is not a route; one looks like `/users/1` or `POST /login`"
        ))
    };
    let (method, path) = route.split_once(' ').unwrap_or(("GET", route));
    let path: Uri = path.trim().parse().map_err(|_| invalid())?;
    if !path.to_string().starts_with('/') {
        return Err(invalid());
    }
    let peer = PeerAddr(([192, 0, 2, 1], 80).into());
    let request = Request::builder().method(method).uri(path).extension(peer);
    request.body(Body::empty()).map_err(|_| invalid())
}
