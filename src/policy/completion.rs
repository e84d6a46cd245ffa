use std::sync::Arc;

use super::Policy;
use crate::{Completion, ConfigError, Limit, decision::CompletionRule, key::KeyError};

impl<K> Policy<K> {
    /// Refuses settings by which a request is counted when it has ended, or once for several: it holds its slots until then.
    pub(super) fn validate_slots(&self) -> Result<(), ConfigError> {
        match self.limit() {
            Some(limit) if limit.is_held() => self.validate_slots_of_requests(),
            _ => Ok(()),
        }
    }

    /// Refuses a limit that was chosen for a request, if the settings of the policy contradict it.
    #[inline]
    pub(super) fn validate_chosen(&self, limit: &Limit) -> Result<(), KeyError> {
        if !limit.is_held() {
            return Ok(());
        }
        self.validate_slots_of_requests().map_err(|error| {
            KeyError::misconfigured(format!(
                "the limit `{limit}` that was chosen for a request cannot be applied: {error}"
            ))
        })
    }

    fn validate_slots_of_requests(&self) -> Result<(), ConfigError> {
        let setting = match &self.settings.completion {
            Some(CompletionRule::RefundIf(_)) => "`.refund_if(..)`",
            Some(CompletionRule::ChargeIf(_)) => "`.charge_if(..)`",
            None if self.settings.id.is_some() => "`.once_per(..)`",
            None => return Ok(()),
        };
        Err(ConfigError::new(format!(
            "{setting} has no meaning for the policy `{}`: a request holds its slots until it ends, each repetition its own; \
             leave it out, or add a policy with a limit such as `SlidingLog::per_minute(100)` for it",
            self.name(),
        )))
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
