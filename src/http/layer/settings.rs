use std::{sync::Arc, time::Duration};

use serde_json::Value;

use crate::{
    ConfigError, Headers, Limit, RateLimitLayer,
    http::{
        drain::Bounds,
        response::{ResponseFormat, openapi::components},
    },
    key::Secret,
};

/// Settings.
impl RateLimitLayer {
    /// Sets the rate limit fields of responses.
    ///
    /// [`Headers::and`] adds those that some clients read alone. The default is [`Headers::Draft08`]. See [`Headers`] for an example
    /// of each.
    pub fn headers(mut self, headers: Headers) -> Self {
        self.present(|presentation| presentation.fields.dialect = headers);
        self
    }

    /// Adds the partition key `pk` to the fields of [`Headers::Draft08`]: 128 bits of a keyed hash of the key.
    ///
    /// A caller sees by it which of its requests share a count. It cannot be computed without the secret. The secret is at
    /// least 16 bytes, from a random source: callers see digests, and can try short or chosen secrets offline. It may be that
    /// of `RedisStoreBuilder::hash_keys`; the digests differ. By default it is not added.
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
    /// let policy = Policy::new("hello", SlidingLog::per_minute(5)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), policy).partition_key("a secret of 24 bytes....")?;
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    ///
    /// let response = service.oneshot(Request::new(Body::new())).await?;
    /// let state = response.headers()["ratelimit"].to_str()?;
    /// assert!(state.starts_with(r#""hello";r=4;t=60;pk=:"#), "{state}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the secret is shorter than 16 bytes.
    pub fn partition_key(mut self, secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        let secret = Secret::derive(Secret::PARTITION_KEYS, secret)?;
        self.present(|presentation| presentation.fields.partition_key = Some(secret));
        Ok(self)
    }

    /// Adds the field `RateLimit-Observed` for the policies that [only observe](crate::Policy::observe_only).
    ///
    /// It has the members of `RateLimit` in [`Headers::Draft08`], with the parameter `denied` if the policy would have denied
    /// the request. No standard defines it, and clients do not act on it. By default it is not added.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Request, StatusCode};
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let candidate = Policy::new("candidate", SlidingLog::per_minute(1)).key(key::constant("all")).observe_only();
    /// let layer = RateLimitLayer::new(MemoryStore::new(), candidate).observed_header(true);
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    ///
    /// for observed in [r#""candidate";r=0;t=60"#, r#""candidate";r=0;t=60;denied"#] {
    ///     let response = service.clone().oneshot(Request::new(Body::new())).await?;
    ///     assert_eq!(response.status(), StatusCode::OK);
    ///     assert_eq!(response.headers()["ratelimit-observed"], observed);
    ///     assert!(!response.headers().contains_key("ratelimit"));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn observed_header(mut self, observed: bool) -> Self {
        self.present(|presentation| presentation.fields.observed = observed);
        self
    }

    /// Adds a random time of up to `most` to the wait of each response, so that clients that were denied together do not
    /// retry together.
    ///
    /// The wait is the same in all fields of a response: `Retry-After`, `t` of `RateLimit`, `RateLimit-Reset`,
    /// `X-RateLimit-Reset`, and in gRPC `RetryInfo` and `grpc-retry-pushback-ms`. The
    /// [`Decision`](crate::Decision::retry_after) of a denial includes it. It is also added to the wait of 1 s after a failure
    /// of the store. The default is [`Duration::ZERO`].
    ///
    /// ```
    /// use std::{sync::Arc, time::Duration};
    /// use bytes::Bytes;
    /// use http::Request;
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, Limit, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = Policy::new("hello", SlidingLog::per_minute(1)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), policy).retry_jitter(Duration::from_secs(30));
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Body::new()))
    /// }));
    /// service.clone().oneshot(Request::new(Body::new())).await?;
    ///
    /// let denied = service.oneshot(Request::new(Body::new())).await?;
    /// let wait = denied.headers()["retry-after"].to_str()?;
    /// assert!((60..=90).contains(&wait.parse::<u64>()?), "{wait}");
    /// assert_eq!(denied.headers()["ratelimit"], *format!(r#""hello";r=0;t={wait}"#));
    /// # Ok(())
    /// # }
    /// ```
    pub fn retry_jitter(mut self, most: Duration) -> Self {
        self.enforcer_mut().jitter = most;
        self
    }

    /// Reads the bodies of rejected requests before the response, up to this many bytes and for up to this long.
    ///
    /// On HTTP/2 and later, only bodies with a `Content-Length` are read: a gRPC call that streams is denied at once. `time` is measured from the denial. See [large request bodies](Self#large-request-bodies). By default nothing is read.
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
    /// let post = || service.clone().oneshot(Request::new(Full::from("a large file")));
    /// assert_eq!(post().await?.status(), StatusCode::OK);
    ///
    /// let denied = post().await?;
    /// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    /// assert_eq!(denied.headers()["retry-after"], "60");
    /// assert!(!denied.headers().contains_key("connection"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// The layer does not panic. Its services do, on a rejected request, on a tokio runtime without a timer
    /// ([`enable_time`](tokio::runtime::Builder::enable_time)).
    pub fn drain_body(mut self, bytes: u64, time: Duration) -> Self {
        self.enforcer_mut().drain = Some(Bounds { bytes, time });
        self
    }

    /// Sets whether the [`Decision`](crate::Decision) is inserted into the extensions of the request, for the inner service,
    /// and of the response to a request that is denied.
    ///
    /// Without it an admitted request allocates once less, but the decision cannot be read or refunded, and a policy that
    /// nested layers have in common is counted by each. The default is `true`.
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

    /// Sets whether the [`Decision`](crate::Decision) is inserted into the extensions of the response to an admitted request too,
    /// for the layers around and for clients. The default is `false`, which saves three allocations. One that nothing was counted for, since
    /// no policy applies to it or the store fails and all policies are [`Open`](crate::FailureMode::Open), has it in the request alone.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Request, Response};
    /// use http_body_util::Empty;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, Decision, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = Empty<Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = Policy::new("hello", SlidingLog::per_minute(5)).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), policy).response_extensions(true);
    /// let service = layer.layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    ///
    /// let response = service.oneshot(Request::new(Body::new())).await?;
    /// assert_eq!(response.extensions().get::<Decision>().map(Decision::remaining), Some(4));
    /// # Ok(())
    /// # }
    /// ```
    pub fn response_extensions(mut self, extensions: bool) -> Self {
        self.enforcer_mut().response_extensions = extensions;
        self
    }

    /// Sets the format of responses to requests that are not admitted.
    ///
    /// It is a format of the module [`response`](crate::http::response), a type that implements [`ResponseFormat`], or a
    /// [closure](ResponseFormat#closures). The default is
    /// [`Grpc`](crate::http::response::Grpc) for gRPC calls, and [`Problem`](crate::http::response::Problem) for all other requests.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Request, StatusCode};
    /// use http_body_util::{BodyExt, Empty};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, response, Limit, MemoryStore, Policy, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let closed = Policy::new("closed", Limit::DenyAll).key(key::constant("all"));
    /// let layer = RateLimitLayer::new(MemoryStore::new(), closed).format(response::text(|_, _| "Closed.\n"));
    /// let service = layer.layer(service_fn(async |_: Request<Empty<Bytes>>| {
    ///     Ok::<_, std::convert::Infallible>(http::Response::new(Empty::<Bytes>::new()))
    /// }));
    ///
    /// let denied = service.oneshot(Request::new(Empty::new())).await?;
    /// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    /// assert_eq!(denied.headers()["ratelimit"], r#""closed";r=0"#);
    /// assert!(!denied.headers().contains_key("retry-after"), "waiting does not help");
    /// assert_eq!(denied.into_body().collect().await?.to_bytes(), "Closed.\n");
    /// # Ok(())
    /// # }
    /// ```
    pub fn format(mut self, format: impl ResponseFormat) -> Self {
        self.present(|presentation| presentation.format = Arc::new(format));
        self
    }
}

/// Documentation.
impl RateLimitLayer {
    /// The components of an OpenAPI 3.1 document for the responses to denied requests, `TooManyRequests`, and to those whose check
    /// fails, `ServiceUnavailable`, if a policy is [`Closed`](crate::FailureMode::Closed). Those to requests without a key (`400`, `500`)
    /// and to [blocked](Self::block) ones (`403`) are not among them.
    ///
    /// Each has its header fields with their schemas, as the layer writes them, and the content of
    /// [`Problem`](crate::response::Problem); replace that if the layer has another format. The fields of
    /// [`Headers::custom`](crate::Headers::custom) are not known. The description names the limits, as of the call, without those of
    /// policies that [only observe](crate::Policy::observe_only) or are [unlimited](crate::Limit::Unlimited).
    ///
    /// ```
    /// use serde_json::json;
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// let search = Policy::new("search", SlidingLog::per_minute(5)).key(key::ip());
    /// let layer = RateLimitLayer::new(MemoryStore::new(), search);
    /// let document = json!({
    ///     "openapi": "3.1.0",
    ///     "info": { "title": "search", "version": "1" },
    ///     "components": layer.openapi(),
    ///     "paths": { "/search": { "get": { "responses": {
    ///         "429": { "$ref": "#/components/responses/TooManyRequests" },
    ///     } } } },
    /// });
    ///
    /// let denied = &document["components"]["responses"]["TooManyRequests"];
    /// assert_eq!(denied["description"], "A limit denies the request: `search` (sliding-log 5/min).");
    /// assert_eq!(denied["headers"]["Retry-After"]["schema"]["type"], "integer");
    /// assert_eq!(denied["headers"]["RateLimit"]["schema"]["examples"][0], "\"default\";r=0;t=30");
    /// ```
    #[must_use]
    pub fn openapi(&self) -> Value {
        let newest = self.enforcer.policies.newest();
        let policies = newest.policies.iter().zip(&*newest.context.policies);
        let denying = policies.filter(|(policy, context)| {
            !context.settings.enforced.is_none() && policy.limit() != Some(&Limit::Unlimited)
        });
        let limits = denying.map(|(policy, _)| {
            let limit = policy
                .limit()
                .map_or("chosen for each request".to_owned(), ToString::to_string);
            match policy.plan_name() {
                Some(plan) => format!("`{}` of the plan `{plan}` ({limit})", policy.name()),
                None => format!("`{}` ({limit})", policy.name()),
            }
        });
        components(&limits.collect::<Vec<_>>(), &newest.context)
    }
}
