use std::sync::Arc;

use http::request::Parts;

use super::Policy;
use crate::{ConfigError, Key, KeyExtractor, Limit, decision::Marker, key::KeyError, limit::MAX_QUOTA};

/// The ids of requests, and how often a request with one is repeated without being counted.
#[derive(Clone)]
pub(crate) struct Once {
    id: Option<Arc<dyn KeyExtractor>>,
    pub(super) repetitions: u64,
}

impl Once {
    pub(super) const DEFAULT: Self = Self {
        id: None,
        repetitions: 10,
    };

    /// Extracts the id from requests.
    pub(super) fn extract(&mut self, id: impl KeyExtractor) {
        self.id = Some(Arc::new(id));
    }

    /// Whether an id is extracted from requests.
    pub(super) fn has_id(&self) -> bool {
        self.id.is_some()
    }

    /// The marker of a request by this limit, if the request has an id.
    #[inline]
    pub(crate) fn marker_of(
        &self,
        (limit, cost): (&Limit, u64),
        key: &Key,
        parts: &Parts,
    ) -> Result<Option<Arc<Marker>>, KeyError> {
        match &self.id {
            Some(extractor) => self.extract_marker(&**extractor, (limit, cost), key, parts),
            None => Ok(None),
        }
    }

    #[inline(never)] // most policies have no ids
    fn extract_marker(
        &self,
        extractor: &dyn KeyExtractor,
        charge: (&Limit, u64),
        key: &Key,
        parts: &Parts,
    ) -> Result<Option<Arc<Marker>>, KeyError> {
        match extractor.extract(parts) {
            Ok(Some(id)) => Ok(self.marker(charge, key, &id)),
            Ok(None) => Ok(None),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The marker of a request of this key with this id, if the limit counts.
    pub(crate) fn marker(&self, (limit, cost): (&Limit, u64), key: &Key, id: &Key) -> Option<Arc<Marker>> {
        let markers = limit.for_markers(self.repetitions + 1)?;
        Some(Arc::new(Marker::new(markers, key.marker(id, cost))))
    }
}

/// Counting once per id.
impl<K> Policy<K> {
    /// Counts a request that is sent several times with one id only once, such as one with an
    /// [`Idempotency-Key`](https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/).
    ///
    /// The first request with an id is counted as always, and denied as always; a denied one does not count as sent. For the
    /// window of the limit after it, a request of the same key with the same id is a
    /// [repetition](crate::PolicyDecision::is_repetition): it is admitted without being counted, also by another replica and
    /// if the limit is used up. After 10 repetitions, or the number that [`repetitions`](Self::repetitions) sets, requests
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
    /// admitted 11 times for each request that is counted, or 1 more than [`repetitions`](Self::repetitions). So over many windows
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
        self.settings.once.extract(id);
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
    /// let mails = Limiter::new(MemoryStore::new(), Policy::new("mails", SlidingLog::per_hour(5)).repetitions(2));
    /// for remaining in [4, 4, 4, 3, 2] {
    ///     assert_eq!(mails.check_once("42", "invoice-7").await?.remaining(), remaining);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the number is 0 or above 999,999,999,999,998. [`try_repetitions`](Self::try_repetitions) returns an error instead.
    #[track_caller]
    pub fn repetitions(self, repetitions: u64) -> Self {
        match self.try_repetitions(repetitions) {
            Ok(policy) => policy,
            Err(error) => panic!("{error}"),
        }
    }

    /// The number of [repetitions](Self::repetitions) from configuration.
    ///
    /// ```
    /// use tower_quota::{Policy, SlidingLog};
    ///
    /// let mails = || Policy::new("mails", SlidingLog::per_hour(5));
    /// assert!(mails().try_repetitions(2).is_ok());
    /// assert!(mails().try_repetitions(0).is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// If the number is 0 or above 999,999,999,999,998.
    pub fn try_repetitions(mut self, repetitions: u64) -> Result<Self, ConfigError> {
        if !(1..MAX_QUOTA).contains(&repetitions) {
            return Err(ConfigError::new(
                "a request with an id has 1 to 999999999999998 repetitions; without `.once_per(..)` each request is counted",
            ));
        }
        self.settings.once.repetitions = repetitions;
        Ok(self)
    }
}
