use super::Policy;

/// Limits of other servers.
impl<K> Policy<K> {
    /// Bans a key when the server behind the layer responds with `429`, or with a time to wait: for a layer around a client.
    ///
    /// A fleet that shares the quota of a third-party API puts the layer around its client, with one key for each quota, such as
    /// one for the API token. When the API denies a request all the same, the key is banned until the time that its response
    /// contains, in all processes, as by [`Limiter::ban`](crate::Limiter::ban): their requests are denied with the
    /// [wait](crate::Decision::retry_after), without being sent and without being counted.
    ///
    /// | response | pause |
    /// | --- | --- |
    /// | `429` | `Retry-After` in seconds or as a date; else the longest `t` of `RateLimit` with `r=0` (drafts -07 to -11); else 1 s |
    /// | `503` | `Retry-After`; without it none |
    /// | gRPC `RESOURCE_EXHAUSTED`, `UNAVAILABLE`, in the head or in the trailers | `RetryInfo` in the details, else `grpc-retry-pushback-ms`; without them none |
    ///
    /// A date is compared with the `Date` of the response. The pause is at most an hour, or the
    /// [longest length](crate::Ban::max_length) of the [ban](Self::ban) of the policy; a longer ban by a policy of the same name
    /// elsewhere applies as it is. It applies to each later check of each process. Requests that [wait](Self::wait_up_to) are denied at their turn; requests that were sent before are not stopped.
    /// The request that received the response stays counted; [`refund_if`](Self::refund_if) can refund it. Denials by a layer or
    /// handler of this process are ignored.
    ///
    /// The ban is sent to the store in a task of its own, as a refund is. If the store fails, this process bans the key for the
    /// time in which it counts by itself, and [`lost_settlements`](crate::RateLimitLayer::lost_settlements) counts the loss. A
    /// server that is not trusted can stop all requests to itself for the longest length. A [`Limiter`](crate::Limiter), which
    /// has no responses, does not take such a policy. By default responses are ignored.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::{Request, Response, StatusCode, header::RETRY_AFTER};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{Decision, Headers, key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let api = Policy::new("api", SlidingLog::per_minute(100)).key(key::constant("token-1")).learn_from_responses();
    /// let layer = RateLimitLayer::new(MemoryStore::new(), api).headers(Headers::None);
    /// // In place of a client, such as that of hyper-util: an API whose quota another program has used up.
    /// let client = layer.layer(service_fn(async |_: Request<Body>| {
    ///     let mut response = Response::new(Body::new());
    ///     *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    ///     response.headers_mut().insert(RETRY_AFTER, 30.into());
    ///     Ok::<_, std::convert::Infallible>(response)
    /// }));
    ///
    /// let sent = client.clone().oneshot(Request::new(Body::new())).await?;
    /// assert!(sent.extensions().get::<Decision>().is_some_and(Decision::is_allowed));
    ///
    /// let unsent = client.oneshot(Request::new(Body::new())).await?;
    /// let denied = unsent.extensions().get::<Decision>().expect("the layer decides");
    /// assert!(!denied.is_allowed());
    /// assert_eq!(denied.retry_after(), Some(Duration::from_secs(30)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Arrival is not admission
    ///
    /// The limit holds for the times at which requests are admitted, and the API counts those at which they arrive. Requests that
    /// take different times on the way can arrive closer together: with a limit equal to that of the API, more than its quota
    /// arrive in some window. Make the window longer than that of the API by a margin: the difference between the longest and
    /// the shortest time from the decision to the arrival. Then at most the quota arrives in any window.
    ///
    /// Three processes send 120 requests to an API on the same machine that admits 20 in each second, as fast as they are
    /// admitted, while the machine is busy. Three runs each of `ALONE=1 MARGIN_MS=.. cargo run --example client --features axum`:
    ///
    /// | margin | most in a second | denied by the API |
    /// | --- | --- | --- |
    /// | none | 20, 21, 23 | 3, 4, 6 |
    /// | 50 ms | 20, 20, 20 | 0, 0, 0 |
    /// | 200 ms | 20, 20, 19 | 0, 0, 0 |
    ///
    /// Over a network the times differ by more: choose the margin from the measured times. It costs as much of the throughput:
    /// 50 ms in a window of a minute are a thousandth.
    pub fn learn_from_responses(mut self) -> Self {
        self.settings.learns = true;
        self
    }
}
