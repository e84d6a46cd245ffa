//! Fields that the application writes.

use std::{fmt, sync::Arc};

use http::HeaderMap;

use super::Headers;
use crate::Decision;

/// The function of [`Headers::custom`].
#[derive(Clone)]
pub struct CustomHeaders(Write);

type Write = Arc<dyn Fn(&Decision, &mut HeaderMap) + Send + Sync>;

impl Headers {
    /// Fields that a function writes: those of another API, such as OpenAI's.
    ///
    /// It is called where the other fields would be written: for admitted and denied requests to which an enforced policy applies,
    /// apart from redirects. The map has the fields of the response so far. `Retry-After` is written beside it.
    /// [`names`](Self::names) does not contain what it writes.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{HeaderMap, Request, Response};
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, Decision, Headers, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// /// `x-ratelimit-limit-requests: 60`, `x-ratelimit-remaining-requests: 59`, `x-ratelimit-reset-requests: 1s`
    /// fn openai(decision: &Decision, headers: &mut HeaderMap) {
    ///     for (policy, [limit, remaining, reset]) in decision.policies().filter_map(|policy| match policy.name() {
    ///         "requests" => Some((policy, [
    ///             "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
    ///         ])),
    ///         "tokens" => Some((policy, [
    ///             "x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
    ///         ])),
    ///         _ => None,
    ///     }) {
    ///         headers.insert(limit, policy.limit().into());
    ///         headers.insert(remaining, policy.remaining().into());
    ///         let seconds = format!("{}s", policy.reset_after().as_secs_f64().ceil());
    ///         headers.insert(reset, seconds.parse().expect("digits"));
    ///     }
    /// }
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policies = [
    ///     Policy::new("requests", SlidingLog::per_minute(60)).key(key::constant("all")),
    ///     Policy::new("tokens", SlidingLog::per_minute(1_000)).key(key::constant("all")).cost(400),
    /// ];
    /// let layer = RateLimitLayer::new(MemoryStore::new(), policies).headers(Headers::custom(openai));
    /// let service = layer.layer(service_fn(async |_: Request<Body>| Ok::<_, std::convert::Infallible>(Response::new(Body::new()))));
    ///
    /// for (status, requests, tokens) in [(200, "59", "600"), (200, "58", "200"), (429, "58", "200")] {
    ///     let response = service.clone().oneshot(Request::new(Body::new())).await?;
    ///     assert_eq!(response.status(), status);
    ///     assert_eq!(response.headers()["x-ratelimit-remaining-requests"], requests);
    ///     assert_eq!(response.headers()["x-ratelimit-remaining-tokens"], tokens);
    ///     assert_eq!(response.headers()["x-ratelimit-reset-requests"], "60s");
    ///     assert!(!response.headers().contains_key("ratelimit"));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn custom(write: impl Fn(&Decision, &mut HeaderMap) + Send + Sync + 'static) -> Self {
        Self::Custom(CustomHeaders(Arc::new(write)))
    }
}

impl CustomHeaders {
    pub(super) fn write(&self, decision: &Decision, headers: &mut HeaderMap) {
        (self.0)(decision, headers);
    }
}

/// Whether both are clones of one value.
impl PartialEq for CustomHeaders {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CustomHeaders {}

impl fmt::Debug for CustomHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<fn>")
    }
}
