use std::{fmt, sync::Arc, time::Duration};

use tower_layer::Layer;

use crate::{
    ConfigError, FailureMode, Headers, IntoPolicies, RateLimit,
    enforce::Enforcer,
    headers::Reset,
    health::OnFailure,
    key::Secret,
    policy::{Terms, validate_names},
    response::{Negotiated, ResponseFormat},
    store::{Store, StoreError},
};

/// Limits how often a caller may use the services it is applied to.
///
/// It has no type parameters, and its clones, and the services it makes, share their counts. See the
/// [crate documentation](crate) for an example.
///
/// # Several policies, one decision
///
/// The policies of a layer are decided together, at one instant: a request is counted by all of them or, if one denies it,
/// by none. The answer names each policy that denied, and its `Retry-After` is the longest of their waits. Each policy's
/// share of `RateLimit` tells what it has left.
///
/// ```
/// use bytes::Bytes;
/// use http::{Request, StatusCode};
/// use http_body_util::{BodyExt, Empty};
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # type Body = Empty<Bytes>;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let user = || key::header("x-user-id");
/// let layer = RateLimitLayer::new(MemoryStore::new(), [
///     Policy::new("per-path", SlidingLog::per_minute(1)).key((user(), key::path())),
///     Policy::new("per-user", SlidingLog::per_minute(3)).key(user()),
/// ]);
/// let service = layer.layer(service_fn(async |_: Request<Body>| {
///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
/// }));
/// let get = |path| {
///     let request = Request::get(path).header("x-user-id", "42").body(Body::new()).unwrap();
///     service.clone().oneshot(request)
/// };
///
/// let first = get("/a").await?;
/// assert_eq!(first.headers()["ratelimit"], r#""per-path";r=0;t=60, "per-user";r=2;t=60"#);
///
/// let denied = get("/a").await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert_eq!(denied.headers()["ratelimit"], r#""per-path";r=0;t=60, "per-user";r=2;t=60"#);
/// let problem = denied.into_body().collect().await?.to_bytes();
/// assert!(problem.ends_with(br#""violated-policies":["per-path"]}"#));
///
/// // The denied one took nothing from the other policy.
/// let other_path = get("/b").await?;
/// assert_eq!(other_path.headers()["ratelimit"], r#""per-path";r=0;t=60, "per-user";r=1;t=60"#);
/// # Ok(())
/// # }
/// ```
///
/// Layers around each other decide one after the other instead: what the outer one has counted stays counted when the inner
/// one denies. A policy that stands in both, with the same key, is counted once.
///
/// All of this holds on one Redis server, and with [`MemoryStore`](crate::MemoryStore). A cluster is to come with its
/// client: there, policies about the same subject are decided together, and those about different subjects one after the
/// other, where an earlier charge is refunded when a later policy denies.
///
/// # When the store fails
///
/// A request that the store does not answer for passes, uncounted, or is answered with `503 Service Unavailable`, in gRPC
/// with `UNAVAILABLE`: see [`FailureMode`]. It is never taken for one that its limit denied, and the error type of the
/// service stays what it is. A [`format`](Self::format) sees [why](crate::response::Rejection) and may answer with something
/// less instead; [`on_failure`](Self::on_failure) observes; and a [`Fallback`](crate::Fallback) counts elsewhere meanwhile.
///
/// # Costs
///
/// A request costs 1, or what its policy says: [`Policy::cost`](crate::Policy::cost) for all of them alike, [`Policy::cost_fn`](crate::Policy::cost_fn) by the request.
/// A request passes if its whole cost fits. One that costs more than the limit can never pass: it is denied without asking
/// the store, without `Retry-After`, and for the reason [`CostAboveLimit`](crate::Denial::CostAboveLimit). With a computed
/// cost of 0 the policy does not apply.
///
/// # What it costs
///
/// Beside what the service behind does, a request that is admitted by a [`MemoryStore`](crate::MemoryStore) allocates 7
/// times: once for the decision, 4 times to leave it in the [`extensions`](Self::extensions) of the request and of the
/// response, and twice for the table of the header fields, unless the response has fields already. What changes in their
/// values is written into a block of memory that each thread keeps, and allocates only where many responses are on their
/// way. A denied request allocates 4 times. A store that does not answer at once adds its future.
///
/// # Refunds
///
/// The service behind finds the [`Decision`](crate::Decision) in the extensions of the request, and in it a
/// [`Receipt`](crate::Receipt). A [`Limiter`](crate::Limiter) on the same store takes that and
/// [gives back](crate::Limiter::refund) what was charged, for a request that turned out not to count:
///
/// ```
/// use bytes::Bytes;
/// use http::Request;
/// use http_body_util::Empty;
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_quota::{key, Decision, Limiter, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// # type Body = Empty<Bytes>;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let mails = Policy::new("mails", SlidingLog::per_hour(1)).key(key::path());
/// let limiter = Limiter::new(store.clone(), mails.clone());
///
/// let service = RateLimitLayer::new(store, mails).layer(service_fn(async |request: Request<Body>| {
///     // The mail could not be sent.
///     let decision = request.extensions().get::<Decision>();
///     if let Some(receipt) = decision.and_then(Decision::receipt) {
///         limiter.refund(receipt).await.expect("the store answers");
///     }
///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
/// }));
///
/// for _ in 0..3 {
///     assert!(service.clone().oneshot(Request::new(Body::new())).await?.status().is_success());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct RateLimitLayer {
    enforcer: Arc<Enforcer>,
}

/// Constructors.
impl RateLimitLayer {
    /// A layer that counts in this store for one policy, or for several that are decided together.
    ///
    /// Of several, a request is counted by all or, if one denies it, by none. An empty list lets everything pass.
    ///
    /// # Panics
    ///
    /// If two policies have the same name. [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(store: impl Store, policies: impl IntoPolicies) -> Self {
        match Self::try_new(store, policies) {
            Ok(layer) => layer,
            Err(error) => panic!("{error}"),
        }
    }

    /// A layer that counts in this store for one policy, or for several that are decided together.
    ///
    /// # Errors
    ///
    /// If two policies have the same name.
    pub fn try_new(store: impl Store, policies: impl IntoPolicies) -> Result<Self, ConfigError> {
        let policies = policies.into_policies();
        validate_names(&policies)?;

        let enforcer = Enforcer {
            terms: Arc::new(Terms::new(store, &policies)),
            jitter: Duration::ZERO,
            format: Arc::new(Negotiated::default()),
            failure_mode: None,
            policies: policies.into(),
            on_failure: OnFailure::default(),
            warned: Arc::default(),
        };
        Ok(Self {
            enforcer: Arc::new(enforcer),
        })
    }
}

/// Settings.
impl RateLimitLayer {
    /// Which header fields tell callers how they stand.
    ///
    /// The default is [`Headers::Draft08`].
    pub fn headers(mut self, headers: Headers) -> Self {
        self.terms_mut().fields.style = headers;
        self
    }

    /// Adds `X-RateLimit-Limit`, `-Remaining` and `-Reset` beside the other fields, for clients that read only these.
    ///
    /// The default is not to.
    pub fn legacy_headers(mut self, reset: Reset) -> Self {
        self.terms_mut().fields.legacy = Some(reset);
        self
    }

    /// Adds the partition key `pk` to the fields of [`Headers::Draft08`], by which a caller knows what it shares a count
    /// with: 128 bits of a hash of the key that nobody can compute without the secret.
    ///
    /// The default is not to.
    pub fn partition_key(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.terms_mut().fields.partition_key = Some(Secret::new(secret));
        self
    }

    /// Tells callers to wait up to this much longer than they must, at random, so that those who were denied together do
    /// not come back together.
    ///
    /// It is added to `Retry-After` and to what [`Decision::retry_after`](crate::Decision::retry_after) says of a denial.
    /// The default is not to.
    pub fn retry_jitter(mut self, most: Duration) -> Self {
        Arc::make_mut(&mut self.enforcer).jitter = most;
        self
    }

    /// Whether the [`Decision`](crate::Decision) is left in the extensions of the request, for the service behind, and of
    /// the response, for the layers around.
    ///
    /// Without it an admitted request allocates 4 times less, but nobody can read what was decided or give it back, and a
    /// policy that stands in several layers is counted by each. The default is `true`.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::Request;
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, Decision, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = Policy::new("hello", SlidingLog::per_minute(5)).key(key::path());
    /// let layer = RateLimitLayer::new(MemoryStore::new(), policy).extensions(false);
    /// let service = layer.layer(service_fn(async |request: Request<Body>| {
    ///     assert!(request.extensions().get::<Decision>().is_none());
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    ///
    /// let response = service.oneshot(Request::new(Body::new())).await?;
    /// assert!(response.extensions().get::<Decision>().is_none());
    /// assert_eq!(response.headers()["ratelimit"], r#""hello";r=4;t=60"#);
    /// # Ok(())
    /// # }
    /// ```
    pub fn extensions(mut self, extensions: bool) -> Self {
        self.terms_mut().extensions = extensions;
        self
    }

    /// What answers requests that may not pass.
    ///
    /// The default is [`Negotiated`]: gRPC calls in gRPC, everything else as [`Problem`](crate::response::Problem).
    pub fn format(mut self, format: impl ResponseFormat) -> Self {
        Arc::make_mut(&mut self.enforcer).format = Arc::new(format);
        self
    }

    /// What happens to requests when the store does not answer, whatever the policies say.
    ///
    /// The default is what the policies say: [`FailureMode::Closed`] if one of those that a request counts against is, else
    /// [`FailureMode::Open`].
    pub fn failure_mode(mut self, failure_mode: FailureMode) -> Self {
        Arc::make_mut(&mut self.enforcer).failure_mode = Some(failure_mode);
        self
    }

    /// Tells of each request for which the store did not answer, whatever the failure mode.
    ///
    /// It only observes: what the caller is told is up to the [`format`](Self::format). It runs on the path of the request,
    /// so it must be quick, and a panic in it is one of the service. The default is to tell nobody.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// static FAILURES: AtomicU64 = AtomicU64::new(0);
    ///
    /// let policy = Policy::new("everybody", SlidingLog::per_second(100)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), policy).on_failure(|error| {
    ///     eprintln!("uncounted: {:?}: {error}", error.kind());
    ///     FAILURES.fetch_add(1, Ordering::Relaxed);
    /// });
    /// # let _ = layer;
    /// ```
    pub fn on_failure(mut self, observe: impl Fn(&StoreError) + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.enforcer).on_failure = OnFailure::new(observe);
        self
    }
}

impl RateLimitLayer {
    fn terms_mut(&mut self) -> &mut Terms {
        Arc::make_mut(&mut Arc::make_mut(&mut self.enforcer).terms)
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::new(inner, self.enforcer.clone())
    }
}

impl fmt::Debug for RateLimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer")
            .field("policies", &self.enforcer.policies)
            .field("headers", &self.enforcer.terms.fields)
            .field("failure_mode", &self.enforcer.failure_mode)
            .finish_non_exhaustive()
    }
}
