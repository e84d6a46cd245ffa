#[cfg(feature = "axum")]
use http::request::Parts;

use super::key::Key;
#[cfg(feature = "axum")]
use super::{
    error::KeyError,
    extractor::{KeyExtractor, inherent_or},
};

/// The template of the matched route, such as `/users/{id}`.
///
/// Requests that match no route share one key, so the number of keys is the number of routes and one more, whatever callers
/// send. The template is that of axum's `MatchedPath`: the layer is added to a router, not around
/// `Router::nest_service`, outside of which the template is not known.
///
/// ```
/// use axum::{Router, body::Body, routing::get};
/// use http::{Request, StatusCode};
/// use tower::ServiceExt;
/// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // All users together, 1 request per minute.
/// let users = Policy::new("users", SlidingLog::per_minute(1)).key(key::route());
///
/// let app: Router = Router::new()
///     .route("/users/{id}", get(|| async { "hello" }))
///     .layer(RateLimitLayer::new(MemoryStore::new(), users));
///
/// let response = app.clone().oneshot(Request::get("/users/1").body(Body::empty())?).await?;
/// assert_eq!(response.status(), StatusCode::OK);
/// let response = app.oneshot(Request::get("/users/2").body(Body::empty())?).await?;
/// assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "axum")]
pub fn route() -> Route {
    Route(())
}

/// A [`KeyExtractor`] made by [`route`].
#[cfg(feature = "axum")]
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Route(());

#[cfg(feature = "axum")]
inherent_or!(Route);

#[cfg(feature = "axum")]
impl KeyExtractor for Route {
    fn extract(&self, parts: &Parts) -> Result<Option<Key>, KeyError> {
        Ok(Some(match parts.extensions.get::<::axum::extract::MatchedPath>() {
            Some(matched) => Key::route(matched.as_str()),
            None => Key::unmatched_route(),
        }))
    }
}

impl Key {
    /// The key that [`route`](fn@super::route) returns for a request to a route with this template.
    ///
    /// In a nested router the template includes the prefix.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// assert_eq!(Key::route("/users/{id}").to_string(), "route=/users/^7Bid^7D");
    /// ```
    pub fn route(template: &str) -> Self {
        Self::component("route", b"", template.as_bytes())
    }

    /// The key that [`route`](fn@super::route) makes of all requests that match no route.
    ///
    /// ```
    /// use tower_quota::Key;
    ///
    /// assert_ne!(Key::unmatched_route(), Key::route(""));
    /// ```
    pub fn unmatched_route() -> Self {
        Self::plain("unmatched", "")
    }
}
