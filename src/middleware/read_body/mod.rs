//! Bodies of requests that limits depend on.

mod service;

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::request::Parts;
#[cfg(feature = "serde")]
use serde::de::DeserializeOwned;

pub use self::service::{ReadBody, ReadBodyFuture};
use super::drain::Bounds;
use crate::{
    decision::response::{BodyError, Negotiated},
    response::ResponseFormat,
};

/// Layer that reads the body of each request, within bounds, and inserts what it contains into the extensions of the request.
///
/// A [`RateLimitLayer`](crate::RateLimitLayer) sees the head of a request only. Inside of this layer its keys, costs, conditions
/// and plans depend on the body too: [`key::extension`](fn@crate::key::extension), [`Policy::cost_fn`](crate::Policy::cost_fn),
/// [`Policy::apply_if`](crate::Policy::apply_if) and [`limit::by`](crate::limit::by()) find the value by its type. The inner
/// service receives the same body again, from the bytes that were read; trailers of a request are not passed on.
///
/// | constructor | the value in the extensions |
/// | --- | --- |
#[cfg_attr(feature = "serde", doc = "| [`json::<T>`](Self::json) | a `T`, parsed from JSON |")]
/// | [`text`](Self::text) | a `String` |
/// | [`bytes`](Self::bytes) | [`Bytes`] |
/// | [`parse`](Self::parse) | what a function returns, such as the fields of a form |
#[cfg_attr(
    feature = "serde",
    doc = r##"
The cost of a completion is the number of tokens that its body requests:

```
use std::time::Duration;
use axum::{Json, Router, body::Body, routing::post};
use http::{Request, StatusCode};
use serde::Deserialize;
use tower::{ServiceBuilder, ServiceExt};
use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, ReadBodyLayer, SlidingLog};

#[derive(Clone, Deserialize)]
struct Completion { max_tokens: u64 }

# #[tokio::main(flavor = "current_thread", start_paused = true)]
# async fn main() -> Result<(), Box<dyn std::error::Error>> {
let tokens = Policy::new("tokens", SlidingLog::per_minute(1_000))
    .key(key::constant("all"))
    .cost_fn(|parts| parts.extensions.get::<Completion>().map_or(1, |completion| completion.max_tokens));
let limit = ServiceBuilder::new()
    .layer(ReadBodyLayer::json::<Completion>(64 << 10, Duration::from_secs(10)))
    .layer(RateLimitLayer::new(MemoryStore::new(), tokens));
let complete = async |Json(completion): Json<Completion>| completion.max_tokens.to_string();
let app: Router = Router::new().route("/complete", post(complete).layer(limit));

for (body, status, remaining) in [
    (r#"{"max_tokens":700}"#, StatusCode::OK, Some(r#""tokens";r=300;t=60"#)),
    (r#"{"max_tokens":400}"#, StatusCode::TOO_MANY_REQUESTS, Some(r#""tokens";r=0;t=60"#)),
    (r#"{"max_tokens":"#, StatusCode::BAD_REQUEST, None),
    (r#"{"max_tokens":"many"}"#, StatusCode::UNPROCESSABLE_ENTITY, None),
] {
    let request = Request::post("/complete").header("content-type", "application/json").body(Body::from(body))?;
    let response = app.clone().oneshot(request).await?;
    assert_eq!(response.status(), status);
    let fields = response.headers().get("ratelimit");
    assert_eq!(fields.map(|fields| fields.to_str().unwrap()), remaining);
}
# Ok(())
# }
```
"##
)]
///
/// # Bounds
///
/// A body of more bytes than the first bound is rejected with `413`: before anything is read if its length is declared, else
/// when it exceeds the bound. One that is not complete after the second bound, from the call of the service on, is rejected with
/// `408`. A service holds at most twice the bound in bytes for a request, and what the value takes. A request that is rejected
/// is not counted by the limits inside of this layer, so a limit by address outside of it, on requests that need no body, bounds
/// how many bodies a client sends.
///
/// [`BodyError`] has all reasons with their status; [`format`](Self::format) builds other responses.
///
/// # Requests without a body
///
/// A request with an empty body and a method that needs none (`GET`, `HEAD`, `OPTIONS`, `TRACE`, `DELETE`) passes without a value
/// in its extensions; so does a `CONNECT`, whose body is not read. An empty body of another method is a body: as JSON it is
/// malformed.
///
/// # Rejected uploads
///
/// On HTTP/1.x the content of a rejected request that was not read lies on the connection before the next request. The response
/// has `Connection: close` then, as that of a [`RateLimitLayer`](crate::RateLimitLayer#large-request-bodies), and
/// [`drain_body`](Self::drain_body) reads the rest within bounds. A [`RateLimitLayer`](crate::RateLimitLayer) inside of this
/// layer denies requests whose bodies are read, so the connection stays open without draining.
#[derive(Clone)]
#[must_use]
pub struct ReadBodyLayer {
    settings: Arc<Settings>,
}

/// Parses a body and inserts the value.
type Insert = Arc<dyn Fn(&mut Parts, &Bytes) -> Result<(), BodyError> + Send + Sync>;

#[derive(Clone)]
struct Settings {
    bounds: Bounds,
    insert: Insert,
    format: Arc<dyn ResponseFormat>,
    drained: Option<Bounds>,
}

/// Constructors: the bounds are a number of bytes, and the time until the body is complete.
impl ReadBodyLayer {
    /// Parses the body as JSON, and inserts the value of this type.
    ///
    /// The content type is not compared: the handler does, as `axum::Json`. Text that is not JSON is rejected with `400`, and
    /// JSON of another shape with `422`, as `axum::Json` does. See the [type](Self) for an example.
    #[cfg(feature = "serde")]
    pub fn json<T>(bytes: u64, time: Duration) -> Self
    where
        T: DeserializeOwned + Clone + Send + Sync + 'static,
    {
        Self::new(bytes, time, |_, body| {
            serde_json::from_slice::<T>(body).map_err(|error| BodyError::of_json(&error))
        })
    }

    /// Inserts the body as a `String`. One that is not UTF-8 is rejected with `400`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use bytes::Bytes;
    /// use http::{Request, Response, StatusCode};
    /// use http_body_util::Full;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::ReadBodyLayer;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = ReadBodyLayer::text(1 << 10, Duration::from_secs(10));
    /// let service = layer.layer(service_fn(async |request: Request<Full<Bytes>>| {
    ///     assert_eq!(request.extensions().get::<String>().map(String::as_str), Some("hello"));
    ///     Ok::<_, std::convert::Infallible>(Response::new(request.into_body()))
    /// }));
    ///
    /// let admitted = service.clone().oneshot(Request::post("/").body(Full::from("hello"))?).await?;
    /// assert_eq!(admitted.status(), StatusCode::OK);
    /// let rejected = service.oneshot(Request::post("/").body(Full::from(&b"\xff"[..]))?).await?;
    /// assert_eq!(rejected.status(), StatusCode::BAD_REQUEST);
    /// assert_eq!(rejected.headers()["content-type"], "application/problem+json");
    /// # Ok(())
    /// # }
    /// ```
    pub fn text(bytes: u64, time: Duration) -> Self {
        Self::new(bytes, time, |_, body| match str::from_utf8(body) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(BodyError::malformed("it is not UTF-8")),
        })
    }

    /// Inserts the body as [`Bytes`], which are not copied.
    ///
    /// ```
    /// use std::time::Duration;
    /// use bytes::Bytes;
    /// use http::{Request, Response};
    /// use http_body_util::{BodyExt, Full};
    /// use tower::{ServiceBuilder, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, ReadBodyLayer, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let traffic = Policy::new("traffic", SlidingLog::per_minute(1_000))
    ///     .key(key::constant("all"))
    ///     .cost_fn(|parts| parts.extensions.get::<Bytes>().map_or(1, |body| body.len() as u64));
    /// let service = ServiceBuilder::new()
    ///     .layer(ReadBodyLayer::bytes(1 << 20, Duration::from_secs(10)))
    ///     .layer(RateLimitLayer::new(MemoryStore::new(), traffic))
    ///     .service(service_fn(async |request: Request<Full<Bytes>>| {
    ///         Ok::<_, std::convert::Infallible>(Response::new(request.into_body()))
    ///     }));
    ///
    /// let response = service.oneshot(Request::post("/").body(Full::from("hello"))?).await?;
    /// assert_eq!(response.headers()["ratelimit"], r#""traffic";r=995;t=60"#);
    /// assert_eq!(response.into_body().collect().await?.to_bytes(), "hello");
    /// # Ok(())
    /// # }
    /// ```
    pub fn bytes(bytes: u64, time: Duration) -> Self {
        Self::new(bytes, time, |_, body| Ok(body.clone()))
    }

    /// Inserts what a function returns. If it returns an error, the request is rejected with `400` and the text of the error.
    ///
    /// ```
    /// use std::time::Duration;
    /// use axum::{Router, body::Body, routing::post};
    /// use http::Request;
    /// use tower::{ServiceBuilder, ServiceExt};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, ReadBodyLayer, SlidingLog};
    ///
    /// #[derive(Clone)]
    /// struct Account(String);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let read = ReadBodyLayer::parse(1 << 10, Duration::from_secs(10), |_, body| {
    ///     let form = str::from_utf8(body).ok().and_then(|form| form.split_once(' '));
    ///     let (account, _password) = form.ok_or("it is not an account and a password")?;
    ///     Ok::<_, &str>(Account(account.to_lowercase()))
    /// });
    /// let logins = Policy::new("logins", SlidingLog::per_hour(1)).key(key::extension("account", |account: &Account| account.0.clone()));
    /// let limit = ServiceBuilder::new().layer(read).layer(RateLimitLayer::new(MemoryStore::new(), logins));
    /// let app: Router = Router::new().route("/login", post(async |form: String| form).layer(limit));
    ///
    /// for (form, status) in [("ada secret", 200), ("Ada guess", 429), ("alan secret", 200), ("ada", 400)] {
    ///     let request = Request::post("/login").body(Body::from(form))?;
    ///     assert_eq!(app.clone().oneshot(request).await?.status(), status);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn parse<T, E>(
        bytes: u64,
        time: Duration,
        parse: impl Fn(&Parts, &Bytes) -> Result<T, E> + Send + Sync + 'static,
    ) -> Self
    where
        T: Clone + Send + Sync + 'static,
        E: fmt::Display,
    {
        Self::new(bytes, time, move |parts, body| {
            parse(parts, body).map_err(|error| BodyError::malformed(error.to_string()))
        })
    }

    fn new<T>(
        bytes: u64,
        time: Duration,
        parse: impl Fn(&Parts, &Bytes) -> Result<T, BodyError> + Send + Sync + 'static,
    ) -> Self
    where
        T: Clone + Send + Sync + 'static,
    {
        let insert: Insert = Arc::new(move |parts, body| {
            let value = parse(parts, body)?;
            parts.extensions.insert(value);
            Ok(())
        });
        Self {
            settings: Arc::new(Settings {
                bounds: Bounds { bytes, time },
                insert,
                format: Arc::new(Negotiated::default()),
                drained: None,
            }),
        }
    }
}

/// Settings.
impl ReadBodyLayer {
    /// Sets the format of the responses to rejected requests: that of the limits inside, if it is the same.
    ///
    /// The reason is [`Rejection::Unread`](crate::response::Rejection::Unread), and [`BodyError`] has an example. The default is
    /// [`Negotiated`].
    pub fn format(mut self, format: impl ResponseFormat) -> Self {
        self.settings_mut().format = Arc::new(format);
        self
    }

    /// Reads the rest of the body of a rejected request on HTTP/1.x before the response, up to this many bytes and for up to this
    /// long, as [`RateLimitLayer::drain_body`](crate::RateLimitLayer::drain_body) does.
    ///
    /// By default nothing more is read.
    ///
    /// ```
    /// use std::time::Duration;
    /// use bytes::Bytes;
    /// use http::{Request, Response, StatusCode};
    /// use http_body_util::Full;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::ReadBodyLayer;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (closing, draining) = (
    ///     ReadBodyLayer::bytes(4, Duration::from_secs(10)),
    ///     ReadBodyLayer::bytes(4, Duration::from_secs(10)).drain_body(8 << 20, Duration::from_secs(10)),
    /// );
    /// for (layer, closes) in [(closing, true), (draining, false)] {
    ///     let service = layer.layer(service_fn(async |request: Request<Full<Bytes>>| {
    ///         Ok::<_, std::convert::Infallible>(Response::new(request.into_body()))
    ///     }));
    ///     let upload = vec![b'x'; 1 << 20];
    ///     let upload = Request::post("/").header("content-length", upload.len()).body(Full::from(upload))?;
    ///     let rejected = service.oneshot(upload).await?;
    ///     assert_eq!(rejected.status(), StatusCode::PAYLOAD_TOO_LARGE);
    ///     assert_eq!(rejected.headers().contains_key("connection"), closes);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn drain_body(mut self, bytes: u64, time: Duration) -> Self {
        self.settings_mut().drained = Some(Bounds { bytes, time });
        self
    }

    fn settings_mut(&mut self) -> &mut Settings {
        Arc::make_mut(&mut self.settings)
    }
}

impl fmt::Debug for ReadBodyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadBodyLayer")
            .field("bounds", &self.settings.bounds)
            .field("drained", &self.settings.drained)
            .finish_non_exhaustive()
    }
}
