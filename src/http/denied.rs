use std::{error::Error, fmt};

use bytes::Bytes;
use http::{HeaderMap, Response, header::RETRY_AFTER, request::Parts};

use super::{
    Presentation,
    headers::{delay_secs, retry_after},
    response::{Problem, Rejection, ResponseFormat, detail, respond, write_fields},
};
use crate::{Decision, PolicyDecision};

/// Error of a decision that denies the request, and the response to the request.
///
/// [`Decision::require`] returns it. A handler that returns it denies its request as a layer does: with `429`, `Retry-After`,
/// the rate limit fields and a body. The format and the fields are those of the [`Limiter`](crate::Limiter::format) or the
/// [`RateLimitLayer`](crate::RateLimitLayer::format) that decided.
///
/// With the feature `axum` it is a response, and so is a [`StoreError`](crate::store::StoreError), mostly with `503`:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # #[cfg(feature = "axum")] {
/// use axum::{Router, body::Body, routing::get};
/// use http::{Request, StatusCode};
/// use tower::ServiceExt;
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
///
/// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", SlidingLog::per_hour(1)));
/// let export = async move || -> axum::response::Result<&'static str> {
///     let _permit = exports.check("42").await?.require()?;
///     Ok("the export")
/// };
/// let app: Router = Router::new().route("/export", get(export));
/// let get = || app.clone().oneshot(Request::get("/export").body(Body::empty()).unwrap());
///
/// assert_eq!(get().await?.status(), StatusCode::OK);
///
/// let denied = get().await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(denied.headers()["retry-after"], "3600");
/// assert_eq!(denied.headers()["ratelimit"], r#""exports";r=0;t=3600"#);
/// assert_eq!(denied.headers()["content-type"], "application/problem+json");
/// # }
/// # Ok(())
/// # }
/// ```
///
/// With the feature `tonic` both become a `tonic::Status`, so that `?` denies a call:
///
/// ```
/// # #[cfg(feature = "tonic")]
/// # mod example {
/// use tonic::{Code, Request, Response, Status};
/// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
///
/// async fn export(exports: &Limiter, request: Request<String>) -> Result<Response<String>, Status> {
///     let _permit = exports.check(request.into_inner()).await?.require()?;
///     Ok(Response::new("the export".to_owned()))
/// }
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # pub async fn main() {
/// let exports = Limiter::new(MemoryStore::new(), Policy::new("exports", SlidingLog::per_hour(1)));
/// assert!(export(&exports, Request::new("42".to_owned())).await.is_ok());
///
/// let status = export(&exports, Request::new("42".to_owned())).await.unwrap_err();
/// assert_eq!(status.code(), Code::ResourceExhausted);
/// assert_eq!(status.metadata().get("ratelimit").unwrap(), r#""exports";r=0;t=3600"#);
/// assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "3600000");
/// # }
/// # }
/// # #[cfg(feature = "tonic")]
/// # fn main() { example::main() }
/// # #[cfg(not(feature = "tonic"))]
/// # fn main() {}
/// ```
///
/// Elsewhere, as in a GraphQL resolver or an item of a batch, it is an error with a text for callers: the policies that deny,
/// and the wait in whole seconds, or the costs that are above a limit. [`Decision::retry_after`] has the wait itself.
///
/// # Layers around the handler
///
/// A layer around a handler does not add its fields to a response that is made of this error: the fields are those of the
/// denial. Middleware finds the error in the extensions of the response, and as the source of a `Status`.
#[derive(Clone)]
pub struct Denied(Decision);

/// Denying from a handler.
impl Decision {
    /// The decision again if the request is admitted; else an error, which is the response. Slots are held until it is dropped.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(1)));
    /// let admitted = mails.check("42").await?.require()?;
    /// assert_eq!(admitted.remaining(), 0);
    ///
    /// let denied = mails.check("42").await?.require().unwrap_err();
    /// assert_eq!(denied.to_string(), "rate limit exceeded: mails; try again in 3600 s");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A decision that is not bound releases its slots at once, so the compiler warns of it:
    ///
    /// ```compile_fail
    /// #![deny(unused_must_use)]
    /// # use tower_quota::{Decision, Denied};
    ///
    /// fn export(decision: Decision) -> Result<&'static str, Denied> {
    ///     decision.require()?;
    ///     Ok("the export")
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// If a limit denies the request.
    pub fn require(self) -> Result<Self, Denied> {
        match self.is_allowed() {
            true => Ok(self),
            false => Err(Denied(self)),
        }
    }

    /// The header fields of the decision: the rate limit fields, and `Retry-After` if waiting helps.
    ///
    /// They are those that the layer or the limiter which decided adds to a response. There are none if no policy applies.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(1)));
    /// let admitted = mails.check("42").await?.headers();
    /// assert_eq!(admitted["ratelimit-policy"], r#""mails";q=1;w=3600"#);
    /// assert_eq!(admitted["ratelimit"], r#""mails";r=0;t=3600"#);
    ///
    /// let denied = mails.check("42").await?.headers();
    /// assert_eq!(denied["retry-after"], "3600");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        write_fields(self, &mut headers);
        if let Some(wait) = self.retry_after() {
            headers.insert(RETRY_AFTER, retry_after(wait));
        }
        headers
    }
}

impl Denied {
    /// The decision, which is not [allowed](Decision::is_allowed).
    pub fn decision(&self) -> &Decision {
        &self.0
    }

    /// The response to a request with these parts.
    ///
    /// The [format](super::response::ResponseFormat) reads them: the default one responds to a gRPC call with a gRPC status.
    ///
    /// ```
    /// use http::{Request, StatusCode};
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog, response};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mails = Policy::new("mails", SlidingLog::per_hour(1));
    /// let mails = Limiter::new(MemoryStore::new(), mails).format(response::text(|_, _| "Later.\n"));
    /// assert!(mails.check("42").await?.require().is_ok());
    ///
    /// let (parts, ()) = Request::post("/mails").body(())?.into_parts();
    /// let response = mails.check("42").await?.require().unwrap_err().response_to(&parts);
    /// assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    /// assert_eq!(response.headers()["retry-after"], "3600");
    /// assert_eq!(response.headers()["ratelimit"], r#""mails";r=0;t=3600"#);
    /// assert_eq!(response.body(), "Later.\n");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn response_to(&self, parts: &Parts) -> Response<Bytes> {
        let mut response = respond(self.format(), Rejection::Limited(&self.0), parts);
        response.extensions_mut().insert(self.clone());
        response
    }

    /// The format of the layer or the limiter that denied the request.
    fn format(&self) -> &dyn ResponseFormat {
        let mut deniers = self.0.deniers();
        deniers
            .next()
            .map_or(&Problem, |policy| &*Presentation::of(&policy.context).format)
    }

    fn message(&self) -> String {
        let names: Vec<_> = self.0.deniers().map(PolicyDecision::name).collect();
        let message = format!("rate limit exceeded: {}", names.join(", "));
        match (self.0.retry_after(), &*detail(&self.0)) {
            (Some(wait), _) => format!("{message}; try again in {} s", delay_secs(wait)),
            (None, "") => message,
            (None, detail) => format!("{message}; {detail}"),
        }
    }
}

/// Whether a response is one of a [`Denied`].
#[inline]
pub(crate) fn made<B>(response: &Response<B>) -> bool {
    let extensions = response.extensions();
    if extensions.get::<Denied>().is_some() {
        return true;
    }

    // tonic leaves the status of a call in the extensions of its response.
    #[cfg(feature = "tonic")]
    let source = extensions.get::<tonic::Status>().and_then(Error::source);
    #[cfg(not(feature = "tonic"))]
    let source = None::<&(dyn Error + 'static)>;
    source.is_some_and(|source| source.is::<Denied>())
}

impl_error!(Denied, denied => &denied.message());
