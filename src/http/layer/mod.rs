mod access;
mod settings;

use std::{sync::Arc, time::Duration};

use http::request::Parts;

use super::{Presentation, enforce::Enforcer};
use crate::{
    ConfigError, Decision, IntoPolicies,
    error::or_panic,
    policy::{PolicySet, validate_for_layer},
    store::{Store, StoreError},
};

/// Layer that limits how often a caller may use a service.
///
/// It has no type parameters. Its clones and the services it makes share their counts. See the [crate documentation](crate)
/// for an example.
///
/// # Several policies, one decision
///
/// The policies of a layer are decided together, at one instant: a request is counted by all of them or, if one denies it,
/// by none. The response names each policy that denied, and its `Retry-After` is the longest of their waits. `RateLimit` has
/// one member for each policy.
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
/// /// The authenticated user.
/// #[derive(Clone)]
/// struct UserId(u64);
///
/// let user = || key::extension("user", |user: &UserId| user.0);
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
/// assert_eq!(denied.headers()["retry-after"], "60");
/// assert_eq!(denied.headers()["ratelimit"], r#""per-path";r=0;t=60, "per-user";r=2;t=60"#);
/// let problem = denied.into_body().collect().await?.to_bytes();
/// assert!(problem.ends_with(br#""violated-policies":["per-path"]}"#));
///
/// // The denied request was not counted by the other policy either.
/// let other_path = get("/b").await?;
/// assert_eq!(other_path.headers()["ratelimit"], r#""per-path";r=0;t=60, "per-user";r=1;t=60"#);
/// # Ok(())
/// # }
/// ```
///
/// Nested layers decide one after the other: what the outer one has counted stays counted when the inner one denies. A policy
/// that both layers have, with the same key, limit and store (or a clone of it), is charged once per request. If its costs
/// differ, the inner layer charges the difference up to the larger cost. With different stores it is counted in both, and so it is
/// if only the inner one has [bans](crate::Policy::ban), which the outer one has not looked at.
///
/// This holds on one Redis server and with [`MemoryStore`](crate::MemoryStore). In a cluster, policies with the same key are
/// decided together, and those with different keys one after the other; an earlier charge is refunded when a later policy
/// denies.
///
/// Requests that a handler sends with a copy of the extensions of its own, such as the items of a batch, are parts of that request,
/// and so free, and hold no slots of their own; remove the [`Decision`](crate::Decision) from the copy to have them counted.
///
/// # Turning limits off
///
/// A layer with an empty list of policies admits all requests. It has the same type as any other, so that one expression turns
/// the limits of an application off, for example in a test. `tower::util::option_layer` does not compile around a router of
/// axum or a server of tonic, since the responses with a layer and without one have different bodies. In a [file](crate::Policies),
/// `enabled = false` turns all of its limits off, and its lists `[block]` and `[skip]`.
///
/// ```
/// use axum::{Router, body::Body, routing::get};
/// use http::{Request, StatusCode};
/// use tower::ServiceExt;
/// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
///
/// fn app(limited: bool) -> Router {
///     let hello = Policy::new("hello", SlidingLog::per_minute(1)).key(key::constant("all"));
///     let policies = if limited { vec![hello] } else { vec![] };
///     Router::new().route("/", get(async || "hi")).layer(RateLimitLayer::new(MemoryStore::new(), policies))
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// for (limited, second) in [(true, StatusCode::TOO_MANY_REQUESTS), (false, StatusCode::OK)] {
///     let app = app(limited);
///     let get = || app.clone().oneshot(Request::new(Body::empty()));
///     let Ok(response) = get().await;
///     assert_eq!(response.status(), StatusCode::OK);
///     let Ok(response) = get().await;
///     assert_eq!(response.status(), second);
/// }
/// # }
/// ```
///
/// # When the store fails
///
/// Each process counts by itself, with the same limits, until the store replies again. Other
/// [`FailureMode`](crate::FailureMode)s admit all requests uncounted, or reject them with `503 Service Unavailable`, in gRPC
/// with `UNAVAILABLE`. A failure is never reported as a denial, and the error type of the service stays what it is. A
/// [`format`](Self::format) has the [reason](crate::http::response::Rejection) and may build another response;
/// [`on_failure`](Self::on_failure) observes failures.
///
/// # When a function of the application panics
///
/// A panic of one that is called until there is a response, such as of a key, a cost or a format, is one of the service: the server,
/// or a `CatchPanicLayer` around the limit, handles it as that of a handler, and no slot stays held. One of a function that is called
/// when the request has ended, such as [`Policy::refund_if`](crate::Policy::refund_if), is caught, and the charge stays.
///
/// # Costs
///
/// The cost of a request is 1, [`Policy::cost`](crate::Policy::cost), or computed by
/// [`Policy::cost_fn`](crate::Policy::cost_fn). A request is admitted if its whole cost fits. A fixed cost above the limit is an
/// error when the layer is built. A request with a computed cost above the limit is denied without `Retry-After`, for the reason
/// [`CostAboveLimit`](crate::Denial::CostAboveLimit), which the `detail` of the response tells. With a computed cost of 0 the policy
/// does not apply.
///
/// # Large request bodies
///
/// The layer rejects a request without waiting for its body. On HTTP/1.x the unread content lies on the connection before the
/// next request, so hyper closes the connection unless all of the content has arrived. The response has
/// `Connection: close` for content that has not, is of more than 8 KiB or in chunks, and for a client that sent
/// `Expect: 100-continue`. A client that is still sending when the connection is closed may get an error in place of the response.
///
/// [`drain_body`](Self::drain_body) reads the body, within bounds, before the response is sent; the connection stays open.
/// Beyond the bounds the response is sent at once, with `Connection: close`. A denied request then takes the traffic of its
/// body and stays open for longer, so set the bounds to the largest upload that the service accepts.
///
/// A `POST` of 5 MB that is denied, 20 times by each client, on axum and HTTP/1.1:
///
/// | client | without | with `drain_body(8 << 20, ..)` |
/// | --- | --- | --- |
/// | curl 7.88, with or without `Expect` | `429` | `429` |
/// | reqwest 0.13 | `429` (14), broken pipe (6) | `429` |
/// | Python 3.11, `http.client` | `BrokenPipeError` | `429` |
/// | Node 20, `fetch` | `429` (2), `EPIPE` (18) | `429` |
///
/// `tests/clients/run upload` makes the table; without draining the numbers depend on timing.
///
/// A client that sends `Expect: 100-continue`, as curl does above 1 MB, waits for the response before it sends the content
/// (RFC 9110 §10.1.1). Such a body is never drained, since reading it would request it.
///
/// On HTTP/2 and later only the stream of the request ends. A client must not discard the response then (RFC 9113 §8.1), and
/// hyper, tonic and Node do not, but curl 7.88 does: of 100 denied posts of 100 bytes it lost 60, and 91 of 100 kB.
/// [`drain_body`](Self::drain_body) reads such bodies too, if they have a `Content-Length`; with it curl lost none. A proxy that reads the whole request first, as nginx does by default, does so for denied
/// requests too.
///
/// # Allocations
///
/// The layer allocates 4 times for a request that a [`MemoryStore`](crate::MemoryStore) admits: once for the decision, once to
/// insert it into the [`extensions`](Self::extensions) of the request, and twice for the table of the header fields, unless the
/// response has fields already. The values of the fields are written into a block of memory that each thread keeps; a new block
/// is allocated while responses still hold the old one. A denied request allocates 4 times. For the first request of a thread
/// the policies are copied, some 1 KB for each. A store that does not reply at once adds its future and what waits for it.
///
/// # Refunds
///
/// [`Policy::refund_if`](crate::Policy::refund_if) refunds requests by how they ended, such as all but failed logins.
///
/// For other cases, the inner service [refunds](crate::Receipt::refund) the charges of a request that is not to count, with
/// the [`Decision`](crate::Decision) in the extensions of the request:
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
/// let store = MemoryStore::new();
/// let mails = Policy::new("mails", SlidingLog::per_hour(1)).key(key::constant("all"));
///
/// let service = RateLimitLayer::new(store, mails).layer(service_fn(async |request: Request<Body>| {
///     // The mail could not be sent.
///     let decision = request.extensions().get::<Decision>();
///     if let Some(decision) = decision {
///         decision.take_receipt().refund().await.expect("the store replies");
///     }
///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
/// }));
///
/// for _ in 0..3 {
///     let response = service.clone().oneshot(Request::new(Body::new())).await?;
///     assert!(response.status().is_success());
///     // The fields are those of the decision, before the refund.
///     assert_eq!(response.headers()["ratelimit"], r#""mails";r=0;t=3600"#);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[doc(alias = "option_layer")]
#[must_use]
pub struct RateLimitLayer {
    pub(super) enforcer: Arc<Enforcer>,
}

/// Constructors.
impl RateLimitLayer {
    /// A layer that counts in this store for one policy, or for several that are decided together.
    ///
    /// Of several, a request is counted by all or, if one denies it, by none. An empty list admits all requests.
    ///
    /// # Panics
    ///
    /// If two policies have the same name, one is not [valid](crate::Policy::validate) or has a setting of a wait without one, or
    /// [`Plans`](crate::Plans) do not fit together or have no [`by`](crate::Plans::by). [`try_new`](Self::try_new) returns an error
    /// instead, and also one where this logs an error: for a name that has another limit elsewhere on the store.
    #[track_caller]
    pub fn new(store: impl Store, policies: impl IntoPolicies) -> Self {
        let layer = or_panic(Self::build(store, policies));
        layer.enforcer.policies.newest().context.log_conflict();
        layer
    }

    /// A layer that counts in this store for one policy, or for several that are decided together.
    ///
    /// ```
    /// use tower_quota::{key, Concurrency, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// let policy = |limit| Policy::new("hello", SlidingLog::per_minute(limit)).key(key::ip());
    /// let error = RateLimitLayer::try_new(MemoryStore::new(), [policy(1), policy(2)]).unwrap_err();
    /// assert!(error.to_string().starts_with("two policies are named `hello`"));
    ///
    /// let exports = Policy::new("exports", Concurrency::new(2)).key(key::ip()).refund_if(|completion| completion.is_success());
    /// let error = RateLimitLayer::try_new(MemoryStore::new(), exports).unwrap_err();
    /// assert!(error.to_string().starts_with("`.refund_if(..)` has no meaning for the policy `exports`"));
    /// ```
    ///
    /// # Errors
    ///
    /// For the policies for which [`new`](Self::new) panics, and if another layer or limiter on the store has one of the names with
    /// another limit, which `new` logs as an error.
    pub fn try_new(store: impl Store, policies: impl IntoPolicies) -> Result<Self, ConfigError> {
        let layer = Self::build(store, policies)?;
        layer.enforcer.policies.newest().context.refuse_conflict()?;
        Ok(layer)
    }

    fn build(store: impl Store, policies: impl IntoPolicies) -> Result<Self, ConfigError> {
        let policies = PolicySet::new(store, policies.into_policies(), validate_for_layer)?;
        if let Some(plans) = policies.newest().plans.as_ref().filter(|plans| plans.is_forgotten()) {
            return Err(ConfigError::new(format!(
                "each request would have the first of the plans {}; set `.by(|parts| ..)`, which names the plan of a request",
                plans.list()
            )));
        }
        Ok(Self {
            enforcer: Arc::new(Enforcer {
                policies,
                extensions: true,
                response_extensions: false,
                jitter: Duration::ZERO,
                drain: None,
                on_decision: None,
                on_failure: None,
                logged_once: Arc::default(),
            }),
        })
    }
}

/// Counters.
impl RateLimitLayer {
    /// The number of requests whose refund after their end was lost.
    ///
    /// These are the settlements of [`Policy::refund_if`](crate::Policy::refund_if), the bans of
    /// [`Policy::learn_from_responses`](crate::Policy::learn_from_responses), and in a layer with either those of
    /// [receipts](crate::Receipt), for which the store failed, and those that could not be sent, since there was no tokio runtime
    /// or it ended. They are not repeated; the first one is logged. Clones of a layer and its services count together. In a layer
    /// without either it is 0: the future of a receipt returns the error, and the [metric](crate::guide::metrics) counts it.
    ///
    /// ```
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// let logins = Policy::new("logins", SlidingLog::per_minute(5)).key(key::ip());
    /// let layer = RateLimitLayer::new(MemoryStore::new(), logins.refund_if(|completion| completion.is_success()));
    /// assert_eq!(layer.lost_settlements(), 0);
    /// ```
    #[must_use]
    pub fn lost_settlements(&self) -> u64 {
        let newest = self.enforcer.policies.newest();
        newest.context.lost.as_ref().map_or(0, |lost| lost.count())
    }
}

/// What remains for a caller.
impl RateLimitLayer {
    /// Returns what the layer would decide about a request with this head, and counts nothing.
    ///
    /// All policies that apply to such a request are in the decision, with the key and the plan of the caller. To ask about
    /// another route than that of the handler, change the method and the URI; a policy with the key
    /// [`route`](crate::key::route()) remains that of the handler. What the layer has counted for the request itself is regarded
    /// as a part of the counts, and a computed [cost](crate::Policy::cost_fn) of 0 as one of 1. Callbacks of decisions are not
    /// called.
    ///
    /// ```
    /// use http::Request;
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = |name, limit| Policy::new(name, limit).key(key::header("x-user-id"));
    /// let policies = [policy("minute", SlidingLog::per_minute(10)), policy("day", SlidingLog::per_day(500))];
    /// let layer = RateLimitLayer::new(MemoryStore::new(), policies);
    ///
    /// // The handler of `/v1/limits`.
    /// let (head, _) = Request::get("/v1/limits").header("x-user-id", "42").body(())?.into_parts();
    /// let decision = layer.peek(&head).await?;
    /// let remaining: Vec<_> = decision.policies().map(|policy| (policy.name(), policy.remaining())).collect();
    /// assert_eq!(remaining, [("minute", 10), ("day", 500)]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Of the kind [`Invalid`](crate::store::ErrorKind::Invalid) if the request has no key, or is [blocked](Self::block).
    /// And if the store fails and a policy is [`Closed`](crate::FailureMode::Closed).
    pub async fn peek(&self, parts: &Parts) -> Result<Decision, StoreError> {
        self.enforcer.peek(parts).await
    }
}

impl RateLimitLayer {
    fn enforcer_mut(&mut self) -> &mut Enforcer {
        Arc::make_mut(&mut self.enforcer)
    }

    fn present(&mut self, change: impl FnOnce(&mut Presentation)) {
        let policies = &mut self.enforcer_mut().policies;
        policies.change_context(|context| Presentation::change(context, change));
    }

    pub(crate) fn policies(&self) -> &PolicySet {
        &self.enforcer.policies
    }
}

impl_debug!(RateLimitLayer, layer =>
    policies: layer.enforcer.policies.newest().policies,
    headers: Presentation::of(&layer.enforcer.policies.newest().context).fields
);
