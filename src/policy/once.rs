use std::sync::Arc;

use super::Policy;
use crate::{ConfigError, KeyExtractor, limit::MAX_QUOTA};

/// Counting once per id.
impl<K> Policy<K> {
    /// Counts a request that is sent several times with one id only once, such as one with an
    /// [`Idempotency-Key`](https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/).
    ///
    /// The first request with an id is counted as always, and denied as always; a denied one does not count as sent. For the
    /// window of the limit after it, a request of the same key with the same id is a
    /// [repetition](crate::PolicyDecision::is_repetition): it is admitted without being counted, also by another replica and
    /// if the limit is used up. After 10 repetitions, or the number that [`max_repetitions`](Self::max_repetitions) sets, requests
    /// with the id are counted again. A request of another [cost](Self::cost_fn) is not a repetition. A repetition was not
    /// charged and has no receipt.
    ///
    /// A [refund](crate::Receipt::refund) of the first request forgets the id, so that the next one is counted. If the request
    /// was repeated before, it changes nothing: what was charged has admitted the repetitions. A request that
    /// [waits](Self::wait_up_to) for its turn has no repetitions: others with its id are counted, and wait.
    ///
    /// The id is a [`KeyExtractor`]. A request without it ([absent](crate::key::KeyError::absent) or `Ok(None)`) is counted
    /// as always. Other errors, as of two header lines, refuse the request. An id is one of its key: callers with different
    /// keys share no id. By default each request is counted. A [`Limiter`](crate::Limiter) has
    /// [`check_once`](crate::Limiter::check_once).
    ///
    /// ```
    /// use http::{Request, Response};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let payments = Policy::new("payments", SlidingLog::per_hour(2))
    ///     .key(key::constant("all"))
    ///     .once_per(key::header("idempotency-key"));
    /// let service = RateLimitLayer::new(MemoryStore::new(), payments).layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    ///
    /// for (id, status) in [("a", 200), ("a", 200), ("b", 200), ("a", 200), ("c", 429), ("b", 200), ("c", 429)] {
    ///     let request = Request::post("/").header("idempotency-key", id).body(Body::new())?;
    ///     assert_eq!(service.clone().oneshot(request).await?.status(), status, "{id}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # What a caller can do
    ///
    /// A caller chooses the ids. New ids gain nothing: each is counted. A caller that sends different requests with one id is
    /// admitted 11 times for each request that is counted, or 1 more than [`max_repetitions`](Self::max_repetitions). So over many windows
    /// it is admitted at most that many times the limit, even if requests are refunded. One window of a
    /// [`SlidingLog`](crate::SlidingLog) may also have the repetitions of the window before, and so 21 times the limit. Each
    /// admitted repetition reaches the handler, which must detect it. Do not use it for limits against guessing, such as of
    /// passwords.
    ///
    /// # What it costs
    ///
    /// The store keeps a marker for each id that was counted, until its window ends: about 200 bytes in Redis and in a
    /// [`MemoryStore`](crate::MemoryStore), which stores a hash of the id. So a caller has at most as many markers as its limit
    /// admits in a window; size the [capacity](crate::MemoryStoreBuilder::capacity) of a memory store for them. A check with an
    /// id is one call of the store, as others are, and its denial is not cached in the process.
    ///
    /// The marker of a limit in windows of a calendar ends with the window. While the store fails and this process counts, it
    /// has ids of its own.
    pub fn once_per(mut self, id: impl KeyExtractor) -> Self {
        self.settings.id = Some(Arc::new(id));
        self
    }

    /// The number of requests with the id of a counted one that are admitted without being counted, from 1 to
    /// 999,999,999,999,998.
    ///
    /// It applies to [`once_per`](Self::once_per) and to [`Limiter::check_once`](crate::Limiter::check_once). The default is
    /// 10.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(5)).max_repetitions(2));
    /// for remaining in [4, 4, 4, 3, 2] {
    ///     assert_eq!(mails.check_once("42", "invoice-7").await?.remaining(), remaining);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn max_repetitions(mut self, repetitions: u64) -> Self {
        self.settings.max_repetitions = Some(repetitions);
        self.noting(match (1..MAX_QUOTA).contains(&repetitions) {
            true => Ok(()),
            false => Err(ConfigError::new(
                "a request with an id has 1 to 999999999999998 repetitions; without `.once_per(..)` each request is counted",
            )),
        })
    }
}
