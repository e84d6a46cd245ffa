use crate::{Headers, Limiter, decision::SharedFormat, response::ResponseFormat};

/// Responses of handlers.
///
/// They apply to [`Decision::headers`](crate::Decision::headers) and [`Decision::require`](crate::Decision::require).
impl Limiter {
    /// Sets the format of responses to requests that the limiter denies.
    ///
    /// The default is [`Negotiated`](crate::response::Negotiated), as of a [layer](crate::RateLimitLayer::format). See
    /// [`Denied::response_to`](crate::Denied::response_to) for an example.
    pub fn format(mut self, format: impl ResponseFormat) -> Self {
        self.policies.context_mut().format = SharedFormat::new(format);
        self
    }

    /// Sets the rate limit fields of decisions.
    ///
    /// The default is [`Headers::Draft08`].
    ///
    /// ```
    /// use tower_quota::{Headers, Limiter, MemoryStore, Policy, SlidingLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_quota::store::StoreError> {
    /// let mails = Policy::new("mails", SlidingLog::per_hour(3));
    /// let mails = Limiter::new(MemoryStore::new(), mails).headers(Headers::Draft06);
    ///
    /// let headers = mails.check("42").await?.headers();
    /// assert_eq!(headers["ratelimit-limit"], "3");
    /// assert_eq!(headers["ratelimit-remaining"], "2");
    /// # Ok(())
    /// # }
    /// ```
    pub fn headers(mut self, headers: Headers) -> Self {
        self.policies.context_mut().fields.dialect = headers;
        self
    }
}
