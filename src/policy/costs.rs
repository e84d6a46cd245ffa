//! Settings of the requests that a policy counts, and of their costs.

use std::sync::Arc;

use http::request::Parts;

use super::Policy;
use crate::{
    Completion, ConfigError, KeyExtractor,
    decision::{CompletionRule, Cost},
    limit::MAX_QUOTA,
};

/// The requests that are counted, and their costs.
impl<K> Policy<K> {
    /// The cost of each request, in units of the limit, from 1.
    ///
    /// A cost above the limit admits no request, so the policy is not [valid](Self::validate). A limit that is
    /// [chosen](crate::limit::by()) for a request may be below it: the request is denied without a call of the store, without
    /// `Retry-After`, and for the reason [`CostAboveLimit`](crate::Denial::CostAboveLimit). Setting it again, or setting
    /// `cost_fn`, replaces it. The default is 1.
    ///
    /// ```
    /// use tower_quota::{Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let export = Limiter::new(MemoryStore::new(), Policy::new("export", SlidingLog::per_hour(100)).cost(40));
    /// assert_eq!(export.check("42").await?.remaining(), 60);
    /// # Ok(())
    /// # }
    /// ```
    pub fn cost(mut self, cost: u64) -> Self {
        self.settings.cost = Some(Cost::Fixed(cost));
        self.noting(match cost {
            0 => Err(ConfigError::new(
                "a request costs at least 1; with `Limit::Unlimited` a policy counts nothing",
            )),
            _ => Ok(()),
        })
    }

    /// The cost of each request, computed from the request, in units of the limit; with 0 the policy does not apply.
    ///
    /// A request that costs more than the limit is denied for the reason [`CostAboveLimit`](crate::Denial::CostAboveLimit), as with
    /// a fixed [`cost`](Self::cost). A [`Limiter`](crate::Limiter), which has no requests, does not take such a policy.
    ///
    /// ```
    /// use http::{Method, Request, Response};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, TokenBucket};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // A write costs as much as ten reads.
    /// let api = Policy::new("api", TokenBucket::per_second(100)).key(key::constant("all")).cost_fn(|parts| {
    ///     if parts.method.is_safe() { 1 } else { 10 }
    /// });
    /// let service = RateLimitLayer::new(MemoryStore::new(), api).layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    ///
    /// for (method, remaining) in [(Method::GET, "99"), (Method::POST, "89")] {
    ///     let request = Request::builder().method(method).body(Body::new())?;
    ///     let response = service.clone().oneshot(request).await?;
    ///     assert!(response.headers()["ratelimit"].to_str()?.starts_with(&format!("\"api\";r={remaining};")));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn cost_fn(mut self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.settings.cost = Some(Cost::Computed(Arc::new(cost)));
        self
    }

    /// The condition under which the policy applies to a request.
    ///
    /// Where a layer is around all methods of a service, as around tonic's router, this selects some of them. A
    /// [`Limiter`](crate::Limiter), which has no requests, does not take such a policy. Setting it again replaces it. By default
    /// the policy applies to all requests.
    ///
    /// ```
    /// use http::{Request, Response};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let sign_up = Policy::new("sign-up", SlidingLog::per_hour(3))
    ///     .key(key::constant("all"))
    ///     .apply_if(|parts| parts.uri.path() == "/shop.Accounts/SignUp");
    /// let service = RateLimitLayer::new(MemoryStore::new(), sign_up).layer(service_fn(async |_: Request<Body>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::new()))
    /// }));
    ///
    /// for (path, counted) in [("/shop.Accounts/SignUp", true), ("/shop.Accounts/SignIn", false)] {
    ///     let response = service.clone().oneshot(Request::post(path).body(Body::new())?).await?;
    ///     assert_eq!(response.headers().contains_key("ratelimit"), counted);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn apply_if(mut self, condition: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.settings.applies = Some(Arc::new(condition));
        self
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

/// Counting by completion.
impl<K> Policy<K> {
    /// Refunds a request after it has ended, if `condition` returns `true` for its [`Completion`].
    ///
    /// A request is charged when it is checked, so the limit holds at any time, also for requests at the same time. Its
    /// response has the fields of the check, before the refund. [`Completion`] describes how the request ended; use
    /// [`charge_if`](Self::charge_if) where a request is to be counted only after it has ended. A login that responds with a
    /// redirect is no [success](Completion::is_success), which is 2xx: [logins](crate::guide::recipes#logins) has its condition.
    ///
    /// The refund does not delay the response. It is made in a task of its own, or at once in a
    /// [`MemoryStore`](crate::MemoryStore). If the store fails then, or no tokio runtime is there, it is lost: the charge
    /// stays, and [`RateLimitLayer::lost_settlements`](crate::RateLimitLayer::lost_settlements) counts it. A request that
    /// is dropped before its response, or whose handler panics, has ended too. Nothing is refunded if the handler has taken
    /// the [receipt](crate::Decision::take_receipt): what becomes of the charge is in its hands.
    ///
    /// A caller can leave at any time, also when the work is done and only the response is missing. So let the condition hold for
    /// something that the response has, such as [`is_success`](Completion::is_success) or [`is_error`](Completion::is_error).
    /// `!is_success()` is also true for a [cancelled](Completion::is_cancelled) request. With that condition, a caller that
    /// disconnects before each response is never limited.
    ///
    /// The condition is evaluated where the request ends, also while a dropped request is destroyed, so it must be quick and
    /// must not panic. Setting it again, or setting `charge_if`, replaces it. By default each admitted request counts. A
    /// [`Limiter`](crate::Limiter), whose decisions have receipts, does not take such a policy.
    ///
    /// ```
    /// use http::{Request, Response, StatusCode};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // Two failed logins a minute. Successful ones are free.
    /// let logins = Policy::new("logins", SlidingLog::per_minute(2))
    ///     .key(key::constant("all"))
    ///     .refund_if(|completion| completion.is_success());
    /// let service = RateLimitLayer::new(MemoryStore::new(), logins).layer(service_fn(async |request: Request<Body>| {
    ///     let mut response = Response::new(Body::new());
    ///     if !request.headers().contains_key("x-password") {
    ///         *response.status_mut() = StatusCode::UNAUTHORIZED;
    ///     }
    ///     Ok::<_, std::convert::Infallible>(response)
    /// }));
    ///
    /// let statuses = [(true, 200), (false, 401), (true, 200), (false, 401), (false, 429), (true, 429)];
    /// for (has_password, status) in statuses {
    ///     let mut request = Request::new(Body::new());
    ///     if has_password {
    ///         request.headers_mut().insert("x-password", "..".parse()?);
    ///     }
    ///     assert_eq!(service.clone().oneshot(request).await?.status(), status);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn refund_if(mut self, condition: impl Fn(&Completion<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.settings.completion = Some(CompletionRule::RefundIf(Arc::new(condition)));
        self
    }

    /// Charges a request after it has ended, if `condition` returns `true` for its [`Completion`].
    ///
    /// The check before the request only verifies that the cost fits, and counts nothing.
    ///
    /// Requests that are served at the same time are not counted yet, so a caller can exceed the limit: at most by the cost
    /// of the requests of its key that are in flight at once. A caller that leaves before the response is not charged by its
    /// status. Where that matters, as it does for passwords to guess, use
    /// [`refund_if`](Self::refund_if), which charges first.
    ///
    /// The charge is made after the response, as a refund is; a lost one is counted too. The response has the fields of the
    /// check, before the charge. A request that a nested layer or the handler [denies](crate::Denied) is
    /// not charged. If the handler has taken the
    /// [receipt](crate::Decision::take_receipt), it can [settle](crate::Receipt::settle) a cost, and nothing else is charged.
    ///
    /// Setting it again, or setting `refund_if`, replaces it. By default each admitted request counts. A
    /// [`Limiter`](crate::Limiter), which can [`peek`](crate::Limiter::peek) and [`charge`](crate::Limiter::charge), does not
    /// take such a policy.
    ///
    /// ```
    /// use http::{Request, Response, StatusCode};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_quota::{key, MemoryStore, Policy, RateLimitLayer, SlidingLog};
    ///
    /// # type Body = http_body_util::Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // A caller that meets three missing pages a minute is probably a scanner.
    /// let scans = Policy::new("scans", SlidingLog::per_minute(3))
    ///     .key(key::constant("all"))
    ///     .charge_if(|completion| completion.status() == Some(StatusCode::NOT_FOUND));
    /// let service = RateLimitLayer::new(MemoryStore::new(), scans).layer(service_fn(async |request: Request<Body>| {
    ///     let mut response = Response::new(Body::new());
    ///     if request.uri().path() != "/" {
    ///         *response.status_mut() = StatusCode::NOT_FOUND;
    ///     }
    ///     Ok::<_, std::convert::Infallible>(response)
    /// }));
    ///
    /// for (path, status) in [("/", 200), ("/a", 404), ("/", 200), ("/b", 404), ("/c", 404), ("/d", 429), ("/", 429)] {
    ///     let request = Request::get(path).body(Body::new())?;
    ///     assert_eq!(service.clone().oneshot(request).await?.status(), status);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn charge_if(mut self, condition: impl Fn(&Completion<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.settings.completion = Some(CompletionRule::ChargeIf(Arc::new(condition)));
        self
    }
}
