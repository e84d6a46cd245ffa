mod values;
mod write;

use std::{fmt, sync::Arc};

use http::{HeaderMap, HeaderName, header::RETRY_AFTER};

pub(crate) use self::{
    values::{count, delay_secs, limits, retry_after, split},
    write::{CDN_CACHE_CONTROL, is_for_shared_caches},
};
pub(crate) use crate::decide::GRPC_STATUS;
use crate::{Decision, key::Secret};

/// The function of [`Headers::custom`].
#[derive(Clone)]
pub struct CustomHeaders(pub(super) Arc<Write>);

type Write = dyn Fn(&Decision, &mut HeaderMap) + Send + Sync;

/// The two of [`Headers::and`].
#[derive(Clone)]
pub struct BothHeaders(pub(in crate::http) Box<[Headers; 2]>);

impl_debug!(CustomHeaders, _custom =>);
impl_debug!(BothHeaders, both => both: both.0);

/// Rate limit fields of responses.
///
/// They are on the responses to admitted and to denied requests, apart from those with a status of 3xx, and those that shared caches
/// are to store and would send to other callers: with `public` or `s-maxage` in `Cache-Control`, or one of these or `max-age` in `CDN-Cache-Control`. Add
/// `private` to others that a cache may store, as with `max-age` alone. Those that count only one policy have
/// the one that matters most: the one with the longest wait if the request was denied, else the one with the least left for
/// its limit. The default is [`Draft08`](Self::Draft08).
///
/// A response may have such fields already, of the service or of a layer inside of this one. A list is continued on the same
/// line. Of fields that count one policy, those with less left stay, as do a list and the dictionary of
/// [`Draft07`](Self::Draft07), which have no common syntax.
///
/// # Examples
///
/// The fields of the first request of two in 30 seconds:
///
/// ```
/// use std::time::Duration;
/// use bytes::Bytes;
/// use http::{HeaderMap, Request, Response};
/// use http_body_util::Empty;
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, Headers, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// async fn fields(headers: Headers) -> HeaderMap {
///     let policy = Policy::new("say-hi", SlidingLog::new(2, Duration::from_secs(30))).key(key::constant("all"));
///     let layer = RateLimitLayer::new(MemoryStore::new(), policy).headers(headers);
///     let service = layer.layer(service_fn(async |_: Request<Empty<Bytes>>| {
///         Ok::<_, std::convert::Infallible>(Response::new(Empty::<Bytes>::new()))
///     }));
///     let Ok(response) = service.oneshot(Request::new(Empty::new())).await;
///     response.headers().clone()
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let draft08 = fields(Headers::Draft08).await;
/// assert_eq!(draft08["ratelimit-policy"], r#""say-hi";q=2;w=30"#);
/// assert_eq!(draft08["ratelimit"], r#""say-hi";r=1;t=30"#);
///
/// let draft07 = fields(Headers::Draft07).await;
/// assert_eq!(draft07["ratelimit-policy"], "2;w=30");
/// assert_eq!(draft07["ratelimit"], "limit=2, remaining=1, reset=30");
///
/// let draft06 = fields(Headers::Draft06).await;
/// assert_eq!(draft06["ratelimit-policy"], "2;w=30");
/// assert_eq!(draft06["ratelimit-limit"], "2");
/// assert_eq!(draft06["ratelimit-remaining"], "1");
/// assert_eq!(draft06["ratelimit-reset"], "30");
///
/// let legacy = fields(Headers::LegacyDelta).await;
/// assert_eq!(legacy["x-ratelimit-limit"], "2");
/// assert_eq!(legacy["x-ratelimit-remaining"], "1");
/// assert_eq!(legacy["x-ratelimit-reset"], "30");
///
/// assert!(fields(Headers::None).await.is_empty());
/// # }
/// ```
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Headers {
    /// `RateLimit` and `RateLimit-Policy` as in the IETF drafts -08 to -11 of *RateLimit header fields for HTTP*.
    ///
    /// `q` is the quota, of a bucket the burst, and `w` its window in seconds, rounded up: of a bucket the time in which it becomes
    /// full. A calendar has no `w`. `r` is what remains, 0 of a policy that denies; `t` is the time until
    /// all of it is restored, in a denial the wait, in seconds, rounded up. Slots have `qu="concurrent-requests"` and no `w`, and
    /// as `t` the rest of the lease, in a denial 1. Several policies are members of one list.
    #[default]
    Draft08,
    /// `RateLimit` and `RateLimit-Policy` as in draft -07.
    Draft07,
    /// `RateLimit-Limit`, `RateLimit-Remaining`, `RateLimit-Reset` and `RateLimit-Policy` as in draft -06.
    Draft06,
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`, which many clients read and no standard
    /// defines. The last one is in seconds from now, rounded up, as Envoy and Kong have it.
    ///
    /// A client that expects an epoch takes it for a time in 1970 and retries at once; choose what the clients expect.
    LegacyDelta,
    /// The same, with `X-RateLimit-Reset` in seconds since the Unix epoch by the clock of the store, rounded up, as GitHub has
    /// it.
    ///
    /// A client that expects a delta takes it for a wait of more than 50 years.
    LegacyEpoch,
    /// Those of a function, made by [`custom`](Self::custom).
    Custom(CustomHeaders),
    /// Those of two, made by [`and`](Self::and).
    Both(BothHeaders),
    /// None. A denial has `Retry-After` all the same.
    None,
}

impl Headers {
    /// These fields, and beside them those of another dialect: the legacy ones for clients that read only these.
    ///
    /// Some clients prefer `RateLimit` and ignore the legacy fields. Version 0.1.0 of the npm package `ratelimit-header-parser`
    /// parses every `RateLimit` field as draft -07, and returns `NaN` for [`Draft08`](Self::Draft08). For such clients use
    /// [`Draft07`](Self::Draft07), [`Draft06`](Self::Draft06) or [`LegacyDelta`](Self::LegacyDelta) alone.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Request, Response};
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, Headers, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = Policy::new("hello", SlidingLog::per_minute(5)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), policy).headers(Headers::Draft08.and(Headers::LegacyDelta));
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    ///
    /// let response = service.oneshot(Request::new(Body::new())).await?;
    /// assert_eq!(response.headers()["ratelimit"], r#""hello";r=4;t=60"#);
    /// assert_eq!(response.headers()["x-ratelimit-remaining"], "4");
    /// assert_eq!(response.headers()["x-ratelimit-reset"], "60");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If both have fields of the same names: two drafts, or both legacy formats.
    #[must_use]
    #[track_caller]
    pub fn and(self, other: Self) -> Self {
        let mut both = self.names_of_fields();
        both.extend(other.names_of_fields());
        for names in ["`RateLimit`", "`X-RateLimit`"] {
            let same = both.iter().filter(|other| **other == names).count();
            assert!(
                same < 2,
                "{self:?} and {other:?} both write {names} fields, which have one format; choose one of them"
            );
        }
        Self::Both(BothHeaders(Box::new([self, other])))
    }

    /// What the names of the fields begin with, for each dialect that is not a function.
    fn names_of_fields(&self) -> Vec<&'static str> {
        match self {
            Self::Draft08 | Self::Draft07 | Self::Draft06 => vec!["`RateLimit`"],
            Self::LegacyDelta | Self::LegacyEpoch => vec!["`X-RateLimit`"],
            Self::Both(BothHeaders(both)) => both.iter().flat_map(Self::names_of_fields).collect(),
            Self::Custom(_) | Self::None => Vec::new(),
        }
    }

    /// The names of all fields that a layer may add, those of gRPC included, for `CorsLayer::expose_headers`.
    ///
    /// A browser hides response fields from scripts of another origin unless CORS exposes them. A gRPC-Web client whose
    /// status is hidden reports another error, or a stream without messages that ended well. The `CorsLayer` goes outside
    /// of the `RateLimitLayer`, so that its fields are on denials too.
    ///
    /// Not in the list: `Cache-Control`, `Content-Type` and `Content-Length`, which a browser always shows, and
    /// `Connection`, which it never does.
    ///
    /// ```
    /// use tower_quota::Headers;
    ///
    /// let names = Headers::names();
    /// assert!(names.contains(&http::header::RETRY_AFTER));
    /// assert!(names.iter().any(|name| name == "ratelimit"));
    ///
    /// let cors = tower_http::cors::CorsLayer::new().expose_headers(names);
    /// # let _ = cors;
    /// ```
    #[must_use]
    pub fn names() -> Vec<HeaderName> {
        vec![
            RETRY_AFTER,
            RATELIMIT,
            RATELIMIT_POLICY,
            RATELIMIT_OBSERVED,
            RATELIMIT_LIMIT,
            RATELIMIT_REMAINING,
            RATELIMIT_RESET,
            X_RATELIMIT_LIMIT,
            X_RATELIMIT_REMAINING,
            X_RATELIMIT_RESET,
            GRPC_STATUS,
            GRPC_MESSAGE,
            GRPC_STATUS_DETAILS,
            GRPC_RETRY_PUSHBACK,
        ]
    }
}

pub(crate) const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
pub(crate) const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATELIMIT_OBSERVED: HeaderName = HeaderName::from_static("ratelimit-observed");
const RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
const RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
const RATELIMIT_RESET: HeaderName = HeaderName::from_static("ratelimit-reset");
const X_RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RATELIMIT_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

pub(crate) const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
pub(crate) const GRPC_STATUS_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
pub(crate) const GRPC_RETRY_PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

impl Headers {
    /// Fields that a function writes: those of another API, such as OpenAI's.
    ///
    /// It is called where the other fields would be written: for admitted and denied requests to which an enforced policy applies,
    /// apart from those with a status of 3xx and responses for shared caches. The map has the fields of the response so far. `Retry-After` is written beside it.
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

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Draft08 => "Draft08",
            Self::Draft07 => "Draft07",
            Self::Draft06 => "Draft06",
            Self::LegacyDelta => "LegacyDelta",
            Self::LegacyEpoch => "LegacyEpoch",
            Self::Custom(_) => "Custom(<fn>)",
            Self::Both(both) => return f.debug_tuple("Both").field(&both.0).finish(),
            Self::None => "None",
        })
    }
}

/// The rate limit fields of responses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields {
    pub(crate) dialect: Headers,
    pub(crate) partition_key: Option<Secret>,
    /// Whether policies that only observe have a field.
    pub(crate) observed: bool,
}
