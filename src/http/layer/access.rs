use std::sync::Arc;

use http::request::Parts;

#[cfg(feature = "serde")]
use crate::{ConfigError, Policies, store::Store};
use crate::{Decision, RateLimitLayer, Usage, policy::Access, store::StoreError};

/// Requests that no policy decides about.
impl RateLimitLayer {
    /// Admits the requests that fulfill a condition without limiting them, such as those of monitoring.
    ///
    /// No policy of the layer applies to such a request: no key is extracted, the store is not called, and the response has no
    /// rate limit fields. [`Ip::within`](crate::key::Ip::within) is a condition on the address of the client. Several
    /// conditions are alternatives, also to those of a [file](crate::Policies#skipped-and-blocked-requests). By default no
    /// request is skipped.
    ///
    /// A condition on the path sees it as the layer does, which may be before a layer that rewrites it, such as
    /// `NormalizePathLayer`, and is without the prefix in a nested router of axum, where `OriginalUri` in the extensions has it.
    /// The routes of a file are compared whole and in all [spellings](crate::Policies#routes).
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::Request;
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, key::PeerAddr, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let api = Policy::new("api", SlidingLog::per_minute(1)).key(key::ip());
    /// let layer = RateLimitLayer::new(MemoryStore::new(), api)
    ///     .skip(key::ip().within(["10.0.0.0/8"])?)
    ///     .skip(|parts| parts.uri.path() == "/health");
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    ///
    /// for (peer, path, statuses) in [
    ///     ("203.0.113.7:4711", "/", [200, 429]),
    ///     ("203.0.113.7:4711", "/health", [200, 200]),
    ///     ("10.0.0.2:4711", "/", [200, 200]),
    /// ] {
    ///     for status in statuses {
    ///         let request = Request::get(path).extension(PeerAddr(peer.parse()?)).body(Body::new())?;
    ///         assert_eq!(service.clone().oneshot(request).await?.status(), status);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn skip(mut self, condition: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.change_access(|access| access.skipped.push(Arc::new(condition)));
        self
    }

    /// Admits the requests of gRPC services of these full names without limiting them, such as those of checks of health and of
    /// reflection, as [`skip`](Self::skip) does.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::Request;
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let all = Policy::new("all", SlidingLog::per_minute(1)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), all)
    ///     .skip_services(["grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"]);
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    ///
    /// for (path, limited) in [("/grpc.health.v1.Health/Check", false), ("/shop.Orders/List", true)] {
    ///     let response = service.clone().oneshot(Request::post(path).body(Body::new())?).await?;
    ///     assert_eq!(response.headers().contains_key("ratelimit"), limited);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If a name is empty or has a slash, since no service has it.
    #[track_caller]
    pub fn skip_services<N: AsRef<str>>(self, names: impl IntoIterator<Item = N>) -> Self {
        let names: Vec<Box<str>> = names.into_iter().map(|name| name.as_ref().into()).collect();
        for name in &names {
            assert!(
                !name.is_empty() && !name.contains('/'),
                "{name:?} is not the full name of a gRPC service, such as `grpc.health.v1.Health`"
            );
        }
        self.skip(move |parts| {
            let path = parts.uri.path().strip_prefix('/').and_then(|path| path.split_once('/'));
            // Names of methods are identifiers; of another path a service behind this one may make any path.
            let is_method = |method: &str| method.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            path.is_some_and(|(service, method)| is_method(method) && names.iter().any(|name| &**name == service))
        })
    }

    /// Rejects the requests that fulfill a condition with `403 Forbidden`, in gRPC with `PERMISSION_DENIED`.
    ///
    /// No policy of the layer applies to such a request, and the store is not called. A [`format`](Self::format) has the reason
    /// [`Rejection::Blocked`](crate::http::response::Rejection::Blocked) and may build another response. Several conditions are
    /// alternatives, also to those of a [file](crate::Policies#skipped-and-blocked-requests). A request that is also to be
    /// [skipped](Self::skip) is blocked. [`Ip::unknown`](crate::key::Ip::unknown) is the condition of clients that a proxy has not
    /// recorded. By default no request is blocked.
    ///
    /// A condition on the path is evaded by other spellings, such as a trailing slash in front of `NormalizePathLayer`, and sees
    /// no prefix of a nested router of axum. The routes of a file are compared whole and in all
    /// [spellings](crate::Policies#routes).
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Request, StatusCode};
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, key::PeerAddr, MemoryStore, RateLimitLayer};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = RateLimitLayer::new(MemoryStore::new(), []).block(key::ip().within(["198.51.100.0/24", "2001:db8::/32"])?);
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    ///
    /// let peer = PeerAddr("198.51.100.9:4711".parse()?);
    /// let blocked = service.oneshot(Request::get("/").extension(peer).body(Body::new())?).await?;
    /// assert_eq!(blocked.status(), StatusCode::FORBIDDEN);
    /// assert!(!blocked.headers().contains_key("ratelimit"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn block(mut self, condition: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.change_access(|access| access.blocked.push(Arc::new(condition)));
        self
    }

    fn change_access(&mut self, change: impl FnOnce(&mut Access)) {
        self.enforcer_mut().policies.change_access(change);
    }
}

/// Callbacks.
///
/// They only observe. They run on the path of the request, so they must be quick, and a panic in one is a panic of the
/// service.
impl RateLimitLayer {
    /// Observes each [`Decision`]: of requests that are admitted, and of those that a limit denies.
    ///
    /// A decision has the policies that [only observe](crate::Policy::observe_only) too, with what they would have done.
    /// Decisions that a process makes by itself while the store fails are included; their
    /// [`store_error`](Decision::store_error) is set. There is no decision, and so no call, for a request
    ///
    /// * to which no policy applies, or that is [skipped](Self::skip);
    /// * that is [blocked](Self::block);
    /// * that is refused, since its key cannot be extracted;
    /// * that is admitted uncounted or rejected because the store fails ([`Open`](crate::FailureMode::Open)
    ///   and [`Closed`](crate::FailureMode::Closed)): see [`on_failure`](Self::on_failure).
    ///
    /// Of nested layers each observes its own decisions. Setting it again replaces the callback. By default none is set.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use bytes::Bytes;
    /// use http::Request;
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// static ADMITTED: AtomicU64 = AtomicU64::new(0);
    /// static DENIED: AtomicU64 = AtomicU64::new(0);
    ///
    /// let policy = Policy::new("hello", SlidingLog::per_minute(2)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), policy).on_decision(|decision| {
    ///     let counter = if decision.is_allowed() { &ADMITTED } else { &DENIED };
    ///     counter.fetch_add(1, Ordering::Relaxed);
    /// });
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    /// for _ in 0..5 {
    ///     service.clone().oneshot(Request::new(Body::new())).await?;
    /// }
    /// assert_eq!(ADMITTED.load(Ordering::Relaxed), 2);
    /// assert_eq!(DENIED.load(Ordering::Relaxed), 3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_decision(mut self, observe: impl Fn(&Decision) + Send + Sync + 'static) -> Self {
        self.enforcer_mut().on_decision = Some(Arc::new(observe));
        self
    }

    /// Observes what each policy has charged an admitted request in the end, for an invoice: after [refunds](crate::Policy::refund_if)
    /// and [settlements](crate::Receipt::settle), once for each admitted request and policy, also if the caller leaves.
    ///
    /// It is called when nothing can change it any more: the inner service has dropped the request, the response has ended, and no
    /// [`Receipt`](crate::Receipt) or clone of the [`Decision`] is left. [`Store::drained`](crate::store::Store::drained) waits for it. Slots, policies that
    /// [only observe](crate::Policy::observe_only), and requests that nothing counts, as in [`FailureMode::Open`](crate::FailureMode::Open) while the store fails, have no usage.
    /// The callback must be quick; a panic in it is caught. Setting it again replaces it. By default none is set.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use bytes::Bytes;
    /// use http::{Request, Response};
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{Decision, MemoryStore, Policy, RateLimitLayer, TokenBucket, key};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let invoice = Arc::new(Mutex::new(Vec::new()));
    /// let ledger = invoice.clone();
    ///
    /// // Each request is charged 100 tokens before it is known how many it takes.
    /// let tokens = Policy::new("tokens", TokenBucket::per_day(1_000)).key(key::header("user")).cost(100);
    /// let layer = RateLimitLayer::new(MemoryStore::new(), tokens).on_settled(move |usage| {
    ///     ledger.lock().unwrap().push((usage.key.to_string(), usage.units));
    /// });
    /// let service = layer.layer(service_fn(async |request: Request<Body>| {
    ///     let receipt = request.extensions().get::<Decision>().expect("the layer decides").take_receipt();
    ///     receipt.settle(42).await.expect("a memory store does not fail");
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    ///
    /// drop(service.oneshot(Request::get("/").header("user", "ada").body(Body::new())?).await?);
    /// assert_eq!(*invoice.lock().unwrap(), [("header:user=ada".to_owned(), 42)]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_settled(mut self, observe: impl Fn(&Usage<'_>) + Send + Sync + 'static) -> Self {
        let policies = &mut self.enforcer_mut().policies;
        policies.change_context(|context| context.on_settled = Some(Arc::new(observe)));
        self
    }

    /// Observes each request for which the store failed, in every failure mode.
    ///
    /// Setting it again replaces the callback. By default none is set.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use bytes::Bytes;
    /// use http::{Request, StatusCode};
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, FailureMode, Policy, RateLimitLayer, SlidingLog};
    /// use tower_quota::store::{ErrorKind, Store, StoreError, StoreFuture, StoreRequest};
    ///
    /// /// A Redis that is down.
    /// struct Down;
    ///
    /// impl Store for Down {
    ///     fn decide(&self, _: &[StoreRequest<'_>]) -> StoreFuture {
    ///         StoreFuture::ready(Err(StoreError::new(ErrorKind::Unreachable, "connection refused")))
    ///     }
    /// }
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// static FAILURES: AtomicU64 = AtomicU64::new(0);
    ///
    /// let policy = Policy::new("hello", SlidingLog::per_second(100)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(Down, policy.failure_mode(FailureMode::Closed)).on_failure(|error| {
    ///     assert_eq!(error.kind(), ErrorKind::Unreachable);
    ///     FAILURES.fetch_add(1, Ordering::Relaxed);
    /// });
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    ///
    /// let rejected = service.oneshot(Request::new(Body::new())).await?;
    /// assert_eq!(rejected.status(), StatusCode::SERVICE_UNAVAILABLE);
    /// assert_eq!(rejected.headers()["retry-after"], "1");
    /// assert_eq!(FAILURES.load(Ordering::Relaxed), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_failure(mut self, observe: impl Fn(&StoreError) + Send + Sync + 'static) -> Self {
        self.enforcer_mut().on_failure = Some(Arc::new(observe));
        self
    }
}

/// Layers.
#[cfg(feature = "serde")]
impl Policies {
    /// A layer that counts in this store for the policies of these names, which are decided together.
    ///
    /// It is [`RateLimitLayer::try_new`] with what [`get`](Self::get) returns for each name or, if the file has plans, with
    /// [`plans`](Self::plans) of these names.
    ///
    /// ```
    /// use axum::{Router, body::Body, routing::get};
    /// use http::{Request, StatusCode};
    /// use tower::ServiceExt;
    /// use tower_quota::{MemoryStore, Policies, key::PeerAddr};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # #[cfg(feature = "file")] {
    /// let policies = Policies::from_toml(r#"
    ///     [block]
    ///     networks = "198.51.100.0/24"
    ///
    ///     [policies]
    ///     api = { limit = "sliding-log 100/min", key = "ip" }
    ///     search = { limit = "sliding-log 5/s", key = "ip" }
    /// "#)?;
    /// let app: Router = Router::new()
    ///     .route("/search", get(async || "found"))
    ///     .layer(policies.layer(MemoryStore::new(), ["api", "search"])?);
    ///
    /// for (peer, status) in [("203.0.113.7:4711", StatusCode::OK), ("198.51.100.9:4711", StatusCode::FORBIDDEN)] {
    ///     let request = Request::get("/search").extension(PeerAddr(peer.parse()?)).body(Body::empty())?;
    ///     assert_eq!(app.clone().oneshot(request).await?.status(), status);
    /// }
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no policy of a name, or it has no key, a name occurs twice, or there are no names.
    pub fn layer<N: AsRef<str>>(
        &self,
        store: impl Store,
        names: impl IntoIterator<Item = N>,
    ) -> Result<RateLimitLayer, ConfigError> {
        let names: Vec<N> = names.into_iter().collect();
        if names.is_empty() {
            return Err(ConfigError::new(
                "a layer of a file has at least one of its policies, by which it finds the file; name one, or make a layer \
                 without limits by `RateLimitLayer::new(store, [])`",
            ));
        }
        RateLimitLayer::try_new(store, self.for_layer(&names)?)
    }
}
