use std::{fmt, sync::Arc, time::Duration};

use tower_layer::Layer;

use crate::{
    ConfigError, DrainBodyLayer, FailureMode, Headers, IntoPolicies, RateLimit,
    enforce::Enforcer,
    headers::{Fields, Reset},
    key::Secret,
    observer::OnFailure,
    policy::{self, validate_names},
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
/// /// The user that authentication found.
/// #[derive(Clone)]
/// struct UserId(u64);
///
/// let user = || key::extension::<UserId>(|user| user.0.to_string());
/// let layer = RateLimitLayer::new(MemoryStore::new(), [
///     Policy::new("per-path", SlidingLog::per_minute(1)).key((user(), key::path())),
///     Policy::new("per-user", SlidingLog::per_minute(3)).key(user()),
/// ]);
/// let service = layer.layer(service_fn(async |_: Request<Body>| {
///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
/// }));
/// let get = |path| {
///     let request = Request::get(path).extension(UserId(42)).body(Body::new()).unwrap();
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
/// one denies. A policy that both have, with the same key, the same numbers and the same store (or a clone of it), is charged
/// once for a request: at the larger of its costs, of which the inner layer charges what the outer one has not. In another
/// store it is counted there too.
///
/// All of this holds on one Redis server, and with [`MemoryStore`](crate::MemoryStore). In a cluster, policies about the same
/// subject are decided together, and those about different subjects one after the other, where an earlier charge is refunded
/// when a later policy denies.
///
/// # When the store fails
///
/// Each process counts by itself, with the same limits, until the store replies again. Other [`FailureMode`]s admit all requests
/// uncounted, or reject them with `503 Service Unavailable`, in gRPC with `UNAVAILABLE`. A failure is never reported as a
/// denial, and the error type of the service stays what it is. A [`format`](Self::format) has the
/// [reason](crate::response::Rejection) and may build another response; [`on_failure`](Self::on_failure) observes failures.
///
/// # Costs
///
/// A request costs 1, or what its policy says: [`Policy::cost`](crate::Policy::cost) for all of them alike, [`Policy::cost_fn`](crate::Policy::cost_fn) by the request.
/// A request passes if its whole cost fits. One that costs more than the limit can never pass: it is denied without asking
/// the store, without `Retry-After`, and for the reason [`CostAboveLimit`](crate::Denial::CostAboveLimit). With a computed
/// cost of 0 the policy does not apply.
///
/// # Large request bodies
///
/// The layer rejects a request without reading its body. On HTTP/1.x the unread content lies on the connection before the
/// next request, so hyper closes the connection unless all of the content arrived with the head. The response then has
/// `Connection: close`: for content of more than 8 KiB or in chunks, and for a client that sent `Expect: 100-continue`. A
/// client that is still sending when the connection is closed may get an error in place of the response.
///
/// [`drain_body`](Self::drain_body) reads the body, within bounds, before the response is sent; the connection stays open.
/// Beyond the bounds the response is sent at once, with `Connection: close`. A denied request then costs the server the
/// traffic of its body, and is open for longer, so the bounds are those of the largest upload that the service accepts.
///
/// A `POST` of 5 MB that is denied, 20 times by each client, on axum and HTTP/1.1:
///
/// | client | without | with `drain_body(8 << 20, ..)` |
/// | --- | --- | --- |
/// | curl 7.88, with or without `Expect` | `429` | `429` |
/// | reqwest 0.12 | `429` (7), broken pipe (13) | `429` |
/// | Python 3.11, `http.client` | `BrokenPipeError` | `429` |
/// | Node 20, `fetch` | `429` (2), `EPIPE` (18) | `429` |
///
/// `tests/clients/run upload` makes the table; without draining the numbers depend on timing.
///
/// A client that sends `Expect: 100-continue`, as curl does above 1 MB, waits for the response before it sends the content
/// (RFC 9110 §10.1.1). Such a body is never drained, since reading it would request it. HTTP/2 and later need neither: the
/// stream of the request ends alone. A proxy that reads the whole request first, as nginx does by default, does so for
/// denied requests too.
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
/// let mails = Policy::new("mails", SlidingLog::per_hour(1)).key(key::constant("all"));
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
            context: Arc::new(policy::context(store, &policies)),
            fields: Fields::default(),
            extensions: true,
            jitter: Duration::ZERO,
            format: Arc::new(Negotiated::default()),
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
    /// The rate limit fields of responses.
    ///
    /// The default is [`Headers::Draft08`].
    pub fn headers(mut self, headers: Headers) -> Self {
        self.enforcer_mut().fields.style = headers;
        self
    }

    /// Adds `X-RateLimit-Limit`, `-Remaining` and `-Reset` beside the other fields, for clients that read only these.
    ///
    /// A client that reads any `RateLimit` field first does not get to them: version 0.1.0 of the npm package
    /// `ratelimit-header-parser` takes every `RateLimit` field for that of draft -07, and returns `NaN` for that of
    /// [`Headers::Draft08`], with the legacy fields beside it or not. For such clients take [`Headers::Draft07`],
    /// [`Headers::Draft06`] or [`Headers::Legacy`]. For the choice of the reset see [`Reset`]. By default they are not added.
    pub fn legacy_headers(mut self, reset: Reset) -> Self {
        self.enforcer_mut().fields.legacy = Some(reset);
        self
    }

    /// Adds the partition key `pk` to the fields of [`Headers::Draft08`], by which a caller knows what it shares a count
    /// with: 128 bits of a keyed hash of the key, which cannot be computed without the secret.
    ///
    /// The secret is at least 16 bytes, from a random source: callers see digests, and can try short or chosen secrets
    /// offline. It may be that of `RedisStoreBuilder::hash_keys`; the digests differ. The default is not to add it.
    ///
    /// # Panics
    ///
    /// If the secret is shorter. [`try_partition_key`](Self::try_partition_key) returns an error instead.
    #[track_caller]
    pub fn partition_key(self, secret: impl AsRef<[u8]>) -> Self {
        match self.try_partition_key(secret) {
            Ok(layer) => layer,
            Err(error) => panic!("{error}"),
        }
    }

    /// Adds the [partition key](Self::partition_key), with a secret from configuration.
    ///
    /// # Errors
    ///
    /// If the secret is shorter than 16 bytes.
    pub fn try_partition_key(mut self, secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        self.enforcer_mut().fields.partition_key = Some(Secret::for_partition_keys(secret)?);
        Ok(self)
    }

    /// Adds a random time of up to this long to the wait of each response, so that clients that were denied together do
    /// not retry together.
    ///
    /// The wait is the same in all fields of a response: `Retry-After`, `t` of `RateLimit`, `RateLimit-Reset`,
    /// `X-RateLimit-Reset`, and in gRPC `RetryInfo` and `grpc-retry-pushback-ms`. The
    /// [`Decision`](crate::Decision::retry_after) of a denial has it too. It is also added to the wait of 1 s after a failure
    /// of the store. The default is [`Duration::ZERO`].
    pub fn retry_jitter(mut self, most: Duration) -> Self {
        self.enforcer_mut().jitter = most;
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
    /// let policy = Policy::new("hello", SlidingLog::per_minute(5)).key(key::constant("all"));
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
        self.enforcer_mut().extensions = extensions;
        self
    }

    /// The format of responses to rejected requests.
    ///
    /// The default is [`Negotiated`]: [`Grpc`](crate::response::Grpc) for gRPC calls, [`Problem`](crate::response::Problem)
    /// for all other requests.
    pub fn format(mut self, format: impl ResponseFormat) -> Self {
        self.enforcer_mut().format = Arc::new(format);
        self
    }

    /// What happens to requests while the store fails, for all policies of the layer.
    ///
    /// The default is the [mode of each policy](crate::Policy::failure_mode), which is [`FailureMode::Local`] unless it was
    /// set.
    pub fn failure_mode(mut self, failure_mode: FailureMode) -> Self {
        let context = Arc::make_mut(&mut self.enforcer_mut().context);
        context.failure_modes = context.failure_modes.iter().map(|_| failure_mode).collect();
        self
    }

    /// Observes each request for which the store failed, in every failure mode.
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
        self.enforcer_mut().on_failure = OnFailure::new(observe);
        self
    }

    /// Reads the bodies of rejected requests on HTTP/1.x before the response, up to this many bytes and for up to this long.
    ///
    /// See [large request bodies](Self#large-request-bodies). The setting needs request bodies that are an
    /// [`http_body::Body`], as those of axum, tonic and hyper are, so it makes a layer of another type and comes last. By
    /// default nothing is read.
    ///
    /// ```
    /// use std::time::Duration;
    /// use bytes::Bytes;
    /// use http::{Request, StatusCode};
    /// use http_body_util::{BodyExt, Full};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let uploads = Policy::new("uploads", SlidingLog::per_minute(1)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), uploads).drain_body(8 << 20, Duration::from_secs(10));
    /// let service = layer.layer(service_fn(async |request: Request<Full<Bytes>>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(request.into_body()))
    /// }));
    ///
    /// for status in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
    ///     let response = service.clone().oneshot(Request::new(Full::from("a large file"))).await?;
    ///     assert_eq!(response.status(), status);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// The layer does not, but its services do if they run on a tokio runtime without a timer
    /// ([`enable_time`](tokio::runtime::Builder::enable_time)).
    pub fn drain_body(self, bytes: u64, time: Duration) -> DrainBodyLayer {
        DrainBodyLayer::new(self, bytes, time)
    }
}

impl RateLimitLayer {
    fn enforcer_mut(&mut self) -> &mut Enforcer {
        Arc::make_mut(&mut self.enforcer)
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
            .field("headers", &self.enforcer.fields)
            .field("failure_modes", &self.enforcer.context.failure_modes)
            .finish_non_exhaustive()
    }
}
