//! [`Decision`] as an extractor.

use std::sync::atomic::{AtomicBool, Ordering};

use axum::{
    Router,
    body::Body,
    extract::{FromRequestParts, OptionalFromRequestParts},
    http::{StatusCode, request::Parts},
    response::{IntoResponse, Response},
};
use http::{Request, Uri};
use tower_service::Service;

use super::response::{Problem, Rejection, respond};
use crate::{ConfigError, Decision, Denied, decide::PolicyDecisions, key::PeerAddr, store::StoreError};

/// Extracts the decision of the layer around the handler.
///
/// If no policy applies to the request, or the store failed and the [`FailureMode`](crate::FailureMode) is `Open`, the
/// decision is allowed and has no policies: [`remaining`](Decision::remaining) is `u64::MAX` then. A handler that sends the
/// number reads that of a [policy](Decision::policies).
///
/// Without a layer around the handler, or with its [`extensions`](crate::RateLimitLayer::extensions) turned off, the response
/// is `500 Internal Server Error`, as for any missing extension in axum. So the first test of the route finds a missing layer.
/// `Option<Decision>` is `None` then, for a handler that is used with and without a layer.
///
/// ```
/// use axum::{Router, body::Body, routing::get};
/// use http::{Request, StatusCode};
/// use http_body_util::BodyExt;
/// use tower::ServiceExt;
/// use tower_quota::{key, Decision, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// async fn hello(decision: Option<Decision>) -> String {
///     match decision.iter().flat_map(Decision::policies).next() {
///         Some(policy) => format!("hello, {} more times", policy.remaining()),
///         None => "hello".to_owned(),
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let policy = Policy::new("hello", SlidingLog::per_minute(1)).key(key::constant("all"));
/// let app: Router = Router::new()
///     .route("/", get(hello).layer(RateLimitLayer::new(MemoryStore::new(), policy)))
///     .route("/unlimited", get(hello));
/// let get = |path| app.clone().oneshot(Request::get(path).body(Body::empty()).unwrap());
///
/// let admitted = get("/").await?;
/// assert_eq!(admitted.headers()["ratelimit"], r#""hello";r=0;t=60"#);
/// assert_eq!(admitted.into_body().collect().await?.to_bytes(), "hello, 0 more times");
///
/// let denied = get("/").await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(denied.headers()["retry-after"], "60");
///
/// let unlimited = get("/unlimited").await?;
/// assert_eq!(unlimited.into_body().collect().await?.to_bytes(), "hello");
/// # Ok(())
/// # }
/// ```
impl<S: Send + Sync> FromRequestParts<S> for Decision {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        parts.extensions.get::<Self>().cloned().ok_or_else(missing_decision)
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for Decision {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}

fn missing_decision() -> (StatusCode, &'static str) {
    const FIX: &str = "no layer has left a decision on this request; put a `RateLimitLayer` around the handler, with its extensions \
                       on, or take an `Option<Decision>`";
    static LOGGED: AtomicBool = AtomicBool::new(false);

    if !LOGGED.swap(true, Ordering::Relaxed) {
        tracing::error!(error = FIX, "a handler cannot run");
    }
    (StatusCode::INTERNAL_SERVER_ERROR, FIX)
}

/// The response as for a `GET` of `/`: a handler is left without the request. For a format that reads the request, or a gRPC
/// call, use [`Denied::response_to`].
impl IntoResponse for Denied {
    fn into_response(self) -> Response {
        self.response_to(&no_request()).map(Body::from)
    }
}

/// `503 Service Unavailable` with `Retry-After`, in the format [`Problem`]; of what is [not possible](crate::store::ErrorKind::Invalid) the
/// response of the layer to such a request, or `500`.
///
/// ```
/// use axum::response::IntoResponse;
/// use tower_quota::store::{ErrorKind, StoreError};
///
/// let response = StoreError::new(ErrorKind::Unreachable, "connection refused").into_response();
/// assert_eq!(response.status(), 503);
/// assert_eq!(response.headers()["retry-after"], "1");
/// ```
impl IntoResponse for StoreError {
    fn into_response(self) -> Response {
        Rejection::of_error(&self, |rejection| respond(&Problem, rejection, &no_request())).map(Body::from)
    }
}

fn no_request() -> Parts {
    Request::new(()).into_parts().0
}

/// The routes of an application for which no layer makes a [`Decision`]: no policy of any layer applies to them. For tests.
///
/// A route is a path, such as `/users/1`, for `GET`, or a method and a path, such as `POST /login`. Each is called once, without
/// a body and from the peer `192.0.2.1`, so the handlers of these routes run; the result has the routes without a decision in
/// their order. A route that a layer denies has one. One that is refused or blocked has none, nor has one
/// that a layer around the limit rejects, such as authentication: let the test pass it. A layer around the
/// application inserts what keys need, such as the user: `app.layer(Extension(user))`.
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
        let around = Decision::new(true, PolicyDecisions::new());
        let mut request = request(route)?;
        request.extensions_mut().insert(around.clone());
        // The services of a router are always ready.
        let Ok(_) = app.clone().call(request).await;
        if !around.is_followed() {
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
