use std::{
    panic::{self, AssertUnwindSafe},
    sync::atomic::Ordering,
    time::Duration,
};

use http::{Extensions, HeaderMap, HeaderName, Response, StatusCode, header::CONTENT_TYPE};

use super::Settlement;
use crate::Decision;

/// How a request ended that a layer had admitted.
///
/// The condition of [`Policy::refund_if`](crate::Policy::refund_if) receives it.
///
/// | the request | ends with | |
/// | --- | --- | --- |
/// | HTTP | the head of the response | [`status`](Self::status), [`headers`](Self::headers), [`extension`](Self::extension) |
/// | gRPC | the status in the head or, of a response with messages, in the trailers | also [`grpc_status`](Self::grpc_status) |
/// | any | an error or a panic of the inner service, or of the body of a gRPC response | [`is_server_error`](Self::is_server_error) |
/// | any | its cancellation: the response future was dropped, or the body of a gRPC response before its end | [`is_cancelled`](Self::is_cancelled) |
///
/// A response to a gRPC call has the content type `application/grpc`. In gRPC-Web the trailers are part of the content: place
/// the layer inside of the one that translates, such as `tonic_web::GrpcWebLayer`. Outside of it, a call whose status is there is
/// neither a success nor an error.
#[derive(Clone, Copy)]
pub struct Completion<'a> {
    head: Option<Head<'a>>,
    end: End,
}

#[derive(Clone, Copy)]
struct Head<'a> {
    status: StatusCode,
    headers: &'a HeaderMap,
    extensions: &'a Extensions,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// The head of the response is decisive.
    Head,
    /// The body of a gRPC response ended, with this status in its trailers.
    Body(Option<i32>),
    /// The inner service or the body failed or panicked.
    Failed,
    /// The response future or the body was dropped.
    Cancelled,
}

/// Accessors.
impl<'a> Completion<'a> {
    /// The status code of the response; `None` without a response.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        Some(self.head?.status)
    }

    /// The header fields of the response of the inner service; `None` without a response.
    #[must_use]
    pub fn headers(&self) -> Option<&'a HeaderMap> {
        Some(self.head?.headers)
    }

    /// The value of this type in the extensions of the response, in which a handler reports what the status does not show.
    ///
    /// ```
    /// use http::{Request, Response};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// /// The response is a form with an error message, and its status is 200.
    /// #[derive(Clone)]
    /// struct WrongPassword;
    ///
    /// let logins = Policy::new("logins", SlidingLog::per_minute(5))
    ///     .key(key::constant("all"))
    ///     .refund_if(|completion| completion.is_success() && completion.extension::<WrongPassword>().is_none());
    /// let service = RateLimitLayer::new(MemoryStore::new(), logins).layer(service_fn(async |_: Request<Body>| {
    ///     let mut form = Response::new(Body::new());
    ///     form.extensions_mut().insert(WrongPassword);
    ///     Ok::<_, std::convert::Infallible>(form)
    /// }));
    ///
    /// for remaining in [4, 3] {
    ///     let response = service.clone().oneshot(Request::new(Body::new())).await?;
    ///     assert_eq!(response.headers()["ratelimit"], format!(r#""logins";r={remaining};t=60"#));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn extension<T: Send + Sync + 'static>(&self) -> Option<&'a T> {
        self.head?.extensions.get()
    }

    /// The status of a gRPC call, such as 16 for `UNAUTHENTICATED`; `None` for other requests, and without a response.
    ///
    /// It is 2, `UNKNOWN`, if the response ended without a status, as clients report it.
    #[must_use]
    pub fn grpc_status(&self) -> Option<i32> {
        match self.end {
            End::Head => grpc_content_type(self.headers()?).and_then(|_| grpc_status_in(self.headers()?)),
            End::Body(status) => Some(status.unwrap_or(UNKNOWN)),
            End::Failed | End::Cancelled => None,
        }
    }

    /// Whether the status is 2xx and, of a gRPC call, `OK`.
    ///
    /// ```
    /// use http::{Request, Response, StatusCode};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // Only what the caller did wrong counts: neither good requests, nor failures of the server.
    /// let wrong = Policy::new("wrong", SlidingLog::per_minute(2))
    ///     .key(key::constant("all"))
    ///     .refund_if(|completion| completion.is_success() || completion.is_server_error());
    /// let service = RateLimitLayer::new(MemoryStore::new(), wrong).layer(service_fn(async |request: Request<Body>| {
    ///     let status: StatusCode = request.uri().path()[1..].parse().expect("a status");
    ///     let mut response = Response::new(Body::new());
    ///     *response.status_mut() = status;
    ///     Ok::<_, std::convert::Infallible>(response)
    /// }));
    ///
    /// for (path, status) in [("/200", 200), ("/503", 503), ("/404", 404), ("/200", 200), ("/404", 404), ("/200", 429)] {
    ///     let response = service.clone().oneshot(Request::get(path).body(Body::new())?).await?;
    ///     assert_eq!(response.status(), status);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.ends_with(StatusCode::is_success, |code| code == OK)
    }

    /// Whether the status is 4xx or, of a gRPC call, one that is neither `OK` nor a [server error](Self::is_server_error).
    #[must_use]
    pub fn is_client_error(&self) -> bool {
        self.ends_with(StatusCode::is_client_error, |code| {
            code != OK && !SERVER_ERRORS.contains(&code)
        })
    }

    /// Whether the server failed: the status is 5xx or, of a gRPC call, `UNKNOWN`, `DEADLINE_EXCEEDED`, `UNIMPLEMENTED`,
    /// `INTERNAL`, `UNAVAILABLE` or `DATA_LOSS`; or the inner service returned an error or panicked.
    #[must_use]
    pub fn is_server_error(&self) -> bool {
        matches!(self.end, End::Failed)
            || self.ends_with(StatusCode::is_server_error, |code| SERVER_ERRORS.contains(&code))
    }

    /// Whether it is a [client error](Self::is_client_error) or a [server error](Self::is_server_error).
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.is_client_error() || self.is_server_error()
    }

    /// Whether the caller left, or a layer outside of this one gave up, before the request had ended.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        matches!(self.end, End::Cancelled)
    }

    /// Whether the head of a gRPC call lacks its status: that of gRPC-Web is in the body.
    fn has_status_in_body(&self) -> bool {
        self.status() == Some(StatusCode::OK) && self.headers().and_then(grpc_content_type).is_some()
    }

    /// Whether the request ended with a status like this one. The status of a gRPC call with a response is 200 in HTTP.
    fn ends_with(&self, status: fn(&StatusCode) -> bool, grpc_status: impl Fn(i32) -> bool) -> bool {
        match self.grpc_status() {
            Some(code) => grpc_status(code),
            None => {
                matches!(self.end, End::Head)
                    && !self.has_status_in_body()
                    && self.status().is_some_and(|code| status(&code))
            }
        }
    }
}

pub(crate) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

// google.rpc.Code
const OK: i32 = 0;
const UNKNOWN: i32 = 2;

/// The codes for which OpenTelemetry reports an error of the server ("Semantic conventions for gRPC").
const SERVER_ERRORS: [i32; 6] = [UNKNOWN, 4, 12, 13, 14, 15];

impl<'a> Completion<'a> {
    /// The end of a request, with the head of its response if there was one.
    pub(crate) fn new<B>(response: Option<&'a Response<B>>, end: End) -> Self {
        let head = response.map(|response| Head {
            status: response.status(),
            headers: response.headers(),
            extensions: response.extensions(),
        });
        Self { head, end }
    }
}

/// What a response asks for.
impl Decision {
    /// The pause that the response to an admitted request asks for, if a policy [learns](crate::Policy::learn_from_responses) from
    /// it: the time until the server accepts the next request.
    ///
    /// It is set in the decision, which the layer [leaves in the response](crate::RateLimitLayer::response_extensions): when
    /// the head of the response is received, and the trailers of a gRPC call if they ask for a longer one. It is what the
    /// response asks for, also where that is above the longest ban of the policy. `None` if it asks for none.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::{Request, Response, StatusCode, header::RETRY_AFTER};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{Decision, key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let api = Policy::new("api", SlidingLog::per_minute(100)).key(key::constant("token")).learn_from_responses();
    /// let layer = RateLimitLayer::new(MemoryStore::new(), api).response_extensions(true);
    /// let client = layer.layer(service_fn(async |_: Request<Body>| {
    ///     let response = Response::builder().status(StatusCode::TOO_MANY_REQUESTS).header(RETRY_AFTER, 30);
    ///     Ok::<_, std::convert::Infallible>(response.body(Body::new()).expect("a response"))
    /// }));
    ///
    /// let response = client.oneshot(Request::new(Body::new())).await?;
    /// let decision = response.extensions().get::<Decision>().expect("the layer decides");
    /// assert!(decision.is_allowed()); // it was sent
    /// assert_eq!(decision.requested_pause(), Some(Duration::from_secs(30)));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn requested_pause(&self) -> Option<Duration> {
        let joined = self.0.joined.iter().flatten().filter_map(Self::requested_pause).max();
        let own = self.0.requested_pause.load(Ordering::Relaxed);
        joined.max((own > 0).then(|| Duration::from_micros(own)))
    }

    /// Records what the response asks for, for all clones.
    pub(crate) fn record_requested_pause(&self, pause: Duration) {
        let pause = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
        self.0.requested_pause.fetch_max(pause, Ordering::Relaxed);
    }
}

impl Decision {
    /// Refunds the policies whose conditions hold for the completion.
    pub(crate) fn settle(&self, completion: &Completion<'_>) {
        let refunded = self.as_slice().iter().filter(|policy| {
            let condition = policy.policy().settings.refund_if.as_ref();
            condition.is_some_and(|refunds| caught(|| refunds(completion)) == Some(true))
        });
        drop(Settlement::refunding(refunded).send());
    }

    /// The caller has left before the request was sent on.
    pub(crate) fn cancel(&self) {
        if self.lost_settlements().is_some() {
            caught(|| self.settle(&Completion::new::<()>(None, End::Cancelled)));
        }
    }
}

/// Whether the status of a gRPC call is still to come, in the trailers. In gRPC-Web these are part of the content.
pub(crate) fn awaits_trailers<B>(response: &Response<B>) -> bool {
    let headers = response.headers();
    matches!(grpc_content_type(headers), Some((GRPC, _))) && !headers.contains_key(GRPC_STATUS)
}

pub(crate) const GRPC: &str = "application/grpc";

/// The content type of a gRPC message, in lower case (RFC 9110 §8.3.1: it has none), and as it is written with the suffix of its
/// format, such as `+proto`.
pub(crate) fn grpc_content_type(headers: &HeaderMap) -> Option<(&'static str, &[u8])> {
    let field = headers.get(CONTENT_TYPE)?.as_bytes();
    let written = field.split(|byte| *byte == b';').next()?.trim_ascii();
    let essence = written.split(|byte| *byte == b'+').next()?;
    let mut types = [GRPC, "application/grpc-web", "application/grpc-web-text"].into_iter();
    let content_type = types.find(|one| one.as_bytes().eq_ignore_ascii_case(essence))?;
    Some((content_type, written))
}

/// The gRPC status in header fields or trailers. One that is not a number is `UNKNOWN`.
pub(crate) fn grpc_status_in(fields: &HeaderMap) -> Option<i32> {
    let status = fields.get(GRPC_STATUS)?;
    let code = status.to_str().ok().and_then(|code| code.parse().ok());
    Some(code.unwrap_or(UNKNOWN))
}

impl_debug!(Completion['a], ended => status: ended.status(), grpc_status: ended.grpc_status(), end: ended.end);

/// Runs code that may be of the application where a handler may unwind: a second panic would abort the process. The panic
/// hook has reported it.
pub(crate) fn caught<T>(run: impl FnOnce() -> T) -> Option<T> {
    panic::catch_unwind(AssertUnwindSafe(run)).ok()
}
